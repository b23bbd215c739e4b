"""Advice on the old-logit route, from a run's figures: gather evidence, draw conclusions.

    gather_evidence(folder) -> Evidence -> conclude(evidence) -> [Conclusion, ...] -> page(...)

Only `gather_evidence` reads the run folder, and nothing writes to it. docs/advise.md explains the
conclusions.
"""

from unstale.observe.advice.comparisons import ComparisonTable
from unstale.observe.advice.conclusion import Conclusion
from unstale.observe.advice.evidence import Evidence, gather_evidence
from unstale.observe.advice.page import as_json, page
from unstale.observe.advice.rules import conclude

__all__ = [
    "ComparisonTable",
    "Conclusion",
    "Evidence",
    "as_json",
    "conclude",
    "gather_evidence",
    "page",
]
