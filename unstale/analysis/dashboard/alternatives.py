"""Compute which tokens another `old_logp` or other limits would have kept and clipped in a run.

A route is a way to get `old_logp`. The trainer's own correction and objective
(`trainer.rules.LossSpec`) are applied to whole sequences of values in the journal. The tokens and
their `logp` are those of the run. With other options the run would have learnt something else, and
later steps would have had other tokens.

Log D and log S are stored as float16, so a token next to a limit may come out on its other side.
The figure `rounding` of an answer counts the tokens to which even the run's own options give other
flags than the stored ones.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unstale.analysis.dashboard.factors import (
    MAX_LAG,
    OUTCOME_NAMES,
    TokenChoice,
    find_rows,
    outcome_codes,
    require_values,
)
from unstale.analysis.dashboard.journals import open_journal
from unstale.analysis.dashboard.limits import Settings, make_route
from unstale.durability.journal import JournalReader
from unstale.durability.journal.token_rows import TrainedTokens
from unstale.durability.run_folder import Row
from unstale.records import Trajectory
from unstale.token_values import STORED, TokenFlag

if TYPE_CHECKING:
    import torch

    from unstale.records import Batch

MAX_TOKENS = 100_000
"""Largest number of tokens that are computed for one answer. In a longer run, groups are evenly
spaced over its steps. 100,000 tokens took 1.7 s of CPU time.
"""

MAX_LISTED = 100
"""Largest number of listed tokens with another outcome: those with the largest |log S|."""

USED = TokenFlag.VETOED | TokenFlag.MASKED | TokenFlag.DROPPED | TokenFlag.CLIPPED_LOW
USED |= TokenFlag.CLIPPED_HIGH | TokenFlag.CAPPED
"""Flags that the correction, the objective or a technique sets on a token."""


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """The episodes of a group in a step, as a batch, with the stored values of their tokens."""

    batch: "Batch"
    old_logp: "torch.Tensor"
    """`[T]` float64, 0 for tokens that were not sampled. `logp` has the same form."""
    logp: "torch.Tensor"
    values: Sequence[TrainedTokens]

    @property
    def version(self) -> int:
        return self.values[0].version

    def column(self, name: str) -> Any:
        """Return the value `name` of the sampled tokens, `[n]`, in the order of the batch."""
        return np.concatenate([getattr(each, name) for each in self.values])


@dataclass(frozen=True, slots=True)
class Applied:
    """The flags and weights that some settings give the sampled tokens of a group, arrays `[n]`."""

    flags: Any
    """For each token, the sum of those flags in `USED` that it has."""
    weight: Any
    """Size of the loss's derivative by the token's `logp`, divided by the advantage. NaN where the
    advantage is 0.
    """


def compare(folder: Path, choice: TokenChoice, own: Settings, other: Settings) -> Row:
    """Return how many of the chosen tokens have each outcome in the run and with other settings.

    `own` are the run's settings. Raises `JournalError`, and OSError without a journal.
    """
    tally = _Tally()
    with open_journal(folder) as journal:
        read = find_rows(journal, choice, limit=MAX_TOKENS)
        for row in read.rows:
            values = journal.trained_tokens(row.group, row.step)
            tally.add_not_run([each for each in values if each.minibatch is None])
            group = _group(journal, [each for each in values if each.minibatch is not None])
            if group is None:
                continue
            applied = apply_settings(group, own), apply_settings(group, other)
            tally.add(_outcomes(group, row.step, choice, applied, _known(group, other)), *applied)
    return {
        "total": read.num_all,
        "read": read.num_tokens,
        "route": other.config.old_logps.route,
        "stored": not other.is_mixed,
        **tally.answer(),
    }


def _group(journal: JournalReader, values: Sequence[TrainedTokens]) -> RecordedGroup | None:
    """Return the episodes of `values` as a batch. None if `values` is empty."""
    import torch

    from unstale.records import ScoredTrajectory, collate

    if not values:
        return None
    trajectories = [journal.episode(each.episode).trajectory for each in values]
    scored = [
        ScoredTrajectory(trajectory, _advantages(trajectory, each))
        for trajectory, each in zip(trajectories, values, strict=True)
    ]
    batch = collate(scored)
    count = int(batch.sampled.sum())
    if count != sum(len(each.flags) for each in values):
        raise ValueError(f"the batch has {count} sampled tokens")  # the reader has checked it
    behavior = batch.behavior_logp.double()

    def spread(name: str) -> torch.Tensor:
        column = torch.zeros(len(behavior), dtype=torch.float64)
        stored = np.concatenate([getattr(each, name) for each in values]).astype(np.float64)
        column[batch.sampled] = torch.from_numpy(stored)
        return column

    old_logp = behavior + spread("log_d")
    logp = old_logp + spread("log_s")
    numbers = (values[0].group,) * batch.num_sequences
    wide = replace(batch, behavior_logp=behavior, group=numbers)
    return RecordedGroup(wide, old_logp, logp, values)


def _advantages(trajectory: Trajectory, values: TrainedTokens) -> tuple[float, ...]:
    """Return the stored advantage of each token of a trajectory, 0 for context."""
    from unstale.records import Sampled, walk

    given = iter(values.advantage.tolist())
    return tuple(
        next(given) if isinstance(piece, Sampled) else 0.0
        for _, piece, _ in walk(trajectory.pieces)
        for _ in piece.tokens
    )


def _known(group: RecordedGroup, settings: Settings) -> Any:
    """Return True for sampled tokens whose `old_logp` the route of the settings determines, `[n]`.

    A route that scores with the weights at the start of the batch needs the `logp` at that time,
    which is stored only for the first optimizer step. Episodes that were trained on again are not
    known either.
    """

    def is_known(values: TrainedTokens) -> bool:
        if not settings.is_mixed:
            return True
        return values.route != STORED and (not settings.spec.needs.now or values.minibatch == 0)

    return np.concatenate([np.full(len(each.flags), is_known(each)) for each in group.values])


def apply_settings(group: RecordedGroup, settings: Settings) -> Applied:
    """Return the flags and weights that the trainer's rules give a group with some settings.

    Tokens that a technique dropped in the run stay dropped, and advantages are those of the run.
    """
    import torch

    batch = group.batch
    rules = settings.rules()
    old_logp = group.old_logp
    if settings.is_mixed:
        old_logp, _ = make_route(settings, version=group.version).logps(batch, group.logp)
        old_logp = old_logp.double()
    logp = group.logp.clone().requires_grad_()
    control = rules.correct(old_logp, batch)
    vetoed = rules.vetoed(old_logp, batch)
    surrogate = rules.surrogate(logp, old_logp, batch)
    sampled = batch.sampled
    dropped = torch.zeros_like(sampled)
    dropped[sampled] = torch.from_numpy((group.column("flags") & int(TokenFlag.DROPPED)) != 0)
    factor = torch.where(dropped, 0.0, control.factor.double())
    capped = rules.cap(factor, group.logp, batch)
    (gradient,) = torch.autograd.grad((capped * surrogate.loss).sum(), logp, allow_unused=True)
    flags = {
        TokenFlag.VETOED: vetoed,
        TokenFlag.MASKED: ~(control.keep | vetoed),
        TokenFlag.DROPPED: dropped,
        TokenFlag.CLIPPED_LOW: surrogate.clipped_low,
        TokenFlag.CLIPPED_HIGH: surrogate.clipped_high,
        TokenFlag.CAPPED: capped < factor,
    }
    found = sum(
        (tensor[sampled].to(torch.uint8) * int(flag) for flag, tensor in flags.items()),
        torch.zeros(int(sampled.sum()), dtype=torch.uint8),
    )
    advantage = batch.advantage.double()
    weight = torch.where(advantage == 0, torch.nan, (gradient / advantage).abs())
    return Applied(found.numpy(), weight[sampled].detach().numpy())


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of a group's sampled tokens, `[n]`, in the run and with other settings."""

    group: RecordedGroup
    step: int
    lag: Any
    chosen: Any
    """True for the tokens that were chosen and whose values are known."""
    unknown: int
    """Number of chosen tokens whose `old_logp` cannot be computed for the route of the other
    settings.
    """
    run: Any
    """Outcomes in the run, as positions in `OUTCOME_NAMES`."""
    other: Any
    """Outcomes with the other settings, as positions in `OUTCOME_NAMES`."""
    rounded: Any
    """True for tokens to which the run's own settings give other flags than stored, by rounding."""
    changed: Any
    """True for chosen tokens whose outcome differs with the other settings, not by rounding."""

    def rows(self, where: Any) -> Iterator[Row]:
        """Yield the tokens at the positions `where`, each with its values and both outcomes."""
        batch = self.group.batch
        starts = np.array(batch.offsets)
        sequence = batch.sequence[batch.sampled].numpy()
        place = batch.sampled.nonzero().flatten().numpy()
        log_d, log_s = self.group.column("log_d"), self.group.column("log_s")
        for i in where.tolist():
            yield {
                "episode": batch.episodes[sequence[i]],
                "step": self.step,
                "token": int(place[i] - starts[sequence[i]]),
                "lag": int(self.lag[i]),
                "log_d": float(log_d[i]),
                "log_s": float(log_s[i]),
                "run": OUTCOME_NAMES[self.run[i]],
                "other": OUTCOME_NAMES[self.other[i]],
            }


