"""Tells webhooks of incidents, from threads of their own: nothing here can disturb training.

One thread a target, fed by a bounded queue, so that a target that is dead delays no other. It
writes down what it is to tell and what it has told in `RUN_DIR/alerts.jsonl`, so that a supervisor
that comes after one that was killed repeats nothing and forgets nothing. Between a target's answer
and the line that records it a kill can still cause a repetition, which then carries the same key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxres.clock import Clock
from jaxres.config.schema_operations import AlertsSection, AlertTarget, PagerdutyTarget, variable
from jaxres.faults import ConfigError, TypedEnd
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage.line_writer import Lines, appended
from jaxres.telemetry import alert_delivery_log, incidents, webhook
from jaxres.telemetry.alert_delivery_log import Ledger
from jaxres.telemetry.alert_monitors import Commits
from jaxres.telemetry.incidents import ALWAYS_TOLD, Incident

MAX_QUEUED = 1000
"""Incidents that wait for the thread; more than that only come while storage hangs."""
MAX_WAITING = 100
"""Incidents that wait for a target that does not answer."""
RETRY_SECONDS = 1.0
"""First wait before a retry; each is twice as long as the one before, up to LONGEST_RETRY."""
LONGEST_RETRY_SECONDS = 60.0
GIVE_UP_SECONDS = 3600.0
"""An incident that could not be delivered for so long is left out."""
CLOSE_SECONDS = 3.0
"""Longest delay of the end, for what is not yet delivered; the next supervisor tries again."""


@dataclass(frozen=True)
class Target:
    """A target with its secret, which no `repr` shows."""

    config: AlertTarget
    secret: str = field(repr=False)
    """The URL, or PagerDuty's key."""

    @property
    def name(self) -> str:
        """What it is called in messages and in the file."""
        return f"{self.config.kind}:{variable(self.config)}"

    @property
    def url(self) -> str:
        """Where to post; a secret, as a rule."""
        return self.config.url if isinstance(self.config, PagerdutyTarget) else self.secret


def resolve(section: AlertsSection, *, env: Mapping[str, str]) -> tuple[Target, ...]:
    """Takes the targets' secrets from the environment.

    Raises:
      ConfigError: variables that are not set, or whose value can't be used; it shows no value.
    """
    found, wrong = [], []
    for number, config in enumerate(section.targets):
        name = variable(config)
        target = Target(config, env.get(name, "").strip())
        if not target.secret:
            wrong.append(f"alerts.targets[{number}]: the environment variable {name} is not set")
        elif not webhook.is_url(target.url):
            wrong.append(
                f"alerts.targets[{number}]: the environment variable {name} does not hold an "
                "address such as https://host/path (its value is not shown)"
            )
        found.append(target)
    if wrong:
        wrong.append("Set it where the supervisor starts, or leave the target out.")
        raise ConfigError("\n".join(wrong))
    return tuple(found)


