"""`launch gce init`: the bucket of a run, as it should be. Says what it would do before it does it.

Rules, holds and retention policies that are about others' objects too are never taken away: what
of them stands in a run's way is named, and refused.

A bucket itself, rather than what is in it: looked at, made, changed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxres.config import RunConfig
from jaxres.config.gce_machine_types import region_of
from jaxres.faults import ConfigError, Exit
from jaxres.storage import gcs_client
from jaxres.storage.path import SCHEME, BucketPath

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
    except gcs_client.Denied:
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
    except gcs_client.Denied as denied:
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

    return gcs_client.tried(path, ask)


def make(path: BucketPath, settings: Resource, *, project: str) -> None:
    """Makes a bucket, unless there is one by now.

    Raises:
      ConfigError: it is refused; the message names what is missing.
      StorageUnavailable: the service does not answer.
    """
    from google.api_core.exceptions import ClientError, Conflict

    body = {"name": path.bucket, **settings}
    try:
        gcs_client.tried(path, lambda: _asked("POST", "/b", {"project": project}, body))
    except Conflict as error:
        if "already own" not in str(error):  # Else an earlier try of ours whose answer was lost.
            raise ConfigError(
                f"{SCHEME}{path.bucket}: the name is taken by another project (they are unique in "
                "all the world). Choose another with run.dir=..."
            ) from error
    except (gcs_client.Denied, ClientError) as error:
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
        gcs_client.tried(path, lambda: _asked("PATCH", f"/b/{path.bucket}", query, settings))
    except PreconditionFailed as error:
        if "constraints/" not in str(error):
            return False
        raise _refused(path, error, "a policy of the organization forbids it", "") from error
    except (gcs_client.Denied, ClientError) as error:
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
    connection: Any = gcs_client.client()._connection
    return connection.api_request(
        method=method,
        path=path,
        query_params=dict(query),
        data=None if body is None else dict(body),
        timeout=gcs_client.TIMEOUT_SECONDS,
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

    said = error.__cause__ if isinstance(error, gcs_client.Denied) else error
    if not isinstance(said, GoogleAPICallError):
        return ConfigError(str(error))
    first = str(said.message).partition("\n")[0]
    words = re.sub(r"^[A-Z]+ https?:\S+: ", "", first)[:300].rstrip(". ")
    told = f"{SCHEME}{path.bucket}: {what} ({said.code}: {words})."
    return ConfigError(f"{told} {remedy}" if said.code in (401, 403) else told)


TRIES = 3
"""Looks and changes, while somebody else changes the bucket too."""
DAY_SECONDS = 86400
SOFT_DELETE_SECONDS = 7 * DAY_SECONDS
"""Of a new bucket where nobody says otherwise."""
ABORTS = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}
NEW: Resource = {
    "storageClass": "STANDARD",
    "iamConfiguration": {
        "uniformBucketLevelAccess": {"enabled": True},
        "publicAccessPrevention": "enforced",
    },
    "softDeletePolicy": {"retentionDurationSeconds": "0"},
    "lifecycle": {"rule": [ABORTS]},
}
"""Settings of a bucket that is made."""
NONCURRENT = ("numNewerVersions", "daysSinceNoncurrentTime", "noncurrentTimeBefore")
"""Conditions of a rule that no live object meets."""


@dataclass(frozen=True)
class Finding:
    """What one setting of a bucket is, and should be."""

    kind: Literal["ok", "note", "change", "danger"]
    """danger: training there would fail or lose checkpoints, and it is not for us to change."""
    words: str
    settings: Resource = field(default_factory=dict)
    """What would make it right."""


def prepare(config: RunConfig, run: BucketPath, *, does: bool) -> int:
    """Says what it would make or change, and does it if asked to.

    Raises:
      ConfigError: the bucket can't serve, or this account may not make it so.
      StorageUnavailable: the service does not answer.
    """
    assert config.launch.gce is not None, config
    gce = config.launch.gce
    regions = [region_of(zone) for rung in gce.ladder for zone in rung.zones]
    found = look(run)
    if found is None:
        _tell(run, f"there is none; it would be made in project {gce.project}:", _plan(regions[0]))
        if not does:
            return _left_alone()
        settings = {"location": regions[0].upper(), **NEW}
        make(run, settings, project=gce.project)
        found = look(run)
        if found is None:
            raise ConfigError(f"{SCHEME}{run.bucket}: was made and is not there; start this again.")
        sys.stdout.write("made\n")
    return _mend(run, found, regions, does=does)


def _mend(run: BucketPath, found: Resource, regions: Sequence[str], *, does: bool) -> int:
    """Has a bucket that is there be as it should be, if asked to; says what is not."""
    for _ in range(TRIES):
        findings = list(look_over(found, run, regions))
        told = [one for one in findings if one.kind != "danger"]
        _tell(run, "is there:", [f"{_WORDS[one.kind]}: {one.words}" for one in told])
        if dangers := [one.words for one in findings if one.kind == "danger"]:
            raise ConfigError(
                f"{SCHEME}{run.bucket}: can't serve this run; nothing was changed:\n"
                + "\n".join(f"  can't be changed: {words}" for words in dangers)
            )
        changes = [one for one in findings if one.kind == "change"]
        if not changes:
            sys.stdout.write("all is as it should be\n")
            return Exit.DONE
        if not does:
            return _left_alone()
        settings: dict[str, Any] = {}
        for finding in changes:
            settings = _joined(settings, finding.settings)
        is_done = change(run, settings, over=found)
        sys.stdout.write("changed\n" if is_done else "it was changed meanwhile; looking again\n")
        again = look(run)
        if again is None:
            raise ConfigError(f"{SCHEME}{run.bucket}: was there, and is gone; start this again.")
        found = again
    raise ConfigError(f"{SCHEME}{run.bucket}: somebody else changes it too; start this again.")


_WORDS = {"ok": "ok", "note": "ok, but", "change": "would change"}


def _tell(run: BucketPath, head: str, lines: Sequence[str]) -> None:
    sys.stdout.write(f"{SCHEME}{run.bucket}: {head}\n" + "".join(f"  {line}\n" for line in lines))


def _left_alone() -> int:
    sys.stdout.write("nothing was changed; the same command with --yes does it\n")
    return Exit.DONE


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with others put into them."""
    found = dict(old)
    for name, value in new.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = _joined(found[name], value) if both else value
    return found


