"""Run 64 streaming episodes at once through the endpoint while the weights change.

    python -m benchmarks.endpoint          # five minutes on two cores

The components of a run: the demo's policy behind the endpoint, episodes of `AgentRollout`, new
weights every few seconds. The agents are one client in another process. Half of the episodes have
the retail tools. After each episode the client compares its record with the stream: text,
log-probabilities, tokens and their number. The trajectory is then compared with the record, token
by token. Writes a dated table under benchmarks/results/."""

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

from benchmarks import tables
from unstale import recipes
from unstale.builders import build_components
from unstale.cli.process import limit_threads
from unstale.config import SHIPPED_POLICY
from unstale.envs.external import ExternalAgent
from unstale.envs.retail import RetailTasks
from unstale.model.loading import DTYPES
from unstale.records import Sampled, Task, Trajectory
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.testing import nudge
from unstale.weights.publish import DirectPublisher

CLIENT = "client"
"""The first argument of the process that runs the agents."""
TURNS = 4
TEMPERATURE = 2.5
"""At 1 the replies of the demo's policy have a few words: little to stream."""
LINE = 1 << 24
SLOPE_MB = 1.0
"""Allowed growth of a process in MB per 1,000 calls, in the second half."""

Call = dict[str, Any]


# ------------------------------------------------------------------------------------------------
# the agents


