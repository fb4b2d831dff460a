"""A run that falls comes back by itself and ends bit for bit, or ends typed and says why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from jaxres.faults import Exit
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from tests.promises.leftovers import assert_nothing_left, members
from tests.promises.test_diverged_is_never_committed import FOLDER
from tests.promises.test_elastic_hosts_keep_samples import BOUND
from tests.promises.trainer import FAULTY, MLP, PACED, Place, Trainer, assert_bit_exact, line
from tests.promises.trainer import history as rows_of

QUICK = "restart.backoff_seconds=0.1"
AT_ONCE_SECONDS = 1.0
MARGIN = 3


def start(
    place: Place, *overrides: str, hosts: int | str = 1, name: str = "run", **env: str
) -> Trainer:
    """Starts a supervised FAULTY run."""
    words = (QUICK, *overrides)
    return place.launch(name, *words, hosts=hosts, config=FAULTY, env=PACED | env, restart=True)


def decisions(trainer: Trainer, kind: str = "AttemptRestarted") -> list[dict[str, Any]]:
    told = read_events(trainer.run_dir.supervisor_events)
    return [event for event in told if event["event"] == kind]


def attempts(trainer: Trainer) -> int:
    return len(line(trainer.run_dir).claims)


def wait_attempt(trainer: Trainer, attempt: int) -> None:
    """Waits for an attempt, of which the trainer then speaks."""
    trainer.wait(lambda: attempts(trainer) >= attempt, what=f"attempt {attempt}")
    trainer.attempt = attempt


def zygotes(trainer: Trainer) -> set[int]:
    """Returns the pid of the process that workers are forked from, if there is one."""
    return {pid for pid in members(trainer.run_dir) if "jaxres.train.forkserver" in words_of(pid)}


def words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""


def wait_zygote(trainer: Trainer, *, prepared: int) -> None:
    """Holds the workers, which have trained, until so many zygotes have been prepared."""
    for pid in trainer.workers().values():
        os.kill(pid, signal.SIGSTOP)
    trainer.wait(
        lambda: len(decisions(trainer, "ZygotePrepared")) >= prepared, what="a prepared zygote"
    )


def forked(trainer: Trainer, host: int = 0) -> list[bool]:
    """Returns by attempt whether a host's worker was forked."""
    numbers = range(1, attempts(trainer) + 1)
    told = [read_events(trainer.run_dir.events(number, host)) for number in numbers]
    return [e["forked"] for events in told for e in events if e["event"] == "RunOpened"]


def kill_at_random(trainer: Trainer, *, kills: int, seed: int) -> None:
    """Kills workers of the run at random moments of as many attempts."""
    chance = random.Random(seed)
    for attempt in range(1, kills + 1):
        wait_attempt(trainer, attempt)
        trainer.wait(lambda: bool(trainer.workers()), what="a worker")
        if chance.random() < 0.7:
            trainer.wait_step(line(trainer.run_dir).step + 1)
        time.sleep(chance.uniform(0, 0.5))
        victim = chance.choice(sorted(trainer.workers().values()))
        os.kill(victim, signal.SIGKILL)
        wait_attempt(trainer, attempt + 1)


@pytest.mark.parametrize("hosts", [1, 2])
def test_killed_workers_come_back_bit_exact(
    place: Place, calm: RunDir, calm_pair: RunDir, hosts: int
) -> None:
    trainer = start(place, "restart.max_attempts_without_commit=20", hosts=hosts)
    if hosts > 1:
        trainer.wait_step(2)
        wait_zygote(trainer, prepared=1)
    kill_at_random(trainer, kills=2, seed=hosts)
    assert trainer.ended() == 0, trainer.said()
    claims = line(trainer.run_dir).claims
    assert len(claims) == 3, "as many attempts as kills, and one more"
    if hosts > 1:
        assert len({claim.coordinator for claim in claims}) == 3, "a port is used again"
        assert forked(trainer, host=1)[:2] == [False, True], trainer.said()
    told = decisions(trainer)
    assert [event["exit"] for event in told] == [128 + signal.SIGKILL] * 2, trainer.said()
    assert len(decisions(trainer, "SupervisionEnded")) == 1
    assert_bit_exact(trainer.run_dir, calm if hosts == 1 else calm_pair)
    assert_nothing_left(trainer.run_dir)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hosts", [1, 2])
def test_many_kills(place: Place, calm: RunDir, calm_pair: RunDir, hosts: int, seed: int) -> None:
    slow = ("restart.max_attempts_without_commit=50",)
    trainer = start(place, *slow, hosts=hosts, PACE="0.005")
    kill_at_random(trainer, kills=8, seed=seed)
    assert trainer.ended() == 0, trainer.said()
    assert_bit_exact(trainer.run_dir, calm if hosts == 1 else calm_pair)
    assert_nothing_left(trainer.run_dir)


