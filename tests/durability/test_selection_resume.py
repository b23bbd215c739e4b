"""Test that a killed and resumed run draws the same tasks and group sizes as an unkilled one."""

import json
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.durability.test_resume import Toy, config, killed, played, require_sound
from tests.test_loop import REPLY, Numbers
from unstale.builders import LocalComponents
from unstale.config import RunConfig, SelectionConfig
from unstale.config.options import override
from unstale.durability.journal import EPISODE_BUDGET, Journal, check
from unstale.techniques.hooks import Techniques


class Choosing(Toy):
    """A run whose machine has the techniques of its configuration."""

    def machine(self, config: RunConfig, *kept: object, **others: object) -> LocalComponents:
        made = super().machine(config, *kept, **others)
        return replace(made, techniques=Techniques.of(config))


def chosen(techniques: str, *, deterministic: bool, **options: Any) -> RunConfig:
    made = config(deterministic=deterministic)
    made = replace(made, max_steps=4, selection=SelectionConfig(pool=6, candidates=4))
    return override(made, {"techniques": techniques, **options})


def groups(folder: Path) -> list[tuple[str, int, int]]:
    """Return the task, the seed and the number of episodes of every finished group."""
    with Journal.read(folder) as reader:
        assert check(reader) == []
        rows = reader.rows(
            """SELECT env || task, groups.seed, count(DISTINCT sibling) FROM groups
            JOIN episodes USING (number) JOIN finished USING (number) GROUP BY groups.number"""
        )
    return [(task, seed, size) for task, seed, size in rows]


CHOICES: list[tuple[str, dict[str, Any]]] = [
    (
        "beta_sampler difficulty_bin_weights bin_sizes",
        {"bin_sizes.mean": 3.5, "bin_sizes.min": 2, "difficulty_bin_weights.beta": 1.0},
    ),
    ("", {}),
    ("beta_sampler", {"beta_sampler.decay": 0.9}),
    ("predicted_sampler", {"predicted_sampler.tau": 0.1}),
    ("predicted_sampler", {"predicted_sampler.forecast": "model", "predicted_sampler.tau": 0.1}),
    (
        "hard_task_stages",
        {"hard_task_stages.steps": 2, "hard_task_stages.size": 4, "selection.candidates": 6},
    ),
    ("allocate", {"allocate.gain": "interval", "allocate.mean": 4.0, "allocate.max": 6}),
    ("beta_sampler allocate", {"allocate.gain": "v0", "allocate.mean": 4.0, "allocate.max": 8}),
    ("allocate", {"allocate.gain": "sqrt_law", "allocate.mean": 3.5, "allocate.prior": 0.1}),
    ("allocate", {"allocate.gain": "v05_risk", "allocate.max": 6, "allocate.cost": 0.02}),
    ("baseline", {"baseline.decay": 0.9}),
    ("baseline", {"baseline.centre": "probe", "baseline.tokens": 2}),
]


@pytest.mark.costly
@pytest.mark.parametrize(("techniques", "options"), CHOICES)
def test_a_killed_deterministic_run_chooses_as_an_unkilled_one(
    tmp_path: Path, techniques: str, options: dict[str, Any]
) -> None:
    made = chosen(techniques, deterministic=True, **options)
    with played(Choosing(lambda: Numbers(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    found = groups(tmp_path / "run")
    assert found == groups(tmp_path / "whole")
    assert len({task for task, _, _ in found}) < len(found)  # some come again
    assert len({(task, seed) for task, seed, _ in found}) == len(found)
    assert (len({size for _, _, size in found}) > 1) == bool(
        {"allocate", "bin_sizes", "hard_task_stages"} & set(techniques.split())
    )


def test_an_ordinary_run_that_is_killed_counts_visits_on(tmp_path: Path) -> None:
    made = chosen("beta_sampler", deterministic=False)
    with played(Choosing(lambda: Numbers(count()))) as toy:
        with killed("flush", 11):
            toy.begin(tmp_path / "run", made)
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    found = groups(tmp_path / "run")
    assert len({(task, seed) for task, seed, _ in found}) == len(found)
    assert max(Counter(task for task, _, _ in found).values()) > 1


def replies(folder: Path) -> dict[int, set[int]]:
    """Return the lengths of the replies of each group, in tokens."""
    found: dict[int, set[int]] = {}
    with Journal.read(folder) as reader:
        assert check(reader) == []
        for stored in reader.trajectories():
            lengths = {len(piece.tokens) for piece in stored.trajectory.sampled}
            found.setdefault(stored.group, set()).update(lengths)
    return found


@pytest.mark.costly
def test_replies_of_the_first_stage_are_shorter_also_after_a_kill(tmp_path: Path) -> None:
    options = {
        "hard_task_stages.steps": 2,
        "hard_task_stages.size": 4,
        "hard_task_stages.first_reply": REPLY - 2,
    }
    made = chosen("hard_task_stages", deterministic=True, **options, **{"selection.candidates": 6})
    with played(Choosing(lambda: Numbers(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    found = replies(tmp_path / "run")
    assert found == replies(tmp_path / "whole")
    with Journal.read(tmp_path / "run") as reader:
        rows = reader.rows("SELECT fields FROM events WHERE kind = ?", EPISODE_BUDGET)
    limits = {row["group"]: row["reply_tokens"] for (text,) in rows for row in [json.loads(text)]}
    assert set(limits.values()) == {REPLY - 2} and len(set(found) - set(limits)) > 1
    assert all(max(found[number]) == limits.get(number, REPLY) for number in found)
