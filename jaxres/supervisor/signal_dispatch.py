"""Handles signals, preemption notices and request files in a supervisor."""

from __future__ import annotations

import os
import signal

from jaxres.exit_codes import STOP_SIGNALS, ExitCode, exit_row
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.events import Event, Noted
from jaxres.runlog.run_log import Claim, superseded_message
from jaxres.runlog.supervisor_events import (
    PreemptionNoticeHandled,
    PreemptionNoticeReceived,
    PreemptionWatchStarted,
)
from jaxres.supervisor import run_dir_watcher
from jaxres.supervisor.attempt import RunningAttempt, print_message
from jaxres.supervisor.preemption import notices as preemption
from jaxres.supervisor.preemption.notices import Decision, PreemptionNotice, SaveTimings
from jaxres.supervisor.preemption.watcher import PreemptionWatcher
from jaxres.supervisor.process.spawn import LEAVE
from jaxres.supervisor.process.worker_process import kill_process_groups, signal_name
from jaxres.supervisor.remote_hosts import FollowerLinks, LeaderLink
from jaxres.supervisor.run_dir_watcher import WatcherEvent

TWICE_KILLS = (signal.SIGTERM, signal.SIGINT)
"""A second one of these signals kills the workers at once.

SIGHUP is excluded: a terminal that closes may send it twice.
"""


def on_watcher_event(running: RunningAttempt, report: WatcherEvent) -> AttemptResult | None:
    """Handles an event of the run directory watcher; returns the result if the attempt ends."""
    match report:
        case run_dir_watcher.StopRequested(path):
            return request_stop(running, ExitCode.STOPPED, str(path))
        case run_dir_watcher.SaveRequested():
            _ask_to_save(running)
            return None
        case run_dir_watcher.Superseded(claim):
            return _fenced(running, claim)
        case run_dir_watcher.WatcherFailed(error):
            raise error


def _fenced(running: RunningAttempt, claim: Claim) -> AttemptResult:
    kill_process_groups(running.workers, clock=running.services.clock)
    reason = superseded_message(running.spec.run_dir.root, claim.attempt, claim)
    return AttemptResult(
        ExitCode.FENCED, reason, committed=False, is_recorded=False, is_printed=True
    )


def _ask_to_save(running: RunningAttempt) -> None:
    """Sends the request to one worker, which shares it with the other hosts."""
    what = "one extra checkpoint after the current step"
    if running.spec.is_program:
        what = "SIGUSR2 to the program, if it handles it"
    print_message(f"save requested: {what} ({running.progress_text()})")
    running.workers[0].signal(signal.SIGUSR2)


def on_signal(running: RunningAttempt, number: int) -> AttemptResult | None:
    """Handles a signal to the supervisor; returns the result if the attempt ends at once."""
    if number == signal.SIGUSR1:
        for worker in running.workers:
            worker.signal(signal.SIGUSR1)
        print_message(f"stacks of all threads are in {running.stacks_text()}")
    elif number == signal.SIGUSR2:
        _ask_to_save(running)
    elif number == signal.SIGTSTP:
        _suspend(running)
    elif number in STOP_SIGNALS:
        is_armed, running.second_signal_armed = (
            running.second_signal_armed,
            running.second_signal_armed or number in TWICE_KILLS,
        )
        if is_armed and number in TWICE_KILLS:
            kill_process_groups(running.workers, clock=running.services.clock)
            print_message(f"{signal_name(number)} again: workers killed; committed steps are kept")
            why = f"{signal_name(number)} a second time"
            return AttemptResult(128 + number, why, committed=False, requested=128 + number)
        stop = STOP_SIGNALS[signal.Signals(number)]
        choice = (
            _sigterm_decision(running, signal_name(number)) if stop == ExitCode.PREEMPTED else None
        )
        return request_stop(running, stop, signal_name(number), choice=choice)
    return None


def _sigterm_decision(running: RunningAttempt, name: str) -> Decision | None:
    """Returns the decision that preemption.sigterm_seconds implies; None: the key is not set."""
    section = (
        None
        if running.services.preemption_watcher is None
        else running.services.preemption_watcher.section
    )
    if section is None or section.sigterm_seconds is None:
        return None
    now = running.services.clock.monotonic()
    notice = PreemptionNotice(name, name, now, now + section.sigterm_seconds)
    return preemption.save_now(_decide(running, notice, section.margin_seconds))


