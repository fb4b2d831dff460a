"""`up` prints the newest step of host 0 with the costs, at most every so many seconds."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console as Terminal

from jaxres.clock import SystemClock
from jaxres.launch.gce.state.observed_state import AgentReport
from jaxres.launch.gce.state.step_line import newest_progress, next_line
from jaxres.telemetry.console import Console
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce.decide.test_reconcile import NAMES, RUNNING, observed

REPORT = AgentReport("running", "boot", RUNNING.attempt.number, progress="step 2/9, loss 1.5000")
SEEN = replace(observed(), reports={NAMES[0]: REPORT})


def line(world: object = SEEN, *, printed: str = "", since: float = 60.0) -> object:
    limits = {"since_seconds": since, "every_seconds": 10.0}
    return next_line(RUNNING, world, spent="$1.20", printed=printed, **limits)  # type: ignore


def test_the_newest_step_is_printed_with_the_costs() -> None:
    assert line() == (REPORT.progress, "step 2/9, loss 1.5000, spent $1.20")


def test_nothing_is_printed_too_soon_twice_of_another_attempt_or_without_progress() -> None:
    assert line(since=9.0) is None
    assert line(printed=REPORT.progress) is None
    older = replace(REPORT, attempt=RUNNING.attempt.number - 1)
    none = replace(REPORT, progress="")
    for report in (older, none):
        assert line(replace(SEEN, reports={NAMES[0]: report})) is None
    assert line(replace(SEEN, reports={NAMES[1]: REPORT})) is None, "only host 0 prints steps"
    idle = changed(RUNNING, phase="placing", hosts=())
    found = next_line(idle, SEEN, spent="$1", printed="", since_seconds=60.0, every_seconds=10.0)
    assert found is None


def test_the_agent_finds_the_progress_that_the_console_prints() -> None:
    output = io.StringIO()
    terminal = Terminal(file=output, width=200, force_terminal=False)
    with Console(attempt=1, log_every_seconds=60.0, clock=SystemClock(), terminal=terminal) as to:
        to.print("step 1: not this one")
        to.print(EXAMPLE)
    found = newest_progress(output.getvalue().encode() + "step 3/9 · half a li".encode())
    assert found == EXAMPLE.replace(" · ", ", ")
    assert AgentReport.of(replace(REPORT, progress=found).metadata()) == replace(
        REPORT, progress=found
    )


EXAMPLE = "step 2/9 · loss 1.5000 · grad 0.1000 · 1,200 tok/s · committed 0 · attempt 1"
