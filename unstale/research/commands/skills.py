"""The command `skills`: write a library of the skills that helped in a run."""

import argparse
from pathlib import Path

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import COUNT, JSON, argument, command, require_runs
from unstale.config import ConfigError
from unstale.config.checks import output_file
from unstale.durability.console import Console


def _skills(chosen: argparse.Namespace) -> int:
    require_runs(chosen.run)
    from unstale.durability.journal import JournalError
    from unstale.research.recorded_skills import count_skills
    from unstale.research.skills import write_library

    try:
        kept = count_skills(chosen.run)[: chosen.most]
    except (JournalError, OSError, ValueError) as error:
        raise ConfigError(f"the skills of {chosen.run} cannot be read: {error}") from error
    if not kept:
        raise ConfigError(
            f"no solved task of {chosen.run} used a skill, so {chosen.out} is not written"
        )
    write_library(chosen.out, kept)
    if chosen.json:
        print_json({"skills": [{"skill": each.line, "successes": count} for each, count in kept]})
        return 0
    console = Console(soft_wrap=True)
    for skill, count in kept:
        console.print(f"{count} solved tasks: {skill.line}", highlight=False, markup=False)
    console.print(
        f"kept {len(kept)} skills; use them with --task.skills {chosen.out}",
        highlight=False,
        markup=False,
    )
    return 0


add = command(
    "skills",
    "write a library of the skills that helped in a run of chains",
    argument("run", type=Path, help="a run with --task.env chain:ENV"),
    argument("out", type=output_file, help="the library, for --task.skills"),
    argument(
        "--most",
        type=COUNT,
        default=16,
        metavar="N",
        help="keep the N skills that were used in most solved tasks; default: 16",
    ),
    JSON,
)(_skills)
