"""Metrics of a job on VMs, which its launcher serves: they exist while no supervisor runs."""

from __future__ import annotations

from jaxres.config import RunConfig
from jaxres.launch.gce.decide import spares
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import ObservedState
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres.supervisor.companions import prometheus_exporter
from jaxres.supervisor.companions.prometheus_exporter import MetricsServer
from jaxres.supervisor.run_metrics import Sample

HOST = "launcher"
"""The label `host` of these metrics."""


def check(config: RunConfig) -> str | None:
    """Returns the address of the launcher's metrics; None: it serves none.

    Raises:
      ConfigError: there is one, and the package is not installed.
    """
    section = config.telemetry.prometheus
    if section is None or section.launcher_address is None:
        return None
    prometheus_exporter.require_package()
    return section.launcher_address


class JobMetrics:
    """Serves the metrics of one launcher from its first look at the job until closed."""

    def __init__(self, config: RunConfig, run: GcsPath) -> None:
        """Serves nothing yet; raises as `check` does."""
        self._config, self._samples = config, list[Sample]()
        self._server: MetricsServer | None = None
        if (address := check(config)) is not None:
            self._server = MetricsServer(
                address, lambda: self._samples, run_dir=RunDir(run), host=HOST
            )

    def update(self, desired: DesiredState, observed: ObservedState) -> None:
        """Takes over the state that was decided from what was observed."""
        if self._server is not None:
            self._samples = samples(desired, observed, self._config)
            self._server.ensure_started()

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()


def samples(desired: DesiredState, observed: ObservedState, config: RunConfig) -> list[Sample]:
    """Returns the values of the metrics. Pure."""
    gce = config.launch.gce
    assert gce is not None, config
    return [
        Sample("jaxres_job_vms", sum(vm.created for vm in desired.vms)),
        Sample("jaxres_job_spares", len(spares.find_ready(desired, observed, gce))),
        Sample("jaxres_job_target_spares", gce.spares),
        Sample("jaxres_job_capacity_wait_seconds", observed.lacking_seconds),
    ]
