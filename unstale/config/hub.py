"""Find the folder of a model: a local folder, a converted GGUF file, or one in the hub's cache.

The hub is Hugging Face's.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Literal

from safetensors import SafetensorError, safe_open

from unstale.config.checks import ConfigError
from unstale.config.files import read_mapping
from unstale.config.gguf import converted_folder, gguf_file

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a placeholder for a file that Git LFS has not fetched."""
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]
_IGNORED = ["*/*", "consolidated*"]
"""Patterns of a model's files that are not downloaded, such as weights in other formats."""
_TOKENIZER = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
"""Patterns of vocabulary files, of which a tokenizer has at least one."""
_TOKENIZER_FILES = " ".join(f"--include '*.{kind}'" for kind in ("json", "jinja", "txt", "model"))
"""Options with which `hf download` leaves out the weights."""
_PACKAGE = Path(__file__).parents[1]


def model_folder(
    policy: str, *, download: bool = False, gguf: str = "", convert: bool = True
) -> Path:
    """Return the local folder of a model.

    `policy` is a path, a hub name `organisation/name` with or without `@revision`, or a GGUF file,
    which is converted to a folder in the cache. `gguf` is the name of such a file in the folder
    `policy`. With `download`, files that the local cache lacks are fetched from the hub. Without
    `convert`, a GGUF file is not converted, and its folder may not exist. A path is returned
    unchecked. Raises `ConfigError` if a GGUF file is missing or damaged, or if a hub model is
    incomplete in the cache.
    """
    if file := gguf_file(policy, gguf):
        return converted_folder(file, convert=convert)
    name = _NAME.fullmatch(policy)
    if Path(policy).exists() or not name:
        return Path(policy)
    return _snapshot(name["repository"], name["revision"], download)


def is_hub_name(model: str) -> bool:
    """Return True if `model` has the form `organisation/name`, and is not a path or a GGUF file."""
    is_name = _NAME.fullmatch(model) is not None and not model.endswith(".gguf")
    return is_name and not Path(model).exists()


def cached_folder(model: str, part: Literal["tokenizer", "config"]) -> Path:
    """Return a model's local folder for reading only a part of it. Nothing is downloaded.

    `model` is as `policy` in `model_folder`. `part` is the tokenizer with its chat template, or
    `config.json`. Raises `ConfigError` if the local cache lacks this part of a hub model.
    """
    if file := gguf_file(model):
        return converted_folder(file)
    name = _NAME.fullmatch(model)
    if name is None or Path(model).exists():
        return Path(model)
    repository, revision = name["repository"], name["revision"]
    files = "config.json" if part == "config" else _TOKENIZER_FILES
    at = f" --revision {revision}" if revision else ""
    fix = f"`hf download {repository}{at} {files}` fetches what is missing"
    folder = _cached(repository, revision)
    if folder is None:
        raise ConfigError(f"{_not_cached(repository)}. {fix}")
    missing = _missing(folder, _listed(repository, revision))
    needed = [
        file
        for file in missing
        if (file == "config.json" if part == "config" else ".safetensors" not in file)
    ]
    if needed:
        raise ConfigError(
            f"the model {repository} in {folder} is incomplete, without {_words(needed)}. {fix}"
        )
    return folder


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Return a context that turns an error of the hub or the network into a `ConfigError`.

    `what` begins the message.
    """
    # HTTPError is the base class of its client's errors: httpx or httpx2, by its version
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        reason = re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__
        raise ConfigError(f"{what}: {reason}") from error


@cache
def _snapshot(repository: str, revision: str | None, download: bool) -> Path:
    folder = _cached(repository, revision)
    problem = _not_cached(repository)
    if folder:
        missing = _missing(folder, _listed(repository, revision))
        if not missing:
            return folder
        problem = f"the model {repository} in {folder} is incomplete, without {_words(missing)}"
    if not download:
        raise ConfigError(f"policy: {problem}. --model_download fetches what is missing")
    with hub_errors(f"policy: {repository} cannot be downloaded"):
        fetched = _fetch(repository, revision, local_files_only=False)
    if missing := _missing(fetched):
        raise ConfigError(
            f"policy: after the download, {fetched} is still without {_words(missing)}. Check that "
            f"the hub can be reached, and that it has these files of {repository}"
        )
    return fetched


def _fetch(repository: str, revision: str | None, *, local_files_only: bool) -> Path:
    import huggingface_hub

    folder = huggingface_hub.snapshot_download(
        repository,
        revision=revision,
        allow_patterns=_FILES,
        ignore_patterns=_IGNORED,
        local_files_only=local_files_only,
    )
    return Path(folder)


def _cached(repository: str, revision: str | None) -> Path | None:
    """Return a hub model's folder in the local cache. None if the cache does not have the model.

    Files of the model may be missing from the folder.
    """
    try:
        return _fetch(repository, revision, local_files_only=True)
    except (OSError, ValueError) as error:
        folder = getattr(error, "snapshot_path", None)  # set if the hub's library misses a file
        return Path(folder) if folder else None


def _not_cached(repository: str) -> str:
    import huggingface_hub

    cache_folder = huggingface_hub.constants.HF_HUB_CACHE
    return f"there is no folder {repository}, and no such model in the cache {cache_folder}"


def _listed(repository: str, revision: str | None) -> list[str]:
    """Return the names of a model's files on the hub, from a list that an earlier download saved.

    Empty if no list was saved.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    with suppress(CachedRepoTreeNotFoundError):
        names = [file.path for file in get_cached_repo_tree(repository, revision=revision)]
        return list(filter_repo_objects(names, allow_patterns=_FILES, ignore_patterns=_IGNORED))
    return []


