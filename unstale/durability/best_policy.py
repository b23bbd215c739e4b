"""Keep a copy of the policy with the best evaluation, and end a run whose evaluations do not
improve.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unstale.config import EvalConfig
from unstale.durability.run_folder import write_whole

BEST = "best"
"""Name of the folder in a run folder that has the weights of the best policy and the file
`RECORD`.
"""
RECORD = "evaluation.json"


def read_best(run: Path) -> Mapping[str, Any]:
    """Return the record of a run's best policy. It is empty if the run keeps no best policy.

    It has the name and value of the metric that was compared, the step and the version of the
    policy, and the steps of later evaluations that were no better ("worse").
    """
    try:
        return dict(json.loads((run / BEST / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


class BestPolicy:
    """A copy of the policy with the best evaluation so far, in the folder `best` of a run.

    Evaluations are compared by the metric that the option `eval.keep_best` names. A policy that
    only equals the best one does not replace it. A resumed run goes on with the recorded best
    policy if the options of the evaluation are unchanged. It forgets worse evaluations that it will
    repeat.
    """

    def __init__(
        self, run: Path, config: EvalConfig, save: Callable[[Path], None], *, step: int
    ) -> None:
        """Read the record of the best policy in the run folder `run`.

        `config` has the options of evaluations. `save` writes the current policy into a folder, in
        Hugging Face's format. `step` is the step from which the run starts or resumes.
        """
        self._folder = run / BEST
        self._replaced = run / f"{BEST}.replaced"
        self._metric = f"eval/{config.keep_best}"
        self._patience = config.patience
        self._save = save
        self._record: dict[str, Any] = {}
        if self._replaced.is_dir() and not self._folder.is_dir():  # the process was killed between
            self._replaced.rename(self._folder)
        self._measured = {
            "metric": self._metric,
            "temperature": config.temperature,
            "samples": config.samples,
            "tasks": config.tasks,
        }
        record = read_best(run)
        if record.get("measured") == self._measured:  # others cannot be compared with it
            worse = [each for each in record["worse"] if each < step]
            self._record = {**record, "worse": worse}

    @property
    def ends_run(self) -> bool:
        """True if the run should end: its last `eval.patience` evaluations were no better than the
        best.

        Always False if `eval.patience` is 0.
        """
        return 0 < self._patience <= len(self._record.get("worse", ()))

    def add(self, step: int, version: int, metrics: Mapping[str, float]) -> bool:
        """Save the current policy if its evaluation is the best so far. Return True if it is.

        `metrics` are the results of the evaluation after step `step`, whose weights have the number
        `version`. An evaluation whose metric is NaN failed, and is ignored. Raises `OSError` if the
        policy cannot be written. The earlier best policy is then kept.
        """
        value = metrics[self._metric]
        if math.isnan(value):
            return False
        if self._record and value <= self._record["value"]:
            if step > self._record["step"]:
                self._record["worse"] = sorted({*self._record["worse"], step})
                write_whole(self._folder / RECORD, json.dumps(self._record))
            return False
        found = {"measured": self._measured, "value": value, "step": step, "version": version}
        unfinished = self._folder.with_name(f"{BEST}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        self._save(unfinished)
        self._record = {**found, "worse": []}
        write_whole(unfinished / RECORD, json.dumps(self._record))
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self._folder.is_dir():
            self._folder.rename(self._replaced)
        unfinished.rename(self._folder)
        shutil.rmtree(self._replaced, ignore_errors=True)
        return True
