"""The command `sft`: train a recipe's policy on reference replies (supervised fine-tuning).

A reference is a conversation from a file, whose replies the policy learns.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from unstale.builders import (
    build_chat,
    build_old_logps,
    build_scorer,
    load_policy,
    warn_of_hidden_tools,
    without_tasks,
)
from unstale.config import (
    AdvantageConfig,
    AuditConfig,
    ConfigError,
    CorrectionConfig,
    CriticConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
)
from unstale.config.checks import require_empty_folder
from unstale.durability.console import Console
from unstale.durability.run_folder import dumps
from unstale.envs import HasTaskTools, implements
from unstale.envs.dataset import DatasetConfig
from unstale.envs.draft_edit import DraftEditConfig, mistaken
from unstale.envs.references import Reference, load_references
from unstale.envs.registry import build_taskset, preparing
from unstale.model.policy import Policy
from unstale.techniques.hooks import Techniques
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.trainer.supervised import CrossEntropy, Otr, reference_batch

NUM_CHECKED_TASKS = 256
"""Number of training tasks that are read to find out whether tasks have different tools."""
RECORD = "sft.json"
"""Name of the file, next to the trained model, with the options and the metrics of every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """Options of the command `sft` besides those of a run."""

    loss: Literal["cross_entropy", "otr"] = "cross_entropy"
    beta: float = 0.0
    samples: int = 0
    batch: int = 32
    mistakes: int = 0
    """Largest number of mistakes in a draft that the policy learns to edit in place."""

    def __post_init__(self) -> None:
        if self.loss != "otr" and (self.beta, self.samples) != (0.0, 0):
            raise ConfigError("--beta and --samples need --loss otr")
        if not self.beta < 1 or self.samples < 0 or self.batch < 1:
            raise ConfigError(
                "--beta must be < 1, --samples >= 0 and --batch >= 1, got "
                f"{self.beta:g}, {self.samples} and {self.batch}"
            )

    def objective(self, seed: int) -> CrossEntropy:
        """Return the objective that the option `loss` names.

        `seed` is that of its random numbers.
        """
        if self.loss == "otr":
            return Otr(beta=self.beta, samples=self.samples, seed=seed)
        return CrossEntropy()


@dataclass(frozen=True, slots=True)
class SftStep:
    """The metrics of one optimizer step of supervised training."""

    step: int
    nll: float
    """Mean of -log pi over the tokens of the batch's replies, in nats, before the step."""
    grad_norm: float


def sft(
    config: RunConfig,
    data: Path | str,
    folder: Path | str,
    options: SftOptions,
    *,
    console: Console | None = None,
) -> Sequence[SftStep]:
    """Train a policy on the replies in the file `data`, and write it to a new or empty folder.

    `config` has the policy, the prompts and tools, the sampling temperature, the options of
    `trainer` and the number of optimizer steps (`config.max_steps`). Return the metrics of each
    step. Raises `ConfigError` before training if an option or a row of the file is wrong.
    """
    folder = Path(folder)
    config = config.with_policy(config.model)  # the recipe's own supervised start is not made
    require_empty_folder(folder)
    require_plain(config, "sft")
    console = console or Console(soft_wrap=True)
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    # Rows of a data set have no tools, so the recipe's own data set need not be there.
    has_no_tools = isinstance(config.task, DatasetConfig)
    taskset = without_tasks("sft") if has_no_tools else build_taskset(config.task)
    own_tools = implements(taskset, HasTaskTools) and _have_different_tools(taskset, config.seed)
    policy = load_policy(config)
    chat = build_chat(config, policy.tokenizer, policy.ends, taskset)
    warn_of_hidden_tools(config, chat, taskset)
    limits: dict[str, Any] = {"max_tokens": config.engine.max_context, "own_tools": own_tools}
    if options.mistakes:
        request, random = _edit_request(config), Random(config.seed)
        limits["read_as"] = partial(mistaken, request=request, most=options.mistakes, random=random)
    references = load_references(data, chat, **limits)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror or error}") from error
    figures = learn(config, policy, references, options, console=console)
    policy.save(folder)
    record = {"options": asdict(options), "data": str(data), "references": len(references)}
    (folder / RECORD).write_text(dumps({**record, "steps": [asdict(each) for each in figures]}))
    return figures


