"""Computes some steps twice, on the same devices from the same state and batch, and compares them.

It finds a device that computes wrong numbers now and then, also where no array has a copy. Which of
the two results is right is unknown, and so is when the fault began: commits after the last replay
with equal results are withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxres.engine.replica_fingerprint import describe
from jaxres.engine.state import TrainState
from jaxres.faults import Continue, Verdict
from jaxres.runlog.events import Emit
from jaxres.train.replica_check import corruption_verdict


@dataclass(frozen=True)
class Replay:
    """Fingerprints of the states after both computations of a step, and their metrics."""

    fingerprints: tuple[jax.Array, jax.Array]
    metrics: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class ReplayCheck:
    """The replays of a run."""

    copy: Callable[[TrainState], TrainState]
    """Copies a state on its devices; a step donates it."""
    fingerprints: Callable[[TrainState], jax.Array]
    """State -> a row for each device, of all its parts of the state."""
    devices: Sequence[Any]
    """Devices of the mesh, in its order."""
    host: int
    """This host."""
    every_steps: int
    mode: Literal["act", "warn"]
    emit: Emit

    def is_due(self, step: int) -> bool:
        """Returns whether a step is computed twice."""
        return step % self.every_steps == 0

    def judge(self, replay: Replay, *, step: int, last_good_step: int) -> Verdict:
        """Waits for both results of a step; returns a stop or a warning if they differ."""
        first_DK, second_DK = (np.asarray(values) for values in replay.fingerprints)
        first, second = (np.asarray(values).tobytes() for values in replay.metrics)
        suspects = np.flatnonzero((first_DK != second_DK).any(axis=1)).tolist()
        if not suspects and first == second:
            return Continue()
        suspects = suspects or list(range(len(self.devices)))
        reason = (
            f"step {step}: computed twice from the same state and batch, it has two results, which "
            f"differ on {describe(suspects, self.devices)}. Step {step} was not saved, and commits "
            f"after step {last_good_step} are not trusted."
        )
        return corruption_verdict(
            [self.devices[index] for index in suspects],
            reason,
            step=step,
            host=self.host,
            mode=self.mode,
            emit=self.emit,
            last_good_step=last_good_step,
        )
