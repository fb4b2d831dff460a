"""VMs on loopback for one run with faults: the emulated Compute Engine of `jaxres_emulators`.

VMs are processes of this machine. They run this interpreter, and what it imports here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jaxres
from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.config.schema.base import Section
from jaxres.config.schema.gce import GceSection, PythonRuntime, SpotOption, StandardOption
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.operate.chaos import emulated_bucket as buckets
from jaxres.operate.chaos import emulators
from jaxres.operate.chaos.short_runs import Runner
from jaxres.storage.path import GcsPath
from jaxres.supervisor.attempt_runner import MIN_DEVICES
from jaxres.train.chaos_hooks import break_hook

if TYPE_CHECKING:
    from jaxres_emulators.gce import GceEmulator

PACKAGE = "google.cloud.compute"
PROGRAMS = ("bash", "curl", "tar", "sha256sum")
"""Programs that the startup script of a VM needs on this machine."""
SPEED = 10.0
"""So many seconds of the emulated service pass in one: a boot takes half a second."""
ZONE, MACHINE, DOLLARS = "us-central1-a", "a2-highgpu-1g", 1.0
IMAGE = "projects/debian-cloud/global/images/family/debian-12"
LEASE_SECONDS = 12.0
"""Term of the launcher: another one takes over after 18 s."""
LOST_SECONDS, CONFIRM_SECONDS = 15.0, 60.0
"""Silence of an agent, which reports every two seconds, until its VM is suspected and is lost."""
REPAIR_MINUTES = 0.5
"""Time in which a VM beside others is replaced in their zone."""
HOLD_SECONDS = 3600.0
"""Deadline of hooks: a worker is held until another launcher leads."""
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class EmulatedVms:
    """The VMs of one run, and the service that creates them."""

    gce: GceEmulator
    run: GcsPath
    up: Sequence[str]
    """Words of the command of jaxres that leads the job."""

    def desired(self) -> DesiredState | None:
        """Reads the launcher's desired state."""
        return StateObject(LaunchPaths(self.run).desired_state).read()

    def member(self, host: int) -> str:
        """Returns the VM of a host of the attempt that runs; empty: none runs."""
        desired = self.desired()
        hosts = () if desired is None else desired.attempt.hosts
        return hosts[host].name if hosts else ""

    def processes(self, name: str) -> list[int]:
        """Returns the processes of a VM; one that is deleted has none."""
        with contextlib.suppress(KeyError):
            return self.gce.pids(name)
        return []

    def made(self) -> list[str]:
        """Returns all VMs so far, oldest first."""
        return [vm.name for vm in self.gce.vms_so_far()]

    def left(self) -> tuple[str, ...]:
        """Returns the VMs, and the processes of VMs, that a job has left behind after its end."""
        vms = [f"VM {name} ({status})" for name, status in self.gce.vms().items()]
        return (*vms, *(f"process {pid} of a VM" for pid in self.gce.pids()))


@contextlib.contextmanager
def emulated_vms(runner: Runner, name: str, *, hosts: int) -> Iterator[tuple[Runner, EmulatedVms]]:
    """Yields a runner whose run is on VMs, in an empty bucket, and the VMs.

    Args:
      hosts: number of VMs.
    """
    from jaxres_emulators.gce import GceEmulator

    with buckets.emulated_bucket(runner, name) as (there, server):
        run = there.run_dir(name).root
        assert isinstance(run, GcsPath), run
        where = {"location": "US-CENTRAL1", "locationType": "region"}
        server.objects.facts[run.bucket] = where
        # Any device will do: the machine type has a GPU, and this machine may have none.
        env = {**there.env, "PYTHONUNBUFFERED": "1", MIN_DEVICES: "1"}
        with GceEmulator(speed=SPEED, env=env) as gce:
            config = runner.folder / f"{name}.yaml"
            short = configs.load(runner.config, runner.overrides).config
            path = (str(Path(jaxres.__file__).parents[1]), os.getcwd(), env.get("PYTHONPATH", ""))
            on_vms = _on_vms(short, run, hosts=hosts, project=gce.project, python_path=path)
            config.write_text(configs.dump_yaml(on_vms))
            up = ("launch", "gce", "up", str(config), f"run.dir={run}")
            leader = dataclasses.replace(there, env={**there.env, **gce.env})
            try:
                yield leader, EmulatedVms(gce, run, up)
            finally:
                leader.stop()
                for vm in gce.vms_so_far():
                    (runner.folder / f"{name}-{vm.name}.txt").write_text(gce.output(vm.name))


def _on_vms(
    config: RunConfig, run: GcsPath, *, hosts: int, project: str, python_path: Sequence[str]
) -> RunConfig:
    """Returns the config of a short run with VMs of the emulator instead of its own."""
    given = config.launch.gce
    env = {} if given is None else given.env
    place: dict[str, Any] = {"zones": (ZONE,), "machine_type": MACHINE, "dollars_per_hour": DOLLARS}
    section = GceSection(
        project=project,
        num_hosts=hosts,
        capacity_options=(SpotOption(**place), StandardOption(**place)),
        image=IMAGE,
        runtime=PythonRuntime(python=sys.executable),
        package=None if given is None else given.package,
        env={**env, "PYTHONPATH": os.pathsep.join(filter(None, python_path))},
        lease_seconds=LEASE_SECONDS,
        lost_seconds=LOST_SECONDS,
        confirm_lost_seconds=CONFIRM_SECONDS,
        repair_minutes=REPAIR_MINUTES,
    )
    # A VM has another home: it finds the folder of the holds by its path.
    args = {"folder": str(break_hook.folder_of(run))}
    launch = config.launch.model_copy(update={"gce": section, "max_dollars": None})
    changes = {
        "hooks": tuple(hook.model_copy(update={"args": args}) for hook in config.hooks),
        "deadlines": config.deadlines.model_copy(update={"hook_seconds": HOLD_SECONDS}),
        "launch": launch,
    }
    return _absolute(config).model_copy(update=changes)


def _absolute(section: S) -> S:
    """Returns a section whose paths that exist here are absolute: VMs have another home."""

    def changed(value: Any) -> Any:
        if isinstance(value, Section):
            return _absolute(value)
        if isinstance(value, tuple):
            return tuple(changed(one) for one in value)
        if isinstance(value, Path) and value.expanduser().exists():
            return value.expanduser().absolute()
        return value

    fields = type(section).model_fields
    return section.model_copy(update={name: changed(getattr(section, name)) for name in fields})


def why_not(config: RunConfig) -> str:
    """Returns why a config has no run on emulated VMs; empty: it can have one."""
    if reason := buckets.why_not(config):
        return reason
    if not emulators.is_there(PACKAGE):
        return f"{PACKAGE} is not installed: the extra `gce`"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{missing[0]} is not installed: VMs boot with it" if missing else ""
