"""Flex-start VMs of several hosts: all at once, by one resize request of a managed instance group.

Each creation has an instance template, a managed instance group in the zone, and one resize request
in it. All three have the name of its first VM, which is never used again, so a launcher that
continues a job finds what a dead one has created. The group repairs no VM: jaxres does.

Every call advances by one step and never waits: the launcher's lease must be renewed.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from jaxres.clock import Clock
from jaxres.config.schema.gce import GceSection
from jaxres.launch.gce.state.desired_state import InstanceGroup, PendingCreate
from jaxres.launch.gce.state.observed_state import CreateFailed
from jaxres.launch.gce.vm.instance_spec import Machine

PREFIX = "resize-request:"
"""Prefix of a name that stands for the operation of a creation."""
STEP_SECONDS = 900.0
"""Longest time until a creation has its resize request."""
SETTLE_SECONDS = 20.0
"""How long a request whose answer was lost may still create something."""
DELETE_RETRY_SECONDS = 10.0
"""Time until the deletion of something that still exists is requested again."""
MAX_BASE_NAME = 58
T = TypeVar("T")
Part = Literal["template", "group", "request"]
CLIENTS: dict[Part, str] = {
    "template": "InstanceTemplatesClient",
    "group": "InstanceGroupManagersClient",
    "request": "InstanceGroupManagerResizeRequestsClient",
}
RESOURCES: dict[Part, str] = {
    "template": "instance_template_resource",
    "group": "instance_group_manager_resource",
    "request": "instance_group_manager_resize_request_resource",
}


def bodies(machine: Machine, names: Sequence[str]) -> dict[Part, dict[str, Any]]:
    """Returns the bodies of the three resources of a creation, in their order."""
    name, text = names[0], description(machine.labels.get("jaxres-run", ""))
    seconds = int(3600 * machine.gce.max_run_hours)
    properties = {"machine_type": machine.option.machine_type, **machine.properties()}
    return {
        "template": {"name": name, "description": text, "properties": properties},
        "group": {
            "name": name,
            "description": text,
            "base_instance_name": name[:MAX_BASE_NAME].rstrip("-"),
            "instance_template": f"global/instanceTemplates/{name}",
            "target_size": 0,
            "instance_lifecycle_policy": {"default_action_on_failure": "DO_NOTHING"},
        },
        "request": {
            "name": name,
            "instances": [{"name": one} for one in names],
            "requested_run_duration": {"seconds": seconds},
        },
    }


def description(label: str) -> str:
    """Returns the description of a run's templates and groups, which have no labels."""
    return f"jaxres-run={label}"


class ComputeCalls(Protocol):
    """The methods used of `gce_api.Compute`, which uses this module."""

    project: str
    clock: Clock

    def template(self) -> Any | None: ...
    def prepare(self, client: str, method: str, key: dict[str, Any]) -> Callable[[], Any]: ...
    def call(self, request: Callable[[], T]) -> T: ...
    def safe_call(self, call: Callable[[], T]) -> T: ...
    def list_call(self, ask: Callable[[], T]) -> T: ...
    def operation_result(self, name: str, zone: str | None) -> CreateFailed | bool: ...
    def list_zones(
        self, kind: str, word: str, key: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, str]]: ...


