"""The time that a supervisor counts: each second has one class, and keeps it."""

import random

import pytest

from jaxres.goodput.intervals import Activity
from jaxres.goodput.live_timeline import LiveTimeline


def nonzero(timeline, *, now):
    return {key: value for key, value in timeline.seconds(now=now).items() if value}


def test_each_second_of_an_attempt_has_the_class_of_its_phase():
    timeline = LiveTimeline(since=0.0)
    timeline.on_attempt_started(now=2.0)
    timeline.on_phase("import", now=2.5)
    timeline.on_phase("compile", now=5.0)
    timeline.on_phase("train", now=8.0)
    timeline.on_step(1, skipped=False, now=9.0)
    timeline.on_step(2, skipped=True, now=10.0)
    timeline.on_phase("wait for data", now=10.5)
    timeline.on_phase("train", now=12.5)
    timeline.on_step(3, skipped=False, now=13.0)
    timeline.on_phase("save", now=13.25)
    timeline.on_phase("train", now=14.25)
    timeline.on_step(4, skipped=False, now=15.0)
    timeline.on_exit_announced(now=15.0)
    timeline.on_attempt_ended(announced=True, now=16.0)
    assert nonzero(timeline, now=20.0) == {
        "down": 6.0,
        "start_up": 4.0,
        "compile": 3.0,
        "productive": 3.0,
        "skipped": 1.0,
        "data_wait": 2.0,
        "save_stall": 1.0,
    }


def test_a_step_that_is_trained_again_is_replayed_and_one_behind_it_is_not():
    timeline = LiveTimeline(since=0.0, reached=2)
    for now, step in enumerate((1, 2, 3), start=1):
        timeline.on_phase("train", now=now - 1)
        timeline.on_step(step, skipped=False, now=now)
    assert nonzero(timeline, now=3.0) == {"replayed": 2.0, "productive": 1.0}


def test_after_a_kill_the_time_since_the_last_sign_is_detection():
    timeline = LiveTimeline(since=0.0)
    timeline.on_phase("train", now=0.0)
    timeline.on_step(1, skipped=False, now=1.0)
    timeline.on_attempt_ended(announced=False, now=31.0)
    assert nonzero(timeline, now=31.0) == {"productive": 1.0, "detection": 30.0}


@pytest.mark.parametrize("seed", range(20))
def test_the_classes_sum_up_to_the_time_and_none_ever_shrinks(seed):
    chance, now = random.Random(seed), 100.0
    timeline = LiveTimeline(since=now)
    before = timeline.seconds(now=now)
    step = 0
    for _ in range(200):
        now += chance.choice((0.0, 0.1, 3.0))
        match chance.randrange(6):
            case 0:
                timeline.on_attempt_started(now=now)
            case 1:
                timeline.on_exit_announced(now=now)
            case 2:
                timeline.on_attempt_ended(announced=chance.random() < 0.5, now=now)
            case 3:
                step = max(1, step + chance.choice((1, 1, 1, -4)))
                timeline.on_step(step, skipped=chance.random() < 0.1, now=now)
            case _:
                phase = chance.choice(
                    ("train", "save", "wait for data", "restore", "of the future")
                )
                timeline.on_phase(phase, now=now)
        found = timeline.seconds(now=now)
        assert all(found[each] >= before[each] for each in Activity)
        before = found
    timeline.on_attempt_ended(announced=True, now=now)
    assert sum(timeline.seconds(now=now + 5).values()) == pytest.approx(now + 5 - 100.0)
