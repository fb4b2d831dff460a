"""Connections to the supervisors of the other hosts: messages, heartbeats and loss detection.

A peer is lost as soon as its connection ends, or when it has sent nothing for too long, since a
machine that loses power closes no connection. Time that this process was suspended is not counted
as silence of a peer.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxres.clock import Awake, Clock
from jaxres.cluster.authentication import VARIABLE, Handshake, Secret
from jaxres.cluster.connection import Connection
from jaxres.cluster.host_identity import UNKNOWN
from jaxres.cluster.messages import (
    Disconnected,
    Goodbye,
    Heartbeat,
    Hello,
    LeaderHeartbeat,
    Message,
    WorkerExited,
)

HEARTBEAT_SECONDS = 1.0
DOUBT_SECONDS = 3 * HEARTBEAT_SECONDS
HELLO_SECONDS = 5.0
"""Longest time for a new connection to complete the handshake and to send its hello."""
REPORT_SECONDS = 600.0
"""Shortest time between two messages about connections that were refused."""
LINGER_SECONDS = 2.0
"""Longest wait until a peer has read the last message."""
MAX_UNIDENTIFIED = 64
MAX_ACCEPTS_PER_CALL = 64
CLOSE_POLL_SECONDS = 0.05


def print_to_stderr(text: str) -> None:
    """Writes a line for an operator; a closed terminal is ignored."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class PeerLink:
    """The connection to one other host's supervisor; owns it."""

    def __init__(
        self, host: int, name: str, connection: Connection, *, awake: Awake, silence_seconds: float
    ) -> None:
        self.host = host
        self.name = name
        self.identity = UNKNOWN
        """Identity of the host's machine; the leader sets it from the host's hello."""
        self.connection = connection
        self.silence_seconds = silence_seconds
        self.step = 0
        """Newest finished step that the host has sent."""
        self.is_lost = False
        self._awake = awake
        self._received_at = awake.now()
        self._sent_heartbeat_at = -math.inf

    def __str__(self) -> str:
        return f"host {self.host} ({self.name})"

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last received message."""
        return self._awake.now() - self._received_at

    def send(self, message: Message) -> None:
        """Sends a message, now or as soon as the socket has room."""
        if not self.is_lost:
            self.connection.send(message)

    def send_heartbeat(self, message: Message) -> None:
        """Sends a heartbeat once a second, unless earlier bytes are still unsent."""
        now = self._awake.now()
        if (
            now - self._sent_heartbeat_at >= HEARTBEAT_SECONDS
            and not self.connection.wants_to_write
        ):
            self._sent_heartbeat_at = now
            self.send(message)

    def receive(self) -> list[Message]:
        """Returns the received messages; the last one of a connection is Disconnected."""
        if self.is_lost:
            return []
        now = (
            self._awake.now()
        )  # Before reading: bytes that arrived during a suspension are not late.
        self.connection.flush()
        messages = self.connection.receive()
        if messages:
            self._received_at = now
        for message in messages:
            self._update_step(message)
        if self.connection.broken is not None:
            self._mark_lost(messages, self.connection.broken)
        elif now - self._received_at > self.silence_seconds:
            limit = f"{self.silence_seconds:g} s (hosts.heartbeat_seconds)"
            self._mark_lost(messages, f"nothing was received from it for {limit}")
        return messages

    def _update_step(self, message: Message) -> None:
        if isinstance(message, Heartbeat | WorkerExited):
            self.step = max(self.step, message.step)
        elif isinstance(message, LeaderHeartbeat) and self.host < len(message.steps):
            self.step = max(self.step, message.steps[self.host])

    def _mark_lost(self, messages: list[Message], reason: str) -> None:
        self.is_lost = True
        self.connection.close()
        after = f" after step {self.step}" if self.step else ""
        messages.append(Disconnected(f"{self} is gone{after}: {reason}"))


class Refusals:
    """Reports refused connections: the first one at once, the following at a bounded rate."""

    def __init__(self, *, secret: Secret, report: Callable[[str], None], awake: Awake) -> None:
        self._secret = secret
        self._report = report
        self._awake = awake
        self._unreported = 0
        self._next_at = -math.inf
        self.summary = ""
        """Summary of all refusals, for a message about absent hosts; empty: there were none."""
        self._count = 0

    def add(self, peer: str, reason: str) -> None:
        """Counts a refused connection, and reports it unless the last report is recent."""
        self._count += 1
        number = "a connection was" if self._count == 1 else f"{self._count} connections were"
        self.summary = (
            f"{number} refused, the last from {peer}: {reason}. If it is a host of this job: is "
            f"run.dir the same shared directory there ({self._secret.source}), is {VARIABLE}, if "
            "used, the same?"
        )
        if self._awake.now() < self._next_at:
            self._unreported += 1
            return
        more = f" ({self._unreported} others before it)" if self._unreported else ""
        self._report(
            f"jaxres: a connection from {peer} was refused{more}: {reason}. It received no "
            f"data of this job, which continues. A host of this job must have the secret in "
            f"{self._secret.source}: its run.dir must be the same shared directory.\n"
        )
        self._unreported = 0
        self._next_at = self._awake.now() + REPORT_SECONDS


@dataclass(frozen=True)
class UnidentifiedPeer:
    """A connection that has not sent its hello."""

    address: str
    """Network address."""
    until: float
    """Deadline for the hello."""


class Acceptor:
    """Accepts connections at the coordinator's port, until each has sent its hello.

    It closes a connection that fails the handshake, or sends another message, too many bytes, or
    nothing in time. Other connections are not affected.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        num_hosts: int,
        secret: Secret,
        report: Callable[[str], None],
        awake: Awake,
        poll: select.epoll,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self.refusals = Refusals(secret=secret, report=report, awake=awake)
        self._awake = awake
        self._poll = poll
        self._max_connections = num_hosts + MAX_UNIDENTIFIED
        self._unidentified: dict[Connection, UnidentifiedPeer] = {}
        """The oldest connection comes first."""
        self._closing: dict[Connection, float] = {}
        """Deadline of each connection for reading the last message."""
        poll.register(listener, select.EPOLLIN)

    def accepted(self) -> list[tuple[Connection, Hello]]:
        """Returns the connections that have sent a hello; the caller keeps or rejects each."""
        self._accept()
        now = self._awake.now()
        for connection, until in list(self._closing.items()):
            if connection.drain() or now > until:
                self._closing.pop(connection)
                connection.close()
        identified: list[tuple[Connection, Hello]] = []
        for connection, peer in list(self._unidentified.items()):
            messages = connection.receive()
            is_late = now > peer.until
            if not (messages or connection.broken is not None or is_late):
                continue
            self._unidentified.pop(connection)
            if messages and isinstance(messages[0], Hello) and connection.broken is None:
                identified.append((connection, messages[0]))
            elif not connection.is_authenticated:
                self._refuse(connection, peer)
            elif messages or connection.is_foreign:
                cause = connection.broken or messages[0]
                reason = f"this port is a jaxres rendezvous; got an invalid hello: {cause}"
                self.reject(connection, Goodbye(78, reason))
            else:
                connection.close()
        return identified

    def _refuse(self, connection: Connection, peer: UnidentifiedPeer) -> None:
        """Closes an unauthenticated connection; reports it unless the peer just closed it."""
        if connection.is_foreign or connection.has_other_secret:
            self.refusals.add(peer.address, str(connection.broken))
            self._close_after(connection, None)
            return
        if connection.broken is None:
            silence = f"it has not proven within {HELLO_SECONDS:g} s that it holds the secret"
            self.refusals.add(peer.address, silence)
        connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # No connection, or no file descriptor left: try later.
            for _ in range(MAX_ACCEPTS_PER_CALL):
                accepted, address = self._listener.accept()
                connection = Connection(accepted, Handshake(self._secret, accepts=True))
                source = str(address[0]).removeprefix("::ffff:")
                self._unidentified[connection] = UnidentifiedPeer(
                    source, self._awake.now() + HELLO_SECONDS
                )
                self._poll.register(accepted, select.EPOLLIN)
        while len(self._unidentified) + len(self._closing) > self._max_connections:
            candidates = self._closing or self._unidentified
            oldest = next(iter(candidates))
            candidates.pop(oldest)
            oldest.close()

    def reject(self, connection: Connection, message: Goodbye) -> None:
        """Sends the reason of a rejection, and closes the connection once it was read."""
        self._close_after(connection, message)

    def _close_after(self, connection: Connection, message: Goodbye | None) -> None:
        connection.finish(message)
        self._closing[connection] = self._awake.now() + LINGER_SECONDS

    def close(self) -> None:
        """Closes the port and all its connections."""
        self._listener.close()
        for connection in (*self._unidentified, *self._closing):
            connection.close()
        self._unidentified.clear()
        self._closing.clear()


