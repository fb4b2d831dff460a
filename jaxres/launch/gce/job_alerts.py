"""Alerts of a job on VMs: the launcher that holds the lease sends them.

Their sources are the launcher's events, which are written with its decisions, and the incidents
that the supervisors on the VMs record. A new launcher goes through all of them again;
`RUN/alerts.jsonl` has those that were sent, so a killed launcher repeats and loses none.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.config.schema.alerts import AlertsSection
from jaxres.faults import ConfigError, Fenced, RunError
from jaxres.launch.gce.state import lease_wait
from jaxres.launch.gce.state.desired_state import AlertStart, DesiredState
from jaxres.launch.gce.state.lease import Lease
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.runlog import launch_events
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres.supervisor.attempt import print_message
from jaxres.telemetry import alert_delivery_log, alert_sender, incidents
from jaxres.telemetry.alert_sender import Alerts, ResolvedTarget
from jaxres.telemetry.incidents import Incident
from jaxres.telemetry.recorded_incidents import RecordedIncidents

LOOK_SECONDS = 5.0
"""Time between two looks at the incidents that the supervisors record."""
MOST_AT_ONCE = 100
"""Most incidents that are given to the senders at once: their queues are bounded."""


class JobAlerts:
    """Alerts of one launcher of a job; a context manager, entered while the lease is held."""

    def __init__(
        self,
        targets: Sequence[ResolvedTarget],
        run: GcsPath,
        section: AlertsSection,
        job: str,
        lease: Lease,
        clock: Clock,
    ) -> None:
        """Prepares the senders.

        Args:
          targets: where to; empty: nothing is read or sent.
          run: the run directory.
          job: id of the job, with which the ids of its incidents begin.
          lease: this launcher's; without it nothing is sent.
        """
        self._run_dir, self._name, self._clock = RunDir(run), run.name, clock
        self._is_off = not targets
        # The launcher's own events tell that commits stall.
        own = section.model_copy(update={"no_commit_minutes": None})
        self._alerts = Alerts(
            targets,
            self._run_dir,
            section=own,
            clock=clock,
            report=print_message,
            nonce=job or None,
            may_send=lease.held,
        )
        self._is_open = False
        self._next_event: int | None = None
        """Number of the first event that was not looked at; None: before the first look."""
        self._waiting: deque[tuple[float, Incident, frozenset[str] | None]] = deque()
        self._recorded = RecordedIncidents(self._run_dir)
        self._looked_at = -math.inf

    def __enter__(self) -> JobAlerts:
        self._alerts.__enter__()
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Sends queued alerts for a few seconds; the next launcher sends the rest."""
        if self._is_open:
            self._is_open = False
            self._alerts.__exit__()

    def update(self, desired: DesiredState) -> bool:
        """Queues the incidents that are new in a desired state that is written; never raises.

        What storage does not return now is read at the next call. Returns whether some of those
        that were read are left for it.
        """
        if self._is_off:
            return False
        try:
            self._read_events(desired)
            self._read_recorded(desired)
        except (RunError, OSError):
            pass  # The controller prints that the bucket does not answer.
        for _ in range(min(MOST_AT_ONCE, len(self._waiting))):
            time, incident, targets = self._waiting.popleft()
            self._alerts.send(incident, time=time, targets=targets)
        return bool(self._waiting)

    def _read_events(self, desired: DesiredState) -> None:
        first = self._next_event
        if first is None:
            first = min((start.event for start in desired.events.alert_starts), default=0)
        if first >= desired.events.count:
            self._next_event = first
            return
        events = _events_from(first, desired, self._run_dir)
        for event, incident in incidents.of_launch_events(events, run=self._name):
            names = {s.target for s in desired.events.alert_starts if s.event <= event.number}
            self._waiting.append((event.time, incident, frozenset(names)))
        self._next_event = desired.events.count

    def _read_recorded(self, desired: DesiredState) -> None:
        """Reads the incidents that supervisors of this and the previous attempt have recorded."""
        if (now := self._clock.monotonic()) < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = now
        newest = desired.attempt.number
        attempts = [attempt for attempt in (newest - 1, newest) if attempt > 0]
        for time, incident in self._recorded.read_new(attempts):
            self._waiting.append((time, incident, None))


def _events_from(first: int, desired: DesiredState, run_dir: RunDir) -> list[LaunchEvent]:
    """Returns the events from a number on; the older ones are no longer in the desired state."""
    events = [event for event in desired.events.newest if event.number >= first]
    missing = events[0].number if events else desired.events.count
    if missing <= first:
        return events
    stored = launch_events.read_stored(run_dir, job=desired.id, first=first)
    return [*(event for event in stored if event.number < missing), *events]


def has_unsent(targets: Sequence[ResolvedTarget], desired: DesiredState, run: GcsPath) -> bool:
    """Returns whether a target has not received all incidents of the launcher's events."""
    run_dir, starts = RunDir(run), {s.target: s.event for s in desired.events.alert_starts}
    if not targets or not starts:
        return False
    events = _events_from(min(starts.values()), desired, run_dir)
    found = incidents.of_launch_events(events, run=run.name)
    lines = read_json_lines(run_dir.alerts)
    for target in targets:
        ledger = alert_delivery_log.fold(target.name, lines)
        first = starts.get(target.name, desired.events.count)
        keys = {
            incidents.key(incident, nonce=desired.id)
            for event, incident in found
            if event.number >= first and incidents.is_wanted(target.config, incident.kind)
        }
        if ledger.waiting or not keys <= ledger.known:
            return True
    return False


def send_rest(
    paths: LaunchPaths,
    config: RunConfig,
    desired: DesiredState | None,
    *,
    env: Mapping[str, str],
    clock: Clock,
) -> None:
    """Sends the alerts of a complete run that a killed launcher or a dead target has left."""
    targets = resolve_if_set(config, env)
    if desired is None or not has_unsent(targets, desired, paths.run):
        return
    lease = lease_wait.new_lease(paths, config, print_message)
    with contextlib.suppress(Fenced):  # Another launcher is about to send them.
        lease_wait.acquire(
            lease,
            paths.run,
            clock,
            waits=False,
            desired=desired,
            may_be_led=False,
            console=print_message,
        )
        alerts = JobAlerts(targets, paths.run, config.alerts, desired.id, lease, clock)
        with lease_wait.holding(lease), alerts:
            while alerts.update(desired):
                pass
        lease.release()


def start_targets(desired: DesiredState, config: RunConfig) -> DesiredState:
    """Returns the state in which every target of the config has its first event.

    A new target receives no alerts about what was before. Pure.
    """
    known = {start.target: start for start in desired.events.alert_starts}
    names = [alert_sender.target_name(target) for target in config.alerts.targets]
    starts = tuple(known.get(name, AlertStart(name, desired.events.count)) for name in names)
    if starts == desired.events.alert_starts:
        return desired
    return replace(desired, events=replace(desired.events, alert_starts=starts))


def resolve_if_set(config: RunConfig, env: Mapping[str, str]) -> tuple[ResolvedTarget, ...]:
    """Returns the targets for a launcher that only ends a job or replaces a VM.

    It must not fail for lack of a secret: the next launcher that has it sends the alerts.
    """
    try:
        return alert_sender.resolve(config.alerts, env=env)
    except ConfigError as error:
        print_message(f"this launcher sends no alerts: {error}")
        return ()
