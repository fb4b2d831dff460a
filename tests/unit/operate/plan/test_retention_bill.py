"""The storage bill is that of the policies of a run."""

from __future__ import annotations

import pytest

from jaxres.checkpoint.retention import retention
from jaxres.checkpoint.retention.retention import FIRST_MONDAY, CommittedStep
from jaxres.config.schema.checkpoint import KeepSection
from jaxres.operate.plan.retention_bill import StorageBill, storage_bill


def bill(keep: KeepSection) -> StorageBill:
    return storage_bill(
        keep, state_bytes=1e12, interval_seconds=3600.0, hours=720.0, dollars_per_gb_month=0.023
    )


def test_hourly_saves_of_a_terabyte_that_are_all_kept_are_720_tb_and_16_560_dollars_a_month():
    found = bill(KeepSection(every_steps=1))
    assert (found.kept, found.end_gb) == (720, 720_000.0)
    assert found.dollars_per_month_at_end == pytest.approx(16_560)
    assert found.dollars == pytest.approx(16_560 * 720 / 730 / 2, rel=0.05)  # It grows from 0.


def test_six_hours_seven_days_and_thirteen_weeks_keep_few():
    found = bill(KeepSection(hours=6, daily=7, weekly=13))
    # Hours 715 to 720; newest of 5 more days; newest of 3 more weeks.
    assert found.kept == 6 + 5 + 3


@pytest.mark.parametrize(
    "keep", [KeepSection(), KeepSection(hours=6, daily=3, weekly=2), KeepSection(every_steps=10)]
)
def test_what_is_counted_is_what_a_run_keeps_that_prunes_after_every_commit(keep):
    kept: list[CommittedStep] = []
    for number in range(1, 721):
        kept.append(CommittedStep(step=number, time=FIRST_MONDAY + 3600.0 * number))
        dead = retention.plan(kept, keep).dead
        kept = [step for step in kept if step.step not in dead]
    assert bill(keep).kept == len(kept)
