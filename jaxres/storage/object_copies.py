"""Copies an object within its bucket by the service itself: its bytes do not come to this host."""

from __future__ import annotations

from typing import Any

from jaxres.faults import StorageUnavailable
from jaxres.storage import gcs_client, gcs_objects
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.path import GcsPath

MAX_REQUESTS = 1000
"""Most requests of a copy; within a bucket the service needs one, whatever the size."""


def copy(path: GcsPath, source: Stat, to: GcsPath) -> Stat | None:
    """Copies one generation of an object to a name that no object has; returns the new metadata.

    None: that generation is gone.

    Raises:
      StorageUnavailable: another object has the name, or the bucket does not answer.
    """
    from google.api_core.exceptions import NotFound

    origin = gcs_client.client().bucket(path.bucket).blob(path.key, generation=source.generation)

    def rewrite(blob: Any) -> None:
        blob.content_type = gcs_objects.CONTENT_TYPE
        token: str | None = None
        for _ in range(MAX_REQUESTS):
            token, _, _ = blob.rewrite(
                origin,
                token=token,
                if_generation_match=0,
                timeout=gcs_objects.UPLOAD_SECONDS,
                retry=None,
            )
            if token is None:
                return
        raise StorageUnavailable(f"{to}: the bucket does not complete the copy of {path}.")

    try:
        written = gcs_objects.written(to, rewrite)
    except NotFound:
        return None
    if written is None:
        raise StorageUnavailable(f"{to}: exists already; another process may be writing there.")
    return written
