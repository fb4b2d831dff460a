"""Serves the Compute API over HTTP, one thread per connection; injects faults."""

from __future__ import annotations

import json
import time
import traceback
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from jaxres_emulators.gce.calls import resources, routes
from jaxres_emulators.gce.calls.api import Api, ComputeRequest
from jaxres_emulators.gce.errors import GceError, by_word
from jaxres_emulators.gcs.faults import AFTER, Faults, RequestFault
from jaxres_emulators.serving import Quiet, Serving

CONTROL = "/emulator/"
API = "/compute/v1"
POLL_SECONDS = 0.05


class Controlled(Protocol):
    """Emulator whose actions are available over HTTP."""

    def control(self, action: str, words: dict[str, Any]) -> object: ...


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

    def stall(self, fault: RequestFault) -> None:
        until = time.monotonic() + fault.late_seconds
        while not fault.ended.wait(POLL_SECONDS) and time.monotonic() < until:
            if self._serving.stopped.is_set():
                return

    def answer(
        self, method: str, path: str, query: dict[str, str], body: bytes, token: str
    ) -> _Response:
        found = routes.find(method, unquote(path))
        if found is None:
            return _refused(GceError(501, "notImplemented", f"{method} {path}: not emulated"))
        route, words = found
        self.api.counts.call(route.call)
        fault = self.faults.of(route.call, path)
        if fault is not None and fault.word == "stall":
            self.stall(fault)
        is_lost = fault is not None and fault.word != "stall"
        if fault is not None and is_lost and fault.when != AFTER:
            return _lost(fault)
        try:
            request = ComputeRequest(
                route.call, words, query, json.loads(body) if body else {}, token
            )
            with self.api.scheduler.changed:
                self.api.admit(request)
                if words.get("zone") in self.api.unreachable:
                    raise resources.unreachable(words["zone"])
                if route.permission:
                    what = path.removeprefix(f"{API}/")
                    self.api.need(route.permission, what)
                reported = route.function(self.api, request)
            answer = _Response(200, json.dumps(reported).encode())
        except GceError as no:
            answer = _refused(no)
        except Exception:  # noqa: BLE001 - else the client would only see its connection end.
            self.bugs.append(f"{method} {path} {query}\n{traceback.format_exc()}")
            answer = _Response(501, self.bugs[-1].encode())
        return _lost(fault) if fault is not None and is_lost else answer

    def control(self, method: str, path: str, body: bytes) -> _Response:
        """Manual use: runs actions, returns the state."""
        action = path.removeprefix(CONTROL) if method == "POST" else "state"
        try:
            reported = self.controlled.control(action, json.loads(body) if body else {})
        except (GceError, KeyError, TypeError, ValueError) as wrong:
            return _Response(400, f"{type(wrong).__name__}: {wrong}\n".encode())
        return _Response(200, (json.dumps(reported, indent=1, default=str) + "\n").encode())


class _Response:
    def __init__(self, status: int, body: bytes = b"", *, is_dropped: bool = False) -> None:
        self.status, self.body, self.is_dropped = status, body, is_dropped


def _refused(no: GceError) -> _Response:
    return _Response(no.status, no.body())


def _lost(fault: RequestFault) -> _Response:
    if fault.word == "drop":
        return _Response(0, is_dropped=True)
    return _refused(by_word(fault.word))


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

    def send(self, answer: _Response) -> None:
        if answer.is_dropped:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
