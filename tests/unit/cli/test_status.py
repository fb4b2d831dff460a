"""`jaxres status` of a run that is live, was killed, or has exited."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxres import config
from jaxres.cli import run_state, runs, status
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.runlog import launch_events, run_log, scrub_progress
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Prune, RunLog, Start
from jaxres.supervisor.run_lock import RunLock
from tests.unit.config.conftest import MINIMAL
from tests.unit.runlog.example_records import CLAIM


@dataclass
class FakeClock:
    """A clock that advances only when a test sets it."""

    now: float = 1_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def claimed(folder: Path, clock: FakeClock) -> tuple[RunDir, RunLog]:
    run_dir = RunDir(folder)
    return run_dir, RunLog.claim(run_dir.log, CLAIM, after=[], clock=clock)


HERE = socket.gethostname()


def write_heartbeat(run_dir: RunDir, clock: FakeClock, *, host: str = HERE, count: int = 1) -> None:
    fields = {
        "host": host,
        "pid": 7,
        "nonce": "n",
        "count": count,
        "locked": True,
        "time": clock.now,
    }
    run_dir.owner.write_text(json.dumps(fields))


def read_status(run_dir: RunDir, clock: FakeClock, *, watch: bool = False) -> status.Status:
    history = run_log.fold(run_log.read_records(run_dir.log))
    return status.read_status(run_dir, history, clock=clock, watch=watch)


def status_rows(run_dir: RunDir, clock: FakeClock) -> dict[str, str]:
    rows = status.as_text(read_status(run_dir, clock)).splitlines()
    return {row[:11].strip(): row[11:] for row in rows}


def test_a_run_is_alive_until_its_lock_holder_misses_three_heartbeats(tmp_path):
    clock = FakeClock()
    run_dir, _ = claimed(tmp_path, clock)
    write_heartbeat(run_dir, clock)
    clock.now += 2
    assert status_rows(run_dir, clock)["alive"] == f"yes: attempt 1, host {HERE}, pid 7"
    assert "touch" in status_rows(run_dir, clock)["next"]
    clock.now += 2
    assert status_rows(run_dir, clock)["alive"].startswith(
        f"no: attempt 1, host {HERE}, pid 7, last"
    )
    assert (
        status_rows(run_dir, clock)["ended"]
        == "no exit record: the process was killed or the machine went down"
    )
    assert status_rows(run_dir, clock)["next"] == f"python -m jaxres.train {run_dir.root}"


def test_the_end_of_a_lost_vm_is_the_launchers(tmp_path):
    clock = FakeClock()
    run_dir, _ = claimed(tmp_path, clock)
    ended = LaunchEvent(1, "attempt_ended", clock.now + 5, cause="75", reason="vm-1: preempted")
    folder = Path(str(run_dir.launch_events))
    folder.mkdir(parents=True)
    (folder / "job-000001.jsonl").write_bytes(launch_events.encode([ended]))
    clock.now += 100
    assert status_rows(run_dir, clock)["ended"].startswith(
        "PREEMPTED: vm-1: preempted, by the launcher"
    )


def test_an_exit_is_shown_with_its_cause_and_what_to_do(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(AttemptEnded(exit=ExitCode.HUNG, reason="no progress for 30.0 s", committed=False))
    clock.now += 100
    assert (
        status_rows(run_dir, clock)["ended"] == "exit 80 HUNG (attempt 1): no progress for 30.0 s"
    )
    assert "stacks-host000.txt" in status_rows(run_dir, clock)["next"]


def test_a_worker_killed_by_a_signal_is_shown_with_the_signal(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(AttemptEnded(exit=137, reason="the worker was ended by SIGKILL", committed=False))
    clock.now += 100
    assert status_rows(run_dir, clock)["ended"].startswith(
        "exit 137 signal 9 (SIGKILL) (attempt 1)"
    )


def write(path: Path, *lines: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": at, "monotonic": at, "event": kind} | fields


RESTARTED = {"exit": 137, "step": 40, "after_seconds": 2.0, "budget": "failure 1 of 5"}


@pytest.mark.parametrize(
    ("exit", "code"),
    [
        (ExitCode.DONE, 0),
        *(
            (exit, 1)
            for exit in (ExitCode.BUG, ExitCode.STORAGE, ExitCode.PREEMPTED, ExitCode.STOPPED)
        ),
        *((exit, 1) for exit in (ExitCode.PEER_LOST, ExitCode.HUNG, 137)),
        *((exit, 3) for exit in (ExitCode.CONFIG, ExitCode.DIVERGED, ExitCode.UNHEALTHY)),
        *((exit, 3) for exit in (ExitCode.UNRESTORABLE, ExitCode.OUT_OF_MEMORY)),
    ],
)
def test_the_exit_code_shows_whether_an_operator_must_act(tmp_path, capsys, exit: int, code: int):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    assert checkpoints_cli.main(["status", str(tmp_path)], usage="") == 1, (
        "killed: it has to be restarted"
    )
    write_heartbeat(run_dir, FakeClock(SystemClock().wall()))
    assert checkpoints_cli.main(["status", str(tmp_path)], usage="") == 0, "it runs"
    write_heartbeat(run_dir, clock)
    log.append(AttemptEnded(exit=exit, reason="why", committed=False))
    capsys.readouterr()
    assert checkpoints_cli.main(["status", str(tmp_path), "--json"], usage="") == code
    fields = json.loads(capsys.readouterr().out)
    assert (fields["code"], fields["alive"], fields["attempts"][-1]["exit"]) == (code, False, exit)


def test_of_several_runs_all_are_shown_and_the_gravest_exit_code_counts(tmp_path, capsys):
    for name, exit in (("first", ExitCode.PREEMPTED), ("second", ExitCode.DIVERGED)):
        _, log = claimed(tmp_path / name, FakeClock())
        log.append(AttemptEnded(exit=exit, reason="why", committed=False))
    runs = [str(tmp_path / name) for name in ("first", "absent", "second")]
    assert checkpoints_cli.main(["status", *runs, "--json"], usage="") == ExitCode.USAGE
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    codes = {Path(row["run"]).name: row["code"] for row in rows}
    assert codes == {"first": 1, "second": 3}
    assert "absent: no run here" in printed.err
    assert checkpoints_cli.main(["status", runs[2], runs[0]], usage="") == 3
    assert capsys.readouterr().out.count("next ") == 2


def test_a_run_whose_last_step_is_committed_is_done_whatever_its_exit(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    write(run_dir.events(1, 0), event("run_built", 1.0, steps=40))
    log.append(Commit(step=40, path="p", manifest="m", bytes=1))
    assert (read_status(run_dir, clock).outlook.state, status_rows(run_dir, clock)["next"][:7]) == (
        "done",
        "nothing",
    )


def extended(folder: Path, clock: FakeClock) -> tuple[RunDir, RunLog]:
    """Returns a run of 40 steps that is complete, and whose next attempt was to train to 60."""
    run_dir, log = claimed(folder, clock)
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    write(run_dir.events(1, 0), event("run_built", 1.0, steps=40))
    log.append(Commit(step=40, path="p", manifest="m", bytes=1))
    log.append(AttemptEnded(exit=ExitCode.DONE, reason="", committed=True))
    claim: Claim = dataclasses.replace(CLAIM, attempt=2)
    records = run_log.read_records(run_dir.log)
    log = RunLog.claim(run_dir.log, claim, after=records, clock=clock)
    write(run_dir.events(2, 0), event("phase_changed", 2.0, phase="import"))
    (folder / "given.yaml").write_text(MINIMAL)
    for path, number in ((run_dir.config, 40), (run_dir.attempt(2) / "config.yaml", 60)):
        loaded = config.load(folder / "given.yaml", [f"train.steps={number}"])
        path.write_text(config.dump_yaml(loaded.config))
    return run_dir, log


@pytest.mark.parametrize(
    ("exit", "state", "code"),
    [
        (None, "down", 1),
        (ExitCode.BUG, "down", 1),
        (ExitCode.CONFIG, "needs a person", 3),
        (ExitCode.NO_PROGRESS, "needs a person", 3),
    ],
)
def test_a_complete_run_whose_extension_ended_before_it_trained_is_not_done(
    tmp_path, exit: ExitCode | None, state: str, code: int
):
    clock = FakeClock()
    run_dir, log = extended(tmp_path, clock)
    if exit == ExitCode.NO_PROGRESS:
        gave_up = event("gave_up", 2.0, attempt=2, exit=exit, step=40, reason="5 attempts")
        write(run_dir.supervisor_events, gave_up)
    if exit is not None:
        log.append(AttemptEnded(exit=exit, reason="why", committed=False))
    found = read_status(run_dir, clock)
    assert (found.outlook.state, found.outlook.code, found.steps) == (state, code, 60)
    assert exit == ExitCode.CONFIG or f"{run_dir.root} train.steps=60" in found.outlook.next
    (row,) = runs.read_rows(tmp_path, clock=clock)
    assert (row.state, row.steps) == (state, 60)


def test_an_extension_whose_config_is_damaged_counts_as_the_attempt_that_trained(tmp_path):
    clock = FakeClock()
    run_dir, _ = extended(tmp_path, clock)
    (run_dir.attempt(2) / "config.yaml").write_text("train: {steps: [")
    assert (read_status(run_dir, clock).steps, read_status(run_dir, clock).outlook.code) == (40, 0)


def test_a_supervisor_that_waits_differs_from_one_that_has_given_up(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(AttemptEnded(exit=137, reason="host 1 (h) was ended by SIGKILL", committed=False))
    write(run_dir.supervisor_events, event("attempt_restarted", 1.0, attempt=1, **RESTARTED))
    write_heartbeat(run_dir, clock)
    assert read_status(run_dir, clock).outlook.state == "restarting"
    rows = status_rows(run_dir, clock)
    assert rows["next"] == "attempt 2, 2 s after the last one"
    assert rows["restarts"] == "its supervisor (failure 1 of 5)"
    assert rows["incident"] == (
        "attempt 1: signal 9 (SIGKILL) (exit 137), no step, 0 kept: host 1 (h) was ended by SIGKILL"
    )
    started = event("supervision_started", 2.0, attempt=1, budget="failure 2 of 5")
    write(run_dir.supervisor_events, event("gave_up", 1.0, attempt=1, exit=84), started)
    assert read_status(run_dir, clock).outlook.state == "restarting", (
        "another supervisor has started"
    )
    assert status_rows(run_dir, clock)["restarts"] == "its supervisor (failure 2 of 5)"
    clock.now += 100
    assert read_status(run_dir, clock).outlook.code == 1, "the supervisor is gone"
    write(
        run_dir.supervisor_events,
        event("attempt_restarted", 1.0, attempt=0, **RESTARTED),
        event("gave_up", 2.0, attempt=1, exit=84, step=40, reason="5 attempts"),
    )
    assert read_status(run_dir, clock).outlook.code == 3
    assert "given up (exit 84 NO_PROGRESS: 5 attempts)" in status_rows(run_dir, clock)["restarts"]
    RunLog.claim(
        run_dir.log,
        dataclasses.replace(CLAIM, attempt=2),
        after=run_log.read_records(run_dir.log),
        clock=clock,
    )
    write_heartbeat(run_dir, clock)
    assert read_status(run_dir, clock).outlook.state == "running", "it was restarted manually"
    assert status_rows(run_dir, clock)["restarts"].startswith(
        "manual, unless a job of `launch slurm`"
    )
    RunLog.claim(
        run_dir.log,
        dataclasses.replace(CLAIM, attempt=3, slots=(0,)),
        after=run_log.read_records(run_dir.log),
        clock=clock,
    )
    assert status_rows(run_dir, clock)["restarts"] == "its supervisor"


def test_events_of_another_version_are_no_error():
    assert run_state.supervision([]) is None
    assert run_state.supervision([{"event": "Unknown"}, {}]) is None
    found = run_state.supervision([{"event": "gave_up"}])
    assert found is not None
    assert (found.decision, found.attempt, found.budget) == ("gave up", 0, "")


def test_each_host_of_the_attempt_is_shown_with_phase_step_and_age(tmp_path):
    clock = FakeClock()
    run_dir = RunDir(tmp_path)
    claim: Claim = dataclasses.replace(CLAIM, num_hosts=3)
    log = RunLog.claim(run_dir.log, claim, after=[], clock=clock)
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    write(
        run_dir.events(1, 0),
        event("phase_changed", clock.now - 50, phase="train"),
        event("save_started", clock.now - 5, step=8),
    )
    write(
        run_dir.events(1, 1), event("phase_changed", clock.now - 300, phase="restore", detail="x")
    )
    rows = status_rows(run_dir, clock)
    assert rows["host 0"] == "train, step 8, last event 5 s ago"
    assert rows["host 1"] == "restore (x), last event 5 min 00 s ago"
    assert "host 2" not in rows, "it has emitted no event yet"
    found = json.loads(status.as_json(read_status(run_dir, clock)))["hosts"]
    assert [(host["host"], host["phase"], host["step"]) for host in found] == [
        (0, "train", 8),
        (1, "restore", None),
    ]


class BeatingClock(FakeClock):
    """A clock whose sleeps advance the lock holder's heartbeat."""

    run_dir: RunDir

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        write_heartbeat(
            self.run_dir, FakeClock(self.now - 3600), host="far", count=int(self.now * 10)
        )