def _missing(folder: Path, listed: list[str] | None = None) -> list[str]:
    """Return the files that a model folder lacks, of those in `listed` and those that every model
    needs.

    `listed` has the names of the model's files on the hub. A link to nothing, as after an
    interrupted download, counts as a missing file.
    """
    needed = {*(listed or []), "config.json"}
    for index in folder.glob("*.safetensors.index.json"):
        # Loading the policy reports a damaged index.
        with suppress(ConfigError, KeyError, TypeError, AttributeError):
            needed |= set(read_mapping(index)["weight_map"].values())
    missing = {name for name in needed if not (folder / name).is_file()}

    def has(*patterns: str) -> bool:
        return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))

    if not has("*.safetensors") and not any(name.endswith(".safetensors") for name in missing):
        missing.add("*.safetensors")
    if not has(*_TOKENIZER) and not any(name.startswith("tokenizer") for name in missing):
        missing.add("tokenizer.json")
    return sorted(missing)


def _words(names: list[str]) -> str:
    """Return the first four names as text, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} others" if len(names) > 4 else "")


def count_weights(folder: Path) -> Counter[str]:
    """Return how many weights of each dtype, such as F32, a model has, from the headers of its
    files.

    Raises `ConfigError` for a file that cannot be read.
    """
    counts: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                for name in [*file.keys()]:
                    tensor = file.get_slice(name)
                    counts[tensor.get_dtype()] += math.prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise damaged_weights(path, error) from error
    return counts


def damaged_weights(path: Path, reason: Exception) -> ConfigError:
    """Return the error for a file of weights that cannot be read. It says what the user can do."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return ConfigError(
                f"policy: {path} is a pointer of Git LFS, not the file with the weights: run "
                f"`git lfs pull` in {path.parent}"
            )
    return ConfigError(
        f"policy: {path} is damaged or incomplete ({reason}): copy or download it again"
    )


@contextmanager
def reading(folder: Path, part: str) -> Iterator[None]:
    """Return a context that turns errors of libraries that read a model folder into `ConfigError`.

    The message names `part`, such as "tokenizer". A folder from elsewhere can cause any error, and
    libraries in Rust raise some that are no `Exception`. Errors of this package's own code, and of
    a GPU, are raised unchanged.
    """
    try:
        yield
    except (ConfigError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if type(error).__name__ in ("OutOfMemoryError", "CancelledError", "AcceleratorError"):
            raise
        if _is_own_mistake(error):
            raise
        text = " ".join(str(error)[:300].split())[:200]
        if not isinstance(error, OSError | ValueError | RuntimeError) or not text:
            text = f"{type(error).__name__}: {text}"
        shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
        raise ConfigError(f"policy: the {part} in {folder} cannot be read: {shown}") from error


def _is_own_mistake(error: BaseException) -> bool:
    """Return True if an error such as a KeyError comes from this package's own code."""
    expected = isinstance(error, OSError | ValueError | RuntimeError)
    if expected or type(error).__module__ != "builtins":
        return False
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return Path(frames[-1]).is_relative_to(_PACKAGE)


def require_safe_weights(folder: Path) -> None:
    """Raise `ConfigError` unless all weights of a model folder are safetensors files in this
    folder.

    Other files may be pickles, which can run any code. transformers would load a pickle that an
    index names, a file outside the folder, or the models that an `adapter_config.json` names.
    """
    if (folder / "adapter_config.json").exists():
        raise ConfigError(
            f"policy: {folder} has an adapter_config.json, which may name a model that is "
            "not checked: merge the adapter into the weights, and remove the file"
        )
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _require_shards(index, "weight_map")
    _require_shards(folder / "config.json", "transformers_weights")


def _require_shards(path: Path, key: str) -> None:
    """Raise `ConfigError` unless a JSON file names, under `key`, only safetensors files next
    to it.
    """
    try:
        content = read_mapping(path)
        named = content.get(key)
        names = set(named.values()) if isinstance(named, dict) else {named or "x.safetensors"}
    except (ConfigError, TypeError, AttributeError) as error:
        raise ConfigError(f"policy: {path} cannot be read: {error}: copy it again") from error
    for name in names:
        endings = (".safetensors", ".safetensors.index.json")
        is_safe = isinstance(name, str) and name.endswith(endings) and Path(name).name == name
        if not is_safe or "\\" in name:
            raise ConfigError(
                f"policy: {path} names the weights {name!r}. Only safetensors files in the same "
                "folder are loaded: convert the model with save_pretrained"
            )


def require_model(folder: Path) -> None:
    """Raise `ConfigError` if `folder` is not the folder of a Hugging Face model."""
    if not folder.is_dir():
        raise ConfigError(f"policy: no model folder at {folder}")
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        choose = f". Choose one of its GGUF files: --model_gguf {_words(files)}" if files else ""
        raise ConfigError(
            f"policy: {folder} is not a Hugging Face model folder: it has no config.json{choose}"
        )
