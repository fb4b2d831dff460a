"""Benchmark of spares and of the replacement that `launch gce` requests at a preemption notice.

    python tools/bench/early_replacement.py --boot 0 60 180 --save 10

Starts the emulated service with VMs that have no processes, an emulated bucket, and a real
`launch gce up` with two VMs. This program writes the reports of the agents: the agent of a new VM
reports so many seconds after the VM runs (`--boot`), the hosts exit with 75 so long after the
notice (`--save`); without a notice the other host exits 3 s after the VM is gone. Prints the
seconds from the notice, or from the loss, to the start of the next attempt: with and without the
request at the notice, and with a spare that is ready. What follows the start (processes, restore,
first step) is the same in all and not in it: `tools/bench/spares.py` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.exit_codes import ExitCode  # noqa: E402
from jaxres.launch.gce.state.desired_state import DesiredState  # noqa: E402
from jaxres.launch.gce.state.observed_state import AgentReport  # noqa: E402
from jaxres.launch.gce.state.paths import LaunchPaths  # noqa: E402
from jaxres.launch.gce.state.state_object import decode_state  # noqa: E402
from jaxres.storage.path import GcsPath  # noqa: E402
from jaxres_emulators.gce import GceEmulator  # noqa: E402
from jaxres_emulators.gcs import GcsServer  # noqa: E402
from jaxres_emulators.gcs.objects import GcsError  # noqa: E402

CONFIG = ROOT / "tests" / "promises" / "faulty.yaml"
BUCKET = "bucket"
LIMIT_SECONDS = 600.0
WITHOUT = (
    "import sys; from jaxres.launch.gce.decide import early_replacement as early; "
    "early.note = lambda found, *_: found; sys.argv[0] = 'launch'; "
    "import runpy; runpy.run_module('jaxres.launch', run_name='__main__')"
)
"""A launcher that requests the replacement once the attempt has ended."""
PEER_SECONDS = 3.0
"""Until the supervisor of the other host has seen the loss of a VM, and exits."""


@dataclass(frozen=True)
class Way:
    """A way to lose a VM, and its replacement."""

    has_notice: bool
    is_early: bool = False
    spares: int = 0


WAYS = {
    "no notice": Way(False),
    "no notice, a spare": Way(False, spares=1),
    "notice, requested after the attempt": Way(True),
    "notice": Way(True, is_early=True),
    "notice, a spare": Way(True, is_early=True, spares=1),
}


class Agents:
    """Writes the reports of modelled agents, until closed."""

    def __init__(
        self, gce: GceEmulator, gcs: GcsServer, paths: LaunchPaths, *, boot: float, save: float
    ) -> None:
        self.gce, self.gcs, self.paths, self.boot, self.save = gce, gcs, paths, boot, save
        self.exit = ExitCode.PREEMPTED
        self.noticed: dict[str, float] = {}
        """VMs that are lost, or about to be, and since when."""
        self.hosts: set[str] = set()
        """Hosts of the first attempt."""
        self.running: dict[str, float] = {}
        """Since when each VM runs."""
        self._first: set[str] = set()
        """VMs of the first attempt, which boot at once."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Agents:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()

    def desired(self) -> DesiredState | None:
        """Returns the desired state."""
        try:
            found = self.gcs.objects.get(BUCKET, self.paths.desired_state.key, {})
        except GcsError:
            return None
        return decode_state(found.data, self.paths.desired_state)

    def attempt(self) -> int:
        """Returns the number of the running attempt; 0: none runs."""
        desired = self.desired()
        is_running = desired is not None and desired.phase == "running"
        return desired.attempt.number if desired is not None and is_running else 0

    def _run(self) -> None:
        while not self._is_closed.wait(0.5):
            if (desired := self.desired()) is not None:
                self._report(desired, now=time.monotonic())

    def _report(self, desired: DesiredState, *, now: float) -> None:
        if not self.noticed:
            self._first |= desired.names
            self.hosts |= {host.name for host in desired.attempt.hosts}
        for name, status in self.gce.vms().items():
            if status != "RUNNING":
                continue
            since = self.running.setdefault(name, now)
            if name not in self._first and now - since < self.boot:
                continue
            report = self._of(name, desired, now=now)
            key = self.paths.report(name).key
            self.gcs.objects.put(BUCKET, key, b"", {}, {"metadata": report.metadata()})

    def _of(self, name: str, desired: DesiredState, *, now: float) -> AgentReport:
        report = AgentReport("ready", "b")
        is_host = any(host.name == name for host in desired.attempt.hosts)
        if is_host and desired.phase == "running":
            report = replace(report, state="running", attempt=desired.attempt.number)
        begun = min(self.noticed.values(), default=now)
        if name in self.hosts and self.noticed and now - begun >= self.save:
            report = replace(report, state="ended", attempt=1, exit=self.exit)
            if is_host and desired.attempt.number > 1:
                number = desired.attempt.number
                report = replace(report, state="running", attempt=number, exit=None)
        at = self.noticed.get(name) if self.exit == ExitCode.PREEMPTED else None
        if at is not None:
            until = time.time() + at + 120.0 - now
            report = replace(report, notice="this VM is being preempted", notice_until=until)
        return report


