"""State of managed instance groups and their resize requests; use with the lock held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxres_emulators.gce.operations import Failure, stamp
from jaxres_emulators.gce.vms.vm import Vm


@dataclass
class ResizeRequest:
    """One resize request; its VMs are created all at once, or none is."""

    name: str
    names: list[str]
    seconds: float
    id: str
    state: str = "CREATING"
    created: str = field(default_factory=stamp)
    failure: Failure | None = None
    last_attempt: Failure | None = None
    vms: list[Vm] = field(default_factory=list)
    settled: int = 0

    def resource(self, where: str) -> dict[str, Any]:
        status: dict[str, Any] = {}
        if self.failure is not None:
            status["error"] = self.failure.reported()["error"]
        if self.last_attempt is not None and self.state == "ACCEPTED":
            status["lastAttempt"] = {"error": self.last_attempt.reported()["error"]}
        return {
            "kind": "compute#instanceGroupManagerResizeRequest",
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "creationTimestamp": self.created,
            "instances": [{"name": name} for name in self.names],
            "requestedRunDuration": {"seconds": str(int(self.seconds)), "nanos": 0},
            "status": status,
            "selfLink": f"{where}/resizeRequests/{self.name}",
        }


@dataclass
class Group:
    """A managed instance group."""

    name: str
    zone: str
    template: str
    wanted: dict[str, Any]
    """Properties of its VMs."""
    repairs: bool
    body: dict[str, Any]
    id: str
    created: str = field(default_factory=stamp)
    members: set[str] = field(default_factory=set)
    """Names of its VMs, lost ones and ones not yet created included."""
    requests: dict[str, ResizeRequest] = field(default_factory=dict)
    is_deleting: bool = False

    def resource(self, url: str) -> dict[str, Any]:
        here = f"{url}/zones/{self.zone}"
        return self.body | {
            "kind": "compute#instanceGroupManager",
            "id": self.id,
            "name": self.name,
            "zone": here,
            "creationTimestamp": self.created,
            "targetSize": len(self.members),
            "instanceGroup": f"{here}/instanceGroups/{self.name}",
            "selfLink": f"{here}/instanceGroupManagers/{self.name}",
        }


@dataclass
class Groups:
    """All groups, and the behaviour that tests give their resize requests."""

    all: dict[tuple[str, str], Group] = field(default_factory=dict[tuple[str, str], Group])
    """By zone and name."""
    holds_requests: bool = False
    """Whether no request gets its VMs."""
    lookups: int = 0
    """How often requests have looked for capacity."""
    failures: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Codes with which the next requests fail."""
