"""Non-blocking TCP connection between two supervisors, and the ports that an attempt uses.

Sizes are bounded in both directions: a line that is too long, or a peer that does not read, breaks
the connection. No message is sent or decoded before both sides have proven that they have the run's
secret (authentication.py).

The workers of an attempt meet at a free port, which `reserve_port` keeps. JAX's service binds with
SO_REUSEPORT, so the services of an old and a new attempt would share a port without an error. A
socket that is bound in the same way and does not listen reserves the port for the attempt: no other
process gets it, and host 0's service can still bind it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator

from jaxres.clock import Clock
from jaxres.cluster.authentication import MAX_LINE_BYTES, Handshake, NotAuthenticatedError, Secret
from jaxres.cluster.detect import Address
from jaxres.cluster.messages import MAX_BYTES, Message, ProtocolError, decode, encode
from jaxres.faults import ConfigError

MAX_UNSENT_BYTES = 1 << 20
MAX_READS_PER_CALL = 16
"""Reads of 64 KiB in one call of `receive`: a busy peer must not delay the others."""
BIND_SECONDS = 1.0
"""Longest wait for a taken port: an exiting supervisor, or a client's local port, may have it."""
PAUSE_SECONDS = 0.1


class Connection:
    """A connected socket that carries messages; owns the socket."""

    def __init__(self, connected: socket.socket, handshake: Handshake | None) -> None:
        """Sends the first line of the handshake; None: both ends are in one process."""
        connected.setblocking(False)
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._handshake = handshake
        """The handshake in progress; None once the other side is authenticated."""
        self._unread = b""
        self._unsent = b""
        self._held = b""
        """Encoded messages to send after the handshake."""
        self.broken: str | None = None
        """Reason why the connection is closed; None while it works."""
        self.is_foreign = False
        """Whether it is broken because the other side does not follow the protocol."""
        self.has_other_secret = False
        """Whether it is broken because the two sides have different secrets."""
        if handshake is not None:
            self._unsent = handshake.opening
            self.flush()

    def fileno(self) -> int:
        """Returns the file descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def is_authenticated(self) -> bool:
        """Whether the other side has proven that it has the secret."""
        return self._handshake is None

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for room in the socket, or for the end of the handshake."""
        return bool(self._unsent or self._held) and self.broken is None

    def send(self, message: Message) -> None:
        """Writes as much of a message as the socket accepts; `flush` writes the rest."""
        if self.broken is not None:
            return
        if not self.is_authenticated:
            self._held += encode(message)
        else:
            self._unsent += encode(message)
            self.flush()
        if (size_bytes := len(self._unsent) + len(self._held)) > MAX_UNSENT_BYTES:
            self.broken = f"it has left {size_bytes} bytes unread"

    def flush(self) -> None:
        """Writes as many bytes as the socket accepts; drops them if the peer has closed it.

        A closed connection can still be read: the last messages of the peer may be in the buffer.
        """
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    def receive(self) -> list[Message]:
        """Returns the received messages; sets `broken` at the end of the connection."""
        messages: list[Message] = []
        for _ in range(MAX_READS_PER_CALL):
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
            messages += self._decode_lines(data)
        return messages

    def _decode_lines(self, data: bytes) -> list[Message]:
        *lines, self._unread = (self._unread + data).split(b"\n")
        limit = MAX_BYTES if self.is_authenticated else MAX_LINE_BYTES
        at_end = self.broken is not None or len(self._unread) > limit
        if self._unread and at_end:
            lines.append(self._unread)  # Not a message: decoding it marks the peer as foreign.
        messages: list[Message] = []
        for line in lines:
            try:
                if self._handshake is not None:
                    self._continue_handshake(line, self._handshake)
                    continue
                if len(line) > MAX_BYTES:
                    raise ProtocolError(f"a line of more than {MAX_BYTES} bytes: {line[:40]!r}")
                messages.append(decode(line))
            except (ProtocolError, NotAuthenticatedError) as error:
                self.is_foreign, self.broken = not self.has_other_secret, str(error)
                break
        return messages

    def _continue_handshake(self, line: bytes, handshake: Handshake) -> None:
        """Processes the next handshake line; after the last one, sends the held messages."""
        try:
            self._unsent += handshake.receive(line)
        except NotAuthenticatedError as error:
            self._held = b""
            if error.is_other_secret:
                self.has_other_secret = True
                self._unsent += handshake.refusal
            raise
        finally:
            self.flush()
        if handshake.is_done:
            self._handshake = None
            self._unsent += self._held
            self._held = b""
            self.flush()

    def finish(self, message: Message | None = None) -> None:
        """Sends a last message and shuts down the sending direction.

        Closing at once would reset the connection if it has unread bytes, and lose the message.
        """
        if message is not None:
            assert self.is_authenticated
            self._unsent += encode(message)
        self.flush()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def drain(self) -> bool:
        """Reads and discards; returns whether the other side has closed the connection too."""
        try:
            return not all(self._socket.recv(65536) for _ in range(MAX_READS_PER_CALL))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Closes the socket."""
        self.broken = self.broken or "this side closed the connection"
        self._socket.close()


def listen(address: Address, *, backlog: int, clock: Clock) -> socket.socket:
    """Returns a listening socket that no other process shares.

    It listens only on the given IP address, or on the first address of the given name that this
    machine has. It listens on all interfaces if it has none of them, such as for the address of a
    service or a gateway, and for a name that means a loopback address here: many machines resolve
    their own name to 127.0.1.1.

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
                f"{address}: host 0 can't listen for the other hosts there: {what}. Is this job "
                "running already? Otherwise choose another port, the same on all hosts "
                "(--coordinator host:port)."
            ) from error


