"""`predicted_sampler`: the next task is one whose success rate is forecast near a target.

A task is drawn with a probability proportional to exp(-|p - alpha| / tau), where p is the forecast
of its success rate. Tasks that were never tried have a forecast, too.

Each task has a vector of word features: the counts of the words of its text, in which rare words
count more, normalised to length 1. The cosine of two such vectors is their dot product.

`words`: p is a weighted mean of the success rates of the last groups. The weight of a group is
exp((cosine - 1) / width), where the cosine is between the vectors of its task and of the new one.
The mean is calibrated: p = sigmoid(logit(mean) / T + b). T and b are fitted by maximum likelihood
to the known results, each of which is forecast from the others (leave-one-out). From DOTS (arXiv
2506.05316), which has a trained encoder: `encoder` = policy has hidden states instead of words, and
`forecast` = model learns their weights. DOTS forecasts from results at 256 `reference` tasks; with
`reference` = 0, all past groups are used.

`model`: p is the forecast of a small attention model over the last groups. For a group of n
episodes, with the vector y of its task and the vector x of the new one, the weight is n exp(s sum_d
m_d x_d y_d). Here m_d is a learned weight of feature d, and s a learned scale. The mean success
rate of all groups is added with the weight exp(c), where c is learned. The weighted mean r of the
success rates is calibrated by a learned slope a and shift b: z = a logit(r) + b. m, s, c, a and b
are trained after each batch on the last groups (leave-one-out). The loss is that of V0: 0.75 times
the cross entropy plus 0.25 times -log sigmoid(z - z') over pairs with different results, where z
belongs to the better group and z' to the other. Finally p = sigmoid(g z + (1 - g) z0). z0 is the
logit of the mean of all groups. g, from 0 to 1, is the trust in the model. It is fitted by maximum
likelihood to the last groups, each of which was forecast before the model was trained on it. From
V0, which trains a large model in advance and never updates it, as `load` and `passes` 0 do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from unstale.config.checks import (
    ConfigError,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Section,
    Share,
)
from unstale.config.techniques import Entry
from unstale.research.techniques.forecast import (
    Array,
    calibrated,
    embed,
    fit_calibration,
    normalised,
    weighted_rates,
)
from unstale.research.techniques.success import SuccessShare, successes
from unstale.research.techniques.value_model import LearnedForecast, Results
from unstale.techniques.hooks import Draw, DrawContext, Outcome, StatesQuery

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSamplerConfig(Section, SuccessShare):
    """The next task is one whose success rate is forecast near a target (DOTS, V0)."""

    selector: ClassVar[str] = "forecast"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {
        "prior": ("words",),
        "calibrate": ("words",),
        "lr": ("model",),
        "passes": ("model",),
        "load": ("model",),
    }

    alpha: Share = 0.5
    """The target: the success rate that drawn tasks should have."""
    tau: Positive = 0.001
    """Temperature of the draw. With a small value, the task nearest to the target is nearly always
    drawn.
    """
    forecast: Literal["words", "model"] = "words"
    """The forecast of success: a mean of past results weighted by common words, or a small model
    that is trained in the run or loaded.
    """
    encoder: Literal["words", "policy"] = "words"
    """The vector of a text: `words` counts its words; `policy` is the mean of the hidden states at
    its end in the run's initial policy, minus the mean over the pool. With `forecast` = model, a
    weight of each feature is learned.
    """
    reference: Count = 0
    """Number of reference tasks, drawn once at random. Forecasts then use only results at these
    tasks, and every fourth group is on one of them. 0 uses the results of all groups. DOTS uses
    256.
    """
    width: Positive = 0.1
    """If the cosine of two texts is 1 - `width`, the weight of a group is 1 / e of that at cosine
    1. With `model` this is only the initial value.
    """
    prior: NonNegative = 1.0
    """Only with `forecast` = words: number of episodes with the mean success rate of all groups
    that are added to each forecast.
    """
    history: PositiveInt = 256
    """Number of last groups from whose results forecasts are made."""
    calibrate: bool = True
    """Only with `forecast` = words: calibrate the forecast by the known results (Platt scaling)."""
    lr: Positive = 0.03
    """Only with `forecast` = model: the learning rate of the small model that forecasts success."""
    passes: Count = 4
    """Only with `forecast` = model: number of optimizer steps after each batch, on all of the
    last groups. 0, for a model from `load`, never updates it.
    """
    load: str = ""
    """Only with `forecast` = model: the folder of an earlier run with this technique, whose small
    model is used from the start. It needs the same `encoder`, and for `policy` the same model.
    Forecasts are computed from results of this run. Empty: an untrained model.
    """

    def check_combination(self) -> None:
        if not (self.passes or self.load):
            raise ConfigError(
                "predicted_sampler.passes 0 never trains the model: set predicted_sampler.load to "
                "the folder of a run that trained one"
            )


QUERY = StatesQuery(depth=0.5, tokens=32)
"""The hidden states that `encoder` = policy reads: after half of the layers, at a text's last
tokens.
"""
REFERENCE_EVERY = 4
"""Every group whose number is a multiple of this is on a reference task."""


class TextSampler(ABC):
    """A technique that draws tasks by forecasts, made from tasks' texts and results of past
    groups.
    """

    def __init__(self, options: PredictedSamplerConfig) -> None:
        self._options = options
        self._places: dict[str, int] = {}
        self._texts: Sequence[str] = ()
        self._vectors = np.zeros((0, 0))
        self._restored = False
        """True if the vectors were restored from a checkpoint."""
        self._reference: frozenset[str] = frozenset()
        self._groups: deque[tuple[str, float, int]] = deque(maxlen=options.history)
        """The task, number of successes and number of episodes of each of the last groups."""

    def read(self, texts: Mapping[str, str]) -> None:
        self._places = {task: place for place, task in enumerate(texts)}
        self._texts = list(texts.values())
        if not self._restored:
            self._vectors = embed(self._texts)
        names = sorted(texts)
        size = min(self._options.reference, len(names))
        self._reference = frozenset(Random(len(names)).sample(names, size))

    def read_vectors(self, encode: Callable[[Sequence[str], StatesQuery], Tensor]) -> None:
        if self._options.encoder == "policy" and not self._restored:
            found = encode(self._texts, QUERY).double().numpy()
            self._vectors = normalised(found - found.mean(0))

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        if context.number % REFERENCE_EVERY == 0 and (due := self._due(tasks)):
            return Draw(due)
        distance = np.abs(self.forecast(tasks) - self._options.alpha)
        weights = np.exp((distance.min() - distance) / self._options.tau)
        return Draw(context.random.choices(tasks, weights=weights.tolist())[0])

    def _due(self, tasks: Sequence[str]) -> str:
        """Return the reference task in `tasks` with the oldest result. "" if no reference task is
        in `tasks`.
        """
        last = {task: place for place, (task, _, _) in enumerate(self._groups)}
        found = [task for task in tasks if task in self._reference]
        return min(found, key=lambda task: (last.get(task, -1), task), default="")

    def _is_used(self, outcome: Outcome) -> bool:
        is_known = not self._reference or outcome.task in self._reference
        return bool(outcome.rewards) and is_known

    def forecast_of(self, task: str) -> float:
        """Return the forecast success rate of a task. It may be called from several threads."""
        return float(self.forecast([task])[0])

    @abstractmethod
    def forecast(self, tasks: Sequence[str]) -> Array:
        """Return the forecast success rate of each task, `[n]`: 1/2 before the first result."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if self._is_used(outcome):
                found = successes("predicted_sampler", outcome.rewards, self._options.success_at)
                self._groups.append((outcome.task, sum(found), len(found)))

    def state(self) -> Mapping[str, Any]:
        state: dict[str, Any] = {"groups": [list(each) for each in self._groups]}
        if self._options.encoder == "policy":
            import torch

            state["vectors"] = torch.from_numpy(self._vectors)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        if "vectors" in state:  # those of the first policy, which the weights have left since
            self._vectors = np.asarray(state["vectors"].numpy(), dtype=np.float64)
            self._restored = True
        groups = [(task, float(solved), int(size)) for task, solved, size in state["groups"]]
        self._groups = deque(groups, maxlen=self._options.history)


