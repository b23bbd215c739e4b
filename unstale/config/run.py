"""The configuration of a run: all sections, and the options of the run itself."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from unstale.config.algorithm import (
    AdvantageConfig,
    AuditConfig,
    CorrectionConfig,
    ObjectiveConfig,
)
from unstale.config.checks import ConfigError, JsonObject, NonNegative, PositiveInt, Range, Section
from unstale.config.hub import model_folder
from unstale.config.routes import OldLogpsConfig
from unstale.config.sampling import (
    EndpointConfig,
    EngineConfig,
    RolloutConfig,
    ScheduleConfig,
    TaskConfig,
    make_task,
)
from unstale.config.training import CheckpointConfig, EvalConfig, TrainerConfig

SHIPPED_POLICY = Path(__file__).parents[1] / "recipes" / "base_policy"
"""The folder of the small model in the package: `policy = "base"`."""

MAX_SEED = 9e9
"""Each seed has 10^9 task numbers, and a task number has 63 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Section):
    """A run: its model, length and folder."""

    recipe: str
    """Name of the recipe."""
    policy: str = "base"
    """A Hugging Face model folder or `org/name` in the local cache; `base` is in the package."""
    policy_download: bool = False
    """Download the policy from the Hugging Face hub if the local cache lacks it."""
    chat_template_kwargs: Annotated[str, JsonObject()] = ""
    """Variables of the chat template as a JSON object, such as {"enable_thinking": false}."""
    allow_weak_sandbox: bool = False
    """Run a model's programs as root without bubblewrap: they can write your files."""
    runs: Path = Path("runs")
    """Folder in which the run folder is made."""
    name: str = ""
    """Name of the run folder; empty makes one from recipe, seed and time."""
    seed: Annotated[int, Range(0, MAX_SEED)] = 0
    """Seed of tasks, episodes and sampling noise."""
    steps: PositiveInt = 80
    """Batches to train on."""
    minutes: NonNegative = 0.0
    """Stop after this many minutes, if earlier than `steps`; 0 never does."""
    trackers: str = ""
    """Trackers that get metrics and texts, such as `wandb,tensorboard` (docs/trackers.md)."""
    deterministic: bool = False
    """Make two runs bitwise equal: a virtual clock, one thread, the engine in lockstep."""
    task: TaskConfig = field(default_factory=make_task)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
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
        """The model folder of the initial policy."""
        if self.policy == "base":
            return SHIPPED_POLICY
        return model_folder(self.policy, download=self.policy_download)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables of the chat template."""
        variables: dict[str, Any] = json.loads(self.chat_template_kwargs or "{}")
        return variables

    def applies(self, option: str) -> bool:
        return option not in ("policy_download", "chat_template_kwargs") or self.policy != "base"

    def check_combination(self) -> None:
        engine = self.engine
        if self.deterministic and (engine.backend, engine.processes) != ("embedded", 1):
            raise ConfigError(
                "deterministic needs engine.backend = embedded and engine.processes = 1, "
                f"got {engine.backend} and {engine.processes}"
            )
        num_sequences = self.schedule.groups_per_step * self.schedule.group_size
        if self.trainer.minibatches_per_batch > num_sequences:
            raise ConfigError(
                f"trainer.minibatches_per_batch must be <= {num_sequences} "
                f"(the sequences of a batch), got {self.trainer.minibatches_per_batch}"
            )
