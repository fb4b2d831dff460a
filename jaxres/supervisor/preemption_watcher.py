"""Watches for the notices of this machine, from the door's first moments on.

One thread a key in a long poll, since the server holds each answer back until its key changes. They
only carry words to the door: a queue, and a pipe that wakes it. On a machine that is no GCE VM
there is no thread, and nothing but one event says so.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Mapping

from jaxres.clock import Clock
from jaxres.config.schema_operations import PreemptionSection
from jaxres.runlog.events import Event, Noted, NoticeSeen, NoticesWatched
from jaxres.supervisor import gce_metadata, preemption, signals
from jaxres.supervisor.gce_metadata import Answer, Server
from jaxres.supervisor.preemption import Calm, Heard, Notice, Standing

PACE_SECONDS = 0.5
"""Between questions to a server that does not hold its answer back."""
RETRY_SECONDS = 0.2
"""First wait after no answer; doubled by each further one, up to LONGEST_RETRY_SECONDS, which is
short against the shortest notice."""
LONGEST_RETRY_SECONDS = 4.0
SILENT_SECONDS = 60.0
"""A server that has not answered for so long is spoken of, once."""


class Watchman:
    """Watches until closed; a context manager, to be entered before anything that may last.

    As long as nobody takes what it reports, a notice that leaves little time ends the process in
    the way of a SIGTERM.
    """

    def __init__(
        self,
        section: PreemptionSection,
        *,
        env: Mapping[str, str],
        clock: Clock,
        product: str | None = None,
    ) -> None:
        """Finds out whether there is anybody to ask.

        Args:
          section: how much time the notices leave.
          env: may name the server.
          clock: of the notices.
          product: the machine's, by its firmware; None: it is read.
        """
        self.section = section
        self._clock = clock
        found = gce_metadata.product_name() if product is None else product
        self.server: Server | None = None
        if section.metadata == "auto":
            self.server = gce_metadata.find(env, product=found)
        self._heard: queue.SimpleQueue[Heard | Noted] = queue.SimpleQueue()
        self._standing: Standing = {}
        self._is_first = self._is_early = True
        self._closed = threading.Event()
        self.wakeup, self._write_end = os.pipe()
        """The first: readable whenever there may be something to take."""
        os.set_blocking(self.wakeup, False)
        os.set_blocking(self._write_end, False)

    def __enter__(self) -> Watchman:
        if self.server is not None:
            for key in preemption.KEYS:
                words = (self.server, key)
                name = f"jaxres-{key.partition('/')[2].partition('?')[0]}"
                threading.Thread(target=self._watch, args=words, name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self.server is None:  # Else a thread may be in a long poll, and is not waited for.
            os.close(self.wakeup)
            os.close(self._write_end)

    def take(self) -> list[Event]:
        """Takes what has come since the last time, and returns what is to be told of it."""
        self._is_early = False
        signals.taken(self.wakeup)
        told: list[Event] = []
        if self._is_first:
            self._is_first = False
            told.append(NoticesWatched(self._address(), self._why()))
        with contextlib.suppress(queue.Empty):
            while True:
                told += self._after(self._heard.get_nowait())
        return told

    def pressing(self) -> Notice | None:
        """Returns the notice that leaves the least time, of those that stand."""
        return preemption.pressing(self._standing)

    def _address(self) -> str | None:
        return None if self.server is None else str(self.server)

    def _why(self) -> str:
        if self.section.metadata == "off":
            return "preemption.metadata is off"
        if self.server is None:
            return "this machine is no GCE VM"
        return f"{gce_metadata.VARIABLE} is set" if self.server.is_named else "this is a GCE VM"

    def _after(self, heard: Heard | Noted) -> list[Event]:
        if isinstance(heard, Noted):
            return [heard]
        meaning = preemption.understood(heard, self.section)
        was = self._standing.get(heard.key)
        self._standing = preemption.after(self._standing, heard.key, meaning)
        if meaning is None:
            return [Noted(f"{heard.key}: {heard.text[:200]!r} is not understood, and not heeded")]
        if isinstance(meaning, Notice):
            left = meaning.left(self._clock.monotonic())
            return [NoticeSeen(heard.key, meaning.words, left)]
        if was is not None and heard.key not in self._standing:
            return [NoticeSeen(heard.key, "called off", None)]
        return [NoticeSeen(heard.key, meaning.words, None)] if meaning.words else []

    def _watch(self, server: Server, key: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # All are the door's.
        etag: str | None = None
        text: str | None = None
        retry = RETRY_SECONDS
        answered, silence_told = self._clock.monotonic(), False
        while not self._closed.is_set():
            asked = self._clock.monotonic()
            answer = gce_metadata.ask(server, key, after=etag)
            now = self._clock.monotonic()
            if not isinstance(answer, Answer):
                if not silence_told and now - answered > SILENT_SECONDS:
                    silence_told = True
                    self._report(
                        Noted(f"{key}: no answer for {now - answered:.0f} s: {answer.why}")
                    )
                pause = LONGEST_RETRY_SECONDS if answer.is_absent else retry
                retry = min(2 * retry, LONGEST_RETRY_SECONDS)
            else:
                if silence_told:
                    self._report(Noted(f"{key}: answers again"))
                answered, silence_told, retry = now, False, RETRY_SECONDS
                is_held = answer.etag is not None and now - asked > PACE_SECONDS
                is_new, etag, text = answer.text != text, answer.etag, answer.text
                if is_new:
                    self._report(self._dated(server, key, text))
                pause = 0.0 if is_held or (is_new and etag is not None) else PACE_SECONDS
            self._closed.wait(pause)

    def _dated(self, server: Server, key: str, text: str) -> Heard:
        heard = Heard(key, text, self._clock.monotonic(), self._clock.wall())
        if key != preemption.UPCOMING or not isinstance(self._meaning(heard), Notice):
            return heard
        policy = gce_metadata.ask(server, preemption.POLICY)
        known = policy.text if isinstance(policy, Answer) else ""
        return Heard(key, text, heard.at, heard.wall, known)

    def _meaning(self, heard: Heard) -> Notice | Calm | None:
        return preemption.understood(heard, self.section)

    def _report(self, report: Heard | Noted) -> None:
        meaning = self._meaning(report) if isinstance(report, Heard) else None
        self._heard.put(report)
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"!")
        if self._is_early and isinstance(meaning, Notice) and _is_near(meaning):
            signals.terminate(meaning.words)


def _is_near(notice: Notice) -> bool:
    return notice.deadline is None or notice.deadline - notice.seen <= preemption.NEAR_SECONDS
