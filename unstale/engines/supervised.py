"""An engine that is started again when it dies. What it was asked to be, version and all, is known here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from unstale.engines import Engine, EngineDied, Reply, SamplingParams, Update
from unstale.records import Sampled


class RestartingEngine:
    """`Engine` around an `Engine` that may die, `restarts` times.

    Its replies then end as interrupted ones, without a token. Whoever continues them gets what they would have got: the
    noise of a token is keyed by seed and position. `weights(version)` are the full weights of any version that `load`
    was asked for; they must be at hand before it is asked. `told` hears of every restart.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Callable[[int], Mapping[str, Tensor]],
        *,
        restarts: int,
        told: Callable[..., None] = lambda **_: None,
    ) -> None:
        self.takes_deltas = engine.takes_deltas
        self._engine = engine
        self._weights = weights
        self._told = told
        self._allowed = restarts
        self._restarts = self._counted = 0
        self._version = -1
        """What the engine is to hold, and whether it is to sample."""
        self._running = False
        self._starts = self._lives = 0
        """How often it was started, and how often it was brought back."""
        self._changing = asyncio.Lock()
        """Held by whoever changes what the engine is to be, or makes it so again."""
        self._reviving: asyncio.Task[None] | None = None
        """The way back to life, which nobody who waits for it can cut short."""
        self._closed = False

    async def start(self) -> None:
        async with self._alone():
            self._closed, self._version, self._running = False, -1, False
            self._counted = self._restarts
            self._starts += 1
            await self._survive(self._engine.start())

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        while True:
            async with self._alone():
                starts, lives = self._starts, self._lives
            try:
                return await self._engine.sample(tokens, params)
            except EngineDied as died:
                async with self._alone():
                    if starts != self._starts:
                        raise
                    if lives == self._lives:
                        await self._revive(died)
            if self._version >= 0:
                return Reply(Sampled((), (), self._version), "interrupted")

    async def interrupt(self) -> None:
        async with self._alone():
            self._running = False
            await self._survive(self._engine.interrupt())

    async def load(self, update: Update, version: int) -> None:
        async with self._alone():
            before, self._version = self._version, version
            try:
                await self._survive(self._engine.load(update, version))
            except (ValueError, RuntimeError):
                self._version = before
                raise

    async def resume(self) -> None:
        async with self._alone():
            before, self._running = self._running, True
            try:
                await self._survive(self._engine.resume())
            except RuntimeError:
                self._running = before
                raise

    async def close(self) -> None:
        self._closed = True
        await self._engine.close()
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.wait((self._reviving,))
            _ = self._reviving.cancelled() or self._reviving.exception()
            await self._engine.close()  # what was begun meanwhile

    def metrics(self) -> Mapping[str, float]:
        """The engine's, and the restarts since the last call. What a life counted since then ends with it."""
        restarts, self._counted = self._restarts - self._counted, self._restarts
        return {**self._engine.metrics(), "restarts": float(restarts)}

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Nobody changes the engine meanwhile, and it is not on its way back."""
        async with self._changing:
            if self._reviving is not None:
                await asyncio.wait((self._reviving,))
            yield

    async def _survive(self, call: Awaitable[None]) -> None:
        """What the call asks of the engine is noted already, so a new life begins with it."""
        try:
            await call
        except EngineDied as died:
            await self._revive(died)

    async def _revive(self, died: EngineDied) -> None:
        back = self._reviving = asyncio.ensure_future(self._bring_back(died))
        await asyncio.wait((back,))
        if back.cancelled():
            raise died
        back.result()

    async def _bring_back(self, died: EngineDied) -> None:
        """Start the engine until it lives, as what it is to be. Raises `EngineDied` once it has died too often."""
        while True:
            if self._closed or not self._allowed:
                raise died
            if self._restarts == self._allowed:
                raise EngineDied(
                    f"{died}; it has been started again {self._restarts} times in this run, which is all that "
                    f"engine.restarts = {self._allowed} allows"
                ) from died
            self._restarts += 1
            self._told(kind="engine_restarted", cause=str(died), restarts=self._restarts)
            try:
                await self._engine.start()
                if self._version >= 0:
                    await self._engine.load(
                        await asyncio.to_thread(self._weights, self._version), self._version
                    )
                if self._running:
                    await self._engine.resume()
            except EngineDied as again:
                died = again
            else:
                self._lives += 1
                return
