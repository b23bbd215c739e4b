"""Test that a run with a critic that is killed and resumed ends equal to one that is not.

The journal, the metrics and the checkpoint with the critic's weights are equal bit for bit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durability.test_resume import Toy, config, played, require_sound, rows
from unstale.config.options import override

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def toy() -> Iterator[Toy]:
    with played(Toy()) as toy:
        yield toy


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(
    ("call", "number", "model"), [("prepare", 3, "trunk"), ("step", 4, "trunk"), ("step", 4, "own")]
)
def test_a_killed_run_with_a_critic_ends_equal(
    toy: Toy, tmp_path: Path, call: str, number: int, model: str
) -> None:
    options = {
        "advantage.estimator": "gae",
        "advantage.lam": 0.9,
        "critic.model": model,
        "critic.warmup_steps": 1,
    }
    toy.require_equal_resume(tmp_path, override(config(deterministic=True), options), call, number)
    require_sound(tmp_path / "run")
    losses = [row["critic/loss"] for row in rows(tmp_path / "run")]
    assert len(set(losses)) == len(losses)
