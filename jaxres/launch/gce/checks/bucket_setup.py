"""`launch gce init`: creates the bucket of a run or corrects its settings, after printing a plan.

Rules, holds and retention policies that affect other objects too are never removed: those that
prevent the run are printed and refused.
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
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.storage import gcs_client
from jaxres.storage.path import SCHEME, GcsPath

Resource = Mapping[str, Any]
"""A bucket or some of its settings, as the JSON API writes them."""


@dataclass(frozen=True)
class Location:
    """Location of a bucket."""

    name: str
    """Lower-case name, such as us-central1."""
    kind: str
    """region, dual-region or multi-region."""


def location_of(found: Resource) -> Location:
    """Returns the location in a bucket's settings."""
    name = str(found.get("location", "")).lower()
    return Location(name, str(found.get("locationType", "region")))


def location(path: GcsPath) -> Location | None:
    """Returns the location of a bucket; None: this account may not read it.

    Raises:
      ConfigError: there is no such bucket.
    """
    try:
        found = _get_bucket(path)
    except gcs_client.PermissionDenied:
        return None
    if found is None:
        raise ConfigError(
            f"{path}: there is no bucket {path.bucket}. `launch gce init` creates one; or choose "
            "another one with run.dir=..."
        )
    return location_of(found)


def get_bucket(path: GcsPath) -> Resource | None:
    """Returns the settings of a bucket; None: there is none.

    Raises:
      ConfigError: this account may not read them.
      StorageUnavailable: the service does not answer.
    """
    try:
        return _get_bucket(path)
    except gcs_client.PermissionDenied as denied:
        raise _refused(
            path,
            denied,
            "its settings can't be read",
            "The name may be taken by another project (names are globally unique: choose "
            "another); if the bucket is yours, this account needs storage.buckets.get, as in the "
            "role Storage Admin on it.",
        ) from denied


def _get_bucket(path: GcsPath) -> Resource | None:
    from google.api_core.exceptions import NotFound

    def ask() -> Resource | None:
        try:
            return _request("GET", f"/b/{path.bucket}", {"projection": "noAcl"}, None)
        except NotFound:
            return None

    return gcs_client.with_retries(path, ask)


def create_bucket(path: GcsPath, settings: Resource, *, project: str) -> None:
    """Creates a bucket unless it exists.

    Raises:
      ConfigError: it is refused; the message names the missing permission.
      StorageUnavailable: the service does not answer.
    """
    from google.api_core.exceptions import ClientError, Conflict

    body = {"name": path.bucket, **settings}
    try:
        gcs_client.with_retries(path, lambda: _request("POST", "/b", {"project": project}, body))
    except Conflict as error:
        if "already own" not in str(error):  # Else the response to an earlier try was lost.
            raise ConfigError(
                f"{SCHEME}{path.bucket}: the name is taken by another project (names are globally "
                "unique). Choose another with run.dir=..."
            ) from error
    except (gcs_client.PermissionDenied, ClientError) as error:
        raise _refused(
            path,
            error,
            f"it can't be created in project {project}",
            "This account needs storage.buckets.create there, as in the role Storage Admin on the "
            "project; or let an administrator create the bucket, and rerun this command.",
        ) from error


def patch_bucket(path: GcsPath, settings: Resource, *, over: Resource) -> bool:
    """Changes settings, all or none; False: the bucket was changed since it was read.

    Raises:
      ConfigError: it is refused; the message names the missing permission.
      StorageUnavailable: the service does not answer.
    """
    from google.api_core.exceptions import ClientError, PreconditionFailed

    query = {"projection": "noAcl", "ifMetagenerationMatch": str(over["metageneration"])}
    try:
        gcs_client.with_retries(
            path, lambda: _request("PATCH", f"/b/{path.bucket}", query, settings)
        )
    except PreconditionFailed as error:
        if "constraints/" not in str(error):
            return False
        raise _refused(path, error, "a policy of the organization forbids it", "") from error
    except (gcs_client.PermissionDenied, ClientError) as error:
        raise _refused(
            path,
            error,
            "it can't be changed; nothing was changed",
            "This account needs storage.buckets.update, and storage.buckets.setIamPolicy for "
            "public access prevention, as in the role Storage Admin on the bucket.",
        ) from error
    return True


