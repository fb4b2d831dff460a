"""What a door answers at once: signals, and what the run directory asks for."""

from __future__ import annotations

import os
import signal

from jaxres.faults import Exit
from jaxres.runlog.events import Event, Noted, NoticeAnswered, NoticeSeen, NoticesWatched
from jaxres.runlog.run_log import Claim, overtaken
from jaxres.supervisor import preemption, run_dir_watcher, signals
from jaxres.supervisor.attempt import Attempt, Ended, say
from jaxres.supervisor.preemption import Choice, Measured, Notice
from jaxres.supervisor.preemption_watcher import Watchman
from jaxres.supervisor.remote_hosts import Following
from jaxres.supervisor.run_dir_watcher import Report
from jaxres.supervisor.worker_process import LEAVE, kill_groups, signal_name

FORWARDED = {Exit.PREEMPTED: signal.SIGTERM, Exit.STOPPED: signal.SIGINT}
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""Of these the second ends at once. Not of SIGHUP: a closed terminal may send it twice."""


def heed(running: Attempt, report: Report) -> Ended | None:
    """Does what the run directory asks for."""
    match report:
        case run_dir_watcher.StopAsked(path):
            return ask_to_stop(running, Exit.STOPPED, str(path))
        case run_dir_watcher.SaveAsked():
            _ask_to_save(running)
            return None
        case run_dir_watcher.Overtaken(claim):
            return _fenced(running, claim)
        case run_dir_watcher.Failed(error):
            raise error


def _fenced(running: Attempt, claim: Claim) -> Ended:
    kill_groups(running.workers, clock=running.clock)
    reason = overtaken(running.run_dir.root, claim.attempt, claim)
    return Ended(Exit.FENCED, reason, committed=False, on_record=False, to_be_said=True)


def _ask_to_save(running: Attempt) -> None:
    """Asks one host, which tells the others."""
    say(f"save asked for: one extra checkpoint after the present step ({running.where()})")
    running.workers[0].signal(signal.SIGUSR2)


def answer(running: Attempt, number: int) -> Ended | None:
    if number == signal.SIGUSR1:
        for worker in running.workers:
            worker.signal(signal.SIGUSR1)
        say(f"stacks of all threads are in {running.stacks()}")
    elif number == signal.SIGUSR2:
        _ask_to_save(running)
    elif number == signal.SIGTSTP:
        _sleep_together(running)
    elif number in signals.STOPS:
        again, running.hurried = running.hurried, running.hurried or number in AT_ONCE
        if again and number in AT_ONCE:
            kill_groups(running.workers, clock=running.clock)
            say(f"{signal_name(number)} again: ended at once; what is committed stays")
            why = f"{signal_name(number)} a second time"
            return Ended(128 + number, why, committed=False, asked=128 + number)
        stop = signals.STOPS[signal.Signals(number)]
        choice = _time_left(running, signal_name(number)) if stop == Exit.PREEMPTED else None
        return ask_to_stop(running, stop, signal_name(number), choice=choice)
    return None


def _time_left(running: Attempt, name: str) -> Choice | None:
    """Returns what follows from preemption.sigterm_seconds, where it is given."""
    section = None if running.watchman is None else running.watchman.section
    if section is None or section.sigterm_seconds is None:
        return None
    now = running.clock.monotonic()
    notice = Notice(name, name, now, now + section.sigterm_seconds)
    return preemption.at_once(_decided(running, notice, section.margin_seconds))


def heed_notices(running: Attempt) -> Ended | None:
    """Does what the notices of this machine ask for, when it is time."""
    watchman = running.watchman
    if watchman is None:
        return None
    for event in watchman.take():
        _tell(event)
        running.diary.emit(event)
    notice = watchman.pressing()
    if notice is None or running.asked is not None:
        return None
    choice = _decided(running, notice, watchman.section.margin_seconds)
    if choice.action == "train on":
        return None
    running.why = f"{notice.words} ({notice.source})"
    return ask_to_stop(running, Exit.PREEMPTED, running.why, choice=choice)


def _decided(running: Attempt, notice: Notice, margin_seconds: float) -> Choice:
    """Decides about a notice, and tells what is new of that."""
    now, measured = running.clock.monotonic(), running.measured()
    choice = preemption.decide(notice, measured, now=now, margin_seconds=margin_seconds)
    if running.answered != (notice, choice.action):
        running.answered = notice, choice.action
        running.diary.emit(
            NoticeAnswered(
                action=choice.action,
                reason=f"{notice.words}: {choice.reason}",
                seconds_left=notice.left(now),
                write_seconds=measured.write_seconds,
                writing_seconds=measured.writing_seconds,
            )
        )
        if choice.action == "train on":
            say(f"{notice.words}: training on to the last safe moment ({choice.reason})")
    return choice


def between_attempts(watchman: Watchman, *, now: float) -> Notice | None:
    """Tells what was heard, and returns the notice that leaves no time for another attempt."""
    for event in watchman.take():
        _tell(event)
    notice, margin = watchman.pressing(), watchman.section.margin_seconds
    if notice is None:
        return None
    choice = preemption.decide(notice, Measured(), now=now, margin_seconds=margin)
    return None if choice.action == "train on" else notice


def _tell(event: Event) -> None:
    """Tells a person what the watchman has heard; on a machine without notices that is nothing."""
    match event:
        case NoticesWatched(server=str(server), why=why):
            say(f"notices of preemption and maintenance come from {server} ({why})")
        case NoticeSeen(source, words, seconds_left):
            left = "" if seconds_left is None else f", in {max(0.0, seconds_left):.0f} s"
            say(f"notice: {words}{left} ({source})")
        case Noted(message):
            say(message)
        case _:
            pass


def ask_to_stop(
    running: Attempt, exit: Exit, why: str, *, choice: Choice | None = None
) -> Ended | None:
    """Asks the workers to save and leave; before the first finished step ends them at once.

    Args:
      running: the attempt.
      exit: how it is to end.
      why: for a person.
      choice: what the time that is left is enough for; None: nobody knows how much it is.
    """
    if running.asked is not None:
        say(f"{why}: saving already, exit {running.asked.value} comes ({running.where()})")
        return None
    running.asked = exit
    has_time = choice is None or choice.action == "save"
    if isinstance(running.others, Following):
        running.others.stop_asked(exit, why, step=running.step)
    if running.step == 0 and isinstance(running.others, Following):
        say(f"{why}: the other hosts are told ({running.where()})")
    elif running.step == 0:
        kill_groups(running.workers, clock=running.clock)
        say(f"{why}: nothing new to save yet ({running.where()}); ended")
        return Ended(exit, f"{why} before the first finished step of the attempt", committed=False)
    elif has_time:
        say(f"{why}: saving after the present step, then exit {exit.value} ({running.where()})")
    else:
        reason = "" if choice is None else choice.reason
        say(f"{why}: {reason}; leaving, exit {exit.value} ({running.where()})")
    for worker in running.workers:
        worker.signal(FORWARDED[exit] if has_time else LEAVE)
    return None


def _sleep_together(running: Attempt) -> None:
    """Ctrl-Z: the workers sleep while this process does; a sleep is no hang."""
    for worker in running.running:
        worker.signal_group(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for worker in running.running:
        worker.signal_group(signal.SIGCONT)
