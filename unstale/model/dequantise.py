"""A program that converts a GGUF file into a model folder: python -m unstale.model.dequantise.

It runs as a separate process, so that the memory for all weights is freed at its end.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from unstale.config import ConfigError
from unstale.config.gguf import ORIGIN

WRONG_FILE = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError)
"""The errors that transformers and gguf raise for a damaged file or an unsupported model."""
BYTES_PER_WEIGHT = 4
"""Bytes of a saved weight. float32 represents every dequantised value exactly."""


def dequantise(file: Path, folder: Path) -> None:
    """Write the float32 weights, configuration and tokenizer of a GGUF file to a new folder.

    The folder appears complete or not at all. Its name must begin with the file's SHA-256 and a
    hyphen. Raises `ConfigError` if the file is damaged or the disk has too little space. Raises an
    error of `WRONG_FILE` if the model is not supported.
    """
    try:
        origin, weights = describe(file)
    except WRONG_FILE as error:
        raise ConfigError(
            f"it is damaged or incomplete ({error}): copy or download it again"
        ) from error
    origin["sha256"] = folder.name.partition("-")[0]
    free, needed = shutil.disk_usage(folder.parent).free, BYTES_PER_WEIGHT * weights
    if free < needed:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and {weights:,} float32 weights need "
            f"{needed / 1e9:.1f} GB. Set XDG_CACHE_HOME to a folder with more"
        )
    partial = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    _save(file, partial)
    (partial / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    for path in partial.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())
    partial.rename(folder)


def describe(file: Path) -> tuple[dict[str, str], int]:
    """Return facts about a GGUF file, and the number of its weights.

    The facts have the keys `file` (the file's name), `architecture` and `quantisation`.
    """
    from gguf import GGUFReader, LlamaFileType

    reader = GGUFReader(file)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    kind = value("general.file_type")
    known = {each.value: each.name.removeprefix("MOSTLY_") for each in LlamaFileType}
    origin = {
        "file": file.name,
        "architecture": str(value("general.architecture")),
        "quantisation": known.get(kind, f"type {kind}"),
    }
    return origin, sum(int(tensor.n_elements) for tensor in reader.tensors)


def _save(file: Path, folder: Path) -> None:
    read: Any = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with the name of the weight
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
    )
    model, info = read
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it lacks {len(missing)} weights, for example {missing[0]}")
    # transformers refuses to save a model that has this, although its weights are plain
    del model.config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    wrong = list(info["mismatched_keys"])
    for name, tensor in model.state_dict().items():  # transformers 5.19 loads other shapes
        if tensor.shape != shapes.get(name, tensor.shape):
            wrong.append((name, tensor.shape, shapes[name]))
    for name, stored, expected in sorted(wrong):
        raise ValueError(
            f"{name} has the shape {tuple(stored)}, and transformers reads {tuple(expected)} from "
            "the metadata of the file: convert the original model instead"
        )
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _print_reason(kind: type[BaseException], error: BaseException, trace: object) -> None:
    """Print an error in one line on standard output, where the parent process reads it."""
    text = re.sub(r"\s+", " ", str(error))[:300]
    sys.stdout.write(f"{text or kind.__name__}\n")


if __name__ == "__main__":
    sys.excepthook = _print_reason
    logging.set_verbosity_error()  # reports have names of the file, and codes for terminals
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
