"""How fast a notice of one host's machine becomes one agreed step on all hosts, and a commit.

    python tools/bench/notices.py [--hosts 4] [--rounds 10]

Every round is a real job: a door for each host on this machine, of which one asks an emulated
metadata server. Prints, over the rounds, the time from the notice to the last host's turn to the
agreed save, less the steps in flight, and from there to the commit, against the write time of a
save that the run has made before.
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
from pathlib import Path
from typing import Any

from jaxres import runlog
from jaxres.eventlog import read_events
from jaxres.faults import Exit
from jaxres.metrics import read_history
from jaxres.rundir import RunDir

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tests.emulators.metadata import MetadataServer  # noqa: E402

CONFIG = ROOT / "tests" / "promises" / "tiny.yaml"
WORDS = ("model.kind=mlp", "optimizer.schedule.kind=constant", "train.steps=1000000")
NOTICED = 2
"""The host whose machine gives the notice."""
SETTLED_STEP = 60
FLIGHT_STEPS = 2


def free_address() -> str:
    """Returns an address of this machine where nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def measured(folder: Path, *, hosts: int) -> tuple[float, float, float, float]:
    """Returns seconds: a step, notice to agreed save, that to the commit, an earlier save."""
    run_dir, at = RunDir(folder / "run"), free_address()
    words = [*WORDS, f"run.dir={run_dir.root}", "checkpoint.save_every_steps=20"]
    words += [f"data.cache_dir={folder.parent}/cache", "evaluation.every_steps=0"]
    words += [f"compilation.cache_dir={folder.parent}/xla", f"--coordinator={at}"]
    with MetadataServer() as metadata:
        doors = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxres.train", str(CONFIG), *words),
                    *(f"--num-hosts={hosts}", f"--host-id={host}"),
                ],
                env=os.environ | (metadata.env if host == NOTICED % hosts else {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for host in range(hosts)
        ]
        while _step(run_dir) < SETTLED_STEP:
            assert doors[0].poll() is None, "the job has ended by itself"
            time.sleep(0.05)
        noticed = time.time()
        metadata.preempt()
        codes = [door.wait(timeout=120) for door in doors]
    assert codes == [Exit.PREEMPTED] * hosts, codes
    lines = read_history(run_dir, runlog.fold(runlog.read_records(run_dir.log)))
    told = [read_events(run_dir.events(1, host)) for host in range(hosts)]
    began = [_last(events, "SaveStarted") for events in told]
    assert len({event["step"] for event in began}) == 1, "not the same step on all hosts"
    commits = [event for event in told[0] if event["event"] == "SaveCommitted"]
    agreed = max(event["time"] - event["blocked_seconds"] for event in began)
    step = statistics.median(line.step_seconds for line in lines[20:])
    return step, agreed - noticed, commits[-1]["time"] - agreed, commits[-2]["seconds"]


def _step(run_dir: RunDir) -> int:
    lines = read_history(run_dir, runlog.fold(runlog.read_records(run_dir.log)))
    return lines[-1].step if lines else 0


def _last(events: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return [event for event in events if event["event"] == kind][-1]


def main() -> int:
    """Runs the jobs and prints medians and the worst."""
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
    step = statistics.median(row[0] for row in rows)
    print(f"{options.hosts} hosts, {len(rows)} rounds, a step of {1e3 * step:.1f} ms")
    beyond = [1e3 * (row[1] - FLIGHT_STEPS * row[0]) for row in rows]
    print(
        f"notice to the agreed save on all hosts, less {FLIGHT_STEPS} steps: "
        f"{statistics.median(beyond):.0f} ms, at most {max(beyond):.0f} ms"
    )
    saves = [1e3 * row[2] for row in rows]
    ratios = [row[2] / row[3] for row in rows]
    print(
        f"from there to the commit: {statistics.median(saves):.0f} ms, at most {max(saves):.0f} ms;"
        f" {statistics.median(ratios):.2f} (at most {max(ratios):.2f}) of an earlier save's time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
