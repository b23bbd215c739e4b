"""Test policies of the Hugging Face hub: from the local cache, and downloaded when asked for."""

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from unstale.config import ConfigError, RunConfig, hub
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with `lab/tiny`, laid out as huggingface_hub does: links to blobs."""
    repository = tmp_path / "hub" / "models--lab--tiny"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    saved = tmp_path / "saved"
    tiny_policy().save(saved)
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(saved.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub._snapshot.cache_clear()
    return tmp_path / "hub"


def folder_of(policy: str, *, download: bool = False) -> Path:
    return RunConfig(recipe="x", policy=policy, policy_download=download).policy_folder


@pytest.mark.parametrize("name", ["lab/tiny", "lab/tiny@main", f"lab/tiny@{COMMIT}"])
def test_a_policy_comes_from_the_local_cache(cache: Path, name: str) -> None:
    folder = folder_of(name)
    assert folder.name == COMMIT
    assert Policy.load(folder).tokenizer.chat_template


@pytest.mark.parametrize("name", ["lab/other", "lab/tiny@v2"])
def test_what_the_cache_lacks_is_one_line(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such model in the cache .*--policy-download") as all:
        folder_of(name)
    assert "\n" not in str(all.value) and str(cache) in str(all.value)


def test_a_download_is_tried_only_when_asked_for(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def download(repository: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append(local_files_only)
        if local_files_only or repository == "lab/none":
            raise OSError("404\nno such repository")
        if repository == "lab/slow":
            raise httpx.ReadTimeout("no answer")
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="--policy-download fetches it"):
        folder_of("lab/new")
    assert asked == [True]
    assert folder_of("lab/new", download=True) == tmp_path / "fetched"
    with pytest.raises(ConfigError, match="lab/none cannot be downloaded: 404 no such repository"):
        folder_of("lab/none", download=True)
    with pytest.raises(ConfigError, match="lab/slow cannot be downloaded: no answer"):
        folder_of("lab/slow", download=True)


def test_paths_stay_paths(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    for name in ("lab/tiny", "model", "./lab/none", "/lab/tiny", "runs/a/policy"):
        assert folder_of(name) == Path(name)
