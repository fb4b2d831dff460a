"""What a job on VMs is meant to be next, given what is seen of it. Pure.

Whatever is decided is written before anything is done about it, and everything that is done may be
done twice.
"""

from __future__ import annotations

from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.gce import GceSection
from jaxres.faults import Exit
from jaxres.launch import placing, running
from jaxres.launch.intent import End, Intent, Next, Vm
from jaxres.launch.placing import without_place
from jaxres.launch.sight import Seen

LOST_REQUEST_SECONDS = 20.0
"""A creation that the service knows nothing of so long after it was asked for never came."""


def decide(intent: Intent, seen: Seen, config: RunConfig) -> Next:
    """Returns the intent that follows; the same one where nothing is to be changed."""
    gce = config.launch.gce
    assert gce is not None, config
    intent = _without_gone(intent, seen, gce)
    if intent.phase == "ended":
        return Next(intent)
    if intent.phase == "ending":
        return _end(intent, seen, gce)
    intent = replace(intent, end=intent.end or _asked_end(intent, seen, config))
    if intent.end is not None and (intent.phase == "placing" or _is_late(intent, seen, config)):
        return _end(intent, seen, gce)
    if intent.phase == "placing":
        most = config.restart.max_preemptions_without_commit
        if not any(vm.name in seen.reports for vm in intent.vms):
            most = config.restart.max_attempts_without_commit  # Not one of them has ever come up.
        return placing.place(intent, seen, gce, most_unready=most)
    return running.run(intent, seen, config)


def to_delete(intent: Intent, seen: Seen) -> list[Vm]:
    """Returns the VMs to be deleted: those doomed, and those of this run that nobody wants.

    The latter are what a launcher has made that was overtaken meanwhile.
    """
    known = intent.names | {vm.name for vm in intent.doomed}
    listed = (seen.vms or {}).values()
    strangers = [Vm(vm.name, vm.zone, 0, seen.now) for vm in listed if vm.name not in known]
    return [*intent.doomed, *strangers]


def dollars(intent: Intent, gce: GceSection, *, now: float) -> float:
    """Returns what the VMs have cost until now, by the prices of the ladder."""
    vms = (*intent.vms, *intent.doomed)
    return intent.spent_dollars + sum(_cost(vm, gce, now=now) for vm in vms)


def vm_hours(intent: Intent, *, now: float) -> float:
    """Returns the hours of all VMs until now."""
    running_seconds = sum(_seconds(vm, now=now) for vm in (*intent.vms, *intent.doomed))
    return (intent.vm_seconds + running_seconds) / 3600


def _cost(vm: Vm, gce: GceSection, *, now: float) -> float:
    rung = gce.ladder[min(vm.rung, len(gce.ladder) - 1)]
    return _seconds(vm, now=now) / 3600 * (rung.dollars_per_hour or 0.0)


def _seconds(vm: Vm, *, now: float) -> float:
    """Returns for how long a VM may have been there."""
    return max(0.0, now - vm.asked) if vm.asked else 0.0


def _asked_end(intent: Intent, seen: Seen, config: RunConfig) -> End | None:
    """Returns the end that a person or the wallet's limits ask for."""
    section, gce = config.launch, config.launch.gce
    assert gce is not None, config
    spent = dollars(intent, gce, now=seen.now)
    if seen.down_asked:
        return End(Exit.STOPPED, "taken down by `launch gce down`", seen.now)
    if section.max_hours is not None and seen.now - intent.began > 3600 * section.max_hours:
        return End(Exit.NO_PROGRESS, f"launch.max_hours={section.max_hours:g} are over", seen.now)
    if section.max_dollars is not None and spent > section.max_dollars:
        limit = f"launch.max_dollars={section.max_dollars:g}"
        return End(Exit.NO_PROGRESS, f"{limit} are spent (${spent:.2f})", seen.now)
    if seen.stop_asked and intent.phase == "placing":
        reason = "asked to stop while no attempt was on: nothing new to save"
        return End(Exit.STOPPED, reason, seen.now)
    return None


def _is_late(intent: Intent, seen: Seen, config: RunConfig) -> bool:
    """Whether an attempt that was asked to save and leave has had its time, or gets none."""
    assert intent.end is not None, intent
    limit = config.deadlines.save_seconds + running.SETTLE_SECONDS
    return seen.down_asked or seen.now - intent.end.since > limit


def _without_gone(intent: Intent, seen: Seen, gce: GceSection) -> Intent:
    """Strikes out doomed VMs that are gone: neither listed nor found, and none is on its way."""
    on_its_way = () if intent.creation is None else intent.creation.names
    gone = [
        vm
        for vm in intent.doomed
        if seen.vms is not None
        and vm.name not in seen.vms
        and vm.name in seen.not_found
        and vm.name not in on_its_way
    ]
    if not gone:
        return intent
    return replace(
        intent,
        doomed=tuple(vm for vm in intent.doomed if vm not in gone),
        spent_dollars=intent.spent_dollars + sum(_cost(vm, gce, now=seen.now) for vm in gone),
        vm_seconds=intent.vm_seconds + sum(_seconds(vm, now=seen.now) for vm in gone),
    )


def _end(intent: Intent, seen: Seen, gce: GceSection) -> Next:
    """Dooms what is there; it is over once nothing is, and nothing is on its way."""
    assert intent.end is not None, intent
    words: tuple[str, ...] = ()
    if intent.phase != "ending":
        words = (f"{intent.end.reason}; VMs to be deleted: {len(intent.vms)}",)
        doomed = without_place(intent, now=seen.now)
        intent = replace(doomed, phase="ending", creation=intent.creation)
    if intent.creation is not None:
        is_unknown = seen.creation is None and seen.vms is not None
        is_lost = is_unknown and seen.unasked_seconds > LOST_REQUEST_SECONDS
        is_lost |= seen.creation is False and placing.hangs(intent, intent.creation, seen, gce)
        if not is_lost and (seen.creation is False or seen.creation is None):
            return Next(intent, words)
        intent = replace(intent, creation=None)
    if intent.doomed or seen.vms is None or seen.vms:
        return Next(intent, words)
    return Next(replace(intent, phase="ended"), words)
