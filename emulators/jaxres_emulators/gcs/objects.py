"""Content of buckets: objects with generations, checksums and holds, and their preconditions.

After cloud.google.com/storage/docs/json_api/v1. Generations are unique and in no order: Google
promises no more ("generations and preconditions").
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
import functools
import hashlib
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import google_crc32c

OFTEN_SECONDS = 1.0
"""Minimum interval between writes of one name (storage/quotas)."""
PAGE = 1000
LAST = "\U0010ffff"


class GcsError(Exception):
    """An error response."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


@dataclass(frozen=True)
class Stored:
    """One generation of one object."""

    bucket: str
    name: str
    data: bytes
    generation: int
    metageneration: int
    fields: Mapping[str, Any]
    """contentType, metadata, holds and other fields set by a client."""
    born: float
    """Monotonic time."""
    created: str

    @property
    def is_held(self) -> bool:
        return bool(self.fields.get("temporaryHold") or self.fields.get("eventBasedHold"))

    @functools.cached_property
    def crc32c(self) -> str:
        return crc32c(self.data)

    @functools.cached_property
    def md5(self) -> str:
        return md5(self.data)

    def resource(self, url: str) -> dict[str, Any]:
        """Returns the API resource."""
        here = f"{url}/storage/v1/b/{self.bucket}/o/{quote(self.name, safe='')}"
        there = here.replace("/storage/v1/", "/download/storage/v1/")
        return {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": here,
            "mediaLink": f"{there}?generation={self.generation}&alt=media",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "size": str(len(self.data)),
            "storageClass": "STANDARD",
            "timeCreated": self.created,
            "updated": self.created,
            "etag": self.etag,
            "crc32c": self.crc32c,
            "md5Hash": self.md5,
            **self.fields,
        }

    @property
    def etag(self) -> str:
        return base64.b64encode(f"{self.generation}.{self.metageneration}".encode()).decode()


class SparseData:
    """The bytes of an object: zeros after a given beginning; they take no memory."""

    def __init__(self, size: int, *, begin: bytes = b"") -> None:
        self.size, self.begin = size, begin

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(self.size)
        return self.begin[start:stop].ljust(max(0, stop - start), b"\0")


def crc32c(data: Any) -> str:
    """Returns the checksum; SparseData has a constant one, which no reader compares."""
    if isinstance(data, SparseData):
        return "AAAAAA=="
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def md5(data: Any) -> str:
    if isinstance(data, SparseData):
        return "AAAAAAAAAAAAAAAAAAAAAA=="
    return base64.b64encode(hashlib.md5(data).digest()).decode()


