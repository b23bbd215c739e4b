"""Test `chain`: tasks of another environment in one episode, with skills and a bonus for them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from random import Random

import numpy as np
import pytest

from unstale.config import ConfigError, make_task
from unstale.envs import Env, ListedTasks, Message, NumberedTasks, Turn
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset
from unstale.records import Task, total_reward
from unstale.research.envs.chain import REQUEST, SKILLS, ChainTasks
from unstale.testing import check_env

DOORS = 4


class Door:
    """Open the right door. Two following tasks have the same one, which the first one shows."""

    def __init__(self, task: Task) -> None:
        self.right = Random(task.index // 2).randrange(DOORS)

    async def begin(self) -> Turn:
        return Turn((Message("system", "Doors."), Message("user", "Which door?")))

    async def step(self, reply: Message) -> Turn:
        words = reply.content.split()
        opened = bool(words) and words[-1] == str(self.right)
        text = Message("user", f"It was door {self.right}.")
        return Turn((text,), done=True, rewards={"open": float(opened)})


class Doors(NumberedTasks):
    name = "doors"
    tools = ()

    def env(self, task: Task, seed: int) -> Env:
        return Door(task)


def play(
    say: Callable[[Sequence[Message]], str], task: int = 0, *, bonus: float = 0.5
) -> tuple[Turn, list[Sequence[Message]]]:
    """Play a chain of two doors. Return its last turn, and what the policy read before replies."""

    async def episode() -> tuple[Turn, list[Sequence[Message]]]:
        env = ChainTasks(Doors(), bonus=bonus).env(Task("chain:doors", "train", task), 0)
        turn, read = await env.begin(), []
        while not turn.done:
            read.append(turn.messages)
            turn = await env.step(Message("assistant", say(turn.messages)))
        await env.close()
        return turn, read

    return asyncio.run(episode())


def learns(messages: Sequence[Message]) -> str:
    """Reply as a policy that writes the shown door down, and opens the door that a skill names."""
    text = messages[-1].content
    if text == REQUEST:
        return f"SKILL door: open {messages[0].content[-2]}"
    return f"By door: {text[-1]}" if SKILLS in text else "0"


def test_a_skill_is_in_the_next_prompt_and_pays_if_a_success_names_it() -> None:
    turn, read = play(learns, task=0)
    assert len(read) == 3 and SKILLS in read[2][0].content
    assert read[2][0].content.startswith("Doors.\n\nWhich door?")
    assert turn.rewards["task_2"] == 0.5 and turn.rewards["skill"] == 0.5
    assert turn.facts["skills"] == 1 and turn.facts["solved_2"] == 1


def test_a_skill_pays_nothing_for_a_failure_or_if_it_is_not_named() -> None:
    def wrong(messages: Sequence[Message]) -> str:
        return learns(messages) if messages[-1].content == REQUEST else "by door: 9"

    def silent(messages: Sequence[Message]) -> str:
        return learns(messages).replace("By door: ", "")

    def bare(messages: Sequence[Message]) -> str:
        return "no skill" if messages[-1].content == REQUEST else learns(messages)

    assert play(wrong)[0].rewards == {"task_1": 0, "task_2": 0, "skill": 0}
    assert play(silent)[0].rewards["skill"] == 0 and play(silent)[0].rewards["task_2"] == 0.5
    turn, read = play(bare)
    assert turn.rewards["skill"] == 0 and SKILLS not in read[2][0].content


def test_only_a_useful_skill_raises_the_success_of_the_second_task() -> None:
    random = Random(3)

    def useless(messages: Sequence[Message]) -> str:
        if messages[-1].content == REQUEST:
            return f"SKILL door: open {random.randrange(DOORS)}"
        return learns(messages)

    chains = range(0, 400, 2)
    useful = np.mean([play(learns, task)[0].facts["solved_2"] for task in chains])
    other = np.mean([play(useless, task)[0].facts["solved_2"] for task in chains])
    assert useful > 0.8 and other == pytest.approx(1 / DOORS, abs=0.06)


def test_the_writer_of_a_skill_learns_because_both_tasks_are_one_episode() -> None:
    """A policy that writes the shown door, or any other, with logits trained by REINFORCE."""
    generator = np.random.default_rng(1)
    logits = np.zeros(2)
    for step in range(200):
        chance = 1 / (1 + np.exp(logits[1] - logits[0]))
        tells = [generator.random() < chance for _ in range(8)]
        rewards = []
        for told in tells:

            def say(messages: Sequence[Message], told: bool = told) -> str:
                reply = learns(messages)
                return reply if told or "SKILL" not in reply else "SKILL door: open 9"

            rewards.append(total_reward(play(say, 2 * step)[0].rewards))
        for told, advantage in zip(tells, np.array(rewards) - np.mean(rewards), strict=True):
            logits += 0.5 * advantage * (np.array([told, not told]) - [chance, 1 - chance])
    assert 1 / (1 + np.exp(logits[1] - logits[0])) > 0.95


class Pairs(ListedTasks):
    """Rows in pairs: both rows of a pair have its number."""

    name = "pairs"
    tools = ()

    def __init__(self, rows: int) -> None:
        self.data = {"train": [each // 2 for each in range(rows)], "held_out": [0, 0, 1, 1, 2]}

    def env(self, task: Task, seed: int) -> Env:
        return Door(task)


@pytest.mark.parametrize("rows", [20, 21])
def test_the_rows_of_a_chain_are_those_that_were_written_together(rows: int) -> None:
    inner = Pairs(rows)
    chains = ChainTasks(inner)
    trained = [chains.tasks_of(task) for task in islice(chains.train(4), 30)]
    held_out = [chains.tasks_of(task) for task in chains.held_out(5)]
    found = [[inner.data_of(each) for each in chain] for chain in trained]
    assert sorted(found[:10]) == [[pair, pair] for pair in range(10)]
    assert all(first == second for first, second in found)
    assert [[inner.data_of(each) for each in chain] for chain in held_out] == [[0, 0], [1, 1]]
    with pytest.raises(ConfigError, match=r"needs 3 training tasks .* got 2"):
        ChainTasks(Pairs(2), length=3)


def test_chains_of_numbered_tasks_share_no_task() -> None:
    chains = ChainTasks(Doors(), length=3)
    for tasks in (islice(chains.train(1), 20), chains.held_out(20)):
        numbers = [each.index for task in tasks for each in chains.tasks_of(task)]
        assert len(numbers) == 60 and numbers == list(range(numbers[0], numbers[0] + 60))


def test_a_chain_keeps_the_contract_of_environments() -> None:
    check_env(ChainTasks(Doors()))


def test_a_chain_of_a_shipped_environment_is_named_and_others_are_refused() -> None:
    made = build_taskset(make_task("chain:calculator", length=3, bonus=0.0))
    (task,) = made.held_out(1)
    assert isinstance(made, ChainTasks) and len(made.tasks_of(task)) == 3
    with pytest.raises(ConfigError, match="tasks of both cannot be chained"):
        ChainTasks(MixedTasks("both", [Doors()]))

    class Combined(Doors):
        def combine(self, rewards: Mapping[str, float]) -> float:
            return 0.0

    with pytest.raises(ConfigError, match=r"it has combine\(\), which would not be called"):
        ChainTasks(Combined())
