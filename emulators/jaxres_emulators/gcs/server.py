"""Serves the JSON API of Google Cloud Storage over HTTP, one thread per connection."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from jaxres_emulators.gcs.buckets import Buckets
from jaxres_emulators.gcs.faults import AFTER, FaultRule, Faults, RequestFault, damaged
from jaxres_emulators.gcs.objects import GcsError, Objects, Stored
from jaxres_emulators.gcs.uploads import Uploads, multipart
from jaxres_emulators.serving import Quiet, Serving

CONTROL = "/emulator/"
MOST_PARTS = 32
SEND_BYTES = 2**16
LATE_SECONDS = 0.05
"""Pause that a limited link makes up for: its threads wake up late, and are not waited for."""
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)(?:/(.+))?")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_BUCKET = re.compile(r"/storage/v1/b(?:/([^/]+))?")
_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o")


@dataclass(frozen=True)
class GcsRequest:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: Any
    body: bytes
    is_damaged: bool = False
    """Whether its body is corrupted on the way."""

    def as_it_came(self, data: bytes) -> bytes:
        return damaged(data) if self.is_damaged else data


@dataclass
class GcsResponse:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cls: str = "free"
    """Operation class of the price list: A, B or free."""


class Bandwidth:
    """Limits the bytes that all connections together move in a second, in one direction."""

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Waits until this many bytes may be sent."""
        with self._lock:
            self.num_bytes += num_bytes
            if not self.bytes_per_second:
                return
            if time.monotonic() - self._free_at > LATE_SECONDS:
                self._free_at = time.monotonic()
            self._free_at += num_bytes / self.bytes_per_second
            seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, seconds))


