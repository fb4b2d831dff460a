"""A GCE metadata server on loopback, as strict as the real one, with faults where a test asks.

By hand: `python -m tests.emulators.metadata --port 8080` prints what to set and how to change keys.
After cloud.google.com/compute/docs/metadata/querying-metadata: `Metadata-Flavor: Google` or 403, no
`X-Forwarded-For`, 404 for keys that are not there, 400 for words it does not know, ETags, long poll
by `wait_for_change`, `last_etag`, `timeout_sec`. And getting-live-migration-notice: the early
warning of a maintenance is given only to who has asked for the key before.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ROOT = "/computeMetadata/v1/"
CONTROL = "/emulator/"
PREEMPTED = "instance/preempted"
EVENT = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance"
POLICY = "instance/scheduling/on-host-maintenance"
WORDS = {"wait_for_change", "timeout_sec", "last_etag", "alt", "recursive"}
LONGEST_WAIT_SECONDS = 600.0
NO_UPCOMING = json.dumps(
    {"error": "no notifications have been received yet, try again later"}, separators=(",", ":")
)


@dataclass
class Fault:
    """What goes wrong with the next requests for a key."""

    kind: str
    """A status such as "503", "hang" (no answer as long as the server lives), or "drop"."""
    key: str
    """Empty: any."""
    times: int


class MetadataServer:
    """Serves until closed; a context manager."""

    def __init__(self, *, port: int = 0, policy: str = "TERMINATE") -> None:
        self.values = {
            PREEMPTED: "FALSE",
            EVENT: "NONE",
            UPCOMING: NO_UPCOMING,
            POLICY: policy,
            "instance/name": "emulated",
        }
        self.changed = threading.Condition()
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        """Keys of all requests so far, in order."""
        self.hanging = 0
        """Requests that get no answer."""
        self.closed = threading.Event()
        self.holds = True
        """Whether it knows the long poll at all."""
        server = self

        class Bound(_Request):
            emulator = server

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Bound)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self.address = f"127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> MetadataServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        with self.changed:
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def env(self) -> dict[str, str]:
        """What a process is to have in its environment to be on this VM."""
        return {"GCE_METADATA_HOST": self.address}

    def set(self, key: str, value: str) -> None:
        """Changes a key; long polls for it are answered."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def preempt(self) -> None:
        self.set(PREEMPTED, "TRUE")

    def announce(self, *, seconds: float, **facts: Any) -> None:
        """Announces a maintenance whose window begins so many seconds from now."""
        start = datetime.now(UTC) + timedelta(seconds=seconds)
        told = {
            "can_reschedule": "false",
            "latest_window_start_time": start.isoformat(),
            "maintenance_status": "PENDING",
            "type": "SCHEDULED",
            "window_end_time": (start + timedelta(hours=4)).isoformat(),
            "window_start_time": start.isoformat(),
        }
        self.set(UPCOMING, json.dumps(told | facts))

    def warn(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> bool:
        """Gives the early warning, to who has asked before; says whether it was given."""
        with self.changed:
            was_asked = EVENT in self.asked
        if was_asked:
            self.set(EVENT, event)
        return was_asked

    def fail(self, kind: str, *, key: str = "", times: int = 1) -> None:
        """Lets the next requests go wrong."""
        with self.changed:
            self.faults.append(Fault(kind, key, times))

    def fault_of(self, key: str) -> str | None:
        with self.changed:
            self.asked.append(key)
            for fault in self.faults:
                if fault.times > 0 and fault.key in ("", key):
                    fault.times -= 1
                    return fault.kind
        return None


class _Request(BaseHTTPRequestHandler):
    emulator: MetadataServer
    server_version, sys_version = "Metadata Server for VM", ""

    def log_message(self, *_: Any) -> None:
        """Says nothing."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # The other side may go by kill -9.
            super().handle()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        words = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if not parts.path.startswith(ROOT):
            return self.answer(404, "not found")
        if self.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in self.headers:
            return self.answer(403, "Missing Metadata-Flavor:Google header.")
        key = parts.path.removeprefix(ROOT)
        match self.emulator.fault_of(key):
            case None:
                pass
            case "hang":
                self.emulator.hanging += 1
                self.emulator.closed.wait()
                return None
            case "drop":
                return self.connection.close()
            case status:
                return self.answer(int(status), "as the test has asked")
        if set(words) - WORDS or words.get("alt", "text") not in ("json", "text"):
            return self.answer(400, "unknown query")
        if key not in self.emulator.values:
            return self.answer(404, "not found")
        value = self.value(key, words)
        if words.get("alt") == "json" and key != UPCOMING:
            value = json.dumps(value)
        return self.answer(200, value, etag=_etag(value))

    def value(self, key: str, words: dict[str, str]) -> str:
        """Returns the value, at once or when it is another than the one that was seen last."""
        emulator = self.emulator
        seconds = float(words.get("timeout_sec", LONGEST_WAIT_SECONDS))
        with emulator.changed:
            if emulator.holds and words.get("wait_for_change") == "true":
                seen = words.get("last_etag", _etag(emulator.values[key]))
                emulator.changed.wait_for(
                    lambda: emulator.closed.is_set() or _etag(emulator.values[key]) != seen, seconds
                )
            return emulator.values[key]

    def do_PUT(self) -> None:
        """Changes a key, for a person."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if not self.path.startswith(CONTROL):
            return self.answer(405, "read only")
        self.emulator.set(self.path.removeprefix(CONTROL), body)
        return self.answer(200, "changed")

    def answer(self, status: int, text: str, *, etag: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Length", str(len(body)))
        if etag is not None:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)


def _etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.metadata")
    parser.add_argument("--port", type=int, default=0)
    with MetadataServer(port=parser.parse_args().port) as server:
        print(f"export GCE_METADATA_HOST={server.address}")
        print(
            f"# then: curl -X PUT -d TRUE http://{server.address}{CONTROL}{PREEMPTED}", flush=True
        )
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
