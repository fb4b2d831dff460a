import dataclasses
import json
import random

import pytest

from jaxres.checkpoint.retention.retention import DAY_SECONDS, CommittedStep, plan, sweep
from jaxres.config.schema.checkpoint import KeepSection
from jaxres.runlog import step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record, fold
from tests.tiers import slow_but
from tests.unit.runlog.example_records import CLAIM

HOUR = 3600.0
MONDAY = 4 * DAY_SECONDS


def kept(steps, *, pinned=(), **keep):
    """Returns the steps that are kept; `last` is 2 unless the test sets it."""
    found = plan(steps, KeepSection(**{"last": 2, **keep}), pinned=pinned)
    assert set(found.dead) | {s for s, why in found.reasons.items() if why} == set(found.reasons)
    return [s.step for s in found.steps if s.step not in found.dead]


def at(*times, **facts):
    return [CommittedStep(10 * (i + 1), time, **facts) for i, time in enumerate(times)]


def test_the_newest_steps_are_kept_in_whatever_order_they_come():
    steps = [CommittedStep(step, 0.0) for step in (40, 10, 30, 20)]
    assert kept(steps, last=2) == [30, 40]
    assert kept(steps, last=4) == kept(steps, last=9) == [10, 20, 30, 40]
    assert kept([]) == []
    assert kept(steps[:1]) == [40]


def test_all_of_the_last_hours_are_kept_counted_from_the_newest_commit():
    steps = at(0, HOUR, 2 * HOUR, 2.5 * HOUR, 3 * HOUR)
    assert kept(steps, hours=1) == [40, 50]
    assert kept(steps, hours=2) == [30, 40, 50]
    a_month_later = at(0, HOUR, 2 * HOUR, 30 * DAY_SECONDS, 30 * DAY_SECONDS + 1)
    assert kept(a_month_later, hours=24) == [40, 50]


def test_the_newest_step_of_each_day_and_week_is_kept():
    days = [MONDAY + day * DAY_SECONDS + hour * HOUR for day in range(10) for hour in (1, 13)]
    steps = at(*days)
    assert kept(steps, daily=3) == [160, 180, 190, 200]
    assert kept(steps, weekly=2) == [140, 190, 200], "Sunday's newest, and the newest of all"


def test_a_pause_or_a_clock_jump_deletes_no_daily_step():
    before = [day * DAY_SECONDS for day in range(5)]
    paused = at(*before, *(day + 90 * DAY_SECONDS for day in before[:1]))
    assert kept(paused, daily=4) == [30, 40, 50, 60]
    jumped = at(*before, 900 * DAY_SECONDS, 5 * DAY_SECONDS)
    assert kept(jumped, daily=4) == [40, 50, 60, 70]


def test_multiples_are_always_kept():
    assert kept(at(*range(12)), every_steps=40) == [40, 80, 110, 120]


def test_the_best_are_kept_one_for_each_evaluation():
    losses = [(3.0, 5), (1.0, 15), (1.0, 15), (float("nan"), 35), (2.0, 45), (None, 0), (9, 65)]
    steps = [
        CommittedStep(10 * (i + 1), 0.0, heldout_loss=loss, evaluated_step=step)
        for i, (loss, step) in enumerate(losses)
    ]
    assert kept(steps, best=1) == [20, 60, 70]
    assert kept(steps, best=2) == [20, 50, 60, 70]
    assert kept(steps, best=9) == [10, 20, 50, 60, 70]


def test_only_losses_on_the_data_of_the_newest_evaluation_are_compared():
    data = ("", "easy", "easy", "hard", "hard", "", "")
    losses = (4.0, 1.0, 1.5, 3.0, 2.0, None, None)
    steps = [
        CommittedStep(10 * n, 0.0, heldout_loss=loss, evaluated_step=10 * n, heldout_data=name)
        for n, (name, loss) in enumerate(zip(data, losses, strict=True), 1)
    ]
    assert kept(steps[:3], best=1) == [20, 30]
    assert kept(steps, best=1) == [50, 60, 70]
    assert kept(steps, best=3) == [10, 40, 50, 60, 70]  # Of step 10 the data is unknown.


def test_pinned_steps_and_the_newest_known_good_are_always_kept():
    steps = [CommittedStep(step, 0.0, known_good=step <= 30) for step in range(10, 100, 10)]
    assert kept(steps) == [30, 80, 90]
    assert kept(steps, pinned={10, 55}) == [10, 30, 80, 90]


@pytest.mark.parametrize(("every", "window"), [(1, 6), (1, 50), (4, 30), (10, 3)])
def test_one_step_out_of_reach_of_any_rollback_is_always_kept(every, window):
    """Holds for every newest commit at which a spike is detected, with few steps kept."""
    steps = []
    for newest in range(every, 40 * every + 4 * window, every):
        good = newest - window
        steps = [
            dataclasses.replace(s, known_good=s.step <= good, grows_good=s.step > good)
            for s in [*steps, CommittedStep(newest, 0.0)]
        ]
        dead = plan(steps, KeepSection(last=2)).dead
        steps = [s for s in steps if s.step not in dead]
        assert len(steps) <= 4
        known = [s.step for s in steps if s.known_good]
        assert known or good < every
        assert not known or good - known[-1] < window + 2 * every, (
            "and none is older than necessary"
        )


