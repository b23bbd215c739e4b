"""Ray starts on loopback only, and each mistake has one clear message."""

import socket
import sys

import pytest

from unstale.cluster import session
from unstale.config import ConfigError


def test_without_ray_the_message_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"need Ray: .*pip install .*cluster"):
        session.connect()


def _address_of_this_machine() -> str:
    """Return the address from which this machine would reach others. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


def test_without_an_address_ray_listens_on_loopback_only(disconnected: None) -> None:
    ray = session.connect(resources={"engine_host": 2}, object_store_memory=100 << 20)
    assert session.connect() is ray, "a second call uses the same Ray"
    assert ray.cluster_resources()["engine_host"] == 2
    (node,) = ray.nodes()
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    assert node["NodeManagerAddress"] == host == "127.0.0.1"
    outside = _address_of_this_machine()
    for number in (int(port), node["NodeManagerPort"], node["ObjectManagerPort"]):
        socket.create_connection((host, number), 5).close()
        with pytest.raises(OSError):
            socket.create_connection((outside, number), 5)


def test_an_address_without_a_cluster_is_refused(disconnected: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cluster.address.*{address}.*ray start --head"):
            session.connect(address)


def test_a_connection_is_used_again_but_not_for_another_address() -> None:
    ray = session.connect()
    address = ray.get_runtime_context().gcs_address
    port = address.rpartition(":")[2]
    for same in (address, f"localhost:{port}", "auto"):
        assert session.connect(same) is ray
    for other in ("127.0.0.1:1", f"nowhere.invalid:{port}"):
        with pytest.raises(ConfigError, match=f"address is {other}, but .* at {address}: use that"):
            session.connect(other)
