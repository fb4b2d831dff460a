"""Benchmark of preemption: from the notice of one host's machine to a commit by all hosts.

    python tools/bench/notices.py [--hosts 4] [--rounds 10]

Every round is a real job: a supervisor for each host on this machine, one of which polls an
emulated metadata server. Prints, over the rounds, the time from the notice until the last host
starts the agreed save, less the steps in flight; how long that save then waits for one that is
being written; and the time from its start to the commit, compared with an earlier save.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.metrics import read_history
from jaxres.runlog.paths import RunDir

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from jaxres_emulators.metadata import MetadataServer  # noqa: E402

CONFIG = ROOT / "tests" / "promises" / "tiny.yaml"
OVERRIDES = ("model.kind=mlp", "optimizer.schedule.kind=constant", "train.steps=1000000")
NOTICED = 2
"""The host whose machine gives the notice."""
SETTLED_STEP = 60
FLIGHT_STEPS = 2


def free_address() -> str:
    """Returns a free address of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@dataclass(frozen=True)
class Round:
    """Seconds of one job."""

    step: float
    received: float
    """From the notice until its supervisor has received it."""
    turned: float
    """From the notice until all hosts have started the agreed save."""
    waited: float
    """From there until the previous save has ended and the agreed one is written."""
    written: float
    """From there to the commit."""
    earlier: float
    """Duration of an earlier save."""


def measured(folder: Path, *, hosts: int) -> Round:
    """Runs a job to its notice and end."""
    run_dir, at = RunDir(folder / "run"), free_address()
    overrides = [*OVERRIDES, f"run.dir={run_dir.root}", "checkpoint.save_every_steps=20"]
    overrides += [f"data.cache_dir={folder.parent}/cache", "evaluation.every_steps=0"]
    overrides += [f"compilation.cache_dir={folder.parent}/xla", f"--coordinator={at}"]
    with MetadataServer() as metadata:
        supervisors = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxres.train", str(CONFIG), *overrides),
                    *(f"--num-hosts={hosts}", f"--host-id={host}"),
                ],
                env=os.environ | (metadata.env if host == NOTICED % hosts else {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for host in range(hosts)
        ]
        while _step(run_dir) < SETTLED_STEP:
            assert supervisors[0].poll() is None, "the job has ended by itself"
            time.sleep(0.05)
        noticed = time.time()
        metadata.preempt()
        codes = [supervisor.wait(timeout=120) for supervisor in supervisors]
    assert codes == [ExitCode.PREEMPTED] * hosts, codes
    lines = read_history(run_dir, run_log.fold(run_log.read_records(run_dir.log)))
    events_of = [read_events(run_dir.events(1, host)) for host in range(hosts)]
    events_of_noticed = read_events(run_dir.host_supervisor_events(1, NOTICED % hosts))
    began = [_last(events, "save_started") for events in events_of]
    turned = max(_last(events, "phase_changed", phase="save")["time"] for events in events_of)
    assert len({event["step"] for event in began}) == 1, "not the same step on all hosts"
    commits = [event for event in events_of[0] if event["event"] == "save_committed"]
    begun = max(event["time"] - event["blocked_seconds"] for event in began)
    return Round(
        step=statistics.median(line.step_seconds for line in lines[20:]),
        received=_last(events_of_noticed, "preemption_notice_received")["time"] - noticed,
        turned=turned - noticed,
        waited=begun - turned,
        written=commits[-1]["time"] - begun,
        earlier=commits[-2]["seconds"],
    )


def _step(run_dir: RunDir) -> int:
    lines = read_history(run_dir, run_log.fold(run_log.read_records(run_dir.log)))
    return lines[-1].step if lines else 0


def _last(events: list[dict[str, Any]], kind: str, **fields: Any) -> dict[str, Any]:
    wanted = {"event": kind, **fields}.items()
    return [event for event in events if wanted <= event.items()][-1]


def main() -> int:
    """Runs the jobs and prints medians and maxima."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            (Path(folder) / f"{number}").mkdir()
            rows.append(measured(Path(folder) / f"{number}", hosts=options.hosts))
    rows = rows[1:]  # The first one fills the caches.
    step = statistics.median(row.step for row in rows)
    print(f"{options.hosts} hosts, {len(rows)} rounds, a step of {1e3 * step:.1f} ms")
    _print("notice to its supervisor", [row.received for row in rows])
    beyond = [row.turned - FLIGHT_STEPS * row.step for row in rows]
    _print(f"notice to the agreed save on all hosts, less {FLIGHT_STEPS} steps", beyond)
    _print("from there until the save before is over", [row.waited for row in rows])
    _print("from there to the commit", [row.written for row in rows])
    ratios = [row.written / row.earlier for row in rows]
    print(f"that is {statistics.median(ratios):.2f} (at most {max(ratios):.2f}) of an earlier save")
    return 0


def _print(what: str, seconds: list[float]) -> None:
    print(f"{what}: {1e3 * statistics.median(seconds):.0f} ms, at most {1e3 * max(seconds):.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
