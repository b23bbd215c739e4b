"""`replay`: train on groups of earlier steps again, beside the fresh ones.

A batch always has its G fresh groups. At most G (1 - s) / s stored groups join them, where s is
`fresh_share`. The store is a queue of `capacity` groups, which drops the oldest first. It keeps the
newest group of a task, and no group with a token older than `max_age`. The rule `uniform` draws
stored groups whose task is not in the batch, each with the same probability. It is from DOTS-RR
(arXiv 2506.05316). The rule `failed` adds the stored group of a task whose fresh groups have no
success, the newest if there are too many. It is from DART (arXiv 2509.23866), whose store has
single successes: set `episodes` to `successes`. Advantages are computed within the stored group,
without the fresh failures: a choice of our own. Episodes with placed text are not stored, because
it has no old log-probability. A technique such as `bus`, which places it, places it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unstale.config.checks import ConfigError, PositiveInt, Range, Section
from unstale.config.techniques import Entry
from unstale.kept_sets import KeptSets, join
from unstale.records import Batch, Placed, Provenance, StoredLogps, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.techniques.hooks import FreshGroup, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig(Section):
    """Train on groups of earlier steps again, beside the fresh ones (DOTS-RR, DART)."""

    fresh_share: Annotated[float, Range(0.01, 1)] = 0.5
    """Smallest share of fresh groups in a batch. The rest may be stored groups."""
    capacity: PositiveInt = 512
    """Largest number of stored groups. They are in main memory and in checkpoints."""
    max_age: PositiveInt = 8
    """Largest age of a replayed token, in versions. It must be larger than the staleness bound."""
    rule: Literal["uniform", "failed"] = "uniform"
    """The stored groups that join a batch: random ones (`uniform`), or those of tasks whose fresh
    groups have no success (`failed`). `failed` needs tasks that are repeated: a list that repeats,
    or `selection.pool`.
    """
    episodes: Literal["all", "successes"] = "all"
    """The episodes of a stored group that are trained on again."""

    def count(self, fresh: int) -> int:
        """Return the largest number of stored groups that join a batch of `fresh` fresh groups."""
        return int(fresh * (1 - self.fresh_share) / self.fresh_share + 1e-9)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A stored group. `batch` has its sequences and their old log-probabilities."""

    number: int
    task: str
    age: int
    """Age of the group's oldest sampled token at the next batch, in versions."""
    batch: Batch


