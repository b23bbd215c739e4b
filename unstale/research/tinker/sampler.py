"""The engine for all tenants. It can sample from several versions in one batch."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from unstale.engines import EngineDied, SamplingParams, VersionedEngine
from unstale.model.policy import Policy
from unstale.records import Sampled
from unstale.research.tinker.trainer import Adapters
from unstale.research.tinker.wire import Sampling
from unstale.rollout.seeds import derive_seed

Read = Callable[[], Awaitable[Adapters]]
HELD = 8
"""Number of versions whose adapters the engine holds. Beyond it, the least recently used version
that is not in use is dropped.
"""
CHUNK = 16
"""Number of tokens that are sampled between two searches for a stop text."""


class Sampler:
    """An engine that holds the adapters of several versions, each loaded when it is first used."""

    def __init__(
        self,
        engine: VersionedEngine,
        policy: Policy,
        base: Adapters,
        *,
        max_context: int,
    ) -> None:
        self._engine = engine
        self._tokenizer = policy.tokenizer
        self._base = base
        self._ends = policy.ends
        self._max_context = max_context
        self._held: OrderedDict[str, int] = OrderedDict()
        """For each version in the engine, by its unique name: the engine's number for it. Version 0
        is the base model.
        """
        self._added = 0
        self._in_use = Counter[int]()
        self._changing = asyncio.Lock()
        self._starts = 0

    async def start(self) -> None:
        """Start the engine, or restart it after a crash. It then holds only the base model."""
        self._starts += 1
        self._held.clear()
        await self._engine.start()
        await self._engine.load(dict(self._base), 0)
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()

    async def sample(
        self, version: str, read: Read | None, request: Sampling, seed: int
    ) -> list[tuple[Sampled, str]]:
        """Return `request.count` replies, each with the reason why it ended.

        `read` returns the adapters of the version with the unique name `version`. It is called if
        the engine does not hold them. If `read` is None, the base model samples. If the engine
        dies, it is restarted once and the replies are sampled again.
        """
        starts = self._starts
        try:
            return await self._replies(version, read, request, seed)
        except EngineDied:
            async with self._changing:
                if self._starts == starts:
                    await self.start()
            return await self._replies(version, read, request, seed)

    async def _replies(
        self, version: str, read: Read | None, request: Sampling, seed: int
    ) -> list[tuple[Sampled, str]]:
        async with self._holding(version, read) as number:
            seeds = [derive_seed(seed, "reply", index) for index in range(request.count)]
            return await asyncio.gather(*(self._reply(request, number, each) for each in seeds))

    @asynccontextmanager
    async def _holding(self, version: str, read: Read | None) -> AsyncIterator[int]:
        """Yield the engine's number of a version, which the engine holds until the context ends."""
        if read is None:
            yield 0
            return
        async with self._changing:
            number = self._held.get(version, 0)
            if not number:
                self._added += 1
                number = self._added
                await self._engine.add_version(await read(), number)
                self._held[version] = number
            self._held.move_to_end(version)
            self._in_use[number] += 1
            await self._drop_unused()
        try:
            yield number
        finally:
            self._in_use[number] -= 1

    async def _drop_unused(self) -> None:
        idle = [each for each, number in self._held.items() if not self._in_use[number]]
        excess = idle[: max(len(self._held) - HELD, 0)]
        if not excess:
            return
        for each in excess:
            del self._in_use[self._held.pop(each)]
        await self._engine.keep_versions([0, *self._held.values()])

    async def _reply(self, request: Sampling, number: int, seed: int) -> tuple[Sampled, str]:
        """Return one reply and the reason why it ended. It is searched for a stop text every
        `CHUNK` tokens.
        """
        limit = min(request.max_tokens, self._max_context - len(request.tokens))
        ends = request.stop_tokens
        ends = self._ends if ends is None else (*self._ends, *ends) if ends else ()
        tokens: list[int] = []
        logps: list[float] = []
        while True:
            left = limit - len(tokens)
            params = SamplingParams(
                min(left, CHUNK) if request.stop_texts else left,
                ends,
                request.temperature,
                seed,
                version=number,
                sampled=len(tokens),
                remaining=left,
            )
            reply = await self._engine.sample([*request.tokens, *tokens], params)
            if reply.stop == "interrupted":
                raise EngineDied("the engine was interrupted")
            before = len(tokens)
            tokens += reply.piece.tokens
            logps += reply.piece.behavior_logp
            length = self._text_end(tokens, before, request.stop_texts)
            if length or reply.stop == "stop" or len(tokens) >= limit:
                kept = length or len(tokens)
                piece = Sampled(tuple(tokens[:kept]), tuple(logps[:kept]), number)
                return piece, "stop" if length else reply.stop

    def _text_end(self, tokens: Sequence[int], before: int, texts: Sequence[str]) -> int:
        """Return the number of tokens up to the end of the first stop text of `texts`; 0 if there
        is none.

        The first `before` tokens are known to contain none.
        """
        if not texts:
            return 0
        start = max(before - 4 * max(map(len, texts)), 0)  # a token has at least a byte
        for end in range(before + 1, len(tokens) + 1):
            text = self._tokenizer.decode(list(tokens[start:end]))
            if any(each in str(text) for each in texts):
                return end
        return 0
