"""Shared code of the emulated services: HTTP on loopback, one thread per connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """A request handler without log output, whose clients may disconnect at any time."""

    protocol_version = "HTTP/1.1"
    wbufsize, disable_nagle_algorithm = 1 << 16, True
    timeout = 600

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().handle()


class Serving:
    """Serves requests from `start` to `stop`, without polling: there may be many servers."""

    def __init__(self, emulator: Any, handler: type[Quiet], *, host: str, port: int) -> None:
        taken = self._taken = set[socket.socket]()

        class Http(ThreadingHTTPServer):
            daemon_threads, block_on_close, request_queue_size = True, False, 128

            def get_request(self) -> tuple[socket.socket, Any]:
                connection, address = super().get_request()
                taken.add(connection)
                return connection, address

            def shutdown_request(self, request: Any) -> None:
                taken.discard(request)
                super().shutdown_request(request)

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignores a client that disconnects during a request."""

        bound = type("Bound", (handler,), {"emulator": emulator})
        self._http = Http((host, port), bound)
        self.address = f"{host}:{self._http.server_address[1]}"
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self._http.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._http.server_close()
        for connection in list(
            self._taken
        ):  # Otherwise a client would wait forever for its response.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self.stopped.is_set():
            self._http.handle_request()
