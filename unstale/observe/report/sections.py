"""Render the sections of a report. Missing data are reported, never hidden."""

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
    """Render the top bar of a page: the name, a badge with the state and the theme button."""
    return el(
        "div",
        el("span", "unstale", class_="brand"),
        el("span", state, class_=f"badge {colour}"),
        el("button", "◐", id="theme", type="button", aria_label="dark or light"),
        class_="bar",
    )


def header(run: Gathered) -> Markup:
    """Render the state, the outcome and the basic facts of a run."""
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
            el("summary", "Error"),
            el("pre", run.error[-6000:]),
            class_="error",
            open=True,
        )
        if run.error
        else None,
        el("ul", [el("li", gap) for gap in run.gaps], class_="gaps") if run.gaps else None,
    )


def status(run: Gathered) -> tuple[str, str]:
    """Return the state of a run in words, and its colour."""
    if run.error:
        return "failed", "bad"
    if (run.planned and run.steps >= run.planned) or (
        run.stopped and run.stopped.get("reason") == "finished"
    ):
        return "finished", "good"
    if run.stopped:
        return f"stopped: {str(run.stopped.get('reason', 'no reason given'))[:120]}", "plain"
    return "not finished: still running, or killed", "plain"


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
        note = f"success on held-out tasks after {run.evaluations[0].step} steps (one evaluation)"
        return el("div", _share(run.evaluations[0]), el("p", note), class_="outcome")
    rollout = [value for _, value in run.series("rollout/success_rate")]
    if len(rollout) > 1:
        few = max(1, min(5, len(rollout) // 2))
        first_mean, last_mean = sum(rollout[:few]) / few, sum(rollout[-few:]) / few
        note = f"rollout success, mean of the first and of the last {few} steps (no evaluation)"
        pair = (_number(first_mean), el("span", "→", class_="arrow"), _number(last_mean))
        return el("div", pair, el("p", note), class_="outcome")
    return el("p", "Too few steps were recorded to show an outcome.", class_="gap")


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
    """Render eight key figures of the run."""
    stalest = max((value for _, value in run.series("schedule/staleness_max")), default=None)
    tokens = sum(sum(histogram(row).values()) for row in run.rows)
    shown = (
        ("staleness, max", amount(stalest), f"bound {amount(run.bound)}"),
        (
            "mixed versions",
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
    """Render the three log-probabilities of a token, the ratios D and S, and the settings."""
    exact = run.exact
    size_d = _mean(run, "correction/log_d_abs_mean")
    size_s = _mean(run, "objective/log_s_abs_mean")
    if exact:
        names = ("discrepancy", "staleness")
    elif run.route == "rollout":
        names = ("0 by construction", "discrepancy and staleness")
    else:
        names = ("mixed", "remaining staleness")
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
            join("π", el("sub", "old")) if exact else "approximation",
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
        text = f"{run.route} is an approximate route. "
        text += (
            "It takes old_logp from the engine, so log S contains discrepancy and staleness."
            if run.route == "rollout"
            else "Wherever this page shows D or S, discrepancy and staleness are mixed."
        )
        text += f" Exact routes are {', '.join(exact_routes())}."
        warning = el("p", text, class_="warning")
    meaning = [
        el("div", el("dt", head), el("dd", text))
        for head, text in semantics(run.setting, exact_fraction(run))
    ]
    return section(
        "means", "What this run computed", None, strip, warning, el("dl", meaning, class_="meaning")
    )


def exact_fraction(run: Gathered) -> float | None:
    """Return the mean share of action tokens with an exact old_logp."""
    return _mean(run, "old_logps/exact_share")


def _station(symbol: str, name: str, about: str, kind: str) -> Markup:
    return el("div", el("b", symbol), el("code", name), el("small", about), class_=kind)


def _link(symbol: str, name: str, size: float | None, colour: str) -> Markup:
    mean = f"mean |log {symbol}| {amount(size)}" if size is not None else NONE
    return el("div", el("b", symbol), el("span", name), el("small", mean), class_=f"link {colour}")


def section(name: str, title: str, lead: str | None, *content: Markup | None) -> Markup:
    """Render a section: heading, lead and content."""
    return el(
        "section", el("h2", title), el("p", lead, class_="lead") if lead else None, content, id=name
    )


def conversations(run: Gathered) -> Markup:
    lead = (
        "One success and one failure from the first and from the last quarter of the steps. "
        "Conversations with several versions are preferred, then the earliest and the latest. The "
        "colour shows which version sampled the tokens; a mark shows where new weights arrived."
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
    """Render a table of the episodes in which the environment raised an error."""
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
    lead = f"{run.num_failures} episodes failed in their environment and were not trained on.{more}"
    return section("failed", "Failed episodes", lead, el("div", table, class_="scroll"))


def forks(run: Gathered) -> Markup | None:
    """Render a table of the forks, where an agent's messages differ from the recorded history."""
    if not run.forks:
        return None
    firsts: dict[str, Mapping[str, Any]] = {}
    for fork in run.forks:
        firsts.setdefault(str(fork.get("reason"))[:300], fork)
    counts = Counter(str(fork.get("reason"))[:300] for fork in run.forks)
    rows = []
    for reason, count in counts.most_common(MAX_REASONS):
        first = [firsts[reason].get(name, NONE) for name in ("episode", "parent", "at")]
        rows.append(el("tr", [el("td", str(value)) for value in (reason, count, *first)]))
    names = ("reason", "forks", "first: episode", "branches from", "at message")
    table = el(
        "table", el("thead", el("tr", [el("th", name) for name in names])), el("tbody", rows)
    )
    lead = (
        f"{len(run.forks)} times, an agent's messages differed from the recorded history. A new "
        "branch of the episode begins there."
    )
    return section("forks", "Forks", lead, el("div", table, class_="scroll"))


def reproduce(run: Gathered) -> Markup:
    """Render the command of a run and all its options."""
    command = run.started.get("command")
    source = "The command that started this run."
    if not isinstance(command, str):
        command = command_of(run.config)
        source = "From the stored configuration: every option that differs from its default."
    facts = [
        (key, value) for key, value in run.started.items() if key not in ("kind", "time", "command")
    ]
    about = [el("li", el("span", key), el("code", _written(value))) for key, value in facts]
    defaults = flatten(plain(RunConfig(recipe="")))
    options = [
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
        el("summary", f"All {len(options)} settings (marked: not the default)"),
        el("ul", options, class_="knobs"),
    )
    return section(
        "again",
        "Reproduce",
        None,
        el("pre", command, class_="command"),
        el("p", source, class_="quiet"),
        el("ul", about, class_="knobs") if about else None,
        settings if options else el("p", "The settings could not be read.", class_="gap"),
    )


def command_of(config: Mapping[str, Any]) -> str:
    """Return a command that sets every option that is not at its default.

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
