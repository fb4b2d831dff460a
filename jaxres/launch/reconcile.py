"""What the ends and losses of an attempt's hosts mean, and what follows. Pure.

What a job on VMs is meant to be next, given what is seen of it. Pure.

Whatever is decided is written before anything is done about it, and everything that is done may be
done twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.schema_gce import GceSection
from jaxres.faults import Exit
from jaxres.launch import provisioning
from jaxres.launch.desired_state import End, Intent, Next, Past, Vm
from jaxres.launch.observed_state import Report, Seen
from jaxres.launch.provisioning import losses, replaced, without_place
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import Again, GiveUp, Outcome, Policy

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
        return provisioning.place(intent, seen, gce, most_unready=most)
    return run(intent, seen, config)


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
    limit = config.deadlines.save_seconds + SETTLE_SECONDS
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
        is_lost |= seen.creation is False and provisioning.hangs(intent, intent.creation, seen, gce)
        if not is_lost and (seen.creation is False or seen.creation is None):
            return Next(intent, words)
        intent = replace(intent, creation=None)
    if intent.doomed or seen.vms is None or seen.vms:
        return Next(intent, words)
    return Next(replace(intent, phase="ended"), words)


SETTLE_SECONDS = 45.0
"""Longest wait for the other hosts' ends after the first, where none of them saves."""
STALL_WAITS, LEAST_STALL_MINUTES = 3, 60.0
"""Times the longest wait for a commit so far, and at least so long, until an attempt is stalled."""
START_SECONDS = 120.0
"""Longest time until an agent has started its part of an attempt."""
ROOT_FIRST = (
    *(Exit.UNHEALTHY, Exit.DIVERGED, Exit.UNRESTORABLE, Exit.CONFIG, Exit.USAGE),
    *(Exit.OUT_OF_MEMORY, Exit.HUNG, Exit.BUG),
)
"""Of the ends of an attempt's hosts, what counts before a crash, gravest first."""
ROOT_LAST = (*(Exit.FENCED, Exit.STORAGE, Exit.STOPPED, Exit.PREEMPTED, Exit.DONE, Exit.PEER_LOST),)
"""What counts after one."""
SAVING = (Exit.DONE, Exit.STOPPED, Exit.PREEMPTED)
"""Ends that all hosts come to, each in its own time."""


def run(intent: Intent, seen: Seen, config: RunConfig) -> Next:
    """Returns what follows while an attempt is on."""
    gce = config.launch.gce
    assert gce is not None, config
    names = {m.name for m in intent.members}
    lost = losses((vm for vm in intent.vms if vm.name in names), seen, gce, notices=False)
    ended = {
        name: report
        for name in names
        if (report := seen.reports.get(name)) is not None
        and (report.attempt, report.state) == (intent.attempt, "ended")
    }
    codes = {name: Exit.BUG if r.exit is None else r.exit for name, r in ended.items()}
    if not lost and not codes:
        return _unless_stalled(intent, seen, gce)
    is_settled = bool(lost) or len(codes) == len(intent.members)
    if not is_settled and (seen.ended_seconds or 0.0) < _settle_seconds(codes, config):
        return Next(intent)
    return _after(intent, _past(intent, codes, ended, lost, seen, config), seen, config)


def _settle_seconds(codes: Mapping[str, int], config: RunConfig) -> float:
    saves = all(code in SAVING for code in codes.values())
    return SETTLE_SECONDS + (config.deadlines.save_seconds if saves else 0.0)


def _past(
    intent: Intent,
    codes: Mapping[str, int],
    ended: Mapping[str, Report],
    lost: Mapping[str, str],
    seen: Seen,
    config: RunConfig,
) -> Past:
    """Returns how the attempt has ended: by the gravest end, or by the loss of a VM."""
    name = min(codes, key=lambda name: (_rank(codes[name]), name), default=None)
    code = Exit.PEER_LOST if name is None else codes[name]
    if lost and code not in (*ROOT_FIRST, Exit.FENCED):
        gone, why = next(iter(lost.items()))
        return Past(
            intent.attempt, Exit.PREEMPTED, f"{gone}: {why}", intent.step_before, seen.log.step
        )
    assert name is not None, lost
    reason = f"{name}: {ended[name].reason}" if len(intent.members) > 1 else ended[name].reason
    stop = seen.log.stop
    if stop is not None and stop.exit == code and seen.log.stop_seq > intent.seq_before:
        reason = stop.reason  # The doors' own verdict, which names the host.
    if code == Exit.DONE and seen.log.step < config.train.steps:
        code, reason = (
            Exit.BUG,
            f"{reason}; it ended as done, and step {seen.log.step} is the newest",
        )
    if code == Exit.FENCED and intent.doomed:
        # A VM on its way out may still have owned the run.
        code, reason = Exit.PEER_LOST, f"{reason} (a lost VM has gone on for a while)"
    is_one_of_many = len(intent.members) > 1 and [*codes.values()].count(codes[name]) == 1
    culprit = name if is_one_of_many else None
    return Past(intent.attempt, code, reason, intent.step_before, seen.log.step, culprit)