def _outcomes(
    group: RecordedGroup,
    step: int,
    choice: TokenChoice,
    applied: tuple[Applied, Applied],
    known: Any,
) -> Outcomes:
    """Return the outcomes of a group.

    `applied` has the results of the run's own settings and of the other settings.
    """
    own, other = applied
    stored = group.column("flags")
    batch = group.batch
    lag = (group.version - batch.version[batch.sampled]).numpy()
    wanted = choice.contains(lag, stored)
    chosen = wanted & known
    used = stored & int(USED)
    before, after = (outcome_codes(flags, run=True) for flags in (used, other.flags))
    return Outcomes(
        group,
        step,
        lag,
        chosen,
        unknown=int((wanted & ~known).sum()),
        run=before,
        other=after,
        rounded=own.flags != used,
        # A token that comes out otherwise with the run's own settings too has changed by rounding.
        changed=chosen & (before != after) & (after != outcome_codes(own.flags, run=True)),
    )


def changed_tokens(
    folder: Path, choice: TokenChoice, own: Settings, other: Settings
) -> Iterator[Row]:
    """Yield all chosen tokens that other settings treat differently, in the order of the steps.

    The journal is read one group at a time. Raises `JournalError`, and OSError without a journal.
    """
    with open_journal(folder) as journal:
        found = find_rows(journal, choice, limit=2**62).rows
    for row in found:
        with open_journal(folder) as journal:
            values = journal.trained_tokens(row.group, row.step)
            require_values(values, row)
            group = _group(journal, [each for each in values if each.minibatch is not None])
        if group is None:
            continue
        applied = apply_settings(group, own), apply_settings(group, other)
        outcomes = _outcomes(group, row.step, choice, applied, _known(group, other))
        yield from outcomes.rows(outcomes.changed.nonzero()[0])


