"""A small model of VMs, agents, training and capacity, for the pure decisions of `launch gce`.

Unlike simulated_cloud.py it has no bucket and no API client: a modelled launcher passes what it
observes to the decisions themselves, so one world takes milliseconds. Time passes in `advance`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from jaxres.cluster.host_identity import HostIdentity
from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.launch.gce.state.boot_report import BootReport, VmBoot
from jaxres.launch.gce.state.capacity_options import CreateErrorKind
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import (
    HOST_ERROR,
    AgentReport,
    CreateFailed,
    RunLogSummary,
    VmStatus,
)
from jaxres.launch.gce.state.run_speed import RunSpeed
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.run_log import AttemptEnded

EPOCH = 1.7e9
PREEMPTED = "compute.instances.preempted"
FAR_SECONDS = 60 * 86400.0
EXITS = (1, 137, 139, *(code for code in ExitCode if code not in (ExitCode.DONE, ExitCode.USAGE)))
FINAL = (ExitCode.STOPPED, ExitCode.CONFIG, ExitCode.DIVERGED, ExitCode.UNRESTORABLE)
"""Exits that end a job at once."""
STEP_SECONDS, START_SECONDS = 6.0, 5.0
"""Mean time of a step with any number of hosts, and of the start of an attempt."""
FaultKind = Literal[
    "preempted",
    "preempted_with_notice",
    "host_error",
    "halted",
    "gone",
    "maintenance_far_ahead",
    "notice_withdrawn",
    "silent_agent",
    "slow_put",
    "crash",
    "hang",
    "failed_boot",
    "silent_boot",
    "failed_creation",
    "stockout",
    "bucket_away",
    "service_away",
    "launcher_killed",
]
FAULTS: tuple[FaultKind, ...] = FaultKind.__args__
HARMLESS: tuple[FaultKind, ...] = ("maintenance_far_ahead", "silent_agent", "slow_put")
"""What happens to a VM that lives and must be kept."""
NOTICES: tuple[FaultKind, ...] = ("preempted_with_notice", "notice_withdrawn")
LOSSES: tuple[FaultKind, ...] = (
    "preempted",
    "preempted_with_notice",
    "host_error",
    "halted",
    "gone",
)


@dataclass
class ModelVm:
    """The true state of a VM."""

    name: str
    id: int
    zone: str
    option: int
    physical_host: str
    listed_from: float
    boots_until: float
    """When its agent reports first; inf: never."""
    status: str = "RUNNING"
    is_alive: bool = True
    agent: AgentReport | None = None
    generation: int = 0
    reported_at: float = -inf
    attempt: int = 0
    """Attempt in which it trains; 0: none."""
    newest_attempt: int = 0
    stopped_until: float = 0.0
    """Until when its agent reports nothing, though the VM lives."""
    boot_error: str = ""
    has_failed: bool = False
    """Whether it may be replaced."""


@dataclass
class Operation:
    done_at: float
    error: CreateFailed | None


@dataclass
class RandomWorld:
    """The environment of a launcher; `write` is its desired state."""

    seed: str
    config: RunConfig
    steps: int
    now: float = 0.0
    vms: dict[str, ModelVm] = field(default_factory=dict)
    desired: DesiredState | None = None
    operations: dict[str, Operation | CreateFailed] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)
    step: int = 0
    step_at: float = 0.0
    log_seq: int = 1
    last_end: tuple[int, AttemptEnded] | None = None
    heartbeat: int = 0
    faulty: list[FaultyHost] = field(default_factory=list)
    limits: dict[int, int] = field(default_factory=dict)
    """Most VMs of a capacity option that may exist: its quota or reservation."""
    num_made: int = 0
    num_spares_used: int = 0
    """Most slots that spares have taken."""
    num_cheaper_sets: int = 0
    """How often VMs of a cheaper option were requested beside an attempt."""
    cheaper_set_ended_at: float = -inf
    """When such VMs were last deleted, or have become hosts."""
    num_faults: int = 0
    """Faults that were seen and that may cost VMs."""
    was_refused: bool = False
    """Whether a creation was refused or has failed, not only because the job's own VMs exist."""
    faults_until: float = 0.0
    always: FaultKind | None = None
    """A fault that never ends: each VM or attempt has it."""
    kill: Literal["", "before the write", "before acting", "after acting"] = ""
    """Where the launcher is killed at its next cycle."""
    events_stored: dict[int, LaunchEvent] = field(default_factory=dict)
    """Events of the launcher that are no longer in the desired state, by number."""
    seen: list[str] = field(default_factory=list)
    speed: RunSpeed = field(default_factory=RunSpeed)
    kinds: Counter[str] = field(default_factory=Counter)
    """How often the launcher has recorded each kind of event."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.draw_save = random.Random(f"saves-{self.seed}")
        self._count = itertools.count(1)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._away: dict[str, float] = {"bucket": 0.0, "service": 0.0}
        self._stockouts: dict[tuple[int, str], float] = {}
        self._freed: list[tuple[int, float]] = []
        """Option of a deleted VM, and until when it counts against the quota."""
        self._next: list[FaultKind] = []
        self._hung_attempt = 0
        self.after(1.0, self._train)

    # Time.

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), action))

    def advance(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until

    @property
    def gce(self) -> GceSection:
        assert self.config.launch.gce is not None
        return self.config.launch.gce

    def wall(self) -> float:
        return EPOCH + self.now

    def is_away(self, name: str) -> bool:
        return self.now < self._away[name]

    def note(self, line: str) -> None:
        self.seen.append(f"{self.now:8.1f} {line}")

    # Faults.

    def inject(self, kind: FaultKind) -> None:
        """Does what a fault does, if there is something that it can happen to."""
        self.note(f"fault: {kind}")
        living = [vm for vm in self.vms.values() if vm.is_alive]
        if kind in LOSSES or kind in HARMLESS or kind in NOTICES:
            if living:
                self.hit(self.draw.choice(living), kind)
        elif kind in ("failed_boot", "silent_boot", "failed_creation"):
            self._next.append(kind)
        elif kind == "stockout":
            sites = [(n, z) for n, o in enumerate(self.gce.capacity_options) for z in o.zones]
            for site in self.draw.sample(sites, self.draw.randint(1, len(sites))):
                self._stockouts[site] = self.now + self.draw.uniform(60, 1500)
            self.num_faults += 1
        elif kind in ("bucket_away", "service_away"):
            self._away[kind.removesuffix("_away")] = self.now + self.draw.choice([3.0, 30.0, 400.0])
            self.num_faults += 1
        elif kind == "launcher_killed":
            self.kill = self.draw.choice(["before the write", "before acting", "after acting"])
        elif kind == "crash":
            self._crash(self.draw.choice(EXITS))
        elif kind == "hang" and self.desired is not None and self.desired.attempt.number:
            self._hung_attempt = self.desired.attempt.number
            self.num_faults += 1

    def leave_without_preferred(self, seconds: float) -> None:
        """Creates no VM of the first capacity option for some time."""
        for zone in self.gce.capacity_options[0].zones:
            self._stockouts[0, zone] = self.now + seconds

    def lose_in_a_stockout(self, draw: random.Random) -> None:
        """Ends some VMs, and creates none of any capacity option for a while."""
        living = [vm for vm in self.vms.values() if vm.is_alive]
        for number, option in enumerate(self.gce.capacity_options):
            for zone in option.zones:
                self._stockouts[number, zone] = self.now + draw.uniform(60, 1500)
        for vm in draw.sample(living, min(len(living), draw.choice([1, 1, 2, 3]))):
            self.hit(vm, draw.choice(LOSSES))

    def hit(self, vm: ModelVm, kind: FaultKind) -> None:
        """Does to one VM what a fault does."""
        if not vm.is_alive:
            return
        if kind == "slow_put":
            vm.stopped_until = self.now + self.draw.uniform(5, 12)
        elif kind == "silent_agent":
            longest = 300.0 if self.is_training else 40.0  # Else nothing shows that it lives.
            vm.stopped_until = self.now + self.draw.uniform(20.0, longest)
        elif kind == "notice_withdrawn":
            self._withdraw(vm)
        elif kind == "maintenance_far_ahead":
            self._update(vm, notice="maintenance", notice_until=self.wall() + FAR_SECONDS)
            if self.draw.random() < 0.5:
                called_off = dict[str, Any](notice="", notice_until=None)
                self.after(self.draw.uniform(60, 600), lambda: self._update(vm, **called_off))
        else:
            self._lose(vm, kind)

    def _withdraw(self, vm: ModelVm) -> None:
        """Announces a near maintenance, which is called off while the attempt goes on.

        The VM may be replaced meanwhile: no attempt would start on it.
        """
        if vm.agent is None or vm.has_failed or vm.agent.notice:
            return
        self.num_faults += 1
        vm.has_failed = True
        self._update(vm, notice="maintenance", notice_until=self.wall() + 700.0)

        def call_off() -> None:
            if vm.agent is not None and vm.agent.notice == "maintenance":
                vm.has_failed = False
                self._update(vm, notice="", notice_until=None)

        self.after(self.draw.uniform(5, 300), call_off)

    def _lose(self, vm: ModelVm, kind: FaultKind) -> None:
        self.num_faults += 1
        vm.has_failed = True
        event = HOST_ERROR if kind == "host_error" else PREEMPTED
        if self.draw.random() < 0.7 and kind != "gone":
            self.after(self.draw.uniform(0, 90), lambda: self.events.update({vm.id: event}))
        if kind == "preempted_with_notice":
            seconds = self.draw.choice([0.0, 30.0, 120.0])
            self._update(vm, notice="is preempted", notice_until=self.wall() + seconds)
            if vm.attempt:
                save = self.draw.choice([3.0, 40.0])
                self.after(min(seconds, save), lambda: self._finish(vm, ExitCode.PREEMPTED))
            self.after(seconds, lambda: self._remove(vm.name))
            return
        vm.is_alive = False
        if kind == "halted":
            vm.status = "TERMINATED"
        if kind == "gone":
            self._remove(vm.name)
        elif kind == "preempted":
            vm.status = "STOPPING"
            self.after(self.draw.uniform(1, 60), lambda: self._remove(vm.name))

    def _crash(self, code: int) -> None:
        training = self._training()
        if not training:
            return
        self.num_faults += 1
        culprit = self.draw.choice(training)
        if code == ExitCode.UNHEALTHY and len(self.faulty) < 3:
            found = HostIdentity(culprit.name, str(culprit.id), culprit.physical_host)
            self.faulty.append(FaultyHost(found, None, culprit.attempt, 0.0, 1, "Xid 79", ("n",)))
        for vm in training:  # It may be the host that two failures name, or that is unhealthy.
            vm.has_failed = True
        self._finish(culprit, code)

    # Capacity and VMs.

    def create(self, request: str, names: tuple[str, ...], zone: str, option: int) -> None:
        """Accepts or refuses a request; the same request again changes nothing."""
        if request in self.operations:
            return
        error = self._refusal(names, zone, option)
        seconds = self.draw.uniform(2, 40)
        if error is not None and self.draw.random() < 0.5:
            self.operations[request] = error
            return
        if error is None and self._takes("failed_creation"):
            kinds: tuple[CreateErrorKind, ...] = ("preempted", "passing", "stockout")
            kind = "preempted" if self.always else self.draw.choice(kinds)
            error = CreateFailed(kind, "rolled back")
            self.num_faults += 1
            self.was_refused = True
            for name in names[: self.draw.randint(0, len(names))]:
                self._make(name, zone, option, listed=0.0)
                self.vms[name].has_failed = True
                self.after(seconds, lambda name=name: self._remove(name))
        elif error is None:
            for name in names:
                self._make(name, zone, option, listed=self.draw.uniform(0, seconds))
        self.operations[request] = Operation(self.now + seconds, error)

    def _refusal(self, names: Iterable[str], zone: str, option: int) -> CreateFailed | None:
        if self.now < self._stockouts.get((option, zone), 0.0):
            self.was_refused = True
            return CreateFailed("stockout", "no capacity")
        self._freed = [(o, until) for o, until in self._freed if until > self.now]
        used = sum(vm.option == option for vm in self.vms.values())
        used += sum(o == option for o, _ in self._freed)
        if used + len(tuple(names)) <= self.limits.get(option, 10**6):
            return None
        is_reserved = self.gce.capacity_options[option].uses_reservation
        return CreateFailed("stockout" if is_reserved else "quota", "the limit is reached")

    def _takes(self, *kinds: FaultKind) -> FaultKind | None:
        """Returns the fault that the next boot or creation has; None: none."""
        if self.always in kinds:
            return self.always
        for index, kind in enumerate(self._next):
            if kind in kinds:
                return self._next.pop(index)
        return None

    def _make(self, name: str, zone: str, option: int, *, listed: float) -> None:
        assert name not in self.vms, f"{name} is made twice"
        boots = self.now + listed + self.draw.uniform(5, 90)
        host = f"/host/{self.draw.randrange(40)}"
        new = ModelVm(name, next(self._count), zone, option, host, self.now + listed, boots)
        self.vms[name] = new
        self.num_made += 1
        if any(known.identity.physical_host == host for known in self.faulty):
            self.num_faults += 1
            new.has_failed = True
        fault = self._takes("failed_boot", "silent_boot")
        if fault is not None:
            self.num_faults += 1
            new.has_failed, new.boots_until = True, inf
        if fault == "failed_boot":
            error = self.draw.choice(["no image", "denied", "curl: (28)"])
            self.after(60.0, lambda: setattr(new, "boot_error", error))
        elif fault is None:
            self.after(boots - self.now, lambda: self._start_agent(new))
        if self.always in LOSSES or self.always in HARMLESS:
            kind = self.always
            self.after(boots + 6.0 - self.now, lambda: self.hit(new, kind))

    def delete(self, name: str) -> None:
        if (vm := self.vms.get(name)) is not None and vm.status != "STOPPING":
            vm.is_alive, vm.status = False, "STOPPING"
            self.after(self.draw.uniform(1, 60), lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        if (vm := self.vms.pop(name, None)) is not None:
            vm.is_alive = False
            self._freed.append((vm.option, self.now + self.draw.uniform(0, 60)))

    def listed(self) -> dict[str, VmStatus]:
        return {
            vm.name: VmStatus(
                *(vm.name, vm.zone, vm.status, "10.0.0.1", vm.id, "", "code", vm.physical_host)
            )
            for vm in self.vms.values()
            if vm.listed_from <= self.now
        }

    def boots(self) -> dict[str, VmBoot]:
        return {
            vm.name: VmBoot(BootReport("image", "failed", vm.boot_error))
            for vm in self.vms.values()
            if vm.boot_error
        }

    # Agents.

    def reports(self) -> dict[str, tuple[int, Mapping[str, str]]]:
        """Returns the agents' reports; those of agents that can report are new at each call."""
        for vm in self.vms.values():
            if vm.agent is not None and vm.is_alive and self.now >= vm.stopped_until:
                vm.generation, vm.reported_at = next(self._count), self.now
        return {
            vm.name: (vm.generation, vm.agent.metadata())
            for vm in self.vms.values()
            if vm.agent is not None and vm.generation
        }

    def write(self, desired: DesiredState) -> None:
        """Makes a state the desired one; the agents follow it a little later."""
        before, self.desired = self.desired, desired
        draining = desired.attempt.draining
        if draining and (before is None or before.attempt.draining != draining):
            for vm in (self.vms[name] for name in draining if name in self.vms):
                save = self.draw_save.uniform(2, 20)
                self.after(save, lambda vm=vm: self._finish(vm, ExitCode.PREEMPTED))
        now = (desired.attempt.number, desired.phase)
        if before is None or (before.attempt.number, before.phase) != now:
            for vm in self.vms.values():
                self.after(self.draw.uniform(1, 4), lambda vm=vm: self._follow(vm))

    def _start_agent(self, vm: ModelVm) -> None:
        if vm.is_alive:
            vm.agent = AgentReport("ready", f"{vm.id}")
            self._follow(vm)

    def _update(self, vm: ModelVm, **changes: Any) -> None:
        if vm.agent is not None:
            vm.agent = replace(vm.agent, **changes)

    def _follow(self, vm: ModelVm) -> None:
        """Starts and ends training as the desired state has it."""
        desired = self.desired
        if not vm.is_alive or vm.agent is None or desired is None:
            return
        if self.is_away("bucket"):
            self.after(5.0, lambda: self._follow(vm))
            return
        is_on = desired.phase == "running" and vm.name in {m.name for m in desired.attempt.hosts}
        if vm.attempt and not (is_on and vm.attempt == desired.attempt.number):
            vm.attempt = 0
            self._update(vm, state="ready", exit=None)
        if is_on and not vm.attempt and vm.newest_attempt < desired.attempt.number:
            vm.attempt = vm.newest_attempt = desired.attempt.number
            self._update(vm, state="running", attempt=desired.attempt.number, exit=None, reason="")

    # Training.

    def _members(self) -> list[ModelVm | None]:
        if self.desired is None or self.desired.phase != "running":
            return []
        return [self.vms.get(host.name) for host in self.desired.attempt.hosts]

    def _training(self) -> list[ModelVm]:
        assert self.desired is not None
        number = self.desired.attempt.number
        return [v for v in self._members() if v is not None and v.is_alive and v.attempt == number]

    @property
    def is_training(self) -> bool:
        """Whether all hosts of the attempt train."""
        members = self._members()
        return bool(members) and len(self._training()) == len(members)

    def _train(self) -> None:
        self.after(self.draw.uniform(4, 8), self._train)
        members = self._members()
        if not members or self.is_away("bucket"):
            return
        assert self.desired is not None
        training = self._training()
        if training and any(m is None or not m.is_alive for m in members):
            self._finish(training[0], ExitCode.PEER_LOST)
        elif len(training) == len(members):
            self._make_progress(training)

    @property
    def has_near_notice(self) -> bool:
        """Whether an agent reports a notice that leaves little time."""
        agents = [vm.agent for vm in self.vms.values() if vm.agent is not None]
        ends = [agent.notice_until for agent in agents if agent.notice_until is not None]
        return any(until - self.wall() < FAR_SECONDS / 2 for until in ends)

    @property
    def is_hung(self) -> bool:
        """Whether the attempt commits nothing, though its processes live."""
        assert self.desired is not None
        return self.always == "hang" or self._hung_attempt == self.desired.attempt.number

    def _make_progress(self, training: list[ModelVm]) -> None:
        if self.always == "crash":
            self._crash(137)
        elif self.step >= self.steps:
            self._finish(training[0], ExitCode.DONE)
        else:
            self.heartbeat += 1
            if not self.is_hung and self.always not in LOSSES:
                self.step, self.step_at = self.step + 1, self.now
                self.log_seq += 1

    def _finish(self, vm: ModelVm, code: int) -> None:
        """Ends the training process of a VM, and later those of its peers."""
        number, vm.attempt = vm.attempt, 0
        if not number or not vm.is_alive:
            return
        self._update(vm, state="ended", exit=int(code), reason=f"exit {int(code)}")
        if self.draw.random() < 0.7:
            self.log_seq += 1
            end = AttemptEnded(exit=int(code), reason="recorded", committed=False)
            self.last_end = self.log_seq, end
        shared = code in (0, 75, 76) or (code in set(ExitCode) and exit_row(code).is_agreed)
        follows = code if shared else ExitCode.PEER_LOST
        for peer in [m for m in self.vms.values() if m.attempt == number]:
            self.after(
                self.draw.uniform(0.5, 9),
                lambda peer=peer: self._finish(peer, follows) if peer.attempt == number else None,
            )

    def log(self) -> RunLogSummary:
        seq, end = self.last_end or (0, None)
        hosts = len(self.desired.attempt.hosts) if self.desired is not None else 0
        self.speed = (
            RunSpeed(STEP_SECONDS * hosts, START_SECONDS) if hosts and self.step else self.speed
        )
        known = tuple(self.faulty)
        return RunLogSummary(self.step, self.log_seq, end, seq, 30.0, self.speed, known)
