"""Chooses the slow tests and mutants of one run of CI. Pure: no clock, no file, no process.

Of the slow tests, those closest to the change are chosen within CLOSEST_SECONDS: tests and promises
of mutants that name a changed file, then tests that executed one in the last campaign. Then come,
for at least SHARE_SECONDS, those that have gone longest without a run. What a test takes is what
the result file says, so a slower machine chooses the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

CLOSEST_SECONDS = 180.0
SHARE_SECONDS = 120.0
MUTANT_SECONDS = 60.0
NUM_CORES = 2
UNKNOWN_SECONDS = 30.0
"""Assumed seconds of a test that no result file has."""
NO_CODE = ("docs/", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "experiments/")
"""Paths that no slow test runs: a change of these alone chooses none."""


@dataclass(frozen=True)
class Case:
    """A slow test, or a mutant with its promise."""

    name: str
    names: frozenset[str] = frozenset()
    """Files that it names: its own, its imports, files that its mutants change."""
    executed: frozenset[str] = frozenset()
    """Files that it executed in the last campaign."""
    seconds: float = UNKNOWN_SECONDS
    """Seconds that it adds to a run: its share of the cores."""
    landing: int = -1
    """Number of the landing at which it last passed; -1: never."""


@dataclass(frozen=True)
class Selection:
    """The tests of a run of CI, and why."""

    closest: tuple[Case, ...] = ()
    share: tuple[Case, ...] = ()
    left_out: tuple[Case, ...] = ()
    """Close to the change, without room."""

    @property
    def chosen(self) -> tuple[Case, ...]:
        """All tests to run."""
        return (*self.closest, *self.share)


def select(
    tests: Collection[Case],
    *,
    changed: Collection[str] | None,
    closest_seconds: float = CLOSEST_SECONDS,
    share_seconds: float = SHARE_SECONDS,
) -> Selection:
    """Returns the tests to run.

    Args:
      tests: all slow tests.
      changed: changed files, relative to the repository's root; None: no base to compare with is
        known, so only the share is chosen.
      closest_seconds: room for tests that are close to the change.
      share_seconds: least room for those that have waited longest.
    """
    if changed is not None and not is_code(changed):
        return Selection()
    near = by_closeness(tests, changed or ())
    closest, left_out = fill(near, closest_seconds)
    taken = {test.name for test in closest}
    waiting = sorted(
        (test for test in tests if test.name not in taken),
        key=lambda test: (test.landing, test.name),
    )
    share: list[Case] = []
    for test in waiting:
        if sum(one.seconds for one in share) >= share_seconds:
            break
        share.append(test)
    shared = {test.name for test in share}
    left = tuple(test for test in left_out if test.name not in shared)
    return Selection(tuple(closest), tuple(share), left)


def is_code(changed: Iterable[str]) -> bool:
    """Returns whether a change has more than texts."""
    return any(not path.startswith(NO_CODE) for path in changed)


def by_closeness(tests: Collection[Case], changed: Collection[str]) -> list[Case]:
    """Returns the tests that a change can reach, the closest first.

    A test is closer, the fewer others name (or executed) the same changed file.
    """
    code = {path for path in changed if not path.startswith(NO_CODE)}
    naming, executing = (
        _counts(test.names & code for test in tests),
        _counts(test.executed & code for test in tests),
    )

    def distance(test: Case) -> tuple[int, float, str] | None:
        if named := test.names & code:
            return (0, min(naming[path] for path in named), test.name)
        if ran := test.executed & code:
            return (1, min(executing[path] for path in ran), test.name)
        return None

    found = [(far, test) for test in tests if (far := distance(test)) is not None]
    return [test for _, test in sorted(found, key=lambda pair: pair[0])]


def fill(tests: Iterable[Case], seconds: float) -> tuple[list[Case], list[Case]]:
    """Returns the tests that fit in so many seconds, in their order, and the others."""
    taken: list[Case] = []
    left: list[Case] = []
    for test in tests:
        used = sum(one.seconds for one in taken)
        (taken if used + test.seconds <= seconds else left).append(test)
    return taken, left


def cost(*, processor: float, wall: float, num_workers: int) -> float:
    """Returns the time that a test adds to a run with so many workers on NUM_CORES cores."""
    return max(processor / NUM_CORES, wall / num_workers)


def longest_wait(tests: Collection[Case], landing: int) -> int:
    """Returns the landings since the run of the test that has gone longest without one."""
    return max((landing - test.landing for test in tests), default=0)


def _counts(sets: Iterable[Collection[str]]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for paths in sets:
        for path in paths:
            counts[path] = counts.get(path, 0) + 1
    return counts
