"""Serves the metrics of a supervisor to Prometheus, over HTTP, with prometheus-client.

The server is a thread of the supervisor, so it answers while workers die and between attempts. It
reads what the supervisor has in memory: a scrape touches no storage and no worker. A client that
takes longer than CLIENT_SECONDS is dropped, and keeps no other one away.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from jaxres.clock import Clock
from jaxres.cluster.limited_server import LimitedServer
from jaxres.config import RunConfig
from jaxres.faults import ConfigError, RunError
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
        self._server: LimitedServer | None = None
        self._is_refused = self._has_history = False
        self.metrics: RunMetrics | None = None
        """The exported metrics; None: the exporter is off."""
        if self._section is None:
            return
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                "telemetry.prometheus: the package prometheus-client is not installed. Run `pip "
                "install -e '.[prometheus]'` in the checkout of jaxres, or remove the section."
            )
        self.metrics = RunMetrics(config, clock=clock)

    def __enter__(self) -> PrometheusExporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            closing = spawn_thread("prometheus-end", self._server.shutdown, daemon=True)
            closing.join(CLOSE_SECONDS)
            self._server.server_close()

    def on_history(self, records: Sequence[Record]) -> None:
        """Takes over counts of earlier attempts; `records` are the run log before the next."""
        if self.metrics is not None:
            reached = 0 if self._has_history else _reached(self._run_dir, records)
            self.metrics.on_history(records, reached=reached)
            self._has_history = True

    def ensure_started(self, *, host: int, health: HealthWatcher | None) -> None:
        """Starts the server unless it runs.

        Args:
          host: the job's first host on this machine.
          health: the source of the machine's readings; None: there is none.
        """
        if self._section is None or self._server is not None:
            return
        assert self.metrics is not None
        self.metrics.health = health
        address = self._section.address
        name = self._run_dir.root.absolute().name.encode(errors="replace").decode()
        labels = (name, str(host))  # The name of a folder may be no UTF-8.
        try:
            server = _serve(address, _Collector(self.metrics, labels))
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host.
            if not self._is_refused:
                reason = error.strerror if isinstance(error, OSError) else error
                print_message(
                    f"telemetry.prometheus: no metrics are served at {address}: {reason}; "
                    "training continues, the next attempt tries again"
                )
            self._is_refused = True
            return
        self._server = server
        spawn_thread("prometheus", lambda: server.serve_forever(POLL_SECONDS), daemon=True)


class _Collector:
    """Collects the present values for each scrape, in the form of prometheus-client."""

    def __init__(self, metrics: RunMetrics, labels: tuple[str, ...]) -> None:
        self._metrics, self._labels = metrics, labels

    def collect(self) -> Iterator[Any]:
        """Yields each metric that has a value, with all of its samples."""
        core = importlib.import_module(f"{PACKAGE}.core")
        families = {"gauge": core.GaugeMetricFamily, "counter": core.CounterMetricFamily}
        by_metric: dict[str, list[Sample]] = {}
        for sample in self._metrics.samples():
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
