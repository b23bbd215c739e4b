"""Predict the memory and disk space that a run needs, before the run starts."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unstale.builders import loads_in_place, reads_old_versions, shares_deltas
from unstale.config import ConfigError, RunConfig
from unstale.config.hub import count_weights
from unstale.config.routes import live_versions
from unstale.config.techniques import needs_reference
from unstale.durability.checkpoint import CHECKPOINTS, VERSIONS
from unstale.durability.run_folder import disk_size
from unstale.engines.registry import packs_weights
from unstale.model import linear
from unstale.model.policy import Policy
from unstale.techniques.distil import START, DistilConfig
from unstale.weights.delta_sizes import WORD, delta_bytes, delta_rate

PROCESS_BYTES = 0.7e9
"""Bytes of a trainer or engine process without a model: Python, torch and transformers. Measured in
benchmarks/results/footprint.md. Activations and cached contexts are not included, because they
depend on the lengths of episodes.
"""
FLOAT32_DELTA = 1.7
"""Bytes per weight of the compressed difference between two float32 versions, at most 4. Measured
at a learning rate of 1e-6, where most weights change in every step, in their lowest bits.
"""
_WIDE = 4
_GRADIENT = 4
_MOMENTS: dict[str, float] = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Muon": 1, "AdamW8bit": 0.5}
"""Number of float32 values per weight that an optimizer keeps, by the optimizer's name. Optimizers
that are not listed keep two, as AdamW does.
"""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PACKED = 1.2
"""Mean bytes per weight in the format of `engine.quantise`: one byte per weight, scales, and
weights that are not quantised.
"""
_NEWEST = 3
"""Largest number of version files if only the newest are kept, one of them incomplete."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Footprint:
    """The predicted memory and disk space of a run, in bytes.

    `weights` is the number of weights of the model.
    """

    weights: int
    trainer: float
    """Bytes of memory of the trainer's process, or of each trainer rank while it writes a
    checkpoint.
    """
    engines: float
    """Bytes of memory of all engine processes on this machine."""
    checkpoint: float
    """Bytes on disk of one checkpoint."""
    disk: float
    """Largest number of bytes on disk of checkpoints, versions and trained policies together."""
    kept: int
    """Number of checkpoints on disk while the newest one is written."""
    ranks: int = 0
    """Number of trainer ranks. 0 if the run's own process trains."""
    driver: float = 0.0
    """Bytes of memory of the run's own process if it has trainer ranks. Otherwise 0."""
    elsewhere: bool = False
    """True if the trainer ranks may be on other machines, so that their memory is not counted
    here.
    """
    scorers: int = 0
    """Number of processes with a second model for `old_logps.route = old_logit_model`. Otherwise
    0.
    """
    scorer: float = 0.0
    """Bytes of memory of each process with the second model, while it loads a version."""

    def __str__(self) -> str:
        ranks = max(1, self.ranks) * self.trainer + self.scorers * self.scorer
        memory = (0.0 if self.elsewhere else ranks) + self.driver + self.engines
        parts = [f"trainer {self.trainer / _GB:.1f}"]
        if self.ranks:
            parts = [f"{self.ranks} trainer ranks of {self.trainer / _GB:.1f}"]
        if self.scorers:
            kind = "ranks of the second model" if self.ranks else "second model"
            parts += [f"{self.scorers} {kind} of {self.scorer / _GB:.1f}"]
        place = ""
        if self.elsewhere:
            place = f", and {' and '.join(parts)} GB in the cluster"
            parts = []
        parts += [f"the run's process {self.driver / _GB:.1f}"] * bool(self.ranks)
        parts += [f"engines {self.engines / _GB:.1f}"]
        return (
            f"expected memory {memory / _GB:.1f} GB ({', '.join(parts)}){place} and activations\n"
            f"expected disk {self.disk / _GB:.1f} GB: {self.kept} checkpoints of "
            f"{self.checkpoint / _GB:.2f} GB, versions and the journal"
        )

    def require_disk(self, folder: Path) -> None:
        """Raise `ConfigError` if the disk of `folder` has too little space. The folder need not
        exist yet.
        """
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        lacking = _lacking_disk(folder, self.disk)
        if lacking:
            raise ConfigError(
                f"{lacking}, but the run needs about {self.disk / _GB:.2f} GB ({self.kept} "
                f"checkpoints of {self.checkpoint / _GB:.2f} GB, and versions). Free some space, "
                "choose another disk with --runs, or lower checkpoint.interval"
            )


