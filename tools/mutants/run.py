"""Applies each mutant to a copy of the tree; its promise must fail, and for a right reason.

    python tools/mutants/run.py                 all mutants
    python tools/mutants/run.py NAME ...        these
    python tools/mutants/run.py --since COMMIT  those whose files have changed since
    ... --minutes N                             begin none after N minutes; unit promises come first
    ... --slots N                               so many at the same time
    ... --results FILE                          append a line of JSON for each one, and leave out
                                                those that have died according to FILE

The mutants are in tests/mutants; `tables.py` says in which form. One dies if a call of its promise
ends with an assertion of the test or with pytest.fail; also with the class that it names, where the
test can only end with another exception. It does not die by a failure at the collection, in a
fixture or by the limit of its time, nor by an assertion of the product. All cases of the promise
run: at least one must fail, and none for a wrong reason. Slow cases run only where no other one
fails, those of a campaign only where there is no other one. No wording is compared. A change with a
syntax error or an undefined name counts as one that does not apply.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # As a script.
    sys.path.insert(0, str(ROOT))

from tools.ci.results import lines  # noqa: E402
from tools.mutants.forks import MODULES, ForkServer, environment  # noqa: E402
from tools.mutants.tables import Mutant, read_all  # noqa: E402
from tools.mutants.trees import Tree, copy_tree, python_path  # noqa: E402

LIMIT_SECONDS = 900.0
SLOTS = 2
"""They wait for processes and time limits as much as they compute."""
PYTEST = ("--workers", "0", "--tb=short", "--show-capture=no")
# The server has imported modules that pytest would have rewritten.
QUIET = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
CAMPAIGN = "campaign and not gpu"
TIERS = ("not campaign and not gpu and not slow", "slow and not campaign and not gpu", CAMPAIGN)
"""The first as in pyproject.toml, since conftest.py compiles fast in it."""
NONE_COLLECTED = 5
Verdict = Literal["died", "survived", "wrong reason", "no verdict", "does not apply", "not run"]


@dataclass(frozen=True)
class Result:
    """Result of a mutant.

    Attributes:
      by: class of the exception that has decided.
      phase: where it was raised: collect, setup, call or teardown.
      log: end of what pytest has printed.
    """

    mutant: str
    verdict: Verdict
    by: str = ""
    phase: str = ""
    seconds: float = 0.0
    reason: str = ""
    digest: str = ""
    log: str = field(default="", repr=False)

    @property
    def line(self) -> str:
        """The line of JSON in the file of the results."""
        facts = {name: value for name, value in asdict(self).items() if name != "log"}
        return json.dumps(facts | {"seconds": round(self.seconds, 1)})

    def __str__(self) -> str:
        """For the terminal: a failure has its reason and the command that repeats it."""
        short = f"{self.mutant}: {self.verdict if self.verdict == 'died' else self.verdict.upper()}"
        if self.verdict == "died":
            return f"{short} by {self.by} ({self.seconds:.1f} s)"
        where = f" ({self.by or 'no exception'} in {self.phase})" if self.phase else ""
        again = f"    again: {sys.executable} tools/mutants/run.py {self.mutant}"
        log = [f"    {line}" for line in self.log.splitlines()]
        return "\n".join([f"{short}{where} ({self.seconds:.1f} s): {self.reason}", *log, again])


def main(arguments: list[str]) -> int:
    """Runs the chosen mutants; 0 if every one that was run has died."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--slots", type=int, default=SLOTS, metavar="N")
    parser.add_argument("--results", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    mutants = _chosen(options.names, since=options.since)
    until = time.monotonic() + 60 * options.minutes
    results = run(mutants, until=until, results=options.results, slots=options.slots)
    counts = {
        verdict: [result.mutant for result in results if result.verdict == verdict]
        for verdict in ("died", "survived", "wrong reason", "no verdict", "does not apply")
    }
    not_run = [result.mutant for result in results if result.verdict == "not run"]
    print(f"mutants: {len(counts['died'])} of {len(mutants)} died")
    for verdict, names in list(counts.items())[1:]:
        if names:
            print(f"{verdict}: {' '.join(names)}")
    if not_run:
        print(f"{len(not_run)} were not run in {options.minutes:g} minutes: {' '.join(not_run)}")
    return 1 if len(counts["died"]) + len(not_run) < len(mutants) else 0


def _chosen(names: Sequence[str], *, since: str | None) -> list[Mutant]:
    mutants = read_all()
    mutants.sort(key=lambda mutant: not mutant.promise.startswith("tests/unit/"))
    if since:
        command = ["git", "diff", "--name-only", since]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        changed = set(listed.stdout.split())
        mutants = [m for m in mutants if changed & (m.files | {m.promise.partition("::")[0]})]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.exit(f"no such mutant, or not changed: {' '.join(sorted(unknown))}")
    return [mutant for mutant in mutants if not names or mutant.name in names]


def run(
    mutants: Sequence[Mutant],
    *,
    until: float = math.inf,
    results: Path | None = None,
    slots: int = SLOTS,
    root: Path = ROOT,
    modules: Sequence[str] = MODULES,
    limit: float = LIMIT_SECONDS,
) -> list[Result]:
    """Runs the mutants; prints each result when it is known and returns all in their order.

    Args:
      mutants: which ones.
      until: begins none after this time of the monotonic clock.
      results: a file with a line of JSON for each; those that have died in it are not run again.
      slots: so many at the same time.
      root: the working tree.
      modules: what the fork server imports.
      limit: seconds after which a test is ended, without a verdict.
    """
    before = _read_results(results)
    known = {m.name: before[m.name, m.digest] for m in mutants if (m.name, m.digest) in before}
    left = [mutant for mutant in mutants if mutant.name not in known]
    if known:
        print(f"{len(known)} have died before, according to {results}")
    writing = threading.Lock()

    def one(mutant: Mutant) -> Result:
        if time.monotonic() > until:
            return Result(mutant.name, "not run")
        result = bench.run(mutant)
        with writing:
            if result.verdict != "not run":
                print(result, flush=True)
                _append(results, result)
        return result

    if left:
        bench = Bench(root, slots=slots, modules=modules, limit=limit)
        with bench, ThreadPoolExecutor(slots) as pool:
            try:
                found = list(pool.map(one, left))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                bench.close()  # Ends the tests for which the threads wait.
                raise
        known |= {result.mutant: result for result in found}
    return [known[mutant.name] for mutant in mutants]


def _read_results(path: Path | None) -> dict[tuple[str, str], Result]:
    """Returns the results of earlier runs in which the mutant died, by its name and digest."""
    if path is None:
        return {}
    results = [Result(**line) for line in lines(path) if line["verdict"] == "died"]
    return {(result.mutant, result.digest): result for result in results}


def _append(path: Path | None, result: Result) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(f"{result.line}\n")


class Bench:
    """A fork server and a tree for each slot."""

    def __init__(self, root: Path, *, slots: int, modules: Sequence[str], limit: float) -> None:
        self._limit = limit
        # Short, since sockets of tests are in it.
        self._folder = Path(tempfile.mkdtemp(prefix="jaxm-")).resolve()
        self._slots: queue.SimpleQueue[tuple[Tree, Path]] = queue.SimpleQueue()
        try:
            copy_tree(root, self._folder / "original")
            self._copy_compiled(root)
            for number in range(slots):
                slot = self._folder / str(number)
                slot.mkdir()
                self._slots.put((Tree(slot / "tree", self._folder / "original"), slot))
            self._server = ForkServer(modules)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy_compiled(self, root: Path) -> None:
        """Copies the compiled programs of the working tree's tests, so that mutants add none."""
        for folder in (root / ".pytest_cache" / "d").glob("xla-*"):
            with contextlib.suppress(shutil.Error):  # Others may be changing it.
                shutil.copytree(folder, self._folder / "cache" / "d" / folder.name)

    def close(self) -> None:
        """Ends the tests that run, which then have the verdict `not run`."""
        self._server.close()

    def run(self, mutant: Mutant) -> Result:
        """Runs the promise of a mutant in a free tree."""
        started = time.monotonic()
        tree, slot = self._slots.get()
        try:
            facts = self._try(mutant, tree, slot)
        finally:
            tree.restore()
            self._slots.put((tree, slot))
        seconds = time.monotonic() - started
        return Result(mutant.name, seconds=seconds, digest=mutant.digest, **facts)

    def _try(self, mutant: Mutant, tree: Tree, slot: Path) -> dict[str, Any]:
        if why := tree.apply(mutant):
            return {"verdict": "does not apply", "reason": why}
        time.sleep(0.02)  # jaxres trusts only files that are older than the process.
        reports: list[dict[str, Any]] = []
        code, log = None, ""
        for tier in TIERS:
            if tier == CAMPAIGN and reports:
                break
            scratch = Path(tempfile.mkdtemp(prefix="", dir=slot))
            try:
                code = self._server.run(self._order(mutant, tree, scratch, tier=tier))
                reports += lines(scratch / "reports")
                if code != NONE_COLLECTED or not log:
                    log = _end_of(scratch / "log")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            if self._server.is_closed:
                return {"verdict": "not run"}
            if code not in (0, NONE_COLLECTED):
                break
        return _judged(code, reports, limit=self._limit) | {"log": log}

    def _order(self, mutant: Mutant, tree: Tree, scratch: Path, *, tier: str) -> dict[str, Any]:
        (scratch / "d").mkdir()
        env = {
            "PYTHONPATH": python_path(tree.folder),
            "TMPDIR": str(scratch / "d"),
            "PWD": str(tree.folder),
            "JAXRES_TEST_CACHES": str(self._folder / "caches"),
        }
        options = [*PYTEST, *QUIET, f"--basetemp={scratch / 't'}", "-m", tier]
        options += ["-o", f"cache_dir={self._folder / 'cache'}"]
        return {
            "tree": str(tree.folder),
            "arguments": [*options, mutant.promise],
            "env": environment() | env,
            "limit": self._limit,
            "raises": mutant.raises,
            "reports": str(scratch / "reports"),
            "log": str(scratch / "log"),
        }


def _judged(code: int | None, reports: Sequence[dict[str, Any]], *, limit: float) -> dict[str, Any]:
    """Returns the verdict and its cause.

    Args:
      code: exit code of pytest; None: ended by the limit.
      reports: what the plugin of the fork server has written.
      limit: seconds.
    """
    failed = [each for each in reports if each["outcome"] == "failed"]
    wrong = [each for each in failed if not each["is_right"]]
    if decisive := (wrong or failed)[:1]:
        facts = {name: decisive[0][name] for name in ("by", "phase", "reason")}
        if wrong:
            return {"verdict": "wrong reason", **facts}
        if code is not None:
            return {"verdict": "died", **facts}
    if code is None:
        return {"verdict": "no verdict", "reason": f"it did not end within {limit:g} s"}
    if code not in (0, 1, NONE_COLLECTED):
        reason = f"pytest ended with {code} without a failed test"
        return {"verdict": "wrong reason", "phase": "collect", "reason": reason}
    outcomes = [each["outcome"] for each in reports]
    if "passed" not in outcomes:
        return {"verdict": "no verdict", "reason": f"no test was run, {len(outcomes)} were skipped"}
    return {"verdict": "survived", "reason": f"{outcomes.count('passed')} tests have passed"}


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
