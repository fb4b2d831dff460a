"""Training runs of the parts: real commands, and their records."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir

Figures = dict[str, object]
"""Name -> number, text or flag."""
ROOT = Path(__file__).resolve().parents[2]
REHEARSED = os.environ.get("REHEARSE") == "1"
"""Whether the sizes are tiny and the device is a CPU."""
NO_GPU = "not measured: no GPU"
WARM_STEPS = 5
"""Steps at the start whose time is not counted."""
SMALL = ("model.num_layers=1", "model.d_model=64", "model.num_heads=2", "data.seq_len=64")
"""Overrides of the quickstart for a rehearsal."""


def sized(gpu: int, cpu: int) -> int:
    """Returns the first number, or the second in a rehearsal."""
    return cpu if REHEARSED else gpu


def seconds(act: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def every(**measurements: Callable[[], Figures]) -> Iterator[Figures]:
    """Yields the figures of each measurement; one that fails stops no other.

    Raises:
      AssertionError: at the end, if any has failed.
    """
    failed = []
    for name, measure in measurements.items():
        try:
            yield measure()
        except Exception as error:  # noqa: BLE001  It is a figure, and raised at the end.
            traceback.print_exc()
            failed.append(name)
            yield {name: f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    assert not failed, f"failed: {', '.join(failed)}"


def quickstart(folder: Path, *overrides: str) -> list[str]:
    """Returns the arguments of the quickstart with its data and caches in a folder."""
    caches = [f"data.cache_dir={folder / 'data'}", f"compilation.cache_dir={folder / 'xla'}"]
    small = SMALL if REHEARSED else ()
    return [str(ROOT / "configs/quickstart.yaml"), *caches, *small, *overrides]


def command(arguments: Sequence[str], *, module: str = "jaxres.train") -> list[str]:
    """Returns the argv of a command."""
    return [sys.executable, "-m", module, *arguments]


def train(arguments: Sequence[str], *, exit: int = 0) -> str:
    """Runs a command to its end and returns its output; raises unless it exits with `exit`."""
    lines = []
    with subprocess.Popen(
        command(arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:  # At once, since a part may be killed at its limit.
            print(line, end="", flush=True)
            lines.append(line)
    assert process.returncode == exit, f"exit {process.returncode}, expected {exit}"
    return "".join(lines)


def digest(run_dir: RunDir) -> str:
    """Returns the digest of the newest checkpoint."""
    arguments = command(["checkpoints", "digest", str(run_dir.root)], module="jaxres")
    return subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def event(run_dir: RunDir, attempt: int, kind: str) -> dict[str, object]:
    """Returns the first event of a kind of an attempt."""
    return next(e for e in read_events(run_dir.events(attempt, 0)) if e["event"] == kind)


def step_seconds(run_dir: RunDir, attempt: int = 1) -> float:
    """Returns the median time of a step after the first ones."""
    rows = read_json_lines(run_dir.metrics(attempt))[WARM_STEPS:]
    return statistics.median(row["step_seconds"] for row in rows)
