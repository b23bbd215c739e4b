"""Asynchronous runs of policies that read pictures.

Old log-probabilities are those of plain transformers with the recorded weights. Pixels are stored
once, and a record has one hash. A killed run that is resumed ends equal to one that was not.
"""

import sqlite3
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from numpy import array, isnan
from transformers import AutoModelForImageTextToText

from tests.cli.test_run import quiet
from tests.durability.test_resume import killed
from tests.support.tiny_runs import tiny_run
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.config import AuditConfig, ConfigError, OldLogpsConfig, RunConfig, TaskConfig
from unstale.durability import compare_runs
from unstale.durability.journal import JOURNAL, Journal
from unstale.model.loading import load_tokenizer
from unstale.model.pictures import PictureReader
from unstale.pictures import FIRST, PICTURES, PictureStore
from unstale.records import ContextPiece, Sampled, walk
from unstale.testing.pictures import DigitTasks, draw_digit, plain_inputs, save_vision_model
from unstale.weights.recording import RECORDED, Recorded

pytestmark = pytest.mark.usefixtures("forked_children")
TASKS = TaskConfig(env="unstale.testing.pictures:DigitTasks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    save_vision_model("qwen3_vl", folder, num_hidden_layers=2)
    return folder


def configure(model: Path, runs: Path, **changes: Any) -> RunConfig:
    record = AuditConfig(share=1.0, record=True)
    return replace(tiny_run(model, runs, max_steps=5, task=TASKS, audit=record), **changes)


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    return session.train(configure(model, tmp_path_factory.mktemp("runs")), console=quiet()).folder


def require_exact(rows: list[dict[str, Any]]) -> None:
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) < 1e-6
    assert max(row["correction/log_d_abs_p99"] for row in rows) < 1e-4
    assert max(row["trainer/grad_norm"] for row in rows) > 0


def test_every_token_is_exact_and_engine_and_trainer_agree(ran: Path) -> None:
    require_exact(list(session.Run(ran, ran).metrics))


@pytest.mark.costly
@pytest.mark.parametrize("route", ["eager", "old_logit_model", "interrupt_sync"])
def test_other_exact_routes_read_pictures(route: str, model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path, old_logps=OldLogpsConfig(route=route))
    require_exact(session.train(config, console=quiet()).metrics)


class Plain:
    """Plain transformers with the pixels of a run and its recorded weights."""

    def __init__(self, folder: Path, run: Path) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self._weights = Recorded(run / RECORDED)
        self._store = PictureStore(run / PICTURES)
        self.placeholder = self._model.config.image_token_id
        """A token that transformers takes for a picture, also if the policy sampled it."""

    @torch.no_grad()
    def logps(self, tokens: tuple[int, ...], version: int) -> torch.Tensor:
        """Return the log-probabilities `[n - 1]` of all tokens but the first."""
        self._model.load_state_dict(self._weights.weights(version), strict=False)
        inputs = plain_inputs(self._model, self._store, tokens)
        logits = self._model(**inputs, use_cache=False).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)


def test_old_logp_is_that_of_plain_transformers_with_the_recorded_weights(
    model: Path, ran: Path
) -> None:
    plain, versions, compared = Plain(model, ran), set(), 0
    with Journal.read(ran) as read:
        values = [each for number in read.token_steps() for each in read.trained_tokens(number)]
        trajectories = [read.episode(each.episode).trajectory for each in values]
    for each, trajectory in zip(values, trajectories, strict=True):
        if plain.placeholder in trajectory.tokens:
            continue
        truth: list[float] = []
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled):
                whole = plain.logps(trajectory.tokens, piece.version)
                truth += whole[start - 1 : start - 1 + len(piece.tokens)].tolist()
        versions |= trajectory.versions
        scored = ~isnan(each.old_logp)  # replies without a gradient are not scored
        compared += bool(scored.any())
        assert abs(array(truth, "f4") - each.old_logp)[scored].max(initial=0) < 1e-5
    assert len(versions) > 2 and compared > 2


def test_pixels_are_stored_once_and_a_record_has_a_hash(ran: Path) -> None:
    with Journal.read(ran) as read:
        episodes = list(read.trajectories())
    pictures = {}
    for each in episodes:
        first = each.trajectory.pieces[0]
        assert isinstance(first, ContextPiece)
        (picture,) = first.pictures
        assert picture.number in first.tokens
        pictures.setdefault(each.trajectory.task.key, set()).add(picture)
    assert all(len(found) == 1 for found in pictures.values())
    stored = {path.stem for path in (ran / PICTURES).iterdir()}
    assert {f"{found.pop().number:08x}" for found in pictures.values()} <= stored
    with sqlite3.connect(ran / JOURNAL) as connection:
        rows = connection.execute(
            "SELECT p.num_tokens, length(p.tokens), length(q.pictures) FROM pieces p "
            "JOIN pictures q USING (episode, position)"
        ).fetchall()
        (begun,) = connection.execute("SELECT count(*) FROM episodes").fetchone()
        tasks = connection.execute("SELECT count(DISTINCT task) FROM groups").fetchone()[0]
    connection.close()
    assert len(rows) == begun and len(stored) == tasks < begun
    assert {(4 * count, 36) for count, _, _ in rows} == {(size, own) for _, size, own in rows}


def test_versions_and_checkpoints_are_without_the_tower(model: Path, ran: Path) -> None:
    names = Recorded(ran / RECORDED).weights(1).keys()
    whole = AutoModelForImageTextToText.from_pretrained(model).state_dict().keys()
    assert not any("visual" in name for name in names)
    assert {name for name in whole - names if "lm_head" not in name} == {
        name for name in whole if "visual" in name
    }
    saved = AutoModelForImageTextToText.from_pretrained(ran / "policy").state_dict()
    before = AutoModelForImageTextToText.from_pretrained(model).state_dict()
    assert all(torch.equal(saved[name], before[name]) for name in saved if "visual" in name)
    reader = PictureReader(ran / "policy", load_tokenizer(ran / "policy"), PictureStore())
    assert max(reader.tokens(draw_digit(3, Random(0)))) >= FIRST, "the processor is saved, too"


@pytest.mark.parametrize("call, number", [("step", 3), ("transaction", 21)])
@pytest.mark.costly
def test_a_killed_run_that_is_resumed_ends_equal(
    call: str, number: int, model: Path, ran: Path, tmp_path: Path
) -> None:
    config = configure(model, tmp_path)
    with killed(call, number):
        session.train(config, console=quiet())
    session.resume(tmp_path / "run", config, console=quiet())
    assert compare_runs.differences(ran, tmp_path / "run") == []


@pytest.mark.costly
def test_a_lost_picture_is_named_at_a_resume(model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path)
    with killed("step", 3):
        session.train(config, console=quiet())
    for path in (tmp_path / "run" / PICTURES).iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises((RunFailed, ConfigError), match=r"the picture .* is damaged"):
        session.resume(tmp_path / "run", config, console=quiet())


def test_a_content_hash_is_that_of_the_file(ran: Path) -> None:
    with Journal.read(ran) as read:
        episode = next(iter(read.trajectories())).trajectory
    (message,) = DigitTasks().env(episode.task, 0).begin().messages
    piece = episode.pieces[0]
    assert isinstance(piece, ContextPiece)
    assert piece.pictures[0].digest == sha256(message.images[0].data).hexdigest()
