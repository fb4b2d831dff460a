"""Restart loop: runs attempts until the run is done or the restart policy gives up.

One process holds the run lock for all attempts and between them: while it waits, it writes the
heartbeat, handles signals and reads request files. Every attempt has its own claim and its own
port. All processes of earlier attempts are killed before the next attempt is claimed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxres import faults
from jaxres.clock import Clock
from jaxres.config import RunConfig
from jaxres.exit_codes import STOP_SIGNALS, ExitCode, exit_row
from jaxres.faults import Fenced, RunError, StorageUnavailable, UnhealthyHost
from jaxres.host import processes, signals
from jaxres.runlog import faulty_hosts, run_log
from jaxres.runlog.attempt_result import AttemptOutcome, AttemptResult, leave_record
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Record, RunHistory
from jaxres.runlog.supervisor_events import (
    GaveUp,
    HardwareFaultFound,
    StartRefused,
    SupervisionEnded,
)
from jaxres.storage import files
from jaxres.storage.timeouts import CallTimeout, call_with_timeout, write_with_timeout
from jaxres.supervisor import (
    attempt_runner,
    failure_report,
    host_exclusion,
    host_memory,
    restart_policy,
    run_dir_watcher,
    signal_dispatch,
)
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.companions.companions import Companions
from jaxres.supervisor.failure_report import failure_text
from jaxres.supervisor.process import worker_group
from jaxres.supervisor.process.forkserver_client import ForkServer
from jaxres.supervisor.process.watchdog import LEAVE_SECONDS
from jaxres.supervisor.restart_policy import GiveUp, Restart, RestartHistory, RestartPolicy
from jaxres.supervisor.run_dir_watcher import RunDirWatcher
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry import stdio
from jaxres.telemetry.alert_monitors import SaveMonitor
from jaxres.telemetry.alert_sender import Alerts

TICK_SECONDS = 0.25
MIN_TICK_SECONDS = 0.02
"""Poll interval while storage has not answered yet."""


@dataclass
class LoopState:
    """State of the restart loop; mutated by `run_restart_loop` only."""

    config: RunConfig
    run_dir: RunDir
    run_dir_id: str
    """Identity of the run directory, which its processes carry in their tag."""
    adopts: bool
    """Whether all descendants of this process are its own, so that leftover ones are killed."""
    run_lock: RunLock
    wakeup: int
    """Read end of `signals.wakeup_fd`: one byte per signal."""
    companions: Companions
    """Processes that run beside all attempts and between them."""
    policy: RestartPolicy
    emit: Callable[[Event], None]
    save_monitor: SaveMonitor
    run_attempt: Callable[..., AttemptResult]
    """Runs a claimed attempt."""
    unconfirmed: str | None
    """Path of the last step if it is committed and does not count yet, or None."""
    fork_server: ForkServer | None
    """Forks the workers of every attempt but the first; None: all are fresh processes."""
    env: Mapping[str, str]
    run_history: RunHistory
    """The run history as it was read last."""
    last_seq: int
    first_step: int
    """Newest committed step when the restart loop began."""
    outcomes: list[AttemptOutcome[int]]
    """Outcomes of all attempts that use up budgets, earlier supervisors' attempts included."""
    claim: Claim | None = None
    """Claim of this supervisor's newest attempt."""
    slots: tuple[int, ...] = ()
    """Slots of that attempt's hosts."""

    @property
    def clock(self) -> Clock:
        """The supervisor's clock."""
        return self.run_lock.clock


def run_restart_loop(
    config: RunConfig,
    run_dir: RunDir,
    *,
    policy: RestartPolicy,
    run_attempt: Callable[..., AttemptResult],
    unconfirmed: str | None,
    env: Mapping[str, str],
    clock: Clock,
    alerts: Alerts,
) -> int:
    """Runs attempts until the run ends; returns the exit code.

    Args:
      config, run_dir, env, clock: of all attempts; no live process holds the run directory.
      policy, run_attempt: when to restart, and what runs a claimed attempt (`_run_claimed`).
      unconfirmed: path of the last step if it is committed and does not count yet.
      alerts: receive the events of the loop; entered once the run lock is held.
    """
    with contextlib.ExitStack() as stack:
        adopts = processes.become_subreaper()  # Before any child: companions have processes.
        companions = stack.enter_context(Companions(config, run_dir, env=env, clock=clock))
        run_lock = stack.enter_context(RunLock(run_dir, clock=clock))
        stack.enter_context(alerts)
        records = run_log.read_records(run_dir.log)
        emit = stack.enter_context(_events_in_time(run_dir, alerts, clock=clock))
        run_history, restarts = run_log.fold(records), _restart_history(run_dir, records)
        forks = config.restart.fork and config.program is None
        server = ForkServer(run_dir, emit=emit, clock=clock) if forks else None
        run = LoopState(
            config=config,
            run_dir=run_dir,
            run_dir_id=processes.run_dir_id(run_dir),
            adopts=adopts,
            run_lock=run_lock,
            wakeup=stack.enter_context(signals.wakeup_fd()),
            companions=companions,
            policy=_without_faulty_slots(run_dir, records, policy, env=env, emit=emit),
            emit=emit,
            save_monitor=SaveMonitor(alerts.send, run=run_dir.root.absolute().name),
            run_attempt=run_attempt,
            unconfirmed=unconfirmed,
            fork_server=None if server is None else stack.enter_context(server),
            env=env,
            run_history=run_history,
            last_seq=run_log.last_seq(records),
            first_step=run_history.step,
            outcomes=list(restarts.outcomes),
        )
        companions.send_faults(partial(_alert_fault, run, alerts))
        return _run_attempts(run, restarts)


