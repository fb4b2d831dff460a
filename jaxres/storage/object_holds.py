"""Temporary holds of objects in a bucket: no account can delete or replace a held object."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from jaxres.storage import gcs_client
from jaxres.storage.path import GcsPath

THREADS = 16
FIELDS = "items(name,temporaryHold),nextPageToken"


def set_all(folder: GcsPath, *, is_held: bool) -> int:
    """Sets or removes the hold of each object below a folder; returns how many have changed."""
    client, prefix = gcs_client.client(), f"{folder.key}/"
    times = {"timeout": gcs_client.TIMEOUT_SECONDS, "retry": None}

    def different() -> list[str]:
        pages = client.list_blobs(folder.bucket, prefix=prefix, fields=FIELDS, **times)
        return [blob.name for blob in pages if bool(blob.temporary_hold) != is_held]

    def change(name: str) -> None:
        blob = client.bucket(folder.bucket).blob(name)
        blob.temporary_hold = is_held
        blob.patch(**times)

    names = gcs_client.with_retries(folder, different)
    with ThreadPoolExecutor(THREADS, "jaxres-bucket") as pool:
        list(pool.map(lambda n: gcs_client.with_retries(folder, lambda: change(n)), names))
    return len(names)
