"""Every knob, in the order the data flows. Frozen, checked once, read by name; imports no torch.

The docstring under a field is its `--help`. A recipe is a function that returns a `RunConfig`.
"""

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from unstale.config.backends import Backend
from unstale.config.checks import ConfigError as ConfigError
from unstale.config.checks import among_choices, at_least, within
from unstale.config.checks import nearest as nearest


def install(extra: str) -> str:
    """What brings an extra to a checkout. The `unstale` in package registries is another project."""
    tested = "constraints-adapters.txt" if extra in ("openenv", "verifiers") else "constraints.txt"
    return f".venv/bin/pip install -c {tested} -e '.[{extra}]'"


def staleness_bound(max_staleness: int, groups_per_step: int, lookahead_window: int) -> int:
    """The largest staleness a token can have when its batch is taken, one version being published per batch.

    Derived in docs/staleness.md.

    >>> staleness_bound(2, 16, lookahead_window=1)
    2
    >>> staleness_bound(2, 16, lookahead_window=4)
    3
    """
    if max_staleness == 0:
        return 0  # the whole budget is one batch: nothing can be left behind
    return max_staleness + math.ceil((lookahead_window - 1) / groups_per_step)


Dtype = Literal["float32", "bfloat16"]


def quick_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Dtype:
    """bfloat16 on a GPU that may be used, and where the processor multiplies it; else float32."""
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    device = Path("/proc/driver/nvidia").exists() and os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    ) not in ("", "-1")
    multiplied = "avx512_bf16" in flags or "amx_bf16" in flags or device
    return "bfloat16" if multiplied else "float32"


SHIPPED_POLICY = Path(__file__).parents[1] / "recipes" / "base_policy"
"""The small model that comes with the package: `policy = "base"`."""

MAX_SEED = 9e9
"""Each seed has a thousand million tasks of its own, and their numbers have 63 bits."""

