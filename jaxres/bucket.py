"""Bytes in a bucket of Google Cloud Storage, through Google's own client.

Every request has limits and is tried again for LIMIT_SECONDS. What is written counts only with the
answer to it, or once it is found there: a write whose answer was lost is known by its nonce. What
is read is held against its checksum. A bucket that does not answer is never taken for an empty one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.place import SCHEME, BucketPath

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Client

LIMIT_SECONDS = 30.0
"""Longest trying of one request before storage counts as unavailable."""
TIMEOUT_SECONDS = (5.0, 15.0)
"""Until there is a connection, and until the next bytes come."""
PAUSE_SECONDS = (0.1, 4.0)
"""Before the second try, and at most between two; times 0.5 to 1.5, lest all ask at once."""
CHUNK_BYTES = 2**24
THREADS = 16
MAX_CONNECTIONS = 48
NONCE = "jaxres-nonce"
SIZES = "items(name,size),prefixes,nextPageToken"
FACTS = "items(name,size,generation,crc32c),nextPageToken"
"""What a list is asked for."""
PASSING = {408, 429, 500, 502, 503, 504}
T = TypeVar("T")


class Denied(ConfigError):
    """The bucket refuses who asks."""


class OnItsWay(StorageUnavailable):
    """Bytes were damaged between the bucket and here."""


@dataclass(frozen=True)
class Stat:
    """What the bucket says of an object."""

    size: int
    generation: int
    crc32c: str
    nonce: str | None


_lock = threading.Lock()
_clients: dict[int, Client] = {}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns what the libraries below Orbax must find in their environment besides `env`.

    TensorStore and gcsfs have their own names for the endpoint that STORAGE_EMULATOR_HOST sets.
    """
    more = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # Else each call asks what bucket it is.
    if host := env.get("STORAGE_EMULATOR_HOST", ""):
        url = host if "://" in host else f"http://{host}"
        more |= {
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous",
            "NO_GCE_CHECK": "true",
        }
    return {name: value for name, value in more.items() if name not in env}


def _client() -> Client:
    """Returns this process's client; a forked process has none of its parent's connections."""
    with _lock:
        if (found := _clients.get(os.getpid())) is None:
            found = _clients[os.getpid()] = _connected()
        return found


def _connected() -> Client:
    try:
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud.storage import Client
        from requests.adapters import HTTPAdapter
    except ImportError as error:
        raise ConfigError(
            f"{SCHEME}...: a package is missing ({error.name}). "
            "Install it with: pip install 'jaxres[gcs]'"
        ) from error
    try:
        client = Client(project=None)
    except DefaultCredentialsError as error:
        raise Denied(
            f"{SCHEME}: there are no credentials. On a VM of Google's give it a service account; "
            "elsewhere run `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS."
        ) from error
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))
    return client


def _blob(path: BucketPath) -> Any:  # The stubs know only whole seconds, and no way not to retry.
    return _client().bucket(path.bucket).blob(path.key)


def _tried(path: BucketPath, call: Callable[[], T]) -> T:
    """Returns what a call returns, tried again while what goes wrong may pass.

    Raises:
      StorageUnavailable: it did not in LIMIT_SECONDS.
      ConfigError: the bucket is not there, or denies.
      GoogleAPICallError: 404, 412 or 416, which are answers.
    """
    clock = SystemClock()
    began, pause = clock.monotonic(), PAUSE_SECONDS[0]
    while True:
        try:
            return call()
        except Exception as error:
            if not _passes(error):
                raise _typed(error, path) from error
            wait = pause * (0.5 + secrets.randbelow(1000) / 1000)
            if clock.monotonic() + wait - began > LIMIT_SECONDS:
                raise StorageUnavailable(
                    f"{path}: the bucket has not answered for {LIMIT_SECONDS:.0f} s "
                    f"({_brief(error)}). Nothing committed is lost and nothing was judged damaged; "
                    "start the same command again when it answers."
                ) from error
        clock.sleep(wait)
        pause = min(2 * pause, PAUSE_SECONDS[1])


