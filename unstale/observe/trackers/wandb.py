"""The tracker Weights & Biases.

The environment variables of wandb apply, such as WANDB_MODE, WANDB_PROJECT and WANDB_ENTITY.
"""

import html
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unstale.config import ConfigError
from unstale.observe.trackers import RunOutcome, Sink, TrackedRun

PACKAGE = "wandb"

EXIT_CODES = {"finished": 0, "stopped": 255, "failed": 1}
"""The exit code that is passed to wandb for each outcome of a run, by which wandb shows it. wandb
itself uses 255 after Ctrl-C.
"""


def open_sink(package: Any, run: TrackedRun) -> Sink:
    """Begin the run in Weights & Biases, or continue it after a resume.

    Raises `ConfigError` if no user is logged in.
    """
    identifier = run.stored_id("wandb") or uuid.uuid4().hex
    # A new folder, because wandb names offline runs by the second and would overwrite one.
    folder = run.folder / f"wandb-{1 + len(list(run.folder.glob('wandb-*')))}"
    folder.mkdir()
    try:
        shown = package.init(
            project=os.environ.get("WANDB_PROJECT", "unstale"),
            name=run.folder.name,
            id=identifier,
            resume="allow",
            dir=str(folder),
            config=dict(run.config),
            settings=package.Settings(console="off", silent=True),
        )
    except package.errors.Error as error:
        raise ConfigError(
            f"trackers: wandb cannot start: {str(error).rstrip('.')}. Or set WANDB_MODE=offline"
        ) from error
    run.store_id("wandb", identifier)
    # Steps may repeat after a resume, which wandb's own step counter does not allow.
    shown.define_metric("step")
    shown.define_metric("*", step_metric="step")
    return _WandB(package, shown)


@dataclass(frozen=True, slots=True)
class _WandB:
    package: Any
    run: Any

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def text(self, step: int, name: str, text: str) -> None:
        page = self.package.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self.run.log({"step": step, name: page})

    def close(self, outcome: RunOutcome) -> None:
        self.run.summary["outcome"] = f"{outcome.kind}: {outcome.detail}"
        self.run.finish(EXIT_CODES[outcome.kind])