def test_one_that_fails_at_once_every_time_is_given_up(place: Place) -> None:
    trainer = start(place, "restart.max_attempts_without_commit=3", FAULT="build:1:fail")
    said = trainer.refused_after_restarts(Exit.NO_PROGRESS)
    assert attempts(trainer) == 3
    assert "3 attempts have ended without a new committed step (newest: 0)" in said
    assert "what to do: mend what the traceback shows" in said
    tail = said.partition("lines of")[2]
    assert "traceback-host000.txt" in tail
    assert "OnPurpose: as the test has asked" in tail
    assert [event["exit"] for event in decisions(trainer)] == [70, 70]
    (gave_up,) = decisions(trainer, "GaveUp")
    assert (gave_up["exit"], gave_up["attempt"]) == (Exit.NO_PROGRESS, 3)


def test_a_new_supervisor_counts_on_and_one_after_a_give_up_begins_afresh(
    place: Place, calm: RunDir
) -> None:
    """Else whatever starts a supervisor again and again would never be stopped by a budget."""
    limit = "restart.max_attempts_without_commit=2"
    first = start(place, limit, "restart.backoff_seconds=60", FAULT="build:1:fail")
    first.wait_word("again from step 0 in ")
    first.kill(who="door")
    first.ended()
    second = start(place, limit, FAULT="build:1:fail")
    assert "2 attempts have ended" in second.refused_after_restarts(Exit.NO_PROGRESS)
    assert attempts(second) == 2, "the budget was forgotten"
    third = start(place, limit)
    assert third.ended() == 0, third.said()
    started = [
        (told["after_kill"], told["attempt"], told["ends_found"], told["budget"])
        for told in decisions(third, "SupervisionStarted")
    ]
    used = "failure 1 of 2 without a new commit"
    assert started == [(False, 0, 0, ""), (True, 1, 1, used), (False, 2, 0, "")]
    assert_bit_exact(third.run_dir, calm)


def test_progress_gives_the_budget_back(place: Place, calm: RunDir) -> None:
    """Three failures with a budget of two: each of them has committed something new before.

    The second attempt is a fork of the zygote, the third is not, since that was killed as well.
    """
    trainer = start(place, "restart.max_attempts_without_commit=2", PACE="0.003")
    for attempt in (1, 2, 3):
        wait_attempt(trainer, attempt)
        trainer.wait_commit(10 * attempt)
        if attempt == 2:
            (zygote,) = zygotes(trainer)
            os.kill(zygote, signal.SIGKILL)
        else:
            wait_zygote(trainer, prepared=1 + attempt // 2)
        trainer.kill(who="worker")
        wait_attempt(trainer, attempt + 1)
    assert trainer.ended() == 0, trainer.said()
    assert forked(trainer) == [False, True, False, True], "a worker came from elsewhere"
    (noted,) = decisions(trainer, "Noted")
    assert "a fresh process instead of a fork" in noted["message"]
    assert not zygotes(trainer), "the zygote outlives its supervisor"
    assert_bit_exact(trainer.run_dir, calm)


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        (Exit.CONFIG, ("data.source.path=/nowhere",)),
        (
            Exit.DIVERGED,
            (
                *("optimizer.kind=sgd", "optimizer.learning_rate=1", "optimizer.momentum=0"),
                *("optimizer.clip_norm=null", "model.kind=custom", "model.args.call=21"),
                "model.target=bad_models:nan_at",
            ),
        ),
    ],
    ids=["config", "diverged"],
)
def test_what_another_attempt_cannot_mend_is_not_tried(
    place: Place, code: Exit, overrides: tuple[str, ...]
) -> None:
    env = {"PYTHONPATH": str(FOLDER)}
    trainer = place.launch("run", *MLP, QUICK, *overrides, hosts=1, env=env, restart=True)
    trainer.refused(code)
    assert attempts(trainer) == 1
    assert not decisions(trainer)


def test_a_preempted_worker_is_followed_at_once_and_charged_to_nobody(
    place: Place, calm: RunDir
) -> None:
    """With a budget of one, the first failure would be the last."""
    slow = ("restart.max_attempts_without_commit=1", "restart.backoff_seconds=60")
    trainer = start(place, *slow)
    trainer.wait_phase("data")
    trainer.kill(signal.SIGTERM, who="worker")
    wait_attempt(trainer, 2)
    trainer.wait_step(13)
    trainer.kill(signal.SIGTERM, who="worker")
    assert trainer.ended() == 0, f"a preemption was charged\n{trainer.said()}"
    told = [(event["exit"], event["after_seconds"]) for event in decisions(trainer)]
    assert told == [(Exit.PREEMPTED, 0.0)] * 2
    assert_bit_exact(trainer.run_dir, calm)


