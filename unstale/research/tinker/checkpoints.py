"""Saved versions: files that are written once, and named by paths such as
`tinker://MODEL/weights/NAME`.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from unstale.research.tinker.trainer import Saved, Shape
from unstale.research.tinker.wire import checkpoint_name
from unstale.rollout.endpoint.schemas import Refused

Kind = Literal["weights", "sampler_weights"]
KEPT_UNNAMED = 16
"""Number of sampler weights without a name that are kept for each model. All are deleted when the
service ends.
"""
_SCHEME = "tinker://"
_UNNAMED = "unnamed-"


@dataclass(frozen=True, slots=True)
class Facts:
    """The data of a saved version that are not tensors: its base model, shape and
    number of steps.
    """

    base: int
    """Checksum of the base model's weights."""
    shape: Shape
    steps: int


class Checkpoints:
    """The saved versions of all tenants, in one folder. A tenant can only name its own versions."""

    def __init__(self, folder: Path, *, base: int) -> None:
        self._folder = folder
        self._base = base
        self._unnamed: dict[str, list[Path]] = {}
        for left in folder.glob(f"*/*/sampler_weights/{_UNNAMED}*"):
            left.unlink()

    def write(  # noqa: PLR0913 - the parts of a path, and what it names
        self, tenant: str, model_id: str, kind: Kind, name: str, saved: Saved, shape: Shape
    ) -> str:
        """Write a version and return its path.

        Raises `Refused` if the name is taken, or has the prefix of versions without a name.
        """
        if name.startswith(_UNNAMED):
            raise Refused(
                f"path must not begin with {_UNNAMED!r}, got {name[:140]!r}", param="path"
            )
        return self._write(tenant, model_id, kind, name, saved, shape)

    def _write(  # noqa: PLR0913 - as `write`
        self, tenant: str, model_id: str, kind: Kind, name: str, saved: Saved, shape: Shape
    ) -> str:
        path = f"{_SCHEME}{model_id}/{kind}/{checkpoint_name(name)}"
        file = self._file(tenant, path)
        if file.exists():
            raise Refused(f"{path} exists, and a path names one version for good", param="path")
        file.parent.mkdir(parents=True, exist_ok=True)
        facts = {"base": self._base, "steps": saved.steps, "shape": asdict(shape)}
        tensors = {f"adapter/{each}": tensor for each, tensor in saved.adapters.items()}
        unfinished = file.with_suffix(".part")
        save_file(tensors | dict(saved.moments), unfinished, {"facts": json.dumps(facts)})
        os.replace(unfinished, file)
        return path

    def write_unnamed(
        self, tenant: str, model_id: str, number: int, saved: Saved, shape: Shape
    ) -> str:
        """Write sampler weights without a name, and return their path. The oldest such weights are
        deleted.
        """
        name = f"{_UNNAMED}{number}"
        path = self._write(tenant, model_id, "sampler_weights", name, saved, shape)
        files = self._unnamed.setdefault(f"{tenant}/{model_id}", [])
        files.append(self._file(tenant, path))
        while len(files) > KEPT_UNNAMED:
            files.pop(0).unlink(missing_ok=True)
        return path

    def facts(self, tenant: str, path: str) -> Facts:
        """Return a saved version's data without its tensors.

        Raises `Refused` if the tenant has no such version, or if its base model is another one.
        """
        return self._read(tenant, path, tensors=False)[1]

    def read(self, tenant: str, path: str) -> tuple[Saved, Shape]:
        """Return a saved version.

        Raises `Refused` if the tenant has no such version, or if its base model is another one.
        """
        saved, facts = self._read(tenant, path, tensors=True)
        return saved, facts.shape

    def _read(self, tenant: str, path: str, *, tensors: bool) -> tuple[Saved, Facts]:
        file = self._file(tenant, path)
        try:
            with safe_open(file, "pt") as opened:
                found = json.loads(opened.metadata()["facts"])
                names = opened.keys() if tensors else []
                values = {name: opened.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            hint = ""
            if file.name.startswith(_UNNAMED):
                hint = f"; of weights without a name, the last {KEPT_UNNAMED} are kept"
            raise Refused(f"there are no weights {path[:200]}{hint}", status=404) from error
        facts = Facts(found["base"], Shape(**found["shape"]), found["steps"])
        if facts.base != self._base:
            raise Refused(f"{path} was trained on another base model")
        adapters = {
            name.removeprefix("adapter/"): value
            for name, value in values.items()
            if name.startswith("adapter/")
        }
        moments = {name: value for name, value in values.items() if name.startswith("exp_")}
        return Saved(adapters, moments, facts.steps), facts

    def _file(self, tenant: str, path: str) -> Path:
        """Return the file for a path `tinker://...`. Raises `Refused` for a malformed path."""
        parts = path.removeprefix(_SCHEME).split("/")
        is_path = path.startswith(_SCHEME) and len(parts) == 3
        if not is_path or parts[1] not in ("weights", "sampler_weights"):
            raise Refused(
                f"a path is tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME, "
                f"got {path[:200]!r}",
                param="path",
            )
        model, kind, name = parts
        folder = hashlib.sha256(model.encode()).hexdigest()[:32]
        return self._folder / tenant / folder / kind / f"{checkpoint_name(name)}.safetensors"
