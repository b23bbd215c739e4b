"""The command `report`: write the report of a run."""

import argparse

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, RUN, command
from unstale.durability.console import Console


def _report(chosen: argparse.Namespace) -> int:
    from unstale.analysis.dashboard.frozen import write_and_summarize

    text = write_and_summarize(chosen.run)
    if chosen.json:
        path, *sentences = text.splitlines()
        print_json({"report": path, "summary": sentences})
    else:
        Console(soft_wrap=True).print(text, highlight=False, markup=False)
    return 0


add = command("report", "write the report of a run", RUN, JSON)(_report)
