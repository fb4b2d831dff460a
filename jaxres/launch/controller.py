"""The controller of a job on VMs: observes, decides, writes the desired state, then acts. No jax.

It may be killed at any time: every action follows from the written state and may be repeated. It
changes VMs only while it holds the lease. Training needs no controller until a host is lost or an
attempt ends.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from jaxres.clock import Clock, boot_seconds
from jaxres.config import RunConfig
from jaxres.config.schema_gce import GceSection
from jaxres.faults import Fenced, StorageUnavailable, Unrestorable
from jaxres.launch import (
    instance_groups,
    instance_spec,
    job_conditions,
    reconcile,
    run_speed,
    step_line,
    transition_events,
)
from jaxres.launch.boot_observer import BootObserver
from jaxres.launch.deletions import Deletions
from jaxres.launch.desired_state import DesiredState, JobEnd, PendingCreate, StateObject, VmSpec
from jaxres.launch.gce_api import CODE_LABEL, ID_LABEL, RUN_LABEL, ApiUnavailable, Compute
from jaxres.launch.instance_spec import Machine
from jaxres.launch.job_alerts import JobAlerts
from jaxres.launch.lease import Lease
from jaxres.launch.lost_vms import find_suspects
from jaxres.launch.observed_state import (
    AgentReport,
    CreateFailed,
    ObservedState,
    RunLogSummary,
    StateObserver,
    VmStatus,
)
from jaxres.launch.paths import LaunchPaths
from jaxres.launch.provisioning import LOST_REQUEST_SECONDS
from jaxres.launch.reconcile import CYCLE_SECONDS
from jaxres.runlog import faulty_hosts, launch_events, run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import is_remote
from jaxres.supervisor import signals

LIST_SECONDS = 5.0
"""Time between two lists of VMs while an attempt runs, and between two lists of the service's own
operations. Every cycle lists both while an attempt ends, and the VMs while none runs."""
MAX_EXISTS_CALLS = 50
"""Most VMs looked up by name in one cycle; the renewal of the lease waits for these calls."""
DELETE_RETRY_SECONDS = 10.0
"""Time until the deletion of a VM that still exists is requested again."""
STOPPING_RETRY_SECONDS = 90.0
"""The same for a VM that is stopping or that lists do not show."""
MAX_CREATE_RETRY_SECONDS = 30.0
"""Longest time between two tries of a creation that the service does not answer."""
CLEANUP_SECONDS = 300.0
"""Longest time that a launcher without the lease spends on deleting what it had requested."""
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
    boottime: Callable[[], float] = boot_seconds
    """Seconds of a clock that keeps running in suspend: VMs cost money then, too."""
    _observer: StateObserver = field(default_factory=StateObserver)
    _records: list[run_log.Record] = field(default_factory=list)
    _log: RunLogSummary = field(default_factory=RunLogSummary)
    _operations: dict[str, str | CreateFailed] = field(default_factory=dict)
    """Operation that a request has started, or how it was refused, by request id."""
    _vms: dict[str, VmStatus] | None = None
    _listed_at: float = -LIST_SECONDS
    _events_at: float = -LIST_SECONDS
    _observed_at: float = 0.0
    _waited: float = 0.0
    """Seconds spent waiting for the bucket since the agents' reports were read last."""
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
    _left_out_at: float = -LIST_SECONDS
    """When the hosts that the run leaves out were read last."""
    _log_is_damaged: bool = False
    """Whether a record of the run log can't be used and that has been printed."""
    _printed_progress: str = ""
    """Progress of the training that was printed last, at `_step_printed_at`."""
    _step_printed_at: float = -inf
    _unavailable: set[str] = field(default_factory=set)
    """Services that do not answer and have been printed."""

    def __post_init__(self) -> None:
        """Adds the observer of boots, and the deletions."""
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
        self._cleanup(desired)
        return desired.end

    def _tick(self) -> DesiredState | None:
        """Observes, decides and acts once; None: the bucket did not answer."""
        desired = self.state_object.desired
        assert desired is not None, "there is no desired state yet"
        try:
            with self._count_wait():
                self.lease.renew()
            observed = self._observe(desired)
            following = reconcile.decide(desired, observed, self.config)
            new = transition_events.without_stored(
                following.desired, before=self._store_events(desired)
            )
            if new != desired:
                if not self.lease.held():
                    return None
                with self._count_wait():
                    desired = self.state_object.write(
                        new, epoch=self.lease.epoch, held=self.lease.held
                    )
            for message in following.messages:
                self.console(message)
            self._print_step(desired, observed)
            self._update_alerts(desired)
            self._report_availability("the bucket", True)
        except StorageUnavailable as error:
            self._observer.bucket_unavailable()
            self._report_availability("the bucket", False, str(error))
            return None
        self._apply(desired, observed)
        return desired

    def _update_alerts(self, desired: DesiredState) -> None:
        if self.alerts is not None:
            with self._count_wait():
                self.alerts.update(desired)

    def _store_events(self, desired: DesiredState) -> int:
        """Writes events of the desired state to an object of their own, once there are enough.

        Returns the number of the first event that is not known to be there.
        """
        events = transition_events.to_store(desired)
        if not events:
            return 0
        path = self.paths.events / f"{desired.id}-{events[0].number:08d}.jsonl"
        with self._count_wait():
            gcs_objects.write(path, launch_events.encode(events), over=0)
        return events[-1].number + 1

    def _print_step(self, desired: DesiredState, observed: ObservedState) -> None:
        """Prints the newest step, at most every `telemetry.log_every_seconds`."""
        now = self.clock.monotonic()
        found = step_line.next_line(
            desired,
            observed,
            spent=reconcile.describe_costs(desired, self._gce(), now=observed.now),
            printed=self._printed_progress,
            since_seconds=now - self._step_printed_at,
            every_seconds=self.config.telemetry.log_every_seconds,
        )
        if found is not None:
            self._printed_progress, line = found
            self._step_printed_at = now
            self.console(line)

    def _report_availability(self, service: str, answers: bool, error: str = "") -> None:
        """Prints once that a service does not answer, and once that it answers again."""
        if answers and service in self._unavailable:
            self._unavailable.discard(service)
            self.console(f"{service} answers again")
        elif not answers and service not in self._unavailable:
            self._unavailable.add(service)
            cause = re.sub(r"; rerun the same command[^.;)]*", "", error)  # This launcher retries.
            self.console(
                f"{service} does not answer; training continues, no VM counts as lost ({cause})"
            )

    @contextlib.contextmanager
    def _count_wait(self) -> Iterator[None]:
        """Adds the time spent in the block to the time waited for the bucket."""
        began = self.clock.monotonic()
        try:
            yield
        finally:
            self._waited += self.clock.monotonic() - began

    # Observation.

    def _observe(self, desired: DesiredState) -> ObservedState:
        with self._count_wait():
            self._read_log()
            stop = gcs_objects.stat(self.paths.stop) is not None
            down = gcs_objects.stat(self.paths.down) is not None
            listed = gcs_objects.list_metadata(self.paths.reports)
        now = self.clock.monotonic()
        self._observer.update_reports(listed, now=now, waited=self._waited)
        is_running, ready_seconds = desired.phase == "running", 60 * self._gce().ready_minutes
        reports = [
            AgentReport.of(metadata)
            for name, (_, metadata) in listed.items()
            if name in desired.names
        ]
        any_ended = any(
            r is not None and (r.attempt, r.state) == (desired.attempt, "ended") for r in reports
        )
        since, self._observed_at, self._waited = now - self._observed_at, now, 0.0
        self._observer.update_progress(
            self._log,
            desired.attempt,
            is_on=is_running,
            any_ended=any_ended,
            since=since,
            heartbeat=self._heartbeat(desired),
        )
        lacks_vms = job_conditions.lacks_vms(desired)
        self._observer.update_waits(self._log.step, lacks_vms=lacks_vms, since=since)
        wanted = {vm.name: vm.created for vm in desired.all_vms}
        creation, not_found = None, frozenset[str]()
        is_ending = is_running and (any_ended or self._log.last_end_seq > desired.seq_before)
        vms = (*desired.vms, *desired.early_vms, *desired.spares)
        boots = self._boots.observe(vms, listed, now=self._wall(), ready_seconds=ready_seconds)
        try:
            if not is_running or is_ending or now - self._listed_at >= LIST_SECONDS:
                self._vms = self.compute.list(desired.run)
                self._listed_at = now
                self._observer.update_vms(self._vms, wanted, now=now)
            if is_ending or now - self._events_at >= LIST_SECONDS:
                for zone in {vm.zone for vm in (*desired.vms, *desired.spares) if vm.created}:
                    self._observer.update_events(self.compute.events(zone))
                self._events_at = now
            creation = self._creation(desired)
            not_found = self._not_found(desired)
            self._look_up_suspects(desired)
            self._report_availability("the Compute API", True)
        except ApiUnavailable as error:
            self._vms = None
            self._observer.update_vms(None, wanted, now=now)
            self._report_availability("the Compute API", False, str(error))
        snapshot = self._observer.snapshot(
            wall=self._wall(),
            creation=creation,
            since_create_seconds=self.clock.monotonic() - self._create_sent_at,
            not_found=not_found,
            stop_requested=stop,
            down_requested=down,
        )
        gone = frozenset(self.compute.resize_requests.gone)
        return replace(snapshot, boots=boots, looked_up=dict(self._looked_up), gone_groups=gone)

    def _suspects(self, desired: DesiredState) -> list[VmSpec]:
        """Returns the VMs whose agents are silent, or that the service has ended."""
        known, observer = desired.vms + desired.spares, self._observer
        return find_suspects(known, observer.silent, self._vms, observer.events, self._gce())

    def _heartbeat(self, desired: DesiredState) -> int | None:
        """Returns the generation of the heartbeat of the run lock; None: no VM is suspected."""
        owner = RunDir(self.paths.run).owner
        if desired.phase != "running" or not self._suspects(desired) or not is_remote(owner):
            return None
        with self._count_wait():
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
        for vm in due[:MAX_EXISTS_CALLS]:
            self._looked_up[vm.name] = self.compute.status(vm.name, vm.zone)
            self._looked_up_at[vm.name] = now

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

    def _read_log(self) -> None:
        folder = RunDir(self.paths.run).log
        try:
            records = run_log.read_records(folder)
        except Unrestorable as error:  # The hosts decide what follows; VMs must still be ended.
            if not self._log_is_damaged:
                self.console(f"{error} The launcher continues with what it has read before")
            self._log_is_damaged = True
            return
        known = run_log.last_seq(self._records)
        if has_news := run_log.last_seq(records) > known:
            self._records = records
            history = run_log.fold(self._records)
            end = history.last_stop
            self._log = RunLogSummary(
                history.step,
                run_log.last_seq(records),
                end.body if end and isinstance(end.body, run_log.AttemptEnded) else None,
                end.seq if end else 0,
                run_speed.longest_wait(run_log.in_force(self._records)),
                run_speed.measure(self._records),
            )
        now = self.clock.monotonic()
        if has_news or now - self._left_out_at >= LIST_SECONDS:  # `jaxres hosts` works at any time.
            self._left_out_at = now
            known = faulty_hosts.read(RunDir(self.paths.run), self._records)
            self._log = replace(self._log, faulty_hosts=known)

    def _creation(self, desired: DesiredState) -> CreateFailed | bool | None:
        """Returns the result of the pending creation."""
        if desired.creation is None:
            return None
        request, zone = desired.creation.request_id, _zone(desired, desired.creation.names)
        found = self._operations.get(request)
        if found is None:  # A previous launcher may have requested it.
            found = self.compute.find_operation(desired.creation, zone)
            if found is None:
                return None
            self._operations[request] = found
        result = (
            found if isinstance(found, CreateFailed) else self.compute.create_result(found, zone)
        )
        if result is not False:
            self._pending = None
        return result

    def _not_found(self, desired: DesiredState) -> frozenset[str]:
        vms = self._vms
        if vms is None:
            return frozenset()
        absent = [vm for vm in desired.deleting if vm.name not in vms][:MAX_EXISTS_CALLS]
        return frozenset(vm.name for vm in absent if not self.compute.exists(vm.name, vm.zone))

    # Actions.

    def _apply(self, desired: DesiredState, observed: ObservedState) -> None:
        """Acts on the differences between the desired and the observed state."""
        with contextlib.suppress(StorageUnavailable):
            if desired.end is not None and desired.phase == "running":
                self._request_stop(desired)
        try:
            if (request := reconcile.request_to_send(desired)) is not None:
                self._create(desired, request)
            self._delete_groups(desired)
            self._delete(reconcile.vms_to_delete(desired, observed), desired)
        except ApiUnavailable as error:
            self._report_availability("the Compute API", False, str(error))

    def _create(self, desired: DesiredState, creation: PendingCreate) -> None:
        now = self.clock.monotonic()
        if (
            creation.request_id in self._operations
            or now < self._not_before
            or not self._holds_lease()
        ):
            return
        self._retry_seconds = min(
            2 * self._retry_seconds, MAX_CREATE_RETRY_SECONDS
        )  # Doubled until it is answered.
        self._not_before = now + self._retry_seconds
        vms = [vm for vm in desired.all_vms if vm.name in creation.names]
        machine = machine_for(self.paths, self.config, desired, vms[0])
        self._pending, self._pending_zone = creation, vms[0].zone
        try:
            operation = self.compute.create(creation, vms, machine)
        finally:
            self._create_sent_at = self.clock.monotonic()
        if operation is not None:
            self._operations[creation.request_id] = operation
        self._retry_seconds, self._not_before = CYCLE_SECONDS / 2, now

    def _delete_groups(self, desired: DesiredState) -> None:
        for group in instance_groups.unwanted(desired):
            if self._holds_lease():
                self._deletions.request_group(group)

    def _delete(self, vms: Sequence[VmSpec], desired: DesiredState) -> None:
        intended = {vm.name for vm in desired.deleting}
        for vm in vms:
            listed = (self._vms or {}).get(vm.name)
            is_stopping = listed is None or listed.status in ("STOPPING", "PENDING_STOP")
            retry_seconds = STOPPING_RETRY_SECONDS if is_stopping else DELETE_RETRY_SECONDS
            if not self._deletions.is_due(vm.name, every_seconds=retry_seconds):
                continue
            if not self._holds_lease():
                return
            if vm.name not in intended and vm.name not in self._unknown_vms:
                self._unknown_vms.add(vm.name)
                cause = "created by a launcher that lost the lease"
                if listed is not None and listed.run_id != self._run_id():
                    cause = "created for an earlier run in the same place"
                self.console(f"{vm.name}: not in the desired state ({cause}); deleting")
            group = instance_groups.group_of(desired.groups, vm.name)
            self._deletions.request(vm.name, vm.zone, group)

    def _run_id(self) -> str:
        return "" if self.state_object.desired is None else self.state_object.desired.id

    def _holds_lease(self) -> bool:
        """Returns whether the lease is certainly held now."""
        try:
            with self._count_wait():
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
        if self._stopped_attempt != desired.attempt:
            gcs_objects.write(self.paths.stop, b"", over=None)
            self._stopped_attempt = desired.attempt

    def _cleanup(self, desired: DesiredState) -> None:
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


def machine_for(
    paths: LaunchPaths, config: RunConfig, desired: DesiredState, vm: VmSpec
) -> Machine:
    """Returns the description of the VMs of a creation."""
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
        metadata={"startup-script": text, "jaxres-run": str(paths.run)},
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
    return replace(
        new,
        id=after.id,
        placement=after.placement,
        next_name=after.next_name,
        attempt=after.attempt,
        freed_at=after.freed_at,
        spent_dollars=after.spent_dollars,
        vm_seconds=after.vm_seconds,
        saved_dollars=after.saved_dollars,
        num_events=after.num_events,
        events=after.events,
        spending=after.spending,
        conditions=tuple(c for c in after.conditions if c.kind == job_conditions.SPEND),
        alert_starts=after.alert_starts,
    )
