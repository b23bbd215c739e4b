"""Write and read calls of every schema of BFCL, and tabulate what a run has learned there.

`python -m benchmarks.bfcl round-trip` writes a call of each schema in every known format, with the
arguments of possible answers where there are any, and reads it back.
`python -m benchmarks.bfcl success RUN --untrained FILE` writes the held-out success of a run, and
of its policy before, which `unstale eval --save FILE` has measured.
`python -m benchmarks.bfcl references simple_python FILE` writes conversations with possible answers
of the training tasks, for `unstale sft`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.demo import graded
from benchmarks.tables import columns, row, write
from unstale.durability.run_folder import RunFolder
from unstale.envs import Message, ToolCall
from unstale.envs.chat import Chat
from unstale.research.adapters.bfcl import (
    MULTI_TURN,
    SINGLE_TURN,
    BfclTasks,
    as_tool,
    first_values,
    is_valid,
    load_entries,
    reference_calls,
)

TOOLS_AT_A_TIME = 16
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that renders neither tools nor calls."""


def schemas() -> dict[str, tuple[Mapping[str, Any], ToolCall]]:
    """Return every different schema of the supported categories, and a call that fits it.

    Each comes as the policy is shown it, and with the types that BFCL writes.
    """
    found: dict[str, tuple[Mapping[str, Any], ToolCall]] = {}
    for category in (*SINGLE_TURN, *MULTI_TURN):
        for entry in load_entries(category):
            missed = [each for one in entry.get("missed_function", {}).values() for each in one]
            given = _given(entry, category)
            functions = [*entry["function"], *missed]
            shown = [*entry["tools"], *map(as_tool, missed)]
            for function, tool in zip(functions, shown, strict=True):
                raw: dict[str, Any] = {"type": "function", "function": {**function}}
                for each in (tool, raw):
                    call = fitting_call(each["function"], given.get(function["name"], {}))
                    found.setdefault(json.dumps(each, sort_keys=True), (each, call))
    return found


def _given(entry: Mapping[str, Any], category: str) -> dict[str, Any]:
    """Return possible arguments of the functions of an entry, by name. Java has none of JSON."""
    if not entry["answer"] or category in MULTI_TURN or "java" in category:
        return {}
    return {name: arguments for answer in entry["answer"] for name, arguments in answer.items()}


def fitting_call(function: Mapping[str, Any], possible: Mapping[str, Any]) -> ToolCall:
    """Return a call with all arguments: possible answers of the right type, others made."""
    arguments = {}
    for name, schema in function["parameters"]["properties"].items():
        values = possible.get(name, [])
        given = (first_values({name: [each]}, optional=True)[name] for each in values)
        fits = (each for each in given if _is_like(each, value_of(schema)))
        arguments[name] = next(fits, value_of(schema))
    return ToolCall(function["name"], arguments)


def _is_like(value: Any, example: Any) -> bool:
    """Return True for a value of the type of an example. An integer is also a number."""
    return type(value) is type(example) or (type(value), type(example)) == (int, float)


