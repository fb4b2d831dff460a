"""Benchmark of a start: to the first completed step, by phase; cold, warm, and resumed.

    python tools/bench/startup.py [--repeats 3] [CONFIG]

Prints the median seconds of each phase over the repeats, interleaved; from the run's own events.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir

ROOT = Path(__file__).resolve().parents[2]


def measure(
    config: Path, run_dir: RunDir, caches: Path, *, steps: int, attempt: int
) -> dict[str, float]:
    """Trains to `steps` and returns the seconds of each phase up to the first completed step."""
    overrides = [
        f"run.dir={run_dir.root}",
        f"train.steps={steps}",
        "optimizer.schedule.horizon_steps=1000",
        f"data.cache_dir={caches}",
        f"compilation.cache_dir={caches / 'xla'}",
        "telemetry.sample_tokens=0",
    ]
    command = [sys.executable, "-m", "jaxres.train", str(config), *overrides]
    started = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    first = read_json_lines(run_dir.metrics(attempt))[0]
    seconds = {"first step": first["step_seconds"]}
    since, phase = started, "import and claim"
    for event in read_events(run_dir.events(attempt, 0)):
        if event["event"] not in ("phase_changed", "run_opened"):
            continue
        name = event.get("phase", "import and claim")
        seconds[phase] = seconds.get(phase, 0.0) + event["time"] - since
        since, phase = event["time"], name
        if name == "train":
            break
    seconds["total"] = since - started + first["step_seconds"]
    return seconds


def main() -> None:
    """Prints a table: one row per phase, one column per kind of start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "config", nargs="?", type=Path, default=ROOT / "configs" / "quickstart.yaml"
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "resumed": []}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            caches, config = Path(folder, "caches"), options.config
            a, b = RunDir(Path(folder, "a")), RunDir(Path(folder, "b"))
            found["cold"].append(measure(config, a, caches, steps=2, attempt=1))
            found["warm"].append(measure(config, b, caches, steps=2, attempt=1))
            found["resumed"].append(measure(config, b, caches, steps=4, attempt=2))
    phases = dict.fromkeys(name for kind in found.values() for run in kind for name in run)
    print(
        f"{'seconds (median of ' + str(options.repeats) + ')':<24}"
        + "".join(f"{k:>10}" for k in found)
    )
    for phase in [*(p for p in phases if p not in ("first step", "total")), "first step", "total"]:
        cells = [statistics.median(run.get(phase, 0.0) for run in runs) for runs in found.values()]
        print(f"{phase:<24}" + "".join(f"{cell:>10.2f}" for cell in cells))


if __name__ == "__main__":
    main()
