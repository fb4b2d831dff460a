"""The devices of the runs, by the run log, and which scenarios they do not fit."""

from __future__ import annotations

from dataclasses import dataclass

from jaxres.operate.chaos.scenarios import Scenario
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import start_of


@dataclass(frozen=True)
class JobDevices:
    """The devices with which an attempt has trained."""

    text: str
    """Number, platform and kind, such as `2 x cpu cpu`."""
    per_host: tuple[int, ...]

    @property
    def are_cpus(self) -> bool:
        """Whether they are CPUs."""
        return self.text.partition(" x ")[2].startswith("cpu")


def read(run_dir: RunDir) -> JobDevices:
    """Returns the devices of the newest attempt that has trained."""
    start = start_of(run_log.fold(run_log.read_records(run_dir.log)).starts[-1])
    return JobDevices(start.computation.get("devices", ""), start.devices or (1,))


def why_not(scenario: Scenario, devices: JobDevices) -> str:
    """Returns why a scenario can't be used with these devices; empty: it can."""
    if scenario.cpu_only and not devices.are_cpus:
        return f"it needs CPUs as devices, here are {devices.text}"
    if sum(devices.per_host) < scenario.min_devices:
        return f"it needs {scenario.min_devices} devices, here is {sum(devices.per_host)}"
    if min(devices.per_host) < (least := scenario.min_devices_per_host):
        few = min(devices.per_host)
        return f"it needs {least} devices a worker (JAX_NUM_CPU_DEVICES={least}), here is {few}"
    return ""
