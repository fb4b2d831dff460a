"""Sends incidents to webhooks from background threads, so that alerts never delay training.

Each target has its own thread and bounded queue, so a dead target delays no other. The thread
records queued and delivered incidents in `RUN_DIR/alerts.jsonl`. A supervisor or launcher that
follows a killed one therefore repeats and loses no incident. The exception: after a kill between a
target's response and the line that records it, the incident is sent twice, with the same key.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from jaxres.clock import Clock
from jaxres.config.schema.alerts import AlertsSection, AlertTarget, PagerdutyTarget, variable
from jaxres.faults import ConfigError, RunError
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import codec
from jaxres.storage.line_writer import LineWriter, open_line_writer
from jaxres.storage.path import is_remote
from jaxres.storage.threads import make_thread
from jaxres.telemetry import alert_delivery_log, incidents, webhook
from jaxres.telemetry.alert_delivery_log import Ledger
from jaxres.telemetry.alert_monitors import CommitMonitor
from jaxres.telemetry.incidents import Incident

MAX_QUEUED = 1000
"""Size of the queue to the thread; it fills up only while storage hangs."""
MAX_WAITING = 100
"""Most incidents that wait for a target that does not respond."""
RETRY_SECONDS = 1.0
"""First wait before a retry; each wait is twice the previous one, up to LONGEST_RETRY_SECONDS."""
LONGEST_RETRY_SECONDS = 60.0
OPEN_RETRY_SECONDS = 5.0
"""Time until a delivery log in a bucket that does not answer is read again."""
MAX_PER_HOUR = 30
"""Most messages per hour and target; the next message has the number of omitted ones.

Slack's incoming webhooks take one a second, PagerDuty's events 120 a minute: this limit is for
people, not for services."""
GIVE_UP_SECONDS = 3600.0
"""Age at which an undelivered incident is dropped."""
CLOSE_SECONDS = 3.0
"""Longest delay of the exit for undelivered incidents; the next supervisor sends the rest."""


@dataclass(frozen=True)
class ResolvedTarget:
    """A target with its secret; `repr` omits the secret."""

    config: AlertTarget
    secret: str = field(repr=False)
    """Webhook URL, or PagerDuty's routing key."""

    @property
    def name(self) -> str:
        """Name of the target in messages and in `alerts.jsonl`."""
        return target_name(self.config)

    @property
    def url(self) -> str:
        """URL of the webhook; secret except for PagerDuty."""
        return self.config.url if isinstance(self.config, PagerdutyTarget) else self.secret


def target_name(target: AlertTarget) -> str:
    """Returns the name of a target in messages and in `alerts.jsonl`."""
    return f"{target.kind}:{variable(target)}"


def resolve(section: AlertsSection, *, env: Mapping[str, str]) -> tuple[ResolvedTarget, ...]:
    """Reads the targets' secrets from the environment.

    Raises:
      ConfigError: a variable is not set or its value can't be used; the message shows no value.
    """
    resolved, errors = [], []
    for number, config in enumerate(section.targets):
        name = variable(config)
        target = ResolvedTarget(config, env.get(name, "").strip())
        if not target.secret:
            errors.append(f"alerts.targets[{number}]: the environment variable {name} is not set")
        elif isinstance(config, PagerdutyTarget) and not webhook.is_url(config.url):
            errors.append(f"alerts.targets[{number}].url: {config.url!r:.200} is no address")
        elif not webhook.is_url(target.url):
            errors.append(
                f"alerts.targets[{number}]: the environment variable {name} does not hold an "
                "address such as https://host/path (its value is not shown)"
            )
        resolved.append(target)
    if errors:
        errors.append("Set it where the supervisor starts, or remove the target.")
        raise ConfigError("\n".join(errors))
    return tuple(resolved)


