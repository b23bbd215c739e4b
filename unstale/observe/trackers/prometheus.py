"""The tracker Prometheus: a page with the newest metrics of a run, at a port of this machine.

A Prometheus server on the same machine fetches it from http://127.0.0.1:PORT/metrics. The page
needs no key and has only numbers, no texts. It is served until the run ends.
"""

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from unstale.config import ConfigError
from unstale.observe.trackers import RunOutcome, Sink, TrackedRun

PACKAGE = "prometheus_client"
HOST = "127.0.0.1"
SILENT_S = 2.0
"""Seconds after which a connection is closed. Clients on the same machine answer much sooner."""
MAX_CONNECTIONS = 16
LOOK_S = 0.5
"""Seconds between two checks of the server whether it should stop."""


def open_sink(package: Any, run: TrackedRun) -> Sink:
    """Serve the metrics at the port of the option `prometheus_port`. Return the tracker.

    Raises `ConfigError` if the port cannot be used.
    """
    gauges = RunGauges(package)
    port = run.config.get("prometheus_port", 0)
    try:
        server = _Server(port, package.make_wsgi_app(gauges.registry))
    except OSError as error:
        raise ConfigError(
            f"trackers: prometheus cannot use port {port} of {HOST}: {error.strerror}. Choose "
            "another --prometheus_port, or 0 for a free one"
        ) from error
    run.note(f"metrics for Prometheus are at http://{HOST}:{server.server_port}/metrics")
    return _Prometheus(run.folder.name, gauges, server)


class RunGauges:
    """The newest metrics of one or more runs, as gauges in a registry of `prometheus_client`.

    The metric `reward/mean` of the run `first` becomes
    `unstale_reward_mean{metric="reward/mean",run="first"}`.
    """

    def __init__(self, package: Any) -> None:
        self.registry = package.CollectorRegistry()
        self._make_gauge = package.Gauge
        self._gauges: dict[str, Any] = {}

    def update(self, run: str, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges of the run `run` to a step's metrics. A missing metric keeps its value."""
        for metric, value in {"step": step, **metrics}.items():
            name = "unstale_" + re.sub(r"\W", "_", metric, flags=re.ASCII)
            if name not in self._gauges:
                about = "Newest value of the metric. Its name is in the label, see docs/metrics.md."
                labels = ("metric", "run")
                self._gauges[name] = self._make_gauge(name, about, labels, registry=self.registry)
            self._gauges[name].labels(metric=metric, run=run).set(value)


class _Prometheus:
    """A tracker that serves the metrics of one run. A thread of its own answers requests."""

    def __init__(self, run: str, gauges: RunGauges, server: "_Server") -> None:
        self._run = run
        self._gauges = gauges
        self._server = server
        self._thread = threading.Thread(target=server.serve, name="prometheus")
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._gauges.update(self._run, step, metrics)

    def text(self, step: int, name: str, text: str) -> None:
        """Do nothing, because Prometheus stores only numbers."""

    def close(self, outcome: RunOutcome) -> None:
        self._server.stop()
        self._thread.join()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because the terminal shows the run."""


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with a thread for each request.

    At most `MAX_CONNECTIONS` are open at once, each for at most `SILENT_S` seconds.
    """

    timeout = LOOK_S

    def __init__(self, port: int, app: Callable[..., Any]) -> None:
        super().__init__((HOST, port), _Handler)
        self.set_app(app)
        self._stopping = threading.Event()
        self._connections: dict[socket.socket, float] = {}
        """Open connections, oldest first, with the time at which each is closed."""
        self._lock = threading.Lock()

    def serve(self) -> None:
        while not self._stopping.is_set():
            self.handle_request()
            self._end(time.monotonic())
        self._end(math.inf)

    def stop(self) -> None:
        """Make `serve` return soon, even if a client is slow."""
        self._stopping.set()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = time.monotonic() + SILENT_S
            oldest = next(iter(self._connections)), len(self._connections)
        if oldest[1] > MAX_CONNECTIONS:
            _shut(oldest[0])
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def _end(self, now: float) -> None:
        """Shut down connections whose time limit has passed at `now`, so that their threads end."""
        with self._lock:
            late = [connection for connection, end in self._connections.items() if end <= now]
        for connection in late:
            _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing, because a client that disconnects is no error of the run."""


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
