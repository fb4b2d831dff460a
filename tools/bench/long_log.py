"""Benchmark of a long run log: start, save, `status` and end after many records.

    python tools/bench/long_log.py --records 10 10000 100000 --steps 1000000

Trains a tiny run for its files, and writes a log of that many commit and prune records of a run
that keeps three steps, and metrics of that many steps. "whole" reads every record, as versions
before the log had a summary did for each of these; both are of the same run on the same disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jaxres.clock import SystemClock
from jaxres.runlog import metrics, metrics_columns, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, Prune, Record, RunLog, Start, file_name, fold

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/promises/tiny.yaml"
KEPT = 3


def seconds_of(action: Callable[[], object], repeats: int) -> float:
    """Returns the shortest time of an action."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)


def command(*arguments: str) -> None:
    """Runs jaxres."""
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True, capture_output=True)


def lengthen(run_dir: RunDir, records: int, steps: int) -> None:
    """Adds records to the log of a run, and lines to its metrics."""
    there = run_log.read_records(run_dir.log)
    newest = fold(there).committed[-1]
    start = next(r for r in reversed(there) if isinstance(r.body, Start))
    (line,) = metrics.read_newest(run_dir, start.attempt)
    seq, step = run_log.last_seq(there), newest.step
    while seq < records:
        step += 1
        commit = Commit(step=step, path="checkpoints/gone", manifest="m", bytes=1)
        for body in (commit, Prune(steps=(step,))):
            seq += 1
            record = Record(seq, start.attempt, time.time(), body)
            Path(str(run_dir.log), file_name(seq)).write_bytes(record.encode())
    with Path(str(run_dir.metrics(start.attempt))).open("ab") as file:
        data = json.dumps(line.fields()).encode() + b"\n"
        file.writelines(data for _ in range(steps))


def measure(run_dir: RunDir, repeats: int) -> list[str]:
    """Returns the cells of a row."""
    folder = run_dir.log
    log = RunLog.of_attempt(
        folder, records := run_log.read_records(folder), attempt=1, clock=SystemClock()
    )
    log.history()  # Writes the summary, as the first save does.
    whole = seconds_of(lambda: fold(run_log.read_whole(folder)), repeats)
    first = seconds_of(lambda: fold(run_log.read_records(folder)), repeats)
    save = seconds_of(log.history, repeats)
    copy = sum(len(record.encode()) + 1 for record in log.records())
    claim = next(r.body for r in records if isinstance(r.body, Claim))
    end = seconds_of(lambda: metrics_columns.read_history(run_dir, fold(log.records())), repeats)
    status = seconds_of(lambda: command("jaxres", "status", str(run_dir.root)), repeats)
    runs = seconds_of(lambda: command("jaxres", "runs", str(run_dir.root)), repeats)
    assert claim.attempt == 1
    cells = (f"{one:.4f}" for one in (whole, first, save))
    return [*cells, f"{copy}", *(f"{one:.2f}" for one in (end, status, runs))]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, nargs="+", default=[10, 10_000, 100_000])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    head = ("records", "lines", "whole log s", "start s", "save s", "copy in a step, bytes")
    head += ("metrics at the end s", "status s", "runs s")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    with tempfile.TemporaryDirectory(dir=os.environ.get("JAXRES_BENCH_DIR")) as folder:
        for records in options.records:
            run_dir = RunDir(Path(folder, str(records)))
            command("jaxres.train", str(TINY), f"run.dir={run_dir.root}")
            steps = 0 if records < 100 else options.steps
            lengthen(run_dir, records, steps)
            print(f"| {records} | {steps} | {' | '.join(measure(run_dir, options.repeats))} |")


if __name__ == "__main__":
    main()
