"""The doors of the other hosts, as this one sees them: what they say, and when one is gone.

A door is gone when its connection ends, at once, or when it has been silent for too long: a machine
that lost its power closes nothing. Time that this process itself was asleep is nobody's silence.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
from collections import deque
from collections.abc import Callable

from jaxres.clock import Awake, Clock
from jaxres.cluster.connection import Wire
from jaxres.cluster.messages import Farewell, Hello, Here, Lost, Standing, Word, WorkerEnded

BEAT_SECONDS = 1.0
DOUBT_SECONDS = 3 * BEAT_SECONDS
HELLO_SECONDS = 5.0
"""Longest time that a stranger may take to say who it is."""
LINGER_SECONDS = 2.0
"""Longest time that a last word may take to be read."""
ROOM_FOR_STRANGERS = 64
ACCEPTS_AT_ONCE = 64
CLOSE_LOOK_SECONDS = 0.05


class Channel:
    """The connection to one other host's door; owns it."""

    def __init__(
        self, host: int, name: str, wire: Wire, *, awake: Awake, silence_seconds: float
    ) -> None:
        self.host = host
        self.name = name
        self.wire = wire
        self.silence_seconds = silence_seconds
        self.step = 0
        """Newest finished step of that host, as far as it has told."""
        self.is_lost = False
        self._awake = awake
        self._heard_at = awake.now()
        self._beat_at = -math.inf

    def __str__(self) -> str:
        return f"host {self.host} ({self.name})"

    @property
    def silent_seconds(self) -> float:
        """How long nothing was heard of it."""
        return self._awake.now() - self._heard_at

    def tell(self, word: Word) -> None:
        """Sends a word, now or as soon as the socket takes it."""
        if not self.is_lost:
            self.wire.send(word)

    def beat(self, word: Word) -> None:
        """Sends a word if the last beat is a second old, and the one before has gone out."""
        now = self._awake.now()
        if now - self._beat_at >= BEAT_SECONDS and not self.wire.wants_to_write:
            self._beat_at = now
            self.tell(word)

    def hear(self) -> list[Word]:
        """Returns what has come; the last word ever is Lost."""
        if self.is_lost:
            return []
        now = self._awake.now()  # Before the reading: what came while we slept counts.
        self.wire.flush()
        words = self.wire.receive()
        if words:
            self._heard_at = now
        for word in words:
            self._note(word)
        if self.wire.broken is not None:
            self._lose(words, self.wire.broken)
        elif now - self._heard_at > self.silence_seconds:
            limit = f"{self.silence_seconds:g} s (hosts.heartbeat_seconds)"
            self._lose(words, f"nothing was heard of it for {limit}")
        return words

    def _note(self, word: Word) -> None:
        if isinstance(word, Here | WorkerEnded):
            self.step = max(self.step, word.step)
        elif isinstance(word, Standing) and self.host < len(word.steps):
            self.step = max(self.step, word.steps[self.host])

    def _lose(self, words: list[Word], reason: str) -> None:
        self.is_lost = True
        self.wire.close()
        after = f" after step {self.step}" if self.step else ""
        words.append(Lost(f"{self} is gone{after}: {reason}"))


class Reception:
    """Takes in strangers at the coordinator's port until they have said who they are.

    Whoever says something else, too much, or too slowly is sent away; nobody else notices.
    """

    def __init__(
        self, listener: socket.socket, *, num_hosts: int, awake: Awake, poll: select.epoll
    ) -> None:
        self._listener = listener
        self._awake = awake
        self._poll = poll
        self._room = num_hosts + ROOM_FOR_STRANGERS
        self._strangers: dict[Wire, float] = {}
        """By when each must have said who it is; the oldest first."""
        self._leaving: dict[Wire, float] = {}
        """By when each must have read its last word."""
        poll.register(listener, select.EPOLLIN)

    def newcomers(self) -> list[tuple[Wire, Hello]]:
        """Returns who has said who it is; it is the caller's to keep or to send away."""
        self._accept()
        now = self._awake.now()
        for wire, until in list(self._leaving.items()):
            if wire.ended() or now > until:
                self._leaving.pop(wire)
                wire.close()
        found: list[tuple[Wire, Hello]] = []
        for wire, until in list(self._strangers.items()):
            words = wire.receive()
            if words and isinstance(words[0], Hello) and wire.broken is None:
                self._strangers.pop(wire)
                found.append((wire, words[0]))
            elif words or wire.alien:
                self._strangers.pop(wire)
                reason = f"here waits a job of jaxres for its hosts: {wire.broken or words[0]}"
                self.send_away(wire, Farewell(78, reason))
            elif wire.broken is not None or now > until:
                self._strangers.pop(wire)
                wire.close()
        return found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # None there, or no descriptor left: not now.
            for _ in range(ACCEPTS_AT_ONCE):
                accepted, _ = self._listener.accept()
                self._strangers[Wire(accepted)] = self._awake.now() + HELLO_SECONDS
                self._poll.register(accepted, select.EPOLLIN)
        while len(self._strangers) + len(self._leaving) > self._room:
            crowd = self._leaving or self._strangers
            oldest = next(iter(crowd))
            crowd.pop(oldest)
            oldest.close()

    def send_away(self, wire: Wire, word: Farewell) -> None:
        """Tells somebody why it can't stay, and closes when that was read."""
        wire.finish(word)
        self._leaving[wire] = self._awake.now() + LINGER_SECONDS

    def close(self) -> None:
        """Closes the port and everybody who waits at it."""
        self._listener.close()
        for wire in (*self._strangers, *self._leaving):
            wire.close()
        self._strangers.clear()
        self._leaving.clear()


