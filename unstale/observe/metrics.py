"""Destinations of a step's metrics besides the run folder."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unstale.config import ConfigError, install


class Sink(Protocol):
    """Where a step's numbers go."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """`metrics` are already reduced: one value per name."""
        ...

    def close(self) -> None:
        """Nothing more will be written."""
        ...


def require_tensorboard() -> Any:
    """Its writer class. ConfigError when the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"run.tensorboard needs the package tensorboard: {install('tensorboard')}"
        ) from error
    return SummaryWriter


class TensorBoardSink:
    """Numbers as TensorBoard events. Histograms and text stay in `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._writer: Any = require_tensorboard()(str(path))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
