"""Facts about a run's initial policy, read from the files of its folder."""

from pathlib import Path
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.config.files import read_mapping
from unstale.config.hub import count_weights, reading
from unstale.routed_experts import num_experts


def local_folder(config: RunConfig) -> Path:
    """Return the folder of the initial policy on this machine. Nothing is downloaded or converted.

    The folder does not exist if the policy is not on this machine.
    """
    try:
        return config.find_policy(fetch=False)
    except ConfigError:
        return Path(config.model)


def num_weights(folder: Path) -> int:
    """Return the number of weights in a model folder. 0 if the folder has no weights.

    Raises ConfigError for a file that cannot be read.
    """
    return count_weights(folder).total()


def width(folder: Path) -> int | None:
    """Return the hidden size of the model in a folder, from its config.json. None if not known."""
    size = _read_text_model(folder).get("hidden_size")
    return size if isinstance(size, int) else None


def positions(folder: Path) -> int | None:
    """Return the longest context of the model in a folder, in tokens, from its config.json.

    None if not known.
    """
    number = _read_text_model(folder).get("max_position_embeddings")
    return number if isinstance(number, int) else None


def has_template(folder: Path) -> bool:
    """Return True if the tokenizer in a model folder has a chat template."""
    return (folder / "chat_template.jinja").is_file() or bool(
        _read(folder, "tokenizer_config.json").get("chat_template")
    )


def experts(folder: Path) -> int | None:
    """Return the number of experts in each layer of the model in a folder. 0 for a dense model.

    None if the folder has no config.json.
    """
    config = _read(folder)
    with reading(folder, "config.json"):
        return num_experts(config) if config else None


def _read_text_model(folder: Path) -> dict[str, Any]:
    """Return the language model's part of config.json.

    Other parts are, for example, for pictures.
    """
    config = _read(folder)
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the object in a JSON file of a model folder. Empty if the file cannot be read."""
    try:
        # A stranger's folder may hold a pipe, which opens only when somebody writes.
        return read_mapping(folder / name) if (folder / name).is_file() else {}
    except ConfigError:
        return {}  # loading the policy will report it