class ModelSampler(TextSampler):
    """A sampler that forecasts success by a small model, which is trained during the run."""

    def __init__(self, options: PredictedSamplerConfig) -> None:
        super().__init__(options)
        self._learned = LearnedForecast(
            width=options.width, lr=options.lr, steps=options.passes, history=options.history
        )
        self._resumed = False

    def read(self, texts: Mapping[str, str]) -> None:
        super().read(texts)
        if self._options.load and not self._resumed:
            self._learned.restore(_learned_by(Path(self._options.load)))

    def forecast(self, tasks: Sequence[str]) -> Array:
        if not self._groups:
            return np.full(len(tasks), 0.5)
        vectors = self._vectors[[self._places[task] for task in tasks]]
        return self._learned.forecast(vectors, self._results(list(self._groups)))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        before = list(self._groups)
        super().observe(outcomes)
        count = sum(map(self._is_used, outcomes))
        past = list(self._groups)
        new = past[max(len(past) - count, 0) :]
        self._learned.learn(self._results(new), self._results(before), self._results(past))

    def _results(self, groups: Sequence[tuple[str, float, int]]) -> Results:
        places = [self._places[task] for task, _, _ in groups]
        solved = np.array([each for _, each, _ in groups], dtype=np.float64)
        sizes = np.array([each for _, _, each in groups], dtype=np.float64)
        return Results(self._vectors[places], solved, sizes)

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), "learned": self._learned.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "learned" not in state:
            raise ConfigError(
                "predicted_sampler.forecast cannot change to model in a resumed run: the "
                "checkpoint has no model"
            )
        super().restore(state)
        self._resumed = True
        self._learned.restore(state["learned"])