def require_disk_to_resume(config: RunConfig, run: Path, step: int) -> None:
    """Raise `ConfigError` if the disk has too little space for the steps after `step` of the run
    `run`.

    The space is predicted from the sizes of the run's present checkpoints, versions and policy.
    Files that the run will remove or replace are taken into account. The journal is not counted.
    """
    checkpoints = [disk_size(path) for path in (run / CHECKPOINTS).glob("step*") if not path.suffix]
    checkpoint: float = max(checkpoints, default=0)
    if step == 0:  # the optimizer's moments are not in it yet
        checkpoint *= 1 + _MOMENTS.get(config.trainer.optimizer, 2)
    versions = [disk_size(path) for path in (run / VERSIONS).glob("*") if path.suffix != ".part"]
    policy = sum(path.stat().st_size for path in config.pretrained_folder.glob("*.safetensors"))
    rest = config.max_steps - step
    every = config.checkpoint.interval
    written = rest if config.checkpoint.minutes else math.ceil(rest / every)
    kept = config.checkpoint.keep + 1
    new_checkpoints = max(0, min(written, kept - len(checkpoints)))
    stored = kept * every if reads_old_versions(config) else _NEWEST
    new_versions = max(0, min(rest, stored - len(versions)))
    needed = new_checkpoints * checkpoint + new_versions * max(versions, default=0)
    needed += _num_policies(config) * policy
    if lacking := _lacking_disk(run, needed):
        raise ConfigError(
            f"{lacking}, but the rest of the run needs about {needed / _GB:.2f} GB "
            f"({new_checkpoints} more checkpoints of {checkpoint / _GB:.2f} GB, {new_versions} "
            f"versions, and the policy). Free some space, or lower checkpoint.interval"
        )


def _lacking_disk(folder: Path, needed: float) -> str:
    """Return a text with the free space of a disk. Empty if `needed` bytes are free, or if it is
    unknown.

    Incomplete files of an interrupted run count as free space, because a resume removes them.
    """
    usage = shutil.disk_usage(folder)
    parts = [part for name in (CHECKPOINTS, VERSIONS) for part in (folder / name).glob("*.part")]
    free = usage.free + sum(map(disk_size, parts))
    is_enough = not usage.total or free >= needed
    return "" if is_enough else f"{folder} has {free / _GB:.2f} GB free"


def _num_policies(config: RunConfig) -> int:
    """Return the largest number of model folders in a run folder: 1, or 3 if the best policy is
    kept.
    """
    return 3 if config.eval.keep_best != "none" else 1


