"""Serves the Compute API over HTTP, one thread per connection; injects faults."""

from __future__ import annotations

import json
import traceback
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.emulators.gce import routes
from tests.emulators.gce.api import Api, Asked
from tests.emulators.gce.errors import Refused, by_word
from tests.emulators.gcs.faults import AFTER, Act, Faults
from tests.emulators.serving import Quiet, Serving

CONTROL = "/emulator/"
API = "/compute/v1"


class Controlled(Protocol):
    """Emulator whose actions are available over HTTP."""

    def control(self, deed: str, words: dict[str, Any]) -> object: ...


class ComputeServer:
    """Serves until closed; a context manager."""

    def __init__(self, api: Api, controlled: Controlled, *, port: int = 0) -> None:
        self.api, self.controlled = api, controlled
        self.faults = Faults()
        self.bugs: list[str] = []
        self._serving = Serving(self, _Request, host="127.0.0.1", port=port)
        self.url = f"http://{self._serving.address}"
        api.root = f"{self.url}{API}"

    def __enter__(self) -> ComputeServer:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.stop()

    def stall(self, seconds: float) -> None:
        self._serving.stopped.wait(seconds)

    def answer(
        self, method: str, path: str, query: dict[str, str], body: bytes, token: str
    ) -> _Answer:
        found = routes.find(method, unquote(path))
        if found is None:
            return _refused(Refused(501, "notImplemented", f"{method} {path}: not emulated"))
        route, words = found
        self.api.counts.call(route.call)
        act = self.faults.of(route.call, path)
        if act is not None and act.word == "stall":
            self.stall(act.late_seconds)
        is_lost = act is not None and act.word != "stall"
        if act is not None and is_lost and act.when != AFTER:
            return _lost(act)
        try:
            asked = Asked(route.call, words, query, json.loads(body) if body else {}, token)
            with self.api.agenda.changed:
                self.api.admit(asked)
                if route.permission:
                    what = path.removeprefix(f"{API}/")
                    self.api.need(route.permission, what)
                reported = route.function(self.api, asked)
            answer = _Answer(200, json.dumps(reported).encode())
        except Refused as no:
            answer = _refused(no)
        except Exception:  # noqa: BLE001 - else the client would only see its connection end.
            self.bugs.append(f"{method} {path} {query}\n{traceback.format_exc()}")
            answer = _Answer(501, self.bugs[-1].encode())
        return _lost(act) if act is not None and is_lost else answer

    def control(self, method: str, path: str, body: bytes) -> _Answer:
        """Manual use: runs actions, returns the state."""
        deed = path.removeprefix(CONTROL) if method == "POST" else "state"
        try:
            reported = self.controlled.control(deed, json.loads(body) if body else {})
        except (Refused, KeyError, TypeError, ValueError) as wrong:
            return _Answer(400, f"{type(wrong).__name__}: {wrong}\n".encode())
        return _Answer(200, (json.dumps(reported, indent=1, default=str) + "\n").encode())


class _Answer:
    def __init__(self, status: int, body: bytes = b"", *, is_dropped: bool = False) -> None:
        self.status, self.body, self.is_dropped = status, body, is_dropped


def _refused(no: Refused) -> _Answer:
    return _Answer(no.status, no.body())


def _lost(act: Act) -> _Answer:
    if act.word == "drop":
        return _Answer(0, is_dropped=True)
    return _refused(by_word(act.word))


class _Request(Quiet):
    emulator: ComputeServer
    server_version, sys_version = "ESF", ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path.startswith(CONTROL):
            return self.send(self.emulator.control(self.command, parts.path, body))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.send(self.emulator.answer(self.command, parts.path, query, body, token))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def send(self, answer: _Answer) -> None:
        if answer.is_dropped:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
