"""The command `export`: write the policy of a run's checkpoint as a Hugging Face model folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unstale.builders import lora_of
from unstale.cli.process import limit_threads
from unstale.cli.resume import read_config
from unstale.config import ConfigError, RunConfig
from unstale.config.checks import require_empty_folder
from unstale.durability.checkpoint import CheckpointError, Checkpoints
from unstale.model.policy import Policy


def export(run: Path | str, folder: Path | str, *, step: int | None = None) -> int:
    """Write the policy of a run's checkpoint to a new or empty folder. Return the checkpoint's
    step.

    The run `run` may be in progress, and its folder is only read. `step` is the step of the
    checkpoint. None means the newest. The model is loaded into main memory. Raises `ConfigError` if
    the run has no such checkpoint or `folder` cannot be used, and `CheckpointError` if the
    checkpoint is damaged, or the run removed it meanwhile.
    """
    run, folder = Path(run), Path(folder)
    config = read_config(run)
    require_empty_folder(folder)
    if folder.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{folder} lies in the run folder {run}. Name a folder outside of it")
    limit_threads()
    stored = _read_stored(run, config, step)
    policy = Policy.load(
        config.policy_folder,
        dtype=config.trainer.dtype,
        device="cpu",
        lora=lora_of(config),
        chat_template=config.chat_template,
    )
    if policy.lora:
        policy.require_base(stored.base)
    try:
        policy.load_weights(stored.weights)
    except ValueError as error:
        raise ConfigError(
            f"the checkpoints of {run} do not fit the model in {config.policy_folder}, from which "
            f"the run started: {error}"
        ) from error
    try:
        policy.save(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}. Delete it and export again"
        ) from error
    return stored.step


@dataclass(frozen=True, slots=True)
class _StoredPolicy:
    """The weights of a checkpoint and the checkpoint's step."""

    step: int
    weights: Mapping[str, Tensor]
    base: int
    """Checksum of the base model to which the LoRA adapters belong. 0 without adapters."""


def _read_stored(run: Path, config: RunConfig, step: int | None) -> _StoredPolicy:
    """Return the policy of the checkpoint of a step. None means the newest.

    If the run removes its newest checkpoint meanwhile, a newer one is read.
    """
    checkpoints = Checkpoints(run, {})
    while True:
        steps = checkpoints.steps
        if not steps:
            raise ConfigError(f"{run} has no checkpoint")
        wanted = next(reversed(steps)) if step is None else step
        if wanted not in steps:
            known = ", ".join(map(str, steps))
            raise ConfigError(f"{run} has no checkpoint of step {wanted}. It has those of {known}")
        name = steps[wanted]
        try:
            base = checkpoints.adapter_base(name)
            return _StoredPolicy(wanted, checkpoints.read_weights(name), base)
        except (CheckpointError, OSError) as error:
            left = checkpoints.names
            keep = config.checkpoint.keep
            if name in left[-keep:]:
                raise CheckpointError(f"{error}{_others(checkpoints, name)}") from error
            if step is not None:
                raise CheckpointError(
                    f"the run removed the checkpoint of step {step} while it was read: it keeps "
                    f"only the newest {keep} (checkpoint.keep){_others(checkpoints, name)}"
                ) from error


def _others(checkpoints: Checkpoints, name: str) -> str:
    """Return a sentence that names the run's checkpoints besides `name`.

    Empty if there are none.
    """
    others = [str(step) for step, other in checkpoints.steps.items() if other != name]
    return f". Others can be exported: --step {' or '.join(others)}" if others else ""
