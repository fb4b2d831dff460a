"""The VM scenarios under random faults of the bucket and the metadata server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from jaxres.runlog.paths import RunDir
from tests.promises import test_gce_replaces_lost_vms as scenarios
from tests.promises.cloud import Cloud

pytestmark = pytest.mark.campaign
FLAP_SECONDS = 1.5


@pytest.fixture
def storm(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A cloud in which requests to the bucket and the metadata server fail at random."""
    # Faults are not sped up ten times like the notice of 120 s: these are real seconds.
    monkeypatch.setattr(scenarios, "NOTICE_SECONDS", 1200.0)
    fault = cloud.gcs.fail("503", probability=0.05, times=None, seed=5)
    is_over = threading.Event()

    def flap() -> None:
        flapping: set[str] = set()
        while not is_over.wait(0.2):
            for name in cloud.gce.vms().keys() - flapping:
                try:
                    cloud.gce.fail_metadata(name, "503", times=1000, flap_seconds=FLAP_SECONDS)
                except (KeyError, ValueError):  # The VM is gone or has no server yet.
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
    scenarios.test_without_capacity_or_quota_the_next_option_is_used,
    scenarios.test_the_next_launcher_adopts_the_creation_of_a_killed_one,
    scenarios.test_only_one_of_two_launchers_acts_and_the_suspended_one_exits,
)
WITH_TWO = (
    scenarios.test_a_preempted_vm_is_replaced_and_no_finished_step_is_lost,
    scenarios.test_a_coordinator_that_disappears_is_replaced,
)


@pytest.mark.parametrize("scenario", WITH_ONE, ids=lambda scenario: scenario.__name__[5:40])
def test_one_host_under_random_faults(
    storm: Cloud, fault_free: RunDir, scenario: Callable[[Cloud, RunDir], None]
) -> None:
    scenario(storm, fault_free)


@pytest.mark.parametrize("scenario", WITH_TWO, ids=lambda scenario: scenario.__name__[5:40])
def test_two_hosts_under_random_faults(
    storm: Cloud, fault_free_pair: RunDir, scenario: Callable[[Cloud, RunDir], None]
) -> None:
    scenario(storm, fault_free_pair)


def test_a_crash_loop_under_random_faults(storm: Cloud) -> None:
    scenarios.test_a_crash_loop_exits_with_its_code_and_leaves_no_vm(storm)
