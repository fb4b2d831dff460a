"""A failed run is restarted automatically and ends bit exact, or exits with a code and a reason."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.supervisor.process.spawn import FORK_SERVER
from jaxres.train.worker import NAME_PREFIX
from tests.promises.leftovers import assert_nothing_left, members
from tests.promises.test_diverged_is_never_committed import FOLDER
from tests.promises.test_elastic_hosts_keep_samples import BOUND
from tests.promises.trainer import (
    ENDLESS,
    FAULTY,
    MLP,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    run_history,
)
from tests.promises.trainer import history as rows_of
from tests.tiers import campaign_but
from tests.waiting import SURE_SECONDS, wait_until

QUICK = "restart.backoff_seconds=0.1"


def start(
    workspace: Workspace, *overrides: str, hosts: int | str = 1, name: str = "run", **env: str
) -> TrainingProcess:
    """Starts a supervised FAULTY run."""
    arguments = (QUICK, *overrides)
    return workspace.launch(
        name, *arguments, hosts=hosts, config=FAULTY, env=PACED | env, restart=True
    )


def decisions(trainer: TrainingProcess, kind: str = "attempt_restarted") -> list[dict[str, Any]]:
    reported = read_events(trainer.run_dir.supervisor_events)
    return [event for event in reported if event["event"] == kind]


def attempts(trainer: TrainingProcess) -> int:
    return len(run_history(trainer.run_dir).claims)


def wait_attempt(trainer: TrainingProcess, attempt: int) -> None:
    """Waits for an attempt and makes it the trainer's current one."""
    trainer.wait(lambda: attempts(trainer) >= attempt, what=f"attempt {attempt}")
    trainer.attempt = attempt


def fork_servers(trainer: TrainingProcess) -> set[int]:
    """Returns the pid of the process that workers are forked from, if there is one."""
    return {pid for pid in members(trainer.run_dir) if is_fork_server(pid)}


def is_fork_server(pid: int) -> bool:
    """Returns whether a process is a fork server; its forks have its command line."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_worker = Path(f"/proc/{pid}/comm").read_text().startswith(NAME_PREFIX)
        return FORK_SERVER.encode() in command and not is_worker
    return False


def wait_fork_server(trainer: TrainingProcess, *, prepared: int) -> None:
    """Suspends the training workers until so many fork servers are ready."""
    for pid in trainer.workers().values():
        os.kill(pid, signal.SIGSTOP)
    trainer.wait(
        lambda: len(decisions(trainer, "fork_server_ready")) >= prepared, what="a ready fork server"
    )


def forked(trainer: TrainingProcess, host: int = 0) -> list[bool]:
    """Returns attempt -> whether the host's worker was forked."""
    numbers = range(1, attempts(trainer) + 1)
    reported = [read_events(trainer.run_dir.events(number, host)) for number in numbers]
    return [e["forked"] for events in reported for e in events if e["event"] == "run_opened"]


def kill_at_random(trainer: TrainingProcess, *, kills: int, seed: int) -> None:
    """Kills workers of the run at random moments of as many attempts."""
    chance = random.Random(seed)
    for attempt in range(1, kills + 1):
        wait_attempt(trainer, attempt)
        trainer.wait(lambda: bool(trainer.workers()), what="a worker")
        if chance.random() < 0.7:
            trainer.wait_step(run_history(trainer.run_dir).step + 1)
        time.sleep(chance.uniform(0, 0.5))
        victim = chance.choice(sorted(trainer.workers().values()))
        os.kill(victim, signal.SIGKILL)
        wait_attempt(trainer, attempt + 1)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_killed_workers_are_restarted_bit_exact(
    workspace: Workspace, fault_free: RunDir, fault_free_pair: RunDir, hosts: int
) -> None:
    # No attempt ends before its kill, and workers that are suspended here have steps to repeat.
    often = "restart.max_attempts_without_commit=20"
    trainer = start(workspace, often, hosts=hosts, HELD="15")
    if hosts > 1:
        trainer.wait_step(12)
        wait_fork_server(trainer, prepared=1)
    kill_at_random(trainer, kills=2, seed=hosts)
    assert trainer.wait_exit() == 0, trainer.printed()
    claims = run_history(trainer.run_dir).claims
    assert len(claims) == 3, "as many attempts as kills, and one more"
    if hosts > 1:
        assert len({claim.coordinator for claim in claims}) == 3, "a port is used again"
        assert forked(trainer, host=1)[:2] == [False, True], trainer.printed()
    reported = decisions(trainer)
    assert [event["exit"] for event in reported] == [128 + signal.SIGKILL] * 2, trainer.printed()
    assert len(decisions(trainer, "supervision_ended")) == 1
    # The tests' spare processes neither: else each supervised worker of a test imports jax again.
    assert "had left behind" not in trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free if hosts == 1 else fault_free_pair)
    assert_nothing_left(trainer.run_dir)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_run_with_many_killed_workers_ends_bit_exact(
    workspace: Workspace, fault_free: RunDir, fault_free_pair: RunDir, hosts: int, seed: int
) -> None:
    # No attempt commits more than one save: none ends before its kill.
    often = ("restart.max_attempts_without_commit=50", "checkpoint.save_every_steps=5")
    trainer = start(workspace, *often, hosts=hosts, PACE="0.005", HELD="9")
    kill_at_random(trainer, kills=8, seed=seed)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free if hosts == 1 else fault_free_pair)
    assert_nothing_left(trainer.run_dir)


