"""A second network namespace on this machine, as a container has one."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

_COMMANDS = """
ip netns add {name}
ip link add {name}a type veth peer name {name}b
ip link set {name}b netns {name}
ip addr add {outside}/30 dev {name}a
ip link set {name}a up
ip netns exec {name} ip addr add {inside}/30 dev {name}b
ip netns exec {name} ip link set {name}b up
"""


class Network(NamedTuple):
    """A network namespace, and how its programs reach this process."""

    address: str
    """The address of this side, for the endpoint."""
    enter: tuple[str, ...]
    """The words before a command that is to run in the namespace."""


@contextmanager
def another_network() -> Iterator[Network]:
    """Make a network namespace with a link to this one, and nothing else.

    It needs root and the program `ip`. Otherwise the test is skipped.
    """
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip")
    number = os.getpid() % (1 << 14)  # tests run at the same time
    base = f"10.231.{number >> 6}."
    outside, inside = (f"{base}{number % 64 * 4 + host}" for host in (1, 2))
    name = f"u{os.getpid()}"
    try:
        for line in _COMMANDS.format(name=name, outside=outside, inside=inside).strip().split("\n"):
            done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine has no network namespaces: {line}: {done.stderr}")
        yield Network(outside, ("ip", "netns", "exec", name))
    finally:
        for line in (f"ip link del {name}a", f"ip netns del {name}"):
            subprocess.run(line.split(), capture_output=True, check=False)
