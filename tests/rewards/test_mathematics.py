"""Test the reward of math-verify.

Equal answers get 1 in any notation, and no wrong one does. Expressions that would compute for hours
get 0, in a thread, and the next reply is compared as usual. An unreadable expected answer is an
error.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify", reason="the extra math is not installed")

from unstale.config import make_task
from unstale.envs import EnvError, Message
from unstale.envs.registry import build_taskset
from unstale.rewards import mathematics, workers
from unstale.rewards.mathematics import math_answer

REWARD = "unstale.rewards.mathematics:math_answer"
HOSTILE = (r"\boxed{9^{9^{9^{9}}}}", r"\boxed{((10!)!)!}", r"\boxed{2^{99999999999}}")

RIGHT = [
    ("The answer is 42.", "42"),
    (r"So \boxed{\frac{2}{4}}.", "0.5"),
    (r"\boxed{\frac12}", "1/2"),
    (r"\boxed{\frac{3}{-4}}", "-0.75"),
    (r"\boxed{\frac{1.5}{2}}", "0.75"),
    (r"\boxed{28\%}", "28"),
    ("0.28", "28%"),
    (r"1.5 \times 10^3", "1500"),
    ("2^{10}", "1024"),
    ("10^6", "1000000"),
    (r"x = \sqrt{2}", "1.41421356"),
    (r"\boxed{\sqrt{16}}", "4"),
    (r"\boxed{1\,234}", "1234"),
    ("-$5", "-5"),
    ("\N{MINUS SIGN}7", "-7"),
    ("#### 5 km^2", "2 + 3 = 5 #### 5"),
    ("The answer is 5 (see step 3)", "5"),
    (r"$18 \text{ (in 2024)}$", "18"),
    ("She has 3+4=7 apples. She sells 2, so she has 5.", "5"),
    (r"Not \boxed{41}. It is \boxed{42}, as {x} shows.", "42"),
    ("So $(1+x)^2$.", "x^2 + 2x + 1"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", r"We get $x = 4$ and so \boxed{5}."),
    (r"It costs \$5.", r"\$5"),
]
WRONG = [
    ("", "5"),
    ("  ", "5"),
    ("\x00\ud800", "5"),
    ("I do not know", "5"),
    ("1000001", "1000000"),
    ("12345678901234567890", "12345678901234567891"),
    ("6", "10^6"),
    ("7/0", "0"),
    (r"\boxed{x^2}", "2"),
    (r"\boxed{2\sqrt{3}}", "3"),
    (r"\boxed{3\pi}", "3"),
    (r"\boxed{[1, 2)}", "2"),
    (r"\boxed{(5,2)}", "(1,2)"),
    (r"Not \boxed{41}. It is \boxed{42}.", "41"),
    (r"\boxed{5, 6}", "5"),
    (r"\boxed{5 \text{ or } 6}", "5"),
    ("1 2 3 4 5 6 7", "5"),
    (r"\boxed{x}", "5"),
    ("5-7", "7"),
    ("2024-01-05", "5"),
    ("$" * 5000, "5"),
    ("9" * 10_000, "9"),
]


@pytest.mark.parametrize(("cases", "value"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_answers_are_compared_as_mathematics(cases: list[tuple[str, str]], value: float) -> None:
    given = {case: math_answer(case[0], {"answer": case[1]}) for case in cases}
    assert given == dict.fromkeys(cases, value)


@pytest.mark.parametrize("answer", ["", "#### "])
def test_an_expected_answer_without_mathematics_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math_answer("5", {"answer": answer})


@pytest.fixture
def new_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start processes with the limits of the test."""
    pool = workers.WorkerPool("math_worker.py")
    monkeypatch.setattr(mathematics, "_POOL", pool)
    yield
    pool.close()


@pytest.mark.usefixtures("new_processes")
def test_hostile_replies_get_0_in_threads_and_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends their processes. Other replies are compared meanwhile and afterwards."""
    monkeypatch.setattr(workers, "CPU_S", 0.3)
    rows = [{"prompt": f"{number}?", "answer": str(number)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"reward": REWARD, "held_out_share": 0.0}
    tasks: Any = build_taskset(make_task(f"dataset:{tmp_path / 'rows.jsonl'}", **options))

    async def reward(index: int, reply: str) -> float:
        task = next(task for task in tasks.train(0) if tasks.data_of(task) == rows[index])
        env = tasks.env(task, 0)
        await env.begin()
        end = await env.step(Message("assistant", reply))
        return end.rewards["reward"]

    async def rewards() -> list[float]:
        replies = [HOSTILE[n // 2] if n % 2 and n < 6 else rf"\boxed{{{n}}}" for n in range(8)]
        return await asyncio.gather(*(reward(n, text) for n, text in enumerate(replies)))

    assert asyncio.run(rewards()) == [1, 0, 1, 0, 1, 0, 1, 1]
    assert math_answer("5", {"answer": "5"}) == 1.0


@pytest.mark.usefixtures("new_processes")
def test_a_frozen_process_is_an_error_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine must not turn a right answer into a wrong one."""
    monkeypatch.setattr(workers, "WALL_S", 0.0)
    with pytest.raises(EnvError, match="gave no answer"):
        math_answer("5", {"answer": "5"})
    monkeypatch.setattr(workers, "WALL_S", 60.0)
    assert math_answer("5", {"answer": "5"}) == 1.0


@pytest.mark.usefixtures("new_processes")
def test_an_interrupted_comparison_leaves_no_answer_to_the_next_one() -> None:
    pool = mathematics._POOL
    for _ in range(workers.WORKERS):
        with pytest.raises(KeyboardInterrupt), pool.worker() as worker:
            worker.send(["5", "5"])
            raise KeyboardInterrupt
    assert math_answer("6", {"answer": "5"}) == 0.0
    assert math_answer("5", {"answer": "5"}) == 1.0
