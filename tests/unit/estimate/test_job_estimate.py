"""The one estimate of a job: notice, preemptions, prices, interval and rates, and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.estimate import job_estimate
from jaxres.estimate.job_estimate import JobEstimate
from jaxres.estimate.storage_rate import StorageRate

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "promises" / "tiny.yaml"
PLACE = "zones: [us-central1-a], machine_type: a3-highgpu-8g"
SPOT, OLD_SPOT = f"{{kind: spot, {PLACE}}}", f"{{kind: spot, notice_seconds: 0, {PLACE}}}"
FLEX, STANDARD = f"{{kind: flex_start, {PLACE}}}", f"{{kind: standard, {PLACE}}}"
PRICED = f"{{kind: spot, dollars_per_hour: 24.0, {PLACE}}}"


def load(*options: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    if not options:
        return configs.load(TINY, list(overrides)).config
    vms = "{project: p, image: projects/p/global/images/i, num_hosts: 4, capacity_options: "
    vms += f"[{', '.join(options)}]}}"
    return configs.load(TINY, ["run.dir=gs://bkt/run", f"launch.gce={vms}", *overrides]).config


def estimate(config: RunConfig, **changes: Any) -> JobEstimate:
    vms = job_estimate.vms_of(config) or job_estimate.fleet(16, 2)
    return job_estimate.estimate(config, vms, **{"state_bytes": 64e9} | changes)


@pytest.mark.parametrize(
    ("options", "given", "seconds"),
    [
        ([], "30", 30),
        ([], "45", 45),
        ([SPOT], "30", 120),
        ([SPOT], "150", 150),
        ([OLD_SPOT], "30", 30),
        ([SPOT, STANDARD], "30", 120),
        ([SPOT, OLD_SPOT], "30", 30),
        ([STANDARD], "30", 30),
        ([SPOT, FLEX], "30", 30),
    ],
)
def test_the_notice_is_the_shortest_that_a_vm_of_the_job_may_have(
    options: list[str], given: str, seconds: float
) -> None:
    config = load(*options, overrides=(f"preemption.notice_seconds={given}",))
    known = estimate(config)
    assert known.job.notice_seconds == seconds
    assert known.room_seconds == seconds - 5
    assert f"a notice leaves {seconds - 5} of {seconds} s" in known.lines()[-1]


def test_a_margin_of_the_config_is_kept_free_of_the_notice() -> None:
    config = load(SPOT, overrides=("preemption.margin_seconds=104",))
    assert estimate(config, state_bytes=60e9).job.is_saved_at_notice  # 15 + 1 s.
    assert not estimate(config, state_bytes=64e9).job.is_saved_at_notice  # 16 + 1 s.


@pytest.mark.parametrize("options", [[SPOT], [SPOT, STANDARD]])
def test_spot_vms_are_preempted_as_often_as_assumed_which_is_said(options: list[str]) -> None:
    known = estimate(load(*options))
    assert known.job.preemptions_per_day == 0.15
    assert known.dollars == 3.125
    text = known.lines()[-1]
    assert "0.15 preemptions a VM and day (Compute Engine has observed 5 to 15 % a day)" in text
    own = estimate(load(*options), given={"--spot-rate": 2.0})
    assert own.job.preemptions_per_day == 2.0
    assert "2 preemptions a VM and day; a notice" in own.lines()[-1]
    assert "--spot-rate" not in {one.flag for one in own.assumed}
    assert estimate(load(*options), given={"--spot-rate": 0.0}).job.preemptions_per_day == 0.0


def test_vms_on_demand_are_not_preempted() -> None:
    known = estimate(load(STANDARD, SPOT))
    assert (known.job.preemptions_per_day, known.dollars) == (0.0, 11.0)
    assert "preemptions" not in known.lines()[-1]
    assert "--spot-rate" not in {one.flag for one in known.assumed}


def test_the_price_of_a_job_is_that_of_its_first_option() -> None:
    known = estimate(load(PRICED, STANDARD))
    assert known.dollars_per_hour == 4 * 24.0
    assert "32 devices on 4 hosts" in known.lines()[0]
    assert known.lines()[0].endswith(": $96.00 an hour (spot)")
    assert estimate(load(SPOT)).lines()[0].endswith(": $100.00 an hour (spot, assumed)")
    assert estimate(load(STANDARD)).lines()[0].endswith(": $352.00 an hour (standard, assumed)")


@pytest.mark.parametrize(
    ("when", "seconds", "text"),
    [
        ("{kind: steps, every_steps: 40}", None, "saved every 40 steps; "),
        ("{kind: seconds, every_seconds: 600}", 600, "saved every 0:10:00; "),
        ("{kind: auto}", 416.2, "saved every 0:06:56 at first (auto); "),
        ("{kind: epochs}", None, "saved every epoch; "),
        ("{kind: epochs, every_epochs: 3}", None, "saved every 3 epochs; "),
        ("{kind: continuous}", 33, "saved every 33.0 s; "),
    ],
)
def test_the_interval_is_that_of_the_config(when: str, seconds: float | None, text: str) -> None:
    known = estimate(load(overrides=(f"checkpoint.when={when}",)))
    assert known.interval_seconds == (None if seconds is None else pytest.approx(seconds, rel=1e-3))
    assert known.lines()[2].startswith(text)
    given = estimate(
        load(overrides=(f"checkpoint.when={when}",)), given={"--save-every-seconds": 99.0}
    )
    assert given.interval_seconds == 99.0
    assert given.lines()[2].startswith("saved every 0:01:39; ")


def test_measured_steps_give_the_seconds_between_saves() -> None:
    known = estimate(load(overrides=("checkpoint.save_every_steps=40",)), step_seconds=5.0)
    assert known.interval_seconds == 200.0
    assert known.lines()[2].startswith("saved every 40 steps (0:03:20, measured); ")


def test_preemptions_that_save_nothing_shorten_the_best_interval() -> None:
    saved, unsaved = estimate(load(SPOT)), estimate(load(OLD_SPOT), state_bytes=640e9)
    assert saved.job.is_saved_at_notice
    assert saved.losses_per_hour == pytest.approx(32 / 50_677, rel=1e-3)
    assert unsaved.losses_per_hour == pytest.approx(32 / 50_677 + 4 * 0.15 / 24, rel=1e-3)
    assert unsaved.lost_share(4320) > 0.01 > saved.lost_share(4320)
    rare = estimate(load(STANDARD), state_bytes=640e9)
    assert unsaved.best_interval_seconds < rare.best_interval_seconds


RATE = StorageRate(
    place="gs://bkt",
    machine="a3-highgpu-8g",
    write_mb_per_second=400.0,
    read_mb_per_second=800.0,
    date="2026-11-26",
)


@pytest.mark.parametrize(
    ("changes", "times", "text", "is_measured"),
    [
        ({}, (16, 16), "1,000 MB/s a host assumed, see `doctor --storage`", False),
        ({"rate": RATE}, (40, 20), "400 and 800 MB/s a host, measured on a3-highgpu-8g, ", True),
        ({"rate": RATE, "given": {"--write-mb-per-s": 2000.0}}, (8, 8), "at the given rate", True),
        ({"given": {"--read-mb-per-s": 500.0}}, (16, 32), "at the given rate", False),
        (
            {"rate": RATE, "given": {"write_seconds": 7.0, "read_seconds": 9.0}},
            (7, 9),
            "as in the run",
            True,
        ),
    ],
)
def test_seconds_of_a_save_and_a_restore_follow_from_the_rate_and_its_source_is_said(
    changes: dict[str, Any], times: tuple[float, float], text: str, is_measured: bool
) -> None:
    known = estimate(load(SPOT), **changes)
    assert (known.job.write_seconds, known.job.read_seconds) == times
    assert f"a save takes {times[0]} s, a restore {times[1]} s ({text}" in known.lines()[1]
    assert known.is_measured == is_measured


def test_a_job_of_an_unknown_state_has_no_seconds() -> None:
    known = estimate(load(), state_bytes=None)
    assert known.lines()[1] == "state unknown"
    assert known.lines()[-1].endswith("the state is of unknown size")