async def agents() -> None:
    """Run an episode for each line of stdin. Write a line for each that ends."""
    import httpx2 as httpx
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHIPPED_POLICY / "tokenizer.json"))
    reader = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=128)
    async with (
        httpx.AsyncClient(timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as episodes,
    ):

        async def play(asked: dict[str, Any]) -> None:
            try:
                reply = await episode(client, tokenizer, asked)
            except (AssertionError, httpx.HTTPError, KeyError, ValueError) as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
            sys.stdout.write(json.dumps({"number": asked["number"], **reply}) + "\n")
            sys.stdout.flush()

        async for line in reader:
            episodes.create_task(play(json.loads(line)))


async def episode(client: Any, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    client_key = {"Authorization": f"Bearer {asked['key']}"}
    history: list[Any] = list(asked["messages"])
    calls: list[Call] = []
    for turn in range(TURNS):
        body = {
            "messages": history,
            "stream": True,
            "logprobs": True,
            "stream_options": {"include_usage": True},
            **({"tools": asked["tools"]} if asked["tools"] else {}),
        }
        calls.append(await streamed(client, f"{asked['url']}/chat/completions", client_key, body))
        reply = calls[-1]
        made = [reply["calls"][at] for at in sorted(reply["calls"])]
        history.append({"role": "assistant", "content": reply["text"] or None, "tool_calls": made})
        answers = [
            {"role": "tool", "tool_call_id": one["id"], "content": f"It is {turn}."} for one in made
        ]
        history += answers or [{"role": "user", "content": f"And then? ({turn})"}]
    answer = await client.get(f"{asked['url']}/record", headers=client_key)
    (record,) = answer.json()["branches"]
    compare(calls, record, tokenizer, tools=bool(asked["tools"]))
    tokens = [token for piece in record for token in piece["tokens"]]
    timing = [[call["first_s"], call["whole_s"], len(call["said"])] for call in calls]
    return {"calls": timing, "tokens": tokens}


async def streamed(client: Any, url: str, headers: Any, body: Any) -> Call:
    """Send a streamed call. Return its text, tool calls, tokens and times."""
    begun, first_s = time.perf_counter(), 0.0
    call: Call = {"text": "", "calls": {}, "said": [], "usage": None, "chunks": 0}
    async with client.stream("POST", url, headers=headers, json=body) as answer:
        assert answer.status_code == 200, (answer.status_code, await answer.aread())
        last = ""
        async for line in answer.aiter_lines():
            if not line:
                continue
            first_s = first_s or time.perf_counter() - begun
            last = line.removeprefix("data: ")
            chunk = json.loads(last) if last != "[DONE]" else {"choices": []}
            assert "error" not in chunk, chunk
            call["usage"] = chunk.get("usage") or call["usage"]
            for choice in chunk["choices"]:
                call["text"] += choice["delta"].get("content") or ""
                call["chunks"] += bool(choice["delta"].get("content"))
                call["calls"] |= {
                    one["index"]: one for one in choice["delta"].get("tool_calls", ())
                }
                call["said"] += (choice.get("logprobs") or {}).get("content", ())
        assert last == "[DONE]", f"a stream that ends with {last[:99]!r}"
    return {**call, "first_s": first_s, "whole_s": time.perf_counter() - begun}


def compare(calls: list[Call], record: list[Any], tokenizer: Any, *, tools: bool) -> None:
    """Compare every call with the recorded pieces of its reply."""
    replies = [
        list(pieces)
        for kind, pieces in groupby(record, key=lambda piece: piece["kind"])
        if kind == "sampled"
    ]
    assert len(replies) == len(calls), f"{len(calls)} calls, {len(replies)} replies on record"
    for call, pieces in zip(calls, replies, strict=True):
        tokens = [token for piece in pieces for token in piece["tokens"]]
        logps = [logp for piece in pieces for logp in piece["behavior_logp"]]
        assert call["usage"]["completion_tokens"] == len(tokens) == len(call["said"])
        assert [one["logprob"] for one in call["said"]] == logps
        assert [one["token"] for one in call["said"]] == [
            tokenizer.decode([t], skip_special_tokens=False) for t in tokens
        ]
        text = tokenizer.decode(tokens, skip_special_tokens=False).removesuffix("<|im_end|>")
        if tools:  # content has no blanks around it, and a call is none of it
            assert call["text"].strip() == text.strip() or (
                call["calls"] and "<tool_call>" in text
            ), (call, text)
        else:
            assert call["text"] == text
        assert [piece["version"] for piece in pieces] == sorted(
            piece["version"] for piece in pieces
        )


# ------------------------------------------------------------------------------------------------
# the endpoint


@dataclass
class CallStats:
    """Counts and times of the calls so far."""

    first_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    whole_s: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    tokens: int = 0
    episodes: int = 0
    across: int = 0
    """Number of replies that more than one version sampled."""
    published: int = 0
    lost: list[str] = field(default_factory=list)
    memory: list[tuple[int, float, float]] = field(default_factory=list)
    """Calls so far, and MB of the endpoint's process and of the engine's."""


class Agents:
    """The process of the agents: base URLs go in, results come out."""

    def __init__(self, tally: CallStats) -> None:
        self.tally = tally
        self.tools = list(RetailTasks(level=1).tools)
        self.tokens: dict[int, list[int]] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            CLIENT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE,
        )

    async def listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            reply = json.loads(line)
            waiting = self._waiting.pop(reply["number"])
            if not waiting.done():  # its time ran out, which is counted
                waiting.set_result(reply)

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self._process.wait() == 0

    async def play(self, base_url: str, task: str, seed: int, api_key: str) -> float:
        """Run one episode, as the agent of a rollout."""
        assert self._process.stdin is not None
        begun = [
            {"role": "system", "content": "You are an agent at the desk of a shop."},
            {"role": "user", "content": f"Where is order {1000 + seed % 9000}? Say {task} words."},
        ]
        tools = self.tools if seed % 2 else []
        asked = {"number": seed, "url": base_url, "key": api_key, "messages": begun, "tools": tools}
        self._waiting[seed] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        reply = await self._waiting[seed]
        if "error" in reply:
            raise ValueError(reply["error"])
        for first, whole, tokens in reply["calls"]:
            self.tally.first_s.append(first)
            self.tally.whole_s.append(whole)
            self.tally.tokens += tokens
        self.tokens[seed] = reply["tokens"]
        return 1.0


@dataclass
class Bench:
    """The components of a run and the work on them."""

    config: Any
    parts: Any
    tally: CallStats
    clients: Agents
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def publish(self, publisher: DirectPublisher) -> None:
        publisher.prepare(self.parts.policy)
        await publisher.publish()

    async def work(self, rollout: AgentRollout, until: float) -> None:
        tally = self.tally
        while time.monotonic() < until:
            seed = next(self.numbers)
            outcome = await rollout.episode(
                Task("bench", "train", seed % 7), env_seed=seed, noise_seed=seed
            )
            if not isinstance(outcome, Trajectory):
                tally.lost.append(outcome.error)
                continue
            if (
                list(outcome.tokens) != self.clients.tokens.pop(seed)
                or outcome.branches
                or outcome.num_turns != TURNS
            ):
                tally.lost.append(f"episode {seed} is not what was on record")
            replies = groupby(outcome.pieces, key=lambda piece: isinstance(piece, Sampled))
            tally.across += sum(
                len({piece.version for piece in reply if isinstance(piece, Sampled)}) > 1
                for _, reply in replies
            )
            tally.episodes += 1

    async def learn(self, publisher: DirectPublisher, every_s: float) -> None:
        policy = self.parts.policy
        weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
        while True:
            await asyncio.sleep(every_s)
            self.tally.published += 1
            policy.load_weights(weights)
            nudge(policy, seed=self.tally.published, size=1e-3)
            policy.version = self.tally.published
            await self.publish(publisher)

    async def watch(self) -> None:
        while True:
            mine, engines = _memory(os.getpid()), sum(map(_memory, _children()))
            self.tally.memory.append((len(self.tally.whole_s), mine, engines))
            await asyncio.sleep(2)


async def measured(seconds: float, many: int, every_s: float) -> tuple[CallStats, dict[str, int]]:
    """Return the counts and times, and the resources that are left over."""
    config = recipes.retail()
    config = replace(
        config, engine=replace(config.engine, max_context=1024, temperature=TEMPERATURE)
    )
    config = replace(
        config, rollout=replace(config.rollout, retries=0, timeout_s=120.0, max_failed_share=1.0)
    )
    limit_threads()
    parts, tally = build_components(config), CallStats()
    engine, clients = parts.generator.engine, Agents(tally)
    bench = Bench(config, parts, tally, clients)
    publisher = DirectPublisher(engine, dtype=DTYPES[config.engine.dtype])
    await engine.start()
    await bench.publish(publisher)
    before = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    await clients.start()
    async with asyncio.TaskGroup() as beside:
        others = [bench.learn(publisher, every_s), bench.watch(), clients.listen()]
        *endless, listening = [beside.create_task(each) for each in others]
        tasks = ExternalAgent(
            clients.play, [str(n) for n in range(7)], name="bench", concurrency=many
        )
        async with RecordingEndpoint() as endpoint:
            rollout = AgentRollout(parts.generator, tasks, config.rollout, endpoint=endpoint)
            async with asyncio.TaskGroup() as episodes:
                for _ in range(many):
                    episodes.create_task(bench.work(rollout, time.monotonic() + seconds))
            for each in endless:
                each.cancel()
            await clients.close()
            await listening
    await asyncio.sleep(1)
    gc.collect()
    left = {
        "tasks": len(asyncio.all_tasks()) - before[0],
        "files": len(os.listdir("/proc/self/fd")) - before[1],
        "episodes": endpoint.num_sessions,
    }
    await engine.close()
    return tally, left


def _memory(process: int) -> float:
    """Return the private memory of a process in MB. Shared memory comes and goes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def _children() -> list[int]:
    """Return the child processes without the client: the engine."""
    tasks = Path("/proc/self/task").glob("*/children")
    children = [int(word) for task in tasks for word in task.read_text().split()]
    return [
        each
        for each in children
        if CLIENT.encode() not in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
    ]


def slope(memory: list[tuple[int, float, float]], at: int) -> float:
    """Return the growth in MB per 1,000 calls over the second half."""
    half = memory[len(memory) // 2 :]
    if half[0][0] == half[-1][0]:
        return 0.0
    return linear_regression([calls for calls, *_ in half], [row[at] for row in half]).slope * 1000


def table(tally: CallStats, left: dict[str, int], seconds: float) -> list[str]:
    def spread(values: Any) -> str:
        ordered = sorted(values)
        p99 = ordered[int(0.99 * len(ordered))]
        return f"{median(ordered):.2f} s, p99 {p99:.2f} s, longest {ordered[-1]:.2f} s"

    calls, memory = len(tally.whole_s), tally.memory
    middle = memory[len(memory) // 2]
    grown = [slope(memory, at) for at in (1, 2)]
    rows = [
        ("episodes, calls", f"{tally.episodes:,}, {calls:,}"),
        ("calls or episodes that were lost, or differ from their record", f"**{len(tally.lost)}**"),
        ("sampled tokens", f"{tally.tokens:,}: {tally.tokens / seconds:,.0f} a second"),
        (
            "weight updates meanwhile",
            f"{tally.published}; {tally.across:,} replies were sampled by more than one version",
        ),
        ("to the first event of a stream", spread(tally.first_s)),
        ("to its end", spread(tally.whole_s)),
        (
            "memory of the process with the endpoint",
            f"{middle[1]:.0f} MB at half time, {memory[-1][1]:.0f} MB at the end",
        ),
        (
            "- growth in the second half, in 1,000 calls",
            f"**{grown[0]:+.2f} MB** (bound {SLOPE_MB:g} MB)",
        ),
        (
            "memory of the engine's process",
            f"{middle[2]:.0f} MB at half time, {memory[-1][2]:.0f} at the end",
        ),
        ("- growth in the second half, in 1,000 calls", f"**{grown[1]:+.2f} MB** (the same bound)"),
        (
            "tasks, open files, episodes left at the end",
            f"{left['tasks']}, {left['files']}, {left['episodes']}",
        ),
    ]
    return [
        f"The demo's policy and engine, at temperature {TEMPERATURE:g}; {TURNS} streamed calls an "
        "episode, half of the episodes with tools. The client has the same cores.",
        "",
        "| | measured |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
    ]


def main() -> int:
    if sys.argv[1:2] == [CLIENT]:
        asyncio.run(agents())
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--episodes", type=int, default=64, help="at a time")
    parser.add_argument(
        "--update",
        type=float,
        default=5.0,
        help="seconds from one version of the weights to the next",
    )
    chosen = parser.parse_args()
    tally, left = asyncio.run(measured(chosen.seconds, chosen.episodes, chosen.update))
    for lost in tally.lost[:5]:
        tables.CONSOLE.print(lost, markup=False, style="red")
    tables.write("endpoint", "The endpoint", table(tally, left, chosen.seconds))
    return int(
        bool(
            tally.lost
            or any(left.values())
            or any(slope(tally.memory, at) > SLOPE_MB for at in (1, 2))
        )
    )


if __name__ == "__main__":
    sys.exit(main())
