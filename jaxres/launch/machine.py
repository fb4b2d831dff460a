"""What one VM of a job is made of, as the Compute API wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxres.config.gce import (
    FlexStartRung,
    GceSection,
    ReservationRung,
    Rung,
    SpotRung,
    StandardRung,
)
from jaxres.config.shapes import region_of, shape_of

NOTICE = "jaxres-notice-seconds"
"""Metadata of a VM: for how long it goes on once `preempted` has turned true."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MODELS = {
    SpotRung: "SPOT",
    FlexStartRung: "FLEX_START",
    ReservationRung: "RESERVATION_BOUND",
    StandardRung: "STANDARD",
}


@dataclass(frozen=True)
class Machine:
    """The VMs of one creation: alike but for their names."""

    gce: GceSection
    rung: Rung
    zone: str
    labels: Mapping[str, str]
    metadata: Mapping[str, str]
    has_notice: bool = True
    """Whether a notice of preemption is asked for, where the rung has one."""

    def without_notice(self, is_refused: bool) -> Machine:
        """Returns it as the API takes it."""
        return replace(self, has_notice=self.has_notice and not is_refused)

    @property
    def notice_seconds(self) -> int:
        """Seconds of notice that are asked for; 0: none."""
        if isinstance(self.rung, SpotRung) and self.has_notice:
            return self.rung.notice_seconds
        return 0

    def bulk(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns the body of a bulkInsert: all of these or none."""
        body = {
            "count": len(names),
            "min_count": len(names),
            "per_instance_properties": {name: {} for name in names},
            "instance_properties": {"machine_type": self.rung.machine_type, **self.properties()},
        }
        return body | self._template()

    def instance(self, name: str, zone: str) -> dict[str, Any]:
        """Returns the body of an insert that waits in a queue."""
        assert isinstance(self.rung, FlexStartRung), self.rung
        return {
            "name": name,
            "machine_type": f"zones/{zone}/machineTypes/{self.rung.machine_type}",
            "params": {"request_valid_for_duration": {"seconds": 60 * self.rung.wait_minutes}},
            **self.properties(disk_types=f"zones/{zone}/diskTypes/"),
        }

    def _template(self) -> dict[str, str]:
        template = self.gce.template
        return {} if template is None else {"source_instance_template": template}

    def properties(self, *, disk_types: str = "") -> dict[str, Any]:
        """Returns what both ways of asking have; `disk_types` is where a disk's type is found."""
        gce = self.gce
        metadata = dict(self.metadata)
        if self.notice_seconds:
            metadata[NOTICE] = str(self.notice_seconds)
        found: dict[str, Any] = {
            "labels": dict(self.labels),
            "metadata": {"items": [{"key": k, "value": v} for k, v in metadata.items()]},
            "scheduling": self.scheduling(),
        }
        if gce.image is not None:
            found["disks"] = [self._disk(gce.image, disk_types)]
        if gce.subnetworks or gce.template is None:
            found["network_interfaces"] = self._interfaces()
        if gce.service_account is not None or gce.template is None:
            account = gce.service_account or "default"
            found["service_accounts"] = [{"email": account, "scopes": [SCOPE]}]
        if isinstance(self.rung, ReservationRung):
            found["reservation_affinity"] = {
                "consume_reservation_type": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [self.rung.reservation],
            }
        return found

    def scheduling(self) -> dict[str, Any]:
        """Returns how the VM may end; by itself at the latest after launch.gce.max_run_hours."""
        seconds = int(3600 * self.gce.max_run_hours)
        found: dict[str, Any] = {
            "provisioning_model": MODELS[type(self.rung)],
            "automatic_restart": False,
            "instance_termination_action": "DELETE",
            "max_run_duration": {"seconds": seconds},
        }
        is_spot = isinstance(self.rung, SpotRung)
        if is_spot or shape_of(self.rung.machine_type) is not None:
            found["on_host_maintenance"] = "TERMINATE"
        if isinstance(self.rung, SpotRung):
            found["preemptible"] = True
            if self.notice_seconds:
                found["preemption_notice_duration"] = {"seconds": self.notice_seconds}
        return found

    def _disk(self, image: str, disk_types: str) -> dict[str, Any]:
        initial: dict[str, Any] = {"source_image": image, "disk_size_gb": self.gce.disk_gb}
        if self.gce.disk_type is not None:
            initial["disk_type"] = disk_types + self.gce.disk_type
        return {"boot": True, "auto_delete": True, "initialize_params": initial}

    def _interfaces(self) -> list[dict[str, Any]]:
        if not self.gce.subnetworks:
            return [{"network": "global/networks/default"}]
        region = region_of(self.zone)
        names = [name.replace("{region}", region) for name in self.gce.subnetworks]
        full = [n if "/" in n else f"regions/{region}/subnetworks/{n}" for n in names]
        return [{"subnetwork": name} for name in full]
