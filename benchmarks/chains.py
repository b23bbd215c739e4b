"""Count the tokens of chains of tasks, with fresh contexts, kept ones, and a procedure as a skill.

    python -m benchmarks.chains          # 1 minute, one core

The scripted expert of a desk plays the chains, so that all cases solve the same tasks. With the
skill it writes, after the first task, a procedure that finds the customer and reads the case. The
tokens are those of the package's policy.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from itertools import islice, product
from statistics import mean

from transformers import AutoTokenizer

from benchmarks import tables
from unstale.config import SHIPPED_POLICY, EngineConfig, RolloutConfig
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.envs.desk import DeskTasks, shipped_desks
from unstale.envs.desk.expert import call_message, expert_replies
from unstale.records import Task, Trajectory
from unstale.research.envs.chain import ChainTasks
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator

DESKS = (("retail", 1), ("airline", 3))
LENGTHS = (2, 4)
COLUMNS = ("replies", "tokens sampled", "tokens read", "longest context", "tokens trained on")


def skill_of(desk: DeskTasks) -> str:
    """Return the procedure that finds the customer and reads the case."""
    tools = desk.domain.tools
    calls = [
        {"name": "find_user", "arguments": {"email": "$email"}},
        {"name": f"get_{tools.case_name}", "arguments": {tools.case_id: "$case"}},
    ]
    return f"SKILL start(email, case): {json.dumps(calls)}"


def replies_to(chain: ChainTasks, task: Task, *, with_skill: bool) -> list[Message]:
    desk = chain.inner
    assert isinstance(desk, DeskTasks)
    written: list[Message] = []
    for number, each in enumerate(chain.tasks_of(task)):
        scenario = desk.scenario(each)
        replies = expert_replies(scenario)
        if with_skill and number:
            case = int(scenario.requests[0].case)
            start = call_message("start", email=scenario.user.email)
            (call,) = start.tool_calls
            call = type(call)(call.name, {**call.arguments, "case": case})
            replies = [replies[0], replies[2], Message("assistant", "", (call,)), *replies[4:]]
        first = with_skill and not number
        written += [*replies, Message("assistant", skill_of(desk) if first else "No skill.")]
    return written[:-1]


async def play(chain: ChainTasks, task: Task, replies: Sequence[Message]) -> dict[str, float]:
    chat = Chat(AutoTokenizer.from_pretrained(SHIPPED_POLICY), chain.tools)
    written = iter([chat.encode_reply(each) for each in replies])
    read: list[int] = []

    def say(tokens: Sequence[int], params: object) -> Sequence[int]:
        read.append(len(tokens))
        return next(written)

    engine = ScriptedEngine(say)
    await engine.start()
    await engine.load({}, version=0)
    await engine.resume()
    config = EngineConfig(max_context=1 << 15, max_completion_tokens=1024)
    rooms = RolloutConfig(max_turns=1000)
    rollout = Rollout(Generator(engine, chat, config), chain, rooms)
    found = await rollout.episode(task, env_seed=0, noise_seed=0)
    assert isinstance(found, Trajectory) and found.success, found
    lengths = map(len, found.conversations)
    figures = (len(read), found.num_sampled_in_all, sum(read), max(read), sum(lengths))
    return dict(zip(COLUMNS, map(float, figures), strict=True))


def measure(name: str, level: int, length: int, context: str, chains: int) -> str:
    """Return a row of the table: the means over chains."""
    desk = shipped_desks(level=str(level))[name]
    chain = ChainTasks(desk, length=length, fresh=context != "kept")
    rows = [
        asyncio.run(play(chain, task, replies_to(chain, task, with_skill="procedure" in context)))
        for task in islice(chain.train(0), chains)
    ]
    means = [f"{mean(row[each] for row in rows):,.0f}" for each in COLUMNS]
    return tables.row(f"{name}, level {level}", length, context, *means)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, default=20)
    chains = parser.parse_args().chains
    text = [
        f"Means of {chains} chains, played by the scripted expert, which solves all tasks. Tokens",
        "read are the prompts of all replies together, as a server without a prefix cache reads",
        "them.",
        "",
        *tables.columns("desk", "tasks", "context", *COLUMNS),
    ]
    for (name, level), length in product(DESKS, LENGTHS):
        for context in ("kept", "fresh", *(["fresh, procedure"] if level == 3 else [])):
            text.append(measure(name, level, length, context, chains))
    tables.write("chains", "Tokens of chains of tasks", text)


if __name__ == "__main__":
    main()
