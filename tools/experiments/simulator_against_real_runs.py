"""Does the simulator of `jaxres plan` predict the goodput of a real run with the same kills?

    python -m tools.experiments.simulator_against_real_runs [--vms]

Each run is a real `launch local` with restarts, whose worker gets SIGKILL at seeded times of its
training. Then `jaxres plan --from RUN` simulates the run's own failures with the run's own times.
With --vms the run is one `launch gce` on an emulated cloud: tests/promises/interrupted_job.py.
Exits 1 if the simulated goodput of a run is more than 1 point away from that of its ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.experiments.training_process import ROOT, jaxres, write_result

FOLDER = ROOT / "experiments" / "simulator_against_real_runs"
STEP_SECONDS = 0.25
MTBF_SECONDS = 20.0
"""Seconds of training between two kills."""
KILLS = 8
TIMEOUT_SECONDS = 600.0
BOUND = 0.01
WORKER = "jaxres-host000"


@dataclass(frozen=True)
class Setting:
    """A run: its name, the seed of its kills, and how it saves."""

    name: str
    seed: int
    overrides: tuple[str, ...] = ()


SETTINGS = (
    Setting("every 10 steps", 0),
    Setting("every 40 steps", 1, ("checkpoint.save_every_steps=40",)),
)


def main() -> int:
    """Trains and simulates the runs, and writes results/results.json or results/vms.json."""
    began = time.monotonic()
    if "--vms" in sys.argv[1:]:
        result = of_job_on_vms() | {"seconds": round(time.monotonic() - began)}
        write_result(FOLDER / "results" / "vms.json", result)
        return 0 if result["holds"] else 1
    rows = []
    with tempfile.TemporaryDirectory(prefix="simulator-") as name:
        for number, setting in enumerate(SETTINGS):
            run_dir = Path(name) / f"run-{number}"
            chance = random.Random(setting.seed)
            gaps = [chance.expovariate(1 / MTBF_SECONDS) for _ in range(KILLS)]
            train(run_dir, gaps, overrides=setting.overrides)
            rows.append(compared(setting, run_dir, gaps))
            print(json.dumps(rows[-1], indent=2), flush=True)
    settings = {"step_seconds": STEP_SECONDS, "mtbf_seconds_of_training": MTBF_SECONDS}
    result = result_of(rows) | settings | {"seconds": round(time.monotonic() - began)}
    write_result(FOLDER / "results" / "results.json", result)
    return 0 if result["holds"] else 1


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the result, with the claim that was fixed before the runs."""
    worst = max(abs(row["difference"]) for row in rows)
    return {
        "claim": "the simulated goodput is within 1 point of the measured one",
        "holds": worst <= BOUND,
        "largest_difference": worst,
        "runs": rows,
    }


def of_job_on_vms() -> dict[str, Any]:
    """Returns the result of a job on emulated VMs."""
    command = [sys.executable, "-m", "tests.promises.interrupted_job"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return result_of([row_of("launch gce", found["plan"], found["ledger"])])


def train(run_dir: Path, gaps: Sequence[float], *, overrides: Sequence[str] = ()) -> None:
    """Trains a run to its end; kills its worker this long after the first step of an attempt."""
    command = [sys.executable, "-m", "jaxres.launch", "local", str(FOLDER / "run.yaml")]
    caches = (f"data.cache_dir={run_dir}-cache", f"compilation.cache_dir={run_dir}-cache/xla")
    words = [f"run.dir={run_dir}", *caches, *overrides, "--hosts", "1"]
    output = run_dir.with_suffix(".txt")
    environment = {**os.environ, "STEP_SECONDS": str(STEP_SECONDS)}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *words], cwd=ROOT, stdout=file, stderr=file, env=environment
        )
    try:
        for attempt, gap in enumerate(gaps, start=1):
            metrics = run_dir / "attempts" / f"{attempt:04d}" / "metrics.jsonl"
            _wait(lambda path=metrics: path.exists() and path.stat().st_size, process)
            time.sleep(gap)
            os.kill(_worker(process.pid), signal.SIGKILL)
        if code := process.wait(timeout=TIMEOUT_SECONDS):
            raise RuntimeError(f"exit {code}:\n{output.read_text()}")
    finally:
        process.kill()
        process.wait()


def _wait(condition: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no step; exit {process.returncode}")
        time.sleep(0.01)


def _worker(supervisor: int) -> int:
    """Returns the process that trains."""
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if Path(f"/proc/{child}/comm").read_text().strip() == WORKER:
                return int(child)
    raise RuntimeError("no worker")


def compared(setting: Setting, run_dir: Path, gaps: Sequence[float]) -> dict[str, Any]:
    """Returns the goodput of the ledger beside the simulated goodput."""
    plan = json.loads(jaxres("plan", "--from", str(run_dir), "--json", "--replications", "1"))
    ledger = json.loads(jaxres("report", str(run_dir), "--json"))
    return row_of(setting.name, plan, ledger) | {
        "seed": setting.seed,
        "gaps_seconds": [round(gap, 2) for gap in gaps],
        "step_seconds_by_attempt": [_mean_step(path) for path in _metrics(run_dir)],
    }


def row_of(name: str, plan: dict[str, Any], ledger: dict[str, Any]) -> dict[str, Any]:
    """Returns the measured and the simulated figures of one run."""
    simulated, measured = plan["measured"]["simulated"], ledger["goodput"]
    lost = sum(incident["steps_lost"] for incident in ledger["incidents"])
    seconds = {name: round(value, 1) for name, value in ledger["by_activity"].items() if value}
    return {
        "run": name,
        "incidents": [incident["cause"] for incident in ledger["incidents"]],
        "seconds": {"measured": ledger["seconds"], "simulated": simulated["seconds"]},
        "steps_lost": {"measured": lost, "simulated": simulated["steps_lost"]},
        "goodput": {"measured": measured, "simulated": simulated["goodput"]},
        "difference": simulated["goodput"] - measured,
        "wait_seconds_simulated": simulated["wait_seconds"],
        "times": simulated["times"],
        "ledger_seconds": seconds,
    }


def _metrics(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "attempts").glob("*/metrics.jsonl"))


def _mean_step(path: Path) -> float:
    """Returns the mean seconds of a step in one attempt."""
    lines = path.read_bytes().split(b"\n")[:-1]  # The last line may be incomplete.
    seconds = [json.loads(line)["step_seconds"] for line in lines]
    return round(sum(seconds) / len(seconds), 3)


if __name__ == "__main__":
    sys.exit(main())