@contextmanager
def launched(command: list[str], folder: Path, env: dict[str, str]) -> Iterator[None]:
    """Runs a launcher, and kills it at the end."""
    with Path(folder, "output.txt").open("wb") as file:
        launcher = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
    except TimeoutError:
        print(Path(folder, "output.txt").read_text())
        raise
    finally:
        launcher.kill()
        launcher.wait()


def measure(way: Way, *, boot: float, save: float) -> float:
    """Returns the seconds from the notice or the loss to the start of the next attempt."""
    save = save if way.has_notice else PEER_SECONDS
    paths = LaunchPaths(GcsPath(BUCKET, "run"))
    with (
        tempfile.TemporaryDirectory() as folder,
        GcsServer(buckets=(BUCKET,)) as gcs,
        GceEmulator(is_simulated=True) as gce,
        Agents(gce, gcs, paths, boot=boot, save=save) as agents,
    ):
        gcs.objects.facts[BUCKET] = {"location": "US-CENTRAL1", "locationType": "region"}
        config = _config(Path(folder), paths.run, project=gce.project, spares=way.spares)
        words = ["-m", "jaxres.launch"] if way.is_early else ["-c", WITHOUT]
        command = [sys.executable, *words, "gce", "up", str(config)]
        with launched(command, Path(folder), {**os.environ, **gcs.env, **gce.env}):
            _wait(lambda: agents.attempt() == 1)
            time.sleep(5.0)
            _wait(lambda: len(_ready_spares(agents)) == way.spares)
            desired = agents.desired()
            assert desired is not None
            start, taken = time.monotonic(), desired.attempt.hosts[1].name
            if not way.has_notice:
                agents.exit = ExitCode.PEER_LOST
                gce.preempt(taken, notice=False)
            agents.noticed[taken] = start
            _wait(lambda: agents.attempt() == 2)
            return time.monotonic() - start


def _ready_spares(agents: Agents) -> list[str]:
    """Returns the spares that have reported for some seconds."""
    desired = agents.desired()
    vms = () if desired is None else desired.spares
    known, now = agents.running, time.monotonic()
    return [vm.name for vm in vms if vm.created and now - known.get(vm.name, now) > 5.0]


def _config(folder: Path, run: GcsPath, *, project: str, spares: int) -> Path:
    option = {"kind": "spot", "machine_type": "a2-highgpu-1g", "zones": ["us-central1-a"]}
    section = {
        "project": project,
        "num_hosts": 2,
        "spares": spares,
        "capacity_options": [option],
        "image": "projects/debian-cloud/global/images/family/debian-12",
    }
    overrides = {"base": str(CONFIG), "run": {"dir": str(run)}, "launch": {"gce": section}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(overrides))
    return path


def _wait(what: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not what():
        if time.monotonic() > until:
            raise TimeoutError("the launcher did not get there")
        time.sleep(0.05)


def main() -> None:
    """Prints a row for each duration of a boot."""
    parser = argparse.ArgumentParser(prog="python tools/bench/early_replacement.py")
    parser.add_argument("--boot", type=float, nargs="+", default=[0.0, 60.0, 180.0])
    parser.add_argument("--save", type=float, default=10.0)
    options = parser.parse_args()
    print(f"| boot | {' | '.join(WAYS)} |\n|---{'|---' * len(WAYS)}|")
    for boot in options.boot:
        found = [measure(way, boot=boot, save=options.save) for way in WAYS.values()]
        print(f"| {boot:.0f} s | {' | '.join(f'{one:.1f} s' for one in found)} |", flush=True)


if __name__ == "__main__":
    main()