def _learned_by(run: Path) -> Mapping[str, Any]:
    """Return the state of the `LearnedForecast` in the newest checkpoint of a run.

    Raises `ConfigError` if it has none.
    """
    from unstale.durability.checkpoint import CHECKPOINTS, Checkpoints
    from unstale.durability.checkpoint_files import CheckpointError, read_state

    names = Checkpoints(run, {}).names
    try:
        folder = run / CHECKPOINTS / names[-1] if names else None
        state = read_state(folder, "technique/predicted_sampler") if folder else {}
    except CheckpointError as error:
        raise ConfigError(f"predicted_sampler.load {run}: {error}") from error
    if "learned" not in state:
        raise ConfigError(
            f"predicted_sampler.load {run} has no checkpoint with a value model: it must be a run "
            "with --techniques predicted_sampler --predicted_sampler.forecast model"
        )
    learned: Mapping[str, Any] = state["learned"]
    return learned


class PredictedSampler(TextSampler):
    """A sampler that forecasts success by a mean of past results, weighted by common words."""

    def __init__(self, options: PredictedSamplerConfig) -> None:
        super().__init__(options)
        self._weights: dict[str, Array] = {}
        """For each task with results: the weight of its groups in the forecasts of all tasks of the
        pool, `[N]`.
        """
        self._rates: Array | None = None
        """The forecasts of all N tasks of the pool, `[N]`. None if they must be computed again."""
        self._lock = Lock()

    def read(self, texts: Mapping[str, str]) -> None:
        super().read(texts)
        self._weights.clear()
        self._rates = None

    def forecast(self, tasks: Sequence[str]) -> Array:
        with self._lock:
            rates = self._rates = self._forecast_all() if self._rates is None else self._rates
        return rates[[self._places[task] for task in tasks]]

    def _forecast_all(self) -> Array:
        options = self._options
        if not self._groups:
            return np.full(len(self._places), 0.5)
        names = [task for task, _, _ in self._groups]
        self._weights = {
            name: self._weights[name] if name in self._weights else self._weights_of(name)
            for name in dict.fromkeys(names)
        }
        weights = np.stack([self._weights[name] for name in names], axis=1)
        solved = np.array([each for _, each, _ in self._groups])
        sizes = np.array([float(each) for _, _, each in self._groups])
        rates = weighted_rates(weights, solved, sizes, prior=options.prior)
        if not options.calibrate:
            return rates
        places = np.array([self._places[name] for name in names])
        others = np.where(places[:, None] == places[None, :], 0.0, weights[places])
        # An episode of a task that is like no other needs a mean, too.
        left_out = weighted_rates(others, solved, sizes, prior=max(options.prior, 1e-9))
        return calibrated(rates, *fit_calibration(left_out, solved, sizes))

    def _weights_of(self, task: str) -> Array:
        cosine = self._vectors @ self._vectors[self._places[task]]
        return np.asarray(np.exp((cosine - 1) / self._options.width))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        super().observe(outcomes)
        self._rates = None

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._rates = None


