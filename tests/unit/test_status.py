"""What `jaxres status` tells of a run that lives, was killed, or ended by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxres import runlog, status
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from jaxres.runlog import RunLog, Stop
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


def beat(run_dir: RunDir, clock: StillClock) -> None:
    words = {"host": "h", "pid": 7, "nonce": "n", "count": 1, "locked": True, "time": clock.now}
    run_dir.owner.write_text(json.dumps(words))


def told(run_dir: RunDir, clock: StillClock) -> dict[str, str]:
    line = runlog.fold(runlog.read_records(run_dir.log))
    rows = status.text(run_dir, line, clock=clock).splitlines()
    return {row[:11].strip(): row[11:] for row in rows}


def test_a_run_whose_owner_beats_is_alive_and_one_that_missed_three_beats_is_not(tmp_path):
    clock = StillClock()
    run_dir, _ = claimed(tmp_path, clock)
    beat(run_dir, clock)
    clock.now += 2
    assert told(run_dir, clock)["alive"] == "yes: attempt 1, host h, pid 7"
    assert "touch" in told(run_dir, clock)["next"]
    clock.now += 2
    assert told(run_dir, clock)["alive"].startswith("no: attempt 1, host h, pid 7, last seen")
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
