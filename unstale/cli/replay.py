"""A number that went wrong, again: the same weights on the same batch, without the run around it."""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from unstale.algorithms.corrections import check_finite
from unstale.build import build_scorer, build_trainer, load_policy
from unstale.config import AuditConfig, ConfigError, RunConfig
from unstale.config.options import stored_config
from unstale.durability.run_folder import RunFolder
from unstale.trainer.records import NOT_FINITE, Minibatch
from unstale.weights.recording import WENT_WRONG, WentWrong


def replay(run: Path, batch: Path | None = None, *, console: Console | None = None) -> bool:
    """Do again what went wrong in a run; whether it went wrong again.

    A loss or a gradient is formed again, by the same code from the same weights; log-probabilities that were not finite
    are shown again as they were kept. Raises `ConfigError` if the run or the file cannot be read.
    """
    console = console or Console(soft_wrap=True)
    path = batch or run / WENT_WRONG
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: nothing went wrong in this run, or it was moved; give --batch"
        )
    config = stored_config(RunFolder(run).config())
    wrong = WentWrong.load(path)
    try:
        _again(config, wrong)
    except NOT_FINITE as error:
        console.print(f"it went wrong again: {error}", markup=False, highlight=False)
        return True
    console.print(
        "it did not go wrong again: every number of this batch is finite here", highlight=False
    )
    return False


def _again(config: RunConfig, wrong: WentWrong) -> None:
    columns, batch = wrong.columns, wrong.batch
    if wrong.about["stage"] == "old_logps":
        sequence: Tensor = torch.tensor(batch.episodes)[batch.sequence]
        logps = {"behavior_logp": batch.behavior_logp, "old_logp": columns["old_logp"]}
        check_finite(logps, batch.sampled, sequence=sequence, version=batch.version)
        return
    # Without its task set, which may name code of whoever wrote the folder, and without an engine: a batch needs none.
    policy = load_policy(config)
    policy.require_base(int(wrong.about.get("base", 0)))
    try:
        policy.load_weights(wrong.weights)
    except ValueError as error:
        raise ConfigError(f"the kept weights are not those of the run's policy: {error}") from error
    policy.version = int(wrong.about["version"])
    trainer, _ = build_trainer(
        replace(config, audit=AuditConfig()), policy, build_scorer(config, policy)
    )
    trainer.steps = int(wrong.about["steps"])
    try:
        trainer.backward(Minibatch(batch, **columns))
        trainer.step()
    finally:
        trainer.old.close()
