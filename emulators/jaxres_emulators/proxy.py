"""A TCP proxy on loopback that drops or delays its traffic on request."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

RECEIVED_BYTES = 65536


class Proxy:
    """Forwards bytes between its clients and an address; a context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._is_cut = threading.Event()
        self._late_seconds = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost_bytes = 0
        """Bytes that it has received since it was cut."""
        self.num_late = 0
        """How often it has forwarded something late."""
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        """Drops every byte from now on; closes no connection."""
        self._is_cut.set()

    def delay(self, seconds: float) -> None:
        """Forwards everything so much later from now on; 0: at once."""
        self._late_seconds = seconds

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                threading.Thread(target=self._connect, args=(near, far), daemon=True).start()

    def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pass, args=(far, near), daemon=True)
            back.start()
            self._pass(near, far)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(RECEIVED_BYTES):
                if late := self._late_seconds:
                    time.sleep(late)
                    self.num_late += 1
                if self._is_cut.is_set():
                    self.lost_bytes += len(data)
                else:
                    target.sendall(data)
        if not self._is_cut.is_set():
            with contextlib.suppress(OSError):  # The other side has ended already.
                target.shutdown(socket.SHUT_WR)
