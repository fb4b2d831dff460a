"""Home of: host_lost. How a job's VMs are found, made and replaced, until an attempt starts. Pure.

Repair in this order: the processes on the same VMs; lost VMs where the others are, which are kept;
all of them, down the ladder.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jaxres.config.schema_gce import FlexStartRung, GceSection
from jaxres.faults import Exit
from jaxres.launch import capacity_options
from jaxres.launch.capacity_options import NEVER, Site
from jaxres.launch.desired_state import Creation, End, Intent, Member, Next, Vm
from jaxres.launch.observed_state import EVENTS, HALTED, HOST_ERROR, Refused, Seen

NAMESPACE = uuid.UUID("5a3c9c1e-7a51-4f0b-9d7e-6a617872e573")
ABSENT_SECONDS = 15.0
"""Lists lag; a VM that was heard of lately is there, whatever they say."""
FREED_SECONDS = 120.0
"""Longest wait for doomed VMs to give back their quota before others are asked for."""


def place(intent: Intent, seen: Seen, gce: GceSection, *, most_unready: int) -> Next:
    """Returns what follows while no attempt is on.

    Args:
      intent: what is meant to be.
      seen: what is.
      gce: which VMs.
      most_unready: how often VMs may be lost before they have trained.
    """
    if not intent.vms:
        return _find_place(intent, seen, gce)
    if intent.creation is not None:
        return _await_creation(intent, intent.creation, seen, gce)
    lost = losses(intent.vms, seen, gce, notices=True)
    if lost:
        if intent.unready + 1 >= most_unready:
            words = f"{intent.unready + 1} times VMs were lost before they could train, the last: "
            words += ", ".join(f"{name}: {why}" for name, why in lost.items())
            return Next(replace(intent, end=End(Exit.NO_PROGRESS, words, seen.now)))
        return replaced(replace(intent, unready=intent.unready + 1), lost, seen)
    if missing := [vm for vm in intent.vms if not vm.made]:
        return _refill(intent, missing, seen, gce)
    return _start(intent, seen, gce)


def _find_place(intent: Intent, seen: Seen, gce: GceSection) -> Next:
    listed = seen.vms or {}
    if any(vm.name in listed and seen.now - vm.doomed < FREED_SECONDS for vm in intent.doomed):
        return Next(intent)  # They may hold what the new ones need.
    site = capacity_options.choose(gce.ladder, intent.cooling, now=seen.now)
    if not isinstance(site, Site):
        if site < NEVER:
            return Next(intent)
        why = "; ".join(f"{c.zone}: {c.trouble}" for c in intent.cooling)
        reason = f"no rung of launch.gce.ladder can be had, now or later ({why}). {intent.why}"
        return Next(replace(intent, end=End(Exit.CONFIG, reason, seen.now)))
    new = replace(intent, placement=intent.placement + 1, refill_since=None)
    new, names = _named(new, gce.num_hosts)
    vms = tuple(Vm(name, site.zone, site.rung, seen.now) for name in names)
    new = _creating(replace(new, vms=vms), names)
    rung = gce.ladder[site.rung]
    return Next(
        new, (f"asking for {len(names)} x {rung.machine_type} ({rung.kind}) in {site.zone}",)
    )


def _named(intent: Intent, count: int) -> tuple[Intent, tuple[str, ...]]:
    """Returns names that were never given before."""
    first = intent.next_name
    names = tuple(f"{intent.run}-{first + n:04d}" for n in range(count))
    return replace(intent, next_name=first + count), names


def _creating(intent: Intent, names: tuple[str, ...]) -> Intent:
    """Returns it with a request whose number follows from what it asks for."""
    zone = next(vm.zone for vm in intent.vms if vm.name == names[0])
    # A run that was deleted may have had these names: `began` makes it another request.
    text = f"{intent.run}/{intent.began}/{zone}/{','.join(names)}"
    return replace(intent, creation=Creation(names, str(uuid.uuid5(NAMESPACE, text))))


def _await_creation(intent: Intent, creation: Creation, seen: Seen, gce: GceSection) -> Next:
    answer = seen.creation
    vms = seen.vms or {}
    if answer is False and hangs(intent, creation, seen, gce):
        is_there = all(name in vms and name in seen.reports for name in creation.names)
        why = "its operation does not end (launch.gce.ready_minutes)"
        answer = True if is_there else Refused("passing", why)
    if answer is True or (
        isinstance(answer, Refused)
        and answer.trouble == "exists"
        and all(name in vms for name in creation.names)
    ):
        made = tuple(
            replace(vm, made=True) if vm.name in creation.names else vm for vm in intent.vms
        )
        return Next(
            replace(intent, vms=made, creation=None), (f"made: {', '.join(creation.names)}",)
        )
    if not isinstance(answer, Refused):
        return Next(intent)
    (first, *_) = (vm for vm in intent.vms if vm.name in creation.names)
    site = Site(first.rung, first.zone)
    longest = 60.0 * gce.max_cool_minutes
    cooling = capacity_options.cooled(
        intent.cooling, site, answer.trouble, now=seen.now, longest=longest, seed=intent.run
    )
    words = f"{site.zone}: {answer.trouble}: {answer.words}"
    new = replace(intent, cooling=cooling, creation=None, why=words)
    is_refill = len(creation.names) < len(intent.vms)
    since = intent.refill_since if intent.refill_since is not None else seen.now
    if is_refill and seen.now - since < 60 * gce.repair_minutes:
        lost = [vm for vm in intent.vms if vm.name in creation.names]
        return Next(_renamed(new, lost, now=seen.now), (words,))
    return Next(without_place(new, now=seen.now), (words,))


def hangs(intent: Intent, creation: Creation, seen: Seen, gce: GceSection) -> bool:
    """Whether a creation has taken longer than any that still goes well."""
    vms = [vm for vm in (*intent.vms, *intent.doomed) if vm.name in creation.names]
    minutes = gce.ready_minutes
    for rung in {vm.rung for vm in vms}:
        if isinstance(found := gce.ladder[rung], FlexStartRung):
            minutes += found.wait_minutes
    return any(seen.now - vm.asked > 60 * minutes for vm in vms)


def without_place(intent: Intent, *, now: float) -> Intent:
    """Returns it with all VMs doomed."""
    doomed = (*intent.doomed, *_doomed(intent.vms, now=now))
    return replace(intent, vms=(), members=(), doomed=doomed, creation=None, refill_since=None)


def _doomed(vms: Iterable[Vm], *, now: float) -> tuple[Vm, ...]:
    return tuple(replace(vm, doomed=now) for vm in vms)


def _renamed(intent: Intent, lost: Sequence[Vm], *, now: float) -> Intent:
    """Returns it with VMs doomed, and new ones that are still to be made in their slots."""
    new, names = _named(intent, len(lost))
    fresh = dict(zip((vm.name for vm in lost), names, strict=True))
    vms = tuple(
        replace(vm, name=fresh[vm.name], asked=0.0, made=False) if vm.name in fresh else vm
        for vm in intent.vms
    )
    return replace(new, vms=vms, doomed=(*intent.doomed, *_doomed(lost, now=now)))


def replaced(intent: Intent, lost: Mapping[str, str], seen: Seen) -> Next:
    """Gives lost VMs' slots to new ones in the same place; of a place without any left, to none."""
    words = tuple(f"{name}: {why}" for name, why in lost.items())
    if len(lost) == len(intent.vms):
        return Next(without_place(replace(intent, why=words[0]), now=seen.now), words)
    since = intent.refill_since if intent.refill_since is not None else seen.now
    gone = [vm for vm in intent.vms if vm.name in lost]
    return Next(
        _renamed(replace(intent, refill_since=since, why=words[0]), gone, now=seen.now), words
    )


