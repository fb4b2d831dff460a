"""Bytes in a bucket of Google Cloud Storage, through Google's own client.

Every request has limits (gcs.py). What is written counts only with the
answer to it, or once it is found there: a write whose answer was lost is known by its nonce. What
is read is held against its checksum. A bucket that does not answer is never taken for an empty one.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import gcs_client
from jaxres.storage.path import BucketPath

if TYPE_CHECKING:
    from google.cloud.storage import Blob

CHUNK_BYTES = 2**24
THREADS = 16
NONCE = "jaxres-nonce"
FIELDS = "items(name,size),prefixes,nextPageToken"
FIELDS_WITH_WORDS = "items(name,generation,metadata),prefixes,nextPageToken"
FIELDS_WITH_SUMS = "items(name,size,generation,crc32c),nextPageToken"
READS_AT_ONE_GENERATION = 20
T = TypeVar("T")


class OnItsWay(StorageUnavailable):
    """Bytes were damaged between the bucket and here."""


@dataclass(frozen=True)
class Stat:
    """What the bucket says of an object."""

    size: int
    generation: int
    crc32c: str
    nonce: str | None


def _blob(path: BucketPath) -> Any:  # The stubs know only whole seconds, and no way not to retry.
    return gcs_client.client().bucket(path.bucket).blob(path.key)


@contextlib.contextmanager
def _absent_is(answer: list[bool]) -> Iterator[None]:
    """Notes that there is no such object."""
    from google.api_core.exceptions import NotFound

    try:
        yield
    except NotFound:
        answer.append(True)


def read(path: BucketPath) -> bytes | None:
    """Returns the bytes of an object, as its checksum says they are; None: there is none."""
    with _absent_is([]):
        return gcs_client.tried(
            path,
            lambda: _blob(path).download_as_bytes(
                raw_download=True, checksum="crc32c", timeout=gcs_client.TIMEOUT_SECONDS, retry=None
            ),
        )
    return None


def stat(path: BucketPath) -> Stat | None:
    """Returns what the bucket says of an object; None: there is none."""

    def ask() -> Stat:
        blob = _blob(path)
        blob.reload(timeout=gcs_client.TIMEOUT_SECONDS, retry=None)
        return _stat_of(blob)

    with _absent_is([]):
        return gcs_client.tried(path, ask)
    return None


def _stat_of(blob: Blob) -> Stat:
    nonce = (blob.metadata or {}).get(NONCE)
    return Stat(int(blob.size or 0), int(blob.generation or 0), str(blob.crc32c), nonce)


def read_at(path: BucketPath) -> tuple[bytes, int] | None:
    """Returns the bytes of an object and the generation that they are of; None: there is none."""
    from google.api_core.exceptions import PreconditionFailed

    for _ in range(READS_AT_ONE_GENERATION):
        if (there := stat(path)) is None:
            return None
        match = there.generation
        with _absent_is([]), contextlib.suppress(PreconditionFailed):
            return gcs_client.tried(
                path,
                lambda match=match: _blob(path).download_as_bytes(
                    raw_download=True,
                    checksum="crc32c",
                    if_generation_match=match,
                    timeout=gcs_client.TIMEOUT_SECONDS,
                    retry=None,
                ),
            ), match
    raise StorageUnavailable(f"{path}: changes faster than it can be read; try again.")


def write(
    path: BucketPath, data: bytes, *, over: int | None, words: Mapping[str, str] | None = None
) -> int | None:
    """Writes an object over a generation of it, 0: over none, None: over any.

    `words` are what a list says of it (`listed`). Returns the new generation, or None if another
    stands there by now. An answer that is lost hides a write that was done: then the try after it
    finds the object changed, by us.

    Raises:
      StorageUnavailable: nobody can say whether it was written, now or later.
    """
    from google.api_core.exceptions import PreconditionFailed

    nonce = secrets.token_hex(8)

    def put() -> int:
        blob = _blob(path)
        blob.metadata = {**(words or {}), NONCE: nonce}
        blob.upload_from_string(
            data,
            content_type="application/octet-stream",
            if_generation_match=over,
            checksum="crc32c",
            timeout=gcs_client.TIMEOUT_SECONDS,
            retry=None,
        )
        return int(blob.generation or 0)

    try:
        return gcs_client.tried(path, put)
    except PreconditionFailed:
        there = stat(path)
        return there.generation if there is not None and there.nonce == nonce else None


def delete(path: BucketPath) -> bool:
    """Deletes an object; False: there was none."""
    with _absent_is(found := []):
        gcs_client.tried(
            path, lambda: _blob(path).delete(timeout=gcs_client.TIMEOUT_SECONDS, retry=None)
        )
    return not found


def names(folder: BucketPath, *, after: str = "") -> list[str]:
    """Returns the names of objects and folders in a folder, in order; [] if there is none.

    Args:
      folder: whose.
      after: leaves out the names before this one, without asking for them.
    """
    prefix = f"{folder.key}/" if folder.key else ""

    def ask() -> list[str]:
        pages = _listed(folder, prefix=prefix, delimiter="/", start_offset=prefix + after or None)
        found = [blob.name for blob in pages]
        return sorted({name.removeprefix(prefix).rstrip("/") for name in [*found, *pages.prefixes]})

    return [name for name in gcs_client.tried(folder, ask) if name]


def listed(folder: BucketPath) -> dict[str, tuple[int, dict[str, str]]]:
    """Returns name -> generation and words of every object right in a folder, by one request."""
    prefix = f"{folder.key}/"

    def ask() -> dict[str, tuple[int, dict[str, str]]]:
        pages = _listed(folder, prefix=prefix, delimiter="/", fields=FIELDS_WITH_WORDS)
        return {
            blob.name.removeprefix(prefix): (int(blob.generation or 0), dict(blob.metadata or {}))
            for blob in pages
        }

    return gcs_client.tried(folder, ask)


def objects(folder: BucketPath) -> dict[str, int]:
    """Returns relative path -> size of every object below a folder; {} if there is none."""
    prefix = f"{folder.key}/"

    def ask() -> dict[str, int]:
        pages = _listed(folder, prefix=prefix)
        return {blob.name.removeprefix(prefix): int(blob.size or 0) for blob in pages}

    return gcs_client.tried(folder, ask)


def listing(folder: BucketPath) -> dict[str, Stat]:
    """Returns relative path -> what the bucket says of every object below a folder, in order."""
    prefix = f"{folder.key}/" if folder.key else ""

    def ask() -> dict[str, Stat]:
        pages = _listed(folder, prefix=prefix, fields=FIELDS_WITH_SUMS)
        return {blob.name.removeprefix(prefix): _stat_of(blob) for blob in pages}

    return {name: stat for name, stat in gcs_client.tried(folder, ask).items() if name}


def exists(path: BucketPath) -> bool:
    """Says whether there is an object of this name, or a folder."""

    def ask() -> bool:
        found = _listed(path, prefix=f"{path.key}/", max_results=1)
        return any(True for _ in found)

    return stat(path) is not None or gcs_client.tried(path, ask)


def _listed(folder: BucketPath, **words: Any) -> Any:
    """Returns the pages of a list, each of which is tried again by itself."""
    from google.api_core.retry import Retry

    low, high = gcs_client.PAUSE_SECONDS
    retry = Retry(
        predicate=gcs_client.passes, initial=low, maximum=high, timeout=gcs_client.LIMIT_SECONDS / 2
    )
    words = {"fields": FIELDS, "timeout": gcs_client.TIMEOUT_SECONDS, "retry": retry} | words
    return gcs_client.client().list_blobs(folder.bucket, **words)


def delete_tree(folder: BucketPath) -> None:
    """Deletes every object below a folder; who is killed in the middle leaves some behind."""
    with ThreadPoolExecutor(THREADS, "jaxres-bucket") as pool:
        list(pool.map(lambda name: delete(folder / name), objects(folder)))


def read_all(paths: list[BucketPath]) -> list[bytes | None]:
    """Reads many objects at a time."""
    if len(paths) < 2:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(THREADS, len(paths)), "jaxres-bucket") as pool:
        return list(pool.map(read, paths))


def chunks(path: BucketPath) -> Iterator[bytes] | None:
    """Yields the bytes of one generation of an object, of any size; None: there is none.

    Raises:
      StorageUnavailable: they are not what the bucket's checksum says, which may pass.
    """
    there = stat(path)
    return None if there is None else chunks_of(path, there)


def chunks_of(path: BucketPath, there: Stat) -> Iterator[bytes]:
    """Yields the bytes of that generation of an object; raises as `chunks` does.

    Raises:
      ConfigError: another generation, or none, is there by now.
    """
    import base64

    import google_crc32c

    checksum = google_crc32c.Checksum()
    for start in range(0, there.size, CHUNK_BYTES):
        data = gcs_client.tried(path, lambda start=start: _range(path, there, start))
        checksum.update(data)
        yield data
    if base64.b64encode(checksum.digest()).decode() != there.crc32c:
        raise OnItsWay(
            f"{path}: was damaged on its way here: its bytes are not those of the bucket's own "
            "checksum. Nothing was judged damaged; it is read again."
        )


def _range(path: BucketPath, there: Stat, start: int) -> bytes:
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        return _blob(path).download_as_bytes(
            start=start,
            end=min(start + CHUNK_BYTES, there.size) - 1,
            raw_download=True,
            checksum=None,
            if_generation_match=there.generation,
            timeout=gcs_client.TIMEOUT_SECONDS,
            retry=None,
        )
    except (NotFound, PreconditionFailed) as error:
        if "bucket does not exist" in str(error):
            raise
        raise ConfigError(
            f"{path}: changed while it was read. Start again when it is at rest."
        ) from error
