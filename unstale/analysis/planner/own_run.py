"""Compare a recorded run with a simulation of it, to decide if simulations can be trusted.

Simulations of other settings are refused if the simulation of the run's own settings deviates from
the recorded run by more than `LIMIT`, gets a part of the step wrong, or names another bottleneck.
Simulations are also refused if the recorded steps leave the duration of a part of the step too
uncertain (`OPEN`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from unstale.analysis.planner.fit import Fit
from unstale.analysis.planner.measured import FittedCosts, SimulationSetup, recorded_fleet
from unstale.analysis.planner.recorded import MIN_STEPS, RecordedRun
from unstale.analysis.planner.result import SimulationResult
from unstale.config import ConfigError
from unstale.observe.words import Waiting, waiting
from unstale.trainer.threads import trainer_threads

LIMIT = 0.1
"""Largest allowed relative deviation of the simulated seconds per step from the measured ones. The
simulation has the run's own settings.
"""
SHARE_LIMIT = 0.1
"""Largest allowed deviation of the simulated share of a step's time that a part, such as training,
takes. Errors of several parts may cancel in the seconds per step, but not with other settings.
"""
DECODING_LIMIT = 0.25
"""Largest allowed relative deviation of the simulated number of decoding steps from the measured
one.
"""
DECODING = "decoding steps a step"
OPEN = 0.15
"""Largest allowed half-width of the 95% confidence interval of the seconds that a part of a step
takes, as a share of the step.
"""
MAX_STEPS = 200
"""Largest number of steps in the simulation of a recorded run with its own settings. Steps at the
start, in which the queue of finished groups fills, are not counted.
"""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure, as measured in a run and as predicted by its simulation."""

    name: str
    measured: float
    predicted: float
    unit: str = ""
    """`s` for seconds, `share`, or empty for a number."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A recorded run compared with a simulation of its own settings."""

    name: str
    figures: tuple[Compared, ...]
    """The compared figures. The first is the number of seconds per step."""
    steps: int
    """Number of steps that are compared."""
    left_out: int
    """Number of steps that are left out, because an evaluation delayed them."""
    run: Waiting
    simulated: Waiting

    @property
    def error(self) -> float:
        """Relative deviation of the predicted seconds per step from the measured ones: 0.1 is 10%
        too many.
        """
        return self.figures[0].predicted / self.figures[0].measured - 1

    @property
    def problems(self) -> list[str]:
        """Reasons why simulations of other settings cannot be trusted. Empty if they can."""
        found = []
        if abs(self.error) > LIMIT:
            found.append(
                f"the simulation of {self.name} itself takes {self.figures[0].predicted:.3g} s a "
                f"step, measured were {self.figures[0].measured:.3g} s: {self.error:+.0%}, more "
                f"than {LIMIT:.0%}. {self._furthest()}"
            )
        if parts := self._wrong_parts():
            found.append(
                f"the simulation of {self.name} gets parts of the step wrong, which other settings "
                f"change differently: {'; '.join(parts)}"
            )
        if self.run.bottleneck != self.simulated.bottleneck:
            found.append(
                f"the bottleneck of {self.name} is {_named(self.run)}, that of its simulation "
                f"{_named(self.simulated)}"
            )
        return found

    def _wrong_parts(self) -> list[str]:
        """Return sentences on the parts of a step that deviate by more than the limits."""
        wrong = []
        for each in self.figures:
            off = each.predicted - each.measured
            if each.unit == "share" and abs(off) > SHARE_LIMIT:
                wrong.append(
                    f"{each.name}, {each.measured:.0%} of the step measured and "
                    f"{each.predicted:.0%} simulated (limit {100 * SHARE_LIMIT:.0f} points)"
                )
            if each.name == DECODING and abs(off) > DECODING_LIMIT * each.measured > 0:
                wrong.append(
                    f"{each.name}, {each.measured:,.3g} measured and {each.predicted:,.3g} "
                    f"simulated: {off / each.measured:+z.0%} (limit {DECODING_LIMIT:.0%})"
                )
        return wrong

    def _furthest(self) -> str:
        """Return sentences on the part of a step whose share of the time deviates most."""
        shares = [each for each in self.figures[1:] if each.unit == "share"]
        worst = max(shares, key=lambda each: abs(each.predicted - each.measured))
        return (
            f"Furthest off: {worst.name}, {worst.measured:.0%} measured and {worst.predicted:.0%} "
            "simulated. Record more steps, on a machine that runs nothing else"
        )


def _named(found: Waiting) -> str:
    return found.bottleneck or "none (generation and training keep pace)"