def test_a_stopped_worker_is_hung_and_comes_back(place: Place, calm: RunDir) -> None:
    trainer = start(place, "deadlines.step_seconds=2")
    trainer.wait_step(13)
    trainer.kill(signal.SIGSTOP, who="worker")
    assert trainer.ended() == 0, trainer.said()
    assert [event["exit"] for event in decisions(trainer)] == [Exit.HUNG]
    assert_bit_exact(trainer.run_dir, calm)


@pytest.mark.campaign
@pytest.mark.parametrize("host", [0, 1])
def test_a_stopped_worker_of_two_is_lost_and_comes_back(
    place: Place, calm_pair: RunDir, host: int
) -> None:
    trainer = start(place, "hosts.heartbeat_seconds=5", hosts=2)
    trainer.wait_step(13)
    os.kill(trainer.workers()[host], signal.SIGSTOP)
    assert trainer.ended() == 0, trainer.said()
    told = [(event["exit"], event["culprit"]) for event in decisions(trainer)]
    assert told == [(Exit.PEER_LOST, host)]
    assert_bit_exact(trainer.run_dir, calm_pair)


def test_nothing_of_an_attempt_is_left_when_the_next_begins(place: Place, calm: RunDir) -> None:
    tag = str(place.run_dir("run").root)
    trainer = start(place, FAULT="build:1:spawn", TAG=tag)
    trainer.wait_step(13)
    before = set(members(trainer.run_dir)) - {trainer.process.pid} - zygotes(trainer)
    assert len(before) == 3, "the worker and two that it has started"
    trainer.kill(who="worker")
    wait_attempt(trainer, 2)
    assert not before & set(members(trainer.run_dir)), "left behind"
    assert trainer.ended() == 0, trainer.said()
    assert "process(es) that an attempt had left behind were ended" in trainer.said()
    assert_bit_exact(trainer.run_dir, calm)
    assert_nothing_left(trainer.run_dir)


def test_a_killed_supervisor_is_followed_by_one_that_cleans_up_and_goes_on(
    place: Place, calm_pair: RunDir
) -> None:
    tag = str(place.run_dir("run").root)
    first = start(place, hosts=2, FAULT="build:1:spawn", TAG=tag)
    first.wait_step(2)
    wait_zygote(first, prepared=1)
    first.kill(who="worker")
    wait_attempt(first, 2)
    first.wait_step(13)
    assert forked(first, host=1) == [False, True]
    workers = set(first.workers().values()) | zygotes(first)
    assert len(workers) == 3
    first.kill(who="door")
    assert first.ended() == -signal.SIGKILL
    deadline = time.monotonic() + MARGIN
    while workers & set(members(first.run_dir)):
        assert time.monotonic() < deadline, "workers outlive their supervisor"
    left = {pid for pid in members(first.run_dir) if "JAXRES_ATTEMPT" in environment(pid)}
    assert left, "something is left to be ended"
    others = set(members(first.run_dir)) - left
    try:
        second = start(place, hosts=2)
        assert second.ended() == 0, second.said()
        assert not left & set(members(first.run_dir)), "left behind"
        loaded = [bool(second.told("StepsLoaded", host)) for host in (0, 1)]
        assert loaded == [True, True], "the lead's file serves every host"
    finally:
        for pid in others:  # Without a mark and without an heir: nobody's to know.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert_bit_exact(second.run_dir, calm_pair)
    assert_nothing_left(second.run_dir)


