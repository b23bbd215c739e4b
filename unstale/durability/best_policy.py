"""Keep a copy of the policy with the best evaluation, and end a run whose evaluations do not
improve.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unstale.config import RunConfig
from unstale.durability.run_folder import write_whole

BEST = "best"
"""Name of the folder in a run folder that has the weights of the best policy and the file
`RECORD`.
"""
RECORD = "evaluation.json"


def read_best(run: Path) -> Mapping[str, Any]:
    """Return the record of a run's best policy. It is empty if the run keeps no best policy.

    It has the name and value of the metric that was compared, the step and the version of the
    policy, and the values of all evaluations of the run, as pairs (step, value).
    """
    try:
        return dict(json.loads((run / BEST / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


class BestPolicy:
    """A copy of the policy with the best evaluation so far, in the folder `best` of a run.

    Evaluations are compared by the metric that the option `eval.keep_best` names. A policy that
    only equals the best one does not replace it. A resumed run forgets the evaluations that it will
    repeat, and those with other options. It keeps the recorded best policy until a better one is
    found. A deterministic run finds those again that the kill lost, so it replaces the best policy
    whenever the undisturbed run does.
    """

    def __init__(
        self, run: Path, config: RunConfig, save: Callable[[Path], None], *, step: int
    ) -> None:
        """Read the record of the best policy in the run folder `run`.

        `config` has the options of the run. `save` writes the current policy into a folder, in
        Hugging Face's format. `step` is the step from which the run starts or resumes.
        """
        options, engine = config.eval, config.engine
        self._folder = run / BEST
        self._replaced = run / f"{BEST}.replaced"
        self._metric = f"eval/{options.keep_best}"
        self._patience = options.patience
        self._save = save
        self._record: Mapping[str, Any] = {}
        self._values: dict[int, float] = {}
        """The value of the metric by step, without evaluations that will be repeated."""
        if self._replaced.is_dir() and not self._folder.is_dir():  # the process was killed between
            self._replaced.rename(self._folder)
        self._measured = {
            "metric": self._metric,
            "temperature": engine.temperature if options.temperature < 0 else options.temperature,
            "top_p": engine.top_p,
            "top_k": engine.top_k,
            "min_p": engine.min_p,
            **options.limits,
            "samples": options.samples,
            "tasks": options.tasks,
        }
        record = read_best(run)
        if record.get("measured") == self._measured:  # others cannot be compared with it
            self._record = record
            self._values = _before(step, record)
            if not (self.ends_run or config.evaluates_after(step)):
                step += 1  # a longer run does not repeat the evaluation after its former last step
                self._values = _before(step, record)
        repeats = config.deterministic and self._record.get("step", -1) >= step
        self._least = -math.inf if repeats else self._record.get("value", -math.inf)
        """Value of the recorded best policy, also if its evaluation will be repeated. -inf if the
        policy will be found again.
        """

    @property
    def ends_run(self) -> bool:
        """True if the run should end: its last `eval.patience` evaluations were no better than the
        best.

        Always False if `eval.patience` is 0.
        """
        values = list(self._values.values())
        worse = len(values) - 1 - values.index(max(values)) if values else 0
        return 0 < self._patience <= worse

    def add(self, step: int, version: int, metrics: Mapping[str, float]) -> bool:
        """Save the current policy if its evaluation is the best so far. Return True if it is.

        `metrics` are the results of the evaluation after step `step`, whose weights have the number
        `version`. An evaluation whose metric is NaN failed, and is ignored. Raises `OSError` if the
        policy cannot be written. The earlier best policy is then kept.
        """
        value = metrics[self._metric]
        if math.isnan(value):
            return False
        is_best = value > max([self._least, *self._values.values()])
        values = {**self._values, step: value}
        evaluations = [list(each) for each in values.items()]
        if not is_best:
            self._values = values
            self._record = {**self._record, "evaluations": evaluations}
            write_whole(self._folder / RECORD, json.dumps(self._record))
            return False
        found = {"measured": self._measured, "value": value, "step": step, "version": version}
        unfinished = self._folder.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._save(unfinished)
        self._record = {**found, "evaluations": evaluations}
        self._values = values
        write_whole(unfinished / RECORD, json.dumps(self._record))
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self._folder.is_dir():
            self._folder.rename(self._replaced)
        unfinished.rename(self._folder)
        shutil.rmtree(self._replaced, ignore_errors=True)
        return True


def _before(step: int, record: Mapping[str, Any]) -> dict[int, float]:
    """Return the value of each recorded evaluation before step `step`, by its step."""
    return {at: value for at, value in record.get("evaluations", ()) if at < step}
