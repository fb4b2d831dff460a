"""One TCP connection between two doors: words in, words out, and it never waits.

Sizes are bounded both ways: a line that does not end, or a peer that does not read, ends the wire.

A fresh port for one attempt, where its workers find each other.

JAX's service binds with SO_REUSEPORT, so that the services of an old and a new attempt would share
a port without an error. A socket that is bound in the same way and does not listen keeps the port
for the attempt: nobody else is given it, and the lead's service can still start on it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from collections.abc import Iterator

from jaxres.clock import Clock
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import MAX_BYTES, NoWord, Word, decode, encode
from jaxres.faults import ConfigError

MAX_UNSENT_BYTES = 1 << 20
MAX_READS = 16
"""Of 64 KiB, at a time; who sends more must not keep the others waiting."""
BIND_SECONDS = 1.0
"""A door that is just leaving, or a client's own port, may hold the address for a moment."""
PAUSE_SECONDS = 0.1


class Wire:
    """A connected socket that carries words; owns the socket."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._unread = b""
        self._unsent = b""
        self.broken: str | None = None
        """Why nothing more comes or goes; None while it works."""
        self.alien = False
        """Whether it broke because the other side does not speak this language."""

    def fileno(self) -> int:
        """The socket's; -1 once closed."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until the socket takes it."""
        return bool(self._unsent) and self.broken is None

    def send(self, word: Word) -> None:
        """Writes what the socket takes now; the rest waits for `flush`."""
        if self.broken is None:
            self._unsent += encode(word)
            self.flush()
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self.broken = f"it has left {len(self._unsent)} bytes unread"

    def flush(self) -> None:
        """Writes what the socket takes now; what can't be written any more is forgotten.

        Such a wire is not broken for reading: what the other side said last may still be there.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> list[Word]:
        """Returns the words that have come; at the end of the connection `broken` says why."""
        words: list[Word] = []
        for _ in range(MAX_READS):
            if self.broken is not None:
                break
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError as error:
                self.broken = (error.strerror or str(error)).lower()
                break
            if not data:
                self.broken = "it closed the connection"
            words += self._words(data)
        return words

    def _words(self, data: bytes) -> list[Word]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        at_end = self.broken is not None or len(self._unread) > MAX_BYTES
        if self._unread and at_end:
            lines.append(self._unread)  # No word, so that a stranger is known as one.
        words: list[Word] = []
        for line in lines:
            try:
                if len(line) > MAX_BYTES:
                    raise NoWord(f"a line of more than {MAX_BYTES} bytes: {line[:40]!r}")
                words.append(decode(line))
            except NoWord as error:
                self.alien, self.broken = True, str(error)
                break
        return words

    def finish(self, word: Word | None = None) -> None:
        """Sends a last word, also to a stranger, and says that nothing more will come.

        Closing at once would reset the connection if something lies unread, and lose that word.
        """
        if word is not None:
            self._unsent += encode(word)
        self.flush()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def ended(self) -> bool:
        """Reads and forgets; says whether the other side has closed the connection too."""
        try:
            return not all(self._socket.recv(65536) for _ in range(MAX_READS))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the socket."""
        self.broken = self.broken or "this side closed the connection"
        self._socket.close()


def listen(address: Address, *, backlog: int, clock: Clock) -> socket.socket:
    """Returns a listening socket that nobody shares.

    On all interfaces, since a machine's own name often means 127.0.1.1 to itself; at a loopback
    address only there.

    Raises:
      ConfigError: another program has the port.
    """
    until = clock.monotonic() + BIND_SECONDS
    while True:
        try:
            return _listen(address, backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and clock.monotonic() < until:
                clock.sleep(PAUSE_SECONDS)
                continue
            is_taken = error.errno == errno.EADDRINUSE
            what = "another program has this port" if is_taken else f"{error.strerror or error}"
            raise ConfigError(
                f"{address}: host 0 can't wait for the other hosts there: {what}. Does this job "
                "run already? Else choose another port, the same on all hosts "
                "(--coordinator host:port)."
            ) from error


def _listen(address: Address, backlog: int) -> socket.socket:
    loopback = {"localhost": "127.0.0.1"}.get(address.host, address.host)
    is_loopback = loopback == "::1" or loopback.startswith("127.")
    listener = _unbound(loopback if is_loopback else "")
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # Past TIME_WAIT; no sharing.
        host = loopback if is_loopback else _any(listener)
        listener.bind((host, address.port))
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _unbound(host: str) -> socket.socket:
    """Returns a socket for a literal address, or for all addresses of both families."""
    if "." in host or not socket.has_dualstack_ipv6():
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    unbound = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(host)))
    return unbound


def _any(unbound: socket.socket) -> str:
    return "::" if unbound.family == socket.AF_INET6 else "0.0.0.0"


def reserve_port(host: str = "") -> socket.socket:
    """Returns a socket that keeps a fresh port for JAX's service until it is closed.

    At a literal address, or at all of this machine's.

    It does not listen: the service binds beside it, since both ask for SO_REUSEPORT. Held for the
    whole attempt it keeps the service of another attempt from starting on the same port unseen.
    """
    kept = _unbound(host)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host or _any(kept), 0))
    except BaseException:
        kept.close()
        raise
    return kept


def connect(address: Address, *, seconds: float) -> Wire:
    """Connects, or raises OSError."""
    connected = socket.create_connection((address.host, address.port), timeout=seconds)
    # On one machine a client can meet itself: its own port is by chance the one it asks for.
    if connected.getsockname() == connected.getpeername():
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return Wire(connected)


LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def held(host: str = LOOPBACK) -> Iterator[str]:
    """Yields `host:port`, and keeps the port until the end of the block."""
    with reserve_port(host) as holder:
        yield f"{host}:{holder.getsockname()[1]}"