def _plan(region: str) -> list[str]:
    """Returns what a new bucket would be like."""
    return [
        f"region {region}, that of the first rung of launch.gce.ladder; it can't be changed later",
        "storage class STANDARD; no object versioning",
        "hierarchical namespace off, for good: jaxres renames nothing, and pruned checkpoints "
        "would leave empty folders behind",
        "uniform access (by roles only); public access prevented",
        "soft delete off: pruned checkpoints would be billed for 7 days more at the least",
        f"one lifecycle rule, {_written(ABORTS)}; none that deletes: who prunes is jaxres",
    ]


def look_over(found: Resource, run: BucketPath, regions: Sequence[str]) -> Iterator[Finding]:
    """Yields what every setting of a bucket is and should be; pure.

    Args:
      found: the bucket as it is.
      run: the run directory in it.
      regions: of the VMs, the most wanted first.
    """
    yield _region(found, regions)
    yield _class(found)
    if found.get("hierarchicalNamespace", {}).get("enabled"):
        words = "hierarchical namespace is on (can't be changed): no gain, jaxres renames nothing; "
        yield Finding("note", words + "empty folders of pruned checkpoints stay")
    else:
        yield Finding("ok", "hierarchical namespace off")
    yield from _access(found)
    yield _soft_delete(found)
    if found.get("versioning", {}).get("enabled"):
        words = "object versioning from on to off: a pruned checkpoint stays as a version, and is "
        words += "billed for ever; for the whole bucket, and versions that are there already stay"
        yield Finding("change", words, {"versioning": {"enabled": False}})
    else:
        yield Finding("ok", "no object versioning")
    yield from _lifecycle(found, run)
    yield from _locks(found)


def _region(found: Resource, regions: Sequence[str]) -> Finding:
    place = location_of(found)
    if place.kind != "region":
        words = f"{place.kind} {place.name} (can't be changed) costs more than {regions[0]} alone"
        return Finding("note", words)
    if place.name not in regions:
        words = f"region {place.name}, while the VMs would be in {', '.join(sorted({*regions}))}: "
        words += "every checkpoint would cross regions, slowly and for money. Use another bucket"
        return Finding("danger", words)
    others = sorted({*regions} - {place.name})
    if others:
        words = f"region {place.name} (can't be changed): VMs in {', '.join(others)} pay for egress"
        return Finding("note", words)
    return Finding("ok", f"region {place.name}")


def _class(found: Resource) -> Finding:
    name = found.get("storageClass", "STANDARD")
    if name == "STANDARD":
        return Finding("ok", "storage class STANDARD")
    words = f"storage class of new objects from {name} to STANDARD: {name} bills what is deleted "
    return Finding("change", words + "early as if it were there", {"storageClass": "STANDARD"})


def _access(found: Resource) -> Iterator[Finding]:
    access = found.get("iamConfiguration", {})
    if access.get("uniformBucketLevelAccess", {}).get("enabled"):
        yield Finding("ok", "uniform access")
    else:
        words = "uniform access from off to on: only roles count then, whoever has access by an "
        words += "object's own list alone loses it, and after 90 days it is for good"
        settings = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
        yield Finding("change", words, settings)
    if access.get("publicAccessPrevention") == "enforced":
        yield Finding("ok", "public access prevented")
    else:
        words = "public access prevention from inherited to enforced: whatever is public in the "
        words += "bucket is so no more"
        settings = {"iamConfiguration": {"publicAccessPrevention": "enforced"}}
        yield Finding("change", words, settings)


