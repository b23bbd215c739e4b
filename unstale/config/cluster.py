"""Options of a run on several processes or machines that Ray starts."""

import re
from dataclasses import dataclass

from unstale.config.checks import ConfigError, Count, Positive, PositiveInt, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    """The processes of a run that Ray starts, on this or other machines. See docs/scale-out.md."""

    engine_hosts: Count = 0
    """Number of machines that sample, each with the engines of `engine.*`; 0 samples on this
    machine.
    """
    trainers: Count = 0
    """Number of trainer ranks that share the model, each with one GPU if there are any; 0 trains in
    the process of the run (docs/trainer-ranks.md).
    """
    context: PositiveInt = 1
    """Number of trainer ranks over which the tokens of each pass are split (context parallelism),
    for long episodes; 1 does not split (docs/long-context.md).
    """
    replicas: PositiveInt = 1
    """Number of copies of the model among the trainer ranks. Each copy is divided among equally
    many ranks. With one copy for each machine, weights are gathered only within a machine, and each
    GPU needs more memory (docs/trainer-ranks.md).
    """
    expert_parallel: bool = False
    """For an MoE policy: keep each expert whole on one of the trainer ranks of a copy, and send
    tokens to it, instead of gathering all experts of a layer in each pass (docs/trainer-ranks.md).
    """
    address: str = ""
    """Address of a Ray cluster: `host:port` or `auto`; empty starts Ray on this machine only."""
    patience_s: Positive = 600.0
    """Seconds that the run waits for missing machines before it stops: for any engine host, for the
    trainer ranks in the cluster at `address`, or for environments. A run that had begun can be
    resumed. If machines for environments are missing later, only the episodes that waited for them
    fail.
    """
    restarts: Count = 10
    """Number of times that a run whose trainer ranks died continues on new ranks from its last
    checkpoint.
    """

    def check_combination(self) -> None:
        known = re.fullmatch(r"auto|[^\s:/]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.address)
        if self.address and not known:
            raise ConfigError(f"cluster.address must be host:port or auto, got {self.address!r}")
        if self.context > 1 and (not self.trainers or self.trainers % self.context):
            raise ConfigError(
                f"cluster.context must divide cluster.trainers ({self.trainers}), "
                f"got {self.context}"
            )

        if self.replicas > 1 and (
            self.trainers % self.replicas or self.trainers // self.replicas < 2
        ):
            raise ConfigError(
                f"cluster.replicas must divide cluster.trainers ({self.trainers}) into copies of "
                f"at least 2 ranks, got {self.replicas}"
            )

        if self.expert_parallel and self.trainers // self.replicas < 2:
            raise ConfigError(
                "cluster.expert_parallel needs at least 2 trainer ranks for each copy of a model, "
                f"got cluster.trainers = {self.trainers} and cluster.replicas = {self.replicas}"
            )

    def applies(self, option: str) -> bool:
        # `address` and `patience_s` are also read with task.isolate = ray
        of_ranks = ("context", "replicas", "expert_parallel", "restarts")
        return option not in of_ranks or self.trainers > 0
