"""Test `chain`: tasks of another environment in one episode, with skills and a bonus for them.

A later task begins with a fresh conversation, which is recorded, trained on and resumed as its own.
A procedure is called as a tool, and the environment executes its calls. A library is read at the
start. `unstale skills` writes it from the skills that solved tasks of a run have used.
"""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from unstale.algorithms import advantages
from unstale.builders import build_rollout
from unstale.cli.main import main
from unstale.cli.saved_episodes import describe_evaluation
from unstale.config import (
    SHIPPED_POLICY,
    ConfigError,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    make_task,
)
from unstale.durability.journal import JOURNAL, Journal, check
from unstale.durability.run_folder import TOKENIZER
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Env, EnvError, ListedTasks, Message, NumberedTasks, ToolCall, Turn
from unstale.envs.chat import Chat
from unstale.envs.desk.expert import call_message, correct_call, expert_replies
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset, data_digests
from unstale.envs.retail import RetailTasks
from unstale.isolation.wire import read_turn, turn_row
from unstale.records import Failure, Group, GroupRequest, Task, Trajectory, total_reward
from unstale.research import recorded_skills
from unstale.research.attempt import AttemptOptions
from unstale.research.envs.chain import NOT_KEPT, REQUEST, ChainTasks
from unstale.research.skills import END, SKILLS, Skill, usable, with_skills
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
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
    say: Callable[[Sequence[Message]], str], task: int = 0, **options: Any
) -> tuple[Turn, list[Sequence[Message]]]:
    """Play a chain of two doors. Return its last turn, and what the policy read before replies."""

    async def episode() -> tuple[Turn, list[Sequence[Message]]]:
        env = ChainTasks(Doors(), **options).env(Task("chain:doors", "train", task), 0)
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
    found = re.search(r"door: open (\d)", text)
    return f"By door: {found[1]}" if found else "0"


class PaidDoor(Door):
    """A door with a reward for the reply, which cannot be closed if it is the first one."""

    def __init__(self, task: Task, closed: list[int]) -> None:
        super().__init__(task)
        self.number, self.closed = task.index, closed

    async def step(self, reply: Message) -> Turn:
        return replace(await super().step(reply), reward=0.25)

    async def close(self) -> None:
        self.closed.append(self.number)
        if not self.number:
            raise ValueError("not closed")


class PaidDoors(Doors):
    def __init__(self) -> None:
        self.closed: list[int] = []

    def env(self, task: Task, seed: int) -> Env:
        return PaidDoor(task, self.closed)


def test_a_chain_of_one_task_keeps_the_rewards_of_replies() -> None:
    env = ChainTasks(PaidDoors(), length=1).env(Task("chain:doors", "train", 0), 0)
    asyncio.run(env.begin())
    assert asyncio.run(env.step(Message("assistant", "0"))).reward == 0.25


def test_all_tasks_of_a_chain_are_closed_if_one_fails() -> None:
    tasks = PaidDoors()
    with pytest.raises(ValueError, match="not closed"):
        asyncio.run(ChainTasks(tasks).env(Task("chain:doors", "train", 0), 0).close())
    assert sorted(tasks.closed) == [0, 1]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_skill_is_in_the_next_prompt_and_pays_if_a_success_names_it(fresh: bool) -> None:
    turn, read = play(learns, task=0, fresh=fresh)
    texts = [each.content for each in read[2]]
    door = read[1][0].content[-2]
    listed = f"Which door?\n\n{SKILLS}\ndoor: open {door}\n{END}"
    assert texts == (["Doors.", listed] if fresh else [f"Doors.\n\n{listed}"])
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
    assert turn.rewards["skill"] == 0 and SKILLS not in read[2][-1].content


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


POLICY = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
RETAIL = ChainTasks(RetailTasks())
START = Task("chain:retail", "train", 0)


def replies_of(chain: ChainTasks, *, skill: str = "") -> list[Message]:
    """Return the scripted expert's replies to the tasks of a chain, with `skill` between them."""
    first, second = (expert_replies(chain.inner.scenario(each)) for each in chain.tasks_of(START))
    return [*first, Message("assistant", skill or "SKILL ask: first ask"), *second]


