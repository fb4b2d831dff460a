"""Life cycle of VMs: they are created, run, are stopped, preempted, lost, deleted.

All of it with the lock of all state held.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jaxres_emulators.gce.catalog import SPOT, Catalog, Shape, region_of
from jaxres_emulators.gce.checks import model_of, seconds_of
from jaxres_emulators.gce.errors import not_found
from jaxres_emulators.gce.operations import Failure, Operation, Operations
from jaxres_emulators.gce.scheduler import Scheduler
from jaxres_emulators.gce.vms import keeper
from jaxres_emulators.gce.vms.guest import MARK, VM_MARK, Guest
from jaxres_emulators.gce.vms.stock import Delays, Shortage
from jaxres_emulators.gce.vms.vm import (
    GLOBAL_METRICS,
    GONE,
    PROVISIONING,
    RUNNING,
    STAGING,
    STOPPING,
    TERMINATED,
    Vm,
)
from jaxres_emulators.metadata import NO_UPCOMING, PREEMPTED, UPCOMING

POLL_SECONDS = 0.05
"""Real ones, however fast the world goes: how often one looks whether processes have ended."""
UNREACHABLE = {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}
"""Environment of a VM that has no way to Google's services: nothing listens there."""
Settled = Callable[[Vm, Failure | None], None]