def value_of(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a schema of BFCL."""
    if enum := schema.get("enum"):
        plain = value_of({key: each for key, each in schema.items() if key != "enum"})
        return next((each for each in enum if _is_like(each, plain)), plain)
    match str(schema.get("type", "string")).lower():
        case "integer" | "long" | "short" | "byte" | "bigint":
            return 12
        case "float" | "number" | "double":
            return 2.5
        case "boolean" | "bool":
            return True
        case "array" | "list" | "tuple" | "arraylist" | "queue" | "stack":
            return [value_of(schema.get("items", {})) for _ in range(2)]
        case "dict" | "object" | "hashmap" | "hashtable":
            inner = schema.get("properties") or {"a key": {"type": "integer"}}
            return {name: value_of(each) for name, each in inner.items()}
    return '5 o\'clock, "sharp"\n<tag> & {brace} [\\n]'


def dialects() -> Iterator[tuple[str, Chat]]:
    """Yield the chat format of each template that the tests have, and of one without tools."""
    templates = import_module("tests.support.templates")
    for name in (*templates.DIALECTS, "plain"):
        written = ("qwen3", PLAIN) if name == "plain" else (name,)
        tokenizer = templates.tokenizer_of(*written)
        yield name, Chat(tokenizer, (), ends=templates.ends_of(tokenizer), tools_in_prompt=True)


def differences(
    chat: Chat, cases: Sequence[tuple[Mapping[str, Any], ToolCall]]
) -> Iterator[tuple[str, str]]:
    """Yield each call that is not read as it was written: the call, and what happened.

    The prompt must name the tool, and the reply is rendered, encoded and parsed.
    """
    for begin in range(0, len(cases), TOOLS_AT_A_TIME):
        some = cases[begin : begin + TOOLS_AT_A_TIME]
        names = [call.name for _, call in some]
        parts = [some] if len(set(names)) == len(names) else [[case] for case in some]
        for part in parts:
            form = chat.with_tools([tool for tool, _ in part])
            prompt = form.render([Message("user", "?")])
            for _, call in part:
                if call.name not in prompt:
                    yield str(call), "the prompt does not name the tool"
                try:
                    read = form.parse(form.encode_reply(Message("assistant", "", (call,))))
                except ValueError as error:
                    yield str(call), str(error)
                    continue
                got = [(each.name, each.error, _exact(each.arguments)) for each in read.tool_calls]
                if got != [(call.name, "", _exact(call.arguments))]:
                    yield str(call), str(got)


def _exact(value: Any) -> str:
    """Return a value as JSON, in which 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True)


def round_trip() -> int:
    """Tabulate the differences by format, and print the first ones of each. Return the number."""
    cases = list(schemas().values())
    total = 0
    lines = columns("template", "form of a call", "schemas", "differ")
    for name, chat in dialects():
        found = list(differences(chat, cases))
        total += len(found)
        form = f"`{chat.call_form}`".replace("|", "\\|")
        lines.append(row(name, form, len(cases), len(found)))
        for call, what in found[:3]:
            print(f"  {call[:200]}\n  -> {what[:200]}")  # noqa: T201
    write(
        "bfcl-round-trip", "Calls of BFCL's schemas that are not read as they were written", lines
    )
    return total


def write_success(run: Path, untrained: Path | None) -> None:
    """Tabulate held-out success by step of a run. `untrained` has episodes of its policy before."""
    folder = RunFolder(run)
    tasks = folder.config()["eval"]["tasks"]
    lines = columns("SmolLM2-135M-Instruct", f"success on {tasks} held-out tasks")
    if untrained:
        _, *episodes = map(json.loads, untrained.read_text().splitlines())
        share = sum(each["success"] for each in episodes) / len(episodes)
        lines.append(row("as it is", graded(share, len(episodes))))
    for each in folder.metrics():
        if (success := each.get("eval/success_rate")) is not None:
            step = each["step"]
            name = f"after {step} steps" if step else "after the supervised start"
            lines.append(row(name, graded(success, tasks)))
    write("bfcl", f"Learning {folder.config()['task']['env']}", lines)


def write_references(category: str, file: Path) -> int:
    """Write the questions of the training tasks with calls that the leaderboard accepts.

    Return their number.
    """
    rows = []
    for entry in BfclTasks(category).data["train"]:
        calls = reference_calls(entry)
        if not is_valid(entry, category, calls):
            continue
        made = [{"function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        reply = {"role": "assistant", "content": "", "tool_calls": made}
        rows.append({"messages": [*entry["question"][0], reply], "tools": entry["tools"]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("round-trip")
    success = commands.add_parser("success")
    success.add_argument("run", type=Path)
    success.add_argument("--untrained", type=Path)
    references = commands.add_parser("references")
    references.add_argument(
        "category", choices=[each for each in SINGLE_TURN if "java" not in each]
    )
    references.add_argument("file", type=Path)
    chosen = parser.parse_args()
    if chosen.command == "round-trip":
        return min(round_trip(), 1)
    if chosen.command == "success":
        write_success(chosen.run, chosen.untrained)
        return 0
    number = write_references(chosen.category, chosen.file)
    print(f"{number} conversations in {chosen.file}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