class GcsServer:
    """Serves until closed; a context manager."""

    def __init__(
        self, *, port: int = 0, buckets: tuple[str, ...] = ("bucket",), late_seconds: float = 0.0
    ) -> None:
        self.objects = Objects({name: [] for name in buckets})
        self.buckets = Buckets(self.objects)
        self.uploads = Uploads(self.objects)
        self.faults = Faults()
        self.late_seconds = late_seconds
        """Latency of every request."""
        self.sent, self.received = Bandwidth(), Bandwidth()
        self.counts: Counter[str] = Counter()
        """Completed requests by class and by method and kind."""
        self.bugs: list[str] = []
        """Tracebacks of bugs in the emulator."""
        self.log: list[str] | None = None
        """Method and path of every request, if a test enables it."""
        self._serving = Serving(self, _Request, host="127.0.0.1", port=port)
        self.url = f"http://{self._serving.address}"

    def __enter__(self) -> GcsServer:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.stop()

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of a process that uses this service."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",
        }

    def fail(self, kind: str, **rule: Any) -> FaultRule:
        """Makes the next requests that a rule matches fail; see FaultRule."""
        return self.faults.add(FaultRule(kind, **rule))

    def flip_bit(self, name: str, chance: random.Random, *, bucket: str = "bucket") -> int:
        """Damages a stored object silently: its checksums match the damaged bytes.

        Returns:
          The number of the byte in which a bit is another.
        """
        with self.objects.lock:
            found = self.objects.now[bucket, name]
            where, bit = chance.randrange(len(found.data)), chance.randrange(8)
            data = bytearray(found.data)
            data[where] ^= 1 << bit
            self.objects.now[bucket, name] = dataclasses.replace(found, data=bytes(data))
        return where

    def body(self, name: str, *, bucket: str = "bucket") -> bytes:
        return self.objects.now[bucket, name].data

    def names(self, prefix: str = "", *, bucket: str = "bucket") -> list[str]:
        with self.objects.lock:
            return [name for name in self.objects.buckets[bucket] if name.startswith(prefix)]

    def answer(self, request: GcsRequest, fault: RequestFault | None) -> GcsResponse:
        stale = fault.late_seconds if fault and fault.word == "stale" else 0.0
        try:
            return self._answer(request, stale_seconds=stale)
        except GcsError as no:
            error = {"code": no.status, "message": no.message, "errors": [{"reason": no.reason}]}
            body = b"" if no.status == 304 else json.dumps({"error": error}).encode()
            cls = "B" if request.method == "GET" else "A"
            return GcsResponse(no.status, body, {"Content-Type": "application/json"}, cls)
        except Exception:  # noqa: BLE001 - else the client would only see its connection end.
            self.bugs.append(
                f"{request.method} {request.path} {request.query}\n{traceback.format_exc()}"
            )
            return GcsResponse(501, self.bugs[-1].encode())

    def _answer(self, request: GcsRequest, *, stale_seconds: float) -> GcsResponse:
        if found := _UPLOAD.fullmatch(request.path):
            return self._upload(request, found[1])
        if found := _OBJECT.fullmatch(request.path):
            return self._object(request, found[1], unquote(found[2]), found[3] or "")
        if found := _LIST.fullmatch(request.path):
            return self._list(request, found[1], stale_seconds=stale_seconds)
        if found := _BUCKET.fullmatch(request.path):
            return self._bucket(request, found[1])
        raise GcsError(501, "notImplemented", f"{request.method} {request.path}")

    def _upload(self, request: GcsRequest, bucket: str) -> GcsResponse:
        query, fields, data = dict(request.query), {}, request.body
        if key := query.get("upload_id"):
            return self._part(request, key)
        kind = query.get("uploadType", "media")
        if kind == "resumable":
            fields = json.loads(data) if data else {}
            fields |= _contents(request.headers, "X-Upload-Content-Type")
            key = self.uploads.begin(bucket, query.get("name") or fields["name"], query, fields)
            place = (
                f"{self.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
            )
            return GcsResponse(200, b"", {"Location": place, "X-GUploader-UploadID": key}, "A")
        if kind == "multipart":
            fields, data, content_type = multipart(data, request.headers.get("Content-Type", ""))
            if content_type:
                fields.setdefault("contentType", content_type)
        else:
            fields = _contents(request.headers, "Content-Type")
        fields |= _hashes(request.headers)
        name, data = query.get("name") or fields["name"], request.as_it_came(data)
        return self._told(self.objects.put(bucket, name, data, query, fields), "A")

    def _part(self, request: GcsRequest, key: str) -> GcsResponse:
        if request.method == "DELETE":
            self.uploads.cancel(key)
            return GcsResponse(499)
        body = request.as_it_came(request.body)
        taken = self.uploads.take(key, body, request.headers.get("Content-Range", ""))
        if isinstance(taken, Stored):
            return self._told(taken)
        headers = {"Range": f"bytes=0-{taken - 1}"} if taken else {}
        return GcsResponse(308, b"", headers)

    def _object(self, request: GcsRequest, bucket: str, name: str, action: str) -> GcsResponse:
        objects, query = self.objects, request.query
        if action:
            return self._told(self._copied(request, bucket, name, action), "A", action=action)
        match request.method:
            case "GET" if query.get("alt") == "media":
                return _media(objects.get(bucket, name, query), request.headers)
            case "GET":
                return self._told(objects.get(bucket, name, query), "B")
            case "DELETE":
                objects.delete(bucket, name, query)
                return GcsResponse(204)
            case "PATCH" | "PUT":
                found = objects.patch(bucket, name, query, json.loads(request.body))
                return self._told(found, "A")
        raise GcsError(405, "methodNotAllowed", request.method)

    def _copied(self, request: GcsRequest, bucket: str, name: str, action: str) -> Stored:
        fields = json.loads(request.body) if request.body else {}
        with self.objects.lock:
            if action == "compose":
                parts = [self._part_of(bucket, part) for part in fields["sourceObjects"]]
                if not 1 <= len(parts) <= MOST_PARTS:
                    raise GcsError(400, "invalid", f"compose takes 1 to {MOST_PARTS} objects")
                data = b"".join(part.data for part in parts)
                return self.objects.put(
                    bucket, name, data, request.query, fields.get("destination", {})
                )
            source_query = {
                word.replace("Source", ""): value
                for word, value in request.query.items()
                if word.startswith("ifSource")
            }
            if generation := request.query.get("sourceGeneration"):
                source_query["generation"] = generation
            source = self.objects.get(bucket, name, source_query)
            if found := re.fullmatch(r"(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", action):
                wanted = {**source.fields, **fields}
                to, there = found[1], unquote(found[2])
                return self.objects.put(to, there, source.data, request.query, wanted)
            if found := re.fullmatch(r"moveTo/o/([^/]+)", action):
                put = self.objects.put(
                    bucket, unquote(found[1]), source.data, request.query, source.fields
                )
                self.objects.delete(bucket, name, {})
                return put
        raise GcsError(501, "notImplemented", action)

    def _part_of(self, bucket: str, part: dict[str, Any]) -> Stored:
        query = {"generation": str(part["generation"])} if part.get("generation") else {}
        if wanted := part.get("objectPreconditions", {}).get("ifGenerationMatch"):
            query["ifGenerationMatch"] = str(wanted)
        return self.objects.get(bucket, part["name"], query)

    def _list(self, request: GcsRequest, bucket: str, *, stale_seconds: float) -> GcsResponse:
        items, prefixes, token = self.objects.page(
            bucket, request.query, stale_seconds=stale_seconds
        )
        reported: dict[str, Any] = {"kind": "storage#objects"}
        reported |= {"items": [one.resource(self.url) for one in items]} if items else {}
        reported |= {"prefixes": prefixes} if prefixes else {}
        reported |= {"nextPageToken": token} if token else {}
        return _json(reported, "A")

    def _bucket(self, request: GcsRequest, bucket: str | None) -> GcsResponse:
        body = json.loads(request.body) if request.body else {}
        reported = self.buckets.answer(request.method, bucket, request.query, body)
        return _json(reported, "A" if bucket is None else "B")

    def _told(self, found: Stored, cls: str = "free", *, action: str = "") -> GcsResponse:
        reported = found.resource(self.url)
        if action.startswith("rewriteTo"):
            size = str(len(found.data))
            reported = {
                "kind": "storage#rewriteResponse",
                "done": True,
                "objectSize": size,
                "totalBytesRewritten": size,
                "resource": reported,
            }
        return _json(reported, cls)

    def control(self, request: GcsRequest) -> GcsResponse:
        """Manual use: sets faults and limits, returns counts."""
        if request.method == "POST" and request.path == f"{CONTROL}limits":
            limits = json.loads(request.body)
            self.late_seconds = limits.get("late_seconds", self.late_seconds)
            for bandwidth in (self.sent, self.received):
                bandwidth.bytes_per_second = limits.get("bytes_per_second")
        elif request.method == "POST":
            self.fail(**json.loads(request.body))
        reported = {
            "requests": self.counts,
            "faults": self.faults.done,
            "sent_bytes": self.sent.num_bytes,
            "too_often": self.objects.too_often,
        }
        return _json(reported, "")


