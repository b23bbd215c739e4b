"""Asynchronous over synchronous, as others published it, and what the simulation makes of their
settings.

Every row is priced by `plan.analytic` with one set of shares, the defaults. Published times of a
synchronous run's phases are taken as they are: its training and scoring, and what its generation
takes longer than is computed as so much more a decoding step. Where only all of its step is
published, the mean length is the one that takes as long. Where the training time of the
asynchronous step is published, it is taken too: what is simulated is then whether generation keeps
up and what waits for what, and `trained_alone` is the ratio that would need no simulation. A ratio
that hangs on what nobody published is simulated and not claimed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from unstale.config import ScheduleConfig
from unstale.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.planner.hardware import DEVICES, Device, Shares
from unstale.planner.models import PRESETS, Model
from unstale.planner.route_costs import route_cost
from unstale.planner.simulate import (
    Constant,
    Fleet,
    LogNormal,
    SimulationResult,
    Workload,
    simulate,
)
from unstale.planner.workload import EpisodeStats, mean_attended

SIGMA = 0.9
"""Of the log-normal lengths: assumed, as their mean is where neither it nor the time of training is
published."""
PROMPT, ANSWER = 200, 200
"""Tokens of a prompt, and of a tool's answer: assumed."""
MAX_RUNNING = 1024
"""Replies of an engine at most: vLLM's default. What they hold is bounded by the memory."""

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
    published: tuple[float, float]
    """The ratio of steps, or of what is said in `source`; or the range of it."""
    model: Model
    device: Device
    gpus: int
    """Of the synchronous run, which all do everything."""
    engine_gpus: int
    """Of the asynchronous run, and those that train."""
    trainer_gpus: int
    tensor: int = 1
    """GPUs of an engine."""
    scale: int = 1
    """Groups and GPUs are divided by it."""
    groups: int
    group_size: int
    most: int
    """Tokens of a reply at most."""
    mean: float = 0.0
    """In the mean; 0: what the synchronous run's training or all of its step takes at the assumed
    shares."""
    turns: float = 1.0
    tool_s: float = 0.0
    staleness: float
    """Batches that are in flight beyond the one that is trained on."""
    sync_s: tuple[float, float, float] | None = None
    """Generation, old log-probabilities and training of the synchronous step, where they are
    published."""
    sync_step_s: float = 0.0
    """All of the synchronous step, where no more is published."""
    async_train_s: float = 0.0
    """Training of the asynchronous step, where it is published."""
    reference_s: tuple[float, float] = (0.0, 0.0)
    """Of both, the reference model's pass."""
    load_s: float = 0.0
    """Of a version, where it is published."""
    parts: int = 1
    """Of a version's batch: the trainer begins with each as it comes."""
    partial: bool = False
    """It is no asynchronous run: engines and trainer share their GPUs, and more episodes are begun
    than are needed."""
    scored: bool = True
    """Whether the asynchronous run computes old log-probabilities."""
    gradient_checkpointing: bool = False
    """Activations, in the backward pass."""
    assumed: str
    unclaimed: str = ""
    """Why it is not claimed to be reproduced."""

    @property
    def given(self) -> str:
        """What of the published results goes in."""
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
        """The ratio if the asynchronous step were its training and nothing else; 0 where that is
        not published."""
        whole = sum(self.sync_s or (self.sync_step_s,)) + self.reference_s[0]
        return whole / (self.async_train_s + self.reference_s[1]) if self.async_train_s else 0.0

    @property
    def episodes(self) -> int:
        return self.groups // self.scale * self.group_size

    @property
    def answers(self) -> float:
        """Tokens that an episode does not sample."""
        return PROMPT + ANSWER * (self.turns - 1)

    @property
    def tokens(self) -> float:
        """Mean tokens of an episode's replies."""
        return self.mean or _tokens(self)


@cache
def _tokens(row: Row) -> float:
    if row.sync_s:
        phases, mean = row.sync_s, row.most / 4
        for _ in range(30):
            free = priced(replace(row, mean=mean, sync_s=None), row.gpus)
            mean = phases[2] / free.train_s(row.episodes) - row.answers
        return mean

    def step_s(mean: float) -> float:
        return synchronous(replace(row, mean=mean), 3)[0].mean_step_s

    return _meeting(row.sync_step_s, step_s, row.most / 8, row.most / 4)


def _meeting(wanted: float, of: Callable[[float], float], first: float, second: float) -> float:
    """Where `of`, which grows, comes to what is wanted, within a fiftieth; or 0, if it is beyond
    that everywhere."""
    known = {each: of(each) for each in (first, second)}
    for _ in range(8):
        nearest = min(known, key=lambda each: abs(known[each] - wanted))
        if abs(known[nearest] - wanted) < wanted / 50 or not nearest:
            break
        below = [each for each in known if known[each] <= wanted]
        above = [each for each in known if known[each] > wanted]
        low, high = (
            (max(below), min(above))
            if below and above
            else sorted(known)[:: 1 if above else -1][:2]
        )
        tried = max(0.0, low + (wanted - known[low]) * (high - low) / (known[high] - known[low]))
        known[tried] = of(tried)
    return min(known, key=lambda each: abs(known[each] - wanted))


@dataclass(frozen=True, kw_only=True)
class Priced(AnalyticCosts):
    """`AnalyticCosts`, and what is known better."""

    step_more_s: float = 0.0
    trained: float = 1.0
    scored: float = 1.0
    loaded_s: float = 0.0

    def step_s(self, replies: int, context: int) -> float:
        return super().step_s(replies, context) + self.step_more_s

    def train_s(self, tokens: int) -> float:
        return self.trained * super().train_s(tokens)

    def old_logps_s(self, tokens: int, versions: float) -> float:
        return self.scored * super().old_logps_s(tokens, versions)

    def load_s(self) -> float:
        return self.loaded_s or super().load_s()