def test_a_lock_holder_with_another_clock_is_alive_if_its_heartbeat_advances(tmp_path):
    clock = BeatingClock()
    clock.run_dir, _ = run_dir, _ = claimed(tmp_path, clock)
    write_heartbeat(run_dir, FakeClock(clock.now - 3600), host="far")
    assert not read_status(run_dir, clock).is_alive
    assert "3600 s ago by its clock, which may differ" in status_rows(run_dir, clock)["alive"]
    assert read_status(run_dir, clock, watch=True).is_alive
    assert read_status(run_dir, clock, watch=True).outlook.code == 0
    still = FakeClock()
    write_heartbeat(run_dir, still, host="far")
    assert not read_status(run_dir, still, watch=True).is_alive
    assert still.now - FakeClock().now < 4


def test_a_run_that_has_just_exited_is_over_although_its_heartbeat_is_recent(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    log.append(AttemptEnded(exit=ExitCode.HUNG, reason="why", committed=False))
    write_heartbeat(run_dir, clock)
    assert read_status(run_dir, clock).outlook.state == "running", "the lock is still held"
    gave_up = event("gave_up", 2.0, attempt=1, exit=84, step=40, reason="5 attempts")
    write(run_dir.supervisor_events, gave_up)
    assert read_status(run_dir, clock).outlook.state == "needs a person"
    run_dir.supervisor_events.unlink()
    log.append(AttemptEnded(exit=ExitCode.DONE, reason="", committed=True))
    assert read_status(run_dir, clock).outlook.state == "done"
    assert status_rows(run_dir, clock)["alive"].startswith("no: ")
    assert status_rows(run_dir, clock)["ended"].startswith("exit 0 DONE")


def test_a_run_whose_supervisor_is_suspended_is_neither_running_nor_killed(tmp_path):
    clock = FakeClock()
    run_dir, _ = claimed(tmp_path, clock)
    with RunLock(run_dir, clock=clock):
        clock.now += 100
        found = read_status(run_dir, clock)
        rows = status_rows(run_dir, clock)
        assert (found.outlook.state, found.outlook.code, found.is_alive) == ("suspended", 3, False)
        assert found.recent[-1].cause == "running"
        assert f"kill -CONT {os.getpid()}" in rows["next"]
        assert rows["ended"].startswith("no: the process exists on this machine")
    assert read_status(run_dir, clock).outlook.state == "down"


@pytest.mark.parametrize("exit", [ExitCode.STOPPED, ExitCode.DIVERGED, ExitCode.BUG])
def test_a_run_is_not_alive_once_its_process_has_exited(tmp_path, exit: ExitCode):
    clock = FakeClock()
    run_dir = RunDir(tmp_path)
    with RunLock(run_dir, clock=clock):
        log = RunLog.claim(run_dir.log, CLAIM, after=[], clock=clock)
        assert read_status(run_dir, clock).outlook.state == "running"
        log.append(AttemptEnded(exit=exit, reason="why", committed=False))
    assert not read_status(run_dir, clock).is_alive
    assert read_status(run_dir, clock).outlook.code == (3 if exit == ExitCode.DIVERGED else 1)


def test_a_committed_step_that_is_damaged_on_storage_is_shown_until_it_is_pruned(tmp_path):
    clock = FakeClock()
    run_dir, log = claimed(tmp_path, clock)
    path = "checkpoints/00000010-0001"
    log.append(Commit(step=10, path=path, manifest="m", bytes=1))
    damage = scrub_progress.Damage("damaged", clock.now, "w is wrong", ("f",), ("w",))
    check = scrub_progress.StepCheck(10, path, clock.now, damage=damage)
    scrub_progress.write(run_dir, {path: check})
    assert status_rows(run_dir, clock)["damaged"] == "step 10: w is wrong"
    (shown,) = json.loads(status.as_json(read_status(run_dir, clock)))["damaged"]
    assert (shown["step"], shown["damage"]["arrays"]) == (10, ["w"])
    log.append(Prune(steps=(10,)))
    assert "damaged" not in status_rows(run_dir, clock)
