"""The Ray session of a run: started on this machine, or a connection to a running cluster."""

import logging
import os
import socket
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from unstale.config import ConfigError, install

_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Name of an environment variable of Ray for machines without a cluster. If it is 0, Ray listens on
loopback only.
"""
_CONNECT_S = 10.0


def import_ray() -> ModuleType:
    """Return the module `ray`. Raises `ConfigError` with the command that installs it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # ray reads it when it is imported
    # The first error of several ranks ends the run. Ray would print those of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(f"the options cluster.* need Ray: {install('cluster')}") from None
    module: ModuleType = ray
    return module


def connect(
    address: str = "", *, resources: Mapping[str, float] | None = None, **options: Any
) -> ModuleType:
    """Connect this process to Ray and return the module `ray`. A second call does nothing.

    Without an address, a new Ray session is started. It listens on loopback only and ends with this
    process. `resources` are its custom resources, and `options` are arguments of `ray.init`. An
    address is `host:port`, or `auto` for the cluster that `RAY_ADDRESS` names or to which this
    machine belongs. Raises `ConfigError` if Ray is not installed, or does not answer at the
    address.
    """
    if not address:  # Ray reads these when it is imported and when it starts
        os.environ.setdefault(_LOOPBACK_ONLY, "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # not behind the trainer's threads
    ray = import_ray()
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _join(ray, address, quiet | options)
    else:
        _start(ray, quiet | {"resources": dict(resources or {})} | options)
    return ray


def _start(ray: ModuleType, options: Mapping[str, Any]) -> None:
    started = ray.init(address="local", include_dashboard=False, **options)
    address = started.address_info["node_ip_address"]
    if address != _LOOPBACK:
        ray.shutdown()
        raise ConfigError(
            f"Ray listens on {address}, but without cluster.address it must listen on loopback "
            f"only: unset {_LOOPBACK_ONLY}, and do not import ray before the run starts; or call "
            "ray.init() yourself, and the run uses that Ray"
        )


def _join(ray: ModuleType, address: str, options: Mapping[str, Any]) -> None:
    try:
        if address != "auto":  # ray.init takes minutes to notice that nothing answers
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise ConfigError(
            f"cluster.address: no Ray cluster can be used at {address!r}: {reason}. Start one with "
            "`ray start --head`; RAY_AUTH_TOKEN or ~/.ray/auth_token must hold its token"
        ) from error


def disconnect() -> None:
    """Leave the Ray session. If `connect` started it, end it."""
    ray = import_ray()
    if ray.is_initialized():
        ray.shutdown()
