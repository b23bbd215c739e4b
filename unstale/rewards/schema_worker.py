"""The program of a worker process that checks texts against JSON Schemas with jsonschema.

`unstale.rewards.schemas` starts it. Each line of its input is a JSON list: text, schema. For each,
it prints `read` once the schema is known to be valid, and then 1 or 0. If the schema has an error,
it prints the error instead. A schema of 1 kB may take 4^12 evaluations, and a pattern may take
hours. So the kernel ends the process if one line takes too much CPU time.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any


def read_schema(schema: Any) -> Any:
    """Return the validator of a schema. Raises ValueError if it is not valid."""
    from jsonschema import SchemaError, validators
    from referencing import Registry

    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=kind.FORMAT_CHECKER)
    except SchemaError as error:
        raise ValueError(error.message) from error
    return kind(schema, registry=Registry())


def is_valid(text: str, validator: Any) -> bool:
    """Return True if a text is JSON that satisfies the schema.

    Raises ValueError for a reference to another schema, and for one that leads to itself.
    """
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    try:
        return bool(validator.is_valid(value))
    except Unresolvable as error:
        raise ValueError(f"it does not define {error.ref!r}") from error


def answers(text: str, schema: Any) -> Iterator[str]:
    """Yield the lines that are printed for a text and a schema, each as soon as it is known."""
    try:
        validator = read_schema(schema)
        yield "read"
        yield str(int(is_valid(text, validator)))
    except RecursionError:
        yield "it is nested too deeply, or refers to itself without an end"
    except ValueError as error:
        yield " ".join(str(error)[:300].split()) or "it is not valid"


def main(cpu_s: float, memory_mb: int) -> None:
    """Answer each line of standard input until it ends.

    `cpu_s` limits the CPU seconds for a line, and `memory_mb` the memory of this process in MB.
    """
    import jsonschema  # noqa: F401 - before memory is limited

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process
        text, schema = json.loads(line)
        for answer in answers(text, schema):
            sys.stdout.write(answer.encode("ascii", "backslashreplace").decode() + "\n")
            sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
