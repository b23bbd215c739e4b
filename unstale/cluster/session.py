"""The Ray session of a run: started on this machine, or a connection to a running cluster."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from unstale.config import ConfigError, install
from unstale.weights.child_process import visible_gpus

_LOOPBACK = "127.0.0.1"
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's environment variable that allows a cluster on Windows or macOS. If it is 0, Ray listens on
loopback only, on every system.
"""
_CONNECT_S = 10.0
MAX_CONCURRENT = 100_000
"""Largest number of calls that a Ray actor serves at once. A run limits its requests and episodes
itself, so it never reaches this number.
"""
_at_end: ExitStack | None = None
"""Functions to call at the end of the current run. None outside of a run."""


def require_ray() -> None:
    """Raise `ConfigError`, with the command that installs Ray, if Ray is missing.

    Do not import it.
    """
    if find_spec("ray") is None:
        raise ConfigError(f"the options cluster.* need Ray: {install('cluster')}")


def import_ray() -> ModuleType:
    """Return the module `ray`. Raises `ConfigError`, with the command that installs Ray, if it is
    missing.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # ray reads it when it is imported
    # The first error of several ranks ends the run. Ray would print those of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    import ray

    module: ModuleType = ray
    return module


def connect(
    address: str = "",
    *,
    resources: Mapping[str, float] | None = None,
    gpus: Sequence[str] = (),
    **options: Any,
) -> ModuleType:
    """Connect this process to Ray and return the module `ray`.

    Without an address, a new Ray session is started. It listens on loopback only and ends with this
    process. `resources` are the session's custom resources, and `gpus` the GPUs that its processes
    may use (empty: all). `options` are arguments of `ray.init`.

    An address is `host:port`, or `auto` for the cluster that `RAY_ADDRESS` names or to which this
    machine belongs. If this process is connected already, that connection is used. Raises
    `ConfigError` if Ray is not installed or does not answer at the address, or if this process is
    connected to another address.
    """
    if not address:  # Ray reads these when it is imported and when it starts
        os.environ.setdefault(_LOOPBACK_ONLY, "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # not behind the trainer's threads
    ray = import_ray()
    if ray.is_initialized():
        _require_same(ray, address)
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        _join(ray, address, quiet | options)
    else:
        _start(ray, quiet | {"resources": dict(resources or {})} | options, gpus)
    return ray


def _start(ray: ModuleType, options: Mapping[str, Any], gpus: Sequence[str]) -> None:
    with _environment(visible_gpus(gpus)):
        started = ray.init(address="local", include_dashboard=False, **options)
    address = started.address_info["node_ip_address"]
    if address != _LOOPBACK:
        ray.shutdown()
        raise ConfigError(
            f"Ray listens on {address}, but without cluster.address it must listen on loopback "
            f"only: unset {_LOOPBACK_ONLY}, and do not import ray before the run starts; or call "
            "ray.init() yourself, and the run uses that Ray"
        )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Return a context with these environment variables, for processes that are started in it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _join(ray: ModuleType, address: str, options: Mapping[str, Any]) -> None:
    try:
        if address != "auto":  # ray.init takes minutes to notice that nothing answers
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"cluster.address: no Ray cluster can be used at {address!r}: {first_line(error)}. "
            "Start one with `ray start --head`; RAY_AUTH_TOKEN or ~/.ray/auth_token must hold its "
            "token"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error of Ray. The other lines are the traceback of another
    process.
    """
    return (str(error).splitlines() or [repr(error)])[0]


def summary(error: BaseException) -> str:
    """Return the first and the last line of an error's text. Ray's messages have many lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)


def machine_address() -> str:
    """Return the address of this machine in the Ray cluster to which this process belongs."""
    return str(import_ray().util.get_node_ip_address())


async def result_of(reference: Any) -> Any:
    """Return the result of an actor's call. `reference` is what Ray returned for the call.

    A reference can be awaited, but asyncio sometimes needs a coroutine, which this is.
    """
    return await reference


def _require_same(ray: ModuleType, address: str) -> None:
    """Raise `ConfigError` if this process is connected to Ray at another address."""
    current = ray.get_runtime_context().gcs_address
    if address not in ("", "auto") and not _resolve(address) & _resolve(current):
        raise ConfigError(
            f"cluster.address is {address}, but this process is connected to Ray at {current}: use "
            "that address, or call ray.shutdown() first"
        )


def _resolve(address: str) -> set[tuple[str, int]]:
    """Return the numeric addresses of `host:port`, each with the port. Empty if the host is
    unknown.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {(str(place[0]), int(port)) for *_, place in found}


@contextmanager
def end_after() -> Iterator[None]:
    """Return a context, or a decorator, for one run.

    At its end it calls the functions that were given to `at_end`. Then it disconnects from Ray,
    unless this process was connected before.
    """
    global _at_end
    was_connected = _is_connected()
    before = _at_end
    try:
        with ExitStack() as _at_end:
            yield
    finally:
        _at_end = before
        if _is_connected() and not was_connected:
            disconnect()


def at_end(function: Callable[[], object]) -> None:
    """Call `function` at the end of the current run (`end_after`), even after an error.

    Outside of a run, do nothing.
    """
    if _at_end is not None:
        _at_end.callback(function)


def disconnect() -> None:
    """Leave the Ray session, which ends the actors of this process. If `connect` started it, end
    it.
    """
    if _is_connected():
        import_ray().shutdown()


def _is_connected() -> bool:
    """Return True if this process is connected to Ray. Ray is not imported for it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