def _soft_delete(found: Resource) -> Finding:
    policy = found.get("softDeletePolicy", {})
    seconds = int(policy.get("retentionDurationSeconds", SOFT_DELETE_SECONDS))
    if not seconds:
        return Finding("ok", "soft delete off")
    words = f"soft delete from {seconds / DAY_SECONDS:g} days to off, for the whole bucket: pruned "
    words += "checkpoints are billed for so long; what is deleted from now on is gone at once"
    return Finding("change", words, {"softDeletePolicy": {"retentionDurationSeconds": "0"}})


def _lifecycle(found: Resource, run: BucketPath) -> Iterator[Finding]:
    rules = list(found.get("lifecycle", {}).get("rule", ()))
    kept, changes = [], []
    for rule in rules:
        ours, others = _reach(rule, run)
        action = rule["action"]["type"]
        if others:
            does = "deletes" if action == "Delete" else "moves"
            words = (
                f"the lifecycle rule {_written(rule)} {does} checkpoints of {run}, and is about "
            )
            words += "other objects too: only you can know whether it may go. Have its "
            words += "matchesPrefix name what it is for, or use a bucket without it"
            yield Finding("danger" if action == "Delete" else "note", words)
        rest = _without(rule, ours) if ours and not others else rule
        if rest is not None:
            kept.append(rest)
        if rest is not rule:
            becomes = "nothing" if rest is None else _written(rest)
            changes.append(f"the lifecycle rule {_written(rule)} to {becomes}: it is about {run}")
    if not any(_aborts(rule) for rule in rules):
        kept.append(ABORTS)
        changes.append(f"lifecycle: one more rule, {_written(ABORTS)}")
    for words in changes:
        yield Finding("change", words, {"lifecycle": {"rule": kept}})
    if not changes:
        yield Finding("ok", "lifecycle: unfinished uploads are ended")


def _reach(rule: Mapping[str, Any], run: BucketPath) -> tuple[list[str], bool]:
    """Returns the prefixes of a rule that mean this run alone, and whether others mean it too."""
    condition = rule.get("condition", {})
    is_harmless = rule["action"]["type"] not in ("Delete", "SetStorageClass")
    if is_harmless or condition.get("isLive") is False or any(n in condition for n in NONCURRENT):
        return [], False
    folder = f"{run.key}/"
    prefixes = condition.get("matchesPrefix") or [""]
    ours = [prefix for prefix in prefixes if prefix.startswith(folder)]
    return ours, any(folder.startswith(prefix) for prefix in prefixes if prefix not in ours)


def _without(rule: Mapping[str, Any], prefixes: Sequence[str]) -> Mapping[str, Any] | None:
    """Returns a rule that is about these no more; None: it would be about nothing."""
    condition = rule["condition"]
    rest = [prefix for prefix in condition["matchesPrefix"] if prefix not in prefixes]
    return {**rule, "condition": {**condition, "matchesPrefix": rest}} if rest else None


def _aborts(rule: Mapping[str, Any]) -> bool:
    """Says whether a rule ends unfinished uploads of all names."""
    return rule["action"]["type"] == ABORTS["action"]["type"] and not (
        rule.get("condition", {}).get("matchesPrefix")
        or rule.get("condition", {}).get("matchesSuffix")
    )


def _locks(found: Resource) -> Iterator[Finding]:
    """Yields what would have every deletion and every overwriting refused."""
    update = f"`gcloud storage buckets update {SCHEME}{found['name']}"
    if policy := found.get("retentionPolicy"):
        days = int(policy["retentionPeriod"]) / DAY_SECONDS
        words = f"a retention policy of {days:g} days: nothing can be deleted or written again "
        remedy = f"{update} --clear-retention-period` takes it away, if that is right"
        if policy.get("isLocked"):
            remedy = "it is locked, so use another bucket"
        yield Finding("danger", words + f"before (403), and a run needs both; {remedy}")
    if found.get("defaultEventBasedHold"):
        words = "a default event-based hold: no object can be deleted or written again (403); "
        words += f"{update} --no-default-event-based-hold` takes it away, if that is right"
        yield Finding("danger", words)
    if found.get("billing", {}).get("requesterPays"):
        words = "requester pays: jaxres names no project to bill with its requests (400); "
        words += f"{update} --no-requester-pays` turns it off, if that is right"
        yield Finding("danger", words)


def _written(rule: Mapping[str, Any]) -> str:
    return json.dumps(rule, sort_keys=True)
