"""Counters of an engine behind a server: tokens, busy time, and cached contexts by version."""

import time
from collections.abc import Sequence

from unstale.engines.prefixes import CachedPrefixes


class UsageCounters:
    """The counters of one server since its start.

    With `keep_cache`, the server reuses caches of older weights, and replies over them are not
    clean.
    """

    def __init__(self, *, keep_cache: bool) -> None:
        self._keep_cache = keep_cache
        self._current = CachedPrefixes()
        """Contexts computed under the current weights."""
        self._older = CachedPrefixes()
        """Contexts computed under the weights before; with `keep_cache`, under all before."""
        self._since = time.monotonic()
        self._busy_since: float | None = None
        self._busy_s = 0.0
        self._sampled = 0
        self._prefilled = 0
        self._reprefilled = 0
        self._probe_error = 0.0

    def begin(self) -> None:
        """Mark the server as busy."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def end(self) -> None:
        """Mark the server as idle."""
        if self._busy_since is not None:
            self._busy_s += time.monotonic() - self._busy_since
            self._busy_since = None

    def loaded(self, probe_error: float) -> None:
        """Count a weight update and the mean log-probability error of its probe, in nats."""
        self._probe_error = max(self._probe_error, probe_error)
        if self._keep_cache:
            self._current.update(self._older)
        self._older = self._current
        self._current = CachedPrefixes()

    def count(self, context: Sequence[int], reply: Sequence[int], *, cached: int) -> bool:
        """Count a reply, of whose context `cached` tokens came from the prefix cache.

        Return True if the reply is clean: no cached token is from older weights. An empty reply is
        not counted, because the server may not have begun to compute it.
        """
        if not reply:
            return True
        current = self._current.length(context)
        older = self._older.length(context)
        self._sampled += len(reply)
        self._prefilled += len(context) - cached
        self._reprefilled += max(0, older - max(cached, current))
        clean = not self._keep_cache or cached <= current
        # With an older cache of the same context, the server may reuse either one for the next
        # reply.
        if clean and (not self._keep_cache or older <= cached):
            self._current.add([*context, *reply])
        return clean

    def read(self) -> dict[str, float]:
        """Return the counters since the last call.

        Re-prefilling gets its token share of the busy time.
        """
        now = time.monotonic()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now
        reprefill_share = self._reprefilled / max(1, self._sampled + self._prefilled)
        counters = {
            "sampled_tokens": float(self._sampled),
            "prefill_tokens": float(self._prefilled),
            "reprefill_tokens": float(self._reprefilled),
            "reprefill_s": self._busy_s * reprefill_share,
            "busy_s": self._busy_s,
            "idle_s": max(0.0, now - self._since - self._busy_s),
            "probe_logp_error": self._probe_error,
        }
        self._since = now
        self._busy_s = 0.0
        self._sampled = 0
        self._prefilled = 0
        self._reprefilled = 0
        self._probe_error = 0.0
        return counters