def without_secrets(section: AlertsSection, env: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment for workers, who need none of the secrets."""
    secrets = {variable(target) for target in section.targets}
    return {name: value for name, value in env.items() if name not in secrets}


class Alerts:
    """Tells every target of incidents until closed; a context manager.

    To be entered by who owns the run: it takes up what a predecessor could not deliver.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        run_dir: RunDir,
        *,
        section: AlertsSection,
        clock: Clock,
        say: Callable[[str], None],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Prepares the threads.

        Args:
          targets: as `resolve` returns them; none of them: nothing is started or written.
          run_dir: where `alerts.jsonl` is, and the log whose commits are watched.
          section: the limits.
          clock: for retries and time stamps.
          say: tells the person at the terminal what could not be delivered.
          retry_seconds: first wait before a retry.
        """
        self._run_dir = run_dir
        self._clock = clock
        self._say = say
        minutes = section.no_commit_minutes if targets else None
        self._commits = (
            None if minutes is None else Commits(self.tell, run_dir, 60 * minutes, clock)
        )
        self._outlets = [
            Outlet(
                target,
                run_dir,
                max_per_hour=section.max_per_hour,
                clock=clock,
                say=say,
                retry_seconds=retry_seconds,
            )
            for target in targets
        ]

    def __enter__(self) -> Alerts:
        for outlet in self._outlets:
            outlet.start()
        if self._commits is not None:
            self._commits.start()
        return self

    def __exit__(self, *_: object) -> None:
        deadline = self._clock.monotonic() + CLOSE_SECONDS
        if self._commits is not None:
            self._commits.close()
        for outlet in self._outlets:
            outlet.close()
        for outlet in self._outlets:
            if left := outlet.join(max(0.0, deadline - self._clock.monotonic())):
                self._say(f"alerts: {outlet.name} has not been told of {left} incidents")

    def tell(self, incident: Incident) -> None:
        """Hands an incident over, at once; one that was told before is not told again."""
        for outlet in self._outlets:
            outlet.take(incident)

    def hear(self, event: object) -> None:
        """Tells of what the supervisor has decided; a listener of its events."""
        incident = incidents.of_event(event, run=self._run_dir.root.absolute().name)
        if incident is not None:
            self.tell(incident)


class Outlet:
    """One target's queue and thread."""

    def __init__(
        self,
        target: Target,
        run_dir: RunDir,
        *,
        max_per_hour: int,
        clock: Clock,
        say: Callable[[str], None],
        retry_seconds: float,
    ) -> None:
        self.name = target.name
        self._target = target
        self._run_dir = run_dir
        self._path = run_dir.alerts
        self._nonce_read: str | None = None
        self._max_per_hour = max_per_hour
        self._clock = clock
        self._say = say
        self._retry_seconds = retry_seconds
        self._queue: queue.Queue[tuple[Incident, float] | None] = queue.Queue(MAX_QUEUED)
        """None only wakes the thread."""
        self._closing = threading.Event()
        self._ledger = Ledger(target.name)
        self._lines: Lines | None = None
        self._taken_at: dict[str, float] = {}
        """When each waiting incident was taken, by the monotonic clock."""
        self._failures = 0
        """In a row."""
        self._next_try = 0.0
        self._lost = 0
        self._thread = threading.Thread(
            target=self._run, name=f"jaxres-alerts-{target.config.kind}", daemon=True
        )

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def take(self, incident: Incident) -> None:
        """Hands an incident to the thread; never waits."""
        if not incidents.is_wanted(self._target.config, incident.kind):
            return
        try:
            self._queue.put_nowait((incident, self._clock.wall()))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Asks the thread to try once more, and to end."""
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, seconds: float) -> int:
        """Waits for the thread, and returns how many incidents are not delivered."""
        self._thread.join(timeout=seconds)
        untaken = sum(one is not None for one in list(self._queue.queue))
        return len(self._ledger.waiting) + untaken + self._lost

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the main one's.
        try:
            self._open()
            while not self._closing.is_set():
                self._take_all(wait_seconds=self._idle_seconds())
                self._deliver_due()
            self._take_all(wait_seconds=0.0)
            while self._ledger.waiting and self._deliver_next():
                pass
        except Exception as error:  # noqa: BLE001 - its words may hold the secret, and end here.
            self._say(f"alerts: {self.name} is told nothing more ({type(error).__name__})")
        finally:
            if self._lines is not None:
                self._lines.close()

    def _open(self) -> None:
        """Reads what was told before; without the file alerts go on, and may be repeated."""
        try:
            self._ledger = alert_delivery_log.fold(self.name, read_json_lines(self._path))
            self._lines = appended(self._path, max_waiting=MAX_QUEUED, beyond="drop oldest")
        except (TypedEnd, OSError):
            self._say(f"alerts: {self._path} can't be used; what was told before may be repeated")
        now = self._clock.monotonic()
        self._taken_at = dict.fromkeys(self._ledger.waiting, now)

    def _put_down(
        self,
        key: str,
        state: alert_delivery_log.State,
        *,
        time: float | None = None,
        **more: object,
    ) -> None:
        at = self._clock.wall() if time is None else time
        one = alert_delivery_log.line(self.name, key, state, time=at, **more)
        self._ledger.apply(one)
        if self._lines is not None:
            self._lines.append(json.dumps(one).encode())

    def _idle_seconds(self) -> float | None:
        """Returns how long there is nothing to do if nothing comes; None: for ever."""
        if not self._ledger.waiting:
            return None
        return max(0.0, self._next_try - self._clock.monotonic())

    def _take_all(self, *, wait_seconds: float | None) -> None:
        """Takes what the queue holds; while it is empty, waits for the first."""
        is_first = True
        with contextlib.suppress(queue.Empty):
            while not self._closing.is_set() or not self._queue.empty():
                wait = wait_seconds if is_first else 0.0
                taken = self._queue.get(block=wait != 0.0, timeout=wait or None)
                is_first = False
                if taken is not None:
                    self._remember(*taken)
        self._leave_out_too_many()

    def _remember(self, incident: Incident, time: float) -> None:
        key = incidents.key(incident, nonce=self._nonce())
        if key in self._ledger.known:
            return
        self._taken_at[key] = self._clock.monotonic()
        self._put_down(key, "told", time=time, incident=dataclasses.asdict(incident))

    def _nonce(self) -> str:
        """Returns the nonce of the run's first claim: the run's own name, wherever it is moved."""
        if self._nonce_read is None:
            with contextlib.suppress(TypedEnd):
                for record in run_log.read_records(self._run_dir.log)[:1]:
                    if isinstance(record.body, Claim):
                        self._nonce_read = record.body.nonce
        return self._nonce_read or "unclaimed"

    def _leave_out_too_many(self) -> None:
        """Leaves out what waits in vain, the oldest first, and the last word about a run last."""
        now, waiting = self._clock.monotonic(), self._ledger.waiting
        late = [key for key in waiting if now - self._taken_at[key] > GIVE_UP_SECONDS]
        spare = [key for key in waiting if waiting[key].incident.kind not in ALWAYS_TOLD]
        many = spare[: max(0, len(waiting) - MAX_WAITING)]
        for key in dict.fromkeys((*late, *many)):
            self._put_down(key, "left_out", why="could not be delivered")

    def _deliver_due(self) -> None:
        while self._ledger.waiting and self._clock.monotonic() >= self._next_try:
            if not self._deliver_next() or self._closing.is_set():
                return

    def _deliver_next(self) -> bool:
        """Tells the target of the oldest incident; False where it is to be tried again later."""
        key, told = next(iter(self._ledger.waiting.items()))
        kind, now = told.incident.kind, self._clock.wall()
        if not self._ledger.is_allowed(kind, now=now, max_per_hour=self._max_per_hour):
            self._put_down(key, "left_out", why="too many in an hour")
            return True
        for message in incidents.messages(
            self._target.config,
            told.incident,
            key=key,
            time=told.time,
            secret=self._target.secret,
            left_out=self._ledger.left_out,
            is_open=self._ledger.is_open,
        ):
            answer = webhook.post(self._target.url, message.body, key=message.key)
            if not answer.is_delivered:
                return self._failed(key, answer)
        self._failures = 0
        self._put_down(key, "delivered")
        return True

    def _failed(self, key: str, answer: webhook.Answer) -> bool:
        """Sees to it that it is tried again, or leaves it out where that can't help."""
        if not answer.may_be_repeated:
            self._say(f"alerts: {self.name} refuses: {answer.words}")
            self._put_down(key, "left_out", why=answer.words)
            return True
        if self._failures == 0:
            self._say(f"alerts: {self.name}: {answer.words}; trying again in the background")
        wait = min(self._retry_seconds * 2**self._failures, LONGEST_RETRY_SECONDS)
        self._failures = min(self._failures + 1, 16)
        self._next_try = self._clock.monotonic() + max(wait, answer.wait_seconds)
        return False
