"""What a run keeps so that every route can be tried on it afterwards: its versions, and the batches it trained on.

    recorded/versions/000012.safetensors    the forward weights that were published as version 12
    recorded/batches/000013.safetensors     what step 13 trained on: the sequences with a gradient

    went_wrong.safetensors                  when a number did: the batch that it was, and the weights that met it

Written aside and renamed, so that a file that is there is whole.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from unstale.config import ConfigError
from unstale.records import Batch

RECORDED = "recorded"
"""Where a run folder holds its recording."""

WENT_WRONG = "went_wrong.safetensors"
"""Where a run folder holds the batch that a number went wrong on."""

_LISTS = ("offsets", "episodes")
"""Columns of a batch that are no tensors."""


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """A batch, the step that trained on it, and the version that the policy was then."""

    step: int
    version: int
    batch: Batch
    version_gaps: tuple[tuple[int, int], ...] = ()
    """The policy's: where the numbers of its versions jumped."""


class Recording:
    """Writes. One file per version and per batch."""

    def __init__(self, folder: Path, *, base: int = 0) -> None:
        """`base`: the checksum of the weights under adapters; 0 where the versions are whole."""
        self._versions, self._batches, self._base = folder / "versions", folder / "batches", base
        for made in (self._versions, self._batches):
            made.mkdir(parents=True, exist_ok=True)

    def version(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """The forward weights of a version, in full."""
        _write(self._versions / _name(number), weights, {"base": str(self._base)})

    def batch(self, trained: TrainedOn) -> None:
        columns = _columns(trained.batch)
        about = {
            "step": str(trained.step),
            "version": str(trained.version),
            "jumps": json.dumps(trained.version_gaps),
        }
        _write(self._batches / _name(trained.step), columns, about)


class Recorded:
    """Reads what a `Recording` wrote."""

    def __init__(self, folder: Path) -> None:
        """FileNotFoundError names what is missing: all of it, or a version that a batch needs."""
        self._folder = folder
        self.versions = _numbers(folder / "versions")
        """Those that were published, in order."""
        self.steps = _numbers(folder / "batches")
        if not self.steps:
            raise FileNotFoundError(
                f"no recorded batch in {folder}: record a run with --audit.record true"
            )
        needed = {version for step in self.steps for version in self._needed(step)}
        if missing := sorted(needed - set(self.versions)):
            raise FileNotFoundError(
                f"{folder / 'versions'} lacks versions {missing}, which recorded batches need"
            )
        with safe_open(folder / "versions" / _name(self.versions[0]), framework="pt") as file:
            self.base = int((file.metadata() or {}).get("base", 0))

    def weights(self, version: int) -> dict[str, Tensor]:
        return load_file(self._folder / "versions" / _name(version))

    def batch(self, step: int) -> TrainedOn:
        path = self._folder / "batches" / _name(step)
        with safe_open(path, framework="pt") as file:
            about = file.metadata()
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        version_gaps = tuple((first, skipped) for first, skipped in json.loads(about["jumps"]))
        return TrainedOn(int(about["step"]), int(about["version"]), _batch(columns), version_gaps)

    def _needed(self, step: int) -> set[int]:
        trained = self.batch(step)
        return {trained.version, *trained.batch.version[trained.batch.sampled].unique().tolist()}


@dataclass(frozen=True, slots=True)
class WentWrong:
    """A number that was not finite: what met what. `columns` are `[T]` tensors beside the batch, `about` is text."""

    batch: Batch
    columns: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    about: Mapping[str, str]

    def save(self, path: Path) -> None:
        groups = {"batch": _columns(self.batch), "column": self.columns, "weight": self.weights}
        # Copies, because columns may share memory, which the format refuses.
        tensors = {
            f"{group}/{name}": tensor.clone()
            for group, held in groups.items()
            for name, tensor in held.items()
        }
        _write(path, tensors, dict(self.about))

    @classmethod
    def load(cls, path: Path) -> "WentWrong":
        """ConfigError for a file that `save` did not write."""
        try:
            return cls._read(path)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no batch that a number went wrong on: {error}") from error

    @classmethod
    def _read(cls, path: Path) -> "WentWrong":
        groups: dict[str, dict[str, Tensor]] = {"batch": {}, "column": {}, "weight": {}}
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118
                group, _, name = key.partition("/")
                groups[group][name] = file.get_tensor(key)
        return cls(_batch(groups["batch"]), groups["column"], groups["weight"], about)


def _columns(batch: Batch) -> dict[str, Tensor]:
    columns = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return columns | {name: torch.tensor(columns[name], dtype=torch.long) for name in _LISTS}


def _batch(columns: Mapping[str, Tensor]) -> Batch:
    held: dict[str, Any] = dict(columns)
    return Batch(**held | {name: tuple(columns[name].tolist()) for name in _LISTS})


def _name(number: int) -> str:
    return f"{number:06d}.safetensors"


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.safetensors"))


def _write(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str]) -> None:
    aside = path.with_suffix(".part")
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        aside,
        metadata=about,
    )
    aside.replace(path)
