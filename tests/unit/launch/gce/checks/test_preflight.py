"""Promises of `up --dry-run`: it prints the requests that `up` would send, and their price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxres.faults import ConfigError
from jaxres.launch.gce.checks import preflight
from jaxres.storage.path import GcsPath
from jaxres_emulators.gcs import GcsServer
from tests.unit.launch.gce_config import OPTION, config

RUN = GcsPath("bkt", "runs/first")
EXPECTED = """\
project p, run gs://bkt/runs/first: 2 VMs, all in one zone, all or none:
  jx-first-@-xxxxxxxx-0000, jx-first-@-xxxxxxxx-0001 (xxxxxxxx: random)
tried in this order:
  1. spot        us-central1-a    a2-highgpu-1g, 1 x A100 40 GB; $3.00 an hour for all
  2. spot        us-central1-b    a2-highgpu-1g, 1 x A100 40 GB; $3.00 an hour for all
  3. standard    us-east4-a       e2-small; price unknown: give dollars_per_hour
the price of standard e2-small is unknown: the config has none. Set \
launch.gce.capacity_options[1].dollars_per_hour to the dollars of one VM and hour: \
Google's page "VM instance pricing" has them
the first request (its startup script is left out here):
"""


def test_the_plan_has_every_zone_in_order_with_its_price() -> None:
    standard = {"kind": "standard", "zones": ["us-east4-a"], "machine_type": "e2-small"}
    lines = preflight.lines(config(capacity_options=[OPTION, standard]), RUN)
    text = "".join(f"{line}\n" for line in lines)
    label = lines[1].split("-")[2]
    assert text.startswith(EXPECTED.replace("@", label)), text
    assert text.endswith(
        "a VM deletes itself after 168 hours in any case\n"
        "no limit: launch.max_hours and launch.max_dollars are not set\n"
        "nothing was created\n"
    ), text


def test_a_bucket_in_another_region_is_refused_except_in_an_emergency(
    gcs_server: GcsServer, gcs_bucket: str
) -> None:
    gcs_server.objects.facts[gcs_bucket] = {"location": "EUROPE-WEST4", "locationType": "region"}
    gce, run = config().launch.gce, GcsPath(gcs_bucket, "runs/a")
    assert gce is not None
    (refused,) = preflight._bucket(gce, run, other_region=False)
    assert (refused.state, "`up --other-region`" in refused.text()) == ("failed", True)
    (told,) = preflight._bucket(gce, run, other_region=True)
    assert (told.state, "would cross regions" in told.text()) == ("warning", True)


def test_the_plan_has_the_estimate_of_doctor_and_plan() -> None:
    lines = [line for line in preflight.lines(config(), RUN) if line.startswith("estimate: ")]
    assert "2 devices on 2 hosts" in lines[0]
    assert "$3.00 an hour (spot)" in lines[0]
    assert "a save takes" in lines[1]
    assert "preemptions a VM and day" in lines[3]


def test_the_price_of_all_vms_includes_the_spares() -> None:
    lines = preflight.lines(config(spares=1), RUN)
    assert (
        "  1. spot        us-central1-a    a2-highgpu-1g, 1 x A100 40 GB; $4.50 an hour for all"
        in lines
    ), "the spare is free of charge"
    assert "1 more as spares, once an attempt runs; the prices include them" in lines


def test_the_plan_shows_the_request_without_its_script() -> None:
    text = "\n".join(preflight.lines(config(launch={"max_dollars": 10.0}), RUN))
    for expected in (
        "  count: 2",
        "  min_count: 2",
        "    machine_type: a2-highgpu-1g",
        "      jaxres-run: jx-first-",
        "      provisioning_model: SPOT",
        "      instance_termination_action: DELETE",
        "      preemptible: true",
        "seconds: 604800",
        "seconds: 120",
        "value: gs://bkt/runs/first",
        "source_image: projects/debian-cloud/global/images/family/debian-12",
        "limits: max_hours=None, max_dollars=10.0",
    ):
        assert expected in text, f"{expected}\n{text}"
    assert "#!/bin/bash" not in text
    assert text == "\n".join(preflight.lines(config(launch={"max_dollars": 10.0}), RUN))


ALONE = ("request_valid_for_duration", "seconds: 1200", f"zones/{OPTION['zones'][0]}/machineTypes/")
TOGETHER = ("requested_run_duration", "default_action_on_failure: DO_NOTHING", "target_size: 0")


@pytest.mark.parametrize(("hosts", "fields"), [(1, ALONE), (2, TOGETHER)])
def test_a_queued_option_shows_its_request(hosts: int, fields: tuple[str, ...]) -> None:
    flex = {**OPTION, "kind": "flex_start", "wait_minutes": 20}
    text = "\n".join(
        preflight.lines(config(num_hosts=hosts, capacity_options=[flex], max_run_hours=24.0), RUN)
    )
    assert [field for field in fields if field not in text] == []
    assert "provisioning_model: FLEX_START" in text


def test_the_plan_lists_every_file_that_is_copied_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").write_text("a = 1\n")
    (tmp_path / "rows.txt").write_bytes(bytes(1234567))
    lines = preflight.lines(config(package=str(tmp_path)), RUN)
    at = lines.index(f"copied from {tmp_path}: 2 files, 1,234,573 bytes")
    assert lines[at - 1].startswith("copied to the VMs: jaxres, ")
    assert lines[at + 1 : at + 3] == ["             6  pkg/model.py", "     1,234,567  rows.txt"]
    (tmp_path / ".env").write_text("TOKEN=1")
    with pytest.raises(ConfigError, match=r"\.env \(by its name, a secret\)"):
        preflight.lines(config(package=str(tmp_path)), RUN)


@pytest.mark.parametrize(
    ("gce", "expected"),
    [
        (
            {},
            "service account: the project's default one, which may have the role Editor on the "
            "whole project. Set launch.gce.service_account to an account with only Storage Object "
            "User on gs://bkt",
        ),
        (
            {"service_account": "a@p.iam.gserviceaccount.com"},
            "service account: a@p.iam.gserviceaccount.com; it needs only Storage Object User on "
            "gs://bkt",
        ),
        (
            {"template": "t", "image": None},
            "service account: that of the template; it needs only Storage Object User on gs://bkt",
        ),
    ],
)
def test_the_plan_names_the_account_and_that_the_training_runs_as_root(
    gce: dict[str, Any], expected: str
) -> None:
    lines = preflight.lines(config(**gce), RUN)
    assert expected in lines
    (root,) = (line for line in lines if "as root" in line)
    assert "Give that account no other role" in root
