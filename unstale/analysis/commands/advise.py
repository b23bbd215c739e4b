"""The command `advise`: suggest a method to obtain old log-probabilities (a route) for a run."""

import argparse

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, OPEN_RUN, command
from unstale.durability.console import Console


def _advise(chosen: argparse.Namespace) -> int:
    from unstale.analysis.advice import as_json, conclude, gather_evidence, page

    evidence = gather_evidence(chosen.run)
    conclusions = conclude(evidence)
    if chosen.json:
        print_json(as_json(evidence, conclusions))
    else:
        Console().print(page(evidence, conclusions), highlight=False)
    return 0


add = command(
    "advise",
    "show which old-logit route pays for a run, and which thresholds fit",
    OPEN_RUN,
    JSON,
)(_advise)
