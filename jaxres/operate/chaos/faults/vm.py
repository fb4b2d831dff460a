"""Scenarios of `launch gce` on emulated VMs: a lost VM, no capacity, a lost launcher or its state.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.operate.chaos.emulated_vms import ZONE, EmulatedVms
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import launch_events
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.storage import gcs_objects, memory_folder

LISTS = 2
"""Number of VM lists that a launcher makes until its requested creations are sent."""
LIST_CALL = "instances.aggregatedList"


def lose_vm(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Ends a VM without a trace in the Compute API, and waits until another one trains."""
    vms = _vms(run)
    return _take(run, number, fault, vms.gce.die_silently, _not_replaced)


def stock_out(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Preempts a VM whose capacity option has no other one, and waits for one of the next."""
    gce = _vms(run).gce
    gce.stockout(zone=ZONE, model="SPOT")
    return _take(run, number, fault, lambda vm: gce.preempt(vm, notice=False), _not_elsewhere)


def _take(
    run: HeldRun,
    number: int,
    fault: ScheduledFault,
    take: Callable[[str], None],
    unkept: Callable[[HeldRun, str, Sequence[LaunchEvent]], str],
) -> Injection:
    """Takes the VM of a host away; `unkept` returns the launcher's omissions since then."""
    vms = _vms(run)
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    lost, attempt = vms.member(fault.host), run.history().attempt
    if not lost:
        return Injection(fault, problem="the launcher has no running attempt")
    known = launch_events.read(run.run_dir)
    run.plan(number + 1)  # Before another worker trains.
    run.mark_fault()
    take(lost)
    if pids := vms.processes(lost):
        return Injection(fault, problem=f"{len(pids)} processes of {lost} have outlived it")
    memory_folder.delete(run.root)  # A VM is lost with its memory.
    seconds = run.wait_trained(attempt, number)
    events = [event for event in launch_events.read(run.run_dir) if event not in known]
    return Injection(
        fault,
        f"{lost}, the VM of host {fault.host}, is gone without a notice",
        recovery_seconds=seconds,
        unkept=unkept(run, lost, events),
    )


def _not_replaced(_: HeldRun, lost: str, events: Sequence[LaunchEvent]) -> str:
    """Returns why the launcher has not replaced a VM; empty: it has."""
    losses = [e for e in events if e.kind == "vm_lost" and lost in e.vms]
    if len(losses) != 1:
        return f"the launcher has {len(losses)} events of the loss of {lost}"
    created = [vm for e in events if e.kind == "vms_created" for vm in e.vms]
    if not created or lost in created:
        return f"no VM was created instead of {lost}"
    is_used = any(e.kind == "attempt_started" and set(created) & {*e.vms} for e in events)
    return "" if is_used else f"no attempt has begun on {', '.join(created)}"


def _not_elsewhere(run: HeldRun, lost: str, events: Sequence[LaunchEvent]) -> str:
    """Returns why the launcher has not taken the next capacity option; empty: it has."""
    if text := _not_replaced(run, lost, events):
        return text
    if not any(e.kind == "request_failed" and e.cause == "stockout" for e in events):
        return "no request has met the stockout"
    newest = _vms(run).gce.vms_so_far()[-1]
    is_next = newest.model == "STANDARD"
    return "" if is_next else f"{newest.name} is not of the next capacity option"


def kill_launcher(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills the launcher, starts the command again, and waits until it has looked around."""
    vms = _vms(run)
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    before, made = vms.desired(), vms.made()
    if before is None or before.phase != "running" or not run.runner.is_running():
        return Injection(fault, problem="no launcher leads a running attempt")
    run.mark_fault()
    run.runner.stop()
    run.start()

    def is_led() -> bool:
        now = vms.desired()
        return now is not None and now.epoch > before.epoch

    is_adopted = run.wait_limited(is_led)
    seconds, lists = run.seconds(), vms.gce.calls().calls[LIST_CALL]
    has_looked = run.wait_limited(lambda: vms.gce.calls().calls[LIST_CALL] >= lists + LISTS)
    now, unkept = vms.desired(), ""
    if not is_adopted or not has_looked or now is None:
        unkept = "the second launcher does not lead"
    elif (now.phase, now.attempt.number) != (before.phase, before.attempt.number):
        state = f"{now.phase}, attempt {now.attempt.number}"
        unkept = f"attempt {before.attempt.number} does not run on: {state}"
    elif new := [name for name in vms.made() if name not in made]:
        unkept = f"created: {', '.join(new)}"
    evidence = f"SIGKILL to the launcher; epoch {before.epoch} became {now and now.epoch}"
    return Injection(fault, evidence, recovery_seconds=seconds, unkept=unkept)


def lose_launch_state(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills the launcher, deletes its desired state, and starts the command again."""
    vms = _vms(run)
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    before, attempt = vms.desired(), run.history().attempt
    if before is None or before.phase != "running" or not run.runner.is_running():
        return Injection(fault, problem="no launcher leads a running attempt")
    run.mark_fault()
    run.runner.stop()
    gcs_objects.delete(LaunchPaths(vms.run).desired_state)
    old = set(vms.gce.vms())
    if vms.desired() is not None or not old:
        return Injection(fault, problem="the desired state or no VM is there")
    run.plan(number + 1)
    run.start()
    are_gone = run.wait_limited(lambda: not old & set(vms.gce.vms()))
    memory_folder.delete(run.root)
    made = set(vms.made())
    seconds = run.wait_trained(attempt, number)
    now, unkept = vms.desired(), ""
    if not are_gone:
        unkept = f"not deleted: {', '.join(sorted(old & set(vms.gce.vms())))}"
    elif now is None or now.id == before.id:
        unkept = "no new job has begun"
    elif not set(vms.made()) - made:
        unkept = "a VM was created before those without a state were deleted"
    evidence = f"the desired state was deleted while {', '.join(sorted(old))} trained"
    return Injection(fault, evidence, recovery_seconds=seconds, unkept=unkept)


def _vms(run: HeldRun) -> EmulatedVms:
    assert run.vms is not None, "a scenario of VMs"
    return run.vms
