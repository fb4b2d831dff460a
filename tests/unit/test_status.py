"""What `jaxres status` tells of a run that lives, was killed, or ended by itself."""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxres.cli import checkpoints as checkpoints_cli
from jaxres.cli import run_health, status
from jaxres.clock import SystemClock
from jaxres.faults import Exit
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, RunLog, Start, Stop
from tests.unit.records import CLAIM


@dataclass
class StillClock:
    """A clock that a test sets."""

    now: float = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def claimed(folder: Path, clock: StillClock) -> tuple[RunDir, RunLog]:
    run_dir = RunDir(folder)
    return run_dir, RunLog.claim(run_dir.log, CLAIM, after=[], clock=clock)


HERE = socket.gethostname()


def beat(run_dir: RunDir, clock: StillClock, *, host: str = HERE, count: int = 1) -> None:
    words = {
        "host": host,
        "pid": 7,
        "nonce": "n",
        "count": count,
        "locked": True,
        "time": clock.now,
    }
    run_dir.owner.write_text(json.dumps(words))


def seen(run_dir: RunDir, clock: StillClock, *, watch: bool = False) -> status.Status:
    line = run_log.fold(run_log.read_records(run_dir.log))
    return status.look(run_dir, line, clock=clock, watch=watch)


def told(run_dir: RunDir, clock: StillClock) -> dict[str, str]:
    rows = status.as_text(seen(run_dir, clock)).splitlines()
    return {row[:11].strip(): row[11:] for row in rows}


def test_a_run_whose_owner_beats_is_alive_and_one_that_missed_three_beats_is_not(tmp_path):
    clock = StillClock()
    run_dir, _ = claimed(tmp_path, clock)
    beat(run_dir, clock)
    clock.now += 2
    assert told(run_dir, clock)["alive"] == f"yes: attempt 1, host {HERE}, pid 7"
    assert "touch" in told(run_dir, clock)["next"]
    clock.now += 2
    assert told(run_dir, clock)["alive"].startswith(f"no: attempt 1, host {HERE}, pid 7, last")
    assert told(run_dir, clock)["ended"] == "without a word: killed, or the machine went down"
    assert told(run_dir, clock)["next"] == f"python -m jaxres.train {run_dir.root}"


def test_an_end_is_told_with_its_cause_and_what_to_do(tmp_path):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(Stop(exit=Exit.HUNG, reason="no progress for 30.0 s", committed=False))
    clock.now += 100
    assert told(run_dir, clock)["ended"] == "exit 80 HUNG (attempt 1): no progress for 30.0 s"
    assert "stacks-host000.txt" in told(run_dir, clock)["next"]


def test_a_worker_that_a_signal_has_killed_is_told_by_the_signal(tmp_path):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(Stop(exit=137, reason="the worker was ended by SIGKILL", committed=False))
    clock.now += 100
    assert told(run_dir, clock)["ended"].startswith("exit 137 signal 9 (attempt 1)")


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": at, "monotonic": at, "event": kind} | fields


RESTARTED = {"exit": 137, "step": 40, "after_seconds": 2.0, "budget": "failure 1 of 5"}


@pytest.mark.parametrize(
    ("exit", "code"),
    [
        (Exit.DONE, 0),
        *((exit, 1) for exit in (Exit.BUG, Exit.STORAGE, Exit.PREEMPTED, Exit.STOPPED)),
        *((exit, 1) for exit in (Exit.PEER_LOST, Exit.HUNG, 137)),
        *((exit, 3) for exit in (Exit.CONFIG, Exit.DIVERGED, Exit.UNHEALTHY)),
        *((exit, 3) for exit in (Exit.UNRESTORABLE, Exit.OUT_OF_MEMORY)),
    ],
)
def test_a_script_can_tell_whether_somebody_has_to_act(tmp_path, capsys, exit: int, code: int):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    assert checkpoints_cli.main(["status", str(tmp_path)], usage="") == 1, (
        "killed: somebody starts it again"
    )
    beat(run_dir, StillClock(SystemClock().wall()))
    assert checkpoints_cli.main(["status", str(tmp_path)], usage="") == 0, "it runs"
    beat(run_dir, clock)
    log.append(Stop(exit=exit, reason="why", committed=False))
    capsys.readouterr()
    assert checkpoints_cli.main(["status", str(tmp_path), "--json"], usage="") == code
    fields = json.loads(capsys.readouterr().out)
    assert (fields["code"], fields["alive"], fields["attempts"][-1]["exit"]) == (code, False, exit)


def test_a_run_whose_last_step_is_committed_is_done_however_it_ended(tmp_path):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    write(run_dir.events(1, 0), event("RunBuilt", 1.0, steps=40))
    log.append(Commit(step=40, path="p", manifest="m", bytes=1, known_good=True))
    assert (seen(run_dir, clock).outlook.state, told(run_dir, clock)["next"][:7]) == (
        "done",
        "nothing",
    )


