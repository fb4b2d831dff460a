"""What the supervisor reports of damage: once, with the steps that are left and what to do."""

from pathlib import Path

import pytest

from jaxres import config
from jaxres.clock import SystemClock
from jaxres.runlog import run_log, scrub_progress
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Commit, Record
from jaxres.runlog.scrub_progress import Damage, StepCheck
from jaxres.supervisor.companions.scrub_process import ScrubProcess, damage_events
from jaxres.telemetry.incidents import key, of_event
from tests.unit.config.conftest import MINIMAL
from tests.unit.runlog.example_records import CLAIM


def history(*steps):
    records = [Record(1, 1, 0.0, CLAIM)]
    for seq, step in enumerate(steps, start=2):
        body = Commit(step=step, path=path(step), manifest="m", bytes=1)
        records.append(Record(seq, 1, 0.0, body))
    return run_log.fold(records)


def path(step):
    return f"checkpoints/{step:08d}-0001"


def damaged(*steps, copy=None, kind="damaged", found=3.0):
    damage = Damage(kind, found, "w is wrong", ("f",), ("w",), copy)
    return {path(step): StepCheck(step, path(step), 4.0, damage=damage) for step in steps}


RUN = RunDir(Path("/runs/a"))


@pytest.mark.parametrize(
    ("checks", "intact", "what_next"),
    [
        (damaged(10, copy="/r/x"), (20,), "copy the files of /r/x over those in /runs/a/checkpo"),
        (damaged(10), (20,), "a restore skips this step and takes step 20"),
        (damaged(10, 20), (), "no other committed step is known to be intact: request a save"),
    ],
)
def test_the_event_names_the_step_what_is_left_and_what_to_do(checks, intact, what_next):
    event = damage_events(history(10, 20), checks, run_dir=RUN)[0]
    assert (event.damaged_step, event.step, event.attempt) == (10, 20, 1)
    assert (event.files, event.arrays, event.intact_steps) == (("f",), ("w",), intact)
    assert event.reason == f"step 10 ({path(10)}) is damaged on storage: w is wrong"
    assert what_next in event.next
    incident = of_event(event, run="a")
    assert incident is not None
    assert (incident.kind, incident.reason) == ("checkpoint_damaged", event.reason)
    assert key(incident, nonce="n") == "n-1-checkpoint_damaged-0"


def test_a_step_that_is_no_longer_committed_is_not_reported():
    assert damage_events(history(20), damaged(10), run_dir=RUN) == []


def test_each_damage_is_reported_once_also_by_the_next_supervisor(tmp_path):
    (tmp_path / "x.yaml").write_text(MINIMAL)
    loaded, run_dir = config.load(tmp_path / "x.yaml").config, RunDir(tmp_path)

    def report(process, checks):
        scrub_progress.write(run_dir, checks)
        emitted = []
        with EventLog(run_dir.supervisor_events, clock=SystemClock()) as log:
            process._report(history(10, 20), lambda e: (emitted.append(e), log.emit(e)))
        return [(event.damaged_step, event.number) for event in emitted]

    first = ScrubProcess(loaded, run_dir, env={}, clock=SystemClock())
    assert report(first, damaged(10)) == [(10, 1)]
    assert report(first, damaged(10)) == []
    assert report(first, damaged(10, 20)) == [(20, 2)]
    second = ScrubProcess(loaded, run_dir, env={}, clock=SystemClock())
    assert report(second, damaged(10, 20)) == []
    assert report(second, damaged(10, found=9.0)) == [(10, 3)], "damaged again after a repair"
