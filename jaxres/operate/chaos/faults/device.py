"""Scenario of a faulty device, which the health guard of the supervisor finds while the run trains.

The function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos.faults.process import SENT_SECONDS
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog.event_log import read_events

REMAP = "remap_pending 1"
"""State of a GPU whose memory row is to be remapped: the content is good, so it is saved."""
DID = "a row of memory of the GPU is to be remapped"


def remap_row(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Gives a GPU a fault, and starts the command again on a healthy one once the run has ended."""
    assert run.gpus is not None, "a scenario with a fake of NVIDIA's library"
    attempt = run.history().attempt

    def is_told(name: str) -> bool:
        events = read_events(run.run_dir.host_supervisor_events(attempt, 0))
        return any(one["event"] == name for one in events)

    if not run.wait_limited(lambda: is_told("health_watch_started")):
        return Injection(fault, problem="the health guard has read no GPU")
    if is_told("hardware_fault_found"):
        return Injection(fault, problem="the health guard has found another fault before")
    run.mark_fault()
    run.gpus.set(REMAP)
    if not run.wait_limited(lambda: is_told("hardware_fault_found")):
        run.gpus.set()
        return Injection(fault, DID, unkept="the health guard has not found it")
    run.runner.clock.sleep(SENT_SECONDS)
    run.release(number)
    code = run.runner.wait_exit()
    unkept = "" if code == ExitCode.UNHEALTHY else f"the command exited with {exit_name(code)}"
    if (saved := run.history().step) < fault.step:
        unkept = unkept or f"step {fault.step} was not saved before the exit, the newest is {saved}"
    run.gpus.set()
    refused = run.forget_faulty_hosts()
    unkept = unkept or refused
    run.resume(number)
    return Injection(fault, DID, unkept=unkept)
