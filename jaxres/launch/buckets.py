"""A bucket itself, rather than what is in it: looked at, made, changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxres import gcs
from jaxres.faults import ConfigError
from jaxres.place import SCHEME, BucketPath

Resource = Mapping[str, Any]
"""A bucket, or settings of one, as the JSON API writes them."""


@dataclass(frozen=True)
class Location:
    """Where a bucket is."""

    name: str
    """Such as us-central1, in small letters."""
    kind: str
    """region, dual-region or multi-region."""


def location_of(found: Resource) -> Location:
    """Returns where a bucket is."""
    name = str(found.get("location", "")).lower()
    return Location(name, str(found.get("locationType", "region")))


def location(path: BucketPath) -> Location | None:
    """Returns where a bucket is; None: this account may not see that.

    Raises:
      ConfigError: there is no such bucket.
    """
    try:
        found = _looked(path)
    except gcs.Denied:
        return None
    if found is None:
        raise ConfigError(
            f"{path}: there is no bucket {path.bucket}. `launch gce init` makes one; or choose "
            "another place with run.dir=..."
        )
    return location_of(found)


def look(path: BucketPath) -> Resource | None:
    """Returns the settings of a bucket; None: there is none.

    Raises:
      ConfigError: this account may not look at it.
      StorageUnavailable: the service does not answer.
    """
    try:
        return _looked(path)
    except gcs.Denied as denied:
        raise _refused(
            path,
            denied,
            "it can't be looked at",
            "The name may be taken by another project (they are unique in all the world: choose "
            "another); if the bucket is yours, this account needs storage.buckets.get, as in the "
            "role Storage Admin on it.",
        ) from denied


def _looked(path: BucketPath) -> Resource | None:
    from google.api_core.exceptions import NotFound

    def ask() -> Resource | None:
        try:
            return _asked("GET", f"/b/{path.bucket}", {"projection": "noAcl"}, None)
        except NotFound:
            return None

    return gcs.tried(path, ask)


def make(path: BucketPath, settings: Resource, *, project: str) -> None:
    """Makes a bucket, unless there is one by now.

    Raises:
      ConfigError: it is refused; the message names what is missing.
      StorageUnavailable: the service does not answer.
    """
    from google.api_core.exceptions import ClientError, Conflict

    body = {"name": path.bucket, **settings}
    try:
        gcs.tried(path, lambda: _asked("POST", "/b", {"project": project}, body))
    except Conflict as error:
        if "already own" not in str(error):  # Else an earlier try of ours whose answer was lost.
            raise ConfigError(
                f"{SCHEME}{path.bucket}: the name is taken by another project (they are unique in "
                "all the world). Choose another with run.dir=..."
            ) from error
    except (gcs.Denied, ClientError) as error:
        raise _refused(
            path,
            error,
            f"it can't be made in project {project}",
            "This account needs storage.buckets.create there, as in the role Storage Admin on the "
            "project; or have somebody make the bucket, and start this again.",
        ) from error


def change(path: BucketPath, settings: Resource, *, over: Resource) -> bool:
    """Changes settings, all or none; False: somebody has changed the bucket since it was seen.

    Raises:
      ConfigError: it is refused; the message names what is missing.
      StorageUnavailable: the service does not answer.
    """
    from google.api_core.exceptions import ClientError, PreconditionFailed

    query = {"projection": "noAcl", "ifMetagenerationMatch": str(over["metageneration"])}
    try:
        gcs.tried(path, lambda: _asked("PATCH", f"/b/{path.bucket}", query, settings))
    except PreconditionFailed as error:
        if "constraints/" not in str(error):
            return False
        raise _refused(path, error, "a policy of the organization forbids it", "") from error
    except (gcs.Denied, ClientError) as error:
        raise _refused(
            path,
            error,
            "it can't be changed; nothing was",
            "This account needs storage.buckets.update, and storage.buckets.setIamPolicy for "
            "public access prevention, as in the role Storage Admin on the bucket.",
        ) from error
    return True


def _asked(method: str, path: str, query: Mapping[str, str], body: Resource | None) -> Resource:
    """Asks once, as JSON: the client's own words for a bucket know only some of its settings."""
    connection: Any = gcs.client()._connection
    return connection.api_request(
        method=method,
        path=path,
        query_params=dict(query),
        data=None if body is None else dict(body),
        timeout=gcs.TIMEOUT_SECONDS,
        retry=None,
    )


def _refused(path: BucketPath, error: Exception, what: str, remedy: str) -> ConfigError:
    """Returns the one message of a refusal; one for want of credentials has its own.

    Args:
      path: in the bucket.
      error: what was answered.
      what: can't be done.
      remedy: where it was for want of a right.
    """
    from google.api_core.exceptions import GoogleAPICallError

    said = error.__cause__ if isinstance(error, gcs.Denied) else error
    if not isinstance(said, GoogleAPICallError):
        return ConfigError(str(error))
    first = str(said.message).partition("\n")[0]
    words = re.sub(r"^[A-Z]+ https?:\S+: ", "", first)[:300].rstrip(". ")
    told = f"{SCHEME}{path.bucket}: {what} ({said.code}: {words})."
    return ConfigError(f"{told} {remedy}" if said.code in (401, 403) else told)
