"""Polls the GCE metadata server for preemption notices of this machine, and reads the time limit.

One thread per key runs a long poll, because the server delays each response until the key changes.
The threads only pass values to the supervisor, through a queue and a pipe that wakes it. On a
machine that is not a GCE VM no thread is started, and one event records that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from jaxres.clock import Clock
from jaxres.config.schema.supervision import PreemptionSection
from jaxres.host import signals
from jaxres.runlog.events import Event, Noted
from jaxres.runlog.supervisor_events import PreemptionNoticeReceived, PreemptionWatchStarted
from jaxres.storage.threads import WatcherThreads
from jaxres.supervisor.preemption import gce_metadata, time_limit
from jaxres.supervisor.preemption import notices as preemption
from jaxres.supervisor.preemption.gce_metadata import Response, Server
from jaxres.supervisor.preemption.notices import (
    ActiveNotices,
    MetadataValue,
    NoEvent,
    PreemptionNotice,
)

PACE_SECONDS = 0.5
"""Interval between requests to a server that does not delay its response."""
RETRY_SECONDS = 0.2
"""First wait after a failed request. It doubles up to LONGEST_RETRY_SECONDS, which is shorter than
any notice."""
LONGEST_RETRY_SECONDS = 4.0
SILENT_SECONDS = 60.0
"""One event is emitted once the server has not answered for this long."""


class PreemptionWatcher:
    """Watches until closed; a context manager, to be entered before any long operation.

    Until the first `poll`, a notice that leaves little time sends this process a SIGTERM.
    """

    def __init__(
        self,
        section: PreemptionSection,
        *,
        env: Mapping[str, str],
        clock: Clock,
        product: str | None = None,
    ) -> None:
        """Detects the metadata server; starts no thread yet.

        Args:
          section: the config section that says how much time each notice leaves.
          env: the environment, which may name the server.
          product: product name of the machine; None: it is read from the firmware.
        """
        self.section = section
        self._clock = clock
        product = gce_metadata.product_name() if product is None else product
        self.server: Server | None = None
        if section.metadata == "auto":
            self.server = gce_metadata.detect(env, product=product)
        self._threads = WatcherThreads[MetadataValue | Noted]()
        self._active: ActiveNotices = {}
        self._env = env
        self._first_events: list[Event] = []
        self._is_first = self._is_early = True

    def __enter__(self) -> PreemptionWatcher:
        if self.server is not None:
            for key in preemption.KEYS:
                name = key.partition("/")[2].partition("?")[0]
                self._threads.start(name, partial(self._watch, self.server, key))
        match time_limit.find(self._env, wall=self._clock.wall()):
            case time_limit.TimeLimit(seconds, source):
                self._apply_time_limit(seconds, source)
            case time_limit.Unknown(reason):
                self._first_events.append(Noted(reason))
            case None:
                pass
        return self

    def _apply_time_limit(self, seconds: float, source: str) -> None:
        now, description = self._clock.monotonic(), "this job reaches its time limit"
        notice = PreemptionNotice(source, description, now, now + seconds, is_time_limit=True)
        self._active = preemption.apply(self._active, source, notice)
        self._first_events.append(PreemptionNoticeReceived(source, description, seconds))

    def __exit__(self, *_: object) -> None:
        self._threads.close(seconds=0.0)  # A thread may be in a long poll.

    @property
    def wakeup(self) -> int:
        """A descriptor that is readable whenever `poll` may return events."""
        return self._threads.wakeup

    def poll(self) -> list[Event]:
        """Processes the values received since the last call; returns the events to emit."""
        self._is_early = False
        events: list[Event] = []
        if self._is_first:
            self._is_first = False
            events.append(PreemptionWatchStarted(self._address(), self._reason()))
            events += self._first_events
        for value in self._threads.take():
            events += self._events_of(value)
        return events

    def most_urgent(self) -> PreemptionNotice | None:
        """Returns the notice in force that leaves the least time; None: there is none."""
        return preemption.most_urgent(self._active)

    def _address(self) -> str | None:
        return None if self.server is None else str(self.server)

    def _reason(self) -> str:
        if self.section.metadata == "off":
            return "preemption.metadata is off"
        if self.server is None:
            return "this machine is no GCE VM"
        return f"{gce_metadata.VARIABLE} is set" if self.server.is_named else "this is a GCE VM"

    def _events_of(self, value: MetadataValue | Noted) -> list[Event]:
        if isinstance(value, Noted):
            return [value]
        meaning = preemption.parse(value, self.section)
        before = self._active.get(value.key)
        self._active = preemption.apply(self._active, value.key, meaning)
        if meaning is None:
            return [Noted(f"{value.key}: {value.text[:200]!r} is not recognised; ignored")]
        if isinstance(meaning, PreemptionNotice):
            left = meaning.seconds_left(self._clock.monotonic())
            return [PreemptionNoticeReceived(value.key, meaning.description, left)]
        if before is not None and value.key not in self._active:
            return [PreemptionNoticeReceived(value.key, "cancelled", None)]
        return (
            [PreemptionNoticeReceived(value.key, meaning.description, None)]
            if meaning.description
            else []
        )

    def _watch(self, server: Server, key: str) -> None:
        etag: str | None = None
        text: str | None = None
        retry = RETRY_SECONDS
        answered_at, is_silence_reported = self._clock.monotonic(), False
        while not self._threads.closed.is_set():
            requested_at = self._clock.monotonic()
            response = gce_metadata.get(server, key, after=etag)
            now = self._clock.monotonic()
            if not isinstance(response, Response):
                if not is_silence_reported and now - answered_at > SILENT_SECONDS:
                    is_silence_reported = True
                    self._report(
                        Noted(f"{key}: no answer for {now - answered_at:.0f} s: {response.why}")
                    )
                pause = LONGEST_RETRY_SECONDS if response.is_absent else retry
                retry = min(2 * retry, LONGEST_RETRY_SECONDS)
            else:
                if is_silence_reported:
                    self._report(Noted(f"{key}: answers again"))
                answered_at, is_silence_reported, retry = now, False, RETRY_SECONDS
                is_held = response.etag is not None and now - requested_at > PACE_SECONDS
                is_new, etag, text = response.text != text, response.etag, response.text
                if is_new:
                    self._report(self._dated(server, key, text))
                pause = 0.0 if is_held or (is_new and etag is not None) else PACE_SECONDS
            self._threads.closed.wait(pause)

    def _dated(self, server: Server, key: str, text: str) -> MetadataValue:
        value = MetadataValue(key, text, self._clock.monotonic(), self._clock.wall())
        if key != preemption.UPCOMING or not isinstance(self._meaning(value), PreemptionNotice):
            return value
        policy = gce_metadata.get(server, preemption.POLICY)
        known = policy.text if isinstance(policy, Response) else ""
        return MetadataValue(key, text, value.received_at, value.wall, known)

    def _meaning(self, value: MetadataValue) -> PreemptionNotice | NoEvent | None:
        return preemption.parse(value, self.section)

    def _report(self, report: MetadataValue | Noted) -> None:
        meaning = self._meaning(report) if isinstance(report, MetadataValue) else None
        self._threads.put(report)
        if self._is_early and isinstance(meaning, PreemptionNotice) and _is_near(meaning):
            signals.terminate_self(meaning.description)


def _is_near(notice: PreemptionNotice) -> bool:
    return (
        notice.deadline is None or notice.deadline - notice.received_at <= preemption.NEAR_SECONDS
    )
