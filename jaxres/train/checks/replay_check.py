"""Computes some steps twice, from the same state and batch, and compares both results.

On the same devices it finds a device that computes wrong numbers now and then, also where no array
has a copy. On rotated devices, each of which computes what another one of its host has computed, it
also finds one that always computes the same wrong number. Which of the two results is right is
unknown, and so is when the fault began: commits after the last replay with equal results are
withdrawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxres.engine.replica_fingerprint import describe
from jaxres.engine.state import TrainState
from jaxres.faults import Continue, Verdict, Warn
from jaxres.runlog.events import Emit
from jaxres.train.checks.replica_check import corruption_verdict


@dataclass(frozen=True)
class Replay:
    """Fingerprints of the states after both computations of a step, and their metrics."""

    fingerprints: tuple[jax.Array, jax.Array]
    metrics: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class RotatedStep:
    """The train step, compiled for the devices of the mesh in another order."""

    move: Callable[[Any], Any]
    """Copies a tree of arrays to the rotated devices; meshes.move."""
    step: Callable[..., tuple[TrainState, jax.Array]]
    """The step, as Trainer.step; donates the state."""
    fingerprints: Callable[[TrainState], jax.Array]
    """State -> a row for each place of the mesh."""
    places: Sequence[int]
    """Place of the mesh -> index of the device that computes its part, in ReplayCheck.devices."""
    is_exact: bool
    """Whether collectives give the same bits in the other order of the devices, for certain."""


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
    rotated: RotatedStep | None = None
    """Computes the replays; None: they are computed on the same devices."""

    def is_due(self, step: int) -> bool:
        """Returns whether a step is computed twice."""
        return step % self.every_steps == 0

    def compute(
        self, step: Callable[..., Any], state: TrainState, inputs: Sequence[Any]
    ) -> tuple[jax.Array, jax.Array]:
        """Computes a step and returns the fingerprints of its result, and its metrics.

        Args:
          step: the step of the run, for replays on the same devices.
          state: the state before it; it is not donated.
          inputs: its other inputs.
        """
        again = self.rotated
        if again is None:
            result, metrics = step(self.copy(state), *inputs)
            return self.fingerprints(result), metrics
        moved, moved_inputs = again.move((state, tuple(inputs)))
        result, metrics = again.step(moved, *moved_inputs)
        return again.fingerprints(result), metrics

    def judge(self, replay: Replay, *, step: int, last_good_step: int, was_equal: bool) -> Verdict:
        """Waits for both results of a step; returns a stop or a warning if they differ.

        Args:
          last_good_step: newest step whose commit is trusted if they differ.
          was_equal: whether an earlier replay on these devices had equal results.
        """
        first_DK, second_DK = (np.asarray(values) for values in replay.fingerprints)
        first, second = (np.asarray(values).tobytes() for values in replay.metrics)
        places = np.flatnonzero((first_DK != second_DK).any(axis=1)).tolist()
        if not places and first == second:
            return Continue()
        suspects = self._suspects(places) or list(range(len(self.devices)))
        how = "" if self.rotated is None else ", again with each device in the place of another one"
        found = (
            f"step {step}: computed twice from the same state and batch{how}, it has two results, "
            f"which differ on {describe(suspects, self.devices)}."
        )
        if self.rotated is not None and not self.rotated.is_exact and not was_equal:
            return Warn(
                f"{found} No replay on rotated devices had equal results in this attempt, so "
                "collectives may add in another order there: replays find nothing here. Set "
                "guards.corruption.replay_on=same."
            )
        reason = (
            f"{found} Step {step} was not saved, and commits after step {last_good_step} are not "
            "trusted."
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

    def _suspects(self, places: Sequence[int]) -> list[int]:
        """Returns the devices that may have computed wrongly, as indices.

        Both devices that have computed the part of a place are suspects: one that is so at every
        place with two results is the only one.
        """
        if not places:
            return []
        found = [
            {place} if self.rotated is None else {place, self.rotated.places[place]}
            for place in places
        ]
        return sorted(set.intersection(*found) or set.union(*found))
