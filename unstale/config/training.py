"""Options of the trainer, its checkpoints and its evaluation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from unstale.config.checks import (
    ConfigError,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Range,
    Section,
)
from unstale.config.sampling import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(Section):
    """The trainer and its optimizer."""

    dtype: Dtype = "float32"
    """Precision of the forward pass; the optimizer's weights are always float32."""
    optimizer: str = "AdamW"
    """Name of a class in torch.optim."""
    lr: Positive = 3e-4
    """Learning rate after warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay of the learning rate over the run's steps."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, for optimizers that have it."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient; a larger one is scaled down."""
    minibatches_per_batch: PositiveInt = 1
    """Optimizer steps per batch; each takes an equal share of its sequences."""
    lora_rank: Count = 0
    """Train adapters of this rank; 0 trains all weights. See docs/lora.md."""
    lora_alpha: Positive = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    lora_targets: str = "all-linear"
    """Layers with an adapter: all linear ones but the head, or ends of module names."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Tokens per forward and backward pass."""
    share_prompts: bool = True
    """Compute a common prefix of sequences once per pass. The gradient is the same."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    compile: bool = False
    """Compile the model with torch.compile: half a minute at the start, then faster passes."""
    threads: Count = 0
    """CPU threads; 0 takes all cores that engine processes leave."""

    def check_combination(self) -> None:
        if not self.lora_targets.split():
            raise ConfigError("trainer.lora_targets must name layers, got none")
        if not self.lora_rank and (self.lora_alpha, self.lora_targets) != (32.0, "all-linear"):
            raise ConfigError(
                "trainer.lora_alpha and lora_targets need trainer.lora_rank > 0, got 0"
            )

    def applies(self, option: str) -> bool:
        return option not in ("lora_alpha", "lora_targets") or self.lora_rank > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Section):
    """The evaluation on held-out tasks, sampled by the engine at the run's temperature."""

    tasks: Count = 256
    """Held-out tasks; 0 never evaluates."""
    every: Count = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Section):
    """The checkpoints that a killed run resumes from. See docs/durability.md."""

    every: PositiveInt = 5
    """Steps between checkpoints; one is made before the first step and after the last."""
    keep: Annotated[int, Range(2)] = 2
    """Checkpoints to keep. Tokens of an older version may arrive while the newest is written."""
