"""How long the simulation of `jaxres plan` takes: 100,000 GPUs, 90 days, 1,000 runs.

python tools/bench/plan.py

A line for failures alone, and one for Spot VMs with everything that is simulated: waits for
capacity, machines on demand, outages of storage, states in memory.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxres.estimate import goodput_model
from jaxres.estimate.assumptions import DEFAULTS
from jaxres.estimate.goodput_model import Interruption, Outages, Plan
from jaxres.operate.plan.simulate import simulate

NUM_GPUS, DAYS, RUNS = 100_000, 90, 1000


def main() -> None:
    """Prints seconds and results as one line of JSON for each plan."""
    per_hour = NUM_GPUS / DEFAULTS["--mtbf-hours"]
    kind = Interruption(name="gpu", per_hour=per_hour, restart_seconds=60, leaves="storage")
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=60, losses_per_hour=per_hour)
    measure("failures", Plan(interruptions=(kind,), storage=saves))
    half = replace(kind, per_hour=per_hour / 2, stockout_share=0.1, stockout_seconds=600)
    kinds = (replace(half, leaves="memory"), replace(half, name="preempted", is_preemption=True))
    everything = Plan(
        interruptions=kinds,
        storage=saves,
        memory=saves,
        outages=Outages(per_day=1, mean_seconds=600),
        spot_hosts=NUM_GPUS // 8,
    )
    measure("everything", everything)
    measure("waits", replace(everything, spot_hosts=None))


def measure(name: str, plan: Plan) -> None:
    """Simulates a plan and prints the time of the simulation."""
    began, used = time.monotonic(), time.process_time()
    found = simulate(plan, hours=24 * DAYS, replications=RUNS)
    seconds = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}
    failures = float(found.interruptions.mean())
    line = {"plan": name, **seconds, "failures": failures, "goodput": found.mean}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
