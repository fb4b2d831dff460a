"""Scenarios that change the state of a run in the memory of its workers.

Each function is called while every worker holds after the planned step, and returns what it did.
The hook of `train/chaos_hooks/array_edit_hook.py` edits once the hold ends.
"""

from __future__ import annotations

import signal

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos.held_run import AGAIN, HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import metrics
from jaxres.runlog.event_log import read_events
from jaxres.train.chaos_hooks.fault_request import Kind


def why_not(config: RunConfig) -> str:
    """Returns why the parameters of a config can't be edited; empty: they can."""
    if config.optimizer.ema_decay is not None:
        return "a hook gets the averaged parameters (optimizer.ema_decay), not the trained ones"
    return ""


def overflow_for_a_step(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Lets the parameters overflow in one step, and kills a worker two steps later."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    attempt, step = run.history().attempt, fault.step
    second, third = AGAIN + number, 2 * AGAIN + number
    run.request(number, step=step, kind="overflow")
    run.mark_altered(step)
    run.plan_hold(second, step=step + 1)
    run.release(number)
    is_held = run.wait_held(second)
    if not (did := run.done(number)):
        return Injection(fault, problem="the parameters were not edited")
    if not is_held:
        return Injection(fault, did, unkept=f"the run ended after step {step + 1}")
    run.request(second, step=step + 1, kind="restore")
    run.plan_hold(third, step=step + 2)
    run.release(second)
    if not run.wait_held(third):
        return Injection(fault, did, unkept=f"the run ended after step {step + 2}")
    unkept = _not_masked(run, attempt, step + 1)
    run.mark_fault()
    run.plan(number + 1)  # Before another worker trains.
    run.runner.signal_worker(run.pid(third, fault.host), signal.SIGKILL)
    run.release(third)
    return Injection(fault, did, unkept=unkept)


def _not_masked(run: HeldRun, attempt: int, step: int) -> str:
    """Returns the error if a step was not masked or the loss after it is not finite; else ""."""
    run.wait_limited(lambda: step + 1 in _rows(run, attempt))
    rows = _rows(run, attempt)
    if step not in rows or not rows[step].skipped:
        return f"step {step} was not masked"
    if step + 1 not in rows or rows[step + 1].loss is None:
        return f"the loss of step {step + 1} is not finite"
    events = read_events(run.run_dir.events(attempt, 0))
    if not any((e["event"], e.get("step")) == ("update_skipped", step) for e in events):
        return f"no event says that the update of step {step} was skipped"
    return ""


def _rows(run: HeldRun, attempt: int) -> dict[int, metrics.MetricsLine]:
    return {row.step: row for row in metrics.read_attempt(run.run_dir, attempt)}


def leave_nan(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Makes a number of each parameter NaN; starts the command again once the run has ended."""
    return _end_by_edit(run, number, fault, "nan", ExitCode.DIVERGED)


def flip_copy(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Flips a bit of one device's copy; uses the host again and starts the command again."""
    return _end_by_edit(run, number, fault, "flip", ExitCode.UNHEALTHY, host=fault.host)


def _end_by_edit(
    run: HeldRun,
    number: int,
    fault: ScheduledFault,
    kind: Kind,
    expected: ExitCode,
    *,
    host: int | None = None,
) -> Injection:
    """Edits the state, waits for the end of the run, and starts the command again.

    Args:
      run: the run.
      kind: what is done to the state.
      expected: the exit code of the command.
      host: whose state it is; None: that of all hosts.
    """
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    run.request(number, step=fault.step, kind=kind, host=host)
    run.mark_altered(fault.step)
    run.mark_fault()
    run.release(number)
    code = run.runner.wait_exit()
    did = run.done(number, host=host or 0)
    saved = [one.step for one in run.history().committed if one.step >= fault.step]
    unkept = "" if code == expected else f"the command exited with {exit_name(code)}"
    if saved:
        unkept = f"step {saved[0]} was committed after it"
    refused = run.forget_faulty_hosts()
    unkept = unkept or refused
    run.resume(number)
    if not did:
        return Injection(fault, problem="no parameter was edited (has it copies?)")
    return Injection(fault, did, unkept=unkept)