def _request(method: str, path: str, query: Mapping[str, str], body: Resource | None) -> Resource:
    """Sends one request as JSON: the client's own bucket class lacks some of the settings."""
    connection: Any = gcs_client.client()._connection
    return connection.api_request(
        method=method,
        path=path,
        query_params=dict(query),
        data=None if body is None else dict(body),
        timeout=gcs_client.TIMEOUT_SECONDS,
        retry=None,
    )


def _refused(path: GcsPath, error: Exception, what: str, remedy: str) -> ConfigError:
    """Returns the error for a refused request; missing credentials have their own message.

    Args:
      path: in the bucket.
      error: the response.
      what: the failed action.
    """
    from google.api_core.exceptions import GoogleAPICallError

    cause = error.__cause__ if isinstance(error, gcs_client.PermissionDenied) else error
    if not isinstance(cause, GoogleAPICallError):
        return ConfigError(str(error))
    first = str(cause.message).partition("\n")[0]
    detail = re.sub(r"^[A-Z]+ https?:\S+: ", "", first)[:300].rstrip(". ")
    message = f"{SCHEME}{path.bucket}: {what} ({cause.code}: {detail})."
    return ConfigError(f"{message} {remedy}" if cause.code in (401, 403) else message)


TRIES = 3
"""Number of reads and changes if the bucket is changed by others at the same time."""
DAY_SECONDS = 86400
SOFT_DELETE_SECONDS = 7 * DAY_SECONDS
"""Soft delete of a new bucket by default."""
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
"""Settings of a new bucket."""
NONCURRENT = ("numNewerVersions", "daysSinceNoncurrentTime", "noncurrentTimeBefore")
"""Conditions of a lifecycle rule that no live object meets."""


@dataclass(frozen=True)
class BucketFinding:
    """Result of checking one setting of a bucket."""

    kind: Literal["ok", "note", "change", "danger"]
    """danger: a run would fail or lose checkpoints, and jaxres must not change the setting."""
    text: str
    settings: Resource = field(default_factory=dict)
    """Settings that correct it."""


def init_bucket(config: RunConfig, run: GcsPath, *, does: bool) -> int:
    """Prints the creations or changes that a bucket needs; makes them if `does`.

    Raises:
      ConfigError: the bucket is unsuitable, or this account may not correct it.
      StorageUnavailable: the service does not answer.
    """
    assert config.launch.gce is not None, config
    gce = config.launch.gce
    regions = [region_of(zone) for option in gce.capacity_options for zone in option.zones]
    found = get_bucket(run)
    if found is None:
        _print(
            run, f"does not exist; it would be created in project {gce.project}:", _plan(regions[0])
        )
        if not does:
            return _nothing_changed()
        settings = {"location": regions[0].upper(), **NEW}
        create_bucket(run, settings, project=gce.project)
        found = get_bucket(run)
        if found is None:
            raise ConfigError(
                f"{SCHEME}{run.bucket}: was created but is missing; rerun this command."
            )
        sys.stdout.write("created\n")
    return _update_bucket(run, found, regions, does=does)


def _update_bucket(run: GcsPath, found: Resource, regions: Sequence[str], *, does: bool) -> int:
    """Corrects the settings of a bucket if `does`, and prints settings that can't be corrected."""
    for _ in range(TRIES):
        findings = list(check_settings(found, run, regions))
        shown = [finding for finding in findings if finding.kind != "danger"]
        _print(run, "exists:", [f"{_LABELS[finding.kind]}: {finding.text}" for finding in shown])
        if dangers := [finding.text for finding in findings if finding.kind == "danger"]:
            raise ConfigError(
                f"{SCHEME}{run.bucket}: can't serve this run; nothing was changed:\n"
                + "\n".join(f"  can't be changed: {danger}" for danger in dangers)
            )
        changes = [finding for finding in findings if finding.kind == "change"]
        if not changes:
            sys.stdout.write("all settings are correct\n")
            return ExitCode.DONE
        if not does:
            return _nothing_changed()
        settings: dict[str, Any] = {}
        for finding in changes:
            settings = _merged(settings, finding.settings)
        is_done = patch_bucket(run, settings, over=found)
        sys.stdout.write("changed\n" if is_done else "it was changed meanwhile; checking again\n")
        again = get_bucket(run)
        if again is None:
            raise ConfigError(f"{SCHEME}{run.bucket}: was deleted meanwhile; rerun this command.")
        found = again
    raise ConfigError(f"{SCHEME}{run.bucket}: is changed by others too; rerun this command.")


