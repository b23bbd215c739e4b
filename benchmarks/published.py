"""Asynchronous over synchronous, as others published it, and what the simulation makes of their settings."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from afterimage.config import ScheduleConfig
from afterimage.plan.costs import Proportional
from afterimage.plan.simulate import Constant, Fleet, LogNormal, Outcome, Workload, simulate

TRAIN_SHARE, FORWARD_SHARE, BANDWIDTH_SHARE = 0.35, 0.4, 0.6
"""Of a processor's bf16 peak when it trains and when it only computes forward, and of its memory bandwidth: the same
for every row, assumed."""
STEP_S = 0.004
"""Of a decoding step, whatever it computes: assumed."""
LINK = 10e9
"""Bytes a second at which an engine takes weights: assumed."""
SIGMA = 0.9
"""Of the log-normal lengths where nothing is published: assumed, as their mean is then: a quarter of the largest."""
MEMORY_SHARE = 0.85
"""Of a processor's memory that weights and contexts fill."""


@dataclass(frozen=True, kw_only=True)
class Processor:
    flops: float
    bandwidth: float
    memory: float


H100 = Processor(flops=989e12, bandwidth=3.35e12, memory=80e9)
"""And H800, which differs in its links."""
H20 = Processor(flops=148e12, bandwidth=4.0e12, memory=96e9)


@dataclass(frozen=True, kw_only=True)
class Model:
    params: float
    active: float
    context_bytes: float
    """Keys and values of one token."""


QWEN_1_5B = Model(params=1.78e9, active=1.78e9, context_bytes=2 * 28 * 256 * 2)
QWEN_7B = Model(params=7.6e9, active=7.6e9, context_bytes=2 * 28 * 512 * 2)
QWEN3_4B = Model(params=4.0e9, active=4.0e9, context_bytes=2 * 36 * 1024 * 2)
QWEN3_30B_A3B = Model(params=30.5e9, active=3.3e9, context_bytes=2 * 48 * 512 * 2)
LLAMA_8B = Model(params=8.0e9, active=8.0e9, context_bytes=2 * 32 * 1024 * 2)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published comparison."""

    name: str
    source: str
    published: tuple[float, float]
    """The ratio, or the range of it."""
    model: Model
    processor: Processor
    gpus: int
    """Of the synchronous run, which all do everything."""
    engine_gpus: int
    """Of the asynchronous run, and those that train."""
    trainer_gpus: int
    tensor: int = 1
    """GPUs of an engine."""
    groups: int
    group_size: int
    most: int
    """Tokens of a reply at most."""
    mean: float = 0.0
    turns: float = 1.0
    tool_s: float = 0.0
    staleness: int
    parts: int = 1
    """Optimizer batches of the asynchronous run that the groups of a synchronous step make; each is published."""
    sync_s: tuple[float, float, float] | None = None
    """Generation, old log-probabilities and training of the synchronous step, where they are published."""
    async_train_s: float = 0.0
    """Training of the asynchronous step, where it is published."""
    load_s: float = 0.0
    """Of a version, where it is published."""
    partial: bool = False
    """It is no asynchronous run: engines and trainer share their GPUs, and more episodes are begun than are needed."""
    scored: bool = True
    """Whether the asynchronous run computes old log-probabilities."""
    assumed: str

    @property
    def tokens(self) -> float:
        """Mean tokens of an episode's replies: published, or what the published time of training implies at
        `TRAIN_SHARE`, or a quarter of the largest."""
        if self.mean:
            return self.mean
        if self.sync_s is None:
            return self.most / 4
        flops = self.sync_s[2] * self.gpus * self.processor.flops * TRAIN_SHARE
        return min(self.most / 2, flops / (6 * self.model.active * self.groups * self.group_size))


def workload(row: Row) -> Workload:
    reply = row.tokens / row.turns
    return Workload(
        prompt_tokens=Constant(200),
        turns=LogNormal.cut(row.turns, 0.5, 16) if row.turns > 1 else Constant(1),
        reply_tokens=LogNormal.cut(reply, SIGMA, row.most / row.turns),
        tool_tokens=Constant(200 if row.turns > 1 else 0),
        tool_s=LogNormal(row.tool_s, 1.0),
        max_tokens=row.most + 200,
    )


def costs(row: Row, trainer_gpus: int) -> Proportional:
    """From the hardware. Where the synchronous run's times are published: training and scoring from these, in
    proportion to GPUs, and engines as fast as its generation was."""
    model, chip = row.model, row.processor
    bandwidth, forward = row.tensor * chip.bandwidth * BANDWIDTH_SHARE, row.tensor * chip.flops * FORWARD_SHARE
    pool = trainer_gpus * chip.flops
    train, old = 6 * model.active / (pool * TRAIN_SHARE), 2 * model.active / (pool * FORWARD_SHARE)
    if row.sync_s:
        tokens = row.groups * row.group_size * (row.tokens + 200) * trainer_gpus / row.gpus
        train, old = row.sync_s[2] / tokens, row.sync_s[1] / tokens
    pace = _pace(row)
    return Proportional(
        decode=pace * (STEP_S + 2 * model.params / bandwidth),
        decode_reply=pace * 2 * model.active / forward,
        decode_context=pace * model.context_bytes / bandwidth,
        prefill_token=pace * 2 * model.active / forward,
        train_token=train,
        old_token=old,
        load=row.load_s or 1.0 + 2 * model.params / (row.tensor * LINK),
    )


@cache
def _pace(row: Row) -> float:
    """What the engine's times are to be multiplied by to generate as long as the synchronous run did."""
    if row.sync_s is None:
        return 1.0
    unpaced = replace(row, sync_s=None, mean=row.tokens)
    free = replace(costs(unpaced, row.gpus), train_token=0.0, old_token=0.0, load=0.0)
    pace = 1.0
    for _ in range(3):
        names = ("decode", "decode_reply", "decode_context", "prefill_token")
        paced = replace(free, **{name: pace * getattr(free, name) for name in names})
        schedule = ScheduleConfig(max_staleness=0, groups_per_step=row.groups, group_size=row.group_size)
        pace *= row.sync_s[0] / simulate(workload(row), fleet(row, row.gpus), schedule, paced, steps=3).mean_step_s
    return pace


