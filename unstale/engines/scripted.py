"""A fake engine that returns given tokens, for tests of code that uses an engine.

It is deterministic and needs no model. Replies take time only in the function `token_delay`. So a
test controls which reply is slow, and at which token an interruption ends it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from unstale.engines import (
    NOT_STARTED,
    REQUIRED_COUNTERS,
    EngineDied,
    Reply,
    ReplyStop,
    SamplingParams,
    Update,
    check_load,
    check_request,
    check_resume,
)
from unstale.engines.embedded.runner import check_update
from unstale.records import Sampled
from unstale.signals import Signals
from unstale.weights.store import Delta

Script = Callable[[Sequence[int], SamplingParams], Sequence[int]]
"""A function that gets a context and the sampling parameters, and returns the reply's tokens. They
must contain a stop token, or be at least `max_tokens` tokens.
"""
Delay = Callable[[Sequence[int], SamplingParams], Awaitable[None]]
"""A function that is awaited before each token, to control the speed. It gets the context with the
reply's tokens so far, and the sampling parameters.
"""


class ScriptedEngine:
    """An engine that returns tokens from a script instead of sampling.

    `script` returns the reply to a context. It is called again when an interrupted reply continues.
    `logp` is the log-probability of every token, or a function of (context, token). `signals`
    returns the signals of the distribution after a context. If `parameters` are given, `load`
    accepts only weights with their names and shapes.

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
        script: Script,
        *,
        logp: float | Callable[[Sequence[int], int], float] = -0.5,
        token_delay: Delay | None = None,
        signals: Callable[[Sequence[int]], Signals] | None = None,
        parameters: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._script = script
        self._logp = logp
        self._token_delay = token_delay
        self._signals = signals
        self._parameters = parameters
        self.version = -1
        self._pending: dict[asyncio.Timeout, None] = {}
        """A timer for each pending reply. `interrupt` lets it expire, which ends the reply."""
        self._open = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._started = False
        self._error = ""
        self._sampled_tokens = 0

    async def start(self) -> None:
        self.die("the engine was started again")
        await asyncio.sleep(0)  # lets requests that wait for `resume` fail
        await self._quiet.wait()
        self._error = ""
        self.version = -1
        self._sampled_tokens = 0
        self._open.clear()
        self._started = True

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        check_request(tokens, params, measures=self._signals is not None)
        self._check_alive()
        began = asyncio.get_running_loop().time()
        while not self._open.is_set():
            await self._open.wait()
        self._check_alive()
        halt = asyncio.timeout(None)
        self._pending[halt] = None
        self._quiet.clear()
        try:
            return await self._reply(tuple(tokens), params, halt, began)
        finally:
            del self._pending[halt]
            if not self._pending:
                self._quiet.set()

    async def _reply(
        self, tokens: tuple[int, ...], params: SamplingParams, halt: asyncio.Timeout, began: float
    ) -> Reply:
        first_token_s = None
        reply: list[int] = []
        behavior_logp: list[float] = []
        version = self.version
        try:
            async with halt:
                for token in self._scripted_reply(tokens, params):
                    if self._token_delay is not None:
                        await self._token_delay((*tokens, *reply), params)
                    behavior_logp.append(
                        self._logp((*tokens, *reply), token) if callable(self._logp) else self._logp
                    )
                    reply.append(token)
                    if first_token_s is None:
                        first_token_s = asyncio.get_running_loop().time() - began
            stop: ReplyStop = "stop" if reply[-1] in params.stop_tokens else "length"
        except TimeoutError:
            if not halt.expired():
                raise
            stop = "interrupted"
        self._check_alive()
        self._sampled_tokens += len(reply)
        piece = Sampled(tuple(reply), tuple(behavior_logp), version)
        if params.signals and self._signals and reply:
            found = [self._signals((*tokens, *reply[:at])) for at in range(len(reply))]
            piece = replace(piece, signals=Signals.join(found))
        return Reply(piece, stop, first_token_s)

    def _scripted_reply(self, tokens: tuple[int, ...], params: SamplingParams) -> list[int]:
        reply: list[int] = []
        for token in self._script(tokens, params):
            reply.append(token)
            if token in params.stop_tokens or len(reply) == params.max_tokens:
                return reply
        raise ValueError(
            f"the script returned {len(reply)} tokens without a stop token, but max_tokens is "
            f"{params.max_tokens}: end it with one of {params.stop_tokens}"
        )

    async def stage(self, update: Update, version: int) -> None:
        """Raise an error if the engine is dead. Otherwise do nothing."""
        self._check_alive()

    async def interrupt(self) -> None:
        self._check_alive()
        self._open.clear()
        self._halt()
        await self._quiet.wait()

    async def load(self, update: Update, version: int) -> None:
        self._check_alive()
        check_load(update, version, self.version, sampling=self._open.is_set(), deltas=False)
        if self._parameters is not None and not isinstance(update, Delta):
            check_update(
                update, {name: tensor.shape for name, tensor in self._parameters.items()}, {}
            )
        self.version = version

    async def resume(self) -> None:
        self._check_alive()
        check_resume(self.version)
        self._open.set()

    async def close(self) -> None:
        self.die("the engine is closed")
        await self._quiet.wait()

    def die(self, error: str) -> None:
        """Simulate the death of the engine: calls raise `EngineDied` until the next `start`."""
        self._error = self._error or error
        self._open.set()
        self._halt()

    def _halt(self) -> None:
        for halt in self._pending:
            if halt.when() is None:
                halt.reschedule(0.0)

    def metrics(self) -> Mapping[str, float]:
        """Return the number of sampled tokens since the last call. The other counters are 0."""
        sampled_tokens = float(self._sampled_tokens)
        self._sampled_tokens = 0
        return dict.fromkeys(REQUIRED_COUNTERS, 0.0) | {"sampled_tokens": sampled_tokens}

    def _check_alive(self) -> None:
        if self._error:
            raise EngineDied(self._error)
        if not self._started:
            raise RuntimeError(NOT_STARTED)
