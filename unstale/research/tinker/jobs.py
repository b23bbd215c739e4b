"""The jobs of a tenant, whose results the client gets by polling."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from safetensors import SafetensorError

from unstale.engines import EngineDied
from unstale.rollout.endpoint.schemas import Refused

_log = logging.getLogger(__name__)
POLL_S = 20.0
"""Longest time in seconds that a poll waits for a result. It is below 45, when clients give up a
poll.
"""
MAX_PENDING = 2048
MAX_PENDING_BYTES = 256 << 20
"""Largest total size in bytes of pending requests. Beyond it, or `MAX_PENDING`, new ones are
refused.
"""
KEPT_RESULTS = 4096
KEPT_BYTES = 256 << 20
"""Largest total size in bytes of stored results. Beyond it, or `KEPT_RESULTS`, the oldest are
deleted.
"""
Result = bytes | dict[str, Any]
"""A message in the Protocol Buffers format, or a JSON object."""


class Jobs:
    """The jobs of one tenant, by the id of their request. A repeated request does not start a job
    again.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._pending: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def submit(self, request_id: str, size: int, work: Callable[[], Awaitable[Result]]) -> None:
        """Start a job, unless one with this request id exists.

        `size` is the size of the request's body in bytes. Raises `Refused` if too many jobs are
        pending.
        """
        if request_id in self._tasks:
            return
        if len(self._pending) >= MAX_PENDING or sum(self._pending.values()) > MAX_PENDING_BYTES:
            raise Refused(
                f"{len(self._pending)} requests are pending: wait for some of them",
                status=429,
                code="too_many_requests",
            )
        self._pending[request_id] = size
        task = asyncio.ensure_future(_guarded(work()))
        self._tasks[request_id] = task
        task.add_done_callback(partial(self._done, request_id))

    def _done(self, request_id: str, task: asyncio.Task[Result]) -> None:
        del self._pending[request_id]
        if not task.cancelled() and isinstance(result := task.result(), bytes):
            self._sizes[request_id] = len(result)
        kept = sum(self._sizes.values())
        for old in [each for each in self._tasks if each not in self._pending][:-1]:
            if len(self._tasks) <= KEPT_RESULTS and kept <= KEPT_BYTES:
                break
            del self._tasks[old]
            kept -= self._sizes.pop(old, 0)

    async def result(self, request_id: str) -> Result | None:
        """Return the result of a job, or None if it has none within `POLL_S` seconds.

        Raises `Refused` if there is no such job.
        """
        task = self._find(request_id)
        await asyncio.wait({task}, timeout=POLL_S)
        task = self._find(request_id)  # it may have been cancelled meanwhile
        return task.result() if task.done() else None

    def cancel(self, request_id: str) -> None:
        """Stop a job. A training pass that has begun is completed. Raises `Refused` for an unknown
        job.
        """
        self._find(request_id).cancel()

    def _find(self, request_id: str) -> asyncio.Task[Result]:
        task = self._tasks.get(request_id)
        if task is None or task.cancelled():
            raise Refused(
                f"there is no request {request_id[:200]!r}, or its result is no longer kept",
                status=404,
                code="no_request",
            )
        return task


async def _guarded(work: Awaitable[Result]) -> Result:
    """Return a job's result, or the error that it raised, as an object for the client."""
    try:
        return await work
    except (Refused, ValueError) as error:
        return {"error": str(error), "category": "user"}
    except (EngineDied, RuntimeError, OSError, MemoryError, SafetensorError) as error:
        _log.exception("a request failed")
        text = f"{type(error).__name__} in the service, whose log has the details"
        return {"error": text, "category": "server"}
