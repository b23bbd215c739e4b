"""The linter: it explains the configuration of a run, and refuses settings that cannot work.

    pi / mu  =  D * S,    D = pi_old / mu,    S = pi / pi_old

`pi` is the probability of a token under the weights in training, and `mu` under the engine's
distribution that sampled it. `pi_old` is its old probability, which the method of the option
`old_logps.route` (a route) computes. `check` describes what the discrepancy D and the staleness
ratio S contain. It also finds wrong combinations of options, each with a reason and a fix.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unstale.config import ConfigError, RunConfig
from unstale.lint.finding import Finding, Rule, find
from unstale.lint.rules import REFUSALS, WARNINGS
from unstale.lint.semantics import Factor, factors, facts

__all__ = ["Factor", "Finding", "Verdict", "check", "page"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the linter for one configuration."""

    recipe: str
    factors: tuple[Factor, Factor]
    """Descriptions of the discrepancy D = pi_old / mu and of the staleness ratio S = pi /
    pi_old.
    """
    facts: Mapping[str, str]
    """Sentences about the configuration, by a short name, in reading order."""
    refusals: tuple[Finding, ...]
    """Problems with which a run does not start."""
    warnings: tuple[Finding, ...]

    def require(self) -> None:
        """Raise `ConfigError` with all `refusals`, one per line. Do nothing if there are none."""
        if self.refusals:
            raise ConfigError("\n".join(map(str, self.refusals)))


def check(config: RunConfig, *, without: Collection[Rule] = ()) -> Verdict:
    """Explain the configuration of a run, and find what is wrong with it.

    `without` names rules that are not applied.

    >>> [factor.denominator for factor in check(RunConfig(recipe="mine")).factors]
    ['mu', 'pi_old']
    """
    refusals = [rule for rule in REFUSALS if rule not in without]
    warnings = [rule for rule in WARNINGS if rule not in without]
    found = find(config, refusals, warnings)
    return Verdict(
        recipe=config.recipe,
        factors=factors(config),
        facts=facts(config),
        refusals=tuple(found[rule] for rule in refusals if rule in found),
        warnings=tuple(found[rule] for rule in warnings if rule in found),
    )


def page(verdict: Verdict) -> RenderableType:
    """Return the linter's result as tables, for a terminal of at least 100 columns."""
    table = Table(
        title=f"{verdict.recipe}: pi / mu = D * S",
        title_justify="left",
        title_style="bold",
        show_lines=True,
    )
    for head in ("", "numerator", "denominator", "what it means here", "what bounds it"):
        table.add_column(head)
    for factor in verdict.factors:
        words = (factor.name, factor.numerator, factor.denominator, factor.meaning, factor.bound)
        table.add_row(*map(Text, words))
    parts: list[RenderableType] = [
        table,
        _rows((Text(name, "bold"), words) for name, words in verdict.facts.items()),
    ]
    findings = [(finding, "refused", "bold red") for finding in verdict.refusals]
    findings += [(finding, "warning", "bold yellow") for finding in verdict.warnings]
    for finding, title, style in findings:
        reason = (Text(title, style), f"{finding.wrong}: {finding.why}.")
        parts += ["", _rows([reason, (Text("fix", "cyan"), finding.fix)])]
    if not verdict.refusals:
        result = "no problem found" if not verdict.warnings else "accepted, with warnings"
        parts += ["", Text(result, "bold green")]
    return Group(*parts)


def _rows(rows: Iterable[tuple[Text, str]]) -> Table:
    """Return names and sentences as a table of two columns.

    Sentences become `Text` objects, because rich would read brackets in a string as markup.
    """
    grid = Table.grid(padding=(0, 2))
    for name, words in rows:
        grid.add_row(name, Text(words))
    return grid