@pytest.mark.campaign
def test_a_run_that_fails_at_once_every_time_is_given_up(workspace: Workspace) -> None:
    trainer = start(workspace, "restart.max_attempts_without_commit=3", FAULT="build:1:fail")
    printed = trainer.assert_gave_up(ExitCode.NO_PROGRESS)
    assert attempts(trainer) == 3
    assert "3 attempts have ended without a new committed step (newest: 0)" in printed
    assert "what to do: fix what the traceback shows" in printed
    tail = printed.partition("lines of")[2]
    assert "traceback-host000.txt" in tail
    assert "OnPurpose: requested by the test" in tail
    assert [event["exit"] for event in decisions(trainer)] == [70, 70]
    (gave_up,) = decisions(trainer, "gave_up")
    assert (gave_up["exit"], gave_up["attempt"]) == (ExitCode.NO_PROGRESS, 3)


@pytest.mark.slow
def test_a_new_supervisor_keeps_the_failure_count_and_resets_it_after_a_give_up(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """Otherwise the budget would never stop a scheduler that restarts the supervisor repeatedly."""
    limit = "restart.max_attempts_without_commit=2"
    first = start(workspace, limit, "restart.backoff_seconds=60", FAULT="build:1:fail")
    first.wait_printed("restart from step 0 in ")
    first.kill(target="supervisor")
    first.wait_exit()
    second = start(workspace, limit, FAULT="build:1:fail")
    assert "2 attempts have ended" in second.assert_gave_up(ExitCode.NO_PROGRESS)
    assert attempts(second) == 2, "the budget was forgotten"
    third = start(workspace, limit)
    assert third.wait_exit() == 0, third.printed()
    started = [
        (
            reported["after_kill"],
            reported["attempt"],
            reported["num_ended_attempts"],
            reported["budget"],
        )
        for reported in decisions(third, "supervision_started")
    ]
    used = "failure 1 of 2 without a new commit"
    assert started == [(False, 0, 0, ""), (True, 1, 1, used), (False, 2, 0, "")]
    assert_bit_exact(third.run_dir, fault_free)


@pytest.mark.slow
def test_progress_resets_the_restart_budget(workspace: Workspace, fault_free: RunDir) -> None:
    """Three failures with a budget of two: new steps were committed before each of them.

    The second attempt is a fork of the fork server, the third is not: the server was killed too.
    """
    trainer = start(workspace, "restart.max_attempts_without_commit=2", HELD="15")
    for attempt in (1, 2, 3):
        wait_attempt(trainer, attempt)
        trainer.wait_commit(10 * attempt)
        if attempt == 2:
            (fork_server,) = fork_servers(trainer)
            os.kill(fork_server, signal.SIGKILL)
        else:
            wait_fork_server(trainer, prepared=1 + attempt // 2)
        trainer.kill(target="worker")
        wait_attempt(trainer, attempt + 1)
    assert trainer.wait_exit() == 0, trainer.printed()
    assert forked(trainer) == [False, True, False, True], "a worker came from elsewhere"
    (noted,) = decisions(trainer, "note")
    assert "a fresh process instead of a fork" in noted["message"]
    assert not fork_servers(trainer), "the fork server outlives its supervisor"
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        (ExitCode.CONFIG, ("hooks=[{target: 'json:absent'}]",)),
        pytest.param(
            ExitCode.DIVERGED,
            (
                *("optimizer.kind=sgd", "optimizer.learning_rate=1", "optimizer.momentum=0"),
                *("optimizer.clip_norm=null", "model.kind=custom", "model.args.call=21"),
                "model.target=bad_models:nan_at",
            ),
            marks=pytest.mark.campaign,
        ),
    ],
    ids=["config", "diverged"],
)
def test_permanent_failures_are_not_retried(
    workspace: Workspace, code: ExitCode, overrides: tuple[str, ...]
) -> None:
    env = {"PYTHONPATH": str(FOLDER)}
    trainer = workspace.launch("run", *MLP, QUICK, *overrides, hosts=1, env=env, restart=True)
    trainer.assert_fails(code)
    assert attempts(trainer) == 1
    assert not decisions(trainer)


