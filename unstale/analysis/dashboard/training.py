"""Read the values with which tokens were trained on, for the table of episodes and for one
episode.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unstale.analysis.dashboard.table import BadQuestion
from unstale.durability.journal import JournalReader
from unstale.durability.run_folder import Row
from unstale.token_values import TokenFlag, TokenValues

DROPPED = TokenFlag.VETOED | TokenFlag.MASKED | TokenFlag.DROPPED
CLIPPED = TokenFlag.CLIPPED_LOW | TokenFlag.CLIPPED_HIGH | TokenFlag.CAPPED

ARRAYS = ("old_logp", "logp", "log_d", "log_s", "weight", "advantage", "entropy")
"""Names of the values that `of_episode` returns for each sampled token."""


def measure(values: Sequence[TokenValues]) -> dict[int, Row]:
    """Return by episode the columns of the table of episodes that are computed from tokens' values.

    An episode on which no training pass was run has only the column `advantage`.
    """
    found: dict[int, Row] = {each.episode: {"advantage": None} for each in values}
    filled = [each for each in values if len(each.flags)]
    if not filled:
        return found
    lengths = np.array([len(each.flags) for each in filled])
    starts = lengths.cumsum() - lengths

    def joined(name: str) -> Any:
        return np.concatenate([getattr(each, name) for each in filled])

    flags = joined("flags")
    dropped = (
        flags & int(DROPPED)
    ) != 0  # the first outcome that applies counts: these are not clipped
    clipped = ((flags & int(CLIPPED)) != 0) & ~dropped
    means = np.add.reduceat(joined("advantage").astype(np.float64), starts) / lengths
    sums = [np.add.reduceat(each.astype(np.int64), starts) for each in (dropped, clipped)]
    largest = [np.maximum.reduceat(_sizes(joined(name)), starts) for name in ("log_d", "log_s")]
    columns = [each.tolist() for each in (means, *largest, *sums)]
    for each, mean, log_d, log_s, num_dropped, num_clipped in zip(filled, *columns, strict=True):
        row = found[each.episode]
        row["advantage"] = _finite(mean)
        if each.minibatch is not None:
            row["log_d_abs_max"] = log_d if log_d >= 0 else None
            row["log_s_abs_max"] = log_s if log_s >= 0 else None
            row["dropped_tokens"] = num_dropped
            row["clipped_tokens"] = num_clipped
    return found


def _sizes(values: Any) -> Any:
    """Return the absolute values of an array, with -1 for values that are not finite."""
    return np.where(np.isfinite(values), np.abs(values), np.float32(-1))


def measure_group(journal: JournalReader, group: int, step: int) -> dict[int, Row]:
    """Return `measure` of a group's episodes with their values in a step. Raises `JournalError` if
    these are damaged.
    """
    return measure(journal.token_values(group, step))


def of_episode(journal: JournalReader, group: int, episode: int, step: int | None) -> Row:
    """Return the values of the sampled tokens of an episode in a step, as a list for each name in
    `ARRAYS` (`tokens`).

    Without `step`, it is the first step that trained on the episode. `steps` has all such steps.
    Empty if the journal has no values of the episode. Raises `BadQuestion` if `step` did not train
    on the episode, and `JournalError` if the journal is damaged.
    """
    every = journal.trained_tokens(group, episode=episode)
    if not every:
        return {}
    steps = [each.step for each in every]
    if step is not None and step not in steps:
        known = ", ".join(map(str, steps))
        raise BadQuestion(f"step {step} did not train on episode {episode}; these did: {known}")
    chosen = every[0 if step is None else steps.index(step)]
    found: Row = {name: _listed(getattr(chosen, name)) for name in ARRAYS}
    found["outcome"] = chosen.outcome
    found["exact"] = [bool(each) for each in chosen.has(TokenFlag.EXACT)]
    return {
        "steps": steps,
        "step": chosen.step,
        "route": chosen.route,
        "version": chosen.version,
        "minibatch": chosen.minibatch,
        "not_run": _why_not_run(chosen),
        "tokens": found,
    }


def _why_not_run(values: TokenValues) -> str:
    """Return a clause on why no training pass was run on an episode. Empty if one was."""
    if values.minibatch is not None:
        return ""
    if not values.advantage.any():
        return "its advantages are all 0"
    return "the correction or a technique dropped every token that has an advantage"


def cut(tokens: Row, start: int, end: int) -> Row:
    """Return the lists in `tokens`, each from position `start` up to `end`."""
    return {name: values[start:end] for name, values in tokens.items()}


def _listed(values: Any) -> list[float | None]:
    return [_finite(value) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
