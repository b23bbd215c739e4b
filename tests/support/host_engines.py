"""Engines for engine hosts in tests. They run in a Ray actor and log what they load to files."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from unstale.engines import Reply, SamplingParams, Update
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.routed_experts import RoutedExperts, pack_experts
from unstale.weights.bits import checksum
from unstale.weights.store import Delta


def digits(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return a reply whose tokens depend on the length of the text before each."""
    return [2 + (len(tokens) + index) ** 2 % 61 for index in range(params.max_tokens)]


class LoggedEngine(ScriptedEngine):
    """A scripted engine. Each load adds `version checksum pid` to the file `log`.

    A load waits while the file `hold` exists.
    """

    def __init__(self, log: Path, hold: Path, options: EngineOptions) -> None:
        super().__init__(digits)
        self._log = log
        self._hold = hold

    async def load(self, update: Update, version: int) -> None:
        assert not isinstance(update, Delta)
        while self._hold.exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.02)
        await super().load(update, version)
        with self._log.open("a") as log:
            log.write(f"{version} {checksum(update)} {os.getpid()}\n")


class SlowEngine(ScriptedEngine):
    """A scripted engine whose tokens take time."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(digits, token_delay=self._wait)

    async def _wait(self, tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.sleep(0.01)


class EngineWithPid(EmbeddedEngine):
    """An embedded engine that writes the id of its process to a file."""

    def __init__(self, path: Path, options: EngineOptions) -> None:
        super().__init__(options)
        self._path = path

    async def start(self) -> None:
        await super().start()
        self._path.write_text(str(self.pid))


ROUTED = 96
"""Number of experts that a token of a `LongEngine` uses, in its only layer."""
EXPERTS = 128


class LongEngine(ScriptedEngine):
    """A scripted engine whose replies have as many tokens as they may, and experts if these are
    recorded.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(words)
        self._record_experts = options.record_experts

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        reply = await super().sample(tokens, params)
        if not self._record_experts:
            return reply
        first = params.first_routed(reply.piece.version)
        place = np.arange(first, len(tokens) + len(reply.piece.tokens) - 1)
        experts = (place[:, None, None] + np.arange(ROUTED)) % EXPERTS
        routed_experts = RoutedExperts(first, pack_experts(experts, EXPERTS))
        return replace(reply, piece=replace(reply.piece, routed_experts=routed_experts))


def words(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return a reply of tokens of the base policy's vocabulary, none of which ends a reply."""
    return [300 + (len(tokens) + index) ** 2 % 97 for index in range(params.max_tokens)]
