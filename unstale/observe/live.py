"""The display of a run while it trains: a panel on a terminal, otherwise plain lines."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from unstale.config import RunConfig
from unstale.durability.console import Console, escaped_prints
from unstale.durability.run_folder import show_controls
from unstale.observe.held_out import HeldOut, improved
from unstale.observe.words import NONE, amount, duration, number, percent, waiting
from unstale.stop_signals import cursor_while_stopped

HISTORY = 400
RECENT = 5
"""Number of most recent steps over which the display averages values."""
WIDE = 100
"""Smallest width of a terminal, in characters, at which the panel's two parts are side by side."""
ROOMY = 30
"""Smallest height of a terminal, in lines, at which empty lines separate parts of the panel."""
GENERATION, TRAINING, GOOD, WARN, QUIET = "cyan", "magenta", "green", "yellow", "bright_black"
_BARS = " ▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None
) -> str:
    """Return a bar chart of the values as text, with one character for each bar.

    Bars range from `low` to `high`, by default the smallest and the largest value. If there are
    more than `width` values, adjacent ones are averaged.

    >>> sparkline([0.0, 0.5, 1.0], 8, low=0.0, high=1.0)
    '▁▅█'
    >>> sparkline([], 8)
    ''
    """
    if not values:
        return ""
    if len(values) > width:
        cuts = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    floor, top = min(values) if low is None else low, max(values) if high is None else high
    span = top - floor or 1.0
    return "".join(
        _BARS[1 + round(7 * min(1.0, max(0.0, (value - floor) / span)))] for value in values
    )


