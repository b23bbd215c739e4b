"""Send each task to the policy that is expected to solve it at the least cost (V0).

Each policy has a small value model, which forecasts its success at a task from the task's words and
from the policy's results at other tasks. A task goes to the policy with the largest forecast minus
`price` times the policy's cost. Results at half of the tasks train the value models, which route
the other half.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from unstale.config import ConfigError
from unstale.research.techniques.forecast import DIMENSIONS, Array, embed, sigmoid
from unstale.research.techniques.value_model import Results, ValueModel

STEPS = 100
"""Number of optimizer steps of each value model."""
WIDTH, RATE = 0.1, 0.03
"""Width and learning rate of the value models, as in `predicted_sampler`."""
FEWEST = 8
"""Smallest number of tasks in each half: those of the forecasts and those that are routed."""

Counts = Mapping[str, tuple[int, int]]
"""One policy's results: by task key, the numbers of successes and attempts."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The success and the cost of the routed tasks if one way of choosing policies is used."""

    success: float
    cost: float
    """Mean cost per task, in the unit of the given costs."""
    shares: tuple[float, ...]
    """Share of the tasks that each policy gets, in the order of the policies."""


def read_counts(path: Path) -> Counts:
    """Read the results of `unstale eval --save`. Raises `ConfigError` for a file
    of another kind.
    """
    counts: dict[str, tuple[int, int]] = {}
    try:
        _, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        for row in rows:
            solved, tried = counts.get(row["task"], (0, 0))
            counts[row["task"]] = solved + bool(row["success"]), tried + 1
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no file of `unstale eval --save`: {error}") from error
    return counts


def route(
    texts: Mapping[str, str], results: Sequence[Counts], costs: Sequence[float], price: float
) -> dict[str, Routed]:
    """Return success and cost of the router, of each policy used for all tasks, and of the best
    choice.

    `texts` has each task's words by its key. `results` and `costs` have an element for each policy.
    `price` converts cost to success. Raises `ConfigError` if one half of the tasks has fewer than
    `FEWEST` tasks with results of all policies.
    """
    keys = [key for key in texts if texts[key] and all(key in counts for counts in results)]
    known = [key for key in keys if crc32(key.encode()) % 2]
    asked = [key for key in keys if not crc32(key.encode()) % 2]
    if min(len(known), len(asked)) < FEWEST:
        raise ConfigError(
            f"{len(keys)} tasks have a text and results of all policies, and at least "
            f"{2 * FEWEST} are needed: half of them teach the router. Evaluate more tasks"
        )
    vectors = dict(zip(keys, embed([texts[key] for key in keys]), strict=True))
    fit, new = (np.stack([vectors[key] for key in half]) for half in (known, asked))
    rates = np.stack([_rates(counts, asked) for counts in results], axis=1)
    value = np.stack([_forecast(fit, _counted(counts, known), new) for counts in results], axis=1)
    charge = price * np.asarray(costs)
    choices = {"router": (value - charge).argmax(1), "best choice": (rates - charge).argmax(1)}
    for place in range(len(results)):
        choices[f"policy {place + 1}"] = np.full(len(asked), place)
    return {name: _worth(choice, rates, costs) for name, choice in choices.items()}


def _counted(counts: Counts, keys: Sequence[str]) -> tuple[Array, Array]:
    solved, tried = np.array([counts[key] for key in keys], dtype=np.float64).T
    return solved, tried


def _rates(counts: Counts, keys: Sequence[str]) -> Array:
    solved, tried = _counted(counts, keys)
    return solved / tried


def _forecast(fit: Array, counted: tuple[Array, Array], new: Array) -> Array:
    """Return the forecast success `[n]` at the tasks with embeddings `new`.

    The forecast is learned from the successes and attempts `counted` at the tasks with embeddings
    `fit`.
    """
    past = Results(fit, *counted)
    model = ValueModel(DIMENSIONS, width=WIDTH, lr=RATE)
    model.train(past, steps=STEPS)
    return sigmoid(model.logits(new, past))


def _worth(
    choice: "np.ndarray[tuple[int], np.dtype[np.int64]]", rates: Array, costs: Sequence[float]
) -> Routed:
    chosen = rates[np.arange(len(choice)), choice]
    shares = np.bincount(choice, minlength=len(costs)) / len(choice)
    cost = math.fsum(share * each for share, each in zip(shares, costs, strict=True))
    return Routed(float(chosen.mean()), cost, tuple(map(float, shares)))
