"""Benchmark of `jaxres report --out`: time and size for a run of many steps and attempts.

    python tools/bench/report.py [--steps 1000000] [--attempts 50] [--save-every 1000]
    ... --run FOLDER --html FILE   keeps the run directory that it writes, and the report

Writes the log, events and metrics that such a run would leave, then starts the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxres.runlog.events import (
    EVENTS,
    PhaseChanged,
    RunBuilt,
    RunEnded,
    RunOpened,
    SaveCommitted,
    SaveStarted,
    TrainingStarted,
    UpdateSkipped,
)
from jaxres.runlog.guarantee import CODE
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import AttemptEnded, Body, Claim, Commit, Record, Rollback, Start

TOKENS_PER_STEP = 524_288
BEGAN = 1_790_000_000.0
BUILT = RunBuilt(
    model="gpt 124M",
    params=124_000_000,
    devices="32 x NVIDIA H100 80GB HBM3",
    rows=1_000_000,
    tokens_per_epoch=10**9,
    steps=10**6,
    tokens_per_step=TOKENS_PER_STEP,
    flops_per_token=8e9,
    state_bytes_per_device=10**9,
)
EXITS = ((80, "no step for 120 s"), (75, "preempted"), (None, ""), (79, "host 2 is gone"))


@dataclass
class Run:
    """Writes a run directory, attempt by attempt."""

    run_dir: RunDir
    now: float = 0.0
    records: list[Record] = field(default_factory=list)
    attempt: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def record(self, body: Body) -> int:
        """Appends a record; returns its number."""
        record = Record(len(self.records) + 1, self.attempt, BEGAN + self.now, body)
        self.records.append(record)
        return record.seq

    def event(self, event: Any) -> None:
        """Appends an event of host 0."""
        times = {"time": BEGAN + self.now, "monotonic": 1000.0 + self.now}
        self.events.append(times | EVENTS.encode(event))

    def phase(self, name: str, seconds: float = 0.0) -> None:
        """Enters a phase and spends time in it."""
        self.event(PhaseChanged(name))
        self.now += seconds

    def begin(self, step: int) -> int:
        """Claims an attempt and starts it at a step; returns the number of its start record."""
        self.attempt, self.events = self.attempt + 1, []
        num_hosts = 4 if self.attempt % 5 else 3
        self.record(claim(self.attempt, num_hosts))
        self.now += 1.0
        self.event(RunOpened(str(self.run_dir.root), self.attempt, 2, False))
        for name, seconds in {"import": 4.0, "build": 3.0, "compile": 30.0, "restore": 8.0}.items():
            self.phase(name, seconds)
        self.event(dataclasses.replace(BUILT, devices=f"{8 * num_hosts} x NVIDIA H100 80GB HBM3"))
        return self.start(step, num_hosts)

    def start(self, step: int, num_hosts: int) -> int:
        """Starts the training at a step."""
        computation: dict[str, str] = {**dict.fromkeys(CODE, "digest")}
        seq = self.record(
            Start(
                step=step,
                path=None if step == 0 else f"checkpoints/{step}",
                dataset="d",
                computation=computation,
                devices=(8,) * num_hosts,
            )
        )
        self.event(TrainingStarted(step=step, path=None, guarantee="bitwise on this topology"))
        self.phase("train")
        return seq

    def save(self, step: int) -> None:
        """Commits a step, with a stall and a write beside the training."""
        stall = self.rng.uniform(0.2, 0.6)
        self.phase("save", stall)
        self.event(SaveStarted(step, stall))
        self.phase("train")
        path, size, seconds = f"checkpoints/{step}", 1_488_000_000, self.rng.uniform(2, 4)
        self.event(SaveCommitted(step, path, size, seconds))
        self.record(Commit(step=step, path=path, manifest="m", bytes=size))

    def write(self) -> None:
        """Writes the events of the attempt."""
        path = Path(str(self.run_dir.events(self.attempt, 0)))
        path.write_text("".join(json.dumps(event) + "\n" for event in self.events))


def claim(attempt: int, num_hosts: int) -> Claim:
    """Returns the claim of an attempt."""
    return Claim(
        attempt=attempt,
        host="node-a",
        pid=7,
        boot_id="b",
        nonce=str(attempt),
        coordinator=None,
        num_hosts=num_hosts,
        threads=2,
        versions={},
        fingerprint={},
        trajectory="7a",
    )


def write_run(folder: Path, *, steps: int, attempts: int, save_every: int) -> RunDir:
    """Writes a run of that many steps; attempts end with different causes, some roll back."""
    run = Run(RunDir(folder))
    log = folder / "log"
    log.mkdir(parents=True)
    committed = step = 0
    for number in range(1, attempts + 1):
        is_last = number == attempts
        target = steps * number // attempts - (0 if is_last else save_every // 3)
        seq = run.begin(committed)
        rolls_back = number % 10 == 5
        path = Path(str(run.run_dir.metrics(number)))
        path.parent.mkdir(parents=True)
        step = committed
        with path.open("w") as file:
            while step < target:
                step += 1
                file.write(json.dumps(_line(run, seq, step).fields()) + "\n")
                if step % save_every == 0 or (is_last and step == target):
                    run.save(step)
                    committed = step
                if rolls_back and step > target - save_every // 2:
                    rolls_back = False
                    run.record(
                        Rollback(onset=step - 9, target=committed, rows=((1, 2),), reason="spike")
                    )
                    run.phase("rollback", 5.0)
                    seq, step = run.start(committed, 4), committed
        _end(run, number, step, is_last=is_last)
    for record in run.records:
        (log / f"{record.seq:08d}.json").write_bytes(record.encode())
    return run.run_dir


def _end(run: Run, number: int, step: int, *, is_last: bool) -> None:
    code, reason = (0, "") if is_last else EXITS[number % len(EXITS)]
    if code in (0, 75):
        run.event(RunEnded(exit=code or 0, name="", step=step, committed=True))
    if code is not None:
        run.now += 120.0 if code == 80 else 1.0
        culprit = 2 if code == 79 else None
        run.record(AttemptEnded(exit=code, reason=reason, committed=False, culprit=culprit))
    run.write()
    run.now += run.rng.uniform(5, 600)


def _line(run: Run, seq: int, step: int) -> MetricsLine:
    seconds = run.rng.uniform(0.9, 1.1)
    run.now += seconds
    skipped = run.rng.random() < 1e-5
    loss = 2.5 + 8 * math.exp(-step / 20_000) + run.rng.gauss(0, 0.05)
    norm = 0.5 + run.rng.expovariate(8)
    if skipped:
        run.event(UpdateSkipped(step, math.nan, math.nan, 0.0, (), 0, ()))
    return MetricsLine(
        seq=seq,
        step=step,
        attempt=run.attempt,
        loss=None if skipped else loss,
        grad_norm=None if skipped else norm,
        learning_rate=3e-4,
        tokens=step * TOKENS_PER_STEP,
        step_seconds=seconds,
        skipped=skipped,
        samples=f"{step:016x}",
        busy_seconds=(0.1, 0.1, 0.1, 0.1),
        usual_step_seconds=1.0,
    )


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Writes the run, starts the command, prints its time and the size of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--attempts", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--html", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.run or Path(scratch) / "run"
        html = options.html or Path(scratch) / "report.html"
        if not folder.exists():
            write_run(
                folder,
                steps=options.steps,
                attempts=options.attempts,
                save_every=options.save_every,
            )
        command = [sys.executable, "-m", "jaxres", "report", str(folder), "--out", str(html)]
        for _ in range(options.repeats):
            began, used = time.monotonic(), _children_seconds()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds, cpu = time.monotonic() - began, _children_seconds() - used
            print(f"{seconds:.1f} s, of the CPU {cpu:.1f} s, {html.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