def environment(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stop"])
def test_a_stop_while_it_waits_is_answered_at_once(place: Place, how: str) -> None:
    trainer = start(place, "restart.backoff_seconds=60", FAULT="build:1:fail")
    trainer.wait_word("again from step 0 in ")
    asked_at = time.monotonic()
    if how == "stop":
        trainer.run_dir.request("stop").touch()
    else:
        trainer.kill(signal.Signals[how], who="door")
    code = Exit.PREEMPTED if how == "SIGTERM" else Exit.STOPPED
    assert trainer.ended() == code, trainer.said()
    assert time.monotonic() - asked_at < MARGIN * AT_ONCE_SECONDS
    assert attempts(trainer) == 1
    assert not trainer.run_dir.request("stop").exists()
    assert_nothing_left(trainer.run_dir)


def test_a_second_signal_ends_at_once_and_nothing_follows(place: Place) -> None:
    trainer = start(place, PACE="0.05")
    trainer.wait_step(1)
    trainer.kill(signal.SIGTERM, who="door")
    trainer.wait_word("saving after the present step")
    trainer.kill(signal.SIGTERM, who="door")
    assert trainer.ended(seconds=20) == 128 + signal.SIGTERM, trainer.said()
    assert attempts(trainer) == 1
    assert not decisions(trainer, "GaveUp")
    assert_nothing_left(trainer.run_dir)


def test_a_stop_while_it_trains_is_kept_and_not_tried_again(place: Place, calm: RunDir) -> None:
    trainer = start(place)
    trainer.wait_step(13)
    trainer.kill(signal.SIGTERM, who="door")
    assert trainer.ended() == Exit.PREEMPTED, trainer.said()
    assert attempts(trainer) == 1
    assert line(trainer.run_dir).step >= 13
    second = start(place)
    assert second.ended() == 0, second.said()
    assert_bit_exact(second.run_dir, calm)


def test_a_suspended_supervisor_recovers_nothing_and_a_second_one_is_refused(
    place: Place, calm: RunDir
) -> None:
    """For longer than each deadline that a worker has while it trains."""
    limits = [f"deadlines.{phase}_seconds=2" for phase in ("step", "data", "evaluate")]
    limits += ["data.timeout_seconds=1", "checkpoint.timeout_seconds=2", "deadlines.save_seconds=5"]
    trainer = start(place, *limits, PACE="0.01")
    trainer.wait_step(13)
    trainer.kill(signal.SIGSTOP, who="door")
    time.sleep(6)
    trainer.kill(signal.SIGCONT, who="door")
    second = start(place)
    second.refused(Exit.FENCED, f"pid {trainer.process.pid}")
    assert trainer.ended() == 0, trainer.said()
    assert attempts(trainer) == 1, trainer.said()
    assert_bit_exact(trainer.run_dir, calm)


def test_an_unhealthy_host_is_left_out(place: Place, calm_pair: RunDir) -> None:
    trainer = start(place, hosts="1..2", FAULT="trace:1:unhealthy")
    assert trainer.ended() == 0, trainer.said()
    (told,) = decisions(trainer)
    assert (told["exit"], told["culprit"]) == (Exit.UNHEALTHY, 1)
    assert (told["num_hosts"], told["without_hosts"]) == (1, [1])
    assert [claim.num_hosts for claim in line(trainer.run_dir).claims] == [2, 1]
    assert [row["samples"] for row in rows_of(trainer.run_dir)] == [
        row["samples"] for row in rows_of(calm_pair)
    ]


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_a_host_that_two_faults_name_is_left_out_by_the_next_supervisor_too(
    place: Place, calm: RunDir, most: int
) -> None:
    hosts = f"{most - 1}..{most}"
    trainer = start(place, hosts=hosts, PACE="0.005")
    for attempt in (1, 2):
        wait_attempt(trainer, attempt)
        trainer.wait_step(3)
        os.kill(trainer.workers()[1], signal.SIGKILL)
        wait_attempt(trainer, attempt + 1)
    facts = ("culprit", "num_hosts", "without_hosts")
    named = [tuple(told[fact] for fact in facts) for told in decisions(trainer)]
    assert named == [(1, most, []), (1, most - 1, [1])], trainer.said()
    trainer.wait_step(23)
    trainer.kill(who="door")
    trainer.ended()
    second = start(place, hosts=hosts, PACE="0.005")
    assert second.ended() == 0, second.said()
    all_places, left = tuple(range(most)), (0, 2)[: most - 1]
    places = [claim.places for claim in line(trainer.run_dir).claims]
    assert places == [all_places, all_places, left, left]
    here, there = rows_of(trainer.run_dir), rows_of(calm)
    assert [row["samples"] for row in here] == [row["samples"] for row in there]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(here, there, strict=True)) < BOUND
    assert_nothing_left(trainer.run_dir)


def test_a_log_that_is_away_is_waited_for_and_never_begun_anew(place: Place, calm: RunDir) -> None:
    trainer = start(place, "restart.storage_backoff_seconds=1", PACE="0.002")
    trainer.wait_commit(20)
    log = trainer.run_dir.log
    log.rename(log.with_name("away"))
    trainer.kill(who="worker")
    trainer.wait(lambda: len(decisions(trainer)) == 2, what="two decisions")
    assert not log.exists()
    log.with_name("away").rename(log)
    assert trainer.ended() == 0, trainer.said()
    codes = [event["exit"] for event in decisions(trainer)]
    assert codes == [128 + signal.SIGKILL] + [Exit.STORAGE] * (len(codes) - 1)
    assert_bit_exact(trainer.run_dir, calm)


def test_hours_that_are_over_save_and_end(place: Place) -> None:
    trainer = start(place, "launch.max_hours=0.003", PACE="0.02")
    said = trainer.refused_after_restarts(Exit.NO_PROGRESS)
    assert "launch.max_hours=0.003 are over" in said
    assert attempts(trainer) == 1
