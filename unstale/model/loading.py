"""Load models and tokenizers from local folders."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from unstale.config import ConfigError
from unstale.config.chat_templates import CONTROL_TOKENS, NAMED
from unstale.config.hub import damaged_weights, reading, require_safe_weights
from unstale.model.pictures import reads_pictures
from unstale.model.template_limits import require_small_template

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The dtypes of forward passes, by name. float64 is for tests."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Files of a tokenizer, of which a model folder must have at least one. Without any of them,
transformers makes an empty tokenizer and reports no error.
"""


def load_tokenizer(folder: Path, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local folder.

    `chat_template` replaces the tokenizer's own chat template, unless it is "". It is the name of a
    built-in template (`NAMED`) or the text of a template. Raises ConfigError if the folder has no
    tokenizer, if there is no chat template, or if the template fails.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"policy: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there"
        )
    with reading(folder, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if chat_template:
        _set_template(tokenizer, chat_template)
    require_small_template(tokenizer, folder)
    if chat_template:
        _require_question(tokenizer)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"policy: the tokenizer in {folder} has no chat template (chat_template.jinja): choose "
            f"one with --chat-template {', '.join(NAMED)} or a file"
        )
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, chosen: str) -> None:
    """Set the chat template to `chosen`: a name in `NAMED`, or the text of a template.

    If the tokenizer begins texts with the BOS token, a template from `NAMED` does, too.
    """
    lacking = [
        token
        for token in CONTROL_TOKENS.get(chosen, ())
        if token not in tokenizer.get_added_vocab()
    ]
    if lacking:
        raise ConfigError(
            f"chat_template = {chosen} needs the tokens {' and '.join(lacking)}, which "
            "the policy's tokenizer lacks: use plain"
        )
    template = NAMED.get(chosen, chosen)
    first = tokenizer("x").input_ids[0]
    if chosen in NAMED and tokenizer.bos_token and first == tokenizer.bos_token_id:
        template = "{{- bos_token }}" + template
    tokenizer.chat_template = template


def _require_question(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the chat template fails, or omits the text of a user's message."""

    def omits(content: Any) -> bool:
        message = {"role": "user", "content": content}
        return "?" not in str(tokenizer.apply_chat_template([message], tokenize=False))

    try:  # some templates of vision-language models read only lists of parts
        is_left_out = omits("?") and omits([{"type": "text", "text": "?"}])
    except (TemplateError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"chat_template cannot be rendered: {_one_line(error)}") from error
    if is_left_out:
        raise ConfigError("chat_template leaves out the text of a user's message")


def load_model(folder: Path, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Load a causal language model from a local folder, with its vision tower if it has one.

    `options` are passed on to transformers' `from_pretrained`. Raises ConfigError if the folder is
    damaged or incomplete.
    """
    require_safe_weights(folder)
    with no_progress_bars(), reading(folder, "model"), _named_damage(folder):
        kind: Any = AutoModelForImageTextToText if reads_pictures(folder) else AutoModelForCausalLM
        read: Any = kind.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            **options,
        )
    model, info = read
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"policy: {folder} lacks {len(missing)} weights of its architecture, "
            f"for example {missing[0]}"
        )
    return cast(PreTrainedModel, model)


@contextmanager
def _named_damage(folder: Path) -> Iterator[None]:
    """Return a context that turns a safetensors error into a ConfigError with the file's name."""
    try:
        yield
    except SafetensorError as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: SafetensorError) -> ConfigError:
    """Return a ConfigError that names the first weight file of a folder that cannot be read."""
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