def on_notices(running: RunningAttempt) -> AttemptResult | None:
    """Handles preemption notices of this machine; returns the result if the attempt ends."""
    watcher = running.services.preemption_watcher
    if watcher is None:
        return None
    for event in watcher.poll():
        _print_event(event)
        running.event_log.emit(event)
    notice = watcher.most_urgent()
    if notice is None or running.stop_requested is not None:
        return None
    choice = _decide(running, notice, watcher.section.margin_seconds)
    if choice.action == "continue":
        return None
    running.stop_reason = f"{notice.description} ({notice.source})"
    return request_stop(running, ExitCode.PREEMPTED, running.stop_reason, choice=choice)


def _decide(running: RunningAttempt, notice: PreemptionNotice, margin_seconds: float) -> Decision:
    """Returns the decision about a notice; logs it if it differs from the last one."""
    now, measured = running.services.clock.monotonic(), running.save_timings()
    choice = preemption.decide(notice, measured, now=now, margin_seconds=margin_seconds)
    if running.last_decision != (notice, choice.action):
        running.last_decision = notice, choice.action
        running.event_log.emit(
            PreemptionNoticeHandled(
                action=choice.action,
                reason=f"{notice.description}: {choice.reason}",
                seconds_left=notice.seconds_left(now),
                write_seconds=measured.write_seconds,
                writing_seconds=measured.writing_seconds,
            )
        )
        if choice.action == "continue":
            print_message(
                f"{notice.description}: training until the last safe moment ({choice.reason})"
            )
    return choice


def notice_between_attempts(watcher: PreemptionWatcher, *, now: float) -> PreemptionNotice | None:
    """Prints new notices, and returns the one that leaves no time for another attempt."""
    for event in watcher.poll():
        _print_event(event)
    notice, margin = watcher.most_urgent(), watcher.section.margin_seconds
    if notice is None:
        return None
    choice = preemption.decide(notice, SaveTimings(), now=now, margin_seconds=margin)
    return None if choice.action == "continue" else notice


def _print_event(event: Event) -> None:
    """Prints an event of the preemption watcher; prints nothing if this machine has no notices."""
    match event:
        case PreemptionWatchStarted(server=str(server), reason=reason):
            print_message(f"notices of preemption and maintenance come from {server} ({reason})")
        case PreemptionNoticeReceived(source, description, seconds_left):
            left = "" if seconds_left is None else f", in {max(0.0, seconds_left):.0f} s"
            print_message(f"notice: {description}{left} ({source})")
        case Noted(message):
            print_message(message)
        case _:
            pass


def request_stop(
    running: RunningAttempt, exit: ExitCode, why: str, *, choice: Decision | None = None
) -> AttemptResult | None:
    """Asks the workers to save and exit; kills them if the attempt has not finished a step.

    Args:
      choice: what the remaining time allows; None: the remaining time is unknown.
    """
    if running.stop_requested is not None:
        stays = exit is ExitCode.STOPPED and running.is_restarted_after_stop
        following = f", and the next start stops at once ({exit.value})" if stays else ""
        print_message(
            f"{why}: a stop is in progress already; exit {running.stop_requested.value} follows"
            f"{following} ({running.progress_text()})"
        )
        return None
    running.stop_requested = exit
    is_before_steps = running.step == 0 and not running.spec.is_program
    has_time = choice is None or choice.action == "save"
    if isinstance(running.links, LeaderLink):
        running.links.request_stop(exit, why, step=running.step)
    elif isinstance(running.links, FollowerLinks) and running.spec.is_program:
        running.links.request_stop(exit, why)
    if is_before_steps and isinstance(running.links, LeaderLink):
        print_message(f"{why}: stop request sent to host 0 ({running.progress_text()})")
    elif is_before_steps:
        kill_process_groups(running.workers, clock=running.services.clock)
        print_message(f"{why}: nothing new to save yet ({running.progress_text()}); workers killed")
        return AttemptResult(
            exit, f"{why} before the first finished step of the attempt", committed=False
        )
    elif running.spec.is_program:
        seconds = running.spec.limits.stop_seconds
        print_message(
            f"{why}: SIGTERM to the program, which has {seconds:g} s; then exit {exit.value}"
        )
    elif has_time:
        print_message(
            f"{why}: saving after the current step, then exit {exit.value} "
            f"({running.progress_text()})"
        )
    else:
        reason = "" if choice is None else choice.reason
        print_message(f"{why}: {reason}; exiting with {exit.value} ({running.progress_text()})")
    save_signal = next(iter(exit_row(exit).stop_signals), signal.SIGTERM)
    for worker in running.workers:
        worker.signal(save_signal if has_time else LEAVE)
    return None


def _suspend(running: RunningAttempt) -> None:
    """Stops the workers and this process until SIGCONT (Ctrl-Z); deadlines are extended by it."""
    for worker in running.running_workers:
        worker.signal_group(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for worker in running.running_workers:
        worker.signal_group(signal.SIGCONT)
