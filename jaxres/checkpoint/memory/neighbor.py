"""Copies of the states in host memory at a neighbour: host 0's at host 1, and so on, in a ring.

Each worker serves HTTP while it trains. After a state is whole in this host's memory it is sent to
the next host (PUT), which keeps it in slots of its own; a host that has come back without its
memory asks the next host for it (GET). The receiver computes the digest of every piece, and
publishes a copy only if they are those that were sent with it; the state is verified on the devices
once more.

Requests carry a token, which each worker makes at its start and the hosts exchange through the
coordination service. Like the collectives of the training step, nothing is encrypted
(docs/security.md).
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import io
import math
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from jaxres.checkpoint.memory.slots import CHUNK_BYTES, MemoryDamaged, Slot, StateKey, oldest
from jaxres.clock import Clock, SystemClock
from jaxres.cluster.connection import own_address
from jaxres.cluster.limited_server import LimitedServer
from jaxres.runlog.events import Emit, MemoryCopied, MemoryCopyFailed

SILENCE_SECONDS = 30.0
"""Longest time for which a connection may carry nothing."""
FAILURE_SHARE = 0.1
"""Largest share of the time that copies which fail may take: they delay this host's states too."""
QUICK_SECONDS = 1.0
"""A failure that takes no longer delays nothing."""
MAX_STRANGERS = 8
STRANGER_SECONDS = 10.0
"""Limits on number and time of connections that have not sent the token: the neighbour's, and
connections of strangers."""
POLL_SECONDS = 0.1
TOKEN = "X-Jaxres-Token"
TOKEN_BYTES = 16
MAX_REASON = 300
"""Characters of a reason in an answer."""


def holder(host: int, num_hosts: int) -> int:
    """Returns the host that keeps the copies of a host."""
    return (host + 1) % num_hosts


def origin(host: int, num_hosts: int) -> int:
    """Returns the host whose copies a host keeps."""
    return (host - 1) % num_hosts


class CopyServer:
    """Receives the copies of one other host, and gives them back; serves in threads of its own."""

    def __init__(self, slots: Sequence[Slot], *, coordinator: str) -> None:
        """Listens at once, at a free port.

        Args:
          slots: receive the copies; open.
          coordinator: host:port of the coordination service, to find this host's address.

        Raises:
          OSError: it can't listen.
        """
        self.token = secrets.token_hex(TOKEN_BYTES)
        """A request without it is refused."""
        self._slots = slots
        self._lock = threading.Lock()
        host = own_address(coordinator)
        self._server = _Server(host, self)
        literal = f"[{host}]" if ":" in host else host
        self.address = f"{literal}:{self._server.server_address[1]}"
        """host:port for the other hosts."""
        threading.Thread(
            target=self._server.serve_forever,
            args=(POLL_SECONDS,),
            name="jaxres-memory-copies",
            daemon=True,
        ).start()

    def close(self) -> None:
        """Stops listening; a copy that is being received is received to its end."""
        self._server.shutdown()
        self._server.server_close()

    def knows(self, given: str | None) -> bool:
        """Returns whether a request carries the token."""
        return hmac.compare_digest((given or "").encode(), self.token.encode())

    def exempt(self, connection: socket.socket) -> None:
        """Lets a connection last, since its client has the token."""
        self._server.exempt(connection)

    def receive(self, size: int, read: Callable[[int], bytes]) -> None:
        """Keeps a state over the older one; as Slot.receive."""
        with self._lock:
            oldest(self._slots).receive(size, read)

    def find(self, path: str) -> Slot | None:
        """Returns the slot with the state of a path of a request."""
        return next(
            (slot for slot in self._slots if slot.index and _path(slot.index.key) == path), None
        )


class _Server(LimitedServer):
    """http.server's own class asks a name server for this host's name, which may take long."""

    def __init__(self, host: str, copies: CopyServer) -> None:
        super().__init__(
            (host, 0), _CopyRequest, max_connections=MAX_STRANGERS, seconds=STRANGER_SECONDS
        )
        self.copies = copies


class _Body:
    """The unread rest of a request's body."""

    def __init__(self, stream: io.BufferedIOBase, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, size: int) -> bytes:
        """Returns the next bytes; fewer only if the sender has stopped."""
        data = self._stream.read(min(size, self.left))
        self.left -= len(data)
        return data


