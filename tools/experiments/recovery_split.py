"""Where the time of a recovery goes: from SIGKILL until the run is where it was.

    python -m tools.experiments.recovery_split

Exits 1 if the parts that the ledger has of an incident are not, to 10 % and 2 s, the time that a
clock outside of jaxres has measured from the kill to the step at which the run was before.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.experiments import plans
from tools.experiments.training_process import ROOT, TIMEOUT_SECONDS, jaxres

CONFIG = ROOT / "experiments" / "recovery_split" / "run.yaml"
SETTINGS = {
    "default": (),
    "new process": ("restart.fork=false", "compilation.keep_programs=0"),
}
KILLS = 2
STEPS_AFTER_SAVE = 10
"""Steps since the newest commit at least, when the kill comes."""
TOLERANCE, TOLERANCE_SECONDS = 0.1, 2.0
PARTS = ("detection", "down", "start_up", "compile", "restore", "replayed")


class Run:
    """A supervised run on one host."""

    def __init__(self, run_dir: Path, overrides: tuple[str, ...]) -> None:
        """Starts the launcher; its output is written beside the run directory."""
        self.run_dir = run_dir
        caches = (f"data.cache_dir={run_dir}-data", f"compilation.cache_dir={run_dir}-xla")
        words = [str(CONFIG), f"run.dir={run_dir}", *caches, *overrides, "--hosts", "1"]
        with run_dir.with_suffix(".txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxres.launch", "local", *words],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env=os.environ | {"STEP_SECONDS": "0.1"},
            )

    def steps(self, attempt: int) -> list[int]:
        """Returns the steps that an attempt has reported."""
        path = self.run_dir / "attempts" / f"{attempt:04d}" / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def committed(self) -> int:
        """Returns the newest committed step."""
        records = (json.loads(path.read_bytes()) for path in self.run_dir.glob("log/*"))
        return max([0, *(own["step"] for own in records if own["kind"] == "commit")])

    def wait(self, condition: Callable[[], Any]) -> None:
        """Waits until a condition holds."""
        deadline = time.monotonic() + 5 * TIMEOUT_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.run_dir.with_suffix(".txt").read_text())
            time.sleep(0.02)

    def kill(self, attempt: int) -> float:
        """Kills the worker; returns the seconds until the next attempt is where this one was."""
        self.wait(
            lambda: (
                self.committed()
                and self.steps(attempt)
                and self.steps(attempt)[-1] >= self.committed() + STEPS_AFTER_SAVE
            )
        )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (worker,) = (
            int(pid)
            for pid in children.split()
            if Path(f"/proc/{pid}/comm").read_text().strip() == "jaxres-host000"
        )
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        step = self.steps(attempt)[-1]
        self.wait(lambda: (self.steps(attempt + 1) or [0])[-1] >= step)
        return time.monotonic() - began

    def end(self) -> None:
        """Stops the run."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=5 * TIMEOUT_SECONDS)


def recoveries(folder: Path, overrides: tuple[str, ...]) -> list[dict[str, float]]:
    """Trains a run and kills it; returns the parts of each recovery, and both totals."""
    run = Run(folder, overrides)
    try:
        outside = [run.kill(attempt) for attempt in range(1, KILLS + 1)]
        run.end()
    finally:
        run.process.kill()
        run.process.wait()
    incidents = json.loads(jaxres("report", str(folder), "--json"))["incidents"]
    return [parts(own) | {"outside": total} for own, total in zip(incidents, outside, strict=False)]


def parts(incident: dict[str, Any]) -> dict[str, float]:
    """Returns the parts of a recovery and their sum."""
    found: dict[str, float] = {
        name: incident[f"{name}_seconds"] for name in ("detection", "down", "replayed")
    }
    found |= incident["setup_seconds"]
    return {name: found[name] for name in PARTS} | {"sum": sum(found.values())}


def result() -> dict[str, Any]:
    """Measures all settings."""
    rows: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxres-experiment-") as name:
        for number, (setting, overrides) in enumerate(SETTINGS.items()):
            rows[setting] = recoveries(Path(name) / str(number), overrides)
            print(setting, rows[setting], flush=True)
    every = [own for found in rows.values() for own in found]
    gaps = [abs(own["sum"] - own["outside"]) - TOLERANCE * own["outside"] for own in every]
    return {
        "claim": "the parts of a recovery sum up to its time, by a clock outside, to 10 % and 2 s",
        "holds": len(every) == KILLS * len(SETTINGS) and max(gaps) <= TOLERANCE_SECONDS,
        "median_seconds": plans.rounded(
            {
                setting: {name: statistics.median(own[name] for own in found) for name in found[0]}
                for setting, found in rows.items()
            }
        ),
        "recoveries": plans.rounded(rows),
    }


if __name__ == "__main__":
    sys.exit(plans.write("recovery_split", result()))