class Replay:
    """A technique that adds groups of earlier steps to a batch."""

    def __init__(self, options: ReplayConfig) -> None:
        self._options = options
        self.max_age = options.max_age
        self.stored: list[StoredGroup] = []
        """The stored groups, oldest first."""
        self._offered: list[StoredGroup] = []

    def take(self, fresh: Sequence[FreshGroup], *, seed: int) -> Sequence[Batch]:
        limit = self._options.count(len(fresh))
        tasks = {each.task for each in fresh}
        if self._options.rule == "failed":
            tasks -= {
                each.task for each in fresh if any(one.success for one in each.group.trajectories)
            }
            found = [each for each in self.stored if each.task in tasks]
            chosen = found[max(len(found) - limit, 0) :]  # the newest
        else:
            others = [each for each in self.stored if each.task not in tasks]
            chosen = Random(seed).sample(others, min(limit, len(others)))
        return [_expand(each.batch) for each in chosen]

    def offer(self, fresh: Sequence[FreshGroup], batch: Batch, lag: Tensor) -> None:
        spans = batch.spans()
        sequences: dict[int, list[int]] = {}
        for i, (number, (start, end)) in enumerate(zip(batch.group, spans, strict=True)):
            if (batch.provenance[start:end] != int(Provenance.REPLAYED)).all():
                sequences.setdefault(number, []).append(i)
        self._offered = []
        for each in fresh:
            main = [one for one in each.group.trajectories if not _has_placed(one)]
            successes = [one for one in main if one.success]
            kept = {
                conversation.episode
                for one in (main if self._options.episodes == "all" else successes)
                for conversation in one.conversations
            }
            number = each.group.number
            members = [i for i in sequences.get(number, []) if batch.episodes[i] in kept]
            part, index = batch.select(members)
            if not (part.advantage != 0).any():
                continue  # nothing can be learned from it
            if self._options.rule == "uniform" or successes:
                age = int(lag[index].max()) + 1
                self._offered.append(StoredGroup(number, each.task, age, _compact(part)))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Store the fresh groups of the last batch. Drop stored groups older than `max_age`."""
        older = {each.task: replace(each, age=each.age + 1) for each in self.stored}
        for each in self._offered:
            older.pop(each.task, None)
            older[each.task] = each
        self._offered = []
        self.stored = self._bounded(older.values())

    def _bounded(self, groups: Iterable[StoredGroup]) -> list[StoredGroup]:
        young = [each for each in groups if each.age <= self._options.max_age]
        return young[-self._options.capacity :]

    def state(self) -> Mapping[str, Any]:
        import torch

        batches = [each.batch for each in self.stored]
        rows = [
            {
                "number": each.number,
                "task": each.task,
                "age": each.age,
                "offsets": list(each.batch.offsets),
                "episodes": list(each.batch.episodes),
                "reward": list(each.batch.reward),
            }
            for each in self.stored
        ]
        columns = [_columns(batch) for batch in batches]
        names = columns[0] if columns else ()
        tensors = {name: torch.cat([each[name] for each in columns]) for name in names}
        kept = join([(len(batch.tokens), batch.kept_sets) for batch in batches])
        return {"groups": rows, "tensors": tensors, "kept_sets": kept and kept.to_tensors()}

    def restore(self, state: Mapping[str, Any]) -> None:
        rows = state["groups"]
        sizes = [row["offsets"][-1] for row in rows]
        parts = {name: each.split(sizes) for name, each in state["tensors"].items()}
        # The options of a resumed run may be smaller.
        sets = state.get("kept_sets")
        kept: list[KeptSets | None] = [None] * len(rows)
        if sets is not None:
            kept = [*KeptSets.of_tensors(*sets).split(sizes)]
        self.stored = self._bounded(
            _stored(row, {name: part[i] for name, part in parts.items()}, kept[i])
            for i, row in enumerate(rows)
        )


_COLUMNS = [each.name for each in fields(Batch) if each.type == "Tensor"]
_LOGPS = ("old_logp", "exact")
_SMALL = {"tokens": "int32", "version": "int32", "turn": "int32", "provenance": "int8"}
"""Types in which columns of a stored batch are saved, to take a third of the memory."""


def _has_placed(episode: Trajectory) -> bool:
    pieces = [piece for one in episode.conversations for piece in one.pieces]
    return any(isinstance(piece, Placed) for piece in pieces)


def _compact(batch: Batch) -> Batch:
    import torch

    small = {name: getattr(batch, name).to(getattr(torch, kind)) for name, kind in _SMALL.items()}
    replayed = torch.full_like(small["provenance"], int(Provenance.REPLAYED))
    small["provenance"] = torch.where(batch.sampled, replayed, small["provenance"])
    return replace(batch, placed=None, **small)


def _expand(batch: Batch) -> Batch:
    return replace(batch, **{name: getattr(batch, name).long() for name in _SMALL})


def _columns(batch: Batch) -> dict[str, Tensor]:
    assert batch.stored is not None
    columns = {name: getattr(batch, name) for name in _COLUMNS}
    return columns | {name: getattr(batch.stored, name) for name in _LOGPS}


def _stored(
    row: Mapping[str, Any], columns: Mapping[str, Tensor], kept_sets: KeptSets | None
) -> StoredGroup:
    tensors: dict[str, Any] = {name: columns[name] for name in _COLUMNS}
    batch = Batch(
        offsets=tuple(row["offsets"]),
        episodes=tuple(row["episodes"]),
        group=(row["number"],) * len(row["episodes"]),
        reward=tuple(row["reward"]),
        stored=StoredLogps(*(columns[name] for name in _LOGPS)),
        kept_sets=kept_sets,
        **tensors,
    )
    return StoredGroup(row["number"], row["task"], row["age"], batch)


def _describe(options: ReplayConfig) -> str:
    which = {
        "uniform": "stored groups at random",
        "failed": "the stored groups of tasks whose fresh group has no success",
    }[options.rule]
    of = "" if options.episodes == "all" else ", their successful episodes alone"
    return (
        f"{which} join the fresh ones of a batch{of}, up to {1 - options.fresh_share:.0%} of its "
        f"groups. Their tokens are at most {options.max_age} versions old. Their old_logp is "
        "stored, so no version is kept for them; it is behavior_logp where the route is not exact"
    )


def _check(options: ReplayConfig, config: RunConfig) -> None:
    bound, groups = config.schedule.staleness_bound, config.schedule.groups_per_step
    if options.max_age <= bound:
        raise ConfigError(
            f"replay.max_age must be > {bound} (the staleness bound), got {options.max_age}: a "
            "token at the bound could never be replayed"
        )
    if not options.count(groups):
        raise ConfigError(
            f"replay.fresh_share must be at most {groups / (groups + 1):.4g} for {groups} groups "
            f"per step, got {options.fresh_share:g}: no stored group could join them"
        )
    if config.trainer.routing_replay:
        raise ConfigError(
            "the technique replay needs trainer.routing_replay = false: the experts of a stored "
            "group are not kept"
        )


def _needs_repeats(options: ReplayConfig) -> str:
    return "replay.rule = failed" if options.rule == "failed" else ""


_MEASURED = """
A bandit of 16 tasks with 16 arms (64 for `failed`), of which one is rewarded: groups of 4, PPO's
ratio over each token, lr 8, 20 seeds; the mean probability of the rewarded arm after 60 steps (100
for `failed`), with a standard error of at most 0.025. `tests/techniques/test_replayed_groups.py`
repeats it.