SHIPPED_ENVS = ("retail", "calculator", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """What the agent is trained on."""

    env: str = "retail"
    """Who poses the tasks: `retail`, `calculator`, `python`, `library:name` (docs/libraries.md), `module:factory`."""
    level: Literal["1", "2", "3"] = "1"
    """How hard the retail desk is: 1 for a small model; 2 and 3 for real ones."""
    latency_s: float = 0.0
    """Mean of the log-normal waiting time of a retail tool call; 0 answers at once."""
    latency_sigma: float = 0.5
    """Spread of that waiting time: the standard deviation of its logarithm."""

    def __post_init__(self) -> None:
        among_choices("task", self)
        at_least("task", 0, latency_s=self.latency_s, latency_sigma=self.latency_sigma)
        if self.env not in SHIPPED_ENVS and ":" not in self.env:
            raise ConfigError(f"task.env cannot be {self.env!r}{nearest(self.env, SHIPPED_ENVS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The program that samples."""

    backend: Backend = "embedded"
    """The embedded engine, or a server behind HTTP. See docs/engines.md."""
    urls: str = ""
    """Servers on this host to attach to, separated by spaces; without any, `vllm` starts one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Precision of generation; `auto`: the quicker one here. What lies between it and the trainer's is discrepancy."""
    threads: int = 1
    """Processor threads of an engine process; the trainer takes the others."""
    processes: int = 1
    """Embedded engines: more of one thread serve a small model better than one of more threads. See docs/engines.md."""
    max_running: int = 128
    """Replies generated at the same time, by all processes of the embedded engine together or by each server."""
    max_context: int = 1024
    """Tokens an episode may hold, prompt and replies together."""
    temperature: float = 1.0
    """Sampling temperature. It is part of the behaviour policy, so the trainer applies it too."""
    top_p: float = 1.0
    """Refused below 1: the embedded engine does not record the truncated support."""
    max_completion_tokens: int = 96
    """Tokens of one reply."""
    keep_cache: bool = False
    """Go on with the KV cache of the version before: quicker, but such tokens come from no version's policy."""
    restarts: int = 2
    """Times that a dead engine is started again before the run stops; its replies go on from their recorded tokens."""

    def __post_init__(self) -> None:
        among_choices("engine", self)
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", quick_dtype())  # what is recorded is what was run
        at_least(
            "engine",
            1,
            threads=self.threads,
            processes=self.processes,
            max_completion_tokens=self.max_completion_tokens,
        )
        at_least("engine", self.processes, max_running=self.max_running)
        at_least("engine", 0, restarts=self.restarts)
        at_least("engine", 16, max_context=self.max_context)
        if not self.temperature > 0:
            raise ConfigError(f"engine.temperature must be > 0, got {self.temperature}")
        if self.backend == "embedded" and self.urls:
            raise ConfigError("engine.urls needs a server backend: set engine.backend too")
        if self.backend != "embedded" and self.processes > 1:
            raise ConfigError(
                "engine.processes is an option of engine.backend = embedded: name servers by engine.urls"
            )
        if self.top_p != 1.0:
            raise ConfigError(
                f"engine.top_p must be 1.0, got {self.top_p}: a truncated support could not be replayed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How an episode is run."""

    max_turns: int = 10
    """Replies an episode may take; then it ends with what it has."""
    timeout_s: float = 60.0
    """Seconds an environment may take for one answer."""
    retries: int = 1
    """Times a failed episode is begun again with the same seed."""
    max_failed_share: float = 0.2
    """Share of failed episodes above which the run stops, of the last 100 (judged from the 20th on)."""

    def __post_init__(self) -> None:
        at_least("rollout", 1, max_turns=self.max_turns)
        at_least("rollout", 0, retries=self.retries)
        within("rollout", 0, 1, max_failed_share=self.max_failed_share)
        if not self.timeout_s > 0:
            raise ConfigError(f"rollout.timeout_s must be > 0, got {self.timeout_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Who may begin, and in which order results are taken. See docs/staleness.md."""

    max_staleness: int = 2
    """Versions a token may lag behind the policy that trains on it (with lookahead_window 1). 0 is synchronous training."""
    groups_per_step: int = 16
    """Tasks per batch."""
    group_size: int = 8
    """Episodes per task."""
    lookahead_window: int = 1
    """Look-ahead: each group of a batch may come from the `lookahead_window` oldest positions in line. 1 is strict order."""

    def __post_init__(self) -> None:
        at_least("schedule", 0, max_staleness=self.max_staleness)
        at_least(
            "schedule",
            1,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            lookahead_window=self.lookahead_window,
        )

    @property
    def staleness_bound(self) -> int:
        """Versions that no token of a batch is ever older than."""
        return staleness_bound(self.max_staleness, self.groups_per_step, self.lookahead_window)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: Literal[
        "grpo", "grpo_no_std", "rloo", "dr_grpo", "reinforce_batch", "turn_level"
    ] = "grpo"
    """How siblings are compared."""

    def __post_init__(self) -> None:
        among_choices("advantage", self)


Route = Literal[
    "rollout",
    "current_recompute",
    "snapshot_old",
    "old_logit_model",
    "interrupt_sync",
    "eager",
    "interp_prox_loglinear",
    "interp_prox_linear",
    "ewma_prox",
    "ppo_ewma_async",
]
EXACT_ROUTES = ("snapshot_old", "old_logit_model", "interrupt_sync")
"""Exact for every clean token; `eager` is on the share that it covers, and on the rest as its fallback is."""

EWMA_BETA = 0.5
"""Decay of `ewma_prox` unless another is given: a mean age of one version."""

_OF_ROUTES: dict[str, tuple[str, ...]] = {
    "alpha": ("interp_prox_loglinear", "interp_prox_linear"),
    "fresh": ("interp_prox_loglinear", "interp_prox_linear"),
    "beta": ("ewma_prox", "ppo_ewma_async"),
    "update_every": ("ewma_prox",),
    "averages": ("ppo_ewma_async",),
    "reset_below": ("ppo_ewma_async",),
    "reset_patience": ("ppo_ewma_async",),
    "reset_cooldown": ("ppo_ewma_async",),
    "fallback": ("eager",),
    "storage": ("snapshot_old",),
    "memory_gb": ("snapshot_old",),
    "spill": ("snapshot_old",),
}
"""Which routes read an option. `eager` hands its own on to its fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogpsConfig:
    """Where the trainer-side log-probability of the sampling version comes from. See docs/old-logps.md."""

    route: Route = "snapshot_old"
    """Exact: `snapshot_old`, `old_logit_model`, `interrupt_sync`, `eager` with an exact fallback. Others stand in."""
    alpha: float | None = None
    """`interp_prox_*`: constant weight of the current policy; none follows the token's lag d, (d - 1) / d."""
    fresh: Literal["trainer", "behavior"] = "trainer"
    """`interp_prox_*` at lag 0: the trainer's log-probability (weight 1), or the engine's (weight 0)."""
    beta: float | None = None
    """Decay of `ewma_prox` (none: 0.5), mean age beta / (1 - beta); of `ppo_ewma_async` (none: follows staleness)."""
    update_every: Literal["version", "step"] = "version"
    """`ewma_prox`: average every published version, or the weights after every optimizer step."""
    averages: int = 1
    """`ppo_ewma_async`: averages of different ages; each token takes the one nearest to its lag."""
    reset_below: float = 0.0
    """`ppo_ewma_async`: reset the average when the share kept by the discrepancy control stays below this; 0 never."""
    reset_patience: int = 3
    """`ppo_ewma_async`: batches below `reset_below` in a row before a reset."""
    reset_cooldown: int = 10
    """`ppo_ewma_async`: batches between two resets, at least."""
    fallback: Literal["snapshot_old", "interrupt_sync", "ewma_prox"] = "snapshot_old"
    """`eager`: the route of the tokens that were not scored while their version was the trainer's."""
    storage: Literal["delta", "full"] = "delta"
    """Version store: lossless differences between neighbouring versions, or a full copy of each."""
    memory_gb: float = 0.0
    """Version store: refuse to hold more than this; 0 has no limit."""
    spill: bool = False
    """Version store: keep what it holds in files of a temporary folder instead of memory."""
    baseline: bool = False
    """Allow what the linter refuses because a ratio is 1 by construction: a baseline to compare with."""

    def __post_init__(self) -> None:
        among_choices("old_logps", self)
        at_least("old_logps", 0, memory_gb=self.memory_gb)
        at_least(
            "old_logps", 1,
            averages=self.averages, reset_patience=self.reset_patience, reset_cooldown=self.reset_cooldown,
        )  # fmt: skip
        within("old_logps", 0, 1, reset_below=self.reset_below, alpha=self.alpha or 0.0)
        within("old_logps", 0, 0.9999, beta=self.beta or 0.0)
        if self.beta is not None and self.averages > 1:
            raise ConfigError(
                "old_logps.averages must be 1 with a fixed old_logps.beta: all would have the same age"
            )
        reading = {self.route, self.underlying}
        for known in fields(self):
            routes = _OF_ROUTES.get(known.name, (self.route,))
            if not reading & set(routes) and getattr(self, known.name) != known.default:
                told = (
                    f"eager with the fallback {self.fallback}"
                    if self.route == "eager"
                    else self.route
                )
                raise ConfigError(
                    f"old_logps.{known.name} is an option of {', '.join(routes)}; the route is {told}"
                )

    @property
    def underlying(self) -> Route:
        """The route of the tokens that `eager` does not cover; of the others, the route itself."""
        return self.fallback if self.route == "eager" else self.route

    @property
    def exact(self) -> bool:
        """Whether every clean token gets the trainer's own log-probability under its version."""
        return self.underlying in EXACT_ROUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """How wrong the route is, measured against full copies of the versions. See docs/old-logps.md."""

    share: float = 0.0
    """Share of a batch's sequences that are scored again to measure it; 0 measures nothing and keeps no copies."""
    record: bool = False
    """Keep every version and every batch in the run folder, for `unstale audit`."""

    def __post_init__(self) -> None:
        within("audit", 0, 1, share=self.share)


Unit = Literal["token", "turn", "segment", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """What is done about the discrepancy D = pi_old / mu: same weights, two programs."""

    control: Literal["none", "mask", "truncate", "mask_weight"] = "mask_weight"
    """Keep or drop inside the band, truncate the weight, or weight inside and drop outside."""
    low: float = 0.5
    """Lower end of the band on D."""
    high: float = 2.0
    """Upper end of the band on D."""
    unit: Unit = "token"
    """What D is aggregated over."""
    aggregate: Literal["mean", "sum"] = "mean"
    """Geometric mean of the ratios in a unit, or their product."""
    token_veto_threshold: float = 0.0
    """Drop a whole sequence with any token whose D is below this; 0 never does."""

    def __post_init__(self) -> None:
        among_choices("correction", self)
        within("correction", 0, 1, low=self.low, token_veto_threshold=self.token_veto_threshold)
        at_least("correction", 1, high=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """What is done about staleness S = pi / pi_old: same program, newer weights; and the loss."""

    kind: Literal["ppo_clip", "dual_clip", "gspo", "cispo", "kl_penalty", "none"] = "ppo_clip"
    """The trust region."""
    clip_low: float = 0.2
    """S below 1 - clip_low gives no further gradient (`cispo` bounds the weight instead). `gspo` wants about 3e-4."""
    clip_high: float = 0.28
    """S above 1 + clip_high gives no further gradient (`cispo` bounds the weight instead). `gspo` wants about 4e-4."""
    dual_clip: float = 3.0
    """`dual_clip`: bound on the loss of a negative advantage, in multiples of it."""
    kl_penalty: float = 1.0
    """`kl_penalty`: the coefficient c of S A - c / 2 (log S)^2."""
    unit: Unit = "token"
    """What S is aggregated over."""
    aggregate: Literal["mean", "sum"] = "mean"
    """Geometric mean of the ratios in a unit, or their product."""
    loss_aggregation: Literal["action_tokens", "kept", "sequence_mean", "constant"] = (
        "action_tokens"
    )
    """What the loss is divided by; `action_tokens` counts them before masking."""
    constant: float = 1000.0
    """`loss_aggregation = "constant"`: tokens per sequence that the sum is divided by (Dr. GRPO)."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the policy that the run began with."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""

    def __post_init__(self) -> None:
        among_choices("objective", self)
        within("objective", 0, 1, clip_low=self.clip_low)
        at_least("objective", 0, clip_high=self.clip_high, kl_penalty=self.kl_penalty)
        at_least("objective", 0, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        at_least("objective", 1, constant=self.constant)
        if not self.dual_clip > 1:
            raise ConfigError(
                f"objective.dual_clip must be > 1 (1 stops fresh data too), got {self.dual_clip}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The program that learns."""

    dtype: Dtype = "float32"
    """Precision of the forward pass; the optimizer's weights are always float32."""
    optimizer: str = "AdamW"
    """Name of a class in torch.optim."""
    lr: float = 3e-4
    """Learning rate after warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls over the run's steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay, for optimizers that have it."""
    grad_clip: float = 1.0
    """Norm that the gradient is clipped to."""
    minibatches_per_batch: int = 1
    """Optimizer steps per batch; each takes an equal share of its sequences."""
    lora_rank: int = 0
    """Train adapters of this rank instead of all weights; 0 trains all. See docs/lora.md."""
    lora_alpha: float = 32.0
    """Adapters count alpha / rank times."""
    lora_targets: str = "all-linear"
    """Layers with an adapter: all linear ones but the head, or ends of module names, separated by spaces."""
    max_tokens_per_microbatch: int = 4096
    """Tokens per forward and backward pass."""
    share_prompts: bool = True
    """Run what sequences of a pass have in common at their beginning once. The gradient is the same."""
    gradient_checkpointing: bool = False
    """Run every layer again for the gradient instead of keeping what is inside it: less memory, more time."""
    compile: bool = False
    """Fuse the model by torch.compile: half a minute at the start, then faster passes."""
    threads: int = 0
    """Processor threads; 0 takes what all engine processes leave. Without staleness they take turns: give it all."""

    def __post_init__(self) -> None:
        among_choices("trainer", self)
        at_least(
            "trainer",
            1,
            minibatches_per_batch=self.minibatches_per_batch,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch,
        )
        at_least(
            "trainer",
            0,
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            threads=self.threads,
        )
        at_least("trainer", 0, lora_rank=self.lora_rank)
        if not self.lora_alpha > 0 or not self.lora_targets.split():
            raise ConfigError(
                f"trainer.lora_alpha must be > 0 and lora_targets name layers, got {self.lora_alpha} and "
                f"{self.lora_targets!r}"
            )
        if not self.lora_rank and (self.lora_alpha, self.lora_targets) != (32.0, "all-linear"):
            raise ConfigError(
                "trainer.lora_alpha and lora_targets are options of adapters; trainer.lora_rank is 0"
            )
        if not self.lr > 0:
            raise ConfigError(f"trainer.lr must be > 0, got {self.lr}")
        if not self.grad_clip > 0:
            raise ConfigError(f"trainer.grad_clip must be > 0, got {self.grad_clip}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """How success is measured: on held-out tasks, sampled at the run's temperature by the engine."""

    tasks: int = 256
    """Held-out tasks; 0 never evaluates."""
    every: int = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last."""

    def __post_init__(self) -> None:
        at_least("eval", 0, tasks=self.tasks, every=self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What a killed run goes on from. See docs/durability.md."""

    every: int = 5
    """Steps between checkpoints; one is made before the first step and after the last."""
    keep: int = 2
    """Checkpoints that are kept, at least 2: pieces of the version before the newest still come while it is made."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 1, every=self.every)
        at_least("checkpoint", 2, keep=self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run."""

    recipe: str
    """The recipe's name, for the record."""
    policy: str = "base"
    """A Hugging Face model folder; `base` is the small model that comes with the package."""
    runs: Path = Path("runs")
    """Where run folders are made."""
    name: str = ""
    """Name of the run folder; empty makes one from the recipe, the seed and the time."""
    seed: int = 0
    """Tasks, episodes and sampling noise derive from it."""
    steps: int = 80
    """Batches to train on."""
    minutes: float = 0.0
    """Stop after this many minutes, if earlier than `steps`; 0 never does."""
    tensorboard: bool = False
    """Also write TensorBoard events into the run folder."""
    deterministic: bool = False
    """Two runs are bitwise equal, killed and resumed ones too: a virtual clock, one thread, the engine in lockstep."""
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    old_logps: OldLogpsConfig = field(default_factory=OldLogpsConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def policy_folder(self) -> Path:
        """Where the policy is that the run begins with."""
        return SHIPPED_POLICY if self.policy == "base" else Path(self.policy)

    def __post_init__(self) -> None:
        at_least("run", 1, steps=self.steps)
        at_least("run", 0, minutes=self.minutes)
        within("run", 0, MAX_SEED, seed=self.seed)
        if self.deterministic and (self.engine.backend, self.engine.processes) != ("embedded", 1):
            raise ConfigError(
                "deterministic needs engine.backend = embedded and processes = 1: only that can be repeated"
            )
        if (
            self.trainer.minibatches_per_batch
            > self.schedule.groups_per_step * self.schedule.group_size
        ):
            raise ConfigError(
                f"trainer.minibatches_per_batch must be <= {self.schedule.groups_per_step * self.schedule.group_size} "
                f"(the sequences of a batch), got {self.trainer.minibatches_per_batch}"
            )
