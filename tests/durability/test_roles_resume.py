"""Test that a killed run of several roles, or of self-play, ends equal to one that was not killed.

The agents call the endpoint over HTTP, in memory: three roles, of which two workers speak at once,
and the two seats of a game. The engine is scripted, and the trainer real.
"""

import asyncio
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.durability.test_resume import (
    AGAIN,
    KILLS,
    STEPS,
    Toy,
    config,
    kill_after_a_step,
    killed,
    played,
    require_sound,
    rows,
)
from tests.rollout.test_external import CHAT, SUMS, TOKENIZER, says
from tests.support.scripted_agents import ask_as, user
from unstale.cli import main, recipe_options, session
from unstale.cli.resume import load_config
from unstale.config import EngineConfig, RolloutConfig, RunConfig, make_task
from unstale.config.options import override
from unstale.durability import compare_runs
from unstale.durability.journal import Journal
from unstale.engines import SamplingParams
from unstale.envs.external import ExternalAgent
from unstale.envs.registry import build_taskset
from unstale.testing import tiny_policy

pytestmark = pytest.mark.usefixtures("forked_children")

REPLY = 8
WORDS = CHAT.encode(" a b c d e f g h")
ROLES = ("planner", "worker", "judge")


async def team(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
    """A plan, two workers at once, a judge of both, and one worker's second answer."""
    call = partial(ask_as, base_url, api_key)
    plan = await call("planner", user(f"Plan {task}."))
    jobs = [user(f"Do {part}: {plan['content']}") for part in ("one", "two")]
    one, two = await asyncio.gather(*(call("worker", job) for job in jobs))
    verdict = await call("judge", user(f"{one['content']} or {two['content']}?"))
    last = await call("worker", jobs[0], one, user(verdict["content"]))
    length = [len(each["content"]) for each in (plan, last, verdict)]
    return {"right": length[1] % 2, "planner/brief": length[0] % 3, "judge/fair": length[2] % 3}


def chatter(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Words that the seed decides, and as many: without those that were said before."""
    said = [WORDS[(params.seed >> (3 * at)) % len(WORDS)] for at in range(1 + params.seed % REPLY)]
    return [*said, CHAT.stop_tokens[0]][REPLY - params.reply_limit :]


def mover(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """A move of Nim that the seed decides: how much it takes from the first pile."""
    piles = CHAT.text(tokens, whole=True).rpartition("Current Pile:")[2]
    pile, size = next(each for each in re.findall(r"pile (\d): (\d)", piles) if each[1] != "0")
    move = says(f"[{pile} {1 + params.seed % int(size)}]")
    return move[REPLY - params.reply_limit :]


async def slowly(tokens: Sequence[int], params: SamplingParams) -> None:
    await asyncio.sleep(0.3 if params.seed % 7 == 0 else 0.02)


def roles() -> Toy:
    return toy(tasks_of_team, chatter)


def games() -> Toy:
    pytest.importorskip("textarena", reason="the extra textarena is not installed")
    return toy(lambda: build_taskset(make_task("textarena:Nim-v0")), mover)


def toy(taskset: Any, say: Any) -> Toy:
    def parts() -> dict[str, Any]:
        policy = tiny_policy(num_words=len(TOKENIZER))
        return {"policy": policy, "chat": CHAT, "say": say, "delay": slowly}

    return Toy(taskset, parts=parts)


def options(*, deterministic: bool = True) -> RunConfig:
    made = config(deterministic=deterministic)
    engine = EngineConfig(max_completion_tokens=REPLY, max_context=2048, restarts=0)
    made = replace(made, engine=engine, rollout=RolloutConfig(retries=0, max_turns=16))
    # the engine does not sample from the policy, so a correction would drop every token
    return override(made, {"correction.mode": "none", "advantage.estimator": "rloo"})


SEATS = {roles: ROLES, games: ("first", "second")}
Tasks = Callable[[], Toy]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tasks], Path]:
    """Return a function that returns the folder of a run of these tasks that was not killed."""

    @cache
    def run(tasks: Tasks) -> Path:
        folder = tmp_path_factory.mktemp("runs") / "whole"
        with played(tasks()) as toy:
            toy.begin(folder, options())
        return folder

    return run


def seats(folder: Path) -> Counter[str]:
    """Return the number of recorded conversations of each role."""
    with Journal.read(folder) as reader:
        return Counter(role for (role,) in reader.rows("SELECT role FROM roles"))


def num_half(folder: Path) -> int:
    """Return how many episodes have begun and not ended, and have an answer on record."""
    with Journal.read(folder) as reader:
        ((number,),) = reader.rows(
            "SELECT count(DISTINCT episode) FROM pieces WHERE version IS NOT NULL AND "
            "episode NOT IN (SELECT episode FROM trajectories)"
        )
    return int(number)


def require_credit_of_each_role(folder: Path, names: Sequence[str]) -> None:
    """Check the advantages that were trained on, by hand: RLOO of each role's own reward."""
    found = defaultdict(set)
    with Journal.read(folder) as reader:
        groups = [(step, each) for step in range(1, STEPS + 1) for each in reader.consumed(step)]
        for step, group in groups:
            values = {each.episode: each for each in reader.token_values(group.number, step)}
            for role, (place, episode) in product(names, enumerate(group.trajectories)):
                own = [
                    sum(x for name, x in one.rewards.items() if name.split("/")[0] in (role, name))
                    for one in group.trajectories
                ]
                others = own[:place] + own[place + 1 :]
                credit = own[place] - sum(others) / len(others)
                talks = [each for each in episode.conversations if each.role == role]
                for each in talks:
                    assert values[each.episode].advantage == pytest.approx(credit, abs=1e-6)
                    found[role].add(round(credit, 3))
    assert {*found} == {*names} and all(len(credits) > 2 for credits in found.values()), found
    assert all(row["trainer/grad_norm"] > 0 for row in rows(folder) if row["step"])
    metrics = [name for name in rows(folder)[-1] if re.fullmatch("reward/.*/.*_mean", name)]
    assert metrics and all(len({row[name] for row in rows(folder)}) > 1 for name in metrics)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("tasks", SEATS)
def test_a_run_killed_in_the_middle_of_an_episode_ends_equal(
    tmp_path: Path, undisturbed: Callable[[Tasks], Path], tasks: Tasks
) -> None:
    folder = tmp_path / "run"
    with played(tasks()) as toy:
        with killed("transaction", 50):  # a conversation begins
            toy.begin(folder, options())
        assert num_half(folder) > 0
        toy.go_on(folder, options())
    assert compare_runs.differences(undisturbed(tasks), folder) == []
    require_sound(folder)
    assert seats(folder) == seats(undisturbed(tasks))
    require_credit_of_each_role(folder, SEATS[tasks])


@pytest.mark.costly
@pytest.mark.parametrize("tasks", SEATS)
@pytest.mark.parametrize(("name", "number"), KILLS)
def test_a_run_ends_equal_wherever_it_is_killed_twice(
    tmp_path: Path, undisturbed: Callable[[Tasks], Path], tasks: Tasks, name: str, number: int
) -> None:
    folder = tmp_path / "run"
    with played(tasks()) as toy:
        with killed(name, number):
            toy.begin(folder, options())
        with killed(*AGAIN[number % 3]):
            toy.go_on(folder, options())
        toy.go_on(folder, options())
    assert compare_runs.differences(undisturbed(tasks), folder) == []
    require_sound(folder)


@pytest.mark.costly
@pytest.mark.parametrize("tasks", SEATS)
@pytest.mark.parametrize(("name", "number"), [each for each in KILLS if each[0] != "prune"])
def test_an_ordinary_run_loses_no_conversation(
    tmp_path: Path, tasks: Tasks, name: str, number: int
) -> None:
    folder, made = tmp_path / "run", options(deterministic=False)
    with played(tasks()) as toy:
        with killed(name, number):
            toy.begin(folder, made)
        held = seats(folder)
        toy.go_on(folder, made)
    require_sound(folder)
    assert held <= seats(folder)
    require_credit_of_each_role(folder, SEATS[tasks])


def tasks_of_team() -> ExternalAgent:
    return ExternalAgent(team, SUMS, name="team", roles=ROLES)


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize(
    "env", ["textarena:IteratedPrisonersDilemma-v0", f"{__name__}:tasks_of_team"]
)
def test_a_run_killed_with_sigkill_and_resumed_is_the_run_that_was_not(
    tmp_path: Path, env: str
) -> None:
    """Everything is real: the engine process, the command line, the signal."""
    if env.startswith("textarena"):
        pytest.importorskip("textarena", reason="the extra textarena is not installed")
    given = f"""--task.env {env} --deterministic true --minutes 0 --max_steps 3 --eval.tasks 0
        --checkpoint.interval 2 --schedule.groups_per_step 2 --schedule.group_size 2
        --schedule.max_staleness 1 --engine.max_completion_tokens 8 --engine.max_context 1024
        --rollout.max_turns 12"""

    def begin(name: str) -> list[str]:
        return ["train", "retail", "--runs", str(tmp_path), "--name", name, *given.split()]

    made = recipe_options.configure(main.parse(begin("whole")))
    whole = session.train(made, console=Console(file=StringIO()))
    kill_after_a_step(begin("killed"), tmp_path / "killed")
    stored = load_config(tmp_path / "killed", named={"task.env": env})
    resumed = session.resume(tmp_path / "killed", stored, console=Console(file=StringIO()))
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3]
    assert compare_runs.differences(whole.folder, resumed.folder) == []
    assert len(seats(resumed.folder)) > 1
