"""Impossible input is rejected with one message that states what to do; nothing is created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxres import faults
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, UsageError
from jaxres.launch.gce import command as gce
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.promises.cloud import OPTION, SPOT, Cloud
from tests.promises.trainer import FAULTY

BIG = OPTION | {"machine_type": "a3-highgpu-8g"}


def assert_fails(
    cloud: Cloud, *arguments: str, env: dict[str, str] | None = None, **config: Any
) -> str:
    """Returns the message of an `up` that must exit with 78 and create nothing."""
    with pytest.raises(RunError) as raised:
        gce.main(
            ["up", str(cloud.config(**config)), *arguments], env=cloud.env if env is None else env
        )
    error = faults.by_phase(raised.value, at_start=True)  # As the command does.
    assert error.exit_code == ExitCode.CONFIG, error
    assert cloud.gce.vms() == {}
    cloud.gcs.faults.clear()
    if cloud.run.bucket in bucket_names(cloud):
        assert gcs_objects.list_sizes(cloud.launch_paths.root) == {}, (
            "something is left in the bucket"
        )
    return str(raised.value)


def bucket_names(cloud: Cloud) -> list[str]:
    return list(cloud.gcs.objects.buckets)


def absent_subnetwork(_: Cloud) -> dict[str, Any]:
    return {"subnetworks": ["nowhere"]}


def in_another_region(cloud: Cloud) -> dict[str, Any]:
    cloud.gcs.objects.facts[cloud.run.bucket] = {"location": "ASIA1", "locationType": "region"}
    return {}


def denied_bucket(cloud: Cloud) -> dict[str, Any]:
    cloud.gcs.fail("403", path=cloud.run.bucket, times=None)
    return {}


def no_quota(cloud: Cloud) -> dict[str, Any]:
    cloud.gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 0)
    return {}


def disabled(cloud: Cloud) -> dict[str, Any]:
    cloud.gce.disable_api()
    return {}


def no_private_access(cloud: Cloud) -> dict[str, Any]:
    cloud.gce.end_private_access("us-central1", "default")
    return {}


def no_gpus_in_all_regions(cloud: Cloud) -> dict[str, Any]:
    cloud.gce.quota_of_all_regions("GPUS_ALL_REGIONS", 0)
    return {}


def missing_bucket(cloud: Cloud) -> dict[str, Any]:
    cloud.run = GcsPath("never-made", "run")
    return {}


def without_the_shape(cloud: Cloud) -> dict[str, Any]:
    cloud.gce.remove_machine("us-central1-a", "a2-highgpu-1g")
    return {}


CASES: dict[str, tuple[Callable[[Cloud], dict[str, Any]], tuple[str, ...]]] = {
    "wrong project": (
        lambda _: {"project": "elsewhere"},
        ("launch.gce.project=elsewhere: there is no such project", "gcloud projects list"),
    ),
    "API disabled": (disabled, ("API is not enabled", "gcloud services enable")),
    "no way to the bucket": (
        no_private_access,
        ("has no Private Google Access", "--enable-private-ip-google-access", "external_ip: true"),
    ),
    "no GPUs in all regions": (
        no_gpus_in_all_regions,
        ("GPUS_ALL_REGIONS is 0 (all regions), needed: 1", "iam-admin/quotas"),
    ),
    "no reservation": (
        lambda _: {"capacity_options": [OPTION | {"kind": "reservation", "reservation": "r"}]},
        ("there is no reservation r in us-central1-a", "gcloud compute reservations list"),
    ),
    "no quota": (
        no_quota,
        ("PREEMPTIBLE_NVIDIA_A100_GPUS is 0 (us-central1), needed: 1", "iam-admin/quotas"),
    ),
    "zone without the shape": (
        without_the_shape,
        ("capacity_options[0].zones: us-central1-a has no a2-highgpu-1g", "machine-types list"),
    ),
    "no such zone": (
        lambda _: {"capacity_options": [SPOT | {"zones": ["us-nowhere1-a"]}]},
        ("there is no zone us-nowhere1-a",),
    ),
    "image absent": (
        lambda _: {"image": "projects/debian-cloud/global/images/family/debian-1"},
        ("launch.gce.image: there is no ", "gcloud compute images list"),
    ),
    "subnetwork absent": (absent_subnetwork, ("no subnetwork nowhere in us-central1",)),
    "bucket in another region": (
        in_another_region,
        ("the bucket is in asia1, the VMs would be in us-central1", "launch gce init"),
    ),
    "bucket without permission": (denied_bucket, ("can't be used", "Storage Object User")),
    "no such bucket": (missing_bucket, ("there is no bucket never-made",)),
    "shape that is not available with these options": (
        lambda _: {
            "capacity_options": [BIG | {"kind": "standard", "machine_type": "a3-highgpu-1g"}]
        },
        ("capacity_options[0].kind: a3-highgpu-1g", "use one of: spot, flex_start"),
    ),
    "package absent": (lambda _: {"package": "/nowhere"}, ("there is no such folder",)),
}


@pytest.mark.parametrize("case", CASES)
def test_impossible_input_is_one_clear_error_and_creates_nothing(cloud: Cloud, case: str) -> None:
    arrange, texts = CASES[case]
    printed = assert_fails(cloud, **arrange(cloud))
    for text in texts:
        assert text in printed, printed


def test_all_checks_can_be_made_without_creating_anything(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(cloud.config())
    assert gce.main(["up", config, "--dry-run", "--check"], env=cloud.env) == ExitCode.DONE
    printed = capsys.readouterr().out
    for row in (
        "access         ok       default in us-central1 has Private Google Access",
        "quotas         ok       those that the API lists suffice",
        "  1. spot        us-central1-a    a2-highgpu-1g, 1 x A100 40 GB; $1.50 an hour for all",
        "no check failed; nothing was created",
    ):
        assert row in printed, printed
    cloud.gce.end_private_access("us-central1", "default")
    cloud.gce.deny("compute.regions.get")
    missing = ["up", config, "--dry-run", "--check", "run.dir=gs://never-made/run"]
    assert gce.main(missing, env=cloud.env) == ExitCode.CONFIG
    printed = capsys.readouterr().out
    for row in (
        "access         FAILED   the subnetwork default in us-central1 has no Private Google",
        "                         -> `gcloud compute networks subnets update default --region us-",
        "quotas         warning  quotas not checked: this account lacks compute.regions.get",
        "bucket         FAILED   gs://never-made/run: there is no bucket never-made.",
        "$1.50 an hour for all",
        "2 of 6 checks failed; nothing was created",
    ):
        assert row in printed, printed
    assert cloud.gce.events("insert") == []
    assert "never-made" not in bucket_names(cloud)
    assert gcs_objects.list_sizes(cloud.launch_paths.root) == {}
    with pytest.raises(UsageError, match="--check: needs --dry-run"):
        gce.main(["up", config, "--check"], env=cloud.env)


def test_without_credentials_the_error_explains_how_to_get_them(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(cloud.root / "none"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    assert "gcloud auth application-default login" in assert_fails(cloud, env={})


def test_a_local_run_directory_is_rejected(cloud: Cloud) -> None:
    printed = assert_fails(cloud, f"run.dir={cloud.root / 'local'}")
    assert "a local disk is deleted with its VM" in printed
    assert "gs://BUCKET/FOLDER" in printed


def test_a_config_without_vms_is_rejected(cloud: Cloud) -> None:
    config = cloud.root / "plain.yaml"
    config.write_text(f"base: {FAULTY}\nrun: {{dir: {cloud.run}}}\n")
    with pytest.raises(ConfigError, match=r"launch.gce is missing"):
        gce.main(["up", str(config)], env=cloud.env)


def test_a_denied_creation_exits_with_its_code_after_the_last_option(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.gce.deny("compute.instances.create")
    code = gce.main(["up", str(cloud.config())], env=cloud.env)
    printed = capsys.readouterr().out
    assert code == ExitCode.CONFIG, printed
    assert "Required 'compute.instances.create' permission" in printed
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_preemption_notice_that_the_api_rejects_is_omitted(cloud: Cloud) -> None:
    cloud.gce.refuse_field("preemptionNoticeDuration")
    launcher = cloud.up(cloud.config(), "train.steps=20")
    assert launcher.wait_exit() == 0, cloud.describe()
    assert "the API refuses the preemption notice" in launcher.printed()
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_vms_with_an_external_address_need_no_private_google_access(cloud: Cloud) -> None:
    cloud.gce.end_private_access("us-central1", "default")
    launcher = cloud.up(cloud.config(external_ip=True), "train.steps=20")
    assert launcher.wait_exit() == 0, cloud.describe()
    (vm,) = cloud.gce.vms_so_far()
    (access,) = vm.wanted["networkInterfaces"][0]["accessConfigs"]
    assert access == {"name": "External NAT", "type": "ONE_TO_ONE_NAT"}
    cloud.assert_nothing_is_left()
