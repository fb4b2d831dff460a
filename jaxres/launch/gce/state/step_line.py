"""The line by which `up` shows the newest step of a job. Pure.

Host 0 of an attempt prints its progress (`telemetry/console.py`). Its agent finds the newest of
these lines in the output and sends it with its report, which the controller reads anyway: no
request is added.
"""

from __future__ import annotations

import re

from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.observed_state import ObservedState

PROGRESS = re.compile(r"^step [0-9]+/[0-9]+ · .*$", re.MULTILINE)
"""A line of progress, as `Console` prints it where there is no terminal."""
TAIL_BYTES = 2**13
"""Size of the end of the output that is searched."""


def newest_progress(output: bytes) -> str:
    r"""Returns the newest line of progress in the end of an output; empty: there is none.

    >>> newest_progress("step 1/9 · loss 2.0\nstep 2/9 · loss 1.5 · 80 tok/s\nsaved\n".encode())
    'step 2/9, loss 1.5, 80 tok/s'
    """
    whole = output.decode("utf-8", "replace").rpartition("\n")[0]
    found = PROGRESS.findall(whole)
    return found[-1].replace(" · ", ", ") if found else ""


def next_line(
    desired: DesiredState,
    observed: ObservedState,
    *,
    spent: str,
    printed: str,
    since_seconds: float,
    every_seconds: float,
) -> tuple[str, str] | None:
    """Returns the progress of the attempt and the line to print; None: nothing new, or too soon.

    Args:
      desired: the desired state.
      observed: the observed state.
      spent: what the job has cost so far.
      printed: the progress that was printed last.
      since_seconds: time since then.
      every_seconds: least time between two lines.
    """
    if desired.phase != "running" or since_seconds < every_seconds:
        return None
    report = observed.reports.get(desired.attempt.hosts[0].name)
    if report is None or report.attempt != desired.attempt.number:
        return None
    if not report.progress or report.progress == printed:
        return None
    return report.progress, f"{report.progress}, spent {spent}"
