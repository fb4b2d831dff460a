"""How long each kind of failure is unnoticed, with the default settings.

    python -m tools.experiments.detection_latency

Exits 1 if a failure is unnoticed for longer than its setting and 15 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxres_emulators.proxy import Proxy
from tools.experiments import plans
from tools.experiments.training_process import ROOT

CONFIG = ROOT / "experiments" / "detection_latency" / "run.yaml"
STEPS_BEFORE = 10
ALLOWANCE_SECONDS = 15.0
REPEATS = 2
LONGEST_SECONDS = 1500.0
PACED = 'model={"kind": "custom", "target": "tools.experiments.paced_model:model"}'
VM_SILENT = re.compile(r"until a VM that stopped reporting was lost: (.*) s")
SETTINGS = {
    "kill": (0.0, "none: its supervisor sees the end"),
    "stop": (10.0, "hosts.heartbeat_seconds"),
    "cut": (10.0, "hosts.heartbeat_seconds"),
    "hang": (30.0, "deadlines.step_seconds"),
    "silent VM": (45.0, "launch.gce.confirm_lost_seconds"),
}
"""Seconds and name of the setting that a kind of failure is noticed by."""


class Job:
    """A run and its supervisors."""

    def __init__(self, run_dir: Path) -> None:
        """Starts nothing."""
        self.run_dir = run_dir
        self.supervisors: list[subprocess.Popen[bytes]] = []
        self.most_steps = run_dir.with_name(f"{run_dir.name}-steps")
        self.attempt = 0

    def start(self, module: str, *words: str) -> None:
        """Starts a supervisor; its output is written beside the run directory."""
        self.allow(1_000_000)
        environment = {"HOLD": str(self.most_steps), "STEP_SECONDS": "0.05", "ROW_SECONDS": "0.01"}
        caches = [f"data.cache_dir={self.run_dir}-cache", f"compilation.cache_dir={self.run_dir}-x"]
        command = [sys.executable, "-m", *module.split(), str(CONFIG), f"run.dir={self.run_dir}"]
        output = self.run_dir.with_name(f"{self.run_dir.name}-{len(self.supervisors)}.txt")
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, *caches, *words],
                cwd=ROOT,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
            )
        self.supervisors.append(process)

    def allow(self, steps: int) -> None:
        """Lets each worker make so many steps, where the model reads it."""
        new = self.most_steps.with_suffix(".new")
        new.write_text(str(steps))
        new.replace(self.most_steps)

    def workers(self) -> dict[str, int]:
        """Returns the processes that train, by name."""
        found = {}
        for process in self.supervisors:
            for pid in children(process.pid):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found |= {name: pid} if name.startswith("jaxres-host") else {}
        return found

    def unnoticed(self, cause: Callable[[Job], None]) -> dict[str, Any]:
        """Causes a failure in the next attempt; returns for how long it was not in the run log."""
        self.attempt += 1
        metrics = self.run_dir / "attempts" / f"{self.attempt:04d}" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > STEPS_BEFORE)
        cause(self)
        began = time.time()
        end = until(self.end)
        self.allow(1_000_000)
        seconds = round(end["time"] - began, 2)
        return {"seconds": seconds, "exit": end["exit"], "reason": end["reason"][:80]}

    def end(self) -> dict[str, Any] | None:
        """Returns the record of the end of the attempt."""
        records = (json.loads(path.read_bytes()) for path in self.run_dir.glob("log/*"))
        ends = [own for own in records if own["kind"] == "attempt_ended"]
        return next((own for own in ends if own["attempt"] == self.attempt), None)

    def close(self) -> None:
        """Kills the processes that are left."""
        for process in self.supervisors:
            started = children(process.pid) if process.poll() is None else []
            for pid in [process.pid, *started]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    return [int(own) for own in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], Any]) -> Any:
    """Waits until a condition holds; returns its value."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError("it did not get there")
        time.sleep(0.05)
    return found


def kill(job: Job) -> None:
    """Kills the worker of host 1."""
    os.kill(job.workers()["jaxres-host001"], signal.SIGKILL)


def stop(job: Job) -> None:
    """Stops the worker of host 1."""
    os.kill(job.workers()["jaxres-host001"], signal.SIGSTOP)


def hang(job: Job) -> None:
    """Lets no further step end, in a process that runs and answers."""
    job.allow(0)


def failures(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each failure with the seconds for which it was not noticed."""
    for name, causes in {"pair": (kill, stop), "single": (hang,)}.items():
        job = Job(folder / name)
        words = ("--hosts", "2") if name == "pair" else ("--hosts", "1", PACED)
        try:
            job.start("jaxres.launch local", *words)
            for cause in causes * REPEATS:
                yield cause.__name__, job.unnoticed(cause)
        finally:
            job.close()
    for repeat in range(REPEATS):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        job = Job(folder / f"cut-{repeat}")
        with Proxy(address) as between:
            try:
                for host, at in enumerate((address, between.address)):
                    job.start(
                        "jaxres.train", f"--coordinator={at}", "--num-hosts=2", f"--host-id={host}"
                    )
                yield "cut", job.unnoticed(lambda job: between.cut())
            finally:
                job.close()


def silent_vms() -> list[dict[str, Any]]:
    """Returns for how long VMs that fall silent are not noticed, on emulated Compute Engine."""
    command = [sys.executable, "tools/bench/launcher.py", "--vms", "4", "--seconds", "5"]
    printed = subprocess.run(
        [*command, "--losses", str(REPEATS)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    if not (found := VM_SILENT.search(printed)):
        raise RuntimeError(printed)
    return [{"seconds": float(own)} for own in found[1].split(", ")]


def result() -> dict[str, Any]:
    """Causes all failures, and compares each with its setting."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    with tempfile.TemporaryDirectory(prefix="jaxres-experiment-") as name:
        for failure, seconds in failures(Path(name)):
            found[failure].append(seconds)
            print(failure, seconds, flush=True)
    found["silent VM"] = silent_vms()
    longest = {name: max(own["seconds"] for own in rows) for name, rows in found.items()}
    return {
        "claim": "a failure is unnoticed for at most its setting and 15 s",
        "holds": all(longest[name] <= SETTINGS[name][0] + ALLOWANCE_SECONDS for name in SETTINGS),
        "setting": SETTINGS,
        "longest_seconds": longest,
        "runs": found,
    }


if __name__ == "__main__":
    sys.exit(plans.write("detection_latency", result()))
