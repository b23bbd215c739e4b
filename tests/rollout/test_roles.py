"""Test several roles of one policy in one episode.

Each role has its own conversations. A role is credited with its own reward, against the same role
in the other episodes of the group. A resumed run is equal to an undisturbed one.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_external import (
    SUMS,
    TASK,
    TEAM,
    Refusal,
    World,
    asker,
    halves,
    says,
    whole,
)
from unstale.algorithms import advantages
from unstale.builders import build_rollout
from unstale.config import AdvantageConfig, ConfigError, RunConfig, TaskConfig
from unstale.durability.journal import Journal, check
from unstale.envs.external import ExternalAgent, role_url
from unstale.records import ContextPiece, Failure, Group, GroupRequest, Sampled, Trajectory
from unstale.rollout.endpoint.check import check_agent

ROLES = ("planner", "worker", "judge")


async def team(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
    """The worker speaks first, with the planner's prompt. It has two conversations."""
    ask = {role: asker(role_url(base_url, role), api_key) for role in ROLES}
    asked: list[Any] = [{"role": "user", "content": f"What is {task}?"}]
    first = await ask["worker"](asked)
    plan = await ask["planner"](asked)
    history = [*asked, plan, {"role": "user", "content": "Go on."}]
    await ask["planner"](history)
    await ask["worker"]([{"role": "system", "content": "Work."}, *asked])
    await ask["judge"]([*asked, first, {"role": "user", "content": "Is it right?"}])
    return {"right": 1.0, "planner/short": 0.5, "worker/done": float(seed % 2), "judge/fair": 0.25}


def test_each_role_has_its_own_conversations_and_reward() -> None:
    world = World(lambda tokens, params: says(f"so {len(tokens)} {params.seed % 1000}"))
    trajectory = whole(world.play(team, roles=ROLES))
    assert [(each.role, each.num_turns) for each in trajectory.conversations] == [
        ("planner", 2),
        ("worker", 1),
        ("worker", 1),
        ("judge", 1),
    ]
    assert [each.role_reward for each in trajectory.conversations] == [1.5, 2.0, 2.0, 1.25]
    assert trajectory.reward == 2.75, "the episode's reward is all of them"
    reasons = [event["reason"] for event in world.events]
    assert reasons == ["an earlier prompt was edited"], "only the worker's second conversation"
    seeds = {each.seed for each in trajectory.conversations}
    assert len(seeds) == 4, "equal prompts of two roles have different noise"


def test_the_role_of_a_call_must_be_one_of_the_task_set() -> None:
    async def agent(base_url: str, task: str, seed: int, api_key: str) -> Mapping[str, float]:
        asked: list[Any] = [{"role": "user", "content": "one"}]
        with pytest.raises(Refusal) as refused:
            await asker(role_url(base_url, "boss"), api_key)(asked)
        assert refused.value.args[0] == 404
        await asker(base_url, api_key)(asked)  # without a role it is the first one
        return {"x/y": 1.0} if task == "bad" else {}

    say = World(lambda tokens, params: says("so"))
    assert whole(say.play(agent, roles=("solo",))).role == "solo"
    assert whole(World(say.say).play(agent)).role == ""
    failure = World(say.say).play(agent, ["bad"], roles=("solo",))
    assert isinstance(failure, Failure) and "'x/y' is of a role that does not" in failure.error
    for wrong in ("a/b", "v1", "", "a"):
        with pytest.raises(ValueError, match="roles must be different names"):
            ExternalAgent(agent, SUMS, roles=("a", wrong))


def said(tokens: tuple[int, ...], rewards: Mapping[str, float], role: str) -> Trajectory:
    pieces = (ContextPiece((1,)), Sampled(tokens, (-1.0,) * len(tokens), 0))
    return Trajectory(pieces, rewards, "done", TASK, 0, role=role)


def episode(rewards: Mapping[str, float], *roles: str) -> Trajectory:
    main, *branches = (said((2, 3), rewards, role) for role in roles)
    return replace(main, branches=tuple(branches))


