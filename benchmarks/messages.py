"""Compare the time and memory of a call by the Messages API with one by the Chat API.

    python -m benchmarks.messages          # a few minutes on two cores

A scripted engine answers, so the time is that of the endpoint: to read, to check, to render, to
record and to answer. Both APIs get the same conversations, in rounds that alternate. The time of
the client's thread is subtracted. Memory is that of Python's objects (tracemalloc): what an open
conversation keeps, and the largest amount that a call holds until its answer. A last table has
conversations whose questions show one picture. Writes a dated table under benchmarks/results/."""

import argparse
import asyncio
import gc
import json
import sys
import threading
import time
import tracemalloc
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import tables
from unstale.cli.process import limit_threads
from unstale.cli.serve import SessionPool
from unstale.config import SHIPPED_POLICY, EngineConfig, RolloutConfig
from unstale.engines.scripted import ScriptedEngine
from unstale.envs.calculator import TOOL
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.model.loading import load_tokenizer
from unstale.model.pictures import PictureReader
from unstale.pictures import PictureStore
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.generator import Generator
from unstale.testing.pictures import save_vision_model

TURNS = 12
"""Calls of an episode. Each sends the whole conversation so far."""
BOUND = 1.2
"""Allowed ratio of Messages to Chat."""
WORDS = " ".join(["The result of the sum is in the table."] * 12)
MOST = 512
"""Largest number of tokens of a reply. None is cut: a call with a cut answer would be a branch."""
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "10 + 20"}}\n</tool_call>'
FUNCTION = TOOL["function"]
PATHS = {"chat": "chat/completions", "messages": "messages"}
SIDE = 256
"""Width and height of the picture, in pixels."""


def bodies(api: str, *, tools: bool, stream: bool, picture: bytes = b"") -> list[bytes]:
    """Return the bodies of an episode's calls by one of the APIs. With `tools` their replies are
    `CALL`. A `picture` is shown in the question.
    """
    chat = api == "chat"
    parts: list[Any] = [{"type": "text", "text": WORDS}]
    if picture:
        data = b64encode(picture).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        parts.append(url if chat else {"type": "image", "source": source})
    messages: list[Any] = [{"role": "user", "content": parts}]
    options: dict[str, Any] = {"model": "policy", "max_tokens": MOST, "stream": stream}
    if chat:
        messages.insert(0, {"role": "system", "content": WORDS})
    else:
        options["system"] = WORDS
    if tools:
        own = {**FUNCTION, "input_schema": FUNCTION["parameters"]}
        options["tools"] = [TOOL if chat else {k: own[k] for k in own if k != "parameters"}]
    found = []
    for turn in range(TURNS):
        found.append(json.dumps({**options, "messages": messages}).encode())
        if not tools:
            messages += [{"role": "assistant", "content": WORDS}, {"role": "user", "content": "?"}]
        elif chat:
            arguments = json.dumps({"expression": "10 + 20"})
            function = {"name": "calculate", "arguments": arguments}
            call = {"id": f"call{turn}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call{turn}", "content": WORDS},
            ]
        else:
            use = {"type": "tool_use", "id": f"call{turn}", "name": "calculate"}
            result = {"type": "tool_result", "tool_use_id": f"call{turn}", "content": WORDS}
            messages += [
                {"role": "assistant", "content": [{**use, "input": {"expression": "10 + 20"}}]},
                {"role": "user", "content": [result]},
            ]
    return found


class Served:
    """An endpoint in a thread, whose policy answers every call with the same text.

    `model` is the folder of a vision-language model. Without it the policy reads only text.
    """

    def __init__(self, reply: str, model: Path | None = None) -> None:
        self._reply = reply
        tokenizer = load_tokenizer(model or SHIPPED_POLICY)
        self.reader = PictureReader(model, tokenizer, PictureStore()) if model else None
        self._chat = Chat(tokenizer, (), pictures=self.reader)
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @contextmanager
    def open(self) -> Iterator["Served"]:
        self._thread.start()
        self._up.wait()
        yield self
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        chat = self._chat
        reply = [*chat.encode(self._reply), chat.stop_tokens[0]]
        begin = tuple(chat.encode("<|im_start|>assistant\n"))

        def say(tokens: Sequence[int], params: Any) -> Sequence[int]:
            """Return the rest of the reply. A stream samples it in parts."""
            limit = max(0, len(tokens) - len(reply) - len(begin))
            places = range(len(tokens) - len(begin), limit - 1, -1)
            start = next(at for at in places if tuple(tokens[at : at + len(begin)]) == begin)
            return reply[len(tokens) - start - len(begin) :]

        engine = ScriptedEngine(say)
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        config = EngineConfig(max_context=1 << 16, max_completion_tokens=1 << 10)
        async with asyncio.TaskGroup() as calls:
            endpoint = RecordingEndpoint(find=lambda key: self.pool.find(key))
            rollout = AgentRollout(
                Generator(engine, chat, config),
                ExternalAgent(lambda *_: 0.0, ["x"]),
                RolloutConfig(max_turns=1 << 30),
                endpoint=endpoint,
            )
            self.pool = SessionPool(rollout, calls, 0)
            async with endpoint:
                self.port = int(endpoint.url.rpartition(":")[2])
                self.token = endpoint.token
                self._up.set()
                await self._end.wait()


