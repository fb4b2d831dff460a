"""A reservation that is delivered later is named with its time, and used from then on."""

from __future__ import annotations

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.cloud import OPTION, Cloud

RESERVED = {"kind": "reservation", "reservation": "mine", **OPTION}
STANDARD = {"kind": "standard", **OPTION, "zones": ["us-east4-a"]}
TIMES = {"begins": "2999-01-01T08:00:00Z", "ends": "2999-01-08T08:00:00Z"}


def test_until_a_reservation_begins_the_other_options_are_used(
    simulated_cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud = simulated_cloud
    zone, machine = OPTION["zones"][0], OPTION["machine_type"]
    words = {"reservation": "mine", "machine": machine, "count": 2, **TIMES}
    cloud.gce.reserve_later(zone, "later", **words)
    launcher = cloud.up(cloud.config(num_hosts=2, capacity_options=[RESERVED, STANDARD]))
    cloud.wait(lambda: "created: " in launcher.printed(), of="creation")
    printed = launcher.printed()
    assert "2 x a2-highgpu-1g, 2999-01-01 08:00 UTC to 2999-01-08 08:00 UTC" in printed
    assert {vm.model for vm in cloud.gce.vms_so_far()} == {"STANDARD"}, cloud.describe()
    assert f"{zone}: refused" not in printed, "it was requested before it begins"
    assert cloud.run_here("status") == ExitCode.DONE
    status = capsys.readouterr().out
    assert f"reservation {machine} in {zone}: not_begun" in status
    assert "2999-01-01 08:00 UTC" in status
    assert cloud.run_here("down") == ExitCode.DONE
    assert cloud.gce.vms() == {}, cloud.describe()