class Talk:
    """A scripted engine that gives written replies in order, and remembers what it read."""

    def __init__(self, chain: ChainTasks, replies: Sequence[Message], stop_after: int = 99) -> None:
        self.chat = Chat(POLICY, chain.tools)
        self.written = [self.chat.encode_reply(each) for each in replies]
        self.read: list[tuple[int, ...]] = []
        self.left = stop_after
        self.chain = chain
        self.engine = ScriptedEngine(self._say)

    def _say(self, tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        if len(self.read) == self.left:
            raise Stopped
        self.read.append(tuple(tokens))
        return self.written[len(self.read) - 1]

    async def rollout(self, **options: Any) -> Rollout:
        await self.engine.start()
        await self.engine.load({}, version=0)
        await self.engine.resume()
        config = EngineConfig(max_context=4096, max_completion_tokens=256)
        rooms = RolloutConfig(retries=0, max_turns=30)
        return Rollout(Generator(self.engine, self.chat, config), self.chain, rooms, **options)

    def play(self) -> Trajectory:
        async def episode() -> Trajectory | Failure:
            return await (await self.rollout()).episode(START, env_seed=7, noise_seed=8)

        found = asyncio.run(episode())
        assert isinstance(found, Trajectory), found
        return found


def library_of(folder: Path, *rows: Mapping[str, Any]) -> str:
    path = folder / "library.json"
    path.write_text(json.dumps({"skills": rows}))
    return str(path)


class Stopped(Exception):
    """The run is killed."""


def test_each_task_is_a_conversation_of_its_own_and_reads_fewer_tokens() -> None:
    talks = {}
    for fresh in (True, False):
        chain = ChainTasks(RetailTasks(), fresh=fresh)
        talks[fresh] = Talk(chain, replies_of(chain))
        found = talks[fresh].play()
        assert found.success and found.rewards["task_2"] == 0.5
        assert len(found.conversations) == 1 + fresh and found.num_sampled_in_all == sum(
            map(len, talks[fresh].written)
        )
    fresh, kept = talks[True], talks[False]
    later = fresh.chat.text(fresh.read[-1], whole=True)
    assert "ask: first ask" in later and "Keep the rules of the desk." in later
    assert REQUEST not in later and REQUEST in kept.chat.text(kept.read[-1], whole=True)
    assert sum(map(len, fresh.read)) < 0.7 * sum(map(len, kept.read))
    assert max(map(len, fresh.read)) < 0.7 * max(map(len, kept.read))


def test_the_writer_of_a_skill_gets_the_advantage_of_the_later_task() -> None:
    good = Talk(RETAIL, replies_of(RETAIL)).play()
    *_, last = replies_of(RETAIL)
    bad = Talk(RETAIL, [*replies_of(RETAIL)[:-2], *[last] * 6]).play()
    assert (good.rewards["task_1"], bad.rewards["task_1"]) == (0.5, 0.5)
    assert (good.rewards["task_2"], bad.rewards["task_2"]) == (0.5, 0.0)
    scored = advantages.rloo([Group(START, (good, bad))])
    assert [each.advantage for each in scored] == [(0.5,), (0.5,), (-0.5,), (-0.5,)]


@pytest.mark.parametrize("after", [1, 5, 8])
def test_a_killed_chain_resumes_with_equal_tokens(tmp_path: Path, after: int) -> None:
    replies = replies_of(RETAIL)
    assert after < len(replies)

    async def begin(talk: Talk) -> None:
        with Journal(tmp_path / JOURNAL) as journal:
            try:
                rollout = await talk.rollout()
                journal.add_request(request)
                await journal.publishing(0)
                await rollout.group(request, size=1, open_writer=journal.begin)
            finally:
                journal.flush()

    async def go_on(talk: Talk) -> Group:
        with Journal.read(tmp_path) as reader:
            (past,) = reader.requests()
            counts = reader.counts()
        with Journal(tmp_path / JOURNAL) as journal:
            rollout = await talk.rollout()
            rollout.restore(counts[2], ())
            group = await rollout.group(past, size=1, open_writer=journal.begin)
            await journal.finish(group)
            return group

    request = GroupRequest(0, START, 0, 0)
    with pytest.raises(ExceptionGroup):
        asyncio.run(begin(Talk(RETAIL, replies, stop_after=after)))
    second = Talk(RETAIL, replies[after:])
    (resumed,) = asyncio.run(go_on(second)).trajectories
    assert len(second.read) == len(replies) - after, "nothing is sampled again"
    whole = asyncio.run(undisturbed(Talk(RETAIL, replies), request))
    assert [(each.pieces, each.rewards, each.seed) for each in resumed.conversations] == [
        (each.pieces, each.rewards, each.seed) for each in whole.conversations
    ]
    with Journal.read(tmp_path) as reader:
        assert check(reader) == [] and reader.group(0).trajectories == (resumed,)


async def undisturbed(talk: Talk, request: GroupRequest) -> Trajectory:
    (found,) = (await (await talk.rollout()).group(request, size=1)).trajectories
    return found


LOOK = 'SKILL look(order): [{"name": "get_order", "arguments": {"order_id": "$order"}}]'


def test_a_procedure_is_called_as_a_tool_and_pays_if_the_task_is_solved() -> None:
    replies = replies_of(RETAIL, skill=LOOK)
    place = max(i for i, each in enumerate(replies) if _names(each) == ["get_order"])
    order = replies[place].tool_calls[0].arguments["order_id"]
    replies[place] = call_message("look", order=order)
    talk = Talk(RETAIL, replies)
    found = talk.play()
    assert found.rewards == {"task_1": 0.5, "task_2": 0.5, "skill": 0.5}
    assert found.facts["skill_calls"] == 1 and found.facts["bad_skill_calls"] == 0
    later = talk.chat.text(talk.read[place + 1], whole=True)
    assert re.search(r"Tools: .* look\b", later) and "\nget_order: " in later
    # a call that only fails pays nothing and changes nothing
    replies[place] = call_message("look", number=order)
    answers = Talk(RETAIL, replies)
    found = answers.play()
    assert found.rewards["skill"] == 0 and found.facts["bad_skill_calls"] == 1
    text = "Error: the skill look takes order; got number"
    assert text in answers.chat.text(answers.read[place + 1], whole=True)


def _names(reply: Message) -> list[str]:
    return [each.name for each in reply.tool_calls]


def test_a_procedure_saves_replies_and_the_environment_executes_each_call(tmp_path: Path) -> None:
    inner = RetailTasks()
    number = next(
        n
        for n in range(0, 400, 2)
        if correct_call(s := inner.scenario(Task("retail", "train", n)), s.requests[0])[0]
        == "cancel_order"
        and s.requests[0].wish == "cancel"
    )
    task = Task("retail", "train", number)
    (case,) = (each.case for each in inner.scenario(task).requests)
    calls = [
        {"name": name, "arguments": {"order_id": "$order"}}
        for name in ("get_order", "cancel_order")
    ]
    library = library_of(tmp_path, {"name": "cancel", "parameters": ["order"], "calls": calls})
    chain = ChainTasks(inner, length=1, skills=library)
    env = chain.env(Task("chain:retail", "train", number), 0)

    async def episode() -> Turn:
        begun = await env.begin()
        assert "cancel(order): [" in begun.messages[-1].content
        await env.step(Message("assistant", "Which order?"))
        turn = await env.step(call_message("cancel", order=int(case)))
        (answer,) = turn.messages
        assert answer.role == "tool" and answer.content.splitlines()[-1] == "cancel_order: ok"
        return await env.step(Message("assistant", "Done."))

    turn = asyncio.run(episode())
    assert turn.done and turn.rewards == {"task_1": 1, "skill": 0}
    assert turn.facts["tool_calls"] == 2 and turn.facts["skill_calls"] == 1
    assert len(expert_replies(inner.scenario(task))) == 4 and turn.facts["turns"] == 3
    names = [each["function"]["name"] for each in chain.tools_of(task)]
    assert names[-1] == "cancel" and "get_order" in names


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("skill", "problem"),
    [
        ("look(): [{]", "the calls of the skill look must be a JSON list such as"),
        ("look(): 3", "the calls of the skill look must be a JSON list such as"),
        ("look(): []", "the calls of the skill look must be a JSON list such as"),
        (f"look(): [{json.dumps(call_of('find'))}]", "look calls the unknown tool find: it may"),
        (f"look(): [{json.dumps(call_of('look'))}]", "look calls the skill look: it may only"),
        (f"look(): [{json.dumps(call_of('get_order'))}]", "look calls get_order without order_id"),
        (
            f"look(): [{json.dumps(call_of('get_order', order_id='$a'))}]",
            r"look uses \$a, which is not in its parameters \(\)",
        ),
        (
            f"look(a, b): [{json.dumps(call_of('get_order', order_id='$a'))}]",
            "the parameters of the skill look must be different names",
        ),
        (
            f"look(): [{json.dumps(call_of('get_order', order_id=1, x=2))}]",
            "look calls get_order with x; the tool takes order_id",
        ),
        (
            f"look(): {json.dumps([call_of('get_order', order_id=1)] * 9)}",
            "look has 9 calls; at most 8 are allowed",
        ),
        (f"get_order(): [{json.dumps(call_of('refuse', reason='a'))}]", "the name of a tool"),
        (f"look: {'x' * 3000}", "look has 3,006 characters; at most 2,000 are allowed"),
    ],
)
def test_a_wrong_skill_gets_one_message_and_may_be_written_once_more(
    skill: str, problem: str
) -> None:
    replies = replies_of(RETAIL, skill=LOOK)
    place = len(expert_replies(RETAIL.inner.scenario(RETAIL.tasks_of(START)[0])))
    written = [*replies[:place], Message("assistant", f"SKILL {skill}"), *replies[place:]]
    env = RETAIL.env(START, 0)

    async def episode() -> list[Turn]:
        return [await env.begin(), *[await env.step(each) for each in written]]

    turns = asyncio.run(episode())
    answer = turns[place + 1].messages[0].content
    assert answer.startswith(NOT_KEPT) and re.search(problem, answer) and not turns[place + 1].fresh
    assert "look(order): [" in turns[place + 2].messages[-1].content and turns[place + 2].fresh
    assert turns[-1].rewards["task_2"] == 0.5 and turns[-1].facts["bad_skills"] == 1
    assert turns[-1].facts["skills"] == 1


