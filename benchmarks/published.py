"""Published speedups of asynchronous over synchronous training, and simulations of their settings.

The costs of every row come from `planner.analytic` with its default shares. They are calibrated by
what was published:

* Phases of the synchronous step: its training and scoring times replace the computed ones. If its
  generation takes longer than computed, every decoding step is lengthened by the same time.
* Only the whole synchronous step: the mean reply length is chosen so that the simulated step takes
  as long.
* The training time of the asynchronous step: it replaces the computed one. The simulation then only
  decides whether generation keeps up. `trained_alone` is the ratio without any simulation.

A ratio that depends on unpublished settings is simulated, but not counted as a prediction
(`unclaimed`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from unstale.analysis.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.analysis.planner.hardware import DEVICES, Device, Shares
from unstale.analysis.planner.models import PRESETS, Model
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.simulate import (
    Constant,
    Fleet,
    LogNormal,
    SimulationResult,
    Workload,
    simulate,
)
from unstale.analysis.planner.workload import EpisodeStats, mean_attended
from unstale.config import ScheduleConfig

SIGMA = 0.9
"""Standard deviation of the logarithm of reply lengths. Assumed."""
PROMPT = 200
"""Tokens of a prompt. Assumed."""
ANSWER = 200
"""Tokens of a tool's answer. Assumed."""
MAX_RUNNING = 1024
"""Running replies of an engine: vLLM's default. Memory limits them further."""

