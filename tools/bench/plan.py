"""How long the simulation of `jaxres plan` takes: 100,000 GPUs, 90 days, 1,000 runs.

python tools/bench/plan.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxres.plan import goodput_model
from jaxres.plan.assumptions import DEFAULTS
from jaxres.plan.goodput_model import Interruption, Plan
from jaxres.plan.simulate import simulate

NUM_GPUS, DAYS, RUNS = 100_000, 90, 1000


def main() -> None:
    """Prints seconds and results as one line of JSON."""
    per_hour = NUM_GPUS / DEFAULTS["--mtbf-hours"]
    kind = Interruption(name="gpu", per_hour=per_hour, restart_seconds=60, leaves="storage")
    saves = goodput_model.tier(stall_seconds=1, commit_seconds=60, losses_per_hour=per_hour)
    plan = Plan(interruptions=(kind,), storage=saves)
    began, used = time.monotonic(), time.process_time()
    found = simulate(plan, hours=24 * DAYS, replications=RUNS)
    seconds = {"seconds": time.monotonic() - began, "cpu_seconds": time.process_time() - used}
    failures = float(found.interruptions.mean())
    sys.stdout.write(json.dumps(seconds | {"failures": failures, "goodput": found.mean}) + "\n")


if __name__ == "__main__":
    main()