def _passes(error: Exception) -> bool:
    """Says whether a request may go well the next time."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    if isinstance(error, GoogleAPICallError):
        is_hurried = "rateLimitExceeded" in str(error) or "does not match" in str(error)
        return error.code in PASSING or (error.code in (400, 403) and is_hurried)
    of_google = DataCorruption | InvalidResponse | RefreshError | RetryError | TransportError
    return isinstance(
        error, of_google | RequestException | HTTPError | ConnectionError | TimeoutError
    )


def _typed(error: Exception, path: BucketPath) -> Exception:
    from google.api_core.exceptions import Forbidden, NotFound, Unauthorized

    if isinstance(error, NotFound) and "bucket does not exist" in str(error):
        return ConfigError(
            f"{path}: there is no bucket {path.bucket}. Make it, or choose another place."
        )
    if isinstance(error, Forbidden | Unauthorized):
        return Denied(
            f"{path}: can't be used ({_brief(error)}). Give this account the role Storage Object "
            "User on the bucket (Viewer, to read only), or choose another place."
        )
    return error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


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
        return _tried(
            path,
            lambda: _blob(path).download_as_bytes(
                raw_download=True, checksum="crc32c", timeout=TIMEOUT_SECONDS, retry=None
            ),
        )
    return None


def stat(path: BucketPath) -> Stat | None:
    """Returns what the bucket says of an object; None: there is none."""

    def ask() -> Stat:
        blob = _blob(path)
        blob.reload(timeout=TIMEOUT_SECONDS, retry=None)
        return _stat_of(blob)

    with _absent_is([]):
        return _tried(path, ask)
    return None


def _stat_of(blob: Blob) -> Stat:
    nonce = (blob.metadata or {}).get(NONCE)
    return Stat(int(blob.size or 0), int(blob.generation or 0), str(blob.crc32c), nonce)


def write(path: BucketPath, data: bytes, *, over: int | None) -> int | None:
    """Writes an object over a generation of it, 0: over none, None: over any.

    Returns the new generation, or None if another stands there by now. An answer that is lost hides
    a write that was done: then the try after it finds the object changed, by us.

    Raises:
      StorageUnavailable: nobody can say whether it was written, now or later.
    """
    from google.api_core.exceptions import PreconditionFailed

    nonce = secrets.token_hex(8)

    def put() -> int:
        blob = _blob(path)
        blob.metadata = {NONCE: nonce}
        blob.upload_from_string(
            data,
            content_type="application/octet-stream",
            if_generation_match=over,
            checksum="crc32c",
            timeout=TIMEOUT_SECONDS,
            retry=None,
        )
        return int(blob.generation or 0)

    try:
        return _tried(path, put)
    except PreconditionFailed:
        there = stat(path)
        return there.generation if there is not None and there.nonce == nonce else None


def delete(path: BucketPath) -> bool:
    """Deletes an object; False: there was none."""
    with _absent_is(found := []):
        _tried(path, lambda: _blob(path).delete(timeout=TIMEOUT_SECONDS, retry=None))
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

    return [name for name in _tried(folder, ask) if name]


def objects(folder: BucketPath) -> dict[str, int]:
    """Returns relative path -> size of every object below a folder; {} if there is none."""
    prefix = f"{folder.key}/"

    def ask() -> dict[str, int]:
        pages = _listed(folder, prefix=prefix)
        return {blob.name.removeprefix(prefix): int(blob.size or 0) for blob in pages}

    return _tried(folder, ask)


def listing(folder: BucketPath) -> dict[str, Stat]:
    """Returns relative path -> what the bucket says of every object below a folder, in order."""
    prefix = f"{folder.key}/" if folder.key else ""

    def ask() -> dict[str, Stat]:
        pages = _listed(folder, prefix=prefix, fields=FACTS)
        return {blob.name.removeprefix(prefix): _stat_of(blob) for blob in pages}

    return {name: stat for name, stat in _tried(folder, ask).items() if name}


def exists(path: BucketPath) -> bool:
    """Says whether there is an object of this name, or a folder."""

    def ask() -> bool:
        found = _listed(path, prefix=f"{path.key}/", max_results=1)
        return any(True for _ in found)

    return stat(path) is not None or _tried(path, ask)


def _listed(folder: BucketPath, **words: Any) -> Any:
    """Returns the pages of a list, each of which is tried again by itself."""
    from google.api_core.retry import Retry

    low, high = PAUSE_SECONDS
    retry = Retry(predicate=_passes, initial=low, maximum=high, timeout=LIMIT_SECONDS / 2)
    words = {"fields": SIZES, "timeout": TIMEOUT_SECONDS, "retry": retry} | words
    return _client().list_blobs(folder.bucket, **words)


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
        data = _tried(path, lambda start=start: _range(path, there, start))
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
            timeout=TIMEOUT_SECONDS,
            retry=None,
        )
    except (NotFound, PreconditionFailed) as error:
        if "bucket does not exist" in str(error):
            raise
        raise ConfigError(
            f"{path}: changed while it was read. Start again when it is at rest."
        ) from error