def _refill(intent: Intent, missing: Sequence[Vm], seen: Seen, gce: GceSection) -> Next:
    since = intent.refill_since if intent.refill_since is not None else seen.now
    if seen.now - since > 60 * gce.repair_minutes:
        words = f"lost VMs could not be had again in {missing[0].zone} within "
        words += f"{gce.repair_minutes:g} minutes (launch.gce.repair_minutes)"
        return Next(without_place(replace(intent, why=words), now=seen.now), (words,))
    site = (missing[0].rung, missing[0].zone)
    until = [c.until for c in intent.cooling if (c.rung, c.zone) == site]
    if until and until[0] > seen.now:
        return Next(replace(intent, refill_since=since))
    names = tuple(vm.name for vm in missing)
    vms = tuple(replace(vm, asked=seen.now) if vm in missing else vm for vm in intent.vms)
    new = _creating(replace(intent, vms=vms, refill_since=since), names)
    kept = len(vms) - len(names)
    return Next(new, (f"asking for {len(names)} more in {site[1]}; {kept} are kept",))


def _start(intent: Intent, seen: Seen, gce: GceSection) -> Next:
    """Starts the next attempt once every agent is there, and the wait after a failure is over."""
    vms = seen.vms or {}
    ready = [vm for vm in intent.vms if vm.name in seen.reports and vm.name in vms]
    if len(ready) < len(intent.vms) or seen.now < intent.not_before:
        return Next(intent)
    number = intent.attempt + 1
    new = replace(
        intent,
        phase="running",
        attempt=number,
        members=tuple(Member(vm.name, vms[vm.name].ip) for vm in intent.vms),
        port=gce.port + number % 1000,
        step_before=seen.log.step,
        seq_before=seen.log.seq,
        refill_since=None,
        unready=0,
    )
    return Next(new, (f"attempt {number} on {', '.join(m.name for m in new.members)}",))


def losses(vms: Iterable[Vm], seen: Seen, gce: GceSection, *, notices: bool) -> dict[str, str]:
    """Returns the VMs that are gone or as good as gone, and why; of notices only if wanted."""
    lost = {}
    for vm in vms:
        if not vm.made:
            continue
        listed, report = (seen.vms or {}).get(vm.name), seen.reports.get(vm.name)
        event = seen.events.get(vm.name)
        cause = "" if event is None else f"{EVENTS[event]} ({event})"
        because = cause and f"; {cause}"
        silent, absent = seen.silent.get(vm.name, 0.0), seen.absent.get(vm.name, 0.0)
        if listed is not None and listed.status in HALTED:
            lost[vm.name] = f"is {listed.status}{because}"
        elif event == HOST_ERROR:
            lost[vm.name] = cause
        elif report is not None and silent >= gce.lost_seconds:
            state = "gone from the list" if listed is None else f"still listed as {listed.status}"
            lost[vm.name] = f"its agent has been silent for {silent:.0f} s ({state}){because}"
        elif report is None and absent >= ABSENT_SECONDS:
            lost[vm.name] = f"is gone, and its agent was never heard of{because}"
        elif report is None and seen.now - vm.asked > 60 * gce.ready_minutes:
            late = f"its agent was not heard of within {gce.ready_minutes:g} minutes"
            lost[vm.name] = f"{late} (launch.gce.ready_minutes); see `launch gce logs`"
        elif notices and report is not None and report.notice:
            lost[vm.name] = report.notice
        elif notices and cause:
            lost[vm.name] = cause
    return lost