_LABELS = {"ok": "ok", "note": "ok, but", "change": "would change"}


def _print(run: GcsPath, head: str, lines: Sequence[str]) -> None:
    sys.stdout.write(f"{SCHEME}{run.bucket}: {head}\n" + "".join(f"  {line}\n" for line in lines))


def _nothing_changed() -> int:
    sys.stdout.write("nothing was changed; rerun the same command with --yes to do so\n")
    return ExitCode.DONE


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings updated recursively with others."""
    found = dict(old)
    for name, value in new.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = _merged(found[name], value) if both else value
    return found


def _plan(region: str) -> list[str]:
    """Returns the description of a new bucket."""
    return [
        f"region {region}, that of the first of launch.gce.capacity_options; it can't change later",
        "storage class STANDARD; no object versioning",
        "hierarchical namespace off, permanently: jaxres renames nothing, and pruned checkpoints "
        "would leave empty folders behind",
        "uniform access (by roles only); public access prevented",
        "soft delete off: pruned checkpoints would be billed for at least 7 more days",
        f"one lifecycle rule, {_as_json(ABORTS)}; none that deletes: jaxres itself prunes",
    ]


def check_settings(
    found: Resource, run: GcsPath, regions: Sequence[str]
) -> Iterator[BucketFinding]:
    """Yields a finding for every setting of a bucket; pure.

    Args:
      run: the run directory in it.
      regions: regions of the VMs, the preferred one first.
    """
    yield _region(found, regions)
    yield _class(found)
    if found.get("hierarchicalNamespace", {}).get("enabled"):
        text = "hierarchical namespace is on (can't be changed): no gain, jaxres renames nothing; "
        yield BucketFinding("note", text + "empty folders of pruned checkpoints stay")
    else:
        yield BucketFinding("ok", "hierarchical namespace off")
    yield from _access(found)
    yield _soft_delete(found)
    if found.get("versioning", {}).get("enabled"):
        text = "object versioning from on to off: a pruned checkpoint stays as a version and is "
        text += "billed forever; for the whole bucket, and existing versions stay"
        yield BucketFinding("change", text, {"versioning": {"enabled": False}})
    else:
        yield BucketFinding("ok", "no object versioning")
    yield from _lifecycle(found, run)
    yield from _locks(found)


def _region(found: Resource, regions: Sequence[str]) -> BucketFinding:
    place = location_of(found)
    if place.kind != "region":
        text = f"{place.kind} {place.name} (can't be changed) costs more than {regions[0]} alone"
        return BucketFinding("note", text)
    if place.name not in regions:
        text = f"region {place.name}, while the VMs would be in {', '.join(sorted({*regions}))}: "
        text += "every checkpoint would cross regions, slowly and at a cost. Use another bucket"
        return BucketFinding("danger", text)
    others = sorted({*regions} - {place.name})
    if others:
        text = f"region {place.name} (can't be changed): VMs in {', '.join(others)} pay for egress"
        return BucketFinding("note", text)
    return BucketFinding("ok", f"region {place.name}")


def _class(found: Resource) -> BucketFinding:
    name = found.get("storageClass", "STANDARD")
    if name == "STANDARD":
        return BucketFinding("ok", "storage class STANDARD")
    text = f"storage class of new objects from {name} to STANDARD: {name} bills objects deleted "
    return BucketFinding("change", text + "early as if they existed", {"storageClass": "STANDARD"})


def _access(found: Resource) -> Iterator[BucketFinding]:
    access = found.get("iamConfiguration", {})
    if access.get("uniformBucketLevelAccess", {}).get("enabled"):
        yield BucketFinding("ok", "uniform access")
    else:
        text = "uniform access from off to on: only roles apply then, access by an object's own "
        text += "list ends, and after 90 days the change is permanent"
        settings = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
        yield BucketFinding("change", text, settings)
    if access.get("publicAccessPrevention") == "enforced":
        yield BucketFinding("ok", "public access prevented")
    else:
        text = "public access prevention from inherited to enforced: public objects in the "
        text += "bucket become private"
        settings = {"iamConfiguration": {"publicAccessPrevention": "enforced"}}
        yield BucketFinding("change", text, settings)


def _soft_delete(found: Resource) -> BucketFinding:
    policy = found.get("softDeletePolicy", {})
    seconds = int(policy.get("retentionDurationSeconds", SOFT_DELETE_SECONDS))
    if not seconds:
        return BucketFinding("ok", "soft delete off")
    text = f"soft delete from {seconds / DAY_SECONDS:g} days to off, for the whole bucket: pruned "
    text += "checkpoints are billed that long; objects deleted from now on can't be restored"
    return BucketFinding("change", text, {"softDeletePolicy": {"retentionDurationSeconds": "0"}})


def _lifecycle(found: Resource, run: GcsPath) -> Iterator[BucketFinding]:
    rules = list(found.get("lifecycle", {}).get("rule", ()))
    kept, changes = [], []
    for rule in rules:
        ours, others = _prefixes_of_run(rule, run)
        action = rule["action"]["type"]
        if others:
            does = "deletes" if action == "Delete" else "moves"
            text = (
                f"the lifecycle rule {_as_json(rule)} {does} checkpoints of {run}, and applies to "
            )
            text += "other objects too: only you can know whether it may be removed. Limit its "
            text += "matchesPrefix to those objects, or use a bucket without it"
            yield BucketFinding("danger" if action == "Delete" else "note", text)
        rest = _rule_without(rule, ours) if ours and not others else rule
        if rest is not None:
            kept.append(rest)
        if rest is not rule:
            becomes = "nothing" if rest is None else _as_json(rest)
            changes.append(f"the lifecycle rule {_as_json(rule)} to {becomes}: it applies to {run}")
    if not any(_aborts(rule) for rule in rules):
        kept.append(ABORTS)
        changes.append(f"lifecycle: one more rule, {_as_json(ABORTS)}")
    for text in changes:
        yield BucketFinding("change", text, {"lifecycle": {"rule": kept}})
    if not changes:
        yield BucketFinding("ok", "lifecycle: unfinished uploads are aborted")


def _prefixes_of_run(rule: Mapping[str, Any], run: GcsPath) -> tuple[list[str], bool]:
    """Returns a rule's prefixes within this run, and whether a wider one matches the run too."""
    condition = rule.get("condition", {})
    is_harmless = rule["action"]["type"] not in ("Delete", "SetStorageClass")
    if is_harmless or condition.get("isLive") is False or any(n in condition for n in NONCURRENT):
        return [], False
    folder = f"{run.key}/"
    prefixes = condition.get("matchesPrefix") or [""]
    ours = [prefix for prefix in prefixes if prefix.startswith(folder)]
    return ours, any(folder.startswith(prefix) for prefix in prefixes if prefix not in ours)


