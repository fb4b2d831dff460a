"""Starts, watches and kills real `python -m jaxres.train` processes; imports nothing of jaxres."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.001
TIMEOUT_SECONDS = 300.0


class TrainingProcess:
    """One `python -m jaxres.train` process on a run directory, with all that it starts."""

    def __init__(self, config: Path, *, run_dir: Path, overrides: tuple[str, ...] = ()) -> None:
        """Starts the process; its output is written beside the run directory."""
        self.run_dir = run_dir
        before = run_dir / "attempts"
        self.attempt = 1 + (len(list(before.iterdir())) if before.exists() else 0)
        self.metrics = run_dir / "attempts" / f"{self.attempt:04d}" / "metrics.jsonl"
        self.output = run_dir.with_name(f"{run_dir.name}-{self.attempt:04d}.txt")
        command = [sys.executable, "-m", "jaxres.train", str(config), f"run.dir={run_dir}"]
        self.started_at = time.monotonic()
        with self.output.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, *overrides], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
            )

    def steps(self) -> list[int]:
        """Returns the steps that this attempt has reported as finished."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_bytes().split(b"\n")[:-1]  # The last line may be incomplete.
        return [json.loads(line)["step"] for line in lines]

    def wait_step(self, step: int) -> float:
        """Waits until `step` or a later one is reported; returns the seconds since the start."""
        self.wait(lambda: (self.steps() or [-1])[-1] >= step, what=f"step {step}")
        return time.monotonic() - self.started_at

    def wait(self, condition: Callable[[], Any], *, what: str) -> None:
        """Waits for a condition; fails if the process ends first."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}; exit {code}:\n{self.output.read_text()}")
            time.sleep(POLL_SECONDS)

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the process and all that it has started have used."""
        ticks = 0
        for pid in [self._process.pid, *_descendants(self._process.pid)]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(words[11]) + int(words[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Sends SIGKILL to the process and to all that it has started, the youngest first."""
        for pid in [*reversed(_descendants(self._process.pid)), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.wait(timeout=60) != -signal.SIGKILL:
            raise RuntimeError(f"ended before the kill:\n{self.output.read_text()}")

    def finish(self) -> None:
        """Waits for the end, which must be exit code 0."""
        if code := self._process.wait(timeout=TIMEOUT_SECONDS):
            raise RuntimeError(f"exit {code}:\n{self.output.read_text()}")


def _descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, parents before children."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def jaxres(*words: str) -> str:
    """Runs a command of jaxres and returns its output."""
    command = [sys.executable, "-m", "jaxres", *words]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def committed_steps(run_dir: Path) -> list[int]:
    """Returns the committed steps of a run, ascending."""
    rows = map(json.loads, jaxres("checkpoints", "list", str(run_dir), "--json").splitlines())
    return sorted(row["step"] for row in rows if row["status"] == "committed")


def machine() -> dict[str, Any]:
    """Describes the machine and the libraries, for the results."""
    return {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "gpus": 0,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "orbax_checkpoint": metadata.version("orbax-checkpoint"),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON, with today's date and the machine."""
    dated = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), **result}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(dated, indent=2) + "\n")