class _Tally:
    """The totals of `compare` over groups."""

    def __init__(self) -> None:
        self._counts = {
            name: np.zeros((MAX_LAG + 1, len(OUTCOME_NAMES)), np.int64) for name in ("run", "other")
        }
        self._weights: dict[str, list[Any]] = {"run": [], "other": []}
        self._changes: Counter[tuple[str, str]] = Counter()
        self._listed: list[Row] = []
        self._rounding = 0
        self._compared = 0
        self._unknown = 0
        self._not_run = 0
        self._not_run_dropped = 0

    def add_not_run(self, values: Sequence[TrainedTokens]) -> None:
        """Count the tokens of episodes on which no training pass was run.

        If such an episode has an advantage, all its tokens had been dropped. These are counted
        separately, too.
        """
        for each in values:
            self._not_run += len(each.flags)
            if each.advantage.any():
                self._not_run_dropped += len(each.flags)

    def add(self, found: Outcomes, own: Applied, other: Applied) -> None:
        """Add the outcomes of a group."""
        chosen = found.chosen
        self._unknown += found.unknown
        self._compared += int(chosen.sum())
        self._rounding += int((found.rounded & chosen).sum())
        shown = np.clip(found.lag, 0, MAX_LAG)
        for name, codes in (("run", found.run), ("other", found.other)):
            np.add.at(self._counts[name], (shown[chosen], codes[chosen]), 1)
        for name, result in (("run", own), ("other", other)):
            weight = result.weight[chosen]
            self._weights[name].append(weight[np.isfinite(weight)])
        (at,) = found.changed.nonzero()
        pairs = Counter(zip(found.run[at].tolist(), found.other[at].tolist(), strict=True))
        for (one, two), count in pairs.items():
            self._changes[OUTCOME_NAMES[one], OUTCOME_NAMES[two]] += count
        size = np.abs(found.group.column("log_s")[at])
        self._listed += found.rows(at[np.argsort(-size, kind="stable")][:MAX_LISTED])
        self._listed.sort(key=lambda row: -abs(row["log_s"]))
        del self._listed[MAX_LISTED:]

    def answer(self) -> Row:
        """Return the counts by lag (staleness), the differences, and what could not be computed."""
        return {
            "compared": self._compared,
            "not_run": self._not_run,
            "not_run_dropped": self._not_run_dropped,
            "unknown": self._unknown,
            "rounding": self._rounding,
            "lags": list(self._by_lag()),
            "ess": {name: _share(parts) for name, parts in self._weights.items()},
            "num_changes": sum(self._changes.values()),
            "changes": [[*pair, count] for pair, count in self._changes.most_common()],
            "rows": self._listed,
        }

    def _by_lag(self) -> Iterator[Row]:
        for lag in range(MAX_LAG + 1):
            counts = {name: each[lag] for name, each in self._counts.items()}
            if not counts["run"].sum():
                continue
            yield {
                "lag": lag,
                **{
                    name: {
                        outcome: int(count)
                        for outcome, count in zip(OUTCOME_NAMES, each, strict=True)
                        if count
                    }
                    for name, each in counts.items()
                },
            }


def _share(parts: Sequence[Any]) -> float | None:
    """Return the effective sample size of weights as a share of their number.

    Weights of 0 count in the number. None without weights.
    """
    import torch

    from unstale.trainer.metrics import effective_sample_size

    weights = np.concatenate([np.empty(0), *parts])
    positive = weights[weights > 0]
    if not len(weights):
        return None
    if not len(positive):
        return 0.0
    share = effective_sample_size(torch.from_numpy(np.log(positive)))
    return share * len(positive) / len(weights)
