"""The command `replay`: repeat the step with which a run failed, from its saved batch and
weights.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms.corrections import check_finite
from unstale.builders import build_scorer, build_trainer, load_policy
from unstale.cli.failures import literal
from unstale.config import AuditConfig, ConfigError, RunConfig
from unstale.config.options import stored_config
from unstale.durability.console import Console
from unstale.durability.run_folder import RunFolder
from unstale.trainer.records import NOT_FINITE, Minibatch
from unstale.weights.recording import WENT_WRONG, FailedStep


def replay(run: Path, batch: Path | None = None, *, console: Console | None = None) -> bool:
    """Repeat a step that failed with NaN or infinity. Return True if it fails again.

    The loss and the gradients are computed again. Log-probabilities are only read from the batch
    and checked. `batch` is the file of the batch, by default that in the run folder. Raises
    `ConfigError` if the run or the batch cannot be read.
    """
    console = console or Console(soft_wrap=True)
    path = batch or run / WENT_WRONG
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: no step of this run failed, or the file was moved; give --batch"
        )
    config = stored_config(RunFolder(run).config())
    saved = FailedStep.load(path)
    try:
        _again(config, saved, run)
    except NOT_FINITE as error:
        console.print(f"the step failed again: {literal(error)}", highlight=False)
        return True
    text = "the step did not fail again: every number of this batch is finite here"
    if config.advantage.estimator == "gae" or "distil" in config.techniques.split():
        text += ". The critic's loss and the weights of a teacher are not saved, so not repeated"
    console.print(text, highlight=False)
    return False


def _again(config: RunConfig, saved: FailedStep, run: Path) -> None:
    columns: dict[str, Any] = dict(saved.columns)
    batch = saved.batch
    if saved.about["stage"] == "old_logps":
        sequence: Tensor = torch.tensor(batch.episodes)[batch.sequence]
        logps = {"behavior_logp": batch.behavior_logp, "old_logp": columns["old_logp"]}
        check_finite(logps, batch.sampled, sequence=sequence, version=batch.version)
        return
    # Neither the task set, which may be foreign code, nor an engine is created: a batch needs
    # neither.
    policy = load_policy(config)
    policy.open_pictures(run)
    policy.require_base(int(saved.about.get("base", 0)))
    try:
        policy.load_weights(dict(saved.weights))
    except ValueError as error:
        raise ConfigError(f"the saved weights do not fit the run's policy: {error}") from error
    policy.version = int(saved.about["version"])
    trainer, _ = build_trainer(
        replace(config, audit=AuditConfig()), policy, build_scorer(config, policy)
    )
    trainer.steps = int(saved.about["steps"])
    trainer.divisor = int(saved.about.get("divisor", 1))
    try:
        trainer.backward(Minibatch(batch, **columns))
        trainer.step()
    finally:
        trainer.old.close()