class Peers:
    """All other doors that this one talks with, for one `select` loop; a context manager.

    The loop looks at this object for reading, calls `hear` after each wake and at least four times
    a second, and `beat` as often; both return at once.
    """

    def __init__(self, *, clock: Clock, silence_seconds: float) -> None:
        self.channels: dict[int, Channel] = {}
        """By host; at a follower only host 0."""
        self.awake = Awake(clock)
        self.answer: Callable[[Wire, Hello], None] | None = None
        """What the lead does with a newcomer."""
        self.reception: Reception | None = None
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._heard: deque[tuple[int, Word]] = deque()
        self._poll = select.epoll()  # One small descriptor for any number of hosts.

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to hear."""
        return self._poll.fileno()

    def receive_at(self, listener: socket.socket, *, num_hosts: int) -> Reception:
        """Takes in newcomers from now on; owns the listener."""
        self.reception = Reception(listener, num_hosts=num_hosts, awake=self.awake, poll=self._poll)
        return self.reception

    def add(self, host: int, name: str, wire: Wire) -> Channel:
        """Takes a host's connection over, in the place of an earlier one and all it has said."""
        if (before := self.channels.pop(host, None)) is not None:
            before.wire.close()
            self._heard = deque(heard for heard in self._heard if heard[0] != host)
        channel = Channel(host, name, wire, awake=self.awake, silence_seconds=self._silence_seconds)
        self.channels[host] = channel
        with contextlib.suppress(FileExistsError):
            self._poll.register(wire, select.EPOLLIN)
        return channel

    def be_patient(self, seconds: float | None) -> None:
        """Lets the others be silent for so long; None: as long as is usual."""
        for channel in self.channels.values():
            channel.silence_seconds = max(self._silence_seconds, seconds or 0.0)

    def _living(self) -> list[Channel]:
        return [channel for channel in self.channels.values() if not channel.is_lost]

    def hear(self) -> list[tuple[int, Word]]:
        """Returns what has come, by host; answers newcomers; waits for nothing."""
        self._collect()
        heard = list(self._heard)
        self._heard.clear()
        return heard

    def next(self, seconds: float) -> tuple[int, Word] | None:
        """Returns the next word, or None if none comes for so long, or something else happens."""
        if not self._heard:
            self._poll.poll(max(0.0, seconds))
            self._collect()
        return self._heard.popleft() if self._heard else None

    def _collect(self) -> None:
        for channel in list(self.channels.values()):
            self._heard.extend((channel.host, word) for word in channel.hear())
        if self.reception and self.answer:
            for wire, hello in self.reception.newcomers():
                self.answer(wire, hello)

    def tell(self, word: Word, *, to: int | None = None) -> None:
        """Sends a word to all, or to one host; who is gone is passed over."""
        for channel in self._living():
            if to in (None, channel.host):
                channel.tell(word)

    def beat(self, word: Here | Standing) -> None:
        """Sends a beat to all that have had none for a second."""
        for channel in self._living():
            channel.beat(word)

    def close(self) -> None:
        """Lets the last words be read, for 2 s at most, and closes all connections and the port."""
        if self.reception:
            self.reception.close()
            self.reception = None
        until = self._clock.monotonic() + LINGER_SECONDS
        finished: set[int] = set()
        while (living := self._living()) and self._clock.monotonic() < until:
            for channel in living:
                channel.wire.flush()
                if not channel.wire.wants_to_write and channel.host not in finished:
                    finished.add(channel.host)
                    channel.wire.finish()
                if channel.wire.ended():
                    self._leave(channel)
            if self._living():
                self._poll.poll(CLOSE_LOOK_SECONDS)
        for channel in self._living():
            self._leave(channel)
        if not self._poll.closed:
            self._poll.close()

    def _leave(self, channel: Channel) -> None:
        channel.is_lost = True
        channel.wire.close()
