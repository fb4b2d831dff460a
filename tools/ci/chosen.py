"""Plugin of pytest: runs the slow tests that `selection.py` chooses, and prints the choice.

python -m pytest -p tools.ci.chosen -m 'slow and not campaign and not gpu'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from tools.ci import change, selection
from tools.ci.results import Results, read
from tools.ci.selection import Case, Selection
from tools.mutants import tables as mutants

NUM_PRINTED = 12
_said: list[str] = []
"""Lines about the selection."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the chosen tests."""
    results = read()
    changed = change.changed_since(results.passed)
    tests = tests_of([item.nodeid for item in items], results=results, changed=changed)
    selected = selection.select(tests, changed=changed)
    names = {test.name for test in selected.chosen}
    _said[:] = report(selected, tests, results=results, changed=changed, what="slow tests")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in names])
    items[:] = [item for item in items if item.nodeid in names]


def pytest_report_collectionfinish() -> list[str]:
    """Prints the selection before the tests."""
    return _said


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A change of texts chooses no test, which is no error."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and _said:
        session.exitstatus = pytest.ExitCode.OK


def tests_of(
    nodeids: Iterable[str], *, results: Results, changed: frozenset[str] | None
) -> list[Case]:
    """Returns slow tests with their known costs, files and last runs.

    Args:
      nodeids: their names.
      results: the result file.
      changed: files that have changed; imports count for those that the last campaign did not know.
    """
    from tests.parallel import LANES

    new = (changed or frozenset()) - results.files
    by_promise: dict[str, set[str]] = {}
    for mutant in mutants.read_all():
        by_promise.setdefault(mutant.promise, set()).update(mutant.files)
    tests = []
    for nodeid in nodeids:
        path, whole = nodeid.partition("::")[0], nodeid.partition("[")[0]
        names = {path} | (change.imported(path) & new)
        for promise in {nodeid, whole, path}:
            names |= by_promise.get(promise, set())
        if (known := results.tests.get(nodeid)) is None:
            tests.append(Case(nodeid, frozenset(names)))
            continue
        seconds = selection.cost(processor=known.processor, wall=known.wall, num_workers=len(LANES))
        tests.append(Case(nodeid, frozenset(names), known.executed, seconds, known.landing))
    return tests


def report(
    selected: Selection,
    tests: Iterable[Case],
    *,
    results: Results,
    changed: frozenset[str] | None,
    what: str,
) -> list[str]:
    """Returns the lines about the chosen tests, and about the left-out ones."""
    tests = list(tests)
    base = "no campaign has passed on an ancestor of this commit: only the share"
    if changed is not None:
        base = f"{len(changed)} files differ from {str(results.passed)[:12]}, which has passed"
    wait = selection.longest_wait(tests, results.landing + 1)
    lines = [
        f"{what}: {base}",
        f"{what}: {len(selected.closest)} of {len(tests)} are close to the change "
        f"({_seconds(selected.closest)} s), {len(selected.share)} have waited longest "
        f"({_seconds(selected.share)} s); the longest wait of any is {wait} landings",
    ]
    if selected.left_out:
        names = " ".join(test.name for test in selected.left_out[:NUM_PRINTED])
        more = len(selected.left_out) - NUM_PRINTED
        lines.append(
            f"{what}: {len(selected.left_out)} that the change can reach are left out: {names}"
            + (f" and {more} more" if more > 0 else "")
        )
    return lines


def _seconds(tests: Iterable[Case]) -> int:
    return round(sum(test.seconds for test in tests))


def mutants_of(known: Mapping[str, mutants.Mutant], *, results: Results) -> list[Case]:
    """Returns the mutants with their known costs, files and last runs."""
    found = []
    for name, mutant in known.items():
        names = frozenset({*mutant.files, mutant.promise.partition("::")[0]})
        entry = results.mutants.get(name)
        if entry is None:
            is_unit = mutant.promise.startswith("tests/unit/")
            found.append(Case(name, names, seconds=UNIT_SECONDS if is_unit else PROMISE_SECONDS))
        else:
            found.append(Case(name, names, frozenset(), entry.wall / 2, entry.landing))
    return found


UNIT_SECONDS, PROMISE_SECONDS = 5.0, 30.0
"""Assumed seconds of a mutant that no result file has: two run at a time."""
