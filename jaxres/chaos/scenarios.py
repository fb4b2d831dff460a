"""The scenarios of `jaxres chaos`: what each injects, and what a run must do then. Pure.

A scenario acts from outside: by signals, or on the files of a run that has stopped. Production code
does not know of it. `runs.py` has the function that injects each.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from jaxres.exit_codes import SIGNAL_BASE, ExitCode

KILLED = SIGNAL_BASE + signal.SIGKILL
ChecklistKind = Literal["node_kill", "partition", "corruption"]
"""What the production checklist asks for: a killed host, a cut network, a damaged checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of fault, and the limits of its recovery."""

    name: str
    injects: str
    promise: str
    """What must hold, besides what holds in every run (verdict.py)."""
    ends: frozenset[int | None]
    """Exits of the attempt that the fault may end; None: it leaves no stop record."""
    lost_intervals: int
    """Most steps that are computed again, in save intervals."""
    at_save: bool = False
    """Whether it is injected after a step that is saved."""
    damages: bool = False
    """Whether the newest step must be found damaged, and an older one restored."""
    is_alone: bool = False
    """Whether a run has no second fault: it needs settings of its own, or another directory."""
    checklist_kind: ChecklistKind | None = None
    """Which item of `jaxres doctor`'s checklist it is a test of."""


NOTICE_ENDS: frozenset[int | None] = frozenset({ExitCode.PREEMPTED})
ALL = (
    Scenario(
        name="worker-kill",
        injects="SIGKILL to a worker between two steps",
        promise="the supervisor restarts it; at most a save interval is lost",
        ends=frozenset({KILLED}),
        lost_intervals=1,
        checklist_kind="node_kill",
    ),
    Scenario(
        name="notice",
        injects="SIGTERM to the supervisor, as before a preemption; then the same command",
        promise="the run saves and exits with PREEMPTED; no step is lost",
        ends=NOTICE_ENDS,
        lost_intervals=0,
    ),
    Scenario(
        name="hang",
        injects="SIGSTOP to a worker",
        promise="the watchdog kills it within deadlines.hook_seconds (set to 5)",
        ends=frozenset({ExitCode.HUNG}),
        lost_intervals=2,  # It does not wait for the commit of the save in flight.
        is_alone=True,
    ),
    Scenario(
        name="supervisor-kill",
        injects="SIGKILL to the supervisor; then the same command",
        promise="no worker outlives it; the command resumes; at most a save interval is lost",
        ends=frozenset({None}),
        lost_intervals=1,
        checklist_kind="node_kill",
    ),
    Scenario(
        name="kill-in-save",
        injects="SIGKILL to the worker of host 0 while a save is written",
        promise="the unfinished save is never restored, and deleted",
        ends=frozenset({KILLED}),
        lost_intervals=2,
        at_save=True,
    ),
    Scenario(
        name="bit-flip",
        injects="flips a bit of an array in the newest checkpoint, while the run is stopped",
        promise="the damage is found and recorded; the newest whole step is restored",
        ends=NOTICE_ENDS,
        lost_intervals=1,
        damages=True,
        checklist_kind="corruption",
    ),
    Scenario(
        name="lost-file",
        injects="deletes a data file of the newest checkpoint, while the run is stopped",
        promise="the damage is found and recorded; the newest whole step is restored",
        ends=NOTICE_ENDS,
        lost_intervals=1,
        damages=True,
        checklist_kind="corruption",
    ),
    Scenario(
        name="torn-line",
        injects="half a line at the end of metrics and events, while the run is stopped",
        promise="no other line is lost or damaged; the run resumes",
        ends=NOTICE_ENDS,
        lost_intervals=0,
    ),
    Scenario(
        name="region-loss",
        injects="deletes the run directory of a killed run that has a replica",
        promise="the same command resumes in the replica; prints RPO (steps) and RTO (seconds)",
        ends=frozenset({None}),
        lost_intervals=1,  # It waits until the replica has the newest commit.
        is_alone=True,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in ALL}