class LiveDisplay:
    """A display of a run while it trains: a panel on a terminal, otherwise plain lines.

    Without a terminal, a line is printed at least every `quiet_s` seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = 5.0,
    ) -> None:
        self.config = config
        self.console = console or Console()
        self._clock, self._quiet_s = clock, quiet_s
        self._start = self._last_line = self._last_step = clock()
        self._rows: list[Mapping[str, Any]] = []
        self._evals: list[HeldOut] = []
        self._phase: tuple[str, int, int] = ("starting", 0, 0)
        self._detail: Callable[[], str] = str
        self._printed_phase = ""
        self._stopped = threading.Event()
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._heart: threading.Thread | None = None
        self._prints = ExitStack()
        self._spinner = Spinner("dots", style=GENERATION)

    def __enter__(self) -> Self:
        self._stopped.clear()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(
                console=self.console,
                get_renderable=self.panel,
                refresh_per_second=2,
                vertical_overflow="crop",
            )
            self._live.start()
            with suppress(OSError):  # a terminal without a file, as in a notebook
                self._prints.enter_context(cursor_while_stopped(self.console.file.fileno()))
        else:
            self._prints.enter_context(escaped_prints())
            self._heart = threading.Thread(target=self._beat, name="unstale-display")
            self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._heart is not None:
            self._heart.join()
            self._heart = None
        self._prints.close()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of a finished step, which have the names in `metrics.jsonl`."""
        with self._lock:
            self._phase, self._detail = ("", 0, 0), str
            now = self._clock()
            self._rows = [*self._rows[-HISTORY:], {"time_s": now - self._start, **metrics}]
            if evaluation := HeldOut.of_metrics(metrics):
                self._evals.append(evaluation)
            if self._live is None:
                self._print(_line(self._rows, self.config, now - self._last_step))
            self._last_step = now

    def note(self, text: str) -> None:
        """Print a line of text. On a terminal it stays above the panel."""
        with self._lock:
            live = self._live
            if live is None:
                self._print(text)
        # Outside of the lock, because rich holds a lock while it asks for the panel.
        if live is not None:
            live.console.print(Text.assemble(("• ", GENERATION), _one_line(text)))

    def phase(
        self, text: str, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None:
        """Show an activity such as "evaluating the base policy", with progress `done` of `total`.

        With an empty text, the current step is shown. `detail` returns a text that says what the
        run waits for. It is called repeatedly, possibly in another thread, so it must be
        thread-safe.
        """
        with self._lock:
            self._phase, self._detail = (text, done, total), detail
            new = text != self._printed_phase
            finished = total > 0 and done >= total
            if (
                self._live is None
                and text
                and (new or finished or self._silent_for() >= self._quiet_s)
            ):
                self._printed_phase = "" if finished else text
                self._print(self._phase_text())

    def panel(self) -> RenderableType:
        """Return the panel with its current content."""
        with self._lock:
            roomy = self.console.height >= ROOMY
            spacing = [Text()] if roomy else []
            body: list[RenderableType] = [
                _progress(self._rows, self.config, self._clock() - self._start)
            ]
            if self._rows:
                body += [
                    *spacing,
                    _numbers(self._rows, self._evals, self.config, self.console),
                    *spacing,
                    _pace(self._rows),
                ]
            if self._phase_text():
                body += [*spacing, self._phase_row()]
            return Panel(
                Group(*body),
                title=Text.assemble((" unstale ", "bold"), (f"{_title(self.config)} ", QUIET)),
                title_align="left",
                subtitle=Text(" Ctrl-C stops cleanly and saves ", style=QUIET),
                subtitle_align="right",
                border_style=QUIET,
                padding=(1 if roomy else 0, 2),
                width=min(self.console.width, WIDE),
            )

    def _phase_row(self) -> RenderableType:
        _, done, total = self._phase
        self._spinner.update(text=Text(_one_line(self._phase_text())))
        if not total:
            return self._spinner
        row = Table.grid(Column(no_wrap=True), Column(ratio=1), padding=(0, 2), expand=True)
        row.add_row(
            self._spinner, ProgressBar(total=total, completed=done, complete_style=GENERATION)
        )
        return row

    def _phase_text(self) -> str:
        text, done, total = self._phase
        if total:
            text = f"{text} {done}/{total}"
        if not (detail := self._detail()):
            return text
        return f"{text}: {detail}" if text else f"episodes: {detail}"

    def _silent_for(self) -> float:
        return self._clock() - self._last_line

    def _print(self, line: str) -> None:
        self._last_line = self._clock()
        line = f"[{duration(self._last_line - self._start):>7}] {_one_line(line)}"
        self.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def _beat(self) -> None:
        while not self._stopped.wait(max(0.05, self._quiet_s - self._silent_for())):
            with self._lock:
                if self._silent_for() >= self._quiet_s:
                    step = int(number(self._rows[-1].get("step")) or 0) if self._rows else 0
                    activity = self._phase_text()
                    if not self._phase[0]:
                        running = f"step {step + 1}/{self.config.max_steps} running"
                        activity = f"{running}, {activity}" if activity else running
                    self._print(f"... {activity}")


def _one_line(text: str) -> str:
    return show_controls(text).replace("\n", " ").replace("\t", " ")


def _title(config: RunConfig) -> str:
    bound = config.schedule.staleness_bound
    mode = f"up to {bound} versions behind" if bound else "synchronous"
    return f"{config.recipe} · seed {config.seed} · {config.old_logps.route} · {mode}"


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := number(row.get(name))) is not None]