def test_a_role_is_compared_with_its_siblings_only() -> None:
    group = Group(
        TASK,
        (
            episode({"r": 1.0, "a/x": 1.0}, "a", "b", "a"),
            episode({"r": 0.0, "a/x": 3.0, "b/x": 2.0}, "a", "b"),
            episode({"r": 0.5}, "a"),
        ),
    )
    scored = advantages.rloo([group])
    found = [(each.trajectory.role, each.advantage[0]) for each in scored]
    # rewards of a: 2, 3, 0.5; of b: 1, 2
    expected = [("a", 0.25), ("b", -1.0), ("a", 0.25), ("a", 1.75), ("b", 1.0), ("a", -2.0)]
    assert [role for role, _ in found] == [role for role, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    for refusing in (advantages.turn_level, advantages.gae):
        with pytest.raises(ValueError, match="no credit by role"):
            refusing([group])
    equal_in_all = (episode({"a/x": 1.0}, "a", "b"), episode({"b/x": 1.0}, "a", "b"))
    assert not Group(TASK, equal_in_all).has_equal_rewards
    assert Group(TASK, equal_in_all[:1] * 2).has_equal_rewards


def chance(theta: float, bit: int) -> float:
    one = 1 / (1 + math.exp(-theta))
    return one if bit else 1 - one


PLAN, WORK = 0.3, (-0.4, 0.9)
"""Logits of the toy: of the planner's bit, and of the worker's bit after each plan."""


def outcome(plan: int, work: int) -> dict[str, float]:
    return {"right": float(plan == work), "planner/x": 0.7 * plan, "worker/x": -0.2 * work + plan}


def episodes() -> list[tuple[float, tuple[int, int], Trajectory]]:
    """Return each episode of the toy with its probability and bits."""
    found = []
    for plan, work in product((0, 1), repeat=2):
        rewards = outcome(plan, work)
        whole_episode = replace(
            said((plan,), rewards, "planner"), branches=(said((work,), rewards, "worker"),)
        )
        likely = chance(PLAN, plan) * chance(WORK[plan], work)
        found.append((likely, (plan, work), whole_episode))
    return found


def expected_gradient() -> dict[str, float]:
    """Return the gradient that groups of two episodes give on average, by logit."""
    gradient: dict[str, float] = defaultdict(float)
    for one, other in product(episodes(), repeat=2):
        likely = one[0] * other[0]
        scored = advantages.rloo([Group(TASK, (one[2], other[2]))])
        for (plan, work), (planner, worker) in zip(
            (one[1], other[1]), (scored[:2], scored[2:]), strict=True
        ):
            slope = {
                "plan": (plan - chance(PLAN, 1), planner),
                f"work{plan}": (work - chance(WORK[plan], 1), worker),
            }
            for name, (of_logit, item) in slope.items():
                gradient[name] += likely / 2 * of_logit * item.advantage[0]
    return gradient


def test_credit_by_role_is_the_gradient_of_each_roles_own_reward() -> None:
    """All groups of two episodes of a toy, against derivatives of the exact expectations."""

    def value(role: str, plan_logit: float, work_logits: tuple[float, float]) -> float:
        return sum(
            chance(plan_logit, plan)
            * chance(work_logits[plan], work)
            * said((0,), outcome(plan, work), role).role_reward
            for plan, work in product((0, 1), repeat=2)
        )

    step = 1e-5
    exact = {
        "plan": [value("planner", PLAN + sign * step, WORK) for sign in (1, -1)],
        "work0": [value("worker", PLAN, (WORK[0] + sign * step, WORK[1])) for sign in (1, -1)],
        "work1": [value("worker", PLAN, (WORK[0], WORK[1] + sign * step)) for sign in (1, -1)],
    }
    derivatives = {name: (high - low) / (2 * step) for name, (high, low) in exact.items()}
    found = expected_gradient()
    assert found == pytest.approx(derivatives, abs=1e-9)
    total = [
        value("", PLAN + sign * step, WORK) for sign in (1, -1)
    ]  # a credit by the episode's reward would be another
    assert abs((total[0] - total[1]) / (2 * step) - found["plan"]) > 0.05


@pytest.mark.parametrize("after", [1, 3, 4, 7])
def test_a_resumed_episode_with_roles_is_equal(tmp_path: Path, after: int) -> None:
    group, first, second = halves(tmp_path, team, after=after, roles=ROLES)
    assert len(first.sampled) + len(second.sampled) == 10, "nothing is sampled again"
    again = World(lambda tokens, params: says(f"so {len(tokens)} {params.seed % 1000}"))

    async def undisturbed() -> Group:
        async with again.open():
            rollout = again.rollout(ExternalAgent(team, SUMS, name="sums", roles=ROLES))
            return await rollout.group(GroupRequest(0, TASK, 0, 0), size=2)

    other = asyncio.run(undisturbed())

    def content(found: Group) -> Any:
        return [
            sorted((one.role, one.tokens, one.role_reward, one.seed) for one in each.conversations)
            for each in found.trajectories
        ]

    assert content(group) == content(other)
    assert [each.advantage for each in advantages.grpo([group])] == [
        each.advantage for each in advantages.grpo([other])
    ]
    with Journal.read(tmp_path) as reader:
        assert reader.group(0) == group and check(reader) == []


def test_a_run_without_credit_by_role_is_refused() -> None:
    tasks = ExternalAgent(team, SUMS, roles=ROLES)

    def config(**options: Any) -> RunConfig:
        return RunConfig(recipe="sums", task=TaskConfig(env="tests.support.x:tasks"), **options)

    build_rollout(config(), tasks)
    with pytest.raises(ConfigError, match=r"advantage.estimator = turn_level has no credit"):
        build_rollout(config(advantage=AdvantageConfig(estimator="turn_level")), tasks)


def test_the_example_of_the_docs_runs() -> None:
    example: dict[str, Any] = {}
    exec(TEAM, example)
    world = World(lambda tokens, params: says("It is 30."))
    trajectory = whole(world.play(example["agent"], roles=example["tasks"]().roles))
    assert trajectory.rewards == {"right": 1.0, "planner/brief": 1.0}
    assert [each.role_reward for each in trajectory.conversations] == [2.0, 1.0]
    check_agent(example["agent"], "10 + 20", ("It is 30.",), roles=("planner", "worker"))
