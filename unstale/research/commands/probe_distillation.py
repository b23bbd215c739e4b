"""The command `probe-distillation`: measure whether distillation would raise a policy's success."""

import argparse
from pathlib import Path

from unstale.cli.preflight import quick_imports
from unstale.cli.recipe_options import file_values, print_json
from unstale.cli.verbs import (
    CONFIG_OF_RUN,
    COUNT,
    JSON,
    argument,
    command,
    console_of,
    open_journal,
)
from unstale.config.options import override
from unstale.durability.console import Console


def _probe(chosen: argparse.Namespace) -> int:
    from unstale.cli.resume import load_config

    values = file_values(chosen)
    config = override(load_config(chosen.run, named=values), values)
    with open_journal(chosen.run):
        pass  # an unreadable journal ends the command before the models are loaded
    with quick_imports():
        from unstale.research.probe_distillation import ProbeOptions, probe_distillation

    options = ProbeOptions(
        prefixes=chosen.prefixes,
        rollouts=chosen.rollouts,
        top=chosen.top,
        student=chosen.student,
        contexts=tuple(chosen.context or [""]),
        positions=chosen.positions,
    )
    result = probe_distillation(
        chosen.run, chosen.teacher, config, options, console=console_of(chosen)
    )
    if chosen.json:
        found = [each.as_json() for each in result]
        print_json({"contexts": found} if chosen.context else found[0])
        return 0
    console = Console(soft_wrap=True)
    for each in result:
        if chosen.context:
            words = repr(each.context) if each.context else "no text"
            console.print(f"\nthe teacher reads {words}", highlight=False, markup=False)
        Console().print(each.table())
        if chosen.positions != "one":
            Console().print(each.question_table())
    console.print(result[0].cost(), highlight=False)
    return 0


def _positions(text: str) -> int | str:
    """Return "one", "windows", or N of every N-th position. "all" is 1."""
    if text in ("one", "windows"):
        return text
    if text.isdecimal() and int(text):
        return int(text)
    if text != "all":
        raise argparse.ArgumentTypeError(f"must be one, all, windows or >= 1, got {text!r}")
    return 1


add = command(
    "probe-distillation",
    "measure whether distillation from a teacher would raise a student's success",
    argument("run", type=Path, help="a run folder with episodes to take prefixes from"),
    argument("teacher", help="the model folder of the teacher"),
    CONFIG_OF_RUN,
    argument("--student", default="", metavar="FOLDER", help="default: the policy of the run"),
    argument(
        "--context",
        action="append",
        metavar="TEXT",
        help="text that only the teacher reads, such as 'Solution: {answer}'; may be repeated, to "
        "compare contexts, and may be empty",
    ),
    argument(
        "--prefixes", type=COUNT, default=32, metavar="N", help="episodes to look at; default: 32"
    ),
    argument(
        "--positions",
        type=_positions,
        default="one",
        metavar="one|all|windows|N",
        help="measure one random token of an episode, all sampled ones, one in each window of 1, "
        "2, 4, ... tokens, or every N-th; default: one",
    ),
    argument(
        "--rollouts",
        type=COUNT,
        default=8,
        metavar="N",
        help="episodes for each next token, an even number; default: 8",
    ),
    argument(
        "--top",
        type=COUNT,
        default=4,
        metavar="N",
        help="likeliest next tokens of each policy to try; default: 4",
    ),
    JSON,
)(_probe)
