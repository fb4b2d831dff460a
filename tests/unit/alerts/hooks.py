"""A real HTTP server on loopback that takes alerts as a test wants it to."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """What the server has got, and how it answers."""

    answers: list[int] = field(default_factory=list)
    """Statuses of the next requests; 200 after the last of them. -1: no answer at all."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of every answer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests."""
    taken: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests that were answered by 200."""
    keys: list[str] = field(default_factory=list)
    """Idempotency keys of the latter."""
    paths: list[str] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, condition: Callable[[], bool], *, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.asked, self.taken)
            time.sleep(0.01)


@contextlib.contextmanager
def served(*answers: int, path: str = "/hook/s3cret-token", **headers: str) -> Iterator[Hook]:
    """Serves until the end of the block."""
    hook = Hook(list(answers), {name.replace("_", "-"): value for name, value in headers.items()})

    class Asked(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = hook.answers.pop(0) if hook.answers else 200
            hook.paths.append(self.path)
            hook.asked.append(body)
            if status < 0:
                hook.over.wait(30)
                return
            if status == 200:
                hook.taken.append(body)
                hook.keys.append(self.headers["Idempotency-Key"])
            self.send_response(status)
            for name, value in hook.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Asked) as server:
        server.daemon_threads = True
        server.block_on_close = False
        hook.url = f"http://127.0.0.1:{server.server_address[1]}{path}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            yield hook
        finally:
            hook.over.set()
            server.shutdown()
