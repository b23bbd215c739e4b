"""The tracker MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.

Without a tracking URI, runs are stored in the database `mlflow.db` next to the run folder.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from unstale.observe.report.gather import flatten
from unstale.observe.trackers import RunOutcome, Sink, TrackedRun

PACKAGE = "mlflow"
MAX_VALUE = 500
"""Number of characters of a parameter that every server accepts."""
MAX_PARAMETERS = 100
"""Number of parameters that a server accepts in one request."""

MAX_NAME = 200
"""Number of characters of a metric's name. MLflow accepts 250."""
_REFUSED = re.compile(r"[^/\w.\- ]", re.ASCII)
"""Characters that a server may refuse in the name of a metric."""

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's name of each outcome of a run."""


def accepted_name(name: str) -> str:
    """Return a metric's name in a form that MLflow accepts, distinct for distinct names.

    MLflow refuses a whole batch because of one name. A name that must change gets a suffix that
    depends on the name alone, so a resumed run continues its chart.

    >>> accepted_name("reward/mean")
    'reward/mean'
    >>> accepted_name("reward/acc@1")
    'reward/acc_1_dd69cc'
    """
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip(". ")]
    accepted = "/".join(parts)[:MAX_NAME]
    if name and accepted == name:
        return name
    suffix = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()
    return f"{accepted or 'metric'}_{suffix}"


def open_sink(package: Any, run: TrackedRun) -> Sink:
    """Begin the run in MLflow, or continue it after a resume."""
    folder = run.folder.parent.resolve()
    server = os.environ.get("MLFLOW_TRACKING_URI")
    client = package.MlflowClient(server or f"sqlite:///{folder / 'mlflow.db'}")
    identifier = run.stored_id("mlflow")
    if not identifier:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unstale")
        experiment = client.get_experiment_by_name(name)
        if experiment:
            number = experiment.experiment_id
        else:  # a server chooses where it stores files
            files = None if server else (folder / "mlflow-files").as_uri()
            number = client.create_experiment(name, artifact_location=files)
        identifier = client.create_run(number, run_name=run.folder.name).info.run_id
        parameters = [
            package.entities.Param(name, str(value)[:MAX_VALUE])
            for name, value in flatten(run.config).items()
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            client.log_batch(identifier, params=parameters[start : start + MAX_PARAMETERS])
        run.store_id("mlflow", identifier)
    client.update_run(identifier, "RUNNING")
    return _MLflow(package, client, identifier, run.note)


@dataclass(frozen=True, slots=True)
class _MLflow:
    package: Any
    client: Any
    identifier: str
    note: Callable[[str], None]
    names: dict[str, str] = field(default_factory=dict)
    """The accepted name of each metric."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        for name in metrics.keys() - self.names.keys():
            self.names[name] = accepted_name(name)
            if self.names[name] != name:
                self.note(f"warning: mlflow refuses the name {name!r}, sent as {self.names[name]}")
        values = [
            self.package.entities.Metric(self.names[name], value, now, step)
            for name, value in metrics.items()
        ]
        self.client.log_batch(self.identifier, metrics=values)

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.identifier, text, f"{name}/step{step:06d}.txt")

    def close(self, outcome: RunOutcome) -> None:
        self.client.set_terminated(self.identifier, STATUS[outcome.kind])  # first: it matters most
        detail = f"{outcome.kind}: {outcome.detail}"[:MAX_VALUE]
        self.client.set_tag(self.identifier, "outcome", detail)
