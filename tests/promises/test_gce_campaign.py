"""The scenarios of VMs that come and go, under a bucket that fails and metadata that flap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises import test_gce_vms_come_and_go as scenarios
from tests.promises.cloud import Cloud

pytestmark = pytest.mark.campaign
FLAP_SECONDS = 1.5


@pytest.fixture
def storm(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """The same cloud, in which requests to the bucket and to the metadata go wrong."""
    monkeypatch.setattr(scenarios, "SLOW", {"PACE": "0.05"})  # A look at the run takes longer.
    # Faults are not ten times as fast as the notice of 120 s: these seconds are real ones.
    monkeypatch.setattr(scenarios, "NOTICE_SECONDS", 1200.0)
    fault = cloud.gcs.fail("503", probability=0.05, times=None, seed=5)
    is_over = threading.Event()

    def flap() -> None:
        flapping: set[str] = set()
        while not is_over.wait(0.2):
            for name in cloud.gce.vms().keys() - flapping:
                try:
                    cloud.gce.fail_metadata(name, "503", times=1000, flap_seconds=FLAP_SECONDS)
                except (KeyError, ValueError):  # It has gone, or has none yet.
                    continue
                flapping.add(name)

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield cloud
    finally:
        is_over.set()
        thread.join()
    assert fault.hits > 5, "no storm"


WITH_ONE = (
    scenarios.test_without_capacity_and_without_quota_the_next_rung_is_taken,
    scenarios.test_a_launcher_killed_in_the_middle_of_a_creation_is_followed_by_one_that_adopts_it,
    scenarios.test_of_two_launchers_one_acts_and_the_one_that_was_paused_leaves,
)
WITH_TWO = (
    scenarios.test_a_preempted_vm_is_replaced_and_no_finished_step_is_lost,
    scenarios.test_a_coordinator_that_is_gone_without_a_word_is_replaced,
)


@pytest.mark.parametrize("scenario", WITH_ONE, ids=lambda scenario: scenario.__name__[5:40])
def test_one_host_in_a_storm(
    storm: Cloud, calm: RunDir, scenario: Callable[[Cloud, RunDir], None]
) -> None:
    scenario(storm, calm)


@pytest.mark.parametrize("scenario", WITH_TWO, ids=lambda scenario: scenario.__name__[5:40])
def test_two_hosts_in_a_storm(
    storm: Cloud, calm_pair: RunDir, scenario: Callable[[Cloud, RunDir], None]
) -> None:
    scenario(storm, calm_pair)


def test_a_crash_loop_in_a_storm(storm: Cloud) -> None:
    scenarios.test_a_crash_loop_ends_typed_and_no_vm_is_left(storm)
