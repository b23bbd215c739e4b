"""Read the figures of a run folder. All data are checked, because others may have written them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.config.names import RENAMED
from unstale.config.options import TECHNIQUE_OPTIONS
from unstale.durability.run_folder import EVENTS, METRICS, Row, RunFolder
from unstale.observe.report.held_out import HeldOut, held_out
from unstale.observe.report.words import mapping, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The configuration and the figures of a run that its model card shows."""

    name: str
    config: Row
    rows: list[Row]
    """Rows of `metrics.jsonl` from step 1 on, sorted by step."""
    evaluations: list[HeldOut]
    started: Row
    stopped: Row
    """The event with which the run ended. Empty if it has not ended since it was last resumed."""

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of an option by its full name, such as `trainer.lr`."""
        value: Any = self.config
        for part in name.split("."):
            value = mapping(value).get(part)
        return default if value is None else value

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return `(step, value)` for each step at which a metric has a value."""
        pairs = ((step_of(row), number(row.get(name))) for row in self.rows)
        return [(step, value) for step, value in pairs if value is not None]

    @property
    def route(self) -> str:
        return str(self.setting("old_logps.route", "unknown"))

    @property
    def steps(self) -> int:
        return step_of(self.rows[-1]) if self.rows else 0

    @property
    def planned(self) -> int:
        return int(number(self.setting("steps")) or 0)

    @property
    def seconds(self) -> float | None:
        times = [time for row in self.rows if (time := number(row.get("time_s"))) is not None]
        return times[-1] if times else None


def gather(path: Path) -> Gathered:
    """Read a run folder. Missing or damaged data are left out and raise no error.

    Raises `ConfigError` if the folder has no run, or one with old names of the options.
    """
    folder = RunFolder(path)
    config = folder.config()
    refuse_old(config, path)
    rows = (row for row in folder.rows(METRICS) if number(row.get("step")) is not None)
    log = list(folder.rows(EVENTS))
    return Gathered(
        name=path.resolve().name,
        config=config,
        rows=[row for row in sorted(rows, key=step_of) if step_of(row) > 0],
        evaluations=held_out(event for event in log if event.get("kind") == "eval"),
        started=next((each for each in reversed(log) if each.get("kind") == "started"), {}),
        stopped=last_stop(log),
    )


def last_stop(events: Iterable[Row]) -> Row:
    """Return the event with which a run ended.

    Empty if the run has not ended, or was resumed after it.

    >>> last_stop([{"kind": "started"}, {"kind": "stopped", "reason": "Ctrl-C"}])["reason"]
    'Ctrl-C'
    >>> last_stop([{"kind": "stopped", "reason": "Ctrl-C"}, {"kind": "resumed"}])
    {}
    """
    stopped: Row = {}
    for event in events:
        match event.get("kind"):
            case "started" | "resumed":
                stopped = {}
            case "stopped":
                stopped = event
    return stopped


def refuse_old(config: Row, path: Path) -> None:
    """Raise `ConfigError` for a run from before the options and metrics were renamed."""
    names = RENAMED.keys() - {"tensorboard"}  # this option was renamed after the metrics
    old = next((name for name in (*config, *flatten(config)) if name in names), None)
    if old:
        raise ConfigError(
            f"{path} is from an older version of unstale ({old} is now {RENAMED[old]}). "
            "Metrics were renamed, too: write its report with the version that ran it."
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under their full names, as on the command line.

    >>> flatten({"a": 1, "b": {"c": 2}, "technique_options": {"ess_lr": {"base": 0.5}}})
    {'a': 1, 'b.c': 2, 'ess_lr.base': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name == TECHNIQUE_OPTIONS:
            flat.update(flatten(value, prefix))
        elif isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def step_of(row: Mapping[str, Any]) -> int:
    return int(number(row.get("step")) or 0)


def histogram(row: Mapping[str, Any]) -> dict[int, float]:
    """Return how many tokens a step trained on at each lag. Invalid entries are left out."""
    return by_lag(mapping(row.get("schedule/staleness_histogram")).items())


def by_lag(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Return numbers by lag. Pairs without a lag or a number are left out.

    >>> by_lag([("0", 3), ("x", 1), ("2", None), (1, 4.5)])
    {0: 3.0, 1: 4.5}
    """
    lags: dict[int, float] = {}
    for key, value in pairs:
        text, amount = str(key), number(value)
        if amount is not None and text.isascii() and text.isdigit() and len(text) <= 2:
            lags[int(text)] = amount
    return dict(sorted(lags.items()))
