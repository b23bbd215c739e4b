"""The sections of a report, in reading order. Each is a function of what was gathered; a gap is said, never hidden."""

import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from unstale.config import RunConfig
from unstale.config.routes import exact_routes
from unstale.durability.run_folder import plain
from unstale.observe.report.gather import Evaluation, Gathered, histogram
from unstale.observe.report.markup import Markup, el, join
from unstale.observe.report.transcripts import conversation
from unstale.observe.report.words import NONE, amount, duration, number, percent, semantics

MAX_REASONS = 20


def bar(state: str, colour: str) -> Markup:
    """What stands on top of every page."""
    return el(
        "div",
        el("span", "unstale", class_="brand"),
        el("span", state, class_=f"badge {colour}"),
        el("button", "◐", id="theme", type="button", aria_label="dark or light"),
        class_="bar",
    )


def header(run: Gathered) -> Markup:
    """The outcome first."""
    state, colour = status(run)
    recipe = run.setting("recipe", "unknown recipe")
    env = run.setting("task.env", recipe)
    facts = [
        str(recipe),
        *([str(env)] if env != recipe else []),
        f"seed {run.setting('seed', '?')}",
    ]
    facts += [f"{run.steps} of {run.planned or '?'} steps", duration(run.seconds)]
    return el(
        "header",
        bar(state, colour),
        el("p", run.name, class_="run-name"),
        _outcome(run),
        el("p", " · ".join(facts), class_="quiet"),
        el(
            "details",
            el("summary", "How it failed"),
            el("pre", run.error[-6000:]),
            class_="error",
            open=True,
        )
        if run.error
        else None,
        el("ul", [el("li", gap) for gap in run.gaps], class_="gaps") if run.gaps else None,
    )


def status(run: Gathered) -> tuple[str, str]:
    """In words, and a colour."""
    if run.error:
        return "failed", "bad"
    if (run.planned and run.steps >= run.planned) or (
        run.stopped and run.stopped.get("reason") == "finished"
    ):
        return "finished", "good"
    if run.stopped:
        return f"stopped: {str(run.stopped.get('reason', 'no reason given'))[:120]}", "plain"
    return "not finished: going on, stopped early, or cut off", "plain"


