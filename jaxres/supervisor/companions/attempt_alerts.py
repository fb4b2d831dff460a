"""Alerts of a supervisor that runs one attempt: it sends them, or records them for another process.

Exactly one process sends the alerts of a run: the supervisor of `launch local`, the launcher of
`launch gce`, or else the supervisor of host 0 of `jaxres train`. The others write their incidents
to the run directory, where that process reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.faults import RunError
from jaxres.runlog import run_log
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded, SupervisorEnded
from jaxres.runlog.run_log import Claim, Record, in_force
from jaxres.runlog.supervisor_events import HardwareFaultFound
from jaxres.storage.threads import make_thread
from jaxres.storage.timeouts import call_with_timeout
from jaxres.supervisor.attempt import print_message
from jaxres.telemetry import alert_sender, incidents
from jaxres.telemetry.alert_monitors import SaveMonitor
from jaxres.telemetry.alert_sender import Alerts, ResolvedTarget
from jaxres.telemetry.heartbeat import News
from jaxres.telemetry.incidents import Incident
from jaxres.telemetry.recorded_incidents import IncidentRecorder, RecordedIncidents

VARIABLE, RECORDED = "JAXRES_ALERTS", "recorded"
"""An environment variable, and its value on a VM: the launcher sends the alerts of this process."""
READ_SECONDS = 10.0
"""Longest wait, at the end, for the newest committed step."""
LOOK_SECONDS = 5.0
"""Time between two looks of host 0 at the incidents that the other hosts record."""
HOST_SEQ = 1000
"""Count of incidents of one host; the next host's begin above it, so that ids differ."""


@dataclasses.dataclass
class AttemptAlerts:
    """Turns the events of one attempt into incidents."""

    run: str
    """Name of the run."""
    host: int
    send: Callable[[Incident], None]
    """Sends an incident, or records it."""
    ends_run: bool
    """Whether the start and the end of the attempt are incidents; else the launcher has them, or
    there is no target, and a storage that hangs is not asked once more."""
    saves: SaveMonitor
    run_dir: RunDir
    follow_hosts: Callable[[int], None] | None = None
    """Begins to send the incidents of the attempt's other hosts; None: nothing does."""
    step: int = 0
    """Newest committed step at the start."""

    def on_claim(self, records: Sequence[Record], claim: Claim) -> None:
        """Begins with a claimed attempt; sends that the supervisor before was killed, if it was.

        `records`: the run log before the claim.
        """
        before = run_log.fold(records)
        self.step = before.step
        if self.follow_hosts is not None:
            self.follow_hosts(claim.attempt)
        if self.ends_run and was_killed(records):
            found = {"attempt": before.attempt, "step": before.step}
            self.send(incidents.of_killed_supervisor(run=self.run, **found))

    def on_news(self, attempt: int, news: News) -> None:
        """Sends the incident that a message from host 0's worker causes."""
        self.saves.on_news(news, attempt=attempt)

    def on_event(self, event: object) -> None:
        """Sends the incident that an event of this supervisor causes."""
        incident = incidents.of_event(event, run=self.run)
        if incident is not None:
            self.send(dataclasses.replace(incident, seq=incident.seq + HOST_SEQ * self.host))

    def on_fault(self, event: HardwareFaultFound) -> None:
        """Sends a fault of this host after which training continues."""
        self.on_event(dataclasses.replace(event, step=max(event.step, self.step)))

    def on_end(self, result: AttemptResult, claim: Claim) -> None:
        """Sends how the attempt has ended."""
        if not self.ends_run:
            return
        step = self.step
        with contextlib.suppress(RunError, OSError):
            read = partial(run_log.read_records, self.run_dir.log)
            step = run_log.fold(call_with_timeout(read, seconds=READ_SECONDS)).step
        found = incidents.of_attempt(result, run=self.run, attempt=claim.attempt, step=step)
        if found is not None:
            self.send(found)


def was_killed(records: Sequence[Record]) -> bool:
    """Returns whether the newest attempt has no record of its end: its supervisor was killed."""
    for record in reversed(in_force(records)):
        if isinstance(record.body, AttemptEnded | SupervisorEnded):
            return False
        if isinstance(record.body, Claim):
            return True
    return False


def resolve(
    config: RunConfig, env: Mapping[str, str], *, is_inline: bool
) -> tuple[ResolvedTarget, ...] | None:
    """Returns the targets of a supervisor of host 0; None: the launcher sends its alerts.

    Raises:
      ConfigError: the variable of a target is not set, or can't be used.
    """
    if env.get(VARIABLE) == RECORDED:
        return None
    if is_inline:
        if config.alerts.targets:
            print_message("alerts: training in this process has no supervisor, so none is sent")
        return ()
    return alert_sender.resolve(config.alerts, env=env)


def open_alerts(
    targets: Sequence[ResolvedTarget] | None,
    config: RunConfig,
    run_dir: RunDir,
    num_hosts: int,
    clock: Clock,
) -> contextlib.AbstractContextManager[AttemptAlerts]:
    """Returns the alerts of the supervisor of host 0; enter it while the run lock is held."""
    if targets is None:
        return recording(config, run_dir, host=0, clock=clock)
    return sending(targets, config, run_dir, num_hosts=num_hosts, clock=clock)


@contextlib.contextmanager
def sending(
    targets: Sequence[ResolvedTarget],
    config: RunConfig,
    run_dir: RunDir,
    *,
    num_hosts: int,
    clock: Clock,
) -> Iterator[AttemptAlerts]:
    """Sends the alerts of an attempt of all hosts; entered while the run lock is held."""
    section, run = config.alerts, run_dir.root.absolute().name
    alerts = Alerts(targets, run_dir, section=section, clock=clock, report=print_message)
    over = threading.Event()
    with alerts:

        def follow(attempt: int) -> None:
            send = partial(_send_recorded, run_dir, attempt, alerts, over)
            make_thread("alerts-hosts", send, daemon=True).start()

        monitor = SaveMonitor(alerts.send, run=run)
        has_others = bool(targets) and num_hosts > 1
        try:
            yield AttemptAlerts(
                run,
                0,
                alerts.send,
                bool(targets),
                monitor,
                run_dir,
                follow if has_others else None,
            )
        finally:
            over.set()


def _send_recorded(run_dir: RunDir, attempt: int, alerts: Alerts, over: threading.Event) -> None:
    """Sends the incidents that the other hosts record, until the attempt is over.

    The last ones of the attempt before may have been written after its host 0 had exited.
    """
    recorded = RecordedIncidents(run_dir)
    while not over.wait(LOOK_SECONDS):
        with contextlib.suppress(RunError, OSError):
            for time, incident in recorded.read_new((attempt - 1, attempt)):
                alerts.send(incident, time=time)


@contextlib.contextmanager
def recording(
    config: RunConfig, run_dir: RunDir, *, host: int, clock: Clock
) -> Iterator[AttemptAlerts]:
    """Records the incidents of a supervisor that sends none itself."""
    run = run_dir.root.absolute().name
    with IncidentRecorder(run_dir, host=host, clock=clock) as recorder:
        send = recorder.send if config.alerts.targets else _ignore
        yield AttemptAlerts(run, host, send, False, SaveMonitor(send, run=run), run_dir)


def _ignore(incident: Incident) -> None:
    """No-op: there is no target."""
