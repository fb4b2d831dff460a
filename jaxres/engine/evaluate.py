"""Evaluation on held-out data: always the same rows, no dropout, no effect on training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres.data import Arrays, Rows, rows_to_evaluate
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh import LocalRows
from jaxres.engine.step import BatchArrays
from jaxres.faults import StopRun, Verdict
from jaxres.models import Params

Compiled = Callable[[Params, Any, BatchArrays, jax.Array, Any], jax.Array]
LOSS = "loss"
"""Name of the loss among the means of a set."""


class Listener(Protocol):
    """Interface of the consensus of all hosts, as far as an evaluation uses it."""

    def local_flags(self, *, times: None) -> Any:
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

    Raises:
      BadRecord: a row can't be used.
    """
    for start in range(0, min(len(heldout), limit * rows_per_batch), rows_per_batch):
        ids = start + local.rows
        mask_B = (ids < len(heldout)).astype(np.float32)
        yield rows_to_evaluate(heldout, np.where(mask_B > 0, ids, 0)), mask_B


def make(
    eval_step: Compiled,
    sets: Mapping[str, Rows],
    *,
    metrics: tuple[str, ...],
    rows_per_batch: int,
    limit: int,
    mesh: Mesh,
) -> Callable[[Params, Any, Listener], dict[str, dict[str, float]] | None]:
    """Returns a function from the state to the means of the loss and of each metric, by set.

    A set's means begin with LOSS. If a stop is requested, all hosts stop between the same two
    batches and the result is None.
    """

    local, names = meshes.local_rows(mesh, rows_per_batch), (LOSS, *metrics)

    def evaluate(
        params: Params, model_state: Any, hosts: Listener
    ) -> dict[str, dict[str, float]] | None:
        found = {}
        for name, rows in sets.items():
            means = means_of(params, model_state, rows, hosts)
            if means is None:
                return None
            found[name] = means
        return found

    def means_of(
        params: Params, model_state: Any, heldout: Rows, hosts: Listener
    ) -> dict[str, float] | None:
        sums = np.zeros(2 * len(names), np.float64)
        rows = batches(heldout, rows_per_batch=rows_per_batch, limit=limit, local=local)
        for arrays, mask_B in rows:
            if isinstance(hosts.verdict(), StopRun):
                return None
            placed: dict[str, Any] = meshes.place_batch(
                mesh, {**arrays, "mask_B": mask_B}, local=local
            )
            mask = placed.pop("mask_B")
            facts = hosts.local_flags(times=None)
            values = np.asarray(eval_step(params, model_state, placed, mask, facts), np.float64)
            sums += values[: len(sums)]
            hosts.on_flags(values[len(sums) :])
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums[0::2] / sums[1::2]
        return dict(zip(names, means.tolist(), strict=True))

    return evaluate
