"""The tracker MLflow. The variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.

Without a tracking URI, runs are stored in the database `mlflow.db` next to the run folder.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unstale.observe.run_rows import flatten
from unstale.observe.trackers import AcceptedNames, RunOutcome, Sink, TrackedRun

PACKAGE = "mlflow"
MAX_VALUE = 500
"""Largest number of characters of a parameter's value that every server accepts."""
MAX_PARAMETERS = 100
"""Largest number of parameters that a server accepts in one request."""
MAX_METRICS = 500
"""Largest number of metrics in one request. A server accepts 1000, but its database's time grows
with the square of the number.
"""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status for each outcome of a run."""


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
    return _MLflow(package, client, identifier, AcceptedNames("mlflow", run.note))


@dataclass(frozen=True, slots=True)
class _MLflow:
    package: Any
    client: Any
    identifier: str
    names: AcceptedNames

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        values = [
            self.package.entities.Metric(name, value, now, step)
            for name, value in self.names.rename(metrics).items()
        ]
        for start in range(0, len(values), MAX_METRICS):
            self.client.log_batch(self.identifier, metrics=values[start : start + MAX_METRICS])

    def text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.identifier, text, f"{name}/step{step:06d}.txt")

    def close(self, outcome: RunOutcome) -> None:
        self.client.set_terminated(self.identifier, STATUS[outcome.kind])  # first: it matters most
        detail = f"{outcome.kind}: {outcome.detail}"[:MAX_VALUE]
        self.client.set_tag(self.identifier, "outcome", detail)