def _outcome(run: Gathered) -> Markup:
    if len(run.evaluations) > 1:
        first, last = run.evaluations[0], run.evaluations[-1]
        tasks = f"{last.tasks} held-out tasks" if last.tasks else "held-out tasks"
        begin = f"after {first.step} steps" if first.step else "before training"
        note = f"success on {tasks}, {begin} and after {last.step} steps"
        return el(
            "div",
            _share(first),
            el("span", "→", class_="arrow"),
            _share(last),
            el("p", note),
            class_="outcome",
        )
    if run.evaluations:
        note = f"success on held-out tasks after {run.evaluations[0].step} steps; there was no second evaluation"
        return el("div", _share(run.evaluations[0]), el("p", note), class_="outcome")
    rollout = [value for _, value in run.series("rollout/success_rate")]
    if len(rollout) > 1:
        few = max(1, min(5, len(rollout) // 2))
        first_mean, last_mean = sum(rollout[:few]) / few, sum(rollout[-few:]) / few
        note = f"success in rollouts, mean of the first and of the last {few} steps; held-out tasks were not evaluated"
        pair = (_number(first_mean), el("span", "→", class_="arrow"), _number(last_mean))
        return el("div", pair, el("p", note), class_="outcome")
    return el("p", "Too few steps were recorded to speak of an outcome.", class_="gap")


def _number(share: float) -> Markup:
    return el("span", el("b", percent(share, 1)), class_="share")


def _share(evaluation: Evaluation) -> Markup:
    low, high = evaluation.interval
    between = (
        el("small", f"95% interval {percent(low, 1)} to {percent(high, 1)}")
        if evaluation.tasks
        else None
    )
    return el("span", el("b", percent(evaluation.success, 1)), between, class_="share")


def tiles(run: Gathered) -> Markup:
    """The run in eight numbers."""
    newest = max((value for _, value in run.series("schedule/staleness_max")), default=None)
    tokens = sum(sum(histogram(row).values()) for row in run.rows)
    shown = (
        ("staleness, max", amount(newest), f"bound {amount(run.bound)}"),
        (
            "several versions",
            percent(_mean(run, "schedule/mixed_version_share")),
            "of the episodes",
        ),
        (
            "kept",
            percent(_mean(run, "correction/kept_share"), 1),
            "of the tokens with an advantage",
        ),
        (
            "clipped",
            percent(_mean(run, "objective/clip_share"), 1),
            "of the tokens with an advantage",
        ),
        ("engine", amount(_mean(run, "engine/sampled_tokens_per_s")), "tokens per second"),
        ("trainer", amount(_mean(run, "trainer/tokens_per_s")), "tokens per second"),
        ("trained on", amount(tokens or None), "action tokens"),
        ("failed", f"{run.num_failures}", "episodes"),
    )
    return el(
        "dl",
        [el("div", el("dt", a), el("dd", b), el("small", c)) for a, b, c in shown],
        class_="tiles",
    )


def _mean(run: Gathered, name: str) -> float | None:
    values = [value for _, value in run.series(name)]
    return sum(values) / len(values) if values else None


def factors(run: Gathered) -> Markup:
    """The three probabilities of a token, the two factors between them, and what is done about each."""
    exact = run.exact
    size_d, size_s = _mean(run, "correction/log_d_abs_mean"), _mean(run, "objective/log_s_abs_mean")
    names = (
        ("0 by construction", "both factors") if run.route == "rollout" else ("mixed", "the rest")
    )
    names = ("discrepancy", "staleness") if exact else names
    strip = el(
        "div",
        _station(
            "μ",
            "behavior_logp",
            f"engine, {run.setting('engine.dtype', '?')}",
            "station engine-side",
        ),
        _link("D", names[0], size_d, "d"),
        _station(
            join("π", el("sub", "old")) if exact else "stand-in",
            "old_logp",
            run.route,
            f"station{'' if exact else ' stand-in'}",
        ),
        _link("S", names[1], size_s, "s"),
        _station(
            "π", "logp", f"trainer, {run.setting('trainer.dtype', '?')}", "station trainer-side"
        ),
        class_="factors",
    )
    warning = None
    if not exact and run.route != "unknown":
        told = f"{run.route} is an approximate route: "
        told += (
            "the engine's number stands for old_logp, so both factors are in log S."
            if run.route == "rollout"
            else "old_logp - behavior_logp mixes discrepancy and staleness on this page, wherever it says D or S."
        )
        warning = el(
            "p", told + f" Exact routes are {', '.join(exact_routes())}.", class_="warning"
        )
    meaning = [
        el("div", el("dt", head), el("dd", text))
        for head, text in semantics(run.setting, exact_fraction(run))
    ]
    return section(
        "means", "What this run computed", None, strip, warning, el("dl", meaning, class_="meaning")
    )


def exact_fraction(run: Gathered) -> float | None:
    """Share of action tokens with an exact old_logp, over the run."""
    return _mean(run, "old_logps/exact_share")


def _station(symbol: str, name: str, about: str, kind: str) -> Markup:
    return el("div", el("b", symbol), el("code", name), el("small", about), class_=kind)


def _link(symbol: str, name: str, size: float | None, colour: str) -> Markup:
    mean = f"mean |log {symbol}| {amount(size)}" if size is not None else NONE
    return el("div", el("b", symbol), el("span", name), el("small", mean), class_=f"link {colour}")


def section(name: str, title: str, lead: str | None, *content: Markup | None) -> Markup:
    """A heading, one sentence of what is to be seen, and the content."""
    return el(
        "section", el("h2", title), el("p", lead, class_="lead") if lead else None, content, id=name
    )


def conversations(run: Gathered) -> Markup:
    lead = (
        "One success and one failure of the first and of the last quarter of the steps, chosen by rule: conversations "
        "that lived through a weight update first, then the earliest and the latest. Colour and label say which "
        "version sampled a run of tokens; the mark between two colours is an interruption by new weights."
    )
    if not run.conversations:
        return section(
            "talk", "Conversations", None, el("p", "No conversation was recorded.", class_="gap")
        )
    shown = [
        conversation(chosen, opened=index == 0) for index, chosen in enumerate(run.conversations)
    ]
    have = {chosen.why for chosen in run.conversations}
    missing = [
        why
        for why in ("early success", "early failure", "late success", "late failure")
        if why not in have
    ]
    gap = el("p", f"Not found: {', '.join(missing)}.", class_="gap") if missing else None
    return section("talk", "Conversations", lead, *shown, gap)


def failures(run: Gathered) -> Markup | None:
    """Episodes that their environment could not finish."""
    if not run.failures:
        return None
    names = ("time", "task", "stage", "error")
    rows = [
        el("tr", [el("td", str(failure.get(name, NONE))[:300]) for name in names])
        for failure in run.failures
    ]
    table = el(
        "table", el("thead", el("tr", [el("th", name) for name in names])), el("tbody", rows)
    )
    more = (
        f" The first {len(run.failures)} are shown." if run.num_failures > len(run.failures) else ""
    )
    lead = f"{run.num_failures} episodes failed in their environment. They are counted, not trained on.{more}"
    return section("failed", "Failed episodes", lead, el("div", table, class_="scroll"))


def forks(run: Gathered) -> Markup | None:
    """Where an agent's history was not what is recorded, and a branch began."""
    if not run.forks:
        return None
    firsts: dict[str, Mapping[str, Any]] = {}
    for fork in run.forks:
        firsts.setdefault(str(fork.get("reason"))[:300], fork)
    many = Counter(str(fork.get("reason"))[:300] for fork in run.forks)
    told = [
        (
            reason,
            str(count),
            *(str(firsts[reason].get(name, NONE)) for name in ("episode", "parent", "at")),
        )
        for reason, count in many.most_common(MAX_REASONS)
    ]
    names = ("why", "forks", "first: episode", "branches from", "at message")
    rows = [el("tr", [el("td", cell) for cell in row]) for row in told]
    table = el(
        "table", el("thead", el("tr", [el("th", name) for name in names])), el("tbody", rows)
    )
    lead = f"{len(run.forks)} times an agent's history was not the one on record: a branch of its episode begins there."
    return section("forks", "Forks", lead, el("div", table, class_="scroll"))


def reproduce(run: Gathered) -> Markup:
    """The command and every knob."""
    command = run.started.get("command")
    told = "The command that began this run."
    if not isinstance(command, str):
        command = command_of(run.config)
        told = "From the stored configuration: every knob that differs from the library's default."
    facts = [
        (key, value) for key, value in run.started.items() if key not in ("kind", "time", "command")
    ]
    about = [el("li", el("span", key), el("code", _written(value))) for key, value in facts]
    defaults = flatten(plain(RunConfig(recipe="")))
    knobs = [
        el(
            "li",
            el("span", name),
            el("code", _written(value)),
            class_="changed" if name in defaults and defaults[name] != value else None,
        )
        for name, value in flatten(run.config).items()
    ]
    settings = el(
        "details",
        el("summary", f"All {len(knobs)} settings (marked: not the library's default)"),
        el("ul", knobs, class_="knobs"),
    )
    return section(
        "again",
        "Do it again",
        None,
        el("pre", command, class_="command"),
        el("p", told, class_="quiet"),
        el("ul", about, class_="knobs") if about else None,
        settings if knobs else el("p", "The settings could not be read.", class_="gap"),
    )


def command_of(config: Mapping[str, Any]) -> str:
    """A command that sets every knob that is not at its default.

    >>> command_of({"recipe": "retail", "seed": 3, "schedule": {"max_staleness": 1}, "name": "a b"})
    'unstale train retail --seed 3 --schedule.max_staleness 1'
    """
    defaults = flatten(plain(RunConfig(recipe="")))
    words = ["unstale", "train", str(config.get("recipe", "RECIPE"))]
    for name, value in flatten(config).items():
        if name not in ("recipe", "name", "runs") and name in defaults and defaults[name] != value:
            words += [f"--{name}", _written(value)]
    return shlex.join(words)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> flatten({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _written(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if number(value) is not None and isinstance(value, float) else str(value)
