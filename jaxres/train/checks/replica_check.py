"""Compares the copies of the state on the devices: every so many steps, and before each save.

The fingerprints of a step are dispatched right after it and read at the training loop's lag, so the
devices do not wait for the host. A state that is kept, in a checkpoint or in host memory, is
compared first: no restore finds a state whose copies differed. They change no bit of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxres.engine.replica_fingerprint import Copies, describe
from jaxres.engine.state import TrainState
from jaxres.faults import Continue, StopRun, Verdict, Warn, fault
from jaxres.runlog.events import CorruptionDetected, Emit
from jaxres.telemetry.stdio import format_bytes


@dataclass(frozen=True)
class ReplicaCheck:
    """The comparison of a run's copies."""

    fingerprints: Callable[[TrainState], jax.Array]
    """State -> a row of fingerprints for each device; see engine/replica_fingerprint.py."""
    copies: Copies
    devices: Sequence[Any]
    """Devices of the mesh, in its order."""
    host: int
    """This host."""
    every_steps: int
    mode: Literal["act", "warn"]
    emit: Emit

    def is_due(self, step: int) -> bool:
        """Returns whether the state after a step is compared although it is not saved."""
        return step % self.every_steps == 0

    def judge(self, values: jax.Array, *, step: int) -> Verdict:
        """Waits for the fingerprints after a step; returns a stop or a warning if copies differ."""
        suspects = self.copies.suspects(np.asarray(values))
        if not suspects:
            return Continue()
        return corruption_verdict(
            [self.devices[index] for index in suspects],
            self._reason(suspects, step=step),
            step=step,
            host=self.host,
            mode=self.mode,
            emit=self.emit,
        )

    def _reason(self, suspects: Sequence[int], *, step: int) -> str:
        names = describe(suspects, self.devices)
        text = f"its copy of the state is not the one of the other devices: {names}"
        if len(suspects) > 1:
            text = f"copies of the state differ, on one or more of these devices: {names}"
        return (
            f"step {step}: {text}. A bit has changed in memory, or an operation has given another "
            "result there. No state since the last equal copies was saved."
        )


def corruption_verdict(
    suspects: Sequence[Any],
    reason: str,
    *,
    step: int,
    host: int,
    mode: Literal["act", "warn"],
    emit: Emit,
    last_good_step: int | None = None,
) -> Verdict:
    """Reports silent corruption; returns a stop or a warning.

    Args:
      suspects: devices with a wrong copy or result; where it is unknown, all that may have it.
      reason: what differs.
      step: the step after which it was found.
      mode: the setting `guards.corruption.mode`.
      last_good_step: newest step whose commit is trusted; None: all are.
    """
    hosts = tuple(sorted({device.process_index for device in suspects}))
    emit(CorruptionDetected(step, tuple(device.id for device in suspects), hosts, reason))
    if mode == "warn":
        return Warn(f"{reason} Training goes on (guards.corruption.mode=warn).")
    culprit = None if host in hosts else hosts[0]
    return StopRun(
        fault("silent_corruption"), reason, culprit=culprit, last_good_step=last_good_step
    )


def undetected(copies: Copies) -> str | None:
    """Returns the note on corruption that the comparison can't detect; None: it detects all."""
    total = sum(copies.num_bytes.values())
    alone, pairs = (copies.num_bytes.get(count, 0) for count in (1, 2))
    if not copies.any:
        return (
            "guards.corruption: no array of the state is on more than one device, so there are no "
            "copies to compare: only replays (guards.corruption.replay_every_steps) detect silent "
            "corruption"
        )
    if alone:
        return (
            f"guards.corruption: {alone / total:.1%} of the state ({format_bytes(alone)}) is on "
            "one device only: there only replays (guards.corruption.replay_every_steps) detect "
            "silent corruption"
        )
    if pairs:
        return (
            "guards.corruption: two devices hold each part of the state, so silent corruption is "
            "detected, but not which of the two devices is faulty"
        )
    return None