@dataclass
class ResizeRequests:
    """The resize requests of one project."""

    compute: ComputeCalls
    gce: GceSection
    create_failed: Callable[[Any], CreateFailed]
    """Returns the meaning of an error response."""
    classify: Callable[[Iterable[str], str, int | None], CreateFailed]
    """Returns the meaning of error codes, a message and a status."""
    gone: set[str] = field(default_factory=set[str])
    """Groups that were found deleted by `delete`."""
    _operations: dict[tuple[str, Part], str] = field(default_factory=dict[tuple[str, Part], str])
    """Operation that creates a part, by name of the group and part."""
    _began: dict[str, float] = field(default_factory=dict[str, float])
    """When this launcher first requested a creation, by name of the group."""
    _sent_at: dict[str, float] = field(default_factory=dict[str, float])
    """When it has sent a request that is not answered, by name of the group."""
    _deleted_at: dict[tuple[str, Part], float] = field(
        default_factory=dict[tuple[str, Part], float]
    )

    @property
    def may_exist(self) -> bool:
        """Whether VMs of the job may be in groups."""
        options = self.gce.capacity_options
        return self.gce.most_hosts > 1 and any(option.waits_in_queue for option in options)

    def request(
        self, creation: PendingCreate, zone: str, machine: Machine
    ) -> str | CreateFailed | None:
        """Advances a creation by one step; returns the name that stands for its operation.

        None: its resize request does not exist yet; the call must be repeated.

        Raises:
          ApiUnavailable: the call may be repeated.
        """
        if (found := self.find(creation, zone)) is not None:
            return found
        group, now = creation.names[0], self.compute.clock.monotonic()
        if now - self._began.setdefault(group, now) > STEP_SECONDS:
            text = f"the instance group {group} has no resize request after {STEP_SECONDS:.0f} s"
            return CreateFailed("passing", text)
        part: Part = "request"
        if self._get("group", group, zone) is None:
            part = "template" if self._get("template", group, zone) is None else "group"
        if (operation := self._operations.get((group, part))) is not None:
            answer = self.compute.operation_result(operation, None if part == "template" else zone)
            return answer if isinstance(answer, CreateFailed) else None
        return self._insert(part, creation, zone, machine)

    def _insert(
        self, part: Part, creation: PendingCreate, zone: str, machine: Machine
    ) -> CreateFailed | None:
        """Requests the creation of a part; returns why it is refused."""
        from google.api_core.exceptions import Conflict, GoogleAPICallError

        group, body = creation.names[0], bodies(machine, creation.names)[part]
        key: dict[str, Any] = {"project": self.compute.project}
        if part != "template":
            key["zone"] = zone
        if part == "request":
            key["instance_group_manager"] = group
        key[RESOURCES[part]] = self._with_template(body) if part == "template" else body
        key["request_id"] = str(uuid.uuid5(uuid.UUID(creation.request_id), part))
        self._sent_at[group] = self.compute.clock.monotonic()
        try:
            call = self.compute.prepare(CLIENTS[part], "insert_unary", key)
            self._operations[group, part] = self.compute.call(call).name
        except GoogleAPICallError as error:
            is_own = isinstance(error, Conflict) and self._get(part, group, zone) is not None
            del self._sent_at[group]
            return None if is_own else self.create_failed(error)
        del self._sent_at[group]
        return None

    def _with_template(self, body: dict[str, Any]) -> Any:
        """Returns the body of a template with the properties of launch.gce.template as well."""
        from google.cloud import compute_v1

        made, base = compute_v1.InstanceTemplate(body), self.compute.template()
        if base is not None:
            found = compute_v1.InstanceProperties(base.properties)
            for name in body["properties"]:
                setattr(found, name, getattr(made.properties, name))
            made.properties = found
        return made

    def find(self, creation: PendingCreate, zone: str) -> str | None:
        """Returns the name that stands for a creation's operation; None: no resize request."""
        group = creation.names[0]
        if len(creation.names) == 1 or not self.may_exist:
            return None
        return None if self._get("request", group, zone) is None else PREFIX + group

    @staticmethod
    def group_in(operation: str) -> str | None:
        """Returns the name of the group of a creation; None: it is an operation of another kind."""
        return operation.removeprefix(PREFIX) if operation.startswith(PREFIX) else None

    def result(self, group: str, zone: str) -> CreateFailed | bool:
        """Returns the result of a creation: True: done, False: it waits, or why it has failed."""
        found = self._get("request", group, zone)
        if found is None:
            return CreateFailed("passing", f"the resize request {group} was deleted")
        if found.state == "CANCELLED":
            return CreateFailed("stockout", f"the resize request {group} was cancelled")
        if found.state != "FAILED":
            return found.state == "SUCCEEDED"
        codes = [error.code for error in found.status.error.errors]
        messages = [error.message for error in found.status.error.errors if error.message]
        return self.classify(codes, "; ".join(messages) or "the resize request failed", None)

    def delete_vm(self, name: str, group: InstanceGroup) -> None:
        """Requests the deletion of one VM of a group; it is no error if there is none."""
        body = {
            "instances": [f"zones/{group.zone}/instances/{name}"],
            "skip_instances_on_validation_error": True,
        }
        key = self._key("group", group.name, group.zone)
        key["instance_group_managers_delete_instances_request_resource"] = body
        self._unless_absent(CLIENTS["group"], "delete_instances_unary", key)

    def delete(self, group: InstanceGroup) -> None:
        """Deletes a group with its VMs, its resize request and its template, step by step.

        It must be repeated until `gone` has the group.
        """
        name, zone, now = group.name, group.zone, self.compute.clock.monotonic()
        if self._get("group", name, zone) is not None:
            if self._is_due(name, "group"):
                self._cancel(name, zone)
                key = self._key("group", name, zone)
                self._unless_absent(CLIENTS["group"], "delete_unary", key)
        elif self._get("template", name, zone) is not None:
            if self._is_due(name, "template"):
                key = self._key("template", name, zone)
                self._unless_absent(CLIENTS["template"], "delete_unary", key)
        elif now - self._sent_at.get(name, -SETTLE_SECONDS) >= SETTLE_SECONDS:
            operations = {p: op for (g, p), op in self._operations.items() if g == name}
            zones = {part: None if part == "template" else zone for part in operations}
            results = [self.compute.operation_result(op, zones[p]) for p, op in operations.items()]
            if all(result is not False for result in results):
                self.gone.add(name)

    def _cancel(self, group: str, zone: str) -> None:
        """Cancels the resize request if it waits; it may get its VMs meanwhile.

        If that is refused, it is deleted with its group.
        """
        from google.api_core.exceptions import GoogleAPICallError

        found = self._get("request", group, zone)
        if found is None or found.state != "ACCEPTED":
            return
        key = self._key("request", group, zone)
        with contextlib.suppress(GoogleAPICallError):
            self.compute.call(self.compute.prepare(CLIENTS["request"], "cancel_unary", key))

    def _is_due(self, name: str, part: Part) -> bool:
        """Returns whether a deletion is to be requested now, and notes that it is."""
        now = self.compute.clock.monotonic()
        before = self._deleted_at.get((name, part))
        if before is not None and now - before < DELETE_RETRY_SECONDS:
            return False
        self._deleted_at[name, part] = now
        return True

    def leftovers(self, label: str) -> tuple[list[InstanceGroup], dict[str, str]]:
        """Returns the groups of a run in all reachable zones, and its templates without a group.

        And why zones are missing, by zone; templates are left out then: groups there may use them.
        """
        if not self.may_exist:
            return [], {}
        key = {
            "project": self.compute.project,
            "filter": f'description = "{description(label)}"',
        }
        templates = self.compute.prepare(CLIENTS["template"], "list", key)
        names = self.compute.list_call(lambda: [one.name for one in templates()])
        groups, missing = self.compute.list_zones(CLIENTS["group"], "instance_group_managers", key)
        found = {} if missing else {name: InstanceGroup(name, "", ()) for name in names}
        for one in groups:
            found[one.name] = InstanceGroup(one.name, one.zone.rpartition("/")[2], ())
        return [*found.values()], missing

    def _key(self, part: Part, name: str, zone: str) -> dict[str, Any]:
        if part == "template":
            return {"project": self.compute.project, "instance_template": name}
        key = {"project": self.compute.project, "zone": zone, "instance_group_manager": name}
        return key | ({"resize_request": name} if part == "request" else {})

    def _get(self, part: Part, name: str, zone: str) -> Any | None:
        """Returns a part of a creation; None: there is none. Unlike a list, this never lags."""
        if part != "template" and not zone:
            return None
        return self._unless_absent(CLIENTS[part], "get", self._key(part, name, zone))

    def _unless_absent(self, client: str, method: str, key: dict[str, Any]) -> Any | None:
        """Returns the result of a call that may always be repeated; None: there is none."""
        from google.api_core.exceptions import NotFound

        try:
            return self.compute.safe_call(self.compute.prepare(client, method, key))
        except NotFound:
            return None
