"""Attempt after attempt, until the run is done or `restart` says that no other is to follow.

One process owns the run directory for all of them, also in between: it beats, answers signals and
looks for requests while it waits. Every attempt is a claim of its own with a port of its own, and
nothing that an earlier one has started is left when it is claimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxres import faults
from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.faults import Exit, Fenced, StorageUnavailable, TypedEnd
from jaxres.runlog import run_log
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Event, GaveUp, SupervisionEnded
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Leave, Line, Record
from jaxres.storage.timeouts import within
from jaxres.supervisor import (
    attempt_runner,
    failure_report,
    processes,
    restart_policy,
    run_dir_watcher,
    signal_dispatch,
    signals,
    worker_group,
)
from jaxres.supervisor.attempt import Ended, say
from jaxres.supervisor.failure_report import exit_name, last_words
from jaxres.supervisor.forkserver_client import Zygote
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.restart_policy import Again, GiveUp, Outcome, Past, Policy
from jaxres.supervisor.run_dir_watcher import Lookout
from jaxres.supervisor.run_lock import Owner
from jaxres.supervisor.watchdog import LEAVE_SECONDS
from jaxres.telemetry import stdio
from jaxres.telemetry.alert_monitors import Saves
from jaxres.telemetry.alert_sender import Alerts

TICK_SECONDS = 0.25
LOOK_SECONDS = 0.02
"""Between looks whether storage has answered yet."""
GOOD = (Exit.DONE, Exit.PREEMPTED, Exit.STOPPED)


@dataclass
class Run:
    """What the supervisor knows of its run; owned by `keep_up`."""

    config: RunConfig
    run_dir: RunDir
    folder: str
    """Identity of the run directory."""
    owner: Owner
    clock: Clock
    wakeup: int
    """Where signals come as bytes."""
    watchman: Watchman
    """Watches for notices of this machine, between attempts too."""
    policy: Policy
    emit: Callable[[Event], None]
    saves: Saves
    train: Callable[..., Ended]
    """Runs an opened attempt."""
    zygote: Zygote | None
    """Forks the workers of every attempt but the first; None: all are fresh processes."""
    env: Mapping[str, str]
    line: Line
    """The newest that could be read."""
    last_seq: int
    first_step: int
    """Newest committed step when the supervisor began."""
    history: list[Outcome]
    """Of all attempts that count, those of earlier supervisors too."""
    claim: Claim | None = None
    """Of the newest attempt of this supervisor."""
    places: tuple[int, ...] = ()
    """Of that attempt's hosts."""


def keep_up(
    config: RunConfig,
    run_dir: RunDir,
    *,
    policy: Policy,
    train: Callable[..., Ended],
    env: Mapping[str, str],
    clock: Clock,
    alerts: Alerts,
) -> int:
    """Supervises the run to its end, and returns the exit code.

    Args:
      config: of every attempt.
      run_dir: the run's, which has no owner that lives.
      policy: when to go on.
      train: runs an opened attempt to its end; is given `env`, `wakeup`, `until`, `heard` and
        `zygote`.
      env: the environment that attempts are to have.
      clock: the supervisor's.
      alerts: are told what is decided; entered once the run is owned, since who is refused may
        neither write nor tell anything.
    """
    processes.adopt_orphans()
    with contextlib.ExitStack() as stack:
        watchman = stack.enter_context(Watchman(config.preemption, env=env, clock=clock))
        owner = stack.enter_context(Owner(run_dir, clock=clock))
        stack.enter_context(alerts)
        records = run_log.read_records(run_dir.log)
        log = EventLog(run_dir.supervisor_events, clock=clock, listeners=[alerts.hear])
        stack.push(lambda *_: within(attempt_runner.RECORD_SECONDS, log.__exit__))
        line, found = run_log.fold(records), restart_policy.recall(records)
        emit = partial(_emit_in_time, log)
        zygote = None
        if config.restart.fork:
            zygote = stack.enter_context(Zygote(run_dir, emit=emit, clock=clock))
        run = Run(
            config=config,
            run_dir=run_dir,
            folder=processes.identity(run_dir),
            owner=owner,
            clock=clock,
            wakeup=stack.enter_context(signals.as_bytes()),
            watchman=watchman,
            policy=policy,
            emit=emit,
            saves=Saves(alerts.tell, run=run_dir.root.absolute().name),
            train=train,
            zygote=zygote,
            env=env,
            line=line,
            last_seq=len(records),
            first_step=line.step,
            history=list(found.outcomes),
        )
        return _attempts(run, found)


def _emit_in_time(log: EventLog, event: Event) -> None:
    """Writes an event, or goes on without: storage that hangs holds up nobody."""

    def emitted() -> bool:
        log.emit(event)
        return True

    if within(attempt_runner.RECORD_SECONDS, emitted) is None:
        say("the event could not be written: storage does not answer")