def _restart_history(run_dir: RunDir, records: Sequence[Record]) -> RestartHistory:
    forgotten = faulty_hosts.forgotten(run_dir)
    return restart_policy.load_history(records, forgotten=forgotten)


def _without_faulty_slots(
    run_dir: RunDir,
    records: Sequence[Record],
    policy: RestartPolicy,
    *,
    env: Mapping[str, str],
    emit: Callable[[Event], None],
) -> RestartPolicy:
    """Returns the policy without the slots whose hardware has failed before, and prints them.

    A refusal is an event, and so reaches the alerts: a scheduler may start the command again and
    again on this host.

    Raises:
      UnhealthyHost: too few slots are left, or none, since it is the whole machine.
    """
    try:
        hosts = host_exclusion.on_this_machine(run_dir, records, env=env)
        faulty = host_exclusion.faulty_slots(run_dir, hosts, policy)
    except UnhealthyHost as refused:
        before, code = run_log.fold(records), refused.exit_code
        row = exit_row(code)
        emit(StartRefused(before.attempt, code, row.name, before.step, str(refused)))
        raise
    for slot, host in sorted(faulty.items()):
        print_message(host_exclusion.left_out(run_dir, slot, host))
    return dataclasses.replace(policy, faulty_slots=frozenset(faulty))


def _alert_fault(run: LoopState, alerts: Alerts, event: HardwareFaultFound) -> None:
    alerts.on_event(dataclasses.replace(event, step=max(event.step, run.run_history.step)))


@contextlib.contextmanager
def _events_in_time(
    run_dir: RunDir, alerts: Alerts, *, clock: Clock
) -> Iterator[Callable[[Event], None]]:
    """Yields what writes an event, or continues without it: hung storage delays no restart."""
    log = EventLog(run_dir.supervisor_events, clock=clock, listeners=[alerts.on_event])
    what, seconds = "the event could not be written", attempt_runner.RECORD_SECONDS

    def emit(event: Event) -> None:
        write = partial(log.emit, event)
        write_with_timeout(write, seconds=seconds, what=what, report=print_message)

    try:
        yield emit
    finally:
        with contextlib.suppress(CallTimeout):
            call_with_timeout(log.__exit__, seconds=seconds)


def _run_attempts(run: LoopState, restarts: RestartHistory) -> int:
    """Runs attempts until the policy gives up or a stop was requested; returns the exit code."""
    host_memory.prepare(run.run_dir, run.config, run.run_history.claims)
    decision = Restart(0.0, run.policy.faulty_slots, "")
    if run.outcomes:
        decision = restart_policy.decide(run.outcomes, run.clock.monotonic(), run.policy)
    _announce(
        run, *failure_report.supervision_started(run.run_history, run.policy, restarts, decision)
    )
    if isinstance(decision, GiveUp):
        last = run.outcomes[-1]
        ended = AttemptResult(last.code, last.reason, committed=False, is_recorded=False)
        return _finish(run, ended, decision.exit, decision.reason)
    ended = _run_one(run, without=decision.without_hosts)
    while True:
        run.outcomes.append(_outcome(run, ended))
        decision = restart_policy.decide(run.outcomes, run.clock.monotonic(), run.policy)
        if isinstance(decision, GiveUp):
            return _finish(run, ended, decision.exit, decision.reason)
        if ended.requested is not None:
            prefix = "" if ended.requested == ended.code else "asked to stop, then "
            return _finish(run, ended, ended.requested, f"{prefix}{ended.reason}")
        report = failure_report.attempt_restarted(
            run.run_history,
            run.policy,
            ended,
            decision,
            has_memory=run.config.checkpoint.memory is not None,
        )
        _announce(run, *report)
        ended = _wait_backoff(run, decision.after_seconds) or _run_one(
            run, without=decision.without_hosts
        )


