"""Of many launchers on one run one acts; what a paused one sends late is swept."""

from __future__ import annotations

import signal

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.cloud import RUNG, SPOT, Cloud
from tests.promises.trainer import assert_bit_exact, line

CREATED = "instances.bulkInsert"
QUOTA = "PREEMPTIBLE_NVIDIA_A100_GPUS"


@pytest.mark.campaign
@pytest.mark.parametrize(("number", "pace", "term"), [(4, "0.02", 6.0), (20, "0.1", 20.0)])
def test_of_many_launchers_at_once_one_acts(
    cloud: Cloud, calm: RunDir, number: int, pace: str, term: float
) -> None:
    config = cloud.config(env={"PACE": pace}, lease_seconds=term)
    all_of_them = [cloud.up(config) for _ in range(number)]

    def left() -> list[int]:
        return [code for one in all_of_them if (code := one.process.poll()) is not None]

    cloud.wait(lambda: len(left()) >= number - 1, of="leaving", seconds=200)
    assert left() == [Exit.FENCED] * (number - 1), cloud.told()
    said = [one.said() for one in all_of_them if one.process.poll() is not None]
    assert all("leads this run. Leave it to that launcher" in words for words in said), said
    (leader,) = (one for one in all_of_them if one.process.poll() is None)
    assert leader.ended(300) == 0, cloud.told()
    assert cloud.gce.calls().calls[CREATED] == 1, "it was asked for twice"
    assert not any("asking for" in words for words in said)
    assert line(cloud.run_dir).attempt == 1
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()


def test_a_creation_that_lands_after_the_takeover_is_swept(cloud: Cloud, calm: RunDir) -> None:
    """It was refused to the second launcher, which has found another place by then."""
    other = {"kind": "spot", **RUNG, "zones": ["us-east4-a"]}
    config = cloud.config(ladder=[SPOT, other], env={"PACE": "0.02"})
    stall = cloud.gce.fail("stall", call=CREATED, late_seconds=25.0)
    first = cloud.up(config)
    cloud.wait(lambda: stall.hits == 1, of="creation")
    first.kill(signal.SIGSTOP)
    cloud.gce.quota("us-central1", QUOTA, 0, as_http=True)
    second = cloud.up(config, "--standby")
    cloud.wait(lambda: "us-central1-a: quota: " in second.said(), of="refusal")
    cloud.gce.quota("us-central1", QUOTA, 8)
    cloud.wait(lambda: "no launcher wants it" in second.said(), of="sweeping")
    first.kill(signal.SIGCONT)
    assert first.ended() == Exit.FENCED, cloud.told()
    assert "leads this run by now" in first.said()
    assert second.ended() == 0, cloud.told()
    made = [name for kind, name in cloud.gce.events("insert") if kind == "insert"]
    assert len(made) == 2, f"nothing has landed late: {made}"
    assert line(cloud.run_dir).attempt == 1, "the training was disturbed"
    assert_bit_exact(cloud.run_dir, calm)
    cloud.assert_nothing_is_left()


@pytest.mark.campaign
def test_a_creation_that_lands_after_the_end_is_taken_back_by_who_has_sent_it(cloud: Cloud) -> None:
    config = cloud.config()
    stall = cloud.gce.fail("stall", call=CREATED, late_seconds=75.0)
    first = cloud.up(config)
    cloud.wait(lambda: stall.hits == 1, of="creation")
    first.kill(signal.SIGSTOP)
    down = cloud.launch(str(cloud.run), verb="down")
    assert down.ended() == 0, cloud.told()
    intent = cloud.intent()
    assert intent is not None
    assert intent.phase == "ended"
    assert cloud.gce.vms() == {}, "it has landed too early"
    cloud.wait(lambda: "RUNNING" in cloud.gce.vms().values(), of="late VM")
    first.kill(signal.SIGCONT)
    assert first.ended() == Exit.FENCED, cloud.told()
    assert "looking whether" in first.said()
    cloud.wait(lambda: cloud.gce.vms() == {}, of="end of the late VM")
    cloud.assert_nothing_is_left()
