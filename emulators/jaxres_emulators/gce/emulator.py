"""The emulator's interface for tests and manual use."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres_emulators.gce.calls.api import NUMBER, Api, Counted
from jaxres_emulators.gce.calls.groups import end_request
from jaxres_emulators.gce.catalog import Catalog, Reservation
from jaxres_emulators.gce.operations import OperationFaultRule, Operations
from jaxres_emulators.gce.scheduler import Scheduler
from jaxres_emulators.gce.server import ComputeServer
from jaxres_emulators.gce.vms import keeper
from jaxres_emulators.gce.vms.addresses import reserve
from jaxres_emulators.gce.vms.fleet import Fleet
from jaxres_emulators.gce.vms.guest import MARK, output_of
from jaxres_emulators.gce.vms.stock import Shortage
from jaxres_emulators.gce.vms.vm import Vm
from jaxres_emulators.gcs.faults import FaultRule

ACTIONS = (
    "preempt",
    "lose_next_in_creation",
    "host_error",
    "die_silently",
    "maintain",
    "announce_maintenance",
    "call_off_maintenance",
    "stockout",
    "restock",
    "quota",
    "quota_of_all_regions",
    "reserve",
    "reserve_later",
    "hold_resize_requests",
    "cancel_resize_requests",
    "fail_resize_requests",
    "hold_deletions",
    "fail",
    "fail_operation",
    "clear_faults",
    "deny",
    "allow",
    "disable_api",
    "refuse_field",
    "lag_lists",
    "lose_zone",
    "limit_rate",
    "add_image",
    "add_subnetwork",
    "remove_subnetwork",
    "end_private_access",
    "add_nat",
    "set_firewall",
    "show_gpus",
    "add_template",
    "add_policy",
    "fail_metadata",
    "remove_machine",
    "state",
)


class GceEmulator:
    """Serves until closed; a context manager. All seconds except `timeout` are emulated time.

    Args:
      speed: so many emulated seconds pass in a real one.
      is_simulated: VMs have no processes; for thousands of them.
      env: what the VMs' processes have in their environment besides the emulator's own.
      root: where VMs have their folders; it is left then. None: a temporary folder.
    """

    def __init__(
        self,
        *,
        project: str = "emulated",
        port: int = 0,
        speed: float = 1.0,
        is_simulated: bool = False,
        env: Mapping[str, str] | None = None,
        root: Path | None = None,
    ) -> None:
        self.project, self.mark = project, uuid.uuid4().hex
        self._root_is_ours = root is None
        self.root = root or Path(tempfile.mkdtemp(prefix="gce-"))
        self._net, self._reserved = reserve()
        self.scheduler = Scheduler(speed=speed)
        self.catalog = Catalog()
        self.operations = Operations(self.scheduler)
        self.fleet = Fleet(
            scheduler=self.scheduler,
            operations=self.operations,
            catalog=self.catalog,
            project=project,
            number=NUMBER,
            root=self.root,
            mark=self.mark,
            net=self._net,
            env=dict(env or {}),
            is_simulated=is_simulated,
        )
        self.delays = self.fleet.delays
        """Settings that tests may change."""
        self.api = Api(self.scheduler, self.operations, self.catalog, self.fleet, project)
        self.server = ComputeServer(self.api, self, port=port)
        self.url = self.server.url
        self._open = contextlib.ExitStack()

    def __enter__(self) -> GceEmulator:
        self._open.enter_context(self._keeper())
        self._open.callback(self._end_fleet)
        self._open.enter_context(self.scheduler)
        self._open.enter_context(self.server)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._reserved.close()
        if self._root_is_ours:
            shutil.rmtree(self.root, ignore_errors=True)

    @contextlib.contextmanager
    def _keeper(self) -> Iterator[None]:
        """Starts a process that kills the VMs' processes if this one is killed."""
        ours = str(self.root) if self._root_is_ours else "/nonexistent"
        words = [sys.executable, "-I", "-S", keeper.__file__, f"{MARK}={self.mark}", ours]
        with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
            try:
                yield
            finally:
                assert process.stdin is not None
                process.stdin.write(b".")
                process.stdin.close()
                process.wait(timeout=30)

    def _end_fleet(self) -> None:
        with self.scheduler.changed:
            self.fleet.close()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of a launcher that uses this service."""
        return {"JAXRES_GCE_ENDPOINT": self.url, "GOOGLE_CLOUD_PROJECT": self.project}

    @property
    def bugs(self) -> list[str]:
        """Tracebacks of the emulator's own; tests assert that there are none."""
        return [*self.server.bugs, *self.scheduler.bugs]

    # Queries.

    def vms(self, pattern: str = ".*") -> dict[str, str]:
        """Returns the status of all VMs there are, by name."""
        with self.scheduler.changed:
            found: dict[str, str] = {}
            for vm in self.fleet.vms.values():  # A name may be taken in two zones.
                found[f"{vm.zone}/{vm.name}" if vm.name in found else vm.name] = vm.status
        return {name: found[name] for name in sorted(found) if re.fullmatch(pattern, name)}

    def vm(self, name: str) -> Vm:
        """Returns the VM of this name; KeyError: there is none."""
        with self.scheduler.changed:
            for vm in self.fleet.vms.values():
                if vm.name == name:
                    return vm
        raise KeyError(f"{name}: no such VM; there are {sorted(self.vms())}")

    def vms_so_far(self) -> list[Vm]:
        """Returns all VMs ever created, oldest first."""
        with self.scheduler.changed:
            return list(self.fleet.past.values())

    def pids(self, name: str | None = None) -> list[int]:
        """Returns the processes of a VM; None: of all VMs, deleted ones included."""
        if name is None:
            return keeper.marked(f"{MARK}={self.mark}")
        with self.scheduler.changed:
            guest = self.vm(name).guest
            return guest.pids() if guest is not None else []

    def output(self, name: str) -> str:
        """Returns the output of the newest VM of this name, also after its deletion."""
        return output_of([vm for vm in self.vms_so_far() if vm.name == name][-1].folder)

    def events(self, pattern: str = "compute\\..*") -> list[tuple[str, str]]:
        """Returns type and target of the operations so far whose type matches."""
        with self.scheduler.changed:
            found = [
                (one.type, one.target.rpartition("/")[2]) for one in self.operations.all.values()
            ]
        return [one for one in found if re.fullmatch(pattern, one[0])]

    def calls(self) -> Counted:
        """Returns the numbers of calls so far, by call and by permission."""
        return self.api.counts.so_far()

    def wait_for(self, what: Callable[[], object], *, timeout: float = 600.0) -> None:
        """Waits for a condition; `timeout` is in real seconds."""
        until = time.monotonic() + timeout
        while not what():
            if time.monotonic() > until:
                raise TimeoutError(f"not within {timeout:g} s; VMs: {self.vms()}")
            with self.scheduler.changed:
                self.scheduler.changed.wait(0.05)

    # Faults.

    def preempt(self, name: str, *, notice: bool = True, seconds: float | None = None) -> None:
        """Preempts a VM.

        Args:
          name: which.
          notice: the metadata changes, and the VM runs on for its requested notice duration,
            then its processes get SIGTERM and 30 seconds; False: they die at once.
          seconds: duration of the notice, overriding the VM's setting.
        """
        with self.scheduler.changed:
            self.fleet.preempt(self.vm(name), notice=notice, seconds=seconds)

    def lose_next_in_creation(self, times: int = 1) -> None:
        """Preempts the next VMs before they run."""
        with self.scheduler.changed:
            self.fleet.lost_in_creation = times

    def host_error(
        self, name: str, *, shows_running_seconds: float = 0.0, is_told: bool = False
    ) -> None:
        """Kills a VM's processes; the API shows it as running for a while.

        is_told: its operation of the error is there at once, not only at the end of that while.
        """
        with self.scheduler.changed:
            self.fleet.lose_host(
                self.vm(name), shows_running_seconds=shows_running_seconds, is_told=is_told
            )

    def die_silently(self, name: str) -> None:
        """Kills a VM's processes; the API shows it as running forever."""
        with self.scheduler.changed:
            self.fleet.die_silently(self.vm(name))

    def maintain(self, name: str) -> None:
        """Simulates a maintenance event, as the call simulateMaintenanceEvent."""
        with self.scheduler.changed:
            self.fleet.maintain(self.vm(name))

    def announce_maintenance(
        self, name: str, *, seconds: float, can_reschedule: bool = False
    ) -> None:
        """Announces and runs a maintenance in so many seconds."""
        with self.scheduler.changed:
            self.fleet.announce(self.vm(name), seconds=seconds, can_reschedule=can_reschedule)

    def call_off_maintenance(self, name: str) -> None:
        """Calls an announced maintenance off: the VM's metadata show none any more."""
        with self.scheduler.changed:
            self.fleet.call_off(self.vm(name))

    def place(self, *physical_hosts: str) -> None:
        """Runs the next VMs on these physical hosts, one each, and shows where they run."""
        with self.scheduler.changed:
            self.fleet.physical_hosts += physical_hosts

    def stockout(self, *, seconds: float = float("inf"), **rule: Any) -> Shortage:
        """Makes creations fail because of missing capacity; see Shortage for the rules."""
        until = time.monotonic() + seconds / self.scheduler.speed
        codes = tuple(rule.pop("codes", Shortage.codes))
        made = Shortage(until=until, codes=codes, **rule)
        with self.scheduler.changed:
            self.fleet.shortages.append(made)
        return made

    def restock(self) -> None:
        """Ends all shortages."""
        with self.scheduler.changed:
            self.fleet.shortages.clear()

    def quota(self, region: str, metric: str, limit: float, *, as_http: bool | None = None) -> None:
        """Sets a limit; whether want of it is told at once (403) or by the operation."""
        with self.scheduler.changed:
            self.catalog.quotas[region, metric] = limit
            if as_http is not None:
                self.api.quota_as_http = as_http

    def quota_of_all_regions(self, metric: str, limit: float) -> None:
        """Sets a limit of GPUS_ALL_REGIONS or CPUS_ALL_REGIONS."""
        with self.scheduler.changed:
            self.catalog.quotas["", metric] = limit

    def reserve(
        self,
        zone: str,
        name: str,
        *,
        machine: str,
        count: int,
        status: str = "READY",
        policies: Sequence[str] = (),
    ) -> None:
        """Adds a reservation of so many VMs; one that is being deleted still has its place."""
        with self.scheduler.changed:
            made = Reservation(machine, count, status, tuple(policies))
            self.catalog.reservations[zone, name] = made

    def reserve_later(
        self,
        zone: str,
        name: str,
        *,
        reservation: str,
        machine: str,
        count: int,
        begins: str,
        ends: str,
        status: str = "APPROVED",
    ) -> None:
        """Adds a future reservation in calendar mode; `reserve` adds the delivered one."""
        made = {
            "kind": "compute#futureReservation",
            "name": name,
            "reservationName": reservation,
            "reservationMode": "CALENDAR",
            "specificReservationRequired": True,
            "specificSkuProperties": {
                "totalCount": str(count),
                "instanceProperties": {"machineType": machine},
            },
            "timeWindow": {"startTime": begins, "endTime": ends},
            "status": {"procurementStatus": status},
        }
        with self.scheduler.changed:
            self.catalog.futures[zone, name] = made

    def hold_resize_requests(self, holds: bool = True) -> None:
        """Lets resize requests be ACCEPTED until this is called with False."""
        with self.scheduler.changed:
            self.api.groups.holds_requests = holds

    def cancel_resize_requests(self) -> None:
        """Cancels all resize requests that wait for capacity, as another client may."""
        with self.scheduler.changed:
            for group in self.api.groups.all.values():
                for one in group.requests.values():
                    if one.state == "ACCEPTED" and not one.vms:
                        end_request(group, one, "CANCELLED")

    def fail_resize_requests(self, *codes: str) -> None:
        """Lets the next resize request fail with these codes, once it looks for capacity."""
        with self.scheduler.changed:
            self.api.groups.failures.append(codes)

    def groups(self) -> dict[str, dict[str, str]]:
        """Returns the managed instance groups; of each, its resize requests and their states."""
        with self.scheduler.changed:
            return {
                name: {one.name: one.state for one in group.requests.values()}
                for (_, name), group in self.api.groups.all.items()
            }

    def members(self) -> list[str]:
        """Returns the names of the VMs of all groups."""
        with self.scheduler.changed:
            return sorted(name for one in self.api.groups.all.values() for name in one.members)

    def lookups(self) -> int:
        """Returns the number of times that resize requests have looked for capacity."""
        return self.api.groups.lookups

    def templates(self) -> list[str]:
        """Returns the names of the instance templates."""
        with self.scheduler.changed:
            return sorted(self.catalog.templates)

    def hold_deletions(self, holds: bool = True) -> None:
        """Lets VMs that are being deleted be STOPPING until this is called with False."""
        with self.scheduler.changed:
            self.fleet.holds_deletions = holds

    def fail(
        self,
        kind: str,
        *,
        call: str = ".*",
        times: int | None = 1,
        seconds: float | None = None,
        late_seconds: float = 0.3,
        probability: float = 1.0,
    ) -> FaultRule:
        """Makes the next calls fail.

        Args:
          kind: a status ("503"), a reason ("rateLimitExceeded", "quotaExceeded", "forbidden",
            "resourceNotReady"), "drop" (no answer) or "stall"; with " after" the effect is there.
          call: regular expression of the call's name, such as "instances.(insert|bulkInsert)".
          times: how often; None: always.
          seconds: for how long.
          late_seconds: real ones, of a stall.
          probability: of each call.
        """
        real = None if seconds is None else seconds / self.scheduler.speed
        return self.server.faults.add(
            FaultRule(
                kind,
                method=call,
                times=times,
                seconds=real,
                late_seconds=late_seconds,
                probability=probability,
            )
        )

    def fail_operation(self, kind: str = "error", **rule: Any) -> OperationFaultRule:
        """Makes the next operations fail, hang or be slow; see OperationFaultRule."""
        if "codes" in rule:
            rule["codes"] = tuple(rule["codes"])
        made = OperationFaultRule(kind, **rule)
        with self.scheduler.changed:
            self.operations.rules.append(made)
        return made

    def clear_faults(self) -> None:
        """Ends all faults, except the faults of VMs and their metadata."""
        self.server.faults.clear()
        with self.scheduler.changed:
            self.operations.rules.clear()
            self.fleet.shortages.clear()
            self.fleet.lost_in_creation = 0
            self.api.denied.clear()
            self.api.refused_fields.clear()
            self.api.is_disabled, self.api.most_per_minute = False, None
            self.api.list_lag = self.api.gone_lag = 0.0
            self.api.unreachable.clear()

    def deny(self, permission: str) -> None:
        """Takes a permission away, such as compute.instances.create."""
        with self.scheduler.changed:
            self.api.denied.add(permission)

    def allow(self, permission: str) -> None:
        with self.scheduler.changed:
            self.api.denied.discard(permission)

    def disable_api(self, is_disabled: bool = True) -> None:
        with self.scheduler.changed:
            self.api.is_disabled = is_disabled

    def refuse_field(self, name: str, *, message: str = "") -> None:
        """Lets the API refuse a field such as preemptionNoticeDuration; by default as unknown."""
        with self.scheduler.changed:
            self.api.refused_fields[name] = message

    def lag_lists(self, seconds: float, *, gone_seconds: float = 0.0) -> None:
        """Lets VMs appear in lists only so long after their birth, and stay after their end."""
        with self.scheduler.changed:
            self.api.list_lag, self.api.gone_lag = seconds, gone_seconds

    def lose_zone(self, zone: str, *, is_lost: bool = True) -> None:
        """Lets calls of a zone fail with 503, and lists of all zones lack it; its VMs run on."""
        with self.scheduler.changed:
            (self.api.unreachable.add if is_lost else self.api.unreachable.discard)(zone)

    def limit_rate(self, calls_per_minute: int | None) -> None:
        """Refuses calls beyond so many in a minute (a real one), until the next begins."""
        with self.scheduler.changed:
            self.api.most_per_minute = calls_per_minute

    def add_image(self, project: str, name: str, *, family: str, **fields: Any) -> None:
        """Adds an image; fields as JSON has them, such as diskSizeGb="200"."""
        with self.scheduler.changed:
            self.catalog.images.setdefault(project, {})[family] = name
            self.catalog.image_fields[project, name] = fields

    def add_subnetwork(
        self,
        region: str,
        name: str,
        *,
        host_project: str = "",
        network: str = "default",
        is_rdma: bool = False,
    ) -> None:
        """Adds a subnetwork; with a host project, one of a Shared VPC.

        A network of another name than default has no firewall rules; one with the RDMA profile
        takes interfaces of the type MRDMA only.
        """
        with self.scheduler.changed:
            self.catalog.networks[host_project, region, name] = network
            if is_rdma:
                self.catalog.rdma.add((host_project, region, name))
            if host_project:
                self.catalog.shared_subnetworks.add((host_project, region, name))
            else:
                self.catalog.subnetworks.add((region, name))

    def remove_subnetwork(self, region: str, name: str) -> None:
        with self.scheduler.changed:
            self.catalog.subnetworks.discard((region, name))

    def end_private_access(self, region: str, name: str, *, host_project: str = "") -> None:
        """Takes Private Google Access from a subnetwork; the real ones have none at first."""
        with self.scheduler.changed:
            self.catalog.private.add((host_project, region, name))

    def add_nat(self, region: str, *, network: str = "default", host_project: str = "") -> None:
        """Adds a router with Cloud NAT for all subnetworks of a network in a region."""
        nat = {"name": "nat", "sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_IP_RANGES"}
        router = {"name": "router", "network": f"/global/networks/{network}", "nats": [nat]}
        with self.scheduler.changed:
            self.catalog.nats.setdefault((host_project, region), []).append(router)

    def set_firewall(
        self,
        network: str,
        rules: list[dict[str, Any]],
        *,
        policies: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Sets the firewall rules and policies of a network; as JSON has them."""
        with self.scheduler.changed:
            self.catalog.firewalls[network] = rules
            self.catalog.firewall_policies[network] = [*policies]

    def show_gpus(self, *numbers: int | None) -> None:
        """Lets the next VMs find so many GPUs, one number each; None: they have no driver."""
        with self.scheduler.changed:
            self.fleet.gpus += numbers

    def add_policy(self, region: str, name: str) -> None:
        """Adds a resource policy."""
        with self.scheduler.changed:
            self.catalog.policies.add((region, name))

    def add_template(self, name: str, properties: dict[str, Any]) -> None:
        """Adds an instance template; its properties are as JSON has them."""
        reported = {"kind": "compute#instanceTemplate", "name": name, "properties": properties}
        with self.scheduler.changed:
            self.catalog.templates[name] = reported

    def fail_metadata(
        self,
        name: str,
        kind: str,
        *,
        key: str = "",
        times: int = 1 << 30,
        seconds: float = float("inf"),
        flap_seconds: float = 0.0,
    ) -> None:
        """Lets a VM's metadata server fail ("503", "drop", "hang"); see MetadataFault."""
        with self.scheduler.changed:
            guest = self.vm(name).guest
        if guest is None:
            raise ValueError(f"{name}: it has no metadata server now")
        speed = self.scheduler.speed
        words = {"seconds": seconds / speed, "flap_seconds": flap_seconds / speed}
        guest.metadata.fail(kind, key=key, times=times, **words)

    def remove_machine(self, zone: str, machine: str) -> None:
        """Takes a machine type out of a zone's offer."""
        with self.scheduler.changed:
            self.catalog.zones[zone].discard(machine)

    def control(self, action: str, words: dict[str, Any]) -> object:
        """Executes an action that was requested over HTTP."""
        if action not in ACTIONS:
            raise ValueError(f"{action}: not one of {', '.join(ACTIONS)}")
        reported = getattr(self, action)(**words)
        is_rule = isinstance(reported, OperationFaultRule | Shortage | FaultRule)
        return dataclasses.asdict(reported) if is_rule else reported

    def state(self) -> dict[str, object]:
        counted = self.calls()
        return {
            "vms": self.vms(),
            "calls": counted.calls,
            "permissions": counted.permissions,
            "peak_calls_per_minute": counted.peak_per_minute,
            "bugs": self.bugs,
        }
