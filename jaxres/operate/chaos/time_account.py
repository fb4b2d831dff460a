"""Compares the report of a run with independent facts about its time. Pure.

The report places steps by events of monotonic clocks. Here the length comes from the times of the
run log, the training time from the metrics, and the incidents are the injected faults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxres.exit_codes import exit_row
from jaxres.goodput.intervals import Activity
from jaxres.goodput.summary import ROLLED_BACK, CostlyInterruption
from jaxres.operate.resume_verdict import AttemptFacts
from jaxres.runlog.attempt_history import KILLED
from jaxres.runlog.metrics import MetricsLine

SHARE = 1e-3
"""Of the time of a run, that may be missing or too much in its report."""
LEAST_SECONDS = 0.1
"""Least tolerance, of a short run: its records are stamped a little later than their events."""


@dataclass(frozen=True)
class TimeAccount:
    """Where the time of a run went, by its report, and how long it took by its log."""

    by_activity: Mapping[str, float]
    """Seconds of each class."""
    seconds: float
    """Length of the report."""
    wall_seconds: float
    """From the first claim to the end record of the last attempt, by the wall clock."""
    clock_moved_seconds: float = 0.0
    """By how much the wall clock was set while the run was watched."""
    incidents: tuple[CostlyInterruption, ...] = ()

    @property
    def tolerance(self) -> float:
        """Seconds by which lengths may differ."""
        return max(LEAST_SECONDS, SHARE * self.wall_seconds) + self.clock_moved_seconds


def differences(
    account: TimeAccount,
    rows: Sequence[MetricsLine],
    ended: Sequence[tuple[str, AttemptFacts, Collection[int | None]]],
    resumed: Sequence[int | None],
) -> Iterator[str]:
    """Yields each difference between a report and the observed facts.

    Args:
      account: the report.
      rows: the metrics of all attempts, in order.
      ended: of each fault its name, the attempt that it ended, and the exits it may lead to.
      resumed: the step at which the attempt after each fault began; None: it has not trained.
    """
    total = sum(account.by_activity.values())
    if abs(total - account.seconds) > SHARE * account.seconds:
        yield f"the classes sum up to {total:.3f} s, the report is {account.seconds:.3f} s long"
    if abs(account.seconds - account.wall_seconds) > account.tolerance:
        yield (
            f"the report is {account.seconds:.3f} s long, the run took {account.wall_seconds:.3f} s"
        )
    lost = _lost(rows, [one.attempt for _, one, _ in ended], resumed)
    kept = sum(row.step_seconds for row in rows) - sum(row.step_seconds for row in lost)
    useful = account.by_activity[Activity.PRODUCTIVE]
    if useful > kept * (1 + SHARE) + SHARE:
        yield f"{useful:.3f} s are productive, the steps that were kept took {kept:.3f} s"
    yield from _incidents(account, lost, ended)


def _lost(
    rows: Sequence[MetricsLine], attempts: Sequence[int], resumed: Sequence[int | None]
) -> list[MetricsLine]:
    """Returns the steps that were finished before a fault and are not kept after it."""
    found: dict[tuple[int, int, int], MetricsLine] = {}
    for attempt, step in zip(attempts, resumed, strict=True):
        for row in rows:
            if step is not None and row.attempt <= attempt and row.step > step:
                found[row.attempt, row.seq, row.step] = row
    return list(found.values())


def _incidents(
    account: TimeAccount,
    lost: Sequence[MetricsLine],
    ended: Sequence[tuple[str, AttemptFacts, Collection[int | None]]],
) -> Iterator[str]:
    found = [one for one in account.incidents if one.cause != ROLLED_BACK]
    if [one.attempt for one in found] != [attempt.attempt for _, attempt, _ in ended]:
        names = [f"attempt {one.attempt} {one.cause}" for one in found]
        yield f"{len(ended)} fault(s) are {len(found)} incident(s): {', '.join(names)}"
        return
    for incident, (name, attempt, exits) in zip(found, ended, strict=True):
        causes = {KILLED if code is None else exit_row(code).name for code in exits}
        if incident.cause not in causes:
            yield f"the cause of attempt {attempt.attempt} is {incident.cause!r}, it was {name}"
    steps = sum(incident.steps_lost for incident in found)
    has_rollbacks = len(found) < len(account.incidents)  # They have lost some of these steps.
    if steps != len(lost) and not has_rollbacks:
        yield f"{steps} steps are lost by the report, {len(lost)} by the metrics"
