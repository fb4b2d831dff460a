"""A VM is idle while it trains nothing and no launcher leads the job; else its idle time is 0."""

from __future__ import annotations

import pytest

from jaxres.launch.gce.vm.agent import MAX_GAP_SECONDS, IdleTime, next_idle

LEASE = 5
HOUR = 3600.0


def after(*observations: tuple[float, bool, int | None], idle: IdleTime | None = None) -> float:
    """Returns the idle seconds after observations: time, is_training, lease."""
    idle = idle or IdleTime()
    for now, is_training, lease in observations:
        idle = next_idle(idle, now=now, is_training=is_training, lease=lease)
    return idle.seconds


def every_20_s(seconds: float, *, is_training: bool, lease: int | None = LEASE) -> float:
    moments = [20.0 * n for n in range(1 + int(seconds / 20))]
    return after(*[(now, is_training, lease) for now in moments])


@pytest.mark.parametrize("lease", [LEASE, 0], ids=["not-renewed", "missing"])
def test_time_without_training_and_without_a_launcher_is_counted(lease: int) -> None:
    assert every_20_s(HOUR, is_training=False, lease=lease) == HOUR


def test_a_vm_whose_job_trains_is_never_idle() -> None:
    assert every_20_s(HOUR, is_training=True) == 0.0, "it would be powered off while its job runs"
    idle = IdleTime(HOUR, 0.0, LEASE)
    assert after((20.0, True, LEASE), idle=idle) == 0.0
    assert after((20.0, True, LEASE), (40.0, False, LEASE), idle=idle) == 20.0


def test_a_renewed_lease_ends_the_idle_time() -> None:
    renewals = [(20.0 * n, False, LEASE + n) for n in range(180)]
    assert after(*renewals) == 0.0, "a launcher waits for capacity, and its VMs power off"
    assert after((0.0, False, LEASE), (20.0, False, LEASE), (40.0, False, 0)) == 0.0


def test_time_without_an_answer_of_the_bucket_is_not_counted() -> None:
    assert every_20_s(HOUR, is_training=False, lease=None) == 0.0
    idle = IdleTime(100.0, 0.0, LEASE)
    assert after((HOUR, False, None), (HOUR + 20, False, LEASE), idle=idle) == 120.0


def test_a_suspended_agent_counts_one_short_gap() -> None:
    assert after((0.0, False, LEASE), (HOUR, False, LEASE)) == MAX_GAP_SECONDS
