"""Evaluation on held-out data: always the same rows, no dropout, no effect on training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres.data import Arrays, Rows
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh import LocalRows
from jaxres.engine.step import BatchArrays
from jaxres.faults import StopRun, Verdict
from jaxres.models import Params

Compiled = Callable[[Params, BatchArrays, jax.Array, Any], jax.Array]
NUM_SUMS = 2


class Listener(Protocol):
    """Interface of the consensus of all hosts, as far as an evaluation uses it."""

    def local_flags(self, *, busy_seconds: float | None) -> Any:
        """Returns this host's flags for the next batch."""
        ...

    def on_flags(self, facts: np.ndarray) -> object:
        """Processes the flags of all hosts."""
        ...

    def verdict(self) -> Verdict:
        """Returns the stop that all hosts have received."""
        ...


def batches(
    heldout: Rows, *, rows_per_batch: int, limit: int, local: LocalRows
) -> Iterator[tuple[Arrays, np.ndarray]]:
    """Yields the first `limit` batches of the held-out rows in order, each with a mask of its rows.

    The last batch is padded with row 0 (mask_B float32: 1 real, 0 padding). Only the local rows of
    each batch are read and yielded.
    """
    for start in range(0, min(len(heldout), limit * rows_per_batch), rows_per_batch):
        ids = start + local.rows
        mask_B = (ids < len(heldout)).astype(np.float32)
        yield heldout.rows(np.where(mask_B > 0, ids, 0)), mask_B


def make(
    eval_step: Compiled, sets: Mapping[str, Rows], *, rows_per_batch: int, limit: int, mesh: Mesh
) -> Callable[[Params, Listener], dict[str, float] | None]:
    """Returns a function from params to the mean loss over the weights of each set.

    If a stop is requested, all hosts stop between the same two batches and the result is None.
    """

    local = meshes.local_rows(mesh, rows_per_batch)

    def evaluate(params: Params, hosts: Listener) -> dict[str, float] | None:
        losses = {}
        for name, rows in sets.items():
            loss = mean_loss(params, rows, hosts)
            if loss is None:
                return None
            losses[name] = loss
        return losses

    def mean_loss(params: Params, heldout: Rows, hosts: Listener) -> float | None:
        sums = np.zeros(NUM_SUMS, np.float64)
        rows = batches(heldout, rows_per_batch=rows_per_batch, limit=limit, local=local)
        for arrays, mask_B in rows:
            if isinstance(hosts.verdict(), StopRun):
                return None
            placed: dict[str, Any] = meshes.place_batch(
                mesh, {**arrays, "mask_B": mask_B}, local=local
            )
            mask = placed.pop("mask_B")
            facts = hosts.local_flags(busy_seconds=None)
            values = np.asarray(eval_step(params, placed, mask, facts), np.float64)
            sums += values[:NUM_SUMS]
            hosts.on_flags(values[NUM_SUMS:])
        return float(sums[0] / sums[1])

    return evaluate
