"""Test policies of the Hugging Face hub: from the local cache, and downloaded when asked for.

`check-template`, `plan`, `eval` and `serve` accept the name of a cached model, too.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path

import huggingface_hub
import pytest
from rich.console import Console

from tests.support.tiny_runs import save_tiny
from unstale.analysis.planner.models import Model
from unstale.cli import session
from unstale.cli.main import main
from unstale.config import ConfigError, RunConfig, TrainerConfig, hub
from unstale.config.hub import cached_folder
from unstale.lint import check
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

COMMIT = "a" * 40
REPOSITORY = "models--lab--tiny"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a model folder whose weights are in two files, as those of a large model."""
    folder = tmp_path / "saved"
    policy = tiny_policy()
    policy.save(folder)
    (folder / "model.safetensors").unlink()
    policy.model.save_pretrained(folder, max_shard_size="50KB")
    return folder


@pytest.fixture
def cache(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with `lab/tiny`, laid out as huggingface_hub does: links to blobs."""
    repository = tmp_path / "hub" / REPOSITORY
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(saved.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub._snapshot.cache_clear()
    return tmp_path / "hub"


@pytest.fixture
def served(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve `saved` as the repository `lab/tiny` of a hub on loopback.

    Return a list of the names of the files that were downloaded.
    """
    fetched: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            if self.path.startswith("/api/models/lab/tiny/tree/"):
                files = sorted(saved.iterdir())
                sizes = [{"path": file.name, "size": file.stat().st_size} for file in files]
                rows = [{"type": "file", "oid": f"{row['path']:x>40}"} | row for row in sizes]
                self.answer(json.dumps(rows).encode())
            elif self.path.startswith("/api/models/lab/tiny"):
                self.answer(json.dumps({"id": "lab/tiny", "sha": COMMIT}).encode())
            elif self.path.startswith("/lab/tiny/resolve/") and (saved / name).is_file():
                if self.command == "GET":
                    fetched.append(name)
                self.answer((saved / name).read_bytes())
            elif "slow" in self.path:
                self.close_connection = True  # no answer at all
            else:
                self.send_error(404)

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{len(body)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fetched
    server.shutdown()
    thread.join()
    server.server_close()
    huggingface_hub.close_session()


def folder_of(policy: str, *, download: bool = False) -> Path:
    return RunConfig(recipe="x", model=policy, model_download=download).policy_folder


@pytest.mark.parametrize("name", ["lab/tiny", "lab/tiny@main", f"lab/tiny@{COMMIT}"])
def test_a_policy_comes_from_the_local_cache(cache: Path, name: str) -> None:
    folder = folder_of(name)
    assert folder.name == COMMIT
    assert Policy.load(folder).tokenizer.chat_template


@pytest.mark.parametrize("name", ["lab/other", "lab/tiny@v2"])
def test_what_the_cache_lacks_is_one_line(cache: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"no such model in the cache .*--model_download") as all:
        folder_of(name)
    assert "\n" not in str(all.value) and str(cache) in str(all.value)


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(str(left.value.code or 0))


@pytest.mark.parametrize("name", ["lab/tiny", "lab/tiny@main"])
def test_commands_take_a_model_of_the_cache(
    cache: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = []
    for model in (name, str(folder_of(name))):
        code = run_command("check-template", model, "--conversations", "2", "--json")
        results.append((code, json.loads(capsys.readouterr().out)))
    assert results[0] == results[1] and results[0][0] in (0, 1)
    sizes = Model.parse(name)
    assert sizes.name == name and sizes == replace(Model.from_folder(folder_of(name)), name=name)
    for verb in ("eval", "serve"):
        assert run_command(verb, name) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"name a recipe, as in `unstale {verb} {name} retail`" in said


def test_eval_plays_a_model_of_the_cache(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "model")
    snapshot = folder_of("lab/tiny")
    for file in (tmp_path / "model").iterdir():
        (snapshot / file.name).unlink(missing_ok=True)
        shutil.copy(file, snapshot / file.name)
    options = ("--engine.max_completion_tokens", "4", "--engine.max_context", "256")
    task = ("--task.env", "tests.support.toy:ToyTasks", "--eval.tasks", "2")
    assert run_command("eval", "lab/tiny", "llm", *task, *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["avg@1"]["value"] >= 0


@pytest.mark.parametrize("name", ["lab/other", "lab/tiny@v2"])
def test_commands_say_how_to_get_a_model_that_the_cache_lacks(
    cache: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    repository, _, revision = name.partition("@")
    download = f"`hf download {repository}{' --revision v2' if revision else ''} "
    for words, reason in (
        (("check-template", name), f"{download}--include '*.json' "),
        (("plan", "--model", name, "--gpus", "2"), f"{download}config.json` fetches"),
        (("eval", name), "--model_download fetches what is missing"),
        (("serve", name), f"{name} is neither a run folder nor a model folder"),
    ):
        assert run_command(*words) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert reason in said and f"no such model in the cache {cache}" in said, said


def test_a_part_of_a_model_is_enough_for_commands_that_read_no_weights(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache / REPOSITORY / "snapshots" / COMMIT
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    assert cached_folder("lab/tiny", "tokenizer") == snapshot
    (snapshot / "tokenizer.json").unlink()
    assert Model.parse("lab/tiny").layers == Model.from_folder(snapshot).layers
    assert run_command("check-template", "lab/tiny") == 2
    assert "is incomplete, without tokenizer.json. `hf download" in capsys.readouterr().err
    (snapshot / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"without config\.json\. .*; or give sizes"):
        Model.parse("lab/tiny")


def test_a_download_happens_only_when_asked_for(cache: Path, served: list[str]) -> None:
    shutil.rmtree(cache / REPOSITORY)
    with pytest.raises(ConfigError, match="--model_download fetches"):
        folder_of("lab/tiny")
    assert not served
    folder = folder_of("lab/tiny", download=True)
    assert Policy.load(folder).tokenizer.chat_template
    assert {"config.json", "tokenizer.json"} <= set(served)
    assert folder_of("lab/tiny") == folder


def test_an_error_of_the_hub_is_one_line(cache: Path, served: list[str]) -> None:
    for name in ("lab/none", "lab/slow"):
        with pytest.raises(ConfigError, match=f"{name} cannot be downloaded: .") as all:
            folder_of(name, download=True)
        assert "\n" not in str(all.value)


@pytest.mark.parametrize("lost", ["model-00002", "config.json", "tokenizer.json", ".safetensors"])
def test_a_download_completes_an_incomplete_cache(
    cache: Path, served: list[str], lost: str
) -> None:
    files = sorted((cache / REPOSITORY / "snapshots" / COMMIT).iterdir())
    removed = [file for file in files if lost in file.name]
    for file in removed:
        file.resolve().unlink()  # the link remains
    with pytest.raises(ConfigError, match=r"is incomplete.* --model_download fetches") as all:
        folder_of("lab/tiny")
    assert "\n" not in str(all.value) and not served
    named = removed[0].name if lost != ".safetensors" else "*.safetensors"
    assert f"without {named}" in str(all.value)
    assert Policy.load(folder_of("lab/tiny", download=True)).tokenizer.chat_template
    assert sorted(set(served)) == [file.name for file in removed]


def test_a_file_that_only_the_list_of_the_hub_names_is_missed(
    cache: Path, served: list[str]
) -> None:
    shutil.rmtree(cache / REPOSITORY)
    folder = folder_of("lab/tiny", download=True)
    hub._snapshot.cache_clear()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"is incomplete, without chat_template\.jinja\. "):
        folder_of("lab/tiny")
    assert (folder_of("lab/tiny", download=True) / "chat_template.jinja").is_file()


def test_files_that_the_hub_lacks_too_are_named(
    cache: Path, saved: Path, served: list[str]
) -> None:
    shutil.rmtree(cache / REPOSITORY)
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"still without tokenizer\.json.* of lab/tiny$"):
        folder_of("lab/tiny", download=True)


def test_the_learning_rate_is_judged_by_the_size_of_the_downloaded_model(
    cache: Path, served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(cache / REPOSITORY)
    config = RunConfig(
        recipe="calculator",
        model="lab/tiny",
        model_download=True,
        runs=tmp_path,
        trainer=TrainerConfig(lr=1e-2),
    )
    (warning,) = check(config).warnings
    assert warning.why.endswith("usual is about 1e-06 (this model's size is unknown)")
    assert not served

    def stop(config: RunConfig, **_: object) -> None:
        raise ConfigError("here the model would be loaded")

    monkeypatch.setattr(session, "build_components", stop)
    out = StringIO()
    rates = {1e-2: "", 1.0: "destroy"}
    for rate, expected in rates.items():
        made = replace(config, trainer=TrainerConfig(lr=rate))
        with pytest.raises(ConfigError, match="here the model would be loaded"):
            session.train(made, console=Console(file=out, width=500))
        assert expected in out.getvalue() and "unknown" not in out.getvalue()


def test_paths_stay_paths(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    for name in ("lab/tiny", "model", "./lab/none", "/lab/tiny", "runs/a/policy"):
        assert folder_of(name) == Path(name)
