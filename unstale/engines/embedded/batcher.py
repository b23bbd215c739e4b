"""Continuous batching: each step is one forward pass, and requests enter or leave between steps.

A slot is the part of the KV cache that holds one sequence. After a reply, its slot keeps the
sequence, so that only new tokens are computed in the next turn of the episode. A new sequence
copies the longest prefix that another slot has cached. Slots that are empty or were unused for long
are overwritten first. If the runner adds LoRA adapters to layers' outputs, requests of several
versions are sampled at once. A cached prefix is then used only by requests of the version that
computed it.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines import ReplyStop
from unstale.engines.embedded.runner import Chunk, Runner, Step
from unstale.engines.embedded.sampling import Sampler
from unstale.kept_sets import WHOLE, KeptSets, Truncation, join
from unstale.routed_experts import pack_experts
from unstale.signals import Signals

if TYPE_CHECKING:
    from unstale.engines.embedded.pages import PagedCache
    from unstale.routed_experts import Experts

MAX_CHUNK_TOKENS = 512
"""Largest number of prompt tokens computed in one forward pass. An interruption waits until the
pass ends, so passes are kept short.
"""
MIN_COPY = 8
"""Smallest number of cached tokens that are copied from another slot. Computing fewer tokens again
is as fast as copying them.
"""
IDLE_STEPS = 512
"""Number of forward passes after which an unused slot of the KV cache probably belongs to an ended
episode.
"""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The arguments of one call of `Engine.sample`, and a number `id` by which to find the
    reply.
    """

    id: int
    tokens: Sequence[int]
    max_tokens: int
    stop_tokens: Sequence[int]
    temperature: float
    seed: int
    truncation: Truncation = WHOLE
    version: int = -1
    """The version of the LoRA adapters that must sample the reply. -1 means the version that was
    loaded last.
    """
    signals: bool = False
    return_sets: bool = True
    """True to return the kept sets of a reply that `truncation` cuts off."""

    @property
    def returns_sets(self) -> bool:
        return self.return_sets and bool(self.truncation)


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A reply that has ended: the `id` of its request, the sampled tokens, and the reason why."""

    id: int
    tokens: list[int]
    behavior_logp: list[float]
    stop: ReplyStop
    clean: bool = True
    """False if the cached keys and values of a context token were computed with older weights."""
    experts: "Experts | None" = None
    """`[rows, layers, k]`: the k experts that the router chose in each layer, for each of the first
    `rows` tokens of the sequence. None if experts are not recorded.
    """
    kept_sets: KeptSets | None = None
    """For each token of the reply, the set of tokens from which truncated sampling (`top_p`,
    `top_k`, `min_p`) drew it. None if the request returns no sets.
    """
    version: int = -1
    """The version of the weights that sampled the reply. -1 before the first load."""
    signals: Signals | None = None
    first_token_s: float | None = field(default=None, compare=False)
    """Seconds from `submit` until the first token was sampled. None without tokens."""


class Batcher:
    """A scheduler of requests, which runs the model (a `Runner`) once in each step.

    In a step, tokens of the requests are chosen and computed in one forward pass, and new tokens
    are sampled. With `keep_cache`, contexts that were cached with older weights are still used, and
    replies to them have `clean` False. With `num_experts` above 0, the runner must record the
    experts chosen for each token. Not thread-safe.
    """

    def __init__(  # noqa: PLR0913 - the limits, and what is recorded
        self,
        runner: Runner,
        *,
        max_slots: int,
        max_context: int,
        keep_cache: bool = False,
        num_experts: int = 0,
        sampler: Sampler | None = None,
    ) -> None:
        self.runner = runner
        self.version = -1
        """The version of the weights that was loaded last. -1 before the first load."""
        self._sampler = sampler or Sampler()
        self._keep_cache = keep_cache
        self._num_experts = num_experts
        self._experts: "Experts | None" = None
        """`[slots, max_context, layers, k]`: for each cached token, the k experts that were chosen
        in each layer. None before the first pass, and if experts are not recorded.
        """
        self._queue: deque[SampleRequest] = deque()
        self._active: dict[int, SampleRequest] = {}
        self._since: dict[int, float] = {}
        """Time at which each request without a token was submitted, by its `id`."""
        self._first_token_s: dict[int, float] = {}
        """Seconds until the first token of each active request that has one, by its `id`."""
        self._tokens = np.full((max_slots, max_context), -1, dtype=np.int32)
        self._logp = np.zeros((max_slots, max_context), dtype=np.float32)
        self._length = np.zeros(max_slots, dtype=np.int64)
        self._cached = np.zeros(max_slots, dtype=np.int64)
        """`[slots]`: the number of tokens in each slot whose keys and values are cached."""
        self._older = np.zeros(max_slots, dtype=np.int64)
        """`[slots]`: the number of tokens at the beginning of each slot whose cache was computed by
        older weights.
        """
        self._versions = np.full(max_slots, -1, dtype=np.int64)
        """`[slots]`: the version of the last request in each slot. If the runner adds adapters, all
        cached tokens of the slot were computed with this version.
        """
        self._limit = np.zeros(max_slots, dtype=np.int64)
        self._temperature = np.ones(max_slots, dtype=np.float32)
        self._seed = np.zeros(max_slots, dtype=np.uint64)
        self._truncation = [WHOLE] * max_slots
        self._kept: list[list[KeptSets]] = [[] for _ in range(max_slots)]
        """For each slot, the kept sets of its current reply. A kept set has the tokens from which
        truncated sampling drew one token of the reply.
        """
        self._signals: list[list[Signals]] = [[] for _ in range(max_slots)]
        """For each slot, the signals (such as the entropy) of its current reply, one per token."""
        self._used = np.zeros(max_slots, dtype=np.int64)
        self._stops = np.zeros((max_slots, runner.vocab_size), dtype=np.bool_)
        self._stale = np.zeros(max_slots, dtype=np.int64)
        """`[slots]`: the number of tokens that the last weight update dropped from each slot's
        cache. The tokens themselves are in `_stale_tokens`. 0 once a request computes them again.
        """
        self._stale_tokens = self._tokens[:, :0]
        self._reprefill: dict[int, int] = {}
        """For each slot, the number of tokens at the beginning of its request's context that are
        computed again, because the last weight update dropped them from a cache.
        """
        self._steps = 0
        self.counters: defaultdict[str, float] = defaultdict(float)
        """Counters, such as `sampled_tokens`, since the engine's process last sent them."""

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._queue)

    def submit(self, request: SampleRequest) -> None:
        self._queue.append(request)
        self._since[request.id] = perf_counter()

    def cancel(self, request_id: int) -> None:
        """Drop a request, without a reply. Other requests can still copy its cached tokens."""
        self._queue = deque(request for request in self._queue if request.id != request_id)
        self._since.pop(request_id, None)
        self._first_token_s.pop(request_id, None)
        for slot, request in list(self._active.items()):
            if request.id == request_id:
                del self._active[slot]

    def interrupt(self) -> list[FinishedReply]:
        """End every request. Return the replies, with the tokens sampled so far."""
        finished = [self._finish(slot, "interrupted") for slot in sorted(self._active)]
        finished += [
            FinishedReply(request.id, [], [], "interrupted", version=self.version)
            for request in self._queue
        ]
        self._queue.clear()
        self._since.clear()
        return finished

    def load(self, update: Mapping[str, Tensor], version: int = 0) -> None:
        """Load the weights `update` of `version`. Drop the KV cache unless `keep_cache` is set.

        If the runner adds adapters, `update` has the adapters of this version. The adapters and
        cached contexts of earlier versions then stay until `keep_versions` is called.

        Raises RuntimeError while replies are being sampled.
        """
        if self._active:
            raise RuntimeError(f"{len(self._active)} replies are being sampled; interrupt first")
        if self.runner.adapters:
            self.runner.adapters.add(version, update)
        else:
            self.runner.load(update)
        self.version = version
        if self._keep_cache:
            self._older[:] = self._cached
            return
        kept = max(int(self._cached.max()), 0)
        self._stale = self._cached.copy()
        self._stale_tokens = self._tokens[:, :kept].copy()
        if not self.runner.adapters:
            self._free(range(len(self._cached)))

    def keep_versions(self, versions: Collection[int]) -> None:
        """Drop the adapters and cached contexts of all versions except `versions`.

        The version loaded last, and those of running or waiting requests, are always kept. If the
        runner has no adapters, nothing is done.
        """
        if self.runner.adapters is None:
            return
        of_queue = {request.version for request in self._queue}
        kept = {*versions, self.version, *of_queue, *self._versions[[*self._active]].tolist()}
        self.runner.adapters.keep(kept)
        self._free(np.flatnonzero(~np.isin(self._versions, [*kept])).tolist())

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Return True if a request for this context would be computed in the next pass.

        A slot must be idle, and the tokens that must be computed before and for the request must
        fit into one pass. A request is also accepted if there is nothing else to compute.
        """
        if len(self._active) + len(self._queue) >= len(self._length):
            return False
        active = [*self._active]
        backlog = int((self._length[active] - self._cached[active]).clip(1).sum()) - len(active)
        known = self._cached.copy()
        known[active] = self._length[active]
        backlog += sum(self._new_tokens(each.tokens, known) for each in self._queue)
        wanted = self._new_tokens(tokens, known, [each.tokens for each in self._queue])
        return not backlog or backlog + wanted <= MAX_CHUNK_TOKENS

    def _new_tokens(
        self,
        tokens: Sequence[int],
        known: NDArray[np.int64],
        others: Sequence[Sequence[int]] = (),
    ) -> int:
        """Return the number of tokens that are not in the first `known` `[slots]` of a slot, and
        not at the beginning of one of `others`.
        """
        own = np.array(tokens, np.int32)
        shared = int(np.minimum(_common_prefix(self._tokens, own), known).max())
        for other in others:
            shared = max(shared, int(_common_prefix(np.array([other], np.int32), own)[0]))
        return max(1, len(own) - shared)

    def send_cache(self, tokens: NDArray[np.int32]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """Return the longest cached beginning of a context, for `take_cache` of another engine.

        The result is a header, and the tokens with their keys and values as the parts of a body.
        """
        cache = self._paged()
        cached = np.minimum(_common_prefix(self._tokens, tokens), self._cached)
        slot = int(np.lexsort((self._used, cached))[-1])
        count = int(cached[slot])
        header = {
            "version": int(self._versions[slot]) if self.runner.adapters else self.version,
            "older": min(int(self._older[slot]), count),
            "layout": cache.layout,
        }
        return header, [self._tokens[slot, :count].copy(), cache.read(slot, count).numpy()]

    def take_cache(self, header: Mapping[str, Any], body: NDArray[np.uint8]) -> int:
        """Store the beginning of a context that another engine computed, for later requests.

        Return the number of its tokens, or 0 if it is ignored: if it is of another version or of
        another kind of cache, if as much of it is already cached, or if no slot is idle.
        """
        cache = self._paged()
        count, rest = divmod(len(body), np.dtype(np.int32).itemsize + cache.token_bytes)
        if header["layout"] != cache.layout or rest or not 0 < count <= self._tokens.shape[1]:
            return 0
        start = count * np.dtype(np.int32).itemsize
        tokens, version = body[:start].view(np.int32), header["version"]
        known = np.minimum(_common_prefix(self._tokens, tokens), self._cached)
        idle = np.ones(len(self._length), dtype=np.bool_)
        idle[list(self._active)] = False
        of_others = self.runner.adapters is None and version != self.version
        if of_others or known.max() >= count or not idle.any():
            return 0
        slot = self._victim(idle)
        cache.write(slot, count, torch.from_numpy(body[start:]))
        self._tokens[slot] = -1
        self._tokens[slot, :count] = tokens
        self._length[slot] = self._cached[slot] = count
        self._older[slot], self._versions[slot] = header["older"], version
        self._used[slot] = self._steps
        self.counters["received_tokens"] += count
        return count

    def _paged(self) -> "PagedCache":
        assert self.runner.cache is not None, "a worker without pages does not send caches"
        return self.runner.cache

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._cached[slot] = 0
            self.runner.keep(slot, 0)

    def step(self) -> list[FinishedReply]:
        """Assign slots to waiting requests, run one forward pass, and sample.

        Return the replies that ended.
        """
        start = perf_counter()
        cpu_start = process_time()
        self._admit()
        step, sampling = self._plan()
        logits = self.runner.forward(step)
        if self._num_experts:
            self._record_experts(step)
        slots = np.concatenate([step.rows.numpy(), [chunk.slot for chunk in step.chunks]]).astype(
            np.int64
        )
        self._cached[slots[: len(step.rows)]] += 1
        reprefilled = 0
        for chunk in step.chunks:
            self._cached[chunk.slot] = chunk.end
            reprefilled += max(0, min(chunk.end, self._reprefill.get(chunk.slot, 0)) - chunk.start)
        self._sample(logits, slots, sampling)
        self._steps += 1
        self._used[slots] = self._steps
        duration_s = perf_counter() - start
        self.counters["steps"] += 1
        self.counters["busy_s"] += duration_s
        self.counters["cpu_s"] += process_time() - cpu_start
        self.counters["rows"] += len(slots)
        self.counters["sampled_tokens"] += int(sampling.sum())
        self.counters["prefill_tokens"] += len(step.tokens) - len(step.rows)
        self.counters["reprefill_tokens"] += reprefilled
        self.counters["reprefill_s"] += duration_s * reprefilled / len(step.tokens)
        return self._ended(slots[sampling])

    def _record_experts(self, step: Step) -> None:
        rows = pack_experts(self.runner.take_experts().numpy(), self._num_experts)
        if self._experts is None:
            self._experts = np.zeros((*self._tokens.shape, *rows.shape[1:]), rows.dtype)
        lengths = [chunk.end - chunk.start for chunk in step.chunks]
        of_chunks = np.repeat([chunk.slot for chunk in step.chunks], lengths)
        slots = np.concatenate([step.rows.numpy(), of_chunks]).astype(np.int64)
        self._experts[slots, step.positions.numpy()] = rows

    def _admit(self) -> None:
        """Assign slots to waiting requests, in order of arrival.

        A request waits while another request computes a prefix that both share. It can then copy
        the prefix.
        """
        idle = np.ones(len(self._length), dtype=np.bool_)
        idle[list(self._active)] = False
        waiting: deque[SampleRequest] = deque()
        while self._queue and idle.any():
            request = self._queue.popleft()
            slot = self._assign_slot(request, idle)
            if slot is None:
                waiting.append(request)
                continue
            idle[slot] = False
            self._active[slot] = request
        self._queue.extendleft(reversed(waiting))

    def _assign_slot(self, request: SampleRequest, idle: NDArray[np.bool_]) -> int | None:
        """Return a slot for a request, with a copy of the longest cached prefix of the request's
        tokens.

        `idle` `[slots]` is True for slots without a request. Return None if another request is
        computing a longer common prefix, which can be copied later.
        """
        tokens = np.array(request.tokens, dtype=np.int32)
        common = np.minimum(_common_prefix(self._tokens, tokens), len(tokens) - 1)
        version = self.version if request.version < 0 else request.version
        if self.runner.adapters:
            common[self._versions != version] = 0
        cached = np.minimum(common, self._cached)
        computing = ~idle & (self._cached + 1 < self._length)
        if not self.runner.keeps_beginnings:  # only an idle slot's whole sequence is continued
            cached[~idle | (cached < self._cached)] = 0
            computing[:] = False
        best = int(cached.argmax())
        if bool((common[computing] > cached[best] + MIN_COPY).any()):
            return None
        extends = idle & (cached == self._cached) & (cached > 0)
        slot = int(np.where(extends, cached, -1).argmax()) if extends.any() else self._victim(idle)
        source = slot
        have = int(cached[slot]) if extends[slot] or slot == best else 0
        if cached[best] >= have + MIN_COPY:
            source = best
            have = int(cached[best])
            self.runner.copy_prefix(best, slot, have)
            if self._experts is not None:
                self._experts[slot, :have] = self._experts[best, :have]
        else:
            self.runner.keep(slot, have)
        self._cached[slot] = have
        self._older[slot] = min(int(self._older[source]), have)
        self._versions[slot] = version
        self._open(slot, request, tokens)
        return slot

    def _victim(self, idle: NDArray[np.bool_]) -> int:
        """Return the index of the idle slot that a new request overwrites.

        It is the first slot that is empty, or was unused for `IDLE_STEPS` steps: low indices keep
        the batch small. If there is none, it is the slot that was unused longest. `idle` `[slots]`
        is True for slots without a request.
        """
        spare = idle & ((self._cached == 0) | (self._used < self._steps - IDLE_STEPS))
        if spare.any():
            return int(spare.argmax())
        return int(np.where(idle, self._used, np.iinfo(np.int64).max).argmin())

    def _open(self, slot: int, request: SampleRequest, tokens: NDArray[np.int32]) -> None:
        count = len(tokens)
        self._tokens[slot, :count] = tokens
        self._tokens[slot, count:] = -1
        self._length[slot] = count
        self._limit[slot] = min(count + request.max_tokens, self._tokens.shape[1])
        self._temperature[slot] = request.temperature
        self._truncation[slot] = request.truncation
        self._kept[slot] = []
        self._signals[slot] = []
        self._seed[slot] = np.uint64(request.seed & 0xFFFFFFFFFFFFFFFF)
        self._stops[slot] = False
        self._stops[slot, list(request.stop_tokens)] = True
        self._used[slot] = self._steps
        self.counters["cached_tokens"] += int(self._cached[slot])
        # the contexts of earlier versions were not dropped
        is_newest = self.runner.adapters is None or self._versions[slot] == self.version
        self._reprefill[slot] = self._stale_prefix(tokens) if is_newest else 0

    def _stale_prefix(self, tokens: NDArray[np.int32]) -> int:
        """Return the length of the prefix of `tokens` that the last update dropped from the cache.

        If a dropped context matches completely, it is forgotten, so that only one request counts
        it.
        """
        if not self._stale.any():
            return 0
        common = np.minimum(_common_prefix(self._stale_tokens, tokens), self._stale)
        best = int(common.argmax())
        if common[best] == self._stale[best]:
            self._stale[best] = 0
        return int(common[best])

    def _plan(self) -> tuple[Step, NDArray[np.bool_]]:
        """Return the input of the next forward pass, and a mask `[rows + chunks]` of those that
        sample.

        A row is the newest token of a sequence that is being sampled. A chunk is a part of a
        prompt. A token is sampled after each row, and after each chunk that ends its prompt.
        """
        slots = np.array(sorted(self._active), dtype=np.int64)
        due = self._length[slots] - self._cached[slots]
        rows = slots[due == 1]
        chunks = []
        budget = MAX_CHUNK_TOKENS
        prefilling = set(slots[due > 1].tolist())
        for slot in [slot for slot in self._active if slot in prefilling]:
            start = int(self._cached[slot])
            length = int(self._length[slot])
            if budget <= 0:
                break
            chunks.append(Chunk(slot, start, min(length, start + budget)))
            budget -= chunks[-1].end - start
        at = self._cached[rows]
        tokens = [
            self._tokens[rows, at],
            *(self._tokens[chunk.slot, chunk.start : chunk.end] for chunk in chunks),
        ]
        positions = [at, *(np.arange(chunk.start, chunk.end) for chunk in chunks)]
        step = Step(
            rows=torch.from_numpy(rows),
            chunks=tuple(chunks),
            tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            positions=torch.from_numpy(np.concatenate(positions)),
            versions=self._versions_of(rows, chunks),
        )
        complete = [chunk.end == self._length[chunk.slot] for chunk in chunks]
        return step, np.array([True] * len(rows) + complete, dtype=np.bool_)

    def _versions_of(self, rows: NDArray[np.int64], chunks: Sequence[Chunk]) -> Tensor | None:
        """Return the adapter version of each token of a pass, `[T]`. None without adapters."""
        if self.runner.adapters is None:
            return None
        of_chunks = [np.full(each.end - each.start, self._versions[each.slot]) for each in chunks]
        return torch.from_numpy(np.concatenate([self._versions[rows], *of_chunks]))

    def _sample(
        self, logits: Tensor, slots: NDArray[np.int64], sampling: NDArray[np.bool_]
    ) -> None:
        if not sampling.all():
            logits = logits[torch.from_numpy(sampling).to(logits.device)]
            slots = slots[sampling]
        if not len(slots):
            return
        at = self._length[slots]
        truncations = [self._truncation[slot] for slot in slots.tolist()]
        heat, seeds = self._temperature[slots], self._seed[slots]
        tokens, logp, kept = self._sampler(logits, heat, seeds, at, truncations)
        if any(measured := [self._active[slot].signals for slot in slots.tolist()]):
            signals = self._sampler.measure(logits[torch.tensor(measured)], heat[measured])
            for place, slot in enumerate(slots[measured].tolist()):
                self._signals[slot].append(signals.at(slice(place, place + 1)))
        self._tokens[slots, at] = tokens
        self._logp[slots, at] = logp
        if kept is not None and any(self._active[slot].returns_sets for slot in slots.tolist()):
            for slot, own in zip(slots.tolist(), kept.split([1] * len(slots)), strict=True):
                self._kept[slot].append(own)
        self._length[slots] += 1
        if self._since:
            now = perf_counter()
            for number in (self._active[slot].id for slot in slots.tolist()):
                if (since := self._since.pop(number, None)) is not None:
                    self._first_token_s[number] = now - since

    def _ended(self, slots: NDArray[np.int64]) -> list[FinishedReply]:
        stopped = self._stops[slots, self._tokens[slots, self._length[slots] - 1]]
        full = self._length[slots] >= self._limit[slots]
        finished = []
        for index in np.flatnonzero(stopped | full):
            finished.append(self._finish(int(slots[index]), "stop" if stopped[index] else "length"))
        return finished

    def _finish(self, slot: int, stop: ReplyStop) -> FinishedReply:
        request = self._active.pop(slot)
        reply = slice(len(request.tokens), int(self._length[slot]))
        tokens = self._tokens[slot, reply].tolist()
        logp = self._logp[slot, reply].tolist()
        clean = not self._older[slot]
        experts = None
        if self._experts is not None:
            experts = self._experts[slot, : self._cached[slot]].copy()
        kept_sets = None
        if request.returns_sets:
            kept_sets = join([(1, own) for own in self._kept[slot]])
        signals = Signals.join(self._signals[slot]) if self._signals[slot] else None
        version = int(self._versions[slot])
        first_token_s = self._first_token_s.pop(request.id, None)
        return FinishedReply(
            request.id,
            tokens,
            logp,
            stop,
            clean,
            experts,
            kept_sets,
            version,
            signals,
            first_token_s,
        )


def _common_prefix(slots: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return `[slots]`: the length of the prefix that each row of `slots` shares with `tokens`.

    >>> slots = np.array([[1, 2, 3], [1, 5, 3], [4, 2, 3]], np.int32)
    >>> _common_prefix(slots, np.array([1, 2], np.int32)).tolist()
    [2, 1, 0]
    """
    width = min(slots.shape[1], len(tokens))
    if not width:
        return np.zeros(len(slots), dtype=np.int64)
    same = slots[:, :width] == tokens[:width]
    return np.where(same.all(1), width, same.argmin(1))
