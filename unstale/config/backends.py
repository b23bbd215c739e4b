"""The names of the engine backends, read from their folder so that torch is not imported."""

from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

_SERVERS = Path(__file__).parents[1] / "engines" / "servers"
BACKENDS = ("embedded", *sorted(module.name for module in iter_modules([str(_SERVERS)])))
"""The embedded engine, and one backend per file in `engines/servers/`."""

if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[BACKENDS]
