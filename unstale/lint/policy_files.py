"""The size of the initial policy, from the files of its folder."""

import json
import math
from pathlib import Path

from safetensors import safe_open


def num_weights(folder: Path) -> int:
    """Return the number of weights in a model folder's safetensors files, from their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            names = file.keys()
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total


def width(folder: Path) -> int | None:
    """Return the hidden size in a model folder's config.json; None if it gives none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the policy will report it
    size = {**config, **config.get("text_config", {})}.get("hidden_size")
    return size if isinstance(size, int) else None
