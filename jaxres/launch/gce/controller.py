"""The controller of a job on VMs: observes, decides, writes the desired state, then acts. No jax.

It may be killed at any time: every action follows from the written state and may be repeated. It
changes VMs only while it holds the lease. Training needs no controller until a host is lost or an
attempt ends.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from jaxres.clock import Clock, boot_seconds
from jaxres.config import RunConfig
from jaxres.config.schema.gce import GceSection
from jaxres.faults import Fenced, StorageUnavailable
from jaxres.host import signals
from jaxres.launch.gce.api import service_answers
from jaxres.launch.gce.api.compute import CODE_LABEL, ID_LABEL, RUN_LABEL, ApiUnavailable, Compute
from jaxres.launch.gce.api.deletions import Deletions
from jaxres.launch.gce.api.service_answers import ServiceAnswers
from jaxres.launch.gce.boot_observer import BootObserver
from jaxres.launch.gce.decide import instance_groups, job_conditions, reconcile
from jaxres.launch.gce.decide.lost_vms import find_suspects
from jaxres.launch.gce.decide.provisioning import LOST_REQUEST_SECONDS
from jaxres.launch.gce.decide.reconcile import CYCLE_SECONDS
from jaxres.launch.gce.job_alerts import JobAlerts
from jaxres.launch.gce.job_metrics import JobMetrics
from jaxres.launch.gce.state import transition_events
from jaxres.launch.gce.state.bucket_reader import BucketReader
from jaxres.launch.gce.state.desired_state import (
    CapacityState,
    DesiredState,
    JobAttempt,
    JobEnd,
    PendingCreate,
    VmSpec,
)
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    StateObserver,
    VmStatus,
)
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.step_line import StepPrinter
from jaxres.launch.gce.vm import instance_spec
from jaxres.launch.gce.vm.instance_spec import Machine
from jaxres.runlog import launch_events
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import is_remote

LIST_SECONDS = 5.0
"""Time between two lists of VMs while an attempt runs, and between two lists of the service's own
operations. Every cycle lists both while an attempt ends, and the VMs while none runs."""
MAX_EXISTS_CALLS = 50
"""Most VMs looked up by name in one cycle; the renewal of the lease waits for these calls."""
ALERT_REQUESTS = 4
"""Fewest requests to the bucket, one after the other, that a look at the incidents takes."""
DELETE_RETRY_SECONDS = 10.0
"""Time until the deletion of a VM that still exists is requested again."""
STOPPING_RETRY_SECONDS = 90.0
"""The same for a VM that is stopping or that lists do not show."""
MAX_CREATE_RETRY_SECONDS = 30.0
"""Longest time between two tries of a creation that the service does not answer."""
CLEANUP_SECONDS = 300.0
"""Longest time that a launcher without the lease spends on deleting its requested resources."""
MANAGED_LABEL = "jaxres-managed"
CODE_DIGITS = 32
"""Digits of the digest of the code in a label, which may have at most 63."""


@dataclass
class Controller:
    """A launcher that holds the lease of a run, or has just lost it."""

    paths: LaunchPaths
    config: RunConfig
    compute: Compute
    lease: Lease
    state_object: StateObject
    clock: Clock
    console: Callable[[str], None]
    """Writes a line to the console."""
    alerts: JobAlerts | None = None
    metrics: JobMetrics | None = None
    boottime: Callable[[], float] = boot_seconds
    """Seconds of a clock that keeps running in suspend: VMs cost money then, too."""
    _programs_secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Secret of the VMs for compiled steps; that of an earlier launcher's VMs if there are any."""
    _observer: StateObserver = field(default_factory=StateObserver)
    _operations: dict[str, str | CreateFailed] = field(default_factory=dict)
    """Operation that a request has started, or how it was refused, by request id."""
    _vms: Mapping[str, VmStatus] | None = None
    _unlisted_zones: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why the newest list lacks zones, by zone."""
    _listed_at: float = -LIST_SECONDS
    _events_at: float = -LIST_SECONDS
    _observed_at: float = 0.0
    _looked_up: dict[str, str | None] = field(default_factory=dict)
    """Status of suspected VMs, by name; None: there is no such VM."""
    _looked_up_at: dict[str, float] = field(default_factory=dict)
    """When the service was asked about each of them."""
    _unknown_vms: set[str] = field(default_factory=set)
    """VMs that are not in the desired state and have been printed."""
    _stopped_attempt: int = 0
    _retry_seconds: float = CYCLE_SECONDS / 2
    _pending: PendingCreate | None = None
    """Creation requested by this controller whose result is not known yet."""
    _pending_zone: str = ""
    """Zone of that creation."""
    _create_sent_at: float = 0.0
    """When it was requested, or when this launcher took the lease."""
    _not_before: float = 0.0
    """Earliest retry of a creation that was not answered."""
    _boot_wall: float | None = None
    """Wall clock at the boot of this machine, as computed once."""

    def __post_init__(self) -> None:
        """Adds the reader of the bucket, the observer of boots, and the deletions."""
        self._bucket = BucketReader(self.paths, self.clock, self.console)
        self._answers = ServiceAnswers(self.console)
        self._steps = StepPrinter(
            RunDir(self.paths.run),
            steps=self.config.last_step,
            every_seconds=self.config.telemetry.log_every_seconds,
            clock=self.clock,
            console=self.console,
        )
        self._boots = BootObserver(self.paths, self.compute, self.console)
        self._deletions = Deletions(self.compute, self.console, self.clock)

    def run(self, *, until: Callable[[DesiredState], bool] = lambda _: False) -> JobEnd | None:
        """Leads the job to its end and returns that; None: `until` returned true before.

        Raises:
          Fenced: another launcher has taken the lease.
        """
        self._create_sent_at, phase = self.clock.monotonic(), ""
        try:
            while (desired := self._tick()) is None or desired.phase != "ended":
                signals.raise_again()
                if desired is not None and until(desired):
                    return None
                before, phase = phase, "" if desired is None else desired.phase
                if (before, phase) != ("running", "placing"):  # What follows an attempt is due now.
                    self.clock.sleep(CYCLE_SECONDS)
        except Fenced:
            self._cleanup_after_loss()
            raise
        assert desired.end is not None, desired
        if self.alerts is not None:
            self.alerts.close()  # It sends only while the lease is held.
        self._cleanup()
        return desired.end

    def _tick(self) -> DesiredState | None:
        """Observes, decides and acts once; None: the bucket did not answer."""
        desired = self.state_object.desired
        assert desired is not None, "there is no desired state yet"
        try:
            with self._bucket.count_wait():
                self.lease.renew()
            observed = self._observe(desired)
            following = reconcile.decide(desired, observed, self.config)
            new = transition_events.without_stored(
                following.desired, before=self._store_events(desired)
            )
            if new != desired:
                if not self.lease.held():
                    return None
                with self._bucket.count_wait():
                    desired = self.state_object.write(
                        new, epoch=self.lease.epoch, held=self.lease.held
                    )
            for message in following.messages:
                self.console(message)
            if self.metrics is not None:
                self.metrics.update(desired, observed)
            self._print_step(desired, observed)
            self._update_alerts(desired)
            self._answers.report("the bucket", True)
        except StorageUnavailable as error:
            self._observer.bucket_unavailable()
            self._answers.report("the bucket", False, str(error))
            return None
        self._apply(desired, observed)
        return desired

    def _update_alerts(self, desired: DesiredState) -> None:
        if self.alerts is not None:
            with self._bucket.count_wait(requests=ALERT_REQUESTS):
                self.alerts.update(desired)

    def _store_events(self, desired: DesiredState) -> int:
        """Writes events of the desired state to an object of their own, once there are enough.

        Returns the number of the first event that is not known to be there.
        """
        events = transition_events.to_store(desired)
        if not events:
            return 0
        path = self.paths.events / f"{desired.id}-{events[0].number:08d}.jsonl"
        with self._bucket.count_wait():
            gcs_objects.write(path, launch_events.encode(events), over=0)
        return events[-1].number + 1

    def _print_step(self, desired: DesiredState, observed: ObservedState) -> None:
        """Prints the newest step, at most every `telemetry.log_every_seconds`."""
        if desired.phase != "running" or not self._steps.is_due():
            return
        spent = reconcile.describe_costs(desired, self._gce(), now=observed.now)
        # The next cycle finds out by itself that the bucket does not answer.
        with contextlib.suppress(StorageUnavailable), self._bucket.count_wait():
            self._steps.print_new(desired.attempt.number, committed=observed.log.step, spent=spent)

    # Observation.

    def _observe(self, desired: DesiredState) -> ObservedState:
        listed, stop, down = self._bucket.read()
        now = self.clock.monotonic()
        self._observer.update_reports(listed, now=now, waited=self._bucket.waited)
        is_running, ready_seconds = desired.phase == "running", 60 * self._gce().ready_minutes
        reports = [
            AgentReport.of(metadata)
            for name, (_, metadata) in listed.items()
            if name in desired.names
        ]
        any_ended = any(
            r is not None and (r.attempt, r.state) == (desired.attempt.number, "ended")
            for r in reports
        )
        since, self._observed_at, self._bucket.waited = now - self._observed_at, now, 0.0
        self._observer.update_progress(
            self._bucket.log,
            desired.attempt.number,
            is_on=is_running,
            any_ended=any_ended,
            since=since,
            heartbeat=self._heartbeat(desired),
        )
        lacks_vms = job_conditions.lacks_vms(desired, self.config)
        self._observer.update_waits(self._bucket.log.step, lacks_vms=lacks_vms, since=since)
        creation, not_found = None, frozenset[str]()
        has_end_record = self._bucket.log.last_end_seq > desired.attempt.seq_before
        is_ending = is_running and (any_ended or has_end_record)
        vms = (*desired.vms, *desired.early_vms, *desired.spares)
        boots = self._boots.observe(vms, listed, now=self._wall(), ready_seconds=ready_seconds)
        try:
            if not is_running or is_ending or now - self._listed_at >= LIST_SECONDS:
                self._list_vms(desired, now=now)
            self._answers.silent_zones = dict(self._unlisted_zones)
            if is_ending or now - self._events_at >= LIST_SECONDS:
                self._read_events(desired, now=now)
            creation = self._creation(desired)
            not_found = self._not_found(desired)
            self._look_up_suspects(desired)
            self._answers.report("the Compute API", True)
            self._answers.report_zones()
        except ApiUnavailable as error:
            self._vms = None
            self._observer.update_vms(None, _wanted(desired), now=now)
            self._answers.report("the Compute API", False, str(error))
        snapshot = self._observer.snapshot(
            wall=self._wall(),
            creation=creation,
            since_create_seconds=self.clock.monotonic() - self._create_sent_at,
            not_found=not_found,
            stop_requested=stop,
            down_requested=down,
        )
        gone = frozenset(self.compute.resize_requests.gone)
        return replace(
            snapshot,
            boots=boots,
            looked_up=dict(self._looked_up),
            gone_groups=gone,
            unreachable=frozenset(self._answers.silent_zones),
        )

    def _list_vms(self, desired: DesiredState, *, now: float) -> None:
        found = self.compute.list(desired.run)
        self._vms, self._unlisted_zones, self._listed_at = found.vms, found.unreachable, now
        self._programs_secret = found.programs_secret or self._programs_secret
        unknown = {vm.name for vm in desired.all_vms if vm.zone in found.unreachable}
        self._observer.update_vms(found.vms, _wanted(desired), now=now, unknown=unknown)

    def _read_events(self, desired: DesiredState, *, now: float) -> None:
        zones = {vm.zone for vm in (*desired.vms, *desired.spares) if vm.created}
        found = self._answers.ask(
            {zone: (zone, partial(self.compute.events, zone)) for zone in zones}
        )
        for events in found.values():
            self._observer.update_events(events)
        if len(found) == len(zones):
            self._events_at = now

    def _suspects(self, desired: DesiredState) -> list[VmSpec]:
        """Returns the VMs whose agents are silent, or that the service has ended."""
        known, observer = desired.vms + desired.spares, self._observer
        return find_suspects(
            known,
            observer.silent,
            self._vms,
            observer.events,
            self._gce(),
            unreachable=self._answers.silent_zones,
        )

    def _heartbeat(self, desired: DesiredState) -> int | None:
        """Returns the generation of the heartbeat of the run lock; None: no VM is suspected."""
        owner = RunDir(self.paths.run).owner
        if desired.phase != "running" or not self._suspects(desired) or not is_remote(owner):
            return None
        with self._bucket.count_wait():
            found = gcs_objects.stat(owner)
        return None if found is None else found.generation

    def _look_up_suspects(self, desired: DesiredState) -> None:
        """Asks the service about each suspected VM, some in each cycle."""
        now, suspects = self.clock.monotonic(), self._suspects(desired)
        names = {vm.name for vm in suspects}
        self._looked_up = {n: status for n, status in self._looked_up.items() if n in names}
        self._looked_up_at = {n: at for n, at in self._looked_up_at.items() if n in names}
        due = [vm for vm in suspects if now - self._looked_up_at.get(vm.name, -inf) >= LIST_SECONDS]
        due.sort(key=lambda vm: self._looked_up_at.get(vm.name, -inf))
        due = due[:MAX_EXISTS_CALLS]
        found = self._answers.ask(
            {vm.name: (vm.zone, partial(self.compute.status, vm.name, vm.zone)) for vm in due}
        )
        self._looked_up |= found
        self._looked_up_at |= dict.fromkeys(found, now)

    def _gce(self) -> GceSection:
        gce = self.config.launch.gce
        assert gce is not None, self.config
        return gce

    def _wall(self) -> float:
        """Returns the seconds since the epoch, counted on from this controller's first call.

        A jump of the wall clock has no effect. Time for which the machine is suspended is included.
        """
        if self._boot_wall is None:
            self._boot_wall = self.clock.wall() - self.boottime()
        return self._boot_wall + self.boottime()

    def _creation(self, desired: DesiredState) -> CreateFailed | bool | None:
        """Returns the result of the pending creation; None also if its zone does not answer."""
        if (creation := desired.creation) is None:
            return None
        zone = _zone(desired, creation.names)
        asked = self._answers.ask({zone: (zone, lambda: self._result(creation, zone))})
        if asked.get(zone) not in (None, False):
            self._pending = None
        return asked.get(zone)

    def _result(self, creation: PendingCreate, zone: str) -> CreateFailed | bool | None:
        found = self._operations.get(creation.request_id)
        if found is None:  # A previous launcher may have requested it.
            found = self.compute.find_operation(creation, zone)
            if found is None:
                return None
            self._operations[creation.request_id] = found
        return found if isinstance(found, CreateFailed) else self.compute.create_result(found, zone)

    def _not_found(self, desired: DesiredState) -> frozenset[str]:
        vms = self._vms
        if vms is None:
            return frozenset()
        absent = [vm for vm in desired.deleting if vm.name not in vms][:MAX_EXISTS_CALLS]
        found = self._answers.ask(
            {vm.name: (vm.zone, partial(self.compute.exists, vm.name, vm.zone)) for vm in absent}
        )
        return frozenset(name for name, exists in found.items() if not exists)

    # Actions.

    def _apply(self, desired: DesiredState, observed: ObservedState) -> None:
        """Acts on the differences between the desired and the observed state."""
        with contextlib.suppress(StorageUnavailable):
            if desired.end is not None and desired.phase == "running":
                self._request_stop(desired)
        try:
            if (request := reconcile.request_to_send(desired)) is not None:
                self._create(desired, request)
        except ApiUnavailable as error:
            self._answers.report("the Compute API", False, str(error))
        self._delete_groups(desired)
        self._delete(reconcile.vms_to_delete(desired, observed), desired)
        self._answers.report_zones()

    def _create(self, desired: DesiredState, creation: PendingCreate) -> None:
        now = self.clock.monotonic()
        if (
            creation.request_id in self._operations
            or now < self._not_before
            or _zone(desired, creation.names) in self._answers.silent_zones
            or not self._holds_lease()
        ):
            return
        self._retry_seconds = min(
            2 * self._retry_seconds, MAX_CREATE_RETRY_SECONDS
        )  # Doubled until it is answered.
        self._not_before = now + self._retry_seconds
        vms = [vm for vm in desired.all_vms if vm.name in creation.names]
        machine = machine_for(self.paths, self.config, desired, vms[0], self._programs_secret)
        self._pending, self._pending_zone = creation, vms[0].zone
        try:
            operation = self.compute.create(creation, vms, machine)
        finally:
            self._create_sent_at = self.clock.monotonic()
        if operation is not None:
            self._operations[creation.request_id] = operation
        self._retry_seconds, self._not_before = CYCLE_SECONDS / 2, now

    def _delete_groups(self, desired: DesiredState) -> None:
        unwanted = instance_groups.unwanted(desired)
        self._request_deletions(
            {g.name: (g.zone, partial(self._deletions.request_group, g)) for g in unwanted}
        )

    def _request_deletions(self, calls: Mapping[str, tuple[str, Callable[[], bool]]]) -> None:
        """Requests deletions, some at a time, while the lease is certainly held."""
        due, most = list(calls), service_answers.MAX_CALLS
        while due and self._holds_lease():
            self._answers.ask({name: calls[name] for name in due[:most]})
            due = due[most:]

    def _delete(self, vms: Sequence[VmSpec], desired: DesiredState) -> None:
        """Requests the deletions of VMs; in a zone that does not answer once it does."""
        intended = {vm.name for vm in desired.deleting}
        calls = dict[str, tuple[str, Callable[[], bool]]]()
        for vm in vms:
            listed = (self._vms or {}).get(vm.name)
            is_stopping = listed is None or listed.status in ("STOPPING", "PENDING_STOP")
            retry_seconds = STOPPING_RETRY_SECONDS if is_stopping else DELETE_RETRY_SECONDS
            if not self._deletions.is_due(vm.name, every_seconds=retry_seconds):
                continue
            if vm.name not in intended and vm.name not in self._unknown_vms:
                self._unknown_vms.add(vm.name)
                cause = "created by a launcher that lost the lease"
                if listed is not None and listed.run_id != self._run_id():
                    cause = "created for an earlier run in the same place"
                self.console(f"{vm.name}: not in the desired state ({cause}); deleting")
            group = instance_groups.group_of(desired.groups, vm.name)
            calls[vm.name] = vm.zone, partial(self._deletions.request, vm.name, vm.zone, group)
        self._request_deletions(calls)

    def _run_id(self) -> str:
        return "" if self.state_object.desired is None else self.state_object.desired.id

    def _holds_lease(self) -> bool:
        """Returns whether the lease is certainly held now."""
        try:
            with self._bucket.count_wait():
                self.lease.renew()
        except StorageUnavailable:
            return False
        return self.lease.held()

    def _cleanup_after_loss(self) -> None:
        """Deletes VMs of this launcher's last creation that are not in the desired state.

        This is safe without the lease: VM names are never reused, so no state will ever have them.
        """
        began = self.clock.monotonic()
        if self._pending is not None:
            names = ", ".join(self._pending.names)
            self.console(
                f"another launcher holds the lease; checking before exit whether {names} are "
                "desired"
            )
        while self._pending is not None and self.clock.monotonic() < began + CLEANUP_SECONDS:
            with contextlib.suppress(ApiUnavailable, StorageUnavailable):
                desired = self.state_object.read()
                wanted = frozenset[str]() if desired is None else desired.names
                left = [name for name in self._pending.names if name not in wanted]
                waited = self.clock.monotonic() - began
                if not left or self._is_settled(self._pending, waited=waited):
                    zone = self._pending_zone
                    accepted = [self._deletions.request(name, zone) for name in left]
                    if all(accepted):
                        return
            self.clock.sleep(CYCLE_SECONDS)

    def _is_settled(self, creation: PendingCreate, *, waited: float) -> bool:
        """Returns whether a request can create no more VMs."""
        found = self._operations.get(creation.request_id)
        if (
            found is None
            and (found := self.compute.find_operation(creation, self._pending_zone)) is None
        ):
            return waited > LOST_REQUEST_SECONDS
        return isinstance(found, CreateFailed) or (
            self.compute.create_result(found, self._pending_zone) is not False
        )

    def _request_stop(self, desired: DesiredState) -> None:
        """Requests the supervisors to save and stop, once an attempt."""
        if self._stopped_attempt != desired.attempt.number:
            gcs_objects.write(self.paths.stop, b"", over=None)
            self._stopped_attempt = desired.attempt.number

    def _cleanup(self) -> None:
        """Deletes the requests, which would end the next `up`, and the reports of deleted VMs."""
        with contextlib.suppress(StorageUnavailable):
            delete_requests(self.paths)
            self.lease.release()


def delete_requests(paths: LaunchPaths) -> None:
    """Deletes the requests, which would end the next `up`, and the reports of deleted VMs."""
    for path in (paths.stop, paths.down):
        gcs_objects.delete(path)
    gcs_objects.delete_tree(paths.reports)
    gcs_objects.delete_tree(paths.boots)


def _wanted(desired: DesiredState) -> dict[str, bool]:
    """Returns for each VM of the state whether it is known to be created."""
    return {vm.name: vm.created for vm in desired.all_vms}


def machine_for(
    paths: LaunchPaths, config: RunConfig, desired: DesiredState, vm: VmSpec, programs: str = ""
) -> Machine:
    """Returns the description of the VMs of a creation; `programs` is their secret for them."""
    gce = config.launch.gce
    assert gce is not None, config
    text = instance_spec.startup_script(config, paths.run, paths.code(desired.code), desired.code)
    return Machine(
        gce,
        gce.capacity_options[vm.option],
        vm.zone,
        labels={
            RUN_LABEL: desired.run,
            MANAGED_LABEL: "1",
            ID_LABEL: desired.id,
            CODE_LABEL: desired.code[:CODE_DIGITS],
        },
        metadata={"startup-script": text, "jaxres-run": str(paths.run)}
        | ({instance_spec.PROGRAMS_SECRET: programs} if programs else {}),
        image=desired.image,
    )


def _zone(desired: DesiredState, names: tuple[str, ...]) -> str:
    return next(vm.zone for vm in desired.all_vms if vm.name in names)


def new_state(
    run: str,
    code: str,
    config: str,
    *,
    now: float,
    after: DesiredState | None,
    run_id: str = "",
    orphans: Iterable[VmStatus] = (),
) -> DesiredState:
    """Returns the desired state of a new job, or of one that is started again after an end.

    Counters continue: names and attempts are never used twice, and costs are kept. So is the time
    since which the quota of the last VM may be free.

    Args:
      run: label of the VMs.
      code: digest of the code.
      config: digest of the config.
      now: seconds since the epoch.
      after: state of the job that has ended; None: there is none.
      run_id: random id of a new run, so that its VMs have other names than those of a deleted one.
      orphans: VMs with the label of the run; they are deleted before others are requested.
    """
    deleting = tuple(
        VmSpec(vm.name, vm.zone, 0, 0.0, created=True, deleting_since=now) for vm in orphans
    )
    new = DesiredState(run, code, config, id=run_id, started_at=now, deleting=deleting)
    if after is None:
        return new
    old, spend = after.capacity, job_conditions.SPEND
    conditions = tuple(c for c in after.events.conditions if c.kind == spend)
    return replace(
        new,
        id=after.id,
        next_name=after.next_name,
        attempt=JobAttempt(number=after.attempt.number),
        capacity=CapacityState(placement=old.placement, freed_at=old.freed_at),
        costs=replace(after.costs, cheaper_by=0.0, prices=()),
        events=replace(after.events, conditions=conditions),
    )