def _rank(code: int) -> int:
    """Returns where an end stands among those that may be the cause; a crash is in the middle."""
    order = [int(exit) for exit in (*ROOT_FIRST, *ROOT_LAST)]
    where = order.index(code) if code in order else len(ROOT_FIRST) - 0.5
    return int(2 * where)


def _unless_stalled(intent: Intent, seen: Seen, gce: GceSection) -> Next:
    """Goes on, unless nothing is committed any more: then the processes start anew."""
    reports = {m.name: seen.reports.get(m.name) for m in intent.members}
    late = [n for n, r in reports.items() if r is None or r.attempt != intent.attempt]
    stall = gce.stall_minutes
    if stall is None and seen.log.longest_wait is not None:
        stall = max(LEAST_STALL_MINUTES, STALL_WAITS * seen.log.longest_wait / 60)
    if late and seen.still_seconds > START_SECONDS:
        reason = f"{late[0]}: has not started its part within {START_SECONDS:.0f} s"
    elif stall is not None and seen.still_seconds > 60 * stall:
        reason = f"no new committed step for {stall:g} minutes (launch.gce.stall_minutes)"
    else:
        return Next(intent)
    past = Past(intent.attempt, Exit.HUNG, reason, intent.step_before, seen.log.step)
    again = replace(intent.with_past(past), phase="placing", members=(), why=reason)
    return Next(again, (reason,))


def _after(intent: Intent, past: Past, seen: Seen, config: RunConfig) -> Next:
    """Decides what follows the end of an attempt: the end of the job, or another one."""
    gce = config.launch.gce
    assert gce is not None, config
    intent = replace(intent.with_past(past), phase="placing", members=(), why=past.reason)
    told = f"attempt {past.attempt} ended ({past.code}): {past.reason}"
    if intent.end is not None and past.code != Exit.DONE:
        reason = f"{intent.end.reason}; newest committed step {seen.log.step}"
        return Next(replace(intent, end=replace(intent.end, reason=reason)), (told,))
    decision = _restart(intent.history, config, seed=intent.attempt)
    if not isinstance(decision, Again):
        reason = decision.reason
        if decision.exit == Exit.DONE:
            reason = f"the last step, {seen.log.step}, is committed"
        return Next(replace(intent, end=End(decision.exit, reason, seen.now)), (told,))
    intent = replace(intent, not_before=seen.now + decision.after_seconds)
    out = losses(intent.vms, seen, gce, notices=True)
    if (culprit := _to_replace(intent.history)) in intent.names:
        assert culprit is not None, past
        out[culprit] = f"is left out: {past.reason}"
    told = f"{told}; {decision.reason}"
    if not out:
        return Next(intent, (told,))
    fresh = replaced(intent, out, seen)
    return Next(fresh.intent, (told, *fresh.words))


def _restart(history: Sequence[Past], config: RunConfig, *, seed: int) -> Again | GiveUp:
    """Asks the supervisor's own rules; hours and hosts are this launcher's business."""
    outcomes = [Outcome(p.code, p.reason, p.step_before, p.step_after) for p in history]
    unlimited = config.launch.model_copy(update={"max_hours": None})
    policy = Policy(config.restart, unlimited, num_hosts=(1,), began=0.0, seed=seed)
    return restart_policy.decide(outcomes, 0.0, policy)


def _to_replace(history: Sequence[Past]) -> str | None:
    """Returns the VM that says itself that it is unhealthy, or that two faults in a row name."""
    last = history[-1]
    if last.culprit is None:
        return None
    if last.code == Exit.UNHEALTHY:
        return last.culprit
    accusing = [
        p for p in history[-2:] if p.code in restart_policy.ACCUSING or p.code not in set(Exit)
    ]
    is_twice = len(accusing) == 2 and {p.culprit for p in accusing} == {last.culprit}
    return last.culprit if is_twice and last.step_after == history[-2].step_after else None
