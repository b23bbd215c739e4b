"""Options of a run on several processes or machines that Ray starts."""

import re
from dataclasses import dataclass

from unstale.config.checks import ConfigError, Count, Positive, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    """Processes of the run that Ray starts, here or on other machines. See docs/scale-out.md."""

    engine_hosts: Count = 0
    """Machines that sample, each with the engines of `engine.*`; 0 samples on this one."""
    trainers: Count = 0
    """Trainer ranks that divide the model, each with one GPU if there are any; 0 trains in the
    process of the run (docs/trainer-ranks.md).
    """
    context: PositiveInt = 1
    """Trainer ranks that divide the tokens of each pass, for long episodes; 1 divides none
    (docs/long-context.md).
    """
    address: str = ""
    """Ray cluster as `host:port` or `auto`; empty starts a Ray of this machine alone."""
    patience_s: Positive = 600.0
    """Seconds that the run waits for machines: for any engine host, for the trainer ranks in the
    cluster at `address`, or for environments. It then stops. A run that had begun can be resumed.
    For environments it stops only at its start; later, the episodes that waited for them fail.
    """
    restarts: Count = 10
    """Times that a run with dead trainer ranks continues from its last checkpoint on new ranks."""

    def check_combination(self) -> None:
        known = re.fullmatch(r"auto|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.address)
        if self.address and not known:
            raise ConfigError(f"cluster.address must be host:port or auto, got {self.address!r}")
        if self.context > 1 and (not self.trainers or self.trainers % self.context):
            raise ConfigError(
                f"cluster.context must divide cluster.trainers ({self.trainers}), "
                f"got {self.context}"
            )

    def applies(self, option: str) -> bool:
        # `address` and `patience_s` are also read with task.isolate = ray
        return option not in ("context", "restarts") or self.trainers > 0
