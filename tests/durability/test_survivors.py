"""Test the comparison of generated and trained episodes.

Each group and attempt is counted by its outcome, with its recorded length and turns. Losing mostly
long attempts gives a warning, an even loss does not. Open attempts count neither as kept nor as
lost.
"""

import asyncio
import random
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from unstale.cli import main
from unstale.durability.journal import JOURNAL, Journal, survivors
from unstale.durability.run_folder import Row
from unstale.observe.survivors import survivorship, terminal_table
from unstale.records import (
    ContextPiece,
    Failure,
    Group,
    GroupRequest,
    Piece,
    Sampled,
    Task,
    Trajectory,
)

TASK = Task("desk", "train", 3)
ASKED = ContextPiece((1, 2, 3))


def said(count: int, version: int = 0) -> Sampled:
    return Sampled((7,) * count, (-0.5,) * count, version)


class Run:
    """A journal that is written one group at a time."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.groups = self.episodes = 0

    def add_request(self, task: Task = TASK) -> int:
        self.journal.add_request(GroupRequest(self.groups, task, seed=5, place=self.groups))
        self.groups += 1
        return self.groups - 1

    def attempt(
        self,
        group: int,
        pieces: Sequence[Piece],
        ended: str | float = "open",
        *,
        sibling: int = 0,
        success: float = -1,
    ) -> None:
        """Add an attempt. `ended` is its reward, or the way it ended."""
        page = self.journal.begin(group, sibling, episode=self.episodes, seed=9)
        for position, piece in enumerate(pieces):
            page.write_piece(position, piece)
        if ended == "failed":
            page.write_outcome(Failure(TASK, "step 1", "EnvError: gone"))
        elif ended == "restarted":
            page.write_restart("other text", turns=1, sampled_tokens=1)
        elif not isinstance(ended, str):
            facts = {"success": success} if success >= 0 else {}
            page.write_outcome(
                Trajectory(tuple(pieces), {"a": ended}, "done", TASK, 9, self.episodes, facts=facts)
            )
        self.episodes += 1

    def finish(self, *groups: int, consumed: bool = True) -> None:
        ended = [Group(TASK, (), number=group) for group in groups]
        for group in ended:
            asyncio.run(self.journal.finish(group))
        if consumed:
            self.journal.commit(ended, step=1, version=0)
            asyncio.run(self.journal.checkpoint("000001", step=1, version=1))


def spread(mean: float, low: int, middle: int, high: int) -> Row:
    return {"mean": mean, "low": low, "middle": middle, "high": high}


def found(folder: Path) -> Row:
    with Journal.read(folder) as journal:
        return survivors(journal)


def test_every_group_and_every_attempt_is_counted_by_how_it_ended(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        run = Run(journal)
        first, second, third, fourth = (run.add_request() for _ in range(4))
        run.attempt(first, [ASKED, said(9), ASKED, said(4)], "failed")
        run.attempt(
            first, [ASKED, said(2), said(3, version=1), ASKED, said(1)], 1.0
        )  # two replies, one interrupted
        run.attempt(first, [ASKED, said(2), ASKED], 1.0, sibling=1, success=0.0)
        run.attempt(second, [ASKED, said(8)], "restarted")
        run.attempt(second, [ASKED, said(4)], 0.5)
        run.attempt(third, [ASKED, said(20)])
        run.attempt(third, [], sibling=1)  # nothing was generated
        run.attempt(third, [ASKED, said(5)], "restarted", sibling=2)  # and not begun again yet
        run.attempt(fourth, [ASKED, said(7)], "failed")
        run.attempt(fourth, [ASKED], "failed")
        run.finish(first, fourth)
        run.finish(second, consumed=False)
    (place,) = found(tmp_path)["places"]
    assert (place["env"], place["split"]) == ("desk", "train")
    assert place["groups"] == {"consumed": 1, "finished": 1, "open": 1, "failed": 1}
    assert {name: kind["count"] for name, kind in place["kinds"].items()} == {
        "generated": 9, "ended": 8, "trained": 2, "waiting": 1,
        "failed": 2, "given_up": 1, "restarted": 2, "open": 1,
    }  # fmt: skip
    kinds = place["kinds"]
    assert kinds["trained"]["tokens"] == spread(4.0, 2, 2, 6)
    assert kinds["trained"]["turns"] == spread(1.5, 1, 1, 2)
    assert (kinds["trained"]["success"], kinds["trained"]["reward"]) == (0.5, 1.0)
    assert kinds["failed"]["tokens"] == spread(10.0, 7, 7, 13)
    assert kinds["failed"]["turns"] == spread(1.5, 1, 1, 2)
    assert (kinds["failed"]["success"], kinds["failed"]["reward"]) == (None, None)
    assert kinds["given_up"]["tokens"] == spread(0.0, 0, 0, 0)
    assert kinds["restarted"]["tokens"] == spread(6.5, 5, 5, 8)
    assert kinds["ended"]["reward"] == pytest.approx(2.5 / 3)
    contrast = place["contrast"]
    assert (contrast["lost"], contrast["kept"]) == (5, 3)
    assert (contrast["lost_mean"], contrast["kept_mean"]) == (6.6, 4.0)
    # variances 22.3 (7 + 13 + 0 + 8 + 5) and 4 (6 + 2 + 4)
    assert contrast["se"] == pytest.approx((22.3 / 5 + 4 / 3) ** 0.5)
    words, alarm = survivorship(found(tmp_path)["places"][0])
    assert not alarm and words.startswith(
        "Lost and kept attempts do not differ measurably in length"
    )


def lose(folder: Path, chance: dict[int, float]) -> tuple[str, bool]:
    """Return the report on 400 episodes of 10, 20 or 30 tokens that are lost with these
    probabilities."""
    rng = random.Random(4)
    with Journal(folder / JOURNAL) as journal:
        run = Run(journal)
        groups = [run.add_request() for _ in range(100)]
        for group in groups:
            for sibling in range(4):
                count = rng.choice((10, 20, 30))
                lost = rng.random() < chance[count]
                run.attempt(group, [ASKED, said(count)], "failed" if lost else 1.0, sibling=sibling)
        run.finish(*groups)
    (place,) = found(folder)["places"]
    return survivorship(place)


def test_long_episodes_that_fail_raise_the_sentence(tmp_path: Path) -> None:
    words, alarm = lose(tmp_path, {10: 0.01, 20: 0.05, 30: 0.2})
    assert alarm and words.endswith("long ones are lost first.")
    assert words.startswith("Lost attempts were 1.5 times as long as kept ones (")


def test_an_even_loss_does_not(tmp_path: Path) -> None:
    words, alarm = lose(tmp_path, dict.fromkeys((10, 20, 30), 0.1))
    assert not alarm and words.startswith(
        "Lost and kept attempts do not differ measurably in length"
    )


def test_what_broke_early_is_not_said_to_have_been_short(tmp_path: Path) -> None:
    words, alarm = lose(tmp_path, {10: 0.4, 20: 0.0, 30: 0.0})
    assert not alarm and words.endswith("Their full length is not known.")


def test_nine_are_too_few() -> None:
    means = {"lost": 9, "kept": 900, "lost_mean": 500.0, "kept_mean": 100.0, "se": 1.0}
    place = {"kinds": {"failed": {}}}
    assert not survivorship({**place, "contrast": means})[1]
    assert survivorship({**place, "contrast": means | {"lost": 10}})[1]


def test_open_ones_are_neither_kept_nor_lost(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        run = Run(journal)
        done, going_on = run.add_request(), run.add_request()
        for sibling in range(20):
            run.attempt(done, [ASKED, said(10)], 1.0, sibling=sibling)
            run.attempt(going_on, [ASKED, said(500)], sibling=sibling)
        run.finish(done)
    (place,) = found(tmp_path)["places"]
    assert place["kinds"]["open"]["count"] == 20
    assert place["kinds"]["open"]["tokens"]["mean"] == 500
    assert place["contrast"] is None
    assert survivorship(found(tmp_path)["places"][0]) == (
        "No attempt that ended was lost.",
        False,
    )


def test_environments_are_told_apart(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        run = Run(journal)
        for env in ("desk", "abacus"):
            run.attempt(run.add_request(Task(env, "train", 0)), [ASKED, said(len(env))], 1.0)
    places = found(tmp_path)["places"]
    assert [(place["env"], place["kinds"]["waiting"]["tokens"]["mean"]) for place in places] == [
        ("abacus", 6),
        ("desk", 4),
    ]


def test_an_empty_journal_has_no_survivors(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL):
        pass
    assert found(tmp_path)["places"] == []


def a_run(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    with Journal(folder / JOURNAL) as journal:
        run = Run(journal)
        group = run.add_request()
        run.attempt(group, [ASKED, said(12)], 1.0)
        run.finish(group)
    return folder


def told(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main.main(arguments)
    return int(left.value.code or 0)


def test_the_terminal_shows_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told("journal", str(a_run(tmp_path)))
    assert "desk/train: No attempt that ended was lost." in capsys.readouterr().out
    console = Console(file=StringIO(), width=100)
    console.print(terminal_table(found(tmp_path)))
    assert isinstance(console.file, StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "trained on 1 12 12 · 12 · 12 1 100.0%" in lines


def test_no_figure_is_cut_off_in_a_terminal_of_80_columns() -> None:
    tokens = spread(1234, 1001, 1202, 1503)
    kind = {"count": 1024, "tokens": tokens, "turns": {"mean": 6.19}, "success": 0.352}
    kinds = {"generated": kind, "waiting": kind}
    places = [{"env": "retail", "split": "train", "kinds": kinds, "contrast": None}]
    console = Console(file=StringIO(), width=80)
    console.print(terminal_table({"places": places}))
    assert isinstance(console.file, StringIO)
    written = console.file.getvalue()
    assert "…" not in written and written.count("35.2%") == 2
