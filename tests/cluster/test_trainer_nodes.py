"""Test a run whose machines die: those of the trainer ranks, and that of the engines.

Each rank takes one core of a node, and the engine host has another node.
"""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cluster.conftest import NODE_MEMORY
from tests.support.ranked_runs import config, require_complete
from tests.support.waits import LIMIT_S
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.cluster.hosted_engine import RESOURCE
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.config import ClusterConfig
from unstale.durability.run_folder import EVENTS, RunFolder, RunLog

Node = Any


def add_node(cluster: Any) -> Node:
    """Add a machine that has room for one trainer rank."""
    return cluster.add_node(num_cpus=1, object_store_memory=NODE_MEMORY)


def add_engine_node(cluster: Any) -> Node:
    """Add a machine that may run one engine host."""
    return cluster.add_node(num_cpus=0, resources={RESOURCE: 1}, object_store_memory=NODE_MEMORY)


class KillAfter:
    """Kill a node after the optimizer steps of these numbers, which count over all lives."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cluster: Any, victims: dict[int, Node]
    ) -> None:
        self._step = RankedTrainer.step
        self._cluster = cluster
        self._victims = victims
        self._steps = 0
        monkeypatch.setattr(RankedTrainer, "step", lambda trainer: self._step_and_kill(trainer))

    def _step_and_kill(self, trainer: RankedTrainer) -> None:
        self._step(trainer)
        self._steps += 1
        if self._steps == max(self._victims):
            trainer.ranks.patience_s = 3.0  # no machine comes any more
        if self._steps in self._victims:
            self._cluster.remove_node(self._victims[self._steps], allow_graceful=False)


def test_a_run_waits_for_nodes_in_place_of_those_that_died(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the engines dies first, and then one of a rank.

    The run waits until the new nodes are there. Without one it ends, and can be resumed. Nothing is
    lost and nothing is trained on twice.
    """
    nodes = [add_node(cluster) for _ in range(2)]
    engine_node = add_engine_node(cluster)
    added: dict[str, Node] = {}
    adds = {"waiting": add_node, "engine_lost": add_engine_node}
    log_event = RunLog.event

    def add_node_when_one_is_missing(log: RunLog, kind: str, **fields: Any) -> None:
        log_event(log, kind, **fields)
        if kind in adds and kind not in added:
            added[kind] = adds[kind](cluster)

    monkeypatch.setattr(RunLog, "event", add_node_when_one_is_missing)
    KillAfter(monkeypatch, cluster, {1: engine_node, 3: nodes[1], 5: nodes[0]})
    made = config(tmp_path, "run")
    cluster_options = ClusterConfig(
        trainers=2, engine_hosts=1, address=cluster.address, patience_s=LIMIT_S
    )
    made = replace(made, deterministic=False, cluster=cluster_options)
    with pytest.raises(RunFailed, match=r"after 3 s \(cluster.patience_s\), 2 trainer ranks need "):
        session.train(made, console=Console(file=StringIO()))
    events = list(RunFolder(tmp_path / "run").rows(EVENTS))
    found = [row["kind"] for row in events]
    assert found.count("engine_lost") == found.count("engine_back") == 1
    kinds = [kind for kind in found if kind in ("trainer_died", "waiting")]
    assert kinds.count("trainer_died") == 2
    first, second = [i for i, kind in enumerate(kinds) if kind == "trainer_died"]
    assert second > first + 1 and len(kinds) > second + 1, "each death was followed by a wait"
    waits = [row["reason"] for row in events if row["kind"] == "waiting"]
    assert all("2 trainer ranks need one core each" in text for text in waits)

    last = add_node(cluster)
    session.resume(tmp_path / "run", made, console=Console(file=StringIO()))
    rows = RunFolder(tmp_path / "run").metrics()
    assert [row["old_logps/exact_share"] for row in rows if row["step"]] == [1.0] * 4
    require_complete(tmp_path / "run", steps=4)
    for node in (*added.values(), last):
        cluster.remove_node(node)