@dataclass
class Objects:
    """All buckets; each method is one atomic operation for all clients."""

    buckets: dict[str, list[str]] = field(default_factory=dict)
    """Name -> names of its objects in order."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a bucket that differ from the defaults."""
    now: dict[tuple[str, str], Stored] = field(default_factory=dict)
    gone: list[tuple[float, Stored]] = field(default_factory=list)
    """Deleted and overwritten objects with their times, for stale lists."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    too_often: Counter[str] = field(default_factory=Counter)
    """Number of writes of a name within a second of the previous one."""
    refuses_too_often: bool = False
    """Whether such a write gets the response 429."""
    used: set[int] = field(default_factory=set)

    def get(self, bucket: str, name: str, query: Mapping[str, str]) -> Stored:
        """Returns an object; GcsError: 404, 304 or 412."""
        with self.lock:
            self.refuse_unknown(bucket)
            found = self.now.get((bucket, name))
            wanted = query.get("generation")
            if found is None or (wanted and int(wanted) != found.generation):
                raise GcsError(404, "notFound", f"No such object: {bucket}/{name}")
            check(found, query, reads=True)
            return found

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes,
        query: Mapping[str, str],
        fields: Mapping[str, Any],
    ) -> Stored:
        """Writes a new generation; GcsError: 400, 403, 412 or 429."""
        with self.lock:
            self.refuse_unknown(bucket)
            before = self.now.get((bucket, name))
            check(before, query, reads=False)
            refuse_held(before)
            self._note_rate(before, bucket, name)
            fields = dict(fields)
            for what, made in (("crc32c", crc32c), ("md5Hash", md5)):
                if fields.pop(what, None) not in (None, made(data)):
                    raise GcsError(400, "invalid", f"Provided {what} does not match the content")
            for word in ("name", "bucket", "generation", "size"):
                fields.pop(word, None)
            fields.setdefault("contentType", "application/octet-stream")
            found = Stored(
                bucket, name, data, self._generation(), 1, fields, time.monotonic(), stamp()
            )
            if before is None:
                bisect.insort(self.buckets[bucket], name)
            else:
                self.gone.append((time.monotonic(), before))
            self.now[bucket, name] = found
            return found

    def patch(
        self, bucket: str, name: str, query: Mapping[str, str], fields: Mapping[str, Any]
    ) -> Stored:
        with self.lock:
            found = self.get(bucket, name, {})
            check(found, query, reads=False)
            merged = {k: v for k, v in {**found.fields, **fields}.items() if v is not None}
            found = dataclasses.replace(
                found, fields=merged, metageneration=found.metageneration + 1
            )
            self.now[bucket, name] = found
            return found

    def delete(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        with self.lock:
            found = self.get(bucket, name, {k: v for k, v in query.items() if k == "generation"})
            check(found, query, reads=False)
            refuse_held(found)
            del self.now[bucket, name]
            names = self.buckets[bucket]
            del names[bisect.bisect_left(names, name)]
            self.gone.append((time.monotonic(), found))

    def page(
        self, bucket: str, query: Mapping[str, str], *, stale_seconds: float = 0.0
    ) -> tuple[list[Stored], list[str], str | None]:
        """Returns objects, prefixes and the token of the next page."""
        with self.lock:
            self.refuse_unknown(bucket)
            names, found = self.buckets[bucket], self.now
            if stale_seconds:
                names, found = self._as_of(bucket, time.monotonic() - stale_seconds)
            return _page(bucket, names, found, query)

    def _as_of(self, bucket: str, when: float) -> tuple[list[str], dict[tuple[str, str], Stored]]:
        alive = [*self.now.values(), *(one for gone, one in self.gone if gone > when)]
        found = {
            (one.bucket, one.name): one
            for one in alive
            if one.bucket == bucket and one.born <= when
        }
        return sorted(name for _, name in found), found

    def refuse_unknown(self, bucket: str) -> None:
        if bucket not in self.buckets:
            raise GcsError(404, "notFound", "The specified bucket does not exist.")

    def _generation(self) -> int:
        while True:
            number = random.randrange(10**15, 2 * 10**15)
            if number not in self.used:
                self.used.add(number)
                return number

    def _note_rate(self, before: Stored | None, bucket: str, name: str) -> None:
        if before is not None and time.monotonic() - before.born < OFTEN_SECONDS:
            self.too_often[f"{bucket}/{name}"] += 1
            if self.refuses_too_often:
                raise GcsError(429, "rateLimitExceeded", f"{name}: the object is changed too often")


def _page(
    bucket: str,
    names: list[str],
    found: Mapping[tuple[str, str], Stored],
    query: Mapping[str, str],
) -> tuple[list[Stored], list[str], str | None]:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    end, most = query.get("endOffset", ""), int(query.get("maxResults", PAGE))
    after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
    at = bisect.bisect_left(names, max(prefix, query.get("startOffset", ""), after))
    items: list[Stored] = []
    prefixes: list[str] = []
    while at < len(names) and names[at].startswith(prefix) and (not end or names[at] < end):
        if len(items) + len(prefixes) == min(most, PAGE):
            return items, prefixes, base64.urlsafe_b64encode(names[at].encode()).decode()
        cut = names[at].find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            items.append(found[bucket, names[at]])
            at += 1
            continue
        prefixes.append(names[at][: cut + len(delimiter)])
        at = bisect.bisect_left(names, prefixes[-1] + LAST)
    return items, prefixes, None


def check(found: Stored | None, query: Mapping[str, str], *, reads: bool) -> None:
    """Checks an object, or its absence, against the preconditions of a request."""
    generation = found.generation if found else 0
    metageneration = found.metageneration if found else 0
    for word, value in (("Generation", generation), ("Metageneration", metageneration)):
        if (wanted := query.get(f"if{word}Match")) is not None and int(wanted) != value:
            raise GcsError(412, "conditionNotMet", "At least one of the pre-conditions failed.")
        if (other := query.get(f"if{word}NotMatch")) is not None and int(other) == value:
            raise GcsError(304 if reads else 412, "conditionNotMet", "Not modified.")


def refuse_held(found: Stored | None) -> None:
    if found is not None and found.is_held:
        message = f"Object '{found.bucket}/{found.name}' is under active hold."
        raise GcsError(403, "objectUnderActiveHold", message)


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