@pytest.mark.slow
def test_a_preempted_worker_is_restarted_at_once_without_using_the_budget(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """With a budget of one, the first counted failure would be the last."""
    slow = ("restart.max_attempts_without_commit=1", "restart.backoff_seconds=60")
    trainer = start(workspace, *slow)
    trainer.wait_phase("data")
    trainer.kill(signal.SIGTERM, target="worker")
    wait_attempt(trainer, 2)
    trainer.wait_step(13)
    trainer.kill(signal.SIGTERM, target="worker")
    wait_attempt(trainer, 3)
    assert trainer.wait_exit() == 0, f"a preemption was charged\n{trainer.printed()}"
    reported = [(event["exit"], event["after_seconds"]) for event in decisions(trainer)]
    assert reported == [(ExitCode.PREEMPTED, 0.0)] * 2
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.campaign
def test_a_suspended_worker_counts_as_hung_and_is_restarted(
    workspace: Workspace, fault_free: RunDir
) -> None:
    limits = ("deadlines.step_seconds=10", "data.timeout_seconds=15", "deadlines.data_seconds=20")
    trainer = start(workspace, *limits, PACE="0.01", HELD="1000")  # A hold has another limit.
    trainer.wait_step(13)
    trainer.kill(signal.SIGSTOP, target="worker")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert [event["exit"] for event in decisions(trainer)] == [ExitCode.HUNG]
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.campaign
@pytest.mark.parametrize("host", [0, 1])
def test_a_suspended_worker_of_two_counts_as_lost_and_is_restarted(
    workspace: Workspace, fault_free_pair: RunDir, host: int
) -> None:
    trainer = start(workspace, "hosts.heartbeat_seconds=15", hosts=2)
    trainer.wait_step(13)
    os.kill(trainer.workers()[host], signal.SIGSTOP)
    assert trainer.wait_exit() == 0, trainer.printed()
    reported = [(event["exit"], event["culprit"]) for event in decisions(trainer)]
    assert reported == [(ExitCode.PEER_LOST, host)]
    assert_bit_exact(trainer.run_dir, fault_free_pair)


@pytest.mark.slow
def test_no_process_of_an_attempt_is_left_when_the_next_starts(
    workspace: Workspace, fault_free: RunDir
) -> None:
    tag = str(workspace.run_dir("run").root)
    trainer = start(workspace, FAULT="build:1:spawn", TAG=tag)
    trainer.wait_step(13)
    before = set(members(trainer.run_dir)) - {trainer.process.pid} - fork_servers(trainer)
    assert len(before) == 3, "the worker and two that it has started"
    trainer.kill(target="worker")
    wait_attempt(trainer, 2)
    assert not before & set(members(trainer.run_dir)), "left behind"
    assert trainer.wait_exit() == 0, trainer.printed()
    assert "process(es) that an attempt had left behind were killed" in trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)
    assert_nothing_left(trainer.run_dir)