def test_of_several_calls_each_gets_its_own_result() -> None:
    replies = replies_of(RETAIL, skill=LOOK)
    place = max(i for i, each in enumerate(replies) if _names(each) == ["get_order"])
    order = replies[place].tool_calls[0].arguments["order_id"]
    calls = (
        ToolCall("look", {}),
        ToolCall("get_order", {"order_id": order}),
        ToolCall("look", {"order": order}),
    )
    env = RETAIL.env(START, 0)

    async def episode() -> Turn:
        await env.begin()
        for each in replies[:place]:
            await env.step(each)
        return await env.step(Message("assistant", "", calls))

    wrong, plain, own = (each.content for each in asyncio.run(episode()).messages)
    assert wrong == "Error: the skill look takes order; got nothing"
    assert "items: " in plain and own == f"get_order: {plain}"


def test_a_library_must_fit_the_tools_and_is_part_of_the_data(tmp_path: Path) -> None:
    note = {"name": "ask", "text": "first ask"}
    path = library_of(tmp_path, note)
    made = build_taskset(make_task("chain:retail", skills=path, length=1))
    assert isinstance(made, ChainTasks) and not made.several_conversations
    before = data_digests(made)
    config = RunConfig(recipe="retail", task=make_task("chain:retail", skills=path))
    saved = describe_evaluation(config)["skills"]
    library_of(tmp_path, {**note, "text": "ask first"})
    assert data_digests(build_taskset(config.task)) != before
    assert describe_evaluation(config)["skills"] != saved
    assert set(before) == {"skills"} and data_digests(RETAIL) == {}
    for rows, problem in (
        ([note, note], "the skills must have different names"),
        ([{"name": "a b", "text": ""}], "is not a library that `unstale skills` has written"),
        ([{"name": "a", "calls": [{"name": "find"}]}], "a calls the unknown tool find"),
        ([{"name": "a", "calls": [], "parameters": "ab"}], "a must be a list of names, got 'ab'"),
    ):
        library_of(tmp_path, *rows)
        with pytest.raises(ConfigError, match=problem):
            ChainTasks(RetailTasks(), skills=path)
    Path(path).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not a library that `unstale skills` has written"):
        ChainTasks(RetailTasks(), skills=path)
    with pytest.raises(ConfigError, match=r"nothing.json cannot be read: No such file"):
        ChainTasks(RetailTasks(), skills=str(tmp_path / "nothing.json"))