QWEN_1_5B = Model(
    layers=28, hidden=1536, ffn=8960, heads=12, kv_heads=2, tied=True, qk_norm=False, qkv_bias=True
)
QWEN_7B = Model(
    layers=28,
    hidden=3584,
    ffn=18944,
    heads=28,
    kv_heads=4,
    vocab=152064,
    qk_norm=False,
    qkv_bias=True,
)
LLAMA_8B = Model(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, qk_norm=False
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published comparison."""

    name: str
    source: str
    """The publication, and its absolute figures."""
    published: tuple[float, float]
    """Lowest and highest published speedup, as a ratio of step times unless `source` differs."""
    model: Model
    device: Device
    gpus: int
    """GPUs of the synchronous run, each of which trains and samples."""
    engine_gpus: int
    """Sampling GPUs of the asynchronous run."""
    trainer_gpus: int
    """Training GPUs of the asynchronous run."""
    tensor: int = 1
    """GPUs of one engine."""
    scale: int = 1
    """Divisor of groups and GPUs, to make the simulation smaller."""
    groups: int
    group_size: int
    max_tokens: int
    """Maximum tokens of a reply."""
    mean: float = 0.0
    """Published mean tokens of an episode's replies. 0 derives it from a published time."""
    turns: float = 1.0
    tool_s: float = 0.0
    staleness: float
    """Batches in flight, in addition to the one that is trained on."""
    sync_s: tuple[float, float, float] | None = None
    """Published seconds of generation, scoring and training in the synchronous step."""
    sync_step_s: float = 0.0
    """Published seconds of the whole synchronous step, if its phases are not published."""
    async_train_s: float = 0.0
    """Published seconds of training in the asynchronous step."""
    reference_s: tuple[float, float] = (0.0, 0.0)
    """Published seconds of the reference model in the synchronous and the asynchronous step."""
    load_s: float = 0.0
    """Published seconds for engines to load a version."""
    parts: int = 1
    """Parts of a version's batch; the trainer starts with each part when it is complete."""
    partial: bool = False
    """Partial rollout instead of asynchronous training: engines and trainer share their GPUs, and
    more episodes are started than a batch needs."""
    scored: bool = True
    """The asynchronous run computes old log-probabilities."""
    gradient_checkpointing: bool = False
    assumed: str
    """The unpublished settings, for the table."""
    unclaimed: str = ""
    """The reason why the ratio does not count as a prediction; empty if it does."""

    @property
    def given(self) -> str:
        """The published results that calibrate the simulation, in words."""
        found = {
            "phases of the synchronous step": self.sync_s,
            "the synchronous step": self.sync_step_s,
            "training of the asynchronous step": self.async_train_s,
            "both reference passes": any(self.reference_s),
            "loading": self.load_s,
        }
        return ", ".join(name for name, value in found.items() if value) or "nothing"

    @property
    def trained_alone(self) -> float:
        """The speedup if the asynchronous step were only its training; 0 if that is unpublished."""
        whole = sum(self.sync_s or (self.sync_step_s,)) + self.reference_s[0]
        return whole / (self.async_train_s + self.reference_s[1]) if self.async_train_s else 0.0

    @property
    def episodes(self) -> int:
        return self.groups // self.scale * self.group_size

    @property
    def answers(self) -> float:
        """Tokens of an episode that the policy does not sample."""
        return PROMPT + ANSWER * (self.turns - 1)

    @property
    def tokens(self) -> float:
        """Mean tokens of an episode's replies."""
        return self.mean or _derived_tokens(self)


@cache
def _derived_tokens(row: Row) -> float:
    """Return the mean tokens with which the synchronous step, or its training, takes its published
    time.
    """

    def train_s(mean: float) -> float:
        costs = priced(replace(row, mean=max(1.0, mean), sync_s=None), row.gpus)
        return costs.train_s(round(costs.batch))

    def step_s(mean: float) -> float:
        return synchronous(replace(row, mean=max(1.0, mean)), 3)[0].mean_step_s

    wanted, seconds = (row.sync_s[2], train_s) if row.sync_s else (row.sync_step_s, step_s)
    return _solve(wanted, seconds, row.max_tokens / 8, row.max_tokens / 4)


def _solve(wanted: float, function: Callable[[float], float], first: float, second: float) -> float:
    """Return where an increasing function has the wanted value, within 2%.

    0 if it is larger everywhere. The search starts with `first` and `second`.
    """
    known = {each: function(each) for each in (first, second)}
    for _ in range(8):
        nearest = min(known, key=lambda each: abs(known[each] - wanted))
        if abs(known[nearest] - wanted) < wanted / 50 or not nearest:
            break
        below = [each for each in known if known[each] <= wanted]
        above = [each for each in known if known[each] > wanted]
        if below and above:
            low, high = max(below), min(above)
        elif above:
            low, high = sorted(known)[:2]
        else:
            high, low = sorted(known)[-2:]
        tried = max(0.0, low + (wanted - known[low]) * (high - low) / (known[high] - known[low]))
        known[tried] = function(tried)
    return min(known, key=lambda each: abs(known[each] - wanted))


@dataclass(frozen=True, kw_only=True)
class Priced(AnalyticCosts):
    """`AnalyticCosts`, corrected by published times."""

    step_more_s: float = 0.0
    """Seconds added to a decoding step."""
    trained: float = 1.0
    """Factor of the training time."""
    scored: float = 1.0
    """Factor of the scoring time."""
    loaded_s: float = 0.0
    """Seconds to load a version; 0 keeps the computed time."""

    def step_s(self, replies: int, context: int) -> float:
        return super().step_s(replies, context) + self.step_more_s

    def train_s(self, tokens: int) -> float:
        return self.trained * super().train_s(tokens)

    def old_logps_s(self, tokens: int, versions: float) -> float:
        return self.scored * super().old_logps_s(tokens, versions)

    def load_s(self) -> float:
        return self.loaded_s or super().load_s()


def priced(row: Row, trainer_gpus: int, *, scored: bool = True) -> Priced:
    """Return the costs before they are corrected by published phases."""
    episode = row.tokens + row.answers
    drawn = LogNormal.capped(min(row.tokens, 0.99 * row.max_tokens), SIGMA, row.max_tokens).draw(
        np.random.default_rng(0), 10_000
    )
    lengths = drawn + row.answers
    setup = TrainingSetup(
        model=row.model,
        device=row.device,
        shares=Shares(),
        lr=1e-6,
        gradient_checkpointing=row.gradient_checkpointing,
        episodes=EpisodeStats(
            tokens=episode,
            attended=mean_attended(lengths.tolist()),
            longest=row.max_tokens,
            prompt=PROMPT,
        ),
    )
    return Priced(
        setup=setup,
        placement=Placement(
            trainer_gpus // row.scale,
            max(1, row.engine_gpus // row.tensor // row.scale),
            row.tensor,
        ),
        route=route_cost("current_recompute" if scored else "rollout"),
        batch=row.episodes * episode,
        live=2,
        loaded_s=row.load_s,
    )


def workload(row: Row) -> Workload:
    return Workload(
        prompt_tokens=Constant(PROMPT),
        turns=LogNormal.capped(row.turns, 0.5, 16) if row.turns > 1 else Constant(1),
        reply_tokens=LogNormal.capped(row.tokens / row.turns, SIGMA, row.max_tokens / row.turns),
        tool_tokens=Constant(ANSWER if row.turns > 1 else 0),
        tool_s=LogNormal(row.tool_s, 1.0),
        max_tokens=row.max_tokens + PROMPT,
    )


def fleet(row: Row, gpus: int, *, colocated: bool = False) -> Fleet:
    return Fleet(
        engines=gpus // row.tensor // row.scale,
        max_running=MAX_RUNNING,
        cache_tokens=int(priced(row, row.gpus).setup.context_tokens(row.tensor)),
        colocated=colocated,
    )


def schedule(row: Row, staleness: float, parts: int = 1) -> ScheduleConfig:
    """Return a schedule with so wide a window that finished groups are taken in any order."""
    groups = row.groups // row.scale // parts
    batches = round((staleness + 1) * parts)
    return ScheduleConfig(
        max_staleness=batches - 1,
        groups_per_step=groups,
        group_size=row.group_size,
        lookahead_window=batches * groups,
    )


@cache
def synchronous(row: Row, steps: int) -> tuple[SimulationResult, float]:
    """Simulate the synchronous run.

    Also return the seconds that a decoding step takes longer than computed.
    """
    costs = priced(row, row.gpus)
    setup = workload(row), fleet(row, row.gpus), schedule(row, 0)
    if row.sync_s:
        generation_s, scoring_s, training_s = row.sync_s
        batch = round(costs.batch)
        training_s += row.reference_s[0]
        costs = replace(
            costs,
            trained=training_s / costs.train_s(batch),
            scored=scoring_s / costs.old_logps_s(batch, 1.0),
        )

        def generated_s(more: float) -> float:
            return generation_s_of(simulate(*setup, replace(costs, step_more_s=more), steps=3))

        costs = replace(costs, step_more_s=_solve(generation_s, generated_s, 0.0, 0.005))
    return simulate(*setup, costs, steps=max(3, steps)), costs.step_more_s


def asynchronous(row: Row, turnovers: int) -> SimulationResult:
    """Simulate the asynchronous run for `turnovers` replacements of all episodes in flight."""
    costs = priced(row, row.trainer_gpus, scored=row.scored)
    if row.async_train_s:
        part = costs.train_s(round(costs.batch / row.parts))
        trained = (row.async_train_s + row.reference_s[1]) / (row.parts * part)
        costs = replace(costs, trained=trained)
    costs = replace(costs, step_more_s=synchronous(row, 3)[1])
    steps = round((row.staleness + 1) * (turnovers + 1) + 2) * row.parts
    at = replace(fleet(row, row.engine_gpus, colocated=row.partial), steps_per_version=row.parts)
    return simulate(workload(row), at, schedule(row, row.staleness, row.parts), costs, steps=steps)


def generation_s_of(outcome: SimulationResult) -> float:
    """Return the seconds of a step in which the trainer does not work."""
    return outcome.mean_step_s * (1 - outcome.trainer_busy_share)


VERL = "verl, docs/advance/fully_async.md"
_VERL_7B = Row(
    name="verl 7B, 128 GPUs",
    source=f"{VERL}: H20, Qwen2.5-Math-7B, 28k tokens, 512 x 16; 356.30 s against 150.63 s "
    "(2.35 to 2.67 of total time)",
    published=(356.30 / 150.63, 356.30 / 150.63),
    model=QWEN_7B,
    device=DEVICES["H20"],
    gpus=128,
    engine_gpus=64,
    trainer_gpus=64,
    tensor=4,
    scale=8,
    groups=512,
    group_size=16,
    max_tokens=28_672,
    staleness=0.5,
    parts=4,
    sync_s=(177.85, 53.92, 113.81),
    async_train_s=113.16,
    load_s=0.12,
    scored=False,
    assumed="mean length, from the synchronous training time at 40% of the peak",
)


_AREAL = Row(
    name="AReaL 1.5B",
    source="arXiv 2505.24298; AReaL, blog/AReaL_v0_3.md: 16 nodes, "
    "1,000 steps in 41.0 h and 14.8 h",
    published=(2.77, 2.77),
    model=QWEN_1_5B,
    device=DEVICES["H800"],
    gpus=128,
    engine_gpus=96,
    trainer_gpus=32,
    groups=512,
    group_size=16,
    max_tokens=27_648,
    sync_step_s=41.0 * 3.6,
    staleness=8,
    scale=16,
    assumed="mean length, from the time of the synchronous step; eight GPUs a node, "
    "three quarters engines; 512 prompts a step; staleness 8",
    unclaimed="lengths are not published. Such as fill the synchronous step (147.6 s) "
    "are not trained in the 53.3 s of the asynchronous one below 74% of the peak: "
    "the former has costs that no published setup gives. "
    "With 2,500 to 6,900 tokens in the mean the ratio is 2.25 to 1.63",
)
ROWS = (
    _AREAL,
    replace(
        _AREAL,
        name="AReaL 7B",
        source="the same: 24 nodes, 57.7 h and 25.4 h",
        published=(2.27, 2.27),
        model=QWEN_7B,
        gpus=192,
        engine_gpus=144,
        trainer_gpus=48,
        sync_step_s=57.7 * 3.6,
        assumed="as above",
        unclaimed="",
    ),
    _VERL_7B,
    replace(
        _VERL_7B,
        name="verl 7B, 64 GPUs",
        gpus=64,
        engine_gpus=32,
        trainer_gpus=32,
        source=f"{VERL}: 365.28 s against 189.26 s",
        published=(365.28 / 189.26, 365.28 / 189.26),
        sync_s=(150.72, 70.26, 133.41),
        async_train_s=156.98,
        assumed="as above",
    ),
    replace(
        _VERL_7B,
        name="verl 7B, 32 GPUs",
        gpus=32,
        engine_gpus=16,
        trainer_gpus=16,
        scale=4,
        source=f"{VERL}: 790.10 s against 294.77 s, 1.70 to 2.66 of total time. "
        "Its two training times are taken the other way round, as the sums of the phases have them",
        published=(790.10 / 294.77, 790.10 / 294.77),
        sync_s=(357.41, 107.71, 313.81),
        async_train_s=269.80,
        assumed="as above",
    ),
    replace(
        _VERL_7B,
        name="verl 7B, 128 GPUs, staleness 0",
        staleness=0,
        source=f"{VERL}: 356.30 s against 231.34 s",
        published=(356.30 / 231.34, 356.30 / 231.34),
        async_train_s=98.77,
        assumed="as above, and nothing more in flight",
    ),
    replace(
        _VERL_7B,
        name="verl 30B-A3B, 128 GPUs",
        source=f"{VERL} and its recipes: H20, Qwen3-30B-A3B, 8k tokens, 512 x 16, "
        "96:32 (1.72 to 2.01 of total time)",
        published=(1.76, 1.76),
        model=PRESETS["30B-A3B"],
        engine_gpus=96,
        trainer_gpus=32,
        max_tokens=8_192,
        sync_s=(348.05, 28.73, 86.27),
        async_train_s=206.63,
        reference_s=(20.86, 50.05),
        load_s=15.76,
        assumed="as above",
    ),
    replace(
        _VERL_7B,
        name="verl 7B with tools, 32 GPUs",
        source=f"{VERL} and its recipes: H20, Qwen2.5-7B, at most 16 turns, "
        "64 x 16 (1.55 to 1.60 of total time)",
        published=(1.70, 1.70),
        gpus=32,
        engine_gpus=16,
        trainer_gpus=16,
        scale=1,
        groups=64,
        max_tokens=16_384,
        turns=5,
        tool_s=2.0,
        staleness=1,
        sync_s=(228.03, 35.19, 111.84),
        async_train_s=179.58,
        assumed="as above; 5 turns and 2 s a tool call",
        unclaimed="turns and the seconds of a tool are not published: "
        "with 3 to 8 turns of 2 to 10 s the ratio is 1.9 to 3.1. That its trainer waits 41 s "
        "of a step with a batch in hand follows from no published setup",
    ),
    Row(
        name="NeMo RL 8B, 16 GPUs",
        source="NeMo RL, docs/about/performance-summary.md (v0.4): H100, Llama 3.1 8B, "
        "mean 1,060 of 4,096 tokens, 2,048 samples; tokens a second and GPU "
        "(steps: 97.7 s against 74.6 s)",
        published=(97.7 / 74.6, 1.38),
        model=LLAMA_8B,
        device=DEVICES["H100"],
        gpus=16,
        engine_gpus=8,
        trainer_gpus=8,
        groups=64,
        group_size=32,
        max_tokens=4_096,
        mean=1_060,
        staleness=1,
        gradient_checkpointing=True,
        assumed="nothing of the settings, which are those of the recipes of the same names; "
        "no reference model",
    ),
)
NOT_SIMULATED = (
    "Of the same page as NeMo RL's 8B row, 30B (0.93), 32B (0.91) and 235B (1.14) are not "
    "simulated: how their GPUs are split and sharded would be assumed. Of verl's ablation, "
    "staleness 0.1 and 0.3 (171.30 and 146.11 s) are left out: they are no whole parts of a batch."
)
APRIL = Row(
    name="APRIL 4B, 8 GPUs",
    source="arXiv 2509.18521: rollout throughput, mean and largest gain",
    published=(1.225, 1.44),
    model=PRESETS["4B"],
    device=DEVICES["H100"],
    gpus=8,
    engine_gpus=8,
    trainer_gpus=8,
    tensor=2,
    groups=32,
    group_size=8,
    max_tokens=16_384,
    mean=8_192,
    staleness=1,
    partial=True,
    gradient_checkpointing=True,
    assumed="H100s, and half of the longest in the mean; model, 32 prompts of 8 samples, "
    "16k tokens, engines of 2 and twice as many begun as are needed are its scripts'",
    unclaimed="lengths are not published, and decide: "
    "with 4,096 to 12,288 tokens in the mean the ratio is 1.8 to 1.2",
)


@dataclass(frozen=True)
class Compared:
    """A published ratio, the simulated one, and the simulated synchronous run."""

    row: Row
    ratio: float
    sync: SimulationResult
    tokens: float
    """Mean tokens of an episode's replies."""

    @property
    def deviation(self) -> float:
        """Relative deviation from the nearer end of the published range; 0 inside it."""
        low, high = self.row.published
        return min(0.0, self.ratio / low - 1) or max(0.0, self.ratio / high - 1)


def compare(
    rows: Sequence[Row], turnovers: int, pool: Executor, on_progress: Callable[[str], None]
) -> Iterator[Compared]:
    """Yield the ratio of groups a second of both runs; for a partial rollout, of its generation.

    The rows are simulated in the processes of `pool`.
    """
    for one in pool.map(partial(_compare, turnovers=turnovers), rows):
        row = one.row
        on_progress(f"{row.name}: {row.published[0]:.2f} published, {one.ratio:.2f} simulated")
        yield one


def _compare(row: Row, turnovers: int) -> Compared:
    sync, _ = synchronous(row, 3)
    other = asynchronous(row, turnovers)
    ratio = other.groups_per_s / sync.groups_per_s
    if row.partial:
        ratio = generation_s_of(sync) / generation_s_of(other)
    return Compared(row, ratio, sync, row.tokens)
