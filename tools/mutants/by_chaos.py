"""Which mutants does the default schedule of `jaxres chaos run` catch?

    python tools/mutants/by_chaos.py            those of CAUGHT, with their scenarios
    python tools/mutants/by_chaos.py NAME ...   these
    ... --config CONFIG                         with this config
    ... --only SCENARIO,...                     with these scenarios ("default": default schedule)
    ... --hosts N                               with so many workers
    ... --minutes N                             begin none after N minutes
    ... --at-a-time N                           so many at the same time

A mutant is caught if the command prints a broken promise, or ends with another code than 0. It is
ended at the first broken promise.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.operate.chaos.verdict import PROMISES  # noqa: E402 (of this tree)
from tools.mutants.run import SLOTS  # noqa: E402
from tools.mutants.tables import Mutant, apply, read_all  # noqa: E402
from tools.mutants.trees import copy_tree, python_path  # noqa: E402

BROKEN = re.compile(rf"^  ({'|'.join(map(re.escape, PROMISES))}): ")
LIMIT_SECONDS = 1200
FEATURES = "tools/mutants/chaos.yaml"
"""A config with all that a restart must bring back."""
QUICKSTART = "quickstart"
FAULTY = "tests/promises/faulty.yaml"
TINY = "tests/promises/tiny.yaml"


@dataclass(frozen=True)
class Case:
    """Scenarios, config and topology with which a mutant is tried."""

    only: str = "default"
    """Scenarios; `default`: the whole default schedule."""
    config: str = QUICKSTART
    hosts: int = 1
    devices: int = 1
    """Virtual CPU devices of each worker."""

    @property
    def words(self) -> list[str]:
        """Arguments of `jaxres chaos run`."""
        only = [] if self.only == "default" else ["--only", self.only]
        return [self.config, *only, "--hosts", str(self.hosts)]

    @property
    def env(self) -> dict[str, str]:
        """Variables of its environment."""
        return {"JAX_NUM_CPU_DEVICES": str(self.devices)}


CAUGHT: Mapping[str, Case] = {
    "replayed-steps-counted-as-productive": Case(),
    "gap-between-attempts-lost": Case(),
    "cursor-not-restored": Case(),
    "optimizer-state-dropped": Case(),
    "key-recomputed-from-the-step": Case(),
    "metrics-lines-lost": Case(),
    "directory-taken-for-a-step": Case(),
    "worker-outlives-its-supervisor": Case(),
    "fallback-without-verification": Case("storage-outage,bucket-flip", TINY),
    "committed-before-durable": Case("full-disk", TINY),
    "lost-log-is-a-new-run": Case("lost-log", TINY),
    "failed-save-counts": Case("full-disk", TINY),
    "error-of-a-save-ignored": Case("full-disk", TINY),
    "manifest-before-finalise": Case("notice", TINY),
    "notice-is-no-end-of-the-command": Case("notice", TINY),
    "spread-arrays-without-one-hosts-part": Case("worker-kill", TINY, 2),
    "average-not-restored": Case("notice", FEATURES),
    "batch-statistics-not-restored": Case("notice", FEATURES),
    "loss-scale-reset-at-a-restart": Case("notice", FEATURES),
    "mixture-schedule-from-the-restart": Case("notice", FEATURES),
    "unknown-keys-ignored": Case("bad-config", FAULTY),
    "masked-by-a-product": Case("nan-step", TINY),
    "budget-not-reset": Case("crash-loop", FAULTY),
    "skips-by-the-row": Case("bad-record", TINY),
    "missing-devices-not-noticed": Case("missing-device", FAULTY, devices=2),
    "oom-taken-for-a-bug": Case("out-of-memory", FAULTY),
    "save-before-leaving-ends-as-preempted": Case("unhealthy-device", FAULTY),
    "product-compared-with-the-devices-own": Case("failed-preflight", FAULTY),
    "busy-seconds-include-waits": Case("straggler", FAULTY, 2),
    "adopted-job-begins-again": Case("launcher-kill", TINY),
}
"""Mutant -> the scenarios that suffice, scenarios of the default schedule first, and the config."""


def main(arguments: list[str]) -> int:
    """Prints the scenario that has caught each mutant; returns 0 if all were caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--config")
    parser.add_argument("--only")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--at-a-time", type=int, default=SLOTS)
    options = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in read_all()}
    mutants = [known[name] for name in options.names or CAUGHT]
    given = {key: getattr(options, key) for key in ("config", "only", "hosts")}
    changes = {key: value for key, value in given.items() if value is not None}
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="jaxres-by-chaos-caches-") as caches:

        def try_one(mutant: Mutant) -> bool | None:
            case = replace(CAUGHT.get(mutant.name, Case()), **changes)
            return _try(mutant, case, caches) if time.monotonic() < until else None

        with ThreadPoolExecutor(options.at_a_time) as pool:
            caught = list(pool.map(try_one, mutants))
    print(f"{caught.count(True)} of {len(caught) - caught.count(None)} mutants were caught")
    return 0 if all(caught) else 1


def _try(mutant: Mutant, case: Case, caches: str) -> bool:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxres-by-chaos-") as folder:
        tree = Path(folder, "tree")
        copy_tree(ROOT, tree)
        if why := apply(mutant, tree):
            sys.exit(f"{mutant.name} does not apply: {why}")
        found = _caught_by(tree, case, caches, log=Path(folder, "log"))
    seconds = time.monotonic() - started
    print(f"{mutant.name}: {found or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    return bool(found)


def _caught_by(tree: Path, case: Case, caches: str, *, log: Path) -> str:
    """Runs the command on a mutant; returns the first broken promise, "" if all held."""
    command = [sys.executable, "-m", "jaxres", "chaos", "run", *case.words]
    # Programs are cached by the source of the tree, data by their own.
    command += [f"data.cache_dir={caches}", f"compilation.cache_dir={tree.parent / 'xla'}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": python_path(tree), "TMPDIR": str(tree.parent)}
            | case.env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + LIMIT_SECONDS
    try:
        while time.monotonic() < until:
            code = process.poll()
            broken = [line for line in log.read_text().splitlines() if BROKEN.match(line)]
            if broken:
                return broken[0].strip()[:160]
            if code is not None:
                # One that was killed proves nothing.
                return "" if code <= 0 else f"exit {code}: {log.read_text()[-160:]!r}"
            time.sleep(1.0)
        return f"did not end within {LIMIT_SECONDS} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command and its runs: they end with it (SIGTERM to a group of its own)."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
