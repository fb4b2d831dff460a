"""How Google Cloud Storage is asked: the client, limits, tries, and what an error means.

Every request has limits and is tried again for LIMIT_SECONDS.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from jaxres.clock import SystemClock
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.storage.path import SCHEME, BucketPath

if TYPE_CHECKING:
    from google.cloud.storage import Client

LIMIT_SECONDS = 30.0
"""Longest trying of one request before storage counts as unavailable."""
TIMEOUT_SECONDS = (5.0, 15.0)
"""Until there is a connection, and until the next bytes come."""
PAUSE_SECONDS = (0.1, 4.0)
"""Before the second try, and at most between two; times 0.5 to 1.5, lest all ask at once."""
MAX_CONNECTIONS = 48
PASSING = {408, 429, 500, 502, 503, 504}
T = TypeVar("T")


class Denied(ConfigError):
    """The bucket refuses who asks."""


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


def client() -> Client:
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


def tried(path: BucketPath, call: Callable[[], T]) -> T:
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
            if not passes(error):
                raise typed(error, path) from error
            wait = pause * (0.5 + secrets.randbelow(1000) / 1000)
            if clock.monotonic() + wait - began > LIMIT_SECONDS:
                raise StorageUnavailable(
                    f"{path}: the bucket has not answered for {LIMIT_SECONDS:.0f} s "
                    f"({_brief(error)}). Nothing committed is lost and nothing was judged damaged; "
                    "start the same command again when it answers."
                ) from error
        clock.sleep(wait)
        pause = min(2 * pause, PAUSE_SECONDS[1])


def passes(error: Exception) -> bool:
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


def typed(error: Exception, path: BucketPath) -> Exception:
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