def _run_one(run: LoopState, *, without: frozenset[int]) -> AttemptResult:
    """Runs one attempt; an error that prevents its start is a result too."""
    slots = restart_policy.choose_slots(run.policy, without)
    assert slots is not None, without
    run.slots, run.claim = slots, None
    try:
        with files.untyped_failures():
            return _claim_and_run(run, slots)
    except RunError as refused:
        error = faults.by_phase(refused, at_start=not run.outcomes)
        return _refused(error.exit_code, str(error))
    finally:
        with contextlib.suppress(RunError, OSError):
            read = partial(run_log.read_records, run.run_dir.log)
            _refresh_history(run, call_with_timeout(read, seconds=attempt_runner.RECORD_SECONDS))


def _claim_and_run(run: LoopState, slots: tuple[int, ...]) -> AttemptResult:
    """Kills leftovers of earlier attempts, then runs one attempt."""
    records = run_log.read_records(run.run_dir.log, known=run.last_seq)
    _refresh_history(run, records)
    run.companions.on_history(records)
    _kill_leftovers(run, run.run_history.claims)
    newest, steps = run.run_history.newest, run.config.train.steps
    # It was verified when this command began, or when it was saved.
    if newest is not None and newest.step >= steps and newest.path != run.unconfirmed:
        return AttemptResult(
            ExitCode.DONE, "the last step is committed", committed=True, is_recorded=False
        )
    num_hosts = len(slots)
    hosts = worker_group.local_hosts(run.config, run.run_dir, num_hosts=num_hosts, slots=slots)
    with hosts as job:
        ended = _run_claimed(run, job)
    with contextlib.suppress(StorageUnavailable):  # The next attempt tries again.
        _kill_leftovers(run, [run.claim] if run.claim else [])
    return ended


def _run_claimed(run: LoopState, job: worker_group.WorkerGroup) -> AttemptResult:
    opened, log = attempt_runner.claim_attempt(
        run.config, run.run_lock, job=job, env=run.env, known=run.last_seq
    )
    claim = opened.claim
    run.claim, run.last_seq = claim, opened.last_seq
    run.run_history = dataclasses.replace(run.run_history, claims=(*run.run_history.claims, claim))
    run.companions.on_claim(claim, host=opened.hosts[0], emit=run.emit)
    services = dataclasses.replace(
        run.companions.services,
        run_lock=run.run_lock,
        wakeup=run.wakeup,
        on_news=partial(run.save_monitor.on_news, attempt=claim.attempt),
        fork_server=run.fork_server,
    )
    deadline = restart_policy.deadline(run.policy)
    train = partial(run.run_attempt, opened, services, env=run.env, deadline=deadline)
    return attempt_runner.run_and_record(opened, log, run.run_lock, job=job, train=train)


def _refresh_history(run: LoopState, records: Sequence[Record]) -> None:
    """Updates the state from the records of the run log.

    Raises:
      Fenced: another process has claimed the run; its processes must not be killed.
      StorageUnavailable: records are missing, for example because a mount is gone.
    """
    run_history = run_log.fold(records)
    if run_history.attempt > run.run_history.attempt and not _is_ours(run_history.claims[-1]):
        raise Fenced(_fenced_reason(run, run_history.claims[-1]))
    newest = run_log.last_seq(records)
    run_log.refuse_lost(run.run_dir.log, newest, known=run.last_seq)
    run.run_history, run.last_seq = run_history, newest


def _is_ours(claim: Claim) -> bool:
    return worker_group.is_claim_of(claim, pid=os.getpid())


def _fenced_reason(run: LoopState, claim: Claim) -> str:
    return run_log.superseded_message(run.run_dir.root, claim.attempt, claim)


def _kill_leftovers(run: LoopState, claims: Sequence[Claim]) -> None:
    """Kills the processes that attempts have left behind."""
    server = run.fork_server
    keep = run.companions.pids | (set() if server is None else server.pids)
    if num_killed := processes.kill_leftovers(
        run.run_dir_id, claims, clock=run.clock, keep=keep, adopts=run.adopts
    ):
        print_message(f"{num_killed} process(es) that an attempt had left behind were killed")


def _outcome(run: LoopState, ended: AttemptResult) -> AttemptOutcome[int]:
    before = run.outcomes[-1].step_after if run.outcomes else run.first_step
    culprit = None if ended.culprit is None else run.slots[ended.culprit]
    return AttemptOutcome(
        ended.code, ended.reason, before, max(before, run.run_history.step), culprit
    )


