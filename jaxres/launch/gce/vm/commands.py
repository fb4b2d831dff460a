"""Commands on one VM of a job: `ssh` prints a command, `cordon` and `uncordon` write requests.

A cordoned VM is a host that is excluded from the run (`runlog/faulty_hosts.py`), as by
`jaxres hosts --exclude`: there is no second list. The controller replaces it before the next
attempt, and a drained one at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from jaxres.clock import Clock
from jaxres.faults import UsageError
from jaxres.launch.gce.state.desired_state import DesiredState, VmSpec
from jaxres.runlog import faulty_hosts
from jaxres.runlog.faulty_hosts import FaultyHost
from jaxres.runlog.paths import RunDir
from jaxres.telemetry import stdio


def find_vm(desired: DesiredState, name: str | None) -> VmSpec:
    """Returns a VM of the job; None: host 0's VM, or else the first one.

    Raises:
      UsageError: the job has no such VM now.
    """
    if name is None and desired.attempt.hosts:
        name = desired.attempt.hosts[0].name
    vms = (*desired.vms, *desired.spares)
    for vm in vms:
        if name in (None, vm.name):
            return vm
    names = ", ".join(vm.name for vm in vms) or "none"
    what = "it has no VM now" if name is None else f"--vm {name}: the job has no such VM now"
    raise UsageError(f"{what} (phase: {desired.phase}; its VMs: {names})")


def ssh_command(vm: VmSpec, *, project: str, has_external_ip: bool) -> str:
    """Returns the command that opens a shell on a VM.

    >>> vm = VmSpec("jx-0000", "us-central1-a", 0, 0.0)
    >>> ssh_command(vm, project="p", has_external_ip=False)
    'gcloud compute ssh jx-0000 --zone us-central1-a --project p --tunnel-through-iap'
    """
    words = ["gcloud", "compute", "ssh", vm.name, "--zone", vm.zone, "--project", project]
    return shlex.join([*words, *([] if has_external_ip else ["--tunnel-through-iap"])])


def excluded(desired: DesiredState, hosts: Sequence[FaultyHost]) -> dict[str, FaultyHost]:
    """Returns the VMs of the job that are excluded by hand, by name.

    A VM that is drained too counts as drained. `hosts`: the hosts that the run leaves out.
    """
    by_hand = [host for host in hosts if host.is_excluded and host.name in desired.names]
    return {host.name: host for host in sorted(by_hand, key=lambda host: host.is_drained)}


def excluded_lines(desired: DesiredState, hosts: Mapping[str, FaultyHost]) -> list[str]:
    """Returns the lines of `status` about cordoned VMs; `hosts`: the result of `excluded`."""
    return [
        describe_excluded(host, is_draining=name in desired.attempt.draining)
        for name, host in hosts.items()
    ]


def is_excluded(run_dir: RunDir, name: str, *, warn: Callable[[str], None]) -> bool:
    """Returns whether a VM is excluded by hand now; `warn`: see faulty_hosts.read."""
    hosts = faulty_hosts.read(run_dir, (), warn=warn)
    return any(host.is_excluded and host.name == name for host in hosts)


def describe_excluded(host: FaultyHost, *, is_draining: bool) -> str:
    """Returns the line of `status` about a cordoned VM."""
    if is_draining:
        return f"  {host.name}: is drained ({host.reason}): the attempt saves, then it is replaced"
    return f"  {host.name}: is cordoned ({host.reason}): replaced before the next attempt"


def cordon(run_dir: RunDir, desired: DesiredState, name: str, *, reason: str, clock: Clock) -> str:
    """Excludes a VM from the next attempt on; returns a message.

    Raises:
      UsageError: the job has no such VM now, or it is cordoned already.
    """
    vm = find_vm(desired, name)
    if vm.name in excluded(desired, faulty_hosts.read(run_dir, warn=stdio.warn)):
        raise UsageError(f"--vm {vm.name}: is cordoned already")
    faulty_hosts.exclude(run_dir, vm.name, slot=None, reason=reason, now=clock.wall())
    return f"{vm.name} is cordoned: it is replaced before the next attempt"


def request_drain(
    run_dir: RunDir, desired: DesiredState, name: str, *, reason: str, clock: Clock
) -> None:
    """Excludes a VM, and requests the end of an attempt on it; a second request is the same one.

    Raises:
      UsageError: the job has no such VM now.
    """
    vm = find_vm(desired, name)
    known = excluded(desired, faulty_hosts.read(run_dir, warn=stdio.warn)).get(vm.name)
    if known is None or not known.is_drained:
        faulty_hosts.exclude(
            run_dir, vm.name, slot=None, reason=reason, now=clock.wall(), is_drained=True
        )


def uncordon(run_dir: RunDir, desired: DesiredState, name: str) -> str:
    """Takes a cordoned or drained VM back; returns a message.

    Raises:
      UsageError: it is not cordoned, or the job has no such VM any more.
    """
    vm = find_vm(desired, name)
    hosts = [
        h
        for h in faulty_hosts.read(run_dir, warn=stdio.warn)
        if h.is_excluded and h.name == vm.name
    ]
    if not hosts:
        raise UsageError(f"--vm {vm.name}: is not cordoned")
    for host in hosts:
        faulty_hosts.forget(run_dir, host)
    more = "; the attempt that was told to save ends" if vm.name in desired.attempt.draining else ""
    return f"{vm.name} is used for the next attempt again{more}"
