"""Scenarios of a worker that runs out of memory, or that is slower than the others.

Each function is called while every worker holds after the planned step, and returns what it did.
The hook of `train/chaos_hooks/faulty_worker_hook.py` causes the faults once the hold ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import metrics
from jaxres.runlog.event_log import read_events
from jaxres.train.chaos_hooks import fault_request

ADVICE = b"Change one of these and run the same command again"
OOM_ATTEMPTS = 2
"""Attempts that run out of memory: the supervisor tries once more, and gives up then."""
SLOW_FACTOR = 3
"""How many usual steps a slow host sleeps in each step."""
LEAST_SECONDS = 0.2
"""Least time that it sleeps."""
FIRST_STEPS = 10
"""Steps whose time is not usual."""


def exhaust_memory(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Lets a worker run out of memory until the command ends, and starts it again without that."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    output = run.runner.output(run.name)
    printed = output.stat().st_size
    run.mark_fault()
    run.request(number, step=fault.step, kind="exhaust", host=fault.host)
    run.release(number)
    code = run.runner.wait_exit()
    fault_request.withdraw(run.root)
    unkept = "" if code == ExitCode.OUT_OF_MEMORY else f"the command exited with {exit_name(code)}"
    if ADVICE not in output.read_bytes()[printed:]:
        unkept = unkept or "no message names settings to change"
    run.resume(number)
    if not (did := run.done(number, host=fault.host)):
        return Injection(fault, problem="no memory was allocated")
    return Injection(fault, did, ended_attempts=OOM_ATTEMPTS, unkept=unkept)


def slow_host(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Lets a host sleep in each step until it is named, or until the run has ended."""
    attempt = run.history().attempt
    rows = metrics.read_attempt(run.run_dir, attempt)
    usual = statistics.median(row.step_seconds for row in rows[FIRST_STEPS:])
    seconds = max(LEAST_SECONDS, SLOW_FACTOR * usual)

    def named() -> list[tuple[int, int]]:
        events = read_events(run.run_dir.events(attempt, 0))
        return [(e["host"], e["step"]) for e in events if e["event"] == "straggler_found"]

    run.mark_fault()
    run.request(number, step=fault.step, kind="sleep", host=fault.host, seconds=seconds)
    run.release(number)
    run.runner.wait(lambda: bool(named()))
    taken = run.seconds()
    fault_request.withdraw(run.root)
    found = named()
    if not (did := run.done(number, host=fault.host)):
        return Injection(fault, problem="no step was slower")
    return Injection(fault, did, recovery_seconds=taken, unkept=not_named(found, fault))


def not_named(found: Sequence[tuple[int, int]], fault: ScheduledFault) -> str:
    """Returns why the named slow hosts or steps do not match the fault; empty: they match.

    >>> slow = ScheduledFault("straggler", 32, host=1)
    >>> not_named([(1, 70)], slow), not_named([(0, 70)], slow)
    ('', 'host 0 was named as slow after step 70, slow since step 32 is host 1')
    """
    for host, step in found:
        if host != fault.host or step <= fault.step:
            slow = f"slow since step {fault.step} is host {fault.host}"
            return f"host {host} was named as slow after step {step}, {slow}"
    return "" if found else f"host {fault.host} was not named as slow"