def _rule_without(rule: Mapping[str, Any], prefixes: Sequence[str]) -> Mapping[str, Any] | None:
    """Returns a rule without these prefixes; None: no prefix is left."""
    condition = rule["condition"]
    rest = [prefix for prefix in condition["matchesPrefix"] if prefix not in prefixes]
    return {**rule, "condition": {**condition, "matchesPrefix": rest}} if rest else None


def _aborts(rule: Mapping[str, Any]) -> bool:
    """Returns whether a rule aborts unfinished uploads of all names."""
    return rule["action"]["type"] == ABORTS["action"]["type"] and not (
        rule.get("condition", {}).get("matchesPrefix")
        or rule.get("condition", {}).get("matchesSuffix")
    )


def _locks(found: Resource) -> Iterator[BucketFinding]:
    """Yields settings that make every deletion and overwrite fail."""
    update = f"`gcloud storage buckets update {SCHEME}{found['name']}"
    if policy := found.get("retentionPolicy"):
        days = int(policy["retentionPeriod"]) / DAY_SECONDS
        text = f"a retention policy of {days:g} days: nothing can be deleted or overwritten "
        remedy = f"{update} --clear-retention-period` removes it, if that is right"
        if policy.get("isLocked"):
            remedy = "it is locked, so use another bucket"
        yield BucketFinding("danger", text + f"before (403), and a run needs both; {remedy}")
    if found.get("defaultEventBasedHold"):
        text = "a default event-based hold: no object can be deleted or overwritten (403); "
        text += f"{update} --no-default-event-based-hold` removes it, if that is right"
        yield BucketFinding("danger", text)
    if found.get("billing", {}).get("requesterPays"):
        text = "requester pays: jaxres names no project to bill with its requests (400); "
        text += f"{update} --no-requester-pays` turns it off, if that is right"
        yield BucketFinding("danger", text)


def _as_json(rule: Mapping[str, Any]) -> str:
    return json.dumps(rule, sort_keys=True)
