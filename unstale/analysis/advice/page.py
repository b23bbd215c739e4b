"""Format the advice on a run for a terminal, and as JSON."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unstale.analysis.advice.conclusion import Conclusion
from unstale.analysis.advice.evidence import FIGURES, SOURCES, Evidence
from unstale.lint.finding import as_options
from unstale.observe.words import amount, percent

STATES = {"unfinished": "in progress, or killed"}
HEAD = """The importance ratio of a token is pi / mu = D * S:
  D = pi_old / mu   discrepancy: trainer / engine, with the weights that sampled
  S = pi / pi_old   staleness: weights now / weights that sampled, both trainer
The option old_logps.route chooses how pi_old is computed. A token is stopped
(has no gradient) if D is outside the correction's band or S outside the clip.
With the objective `cispo`, the clip stops no token: it only limits a weight."""


def page(evidence: Evidence, conclusions: Iterable[Conclusion]) -> Group:
    """Return the advice on a run as text for a terminal."""
    parts: list[RenderableType] = [Text(_title(evidence), "bold"), "", Text(HEAD)]
    for number, conclusion in enumerate(conclusions, 1):
        parts += ["", Text(f"{number}  {conclusion.text}", "bold"), _rows(evidence, conclusion)]
    parts += ["", Text("Where the figures are from", "bold"), _sources(evidence)]
    return Group(*parts)


def as_json(evidence: Evidence, conclusions: Iterable[Conclusion]) -> dict[str, Any]:
    """Return the advice on a run as a JSON object."""
    return {
        "run": evidence.run,
        "state": evidence.state,
        "route": evidence.route,
        "exact": evidence.config.old_logps.exact,
        "source": evidence.source,
        "figures": {
            name: {"value": value, "unit": meaning(name)[0], "about": meaning(name)[1]}
            for name, value in evidence.figures.items()
        },
        "conclusions": [
            {
                "name": conclusion.name,
                "text": conclusion.text,
                "reason": conclusion.reason,
                "figures": [name for name in conclusion.figures if name in evidence.figures],
                "options": dict(conclusion.options),
                "command": conclusion.command,
            }
            for conclusion in conclusions
        ],
        "gaps": list(evidence.gaps),
    }


def meaning(name: str) -> tuple[str, str]:
    """Return the unit and the meaning, in words, of the figure `name` of `Evidence`."""
    if not name.startswith("changed/"):
        return FIGURES[name]
    route = name.removeprefix("changed/").removesuffix("_low").removesuffix("_high")
    bound = {"_low": ", 95% interval from", "_high": ", 95% interval to"}
    end = next((words for suffix, words in bound.items() if name.endswith(suffix)), "")
    return "share", f"tokens that `{route}` treats differently from exact values{end}"


def written(name: str, value: float) -> str:
    """Return `value`, of the figure `name` of `Evidence`, as text with its unit.

    >>> written("route_share", 0.0812), written("route_s", 0.1595), written("tokens", 24310.0)
    ('8.1%', '0.16 s', '24,310')
    """
    unit = meaning(name)[0]
    if unit == "share":
        value = round(value, 6) + 0.0  # not -0.0
        return percent(value, 1 if abs(value) >= 0.01 else 3 if value else 0)
    return f"{amount(value)} {unit}".rstrip()


def _title(evidence: Evidence) -> str:
    old = evidence.config.old_logps
    state = STATES.get(evidence.state, evidence.state)
    steps, age = evidence.get("steps") or 0.0, evidence.get("staleness_max")
    words = f"{evidence.run}: route {old.route} ({'exact' if old.exact else 'not exact'})"
    words += f", {amount(steps)} step{'' if steps == 1 else 's'}, {state}"
    if age is None:
        return words
    return words + (f", tokens up to {amount(age)} versions old" if age else ", no stale tokens")


def _rows(evidence: Evidence, conclusion: Conclusion) -> Table:
    """Return a table with one row each for the conclusion's reason, figures, options and
    command.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column()
    grid.add_row("", Text("why", "dim"), Text(f"{conclusion.reason.rstrip('.')}."))
    seen = Table.grid(padding=(0, 1, 0, 0))
    seen.add_column(justify="right", no_wrap=True)
    for name in conclusion.figures:
        if name in evidence.figures:
            seen.add_row(Text(written(name, evidence.figures[name])), Text(meaning(name)[1]))
    if seen.rows:
        grid.add_row("", Text("seen", "dim"), seen)
    if conclusion.options:
        grid.add_row("", Text("set", "cyan"), Text(as_options(conclusion.options)))
    if conclusion.command:
        grid.add_row("", Text("run", "cyan"), Text(conclusion.command))
    return grid


def _sources(evidence: Evidence) -> Text:
    return Text("\n".join(_source_lines(evidence)))


def _source_lines(evidence: Evidence) -> Iterator[str]:
    tokens = evidence.get("sample_tokens")
    count = f" ({amount(tokens)} tokens)" if tokens else ""
    yield f"D and S: {SOURCES[evidence.source]}{count}. All else: the metrics of the steps."
    exact = evidence.get("exact_share")
    if evidence.source == "exact" and exact is not None and exact < 0.999:
        yield f"Only {percent(exact, 1)} of the tokens had exact values: see old_logps/exact_share."
    unit = evidence.get("unit_tokens") or 1.0
    if unit > 1:
        yield (
            f"A threshold is on the ratio of a sequence or turn. Its decisions are estimated: "
            f"sequences of {amount(unit)} tokens are drawn from the sample of a step."
        )
    yield (
        "A clip counts whichever sign the advantage has. Intervals take tokens, or sequences, as "
        "independent."
    )
    if evidence.config.correction.token_veto_threshold:
        yield "Sequences that correction.token_veto_threshold drops are not counted."
    yield from (f"Not read: {gap}." for gap in evidence.gaps)
    yield "Which routes learned better in comparisons: docs/advise.md. No conclusion predicts it."