def send(served: Served, episodes: int, api: str, calls: Sequence[bytes]) -> Iterator[None]:
    """Send the calls of some episodes. Yield after each call.

    Raises RuntimeError if a call is refused, or is not recorded as a continuation of the last one.
    """
    connection = HTTPConnection("127.0.0.1", served.port)
    headers = {"Authorization": f"Bearer {served.token}", "Content-Type": "application/json"}
    for _ in range(episodes):
        episode = f"{time.monotonic_ns()}"
        for body in calls:
            connection.request("POST", f"/e/{episode}/v1/{PATHS[api]}", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{api}: {answer.status} {text[:300]!r}")
            yield
        if served.pool.find(episode).transcript.branches:
            raise RuntimeError(f"{api}: a call began a branch")
    connection.close()


def measure(served: Served, episodes: int, api: str, calls: Sequence[bytes]) -> float:
    """Return the milliseconds of processor time of a call, without the client's."""
    began = time.process_time() - time.thread_time()
    number = sum(1 for _ in send(served, episodes, api, calls))
    return 1e3 * (time.process_time() - time.thread_time() - began) / number


def memory(served: Served, episodes: int, api: str, calls: Sequence[bytes]) -> tuple[float, float]:
    """Return the KiB that an open conversation keeps, and the most that one of its calls holds."""
    [*send(served, 2, api, calls)]
    gc.collect()
    tracemalloc.start()
    before, peaks = tracemalloc.get_traced_memory()[0], []
    for _ in send(served, episodes, api, calls):
        now, peak = tracemalloc.get_traced_memory()
        peaks.append(peak - now)
        tracemalloc.reset_peak()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    longest = peaks[len(calls) - 1 :: len(calls)]
    return kept / episodes / 1024, median(longest) / 1024


def noise() -> bytes:
    """Return a PNG file of random pixels, which cannot be compressed."""
    import PIL.Image

    data = BytesIO()
    pixels = Random(0).randbytes(3 * SIDE * SIDE)
    PIL.Image.frombytes("RGB", (SIDE, SIDE), pixels).save(data, "PNG")
    return data.getvalue()


def compare(rounds: int, episodes: int) -> tuple[list[str], list[str], float]:
    """Return the rows of the tables of time and memory, and the largest ratio."""
    times, memories, worst = [], [], 0.0
    for tools in (False, True):
        with Served(CALL if tools else WORDS).open() as served:
            for stream in (False, True):
                calls = {api: bodies(api, tools=tools, stream=stream) for api in PATHS}
                kinds: dict[str, Callable[[], float]] = {
                    api: partial(measure, served, episodes, api, calls[api]) for api in PATHS
                }
                for warm_up in kinds.values():
                    warm_up()
                found = tables.alternate(kinds, rounds)
                ratios = tables.ratios(found, "messages", "chat")
                name = f"{'with' if tools else 'no'} tools, {'streamed' if stream else 'whole'}"
                cells = [f"{median(found[api]):.2f} ms" for api in PATHS]
                times.append(tables.row(name, *cells, tables.spread(ratios)))
                sizes = [memory(served, episodes, api, calls[api]) for api in PATHS]
                both = [more / less for less, more in zip(*sizes, strict=True)]
                cells = [f"{kept:.0f}, {held:.0f} KiB" for kept, held in sizes]
                memories.append(tables.row(name, *cells, f"{both[0]:.2f}, {both[1]:.2f}"))
                worst = max(worst, median(ratios), *both)
    return times, memories, worst


def pictured(episodes: int) -> list[str]:
    """Return the rows of the table of conversations that show one picture."""
    file, rows = noise(), []
    with TemporaryDirectory() as folder:
        save_vision_model("qwen3_vl", Path(folder), load_tokenizer(SHIPPED_POLICY))
        with Served(WORDS, Path(folder)).open() as served:
            assert served.reader
            for api in PATHS:
                calls = partial(bodies, api, tools=False, stream=False)
                plain, shown = (
                    memory(served, episodes, api, calls(picture=each))[0] for each in (b"", file)
                )
                files = [*served.reader.store.folder.iterdir()]
                cells = [f"{size:.1f} KiB" for size in (plain, shown, len(file) / 1024)]
                num_tokens = len(served.reader.tokens(file))
                rows.append(tables.row(api, *cells, num_tokens, len(files)))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--episodes", type=int, default=25, help="in each round")
    chosen = parser.parse_args()
    limit_threads()
    times, memories, worst = compare(chosen.rounds, chosen.episodes)
    lines = [
        f"Conversations of {TURNS} calls, each with the whole history; {chosen.rounds} alternating "
        f"rounds of {chosen.episodes} conversations. Processor time of a call in the endpoint's "
        f"process. The bound of all ratios is {BOUND:g}.",
        "",
        *tables.columns("calls", "Chat", "Messages", "ratio"),
        *times,
        "",
        f"Memory of Python's objects in {chosen.episodes} conversations: what one keeps while it "
        "is open, and the most that its last call holds until the answer.",
        "",
        *tables.columns("calls", "Chat", "Messages", "ratios"),
        *memories,
        "",
        f"{chosen.episodes} conversations whose questions show the same picture: what one keeps "
        "while it is open, the picture's tokens, and the number of files with pixels. A token "
        "takes 8 bytes in its piece, and 8 in the list of all tokens. The list has room for up to "
        "an eighth more, so the difference can be larger.",
        "",
        *tables.columns("API", "without it", "with it", "its file", "tokens", "files of pixels"),
        *pictured(chosen.episodes),
    ]
    tables.write("messages", "A call by Messages and by Chat", lines)
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
