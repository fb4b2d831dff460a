"""Promises of `launch gce init`: it prints its plan, acts with --yes, and keeps others' rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.launch.gce import command as gce
from jaxres.storage import gcs_client
from jaxres_emulators.gcs import GcsServer

Init = Callable[..., str]
KEEPS = {"action": {"type": "Delete"}, "condition": {"age": 30, "numNewerVersions": 2}}
OTHERS = {"action": {"type": "Delete"}, "condition": {"age": 3, "matchesPrefix": ["logs/"]}}
ABORTS = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}
GOOD = {
    "location": "US-CENTRAL1",
    "locationType": "region",
    "iamConfiguration": {
        "uniformBucketLevelAccess": {"enabled": True},
        "publicAccessPrevention": "enforced",
    },
    "softDeletePolicy": {"retentionDurationSeconds": "0"},
    "lifecycle": {"rule": [ABORTS]},
}


@pytest.fixture
def service(gcs_server: GcsServer, gcs_bucket: str) -> GcsServer:
    """The service, whose newest bucket has the correct settings."""
    gcs_server.objects.facts[gcs_bucket] = json.loads(json.dumps(GOOD))
    gcs_server.buckets.denied.clear()
    gcs_server.buckets.permissions.clear()
    return gcs_server


@pytest.fixture
def init(tmp_path: Path, gcs_bucket: str, capsys: pytest.CaptureFixture[str]) -> Init:
    """Runs `init` and returns its output."""

    def run(
        *flags: str, name: str = gcs_bucket, zones: tuple[str, ...] = ("us-central1-a",)
    ) -> str:
        option = {"kind": "spot", "machine_type": "a2-highgpu-1g"}
        section = {
            "project": "paying",
            "image": "projects/p/global/images/i",
            "capacity_options": [{**option, "zones": [zone]} for zone in zones],
        }
        config = {"run": {"dir": f"gs://{name}/runs/a"}, "launch": {"gce": section}}
        path = tmp_path / "config.yaml"
        base = Path(__file__).parents[4] / "promises" / "tiny.yaml"
        path.write_text(json.dumps({"base": str(base), **config}))
        assert gce.main(["init", str(path), *flags], env={}) == ExitCode.DONE
        return capsys.readouterr().out

    return run


def changes(service: GcsServer) -> int:
    return service.buckets.permissions["storage.buckets.update"]


def test_an_absent_bucket_is_created_with_the_right_settings_and_only_with_yes(
    service: GcsServer, init: Init
) -> None:
    name = f"new-{len(service.objects.buckets)}"
    output = init(name=name)
    assert "it would be created in project paying" in output
    assert "region us-central1" in output
    assert "nothing was changed" in output
    assert name not in service.objects.buckets
    assert init("--yes", name=name).endswith("all settings are correct\n")
    made = service.objects.facts[name]
    assert {key: made[key] for key in GOOD} == GOOD
    assert made["storageClass"] == "STANDARD"
    assert "hierarchicalNamespace" not in made
    assert service.buckets.projects[name] == "paying"
    current = service.buckets.resource(name)["metageneration"]
    assert "would" not in init("--yes", name=name)
    assert service.buckets.resource(name)["metageneration"] == current
    assert changes(service) == 0


def test_each_setting_is_shown_with_its_old_and_new_value_and_changed_once(
    service: GcsServer, init: Init, gcs_bucket: str
) -> None:
    service.objects.facts[gcs_bucket] = {
        "location": "US-CENTRAL1",
        "locationType": "region",
        "storageClass": "NEARLINE",
        "versioning": {"enabled": True},
        "lifecycle": {"rule": [KEEPS, OTHERS]},
        "labels": {"team": "us"},
    }
    output = init()
    assert changes(service) == 0
    for texts in (
        "would change: storage class of new objects from NEARLINE to STANDARD",
        "would change: uniform access from off to on",
        "would change: public access prevention from inherited to enforced",
        "would change: soft delete from 7 days to off",
        "would change: object versioning from on to off",
        "would change: lifecycle: one more rule",
    ):
        assert texts in output, texts
    output = init("--yes")
    assert "changed\n" in output
    assert output.endswith("all settings are correct\n")
    assert changes(service) == 1, "not all or none"
    current = service.buckets.resource(gcs_bucket)
    assert current["lifecycle"]["rule"] == [KEEPS, OTHERS, ABORTS], "a rule was removed"
    assert current["labels"] == {"team": "us"}
    assert not current["versioning"]["enabled"]
    assert "would" not in init("--yes")
    assert changes(service) == 1


def test_a_rule_that_deletes_only_this_run_is_shown_and_removed_with_yes(
    service: GcsServer, init: Init, gcs_bucket: str
) -> None:
    both = {"age": 3, "matchesPrefix": ["runs/a/steps", "logs/"]}
    ours = {"action": {"type": "Delete"}, "condition": {"age": 9, "matchesPrefix": ["runs/a/"]}}
    rules = [{"action": {"type": "Delete"}, "condition": both}, ours, ABORTS]
    service.objects.facts[gcs_bucket]["lifecycle"] = {"rule": rules}
    output = init()
    assert json.dumps(ours, sort_keys=True) + " to nothing" in output
    assert (
        f"{json.dumps(rules[0], sort_keys=True)} to {json.dumps(OTHERS, sort_keys=True)}" in output
    )
    assert service.objects.facts[gcs_bucket]["lifecycle"] == {"rule": rules}
    init("--yes")
    assert service.objects.facts[gcs_bucket]["lifecycle"] == {"rule": [OTHERS, ABORTS]}


@pytest.mark.parametrize("prefixes", [None, ["runs/"], ["logs/", "runs/a"], ["runs/a/", "r"]])
def test_a_rule_that_deletes_other_objects_too_is_named_and_never_removed(
    service: GcsServer, init: Init, gcs_bucket: str, prefixes: list[str] | None
) -> None:
    condition = {"age": 30} | ({"matchesPrefix": prefixes} if prefixes else {})
    rule = {"action": {"type": "Delete"}, "condition": condition}
    before = GOOD | {"lifecycle": {"rule": [rule, ABORTS]}}
    service.objects.facts[gcs_bucket] = before
    with pytest.raises(ConfigError, match="only you can know") as raised:
        init("--yes")
    assert json.dumps(rule, sort_keys=True) in str(raised.value)
    assert service.objects.facts[gcs_bucket] == before
    assert changes(service) == 0


DANGERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another region": (
        {"location": "ASIA-EAST1"},
        ("region asia-east1, while the VMs would be in us-central1", "Use another bucket"),
    ),
    "a retention policy": (
        {"retentionPolicy": {"retentionPeriod": "864000"}},
        ("retention policy of 10 days", "403", "--clear-retention-period"),
    ),
    "a locked retention policy": (
        {"retentionPolicy": {"retentionPeriod": "864000", "isLocked": True}},
        ("it is locked, so use another bucket",),
    ),
    "holds": ({"defaultEventBasedHold": True}, ("event-based hold", "403")),
    "requester pays": ({"billing": {"requesterPays": True}}, ("--no-requester-pays",)),
}


@pytest.mark.parametrize("case", DANGERS)
def test_settings_that_make_a_run_fail_are_named_and_nothing_is_changed(
    service: GcsServer, init: Init, gcs_bucket: str, case: str
) -> None:
    settings, texts = DANGERS[case]
    before = GOOD | settings | {"storageClass": "NEARLINE"}
    service.objects.facts[gcs_bucket] = before
    with pytest.raises(ConfigError, match="can't serve this run; nothing was changed") as raised:
        init("--yes")
    for word in texts:
        assert word in str(raised.value)
    assert service.objects.facts[gcs_bucket] == before


def test_harmless_settings_that_cannot_be_changed_are_only_named(
    service: GcsServer, init: Init, gcs_bucket: str
) -> None:
    service.objects.facts[gcs_bucket] |= {"hierarchicalNamespace": {"enabled": True}}
    output = init("--yes", zones=("us-east4-a", "us-central1-a"))
    assert (
        "ok, but: region us-central1 (can't be changed): VMs in us-east4 pay for egress" in output
    )
    assert "ok, but: hierarchical namespace is on (can't be changed)" in output
    service.objects.facts[gcs_bucket] |= {"location": "US", "locationType": "multi-region"}
    assert "ok, but: multi-region us (can't be changed)" in init("--yes")
    assert changes(service) == 0


@pytest.mark.parametrize(
    ("permission", "texts"),
    [
        ("storage.buckets.get", ("settings can't be read", "taken by another project")),
        ("storage.buckets.update", ("can't be changed; nothing was changed", "on the bucket")),
        (
            "storage.buckets.setIamPolicy",
            ("can't be changed; nothing was changed", "on the bucket"),
        ),
        ("storage.buckets.create", ("can't be created in project paying", "on the project")),
    ],
)
def test_a_missing_permission_is_one_message_with_the_role_that_has_it(
    service: GcsServer, init: Init, gcs_bucket: str, permission: str, texts: tuple[str, ...]
) -> None:
    is_new = permission.endswith("create")
    name = f"new-{len(service.objects.buckets)}" if is_new else gcs_bucket
    service.objects.facts[gcs_bucket] = {"location": "US-CENTRAL1", "locationType": "region"}
    service.buckets.denied.add(permission)
    with pytest.raises(ConfigError) as raised:
        init("--yes", name=name)
    service.buckets.denied.clear()
    for word in (*texts, permission, "role Storage Admin"):
        assert word in str(raised.value)
    current = service.objects.facts.get(name)
    assert current == (None if is_new else {"location": "US-CENTRAL1", "locationType": "region"})


def test_a_bucket_name_of_another_project_is_reported(service: GcsServer, init: Init) -> None:
    service.buckets.taken.add("taken-by-others")
    with pytest.raises(ConfigError, match="taken by another project"):
        init("--yes", name="taken-by-others")
    service.fail("404", method="GET", path="b/taken-by-others")
    with pytest.raises(ConfigError, match="the name is taken by another project"):
        init("--yes", name="taken-by-others")


@pytest.mark.parametrize(("method", "status"), [("POST", 400), ("PATCH", 400), ("PATCH", 409)])
def test_a_refusal_for_another_reason_names_no_permission(
    service: GcsServer, init: Init, gcs_bucket: str, method: str, status: int
) -> None:
    name = f"new-{len(service.objects.buckets)}" if method == "POST" else gcs_bucket
    service.objects.facts[gcs_bucket]["versioning"] = {"enabled": True}
    service.fail(str(status), method=method)
    with pytest.raises(ConfigError, match=rf"\({status}: requested by the test\)\.$"):
        init("--yes", name=name)


@pytest.mark.parametrize("kind", ["503", "503 after", "drop after"])
def test_a_lost_response_creates_or_changes_nothing_twice(
    service: GcsServer, init: Init, gcs_bucket: str, kind: str
) -> None:
    name = f"new-{len(service.objects.buckets)}"
    made = service.fail(kind, method="POST")
    assert init("--yes", name=name).endswith("all settings are correct\n")
    service.objects.facts[gcs_bucket]["versioning"] = {"enabled": True}
    changed = service.fail(kind, method="PATCH")
    assert init("--yes").endswith("all settings are correct\n")
    assert (made.hits, changed.hits) == (1, 1)
    assert service.buckets.resource(gcs_bucket)["metageneration"] == "2"


def test_a_bucket_that_is_changed_concurrently_is_checked_again(
    service: GcsServer, init: Init, gcs_bucket: str
) -> None:
    service.objects.facts[gcs_bucket]["versioning"] = {"enabled": True}
    service.fail("412", method="PATCH")
    output = init("--yes")
    assert "it was changed meanwhile; checking again" in output
    assert output.endswith("all settings are correct\n")


def test_an_unavailable_service_is_not_an_absent_bucket(
    service: GcsServer, init: Init, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.3)
    service.fail("503", times=None)
    with pytest.raises(StorageUnavailable):
        init("--yes")


def test_the_table_of_permissions_is_what_init_needs(
    service: GcsServer, init: Init, gcs_bucket: str
) -> None:
    init("--yes", name=f"new-{len(service.objects.buckets)}")
    service.objects.facts[gcs_bucket]["iamConfiguration"] = {}
    init("--yes")
    table = (Path(__file__).parents[5] / "docs" / "gce-reference.md").read_text()
    current = re.findall(r"^\| (storage\.\S+) \|", table, flags=re.MULTILINE)
    assert sorted(service.buckets.permissions) == sorted(current)
