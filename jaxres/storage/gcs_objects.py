"""Reads, writes, lists and deletes objects of a Google Cloud Storage bucket.

Every request has a timeout (gcs_client.py). A write is done once the bucket has confirmed it, or
the object is found there: a nonce identifies a write whose response was lost. Reads are compared
with the checksum of the object. A bucket that does not answer is never treated as empty.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage import gcs_client
from jaxres.storage.object_streams import MemoryFile
from jaxres.storage.path import GcsPath

if TYPE_CHECKING:
    from google.cloud.storage import Blob

CHUNK_BYTES = 2**24
UPLOAD_BYTES = 2**23
"""Bytes that one request of an upload sends."""
UPLOAD_SECONDS = (20.0, 20.0)
"""Timeouts of sending these bytes and of the answer."""
CONTENT_TYPE = "application/octet-stream"
THREADS = 16
NONCE = "jaxres-nonce"
FIELDS = "items(name,size),prefixes,nextPageToken"
FIELDS_WITH_METADATA = "items(name,generation,metadata),prefixes,nextPageToken"
FIELDS_WITH_CHECKSUMS = "items(name,size,generation,crc32c),nextPageToken"
MAX_GENERATION_TRIES = 20
T = TypeVar("T")


class TransferCorrupted(StorageUnavailable):
    """Bytes were damaged during the transfer from the bucket."""


@dataclass(frozen=True)
class Stat:
    """Metadata of an object."""

    size: int
    generation: int
    crc32c: str
    nonce: str | None
    updated: float = 0.0
    """When it was written, in seconds since the epoch, by the bucket's clock."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Metadata that `write` has stored with it; empty in lists."""


def _blob(path: GcsPath) -> Any:  # The stubs lack float timeouts and retry=None.
    return gcs_client.client().bucket(path.bucket).blob(path.key)


@contextlib.contextmanager
def _on_not_found(absent: list[bool]) -> Iterator[None]:
    """Suppresses the error for a missing object, and appends True to `absent`."""
    from google.api_core.exceptions import NotFound

    try:
        yield
    except NotFound:
        absent.append(True)


def read(path: GcsPath) -> bytes | None:
    """Returns the bytes of an object, checked by its checksum; None: it does not exist."""
    with _on_not_found([]):
        return gcs_client.with_retries(
            path,
            lambda: _blob(path).download_as_bytes(
                raw_download=True, checksum="crc32c", timeout=gcs_client.TIMEOUT_SECONDS, retry=None
            ),
        )
    return None


def stat(path: GcsPath) -> Stat | None:
    """Returns the metadata of an object; None: it does not exist."""

    def request() -> Stat:
        blob = _blob(path)
        blob.reload(timeout=gcs_client.TIMEOUT_SECONDS, retry=None)
        return _stat_of(blob)

    with _on_not_found([]):
        return gcs_client.with_retries(path, request)
    return None


def _stat_of(blob: Blob) -> Stat:
    metadata = dict(blob.metadata or {})
    nonce = metadata.pop(NONCE, None)
    updated = 0.0 if blob.updated is None else blob.updated.timestamp()
    size, generation = int(blob.size or 0), int(blob.generation or 0)
    return Stat(size, generation, str(blob.crc32c), nonce, updated, metadata)


def read_at(path: GcsPath) -> tuple[bytes, int] | None:
    """Returns the bytes of an object and their generation; None: it does not exist."""
    from google.api_core.exceptions import PreconditionFailed

    for _ in range(MAX_GENERATION_TRIES):
        if (current := stat(path)) is None:
            return None
        match = current.generation
        with _on_not_found([]), contextlib.suppress(PreconditionFailed):
            return gcs_client.with_retries(
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
    path: GcsPath, data: bytes, *, over: int | None, metadata: Mapping[str, str] | None = None
) -> int | None:
    """Writes an object, provided that its current generation is `over`.

    If the response of a successful write is lost, the retry finds the object changed by this call,
    which the nonce shows.

    Args:
      data: its new content.
      over: the expected generation; 0: the object must not exist; None: any.
      metadata: stored with the object; `list_metadata` returns it.

    Returns:
      The new generation; None: the object has another generation than `over`.

    Raises:
      StorageUnavailable: it is unknown whether the object was written or still will be.
    """

    def put(blob: Any) -> None:
        blob.metadata = {**(metadata or {}), **blob.metadata}
        blob.upload_from_string(
            data,
            content_type=CONTENT_TYPE,
            if_generation_match=over,
            checksum="crc32c",
            timeout=gcs_client.TIMEOUT_SECONDS,
            retry=None,
        )

    found = written(path, put)
    return None if found is None else found.generation