def scrub_secrets(section: AlertsSection, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for workers, without the targets' secrets."""
    secrets = {variable(target) for target in section.targets}
    return {name: value for name, value in env.items() if name not in secrets}


class Alerts:
    """Sends incidents to every target; a context manager.

    Enter it only while holding the run lock: it also sends what an earlier supervisor could not
    deliver.
    """

    def __init__(
        self,
        targets: Sequence[ResolvedTarget],
        run_dir: RunDir,
        *,
        section: AlertsSection,
        clock: Clock,
        report: Callable[[str], None],
        retry_seconds: float = RETRY_SECONDS,
        nonce: str | None = None,
        may_send: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepares the threads.

        Args:
          targets: as returned by `resolve`; if empty, no thread starts and no file is written.
          run_dir: holds `alerts.jsonl` and the run log whose commits are monitored.
          section: commit stall limit.
          clock: for retries and time stamps.
          report: prints delivery failures on the terminal.
          retry_seconds: first wait before a retry.
          nonce: what the ids of incidents begin with; None: the nonce of the run's first claim.
          may_send: whether this process still owns the run; asked before every request.
        """
        self._run_dir = run_dir
        self._clock = clock
        self._print = report
        minutes = section.no_commit_minutes if targets else None
        self._commits = (
            None if minutes is None else CommitMonitor(self.send, run_dir, 60 * minutes, clock)
        )
        self._senders = [
            TargetSender(
                target,
                run_dir,
                clock=clock,
                report=report,
                retry_seconds=retry_seconds,
                nonce=nonce,
                may_send=may_send,
            )
            for target in targets
        ]

    def __enter__(self) -> Alerts:
        for sender in self._senders:
            sender.start()
        if self._commits is not None:
            self._commits.start()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = self._clock.monotonic() + CLOSE_SECONDS
        if self._commits is not None:
            self._commits.close()
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            if left := sender.join(max(0.0, deadline - self._clock.monotonic())):
                self._print(f"alerts: {left} incidents were not delivered to {sender.name}")

    def send(
        self,
        incident: Incident,
        *,
        time: float | None = None,
        targets: Container[str] | None = None,
    ) -> None:
        """Queues an incident for the targets without waiting; an incident is sent only once.

        Args:
          time: when it happened, in seconds since the epoch; None: now.
          targets: names of the targets that receive it; None: all.
        """
        for sender in self._senders:
            if targets is None or sender.name in targets:
                sender.take(incident, time=time)

    def on_event(self, event: object) -> None:
        """Sends the incident that a supervisor event causes, if any."""
        incident = incidents.of_event(event, run=self._run_dir.root.absolute().name)
        if incident is not None:
            self.send(incident)

    def on_step(self, line: MetricsLine) -> None:
        """No-op: a completed step causes no incident."""


class TargetSender:
    """Queue and sending thread of one target."""

    def __init__(
        self,
        target: ResolvedTarget,
        run_dir: RunDir,
        *,
        clock: Clock,
        report: Callable[[str], None],
        retry_seconds: float,
        nonce: str | None,
        may_send: Callable[[], bool],
    ) -> None:
        self.name = target.name
        self._target = target
        self._run_dir = run_dir
        self._path = run_dir.alerts
        self._nonce_read = nonce
        self._may_send = may_send
        self._clock = clock
        self._print = report
        self._retry_seconds = retry_seconds
        self._queue: queue.Queue[tuple[Incident, float] | None] = queue.Queue(MAX_QUEUED)
        """Incidents with their times; None only wakes the thread."""
        self._closing = threading.Event()
        self._ledger = Ledger(target.name)
        self._lines: LineWriter | None = None
        self._taken_at: dict[str, float] = {}
        """Monotonic time at which each waiting incident was taken from the queue, by key."""
        self._failures = 0
        """Number of consecutive failures."""
        self._next_try = 0.0
        self._num_lost = 0
        self._thread = make_thread(f"alerts-{target.config.kind}", self._run, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self, incident: Incident, *, time: float | None = None) -> None:
        """Queues an incident for the thread without waiting."""
        if not incidents.is_wanted(self._target.config, incident.kind):
            return
        try:
            self._queue.put_nowait((incident, self._clock.wall() if time is None else time))
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        """Makes the thread send the remaining incidents once and stop."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> int:
        """Waits for the thread; returns the number of undelivered incidents."""
        self._thread.join(timeout=seconds)
        untaken = sum(item is not None for item in list(self._queue.queue))
        return len(self._ledger.waiting) + untaken + self._num_lost

    def _run(self) -> None:
        try:
            while not self._open():
                if self._closing.wait(OPEN_RETRY_SECONDS):
                    return
            while not self._closing.is_set():
                self._take_all(wait_seconds=self._idle_seconds())
                self._deliver_due()
            self._take_all(wait_seconds=0.0)
            while self._ledger.waiting and self._deliver_next():
                pass
        except Exception as error:  # noqa: BLE001 - its message may hold the secret.
            self._print(f"alerts: sending to {self.name} has stopped ({type(error).__name__})")
        finally:
            if self._lines is not None:
                self._lines.close()

    def _open(self) -> bool:
        """Reads the delivery log; False: it has to be tried again.

        A bucket that does not answer is waited for. A file that can't be used is left out: alerts
        are sent, but may be repeated.
        """
        try:
            self._ledger = alert_delivery_log.fold(self.name, read_json_lines(self._path))
            self._lines = open_line_writer(
                self._path, max_waiting=MAX_QUEUED, on_overflow="drop oldest"
            )
        except (RunError, OSError):
            if is_remote(self._path):
                return False
            self._print(f"alerts: {self._path} can't be used; earlier alerts may be repeated")
        now = self._clock.monotonic()
        self._taken_at = dict.fromkeys(self._ledger.waiting, now)
        return True

    def _record(
        self,
        key: str,
        state: alert_delivery_log.DeliveryState,
        *,
        time: float | None = None,
        **more: object,
    ) -> None:
        at = self._clock.wall() if time is None else time
        entry = alert_delivery_log.line(self.name, key, state, time=at, **more)
        self._ledger.apply(entry)
        if self._lines is not None:
            self._lines.append(json.dumps(entry).encode())

    def _idle_seconds(self) -> float | None:
        """Returns the seconds until the next retry; None: no incident waits."""
        if not self._ledger.waiting:
            return None
        return max(0.0, self._next_try - self._clock.monotonic())

    def _take_all(self, *, wait_seconds: float | None) -> None:
        """Takes all queued incidents; waits for the first one if the queue is empty."""
        is_first = True
        with contextlib.suppress(queue.Empty):
            while not self._closing.is_set() or not self._queue.empty():
                wait = wait_seconds if is_first else 0.0
                taken = self._queue.get(block=wait != 0.0, timeout=wait or None)
                is_first = False
                if taken is not None:
                    self._remember(*taken)
        self._drop_excess()

    def _remember(self, incident: Incident, time: float) -> None:
        key = incidents.key(incident, nonce=self._nonce())
        if key in self._ledger.known or self._ledger.has_nothing_to_resolve(incident.kind):
            return
        self._taken_at[key] = self._clock.monotonic()
        self._record(key, "queued", time=time, incident=codec.encode(incident))

    def _nonce(self) -> str:
        """Returns the nonce of the run's first claim: it identifies the run even if it is moved."""
        if self._nonce_read is None:
            with contextlib.suppress(RunError):
                for record in run_log.read_records(self._run_dir.log)[:1]:
                    if isinstance(record.body, Claim):
                        self._nonce_read = record.body.nonce
        return self._nonce_read or "unclaimed"

    def _drop_excess(self) -> None:
        """Drops incidents that wait too long, and the oldest ones beyond MAX_WAITING.

        Incidents that end the run, and resolves, are dropped only for their age.
        """
        now, waiting = self._clock.monotonic(), self._ledger.waiting
        late = [key for key in waiting if now - self._taken_at[key] > GIVE_UP_SECONDS]
        kinds = {key: incident.incident.kind for key, incident in waiting.items()}
        spare = [
            key
            for key, kind in kinds.items()
            if not kind.row.ends_run and not incidents.only_resolves(self._target.config, kind)
        ]
        many = spare[: max(0, len(waiting) - MAX_WAITING)]
        for key in dict.fromkeys((*late, *many)):
            self._record(key, "dropped", reason="could not be delivered")

    def _deliver_due(self) -> None:
        while self._ledger.waiting and self._clock.monotonic() >= self._next_try:
            if not self._deliver_next() or self._closing.is_set():
                return

    def _deliver_next(self) -> bool:
        """Sends the oldest incident; returns False if it has to be retried later."""
        if not self._may_send():
            self._next_try = self._clock.monotonic() + RETRY_SECONDS
            return False
        key, oldest = next(iter(self._ledger.waiting.items()))
        kind, now = oldest.incident.kind, self._clock.wall()
        messages = incidents.messages(
            self._target.config,
            oldest.incident,
            key=key,
            time=oldest.time,
            secret=self._target.secret,
            left_out=self._ledger.left_out,
            is_open=self._ledger.is_open,
        )
        is_silent = not messages or incidents.only_resolves(self._target.config, kind)
        if not is_silent and not self._ledger.is_allowed(kind, now=now, max_per_hour=MAX_PER_HOUR):
            self._record(key, "dropped", reason="too many in an hour")
            return True
        for message in messages:
            result = webhook.post(self._target.url, message.body, key=message.key)
            if not result.is_delivered:
                return self._failed(key, result)
        self._failures = 0
        self._record(key, "silent" if is_silent else "delivered")
        if self._lines is not None and is_remote(self._path):  # A file has the line already.
            with contextlib.suppress(RunError, OSError):  # Then it is written later, in order.
                self._lines.flush()
        return True

    def _failed(self, key: str, result: webhook.PostResult) -> bool:
        """Schedules a retry and returns False, or drops the incident and returns True."""
        if not result.may_be_repeated:
            self._print(f"alerts: {self.name} refused: {result.description}")
            self._record(key, "dropped", reason=result.description)
            return True
        if self._failures == 0:
            self._print(
                f"alerts: {self.name}: {result.description}; trying again in the background"
            )
        wait = min(self._retry_seconds * 2**self._failures, LONGEST_RETRY_SECONDS)
        self._failures = min(self._failures + 1, 16)
        self._next_try = self._clock.monotonic() + max(wait, result.wait_seconds)
        return False
