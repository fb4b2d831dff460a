"""Applies each mutant to a copy of the tree and holds that its promise turns red, for its reason.

    python tools/mutants/run.py                 all mutants
    python tools/mutants/run.py NAME ...        these
    python tools/mutants/run.py --since COMMIT  those whose files have changed since
    ... --minutes N                             begin none after N minutes; unit promises come first

A mutant is a patch whose first lines say which test must fail and with which assertion text:

    # promise: tests/promises/test_x.py::test_y
    # red with: assert what_must_hold
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_SECONDS = 600
PYTEST = (
    *(sys.executable, "-m", "pytest", "-x", "-n0", "-p", "no:cacheprovider"),
    *("-m", "not campaign and not gpu"),  # Also where the promise is marked as slow.
)
AT_A_TIME = 2
"""They wait for processes and time limits as much as they compute."""


@dataclass(frozen=True)
class Mutant:
    """A wrong change, the promise it breaks, and how the promise must say so."""

    name: str
    patch: Path
    promise: str
    red_with: str
    files: frozenset[str]


def read(patch: Path) -> Mutant:
    """Reads a mutant's header and the files it touches."""
    text = patch.read_text()
    header = dict(re.findall(r"^# (promise|red with): (.+)$", text, re.MULTILINE))
    return Mutant(
        name=patch.stem,
        patch=patch,
        promise=header["promise"],
        red_with=header["red with"],
        files=frozenset(re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)),
    )


def main(arguments: list[str]) -> int:
    """Runs the chosen mutants; 0 if every one of them died for its own reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args(arguments)
    mutants = [read(path) for path in sorted(HERE.glob("*.patch"))]
    mutants.sort(key=lambda mutant: not mutant.promise.startswith("tests/unit/"))
    if options.since:
        changed = _changed_since(options.since)
        mutants = [m for m in mutants if changed & (m.files | {m.promise.partition("::")[0]})]
    if options.names:
        mutants = [m for m in mutants if m.name in options.names]
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="jaxres-mutants-caches-") as caches:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            died = list(pool.map(lambda mutant: _dies(mutant, caches=caches, until=until), mutants))
    survivors = [m.name for m, dead in zip(mutants, died, strict=True) if dead is False]
    not_run = [m.name for m, dead in zip(mutants, died, strict=True) if dead is None]
    print(f"mutants: {died.count(True)} of {len(mutants)} died {survivors or ''}")
    if not_run:
        print(f"{len(not_run)} were not run within {options.minutes:g} minutes: {' '.join(not_run)}")
    return 1 if survivors else 0


def _changed_since(commit: str) -> set[str]:
    listed = subprocess.run(
        ["git", "diff", "--name-only", commit], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(listed.stdout.split())


def _dies(mutant: Mutant, *, caches: str, until: float) -> bool | None:
    """Returns whether its test fails for its reason; None if the time is over."""
    started = time.monotonic()
    if started > until:
        return None
    with tempfile.TemporaryDirectory(prefix="jaxres-mutant-") as folder:
        tree = Path(folder, "tree")
        apply_to_copy(mutant, tree)
        try:
            ended = subprocess.run(
                [*PYTEST, mutant.promise],
                cwd=tree,
                env=_environment(tree, caches),
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            print(f"{mutant.name}: its test did not end within {LIMIT_SECONDS} s")
            return False
    seconds = time.monotonic() - started
    red = ended.returncode == 1
    right = mutant.red_with in _failing_lines(ended.stdout)
    if red and right:
        print(f"{mutant.name}: died ({seconds:.0f} s)", flush=True)
        return True
    why = "died, but for another reason" if red else "SURVIVED"
    print(f"{mutant.name}: {why} ({seconds:.0f} s)\n{ended.stdout[-4000:]}\n{ended.stderr[-2000:]}")
    return False


def _environment(tree: Path, caches: str) -> dict[str, str]:
    """Returns the environment of a mutant's test, the same on every machine.

    Where CI or BUILD_NUMBER is set, pytest words a failing comparison in another way.
    """
    kept = {key: value for key, value in os.environ.items() if key not in ("CI", "BUILD_NUMBER")}
    kept |= {"JAXRES_TEST_SURE_SECONDS": "120"}  # Many mutants only show as a wait without an end.
    return kept | {"PYTHONPATH": str(tree), "JAXRES_TEST_CACHES": caches}


def _failing_lines(report: str) -> str:
    """Returns the lines of pytest's report that name a failing statement or its error.

    The report also prints the source above the statement, with the texts of assertions that hold.
    """
    return "\n".join(line for line in report.splitlines() if re.match(r"[E>]\s", line))


def apply_to_copy(mutant: Mutant, tree: Path) -> None:
    """Copies the working tree, without what git ignores, and applies a mutant to the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in listed.stdout.splitlines():
        if Path(ROOT, name).is_file() or Path(ROOT, name).is_symlink():
            Path(tree, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path(ROOT, name), Path(tree, name), follow_symlinks=False)
    subprocess.run(["patch", "-p1", "-s", "-i", str(mutant.patch)], cwd=tree, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
