"""Spawns a job's workers, answers signals and requests at once, holds deadlines, reports the end.

One thread, one `select`: signals come through a wake-up pipe, progress through each worker's beat,
its end through a pidfd, news of the run directory from the lookout. A worker sits in a process
group of its own and dies with this process. One worker is the case of one; of several the first end
decides for all (`blame`).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxres import screen
from jaxres.clock import Clock
from jaxres.config.schema import DeadlinesSection
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from jaxres.runlog import Claim
from jaxres.supervise import blame, lookout, signals
from jaxres.supervise.blame import End, Known
from jaxres.supervise.deadlines import LEAVE_SECONDS, limit_seconds, overdue_seconds
from jaxres.supervise.kernel import out_of_memory_kills
from jaxres.supervise.lookout import Lookout, Report
from jaxres.supervise.owner import Owner
from jaxres.supervise.process import Worker, kill_groups, signal_name, spawn, wait_for

TICK_SECONDS = 0.25
SLEPT_SECONDS = 2.0
"""A tick that took longer than this was no tick: the process itself was asleep."""
SILENT_SECONDS = 10.0
"""Storage that has not answered the lookout for so long is spoken of."""
STACKS_GRACE_SECONDS = 0.7
ABORT_GRACE_SECONDS = 0.7
FORWARDED = {Exit.PREEMPTED: signal.SIGTERM, Exit.STOPPED: signal.SIGINT}
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""Of these the second ends at once. Not of SIGHUP: a closed terminal may send it twice."""


@dataclass(frozen=True)
class Ended:
    """How the attempt ended, for the process's exit code and the stop record."""

    code: int
    reason: str
    committed: bool
    on_record: bool = True
    """False: fenced; this attempt may write nothing more."""
    to_be_said: bool = False
    """Whether nobody has told the person yet."""
    culprit: int | None = None
    """The host that is the cause, where one is."""
    own_word: bool = False
    """Whether its worker itself has said why."""


@dataclass
class Attempt:
    """What the supervisor knows of the running workers; owned by `supervise`."""

    run_dir: RunDir
    number: int
    limits: DeadlinesSection
    clock: Clock
    workers: list[Worker]
    asked: Exit | None = None
    hurried: bool = False
    """Whether one of AT_ONCE has come."""
    looked_at: float = float("inf")
    ticked_at: float = float("-inf")
    silence_told: bool = False

    @property
    def running(self) -> list[Worker]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if worker.end is None]

    @property
    def step(self) -> int:
        """The newest step that any worker has finished."""
        return max((worker.watch.step for worker in self.workers), default=0)

    def where(self) -> str:
        """Returns how far the attempt has come, for a message."""
        if len(self.workers) == 1:
            return self.workers[0].where()
        return f"{len(self.workers)} hosts, step {self.step} of this attempt"

    def stacks(self) -> str:
        """Returns where stacks are dumped to, for a message."""
        first, last = (self.run_dir.stacks(self.number, self.workers[n].host) for n in (0, -1))
        return f"{first}" if first == last else f"{first} to {last.name}"


def supervise(
    commands: Mapping[int, Sequence[str]],
    *,
    run_dir: RunDir,
    attempt: int,
    last_seq: int,
    limits: DeadlinesSection,
    owner: Owner,
    clock: Clock,
    env: Mapping[str, str],
) -> Ended:
    """Runs the workers to their end.

    Args:
      commands: a worker's argv by host; `--beat-fd N` is appended. The lead starts first.
      run_dir: whose requests are honoured.
      attempt: the attempt that the workers belong to.
      last_seq: number of the attempt's claim in the log.
      limits: the deadlines by phase.
      owner: beats every second while the workers run.
      clock: the watcher's.
      env: the workers' environment.
    """
    with signals.as_bytes() as wakeup:
        running = Attempt(run_dir, attempt, limits, clock, [])
        kills_before = out_of_memory_kills()
        try:
            for host, command in sorted(commands.items()):
                running.workers.append(
                    spawn(
                        command,
                        host=host,
                        is_alone=len(commands) == 1,
                        env=env,
                        kills_before=kills_before,
                        clock=clock,
                    )
                )
            with Lookout(
                run_dir,
                attempt=attempt,
                last_seq=last_seq,
                owner=owner,
                clock=clock,
                step=lambda: running.step,
            ) as watch:
                return _wait(running, wakeup, watch)
        finally:
            kill_groups(running.workers, clock=clock)
            for worker in running.workers:
                worker.close()


def _wait(running: Attempt, wakeup: int, watch: Lookout) -> Ended:
    """Answers whatever comes until the attempt has ended."""
    while True:
        sources = [fd for worker in running.workers for fd in worker.sources()]
        select.select([wakeup, watch.wakeup, *sources], [], [], TICK_SECONDS)
        _stretch(running)
        now = running.clock.monotonic()
        for worker in running.workers:
            worker.take(now=now)
        if (ended := _first_end(running)) is not None:
            return ended
        for number in _pending(wakeup):
            if (ended := _answer(running, number)) is not None:
                return ended
        for report in watch.reports():
            if (ended := _heed(running, report)) is not None:
                return ended
        _stretch(running)  # An answer may have been a sleep.
        if (ended := _tick(running, watch)) is not None:
            return ended


def _stretch(running: Attempt) -> None:
    """Lets no limit run while this process was asleep."""
    now = running.clock.monotonic()
    if now - running.looked_at > SLEPT_SECONDS:
        for worker in running.workers:
            worker.paused(now - running.looked_at)
    running.looked_at = now


def _first_end(running: Attempt) -> Ended | None:
    """Ends all once the first end, and what the others did then, allow to say why."""
    ends = [worker.end for worker in running.workers]
    settle_seconds = running.limits.save_seconds + LEAVE_SECONDS
    if running.clock.monotonic() < blame.due(ends, settle_seconds=settle_seconds):
        return None
    return _conclude(running)


def _conclude(running: Attempt) -> Ended:
    known = [worker.known() for worker in running.workers]
    kill_groups(running.workers, clock=running.clock)
    found = blame.decide(known)
    return Ended(
        found.code,
        found.reason,
        found.committed,
        on_record=found.code != Exit.FENCED,
        to_be_said=found.code != Exit.DONE,
        culprit=found.culprit,
        own_word=found.own_word,
    )


def _tick(running: Attempt, watch: Lookout) -> Ended | None:
    """Holds the deadlines, and says so when storage no longer answers."""
    now = running.clock.monotonic()
    if now - running.ticked_at < TICK_SECONDS:
        return None  # A finished step has woken us.
    running.ticked_at = now
    is_silent = watch.silent_seconds(now=now) > SILENT_SECONDS
    if is_silent != running.silence_told:
        running.silence_told = is_silent
        state = "does not answer; deadlines and signals go on" if is_silent else "answers again"
        say(f"{running.run_dir.root}: storage {state} ({running.where()})")
    overdue = [w for w in running.running if overdue_seconds(w.watch, running.limits, now=now) > 0]
    for worker in overdue:
        if worker.word is not None:
            worker.signal_group(signal.SIGKILL)
            worker.end = worker.end_by_word(now)
    late = {worker.host for worker in overdue if worker.word is None}
    if late:
        known = [worker.known() for worker in running.running]
        if hung := blame.hung(known, late):
            return _end_hung(running, hung)
    return None


def _end_hung(running: Attempt, hung: Sequence[Known]) -> Ended:
    """Asks for the stacks of all threads of all workers, aborts, kills; each step sure to end."""
    workers = running.running
    known, *others = hung
    worker = next(worker for worker in workers if worker.host == known.host)
    limit = limit_seconds(worker.watch, running.limits)
    reason = (
        f"no progress for {limit:.1f} s in phase '{known.phase}' after step {known.step} of this "
        f"attempt; {_alike(known, others)}stacks of all threads, where they could be had: "
        f"{running.stacks()}. If that is no hang, raise the phase's limit (deadlines.*)."
    )
    end = End(Exit.HUNG, reason, running.clock.monotonic(), own_word=False)
    for number, grace in (
        (signal.SIGUSR1, STACKS_GRACE_SECONDS),
        (signal.SIGABRT, ABORT_GRACE_SECONDS),
    ):
        for each in workers:
            each.signal(number)
        wait_for(workers, seconds=grace, clock=running.clock)
    worker.end = end
    return _conclude(running)


def _alike(known: Known, others: Sequence[Known]) -> str:
    """Says which hosts look the same from here: where they wait for each other, any may be hung."""
    alike = [o.host for o in others if (o.phase, o.step) == (known.phase, known.step)]
    if not alike or known.is_stopped:
        return ""
    return f"host {', '.join(map(str, alike))} looks the same, the stacks tell them apart; "


def _heed(running: Attempt, report: Report) -> Ended | None:
    """Does what the run directory asks for."""
    match report:
        case lookout.StopAsked(path):
            return _ask_to_stop(running, Exit.STOPPED, str(path))
        case lookout.SaveAsked():
            _ask_to_save(running)
            return None
        case lookout.Overtaken(claim):
            return _fenced(running, claim)
        case lookout.Failed(error):
            raise error


def _fenced(running: Attempt, claim: Claim) -> Ended:
    kill_groups(running.workers, clock=running.clock)
    reason = (
        f"{running.run_dir.root}: attempt {claim.attempt} (host {claim.host}, pid "
        f"{claim.pid}) owns this run now; this process has written nothing more."
    )
    return Ended(Exit.FENCED, reason, committed=False, on_record=False, to_be_said=True)


def _ask_to_save(running: Attempt) -> None:
    """Asks the lead, which tells the others."""
    say(f"save asked for: one extra checkpoint after the present step ({running.where()})")
    for worker in running.workers:
        if worker.host == 0:
            worker.signal(signal.SIGUSR2)


def _answer(running: Attempt, number: int) -> Ended | None:
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
            return Ended(128 + number, f"{signal_name(number)} a second time", committed=False)
        stop = signals.STOPS[signal.Signals(number)]
        return _ask_to_stop(running, stop, signal_name(number))
    return None


def _ask_to_stop(running: Attempt, exit: Exit, why: str) -> Ended | None:
    """Asks the workers to save and leave; before the first finished step ends them at once."""
    if running.asked is not None:
        say(f"{why}: saving already, exit {running.asked.value} comes ({running.where()})")
        return None
    running.asked = exit
    if running.step == 0:
        kill_groups(running.workers, clock=running.clock)
        say(f"{why}: nothing new to save yet ({running.where()}); ended")
        return Ended(exit, f"{why} before the first finished step of the attempt", committed=False)
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


def _pending(wakeup: int) -> bytes:
    try:
        return os.read(wakeup, 4096)
    except BlockingIOError:
        return b""


def say(text: str) -> None:
    """Answers the person at the terminal, at once."""
    screen.tell(f"jaxres: {text}\n")
