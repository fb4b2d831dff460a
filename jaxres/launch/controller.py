"""Leads a job on VMs: looks, decides, writes what is to be, then does it. No jax.

It may be killed at any instant: whatever it does follows from what it has written before, and may
be done twice. Nothing is done to a VM unless the lease is held at that moment. The training needs
no leader as long as nothing happens to it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jaxres.clock import Clock, boot_seconds
from jaxres.config import RunConfig
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.launch import instance_spec, reconcile
from jaxres.launch.desired_state import Creation, End, Intent, Record, Vm
from jaxres.launch.gce_api import RUN_LABEL, Compute, ServiceSilent
from jaxres.launch.instance_spec import Machine
from jaxres.launch.lease import Lease
from jaxres.launch.observed_state import Log, Observed, Refused, Report, Seen, Sight
from jaxres.launch.paths import Places
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects

CYCLE_SECONDS = 1.0
LIST_SECONDS = 5.0
"""Between two lists of the service while an attempt is on; all other times every cycle asks. And
always between two looks at what it has done to VMs by itself."""
MOST_ASKED_FOR = 50
"""VMs that one look asks for by name; the lease waits for it."""
AGAIN_SECONDS = 10.0
"""Until a VM that is still there is asked to end again."""
ENDING_SECONDS = 90.0
"""The same for one that is ending, or that lists do not show."""
LONGEST_PAUSE_SECONDS = 30.0
"""Between two tries of a creation that the service does not answer."""
TAKE_BACK_SECONDS = 300.0
"""Longest stay of a leader that was overtaken, to delete what it has asked for before."""
MANAGED_LABEL = "jaxres-managed"


@dataclass
class Leader:
    """One launcher that holds, or held, the lease of a run."""

    places: Places
    config: RunConfig
    compute: Compute
    lease: Lease
    record: Record
    clock: Clock
    tell: Callable[[str], None]
    """Tells a person."""
    awake_or_not: Callable[[], float] = boot_seconds
    """Seconds that go on while the machine sleeps: VMs cost money then, too."""
    _sight: Sight = field(default_factory=Sight)
    _records: list[run_log.Record] = field(default_factory=list)
    _log: Log = field(default_factory=Log)
    _operations: dict[str, str | Refused] = field(default_factory=dict)
    """By request: the operation that it has started, or how it was refused."""
    _vms: dict[str, Observed] | None = None
    _listed_at: float = -LIST_SECONDS
    _told_at: float = -LIST_SECONDS
    _looked_at: float = 0.0
    _waited: float = 0.0
    """For the bucket, since what the agents say was looked at last."""
    _deleted_at: dict[str, float] = field(default_factory=dict)
    _strangers: set[str] = field(default_factory=set)
    """VMs that nobody wants, as a person was told."""
    _stopped_attempt: int = 0
    _pause: float = CYCLE_SECONDS / 2
    _asked: Creation | None = None
    """A creation that this leader has asked for, and of which it has not seen the end."""
    _asked_in: str = ""
    """In which zone."""
    _asked_at: float = 0.0
    """When, or when it began to lead."""
    _not_before: float = 0.0
    """Earliest next try of a creation that was not answered."""
    _began: float | None = None
    """The wall clock when this machine was started, as it was told once."""
    _silences: set[str] = field(default_factory=set)
    """Who does not answer, as a person was told."""

    def lead(self) -> End:
        """Leads the job to its end, and returns that.

        Raises:
          Fenced: another launcher leads by now.
        """
        self._asked_at = self.clock.monotonic()
        try:
            while (intent := self._cycle()) is None or intent.phase != "ended":
                self.clock.sleep(CYCLE_SECONDS)
        except Fenced:
            self._take_back()
            raise
        assert intent.end is not None, intent
        self._tidy_up(intent)
        return intent.end

    def _cycle(self) -> Intent | None:
        """Looks, decides and acts once; None: the bucket did not answer."""
        intent = self.record.intent
        assert intent is not None, "nothing is meant to be yet"
        try:
            with self._waiting():
                self.lease.renew()
            seen = self._look(intent)
            following = reconcile.decide(intent, seen, self.config)
            if following.intent != intent:
                if not self.lease.held():
                    return None
                with self._waiting():
                    intent = self.record.write(following.intent, epoch=self.lease.epoch)
            for words in following.words:
                self.tell(words)
            self._hear("the bucket", True)
        except StorageUnavailable as error:
            self._sight.bucket_silent()
            self._hear("the bucket", False, str(error))
            return None
        self._act(intent, seen)
        return intent

    def _hear(self, who: str, answers: bool, why: str = "") -> None:
        """Tells a person of a silence once, and of its end."""
        if answers and who in self._silences:
            self._silences.discard(who)
            self.tell(f"{who} answers again")
        elif not answers and who not in self._silences:
            self._silences.add(who)
            self.tell(
                f"{who} does not answer; the training goes on, nothing is judged lost ({why})"
            )

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts how long the bucket takes."""
        began = self.clock.monotonic()
        try:
            yield
        finally:
            self._waited += self.clock.monotonic() - began

    # Looking.

    def _look(self, intent: Intent) -> Seen:
        with self._waiting():
            self._read_log()
            stop = gcs_objects.stat(self.places.stop) is not None
            down = gcs_objects.stat(self.places.down) is not None
            listed = gcs_objects.listed(self.places.reports)
        now = self.clock.monotonic()
        self._sight.heard(listed, now=now, waited=self._waited)
        self._waited = 0.0
        is_on = intent.phase == "running"
        reports = [Report.of(words) for name, (_, words) in listed.items() if name in intent.names]
        any_ended = any(
            r is not None and (r.attempt, r.state) == (intent.attempt, "ended") for r in reports
        )
        since = now - self._looked_at
        self._looked_at = now
        number = intent.attempt
        self._sight.progressed(self._log, number, is_on=is_on, any_ended=any_ended, since=since)
        wanted = {vm.name: vm.made for vm in (*intent.vms, *intent.doomed)}
        creation, not_found = None, frozenset[str]()
        try:
            if not is_on or any_ended or now - self._listed_at >= LIST_SECONDS:
                self._vms = self.compute.list(intent.run)
                self._listed_at = now
                self._sight.listed(self._vms, wanted, now=now)
            if now - self._told_at >= LIST_SECONDS:
                for zone in {vm.zone for vm in intent.vms if vm.made}:
                    self._sight.told(self.compute.events(zone))
                self._told_at = now
            creation = self._creation(intent)
            not_found = self._not_found(intent)
            self._hear("the Compute API", True)
        except ServiceSilent as error:
            self._vms = None
            self._sight.listed(None, wanted, now=now)
            self._hear("the Compute API", False, str(error))
        return self._sight.seen(
            wall=self._wall(),
            creation=creation,
            unasked_seconds=self.clock.monotonic() - self._asked_at,
            not_found=not_found,
            stop_asked=stop,
            down_asked=down,
        )

    def _wall(self) -> float:
        """Returns the seconds since the epoch as they go on from this leader's beginning.

        A clock that jumps meanwhile moves nothing; a machine that sleeps is billed for.
        """
        if self._began is None:
            self._began = self.clock.wall() - self.awake_or_not()
        return self._began + self.awake_or_not()

    def _read_log(self) -> None:
        folder = RunDir(self.places.run).log
        if more := run_log.read_after(folder, len(self._records)):
            self._records += more
            stop, seq = self._log.stop, self._log.stop_seq
            for record in more:
                if isinstance(record.body, run_log.Stop):
                    stop, seq = record.body, record.seq
            step = run_log.fold(self._records).step
            self._log = Log(step, len(self._records), stop, seq, longest_wait(self._records))

    def _creation(self, intent: Intent) -> Refused | bool | None:
        """Returns what has become of the creation that is on."""
        if intent.creation is None:
            return None
        request, zone = intent.creation.request_id, _zone(intent, intent.creation.names)
        found = self._operations.get(request)
        if found is None:  # A launcher before this one may have asked.
            found = self.compute.operation_of(intent.creation, zone)
            if found is None:
                return None
            self._operations[request] = found
        became = found if isinstance(found, Refused) else self.compute.became_of(found, zone)
        if became is not False:
            self._asked = None
        return became

    def _not_found(self, intent: Intent) -> frozenset[str]:
        vms = self._vms
        if vms is None:
            return frozenset()
        absent = [vm for vm in intent.doomed if vm.name not in vms][:MOST_ASKED_FOR]
        return frozenset(vm.name for vm in absent if not self.compute.exists(vm.name, vm.zone))

    # Acting.

    def _act(self, intent: Intent, seen: Seen) -> None:
        """Does what is meant to be, as far as it is not yet."""
        with contextlib.suppress(StorageUnavailable):
            if intent.end is not None and intent.phase == "running":
                self._ask_to_stop(intent)
        try:
            if intent.creation is not None and intent.phase == "placing":
                self._create(intent, intent.creation)
            self._delete(reconcile.to_delete(intent, seen), doomed={v.name for v in intent.doomed})
        except ServiceSilent as error:
            self._hear("the Compute API", False, str(error))

    def _create(self, intent: Intent, creation: Creation) -> None:
        now = self.clock.monotonic()
        if creation.request_id in self._operations or now < self._not_before or not self._may():
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)  # Until it is answered.
        self._not_before = now + self._pause
        vms = [vm for vm in intent.vms if vm.name in creation.names]
        machine = machine_of(self.places, self.config, intent, vms[0])
        self._asked, self._asked_in = creation, vms[0].zone
        try:
            self._operations[creation.request_id] = self.compute.create(creation, vms, machine)
        finally:
            self._asked_at = self.clock.monotonic()
        self._pause, self._not_before = CYCLE_SECONDS / 2, now

    def _delete(self, vms: Sequence[Vm], *, doomed: Container[str]) -> None:
        for vm in vms:
            now = self.clock.monotonic()
            asked_at = self._deleted_at.get(vm.name)
            listed = (self._vms or {}).get(vm.name)
            ends = listed is None or listed.status in ("STOPPING", "PENDING_STOP")
            again = ENDING_SECONDS if ends else AGAIN_SECONDS
            if asked_at is not None and now - asked_at < again:
                continue
            if not self._may():
                return
            if vm.name not in doomed and vm.name not in self._strangers:
                self._strangers.add(vm.name)
                self.tell(
                    f"{vm.name}: no launcher wants it (one that was overtaken made it); deleted"
                )
            self.compute.delete(vm.name, vm.zone)
            self._deleted_at[vm.name] = now

    def _may(self) -> bool:
        """Whether the lease is held for certain, at this moment."""
        try:
            with self._waiting():
                self.lease.renew()
        except StorageUnavailable:
            return False
        return self.lease.held()

    def _take_back(self) -> None:
        """Deletes what this leader's last request has made, or still makes, and nobody wants.

        It leads no more; but no name is given twice, so what is not meant to be never will be.
        """
        began = self.clock.monotonic()
        if self._asked is not None:
            names = ", ".join(self._asked.names)
            self.tell(f"another launcher leads; looking whether {names} are wanted before leaving")
        while self._asked is not None and self.clock.monotonic() < began + TAKE_BACK_SECONDS:
            with contextlib.suppress(ServiceSilent, StorageUnavailable):
                intent = self.record.read()
                wanted = frozenset[str]() if intent is None else intent.names
                left = [name for name in self._asked.names if name not in wanted]
                waited = self.clock.monotonic() - began
                if not left or self._is_settled(self._asked, waited=waited):
                    for name in left:
                        self.compute.delete(name, self._asked_in)
                    return
            self.clock.sleep(CYCLE_SECONDS)

    def _is_settled(self, asked: Creation, *, waited: float) -> bool:
        """Whether a request makes nothing any more."""
        found = self._operations.get(asked.request_id)
        if found is None and (found := self.compute.operation_of(asked, self._asked_in)) is None:
            return waited > reconcile.LOST_REQUEST_SECONDS
        return isinstance(found, Refused) or (
            self.compute.became_of(found, self._asked_in) is not False
        )

    def _ask_to_stop(self, intent: Intent) -> None:
        """Has the doors save and leave, once an attempt."""
        if self._stopped_attempt != intent.attempt:
            gcs_objects.write(self.places.stop, b"", over=None)
            self._stopped_attempt = intent.attempt

    def _tidy_up(self, intent: Intent) -> None:
        """Leaves nothing that would end the next `up`, and no reports of VMs that are gone."""
        with contextlib.suppress(StorageUnavailable):
            for path in (self.places.stop, self.places.down):
                gcs_objects.delete(path)
            gcs_objects.delete_tree(self.places.reports)
            self.lease.release()


