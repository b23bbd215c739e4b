"""Load models and tokenizers from local folders."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from unstale.config import ConfigError
from unstale.config.hub import damaged_weights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The precisions of a forward pass by name. float64 is for tests."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of a tokenizer, of which one must exist. Without any, transformers makes an empty tokenizer
and reports no error.
"""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder.

    Raises ConfigError if the folder has none, or if the tokenizer has no chat template.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"policy: the tokenizer in {folder} cannot be read: {_one_line(error)}"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigError(
            f"policy: the tokenizer in {folder} has no chat template (chat_template.jinja)"
        )
    return tokenizer


def load_model(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Load a causal language model from a local folder.

    `options` are further arguments of transformers' `from_pretrained`. Raises ConfigError if the
    folder is damaged or incomplete.
    """
    try:
        with no_progress_bars():
            read: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                use_safetensors=True,
                trust_remote_code=False,
                **options,
            )
    except SafetensorError as error:
        raise _damaged(folder, error) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"policy: the model in {folder} cannot be read: {_one_line(error)}"
        ) from error
    model, info = read
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"policy: {folder} lacks {len(missing)} weights of its architecture, "
            f"for example {missing[0]}"
        )
    return cast(PreTrainedModel, model)


def float_dtypes(folder: Path) -> set[str]:
    """Return the dtypes of the numbers in a folder's weights, as safetensors names them."""
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return {name for name in found if name in ("F64", "F32", "F16", "BF16")}


def _damaged(folder: Path, error: SafetensorError) -> ConfigError:
    """Return the error for the first file of a folder's weights that cannot be read."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as found:
            return damaged_weights(path, found)
    return ConfigError(f"policy: the model in {folder} cannot be read: {_one_line(error)}")


def vocab_size(embedding: nn.Module) -> int:
    """Return the number of rows of an embedding or an output head."""
    return int(cast(Tensor, embedding.weight).shape[0])


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]


@contextmanager
def no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