def test_a_supervisor_that_waits_is_told_from_one_that_has_given_up(tmp_path):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(Stop(exit=137, reason="host 1 (h) was ended by SIGKILL", committed=False))
    write(run_dir.supervisor_events, event("AttemptRestarted", 1.0, attempt=1, **RESTARTED))
    beat(run_dir, clock)
    assert seen(run_dir, clock).outlook.state == "restarting"
    rows = told(run_dir, clock)
    assert rows["next"] == "attempt 2, 2 s after the last one"
    assert rows["restarts"] == "its supervisor (failure 1 of 5)"
    assert rows["incident"] == (
        "attempt 1: signal 9 (exit 137), no step, 0 kept: host 1 (h) was ended by SIGKILL"
    )
    started = event("SupervisionStarted", 2.0, attempt=1, budget="failure 2 of 5")
    write(run_dir.supervisor_events, event("GaveUp", 1.0, attempt=1, exit=84), started)
    assert seen(run_dir, clock).outlook.state == "restarting", "another has begun"
    assert told(run_dir, clock)["restarts"] == "its supervisor (failure 2 of 5)"
    clock.now += 100
    assert seen(run_dir, clock).outlook.code == 1, "the supervisor is gone"
    write(
        run_dir.supervisor_events,
        event("AttemptRestarted", 1.0, attempt=0, **RESTARTED),
        event("GaveUp", 2.0, attempt=1, exit=84, step=40, reason="5 attempts"),
    )
    assert seen(run_dir, clock).outlook.code == 3
    assert "given up (exit 84 NO_PROGRESS: 5 attempts)" in told(run_dir, clock)["restarts"]
    RunLog.claim(
        run_dir.log,
        dataclasses.replace(CLAIM, attempt=2),
        after=run_log.read_records(run_dir.log),
        clock=clock,
    )
    beat(run_dir, clock)
    assert seen(run_dir, clock).outlook.state == "running", "somebody has started it again"
    assert told(run_dir, clock)["restarts"].startswith("whoever started it")
    RunLog.claim(
        run_dir.log,
        dataclasses.replace(CLAIM, attempt=3, places=(0,)),
        after=run_log.read_records(run_dir.log),
        clock=clock,
    )
    assert told(run_dir, clock)["restarts"] == "its supervisor"


def test_what_a_supervisor_of_another_version_has_written_is_no_error():
    assert run_health.supervision([]) is None
    assert run_health.supervision([{"event": "Unknown"}, {}]) is None
    found = run_health.supervision([{"event": "GaveUp"}])
    assert found is not None
    assert (found.word, found.attempt, found.budget) == ("gave up", 0, "")


def test_every_host_of_the_attempt_is_told_with_phase_step_and_age(tmp_path):
    clock = StillClock()
    run_dir = RunDir(tmp_path)
    claim: Claim = dataclasses.replace(CLAIM, num_hosts=3)
    log = RunLog.claim(run_dir.log, claim, after=[], clock=clock)
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    write(
        run_dir.events(1, 0),
        event("PhaseChanged", clock.now - 50, phase="train"),
        event("SaveStarted", clock.now - 5, step=8),
    )
    write(run_dir.events(1, 1), event("PhaseChanged", clock.now - 300, phase="restore", detail="x"))
    rows = told(run_dir, clock)
    assert rows["host 0"] == "train, step 8, last heard of 5 s ago"
    assert rows["host 1"] == "restore (x), last heard of 5 min ago"
    assert "host 2" not in rows, "it has told nothing yet"
    found = json.loads(status.as_json(seen(run_dir, clock)))["hosts"]
    assert [(one["host"], one["phase"], one["step"]) for one in found] == [
        (0, "train", 8),
        (1, "restore", None),
    ]


class BeatingClock(StillClock):
    """A clock during whose sleeps the owner beats."""

    run_dir: RunDir

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        beat(self.run_dir, StillClock(self.now - 3600), host="far", count=int(self.now * 10))


def test_an_owner_with_another_clock_is_judged_by_whether_its_beat_moves(tmp_path):
    clock = BeatingClock()
    clock.run_dir, _ = run_dir, _ = claimed(tmp_path, clock)
    beat(run_dir, StillClock(clock.now - 3600), host="far")
    assert not seen(run_dir, clock).is_alive
    assert "3600 s ago by its clock, which may differ" in told(run_dir, clock)["alive"]
    assert seen(run_dir, clock, watch=True).is_alive
    assert seen(run_dir, clock, watch=True).outlook.code == 0
    still = StillClock()
    beat(run_dir, StillClock(still.now + 3600), host="far")
    assert seen(run_dir, still).is_alive, "by the clock"
    assert not seen(run_dir, still, watch=True).is_alive
    assert still.now - StillClock().now < 4


def test_a_run_that_has_just_ended_is_over_though_its_beat_is_young(tmp_path):
    clock = StillClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(Stop(exit=Exit.HUNG, reason="why", committed=False))
    beat(run_dir, clock)
    assert seen(run_dir, clock).outlook.state == "running", "somebody still holds it"
    gave_up = event("GaveUp", 2.0, attempt=1, exit=84, step=40, reason="5 attempts")
    write(run_dir.supervisor_events, gave_up)
    assert seen(run_dir, clock).outlook.state == "needs a person"
    run_dir.supervisor_events.unlink()
    log.append(Stop(exit=Exit.DONE, reason="", committed=True))
    assert seen(run_dir, clock).outlook.state == "done"
    assert told(run_dir, clock)["alive"].startswith("no: ")
    assert told(run_dir, clock)["ended"].startswith("exit 0 DONE")
