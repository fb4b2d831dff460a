"""Serves the metrics of a supervisor to Prometheus, over HTTP, with prometheus-client.

The server is a thread of the supervisor, so it answers while workers die and between attempts. It
reads what the supervisor has in memory: a scrape touches no storage and no worker. A client that
takes longer than CLIENT_SECONDS is dropped, and keeps no other one away. The launcher of VMs serves
its own metrics by the same server.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxres.clock import Clock
from jaxres.cluster.limited_server import LimitedServer
from jaxres.config import RunConfig
from jaxres.faults import ConfigError, RunError
from jaxres.runlog import launch_events
from jaxres.runlog.event_log import read_json_lines_since
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.storage.path import is_remote
from jaxres.storage.threads import spawn_thread
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.health.health_watcher import HealthWatcher
from jaxres.supervisor.run_metrics import LABELS, METRICS, RunMetrics, Sample

PACKAGE = "prometheus_client"
CLIENT_SECONDS = 5.0
MAX_CLIENTS = 16
CLOSE_SECONDS = 1.0
POLL_SECONDS = 0.1
"""Interval at which the server sees that it is to end."""
TAIL_BYTES = 65536
"""Size of the end of a metrics file in which its newest step is."""


class MetricsServer:
    """Serves samples at an address from its start until closed; a taken address is a warning."""

    def __init__(
        self, address: str, samples: Callable[[], list[Sample]], *, run_dir: RunDir, host: str
    ) -> None:
        """Serves nothing yet.

        Args:
          address: HOST:PORT.
          samples: returns the present values, from any thread.
          run_dir: its name is a label of every metric.
          host: the other label.
        """
        name = run_dir.root.absolute().name.encode(errors="replace").decode()
        self._address = address  # The name of a folder may be no UTF-8.
        self._collector = _Collector(samples, (name, host))
        self._is_refused = False
        self.http: LimitedServer | None = None
        """The HTTP server; None: it does not run."""

    def ensure_started(self) -> None:
        """Starts the server unless it runs; prints once that it can't."""
        if self.http is not None:
            return
        try:
            server = _serve(self._address, self._collector)
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host.
            if not self._is_refused:
                reason = error.strerror if isinstance(error, OSError) else error
                print_message(
                    f"telemetry.prometheus: no metrics are served at {self._address}: {reason}; "
                    "training continues, and it is tried again"
                )
            self._is_refused = True
            return
        self.http = server
        spawn_thread("prometheus", lambda: server.serve_forever(POLL_SECONDS), daemon=True)

    def close(self) -> None:
        """Ends the server if it runs."""
        if self.http is not None:
            closing = spawn_thread("prometheus-end", self.http.shutdown, daemon=True)
            closing.join(CLOSE_SECONDS)
            self.http.server_close()


def require_package() -> None:
    """Raises ConfigError if prometheus-client is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "telemetry.prometheus: the package prometheus-client is not installed. Run `pip "
            "install -e '.[prometheus]'` in the checkout of jaxres, or remove the section."
        )


class PrometheusExporter:
    """Serves /metrics from the first attempt on until closed; a context manager.

    Without `telemetry.prometheus` it does nothing. A taken address is a warning, and is tried again
    with each attempt.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir, *, clock: Clock) -> None:
        """Checks that the package is installed; serves nothing yet.

        Raises:
          ConfigError: it is not installed.
        """
        self._section = config.telemetry.prometheus
        self._run_dir = run_dir
        self._server: MetricsServer | None = None
        self._has_history = False
        self.metrics: RunMetrics | None = None
        """The exported metrics; None: the exporter is off."""
        if self._section is None:
            return
        require_package()
        self.metrics = RunMetrics(config, clock=clock)

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def on_history(self, records: Sequence[Record]) -> None:
        """Takes over counts of earlier attempts; `records` are the run log before the next.

        The events of a launcher of VMs are read by a thread: the attempt does not wait for them.
        """
        if (metrics := self.metrics) is None:
            return
        reached = 0 if self._has_history else _reached(self._run_dir, records)
        metrics.on_history(records, reached=reached)
        self._has_history = True
        if not is_remote(self._run_dir.root):
            metrics.on_restarts(records)
            return

        def read_ends() -> None:
            events = launch_events.read(self._run_dir, warn=print_message)
            metrics.on_restarts(records, events)

        spawn_thread("prometheus-restarts", read_ends, daemon=True)

    def ensure_started(self, *, host: int, health: HealthWatcher | None) -> None:
        """Starts the server unless it runs.

        Args:
          host: the job's first host on this machine.
          health: the source of the machine's readings; None: there is none.
        """
        if self._section is None or self.metrics is None:
            return
        if self._server is None:
            self.metrics.health = health
            self._server = MetricsServer(
                self._section.address,
                self.metrics.samples,
                run_dir=self._run_dir,
                host=str(host),
            )
        self._server.ensure_started()


class _Collector:
    """Collects the present values for each scrape, in the form of prometheus-client."""

    def __init__(self, samples: Callable[[], list[Sample]], labels: tuple[str, ...]) -> None:
        self._samples, self._labels = samples, labels

    def collect(self) -> Iterator[Any]:
        """Yields each metric that has a value, with all of its samples."""
        core = importlib.import_module(f"{PACKAGE}.core")
        families = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        by_metric: dict[str, list[Sample]] = {}
        for sample in self._samples():
            by_metric.setdefault(sample.metric, []).append(sample)
        for name, samples in by_metric.items():
            metric = METRICS[name]
            family = families[metric.kind](name, metric.help, labels=[*LABELS, *metric.labels])
            for sample in samples:
                family.add_metric([*self._labels, *sample.labels], float(sample.value))
            yield family


def _serve(address: str, collector: _Collector) -> LimitedServer:
    """Returns a bound server of the metrics; raises OSError or UnicodeError."""
    client = importlib.import_module(PACKAGE)
    registry = client.CollectorRegistry()
    registry.register(collector)
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][4]
    return LimitedServer(
        (str(found[0]), int(port)),
        client.MetricsHandler.factory(registry),
        max_connections=MAX_CLIENTS,
        seconds=CLIENT_SECONDS,
    )


def _reached(run_dir: RunDir, records: Sequence[Record]) -> int:
    """Returns the newest step of the newest attempt in the records; 0: unknown.

    Only on a disk: a metrics file in a bucket would have to be read as a whole.
    """
    attempt = max((record.attempt for record in records), default=0)
    path = run_dir.metrics(attempt)
    if attempt == 0 or is_remote(path):
        return 0
    with contextlib.suppress(OSError, RunError):
        size = os.stat(path).st_size
        rows, _ = read_json_lines_since(path, max(0, size - TAIL_BYTES))
        return max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
    return 0
