"""Operations: request, progress and outcome."""

from __future__ import annotations

import itertools
import re
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from jaxres_emulators.gce.errors import not_found
from jaxres_emulators.gce.scheduler import Scheduler

TEXTS = {
    "ZONE_RESOURCE_POOL_EXHAUSTED": (
        "The zone '{zone}' does not have enough resources available to fulfill the request.  "
        "Try a different zone, or try again later."
    ),
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": (
        "The zone '{zone}' does not have enough resources available to fulfill the request, "
        "'(resource type:compute)'."
    ),
    "VM_MIN_COUNT_NOT_REACHED": "Requested minimum count of {count} VMs could not be created.",
    "UNSUPPORTED_OPERATION": "Instance failed to start due to preemption.",
    "QUOTA_EXCEEDED": "Quota '{metric}' exceeded.  Limit: {limit} {where}.",
    "RESOURCE_ALREADY_EXISTS": "The resource '{target}' already exists",
    "CONDITION_NOT_MET": (
        "Specified reservation {reservation} does not have available resources for the request."
    ),
}
HTTP = {
    "QUOTA_EXCEEDED": (403, "FORBIDDEN"),
    "RESOURCE_ALREADY_EXISTS": (409, "CONFLICT"),
    "INVALID_USAGE": (400, "BAD REQUEST"),
    "CONDITION_NOT_MET": (412, "PRECONDITION FAILED"),  # The status is not known.
}
UNAVAILABLE = (503, "SERVICE UNAVAILABLE")
SYSTEM = "system"


def stamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Failure:
    """The error of an operation that has not succeeded."""

    codes: tuple[str, ...]
    has_http: bool = True
    """Whether it has the fields that the library's futures look at."""
    words: dict[str, Any] = field(default_factory=dict)

    def reported(self) -> dict[str, Any]:
        errors = []
        for code in self.codes:
            text = TEXTS.get(code, "requested by the test")
            errors.append({"code": code, "message": text.format_map(_Blanks(self.words))})
        status, word = next((HTTP[code] for code in self.codes if code in HTTP), UNAVAILABLE)
        http = {"httpErrorStatusCode": status, "httpErrorMessage": word} if self.has_http else {}
        return {"error": {"errors": errors}} | http


class _Blanks(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


@dataclass
class OperationFaultRule:
    """Fault of the operations that it matches."""

    kind: str
    """"error" (instead of the effect), "hang" (the effect is there, the operation never ends), or
    "slow" (it ends late)."""
    type: str = ".*"
    """Regular expression of the operation's type, such as insert."""
    target: str = ".*"
    """Regular expression of the target's name."""
    times: int | None = 1
    """Number of times; None: always."""
    codes: tuple[str, ...] = ("INTERNAL_ERROR",)
    has_http: bool = True
    seconds: float = 60.0
    """How late, in the emulated world."""

    def takes(self, type_: str, target: str) -> bool:
        matches = re.fullmatch(self.type, type_) and re.fullmatch(self.target, target)
        if self.times == 0 or not matches:
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class Operation:
    """One operation."""

    id: str
    name: str
    type: str
    scope: str
    """zones/Z, regions/R or global."""
    target: str
    """The target's path from projects on."""
    user: str
    request_id: str | None
    group: str | None
    rule: OperationFaultRule | None
    target_id: str = "0"
    status: str = "PENDING"
    inserted: str = field(default_factory=stamp)
    started: str = ""
    ended: str = ""
    failure: Failure | None = None
    warnings: list[dict[str, Any]] = field(default_factory=list)
    bulk: dict[str, Any] = field(default_factory=dict)

    def resource(self, root: str, project: str) -> dict[str, Any]:
        url = f"{root}/projects/{project}"
        reported: dict[str, Any] = {
            "kind": "compute#operation",
            "id": self.id,
            "name": self.name,
            "operationType": self.type,
            "targetLink": f"{root}/{self.target}",
            "targetId": self.target_id,
            "status": self.status,
            "user": self.user,
            "progress": {"PENDING": 0, "RUNNING": 50, "DONE": 100}[self.status],
            "insertTime": self.inserted,
            "selfLink": f"{url}/{self.scope}/operations/{self.name}",
        }
        word, _, name = self.scope.partition("/")
        if name:
            reported[word.removesuffix("s")] = f"{url}/{self.scope}"
        for key, value in (
            ("startTime", self.started),
            ("endTime", self.ended),
            ("clientOperationId", self.request_id),
            ("operationGroupId", self.group),
            ("warnings", self.warnings),
        ):
            if value:
                reported[key] = value
        if self.bulk:
            reported["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": self.bulk}
        return reported | (self.failure.reported() if self.failure else {})


class Operations:
    """All operations so far, oldest first; use with the lock held."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.all: dict[str, Operation] = {}
        self.rules: list[OperationFaultRule] = []
        self._number = itertools.count(1)
        self._by_request: dict[str, Operation] = {}

    def of_request(self, request_id: str | None) -> Operation | None:
        return self._by_request.get(request_id or "")

    def get(self, scope: str, name: str, project: str) -> Operation:
        found = self.all.get(name)
        if found is None or found.scope != scope:
            raise not_found(f"projects/{project}/{scope}/operations/{name}")
        return found

    def begin(
        self,
        type_: str,
        scope: str,
        target: str,
        *,
        user: str = SYSTEM,
        request_id: str | None = None,
        group: str | None = None,
        target_id: str = "0",
    ) -> Operation:
        rule = None
        if user != SYSTEM:
            name = target.rpartition("/")[2]
            rule = next((rule for rule in self.rules if rule.takes(type_, name)), None)
        number = next(self._number)
        word = "systemevent" if user == SYSTEM else "operation"
        name = f"{word}-{int(time.time() * 1000)}-{uuid.uuid4().hex[:12]}-{number:08x}"
        made = Operation(
            str(10**15 + number), name, type_, scope, target, user, request_id, group, rule
        )
        made.target_id = target_id
        self.all[name] = made
        if request_id:
            self._by_request[request_id] = made
        self._scheduler.after(0.1, self._start, made)
        return made

    def _start(self, one: Operation) -> None:
        if one.status == "PENDING":
            one.status, one.started = "RUNNING", stamp()

    def end(self, one: Operation, failure: Failure | None = None) -> None:
        """Ends it; a rule may want it later, or never."""
        if one.rule is not None and one.rule.kind == "hang":
            return
        if one.rule is not None and one.rule.kind == "slow":
            self._scheduler.after(one.rule.seconds, self._end, one, failure)
            return
        self._end(one, failure)

    def _end(self, one: Operation, failure: Failure | None) -> None:
        if one.status != "DONE":
            one.started = one.started or stamp()
            one.status, one.ended, one.failure = "DONE", stamp(), failure