def _attempts(run: Run, found: Past) -> int:
    """Makes attempts until one of them is the last, or budgets were used up before."""
    decision = Again(0.0, frozenset(), "")
    if run.history:
        decision = restart_policy.decide(run.history, run.clock.monotonic(), run.policy)
    _tell(run, *failure_report.started(run.line, run.policy, found, decision))
    if isinstance(decision, GiveUp):
        last = run.history[-1]
        ended = Ended(last.code, last.reason, committed=False, on_record=False)
        return _leave(run, ended, decision.exit, decision.reason)
    ended = _attempt(run, without=decision.without_hosts)
    while True:
        run.history.append(_outcome(run, ended))
        decision = restart_policy.decide(run.history, run.clock.monotonic(), run.policy)
        if isinstance(decision, GiveUp):
            return _leave(run, ended, decision.exit, decision.reason)
        if ended.asked is not None:
            why = "" if ended.asked == ended.code else "asked to stop, then "
            return _leave(run, ended, ended.asked, f"{why}{ended.reason}")
        _tell(run, *failure_report.restarted(run.line, run.policy, ended, decision))
        ended = _pause(run, decision.after_seconds) or _attempt(run, without=decision.without_hosts)


def _attempt(run: Run, *, without: frozenset[int]) -> Ended:
    """Makes one attempt; what keeps it from beginning is an end too."""
    places = restart_policy.hosts(run.policy, without)
    assert places is not None, without
    run.places, run.claim = places, None
    try:
        _take(run, run_log.read_records(run.run_dir.log))
        _clear(run, run.line.claims)
        if attempt_runner.is_done(run.run_dir, run.config):
            return Ended(Exit.DONE, "the last step is committed", True, on_record=False)
        number = len(places)
        meet = worker_group.behind_one_door(
            run.config, run.run_dir, num_hosts=number, places=places
        )
        with meet as job:
            ended = _claimed(run, job)
        with contextlib.suppress(StorageUnavailable):  # The next attempt tries again.
            _clear(run, [run.claim] if run.claim else [])
        return ended
    except TypedEnd as end:
        return Ended(end.exit, str(end), committed=False, on_record=False, to_be_said=True)
    finally:
        with contextlib.suppress(TypedEnd, OSError):
            records = within(
                attempt_runner.RECORD_SECONDS, lambda: run_log.read_records(run.run_dir.log)
            )
            if records is not None:
                _take(run, records)


def _claimed(run: Run, job: worker_group.Job) -> Ended:
    log, opened = attempt_runner.claim_next(
        run.config, run.run_dir, job=job, owner=run.owner, clock=run.clock, env=run.env
    )
    opened = dataclasses.replace(opened, watchman=run.watchman)
    run.claim, run.last_seq = opened.claim, opened.last_seq
    run.line = dataclasses.replace(run.line, claims=(*run.line.claims, opened.claim))
    ended = attempt_runner.stop_that_was_asked(run.run_dir, opened.claim)
    if ended is None:
        until = restart_policy.ends_at(run.policy)
        ended = run.train(
            opened,
            env=run.env,
            wakeup=run.wakeup,
            until=until,
            heard=partial(run.saves.heard, attempt=opened.claim.attempt),
            zygote=run.zygote,
        )
    attempt_runner.put_down_in_time(log, ended, run_dir=run.run_dir, owner=run.owner)
    return ended


def _take(run: Run, records: Sequence[Record]) -> None:
    """Takes in what the log says by now.

    Raises:
      Fenced: another process has claimed the run; what it has started is not ours to end.
      StorageUnavailable: the log is away, which is no empty log.
    """
    line = run_log.fold(records)
    if line.attempt > run.line.attempt and not _is_ours(line.claims[-1]):
        raise Fenced(_overtaken(run, line.claims[-1]))
    if len(records) < run.last_seq:
        gone = f"{run.run_dir.log}: {run.last_seq} records were here, now {len(records)} are"
        raise StorageUnavailable(f"{gone}. Bring the folder back; nothing was changed.")
    run.line, run.last_seq = line, len(records)


def _is_ours(claim: Claim) -> bool:
    ours = (socket.gethostname(), os.getpid(), worker_group.boot_id())
    return (claim.host, claim.pid, claim.boot_id) == ours


def _overtaken(run: Run, claim: Claim) -> str:
    return run_log.overtaken(run.run_dir.root, claim.attempt, claim)


def _clear(run: Run, claims: Sequence[Claim]) -> None:
    """Ends what attempts have left behind."""
    spare = set() if run.zygote is None else run.zygote.pids
    if cleared := processes.end(run.folder, claims, clock=run.clock, spare=spare):
        say(f"{cleared} process(es) that an attempt had left behind were ended")


