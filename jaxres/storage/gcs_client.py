"""Google Cloud Storage client: timeouts, retries and the classification of errors.

Every request has a timeout and is retried for RETRY_SECONDS.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageRefused, StorageUnavailable
from jaxres.storage.path import SCHEME, GcsPath

if TYPE_CHECKING:
    from google.cloud.storage import Client

RETRY_SECONDS = 30.0
"""How long a request is retried before StorageUnavailable is raised."""
TIMEOUT_SECONDS = (5.0, 15.0)
"""Timeouts of connecting and of reading the next bytes."""
PAUSE_SECONDS = (0.1, 4.0)
"""First and largest pause between two tries, each times 0.5 to 1.5 so that clients spread out."""
MAX_CONNECTIONS = 48
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
T = TypeVar("T")


class PermissionDenied(StorageRefused):
    """The bucket refuses this account, or there is no account."""


class NoBucket(StorageRefused):
    """The bucket does not exist."""


PACKAGES = ("google.api_core.retry", "google.auth", "google.cloud.storage", "requests", "urllib3")
"""Packages that a bucket needs, of the extra `gcs`."""
_lock = threading.Lock()
_clients: dict[int, Client] = {}


def library_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that Orbax's libraries need in addition to `env`.

    TensorStore and gcsfs have other variables for the endpoint that STORAGE_EMULATOR_HOST sets.
    """
    added = {
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"
    }  # Otherwise each call requests the bucket type.
    if host := env.get("STORAGE_EMULATOR_HOST", ""):
        url = host if "://" in host else f"http://{host}"
        added |= {
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous",
            "NO_GCE_CHECK": "true",
        }
    return {name: value for name, value in added.items() if name not in env}


def client() -> Client:
    """Returns the client of this process; a forked process gets a new one."""
    with _lock:
        if (cached := _clients.get(os.getpid())) is None:
            cached = _clients[os.getpid()] = _connect()
        return cached


def close() -> None:
    """Closes the client of this process, if it has one; the next call connects again."""
    with _lock:
        if (cached := _clients.pop(os.getpid(), None)) is not None:
            cached.close()


def require_packages() -> None:
    """Imports the packages that a bucket needs.

    Raises:
      ConfigError: one of them is not installed.
    """
    try:
        for name in PACKAGES:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{SCHEME}...: a package is missing ({error.name}). "
            "Run `pip install -e '.[gcs]'` in the checkout of jaxres, or give its wheel as "
            "'jaxres-VERSION-py3-none-any.whl[gcs]'."
        ) from error


def _connect() -> Client:
    require_packages()
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.storage import Client
    from requests.adapters import HTTPAdapter

    try:
        client = Client(project=None)
    except DefaultCredentialsError as error:
        raise PermissionDenied(
            f"{SCHEME}: there are no credentials. Attach a service account to a Google VM; "
            "elsewhere run `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS."
        ) from error
    for scheme in ("https://", "http://"):
        client._http.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))
    return client


def with_retries(path: GcsPath, call: Callable[[], T]) -> T:
    """Returns the result of a call; retries it after transient errors.

    Raises:
      ConfigError: a package is not installed.
      StorageUnavailable: the call has not succeeded within RETRY_SECONDS.
      StorageRefused: the bucket does not exist, or denies access.
      GoogleAPICallError: 404, 412 or 416, which the caller handles.
    """
    require_packages()
    clock = SystemClock()
    began, pause = clock.monotonic(), PAUSE_SECONDS[0]
    while True:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise typed_error(error, path) from error
            wait = pause * (0.5 + secrets.randbelow(1000) / 1000)
            if clock.monotonic() + wait - began > RETRY_SECONDS:
                raise StorageUnavailable(
                    f"{path}: the bucket has not answered for {RETRY_SECONDS:.0f} s "
                    f"({_brief(error)}). Nothing committed is lost and nothing was judged "
                    "damaged; rerun the same command when the bucket answers again."
                ) from error
        clock.sleep(wait)
        pause = min(2 * pause, PAUSE_SECONDS[1])


def is_transient(error: Exception) -> bool:
    """Returns whether the same request may succeed later."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import RefreshError, TransportError
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    if isinstance(error, GoogleAPICallError):
        is_rate_limited = "rateLimitExceeded" in str(error) or "does not match" in str(error)
        return error.code in TRANSIENT_STATUS or (error.code in (400, 403) and is_rate_limited)
    google_errors = DataCorruption | InvalidResponse | RefreshError | RetryError | TransportError
    return isinstance(
        error, google_errors | RequestException | HTTPError | ConnectionError | TimeoutError
    )


def may_send_again(error: Exception) -> bool:
    """Returns whether one request of an upload may be sent again within the same upload.

    Not if the object is damaged or a precondition has failed: the upload starts again, or ends.
    """
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    if isinstance(error, InvalidResponse):
        return getattr(error.response, "status_code", 0) in TRANSIENT_STATUS
    return is_transient(error) and not isinstance(error, DataCorruption)


def typed_error(error: Exception, path: GcsPath) -> Exception:
    """Returns the StorageRefused for a missing bucket or missing rights, else the error itself."""
    from google.api_core.exceptions import Forbidden, NotFound, Unauthorized

    if isinstance(error, NotFound) and "bucket does not exist" in str(error):
        return NoBucket(
            f"{path}: there is no bucket {path.bucket}. Create it, or choose another path."
        )
    if isinstance(error, Forbidden) and "under active" in str(error):
        return StorageRefused(
            f"{path}: has a hold of Cloud Storage: it can't be deleted or replaced until `jaxres "
            "checkpoints unpin RUN_DIR --step N` removes it."
        )
    if isinstance(error, Forbidden | Unauthorized):
        return PermissionDenied(
            f"{path}: can't be used ({_brief(error)}). Give this account the role Storage Object "
            "User on the bucket (Viewer, to read only), or choose another path."
        )
    return error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
