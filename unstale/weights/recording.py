"""A recording of a run's weight versions and batches, with which `unstale audit` checks `old_logp`.

    recorded/versions/000012.safetensors    the weights of version 12
    recorded/batches/000013.safetensors     the sequences that step 13 trained on

    went_wrong.safetensors                  the batch and weights that gave a non-finite number

Each file is written under another name and then renamed, so no file is ever incomplete.
"""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from unstale.config import ConfigError
from unstale.kept_sets import KeptSets
from unstale.model.whole_weights import WholeWeights
from unstale.records import Batch, Lesson, PlacedTokens, SharedTokens, StoredLogps
from unstale.routed_experts import ExpertTable, RoutedExperts
from unstale.weights.bits import bytes_of
from unstale.weights.codec import file_header

RECORDED = "recorded"
"""Name of the folder in a run folder that has the recording."""

WENT_WRONG = "went_wrong.safetensors"
"""Name of the file in a run folder that has the batch and weights of a step whose computation gave
NaN or infinity.
"""

_LISTS = ("offsets", "episodes")
"""Names of the columns that are tuples in a batch, not tensors."""

_STORED = ("stored.old_logp", "stored.exact")
"""Names of the columns that only a batch with replayed tokens (which are trained on again) has."""

_LESSONS = "lessons"
"""Name of the column that only a batch with lessons has. A lesson is a text of a sequence that only
its teacher model reads. The column has, for each lesson: the teacher, the offset in the sequence
before which the text is read, its number of tokens, and the tokens.
"""

_WEIGHT = "weight/"
"""Prefix of the names of weights in the file of a failed step."""

_ROUTED_EXPERTS = ("routes.complete", "routes.places", "routes.experts")
"""Names of the columns that only a batch with routed experts has: the experts that an MoE model
chose for each token. A row of `routes.places` is (sequence, version, start, count).
"""

_KEPT_SETS = ("kept_sets.sizes", "kept_sets.ids")
"""Columns that only a batch of truncated sampling (`top_p`, `top_k`, `min_p`) has: the sets of
tokens to which sampling was truncated.
"""


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch, the step that trained on it, and the version of the policy before that step."""

    step: int
    version: int
    batch: Batch
    version_gaps: tuple[tuple[int, int], ...] = ()
    """Ranges of version numbers that the run skipped when it was resumed, as in
    `unstale.model.versions`.
    """


class Recording:
    """A writer of a run's weight versions and batches, with one file for each."""

    def __init__(self, folder: Path, *, base: int = 0, writes: bool = True) -> None:
        """Create the folders of a recording.

        `base` is the checksum of the frozen weights if the run trains LoRA adapters, else 0. With
        several trainer ranks, only one has `writes=True`. The others write nothing.
        """
        self._versions = folder / "versions"
        self._batches = folder / "batches"
        self._base = base
        self._writes = writes
        if writes:
            self._versions.mkdir(parents=True, exist_ok=True)
            self._batches.mkdir(parents=True, exist_ok=True)

    def version(self, number: int, weights: WholeWeights) -> None:
        """Write the weights of a version to a file, one tensor at a time."""
        if self._writes:
            _write(self._versions / _name(number), weights, {"base": str(self._base)})
        else:
            weights.skip()

    def batch(self, trained: RecordedBatch) -> None:
        if not self._writes:
            return
        columns = _columns(trained.batch)
        about = {
            "step": str(trained.step),
            "version": str(trained.version),
            "jumps": json.dumps(trained.version_gaps),
        }
        _write(self._batches / _name(trained.step), _held(columns), about)


