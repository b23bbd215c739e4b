"""The command `tool-traces`: turn plain reasoning into conversations with tool calls."""

import argparse
import asyncio
import json
from pathlib import Path

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, argument, command
from unstale.config import ConfigError
from unstale.durability.console import Console


def _tool_traces(chosen: argparse.Namespace) -> int:
    from unstale.durability.run_folder import write_whole
    from unstale.envs import sandbox
    from unstale.envs.rows import load_rows
    from unstale.research.served_writer import ServedWriter
    from unstale.research.tool_traces import TOOLS, traces

    if bool(chosen.url) != bool(chosen.url_model) or (chosen.url and chosen.tool != "python"):
        raise ConfigError(
            "--url and --url-model name a served writer together, which writes programs: give "
            "both, with --tool python"
        )
    if chosen.tool == "python":
        sandbox.check_allowed()
    writer = ServedWriter(chosen.url, chosen.url_model) if chosen.url else None
    rows = load_rows(str(chosen.rows))
    for column in filter(None, (chosen.prompt, chosen.solution, chosen.answer)):
        if missing := next((row for row in rows if column not in row), None):
            raise ConfigError(f"{missing.place}: there is no column {column!r}")
    try:
        kept, refused = asyncio.run(
            traces(
                rows,
                TOOLS[chosen.tool],
                prompt=chosen.prompt,
                solution=chosen.solution,
                answer=chosen.answer,
                writer=writer,
            )
        )
    except OSError as error:
        raise ConfigError(f"--url {chosen.url} cannot be used: {error}") from error
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
    write_whole(chosen.out, text, durable=True)
    counts = {"rows": len(rows), "kept": len(kept), "refused": dict(refused.most_common())}
    if chosen.json:
        print_json(counts)
        return 0
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    console = Console(soft_wrap=True)
    console.print(
        f"kept {len(kept)} of {len(rows)} rows; refused: {reasons or 'none'}", highlight=False
    )
    console.print(f"learn them with unstale sft RECIPE {chosen.out} --task.env {chosen.tool}")
    return 0


add = command(
    "tool-traces",
    "turn plain reasoning into conversations with tool calls",
    argument("rows", type=Path, help="a file with prompts and solutions (.jsonl, .csv, .parquet)"),
    argument("out", type=Path, help="the conversations, as .jsonl for `unstale sft`"),
    argument("--prompt", default="question", metavar="COLUMN", help="default: question"),
    argument("--solution", default="answer", metavar="COLUMN", help="default: answer"),
    argument("--answer", default="", metavar="COLUMN", help="column with the number at the end"),
    argument(
        "--tool",
        choices=("calculator", "python"),
        default="calculator",
        help="the environment whose tool is called; default: calculator",
    ),
    argument("--url", default="", help="let a served model write programs: http://host:port/v1"),
    argument("--url-model", default="", metavar="NAME", help="the served model's name"),
    JSON,
)(_tool_traces)
