"""Reads the reports of startup scripts, and keeps the serial port output of failed VMs. No jax.

The reports are read while agents have not reported yet. The serial port output of a VM is lost with
the VM, so it is copied to the bucket before the decision to delete the VM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace

from jaxres.faults import StorageUnavailable
from jaxres.launch.gce.api.compute import ApiUnavailable, Compute
from jaxres.launch.gce.state.boot_report import BootReport, VmBoot, last_lines
from jaxres.launch.gce.state.desired_state import VmSpec
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.storage import gcs_objects

MAX_SERIAL_BYTES = 1 << 20
MAX_SERIAL_READS = 4
"""Most VMs whose serial port output is read in one cycle; the renewal of the lease waits for it."""


@dataclass
class BootObserver:
    """Reads the reports of startup scripts, and keeps the serial port output of failed VMs."""

    paths: LaunchPaths
    compute: Compute
    console: Callable[[str], None]
    _serial: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _printed: dict[str, BootReport] = field(default_factory=dict)

    def observe(
        self, vms: Iterable[VmSpec], reported: Container[str], *, now: float, ready_seconds: float
    ) -> dict[str, VmBoot]:
        """Returns the boot state of each VM that exists and whose agent has not reported.

        Args:
          reported: names of the VMs whose agents have reported.
          now: seconds since the epoch.
          ready_seconds: time until the first report of an agent after which a VM counts as lost.
        """
        waiting = [vm for vm in vms if vm.created and vm.name not in reported]
        if not waiting:
            return {}
        listed = gcs_objects.list_metadata(self.paths.boots)
        boots: dict[str, VmBoot] = {}
        for vm in waiting:
            report = BootReport.of(listed[vm.name][1]) if vm.name in listed else None
            boots[vm.name] = VmBoot(report)
            if report is not None and report.state == "retrying":
                self._print(vm.name, report)
        late = [v for v in waiting if now - v.boots_since > ready_seconds]
        failed = [v for v in waiting if boots[v.name].has_failed]
        unread = [v for v in dict.fromkeys((*failed, *late)) if v.name not in self._serial]
        for vm in unread[:MAX_SERIAL_READS]:
            self._serial[vm.name] = self._keep_serial(vm)
        return {
            name: replace(boot, serial=self._serial.get(name, ())) for name, boot in boots.items()
        }

    def _print(self, name: str, report: BootReport) -> None:
        """Prints once for each error that a startup script tries again."""
        if self._printed.get(name) != report:
            self._printed[name] = report
            self.console(f"{name}: {report.describe()}")

    def _keep_serial(self, vm: VmSpec) -> tuple[str, ...]:
        """Writes a VM's serial port output to the bucket; returns its last lines."""
        from google.api_core.exceptions import NotFound

        output = ""
        with contextlib.suppress(ApiUnavailable, NotFound):
            output = self.compute.output(vm.name, vm.zone)
        with contextlib.suppress(StorageUnavailable):
            if output:
                data = output.encode()[-MAX_SERIAL_BYTES:]
                gcs_objects.write(self.paths.serial(vm.name), data, over=None)
        return last_lines(output)