class _CopyRequest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SILENCE_SECONDS

    def handle(self) -> None:
        """Serves one request: the next one would not be limited in time."""
        self.handle_one_request()

    @property
    def copies(self) -> CopyServer:
        assert isinstance(self.server, _Server)
        return self.server.copies

    def do_PUT(self) -> None:
        """Keeps a state."""
        if self._is_refused():
            return
        body = _Body(self.rfile, int(self.headers["Content-Length"] or 0))
        try:
            self.copies.receive(body.left, body.read)
        except (MemoryDamaged, OSError) as error:
            while body.left and body.read(CHUNK_BYTES):
                pass  # A sender that can't write on would not read the reason.
            self._refuse(HTTPStatus.CONFLICT, str(error))
            return
        self._begin(HTTPStatus.NO_CONTENT, 0)

    def do_GET(self) -> None:
        """Gives a state back."""
        if self._is_refused():
            return
        slot = self.copies.find(self.path)
        if slot is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"no copy of {self.path} here")
            return
        size, parts = slot.sent()
        self._begin(HTTPStatus.OK, size)
        for part in parts:
            self.wfile.write(part)

    def _is_refused(self) -> bool:
        if self.copies.knows(self.headers[TOKEN]):
            self.copies.exempt(self.connection)
            return False
        self._refuse(HTTPStatus.FORBIDDEN, "another attempt, or no host of this job")
        return True

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self.close_connection = True  # What was sent may not have been read.
        data = reason[:MAX_REASON].encode()
        self._begin(status, len(data))
        self.wfile.write(data)

    def _begin(self, status: HTTPStatus, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class Neighbor:
    """The next host, at which this one keeps copies of its states."""

    def __init__(
        self,
        host: int,
        address: str,
        token: str,
        *,
        seconds: float,
        emit: Emit,
        clock: Clock | None = None,
    ) -> None:
        """Connects to nothing yet.

        Args:
          address: host:port of its CopyServer.
          seconds: longest transfer of a state; a slower one is given up.
          emit: receives an event of the first copy, of the first failure and of the end of it.
        """
        self.host = host
        self._address = address
        self._token = token
        self._seconds = seconds
        self._emit = emit
        self._clock = clock or SystemClock()
        self._works: bool | None = None
        self._resumes_at = -math.inf
        """When a state may be sent again after a failure, on the monotonic clock."""

    def send(self, slot: Slot) -> None:
        """Sends a state; a failure is an event, not an error.

        After one that has taken long, states are left out for some time.
        """
        begun = self._clock.monotonic()
        if begun < self._resumes_at:
            return
        assert slot.index is not None
        key = slot.index.key  # `discard` may forget the state meanwhile.
        size, parts = slot.sent()
        headers = {TOKEN: self._token, "Content-Length": str(size)}
        failure = ""
        try:
            with self._connection() as connection:
                connection.request("PUT", _path(key), body=parts, headers=headers)
                answer = connection.getresponse()
                if answer.status != HTTPStatus.NO_CONTENT:
                    failure = answer.read(MAX_REASON).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            failure = str(error) or type(error).__name__
        now = self._clock.monotonic()
        if failure and now - begun > QUICK_SECONDS:
            self._resumes_at = now + (now - begun) * (1 / FAILURE_SHARE - 1)
        if self._works is not False and failure:
            self._emit(MemoryCopyFailed(key[0], self.host, failure))
        if not self._works and not failure:
            self._emit(MemoryCopied(key[0], self.host, size))
        self._works = not failure

    def fetch(self, key: StateKey, slot: Slot) -> None:
        """Gets a state of this host back.

        Raises:
          OSError: the neighbour does not answer in time, or has no such copy.
          MemoryDamaged: the bytes that came are not those that were written, or of another state.
        """
        try:
            with self._connection() as connection:
                connection.request("GET", _path(key), headers={TOKEN: self._token})
                answer = connection.getresponse()
                if answer.status != HTTPStatus.OK or answer.length is None:
                    reason = answer.read(MAX_REASON).decode("utf-8", "replace")
                    raise ConnectionError(f"host {self.host} at {self._address}: {reason}")
                slot.receive(answer.length, answer.read, key=key)
        except http.client.HTTPException as error:
            reason = f"host {self.host} at {self._address}: {type(error).__name__}"
            raise ConnectionError(reason) from error

    def _connection(self) -> _Connection:
        return _Connection(self._address, seconds=self._seconds)


class _Connection(http.client.HTTPConnection):
    """A connection that is closed after a time: a byte now and then would keep it open for ever."""

    def __init__(self, address: str, *, seconds: float) -> None:
        super().__init__(address, timeout=SILENCE_SECONDS)
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._is_late = False

    def __enter__(self) -> _Connection:
        self.connect()
        self._timer = threading.Timer(self._seconds, self._shut_down, [self.sock])
        self._timer.daemon = True
        self._timer.start()
        return self

    def _shut_down(self, connected: socket.socket) -> None:
        self._is_late = True
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.close()
        is_cut = kind is not None and issubclass(kind, OSError | http.client.HTTPException)
        if is_cut and self._is_late:
            raise TimeoutError(f"{self.host}: a state took longer than {self._seconds:.0f} s")


def _path(key: StateKey) -> str:
    return "/" + "-".join(map(str, key))
