"""Test several roles of one policy in one episode.

Each role has its own conversations. A role is credited with its own reward, against the same role
in the other episodes of the group. A resumed run is equal to an undisturbed one.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_external import (
    CHAT,
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
from tests.support.scripted_agents import ask_as, user
from unstale.algorithms import advantages
from unstale.builders import build_rollout
from unstale.config import AdvantageConfig, ConfigError, RunConfig, TaskConfig
from unstale.durability import virtual_clock
from unstale.durability.journal import Journal, check
from unstale.engines import SamplingParams
from unstale.envs.external import ExternalAgent, role_url
from unstale.records import ContextPiece, Failure, Group, GroupRequest, Sampled, Trajectory
from unstale.rollout.endpoint.check import check_agent
from unstale.rollout.seeds import derive_seed

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


Logits = dict[tuple[str, int], float]
"""(role, what it sees) -> logit of the bit 1 that it says."""

LOGITS: Logits = {
    ("planner", 0): 0.3,
    ("worker", 0): -0.4,
    ("worker", 1): 0.9,
    ("judge", 0): -0.2,
    ("judge", 1): 0.5,
    ("judge", 2): 0.1,
}

Said = tuple[tuple[str, int, int], ...]
"""The conversations of an episode: role, what it sees, and the bit that it says."""


def games() -> list[Said]:
    """Return all episodes of the toy. A worker sees the plan; with the plan 1 it is asked twice.
    The judge sees how often a worker said 1.
    """
    return [
        (("planner", 0, plan), *(("worker", plan, bit) for bit in bits), ("judge", sum(bits), last))
        for plan in (0, 1)
        for bits in product((0, 1), repeat=1 + plan)
        for last in (0, 1)
    ]


def outcome(game: Said) -> dict[str, float]:
    (*_, plan), *works, (*_, seen, last) = game
    return {
        "right": float(plan == works[0][-1]) - 0.4 * last,
        "planner/x": 0.7 * plan - 0.3 * seen,
        "worker/x": plan - 0.2 * seen + 0.3 * last,
        "judge/x": 1.3 * float(last == seen % 2),
    }


def own_reward(game: Said, role: str) -> float:
    return sum(value for name, value in outcome(game).items() if name in ("right", f"{role}/x"))


def slope(logits: Logits, role: str, seen: int, bit: int) -> float:
    """Return the derivative of the log-probability of the bit by its logit."""
    return bit - 1 / (1 + math.exp(-logits[role, seen]))


def likely(game: Said, logits: Logits) -> float:
    chances = (1 - abs(slope(logits, *said)) for said in game)
    return math.prod(chances)


def trajectory_of(game: Said) -> Trajectory:
    main, *branches = (said((bit,), outcome(game), role) for role, _, bit in game)
    return replace(main, branches=tuple(branches))


def expected_gradient(estimator: Any, size: int) -> Logits:
    """Return the gradient that groups of `size` episodes give on average, by logit."""
    gradient: Logits = dict.fromkeys(LOGITS, 0.0)
    for games_of_group in product(games(), repeat=size):
        weight = math.prod(likely(game, LOGITS) for game in games_of_group) / size
        scored = estimator([Group(TASK, tuple(map(trajectory_of, games_of_group)))])
        for (role, seen, bit), item in zip(chain(*games_of_group), scored, strict=True):
            assert item.trajectory.role == role
            gradient[role, seen] += weight * slope(LOGITS, role, seen, bit) * item.advantage[0]
    return gradient


def exact_gradient(reward: Callable[[Said, str], float]) -> Logits:
    """Return the derivatives of each role's expected reward by the logits of this role."""
    step = 1e-5

    def value(role: str, seen: int, change: float) -> float:
        logits = {**LOGITS, (role, seen): LOGITS[role, seen] + change}
        return sum(likely(game, logits) * reward(game, role) for game in games())

    return {name: (value(*name, step) - value(*name, -step)) / (2 * step) for name in LOGITS}


@pytest.mark.parametrize(
    ("estimator", "size", "share"),
    [(advantages.rloo, 2, 1.0), (advantages.rloo, 3, 1.0), (advantages.grpo_no_std, 2, 0.5)],
)
def test_credit_by_role_is_the_gradient_of_each_roles_own_reward(
    estimator: Any, size: int, share: float
) -> None:
    """All groups of the toy, in float64. GRPO without division has (n - 1) / n of the gradient."""
    assert sum(likely(game, LOGITS) for game in games()) == pytest.approx(1)
    found = expected_gradient(estimator, size)
    exact = exact_gradient(own_reward)
    assert found == pytest.approx({name: share * each for name, each in exact.items()}, abs=1e-9)
    by_total = exact_gradient(lambda game, role: sum(outcome(game).values()))
    # a credit by the episode's reward would be another
    assert min(abs(by_total[name] - exact[name]) for name in LOGITS) > 0.005


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


async def at_once(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
    """A slow worker and a judge that answers before it, and is asked again."""
    ask = partial(ask_as, base_url, api_key)
    await ask("planner", user("Plan."))

    async def judge() -> None:
        verdict = await ask("judge", user("Right?"))
        await ask("judge", user("Right?"), verdict, user("Sure?"))

    async with asyncio.TaskGroup() as both:
        both.create_task(ask("worker", user("slow")))
        await asyncio.sleep(1)
        both.create_task(judge())
    return {"right": 1.0}


def test_a_conversation_keeps_its_noise_if_an_earlier_one_has_no_reply_on_record(
    tmp_path: Path,
) -> None:
    """The run ends when the judge is asked again, before the slow worker's first token."""

    async def wait(tokens: Sequence[int], params: SamplingParams) -> None:
        if "slow" in CHAT.text(tokens):
            await asyncio.sleep(3600)

    run = partial(virtual_clock.run, virtual=True)
    group, first, second = halves(
        tmp_path, at_once, after=3, roles=ROLES, delay=wait, size=1, run=run
    )
    talks = {each.role: each for each in group.trajectories[0].conversations}
    seeds = [derive_seed(talks["planner"].seed, "branch", number) for number in (1, 2)]
    assert [talks["worker"].seed, talks["judge"].seed] == seeds
    used = {seed for _, _, seed in (*first.sampled, *second.sampled)}
    assert used == {each.seed for each in talks.values()}


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
