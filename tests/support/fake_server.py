"""The base of the fake inference servers: an HTTP server in a thread, and a tiny model.

One thread serves requests and samples, so weights and version change only between tokens.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache

from unstale.model.experts import ExpertRecorder
from unstale.model.policy import Policy

_HEADERS = (
    "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    "Content-Length: {size}\r\nConnection: close\r\n\r\n"
)
_Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


class Speech:
    """A reply that is being sampled."""

    def __init__(
        self, context: list[int], temperature: float, noise: Callable[[int, int], Tensor]
    ) -> None:
        self.context = context
        self.temperature = temperature
        self.noise = noise
        """A function of the position and the number of words. It returns the noise that is added to
        the words' log-probabilities.
        """
        self.aborted = False
        self.routed_experts: list[Tensor] = []
        """The experts `[tokens, layers, k]` of every step, if the server records them."""
        self.keep: Callable[[Tensor], Tensor] | None = None
        """A function of the log-probabilities `[V]` that is True for the words to draw from."""
        self.kept: list[list[int]] = []
        """The words of every step among which `keep` let it draw."""
        self.renormalises = True
        """False if log-probabilities are over the whole vocabulary, whatever `keep` keeps."""
        self._cache = DynamicCache()

    @torch.no_grad()
    def next(self, policy: Policy, head: Tensor | None) -> tuple[int, float, float]:
        """Return the next token, its log-probability, and its log-probability at temperature 1."""
        new = self.context[self._cache.get_seq_length() :]
        model = policy.model.model
        hidden = model(
            input_ids=torch.tensor([new]), past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        logits = hidden[0, -1] @ (policy.model.lm_head.weight if head is None else head).T
        logp = (logits / (self.temperature or 1.0)).log_softmax(-1)
        likely = logp
        if self.keep is not None:
            kept = self.keep(logp)
            self.kept.append(kept.nonzero().squeeze(1).tolist())
            likely = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
            logp = likely if self.renormalises else logp
        noisy = likely + self.noise(len(self.context), len(logp)) if self.temperature else logp
        token = int(noisy.argmax())
        self.context.append(token)
        return token, float(logp[token]), float(logits.log_softmax(-1)[token])


def gumbel(noise: torch.Generator, size: int) -> Tensor:
    return -torch.empty(size).exponential_(generator=noise).log()


class FakeServer:
    """A fake server: `with FakeServer() as server:` serves at `server.url`.

    Tests set its attributes to inject faults.
    """

    url: str
    notices_s = 0.0
    """Seconds until the server notices that a client closed its connection."""

    def __init__(self, policy: Policy) -> None:
        self.stale_head = False
        """True if loads do not change the head, as in vLLM's CPU build with tied embeddings."""
        self.corrupt = ""
        """Name of a tensor that loads set to zero. Empty if they set none."""
        self.frozen = False
        """True if the engine stops working, while the process in front of it still answers."""
        self.forgetful = False
        """True if the server does not record which versions it loaded."""
        self.answers: dict[str, tuple[int, Any]] = {}
        """Status and body that replace the server's answer, by path."""
        self.asked = 0
        """Number of requested replies, including those of probes."""
        self.running: dict[str, Any] = {}
        self.policy = policy
        self.recorder: ExpertRecorder | None = None
        """Records the experts if a test calls `record_experts`; None if the server returns none."""
        self.head: Tensor | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def record_experts(self) -> None:
        self.recorder = ExpertRecorder(self.policy.model)

    def step(self, speech: Speech) -> tuple[int, float, float]:
        """Return `speech.next`, and record its experts."""
        said = speech.next(self.policy, self.head)
        if self.recorder:
            speech.routed_experts.append(self.recorder.take())
        return said

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Break all connections, as after SIGKILL."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        served: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            served.add(task)
            task.add_done_callback(served.discard)
            # not in the task itself, which may be cancelled before it begins
            task.add_done_callback(lambda _: writer.close())

        server = await self.listen(connected)
        self._ready.set()
        await self._stop.wait()
        for listener in server.sockets:
            self._loop.remove_reader(listener.fileno())
        await asyncio.sleep(0)  # asyncio never closes a connection that begins after `close`
        server.close()
        for task in [*served]:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, target, _ = head.split("\r\n")[0].split(" ")
            size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(size) or b"null")
            answering = asyncio.ensure_future(self._answering(method, target, body))
            gone = asyncio.ensure_future(reader.read())
            try:
                await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    await asyncio.wait((answering,), timeout=self.notices_s)
                    return
                status, answer = answering.result()
            finally:
                answering.cancel()
                gone.cancel()
            content = (
                answer
                if isinstance(answer, bytes)
                else b""
                if answer is None
                else json.dumps(answer).encode()
            )
            writer.write(_HEADERS.format(status=status, size=len(content)).encode() + content)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async def _answering(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        return self.answers.get(target.partition("?")[0]) or await self.answer(method, target, body)

    def listen(self, connected: _Connected) -> Awaitable[asyncio.Server]:
        raise NotImplementedError

    async def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError

    async def thaw(self) -> None:
        """Answer requests again."""
        while self.frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        taken = {
            name: torch.zeros_like(tensor) if name == self.corrupt else tensor
            for name, tensor in weights.items()
        }
        if self.head is None or not self.stale_head:
            dtype = self.policy.model.lm_head.weight.dtype
            self.head = taken["model.embed_tokens.weight"].to(dtype, copy=True)
        self.policy.load_weights(taken)
