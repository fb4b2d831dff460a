"""A GCE metadata server on loopback, as strict as the real one, with faults on request.

By hand: `python -m jaxres_emulators.metadata --port 8080` prints what to set, and how to change
keys.
After cloud.google.com/compute/docs/metadata/querying-metadata: `Metadata-Flavor: Google` or 403, no
`X-Forwarded-For`, 404 for keys that are not there, 400 for words it does not know, ETags, long poll
by `wait_for_change`, `last_etag`, `timeout_sec`; folders (`instance/attributes/`) list what they
hold, or all of it by `recursive=true`; guest attributes are written by PUT where the VM's metadata
allow it. And getting-live-migration-notice: the early warning of a maintenance is given only to who
has asked for the key before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxres_emulators.serving import Quiet, Serving

ROOT = "/computeMetadata/v1/"
CONTROL = "/emulator/"
PREEMPTED = "instance/preempted"
EVENT = "instance/maintenance-event"
UPCOMING = "instance/upcoming-maintenance"
POLICY = "instance/scheduling/on-host-maintenance"
GUEST_ATTRIBUTES = "instance/guest-attributes/"
WORDS = {"wait_for_change", "timeout_sec", "last_etag", "alt", "recursive", "scopes"}
LONGEST_WAIT_SECONDS = 600.0
NO_UPCOMING = json.dumps(
    {"error": "no notifications have been received yet, try again later"}, separators=(",", ":")
)


@dataclass
class MetadataFault:
    """Fault of the next requests for a key."""

    kind: str
    """A status such as "503", "hang" (no response while the server runs), or "drop"."""
    key: str
    """Key; empty: any key."""
    times: int
    until: float = float("inf")
    """Monotonic time."""
    flap_seconds: float = 0.0
    """Period in seconds in which the fault alternates between on and off; 0: always on."""

    def is_there(self, now: float) -> bool:
        is_on = not self.flap_seconds or int(now / self.flap_seconds) % 2 == 0
        return self.times > 0 and now < self.until and is_on


class MetadataServer:
    """Serves until closed; a context manager."""

    def __init__(
        self, *, port: int = 0, policy: str = "TERMINATE", host: str = "127.0.0.1"
    ) -> None:
        self.values = {
            PREEMPTED: "FALSE",
            EVENT: "NONE",
            UPCOMING: NO_UPCOMING,
            POLICY: policy,
            "instance/name": "emulated",
        }
        self.changed = threading.Condition()
        self.faults: list[MetadataFault] = []
        self.requests: list[str] = []
        """Keys of all requests so far, in order."""
        self.hanging = 0
        """Number of requests without a response."""
        self.holds = True
        """Whether long polls are supported."""
        self._serving = Serving(self, _Request, host=host, port=port)
        self.address, self.closed = self._serving.address, self._serving.stopped

    def __enter__(self) -> MetadataServer:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.stop()
        with self.changed:
            self.changed.notify_all()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of a process on this VM."""
        return {"GCE_METADATA_HOST": self.address}

    def set(self, key: str, value: str) -> None:
        """Changes a key; completes long polls for it."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def preempt(self) -> None:
        self.set(PREEMPTED, "TRUE")

    def announce(self, *, seconds: float, **facts: Any) -> None:
        """Announces a maintenance whose window starts in so many seconds."""
        start = datetime.now(UTC) + timedelta(seconds=seconds)
        reported = {
            "can_reschedule": "false",
            "latest_window_start_time": start.isoformat(),
            "maintenance_status": "PENDING",
            "type": "SCHEDULED",
            "window_end_time": (start + timedelta(hours=4)).isoformat(),
            "window_start_time": start.isoformat(),
        }
        self.set(UPCOMING, json.dumps(reported | facts))

    def warn(self, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> bool:
        """Sends the early warning if it was requested before; returns whether it was sent."""
        with self.changed:
            was_requested = EVENT in self.requests
        if was_requested:
            self.set(EVENT, event)
        return was_requested

    def fail(
        self,
        kind: str,
        *,
        key: str = "",
        times: int = 1,
        seconds: float = float("inf"),
        flap_seconds: float = 0.0,
    ) -> None:
        """Makes the next requests fail."""
        until = time.monotonic() + seconds
        with self.changed:
            self.faults.append(MetadataFault(kind, key, times, until, flap_seconds))

    def fault_of(self, key: str) -> str | None:
        with self.changed:
            self.requests.append(key)
            for fault in self.faults:
                if fault.key in ("", key) and fault.is_there(time.monotonic()):
                    fault.times -= 1
                    return fault.kind
        return None

    def below(self, folder: str) -> dict[str, str]:
        """Returns the content of a folder by the rest of the path; call with the lock held."""
        found = {k.removeprefix(folder): v for k, v in self.values.items() if k.startswith(folder)}
        return {name: found[name] for name in sorted(found) if name}

    def read(self, key: str, *, recursive: bool) -> str | None:
        """Returns a value, or a folder as a list or as JSON; None: the key does not exist."""
        if key in self.values:
            return self.values[key]
        inside = self.below(key if key.endswith("/") or not key else f"{key}/")
        if not inside:
            empty = "{}" if recursive else ""
            return empty if key in ("instance/attributes/", GUEST_ATTRIBUTES) else None
        if recursive:
            return json.dumps(_tree(inside, is_verbatim="attributes" in key))
        names = {name[: name.find("/") + 1] if "/" in name else name for name in inside}
        return "".join(f"{name}\n" for name in sorted(names))


class _Request(Quiet):
    emulator: MetadataServer
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "Metadata Server for VM", ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        words = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/":  # Google's libraries ask it whether there is a server.
            return self.answer(200, "computeMetadata/\n")
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
                return self.answer(int(status), "requested by the test")
        if set(words) - WORDS or words.get("alt", "text") not in ("json", "text"):
            return self.answer(400, "unknown query")
        recursive = words.get("recursive", "").lower() == "true"
        value = self.value(key, words, recursive=recursive)
        if value is None:
            return self.answer(404, "not found")
        is_json = recursive or key.endswith("/token") or words.get("alt") == "json"
        if is_json and not value.startswith("{") and key != UPCOMING:
            value = json.dumps(value)
        return self.answer(200, value, etag=_etag(value), is_json=is_json)

    def value(self, key: str, words: dict[str, str], *, recursive: bool) -> str | None:
        """Returns the value, at once or when it differs from the last one seen."""
        emulator = self.emulator
        seconds = float(words.get("timeout_sec", LONGEST_WAIT_SECONDS))

        def etag() -> str:
            return _etag(emulator.read(key, recursive=recursive) or "")

        with emulator.changed:
            if emulator.holds and words.get("wait_for_change") == "true":
                seen = words.get("last_etag", etag())
                emulator.changed.wait_for(
                    lambda: emulator.closed.is_set() or etag() != seen, seconds
                )
            return emulator.read(key, recursive=recursive)

    def do_PUT(self) -> None:
        """Changes a key (manual use), or a guest attribute (for a process of the VM)."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self.path.startswith(ROOT + GUEST_ATTRIBUTES):
            return self.put_guest_attribute(self.path.removeprefix(ROOT), body)
        if not self.path.startswith(CONTROL):
            return self.answer(405, "read only")
        self.emulator.set(self.path.removeprefix(CONTROL), body)
        return self.answer(200, "changed")

    def put_guest_attribute(self, key: str, body: str) -> None:
        allowed = self.emulator.values.get("instance/attributes/enable-guest-attributes", "")
        if self.headers.get("Metadata-Flavor") != "Google" or allowed.upper() != "TRUE":
            return self.answer(403, "Guest attributes endpoint access is disabled.")
        if key.count("/") != 3:
            return self.answer(400, "expected guest-attributes/NAMESPACE/KEY")
        self.emulator.set(key, body)
        return self.answer(200, "")

    def answer(
        self, status: int, text: str, *, etag: str | None = None, is_json: bool = False
    ) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json" if is_json else "application/text")
        self.send_header("Content-Length", str(len(body)))
        if etag is not None:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(body)


def _etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _tree(inside: dict[str, str], *, is_verbatim: bool) -> dict[str, Any]:
    """Returns a folder as nested objects, with camelCase names except for user-defined ones."""
    found: dict[str, Any] = {}
    for path, value in inside.items():
        *folders, name = path.split("/")
        at, keeps = found, is_verbatim
        for folder in folders:
            at = at.setdefault(folder if keeps else _camel(folder), {})
            keeps = keeps or folder.endswith("attributes")
        at[name if keeps else _camel(name)] = value.split(",") if name == "scopes" else value
    return _lists(found)


def _lists(found: Any) -> Any:
    """Returns numbered folders as lists."""
    if not isinstance(found, dict):
        return found
    reported = {name: _lists(one) for name, one in found.items()}
    return (
        list(reported.values())
        if reported and all(name.isdigit() for name in reported)
        else reported
    )


def _camel(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxres_emulators.metadata")
    parser.add_argument("--port", type=int, default=0)
    with MetadataServer(port=parser.parse_args().port) as server:
        sys.stdout.write(
            f"export GCE_METADATA_HOST={server.address}\n"
            f"# then: curl -X PUT -d TRUE http://{server.address}{CONTROL}{PREEMPTED}\n"
        )
        sys.stdout.flush()
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
