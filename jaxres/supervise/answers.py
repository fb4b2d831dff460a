"""What a door answers at once: signals, and what the run directory asks for."""

from __future__ import annotations

import os
import signal

from jaxres.faults import Exit
from jaxres.runlog import Claim, overtaken
from jaxres.supervise import lookout, signals
from jaxres.supervise.attempt import Attempt, Ended, say
from jaxres.supervise.lookout import Report
from jaxres.supervise.others import Following
from jaxres.supervise.process import kill_groups, signal_name

FORWARDED = {Exit.PREEMPTED: signal.SIGTERM, Exit.STOPPED: signal.SIGINT}
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""Of these the second ends at once. Not of SIGHUP: a closed terminal may send it twice."""


def heed(running: Attempt, report: Report) -> Ended | None:
    """Does what the run directory asks for."""
    match report:
        case lookout.StopAsked(path):
            return ask_to_stop(running, Exit.STOPPED, str(path))
        case lookout.SaveAsked():
            _ask_to_save(running)
            return None
        case lookout.Overtaken(claim):
            return _fenced(running, claim)
        case lookout.Failed(error):
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
        return ask_to_stop(running, stop, signal_name(number))
    return None


def ask_to_stop(running: Attempt, exit: Exit, why: str) -> Ended | None:
    """Asks the workers to save and leave; before the first finished step ends them at once."""
    if running.asked is not None:
        say(f"{why}: saving already, exit {running.asked.value} comes ({running.where()})")
        return None
    running.asked = exit
    if running.step == 0 and isinstance(running.others, Following):
        running.others.stop_asked(exit, why)
        say(f"{why}: the other hosts are told ({running.where()})")
    elif running.step == 0:
        kill_groups(running.workers, clock=running.clock)
        say(f"{why}: nothing new to save yet ({running.where()}); ended")
        return Ended(exit, f"{why} before the first finished step of the attempt", committed=False)
    else:
        say(f"{why}: saving after the present step, then exit {exit.value} ({running.where()})")
    for worker in running.workers:
        worker.signal(FORWARDED[exit])
    return None


def _sleep_together(running: Attempt) -> None:
    """Ctrl-Z: the workers sleep while this process does; a sleep is no hang."""
    for worker in running.running:
        worker.signal_group(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for worker in running.running:
        worker.signal_group(signal.SIGCONT)
