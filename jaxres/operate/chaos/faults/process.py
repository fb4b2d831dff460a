"""Scenarios that break the processes of a run: signals to workers and to the supervisor.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

import contextlib
import random
import signal
from pathlib import Path

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.host import proc_stat
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import step_dirs

LOOK_SECONDS = 0.001
"""Pause between two looks at the saves: a tiny one takes a few hundredths of a second."""
SENT_SECONDS = 0.2
"""Pause after the supervisor has passed a request on: the worker's thread takes it at once."""


def kill_worker(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills a worker when the newest save is committed."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    return _signal(run, number, fault, signal.SIGKILL)


def stop_worker(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Suspends a worker at once: the deadline of hooks begins with the hold."""
    return _signal(run, number, fault, signal.SIGSTOP)


def _signal(run: HeldRun, number: int, fault: ScheduledFault, sent: signal.Signals) -> Injection:
    pid = run.pid(number, fault.host)
    run.mark_fault()
    run.plan(number + 1)  # Before another worker trains.
    if not run.runner.signal_worker(pid, sent):
        return Injection(fault, problem=f"the worker (pid {pid}) had ended")
    return Injection(fault, f"{sent.name} to pid {pid}")


def kill_in_save(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills host 0's worker as soon as a save has a directory and no commit record.

    The worker is suspended while that is looked at, so that the save can't end meanwhile. A
    save that has been too fast is left alone, and the next one is watched.
    """
    pid = run.pid(number, 0)
    before = {one.name for one in step_dirs.listed(run.run_dir.checkpoints)}
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    run.plan(number + 1)
    run.release(number)
    next_hold = run.held(number + 1, 0)
    while run.runner.is_running() and not next_hold.exists():
        new = {one.name for one in step_dirs.listed(run.run_dir.checkpoints)} - before
        if not new:
            run.runner.clock.sleep(LOOK_SECONDS)
            continue
        if not _suspend(run, pid):
            break
        paths = {path.rpartition("/")[2] for path in run.history().paths}
        open_saves = [name for name in new if _final_name(name) not in paths]
        if open_saves:
            run.mark_fault()
            run.runner.signal_worker(pid, signal.SIGKILL)
            evidence = f"SIGKILL to pid {pid} while {open_saves[0]} was written"
            return Injection(fault, evidence)
        run.runner.signal_worker(pid, signal.SIGCONT)
        before |= new
    return Injection(fault, problem="each save was committed before it was seen")


def _suspend(run: HeldRun, pid: int) -> bool:
    """Suspends a worker; returns whether it is, once all its threads are."""
    if not run.runner.signal_worker(pid, signal.SIGSTOP):
        return False
    run.wait_limited(lambda: _is_suspended(pid), instead=lambda: not Path(f"/proc/{pid}").exists())
    return _is_suspended(pid)


def notice(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Sends a notice, and starts the command again."""
    run.mark_fault()
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    run.resume(number)
    return Injection(fault, "the command exited with PREEMPTED")


def kill_supervisor(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills the supervisor, and starts the command again."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    if not run.runner.is_running():
        return Injection(fault, problem="the supervisor had ended")
    pid = run.pid(number, fault.host)
    run.mark_fault()
    run.runner.stop()
    run.resume(number)
    evidence = f"SIGKILL to the supervisor of pid {pid}"
    return Injection(fault, evidence)


def stop_and_resume(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run as its operator, by Ctrl-C or by a file, and starts the command again."""
    process, output = run.runner.process, run.runner.output(run.name)
    assert process is not None
    before = output.stat().st_size
    run.mark_fault()
    by = random.Random(f"{fault}").choice(("SIGINT", "a file `stop`"))
    if by == "SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        (run.disk / "stop").touch()
    run.runner.wait(lambda: b"saving after the current step" in output.read_bytes()[before:])
    run.runner.clock.sleep(SENT_SECONDS)
    run.release(number)
    code = run.runner.wait_exit()
    run.resume(number)
    kept = code == ExitCode.STOPPED
    return Injection(fault, by, unkept="" if kept else f"it exited with {exit_name(code)}")


def leave_zombie(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Suspends the supervisor until another one has taken the run over, and then resumes it."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    zombie, attempt = run.runner.process, run.history().attempt
    assert zombie is not None
    zombie.send_signal(signal.SIGSTOP)
    if not run.wait_limited(lambda: _is_suspended(zombie.pid)):
        return Injection(fault, problem="the supervisor was not suspended")
    run.others.append(zombie)
    run.mark_fault()
    run.resume(number)
    seconds = run.wait_trained(attempt, number)
    zombie.send_signal(signal.SIGCONT)
    ended = run.wait_end(zombie)  # The resumed command may end before it.
    kept = ended and zombie.returncode == ExitCode.FENCED
    state = f"ended with {zombie.returncode}" if ended else "still runs"
    return Injection(
        fault,
        f"pid {zombie.pid} was suspended while attempt {attempt + 1} began",
        recovery_seconds=seconds,
        unkept="" if kept else f"the old supervisor {state}, not with {exit_name(ExitCode.FENCED)}",
    )


def _is_suspended(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return proc_stat.read_proc_stat(pid).state in "Tt"
    return False


def _final_name(name: str) -> str:
    """Returns the name of a step directory when it is complete.

    >>> _final_name("00000008-0002.orbax-checkpoint-tmp")
    '00000008-0002'
    """
    return name.partition(".")[0]