def test_a_step_is_kept_by_any_policy_and_the_reasons_list_all():
    steps = at(0, DAY_SECONDS, 2 * DAY_SECONDS, 2 * DAY_SECONDS + 1)
    found = plan(steps, KeepSection(last=2, daily=2, every_steps=20), pinned={20})
    assert found.reasons == {
        10: (),
        20: ("daily", "every 20 steps", "pinned"),
        30: ("last 2",),
        40: ("last 2", "daily", "every 20 steps"),
    }
    assert found.dead == (10,)


@pytest.mark.parametrize("seed", slow_but(range(3), 0))
def test_over_120_days_of_commits_the_set_stays_small_and_the_newest_stay(seed):
    """Simulates commits with pauses and clock jumps, and prunes after each."""
    chance = random.Random(seed)
    keep = KeepSection(last=3, hours=6, daily=7, weekly=8, best=2)
    now, steps, committed, newest_good = 0.0, [], [], 0
    for step in range(1, 120 * 24):
        now += chance.choice([2400, 3600, 4800])
        if chance.random() < 0.002:
            now += chance.choice([-2, 1, 20]) * DAY_SECONDS * chance.random()
        is_good = step > 5 and chance.random() < 0.05
        newest_good = step if is_good else newest_good
        loss = chance.choice([None, float("inf"), chance.random()])
        steps.append(
            CommittedStep(step, now, known_good=is_good, heldout_loss=loss, evaluated_step=step)
        )
        committed.append(step)
        dead = set(plan(steps, keep, pinned={100}).dead)
        steps = [s for s in steps if s.step not in dead]
        there = [s.step for s in steps]
        assert there[-3:] == committed[-3:]
        assert not newest_good or newest_good in there
        assert step < 100 or 100 in there
        # 6 h on both sides of a jump; each of the other policies keeps at most its count.
        assert len(there) <= 2 * 9 + 3 + 7 + 8 + 2 + 2


def present(folder):
    return sorted(path.name for path in folder.iterdir())


def make(run_dir, *names, complete=False):
    """Makes step directories with a file; complete ones have a manifest of it."""
    for name in names:
        (run_dir.checkpoints / name).mkdir(parents=True)
        (run_dir.checkpoints / name / "data").write_bytes(b"1234")
        if complete:
            manifest = json.dumps({"files": {"data": {"size": 4}}})
            (run_dir.checkpoints / name / "MANIFEST.json").write_text(manifest)


def history(*commits, attempts=1):
    """A run history with these committed step directories: name -> step and attempt."""
    bodies = []
    for attempt in range(1, attempts + 1):
        bodies.append((attempt, dataclasses.replace(CLAIM, attempt=attempt)))
        for found in map(step_dirs.parse_name, commits):
            path = f"checkpoints/{found.name}"
            if found.attempt == attempt:
                commit = Commit(step=found.step, path=path, manifest="", bytes=4)
                bodies.append((attempt, commit))
    return fold([Record(seq, attempt, 0.0, body) for seq, (attempt, body) in enumerate(bodies, 1)])


def test_directories_of_killed_saves_are_deleted(tmp_path):
    run_dir = RunDir(tmp_path)
    names = ["00000008-0001", "00000024-0002.orbax-checkpoint-tmp", "00000024-0002"]
    make(run_dir, *names, "00000016-0001", ".00000004-0001.aabbccddeeff.trash")
    swept = sweep(run_dir, history("00000016-0001", attempts=2), attempt=2)
    assert present(run_dir.checkpoints) == ["00000016-0001"]
    assert sorted(swept) == sorted(names)


def test_a_superseded_process_deletes_no_directory_of_its_successors(tmp_path):
    run_dir, later = RunDir(tmp_path), ["00000024-0003", "00000032-0003.orbax-checkpoint-tmp"]
    make(run_dir, *later, "00000024-0002")
    sweep(run_dir, history(attempts=2), attempt=2)
    assert present(run_dir.checkpoints) == later


def test_a_complete_step_without_a_record_stays_until_its_step_is_committed_again(tmp_path):
    run_dir = RunDir(tmp_path)
    make(run_dir, "00000024-0001", complete=True)
    assert sweep(run_dir, history("00000032-0001", attempts=2), attempt=2) == []
    assert sweep(run_dir, history("00000016-0002", attempts=2), attempt=2) == []
    again = history("00000016-0002", "00000024-0002", attempts=2)
    assert sweep(run_dir, again, attempt=2) == ["00000024-0001"]


def test_complete_steps_of_the_attempt_itself_and_of_pruned_steps_are_deleted(tmp_path):
    run_dir = RunDir(tmp_path)
    make(run_dir, "00000008-0001", "00000024-0002", complete=True)
    before = history("00000008-0001", attempts=2)
    pruned = dataclasses.replace(before, commits=())
    assert sweep(run_dir, pruned, attempt=2) == ["00000008-0001", "00000024-0002"]


@pytest.mark.parametrize(
    "name",
    [
        "best",
        "00000008-0001-copy",
        "8-1",
        "00000008-0001.backup",
        "00000008-0001.orbax-checkpoint-tmp.mine",
        "00000008-0001 (copy)",
        ".mine.trash",
        ".00000008-0001.trash",
    ],
)
def test_names_that_no_save_produces_are_never_deleted(tmp_path, name):
    run_dir = RunDir(tmp_path)
    make(run_dir, name)
    (run_dir.checkpoints / "README").write_text("mine")
    before = present(run_dir.checkpoints)
    assert sweep(run_dir, history(attempts=2), attempt=2) == []
    assert present(run_dir.checkpoints) == before
