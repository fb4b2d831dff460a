"""Kills runs with SIGKILL at random times and at chosen places, and compares how they end.

    python tools/campaign/kills.py --kills 1175 --minutes 10    the next slice of 1,175 kills
    ... --seed 1                                                other runs
    ... --only "save,any time"                                  these places alone
    ... --run 12                                                one run again, recorded or not

A run of 60 steps takes 5 to 10 kills and must end as the unbroken run, see experiments/campaign.
A slice goes on where the last one ended: what kills.jsonl has is not repeated. A run that breaks a
promise keeps its directory. Exit 0: every promise held.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.host import proc_stat  # noqa: E402
from jaxres.operate.resume_verdict import RunFacts  # noqa: E402 (the tree of this file)
from jaxres.storage.path import GcsPath  # noqa: E402
from tests.promises import forks  # noqa: E402
from tests.promises.trainer import Workspace  # noqa: E402
from tools.campaign import results  # noqa: E402
from tools.campaign.bucket import KillingServer  # noqa: E402
from tools.campaign.killed_run import Execution, unbroken  # noqa: E402
from tools.campaign.plan import PLACES, RunPlan, plan_run, schedule  # noqa: E402
from tools.campaign.verdict import judge  # noqa: E402
from tools.campaign.waits import Timing, measured  # noqa: E402

HERE = ROOT / "experiments" / "campaign"
BUILD = ROOT / "build" / "campaign"
"""Folder that later slices use too."""
CACHES = BUILD / "caches"
BUCKET = "bucket"
MORE_SPARES = 2
"""For fork servers that follow a killed one. Each spare is a fork of a large process."""
CHANGED = "+changes"
"""End of a commit's name if the tree is not the commit's."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Slice:
    """One call of the command."""

    folder: Path
    unbroken: Path
    """Folder of the unbroken runs."""
    server: KillingServer
    seed: int
    only: tuple[str, ...]
    record: Path
    commit: str
    """The tree's when the slice began."""
    references: dict[tuple[int, int], RunFacts] = field(default_factory=dict)
    timings: dict[tuple[int, str], Timing] = field(default_factory=dict)
    """Hosts and storage -> times of their newest attempt that ended by itself."""
    workspaces: list[Workspace] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    """Runs that broke a promise."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _cpu: float = 0.0

    def reference(self, plan: RunPlan) -> RunFacts:
        """Returns the unbroken run of a plan's config, on a disk; it is made once a commit."""
        key = (plan.hosts, plan.run_seed)
        with self._lock:
            if key not in self.references:
                name = f"unbroken-{plan.hosts}-{plan.run_seed}"
                workspace = self._workspace(self.unbroken, name)
                facts, timing = unbroken(workspace, plan, name)
                self.references[key] = facts
                self.timings.setdefault((plan.hosts, "disk"), timing)
                slower = Timing(2 * timing.startup, 10 * timing.step)  # The pace is another.
                self.timings.setdefault((plan.hosts, "bucket"), slower)
            return self.references[key]

    def _workspace(self, folder: Path, name: str, storage: str = "disk") -> Workspace:
        root = folder / name
        root.mkdir(parents=True, exist_ok=True)
        bucket = GcsPath(BUCKET, "runs") if storage == "bucket" else None
        workspace = Workspace(root, CACHES, bucket=bucket, more_spares=MORE_SPARES)
        self.workspaces.append(workspace)
        return workspace

    def run(self, plan: RunPlan) -> None:
        """Carries out a plan, judges the run and records it."""
        reference, key = self.reference(plan), (plan.hosts, plan.storage)
        began = time.monotonic()
        with self._lock:
            workspace = self._workspace(self.folder, f"{plan.number:04d}", plan.storage)
        execution = Execution(workspace, plan, self.timings[key], self.server)
        seen, landed = execution.execute()
        broken = judge(reference, seen)
        if seen.run.attempts and not broken:
            timing = measured(workspace.run_dir(execution.name), seen.run.attempts[-1])
            self.timings[key] = timing or self.timings[key]
        line = {
            "commit": self.commit,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seed": self.seed,
            "run": plan.number,
            "only": list(self.only),
            "hosts": plan.hosts,
            "storage": plan.storage,
            "run_seed": plan.run_seed,
            "kills": [asdict(kill) for kill in landed],
            "missed": execution.missed,
            "attempts": len(seen.run.attempts),
            "starts": [attempt.start_step for attempt in seen.run.attempts],
            "expected": asdict(self.timings[key]),
            "seconds": round(time.monotonic() - began, 1),
            "outcome": list(broken) or results.HELD,
        }
        with self._lock:
            self._reap()
            spent, self._cpu = cpu_seconds() - self._cpu, cpu_seconds()
            results.append(self.record, line | {"cpu_seconds": round(spent, 2)})
            self._report(plan, line, broken, workspace)

    def _report(
        self, plan: RunPlan, line: results.Line, broken: Sequence[str], workspace: Workspace
    ) -> None:
        name = f"run {plan.number} ({plan.hosts} hosts, {plan.storage})"
        numbers = f"{len(line['kills'])} kills, {line['attempts']} attempts, {line['seconds']} s"
        print(f"{name}: {numbers}: {'BROKEN' if broken else results.HELD}", flush=True)
        if not broken:
            shutil.rmtree(workspace.root, ignore_errors=True)
            return
        self.bad.append(plan.number)
        if plan.storage == "bucket":
            self._keep_objects(workspace, f"runs/run-{plan.number:04d}/")
        only = f" --only '{','.join(self.only)}'" if self.only else ""
        for text in broken:
            print(f"  {text}")
        print(f"  kept: {workspace.root}")
        print(
            f"  again: python tools/campaign/kills.py --seed {self.seed}{only} --run {plan.number}"
        )

    def _keep_objects(self, workspace: Workspace, prefix: str) -> None:
        for name in self.server.names(prefix):
            path = workspace.root / "objects" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.body(name))

    def _reap(self) -> None:
        """Reaps workers whose supervisor was killed, so that their CPU time is counted."""
        own = {trainer.process.pid for one in self.workspaces for trainer in one.trainers}
        own |= {server.process.pid for server in forks._servers.values()}
        for children in Path("/proc/self/task").glob("*/children"):
            for pid in map(int, children.read_text().split()):
                if pid not in own and proc_stat.read_proc_stat(pid).state == "Z":
                    os.waitpid(pid, os.WNOHANG)

    def end(self) -> None:
        """Ends the processes that still run."""
        for workspace in self.workspaces:
            workspace.end_all()


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of all processes that it has reaped."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def commit_of() -> str:
    """Returns the commit of this tree, marked if the tree is another."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "jaxres", "tests", "tools")
    return git("rev-parse", "--short", "HEAD") + (CHANGED if changed else "")


def main(arguments: Sequence[str]) -> int:
    """Carries out a slice; 0: every promise held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=1000, help="planned kills; one in seven comes too late"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    parser.add_argument("--only", default="", metavar="PLACE,...", help=", ".join(PLACES))
    parser.add_argument("--run", type=int, help="this run alone; it is not recorded")
    parser.add_argument("--at-a-time", type=int, default=3, help="runs at the same time")
    parser.add_argument("--to", type=Path, default=HERE, help="folder of kills.jsonl and README.md")
    options = parser.parse_args(arguments)
    only = tuple(filter(None, options.only.split(",")))
    if unknown := set(only) - set(PLACES):
        parser.error(f"unknown place: {', '.join(sorted(unknown))}")
    record = options.to / "kills.jsonl"
    planned = schedule(options.seed, kills=options.kills, only=only)
    plans = results.left(planned, results.read(record), seed=options.seed, only=only)
    folder = Path(tempfile.mkdtemp(prefix="jaxres-campaign-"))
    if options.run is not None:
        plans, record = [plan_run(options.seed, options.run, only)], folder / "kills.jsonl"
    bad = run_slice(plans, options, folder, record=record, only=only)
    if options.run is None and (options.to / "README.md").exists():
        results.write_tables(options.to / "README.md", results.read(record))
    if not bad:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


def run_slice(
    plans: Sequence[RunPlan],
    options: argparse.Namespace,
    folder: Path,
    *,
    record: Path,
    only: tuple[str, ...],
) -> list[int]:
    """Carries out plans until the time is over; returns the runs that broke a promise."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.environ["HOME"] = str(folder)  # A run in a bucket stores some files there.
    until = time.monotonic() + 60 * options.minutes
    with KillingServer(buckets=(BUCKET,)) as server:
        os.environ.update(server.env)
        server.objects.refuses_too_often = True
        commit = commit_of()
        # Of a tree that has changed, no later slice can use anything.
        runs = folder if commit.endswith(CHANGED) else BUILD / commit
        one = Slice(folder, runs, server, options.seed, only, record, commit)
        one._cpu = cpu_seconds()

        def run(plan: RunPlan) -> None:
            if time.monotonic() < until:
                one.run(plan)

        try:
            with ThreadPoolExecutor(options.at_a_time) as pool:
                list(pool.map(run, plans))
        finally:
            one.end()
        assert server.bugs == [], server.bugs[0]
    return one.bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
