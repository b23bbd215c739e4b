"""Counters of an engine on a server, and a record of the contexts in the server's prefix cache."""

import time
from collections.abc import Sequence

from unstale.engines.prefixes import CachedPrefixes, add_blocks, hash_blocks

_COUNTERS = (
    "sampled_tokens",
    "prefill_tokens",
    "cached_tokens",
    "reprefill_tokens",
    "reprefill_s",
    "busy_s",
    "idle_s",
    "probe_logp_error",
)


class UsageCounters:
    """The counters of one server since its start.

    A reply is clean if no part of its context was computed with older weights. With `keep_cache`,
    the server keeps its prefix cache when weights change, so some replies are not clean.
    """

    def __init__(self, *, keep_cache: bool) -> None:
        self._keep_cache = keep_cache
        self._current = CachedPrefixes()
        """Contexts that were computed with the current weights."""
        self._older = CachedPrefixes()
        """Contexts that were computed with the previous weights. With `keep_cache`, those of all
        earlier weights.
        """
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._since = time.monotonic()
        self._busy_since: float | None = None

    def begin(self) -> None:
        """Count the time as busy from this call until `end`."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def end(self) -> None:
        """Count the time as idle from this call until `begin`."""
        if self._busy_since is not None:
            self._counters["busy_s"] += time.monotonic() - self._busy_since
            self._busy_since = None

    def probed(self, error: float) -> None:
        """Record the error in nats of a probe (a test of weights). `read` returns the largest."""
        self._counters["probe_logp_error"] = max(self._counters["probe_logp_error"], error)

    def loaded(self) -> None:
        """Record a weight update: all contexts cached so far were computed with older weights."""
        if self._keep_cache:
            self._current.update(self._older)
        self._older = self._current
        self._current = CachedPrefixes()

    def count(self, context: Sequence[int], reply: Sequence[int], *, cached: int) -> bool:
        """Count a reply to a context. Return True if the reply is clean.

        `cached` is the number of context tokens that the server found in its cache. An empty reply
        is not counted, because the server may not have begun to compute it.
        """
        if not reply:
            return True
        blocks = hash_blocks(context)
        current = self._current.length(blocks)
        older = self._older.length(blocks)
        self._counters["sampled_tokens"] += len(reply)
        self._counters["prefill_tokens"] += len(context) - cached
        self._counters["cached_tokens"] += cached
        self._counters["reprefill_tokens"] += max(0, older - max(cached, current))
        clean = not self._keep_cache or cached <= current
        # If an older cache of the same context exists, the server may use either one for the next
        # reply.
        if clean and (not self._keep_cache or older <= cached):
            self._current.add(add_blocks(context, reply, blocks))
        return clean

    def read(self) -> dict[str, float]:
        """Return the counters since the last call, and reset them to 0.

        `reprefill_s` estimates the seconds spent on computing dropped contexts again: the busy time
        is divided in proportion to the numbers of tokens.
        """
        if self._busy_since is not None:
            self.end()
            self.begin()
        now = time.monotonic()
        counters = self._counters
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        tokens = counters["sampled_tokens"] + counters["prefill_tokens"]
        reprefill_share = counters["reprefill_tokens"] / max(1, tokens)
        counters["reprefill_s"] = counters["busy_s"] * reprefill_share
        counters["idle_s"] = max(0.0, now - self._since - counters["busy_s"])
        self._since = now
        return counters