def priced(row: Row, trainer_gpus: int, *, scored: bool = True) -> Priced:
    """Without what is published of its phases."""
    episode = row.tokens + row.answers
    drawn = LogNormal.capped(min(row.tokens, 0.99 * row.most), SIGMA, row.most).draw(
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
            longest=row.most,
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
        reply_tokens=LogNormal.capped(row.tokens / row.turns, SIGMA, row.most / row.turns),
        tool_tokens=Constant(ANSWER if row.turns > 1 else 0),
        tool_s=LogNormal(row.tool_s, 1.0),
        max_tokens=row.most + PROMPT,
    )


def fleet(row: Row, gpus: int, *, colocated: bool = False) -> Fleet:
    room = int(priced(row, row.gpus).setup.context_tokens(row.tensor))
    engines = gpus // row.tensor // row.scale
    return Fleet(engines=engines, max_running=MAX_RUNNING, cache_tokens=room, colocated=colocated)


def schedule(row: Row, staleness: float, parts: int = 1) -> ScheduleConfig:
    """Whatever is finished is taken."""
    groups, lives = row.groups // row.scale // parts, round((staleness + 1) * parts)
    sizes = {
        "groups_per_step": groups,
        "group_size": row.group_size,
        "lookahead_window": lives * groups,
    }
    return ScheduleConfig(max_staleness=lives - 1, **sizes)


@cache
def synchronous(row: Row, steps: int) -> tuple[SimulationResult, float]:
    """And what a decoding step takes longer than is computed."""
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

        costs = replace(costs, step_more_s=_meeting(generation_s, generated_s, 0.0, 0.005))
    return simulate(*setup, costs, steps=max(3, steps)), costs.step_more_s


def asynchronous(row: Row, turnovers: int) -> SimulationResult:
    """For so many times that all episodes in flight are others."""
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
    """Of a step, what is not the trainer's."""
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
    most=28_672,
    staleness=0.5,
    parts=4,
    sync_s=(177.85, 53.92, 113.81),
    async_train_s=113.16,
    load_s=0.12,
    scored=False,
    assumed="mean length, from the synchronous training time at 40% of the peak",
)


ROWS = (
    Row(
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
        most=27_648,
        sync_step_s=41.0 * 3.6,
        staleness=8,
        scale=16,
        assumed="mean length, from the time of the synchronous step; eight GPUs a node, "
        "three quarters engines; 512 prompts a step; staleness 8",
        unclaimed="lengths are not published. Such as fill the synchronous step (147.6 s) "
        "are not trained in the 53.3 s of the asynchronous one below 74% of the peak: "
        "the former has costs that no published setup gives. "
        "With 2,500 to 6,900 tokens in the mean the ratio is 2.25 to 1.63",
    ),
    Row(
        name="AReaL 7B",
        source="the same: 24 nodes, 57.7 h and 25.4 h",
        published=(2.27, 2.27),
        model=QWEN_7B,
        device=DEVICES["H800"],
        gpus=192,
        engine_gpus=144,
        trainer_gpus=48,
        groups=512,
        group_size=16,
        most=27_648,
        sync_step_s=57.7 * 3.6,
        staleness=8,
        scale=16,
        assumed="as above",
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
    Row(
        name="verl 30B-A3B, 128 GPUs",
        source=f"{VERL} and its recipes: H20, Qwen3-30B-A3B, 8k tokens, 512 x 16, "
        "96:32 (1.72 to 2.01 of total time)",
        published=(1.76, 1.76),
        model=PRESETS["30B-A3B"],
        device=DEVICES["H20"],
        gpus=128,
        engine_gpus=96,
        trainer_gpus=32,
        tensor=4,
        scale=8,
        groups=512,
        group_size=16,
        most=8_192,
        staleness=0.5,
        parts=4,
        sync_s=(348.05, 28.73, 86.27),
        async_train_s=206.63,
        reference_s=(20.86, 50.05),
        load_s=15.76,
        scored=False,
        assumed="as above",
    ),
    Row(
        name="verl 7B with tools, 32 GPUs",
        source=f"{VERL} and its recipes: H20, Qwen2.5-7B, at most 16 turns, "
        "64 x 16 (1.55 to 1.60 of total time)",
        published=(1.70, 1.70),
        model=QWEN_7B,
        device=DEVICES["H20"],
        gpus=32,
        engine_gpus=16,
        trainer_gpus=16,
        tensor=4,
        groups=64,
        group_size=16,
        most=16_384,
        turns=5,
        tool_s=2.0,
        staleness=1,
        parts=4,
        sync_s=(228.03, 35.19, 111.84),
        async_train_s=179.58,
        load_s=0.12,
        scored=False,
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
        most=4_096,
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
    most=16_384,
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
    """A published ratio beside a simulated one."""

    row: Row
    ratio: float
    sync: SimulationResult

    @property
    def deviation(self) -> float:
        """From the nearer end of what was published; 0 between them."""
        low, high = self.row.published
        return min(0.0, self.ratio / low - 1) or max(0.0, self.ratio / high - 1)


def compare(
    rows: tuple[Row, ...], turnovers: int, told: Callable[[str], None]
) -> Iterator[Compared]:
    """Groups a second of both runs; for a partial one, of its generation."""
    for row in rows:
        sync, other = synchronous(row, 3)[0], asynchronous(row, turnovers)
        ratio = (
            generation_s_of(sync) / generation_s_of(other)
            if row.partial
            else other.groups_per_s / sync.groups_per_s
        )
        told(f"{row.name}: {row.published[0]:.2f} published, {ratio:.2f} simulated")
        yield Compared(row, ratio, sync)