def write_stream(path: GcsPath, file: MemoryFile) -> Stat:
    """Writes an object that does not exist yet, in parts of UPLOAD_BYTES; returns its metadata.

    Raises:
      StorageUnavailable: it is unknown whether the object was written, or another has the name.
    """

    def put(blob: Any) -> None:
        blob.chunk_size = UPLOAD_BYTES
        file.seek(0)
        blob.upload_from_file(
            file,
            size=file.size_bytes,
            content_type=CONTENT_TYPE,
            if_generation_match=0,
            checksum="crc32c",
            timeout=UPLOAD_SECONDS,
            retry=_retry(gcs_client.may_send_again),
        )

    if (found := written(path, put)) is None:
        raise StorageUnavailable(f"{path}: exists already; another process may be writing there.")
    return found


def written(path: GcsPath, put: Callable[[Any], None]) -> Stat | None:
    """Returns the metadata of an object that `put` has written; None: its precondition failed."""
    from google.api_core.exceptions import PreconditionFailed

    nonce = secrets.token_hex(8)

    def attempt() -> Stat:
        blob = _blob(path)
        blob.metadata = {NONCE: nonce}
        put(blob)
        return _stat_of(blob)

    try:
        return gcs_client.with_retries(path, attempt)
    except PreconditionFailed:
        current = stat(path)
        return current if current is not None and current.nonce == nonce else None


def upload(file: Path, path: GcsPath) -> None:
    """Uploads a file of any size to a name that no object has; its checksum is compared.

    An object with the same bytes counts as uploaded.

    Raises:
      ConfigError: the name has other bytes.
      StorageUnavailable: the bucket does not respond.
    """
    from google.api_core.exceptions import PreconditionFailed

    def put() -> None:
        blob = _blob(path)
        blob.chunk_size = CHUNK_BYTES
        blob.upload_from_filename(
            str(file),
            content_type="application/octet-stream",
            if_generation_match=0,
            checksum="crc32c",
            timeout=gcs_client.TIMEOUT_SECONDS,
        )

    found = stat(path)
    if found is None:
        with contextlib.suppress(PreconditionFailed):
            gcs_client.with_retries(path, put)
        found = stat(path)
    if found is None or (found.size, found.crc32c) != (file.stat().st_size, crc32c(file)):
        raise ConfigError(f"{path}: exists already, with other content. Give another folder.")


