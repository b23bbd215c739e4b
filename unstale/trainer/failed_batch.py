"""Save the batch at which training failed, so that `unstale replay` can repeat the failure."""

from dataclasses import fields
from pathlib import Path

from unstale.trainer.local import LocalTrainer
from unstale.weights.recording import WENT_WRONG, FailedStep


def save_failed_batch(trainer: LocalTrainer, folder: Path) -> str:
    """Save the last batch and the trainer's weights in `folder`. Return a message for the terminal.

    All ranks of a trainer must call this function. Only the first rank writes. The others return
    "".
    """
    failed = trainer.failed_batch
    if failed is None:
        return "no batch was saved: the trainer had none yet"
    minibatch = failed.minibatch
    columns = {
        field.name: getattr(minibatch, field.name)
        for field in fields(minibatch)
        if field.name not in ("batch", "forecasts")
    }
    about = {
        "stage": failed.stage,
        "steps": str(trainer.steps),
        "version": str(trainer.policy.version),
        "base": str(trainer.policy.base),
        "divisor": str(failed.divisor),
    }
    weights = trainer.policy.whole_weights()
    if trainer.policy.peers.rank:
        weights.skip()
        return ""
    try:
        FailedStep(minibatch.batch, columns, weights, about).save(folder / WENT_WRONG)
    except OSError as error:
        return f"the batch could not be saved: {error}"
    return f"the batch was saved; to compute it again: unstale replay {folder}"
