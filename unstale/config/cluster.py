"""Options of a run on several machines."""

import re
from dataclasses import dataclass

from unstale.config.checks import ConfigError, Count, Positive, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    """Processes of the run on other machines, which Ray starts. See docs/scale-out.md."""

    engine_hosts: Count = 0
    """Machines that sample, each with the engines of `engine.*`; 0 samples on this one."""
    address: str = ""
    """Ray cluster as `host:port` or `auto`; empty starts a Ray of this machine alone."""
    patience_s: Positive = 600.0
    """Seconds without any engine host after which the run stops."""

    def check_combination(self) -> None:
        known = re.fullmatch(r"auto|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.address)
        if self.address and not known:
            raise ConfigError(f"cluster.address must be host:port or auto, got {self.address!r}")
        if self.address and not self.engine_hosts:
            raise ConfigError("cluster.address is read only with cluster.engine_hosts > 0")

    def applies(self, option: str) -> bool:
        return option == "engine_hosts" or self.engine_hosts > 0
