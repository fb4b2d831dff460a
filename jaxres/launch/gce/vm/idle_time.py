"""For how long a VM has been idle: it trains nothing, and no launcher leads the job. Pure.

A launcher deletes the VMs of a job that has ended. Without one they would exist until
`launch.gce.max_run_hours`. An agent powers its VM off before that, which needs no permission; a VM
that is off costs its disk only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_GAP_SECONDS = 60.0
"""Most that one observation adds: an agent that was suspended observes nothing."""


@dataclass(frozen=True)
class IdleTime:
    """Idle time measured by one agent, on its own clock."""

    seconds: float = 0.0
    at: float | None = None
    """Time of the last observation."""
    lease: int | None = None
    """Generation of the launcher lease then; None: not read yet."""


def next_idle(before: IdleTime, *, now: float, is_training: bool, lease: int | None) -> IdleTime:
    """Returns the idle time after an observation.

    A lease that has changed was renewed or taken by a launcher.

    Args:
      before: the idle time at the last observation.
      now: the time.
      is_training: whether the VM has a training process.
      lease: generation of the launcher lease; 0: there is none; None: the bucket has not answered,
        and the time is not counted.
    """
    if is_training:
        return replace(before, seconds=0.0, at=now)
    if lease is None:
        return replace(before, at=now)
    if lease != before.lease or before.at is None:
        return IdleTime(0.0, now, lease)
    return IdleTime(before.seconds + min(MAX_GAP_SECONDS, now - before.at), now, lease)
