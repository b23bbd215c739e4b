"""Test that a killed and resumed run has the placed text of an unkilled one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.durability.test_limits_resume import Wandering
from tests.durability.test_resume import killed, played, require_sound, rows
from tests.durability.test_selection_resume import Choosing, chosen
from tests.test_loop import NumberChat
from unstale.builders import LocalComponents
from unstale.config import RunConfig
from unstale.durability.journal import Journal, check
from unstale.durability.journal.tables import ROUND
from unstale.records import Edit, Failure, Fork, Placed, Provenance, Sampled, Trajectory, walk
from unstale.research.techniques.tree import Tree
from unstale.rollout.texts import PolicyTexts
from unstale.techniques.hooks import Techniques, Texts


class Guides(Tree):
    """A tree whose forks begin with the reply of the episode that they were forked from.

    It is as if the reply had been sampled after a hint.
    """

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork]:
        ended = {each.episode: each for each in rounds[0] if isinstance(each, Trajectory)}
        return [
            replace(fork, text=guided(ended[fork.parent], fork.at))
            for fork in await super().forks(rounds, texts)
        ]


def guided(parent: Trajectory, at: int) -> tuple[Placed, ...]:
    edit = Edit(1, 1, (3, 4))
    reply = next(turn for start, _, turn in walk(parent.pieces) if start == at)
    return tuple(
        Placed(piece.tokens, Provenance.REWRITTEN, piece.version, piece.behavior_logp, edit)
        for start, piece, turn in walk(parent.pieces)
        if turn == reply and start >= at and isinstance(piece, Sampled)
    )


class Guiding(Choosing):
    def machine(self, config: RunConfig, *kept: object, **others: object) -> LocalComponents:
        made = super().machine(config, *kept, **others)
        guides = Guides(config.technique_options["tree"])  # type: ignore[arg-type]
        return replace(made, techniques=Techniques({**made.techniques.parts, "tree": guides}))


def configured(placed: str, *, deterministic: bool) -> RunConfig:
    # the engine is scripted, so D is far from 1
    options: dict[str, Any] = {"schedule.group_size": 4, "correction.mode": "truncate"}
    options |= {"objective.placed": placed}
    return chosen("tree tree_advantage", deterministic=deterministic, **options)


def require_placed(folder: Path) -> int:
    """Check the forks with placed text of a run. Return their number."""
    with Journal.read(folder) as reader:
        assert check(reader) == []
        ended = {each.trajectory.episode: each.trajectory for each in reader.trajectories()}
        trained = {
            each.episode: len(each.flags)
            for group, steps in reader.token_steps().items()
            for each in reader.trained_tokens(group, steps[0])
        }
    forks = [each for each in ended.values() if each.fork]
    for each in forks:
        assert each.fork and each.fork.text == guided(ended[each.fork.parent], each.fork.at)
        assert trained.get(each.episode, each.num_sampled) == each.num_sampled
    shares = [row["placed/trained_share"] for row in rows(folder)]
    assert len(shares) == 4 and max(shares) > 0
    return len(forks)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("placed", ["guided", "anchor"])
def test_a_killed_deterministic_run_has_the_placed_text_of_an_unkilled_one(
    tmp_path: Path, placed: str
) -> None:
    made = configured(placed, deterministic=True)
    with played(Guiding(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    assert require_placed(tmp_path / "run") == require_placed(tmp_path / "whole") > 0


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("rule", ["reflect", "plan"])
def test_a_killed_deterministic_run_has_the_written_texts_of_an_unkilled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    monkeypatch.setattr(NumberChat, "longest_token", 64)
    monkeypatch.setattr(PolicyTexts, "written", lambda *_: '{"advice": "look again", "step": 1}')
    options: dict[str, Any] = {"schedule.group_size": 4, "objective.placed": "anchor"}
    options |= {"retry.rule": rule, "retry.train_texts": True}
    options |= {"retry.attempts": "all"} if rule == "reflect" else {}
    made = chosen("retry", deterministic=True, **options)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    with Journal.read(tmp_path / "run") as reader:
        assert check(reader) == []
        forks = [each.trajectory.fork for each in reader.trajectories() if each.trajectory.fork]
    assert {bool(fork.writes) for fork in forks} == {True, False}
    notes = [fork.note for fork in forks if not fork.writes]
    assert all("look again" in note for note in notes) if rule == "plan" else not any(notes)


ASKED = count(2)
"""The words that the corrector writes: others each time."""


def judge(task: str, steps: list[str]) -> int | None:
    return 0 if next(ASKED) % 5 else None


def correct(task: str, right: list[str], wrong: str) -> str:
    return f"{2 + next(ASKED) % 7} {2 + next(ASKED) % 5}"


@pytest.mark.parametrize(("call", "number"), [("step", 3), ("transaction", 70)])
def test_a_resumed_run_reads_what_the_corrector_wrote_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Judge and corrector answer otherwise each time, and so would a served model."""
    monkeypatch.setattr(NumberChat, "encode_content", lambda _, text: (*map(int, text.split()),))
    options: dict[str, Any] = {"schedule.group_size": 4, "objective.placed": "anchor"}
    options |= {"retry.rule": "correct", "retry.step": "line", "retry.steps": 2}
    options |= {"retry.judge": f"{__name__}:judge", "retry.corrector": f"{__name__}:correct"}
    made = chosen("retry", deterministic=False, **options)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        with killed(call, number):
            toy.begin(tmp_path / "run", made)
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    begun, recorded = set(), set()
    with Journal.read(tmp_path / "run") as reader:
        assert check(reader) == []
        for each in reader.trajectories():
            if fork := each.trajectory.fork:
                begun.add((fork.parent, fork.at, *fork.text[0].tokens))
        for (fields,) in reader.rows("SELECT fields FROM events WHERE kind = ?", ROUND):
            for start in json.loads(fields)["starts"]:
                recorded.add((start["parent"], start["at"], *start["text"][0][0]))
    parents = [(parent, at) for parent, at, *_ in recorded]
    assert begun and begun <= recorded
    assert len(parents) == len({*parents}), "no attempt was corrected twice"


@pytest.mark.parametrize(("call", "number"), [("step", 3), ("transaction", 70)])
def test_an_ordinary_run_keeps_the_placed_text_of_open_groups(
    tmp_path: Path, call: str, number: int
) -> None:
    made = configured("guided", deterministic=False)
    with played(Guiding(lambda: Wandering(count()))) as toy:
        with killed(call, number):
            toy.begin(tmp_path / "run", made)
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    assert require_placed(tmp_path / "run")