def predict_footprint(config: RunConfig, policy: Policy) -> Footprint:
    """Predict the memory and disk space, in bytes, that a run of `policy` needs.

    The prediction holds from the first optimizer step on, when all buffers exist.
    """
    total = sum(weight.numel() for weight in policy.model.parameters())
    trained = sum(weight.numel() for weight in policy.weights().values())
    width = policy.dtype.itemsize
    moments = _WIDE * _MOMENTS.get(config.trainer.optimizer, 2)
    master = _WIDE if width < _WIDE else width
    delta = _delta_bytes(config, trained, width)
    copy = trained * width  # with adapters, copies of the model share the frozen weights
    live = live_versions(config)
    needs = config.old_logps.needs
    copies = needs.resident_models * (not needs.own_process) + needs_reference(config)
    copies += needs.trained_weights * (1 + needs.snapshots)  # in main memory, while they score
    copies += (live + 1) * (config.audit.share > 0)
    deltas = live * delta if needs.snapshots else 0.0
    averages = needs.averages * _WIDE * trained
    state = trained * (_GRADIENT + moments + (master if width < _WIDE else 0))
    taught, kept_teacher = _teacher_bytes(config, copy, width)
    trainer = PROCESS_BYTES + total * width + state + copies * copy + averages + deltas + taught
    if config.advantage.estimator == "gae" and config.critic.model == "own":
        trainer += copy + state
    if packs_weights(config):
        trainer += _PACKED * total  # of the version that was sent last
    ranks = config.cluster.trainers
    if ranks:
        trainer += trained * (master + moments) + copy  # what a checkpoint is written from
    if ranks and not config.old_logps.shares_deltas:
        trainer += copy  # of the last published version
    if (shards := ranks // config.cluster.replicas) > 1:
        whole = trainer - PROCESS_BYTES
        if policy.lora:  # adapters are whole on every rank
            whole -= (total - trained) * width * (1 - 1 / shards)
        else:  # passes round parts in the optimizer's precision to nearest
            if width < _WIDE and config.trainer.rounding != "nearest":
                whole += _WIDE * trained  # so those that are rounded otherwise are others
            whole = (whole - total * width * (width < _WIDE)) / shards
        trainer = PROCESS_BYTES + whole + width * _gathered_weights(policy, config)
    kept_copies = (live + needs.snapshots) * delta if config.audit.share else 0.0
    checkpoint = trained * (master + moments) + averages + deltas + kept_copies + kept_teacher
    version = delta if ranks or shares_deltas(config) else copy
    every = config.checkpoint.interval
    most = config.max_steps if config.checkpoint.minutes else math.ceil(config.max_steps / every)
    kept = min(config.checkpoint.keep + 1, most + 1)  # one is written before the first step
    stored = min(kept * every, config.max_steps + 1)
    if version == copy and not reads_old_versions(config):
        stored = min(stored, _NEWEST)
    versions = version * stored
    return Footprint(
        weights=total,
        trainer=trainer,
        engines=_engine_bytes(config, total, copy),
        checkpoint=checkpoint,
        disk=kept * checkpoint + versions + _num_policies(config) * total * width,
        kept=kept,
        ranks=ranks,
        driver=PROCESS_BYTES + total * width if ranks else 0.0,
        elsewhere=bool(ranks and config.cluster.address),
        **_scoring_footprint(config, policy, total=total * width, sent=copy / max(1, ranks)),
    )


def _teacher_bytes(config: RunConfig, copy: float, width: int) -> tuple[float, float]:
    """Return the bytes of teacher models in the trainer's memory, and of those in a checkpoint.

    `copy` is the size of a copy of the policy in bytes, and `width` that of one weight. Teachers
    that must be downloaded first are not counted.
    """
    options = config.technique_options.get("distil")
    if not isinstance(options, DistilConfig):
        return 0.0, 0.0
    folders = [Path(each) for each in options.sources if Path(each, "config.json").is_file()]
    loaded = width * sum(sum(count_weights(folder).values()) for folder in folders)
    return loaded + copy * (START in options.sources), copy * (options.refresh > 0)


def _scoring_footprint(
    config: RunConfig, policy: Policy, *, total: float, sent: float
) -> dict[str, Any]:
    """Return the values of the fields `scorers` and `scorer` of `Footprint`. Empty if they are 0.

    They describe the processes with a second model that compute old log-probabilities. `total` is
    the size of the model in bytes. `sent` is the number of bytes of new weights that such a process
    receives in one message: all weights, or the part of one trainer rank.
    """
    if not config.old_logps.needs.own_process:
        return {}
    count = config.old_logps.scoring_ranks if config.cluster.trainers else 1
    gathered = policy.dtype.itemsize * _gathered_weights(policy) * (count > 1)
    return {"scorers": count, "scorer": PROCESS_BYTES + total / count + gathered + sent}


def _gathered_weights(policy: Policy, config: RunConfig | None = None) -> float:
    """Return the number of weights that a rank gathers at a time: embedding, head and two layers.

    With `cluster.expert_parallel` in `config`, experts are not gathered.
    """
    model: Any = policy.model
    ends = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        ends[id(module.weight)] = module.weight.numel()  # tied ones count once
    apart = config is not None and config.cluster.expert_parallel
    total = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if not apart or ".experts." not in name
    )
    outside = sum(ends.values())
    num_layers: int = model.config.get_text_config().num_hidden_layers
    return float(outside + 2 * (total - outside) / num_layers)


def _delta_bytes(config: RunConfig, weights: int, width: int) -> float:
    """Return the bytes of the compressed difference between two successive versions.

    `weights` is the number of weights, and `width` the number of bytes of one.
    """
    if width > WORD:
        return FLOAT32_DELTA * weights
    return delta_bytes(weights, delta_rate(config.trainer.lr, config.trainer.rounding))


def _multiplied_bytes(dtype: str) -> int:
    """Return the bytes per weight of the precision in which an embedded engine here multiplies.

    It is `dtype`, or float32 on CPUs that multiply `dtype` slowly.
    """
    is_fast = linear.MULTIPLIES_FLOAT16 if dtype == "float16" else linear.MULTIPLIES_BFLOAT16
    widened = not is_fast and not torch.cuda.is_available()
    return _DTYPE_BYTES["float32" if widened else dtype]


def _engine_bytes(config: RunConfig, total: int, copy: int) -> float:
    """Return the bytes of memory of all embedded engines on this machine. Servers are not counted.

    `total` is the number of weights of the model. `copy` is the number of bytes of the trained
    weights.
    """
    engine = config.engine
    if engine.backend != "embedded":
        return 0.0
    applies_deltas = shares_deltas(config) and not loads_in_place(config)
    held: float = copy if applies_deltas else 0  # the weights that deltas are applied to
    if packs_weights(config):
        held = _PACKED * total
    engines = engine.processes * (PROCESS_BYTES + total * _multiplied_bytes(engine.dtype) + held)
    if not config.cluster.engine_hosts:
        return engines
    if config.cluster.address:
        return 0.0
    return config.cluster.engine_hosts * (PROCESS_BYTES + copy + engines)
