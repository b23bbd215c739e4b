"""Test `push-to-hub`: a policy with its model card, in a folder or on the hub."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError

import unstale
from tests.support.fake_run import fake_run
from unstale.cli import push
from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.model.policy import Policy
from unstale.testing import tiny_policy


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = fake_run(tmp_path / "runs" / "trained")
    tiny_policy().save(folder / "policy")
    return folder


def configure(run: Path, **options: Any) -> None:
    row = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**row, **options}))


def test_a_folder_gets_the_model_and_its_card(run: Path, tmp_path: Path) -> None:
    configure(run, model="some-lab/tiny@v1")
    out = tmp_path / "out"
    assert unstale.push_to_hub(run, out) == str(out)
    assert Policy.load(out).tokenizer.chat_template
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "some-lab/tiny" and card.data.library_name == "transformers"
    steps = unstale.Run(run, run / "report.html").metrics[-1]["step"]
    for expected in (
        "# trained",
        "| base model | some-lab/tiny@v1 |",
        "| task | retail |",
        f"| steps | {steps}",
        "| held-out success before training | ",
        "| held-out success after training | ",
        "| mean reward at step 1 | ",
        "transformers ",
    ):
        assert expected in card.text, expected


def test_a_base_that_is_a_folder_is_not_named_as_a_repository(run: Path) -> None:
    configure(run, model="base")
    card = ModelCard(push.model_card(run))
    assert card.data.base_model is None and "the small model of the package" in card.text
    assert "# name" in push.model_card(run, "lab/name")


def test_what_cannot_be_exported_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    for words, reason in (
        ([str(run)], "needs --folder, --repo, or both"),
        ([str(run), "--folder", str(run)], "is not an empty folder"),
        ([str(begun), "--folder", str(tmp_path / "out")], "has no policy folder"),
        ([str(tmp_path), "--folder", str(tmp_path / "out")], "is not a run folder"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["push-to-hub", *words])
        assert left.value.code == 2 and reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Hub:
    """A stand-in for `HfApi` that keeps what it is sent."""

    calls: list[tuple[Any, ...]]

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> str:
        if repo == "lab/forbidden":
            raise OSError("403 Forbidden:\nno right")
        if repo == "lab/unreachable":
            raise HTTPError("no route to the hub")
        self.calls.append((repo, private))
        return f"https://hub/{repo}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        self.calls.append((repo_id, sorted(path.name for path in folder_path.iterdir())))


def test_the_hub_gets_the_same_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Hub.calls = []
    monkeypatch.setattr(push, "HfApi", Hub)
    assert push.push_to_hub(run, repo="lab/tiny") == "https://hub/lab/tiny"
    (repo, private), (target, names) = Hub.calls
    assert (repo, private, target) == ("lab/tiny", True, "lab/tiny")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    with pytest.raises(ConfigError, match="cannot be written on the hub: 403 Forbidden: no right"):
        push.push_to_hub(run, repo="lab/forbidden")
    with pytest.raises(ConfigError, match="cannot be written on the hub: no route to the hub"):
        push.push_to_hub(run, repo="lab/unreachable")