class Recorded:
    """A reader of a `Recording`: the batches of a run, and the weights of each version.

    To check a batch, the versions that sampled its tokens and the version before its step are
    needed. A batch is skipped if one of these was not recorded. This happens if the run was killed
    before it recorded a version, or if recording began with a resume.
    """

    def __init__(self, folder: Path) -> None:
        """Open the recording in `folder`.

        Raises FileNotFoundError if it has no batch, or if every batch needs a version that was not
        recorded.
        """
        self._folder = folder
        self.versions = _numbers(folder / "versions")
        """The numbers of the recorded versions, in ascending order."""
        steps = _numbers(folder / "batches")
        if not steps:
            raise FileNotFoundError(
                f"no recorded batch in {folder}: record a run with --audit.record true"
            )
        missing = {step: self._needed(step) - {*self.versions} for step in steps}
        self.steps = [step for step in steps if not missing[step]]
        """The numbers of the steps whose batches can be read, in ascending order."""
        self.skipped_steps = [step for step in steps if missing[step]]
        """The numbers of the steps whose batches are skipped, in ascending order."""
        self.missing_versions = sorted({version for each in missing.values() for version in each})
        """The versions that skipped batches need and that were not recorded, in ascending order."""
        if not self.steps:
            raise FileNotFoundError(
                f"{folder / 'versions'} lacks versions {self.missing_versions}, and each of the "
                f"{len(steps)} recorded batches needs one of them: record another run"
            )
        with safe_open(folder / "versions" / _name(self.versions[0]), framework="pt") as file:
            self.base = int((file.metadata() or {}).get("base", 0))

    def weights(self, version: int) -> dict[str, Tensor]:
        return load_file(self._folder / "versions" / _name(version))

    def batch(self, step: int) -> RecordedBatch:
        path = self._folder / "batches" / _name(step)
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version_gaps = tuple((first, skipped) for first, skipped in json.loads(about["jumps"]))
        return RecordedBatch(
            int(about["step"]), int(about["version"]), _batch(columns), version_gaps
        )

    def _needed(self, step: int) -> set[int]:
        trained = self.batch(step)
        return {trained.version, *trained.batch.version[trained.batch.sampled].unique().tolist()}


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The batch and weights of a training step that gave NaN or infinity, to repeat the step.

    `columns` are further tensors `[T]`, with one entry for each token of the batch. `about`
    describes the failure, as texts by name.
    """

    batch: Batch
    columns: Mapping[str, Tensor]
    weights: WholeWeights
    about: Mapping[str, str]

    def save(self, path: Path) -> None:
        """Write the failed step to the file `path`, with one weight at a time in memory."""
        columns = {f"batch/{name}": tensor for name, tensor in _columns(self.batch).items()}
        columns |= {f"column/{name}": tensor for name, tensor in self.columns.items()}
        layout = {f"{_WEIGHT}{name}": like for name, like in self.weights.layout.items()}

        def read(name: str) -> Tensor:
            own = columns.get(name)
            return self.weights.read(name.removeprefix(_WEIGHT)) if own is None else own

        _write(path, WholeWeights(columns | layout, read), dict(self.about))

    @classmethod
    def load(cls, path: Path) -> "FailedStep":
        """Return the failed step that `save` wrote to a file.

        Raises ConfigError for any other file.
        """
        try:
            return cls._read(path)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a saved batch of a failed step: {error}") from error

    @classmethod
    def _read(cls, path: Path) -> "FailedStep":
        groups: dict[str, dict[str, Tensor]] = {"batch": {}, "column": {}, "weight": {}}
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118
                group, _, name = key.partition("/")
                groups[group][name] = file.get_tensor(key)
        return cls(_batch(groups["batch"]), groups["column"], _held(groups["weight"]), about)


def _columns(batch: Batch) -> dict[str, Tensor]:
    columns = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    for name in ("group", "reward", "turn_rewards"):  # no step of a recorded batch reads them
        del columns[name]
    if columns["engine_entropy"] is None:
        del columns["engine_entropy"]
    if lessons := columns.pop("lessons"):
        rows = [(each.teacher, each.start, len(each.tokens), *each.tokens) for each in lessons]
        columns[_LESSONS] = torch.tensor([number for row in rows for number in row])
    table = columns.pop("routed_experts")
    if stored := columns.pop("stored"):
        columns |= dict(zip(_STORED, (stored.old_logp, stored.exact), strict=True))
    if kept := columns.pop("kept_sets"):
        columns |= zip(_KEPT_SETS, kept.to_tensors(), strict=True)
    for prefix, part in (("placed_", columns.pop("placed")), ("shared_", columns.pop("shared"))):
        names = [each.name for each in fields(part) if each.type == "Tensor"] if part else []
        columns |= {f"{prefix}{name}": getattr(part, name) for name in names}
    columns |= {name: torch.tensor(columns[name], dtype=torch.long) for name in _LISTS}
    return columns | _expert_columns(table) if table else columns


def _batch(columns: Mapping[str, Tensor]) -> Batch:
    apart = (*_ROUTED_EXPERTS, *_STORED, *_KEPT_SETS, _LESSONS)
    placed, shared = (_under(prefix, columns) for prefix in ("placed_", "shared_"))
    values: dict[str, Any] = {
        key: value
        for key, value in columns.items()
        if key not in apart and not key.startswith(("placed_", "shared_"))
    }
    for name in _LISTS:
        values[name] = tuple(columns[name].tolist())
    if _LESSONS in columns:
        numbers = iter(columns[_LESSONS].tolist())
        values["lessons"] = tuple(
            Lesson(teacher, next(numbers), tuple(islice(numbers, next(numbers))))
            for teacher in numbers
        )
    if _ROUTED_EXPERTS[0] in columns:
        complete, places, experts = (columns[name] for name in _ROUTED_EXPERTS)
        values["routed_experts"] = _expert_table(complete, places, experts, len(values["episodes"]))
    if _STORED[0] in columns:
        values["stored"] = StoredLogps(*(columns[name] for name in _STORED))
    if _KEPT_SETS[0] in columns:
        values["kept_sets"] = KeptSets.of_tensors(*(columns[name] for name in _KEPT_SETS))
    if placed:  # its edits are needed only to score it, and the step has its scores
        values["placed"] = PlacedTokens(**placed, edits=((),) * len(values["episodes"]))
    if shared:
        values["shared"] = SharedTokens(**shared)
    return Batch(**values)


def _under(prefix: str, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): column
        for name, column in columns.items()
        if name.startswith(prefix)
    }


def _expert_columns(table: ExpertTable) -> dict[str, Tensor]:
    places = []
    experts = [torch.empty(0, dtype=torch.uint8)]
    for sequence, versions in enumerate(table.sequences):
        for version, routed_experts in versions.items():
            for record in routed_experts.chain():
                places.append((sequence, version, record.start, len(record.experts)))
                experts.append(torch.tensor(record.experts))
    rows = torch.cat(experts[1:]) if places else experts[0].reshape(0, 0, 0)
    values = (table.complete, torch.tensor(places, dtype=torch.long).reshape(-1, 4), rows)
    return dict(zip(_ROUTED_EXPERTS, values, strict=True))


def _expert_table(
    complete: Tensor, places: Tensor, experts: Tensor, num_sequences: int
) -> ExpertTable:
    sequences: list[dict[int, RoutedExperts]] = [{} for _ in range(num_sequences)]
    first = 0
    for sequence, version, start, count in places.tolist():
        versions = sequences[sequence]
        rows = experts[first : first + count].numpy()
        versions[version] = RoutedExperts(start, rows, versions.get(version))
        first += count
    return ExpertTable(tuple(sequences), complete)


def _name(number: int) -> str:
    return f"{number:06d}.safetensors"


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.safetensors"))


def _held(tensors: Mapping[str, Tensor]) -> WholeWeights:
    return WholeWeights(tensors, tensors.__getitem__)


def _write(path: Path, tensors: WholeWeights, about: dict[str, str]) -> None:
    """Write a safetensors file, with one tensor at a time in memory.

    After an error, the remaining tensors are still read, because other trainer ranks take part in
    reading them.
    """
    part = path.with_suffix(".part")
    left = iter(tensors)
    try:
        header, starts = file_header(tensors.layout, about)
        with part.open("wb") as file:

            def write(item: tuple[str, Tensor]) -> None:
                name, tensor = item
                file.seek(starts[name])
                file.write(bytes_of(tensor))

            file.write(header)
            deque(map(write, left), maxlen=0)  # a loop's variable would keep each tensor too long
        part.replace(path)
    finally:
        deque(left, maxlen=0)