def fleet(row: Row, gpus: int) -> Fleet:
    room = row.tensor * row.processor.memory * MEMORY_SHARE - 2 * row.model.params
    return Fleet(
        engines=gpus // row.tensor, max_running=max(1, min(256, int(room / row.model.context_bytes / (row.most / 2))))
    )


def synchronous(row: Row, steps: int) -> Outcome:
    schedule = ScheduleConfig(max_staleness=0, groups_per_step=row.groups, group_size=row.group_size)
    return simulate(workload(row), fleet(row, row.gpus), schedule, costs(row, row.gpus), steps=steps)


def asynchronous(row: Row, steps: int, *, train_s: float = 0.0) -> Outcome:
    """`train_s` is the published time of training, in place of what follows from the synchronous one."""
    paid = costs(row, row.trainer_gpus)
    if train_s:
        paid = replace(paid, train_token=train_s / (row.groups * row.group_size * (row.tokens + 200)))
    if not row.scored:
        paid = replace(paid, old_token=0.0)
    groups = row.groups // row.parts
    live = (row.staleness + 1) * groups
    schedule = ScheduleConfig(
        max_staleness=row.staleness, groups_per_step=groups, group_size=row.group_size, window=live
    )
    steps = row.staleness + 1 + steps * row.parts
    return simulate(workload(row), fleet(row, row.engine_gpus), schedule, paid, steps=steps)


def partial(row: Row, steps: int) -> Outcome:
    """The engines are the trainer's own GPUs: begin more than is needed, train on the first, go on with the others."""
    live = (row.staleness + 1) * row.groups
    schedule = ScheduleConfig(
        max_staleness=row.staleness, groups_per_step=row.groups, group_size=row.group_size, window=live
    )
    at = replace(fleet(row, row.gpus), colocated=True)
    return simulate(workload(row), at, schedule, costs(row, row.gpus), steps=row.staleness + 1 + steps)


def generation_s(outcome: Outcome) -> float:
    """Of a step, what is not the trainer's."""
    return outcome.mean_step_s * (1 - outcome.trainer_busy_share)


