"""Test whole runs with `trainer.stream`, on the virtual clock with a scripted engine.

They train on the same batches as runs without it, with the same weights and metrics up to rounding,
and have the same journal. A run that is killed between two parts of a batch has trained on none of
them, and ends equal to an undisturbed one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.durability import test_resume
from tests.durability.test_resume import STEPS, Toy, config, killed, played, require_sound, rows
from unstale.config import RunConfig
from unstale.durability.checkpoint import Checkpoints
from unstale.durability.journal import Journal
from unstale.trainer.local import LocalTrainer

pytestmark = pytest.mark.usefixtures("forked_children")

TIMES = ("_s", "_per_s", "_bytes", "microbatches", "forward_tokens", "groups_waiting")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Toy]:
    monkeypatch.setattr(test_resume, "MOMENTS", (*test_resume.MOMENTS, (LocalTrainer, "add")))
    with played(Toy()) as toy:
        yield toy


def streamed(*, stream: bool = True, deterministic: bool = True, **options: Any) -> RunConfig:
    made = config(deterministic=deterministic, **options)
    return replace(made, trainer=replace(made.trainer, stream=stream))


def trained(folder: Path) -> list[tuple[int, int | None, str]]:
    """Return the number, the step and the state of every group."""
    with Journal.read(folder) as reader:
        return [(group.number, group.step, group.ended) for group in reader.groups()]


def journal(folder: Path) -> list[list[Any]]:
    """Return the episodes that were trained on, and the flags of their tokens."""
    with Journal.read(folder) as reader:
        episodes: list[list[Any]] = [
            [record.group, record.step, record.trajectory.episode, record.trajectory.tokens]
            for record in reader.trajectories()
            if record.step is not None
        ]
        assert len(episodes) >= STEPS * 6
        for group in reader.token_steps():
            for each in reader.trained_tokens(group):
                episodes.append([group, each.episode, each.minibatch, each.flags.tolist()])
        return episodes


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"max_staleness": 0, "groups_per_step": 3}])
def test_a_streamed_run_is_the_run_without_it(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    added = list[int]()
    add = LocalTrainer.add

    def count(self: LocalTrainer, part: Any) -> None:
        added.append(part.num_sequences)
        add(self, part)

    monkeypatch.setattr(LocalTrainer, "add", count)
    for stream in (False, True):
        toy.begin(tmp_path / str(stream), streamed(stream=stream, **options))
        assert bool(added) == stream
    assert journal(tmp_path / "True") == journal(tmp_path / "False")
    newest = [Checkpoints(tmp_path / name, {}) for name in ("False", "True")]
    weights = [each.weights(each.versions[-1]) for each in newest]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-5)
    for one, other in zip(*(rows(tmp_path / name) for name in ("False", "True")), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {name for name in one if name.endswith(TIMES)}:
            wanted = one[name]
            if isinstance(wanted, float):
                wanted = pytest.approx(wanted, rel=1e-2, abs=1e-4, nan_ok=True)
            assert other[name] == wanted, name


@pytest.mark.costly
@pytest.mark.parametrize("number", [1, 3])
def test_a_run_that_is_killed_between_two_parts_ends_equal(
    toy: Toy, tmp_path: Path, number: int
) -> None:
    toy.require_equal_resume(tmp_path, streamed(), "add", number)
    require_sound(tmp_path / "run")


def test_a_part_of_a_batch_that_is_lost_is_trained_on_after_a_resume(
    toy: Toy, tmp_path: Path
) -> None:
    """The groups of the lost part were finished. They are not sampled again."""
    folder, made = tmp_path / "run", streamed(deterministic=False)
    with killed("add", 2):
        toy.begin(folder, made)
    before = trained(folder)
    lost = {number for number, _, ended in before if ended == "finished"}
    assert lost
    toy.go_on(folder, made)
    after = trained(folder)
    assert lost <= {number for number, _, ended in after if ended == "consumed"}
    require_sound(folder)