def _listen(address: Address, backlog: int) -> socket.socket:
    for host in _addresses(address.host):
        try:
            return _listen_at(host, address.port, backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listen_at("", address.port, backlog)


def _addresses(host: str) -> list[str]:
    """Returns the IP addresses at which to listen if this machine has one of them."""
    with contextlib.suppress(ValueError):
        return [] if ipaddress.ip_address(host).is_unspecified else [host]
    if host == "localhost":
        return list(LOOPBACK)
    with contextlib.suppress(OSError, UnicodeError):
        found = [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ]
        if not any(ipaddress.ip_address(literal).is_loopback for literal in found):
            return found
    return []


def _listen_at(host: str, port: int, backlog: int) -> socket.socket:
    listener = _unbound(host)
    try:
        # Allows an address in TIME_WAIT; does not share the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host or _any(listener), port))
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
    """Returns a socket that reserves a free port for JAX's service until it is closed.

    It is bound to an IP address, or to all addresses of this machine. It does not listen: the
    service can bind the same port, since both set SO_REUSEPORT. Open for the whole attempt, it
    prevents the service of another attempt from starting on the same port without an error.
    """
    reserved = _unbound(host)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host or _any(reserved), 0))
    except BaseException:
        reserved.close()
        raise
    return reserved


def connect(address: Address, *, secret: Secret, seconds: float) -> Connection:
    """Connects, or raises OSError; calls of `receive` continue the handshake."""
    connected = socket.create_connection((address.host, address.port), timeout=seconds)
    # On one machine a client can connect to itself: its local port is by chance the one it dials.
    if connected.getsockname() == connected.getpeername():
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return Connection(connected, Handshake(secret, accepts=False))


LOOPBACK = ("127.0.0.1", "::1")
"""Addresses over which processes of a machine connect; a container may have only one of them."""
LOOPBACK_SECONDS = 5.0
ANY_OTHER_HOST = "192.0.2.1"
"""An address of documentation (RFC 5737), for its route only."""


def loopback() -> str:
    """Returns the loopback address over which processes of this machine can connect.

    Raises:
      ConfigError: they can't.
    """
    for host in LOOPBACK:
        with contextlib.suppress(OSError), _listen_at(host, 0, 1) as listener:
            socket.create_connection(listener.getsockname()[:2], LOOPBACK_SECONDS).close()
            return host
    raise ConfigError(
        "processes of this machine can't connect to each other, neither by "
        f"{' nor by '.join(LOOPBACK)}. Set its loopback interface up (`ip link set lo up`), or "
        "train with one worker."
    )


def route_to(host: str) -> str:
    """Returns the address of this machine from which it reaches a host; sends nothing.

    Raises:
      OSError: it doesn't.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def own_address(coordinator: str, source: Callable[[str], str] = route_to) -> str:
    """Returns this host's IP address on the network of the coordinator.

    Many machines give their own name a loopback address, which other hosts can't reach. There it
    is the address of the default route.

    Args:
      coordinator: host:port of the coordination service.
      source: returns the address from which this host would reach another one.

    Raises:
      OSError: the name is unknown, or there is no route.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    address = source(host)
    is_local_job = host == "localhost" or host.startswith("127.") or host == "::1"
    if ipaddress.ip_address(address).is_loopback and not is_local_job:
        address = source(ANY_OTHER_HOST)
    return address


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Yields `host:port` of the loopback interface, and reserves the port for the block.

    Raises:
      ConfigError: processes of this machine can't connect to each other.
    """
    host = loopback()
    with reserve_port(host) as holder:
        yield str(Address(host, holder.getsockname()[1]))