class Fleet:
    """All VMs."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        operations: Operations,
        catalog: Catalog,
        project: str,
        number: str,
        root: Path,
        mark: str,
        net: int,
        env: Mapping[str, str],
        is_simulated: bool,
    ) -> None:
        self.scheduler, self.operations, self.catalog = scheduler, operations, catalog
        self.project, self.number, self.root, self.mark = project, number, root, mark
        self.net, self.env, self.is_simulated = net, env, is_simulated
        self.vms: dict[tuple[str, str], Vm] = {}
        self.past: dict[str, Vm] = {}
        """All that there ever were, by id."""
        self.shortages: list[Shortage] = []
        self.delays = Delays()
        self.lost_in_creation = 0
        """How many of the next VMs are preempted while they are created."""
        self.holds_deletions = False
        """Whether no deletion ends."""
        self.gpus: list[int | None] = []
        """GPUs that the next VMs find, instead of all of theirs; None: no driver."""
        self.physical_hosts: list[str] = []
        """Physical hosts of the next VMs; later VMs show none."""
        self._count = itertools.count(1)
        self._looked = -float("inf")
        self._seen: dict[str, list[int]] = {}

    def find(self, zone: str, name: str) -> Vm:
        if (zone, name) not in self.vms:
            raise not_found(f"projects/{self.project}/zones/{zone}/instances/{name}")
        return self.vms[zone, name]

    def usage(self, region: str) -> dict[str, float]:
        """Returns the usage of quotas in a region; empty: in all regions."""
        used: dict[str, float] = {}
        for vm in self.vms.values():
            if region in ("", region_of(vm.zone)):
                for metric, number in vm.usage().items():
                    used[metric] = used.get(metric, 0.0) + number
        return used

    def is_short(self, zone: str, machine: str) -> bool:
        """Returns whether a machine type is unavailable in a zone in any model."""
        return any(one.takes_all(zone, machine) for one in self.shortages)

    def create(
        self,
        wanted: dict[str, Any],
        *,
        name: str,
        zone: str,
        shape: Shape,
        operation: Operation,
        settled: Settled | None = None,
    ) -> Vm:
        """Starts to create a VM; the caller has checked the request."""
        number = next(self._count)
        ident = str(random.randrange(10**17, 10**18) * 10 + number % 10)
        vm = Vm(
            ident,
            name,
            zone,
            self.project,
            shape,
            model_of(wanted),
            wanted,
            f"127.{self.net}.{1 + number // 250}.{1 + number % 250}",
            self.root / f"{name}-{ident}",
            labels=dict(wanted.get("labels", {})),
            items={
                one["key"]: one.get("value", "")
                for one in wanted.get("metadata", {}).get("items", [])
            },
        )
        if self.physical_hosts:
            vm.physical_host = self.physical_hosts.pop(0)
        vm.gpus = self.gpus.pop(0) if self.gpus else shape.gpus
        failure = self._obstacle(vm, operation.group or operation.name)
        vm.is_blocked = failure is not None
        self.vms[zone, name] = self.past[ident] = vm
        operation.target_id = ident
        words = (vm, vm.life, operation, failure, settled)
        self.scheduler.after(self.delays.provision, self._stage, *words)
        return vm

    def _obstacle(self, vm: Vm, group: str) -> Failure | None:
        for metric, number in vm.usage().items():
            region = "" if metric in GLOBAL_METRICS else region_of(vm.zone)
            if (region, metric) not in self.catalog.quotas:
                continue
            limit = self.catalog.limit(region, metric)
            if self.usage(region).get(metric, 0.0) + number > limit:
                where = f"in region {region}" if region else "globally"
                words = {"metric": metric, "limit": limit, "where": where}
                return Failure(("QUOTA_EXCEEDED",), True, words)
        if reserved := vm.reservation:
            count = self.catalog.reservations[vm.zone, reserved].count
            others = [(other.zone, other.reservation) for other in self.vms.values()]
            if others.count((vm.zone, reserved)) >= count:
                return Failure(("CONDITION_NOT_MET",), True, {"reservation": reserved})
        for one in self.shortages:
            if one.takes(vm, self._taken(one), group):
                return Failure(one.codes, one.has_http, {"zone": vm.zone})
        return None

    def obstacle_of_all(
        self, wanted: dict[str, Any], count: int, group: str, *, zone: str, shape: Shape
    ) -> Failure | None:
        """Returns why so many VMs can't be created together now; None: there is room for all."""
        probe = Vm("0", "probe", zone, self.project, shape, model_of(wanted), wanted, "", self.root)
        for metric, number in probe.usage().items():
            region = "" if metric in GLOBAL_METRICS else region_of(zone)
            limit = self.catalog.limit(region, metric)
            if self.usage(region).get(metric, 0.0) + number * count > limit:
                where = f"in region {region}" if region else "globally"
                words = {"metric": metric, "limit": limit, "where": where}
                return Failure(("QUOTA_EXCEEDED",), True, words)
        for one in self.shortages:
            if one.takes(probe, self._taken(one) + count - 1, group):
                return Failure(one.codes, one.has_http, {"zone": zone})
        return None

    def _taken(self, shortage: Shortage) -> int:
        """Returns the number of VMs that use the capacity that a shortage limits."""
        return sum(
            shortage.matches(vm) and not vm.is_blocked and vm.status != TERMINATED
            for vm in self.vms.values()
        )

    def _stage(
        self,
        vm: Vm,
        life: int,
        operation: Operation,
        failure: Failure | None,
        settled: Settled | None,
    ) -> None:
        rule = operation.rule
        if failure is None and rule is not None and rule.kind == "error":
            failure = Failure(rule.codes, rule.has_http, {"zone": vm.zone, "target": vm.path})
        if vm.life != life:
            return self._settle(vm, operation, failure or _overtaken(vm), settled)
        if failure is not None:
            self._remove(vm)
            return self._settle(vm, operation, failure, settled)
        life = vm.turn(STAGING)
        return self.scheduler.after(self.delays.stage, self._arrive, vm, life, operation, settled)

    def _arrive(
        self, vm: Vm, life: int, operation: Operation, settled: Settled | None = None
    ) -> None:
        failure = None
        if vm.life != life:
            failure = _overtaken(vm)
        elif self.lost_in_creation > 0:
            self.lost_in_creation -= 1
            self.preempt(vm, notice=False, seconds=None)
            failure = _overtaken(vm)
        else:
            self._run(vm)
        self._settle(vm, operation, failure, settled)

    def _settle(
        self, vm: Vm, operation: Operation, failure: Failure | None, settled: Settled | None
    ) -> None:
        self.operations.end(operation, failure)
        if settled is not None:
            settled(vm, failure)

    def _run(self, vm: Vm) -> None:
        life = vm.turn(RUNNING)
        if not self.is_simulated:
            vm.folder.mkdir(parents=True, exist_ok=True)
            vm.guest = Guest(
                folder=vm.folder,
                mark=self.mark,
                number=f"{vm.id}.{life}",
                ip=vm.ip,
                values=vm.values(self.number),
                env={**self.env, **({} if self._reaches_google(vm) else UNREACHABLE)},
                gpus=vm.gpus,
            )
            vm.guest.run("startup-script")
            self._watch_power(vm, life)
        if limit := seconds_of(vm.scheduling.get("maxRunDuration")):
            self.scheduler.after(limit, self._expire, vm, life)

    def _reaches_google(self, vm: Vm) -> bool:
        first = vm.wanted["networkInterfaces"][0]
        return self.catalog.reaches_google(first, vm.zone, vm.project)

    def _watch_power(self, vm: Vm, life: int) -> None:
        """Stops a VM that powers itself off; its termination action does not matter."""
        if vm.life != life or vm.guest is None:
            return
        if vm.guest.is_powering_off:
            self.shut_down(vm, "STOP", self._event("compute.instances.guestTerminate", vm))
            return
        self.scheduler.after(10 * POLL_SECONDS * self.scheduler.speed, self._watch_power, vm, life)

    def _expire(self, vm: Vm, life: int) -> None:
        if vm.life == life:
            word = "delete" if vm.action == "DELETE" else "stop"
            self.shut_down(vm, vm.action, self._event(word, vm))

    def start(self, vm: Vm, operation: Operation) -> None:
        life = vm.turn(STAGING)
        self.scheduler.after(self.delays.stage, self._arrive, vm, life, operation)

    def _event(self, type_: str, vm: Vm) -> Operation:
        return self.operations.begin(type_, f"zones/{vm.zone}", vm.path, target_id=vm.id)

    def shut_down(self, vm: Vm, action: str, *operations: Operation) -> None:
        """Ends it as the power button does, then stops or deletes it."""
        seconds = self.delays.spot_off if vm.model == SPOT else self.delays.standard_off
        if vm.scheduling.get("skipGuestOsShutdown"):
            seconds = 0.0
        life = vm.turn(STOPPING)
        if vm.guest is not None and seconds:
            vm.guest.ask_to_end()
        vm.asked_to_end = time.monotonic()
        until = vm.asked_to_end + seconds / self.scheduler.speed
        self._wait_for_processes(vm, life, until, action, operations)

    def _wait_for_processes(
        self, vm: Vm, life: int, until: float, action: str, operations: tuple[Operation, ...]
    ) -> None:
        if vm.life != life:
            for one in operations:
                self.operations.end(one)
            return
        is_held = action == "DELETE" and self.holds_deletions
        if is_held or (self._is_alive(vm) and time.monotonic() < until):
            again = POLL_SECONDS * self.scheduler.speed
            words = (vm, life, until, action, operations)
            self.scheduler.after(again, self._wait_for_processes, *words)
            return
        self._kill(vm)
        self.scheduler.after(self.delays.off, self._off, vm, life, action, operations)

    def _is_alive(self, vm: Vm) -> bool:
        """Says whether a VM has processes; one look is for all that end at the same time."""
        if vm.guest is None:
            return False
        now = time.monotonic()
        if self._looked < vm.asked_to_end or self._looked < now - POLL_SECONDS:
            self._looked, self._seen = now, keeper.values(VM_MARK)
        vm.guest.reap()
        return vm.guest.mark in self._seen

    def _off(self, vm: Vm, life: int, action: str, operations: tuple[Operation, ...]) -> None:
        if vm.life == life:
            self._power_off(vm, action)
        for one in operations:
            self.operations.end(one)

    def _power_off(self, vm: Vm, action: str, *operations: Operation) -> None:
        self._kill(vm)
        if action == "DELETE":
            self._remove(vm)
        else:
            vm.turn(TERMINATED)
        for one in operations:
            self.operations.end(one)

    def _kill(self, vm: Vm) -> None:
        if vm.guest is not None:
            vm.guest.kill()
            vm.guest = None

    def _remove(self, vm: Vm) -> None:
        vm.turn(GONE)
        if self.vms.get((vm.zone, vm.name)) is vm:
            del self.vms[vm.zone, vm.name]

    def preempt(self, vm: Vm, *, notice: bool, seconds: float | None) -> None:
        """Preempts a VM; without notice its processes are killed at once."""
        if vm.status in (TERMINATED, STOPPING):
            raise ValueError(f"{vm.name}: {vm.status} already")
        if vm.status in (PROVISIONING, STAGING):
            vm.is_preempted, notice = True, False
        if not notice:
            self._power_off(vm, vm.action, self._event("compute.instances.preempted", vm))
            return
        if vm.guest is not None:
            vm.guest.metadata.set(PREEMPTED, "TRUE")
        event = self._event("compute.instances.preempted", vm)
        left = vm.notice_seconds if seconds is None else seconds
        self.scheduler.after(left, self._take, vm, vm.life, event)

    def _take(self, vm: Vm, life: int, event: Operation) -> None:
        if vm.life == life:
            self.shut_down(vm, vm.action, event)
        else:
            self.operations.end(event)

    def announce(self, vm: Vm, *, seconds: float, can_reschedule: bool) -> None:
        """Announces a maintenance, to the VM and in its resource, and does it in its time."""
        begins = datetime.now(UTC) + timedelta(seconds=seconds / self.scheduler.speed)
        stamps = {
            "windowStartTime": begins.isoformat(),
            "latestWindowStartTime": begins.isoformat(),
            "windowEndTime": (begins + timedelta(hours=4)).isoformat(),
        }
        words = {"canReschedule": can_reschedule, "maintenanceStatus": "PENDING"}
        vm.upcoming = {"type": "SCHEDULED", **words, **stamps}
        if vm.guest is not None:
            vm.guest.metadata.announce(
                seconds=seconds / self.scheduler.speed, can_reschedule=str(can_reschedule).lower()
            )
        left = max(0.0, seconds - self.delays.warning)
        self.scheduler.after(left, self._warn, vm, vm.life, vm.upcoming)

    def call_off(self, vm: Vm) -> None:
        """Calls an announced maintenance off."""
        vm.upcoming = {}
        if vm.guest is not None:
            vm.guest.metadata.set(UPCOMING, NO_UPCOMING)

    def _warn(self, vm: Vm, life: int, announced: dict[str, Any]) -> None:
        if vm.life == life and vm.upcoming is announced:
            vm.upcoming = {}
            self.maintain(vm)

    def maintain(self, vm: Vm) -> None:
        """Simulates a maintenance event: it preempts a Spot VM, and stops a VM with GPUs."""
        if vm.model == SPOT:
            return self.preempt(vm, notice=True, seconds=None)
        if vm.guest is not None:
            vm.guest.metadata.warn()
        return self.scheduler.after(self.delays.warning, self._maintained, vm, vm.life)

    def _maintained(self, vm: Vm, life: int) -> None:
        if vm.life != life:
            return
        self.shut_down(vm, "STOP", self._event("compute.instances.terminateOnHostMaintenance", vm))
        if vm.restarts:
            self.scheduler.after(self.delays.standard_off, self._come_back, vm, vm.life)

    def _come_back(self, vm: Vm, life: int) -> None:
        """Restarts a VM after it is off, unless its state has changed meanwhile."""
        if vm.status == STOPPING and vm.life == life:
            self.scheduler.after(1.0, self._come_back, vm, life)
        elif vm.status == TERMINATED and vm.life == life + 1:
            self.start(vm, self._event("compute.instances.automaticRestart", vm))

    def lose_host(self, vm: Vm, *, shows_running_seconds: float, is_told: bool) -> None:
        """Kills a VM's processes at once; the API's list, at least, knows of it only later."""
        self._kill(vm)
        event = self._event("compute.instances.hostError", vm) if is_told else None
        self.scheduler.after(shows_running_seconds, self._show_host_error, vm, vm.life, event)

    def _show_host_error(self, vm: Vm, life: int, event: Operation | None) -> None:
        if vm.life != life:
            return
        self._power_off(vm, "STOP", event or self._event("compute.instances.hostError", vm))
        if vm.restarts and vm.model != SPOT:
            self.start(vm, self._event("compute.instances.automaticRestart", vm))

    def die_silently(self, vm: Vm) -> None:
        """Kills a VM's processes; the API continues to show it as running."""
        self._kill(vm)

    def close(self) -> None:
        keeper.kill(f"{MARK}={self.mark}")
        for vm in list(self.vms.values()):
            self._kill(vm)


def _overtaken(vm: Vm) -> Failure:
    """Returns the failure of a creation during which its VM was preempted or changed otherwise."""
    code = "UNSUPPORTED_OPERATION" if vm.is_preempted else "RESOURCE_NOT_FOUND"
    return Failure((code,), True, {"target": vm.path})
