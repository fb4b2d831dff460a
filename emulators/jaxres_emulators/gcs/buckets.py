"""Buckets: creation, queries and changes, with the errors of the real service.

Where a comment says "words not known" the real text was never seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxres_emulators.gcs.objects import GcsError, Objects, stamp

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*[a-z0-9]")
MULTI = ("ASIA", "EU", "US")
REGION = re.compile(r"[A-Z]+-[A-Z]+[0-9]+")
DAY = 86400
SOFT_DAYS = (7, 90)
"""Inclusive minimum and exclusive maximum, or None."""
FIXED = ("location", "locationType", "hierarchicalNamespace", "name", "id")
DEFAULTS: Mapping[str, Any] = {
    "location": "US",
    "locationType": "multi-region",
    "storageClass": "STANDARD",
    "metageneration": "1",
    "iamConfiguration": {
        "uniformBucketLevelAccess": {"enabled": False},
        "publicAccessPrevention": "inherited",
    },
    "softDeletePolicy": {"retentionDurationSeconds": "604800"},
}


class Buckets:
    """State of the buckets, without their objects."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.permissions: Counter[str] = Counter()
        """Permissions that the requests needed."""
        self.denied: set[str] = set()
        """Permissions denied to the caller."""
        self.taken: set[str] = set()
        """Names of other projects' buckets."""
        self.projects: dict[str, str] = {}
        """Bucket -> its project."""

    def resource(self, name: str) -> dict[str, Any]:
        reported = {"kind": "storage#bucket", "id": name, "name": name, "timeCreated": stamp()}
        return reported | merged(DEFAULTS, self._objects.facts.get(name, {}))

    def answer(
        self, method: str, name: str | None, query: Mapping[str, str], body: dict[str, Any]
    ) -> dict[str, Any]:
        with self._objects.lock:
            if name is None:
                if method == "POST":
                    return self._insert(query, body)
                return {"kind": "storage#buckets", "items": []}
            self._need("storage.buckets.get" if method == "GET" else "storage.buckets.update", name)
            self._objects.refuse_unknown(name)
            match method:
                case "GET":
                    return self.resource(name)
                case "PATCH":
                    return self._change(name, query, body)
            raise GcsError(405, "methodNotAllowed", method)

    def _need(self, permission: str, name: str, *, what: str = "Storage bucket") -> None:
        self.permissions[permission] += 1
        if permission in self.denied or name in self.taken:
            raise GcsError(
                403,
                "forbidden",
                f"me@example.com does not have {permission} access to the Google Cloud {what}. "
                f"Permission '{permission}' denied on resource (or it may not exist).",
            )

    def _insert(self, query: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        name = body["name"]
        if "project" not in query:
            raise GcsError(400, "required", "Required parameter: project")
        most = 222 if "." in name else 63
        if not (NAME.fullmatch(name) and 3 <= len(name) <= most) or "goog" in name:
            raise GcsError(400, "invalid", f"Invalid bucket name: '{name}'")
        if name in self.taken:
            why = "The requested bucket name is not available. The bucket namespace is shared by "
            why += "all users of the system. Please select a different name and try again."
            raise GcsError(409, "conflict", why)
        self._need("storage.buckets.create", "", what="project")
        if name in self._objects.buckets:
            why = "Your previous request to create the named bucket succeeded and you already own "
            raise GcsError(409, "conflict", why + "it.")
        location = str(body.get("location", "US")).upper()
        if location not in MULTI and not REGION.fullmatch(location):
            raise GcsError(400, "invalid", "The specified location constraint is not valid.")
        kind = "multi-region" if location in MULTI else "region"
        fields = {**body, "location": location, "locationType": kind, "metageneration": "1"}
        _refuse_unfit(merged(DEFAULTS, fields))
        self._objects.buckets[name] = []
        self._objects.facts[name] = fields
        self.projects[name] = query["project"]
        return self.resource(name)

    def _change(self, name: str, query: Mapping[str, str], body: dict[str, Any]) -> dict[str, Any]:
        if "publicAccessPrevention" in body.get("iamConfiguration", {}):
            self._need("storage.buckets.setIamPolicy", name)
        before = self.resource(name)
        wanted = query.get("ifMetagenerationMatch")
        if wanted is not None and wanted != before["metageneration"]:
            raise GcsError(412, "conditionNotMet", "At least one of the pre-conditions failed.")
        after = merged(before, body)
        for field in FIXED:  # Words not known.
            if after.get(field) != before.get(field):
                raise GcsError(400, "invalid", f"{field} can't be changed")
        _refuse_unfit(after)
        number = str(int(before["metageneration"]) + 1)
        self._objects.facts[name] = after | {"metageneration": number}
        return self.resource(name)


def _refuse_unfit(fields: Mapping[str, Any]) -> None:
    seconds = int(fields["softDeletePolicy"]["retentionDurationSeconds"])
    least, below = SOFT_DAYS
    if seconds and not least * DAY <= seconds < below * DAY:  # Words not known.
        raise GcsError(400, "invalid", "retentionDurationSeconds must be 0, or 7 to 90 days")
    is_uniform = fields["iamConfiguration"]["uniformBucketLevelAccess"]["enabled"]
    if fields.get("hierarchicalNamespace", {}).get("enabled") and not is_uniform:
        why = "Hierarchical namespace requires uniform bucket-level access."  # Words not known.
        raise GcsError(400, "invalid", why)
    if fields["iamConfiguration"]["publicAccessPrevention"] not in ("inherited", "enforced"):
        raise GcsError(400, "invalid", "Invalid argument.")


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of a PATCH: merges objects, replaces lists; null removes."""
    found = dict(old)
    for name, value in new.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}
