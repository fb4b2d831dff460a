"""A real HTTP server on loopback that receives alerts and responds as a test configures it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.waiting import SURE_SECONDS, wait_until


@dataclass
class Hook:
    """Requests received by the server, and its configured responses."""

    statuses: list[int] = field(default_factory=list)
    """Status codes of the next responses, then 200 for all later ones. -1: no response."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every response."""
    received: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests."""
    accepted: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests with response 200."""
    keys: list[str] = field(default_factory=list)
    """Idempotency keys of the requests in `accepted`."""
    paths: list[str] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: f"such alert among {self.received}, {self.accepted}")


@contextlib.contextmanager
def served(*statuses: int, path: str = "/hook/s3cret-token", **headers: str) -> Iterator[Hook]:
    """Runs the server within the block."""
    hook = Hook(list(statuses), {name.replace("_", "-"): value for name, value in headers.items()})

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = hook.statuses.pop(0) if hook.statuses else 200
            hook.paths.append(self.path)
            hook.received.append(body)
            if status < 0:
                hook.over.wait(2 * SURE_SECONDS)
                return
            if status == 200:
                hook.keys.append(self.headers["Idempotency-Key"])
                hook.accepted.append(body)  # Last: tests wait for it.
            self.send_response(status)
            for name, value in hook.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        server.daemon_threads = True
        server.block_on_close = False
        hook.url = f"http://127.0.0.1:{server.server_address[1]}{path}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield hook
        finally:
            hook.over.set()
            server.shutdown()
