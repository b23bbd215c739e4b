"""Test the benchmark of digits: a short run has its figures, and blind tasks say nothing."""

from pathlib import Path
from random import Random

import pytest

from benchmarks import vision
from unstale.envs import Message
from unstale.records import Task
from unstale.testing.pictures import DigitEnv, DigitTasks, draw_digit, save_vision_model

pytestmark = pytest.mark.usefixtures("forked_children")


def pictures(env: DigitEnv) -> bytes:
    (message,) = env.begin().messages
    return message.images[0].data


def test_blind_tasks_all_show_one_picture() -> None:
    tasks = [Task("digits", "train", number) for number in range(40)]
    seen, blind = ([made.env(task, 0) for task in tasks] for made in (DigitTasks(), BLIND))
    assert [each.digit for each in seen] == [each.digit for each in blind]
    assert len({each.digit for each in seen}) > 5
    assert len({*map(pictures, seen)}) == 40 and len({*map(pictures, blind)}) == 1
    for env in seen:
        right = env.step(Message("assistant", f"{env.digit} 3"))
        assert (right.rewards["right"], right.rewards["form"]) == (1.0, 0.0)
        wrong = env.step(Message("assistant", str((env.digit + 1) % 10)))
        assert (wrong.rewards["right"], wrong.rewards["form"]) == (0.0, 0.1)
        assert not any(env.step(Message("assistant", "user")).rewards.values())


BLIND = vision.BlindTasks()


def test_a_picture_differs_from_others_of_its_digit() -> None:
    assert len({draw_digit(4, Random(number)) for number in range(8)}) == 8


def test_a_short_run_has_its_figures_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "HELD_OUT", 4)
    save_vision_model("qwen3_vl", tmp_path / "model", num_hidden_layers=2)
    found = vision.train(tmp_path / "model", tmp_path, "DigitTasks", steps=2, seed=0)
    assert found["exact"] == 1.0 and found["error"] < 1e-5
    assert 0 < found["files"] < found["records"]
    again = vision.train(tmp_path / "model", tmp_path, "DigitTasks", steps=2, seed=0)
    assert again == found
    assert vision.line("a run", found).count("|") == 10
