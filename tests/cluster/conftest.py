"""Settings of the tests with Ray: it listens on loopback only. Without Ray they are not collected.

`make test-cluster` runs them in an environment that has Ray.
"""

import os
import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from unstale.cluster import session

# Ray reads these when it is imported or starts. Without a token of all tests, a Ray of one machine
# would require one of the nodes that are added to the cluster later, but not of its head.
os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(32),
)

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

NODE_MEMORY = 100 << 20
"""Bytes of the object store of each node."""


@pytest.fixture(scope="session")
def head() -> Iterator[Any]:
    """The head of a Ray cluster, which takes seconds to start."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 0, "object_store_memory": NODE_MEMORY, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=options)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(head: Any) -> Iterator[Any]:
    """A Ray cluster of one machine, on which nothing is placed."""
    session.disconnect()
    session.connect(head.address)
    yield head
    session.disconnect()
    for node in list(head.worker_nodes):
        head.remove_node(node)


@pytest.fixture(autouse=True)
def connected(request: pytest.FixtureRequest) -> None:
    """Ray on this machine, if no other is connected: runs in one process then start it once."""
    if "disconnected" not in request.fixturenames:
        session.connect(object_store_memory=NODE_MEMORY)


@pytest.fixture
def disconnected() -> Iterator[None]:
    """No connection to Ray, at the beginning and at the end of a test."""
    session.disconnect()
    yield
    session.disconnect()
