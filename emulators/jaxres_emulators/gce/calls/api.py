"""Common parts of all calls: caller, permissions, counts."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxres_emulators.gce.catalog import Catalog
from jaxres_emulators.gce.checks import check_request_id
from jaxres_emulators.gce.errors import (
    GceError,
    api_disabled,
    by_word,
    no_permission,
    no_token,
    not_found,
    unknown_field,
)
from jaxres_emulators.gce.operations import Operation, Operations
from jaxres_emulators.gce.scheduler import Scheduler
from jaxres_emulators.gce.vms.fleet import Fleet
from jaxres_emulators.gce.vms.groups import Groups
from jaxres_emulators.gce.vms.vm import VM_TOKEN

NUMBER = "123456789012"
"""Of the project."""


@dataclass(frozen=True)
class ComputeRequest:
    """One call."""

    call: str
    """Such as instances.insert."""
    words: dict[str, str]
    """Of the path: project, zone, instance, ..."""
    query: dict[str, str]
    body: dict[str, Any]
    token: str = ""
    """Empty: anonymous caller."""

    @property
    def user(self) -> str:
        is_vm = self.token == VM_TOKEN
        return f"{NUMBER}-compute@developer.gserviceaccount.com" if is_vm else "me@example.com"

    @property
    def request_id(self) -> str | None:
        return self.query.get("requestId")


@dataclass(frozen=True)
class Counted:
    """Counts of calls so far."""

    calls: Counter[str]
    permissions: Counter[str]
    """Permissions that the calls needed."""
    peak_per_minute: int
    """The most calls in any 60 seconds (real ones)."""


class Counts:
    """Counts calls, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._permissions: Counter[str] = Counter()
        self._recent: deque[float] = deque()
        self._peak = 0
        self._minute = (0, 0)

    def call(self, name: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._calls[name] += 1
            self._recent.append(now)
            while self._recent[0] < now - 60.0:
                self._recent.popleft()
            self._peak = max(self._peak, len(self._recent))
            minute = int(now // 60)
            self._minute = (minute, self._minute[1] + 1 if self._minute[0] == minute else 1)

    def in_this_minute(self) -> int:
        with self._lock:
            return self._minute[1]

    def permission(self, name: str) -> None:
        with self._lock:
            self._permissions[name] += 1

    def so_far(self) -> Counted:
        with self._lock:
            return Counted(Counter(self._calls), Counter(self._permissions), self._peak)

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()
            self._permissions.clear()
            self._recent.clear()
            self._peak = 0


@dataclass
class Api:
    """The state that calls see and change; with the lock held."""

    scheduler: Scheduler
    operations: Operations
    catalog: Catalog
    fleet: Fleet
    project: str
    groups: Groups = field(default_factory=Groups)
    counts: Counts = field(default_factory=Counts)
    root: str = ""
    """URL up to and with v1."""
    denied: set[str] = field(default_factory=set)
    refused_fields: dict[str, str] = field(default_factory=dict)
    """Messages by name; empty: the field is unknown."""
    is_disabled: bool = False
    unreachable: set[str] = field(default_factory=set)
    """Zones whose calls are not answered; lists of all zones lack their resources."""
    list_lag: float = 0.0
    """How many emulated seconds after its birth a VM appears in lists."""
    gone_lag: float = 0.0
    """How many emulated seconds after its end it is still there."""
    quota_as_http: bool = False
    """Whether want of quota is told at once rather than by the operation."""
    conflict_by_operation: bool = False
    """Whether bulkInsert tells of a name that is taken by the operation rather than at once."""
    needs_token: bool = False
    """Whether a call without a token is refused."""
    most_per_minute: int | None = None
    """Calls, after which the rest of the minute (a real one) is refused."""

    @property
    def url(self) -> str:
        return f"{self.root}/projects/{self.project}"

    def admit(self, request: ComputeRequest) -> None:
        """Refuses requests that no project answers."""
        if self.needs_token and not request.token:
            raise no_token()
        most = self.most_per_minute
        if most is not None and self.counts.in_this_minute() > most:
            raise by_word("rateLimitExceeded")
        if "project" not in request.words:  # Not the Compute API.
            return
        project = request.words["project"]
        is_shared = project in self.catalog.images and request.call.startswith("images.")
        of_host = ("subnetworks.get", "routers.list", "networks.getEffectiveFirewalls")
        is_shared |= request.call in of_host and any(
            host == project for host, _, _ in self.catalog.shared_subnetworks
        )
        if project not in (self.project, NUMBER) and not is_shared:
            raise not_found(f"projects/{project}")
        if self.is_disabled:
            raise api_disabled(NUMBER)
        zone, region = request.words.get("zone"), request.words.get("region")
        if zone is not None and zone not in self.catalog.zones:
            raise not_found(f"projects/{project}/zones/{zone}")
        if region is not None and region not in self.catalog.regions:
            raise not_found(f"projects/{project}/regions/{region}")
        check_request_id(request.request_id)
        self._refuse_fields(request.body, "resource")

    def _refuse_fields(self, found: Any, where: str) -> None:
        if isinstance(found, list):
            for number, one in enumerate(found):
                self._refuse_fields(one, f"{where}[{number}]")
        if isinstance(found, dict):
            for name, one in found.items():
                if message := self.refused_fields.get(name):
                    raise GceError(400, "invalid", message)
                if name in self.refused_fields:
                    raise unknown_field(name, where)
                self._refuse_fields(one, f"{where}.{name}")

    def need(self, permission: str, what: str) -> None:
        """Counts a permission that a call needs, and refuses the call if it is denied."""
        self.counts.permission(permission)
        if permission in self.denied:
            raise no_permission(permission, what)

    def again(self, request: ComputeRequest) -> Operation | None:
        """Returns the operation of the same request, if it came before."""
        return self.operations.of_request(request.request_id)

    def begin(
        self, request: ComputeRequest, type_: str, scope: str, target: str, *, target_id: str = "0"
    ) -> Operation:
        return self.operations.begin(
            type_,
            scope,
            target,
            user=request.user,
            request_id=request.request_id,
            target_id=target_id,
        )

    def reported(self, operation: Operation) -> dict[str, Any]:
        return operation.resource(self.root, self.project)


Function = Callable[[Api, ComputeRequest], dict[str, Any]]
