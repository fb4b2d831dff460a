"""Finds the time limit of the job that this process belongs to: when a scheduler ends it.

The limit is known from the start, unlike a preemption, so the run trains until just before it:
`preemption.decide` stops it when there is still time for the last save.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from jaxres.faults import UsageError

VARIABLE = "JAXRES_DEADLINE"
"""The end as seconds since the epoch, or `+N`: N seconds after the start of the command; `none`:
there is no limit, and no scheduler is asked."""
SLURM_END = "SLURM_JOB_END_TIME"
"""Set by Slurm 23.02 and later, when the job begins."""
ANSWER_SECONDS = 10.0
"""Longest time that `squeue` may take; the run starts without a known limit after it."""


@dataclass(frozen=True)
class TimeLimit:
    """The job ends by its time limit."""

    seconds_left: float
    source: str
    """Variable or command that it comes from."""


@dataclass(frozen=True)
class Unknown:
    """The job has a scheduler whose time limit could not be read."""

    reason: str


def find(env: Mapping[str, str], *, wall: float) -> TimeLimit | Unknown | None:
    """Returns the time limit of this process's job; None: it has none.

    Only the first task of a Slurm job asks Slurm's controller: its stop is one of all hosts. The
    answer of `squeue` is used rather than the variable because it knows of later changes.

    Args:
      wall: seconds since the epoch.

    Raises:
      UsageError: JAXRES_DEADLINE is set to something else than a time.
    """
    if given := env.get(VARIABLE, ""):
        seconds = parse(given, wall=wall)
        return None if seconds is None else TimeLimit(seconds, VARIABLE)
    job = env.get("SLURM_JOB_ID", "")
    if not job or env.get("SLURM_PROCID", "0") != "0":
        return None
    answer = _ask_slurm(job)
    if answer.strip() == "UNLIMITED":
        return None
    if (left := parse_time_left(answer)) is not None:
        return TimeLimit(left, "squeue")
    if (end := env.get(SLURM_END, "")).isdecimal():
        return TimeLimit(int(end) - wall, SLURM_END)
    return Unknown(
        f"the time limit of this Slurm job is not known (squeue: {answer.strip()[:200] or 'none'});"
        f" {VARIABLE} may name the end"
    )


def parse(text: str, *, wall: float) -> float | None:
    """Returns the seconds until a deadline that JAXRES_DEADLINE names; None: there is no limit.

    >>> parse("+3600", wall=5.0), parse("1800000060", wall=1.8e9), parse("none", wall=5.0)
    (3600.0, 60.0, None)
    """
    if text == "none":
        return None
    if re.fullmatch(r"\+[0-9]{1,10}(\.[0-9]+)?", text):
        return float(text[1:])
    if re.fullmatch(r"[0-9]{10}(\.[0-9]+)?", text):
        return float(text) - wall
    raise UsageError(
        f"{VARIABLE}={text}: expected the end of the job in seconds since the epoch (`date +%s`), "
        "+N for N seconds after the start of this command, or none"
    )


def parse_time_left(text: str) -> float | None:
    """Returns Slurm's time left in seconds; None: no limit, or unknown.

    >>> parse_time_left("1-02:03:04"), parse_time_left("9:05"), parse_time_left("UNLIMITED")
    (93784.0, 545.0, None)
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(86400 * days + 3600 * hours + 60 * minutes + seconds)


def _ask_slurm(job: str) -> str:
    """Returns squeue's output for a job's time left, or the error."""
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr
