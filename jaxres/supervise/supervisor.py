"""Spawns one worker, answers signals and requests at once, holds the deadlines, reports the end.

One thread, one `select`: signals come through a wake-up pipe, progress through the worker's beat,
its end through a pidfd. The worker sits in a process group of its own and dies with this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxres import screen, storage
from jaxres.beat import Leaving, decode
from jaxres.clock import Clock
from jaxres.config.schema import DeadlinesSection
from jaxres.faults import Exit, StorageUnavailable, TypedEnd
from jaxres.rundir import RunDir
from jaxres.runlog import newer_claim
from jaxres.supervise import signals
from jaxres.supervise.deadlines import Watch, limit_seconds, overdue_seconds
from jaxres.supervise.kernel import out_of_memory_kills
from jaxres.supervise.owner import BEAT_SECONDS, Owner

TICK_SECONDS = 0.25
SLEPT_SECONDS = 2.0
"""A tick that took longer than this was no tick: the process itself was asleep."""
STACKS_GRACE_SECONDS = 0.7
ABORT_GRACE_SECONDS = 0.7
KILL_GRACE_SECONDS = 5.0
"""A killed process that waits for dead storage is not even gone; the door leaves it behind."""
FORWARDED = {Exit.PREEMPTED: signal.SIGTERM, Exit.STOPPED: signal.SIGINT}
AT_ONCE = (signal.SIGTERM, signal.SIGINT)
"""Of these the second ends at once. Not of SIGHUP: a closed terminal may send it twice."""
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Blocked when the worker is spawned, and taken by it as soon as it can."""


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


@dataclass
class Attempt:
    """What the supervisor knows of the running worker; owned by `supervise`."""

    run_dir: RunDir
    number: int
    last_seq: int
    """Newest record of the log that was seen; a newer claim after it fences us."""
    limits: DeadlinesSection
    owner: Owner
    clock: Clock
    process: subprocess.Popen[bytes]
    beats: int
    """Read end of the worker's beat."""
    watch: Watch
    asked: Exit | None = None
    leaving: Leaving | None = None
    rest: bytes = b""
    hurried: bool = False
    """Whether one of AT_ONCE has come."""
    deaf: bool = False
    """Whether the worker has closed its end of the pipe."""
    looked_at: float = math.inf
    beat_at: float = -math.inf
    ticked_at: float = -math.inf


def supervise(
    command: Sequence[str],
    *,
    run_dir: RunDir,
    attempt: int,
    last_seq: int,
    limits: DeadlinesSection,
    owner: Owner,
    clock: Clock,
    env: dict[str, str],
) -> Ended:
    """Runs the worker to its end.

    Args:
      command: the worker's argv; `--beat-fd N` is appended.
      run_dir: whose requests are honoured.
      attempt: the attempt that the worker belongs to.
      last_seq: number of the attempt's claim in the log.
      limits: the deadlines by phase.
      owner: beats every second while the worker runs.
      clock: the watcher's.
      env: the worker's environment.
    """
    with signals.as_bytes() as wakeup:
        kills_before = out_of_memory_kills()
        read_end, write_end = os.pipe()
        process = _spawn([*command, "--beat-fd", str(write_end)], write_end, env=env)
        os.close(write_end)
        now = clock.monotonic()
        running = Attempt(
            run_dir, attempt, last_seq, limits, owner, clock, process, read_end, Watch(since=now)
        )
        try:
            ended = _wait(running, wakeup)
        finally:
            _kill_group(process)
            os.close(read_end)
        if ended.code == 128 + signal.SIGKILL and out_of_memory_kills() > kills_before:
            reason = f"the kernel killed the worker for want of memory ({_where(running)})"
            return dataclasses.replace(ended, code=Exit.OUT_OF_MEMORY, reason=reason)
        return ended


def _spawn(command: Sequence[str], beat: int, *, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the worker in its own process group, with its signals blocked until it takes them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(beat,), process_group=0, env=env
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(running: Attempt, wakeup: int) -> Ended:
    """Answers whatever comes until the worker has ended."""
    pidfd = os.pidfd_open(running.process.pid)
    try:
        while True:
            sources = [wakeup, pidfd] if running.deaf else [wakeup, pidfd, running.beats]
            ready, _, _ = select.select(sources, [], [], TICK_SECONDS)
            _stretch(running)
            _take_beats(running)
            if pidfd in ready:
                _take_beats(running)
                return _translate(running, running.process.wait())
            for number in _pending(wakeup):
                if (ended := _answer(running, number)) is not None:
                    return ended
            _stretch(running)  # An answer may have been a sleep.
            if (ended := _tick(running)) is not None:
                return ended
    finally:
        os.close(pidfd)


def _stretch(running: Attempt) -> None:
    """Lets no limit run while this process was asleep."""
    now = running.clock.monotonic()
    if now - running.looked_at > SLEPT_SECONDS:
        running.watch = running.watch.paused(now - running.looked_at)
    running.looked_at = now


def _tick(running: Attempt) -> Ended | None:
    """Beats, looks for requests and newer claims, and holds the deadline."""
    now = running.clock.monotonic()
    if now - running.ticked_at < TICK_SECONDS:
        return None  # A finished step has woken us.
    running.ticked_at = now
    if now - running.beat_at >= BEAT_SECONDS:
        running.beat_at = now
        if (ended := _beat(running)) is not None:
            return ended
    if (ended := _take_requests(running)) is not None:
        return ended
    overdue = overdue_seconds(running.watch, running.limits, now=now)
    return _end_hung(running) if overdue > 0 else None


def _beat(running: Attempt) -> Ended | None:
    """Looks whether we still own the run, and only then beats: who was fenced writes nothing."""
    try:
        claim, running.last_seq = newer_claim(
            running.run_dir.log, attempt=running.number, after=running.last_seq
        )
        if claim is None:
            running.owner.beat()
            return None
    except StorageUnavailable:
        return None  # Not the watcher's to judge; the log fences whoever writes.
    _kill_group(running.process)
    reason = (
        f"{running.run_dir.root}: attempt {claim.attempt} (host {claim.host}, pid "
        f"{claim.pid}) owns this run now; this process has written nothing more."
    )
    return Ended(Exit.FENCED, reason, committed=False, on_record=False, to_be_said=True)


def _take_requests(running: Attempt) -> Ended | None:
    """Honours the files that a person has put into the run directory."""
    stop, save = running.run_dir.request("stop"), running.run_dir.request("save")
    if _is_there(stop) and (_honour(running, stop) or running.asked is None):
        return _ask_to_stop(running, Exit.STOPPED, str(stop))
    # Not honoured again and again where it can't be moved.
    if _is_there(save) and _honour(running, save):
        _ask_to_save(running)
    return None


def _is_there(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.exists()
    return False


def _honour(running: Attempt, request: Path) -> bool:
    """Moves a request into the attempt's folder; says whether that went well."""
    folder = running.run_dir.attempt(running.number)
    with contextlib.suppress(TypedEnd, OSError):
        storage.move(request, folder / f"{request.name}-{running.watch.step:08d}")
        return True
    return False


def _ask_to_save(running: Attempt) -> None:
    say(f"save asked for: one extra checkpoint after the present step ({_where(running)})")
    running.process.send_signal(signal.SIGUSR2)


def _answer(running: Attempt, number: int) -> Ended | None:
    if number == signal.SIGUSR1:
        running.process.send_signal(signal.SIGUSR1)
        say(f"stacks of all threads are in {running.run_dir.stacks(running.number, 0)}")
    elif number == signal.SIGUSR2:
        _ask_to_save(running)
    elif number == signal.SIGTSTP:
        _sleep_together(running)
    elif number in signals.STOPS:
        again, running.hurried = running.hurried, running.hurried or number in AT_ONCE
        if again and number in AT_ONCE:
            _kill_group(running.process)
            say(f"{_name(number)} again: ended at once; what is committed stays")
            return Ended(128 + number, f"{_name(number)} a second time", committed=False)
        return _ask_to_stop(running, signals.STOPS[signal.Signals(number)], _name(number))
    return None


def _ask_to_stop(running: Attempt, exit: Exit, why: str) -> Ended | None:
    """Asks the worker to save and leave; before the first finished step ends it at once."""
    if running.asked is not None:
        say(f"{why}: saving already, exit {running.asked.value} comes ({_where(running)})")
        return None
    running.asked = exit
    if running.watch.step == 0:
        _kill_group(running.process)
        say(f"{why}: nothing new to save yet ({_where(running)}); ended")
        return Ended(exit, f"{why} before the first finished step of the attempt", committed=False)
    say(f"{why}: saving after the present step, then exit {exit.value} ({_where(running)})")
    running.process.send_signal(FORWARDED[exit])
    return None


def _sleep_together(running: Attempt) -> None:
    """Ctrl-Z: the worker sleeps while this process does; a sleep is no hang."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGCONT)


def _end_hung(running: Attempt) -> Ended:
    """Asks for the stacks of all threads, aborts, kills; each step sure to end."""
    if (word := running.leaving) is not None:
        _kill_group(running.process)
        return Ended(word.exit, word.reason, word.committed, word.exit != Exit.FENCED, True)
    watch, limit = running.watch, limit_seconds(running.watch, running.limits)
    stacks = running.run_dir.stacks(running.number, 0)
    reason = (
        f"no progress for {limit:.1f} s in phase '{watch.phase}' after step {watch.step} of this "
        f"attempt; stacks of all threads, where they could be had: {stacks}. If that is no hang, "
        "raise the phase's limit (deadlines.*)."
    )
    for number, grace in (
        (signal.SIGUSR1, STACKS_GRACE_SECONDS),
        (signal.SIGABRT, ABORT_GRACE_SECONDS),
    ):
        running.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(timeout=grace)
    _kill_group(running.process)
    return Ended(Exit.HUNG, reason, committed=False, to_be_said=True)


def _take_beats(running: Attempt) -> None:
    while not running.deaf and select.select([running.beats], [], [], 0)[0]:
        data = os.read(running.beats, 65536)
        if not data:
            running.deaf = True
            return
        *lines, running.rest = (running.rest + data).split(b"\n")
        now = running.clock.monotonic()
        for line in lines:
            beat = decode(line)
            running.watch = running.watch.after(beat, now=now)
            if isinstance(beat, Leaving):
                running.leaving = beat


def _pending(wakeup: int) -> bytes:
    try:
        return os.read(wakeup, 4096)
    except BlockingIOError:
        return b""


def _translate(running: Attempt, status: int) -> Ended:
    """Turns the worker's end into an exit code: its own, or 128 + the signal that killed it.

    A code without a word before it is custom code's `os._exit`, and no end of a run.
    """
    leaving = running.leaving
    if status < 0:
        reason = f"the worker was ended by {_name(-status)} ({_where(running)})"
        return Ended(128 - status, reason, committed=False, to_be_said=True)
    if leaving is not None and leaving.exit == status:
        on_record = status != Exit.FENCED
        return Ended(status, leaving.reason, leaving.committed, on_record=on_record)
    reason = f"the worker left with {status} and did not say why ({_where(running)})"
    return Ended(Exit.BUG, reason, committed=False, to_be_said=True)


def _where(running: Attempt) -> str:
    return f"phase '{running.watch.phase}', step {running.watch.step} of this attempt"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker and all it has started, for sure."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=KILL_GRACE_SECONDS)


def say(text: str) -> None:
    """Answers the person at the terminal, at once."""
    screen.tell(f"jaxres: {text}\n")