| groups per step | clip | result |
|---|---|---|
| 2 fresh | none or 0.2 | 0.69 |
| 4 fresh | none or 0.2 | 0.84 |
| 2 fresh, 2 stored (`uniform`, `max_age` 16) | none | 0.81 |
| 2 fresh, 2 stored (`uniform`, `max_age` 16) | 0.2 | 0.50 |
| 2 fresh, 64 arms | none or 0.2 | 0.35 |
| 2 fresh, those of failed tasks stored (`failed`) | none | 0.50 |
| 2 fresh, those of failed tasks stored (`failed`) | 0.2 | 0.33 |

The clip counts from the policy that sampled. Here the policy moves far in few steps, so a clip of
0.2 stops most stored tokens, which still count in the loss's divisor: then replay is a loss. See
`replay/clip_share` and `replay/s_ess_share`. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="replay",
    slot="source",
    rows=(2, 11),
    makes=Replay,
    options=ReplayConfig,
    changes=frozenset({"groups"}),
    describe=_describe,
    use="Episodes are expensive, many fresh groups have equal rewards, and the policy moves little "
    "within `max_age`, so that few replayed tokens are clipped (`replay/clip_share`). The rule "
    "`failed` needs tasks that come again while their groups are stored.",
    measured=_MEASURED,
    exactness="The fresh groups and their staleness bound do not change. Replayed tokens have an "
    "age bound of their own. Their D is that of their first training, and S is pi now over pi_old, "
    "exact where the route was exact then. Groups whose advantages are all 0 are not stored, and "
    "`failed` chooses groups by their rewards, so the weights of tasks change.",
    check=_check,
    needs_repeats=_needs_repeats,
)
