"""Check texts against JSON Schemas, in worker processes with a limit on CPU time."""

from collections.abc import Mapping
from typing import Any

from unstale.envs.strict_json import loads
from unstale.rewards import workers

_POOL = workers.WorkerPool("schema_worker.py")


def satisfies(text: str, schema: Mapping[str, Any]) -> bool | None:
    """Return True if the text is JSON that satisfies the schema, else False.

    None if the check takes too long. Blocks until a worker process has answered, so do not call it
    on an event loop. Raises ValueError for an invalid schema, for a reference to another schema,
    and for a schema that itself takes too long to read.
    """
    import jsonschema  # noqa: F401 - its absence is reported here, and not in the worker

    try:
        loads(text)
    except (ValueError, RecursionError):
        text = ""  # no JSON either, but the schema is still checked
    with _POOL.worker() as worker:
        worker.send([text, schema])
        line = worker.line()
        if line == b"":
            line = f"its check takes more than {workers.CPU_S:g} s".encode()
        if line == b"read":
            line = worker.line()
    if line not in (b"1", b"0", b""):
        raise ValueError(f"not a JSON schema: {line.decode()}")
    return line == b"1" if line else None
