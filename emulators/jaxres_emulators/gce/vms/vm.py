"""One VM as the API knows it."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres_emulators.gce.catalog import Shape, metric_of, region_of
from jaxres_emulators.gce.checks import reservation_of, seconds_of
from jaxres_emulators.gce.operations import stamp
from jaxres_emulators.gce.vms.guest import Guest

RUNNING, TERMINATED, STOPPING = "RUNNING", "TERMINATED", "STOPPING"
PROVISIONING, STAGING = "PROVISIONING", "STAGING"
VM_TOKEN = "emulator-token"
GONE = "GONE"
"""Status of the emulator: deleted."""


DISK_METRICS = {
    "pd-standard": "DISKS_TOTAL_GB",
    "pd-balanced": "SSD_TOTAL_GB",
    "pd-ssd": "SSD_TOTAL_GB",
    "hyperdisk-balanced": "HDB_TOTAL_GB",
}
GLOBAL_METRICS = ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS")


def needs_of(
    wanted: dict[str, Any], shape: Shape, model: str, *, is_reserved: bool
) -> dict[str, float]:
    """Returns the usage of each quota by a VM, global quotas (GLOBAL_METRICS) included."""
    used: dict[str, float] = {"INSTANCES": 1, "CPUS_ALL_REGIONS": shape.cpus}
    if not is_reserved:
        used |= {"GPUS_ALL_REGIONS": shape.gpus, metric_of(shape, model): shape.gpus}
        used |= {shape.cpu_metric: shape.cpus}
        family = shape.name.partition("-")[0]
        if family == "a2":  # The others have quotas by family, which no region lists.
            used["LOCAL_SSD_TOTAL_GB"] = 375 * shape.local_ssds
    for disk in wanted.get("disks", []):
        init = disk.get("initializeParams", {})
        kind = init.get("diskType", "pd-standard").rpartition("/")[2]
        if metric := DISK_METRICS.get(kind):
            used[metric] = used.get(metric, 0.0) + float(init.get("diskSizeGb", 0))
    return {metric: number for metric, number in used.items() if metric and number}


@dataclass
class Vm:
    """Use with the lock held."""

    id: str
    name: str
    zone: str
    project: str
    shape: Shape
    model: str
    wanted: dict[str, Any]
    """The resource as it was asked for."""
    ip: str
    folder: Path
    status: str = PROVISIONING
    labels: dict[str, str] = field(default_factory=dict)
    items: dict[str, str] = field(default_factory=dict)
    life: int = 0
    """Changes with each status change, which cancels scheduled actions."""
    guest: Guest | None = None
    is_blocked: bool = False
    """Whether it uses no capacity because its creation will fail."""
    is_preempted: bool = False
    """In the middle of its creation."""
    created: str = field(default_factory=stamp)
    born: float = field(default_factory=time.monotonic)
    gone: float = 0.0
    asked_to_end: float = 0.0
    gpus: int | None = 0
    """GPUs that its driver shows; None: it has no driver."""
    started: str = ""
    stopped: str = ""
    upcoming: dict[str, Any] = field(default_factory=dict)
    metadata_version: int = 1
    physical_host: str = ""
    """Empty: not shown, as for most machine types without a placement policy."""

    @property
    def path(self) -> str:
        return f"projects/{self.project}/zones/{self.zone}/instances/{self.name}"

    @property
    def scheduling(self) -> dict[str, Any]:
        return self.wanted.get("scheduling", {})

    @property
    def restarts(self) -> bool:
        """Whether Google starts it again after a fault of the host."""
        return self.scheduling.get("automaticRestart", True) is not False

    @property
    def notice_seconds(self) -> float:
        return seconds_of(self.scheduling.get("preemptionNoticeDuration"))

    @property
    def action(self) -> str:
        return self.scheduling.get("instanceTerminationAction", "STOP")

    def turn(self, status: str) -> int:
        """Changes its status; returns its new life."""
        self.status = status
        self.life += 1
        if status == RUNNING:
            self.started = stamp()
        if status == TERMINATED:
            self.stopped = stamp()
        if status == GONE:
            self.gone = time.monotonic()
        return self.life

    def usage(self) -> dict[str, float]:
        """Returns its usage of the region's quotas, which lasts until it is off or deleted."""
        if self.is_blocked or self.status == TERMINATED:
            return {}
        return needs_of(self.wanted, self.shape, self.model, is_reserved=bool(self.reservation))

    @property
    def reservation(self) -> str:
        """Name of the reservation that it consumes; empty: none.

        A VM that is being stopped or deleted still has its place there.
        """
        if self.is_blocked or self.status == TERMINATED:
            return ""
        return reservation_of(self.wanted)

    def metadata_fingerprint(self) -> str:
        return _fingerprint([self.metadata_version, self.items])

    def label_fingerprint(self) -> str:
        return _fingerprint(self.labels)

    def resource(self, root: str) -> dict[str, Any]:
        url = f"{root}/projects/{self.project}"
        here = f"{url}/zones/{self.zone}"
        reported = {
            key: value
            for key, value in self.wanted.items()
            if key not in ("labels", "metadata", "disks", "networkInterfaces", "machineType")
        }
        reported |= {
            "kind": "compute#instance",
            "id": self.id,
            "name": self.name,
            "zone": here,
            "machineType": f"{here}/machineTypes/{self.shape.name}",
            "status": STOPPING if self.status == GONE else self.status,
            "creationTimestamp": self.created,
            "labels": self.labels,
            "labelFingerprint": self.label_fingerprint(),
            "metadata": {
                "kind": "compute#metadata",
                "fingerprint": self.metadata_fingerprint(),
                "items": [{"key": key, "value": value} for key, value in self.items.items()],
            },
            "scheduling": {"provisioningModel": self.model, **self.scheduling},
            "networkInterfaces": self._networks(url),
            "disks": self._disks(here),
            "cpuPlatform": "Unknown CPU Platform",
            "selfLink": f"{here}/instances/{self.name}",
            "resourceStatus": self._resource_status(),
        }
        if self.shape.gpus:
            kind = f"{here}/acceleratorTypes/{self.shape.gpu}"
            one = {"acceleratorType": kind, "acceleratorCount": self.shape.gpus}
            reported["guestAccelerators"] = [one]
        times = {"lastStartTimestamp": self.started, "lastStopTimestamp": self.stopped}
        return reported | {key: value for key, value in times.items() if value}

    def _resource_status(self) -> dict[str, Any]:
        fields = {"upcomingMaintenance": self.upcoming, "physicalHost": self.physical_host}
        return {key: value for key, value in fields.items() if value}

    def _networks(self, url: str) -> list[dict[str, Any]]:
        default = f"{url}/regions/{region_of(self.zone)}/subnetworks/default"
        found = []
        for number, one in enumerate(self.wanted.get("networkInterfaces", [])):
            mine = {"name": f"nic{number}", "subnetwork": default, **one}
            # Only the first has an address here: one loopback address stands for the VM.
            found.append(mine | ({"networkIP": self.ip} if number == 0 else {}))
        return found

    def _disks(self, here: str) -> list[dict[str, Any]]:
        found = []
        for number, one in enumerate(self.wanted.get("disks", [])):
            name = self.name if number == 0 else f"{self.name}-{number}"
            reported = {key: value for key, value in one.items() if key != "initializeParams"}
            found.append({"index": number, "source": f"{here}/disks/{name}", **reported})
        return found

    def values(self, number: str) -> dict[str, str]:
        """Returns the content of its metadata server."""
        short = f"projects/{number}"
        words = {
            "instance/id": self.id,
            "instance/name": self.name,
            "instance/hostname": f"{self.name}.{self.zone}.c.{self.project}.internal",
            "instance/zone": f"{short}/zones/{self.zone}",
            "instance/machine-type": f"{short}/machineTypes/{self.shape.name}",
            "instance/network-interfaces/0/ip": self.ip,
            "instance/scheduling/automatic-restart": str(self.restarts).upper(),
            "instance/scheduling/on-host-maintenance": self.scheduling.get(
                "onHostMaintenance", "MIGRATE"
            ),
            "instance/scheduling/preemptible": str(
                bool(self.scheduling.get("preemptible"))
            ).upper(),
            "project/project-id": self.project,
            "project/numeric-project-id": number,
        }
        for account in self.wanted.get("serviceAccounts", []):
            token = {"access_token": VM_TOKEN, "expires_in": 3599, "token_type": "Bearer"}
            for alias in ("default", account.get("email", "default")):
                at = f"instance/service-accounts/{alias}"
                words[f"{at}/email"] = account.get("email", "default")
                words[f"{at}/scopes"] = ",".join(account.get("scopes", []))
                words[f"{at}/aliases"] = "default"
                words[f"{at}/token"] = json.dumps(token)
        return words | {f"instance/attributes/{key}": value for key, value in self.items.items()}


def _fingerprint(found: object) -> str:
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).digest()
    return base64.b64encode(digest[:8]).decode()
