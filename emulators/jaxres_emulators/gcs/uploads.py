"""The three kinds of uploads: plain media, multipart/related, and resumable in parts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jaxres_emulators.gcs.objects import GcsError, Objects, Stored

PART_MULTIPLE = 256 * 1024


@dataclass
class Session:
    """One resumable upload."""

    bucket: str
    name: str
    query: Mapping[str, str]
    fields: dict[str, Any]
    data: bytearray = field(default_factory=bytearray)
    done: Stored | None = None


class Uploads:
    """The started resumable uploads."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def begin(
        self, bucket: str, name: str, query: Mapping[str, str], fields: dict[str, Any]
    ) -> str:
        """Returns the session's id."""
        self._objects.refuse_unknown(bucket)
        with self._lock:
            key = uuid4().hex
            self._sessions[key] = Session(bucket, name, query, fields)
            return key

    def take(self, key: str, body: bytes, content_range: str) -> Stored | int:
        """Appends a part; returns the object when it is complete, else the number of bytes."""
        with self._lock:
            session = self._sessions.get(key)
            if session is None:
                raise GcsError(404, "notFound", "no such upload")
            if session.done is not None:
                return session.done
            start, total = _parsed(content_range, len(body), len(session.data))
            if start is not None:
                if start > len(session.data):
                    raise GcsError(503, "backendError", "a part is missing")
                del session.data[start:]
                session.data += body
            if total is None:
                keep = len(session.data) // PART_MULTIPLE * PART_MULTIPLE
                del session.data[keep:]
            if total is None or len(session.data) < total:
                return len(session.data)
            session.done = self._objects.put(
                session.bucket, session.name, bytes(session.data), session.query, session.fields
            )
            return session.done

    def cancel(self, key: str) -> None:
        with self._lock:
            self._sessions.pop(key, None)


def _parsed(content_range: str, size: int, have: int) -> tuple[int | None, int | None]:
    """Returns where the body begins (None: only a question) and the whole's size, if known."""
    if not content_range:
        return have, have + size
    found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", content_range)
    if found is None:
        raise GcsError(400, "invalid", f"Content-Range: {content_range}")
    total = None if found[3] == "*" else int(found[3])
    return (None if found[1] is None else int(found[1])), total


def multipart(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes, str]:
    """Returns the fields, the data and its type; parts end in CRLF or, as some send it, LF."""
    found = re.search(r"boundary=\"?([^\";]+)", content_type)
    if found is None:
        raise GcsError(400, "invalid", "no boundary")
    mark = b"--" + found[1].strip("'").encode()
    parts = body.split(mark)
    if len(parts) < 4:
        raise GcsError(400, "invalid", "expected two parts")
    (_, first), (head, data) = _split(parts[1]), _split(mark.join(parts[2:-1]))
    kind = re.search(rb"(?im)^content-type:\s*(.*?)\r?$", head)
    return json.loads(first), data, kind[1].decode() if kind else ""


def _split(part: bytes) -> tuple[bytes, bytes]:
    found = re.search(rb"\r?\n\r?\n", part)
    if found is None:
        raise GcsError(400, "invalid", "a part without head")
    data = part[found.end() :]
    return part[: found.start()], data[:-2] if data.endswith(b"\r\n") else data[:-1]