def _recent(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _series(rows[-RECENT:], name)
    return sum(values) / len(values) if values else None


def _last(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = _series(rows, name)
    return values[-1] if values else None


def _progress(
    rows: Sequence[Mapping[str, Any]], config: RunConfig, elapsed: float
) -> RenderableType:
    step = int(_last(rows, "step") or 0)
    times = _series(rows, "time_s")
    left = ""
    if 0 < step < config.max_steps and len(times) > 1:
        pace = (times[-1] - times[max(0, len(times) - 20)]) / min(19, len(times) - 1)
        seconds = pace * (config.max_steps - step)
        if config.minutes:
            seconds = min(seconds, max(0.0, 60 * config.minutes - elapsed))
        left = f" · about {duration(seconds)} left"
    share = step / config.max_steps
    if config.minutes:  # whichever ends the run first
        share = max(share, min(1.0, elapsed / (60 * config.minutes)))
    columns = (Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True, justify="right"))
    grid = Table.grid(*columns, padding=(0, 2), expand=True)
    grid.add_row(
        Text.assemble("step ", (f"{step}", "bold"), f"/{config.max_steps}"),
        ProgressBar(completed=100 * share, complete_style=GOOD, finished_style=GOOD),
        Text.assemble((duration(elapsed), "bold"), (left, QUIET)),
    )
    return grid


def _numbers(
    rows: Sequence[Mapping[str, Any]],
    evals: Sequence[HeldOut],
    config: RunConfig,
    console: Console,
) -> RenderableType:
    is_wide = console.width >= WIDE
    learning, off_policy = _learning(rows, evals, is_wide=is_wide), _off_policy(rows, config)
    if not is_wide:
        return Group(learning, *([Text()] if console.height >= ROOMY else []), off_policy)
    grid = Table.grid(Column(ratio=1), Column(ratio=1), padding=(0, 3), expand=True)
    grid.add_row(learning, off_policy)
    return grid


def _block(title: str) -> Table:
    table = Table.grid(
        Column(no_wrap=True, style=QUIET, min_width=10),
        Column(no_wrap=True, justify="right", min_width=7, style="bold"),
        Column(no_wrap=True),
        padding=(0, 1),
    )
    table.add_row(Text(title, style="bold default"), "", "")
    return table


def _learning(
    rows: Sequence[Mapping[str, Any]], evals: Sequence[HeldOut], *, is_wide: bool
) -> RenderableType:
    """Return the part of the panel about success and reward, from steps (`rows`) and evaluations.

    With `is_wide`, the number of held-out tasks is on a separate line.
    """
    table = _block("Learning")
    if evals:
        last = evals[-1]
        shares = [each.success for each in evals if each.success is not None]
        style = WARN if last.success is None else GOOD if improved(evals) else "default"
        note = Text.assemble((f"{sparkline(shares, 10, 0, 1)} " if len(evals) > 2 else "", style))
        step = f"step {last.step}" if last.step else "before training"
        counts = "" if is_wide or not last.counts else f" ({last.counts})"
        was = f"was {evals[0].share} · " if len(evals) > 1 else ""
        note.append(f"{was}{step}{counts}", QUIET)
        table.add_row("held-out", Text(last.share, style=f"bold {style}"), note)
        if is_wide and last.counts:
            table.add_row("", "", Text(last.counts, style=QUIET))
    rollout = sparkline(_series(rows, "rollout/success_rate"), 22, 0, 1)
    table.add_row(
        "rollout",
        percent(_recent(rows, "rollout/success_rate"), 1),
        Text(rollout, style=GENERATION),
    )
    reward = _recent(rows, "reward/mean")
    rewards = sparkline(_series(rows, "reward/mean"), 22)
    table.add_row(
        "reward", NONE if reward is None else f"{reward:z.2f}", Text(rewards, style=GENERATION)
    )
    turns = _recent(rows, "rollout/turns_mean")
    failed = int(sum(_series(rows, "rollout/failed_episodes")))
    note = Text(f"{failed} episode{'s' if failed > 1 else ''} failed" if failed else "", style=WARN)
    table.add_row("turns", NONE if turns is None else f"{turns:.1f}", note)
    return table


def _off_policy(rows: Sequence[Mapping[str, Any]], config: RunConfig) -> RenderableType:
    table = _block("Off-policy")
    stalest = _last(rows, "schedule/staleness_max")
    bound = _last(rows, "schedule/staleness_bound")
    mean = _recent(rows, "schedule/staleness_mean")
    mixed = _recent(rows, "schedule/mixed_version_share")
    over = stalest is not None and bound is not None and stalest > bound
    facts = Text(f"max {amount(stalest)} of {amount(bound)}", style="bold red" if over else QUIET)
    table.add_row("staleness", NONE if mean is None else f"{mean:.2f}", facts)
    table.add_row("mixed", percent(mixed), Text("with several versions", style=QUIET))
    exact = config.old_logps.exact
    factors = (
        ("|log D|", "correction/log_d_abs_mean", GENERATION, "kept", "correction/kept_share"),
        ("|log S|", "objective/log_s_abs_mean", TRAINING, "clipped", "objective/clip_share"),
    )
    for name, key, colour, word, share in factors:
        values = _series(rows, key)
        bars = sparkline(values, 10, low=0.0, high=1.5 * max(values, default=0.0))
        note = Text(f"{bars:<10} ", style=colour)
        note.append(f"{word} {percent(_recent(rows, share), 1)}", "default")
        table.add_row(name if exact else f"{name} *", _small(_recent(rows, key)), note)
    if not exact:
        table.add_row("", "", Text(f"* {config.old_logps.route} mixes the two", style=QUIET))
    return table


def _small(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.4f}" if value == 0 or value >= 1e-4 else f"{value:.0e}"


def _pace(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the part of the panel about speed: throughput, busy shares, and the bottleneck."""
    wait = waiting(rows[-RECENT - 1 :])
    grid = Table.grid(
        Column(no_wrap=True, width=8, style="bold"),
        Column(no_wrap=True, width=13, justify="right"),
        Column(ratio=1),
        Column(no_wrap=True, width=30),
        padding=(0, 1),
        expand=True,
    )
    sides = (
        ("engine", "engine/sampled_tokens_per_s", wait.engine, GENERATION, "idle"),
        ("trainer", "trainer/tokens_per_s", wait.trainer, TRAINING, "waits for episodes"),
    )
    for name, key, idle, colour, word in sides:
        rate = _recent(rows, key)
        bar = ProgressBar(
            total=100,
            completed=100 * (1 - (idle or 0.0)),
            complete_style=colour,
            finished_style=colour,
        )
        grid.add_row(
            Text(name, style=colour),
            NONE if rate is None else f"{rate:,.0f} tok/s" if rate else "no advantage",
            "" if idle is None else bar,
            "" if idle is None else Text(f"{percent(idle):>4} {word}", style=QUIET),
        )
    if wait.trainer is None and wait.engine is None:
        return grid
    title = Text.assemble(("Pace ", "bold"), (f"of the last {RECENT} steps", QUIET))
    return Group(title, grid, Text(wait.sentence.split(":")[0] + ".", style="italic"))


def _line(rows: Sequence[Mapping[str, Any]], config: RunConfig, took: float) -> str:
    """Return the line that is printed for a step without a terminal. `took` is its seconds."""
    row = rows[-1]
    parts = [f"step {int(number(row.get('step')) or 0)}/{config.max_steps}"]
    if evaluation := HeldOut.of_metrics(row):
        parts.append(f"held-out {evaluation}")
    wanted = (
        ("success", "rollout/success_rate", lambda v: percent(v, 1)),
        ("reward", "reward/mean", lambda v: f"{v:z.2f}"),
        (
            "staleness",
            "schedule/staleness_max",
            lambda v: f"{v:g}/{amount(number(row.get('schedule/staleness_bound')))}",
        ),
        ("|log D|", "correction/log_d_abs_mean", _small),
        ("kept", "correction/kept_share", lambda v: percent(v, 1)),
        ("|log S|", "objective/log_s_abs_mean", _small),
        ("clipped", "objective/clip_share", lambda v: percent(v, 1)),
        ("engine", "engine/sampled_tokens_per_s", lambda v: f"{v:,.0f} tok/s"),
        ("trainer", "trainer/tokens_per_s", lambda v: f"{v:,.0f} tok/s"),
        ("waited", "schedule/wait_for_batch_s", lambda v: f"{v:.1f} s"),
    )
    for name, key, show in wanted:
        value = number(row.get(key))
        if key == "trainer/tokens_per_s" and value == 0:
            parts.append("no advantage, nothing trained")
        elif value is not None:
            parts.append(f"{name} {show(value)}")
    return " · ".join(parts) + f" · {duration(took)}"