def _outcome(run: Run, ended: Ended) -> Outcome:
    before = run.history[-1].step_after if run.history else run.first_step
    culprit = None if ended.culprit is None else run.places[ended.culprit]
    return Outcome(ended.code, ended.reason, before, max(before, run.line.step), culprit)


def _pause(run: Run, seconds: float) -> Ended | None:
    """Waits until it is time and storage answers; returns how all ends, if it does meanwhile."""
    began = run.clock.monotonic()
    watch = Lookout(
        run.run_dir,
        attempt=run.line.attempt,
        last_seq=run.last_seq,
        owner=run.owner,
        clock=run.clock,
        step=lambda: run.line.step,
    )
    patience = seconds + run.policy.restart.max_storage_backoff_seconds + LEAVE_SECONDS
    with watch:
        while True:
            left = began + seconds - run.clock.monotonic()
            tick = min(TICK_SECONDS, max(LOOK_SECONDS, left))
            select.select([run.wakeup, watch.wakeup, run.watchman.wakeup], [], [], tick)
            now = run.clock.monotonic()
            if (notice := signal_dispatch.between_attempts(run.watchman, now=now)) is not None:
                return _stopped(Exit.PREEMPTED, notice.words)
            for number in signals.taken(run.wakeup):
                if (ended := _answer(number)) is not None:
                    return ended
            for report in watch.reports():
                if (ended := _heed(run, report)) is not None:
                    return ended
            if now >= began + seconds and watch.has_answered:
                return None
            if now >= restart_policy.ends_at(run.policy):
                return Ended(Exit.STOPPED, "no attempt was running", committed=False)
            if now >= began + patience:
                reason = f"{run.run_dir.root}: storage has not answered for {now - began:.0f} s"
                return Ended(Exit.STORAGE, reason, committed=False, to_be_said=True)


def _answer(number: int) -> Ended | None:
    """Answers a signal while no attempt runs."""
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number not in signals.STOPS:
        return None
    code, name = signals.STOPS[signal.Signals(number)], signal.Signals(number).name
    return _stopped(code, name)


def _stopped(code: Exit, why: str) -> Ended:
    reason = f"{why} between two attempts: nothing new to save"
    return Ended(code, reason, committed=False, asked=code, to_be_said=True)


def _heed(run: Run, report: run_dir_watcher.Report) -> Ended | None:
    match report:
        case run_dir_watcher.StopAsked(path):
            return _stopped(Exit.STOPPED, str(path))
        case run_dir_watcher.Overtaken(claim):
            reason = _overtaken(run, claim)
            return Ended(Exit.FENCED, reason, committed=False, on_record=False, to_be_said=True)
        case run_dir_watcher.Failed(TypedEnd() as end):
            return Ended(end.exit, str(end), committed=False, on_record=False, to_be_said=True)
        case run_dir_watcher.Failed(error):
            raise error
        case run_dir_watcher.SaveAsked():
            say("save asked for, but nothing runs: the next attempt goes on from the last commit")
    return None


def _tell(run: Run, event: Event, words: list[str]) -> None:
    run.emit(event)
    for line in words:
        say(line)


def _leave(run: Run, ended: Ended, code: int, reason: str) -> int:
    """Puts the supervisor's own end down, and tells the person why and what to do."""
    as_asked = code in GOOD or code == ended.asked
    kind = SupervisionEnded if as_asked else GaveUp
    if code != Exit.FENCED:
        run.emit(kind(run.line.attempt, code, exit_name(code), run.line.step, reason))
        _record_leave(run, code, reason)
    is_the_attempts = (code, reason) == (ended.code, ended.reason)
    if not is_the_attempts or (run.claim is None and ended.to_be_said):
        stdio.flush()
        stdio.tell(faults.message(code, reason))
    elif ended.to_be_said and run.claim is not None:
        attempt_runner.say_end(ended, run.run_dir, run.claim)
    if not as_asked:
        stdio.tell(last_words(run.run_dir, run.line.attempt, ended, code=code))
    return code


def _record_leave(run: Run, code: int, reason: str) -> None:
    """Puts the end into the log, where the next supervisor looks; there is none without a claim."""
    if run.line.attempt == 0:
        return

    def record() -> bool:
        after, attempt = run.last_seq, run.line.attempt
        log = run_log.RunLog(run.run_dir.log, attempt=attempt, last_seq=after, clock=run.clock)
        log.append(Leave(exit=code, reason=reason))
        return True

    try:
        is_recorded = within(attempt_runner.RECORD_SECONDS, record)
    except (TypedEnd, OSError) as error:
        say(f"the supervisor's end could not be recorded: {error}")
    else:
        if is_recorded is None:
            say("the supervisor's end could not be recorded: storage does not answer")
