"""How a job on VMs stands, for a person: from its bucket alone, whether or not anybody leads it."""

from __future__ import annotations

import dataclasses
import json
import sys

from jaxres import config as configs
from jaxres.clock import Clock
from jaxres.config.schema_gce import GceSection
from jaxres.faults import Exit, UsageError
from jaxres.launch import reconcile
from jaxres.launch.capacity_options import NEVER, Cooling
from jaxres.launch.desired_state import Intent, Record, Vm
from jaxres.launch.gce_api import Compute, ServiceSilent
from jaxres.launch.lease import Lease
from jaxres.launch.observed_state import Report
from jaxres.launch.paths import Places
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files, gcs_objects
from jaxres.storage.path import BucketPath


def show(run: BucketPath, *, as_json: bool, clock: Clock) -> int:
    """Prints how the job stands."""
    places = Places(run)
    intent = Record(places.intent).read()
    if intent is None:
        raise UsageError(f"{run}: no launcher has been here")
    config = configs.load_recorded(places.config(intent.config), ()).config
    gce = config.launch.gce
    assert gce is not None, config
    leads = Lease(places.lease, holder="", seconds=gce.lease_seconds).other()
    step = run_log.fold(run_log.read_records(RunDir(run).log)).step
    reports = {n: Report.of(words) for n, (_, words) in gcs_objects.listed(places.reports).items()}
    now = clock.wall()
    spent = reconcile.dollars(intent, gce, now=now)
    hours = reconcile.vm_hours(intent, now=now)
    has_prices = all(rung.dollars_per_hour is not None for rung in gce.ladder)
    if as_json:
        fields = {
            "run": str(run),
            "phase": intent.phase,
            "attempt": intent.attempt,
            "step": step,
            "steps": config.train.steps,
            "leader": None if leads is None else leads.holder,
            "vms": [dataclasses.asdict(vm) for vm in intent.vms],
            "reports": {n: r and dataclasses.asdict(r) for n, r in reports.items()},
            "doomed": [vm.name for vm in intent.doomed],
            "dollars": spent if has_prices else None,
            "vm_hours": hours,
            "end": intent.end and dataclasses.asdict(intent.end),
            "why": intent.why,
        }
        sys.stdout.write(json.dumps(fields) + "\n")
        return Exit.DONE
    leader = "nobody (start `launch gce up` again)" if leads is None else leads.holder
    cost = f"${spent:.2f}" if has_prices else "price unknown (dollars_per_hour)"
    lines = [f"{run}: {intent.phase}, step {step} of {config.train.steps} is committed"]
    if intent.end is not None:
        lines.append(f"  end: {intent.end.reason} (exit {intent.end.exit})")
    if intent.phase != "ended":
        lines.append(f"  led by {leader}")
    lines.append(f"  spent so far: {cost}, {hours:.2f} VM hours")
    lines += [_of_vm(vm, gce, reports.get(vm.name)) for vm in intent.vms]
    lines += [f"  {vm.name}: is being deleted" for vm in intent.doomed]
    lines += [_of_rung(c, gce, now=now) for c in intent.cooling if c.until > now]
    if intent.why and intent.phase != "ended":
        lines.append(f"  last: {intent.why}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return Exit.DONE


def _of_vm(vm: Vm, gce: GceSection, said: Report | None) -> str:
    rung = gce.ladder[vm.rung]
    state = "is being created" if not vm.made else "has not been heard of yet"
    if said is not None:
        notice = f"; {said.notice}" if said.notice else ""
        state = f"{said.state}, attempt {said.attempt}{notice}"
    return f"  {vm.name}: {rung.machine_type} ({rung.kind}) in {vm.zone}: {state}"


def _of_rung(cooling: Cooling, gce: GceSection, *, now: float) -> str:
    rung = gce.ladder[cooling.rung]
    again = f"again in {(cooling.until - now) / 60:.0f} min"
    again = "not tried again" if cooling.until >= NEVER else again
    return f"  {rung.kind} {rung.machine_type} in {cooling.zone}: {cooling.trouble}, {again}"


def logs(
    run: BucketPath, intent: Intent, compute: Compute, *, vm: str | None, attempt: int | None
) -> int:
    """Prints what a VM's part in an attempt has printed last; without one, what its boot said."""
    places = Places(run)
    number = intent.attempt if attempt is None else attempt
    folder = places.outputs / f"{number:04d}"
    there = [name.removesuffix(".txt") for name in files.list_names(folder)]
    lead = intent.members[0].name if intent.members else None
    name = vm or (lead if lead in there else next(iter(there), lead))
    if name is None and intent.vms:
        name = intent.vms[0].name
    data = None if name is None else gcs_objects.read(places.output(number, name))
    if data is not None:
        others = [n for n in there if n != name]
        more = f" (--vm: also {', '.join(others)})" if others else ""
        sys.stdout.write(f"attempt {number} on {name}{more}:\n{data.decode('utf-8', 'replace')}")
        return Exit.DONE
    found = next((v for v in (*intent.vms, *intent.doomed) if v.name == name), None)
    if found is None:
        raise UsageError(
            f"{run}: attempt {number} has printed nothing yet"
            f"{'' if name is None else f' on {name}'}; there are {', '.join(there) or 'no others'}"
        )
    try:
        words = compute.output(found.name, found.zone)
    except ServiceSilent as error:
        raise UsageError(
            f"{name}: nothing in the bucket yet, and the API is silent ({error})"
        ) from error
    sys.stdout.write(f"{name} has not trained yet; its boot said:\n{words}")
    return Exit.DONE
