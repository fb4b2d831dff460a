"""Limits the replacements of VMs, of any cause, without a new committed step. Pure.

Each cause has rules of its own for when to replace a VM; a mistake in one of them, or a cause that
does not end, would otherwise make and delete VMs for as long as the job may run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxres.exit_codes import ExitCode
from jaxres.launch.gce.state.desired_state import JobEnd, LossCount, Replacements, VmSpec


def add(
    before: Replacements,
    vms: Sequence[tuple[VmSpec, str]],
    *,
    step: int,
    now: float,
    vm_seconds: float,
    dollars: float,
) -> Replacements:
    """Returns the count after VMs are replaced.

    VMs that are lost together count once, and so do those that are lost one after another before
    any VM that has replaced one of them. A replacement that was requested at the notice has
    replaced its VM, though it was requested before that one was counted.

    Args:
      before: the count so far.
      vms: the replaced VMs, each with the kind of its loss; at least one.
      step: newest committed step; a new one starts the count again.
      now: seconds since the epoch.
      vm_seconds: lifetime of these VMs.
      dollars: their costs.
    """
    before = since_commit(before, step=step)
    is_next = before.times == 0 or any(vm.requested_at > before.at or vm.replaces for vm, _ in vms)
    losses = Counter({count.kind: count.vms for count in before.losses})
    losses.update(kind for _, kind in vms)
    return Replacements(
        step=max(step, before.step),
        at=now if is_next else before.at,
        times=before.times + is_next,
        losses=tuple(LossCount(kind, number) for kind, number in losses.most_common()),
        vm_seconds=before.vm_seconds + vm_seconds,
        dollars=before.dollars + dollars,
    )


def since_commit(count: Replacements, *, step: int) -> Replacements:
    """Returns a count, or an empty one if a step was committed since; `step`: the newest one."""
    return Replacements() if step > count.step else count


def end_of_job(
    count: Replacements, *, most: int, requested: int, has_prices: bool, now: float
) -> JobEnd | None:
    """Returns the end of a job that has used its budget; None: it has not."""
    if count.times <= most:
        return None
    number = sum(one.vms for one in count.losses)
    losses = ", ".join(f"{one.vms} {one.kind}" for one in count.losses)
    cost = f"cost ${count.dollars:.2f}" if has_prices else "cost an unknown sum"
    reason = (
        f"VMs were replaced {count.times} times without a new committed step "
        f"(launch.gce.max_replacements_without_commit={most}): {number} VMs were deleted "
        f"({losses}); they existed for {count.vm_seconds / 3600:.2f} hours and {cost}; "
        f"the job has requested {requested} VMs so far"
    )
    return JobEnd(ExitCode.NO_PROGRESS, reason, now)
