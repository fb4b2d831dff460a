"""What looks like a fall and is none starts nothing anew: storage that hangs, a watcher asleep."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jaxres.attempts import phase_seconds
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from tests.promises.preloaded import Jumping, Mount
from tests.promises.test_supervisor_brings_it_back import attempts, decisions, start
from tests.promises.trainer import Place, assert_bit_exact

LIMITS = ("deadlines.step_seconds=2", "deadlines.data_seconds=2", "data.timeout_seconds=1")


@pytest.fixture
def mount(place: Place, tmp_path: Path) -> Mount:
    return Mount.over(place.run_dir("run").root, built_in=tmp_path)


LONG = [pytest.param(hosts, 60, marks=pytest.mark.campaign) for hosts in (1, 2)]


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 7), *LONG])
def test_storage_that_hangs_longer_than_a_step_may_take_starts_nothing_anew(
    place: Place, request: pytest.FixtureRequest, mount: Mount, hosts: int, seconds: int
) -> None:
    calm = request.getfixturevalue("calm" if hosts == 1 else "calm_pair")
    trainer = start(place, *LIMITS, hosts=hosts, PACE="0.004", **mount.env)
    trainer.wait_step(13)
    with mount.hanging():
        second = start(place, hosts=hosts, **mount.env)
        time.sleep(seconds)
        before = trainer.process.poll()
    assert before is None, trainer.said()
    second.refused(Exit.FENCED, f"pid {trainer.process.pid}")
    assert trainer.ended() == 0, trainer.said()
    assert attempts(trainer) == 1, trainer.said()
    assert not decisions(trainer)
    assert phase_seconds(trainer.events())["save"] > seconds - 4, "it did not hang"
    assert_bit_exact(trainer.run_dir, calm)


@pytest.mark.campaign
def test_one_whose_storage_hangs_may_be_taken_over_and_the_run_lives(
    place: Place, calm: RunDir, mount: Mount
) -> None:
    """By another host, whose storage answers: three beats are missed."""
    trainer = start(place, PACE="0.004", **mount.env)
    trainer.wait_step(13)
    with mount.hanging():
        second = start(place)
        second.wait(lambda: attempts(second) == 2, what="attempt 2")
        assert second.ended() == 0, second.said()
    assert trainer.ended() == Exit.FENCED, trainer.said()
    assert attempts(trainer) == 2, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_a_wall_clock_that_jumps_by_an_hour_each_way_starts_nothing_anew(
    place: Place, calm: RunDir, tmp_path: Path
) -> None:
    clock = Jumping.built(tmp_path)
    trainer = start(place, *LIMITS, PACE="0.004", **clock.env)
    # Back before the first save: TensorStore starts no thread before the time of its last one.
    for step, seconds in ((3, -3600), (23, 3600)):
        trainer.wait_step(step)
        clock.jump(seconds)
    second = start(place, **clock.env)
    second.refused(Exit.FENCED, f"pid {trainer.process.pid}")
    assert trainer.ended() == 0, trainer.said()
    times = [event["time"] for event in trainer.events()]
    assert max(times) - min(times) > 3600, "it did not jump"
    assert attempts(trainer) == 1, trainer.said()
    assert not decisions(trainer)
    assert_bit_exact(trainer.run_dir, calm)