def simulate_own(
    run: RecordedRun, setup: SimulationSetup, seed: int = 0
) -> tuple[SimulationSetup, SimulationResult, OwnRun]:
    """Simulate a run with its own settings. Return the setup, the result and the comparison.

    If replies are faster in this simulation than in the run, the difference is added to the setup
    as `overheads.reply_s`, and the run is simulated again. Raises `ConfigError` if the run has too
    few steps in which its queue of finished groups was full.
    """
    steady = run.steady
    if len(steady) < MIN_STEPS:
        raise ConfigError(
            f"{run.name} has {len(steady)} steps after its queue was full, without those of "
            f"evaluations; a comparison with its simulation needs {MIN_STEPS}"
        )
    steps = run.config.schedule.max_staleness + 1 + min(MAX_STEPS, len(steady))
    result = setup.simulate(steps, seed)
    missing_s = _generation_s(run) - result.engine_share * result.episode_s
    turns = fmean(len(shape.turns) for siblings in run.groups for shape in siblings)
    if missing_s > 0:
        overheads = replace(setup.overheads, reply_s=missing_s / turns)
        setup = replace(setup, overheads=overheads)
        result = setup.simulate(steps, seed)
    return setup, result, compare(run, result)


def _generation_s(run: RecordedRun) -> float:
    """Return the mean seconds for which an episode of the run waited for replies."""
    waited = sum(each["rollout/generation_wait_s"] for each in run.steady)
    return waited / sum(each["rollout/episodes"] for each in run.steady)


def compare(run: RecordedRun, result: SimulationResult) -> OwnRun:
    """Return the figures of a run beside those that `result`, its simulation, predicts."""
    steady = run.steady
    step_s = fmean(each.seconds for each in steady)
    engines = recorded_fleet(run.config).engines

    def mean(name: str) -> float:
        return fmean(each[name] for each in steady)

    simulated = len(result.steady_s)
    figures = (
        Compared("seconds per step", step_s, result.mean_step_s, "s"),
        Compared("engines busy", mean("engine/busy_s") / step_s, result.engine_busy_share, "share"),
        Compared(
            "trainer trains",
            mean("trainer/update_s") / step_s,
            result.waiting.work.get("Training", 0.0),
            "share",
        ),
        Compared(
            "trainer scores",
            mean("old_logps/prepare_s") / step_s,
            result.old_logps_share,
            "share",
        ),
        Compared(
            "trainer waits for groups",
            mean("schedule/wait_for_batch_s") / step_s,
            result.trainer_wait_share,
            "share",
        ),
        Compared(
            "tokens sampled a step", mean("engine/sampled_tokens"), result.work.sampled / simulated
        ),
        Compared(
            "context tokens a step",
            mean("engine/prefill_tokens"),
            result.work.prefilled / simulated,
        ),
        Compared(DECODING, mean("engine/steps"), result.work.steps / simulated),
        Compared(
            "tokens trained a step",
            fmean(each.tokens for each in steady),
            result.trained_tokens / simulated,
        ),
    )
    return OwnRun(
        name=run.name,
        figures=figures,
        steps=len(steady),
        left_out=sum(each.evaluation for each in run.steps),
        run=waiting(_rows(run, engines)),
        simulated=result.waiting,
    )


