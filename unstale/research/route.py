"""Send each task to the policy that is expected to solve it at the least cost (V0).

One small value model for all policies forecasts the success of a policy at a task from the task's
words and from the policy's results at other tasks. A task goes to the policy with the largest
forecast minus `price` times the policy's cost. To measure the gain, half of the tasks are routed
with forecasts from the results of the other half.
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
"""Number of optimizer steps of the value model."""
WIDTH, RATE = 0.1, 0.03
"""The width and the learning rate of the value model, as in `predicted_sampler`."""
FEWEST = 8
"""Smallest number of tasks in each half of the tasks. Forecasts are fitted on one half, and tasks
of the other are routed.
"""

Counts = Mapping[str, tuple[int, int]]
"""One policy's results: by task key, the numbers of successes and attempts."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The success and the cost of the routed tasks with one rule that chooses policies."""

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
        raise ConfigError(f"{path} is not a file of `unstale eval --save`: {error}") from error
    return counts


def route(
    texts: Mapping[str, str], results: Sequence[Counts], costs: Sequence[float], price: float
) -> dict[str, Routed]:
    """Return success and cost of the router, of each policy if it were used for all tasks, and of
    the best choice for each task.

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
    rates = np.stack([_rates(counts, asked) for counts in results], axis=1)
    charge = price * np.asarray(costs)
    value = _forecasts({key: texts[key] for key in keys}, results, known, asked)
    choices = {"router": (value - charge).argmax(1), "best choice": (rates - charge).argmax(1)}
    for place in range(len(results)):
        choices[f"policy {place + 1}"] = np.full(len(asked), place)
    return {name: _worth(choice, rates, costs) for name, choice in choices.items()}


def dispatch(
    texts: Mapping[str, str], results: Sequence[Counts], costs: Sequence[float], price: float
) -> dict[str, tuple[int, list[float]]]:
    """Return for each task with a text the index of the chosen policy, and the forecasts of all
    policies.

    The tasks need no results. Raises `ConfigError` if fewer than `FEWEST` have results of all
    policies.
    """
    texts = {key: text for key, text in texts.items() if text}
    known = [key for key in texts if all(key in counts for counts in results)]
    if len(known) < FEWEST:
        raise ConfigError(
            f"{len(known)} tasks have results of all policies, and at least {FEWEST} are needed: "
            "they teach the router. Evaluate more tasks"
        )
    value = _forecasts(texts, results, known, list(texts))
    choice = (value - price * np.asarray(costs)).argmax(1)
    return {
        key: (int(place), row.tolist())
        for key, place, row in zip(texts, choice, value, strict=True)
    }


def _counted(counts: Counts, keys: Sequence[str]) -> tuple[Array, Array]:
    solved, tried = np.array([counts[key] for key in keys], dtype=np.float64).T
    return solved, tried


def _rates(counts: Counts, keys: Sequence[str]) -> Array:
    solved, tried = _counted(counts, keys)
    return solved / tried


def _forecasts(
    texts: Mapping[str, str], results: Sequence[Counts], known: Sequence[str], asked: Sequence[str]
) -> Array:
    """Return the forecast success of each policy at the tasks `asked`, `[asked, policies]`.

    One model is trained on the results of all policies at the tasks `known`. Its only information
    about a policy is the policy's results, which are an input.
    """
    vectors = dict(zip(texts, embed(list(texts.values())), strict=True))
    fit, new = (np.stack([vectors[key] for key in half]) for half in (known, asked))
    histories = [Results(fit, *_counted(counts, known)) for counts in results]
    model = ValueModel(DIMENSIONS, width=WIDTH, lr=RATE)
    model.train(*histories, steps=STEPS)
    return np.stack([sigmoid(model.logits(new, past)) for past in histories], axis=1)


def _worth(
    choice: "np.ndarray[tuple[int], np.dtype[np.int64]]", rates: Array, costs: Sequence[float]
) -> Routed:
    chosen = rates[np.arange(len(choice)), choice]
    shares = np.bincount(choice, minlength=len(costs)) / len(choice)
    cost = math.fsum(share * each for share, each in zip(shares, costs, strict=True))
    return Routed(float(chosen.mean()), cost, tuple(map(float, shares)))
