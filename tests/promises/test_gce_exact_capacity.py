"""A job that needs its whole quota or reservation gets the place of its own lost VM again."""

from __future__ import annotations

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises.cloud import OPTION, SOON_LOST, SPOT, Cloud
from tests.promises.trainer import PACED, assert_bit_exact, starts

ZONE, MACHINE = OPTION["zones"][0], OPTION["machine_type"]
RESERVED = {"kind": "reservation", "reservation": "mine", **OPTION}
COSTLY = {"kind": "standard", **OPTION, "dollars_per_hour": 5.0}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["quota", "reservation"])
def test_a_lost_vm_is_replaced_though_it_holds_the_place_of_the_next_one_for_a_while(
    cloud: Cloud, fault_free_pair: RunDir, kind: str
) -> None:
    if kind == "quota":
        cloud.gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 2)
    else:
        cloud.gce.reserve(ZONE, "mine", machine=MACHINE, count=2)
    options = [SPOT if kind == "quota" else RESERVED, COSTLY]
    launcher = cloud.up(cloud.config(num_hosts=2, env=PACED, capacity_options=options, **SOON_LOST))
    cloud.wait_commit(20)
    kept, lost = cloud.member(0), cloud.member(1)
    cloud.gce.hold_deletions()
    cloud.gce.die_silently(lost)
    refused = f"{ZONE}: not_freed: "
    cloud.wait(lambda: refused in launcher.printed(), of="refusal")
    assert cloud.gce.vms()[lost] == "STOPPING"
    cloud.gce.hold_deletions(False)
    cloud.go_on()
    assert launcher.wait_exit() == 0, cloud.describe()
    printed = launcher.printed()
    assert f"attempt 2 on {kept}, " in printed, "the other VM was not kept"
    assert "(standard)" not in printed, "a more expensive option was used"
    assert starts(cloud.run_dir)[1] >= 20
    assert_bit_exact(cloud.run_dir, fault_free_pair)
    cloud.assert_nothing_is_left()