def longest_wait(records: Sequence[run_log.Record]) -> float | None:
    """Returns the longest time between two commits of one attempt; None: there were no two."""
    commits = [record for record in records if isinstance(record.body, run_log.Commit)]
    waits = [
        after.time - before.time
        for before, after in itertools.pairwise(commits)
        if after.attempt == before.attempt
    ]
    return max(waits, default=None)


def machine_of(places: Places, config: RunConfig, intent: Intent, vm: Vm) -> Machine:
    """Returns what the VMs of a creation are made of."""
    gce = config.launch.gce
    assert gce is not None, config
    text = instance_spec.script(gce, places.run, places.code(intent.code), intent.code)
    return Machine(
        gce,
        gce.ladder[vm.rung],
        vm.zone,
        labels={RUN_LABEL: intent.run, MANAGED_LABEL: "1"},
        metadata={"startup-script": text, "jaxres-run": str(places.run)},
    )


def _zone(intent: Intent, names: tuple[str, ...]) -> str:
    return next(vm.zone for vm in (*intent.vms, *intent.doomed) if vm.name in names)


def fresh(run: str, code: str, config: str, *, now: float, after: Intent | None) -> Intent:
    """Returns the intent of a job that begins, or begins again after an end.

    What has been counted goes on: names and attempts are never used twice, and money stays spent.
    """
    if after is None:
        return Intent(run, code, config, began=now)
    return replace(
        Intent(run, code, config, began=now),
        placement=after.placement,
        next_name=after.next_name,
        attempt=after.attempt,
        spent_dollars=after.spent_dollars,
        vm_seconds=after.vm_seconds,
    )
