"""The values with which a step trained on tokens, for the table of episodes and for one episode."""

import math
from typing import Any

import numpy as np

from unstale.durability.journal import JournalReader
from unstale.durability.run_folder import Row
from unstale.observe.dashboard.table import BadQuestion
from unstale.token_values import TokenFlag, TokenValues

DROPPED = TokenFlag.VETOED | TokenFlag.MASKED | TokenFlag.DROPPED
CLIPPED = TokenFlag.CLIPPED_LOW | TokenFlag.CLIPPED_HIGH | TokenFlag.CAPPED

ARRAYS = ("old_logp", "logp", "log_d", "log_s", "weight", "advantage", "entropy")
"""Values of a token that an answer has."""


def measure(values: TokenValues) -> Row:
    """Return the columns of the table that the values of an episode give.

    An episode that was not run has an advantage and no other value.
    """
    row: Row = {"advantage": _finite(values.advantage.mean()) if len(values.advantage) else None}
    if values.minibatch is None:
        return row
    dropped = values.has(DROPPED)  # the first outcome that applies counts, so these are not clipped
    return row | {
        "log_d_abs_max": _largest(values.log_d),
        "log_s_abs_max": _largest(values.log_s),
        "dropped_tokens": int(dropped.sum()),
        "clipped_tokens": int((values.has(CLIPPED) & ~dropped).sum()),
    }


def measure_group(journal: JournalReader, group: int, step: int) -> dict[int, Row]:
    """Return `measure` of each episode of a group in a step. Raises `JournalError`."""
    return {each.episode: measure(each) for each in journal.token_values(group, step)}


def of_episode(journal: JournalReader, group: int, episode: int, step: int | None) -> Row:
    """Return the values of the sampled tokens of an episode, in order, as lists by name.

    `step` is the step whose values are wanted, or None for the first one. `steps` has all of them.
    Empty if the journal keeps none. Raises `BadQuestion` if `step` is none of them, and
    `JournalError`.
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
        "skipped": chosen.minibatch is None,
        "tokens": found,
    }


def cut(tokens: Row, start: int, end: int) -> Row:
    """Return the values of some of the sampled tokens."""
    return {name: values[start:end] for name, values in tokens.items()}


def _listed(values: Any) -> list[float | None]:
    """Return an array as a list, with None for what is not finite."""
    return [_finite(value) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _largest(values: Any) -> float | None:
    sizes = np.abs(values[np.isfinite(values)])
    return float(sizes.max()) if len(sizes) else None
