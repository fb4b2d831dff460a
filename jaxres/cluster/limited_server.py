"""A TCP server that strangers can't hold: few connections, each for a limited time.

A connection beyond the limit closes the oldest one, as at the rendezvous. So clients that connect
and send nothing, send half a request or do not read the answer neither keep others away nor use
more threads. A request handler may exempt a connection once its client has proven who it is.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from typing import Any

from jaxres.clock import Clock, SystemClock


class LimitedServer(socketserver.ThreadingTCPServer):
    """Serves each connection in a thread; `serve_forever` closes connections that take too long."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[socketserver.BaseRequestHandler],
        *,
        max_connections: int,
        seconds: float,
        clock: Clock | None = None,
    ) -> None:
        """Listens at once.

        Args:
          address: IP address, and port; 0: a free one.
          handler: serves a connection.
          max_connections: the oldest one is closed for one more.
          seconds: after these a connection is closed.

        Raises:
          OSError: it can't listen there.
        """
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._max_connections = max_connections
        self._seconds = seconds
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._limited: dict[socket.socket, float] = {}
        """Connection -> when it is closed; the oldest one comes first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection; closes the oldest one if there are too many."""
        with self._lock:
            if len(self._limited) >= self._max_connections:
                self._cut(next(iter(self._limited)))
            self._limited[request] = self._clock.monotonic() + self._seconds
        super().process_request(request, client_address)

    def exempt(self, connection: socket.socket) -> None:
        """Exempts a connection from the limits on number and time."""
        with self._lock:
            self._limited.pop(connection, None)

    def service_actions(self) -> None:
        """Closes the connections whose time is over; called by `serve_forever` at each poll."""
        now = self._clock.monotonic()
        with self._lock:
            for connection in [each for each, until in self._limited.items() if now >= until]:
                self._cut(connection)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection whose thread has ended."""
        self.exempt(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Stops listening, and closes all connections that are not exempt."""
        super().server_close()
        with self._lock:
            for connection in list(self._limited):
                self._cut(connection)

    def _cut(self, connection: socket.socket) -> None:
        """Ends the reads and writes of a connection's thread, which then closes it."""
        del self._limited[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: the client is gone, or was closed, as a rule."""
