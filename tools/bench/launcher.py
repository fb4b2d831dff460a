"""Benchmark of the GCE controller: API calls, bucket requests and memory for many VMs.

    python tools/bench/launcher.py --vms 1000 --seconds 120
    python tools/bench/launcher.py --vms 4 --seconds 5 --losses 10
    python tools/bench/launcher.py --vms 8 --seconds 20 --losses 2 --latency 0.35
    python tools/bench/launcher.py --vms 4 --seconds 5 --losses 0 --takeovers 3

Starts the emulated service with VMs that have no processes, an emulated bucket, and a real
`launch gce up`. This program writes the reports of all agents into the bucket, as often as an agent
does. Prints, from one run: the time until the first attempt began; while it ran, the calls of the
Compute API and the requests to the bucket per minute, the memory of the controller and its share of
a core; the time until VMs that stop reporting, one by one, are lost; the time until a standby
launcher leads once the launcher is killed; and the time of the shutdown. `--latency` delays each
answer of the bucket and of the Compute API to a launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.launch.gce.state.desired_state import DesiredState  # noqa: E402
from jaxres.launch.gce.state.observed_state import AgentReport  # noqa: E402
from jaxres.launch.gce.state.paths import LaunchPaths  # noqa: E402
from jaxres.launch.gce.state.state_object import decode_state  # noqa: E402
from jaxres.launch.gce.vm.agent import REPORT_SECONDS  # noqa: E402
from jaxres.storage.path import GcsPath  # noqa: E402
from jaxres_emulators.gce import GceEmulator  # noqa: E402
from jaxres_emulators.gcs import GcsServer  # noqa: E402
from jaxres_emulators.gcs.objects import GcsError  # noqa: E402

CONFIG = ROOT / "tests" / "promises" / "faulty.yaml"
BUCKET = "bucket"
LIMIT_SECONDS = 600.0


class Agents:
    """Writes the reports of the agents of all VMs, until closed."""

    def __init__(self, gce: GceEmulator, gcs: GcsServer, places: LaunchPaths) -> None:
        self.gce, self.gcs, self.places = gce, gcs, places
        self.silent: set[str] = set()
        """VMs that have stopped reporting."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Agents:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()

    def intent(self) -> DesiredState | None:
        """Returns the desired state."""
        try:
            found = self.gcs.objects.get(BUCKET, self.places.desired_state.key, {})
        except GcsError:
            return None
        return decode_state(found.data, self.places.desired_state)

    def phase(self) -> str:
        """Returns the phase of the job."""
        intent = self.intent()
        return "" if intent is None else intent.phase

    def is_wanted(self, name: str) -> bool:
        """Returns whether a VM is in the desired state."""
        intent = self.intent()
        return intent is None or name in intent.names

    def _run(self) -> None:
        while not self._is_closed.wait(REPORT_SECONDS):
            intent = self.intent()
            if intent is None:
                continue
            is_on = intent.phase == "running"
            number = intent.attempt.number
            report = AgentReport("running" if is_on else "ready", "b", number).metadata()
            running = {n for n, status in self.gce.vms().items() if status == "RUNNING"}
            for name in running - self.silent:
                key = self.places.report(name).key
                self.gcs.objects.put(BUCKET, key, b"", {}, {"metadata": report})


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(prog="python tools/bench/launcher.py")
    parser.add_argument("--vms", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument("--takeovers", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    options = parser.parse_args()
    run = GcsPath(BUCKET, "run")
    with (
        tempfile.TemporaryDirectory() as folder,
        GcsServer(buckets=(BUCKET,)) as gcs,
        GceEmulator(speed=10, is_simulated=True) as gce,
        Agents(gce, gcs, LaunchPaths(run)) as agents,
    ):
        gcs.objects.facts[BUCKET] = {"location": "US-CENTRAL1", "locationType": "region"}
        gce.quota("us-central1", "PREEMPTIBLE_NVIDIA_A100_GPUS", 1e6)
        for metric in ("CPUS", "INSTANCES", "PREEMPTIBLE_CPUS"):
            gce.quota("us-central1", metric, 1e6)
        config = _config(Path(folder), run, project=gce.project, vms=options.vms)
        env = {**os.environ, **gcs.env, **gce.env}
        began = time.monotonic()
        output = Path(folder, "output.txt")
        leader = _launch(config, output, env)
        if options.latency:
            gcs.fail("stall", method=".*", times=None, late_seconds=options.latency)
            gce.fail("stall", times=None, late_seconds=options.latency)
        try:
            _measure(leader, agents, gce, gcs, began=began, seconds=options.seconds)
            _lose(options.losses, leader, agents)
            for _ in range(options.takeovers):
                leader = _take_over(leader, agents, config, output, env)
            _end(leader, agents, gce, gcs)
        except TimeoutError:
            print(output.read_text())
            raise
        finally:
            leader.kill()
            leader.wait()


def _launch(
    config: Path, output: Path, env: dict[str, str], *flags: str
) -> subprocess.Popen[bytes]:
    with output.open("ab") as file:
        command = [sys.executable, "-m", "jaxres.launch", "gce", "up", str(config), *flags]
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _take_over(
    leader: subprocess.Popen[bytes], agents: Agents, config: Path, output: Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Kills the launcher and prints when a standby leads; returns that."""
    standby, lines = _launch(config, output, env, "--standby"), output.read_text().count
    waits, before = "holds the launcher lease", lines("holds the launcher lease")
    _wait(lambda: output.read_text().count(waits) > before, standby)
    time.sleep(random.uniform(5.0, 11.0))
    epoch, start = _epoch(agents), time.monotonic()
    leader.kill()
    leader.wait()
    lists = _lists(agents)
    _wait(lambda: _lease_epoch(agents) > epoch, standby)
    took = time.monotonic() - start
    _wait(lambda: _epoch(agents) > epoch, standby)
    wrote = time.monotonic() - start
    _wait(lambda: _lists(agents) > lists, standby)
    cycle = time.monotonic() - start
    print(
        f"after the kill of the launcher: a standby had the lease after {took:.1f} s, had written "
        f"the desired state after {wrote:.1f} s, and listed the VMs after {cycle:.1f} s"
    )
    return standby


def _lists(agents: Agents) -> int:
    return agents.gce.calls().calls["instances.aggregatedList"]


def _epoch(agents: Agents) -> int:
    intent = agents.intent()
    return 0 if intent is None else intent.epoch


def _lease_epoch(agents: Agents) -> int:
    data = agents.gcs.objects.get(BUCKET, agents.places.lease.key, {}).data
    return int(json.loads(data)["epoch"])


def _measure(
    leader: subprocess.Popen[bytes],
    agents: Agents,
    gce: GceEmulator,
    gcs: GcsServer,
    *,
    began: float,
    seconds: float,
) -> None:
    _wait(lambda: agents.phase() == "running", leader)
    print(f"until the first attempt began: {time.monotonic() - began:.1f} s")
    time.sleep(10)
    calls, requests = gce.calls().calls.total(), gcs.counts["A"] + gcs.counts["B"]
    busy, start = _cpu_seconds(leader.pid), time.monotonic()
    time.sleep(seconds)
    minutes = (time.monotonic() - start) / 60
    num_calls = gce.calls().calls.total() - calls
    print(f"calls of the Compute API per minute while it ran: {num_calls / minutes:.0f}")
    stored = gcs.counts["A"] + gcs.counts["B"] - requests
    print(f"requests to the bucket per minute while it ran: {stored / minutes:.0f}")
    print(f"memory of the leader at most: {_peak_mib(leader.pid):.0f} MiB")
    print(f"share of a core: {(_cpu_seconds(leader.pid) - busy) / (60 * minutes):.2f}")
    intent = agents.intent()
    assert intent is not None
    print(f"attempts: {intent.attempt.number}, VMs: {len(gce.vms())}")


def _lose(count: int, leader: subprocess.Popen[bytes], agents: Agents) -> None:
    """Prints how long the silence of a VM lasts until it counts as lost."""
    found = []
    for _ in range(count):
        time.sleep(random.uniform(0, REPORT_SECONDS))
        intent = agents.intent()
        assert intent is not None
        name, start = intent.attempt.hosts[-1].name, time.monotonic()
        agents.silent.add(name)
        _wait(lambda name=name: not agents.is_wanted(name), leader)
        found.append(time.monotonic() - start)
        _wait(lambda: agents.phase() == "running", leader)
    text = ", ".join(f"{seconds:.1f}" for seconds in sorted(found))
    print(f"until a VM that stopped reporting was lost: {text} s")


def _end(leader: subprocess.Popen[bytes], agents: Agents, gce: GceEmulator, gcs: GcsServer) -> None:
    """Prints the time of the shutdown."""
    before, start = gce.calls().calls.total(), time.monotonic()
    gcs.objects.put(BUCKET, agents.places.down.key, b"", {}, {})
    _wait(lambda: agents.phase() == "ended", leader)
    print(f"until no VM was left: {time.monotonic() - start:.1f} s", end="")
    print(f" and {gce.calls().calls.total() - before} calls")
    print(f"most calls in any minute: {gce.calls().peak_per_minute}")


def _config(folder: Path, run: GcsPath, *, project: str, vms: int) -> Path:
    option = {"kind": "spot", "machine_type": "a2-highgpu-1g", "zones": ["us-central1-a"]}
    section = {
        "project": project,
        "num_hosts": vms,
        "capacity_options": [option],
        "image": "projects/debian-cloud/global/images/family/debian-12",
    }
    overrides = {"base": str(CONFIG), "run": {"dir": str(run)}, "launch": {"gce": section}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(overrides))
    return path


def _wait(what: Callable[[], bool], leader: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + LIMIT_SECONDS
    while not what():
        if time.monotonic() > until or leader.poll() is not None:
            raise TimeoutError("the leader did not get there")
        time.sleep(0.1)


def _peak_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