class PeerLinks:
    """The connections to all peers, for one `select` loop; a context manager.

    The loop selects this object for reading, and calls `receive` and `send_heartbeat` after each
    wake and at least four times a second; both return at once.
    """

    def __init__(self, *, clock: Clock, silence_seconds: float) -> None:
        self.links: dict[int, PeerLink] = {}
        """The link of each host; a follower has only host 0."""
        self.awake = Awake(clock)
        self.on_accepted: Callable[[Connection, Hello], None] | None = None
        """Called on host 0 for each connection that has sent a hello."""
        self.acceptor: Acceptor | None = None
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._received: deque[tuple[int, Message]] = deque()
        self._poll = select.epoll()  # One file descriptor for any number of hosts.

    def __enter__(self) -> PeerLinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when a connection is."""
        return self._poll.fileno()

    def accept_at(
        self,
        listener: socket.socket,
        *,
        num_hosts: int,
        secret: Secret,
        report: Callable[[str], None] = print_to_stderr,
    ) -> Acceptor:
        """Starts to accept connections; owns the listener, and reports refused ones."""
        self.acceptor = Acceptor(
            listener,
            num_hosts=num_hosts,
            secret=secret,
            report=report,
            awake=self.awake,
            poll=self._poll,
        )
        return self.acceptor

    def add(self, host: int, name: str, connection: Connection) -> PeerLink:
        """Adds a host's connection; it replaces an earlier one and its unread messages."""
        if (before := self.links.pop(host, None)) is not None:
            before.connection.close()
            self._received = deque(item for item in self._received if item[0] != host)
        link = PeerLink(
            host, name, connection, awake=self.awake, silence_seconds=self._silence_seconds
        )
        self.links[host] = link
        with contextlib.suppress(FileExistsError):
            self._poll.register(connection, select.EPOLLIN)
        return link

    def set_silence_limit(self, seconds: float | None) -> None:
        """Sets the longest silence of a peer; None: the default."""
        for link in self.links.values():
            link.silence_seconds = max(self._silence_seconds, seconds or 0.0)

    def _live_links(self) -> list[PeerLink]:
        return [link for link in self.links.values() if not link.is_lost]

    def receive(self) -> list[tuple[int, Message]]:
        """Returns the received messages with their hosts; does not wait."""
        self._collect()
        received = list(self._received)
        self._received.clear()
        return received

    def next(self, seconds: float) -> tuple[int, Message] | None:
        """Returns the next message; None: the time is over, or another event woke the poll."""
        if not self._received:
            self._poll.poll(max(0.0, seconds))
            self._collect()
        return self._received.popleft() if self._received else None

    def _collect(self) -> None:
        for link in list(self.links.values()):
            self._received.extend((link.host, message) for message in link.receive())
        if self.acceptor and self.on_accepted:
            for connection, hello in self.acceptor.accepted():
                self.on_accepted(connection, hello)

    def send(self, message: Message, *, to: int | None = None) -> None:
        """Sends a message to all hosts, or to one; lost ones are skipped."""
        for link in self._live_links():
            if to in (None, link.host):
                link.send(message)

    def send_heartbeat(self, message: Heartbeat | LeaderHeartbeat) -> None:
        """Sends a heartbeat to every host to which none was sent for a second."""
        for link in self._live_links():
            link.send_heartbeat(message)

    def close(self) -> None:
        """Closes all connections and the port; first waits 2 s at most until peers have read."""
        if self.acceptor:
            self.acceptor.close()
            self.acceptor = None
        until = self._clock.monotonic() + LINGER_SECONDS
        finished: set[int] = set()
        while (living := self._live_links()) and self._clock.monotonic() < until:
            for link in living:
                link.connection.flush()
                if not link.connection.wants_to_write and link.host not in finished:
                    finished.add(link.host)
                    link.connection.finish()
                if link.connection.drain():
                    self._close_link(link)
            if self._live_links():
                self._poll.poll(CLOSE_POLL_SECONDS)
        for link in self._live_links():
            self._close_link(link)
        if not self._poll.closed:
            self._poll.close()

    def _close_link(self, link: PeerLink) -> None:
        link.is_lost = True
        link.connection.close()