def crc32c(file: Path) -> str:
    """Returns the checksum of a file as a bucket writes it."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode()


def set_aside(path: GcsPath, data: bytes, *, generation: int) -> GcsPath:
    """Copies one generation of a damaged object to a name beside it, for the operator."""
    aside = path.with_name(f"{path.name}.damaged-{generation}")
    write(aside, data, over=0)
    return aside


def delete(path: GcsPath) -> bool:
    """Deletes an object; False: it did not exist."""
    with _on_not_found(absent := []):
        gcs_client.with_retries(
            path, lambda: _blob(path).delete(timeout=gcs_client.TIMEOUT_SECONDS, retry=None)
        )
    return not absent


def list_names(folder: GcsPath, *, after: str = "") -> list[str]:
    """Returns the sorted names of objects and folders in a folder; [] if there are none.

    Args:
      after: names before this one are not requested.
    """
    prefix = f"{folder.key}/" if folder.key else ""

    def request() -> list[str]:
        pages = _list_pages(
            folder, prefix=prefix, delimiter="/", start_offset=prefix + after or None
        )
        names = [*(blob.name for blob in pages), *pages.prefixes]
        return sorted({name.removeprefix(prefix).rstrip("/") for name in names})

    return [name for name in gcs_client.with_retries(folder, request) if name]


def list_metadata(folder: GcsPath) -> dict[str, tuple[int, dict[str, str]]]:
    """Returns name -> generation and metadata of every object directly in a folder."""
    prefix = f"{folder.key}/"

    def request() -> dict[str, tuple[int, dict[str, str]]]:
        pages = _list_pages(folder, prefix=prefix, delimiter="/", fields=FIELDS_WITH_METADATA)
        return {
            blob.name.removeprefix(prefix): (int(blob.generation or 0), dict(blob.metadata or {}))
            for blob in pages
        }

    return gcs_client.with_retries(folder, request)


def list_sizes(folder: GcsPath) -> dict[str, int]:
    """Returns relative path -> size of every object below a folder; {} if there are none."""
    prefix = f"{folder.key}/"

    def request() -> dict[str, int]:
        pages = _list_pages(folder, prefix=prefix)
        return {blob.name.removeprefix(prefix): int(blob.size or 0) for blob in pages}

    return gcs_client.with_retries(folder, request)


def list_stats(folder: GcsPath) -> dict[str, Stat]:
    """Returns relative path -> metadata of every object below a folder, in order."""
    prefix = f"{folder.key}/" if folder.key else ""

    def request() -> dict[str, Stat]:
        pages = _list_pages(folder, prefix=prefix, fields=FIELDS_WITH_CHECKSUMS)
        return {blob.name.removeprefix(prefix): _stat_of(blob) for blob in pages}

    return {name: stat for name, stat in gcs_client.with_retries(folder, request).items() if name}


def exists(path: GcsPath) -> bool:
    """Returns whether an object or a folder has this name."""

    def request() -> bool:
        pages = _list_pages(path, prefix=f"{path.key}/", max_results=1)
        return any(True for _ in pages)

    return stat(path) is not None or gcs_client.with_retries(path, request)


def _list_pages(folder: GcsPath, **options: Any) -> Any:
    """Returns the pages of a list; each page has its own retries."""
    options = {
        "fields": FIELDS,
        "timeout": gcs_client.TIMEOUT_SECONDS,
        "retry": _retry(gcs_client.is_transient),
    } | options
    return gcs_client.client().list_blobs(folder.bucket, **options)


def _retry(predicate: Callable[[Exception], bool]) -> Any:
    """Returns the retries of one request of several that belong together."""
    from google.api_core.retry import Retry

    low, high = gcs_client.PAUSE_SECONDS
    return Retry(
        predicate=predicate,
        initial=low,
        maximum=high,
        timeout=gcs_client.RETRY_SECONDS / 2,
    )


def delete_tree(folder: GcsPath) -> None:
    """Deletes every object below a folder; a killed process leaves some of them."""
    with ThreadPoolExecutor(THREADS, "jaxres-bucket") as pool:
        list(pool.map(lambda name: delete(folder / name), list_sizes(folder)))


def read_all(paths: list[GcsPath]) -> list[bytes | None]:
    """Reads many objects, several at a time."""
    if len(paths) < 2:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(THREADS, len(paths)), "jaxres-bucket") as pool:
        return list(pool.map(read, paths))


def iter_chunks(path: GcsPath) -> Iterator[bytes] | None:
    """Returns an iterator over one generation of an object of any size; None: it does not exist.

    Raises:
      TransferCorrupted: the bytes do not match the checksum; a retry may succeed.
    """
    current = stat(path)
    return None if current is None else iter_generation(path, current)


def iter_generation(path: GcsPath, generation: Stat) -> Iterator[bytes]:
    """Yields the bytes of one generation of an object.

    Raises:
      TransferCorrupted: the bytes do not match the checksum; a retry may succeed.
      ConfigError: the object was replaced or deleted meanwhile.
    """
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for start in range(0, generation.size, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, generation.size)
        data = read_range(path, generation, start=start, stop=stop)
        checksum.update(data)
        yield data
    if base64.b64encode(checksum.digest()).decode() != generation.crc32c:
        raise TransferCorrupted(
            f"{path}: was damaged in transfer: its bytes do not match the checksum of the bucket. "
            "Nothing was judged damaged; it is read again."
        )


def read_range(path: GcsPath, generation: Stat, *, start: int, stop: int) -> bytes:
    """Returns a part of one generation of an object; the caller checks its content.

    Raises:
      ConfigError: the object was replaced or deleted meanwhile.
    """
    return gcs_client.with_retries(path, lambda: _range(path, generation, start, stop))


def _range(path: GcsPath, generation: Stat, start: int, stop: int) -> bytes:
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        return _blob(path).download_as_bytes(
            start=start,
            end=stop - 1,
            raw_download=True,
            checksum=None,
            if_generation_match=generation.generation,
            timeout=gcs_client.TIMEOUT_SECONDS,
            retry=None,
        )
    except (NotFound, PreconditionFailed) as error:
        if "bucket does not exist" in str(error):
            raise
        raise ConfigError(
            f"{path}: changed while it was read. Rerun when it no longer changes."
        ) from error


class GcsStore:
    """Implements `storage.Store` for objects of a bucket; it has no state.

    An object is durable once its upload is confirmed, so the sync methods do nothing. A bucket has
    no folders: a folder exists while an object has a name below it.
    """

    is_remote = True

    def read(self, path: GcsPath) -> bytes | None:
        """Returns the bytes of an object; None: it does not exist."""
        return read(path)

    def read_whole(self, path: GcsPath) -> bytes:
        """Returns the bytes of an object; raises FileNotFoundError if it does not exist."""
        if (data := read(path)) is None:
            raise _no_object(path)
        return data

    def read_all(self, paths: Sequence[GcsPath]) -> list[bytes | None]:
        """Reads many small objects, several at a time."""
        return read_all(list(paths))

    def exists(self, path: GcsPath) -> bool:
        """Returns whether an object or a folder has this name."""
        return exists(path)

    def file_exists(self, path: GcsPath) -> bool:
        """Returns whether an object has this name."""
        return read(path) is not None

    def is_dir(self, path: GcsPath) -> bool:
        """Returns True: every name can be a folder."""
        return True

    def create(self, path: GcsPath, data: bytes, *, mode: int = 0o666) -> bool:
        """Writes an object with the precondition that there is none; ignores `mode`."""
        return write(path, data, over=0) is not None

    def replace(self, path: GcsPath, data: bytes, *, mode: int = 0o666) -> None:
        """Writes an object over any generation; a bucket has no file permissions."""
        write(path, data, over=None)

    def move(self, path: GcsPath, to: GcsPath) -> None:
        """Copies a small object and deletes the old one; both names exist for a moment."""
        if (data := read(path)) is not None:
            write(to, data, over=None)
            delete(path)

    def delete(self, path: GcsPath) -> bool:
        """Deletes an object; False: it does not exist."""
        return delete(path)

    def delete_temporaries(self, folder: GcsPath) -> None:
        """No-op: an upload needs no temporary object."""

    def has_leftovers(self, folder: GcsPath) -> bool:
        """Returns False: nothing is left, as for delete_temporaries."""
        return False

    def delete_leftovers(self, folder: GcsPath, *, of: Collection[str] | None = None) -> None:
        """No-op, as delete_temporaries."""

    def list_names(self, folder: GcsPath, *, after: str = "") -> list[str]:
        """Returns the sorted names in `folder`, starting at `after`."""
        return [name for name in list_names(folder, after=after) if not name.startswith(".")]

    def make_dir(self, folder: GcsPath) -> None:
        """No-op."""

    def delete_tree(self, folder: GcsPath) -> None:
        """Deletes every object below `folder`; a killed process leaves some of them."""
        delete_tree(folder)

    def trash(self, folder: GcsPath) -> list[Path]:
        """Returns []: objects of a partly deleted folder keep their names."""
        return []

    def delete_trash(self, folder: GcsPath) -> None:
        """No-op."""

    def sync_dir(self, folder: GcsPath) -> None:
        """No-op."""

    def sync_tree(self, folder: GcsPath) -> None:
        """No-op."""

    def sync_file(self, path: GcsPath) -> None:
        """No-op."""

    def drop_page_cache(self, path: GcsPath) -> None:
        """No-op: every read is a request."""

    def files_below(self, folder: GcsPath) -> dict[str, int]:
        """Returns relative name -> size of every object below `folder`."""
        return list_sizes(folder)

    def sizes_of(self, folder: GcsPath, names: Collection[str]) -> dict[str, int]:
        """Lists the folder, which is one request for a thousand names."""
        return {name: size for name, size in list_sizes(folder).items() if name in names}

    def cached_files(self, folder: GcsPath) -> list[Path]:
        """Returns []: this machine caches no object."""
        return []

    def iter_chunks(self, path: GcsPath, *, size_bytes: int) -> Iterator[memoryview]:
        """Yields the bytes of one generation of an object in parts of CHUNK_BYTES."""
        if (chunks := iter_chunks(path)) is None:
            raise _no_object(path)
        yield from map(memoryview, chunks)

    def refuses_locks(self, folder: GcsPath) -> bool:
        """Returns False: writes have preconditions and need no locks."""
        return False

    def can_link(self, path: GcsPath, folder: GcsPath) -> bool:
        """Returns False: an object has one name."""
        return False

    def link(self, path: GcsPath, to: GcsPath) -> bool:
        """Returns False: an object has one name."""
        return False

    def is_same(self, path: GcsPath, other: GcsPath) -> bool:
        """Returns whether the names are equal."""
        return path == other

    def shared_bytes(self, folders: Sequence[GcsPath]) -> int:
        """Returns 0: no two names share an object."""
        return 0

    def free_bytes(self, folder: GcsPath) -> int:
        """Returns the largest number: a bucket has no limit."""
        return sys.maxsize

    def identity(self, folder: GcsPath) -> str:
        """Returns the name: an object can't be renamed."""
        return str(folder)


def _no_object(path: GcsPath) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", str(path))
