"""The public fake: an engine that says what it is told to, for tests of everything that stands on an engine.

In-process, deterministic, without a model. Time passes only in `token_delay`, so a test decides with events or a
virtual clock which reply is the slow one and where an interrupt finds it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from torch import Tensor

from unstale.engines import (
    REQUIRED_COUNTERS,
    EngineDied,
    Reply,
    ReplyStop,
    SamplingParams,
    Update,
    require_full_support,
)
from unstale.engines.embedded.runner import check_update
from unstale.records import Sampled
from unstale.weights.store import Delta

Say = Callable[[Sequence[int], SamplingParams], Sequence[int]]
"""`(tokens so far, params)` -> the tokens that follow, up to and including a stop token or as many as are asked for."""
Delay = Callable[[Sequence[int], SamplingParams], Awaitable[None]]
"""`(tokens so far, params)` -> what the next token waits for."""


class ScriptedEngine:
    """`Engine` that samples nothing. `logp` is the log-probability of every token, or a function of (context, token).

    A continued reply asks `say` again, with what was said so far. `parameters` are the weights that `load` expects, by
    name; without them it takes any.

    >>> async def hello() -> Reply:
    ...     engine = ScriptedEngine(lambda tokens, params: [5, 6, 7])
    ...     await engine.start()
    ...     await engine.load({}, version=3)
    ...     await engine.resume()
    ...     return await engine.sample([1], SamplingParams(max_tokens=2, stop_tokens=()))
    >>> reply = asyncio.run(hello())
    >>> reply.piece.tokens, reply.piece.version, reply.stop
    ((5, 6), 3, 'length')
    """

    takes_deltas = False

    def __init__(
        self,
        say: Say,
        *,
        logp: float | Callable[[Sequence[int], int], float] = -0.5,
        token_delay: Delay | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._say = say
        self._logp = logp
        self._token_delay = token_delay
        self._parameters = parameters
        self.version = -1
        self._pending: dict[asyncio.Timeout, None] = {}
        """One limit per reply being said, in order; once it is due, the reply ends with what it has."""
        self._open = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._started = False
        self._error = ""
        self._sampled_tokens = 0

    async def start(self) -> None:
        self.die("the engine was started again")
        await asyncio.sleep(0)  # for those who wait for `resume`
        await self._quiet.wait()
        self._error, self.version, self._sampled_tokens = "", -1, 0
        self._open.clear()
        self._started = True

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        require_full_support(params)
        if not tokens:
            raise ValueError("nothing to continue: sample needs at least one token")
        self._check_alive()
        while not self._open.is_set():
            await self._open.wait()
        self._check_alive()
        halt = asyncio.timeout(None)
        self._pending[halt] = None
        self._quiet.clear()
        try:
            return await self._reply(tuple(tokens), params, halt)
        finally:
            del self._pending[halt]
            if not self._pending:
                self._quiet.set()

    async def _reply(
        self, tokens: tuple[int, ...], params: SamplingParams, halt: asyncio.Timeout
    ) -> Reply:
        said: list[int] = []
        behavior_logp: list[float] = []
        version = self.version
        try:
            async with halt:
                for token in self._script(tokens, params):
                    if self._token_delay is not None:
                        await self._token_delay((*tokens, *said), params)
                    behavior_logp.append(
                        self._logp((*tokens, *said), token) if callable(self._logp) else self._logp
                    )
                    said.append(token)
            stop: ReplyStop = "stop" if said[-1] in params.stop_tokens else "length"
        except TimeoutError:
            if not halt.expired():
                raise
            stop = "interrupted"
        self._check_alive()
        self._sampled_tokens += len(said)
        return Reply(Sampled(tuple(said), tuple(behavior_logp), version), stop)

    def _script(self, tokens: tuple[int, ...], params: SamplingParams) -> list[int]:
        """What will be said if nothing interrupts it."""
        script: list[int] = []
        for token in self._say(tokens, params):
            script.append(token)
            if token in params.stop_tokens or len(script) == params.max_tokens:
                return script
        raise ValueError(
            f"say gave {len(script)} tokens, neither the {params.max_tokens} asked for nor one of the stop tokens "
            f"{params.stop_tokens}: end the script with a stop token"
        )

    async def interrupt(self) -> None:
        self._check_alive()
        self._open.clear()
        self._halt()
        await self._quiet.wait()

    async def load(self, update: Update, version: int) -> None:
        self._check_alive()
        if isinstance(update, Delta):
            raise ValueError(
                "this engine takes full weights: it has none that a delta could change"
            )
        if version < 0:
            raise ValueError(f"version must be >= 0, got {version}")
        if self._open.is_set():
            raise RuntimeError(
                "load while sampling: interrupt first, so that no reply mixes two versions"
            )
        if self._parameters is not None:
            check_update(
                update, {name: tensor.shape for name, tensor in self._parameters.items()}, {}
            )
        self.version = version

    async def resume(self) -> None:
        self._check_alive()
        if self.version < 0:
            raise RuntimeError("resume before the first load: there are no weights to sample from")
        self._open.set()

    async def close(self) -> None:
        """End every pending reply with `EngineDied`."""
        self.die("the engine is closed")
        await self._quiet.wait()

    def die(self, error: str) -> None:
        """Fail as an engine whose process has ended: every call until `start` raises `EngineDied`, pending ones too."""
        self._error = self._error or error
        self._open.set()
        self._halt()

    def _halt(self) -> None:
        for halt in self._pending:
            if halt.when() is None:
                halt.reschedule(0.0)

    def metrics(self) -> Mapping[str, float]:
        """Tokens said since the last call; the fake computes nothing, so its other counters are 0."""
        sampled_tokens, self._sampled_tokens = self._sampled_tokens, 0
        return dict.fromkeys(REQUIRED_COUNTERS, 0.0) | {"sampled_tokens": float(sampled_tokens)}

    def _check_alive(self) -> None:
        if self._error:
            raise EngineDied(self._error)
        if not self._started:
            raise RuntimeError("the engine has not been started: await start() first")
