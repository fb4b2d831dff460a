"""Benchmark of a restart: from SIGKILL of a worker to its next completed step, by phase.

    python tools/bench/restart.py [--repeats 3] [CONFIG] [section.field=value ...]

Caches are warm, the kinds interleaved: `new` is a new process that traces and takes the steps from
JAX's cache, `kept` one that loads them from ours, `forked` is forked from the fork server and
loads them. `floor` is a bare script that imports, builds, takes the same steps from JAX's own
cache, restores with Orbax and runs one step, measured from its start. Waits
(restart.backoff_seconds) are set to 0.
"""

from __future__ import annotations

import argparse
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

from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events, read_json_lines
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import RunPath
from jaxres.train.worker import NAME_PREFIX

ROOT = Path(__file__).resolve().parents[2]
RATIOS = (("new", "floor"), ("kept", "floor"), ("forked", "new"), ("forked", "kept"))
KINDS = {
    "new": ("restart.fork=false", "compilation.keep_programs=0"),
    "kept": ("restart.fork=false",),
    "forked": (),
}
CPU = "CPU of the worker"
"""CPU seconds of the worker up to that step; unaffected by other load on the machine."""
PARTS = ("detect", "start", "import", "data", "build", "compile", "restore", "first step", "total")
LONGEST_SECONDS = 300.0


def wait(condition: Callable[[], Any], what: str) -> Any:
    """Waits until a condition returns a true value, and returns it."""
    until = time.monotonic() + LONGEST_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, what
        time.sleep(0.002)
    return found


def event(path: RunPath, kind: str) -> dict[str, Any] | None:
    """Returns the first event of a kind."""
    return next((e for e in read_events(path) if e["event"] == kind), None)


def worker_of(supervisor: int) -> int:
    """Returns the pid of the one worker."""
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().startswith(NAME_PREFIX):
            return int(child)
    raise AssertionError("no worker")


def measure(command: list[str], run_dir: RunDir, *, forked: bool) -> dict[str, float]:
    """Starts a supervised run, kills its worker, and returns the seconds of each part."""
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: run_log.fold(run_log.read_records(run_dir.log)).step, "a commit")
        if forked:
            wait(lambda: event(run_dir.supervisor_events, "fork_server_ready"), "a fork server")
            time.sleep(1)  # It has just used much of the cores.
        killed_at = time.monotonic()
        os.kill(worker_of(supervisor.pid), signal.SIGKILL)
        wait(lambda: read_json_lines(run_dir.metrics(2)), "a step")
        stepped_at, cpu_seconds = time.monotonic(), cpu_of(worker_of(supervisor.pid))
    finally:
        supervisor.kill()
        supervisor.wait()
    return split(run_dir, killed_at, stepped_at, forked=forked) | {CPU: cpu_seconds}