@pytest.mark.slow
def test_the_successor_of_a_killed_supervisor_cleans_up_and_resumes(
    workspace: Workspace, fault_free_pair: RunDir
) -> None:
    tag = str(workspace.run_dir("run").root)
    first = start(workspace, ENDLESS, hosts=2, FAULT="build:1:spawn", TAG=tag, PACE="0.005")
    first.wait_step(2)
    wait_fork_server(first, prepared=1)
    first.kill(target="worker")
    wait_attempt(first, 2)
    first.wait_step(13)
    assert forked(first, host=1) == [False, True]
    workers = set(first.workers().values()) | fork_servers(first)
    assert len(workers) == 3
    first.kill(target="supervisor")
    assert first.wait_exit() == -signal.SIGKILL
    wait_until(
        lambda: not workers & set(members(first.run_dir)),
        "end: workers outlive their supervisor",
    )
    left = {pid for pid in members(first.run_dir) if "JAXRES_ATTEMPT" in environment(pid)}
    assert left, "something is left to be ended"
    mark = f"JAXRES_ATTEMPT={run_history(first.run_dir).claims[1].nonce}."
    assert all(mark in environment(pid) for pid in left), "marked as of an earlier attempt"
    others = set(members(first.run_dir)) - left
    try:
        second = start(workspace, hosts=2)
        assert second.wait_exit() == 0, second.printed()
        assert not left & set(members(first.run_dir)), "left behind"
        loaded = [bool(second.events_of("compiled_steps_loaded", host)) for host in (0, 1)]
        assert loaded == [True, True], "on one machine, one file serves every host"
    finally:
        for pid in others:  # Without a mark and a successor, no process finds it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert_bit_exact(second.run_dir, fault_free_pair)
    assert_nothing_left(second.run_dir)