def test_a_library_has_the_skills_that_solved_tasks_of_a_run_have_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The procedure helps in one episode, and is called before a failure in another."""
    helped = replies_of(RETAIL, skill=LOOK)
    place = max(i for i, each in enumerate(helped) if _names(each) == ["get_order"])
    order = helped[place].tool_calls[0].arguments["order_id"]
    helped[place] = call_message("look", order=order)
    failed = [*helped[: place + 1], *[Message("assistant", "Hello.")] * 3]
    unused = replies_of(RETAIL, skill="SKILL never: use it")

    async def run() -> None:
        with Journal(tmp_path / JOURNAL) as journal:
            await journal.publishing(0)
            for number, replies in enumerate((helped, failed, unused)):
                rollout = await Talk(RETAIL, replies).rollout()
                rollout.restore(10 * number, ())
                request = GroupRequest(number, START, 0, number)
                journal.add_request(request)
                await journal.finish(
                    await rollout.group(request, size=1, open_writer=journal.begin)
                )

    asyncio.run(run())
    (tmp_path / "events.jsonl").touch()
    shutil.copy(SHIPPED_POLICY / "tokenizer.json", tmp_path / TOKENIZER)
    out = tmp_path / "library.json"
    with pytest.raises(SystemExit, match="0"):
        main(["skills", str(tmp_path), str(out), "--json"])
    assert json.loads(capsys.readouterr().out)["skills"] == [
        {"skill": LOOK.removeprefix("SKILL "), "successes": 1}
    ]
    later = ChainTasks(RetailTasks(), length=1, skills=str(out))
    begun = asyncio.run(later.env(START, 0).begin())
    assert LOOK.removeprefix("SKILL ") in begun.messages[-1].content


def test_a_skill_with_the_name_of_a_tool_of_the_task_does_not_replace_it() -> None:
    tool = RETAIL.tools[0]
    skill = Skill(tool["function"]["name"], "", (), (ToolCall("other", {}),))
    assert with_skills([tool], [skill]) == (tool,) and not usable([skill], [tool])


def test_a_library_of_no_skill_is_not_written_and_a_bad_place_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(out: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            main(["skills", str(tmp_path), out])
        return " ".join(capsys.readouterr().err.split())

    asked = problem(str(tmp_path / "none" / "library.json"))
    assert asked.startswith("unstale: out:") and "cannot be written: No such file" in asked
    assert "is a folder, and must be a file" in problem(str(tmp_path))
    (tmp_path / "events.jsonl").touch()
    monkeypatch.setattr(recorded_skills, "count_skills", lambda run: [])
    out = tmp_path / "library.json"
    assert "no solved task of" in problem(str(out)) and not out.exists()


def test_a_new_conversation_is_refused_where_it_cannot_be_recorded() -> None:
    config = RunConfig(recipe="retail", task=make_task("chain:retail"), techniques="limits")
    with pytest.raises(ConfigError, match="limits cannot be used with chain:retail"):
        build_rollout(config, RETAIL)
    with pytest.raises(ConfigError, match="--plan cannot be used with chain:retail, whose"):
        AttemptOptions(plan=True, votes=1).check(RETAIL)
    turn = Turn((Message("user", "a"),), fresh=True, tools=RETAIL.tools)
    assert read_turn(turn_row(turn)) == turn
    with pytest.raises(EnvError, match=r"set Turn.fresh = True, too"):
        Turn((), tools=())

    class Paid(ChainTasks):
        several_conversations = False

        def __init__(self, fresh: bool) -> None:
            super().__init__(RetailTasks())
            self.several_conversations = fresh

        def env(self, task: Task, seed: int) -> Any:
            env = super().env(task, seed)
            step = env.step

            async def paid(reply: Message) -> Turn:
                turn = await step(reply)
                return Turn(turn.messages, turn.done, turn.rewards, 1.0, turn.facts, turn.fresh)

            env.step = paid
            return env

    for fresh, problem in ((True, "Turn.reward must be 0 in an"), (False, "Turn.fresh begins a")):
        tasks = Paid(fresh)

        async def episode(tasks: Paid = tasks) -> Trajectory | Failure:
            rollout = await Talk(tasks, replies_of(tasks)).rollout()
            return await rollout.episode(START, env_seed=7, noise_seed=8)

        failure = asyncio.run(episode())
        assert isinstance(failure, Failure) and problem in failure.error