def _json(reported: dict[str, Any], cls: str) -> GcsResponse:
    return GcsResponse(
        200, json.dumps(reported).encode(), {"Content-Type": "application/json"}, cls
    )


def _contents(headers: Any, word: str) -> dict[str, Any]:
    return {"contentType": headers[word]} if word in headers else {}


def _hashes(headers: Any) -> dict[str, Any]:
    """Returns the checksums that came as headers, as fields."""
    found = dict(re.findall(r"(crc32c|md5)=([^,\s]+)", headers.get("X-Goog-Hash", "")))
    reported = {
        "crc32c": found.get("crc32c"),
        "md5Hash": found.get("md5", headers.get("Content-MD5")),
    }
    return {name: value for name, value in reported.items() if value}


def _media(found: Stored, headers: Any) -> GcsResponse:
    reported = {
        "Content-Type": str(found.fields.get("contentType", "")),
        "ETag": found.etag,
        "X-Goog-Generation": str(found.generation),
        "X-Goog-Metageneration": str(found.metageneration),
        "X-Goog-Hash": f"crc32c={found.crc32c},md5={found.md5}",
        "X-Goog-Stored-Content-Length": str(len(found.data)),
        "X-Goog-Stored-Content-Encoding": "identity",
        "X-Goog-Storage-Class": "STANDARD",
    }
    span = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
    if span is None or span[0] == "bytes=-":
        return GcsResponse(200, found.data, reported, "B")
    size = len(found.data)
    start = int(span[1]) if span[1] else max(0, size - int(span[2]))
    end = min(size, int(span[2]) + 1) if span[1] and span[2] else size
    if start >= size or start >= end:
        raise GcsError(416, "requestedRangeNotSatisfiable", f"bytes */{size}")
    reported["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return GcsResponse(206, found.data[start:end], reported, "B")


class _Request(Quiet):
    emulator: GcsServer
    server_version, sys_version = "UploadServer", ""

    def do_GET(self) -> None:
        server, parts = self.emulator, urlsplit(self.path)
        # Not parse_qs: keys are unique, and a + in an offset is sent as %2B.
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        request = GcsRequest(self.command, parts.path, query, self.headers, self.body())
        if parts.path.startswith(CONTROL):
            return self.send(server.control(request))
        if server.log is not None:
            server.log.append(f"{self.command} {self.path}")
        if server.late_seconds:
            time.sleep(server.late_seconds)
        fault = server.faults.of(self.command, self.path)
        if fault and fault.word == "stall":
            time.sleep(fault.late_seconds)
        if fault and fault.word == "damage" and request.body and self.command != "GET":
            request = dataclasses.replace(request, is_damaged=True)
        is_lost = fault is not None and (fault.word == "drop" or fault.word.isdigit())
        if fault and is_lost and fault.when != AFTER:
            return self.lose(fault)
        answer = server.answer(request, fault)
        server.counts[answer.cls] += 1
        server.counts[f"{self.command} {_kind(parts.path, query)}"] += 1
        if fault and is_lost:
            return self.lose(fault)
        if fault and fault.word == "damage" and self.command == "GET":
            answer.body = damaged(answer.body)
        return self.send(answer, short=fault is not None and fault.word == "short")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def read(self, size: int) -> bytes:
        parts = []
        for start in range(0, size, SEND_BYTES):
            parts.append(self.rfile.read(min(SEND_BYTES, size - start)))
            self.emulator.received.wait(len(parts[-1]))
        return b"".join(parts)

    def lose(self, fault: RequestFault) -> None:
        self.emulator.counts["lost"] += 1
        if fault.word.isdigit():
            error = {"code": int(fault.word), "message": "requested by the test", "errors": []}
            body = json.dumps({"error": error}).encode()
            return self.send(
                GcsResponse(int(fault.word), body, {"Content-Type": "application/json"})
            )
        self.close_connection = True
        return None

    def send(self, answer: GcsResponse, *, short: bool = False) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = answer.body if answer.status not in (204, 304) else b""
        if short and body:
            body, self.close_connection = body[: len(body) // 2], True
        for start in range(0, len(body), SEND_BYTES):
            part = body[start : start + SEND_BYTES]
            self.emulator.sent.wait(len(part))
            self.wfile.write(part)


def _kind(path: str, query: dict[str, str]) -> str:
    """Returns the kind of a request, for the counts."""
    if _UPLOAD.fullmatch(path):
        return f"upload {query.get('uploadType', 'part')}"
    if _LIST.fullmatch(path):
        return "list"
    if _OBJECT.fullmatch(path):
        return "media" if query.get("alt") == "media" else "object"
    return "bucket"
