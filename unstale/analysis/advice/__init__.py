"""Advice on a run's route, the method that computes old log-probabilities, from measured figures.

    gather_evidence(folder) -> Evidence -> conclude(evidence) -> [Conclusion, ...] -> page(...)

Only `gather_evidence` reads the run folder, and nothing writes to it. docs/advise.md explains the
conclusions.
"""

from unstale.analysis.advice.conclusion import Conclusion
from unstale.analysis.advice.evidence import Evidence, gather_evidence
from unstale.analysis.advice.page import as_json, page
from unstale.analysis.advice.rules import conclude

__all__ = [
    "Conclusion",
    "Evidence",
    "as_json",
    "conclude",
    "gather_evidence",
    "page",
]