def _rows(run: RecordedRun, engines: int) -> list[Mapping[str, float]]:
    """Return the metrics of the compared steps. Their `time_s` does not include other steps."""
    time = 0.0
    rows: list[Mapping[str, float]] = [{"time_s": time}]
    for each in run.steady:
        time += each.seconds
        rows.append(
            {
                **each.metrics,
                "time_s": time,
                "engine/busy_share": each["engine/busy_s"] / each.seconds,
                "publish/duration_s": each.publish + each.stage + each.load,
                "checkpoint/duration_s": each.checkpoint,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a step, such as training, whose duration was fitted to recorded steps."""

    title: str
    fit: Fit
    work: Mapping[str, float]
    """Name of a coefficient of `fit` -> the amount of its work in a simulated step."""
    servers: int
    """Number of engines that divide the work. 1 for the trainer."""
    remedy: str


def open_questions(
    runs: Sequence[RecordedRun],
    fitted: FittedCosts,
    setup: SimulationSetup,
    result: SimulationResult,
    given: Collection[str],
) -> list[str]:
    """Return reasons why the recorded steps do not suffice to predict other settings.

    `result` is the simulation of these settings, described by `setup`. `given` are the names of the
    costs that the user has set. The list is empty if the simulation can be trusted.
    """
    found = []
    for part in _parts(fitted, setup, result):
        half_s = part.fit.half_width(part.work, given) / part.servers
        if half_s > OPEN * result.mean_step_s:
            names = [name for name in part.work if name not in given]
            found.append(
                f"{part.title} is not identified: with this work the recorded steps leave it open "
                f"by {_open(half_s, result.mean_step_s)} "
                f"(limit {OPEN:.0%} of a step). {_spread(part, runs)} {part.remedy}, or --set "
                + " ".join(f"costs.{name}=SECONDS" for name in names)
            )
    return [
        *found,
        *_shared_cores(runs[0], setup, given),
        *_trainer_cores(runs[0], setup, given),
    ]


def _open(half_s: float, step_s: float) -> str:
    share = half_s / step_s
    return f"{share:.0%} of a step" if share < 10 else "more than ten steps"


def _parts(
    fitted: FittedCosts, setup: SimulationSetup, result: SimulationResult
) -> tuple[_Part, ...]:
    steps = len(result.steady_s)
    tokens = result.trained_tokens / steps
    return (
        _Part(
            "the engines' time per step",
            fitted.engine,
            {
                "decode": result.work.steps / steps,
                "decode_reply": result.work.sampled / steps,
                "prefill_token": result.work.prefilled / steps,
            },
            setup.fleet.engines,
            "Give a second run with another number of live episodes (schedule.groups_per_step or "
            "schedule.group_size): --like A --like B",
        ),
        _Part(
            "the time of training",
            fitted.train,
            {"train": 1.0, "train_token": tokens},
            1,
            "Give a second run with another schedule.groups_per_step: --like A --like B",
        ),
        _Part(
            "the time of old log-probabilities",
            fitted.old,
            {
                "old": 1.0,
                "old_token": tokens,
                "old_version_token": tokens * max(0.0, result.versions_mean - 1),
            },
            1,
            "Give a second run with another schedule.groups_per_step and schedule.max_staleness: "
            "--like A --like B",
        ),
    )


def _spread(part: _Part, runs: Sequence[RecordedRun]) -> str:
    """Return sentences on how far a part's amount of work differs between the recorded steps."""
    steps = [each for run in runs for each in run.steps]
    if "decode" in part.work:
        replies = [each["engine/batch_size_mean"] for each in steps]
        simulated = part.work["decode_reply"] / max(1.0, part.work["decode"])
        return (
            f"The recorded decoding steps have {min(replies):.3g} to {max(replies):.3g} replies, "
            f"the simulated ones {simulated:.3g}."
        )
    sizes = [each.tokens for each in steps]
    simulated = part.work.get("train_token", part.work.get("old_token", 0.0))
    text = (
        f"The recorded batches have {min(sizes):,.0f} to {max(sizes):,.0f} tokens, the simulated "
        f"ones {simulated:,.0f}"
    )
    if min(sizes) > 0.8 * max(sizes):
        text += "; so seconds per token and per batch cannot be told apart"
    return text + "."


def _shared_cores(run: RecordedRun, setup: SimulationSetup, given: Collection[str]) -> list[str]:
    """Return the objection that the simulated engines need more cores than the recorded machine
    has.

    The list is empty if they do not.
    """
    engine = run.config.engine
    before = recorded_fleet(run.config).engines
    needed = engine.threads * setup.fleet.engines + max(1, run.config.trainer.threads)
    is_local = engine.backend == "embedded" and not run.config.cluster.engine_hosts
    names = ("decode", "decode_reply", "prefill_token")
    if not is_local or setup.fleet.engines <= before or all(name in given for name in names):
        return []
    if not run.cores or needed <= run.cores:
        return []
    return [
        f"fleet.engines={setup.fleet.engines} is not identified: engines and trainer need {needed} "
        f"cores, and {run.name} was recorded with {run.cores}. How much they slow each other down "
        f"is not known. Record a run with engine.processes={setup.fleet.engines}, or --set "
        + " ".join(f"costs.{name}=SECONDS" for name in names)
    ]


def _trainer_cores(run: RecordedRun, setup: SimulationSetup, given: Collection[str]) -> list[str]:
    """Return an objection if a change of `max_staleness` changes the number of cores of the
    trainer.

    The list is empty if it does not.
    """
    wanted = setup.schedule.max_staleness
    names = ("train", "train_token")
    if not run.cores or all(name in given for name in names):
        return []
    fewest, most = (
        trainer_threads(run.config, with_engine_cores=idle, num_cores=run.cores)
        for idle in (False, True)
    )
    if wanted == run.config.schedule.max_staleness or most <= (1 + OPEN) * fewest:
        return []
    return [
        f"the time of training is not identified for schedule.max_staleness={wanted}: the trainer "
        f"of {run.name} had {fewest} of {run.cores} cores while episodes ran, and {most} while "
        "none ran. How long it has which number depends on the bound. Record a run with "
        f"--trainer.threads {fewest}, or --set "
        + " ".join(f"costs.{name}=SECONDS" for name in names)
    ]


def require_alike(runs: Sequence[RecordedRun]) -> None:
    """Raise `ConfigError` if the durations of these runs cannot be fitted together.

    The runs must have the same number of cores, and equal values of the options in `_SAME`.
    """
    first = runs[0]
    for other in runs[1:]:
        for name in _SAME:
            section, _, option = name.rpartition(".")
            one, two = (
                getattr(getattr(run.config, section) if section else run.config, option)
                for run in (first, other)
            )
            if one != two:
                raise ConfigError(
                    f"--like: runs must have the same {name}, got {one!r} in {first.name} and "
                    f"{two!r} in {other.name}"
                )
        if first.cores != other.cores:
            raise ConfigError(
                f"--like: runs must be of the same machine, got {first.cores} cores in "
                f"{first.name} and {other.cores} in {other.name}"
            )


_SAME = (
    "model",
    "engine.backend",
    "engine.dtype",
    "engine.threads",
    "engine.processes",
    "trainer.dtype",
    "trainer.threads",
    "trainer.gradient_checkpointing",
    "trainer.lora_rank",
    "old_logps.route",
)
"""Options that change durations, which must be equal in all runs of `unstale simulate --like`."""
