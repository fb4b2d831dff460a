"""Runs everything: all tests, all mutants, other versions. An interrupted campaign resumes.

    python -m tools.ci.campaign                    all parts that have not passed on this commit
    python -m tools.ci.campaign --only PART ...    these: fast, slow, mutants, campaign, versions

What has passed is in build/campaign/COMMIT/. After each part the result file of `results.py` gets
what slow tests and mutants took and executed, and the commit for each part that has passed; it
names the commit as passed once every part has passed on it, or is not possible here (another
version of Python). Run it beside other work, once for each issue that is called resolved, and
commit the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.parallel import LANES
from tools.ci import executed, measure
from tools.ci.results import FILE, MUTANTS, ROOT, TESTS, Entry, Results, lines, read, write

PARTS = ("fast", "slow", "mutants", "campaign", "versions")
TIERS = {
    "fast": "not campaign and not gpu and not slow",
    "slow": "slow and not campaign and not gpu",
    "campaign": "campaign and not gpu",
}
OTHER = ("python3.12", "0.11")
"""Another version of Python and jax."""
PTH = "jaxres-campaign.pth"


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if all parts have passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args(arguments)
    commit = _git("rev-parse", "HEAD")
    own = FILE.relative_to(ROOT)  # An earlier part has written it.
    if _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{own}"):
        print("the working tree has changes: commit them first, the result names a commit")
        return 1
    folder = ROOT / "build" / "campaign" / commit
    (folder / "executed").mkdir(parents=True, exist_ok=True)
    codes = {}
    for part in options.only:
        codes[part] = _run(part, folder)
        _note(folder, part, codes[part])
        write(merged(read(), folder, commit=commit))
    print(json.dumps(_parts(folder)))
    return 1 if any(codes.values()) else 0


def _run(part: str, folder: Path) -> int | None:
    """Runs a part; returns its exit code, None if it is not possible here."""
    if part == "versions":
        if shutil.which(OTHER[0]) is None:
            print(f"versions: {OTHER[0]} is not on this machine")
            return None
        return subprocess.run(["tools/versions", *OTHER], cwd=ROOT).returncode
    if part == "mutants":
        command = [sys.executable, "tools/mutants/run.py", "--results", str(folder / MUTANTS)]
        return subprocess.run(command, cwd=ROOT).returncode
    env = os.environ | {measure.LINES: str(folder / TESTS), measure.RESUME: "1"}
    command = [sys.executable, "-m", "pytest", "-p", "tools.ci.measure", "-m", TIERS[part]]
    command += [] if part == "fast" else ["--workers", str(len(LANES))]
    with recorded(folder / "executed"):
        code = subprocess.run(command, cwd=ROOT, env=env).returncode
    return 0 if code == 5 else code  # 5: all of them had passed before.


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Makes every Python process of this environment record its executed files, in the block."""
    path = Path(sysconfig.get_path("purelib"), PTH)
    path.write_text(executed.pth(folder))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def merged(results: Results, folder: Path, *, commit: str) -> Results:
    """Returns the results merged with the results of a campaign.

    Args:
      results: those so far.
      folder: what the campaign has written.
      commit: the commit that it ran on.
    """
    ended = _parts(folder)
    parts = {**results.parts, **{name: commit for name, code in ended.items() if code == 0}}
    has_passed = all(name in ended and ended[name] in (0, None) for name in PARTS)
    passed = commit if has_passed else results.passed
    functions = executed.read(folder / "executed", root=ROOT)
    tests = dict(results.tests)
    for line in lines(folder / TESTS):
        if line["tier"] == "slow" and line["outcome"] == "passed":
            name = line["test"]
            files = frozenset(one.partition(":")[0] for one in functions.get(name, ()))
            tests[name] = Entry(line["wall"], line["processor"], results.landing, files)
    died = dict(results.mutants)
    for line in lines(folder / MUTANTS):
        if line["verdict"] == "died":
            died[line["mutant"]] = Entry(line["seconds"], line["seconds"], results.landing)
    return replace(results, tests=tests, mutants=died, passed=passed, parts=parts)


def _note(folder: Path, part: str, code: int | None) -> None:
    """Records how a part has ended."""
    (folder / "parts.json").write_text(json.dumps(_parts(folder) | {part: code}))


def _parts(folder: Path) -> dict[str, int | None]:
    path = folder / "parts.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