VERL = "verl, docs/advance/fully_async.md and recipe/fully_async_policy/shell"
ROWS = (
    Row(
        name="AReaL 1.5B",
        source="arXiv 2505.24298; AReaL, blog/AReaL_v0_3.md: 16 nodes, 41.0 h against 14.8 h",
        published=(2.77, 2.77),
        model=QWEN_1_5B, processor=H100, gpus=128, engine_gpus=96, trainer_gpus=32,
        groups=512, group_size=16, most=27_648, staleness=8,
        assumed="lengths; eight GPUs a node, three quarters of them engines; 512 prompts a step; staleness 8",
    ),
    Row(
        name="AReaL 7B",
        source="the same: 24 nodes, 57.7 h against 25.4 h",
        published=(2.27, 2.27),
        model=QWEN_7B, processor=H100, gpus=192, engine_gpus=144, trainer_gpus=48,
        groups=512, group_size=16, most=27_648, staleness=8,
        assumed="as above",
    ),
    Row(
        name="verl 7B, 128 GPUs",
        source=f"{VERL}: H20, Qwen2.5-Math-7B, 28k tokens, 512 x 16",
        published=(2.35, 2.67),
        model=QWEN_7B, processor=H20, gpus=128, engine_gpus=64, trainer_gpus=64, tensor=4,
        groups=512, group_size=16, most=28_672, staleness=5, parts=4,
        sync_s=(177.85, 53.92, 113.81), async_train_s=113.16, load_s=0.12, scored=False,
        assumed="mean length, from the synchronous training time; half a step more in flight: 5 batches of 128",
    ),
    Row(
        name="verl 30B-A3B, 128 GPUs",
        source=f"{VERL}: H20, Qwen3-30B-A3B, 8k tokens, 512 x 16, 96:32",
        published=(1.72, 2.01),
        model=QWEN3_30B_A3B, processor=H20, gpus=128, engine_gpus=96, trainer_gpus=32, tensor=4,
        groups=512, group_size=16, most=8_192, staleness=5, parts=4,
        sync_s=(348.05, 28.73, 86.27 + 20.86), async_train_s=206.63 + 50.05, load_s=15.76, scored=False,
        assumed="as above; the reference model's pass is counted as training",
    ),
    Row(
        name="verl 7B with tools, 32 GPUs",
        source=f"{VERL}: H20, Qwen2.5-7B, at most 16 turns, 64 x 16",
        published=(1.55, 1.60),
        model=QWEN_7B, processor=H20, gpus=32, engine_gpus=16, trainer_gpus=16, tensor=4,
        groups=64, group_size=16, most=16_384, turns=5, tool_s=2.0, staleness=7, parts=4,
        sync_s=(228.03, 35.19, 111.84), async_train_s=179.58, load_s=0.12, scored=False,
        assumed="as above; 5 turns and 2 s a tool call",
    ),
    Row(
        name="NeMo RL 8B, 16 GPUs",
        source="NeMo RL, docs/about/performance-summary.md (v0.4): H100, Llama 3.1 8B, mean 1,060 of 4,096 tokens, "
        "2,048 samples; tokens a second and GPU",
        published=(1.38, 1.38),
        model=LLAMA_8B, processor=H100, gpus=16, engine_gpus=8, trainer_gpus=8,
        groups=64, group_size=32, most=4_096, mean=1_060, staleness=1,
        assumed="half of the GPUs are engines; 64 prompts of 32 samples",
    ),
)  # fmt: skip
APRIL = Row(
    name="APRIL 4B, 8 GPUs",
    source="arXiv 2509.18521: rollout throughput, mean and largest gain",
    published=(1.225, 1.44),
    model=QWEN3_4B, processor=H100, gpus=8, engine_gpus=8, trainer_gpus=8,
    groups=32, group_size=8, most=16_384, staleness=1, partial=True,
    assumed="model, GPUs, 32 prompts of 8 samples, 16k tokens; twice as many are begun as are needed",
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A published ratio beside a simulated one."""

    row: Row
    how: str
    ratio: float
    sync: Outcome

    @property
    def deviation(self) -> float:
        """From the nearer end of what was published; 0 between them."""
        low, high = self.row.published
        return min(0.0, self.ratio / low - 1) or max(0.0, self.ratio / high - 1)


def compare(rows: tuple[Row, ...], steps: int, told: Callable[[str], None]) -> list[Compared]:
    found = []
    for row in rows:
        told(f"simulating {row.name}")
        sync = synchronous(row, max(2, steps))
        if row.partial:
            ratio = generation_s(sync) / generation_s(partial(row, 4 * steps))
            found.append(Compared(row, "rollout throughput", ratio, sync))
            continue
        tokens = sync.trained_tokens_per_s
        found.append(
            Compared(row, "trainer in proportion", asynchronous(row, steps).trained_tokens_per_s / tokens, sync)
        )
        if row.async_train_s:
            paid = asynchronous(row, steps, train_s=row.async_train_s)
            found.append(Compared(row, "trainer as published", paid.trained_tokens_per_s / tokens, sync))
    return found
