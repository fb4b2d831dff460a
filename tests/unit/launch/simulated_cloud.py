"""A simulated environment of controllers: a bucket, the Compute API, VMs with agents, and faults.

Time is simulated: it passes in calls and sleeps only. The controllers are the real ones. At every
call a controller may be killed, or paused while another one leads.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxres.config.schema.gce import FlexStartOption
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageUnavailable
from jaxres.launch.gce.api.aggregated_lists import ListedVms
from jaxres.launch.gce.api.compute import ApiUnavailable
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.desired_state import DesiredState, InstanceGroup, PendingCreate, VmSpec
from jaxres.launch.gce.state.observed_state import HOST_ERROR, AgentReport, CreateFailed, VmStatus
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateDamaged, decode_state
from jaxres.launch.gce.vm.agent import LEASE_SECONDS, next_idle
from jaxres.launch.gce.vm.instance_spec import Machine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record, Start, file_name
from jaxres.storage import gcs_objects, threads
from jaxres.storage.path import GcsPath
from tests.unit.launch.simulated_vms import FaultRates, Killed, SimulatedOperation, SimulatedVm
from tests.unit.runlog.example_records import CLAIM

EPOCH = 1.7e9
IDLE_SECONDS = 600.0
"""Time after which an agent without training and without a launcher powers its VM off."""
LIMIT = 30.0
"""Longest time of retries of one request to the bucket."""
MAINTENANCE = "maintenance in two months"
PREEMPTED = "compute.instances.preempted"
CRASHES = (
    1,
    137,
    ExitCode.BUG,
    ExitCode.HUNG,
    ExitCode.UNHEALTHY,
    ExitCode.PEER_LOST,
    ExitCode.STORAGE,
)
CREATE_ERRORS: tuple[CreateErrorKind, ...] = ("stockout", "quota", "preempted", "passing", "exists")
COMMIT = Commit(step=0, path="", manifest="sha256:0", bytes=3)


@dataclass
class SimulatedCloud:
    """The environment of leaders; `check` is called at every change of the desired state."""

    seed: int
    steps: int
    paths: LaunchPaths
    rates: FaultRates = field(default_factory=FaultRates)
    check: Callable[[DesiredState | None, DesiredState], None] = lambda before, after: None
    now: float = 0.0
    objects: dict[str, tuple[bytes, int, dict[str, str]]] = field(default_factory=dict)
    vms: dict[str, SimulatedVm] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)
    """Newest operation of the service on a VM, by id."""
    operations: dict[str, SimulatedOperation] = field(default_factory=dict)
    refusals: dict[str, CreateFailed] = field(default_factory=dict)
    created: dict[str, set[str]] = field(default_factory=dict)
    """Requests that have requested a VM, by name."""
    excused: set[str] = field(default_factory=set)
    """VMs that may be replaced because they have failed."""
    other: Callable[[float], None] | None = None
    """Runs another leader until a time, while the calling one is paused."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """VMs of the managed instance groups that exist, by name."""
    groups_deleted: set[str] = field(default_factory=set)
    damages: list[str] = field(default_factory=list)
    """What was done to the lease and the desired state."""
    lost_zones: set[str] = field(default_factory=set)
    _past: list[tuple[str, bytes]] = field(default_factory=list)
    """All contents of the lease and the desired state so far, by key."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.draw_harmless = random.Random(f"harmless-{self.seed}")
        self._count = itertools.count(1)
        self._events_due: list[tuple[float, int, Callable[[], object]]] = []
        self._outages: dict[str, list[tuple[float, float]]] = {
            name: [self._span() for _ in range(self.rates.outages)] for name in ("bucket", "gce")
        }
        self.step, self._seq = 0, 0
        self.interrupted: list[str] = []
        self.deadline = float("inf")
        """Time at which the current leader is killed."""
        self._append(CLAIM)
        self._append(Start(step=0, path=None, dataset="d", computation={}))
        self.after(1.0, self._train)

    def _span(self) -> tuple[float, float]:
        begins = self.draw.uniform(20, self.rates.seconds)
        return begins, begins + self.draw.choice([3.0, 12.0, 25.0, 90.0])

    @property
    def log(self) -> GcsPath:
        folder = RunDir(self.paths.run).log
        assert isinstance(folder, GcsPath)
        return folder

    # Time.

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events_due, (self.now + seconds, next(self._count), action))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._events_due and self._events_due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events_due)
            action()
        self.now = until

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return EPOCH + self.now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self._interrupt("asleep")

    @property
    def faults_are_over(self) -> bool:
        return self.now > self.rates.seconds

    def is_unavailable(self, name: str) -> bool:
        return any(begins <= self.now < ends for begins, ends in self._outages[name])

    def _interrupt(self, where: str) -> None:
        """Kills or pauses the calling leader with some probability."""
        if self.now > self.deadline:
            raise Killed
        if where == "log":  # The calling process holds its own lock on the log's cache.
            return
        few = len(self.interrupted) >= self.rates.interruptions or self.faults_are_over
        chance = 0.02 if where in ("create", "desired_state.json") else 0.001
        if few or self.other is None or self.draw.random() > chance:
            return
        self.interrupted.append(where)
        if self.draw.random() < 0.5:
            raise Killed
        self.other(self.now + self.draw.choice([5.0, 30.0, 120.0, 5000.0]))

    # The bucket, with the functions of `jaxres.storage.gcs_objects`.

    def _bucket_request(self, where: str) -> None:
        self.advance(0.01)
        self._interrupt(where)
        began = self.now
        while self.is_unavailable("bucket"):
            pause = min(self.draw.uniform(0.1, 6.0), began + LIMIT - self.now)
            if pause <= 0.01:
                raise StorageUnavailable("the bucket has not answered")
            self.advance(pause)

    def damage(self) -> None:
        """Deletes the lease or the desired state, makes it unreadable, or restores an older one."""
        path = self.draw.choice([self.paths.lease, self.paths.desired_state])
        older = [data for key, data in self._past if key == path.key]
        kind = self.draw.choice(["deleted", "damaged", "an older copy"])
        if path.key not in self.objects or self.faults_are_over:
            return
        self.damages.append(f"{self.now:.0f}: {path.name} is {kind}")
        if kind == "deleted":
            del self.objects[path.key]
        else:
            self.put(path.key, b"{" if kind == "damaged" else self.draw.choice(older))

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> int:
        generation = next(self._count)
        if key in (self.paths.lease.key, self.paths.desired_state.key):
            self._past.append((key, data))
        self.objects[key] = data, generation, dict(metadata or {})
        return generation

    def write(
        self,
        path: GcsPath,
        data: bytes,
        *,
        over: int | None,
        metadata: Mapping[str, str] | None = None,
    ) -> int | None:
        self._bucket_request(path.name)
        stored = self.objects.get(path.key)
        if over is not None and over != (0 if stored is None else stored[1]):
            return None
        if path == self.paths.desired_state:
            self.check(self.desired(), decode_state(data, path))
        generation = self.put(path.key, data, metadata)
        self._interrupt("written")
        return generation

    def read_at(self, path: GcsPath) -> tuple[bytes, int] | None:
        self._bucket_request("log" if path.parent == self.log else path.name)
        found = self.objects.get(path.key)
        return None if found is None else found[:2]

    def read(self, path: GcsPath) -> bytes | None:
        found = self.read_at(path)
        return None if found is None else found[0]

    def read_all(self, paths: Sequence[GcsPath]) -> list[bytes | None]:
        return [self.read(path) for path in paths]

    def stat(self, path: GcsPath) -> gcs_objects.Stat | None:
        found = self.read_at(path)
        return found and gcs_objects.Stat(len(found[0]), found[1], "", None)

    def delete(self, path: GcsPath) -> bool:
        self._bucket_request("delete")
        return self.objects.pop(path.key, None) is not None

    def _in(self, folder: GcsPath) -> Iterator[str]:
        prefix = f"{folder.key}/"
        return (key.removeprefix(prefix) for key in self.objects if key.startswith(prefix))

    def list_names(self, folder: GcsPath, *, after: str = "") -> list[str]:
        self._bucket_request("log")
        return sorted({key.partition("/")[0] for key in self._in(folder) if key >= after})

    def list_metadata(self, folder: GcsPath) -> dict[str, tuple[int, dict[str, str]]]:
        self._bucket_request("list")
        return {n: self.objects[f"{folder.key}/{n}"][1:] for n in self._in(folder)}

    def delete_tree(self, folder: GcsPath) -> None:
        for name in [*self._in(folder)]:
            self.delete(folder / name)

    def patch(self, monkeypatch: Any) -> None:
        """Replaces the functions of the bucket; calls are made one after the other."""
        for name in (
            *("write", "read", "read_at", "read_all", "stat", "delete", "delete_tree"),
            *("list_names", "list_metadata"),
        ):
            monkeypatch.setattr(gcs_objects, name, getattr(self, name))
        monkeypatch.setattr(threads, "call_all", lambda calls, *, most: [call() for call in calls])

    def desired(self) -> DesiredState | None:
        found = self.objects.get(self.paths.desired_state.key)
        with contextlib.suppress(StateDamaged):
            return None if found is None else decode_state(found[0], self.paths.desired_state)
        return None

    # The Compute API, with the methods of `jaxres.launch.gce.api.compute.Compute`.

    def _compute_request(self, where: str, zone: str = "") -> None:
        self.advance(0.03)
        self._interrupt(where)
        if zone in self.lost_zones:
            raise ApiUnavailable(f"503: the zone {zone} is unreachable")
        if self.is_unavailable("gce"):
            self.advance(self.draw.uniform(0.01, 15.0))
            raise ApiUnavailable("503")
        self._fail_at_random()

    def _fail_at_random(self) -> None:
        if not self.faults_are_over and self.draw.random() < self.rates.no_answer:
            raise ApiUnavailable("503, at random")

    def list(self, run: str) -> ListedVms:
        self._compute_request("list")
        vms = {n: vm for n, vm in self.vms_listed().items() if vm.zone not in self.lost_zones}
        return ListedVms(vms, dict.fromkeys(self.lost_zones, "is unreachable"))

    def vms_listed(self) -> dict[str, VmStatus]:
        observed = [m for m in self.vms.values() if m.listed_from <= self.now]
        return {
            m.name: VmStatus(m.name, m.zone, m.status, "10.0.0.1", m.id, m.name.split("-")[-2])
            for m in observed
        }

    def events_of(self, zone: str) -> dict[int, str]:
        self._compute_request("events", zone)
        return self.events

    def exists(self, name: str, zone: str) -> bool:
        self._compute_request("get", zone)
        return name in self.vms

    def status(self, name: str, zone: str) -> str | None:
        self._compute_request("get", zone)
        return self.vms[name].status if name in self.vms else None

    def create(
        self, creation: PendingCreate, vms: Sequence[VmSpec], machine: Machine
    ) -> str | CreateFailed:
        is_group = isinstance(machine.option, FlexStartOption) and len(vms) > 1
        zone = vms[0].zone
        fate = self.draw.random()
        try:
            self._compute_request("create", zone)
            if fate < 0.05 and not self.faults_are_over:
                raise ApiUnavailable("read timeout")
        except (ApiUnavailable, Killed):
            if fate < 0.5:  # The request is delayed, and arrives late.
                late = self.draw.uniform(0, 15)
                self.after(late, lambda: self._accept(creation, zone, is_group=is_group))
            raise
        answer = self._accept(creation, zone, is_group=is_group)
        self._fail_at_random()
        self._interrupt("create")
        return answer

    def _accept(self, creation: PendingCreate, zone: str, *, is_group: bool) -> str | CreateFailed:
        request = creation.request_id
        if is_group and creation.names[0] in self.groups_deleted:
            return CreateFailed("passing", "its group is deleted")
        if request in self.operations:
            return request
        if request in self.refusals:
            return self.refusals[request]
        refused = None
        if not self.faults_are_over and self.draw.random() < self.rates.refusal:
            refused = CreateFailed(self.draw.choice(CREATE_ERRORS), "at random")
            if self.draw.random() < 0.4:
                return self.refusals.setdefault(request, refused)
        seconds = self.draw.choice([2.0, 10.0, 40.0, 200.0])
        hangs = not self.faults_are_over and self.draw.random() < 0.05
        ends = self.now + (float("inf") if hangs else seconds)
        self.operations[request] = SimulatedOperation(creation.names, ends, refused)
        if is_group:
            self.groups[creation.names[0]] = creation.names
        for name in creation.names:
            self.created.setdefault(name, set()).add(request)
            if refused is None or self.draw.random() < 0.5:
                delay = self.draw.uniform(0, seconds)
                self.after(delay, lambda name=name: self._boot_vm(name, zone))
            if refused is not None:  # Rolled back before the operation ends.
                self.after(seconds - 1e-6, lambda name=name: self._roll_back(name))
        return request

    def create_result(self, operation: str, zone: str) -> CreateFailed | bool:
        self._compute_request("operation", zone)
        found = self.operations[operation]
        return False if self.now < found.done_at else found.error or True

    def find_operation(self, creation: PendingCreate, zone: str) -> str | None:
        self._compute_request("operation", zone)
        return creation.request_id if creation.request_id in self.operations else None

    def delete_vm(self, name: str, zone: str, group: InstanceGroup | None = None) -> None:
        desired = self.desired()
        if not self.damages:
            assert desired is not None
            assert name not in desired.names, f"{name} is deleted, and it should exist"
        self._compute_request("delete", zone)
        if (machine := self.vms.get(name)) is not None:
            machine.is_alive, machine.status = False, "STOPPING"
            self.after(self.draw.uniform(1, 40), lambda: self._remove_vm(name))
        self._fail_at_random()

    def delete_group(self, group: InstanceGroup) -> bool:
        """Deletes a group with its VMs; returns whether it is gone."""
        desired = self.desired()
        if not self.damages:
            assert desired is not None
            assert desired.names.isdisjoint(group.names), f"{group} is deleted with VMs in use"
        self._compute_request("delete", group.zone)
        self.groups_deleted.add(group.name)
        if group.name not in self.groups:
            return True
        names = [name for name in self.groups[group.name] if name in self.vms]
        for name in names:
            self.vms[name].is_alive, self.vms[name].status = False, "STOPPING"
            self.after(self.draw.uniform(1, 40), lambda name=name: self._remove_vm(name))
        if not names:
            self.groups.pop(group.name)
        self._fail_at_random()
        return False

    def output(self, name: str, zone: str) -> str:
        self._compute_request("output", zone)
        return f"{zone}: {name} boots"

    # VMs and their agents.

    def _boot_vm(self, name: str, zone: str) -> None:
        machine = SimulatedVm(name, next(self._count), zone, self.now + self.draw.uniform(0, 8))
        self.vms[name] = machine
        if not self.faults_are_over and self.draw.random() < self.rates.loss:
            self.after(self.draw.uniform(5, 300), lambda: self._lose_vm(machine))
        self.after(self.draw_harmless.uniform(10, 300), lambda: self._stop_agent(machine))
        if self.faults_are_over or self.draw.random() > 0.03:
            self.after(self.draw.uniform(3, 20), lambda: self._start_agent(machine))
        else:
            self.excused.add(name)

    def _roll_back(self, name: str) -> None:
        """Removes a VM of a creation that fails; the launcher may have seen it in a list before."""
        if name in self.vms:
            self.excused.add(name)
        self._remove_vm(name)

    def _remove_vm(self, name: str) -> None:
        if (machine := self.vms.pop(name, None)) is not None:
            machine.is_alive = False

    def _lose_vm(self, machine: SimulatedVm) -> None:
        if not machine.is_alive:
            return
        self.excused.add(machine.name)
        kind = self.draw.choice(["silently", "halted", "gone", "notice"])
        if self.draw.random() < 0.5:
            event = PREEMPTED if kind == "notice" else HOST_ERROR
            self.after(self.draw.uniform(0, 60), lambda: self.events.update({machine.id: event}))
        if kind == "notice" and machine.agent is not None:
            self._update_report(machine, notice="is preempted", notice_until=self.wall() + 30)
            save = self.draw_harmless.choice([0.0, 25.0])
            self.after(save, lambda: self._finish(machine, ExitCode.PREEMPTED))
            self.after(self.draw.uniform(save, 120), lambda: self._remove_vm(machine.name))
            return
        machine.is_alive = False
        if kind == "halted":
            machine.status = "TERMINATED"
        if kind in ("halted", "gone"):
            self.after(self.draw.uniform(0, 60), lambda: self._remove_vm(machine.name))

    def _stop_agent(self, machine: SimulatedVm) -> None:
        """Stops the reports of a healthy VM for less than `confirm_lost_seconds`."""
        if not self.faults_are_over:
            machine.stopped_until = self.now + self.draw_harmless.uniform(5, 35)

    def _start_agent(self, machine: SimulatedVm) -> None:
        if machine.is_alive:
            machine.agent = AgentReport("ready", f"{next(self._count)}")
            if self.draw_harmless.random() < 0.5:
                self._update_report(machine, notice=MAINTENANCE, notice_until=self.wall() + 5e6)
            self._send_heartbeat(machine)
            self._follow_desired_state(machine)
            self._end_if_idle(machine)

    def _update_report(self, machine: SimulatedVm, **changes: Any) -> None:
        if machine.agent is not None:
            fields = {**vars(machine.agent), **changes}
            machine.agent = AgentReport(**fields)

    def _send_heartbeat(self, machine: SimulatedVm) -> None:
        if not machine.is_alive or machine.agent is None:
            return None
        if self.is_unavailable("bucket"):
            return self.after(self.draw.uniform(0.1, 6.0), lambda: self._send_heartbeat(machine))
        if self.now < machine.stopped_until:
            return self.after(1.0, lambda: self._send_heartbeat(machine))
        self.put(self.paths.report(machine.name).key, b"", machine.agent.metadata())
        return self.after(self.draw.uniform(2.0, 3.5), lambda: self._send_heartbeat(machine))

    def _follow_desired_state(self, machine: SimulatedVm) -> None:
        """Starts and ends training as the desired state has it."""
        if not machine.is_alive:
            return
        if not self.is_unavailable("bucket") and (desired := self.desired()) is not None:
            number = desired.attempt.number
            is_member = machine.name in {m.name for m in desired.attempt.hosts}
            is_on = desired.phase == "running" and is_member
            if machine.attempt and not (is_on and machine.attempt == number):
                machine.attempt = 0
                self._update_report(machine, state="ready", exit=None)
            if is_on and not machine.attempt and machine.newest_attempt < number:
                machine.attempt = machine.newest_attempt = number
                self._update_report(machine, state="running", attempt=number, exit=None)
        self.after(self.draw.uniform(1.0, 1.2), lambda: self._follow_desired_state(machine))

    def _end_if_idle(self, machine: SimulatedVm) -> None:
        """Powers the VM off once it has had no training and no launcher for `IDLE_SECONDS`."""
        if not machine.is_alive:
            return
        lease = self.objects.get(self.paths.lease.key)
        generation = None if self.is_unavailable("bucket") else 0 if lease is None else lease[1]
        machine.idle = next_idle(
            machine.idle, now=self.now, is_training=bool(machine.attempt), lease=generation
        )
        if machine.idle.seconds >= IDLE_SECONDS:
            machine.is_alive, machine.status = False, "TERMINATED"
        self.after(LEASE_SECONDS, lambda: self._end_if_idle(machine))

    def _finish(self, machine: SimulatedVm, code: int) -> None:
        """Ends the training process of a VM, and later those of its peers."""
        number = machine.attempt
        if not number:
            return
        machine.attempt = 0
        self._update_report(machine, state="ended", exit=int(code), reason=f"exit {int(code)}")
        follows = (
            code
            if code in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED)
            else ExitCode.PEER_LOST
        )
        for peer in [m for m in self.vms.values() if m.attempt == number]:
            self.after(
                self.draw.uniform(0.5, 9),
                lambda peer=peer: self._finish(peer, follows) if peer.attempt == number else None,
            )

    # Training.

    def _append(self, body: Any) -> None:
        self._seq += 1
        self.put(f"{self.log.key}/{file_name(self._seq)}", Record(self._seq, 1, 0.0, body).encode())

    def _train(self) -> None:
        self.after(self.draw.uniform(1.5, 2.5), self._train)
        desired = self.desired()
        if desired is None or desired.phase != "running" or self.is_unavailable("bucket"):
            return
        members = [self.vms.get(m.name) for m in desired.attempt.hosts]
        training = [m for m in members if m is not None and m.attempt == desired.attempt.number]
        lost = [m for m in members if m is None or not m.is_alive]
        alive = [m for m in training if m.is_alive]
        if lost and alive:
            self._finish(alive[0], ExitCode.PEER_LOST)
        elif len(training) == len(members):
            self._make_progress(desired, training)

    def _make_progress(self, desired: DesiredState, members: Sequence[SimulatedVm]) -> None:
        if self.paths.stop.key in self.objects:
            self._finish(members[0], ExitCode.STOPPED)
        elif not self.faults_are_over and self.draw.random() < self.rates.crash:
            culprit = self.draw.choice(members)
            self.excused |= {machine.name for machine in members}
            self._finish(culprit, self.draw.choice(CRASHES))
        elif self.step >= self.steps:
            self._finish(members[0], ExitCode.DONE)
        elif self.draw.random() < 0.5:
            self.step += 1
            fields = {**vars(COMMIT), "step": self.step, "path": f"checkpoints/{self.step}"}
            self._append(Commit(**fields))


class SimulatedCompute:
    """The part of the world that replaces `Compute`."""

    def __init__(self, cloud: SimulatedCloud) -> None:
        self.list, self.exists, self.create = cloud.list, cloud.exists, cloud.create
        self.events, self.status = cloud.events_of, cloud.status
        self.create_result, self.find_operation = cloud.create_result, cloud.find_operation
        self.delete, self.output = cloud.delete_vm, cloud.output
        self.resize_requests = SimulatedGroups(cloud)


class SimulatedGroups:
    """The part of the world that replaces `ResizeRequests`."""

    def __init__(self, cloud: SimulatedCloud) -> None:
        self._cloud = cloud
        self.gone: set[str] = set()

    def delete(self, group: InstanceGroup) -> None:
        if self._cloud.delete_group(group):
            self.gone.add(group.name)