def _wait_backoff(run: LoopState, seconds: float) -> AttemptResult | None:
    """Waits for the backoff and until storage answers; returns a result if the run ends instead."""
    began = run.clock.monotonic()
    watch = RunDirWatcher(
        run.run_dir,
        attempt=run.run_history.attempt,
        last_seq=run.last_seq,
        run_lock=run.run_lock,
        clock=run.clock,
        step=lambda: run.run_history.step,
    )
    longest = seconds + restart_policy.MAX_STORAGE_BACKOFF_SECONDS + LEAVE_SECONDS
    preemption = run.companions.preemption_watcher
    assert preemption is not None  # Only a supervisor that trains by itself has none.
    with watch:
        while True:
            left = began + seconds - run.clock.monotonic()
            tick = min(TICK_SECONDS, max(MIN_TICK_SECONDS, left))
            select.select([run.wakeup, watch.wakeup, preemption.wakeup], [], [], tick)
            now = run.clock.monotonic()
            notice = signal_dispatch.notice_between_attempts(preemption, now=now)
            if notice is not None:
                return _stopped(ExitCode.PREEMPTED, notice.description)
            for number in signals.drain(run.wakeup):
                if (ended := _on_signal(number)) is not None:
                    return ended
            for report in watch.reports():
                if (ended := _on_watcher_event(run, report)) is not None:
                    return ended
            if now >= began + seconds and watch.has_answered:
                return None
            if now >= restart_policy.deadline(run.policy):
                return AttemptResult(ExitCode.STOPPED, "no attempt was running", committed=False)
            if now >= began + longest:
                reason = f"{run.run_dir.root}: storage has not answered for {now - began:.0f} s"
                return AttemptResult(ExitCode.STORAGE, reason, committed=False, is_printed=True)


def _on_signal(number: int) -> AttemptResult | None:
    """Handles a signal while no attempt runs; returns the result if it stops the run."""
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if number not in STOP_SIGNALS:
        return None
    code, name = STOP_SIGNALS[signal.Signals(number)], signal.Signals(number).name
    return _stopped(code, name)


def _stopped(code: ExitCode, why: str) -> AttemptResult:
    reason = f"{why} between two attempts: nothing new to save"
    return AttemptResult(code, reason, committed=False, requested=code, is_printed=True)


def _refused(code: int, reason: str) -> AttemptResult:
    """Returns the result of an attempt whose end is no record of its own."""
    return AttemptResult(code, reason, committed=False, is_recorded=False, is_printed=True)


def _on_watcher_event(run: LoopState, report: run_dir_watcher.WatcherEvent) -> AttemptResult | None:
    match report:
        case run_dir_watcher.StopRequested(path):
            return _stopped(ExitCode.STOPPED, str(path))
        case run_dir_watcher.Superseded(claim):
            return _refused(ExitCode.FENCED, _fenced_reason(run, claim))
        case run_dir_watcher.WatcherFailed(RunError() as error):
            return _refused(error.exit_code, str(error))
        case run_dir_watcher.WatcherFailed(error):
            raise error
        case run_dir_watcher.SaveRequested():
            print_message(
                "save requested, but no attempt runs: the next one resumes from the last commit"
            )
    return None


def _announce(run: LoopState, event: Event, messages: list[str]) -> None:
    run.emit(event)
    for line in messages:
        print_message(line)


def _finish(run: LoopState, ended: AttemptResult, code: int, reason: str) -> int:
    """Records the supervisor's exit, prints reason and remedy; returns the exit code."""
    row = exit_row(code)
    is_graceful = row.is_graceful or (code == ended.requested and not row.needs_operator)
    event_type = SupervisionEnded if is_graceful else GaveUp
    if code != ExitCode.FENCED:
        host_memory.delete(run.run_dir, run.config)
        run.emit(event_type(run.run_history.attempt, code, row.name, run.run_history.step, reason))
        _record_leave(run, AttemptResult(code, reason))
    run.companions.on_run_ended(code)
    is_attempt_result = (code, reason) == (ended.code, ended.reason)
    if not is_attempt_result or (run.claim is None and ended.is_printed):
        stdio.flush()
        stdio.eprint(faults.format_exit_message(code, reason))
    elif ended.is_printed and run.claim is not None:
        attempt_runner.print_result(ended, run.run_dir, run.claim)
    if not is_graceful:
        stdio.eprint(failure_text(run.run_dir, run.run_history.attempt, ended, code=code))
    return code


def _record_leave(run: LoopState, result: AttemptResult) -> None:
    """Writes the supervisor's exit to the run log, for the next one; no-op without a claim.

    A request to stop that it answers is moved.
    """
    if run.run_history.attempt == 0:
        return

    def record() -> None:
        after, attempt = run.last_seq, run.run_history.attempt
        log = run_log.RunLog(run.run_dir.log, attempt=attempt, last_seq=after, clock=run.clock)
        log.append(leave_record(result))
        run_dir_watcher.end_stop_request(run.run_dir, attempt, result.code)

    what, seconds = "the supervisor's exit could not be recorded", attempt_runner.RECORD_SECONDS
    write_with_timeout(record, seconds=seconds, what=what, report=print_message)
