"""Options of the trainer, the supervised start, the evaluation, the journal and checkpoints."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
)
from unstale.config.sampling import LIMITS, Quantise, has_gpu, limits_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(Section):
    """The trainer and its optimizer."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward pass. The weights that the optimizer updates are always float32.
    `auto` is bfloat16 on a GPU and float32 on a CPU.
    """
    rounding: Literal["nearest", "stochastic", "dither"] = "stochastic"
    """Rounding of the optimizer's float32 weights to bfloat16 or float16 for the forward pass: to
    the nearest number, at random after every step, or at one random threshold per weight for the
    whole run. See docs/rounding.md.
    """
    optimizer: str = "AdamW"
    """Name of an optimizer class in torch.optim, or AdamW8bit, whose moments take 2 bytes for each
    weight instead of 8. See docs/speed.md.
    """
    offload_optimizer: bool = False
    """Keep the optimizer's state in main memory. The float32 weights are there, too, unless forward
    and backward passes use them. A step copies them to the GPU and back in parts. The result is the
    same. See docs/speed.md.
    """
    lr: Positive = 3e-4
    """Learning rate after the warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over the run's steps."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly: lr / warmup_steps at the first
    step, lr at step warmup_steps.
    """
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, for optimizers that have this option."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient. A gradient with a larger norm is scaled down to this norm."""
    minibatches_per_batch: PositiveInt = 1
    """Optimizer steps per batch. Each step uses an equal share of the batch's sequences."""
    epochs_per_batch: PositiveInt = 1
    """Number of times that a batch is trained on. Advantages and old log-probabilities are computed
    once, so S = pi / pi_old moves away from 1 in each further pass. Only the routes
    `interp_prox_linear` and `interp_prox_loglinear` compute old log-probabilities in every pass.
    """
    stream: bool = False
    """Compute the gradient of each group as soon as its episodes have ended, while the rest of the
    batch is still being generated. The optimizer step is the same. See docs/asynchrony.md.
    """
    lora_rank: Count = 0
    """Rank of LoRA adapters, which are trained instead of all weights; 0 trains all weights. See
    docs/lora.md.
    """
    lora_alpha: Positive = 32.0
    """Scale of the LoRA adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_targets: str = "all-linear"
    """Layers that get a LoRA adapter: `all-linear` (without the output head), or endings of module
    names, such as `q_proj`.
    """
    max_tokens_per_microbatch: Count = 4096
    """Largest number of tokens in one forward and backward pass; 0 chooses the largest number that
    fits into memory, and a larger one for passes without gradient.
    """
    max_tokens_per_scoring_pass: Count = 0
    """Largest number of tokens in a forward pass without gradient, such as the passes that compute
    old log-probabilities; 0 means `max_tokens_per_microbatch` on a CPU, and 4 times as many on a
    GPU.
    """
    share_prompts: bool = True
    """Compute a prefix that several sequences share only once per pass.

    The gradient is the same.
    """
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, which saves memory and takes more time."""
    compile: bool = False
    """Compile the model with torch.compile. The start takes half a minute longer, later passes are
    faster.
    """
    routing_replay: bool = False
    """For an MoE policy: train each token with the experts that the engine chose for it. See
    docs/moe.md.
    """
    quantise: Quantise = "none"
    """Number format to which the trainer's passes round weights and activations: the value of
    `engine.quantise`, or none.
    """
    threads: Count = 0
    """CPU threads of the trainer; 0 uses the cores that other processes of the run do not use. See
    docs/engines.md.
    """

    @property
    def steps_per_batch(self) -> int:
        """Number of optimizer steps on a batch, over all epochs."""
        return self.minibatches_per_batch * self.epochs_per_batch

    def check_combination(self) -> None:
        if self.dtype == "auto":
            # The chosen precision replaces `auto`, so that the run folder records it.
            object.__setattr__(self, "dtype", "bfloat16" if has_gpu() else "float32")
        if not self.lora_targets.split():
            raise ConfigError("trainer.lora_targets must name layers, got none")
        if not self.lora_rank and (self.lora_alpha, self.lora_targets) != (32.0, "all-linear"):
            raise ConfigError(
                "trainer.lora_alpha and lora_targets need trainer.lora_rank > 0, got 0"
            )

        for option, is_set in (("lora_rank", self.lora_rank > 0), ("compile", self.compile)):
            if self.quantise != "none" and is_set:
                raise ConfigError(
                    f"trainer.quantise must be none with trainer.{option}, got {self.quantise}: "
                    "not built, because passes that round weights do not have it"
                )

    def scoring_tokens(self, *, on_gpu: bool) -> int:
        """Return the largest number of tokens in a forward pass without gradient. 0 means as many
        as fit.

        Such a pass keeps the activations of only one layer at a time, so more tokens fit than with
        gradient. On a GPU, larger passes start fewer kernels and gather divided weights less often.
        """
        factor = 4 if on_gpu else 1
        return self.max_tokens_per_scoring_pass or factor * self.max_tokens_per_microbatch

    def applies(self, option: str) -> bool:
        if option == "rounding":
            return self.dtype != "float32"
        return option not in ("lora_alpha", "lora_targets") or self.lora_rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(Section):
    """A supervised start: before the run, the policy learns from demonstrations that a task set
    provides.
    """

    refused_unread: ClassVar = ("env", "demonstrations", "batch", "lr")
    read_with: ClassVar = dict.fromkeys(refused_unread, ("steps", "> 0"))

    steps: Count = 0
    """Optimizer steps on demonstrations before the run; 0 makes no supervised start."""
    env: str = ""
    """Task set of the demonstrations, with the other options of `task`. Empty uses `task.env`. The
    task set must have demonstrations, as `reasoning-gym:NAME` with a tool has.
    """
    demonstrations: PositiveInt = 64
    """Number of training tasks to demonstrate."""
    batch: PositiveInt = 8
    """Number of demonstrations in an optimizer step."""
    lr: Positive = 3e-5
    """Learning rate of the supervised start, after one step of warm-up."""

    def applies(self, option: str) -> bool:
        return option == "steps" or self.steps > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Section):
    """The evaluation on held-out tasks."""

    refused_unread: ClassVar = ("patience",)
    read_with: ClassVar = {"patience": ("keep_best", "= success_rate or reward_mean")}

    tasks: Count = 256
    """Number of held-out tasks; 0 turns the evaluation off."""
    interval: Count = 0
    """Batches between evaluations; 0 evaluates only before the first step and after the last.
    """
    samples: PositiveInt = 1
    """Number of episodes on each held-out task, with different random numbers. Success is the mean
    over them (avg@n).
    """
    temperature: Annotated[float, Range(-1)] = -1.0
    """Sampling temperature of the evaluation: 0 always takes the most probable token, -1 is
    `engine.temperature`.
    """
    top_p: Annotated[float, Range(-1, 1)] = -1.0
    """Sample the evaluation from the smallest set of most probable tokens whose probabilities have
    at least this sum: 1 is the whole vocabulary, -1 is `engine.top_p`.
    """
    top_k: Annotated[int, Range(-1)] = -1
    """Sample the evaluation from this number of most probable tokens: 0 sets no limit, -1 is
    `engine.top_k`.
    """
    min_p: Annotated[float, Range(-1, 1)] = -1.0
    """Sample the evaluation from tokens whose probability is at least this share of the highest
    one: 0 sets no limit, -1 is `engine.min_p`.
    """
    keep_best: Literal["none", "success_rate", "reward_mean"] = "none"
    """Keep the policy whose evaluation had the highest value of this metric, in the run's folder
    `best`; `none` keeps no such policy.
    """
    patience: Count = 0
    """With `keep_best`: stop the run after this many evaluations in a row that are no better than
    the best before, by the metric `keep_best`; 0 never stops it.
    """

    @property
    def limits(self) -> dict[str, Any]:
        """The values of `top_p`, `top_k` and `min_p` that are not those of the engine, by name.

        >>> EvalConfig(top_p=0.95).limits
        {'top_p': 0.95}
        """
        limits = {name: getattr(self, name) for name in LIMITS}
        return {name: value for name, value in limits.items() if value >= 0}

    @property
    def truncated_by(self) -> str:
        """The options among `limits` that cut off tokens, as text. Empty if there are none."""
        return limits_text("eval", self.limits)

    def applies(self, option: str) -> bool:
        return option != "patience" or self.keep_best != "none"

    def check_combination(self) -> None:
        if -1 < self.temperature < 0:
            raise ConfigError(
                "eval.temperature must be >= 0, or -1 for engine.temperature, got "
                f"{self.temperature:g}"
            )
        self._check_limits()
        if not self.temperature and self.samples > 1:
            raise ConfigError(
                f"eval.samples must be 1 with eval.temperature = 0, got {self.samples}: greedy "
                "episodes of a task are equal"
            )
        if self.keep_best != "none" and not self.tasks:
            raise ConfigError(f"eval.keep_best = {self.keep_best} needs eval.tasks > 0")
        if self.patience and not self.interval:
            raise ConfigError(
                f"eval.patience = {self.patience} needs eval.interval > 0: without it a run is "
                "evaluated only before its first step and after its last"
            )

    def _check_limits(self) -> None:
        """Raise `ConfigError` for values of `top_p`, `top_k` and `min_p` that cannot be used."""
        for name in ("top_p", "min_p"):
            if -1 < getattr(self, name) < 0:
                raise ConfigError(
                    f"eval.{name} must be between 0 and 1, or -1 for engine.{name}, got "
                    f"{getattr(self, name):g}"
                )
        if self.top_p == 0 or self.top_k == 1 or self.min_p == 1:
            raise ConfigError(
                f"{self.truncated_by} keeps only the most probable token: set eval.temperature = 0"
            )
        if not self.temperature and self.truncated_by:
            raise ConfigError(
                f"{self.truncated_by} cannot be used with eval.temperature = 0, which takes the "
                "most probable token: set eval.temperature above 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalConfig(Section):
    """The journal, which records every training episode. See docs/journal.md."""

    token_share: Share = 1.0
    """Share of groups for which the journal keeps the log-probabilities, weight and advantage of
    every trained token; 0 keeps none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Section):
    """The checkpoints (saved states) from which a killed run resumes. See docs/durability.md."""

    interval: PositiveInt = 5
    """Steps between checkpoints. Checkpoints are also written before the first step and after the
    last.
    """
    minutes: NonNegative = 0.0
    """Also write a checkpoint this many minutes after the last one; 0 writes none for this
    reason.
    """
    keep: Annotated[int, Range(2)] = 2
    """Number of complete checkpoints to keep. At least 2: a resumed run may need a version before
    the newest checkpoint, and rebuilds it from the older one.
    """