def make_sampler(options: PredictedSamplerConfig) -> TextSampler:
    """Return the sampler for the option `forecast`."""
    return ModelSampler(options) if options.forecast == "model" else PredictedSampler(options)


def _describe(options: PredictedSamplerConfig) -> str:
    model = ", by a model that is trained on them" if options.forecast == "model" else ""
    if not options.passes:
        model = f", by the model of {options.load}, which is not trained"
    return (
        f"the next task has a forecast success rate near {options.alpha:g}, from its text and the "
        f"last {options.history} groups{model}; the objective is the expectation over these tasks"
    )


_MEASURED = """
400 tasks of 12 topics, whose success rate depends on the topic and on words for the level; groups
of 8, 8 per step, results known 2 steps later, 30 steps, 20 seeds (standard error at most 0.03). In
the last columns, the texts are exchanged among the tasks, so they say nothing. The error is that of
the forecasts for tasks that were never tried. `tests/techniques/test_predicted_sampler.py` repeats
the rows with `tau` 0.05 on a smaller scale.

| | equal rewards | error | exchanged: equal rewards | error |
|---|---|---|---|---|
| drawn uniformly | 0.47 | | 0.48 | |
| defaults | 0.21 | 0.24 | 0.29 | 0.31 |
| without `calibrate` | 0.25 | 0.33 | 0.24 | 0.27 |
| `tau` 0.05 | 0.26 | 0.17 | 0.39 | 0.24 |

Texts that say nothing do no harm: tasks that come again are then chosen by their own results, as
`beta_sampler` does. With the small `tau` of DOTS, the same tasks come often and others never.

With 200 tasks, of which 128 are drawn uniformly, one group of 8 each, the cross entropy of the
forecasts for the others is 0.451 with `model`, 0.554 with the mean success rate and 0.346 with the
true ones (20 seeds). Among forecasts of 0 to 0.2, of 0.2 to 0.4 and so on, their mean is within
0.041 of the mean success rate. If texts are exchanged, it is 0.556 instead of 0.552: the model is
useless, but does no harm. `tests/techniques/test_value_model.py` repeats this.

Of the tasks that `model` draws (`tau` 0.05, 16 steps), 0.19 have groups with equal rewards, against
0.34 with `words` and 0.42 drawn uniformly; if texts are exchanged, 0.29 and 0.35. The error of
forecasts for tasks that were never tried is 0.12 and 0.18 with `words`; if exchanged, 0.23 with
both. No test repeats the figures of `model` in this paragraph.

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="predicted_sampler",
    slot="sampler",
    rows=(2, 29),
    makes=make_sampler,
    options=PredictedSamplerConfig,
    changes=frozenset({"tasks"}),
    describe=_describe,
    use="The pool is so large that most tasks come once or twice, and the difficulty of a task "
    "shows in its words. `model` learns which words show it.",
    measured=_MEASURED,
    exactness="The objective becomes the expectation over the tasks that are drawn, not over the "
    "pool; no weight corrects it. D and S do not change. Words, or hidden states of the first "
    "policy, instead of an encoder that was trained in advance, the place of reference tasks, the "
    "mean success as `prior` and Platt's calibration, which is an alternative in the code of DOTS, "
    "are our own choice. So are the small model, its training in a run, and g. V0 trains TabPFN "
    "2.5 in advance, and lets it read 256 results.",
    requires=frozenset({"pool", "texts"}),
    fixed={
        "forecast": "the checkpoint has the state of that forecast",
        "encoder": "the checkpoint has the results of that encoder",
        "load": "the checkpoint has the model that came from there",
    },
)
