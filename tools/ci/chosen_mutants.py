"""Runs the mutants that `selection.py` chooses, and says so.

python -m tools.ci.chosen_mutants
"""

from __future__ import annotations

import subprocess
import sys

from tools.ci import change, selection
from tools.ci.chosen import mutants_of, report
from tools.ci.results import BUILD, MUTANTS, ROOT, read
from tools.mutants import tables as mutants


def main() -> int:
    """Returns the exit code of tools/mutants/run.py."""
    results = read()
    changed = change.changed_since(results.passed)
    tests = mutants_of({one.name: one for one in mutants.read_all()}, results=results)
    near, _ = selection.fill(selection.by_closeness(tests, changed or ()), selection.MUTANT_SECONDS)
    room = selection.MUTANT_SECONDS - sum(test.seconds for test in near)
    selected = selection.select(
        tests,
        changed=changed,
        closest_seconds=selection.MUTANT_SECONDS,
        share_seconds=max(0.0, room),
    )
    print("\n".join(report(selected, tests, results=results, changed=changed, what="mutants")))
    if not selected.chosen:
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "tools/mutants/run.py", "--results", str(BUILD / MUTANTS)]
    return subprocess.run([*command, *(test.name for test in selected.chosen)], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