def cpu_of(pid: int) -> float:
    """Returns the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def split(
    run_dir: RunDir, killed_at: float, stepped_at: float, *, forked: bool
) -> dict[str, float]:
    """Returns the parts, by the monotonic clock that all processes of this machine share."""
    decided = event(run_dir.supervisor_events, "attempt_restarted")
    opened = event(run_dir.events(2, 0), "run_opened")
    assert decided is not None
    assert opened is not None
    assert opened["forked"] == forked
    seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    seconds["detect"] = decided["monotonic"] - killed_at
    seconds["start"] = opened["monotonic"] - decided["monotonic"]
    since, phase = opened["monotonic"], "import"
    for one in read_events(run_dir.events(2, 0)):
        if one["event"] == "phase_changed":
            seconds[phase] += one["monotonic"] - since
            since, phase = one["monotonic"], one["phase"]
            if phase == "train":
                break
    seconds["first step"] = stepped_at - since
    seconds["total"] = stepped_at - killed_at
    return seconds


def floor(run_dir: RunDir, caches: Path) -> dict[str, float]:
    """Runs the bare script, and returns the seconds from its start to the end of its step."""
    command = [sys.executable, __file__, "--floor", str(run_dir.root), str(caches)]
    began = time.monotonic()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    stepped_at, cpu_seconds = map(float, output.splitlines()[-1].split())
    return {"total": stepped_at - began, CPU: cpu_seconds}


def bare(run_dir: RunDir, caches: Path) -> None:
    """Does the minimum of a restart, and prints when it was done."""
    import jax
    import numpy as np

    from jaxres import config as configs
    from jaxres.checkpoint.restore.load_arrays import load
    from jaxres.data import dataset
    from jaxres.data.tokens.token_folder import open_tokens
    from jaxres.engine import mesh as meshes
    from jaxres.engine import schedule
    from jaxres.engine.state import from_plain, to_plain
    from jaxres.train.compiled import assemble, compile_cache, jitted_steps

    config = configs.load_recorded(run_dir.attempt(1) / "config.yaml", ()).config
    compile_cache.use_compilation_cache(caches / "floor")
    (corpus,) = (caches / "corpora").iterdir()
    rows = dataset._tokens(open_tokens(corpus), None, config.data)
    plan, mesh, _ = assemble.devices_here(config)
    parts = assemble.components(config, rows, plan=plan, mesh=mesh, platform=jax.default_backend())
    step = jitted_steps.traced_step(parts).lower().compile()
    jitted_steps.traced_evaluation(parts, facts=None, rows=plan.rows_at_once).lower().compile()
    commit = run_log.fold(run_log.read_records(run_dir.log)).newest
    assert commit is not None
    like = to_plain(parts.shapes)
    state = load((run_dir.root / commit.path).absolute(), like)
    local = meshes.local_rows(mesh, parts.rows_per_batch)
    some = rows.train.rows(np.arange(parts.rows_per_batch))
    placed = meshes.place_batch(mesh, meshes.pack(some), local=local)
    rate = schedule.rate_arrays(config.optimizer.learning_rate, mesh)(1.0)
    _, metrics = step(from_plain(state), placed, None, rate)
    metrics.block_until_ready()
    print(time.monotonic(), time.process_time(), flush=True)
    os._exit(0)


def rounds(folder: Path, arguments: list[str], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Returns the parts of every restart by kind; the first round fills the caches."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in (*KINDS, "floor")}
    caches = folder / "caches"
    shared = [f"data.cache_dir={caches}", f"compilation.cache_dir={caches / 'xla'}"]
    shared += ["restart.backoff_seconds=0", "checkpoint.save_every_steps=2", "--hosts", "1"]
    for number in range(repeats + 1):
        for kind, own in KINDS.items():
            run_dir = RunDir(folder / f"{kind}{number}")
            command = [sys.executable, "-m", "jaxres.launch", "local", arguments[0], *shared, *own]
            command += [f"run.dir={run_dir.root}", *arguments[1:]]
            found[kind].append(measure(command, run_dir, forked=kind == "forked"))
        found["floor"].append(floor(RunDir(folder / f"kept{number}"), caches))
    return {kind: runs[1:] for kind, runs in found.items()}


def main() -> None:
    """Prints a table: one row a part, one column a kind of restart; then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = ROOT / "configs" / "quickstart.yaml"
    parser.add_argument("config", nargs="?", default=str(default))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--floor", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor:
        bare(RunDir(options.floor[0]), options.floor[1])
    with tempfile.TemporaryDirectory() as folder:
        table(rounds(Path(folder), [options.config, *options.overrides], options.repeats))


def table(found: dict[str, list[dict[str, float]]]) -> None:
    """Prints medians and ratios."""
    print(f"load: {Path('/proc/loadavg').read_text().split()[0]}")
    repeats = len(found["floor"])
    print(f"{f'seconds (median of {repeats})':<24}" + "".join(f"{k:>10}" for k in found))
    for part in (*PARTS, CPU):
        cells = [statistics.median(run.get(part, 0.0) for run in runs) for runs in found.values()]
        print(f"{part:<24}" + "".join(f"{cell:>10.2f}" for cell in cells))
    for above, below in RATIOS:
        for part in ("total", CPU):
            pairs = zip(found[above], found[below], strict=True)
            ratios = sorted(one[part] / other[part] for one, other in pairs)
            middle = statistics.median(ratios)
            print(f"{above} / {below}, {part}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
