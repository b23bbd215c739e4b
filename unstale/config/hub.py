"""Find a model of the Hugging Face hub in the local cache, or download it."""

import re
from functools import cache
from pathlib import Path

from unstale.config.checks import ConfigError

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_IGNORED = ["*/*", "consolidated*"]
"""Patterns of files that are not downloaded, such as the same weights in another format."""


def model_folder(policy: str, *, download: bool) -> Path:
    """Return the local folder of a model.

    `policy` is a path, or the hub name `organisation/name` with or without `@revision`. With
    `download` a model that the local cache lacks is fetched from the hub. Raises `ConfigError` if
    the model is neither a folder nor in the cache.
    """
    name = _NAME.fullmatch(policy)
    if Path(policy).exists() or not name:
        return Path(policy)
    return _snapshot(name["repository"], name["revision"], download)


@cache
def _snapshot(repository: str, revision: str | None, download: bool) -> Path:
    import huggingface_hub
    from httpx import HTTPError  # huggingface_hub passes on the errors of its client

    def fetch(*, local_files_only: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=_FILES,
            ignore_patterns=_IGNORED,
        )
        return Path(str(folder))

    try:
        return fetch(local_files_only=True)
    except (OSError, ValueError) as error:
        if not download:
            raise ConfigError(
                f"policy: there is no folder {repository}, and no such model in the cache "
                f"{huggingface_hub.constants.HF_HUB_CACHE}. --policy-download fetches it"
            ) from error
    try:
        return fetch(local_files_only=False)
    except (OSError, ValueError, HTTPError) as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        raise ConfigError(f"policy: {repository} cannot be downloaded: {reason}") from error
