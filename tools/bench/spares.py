"""Benchmark of the recovery of `launch gce` with spares and with replacements at the notice.

    python tools/bench/spares.py --boot 0 60 180

Starts the emulated service with processes as VMs, an emulated bucket, and a real `launch gce up` of
two hosts with a tiny model. One VM is preempted, with a notice of 120 s or without one. Prints the
seconds from then to the start of the next attempt, and to its first finished step. Before that, a
supervisor waits for the next attempt on each VM. `--boot` is the
time that a new VM needs until its startup script runs; the script, the agent and the training are
real processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.runlog.event_log import read_events  # noqa: E402
from jaxres.runlog.metrics import read_attempt  # noqa: E402
from jaxres.storage.path import GcsPath  # noqa: E402
from jaxres_emulators.environment import environment  # noqa: E402
from jaxres_emulators.gce import GceEmulator  # noqa: E402
from jaxres_emulators.gcs import GcsServer  # noqa: E402
from tests.promises.cloud import Cloud, Launcher  # noqa: E402

BUCKET = "bucket"
LIMIT_SECONDS = 600.0
WITHOUT = (
    "import sys; from jaxres.launch.gce.decide import early_replacement as early; "
    "early.note = lambda found, *_: found; sys.argv[0] = 'launch'; "
    "import runpy; runpy.run_module('jaxres.launch', run_name='__main__')"
)
"""A launcher that requests nothing at a notice."""
PACE = "0.02"
"""Seconds for a row: a step of 12 rows a host takes a quarter of a second."""
DEFAULTS: dict[str, Any] = {
    "lease_seconds": 18.0,
    "lost_seconds": 8.0,
    "confirm_lost_seconds": 45.0,
}
WAYS = {
    "no notice": (False, 0, True),
    "no notice, a spare": (False, 1, True),
    "notice, requested after the attempt": (True, 0, False),
    "notice": (True, 0, True),
    "notice, a spare": (True, 1, True),
}
"""Whether there is a notice, the number of spares, and whether one is requested at the notice."""


@contextmanager
def opened(gcs: GcsServer, folder: Path, caches: Path) -> Iterator[Cloud]:
    """Opens a cloud without VMs, with a run of its own."""
    env = {"PYTHONUNBUFFERED": "1", "JAXRES_PLATFORM": "cpu", **gcs.env}
    with GceEmulator(env=env) as gce:
        gce.delays.provision = gce.delays.stage = 1.0
        run = GcsPath(BUCKET, folder.name)
        cloud = Cloud(gce, gcs, run, folder, caches, {**gcs.env, **gce.env})
        try:
            yield cloud
        finally:
            cloud.end_all()


def measure(gcs: GcsServer, way: str, *, boot: float, caches: Path) -> tuple[float, float]:
    """Returns the seconds to the start of the next attempt and to its first finished step."""
    has_notice, spares, is_early = WAYS[way]
    with tempfile.TemporaryDirectory() as folder, opened(gcs, Path(folder), caches) as cloud:
        config = cloud.config(num_hosts=2, spares=spares, env={"PACE": PACE}, **DEFAULTS)
        launcher = _up(cloud, config, is_early=is_early)
        _await_step(cloud, 1, at_least=20)
        if spares:
            cloud.wait(lambda: _is_spare_ready(cloud), of="a ready spare", seconds=LIMIT_SECONDS)
        cloud.wait(lambda: _are_standbys_ready(cloud), of="standbys", seconds=LIMIT_SECONDS)
        cloud.gce.delays.stage = max(boot, 0.1)
        start, started_at = time.monotonic(), time.time()
        cloud.gce.preempt(cloud.member(1), notice=has_notice)
        cloud.wait(
            lambda: "attempt 2 on " in launcher.printed(), of="attempt 2", seconds=LIMIT_SECONDS
        )
        begun = time.monotonic() - start
        _await_step(cloud, 2, at_least=1)
        return begun, _first_step_at(cloud, 2) - started_at


def _up(cloud: Cloud, config: Path, *, is_early: bool) -> Launcher:
    words = [str(config), "train.steps=100000"]
    if is_early:
        return cloud.up(config, *words[1:])
    return cloud.start([sys.executable, "-c", WITHOUT, "gce", "up", *words])


def _is_spare_ready(cloud: Cloud) -> bool:
    desired, reports = cloud.desired_state(), cloud.reports()
    return desired is not None and any(vm.name in reports for vm in desired.spares)


def _are_standbys_ready(cloud: Cloud) -> bool:
    """Returns whether a supervisor waits for the next attempt on each VM."""
    return all("a supervisor is ready" in cloud.gce.output(name) for name in cloud.gce.vms())


def _await_step(cloud: Cloud, attempt: int, *, at_least: int) -> None:
    cloud.wait(
        lambda: any(line.step >= at_least for line in read_attempt(cloud.run_dir, attempt)),
        of=f"step of attempt {attempt}",
        seconds=LIMIT_SECONDS,
    )


def _first_step_at(cloud: Cloud, attempt: int) -> float:
    """Returns when the first step was finished, in seconds since the epoch.

    Its line is in the bucket only up to 5 s later.
    """
    path = cloud.run_dir.events(attempt, 0)

    def begun() -> list[float]:
        return [e["time"] for e in read_events(path) if e["event"] == "training_started"]

    cloud.wait(begun, of=f"start of attempt {attempt}", seconds=LIMIT_SECONDS)
    lines = list(read_attempt(cloud.run_dir, attempt))
    return begun()[0] + lines[0].step_seconds


def main() -> None:
    """Prints a row for each way and duration of a boot."""
    parser = argparse.ArgumentParser(prog="python tools/bench/spares.py")
    parser.add_argument("--boot", type=float, nargs="+", default=[0.0, 60.0, 180.0])
    parser.add_argument("--way", choices=WAYS, nargs="+", default=[*WAYS])
    options = parser.parse_args()
    print("| preempted with | boot | next attempt | next finished step | load |")
    print("|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as caches,
        GcsServer(buckets=(BUCKET,)) as gcs,
        environment(gcs.env),
    ):
        gcs.objects.facts[BUCKET] = {"location": "US-CENTRAL1", "locationType": "region"}
        for boot in options.boot:
            for way in options.way:
                begun, stepped = measure(gcs, way, boot=boot, caches=Path(caches))
                row = f"| {way} | {boot:.0f} s | {begun:.1f} s | {stepped:.1f} s |"
                print(f"{row} {os.getloadavg()[0]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
