"""Benchmark of jaxres' own work on each host per step, in a real job of several hosts.

    python tools/bench/hosts.py --hosts 2

Runs `launch local` on a small model and reads the busy seconds that the hosts exchange: how long
each worked for a step (data, metrics, events, guards, flags, and JAX's own dispatch) without waits
for devices or hosts. It is wall time: if hosts and XLA share the cores, it includes the time of
the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxres.runlog import run_log
from jaxres.runlog.metrics import read_history
from jaxres.runlog.paths import RunDir

CONFIG = Path(__file__).parents[2] / "tests" / "promises" / "tiny.yaml"
SETTLED = 40
"""Steps that are left out at the start: caches are cold."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the job and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder, "run"))
        overrides = [f"run.dir={run_dir.root}", f"train.steps={options.steps}"]
        overrides += [f"data.cache_dir={folder}/cache", f"compilation.cache_dir={folder}/xla"]
        overrides += ["checkpoint.save_every_steps=1000000", "evaluation.every_steps=0"]
        overrides += options.overrides
        command = [sys.executable, "-m", "jaxres.launch", "local", str(CONFIG), *overrides]
        command += ["--no-restart", "--hosts", str(options.hosts)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        history = read_history(run_dir, run_log.fold(run_log.read_records(run_dir.log)))
    steps = history[SETTLED:]
    step = statistics.median(line.step_seconds for line in steps)
    print(f"{options.hosts} hosts, {len(steps)} steps of {step * 1e3:.1f} ms")
    for host in range(options.hosts):
        busy = [line.busy_seconds[host] for line in steps]
        print(
            f"host {host}: by itself {statistics.median(busy) * 1e3:.3f} ms a step "
            f"(worst of the means over 5 steps {max(busy) * 1e3:.3f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
