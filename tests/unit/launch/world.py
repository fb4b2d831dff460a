"""A small world for leaders: a bucket, a service, VMs with agents, and all that goes wrong there.

Time is simulated: it passes in calls and sleeps alone. The leaders in it are the real ones; what is
made up is what they meet. A leader may be killed, or paused while another one leads, at every call.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxres.faults import Exit, StorageUnavailable
from jaxres.launch.capacity_options import Trouble
from jaxres.launch.desired_state import Creation, Intent, Vm, unpacked
from jaxres.launch.gce_api import ServiceSilent
from jaxres.launch.observed_state import HOST_ERROR, Observed, Refused, Report
from jaxres.launch.paths import Places
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record, Start, file_name
from jaxres.storage import gcs_objects
from jaxres.storage.path import BucketPath
from tests.unit.records import CLAIM

EPOCH = 1.7e9
LIMIT = 30.0
"""Longest trying of one request to the bucket."""
PREEMPTED = "compute.instances.preempted"
CRASHES = (1, 137, Exit.BUG, Exit.HUNG, Exit.UNHEALTHY, Exit.PEER_LOST, Exit.STORAGE)
TROUBLES: tuple[Trouble, ...] = ("stockout", "quota", "preempted", "passing", "exists")
COMMIT = Commit(step=0, path="", manifest="sha256:0", bytes=3, known_good=False)


class Killed(BaseException):
    """The leader is killed here."""


@dataclass
class Machine:
    """A VM as it is, whatever anybody sees of it."""

    name: str
    id: int
    zone: str
    listed_from: float
    status: str = "RUNNING"
    is_alive: bool = True
    """Whether its processes are."""
    agent: Report | None = None
    part: int = 0
    """Attempt that it has a part in."""
    had: int = 0


@dataclass
class Operation:
    names: tuple[str, ...]
    done_at: float
    error: Refused | None


@dataclass
class Chances:
    """Of what may go wrong; all of it ends after `seconds`."""

    seconds: float = 1800.0
    silence: float = 0.03
    """Of a call of the service."""
    refusal: float = 0.3
    """Of a creation."""
    loss: float = 0.4
    """Of a VM, sooner or later."""
    crash: float = 0.02
    """Of a part, in each of its moments."""
    outages: int = 3
    """Of the bucket, and of the service."""
    interruptions: int = 4
    """Kills and pauses of leaders."""


@dataclass
class World:
    """All that leaders meet; `hold` is asked at every change of the intent."""

    seed: int
    steps: int
    places: Places
    chances: Chances = field(default_factory=Chances)
    hold: Callable[[Intent | None, Intent], None] = lambda before, after: None
    now: float = 0.0
    objects: dict[str, tuple[bytes, int, dict[str, str]]] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    events: dict[int, str] = field(default_factory=dict)
    """By id of a VM: what the service has done to it."""
    operations: dict[str, Operation] = field(default_factory=dict)
    refusals: dict[str, Refused] = field(default_factory=dict)
    created: dict[str, set[str]] = field(default_factory=dict)
    """By name of a VM: the requests that have asked for it."""
    excused: set[str] = field(default_factory=set)
    """VMs that have given a cause to be replaced."""
    other: Callable[[float], None] | None = None
    """Has another leader lead until then, while the one that calls is paused."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self._count = itertools.count(1)
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._outages: dict[str, list[tuple[float, float]]] = {
            who: [self._span() for _ in range(self.chances.outages)] for who in ("bucket", "gce")
        }
        self.step, self._seq = 0, 0
        self.interrupted: list[str] = []
        self.deadline = float("inf")
        """Of the leader that leads now."""
        self._append(CLAIM)
        self._append(Start(step=0, path=None, dataset="d", computation={}))
        self.after(1.0, self._train)

    def _span(self) -> tuple[float, float]:
        begins = self.draw.uniform(20, self.chances.seconds)
        return begins, begins + self.draw.choice([3.0, 12.0, 25.0, 90.0])

    @property
    def log(self) -> BucketPath:
        folder = RunDir(self.places.run).log
        assert isinstance(folder, BucketPath)
        return folder

    # Time.

    def after(self, seconds: float, deed: Callable[[], object]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._count), deed))

    def let_pass(self, seconds: float) -> None:
        until = self.now + seconds
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, deed = heapq.heappop(self._agenda)
            deed()
        self.now = until

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return EPOCH + self.now

    def sleep(self, seconds: float) -> None:
        self.let_pass(seconds)
        self._interrupt("asleep")

    @property
    def is_calm(self) -> bool:
        return self.now > self.chances.seconds

    def is_out(self, who: str) -> bool:
        return any(begins <= self.now < ends for begins, ends in self._outages[who])

    def _interrupt(self, where: str) -> None:
        """Kills or pauses the leader that is just there, or does not."""
        if self.now > self.deadline:
            raise Killed
        if where == "log":  # This process's own lock on what it knows of it is held.
            return
        few = len(self.interrupted) >= self.chances.interruptions or self.is_calm
        chance = 0.02 if where in ("create", "intent.json") else 0.001
        if few or self.other is None or self.draw.random() > chance:
            return
        self.interrupted.append(where)
        if self.draw.random() < 0.5:
            raise Killed
        self.other(self.now + self.draw.choice([5.0, 30.0, 120.0, 5000.0]))

    # The bucket, as `jaxres.bucket` has it.

    def _bucket(self, where: str) -> None:
        self.let_pass(0.01)
        self._interrupt(where)
        began = self.now
        while self.is_out("bucket"):
            pause = min(self.draw.uniform(0.1, 6.0), began + LIMIT - self.now)
            if pause <= 0.01:
                raise StorageUnavailable("the bucket has not answered")
            self.let_pass(pause)

    def put(self, key: str, data: bytes, words: Mapping[str, str] | None = None) -> int:
        generation = next(self._count)
        self.objects[key] = data, generation, dict(words or {})
        return generation

    def write(
        self,
        path: BucketPath,
        data: bytes,
        *,
        over: int | None,
        words: Mapping[str, str] | None = None,
    ) -> int | None:
        self._bucket(path.name)
        there = self.objects.get(path.key)
        if over is not None and over != (0 if there is None else there[1]):
            return None
        if path == self.places.intent:
            self.hold(None if there is None else unpacked(there[0], path), unpacked(data, path))
        generation = self.put(path.key, data, words)
        self._interrupt("written")
        return generation

    def read_at(self, path: BucketPath) -> tuple[bytes, int] | None:
        self._bucket("log" if path.parent == self.log else path.name)
        found = self.objects.get(path.key)
        return None if found is None else found[:2]

    def read(self, path: BucketPath) -> bytes | None:
        found = self.read_at(path)
        return None if found is None else found[0]

    def read_all(self, paths: Sequence[BucketPath]) -> list[bytes | None]:
        return [self.read(path) for path in paths]

    def stat(self, path: BucketPath) -> object:
        return self.read_at(path)

    def delete(self, path: BucketPath) -> bool:
        self._bucket("delete")
        return self.objects.pop(path.key, None) is not None

    def _in(self, folder: BucketPath) -> Iterator[str]:
        prefix = f"{folder.key}/"
        return (key.removeprefix(prefix) for key in self.objects if key.startswith(prefix))

    def names(self, folder: BucketPath, *, after: str = "") -> list[str]:
        self._bucket("log")
        return sorted({key.partition("/")[0] for key in self._in(folder) if key >= after})

    def listed(self, folder: BucketPath) -> dict[str, tuple[int, dict[str, str]]]:
        self._bucket("list")
        return {n: self.objects[f"{folder.key}/{n}"][1:] for n in self._in(folder)}

    def delete_tree(self, folder: BucketPath) -> None:
        for name in [*self._in(folder)]:
            self.delete(folder / name)

    def patch(self, monkeypatch: Any) -> None:
        """Stands in for the bucket."""
        for name in (
            *("write", "read", "read_at", "read_all", "stat", "delete", "delete_tree"),
            *("names", "listed"),
        ):
            monkeypatch.setattr(gcs_objects, name, getattr(self, name))

    def intent(self) -> Intent | None:
        found = self.objects.get(self.places.intent.key)
        return None if found is None else unpacked(found[0], self.places.intent)

    # The service, as `jaxres.launch.compute.Compute` has it.

    def _service(self, where: str) -> None:
        self.let_pass(0.03)
        self._interrupt(where)
        if self.is_out("gce"):
            self.let_pass(self.draw.uniform(0.01, 15.0))
            raise ServiceSilent("503")
        self._flake()

    def _flake(self) -> None:
        if not self.is_calm and self.draw.random() < self.chances.silence:
            raise ServiceSilent("503, as often")

    def list(self, run: str) -> dict[str, Observed]:
        self._service("list")
        seen = [m for m in self.machines.values() if m.listed_from <= self.now]
        return {m.name: Observed(m.name, m.zone, m.status, "10.0.0.1", m.id) for m in seen}

    def events_of(self, zone: str) -> dict[int, str]:
        self._service("events")
        return self.events

    def exists(self, name: str, zone: str) -> bool:
        self._service("get")
        return name in self.machines

    def create(self, creation: Creation, vms: Sequence[Vm], machine: object) -> str | Refused:
        del machine
        zone = vms[0].zone
        way = self.draw.random()
        try:
            self._service("create")
            if way < 0.05 and not self.is_calm:
                raise ServiceSilent("read timeout")
        except (ServiceSilent, Killed):
            if way < 0.5:  # It is under way, and comes late.
                self.after(self.draw.uniform(0, 15), lambda: self._take(creation, zone))
            raise
        answer = self._take(creation, zone)
        self._flake()
        self._interrupt("create")
        return answer

    def _take(self, creation: Creation, zone: str) -> str | Refused:
        request = creation.request_id
        if request in self.operations:
            return request
        if request in self.refusals:
            return self.refusals[request]
        refused = None
        if not self.is_calm and self.draw.random() < self.chances.refusal:
            refused = Refused(self.draw.choice(TROUBLES), "as it happens")
            if self.draw.random() < 0.4:
                return self.refusals.setdefault(request, refused)
        seconds = self.draw.choice([2.0, 10.0, 40.0, 200.0])
        hangs = not self.is_calm and self.draw.random() < 0.05
        ends = self.now + (float("inf") if hangs else seconds)
        self.operations[request] = Operation(creation.names, ends, refused)
        for name in creation.names:
            self.created.setdefault(name, set()).add(request)
            if refused is None or self.draw.random() < 0.5:
                late = self.draw.uniform(0, seconds)
                self.after(late, lambda name=name: self._bear(name, zone))
            if refused is not None:  # Rolled back before the operation ends.
                self.after(seconds - 1e-6, lambda name=name: self._vanish(name))
        return request

    def became_of(self, operation: str, zone: str) -> Refused | bool:
        self._service("operation")
        found = self.operations[operation]
        return False if self.now < found.done_at else found.error or True

    def operation_of(self, creation: Creation, zone: str) -> str | None:
        self._service("operation")
        return creation.request_id if creation.request_id in self.operations else None

    def delete_vm(self, name: str, zone: str) -> None:
        intent = self.intent()
        assert intent is not None
        assert name not in intent.names, f"{name} is deleted, and it is meant to be"
        self._service("delete")
        if (machine := self.machines.get(name)) is not None:
            machine.is_alive, machine.status = False, "STOPPING"
            self.after(self.draw.uniform(1, 40), lambda: self._vanish(name))
        self._flake()

    # VMs and their agents.

    def _bear(self, name: str, zone: str) -> None:
        machine = Machine(name, next(self._count), zone, self.now + self.draw.uniform(0, 8))
        self.machines[name] = machine
        if not self.is_calm and self.draw.random() < self.chances.loss:
            self.after(self.draw.uniform(5, 300), lambda: self._lose(machine))
        if self.is_calm or self.draw.random() > 0.03:
            self.after(self.draw.uniform(3, 20), lambda: self._boot(machine))
        else:
            self.excused.add(name)

    def _vanish(self, name: str) -> None:
        if (machine := self.machines.pop(name, None)) is not None:
            machine.is_alive = False

    def _lose(self, machine: Machine) -> None:
        if not machine.is_alive:
            return
        self.excused.add(machine.name)
        kind = self.draw.choice(["silently", "halted", "gone", "notice"])
        if self.draw.random() < 0.5:
            event = PREEMPTED if kind == "notice" else HOST_ERROR
            self.after(self.draw.uniform(0, 60), lambda: self.events.update({machine.id: event}))
        if kind == "notice" and machine.agent is not None:
            self._say(machine, notice="is preempted")
            self._finish(machine, Exit.PREEMPTED)
            self.after(self.draw.uniform(10, 120), lambda: self._vanish(machine.name))
            return
        machine.is_alive = False
        if kind == "halted":
            machine.status = "TERMINATED"
        if kind in ("halted", "gone"):
            self.after(self.draw.uniform(0, 60), lambda: self._vanish(machine.name))

    def _boot(self, machine: Machine) -> None:
        if machine.is_alive:
            machine.agent = Report("ready", f"{next(self._count)}")
            self._beat(machine)
            self._follow(machine)

    def _say(self, machine: Machine, **words: Any) -> None:
        if machine.agent is not None:
            fields = {**vars(machine.agent), **words}
            machine.agent = Report(**fields)

    def _beat(self, machine: Machine) -> None:
        if not machine.is_alive or machine.agent is None:
            return None
        if self.is_out("bucket"):
            return self.after(self.draw.uniform(0.1, 6.0), lambda: self._beat(machine))
        self.put(self.places.report(machine.name).key, b"", machine.agent.words())
        return self.after(self.draw.uniform(2.0, 3.5), lambda: self._beat(machine))

    def _follow(self, machine: Machine) -> None:
        """Starts and ends the part that the intent says."""
        if not machine.is_alive:
            return
        if not self.is_out("bucket") and (intent := self.intent()) is not None:
            number = intent.attempt
            is_member = machine.name in {m.name for m in intent.members}
            is_on = intent.phase == "running" and is_member
            if machine.part and not (is_on and machine.part == number):
                machine.part = 0
                self._say(machine, state="ready", exit=None)
            if is_on and not machine.part and machine.had < number:
                machine.part = machine.had = number
                self._say(machine, state="running", attempt=number, exit=None)
        self.after(self.draw.uniform(1.0, 1.2), lambda: self._follow(machine))

    def _finish(self, machine: Machine, code: int) -> None:
        """Ends a part, and the others' of its attempt."""
        number = machine.part
        if not number:
            return
        machine.part = 0
        self._say(machine, state="ended", exit=int(code), reason=f"exit {int(code)}")
        follows = code if code in (Exit.DONE, Exit.STOPPED, Exit.PREEMPTED) else Exit.PEER_LOST
        for peer in [m for m in self.machines.values() if m.part == number]:
            self.after(
                self.draw.uniform(0.5, 9),
                lambda peer=peer: self._finish(peer, follows) if peer.part == number else None,
            )

    # The training.

    def _append(self, body: Any) -> None:
        self._seq += 1
        self.put(f"{self.log.key}/{file_name(self._seq)}", Record(self._seq, 1, 0.0, body).encode())

    def _train(self) -> None:
        self.after(self.draw.uniform(1.5, 2.5), self._train)
        intent = self.intent()
        if intent is None or intent.phase != "running" or self.is_out("bucket"):
            return
        members = [self.machines.get(m.name) for m in intent.members]
        there = [m for m in members if m is not None and m.part == intent.attempt]
        lost = [m for m in members if m is None or not m.is_alive]
        alive = [m for m in there if m.is_alive]
        if lost and alive:
            self._finish(alive[0], Exit.PEER_LOST)
        elif len(there) == len(members):
            self._make_progress(intent, there)

    def _make_progress(self, intent: Intent, parts: Sequence[Machine]) -> None:
        if self.places.stop.key in self.objects:
            self._finish(parts[0], Exit.STOPPED)
        elif not self.is_calm and self.draw.random() < self.chances.crash:
            culprit = self.draw.choice(parts)
            self.excused |= {machine.name for machine in parts}
            self._finish(culprit, self.draw.choice(CRASHES))
        elif self.step >= self.steps:
            self._finish(parts[0], Exit.DONE)
        elif self.draw.random() < 0.5:
            self.step += 1
            words = {**vars(COMMIT), "step": self.step, "path": f"checkpoints/{self.step}"}
            self._append(Commit(**words))


class Service:
    """What a leader has of the service."""

    def __init__(self, world: World) -> None:
        self.list, self.exists, self.create = world.list, world.exists, world.create
        self.events = world.events_of
        self.became_of, self.operation_of = world.became_of, world.operation_of
        self.delete = world.delete_vm
