"""Destinations for the metrics of each step."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from unstale.config import ConfigError, install


class Sink(Protocol):
    """A destination for the metrics of a step."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step, one value per name."""
        ...

    def close(self) -> None:
        """Flush and close. The caller writes nothing afterwards."""
        ...


def require_tensorboard() -> Any:
    """Return TensorBoard's writer class. Raise ConfigError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"run.tensorboard needs the package tensorboard: {install('tensorboard')}"
        ) from error
    return SummaryWriter


class TensorBoardSink:
    """A sink that writes finite numbers as TensorBoard events."""

    def __init__(self, path: Path) -> None:
        self._writer: Any = require_tensorboard()(str(path))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