def _edit_request(config: RunConfig) -> str:
    if not isinstance(config.task, DraftEditConfig) or config.task.edits != "in_place":
        raise ConfigError("--mistakes needs task.edit_request and task.edits = in_place")
    return config.task.edit_request


def require_plain(config: RunConfig, command: str) -> None:
    """Raise `ConfigError` for options of a run that `command`, which has no engine, cannot
    apply.
    """
    if config.cluster.trainers:
        raise ConfigError(
            f"{command} needs cluster.trainers = 0, got {config.cluster.trainers}: it is not built "
            "for trainer ranks"
        )
    for name, coefficient in (
        ("kl_coef", config.objective.kl_coef),
        ("entropy_coef", config.objective.entropy_coef),
    ):
        if coefficient:
            raise ConfigError(
                f"{command} needs objective.{name} = 0, got {coefficient:g}: its loss is another"
            )
    for name in ("minibatches_per_batch", "epochs_per_batch"):
        if (number := getattr(config.trainer, name)) > 1:
            raise ConfigError(
                f"{command} needs trainer.{name} = 1, got {number}: each batch is one of its "
                "optimizer steps. Set --batch and --max_steps instead"
            )
    if config.trainer.stream:
        raise ConfigError(
            f"{command} needs trainer.stream = false, got true: its batches are complete from the "
            "start"
        )
    if config.techniques:
        raise ConfigError(
            f"{command} has no techniques, got {config.techniques!r}: set --techniques ''"
        )


def learn(
    config: RunConfig,
    policy: Policy,
    references: Sequence[Reference],
    options: SftOptions,
    *,
    console: Console,
) -> list[SftStep]:
    """Train a policy on references for `config.max_steps` optimizer steps. Return the metrics of
    each.
    """
    objective = options.objective(config.seed)
    policy.bias_logits(())  # nothing was sampled
    trainer = plain_trainer(config, policy, objective)
    figures = []
    for step, batch in enumerate(
        islice(_batches(references, options.batch, config.seed), config.max_steps), start=1
    ):
        train_on(trainer, reference_batch(batch, version=trainer.version))
        grad_norm = trainer.metrics()["trainer/grad_norm"]
        figures.append(SftStep(step, objective.take_nll(), grad_norm))
        if step % max(1, config.max_steps // 20) == 0 or step == config.max_steps:
            console.print(
                f"step {step}: -log pi {figures[-1].nll:.4f} nats, gradient norm {grad_norm:.3g}",
                highlight=False,
            )
    return figures


def _have_different_tools(taskset: Any, seed: int) -> bool:
    """Return True if the first training tasks do not all have the same tools."""
    with preparing(taskset, "train() or tools_of()"):
        tasks = islice(taskset.train(seed), NUM_CHECKED_TASKS)
        return len({json.dumps(taskset.tools_of(task), sort_keys=True) for task in tasks}) > 1


def plain_trainer(config: RunConfig, policy: Policy, objective: Any) -> LocalTrainer:
    """Return a trainer without an engine. Its objective gets log pi in place of log S.

    This is because `old_logp` is the batch's `behavior_logp` (route `rollout`), which is 0.
    """
    plain = replace(
        config,
        advantage=AdvantageConfig(),
        critic=CriticConfig(),
        old_logps=OldLogpsConfig(route="rollout"),
        correction=CorrectionConfig(mode="none"),
        objective=ObjectiveConfig(
            loss_type="none",
            loss_aggregation=config.objective.loss_aggregation,
            constant=config.objective.constant,
        ),
        audit=AuditConfig(),
    )
    old = build_old_logps(plain.old_logps, build_scorer(plain, policy))
    return LocalTrainer(policy, plain, old, techniques=Techniques({"sft": objective}))


def _batches(references: Sequence[Reference], size: int, seed: int) -> Iterator[list[Reference]]:
    """Yield batches of references in random order, without end. Each pass uses every reference
    once.
    """
    order: list[Reference] = []
    for round_number in count():
        order += Random(f"sft/{seed}/{round_number}").sample(references, len(references))
        while len(order) >= size:
            yield order[:size]
            del order[:size]