def environment(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("how", campaign_but(["SIGTERM", "SIGINT", "stop"], "stop"))
def test_a_stop_during_the_restart_delay_exits_at_once(
    workspace: Workspace, tmp_path: Path, how: str
) -> None:
    delay = 10 * SURE_SECONDS  # No wait for it would end.
    change = f"from jaxres.supervisor import restart_policy as p; p.MAX_BACKOFF_SECONDS = {delay}"
    (tmp_path / "sitecustomize.py").write_text(change)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    delays = f"restart.backoff_seconds={delay}"
    trainer = start(workspace, delays, FAULT="build:1:fail", PYTHONPATH=path)
    trainer.wait_printed("restart from step 0 in ")
    if how == "stop":
        trainer.run_dir.request("stop").touch()
    else:
        trainer.kill(signal.Signals[how], target="supervisor")
    code = ExitCode.PREEMPTED if how == "SIGTERM" else ExitCode.STOPPED
    assert trainer.wait_exit() == code, trainer.printed()
    assert attempts(trainer) == 1
    assert not trainer.run_dir.request("stop").exists()
    assert_nothing_left(trainer.run_dir)


@pytest.mark.slow
def test_nothing_is_restarted_after_a_stop_whose_attempt_crashes(workspace: Workspace) -> None:
    trainer = start(workspace)
    trainer.wait_step(1)
    trainer.kill(signal.SIGSTOP, target="worker")  # It must not save first.
    trainer.run_dir.request("stop").touch()
    trainer.wait_printed("saving after the current step")
    trainer.kill(target="worker")
    assert trainer.wait_exit() == ExitCode.STOPPED, trainer.printed()
    assert "asked to stop, then " in trainer.printed()
    assert attempts(trainer) == 1
    assert not trainer.run_dir.request("stop").exists()
    assert_nothing_left(trainer.run_dir)


@pytest.mark.campaign
def test_a_second_signal_kills_at_once_and_nothing_is_restarted(workspace: Workspace) -> None:
    trainer = start(workspace)
    trainer.wait_step(1)
    trainer.kill(signal.SIGSTOP, target="worker")  # It must not save first.
    trainer.kill(signal.SIGTERM, target="supervisor")
    trainer.wait_printed("saving after the current step")
    trainer.kill(signal.SIGTERM, target="supervisor")
    assert trainer.wait_exit() == 128 + signal.SIGTERM, trainer.printed()
    assert attempts(trainer) == 1
    assert not decisions(trainer, "gave_up")
    assert_nothing_left(trainer.run_dir)


@pytest.mark.campaign
def test_a_stop_during_training_saves_and_is_not_restarted(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = start(workspace)
    trainer.wait_step(13)
    trainer.kill(signal.SIGTERM, target="supervisor")
    assert trainer.wait_stopped() == ExitCode.PREEMPTED, trainer.printed()
    assert attempts(trainer) == 1
    assert run_history(trainer.run_dir).step >= 13
    second = start(workspace)
    assert second.wait_exit() == 0, second.printed()
    assert_bit_exact(second.run_dir, fault_free)


@pytest.mark.campaign
def test_a_suspended_supervisor_restarts_nothing_and_a_second_one_is_rejected(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """Suspended for longer than each deadline of a training worker."""
    limits = [f"deadlines.{phase}_seconds=10" for phase in ("step", "data", "evaluate")]
    limits += ["data.timeout_seconds=9", "checkpoint.timeout_seconds=6"]
    limits += ["deadlines.save_seconds=13"]
    trainer = start(workspace, *limits, PACE="0.03", HELD="1000")  # No hold within the limits.
    trainer.wait_step(13)
    trainer.kill(signal.SIGSTOP, target="supervisor")
    time.sleep(15)
    trainer.kill(signal.SIGCONT, target="supervisor")
    second = start(workspace)
    second.assert_fails(ExitCode.FENCED, f"pid {trainer.process.pid}")
    assert trainer.wait_exit() == 0, trainer.printed()
    assert attempts(trainer) == 1, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_an_unhealthy_host_is_excluded(workspace: Workspace, fault_free_pair: RunDir) -> None:
    trainer = start(workspace, hosts="1..2", FAULT="trace:1:unhealthy")
    assert trainer.wait_exit() == 0, trainer.printed()
    (reported,) = decisions(trainer)
    assert (reported["exit"], reported["culprit"]) == (ExitCode.UNHEALTHY, 1)
    assert (reported["num_hosts"], reported["excluded_slots"]) == (1, [1])
    assert [claim.num_hosts for claim in run_history(trainer.run_dir).claims] == [2, 1]
    assert [row["samples"] for row in rows_of(trainer.run_dir)] == [
        row["samples"] for row in rows_of(fault_free_pair)
    ]


@pytest.mark.campaign
@pytest.mark.parametrize("most", [2, 3])
def test_a_host_named_by_two_faults_is_excluded_also_by_the_next_supervisor(
    workspace: Workspace, fault_free: RunDir, most: int
) -> None:
    hosts = f"{most - 1}..{most}"
    trainer = start(workspace, hosts=hosts, HELD="15")
    for attempt in (1, 2):
        wait_attempt(trainer, attempt)
        trainer.wait_step(3)
        os.kill(trainer.workers()[1], signal.SIGKILL)
        wait_attempt(trainer, attempt + 1)
    facts = ("culprit", "num_hosts", "excluded_slots")
    named = [tuple(reported[fact] for fact in facts) for reported in decisions(trainer)]
    assert named == [(1, most, []), (1, most - 1, [1])], trainer.printed()
    trainer.wait_commit(10)
    trainer.kill(target="supervisor")
    trainer.wait_exit()
    second = start(workspace, hosts=hosts)
    assert second.wait_exit() == 0, second.printed()
    all_slots, left = tuple(range(most)), (0, 2)[: most - 1]
    slots = [claim.slots for claim in run_history(trainer.run_dir).claims]
    assert slots == [all_slots, all_slots, left, left]
    here, there = rows_of(trainer.run_dir), rows_of(fault_free)
    assert [row["samples"] for row in here] == [row["samples"] for row in there]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True)) < BOUND
    assert_nothing_left(trainer.run_dir)


@pytest.mark.slow
def test_an_unavailable_log_is_waited_for_and_never_recreated(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = start(workspace, "restart.storage_backoff_seconds=1")
    trainer.wait_commit(20)
    trainer.kill(signal.SIGSTOP, target="worker")  # It must not see that the log is away.
    log = trainer.run_dir.log
    log.rename(log.with_name("away"))
    trainer.kill(target="worker")
    trainer.wait(lambda: len(decisions(trainer)) >= 2, what="two decisions")
    assert not log.exists()
    log.with_name("away").rename(log)
    assert trainer.wait_exit() == 0, trainer.printed()
    codes = [event["exit"] for event in decisions(trainer)]
    assert codes == [128 + signal.SIGKILL] + [ExitCode.STORAGE] * (len(codes) - 1)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_the_time_limit_saves_and_ends_the_run(workspace: Workspace) -> None:
    trainer = start(workspace, "launch.max_hours=0.003", PACE="0.02")
    printed = trainer.assert_gave_up(ExitCode.NO_PROGRESS)
    assert "launch.max_hours=0.003 is reached" in printed
    assert attempts(trainer) == 1
