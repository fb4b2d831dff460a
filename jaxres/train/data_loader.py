"""Data loader: reads batches ahead and places them on the devices, in the background."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres import data
from jaxres.config.schema.data import DataSection
from jaxres.config.schema.run_config import TrainSection
from jaxres.data import Batch, Dataset, DataTimeout, Mixture, Order
from jaxres.engine import device_use
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh import LocalRows
from jaxres.runlog.events import PhaseChanged
from jaxres.runlog.run_log import RunHistory
from jaxres.train.components import BadRows, BatchAt, DataLoader, PlacedBatch
from jaxres.train.context import AttemptContext

PROBE_SHARE = 0.5
"""Share of data.timeout_seconds that a single row may take, after a batch has timed out."""
MAX_REPORTED = 5
"""Largest number of bad rows of a batch that the reason lists."""


def open_data_loader(
    dataset: Dataset,
    mesh: Mesh,
    context: AttemptContext,
    stack: contextlib.ExitStack,
    *,
    section: DataSection,
    train: TrainSection,
    leaves_out: bool,
    seed: int,
) -> DataLoader:
    """Returns the data loader of a data set; `stack` closes the stream that was opened last.

    With `leaves_out` a batch with unusable rows becomes `BadRows`, else their error is raised.
    """
    global_batch_size = train.global_batch_size
    local = meshes.local_rows(mesh, global_batch_size)
    order = dataset.order(seed=seed, rows_per_step=global_batch_size)
    reading = stack.enter_context(contextlib.ExitStack())

    def open_at(history: RunHistory) -> BatchAt:
        reading.close()  # Batches that were read ahead may have rows to leave out from now on.
        skips = data.skip_ranges(
            order, history.skips, history.bad_rows, num_served=train.steps * global_batch_size
        )
        batch_at = data.batch_at(
            dataset.train,
            order,
            global_batch_size=global_batch_size,
            skips=skips,
            local=local.rows,
        )
        prefetch = data.Prefetch(
            batch_at,
            depth=section.prefetch_batches,
            timeout_seconds=section.timeout_seconds,
            place=functools.partial(_place, mesh, local),
        )
        source = _BatchSource(reading.enter_context(prefetch), context)
        if not leaves_out:
            return source.at
        rows = _Rows(dataset, order, mesh, local, skips)
        return _IsolatingSource(source, rows, PROBE_SHARE * section.timeout_seconds).at

    return DataLoader(
        open=open_at,
        num_rows=len(dataset.train),
        tokens_per_step=dataset.tokens_of(global_batch_size),
        rows_per_step=global_batch_size,
        epochs=order.epochs if isinstance(order, Mixture) else lambda cursor: {},
    )


def _place(mesh: Mesh, local: LocalRows, batch: Batch) -> PlacedBatch:
    """Places a batch that was read ahead on the devices, while they train."""
    with device_use.background():
        placed = meshes.place_batch(mesh, meshes.pack(batch.arrays), local=local)
        return batch, jax.block_until_ready(placed)


def showing_first_batch(loader: DataLoader, show: Callable[[Batch], None]) -> DataLoader:
    """Returns a data loader that calls `show` with the first batch of each segment of training."""

    def open_at(history: RunHistory) -> BatchAt:
        batch_at, is_shown = loader.open(history), False

        def at(cursor: int) -> PlacedBatch | BadRows | None:
            nonlocal is_shown
            placed = batch_at(cursor)
            if not is_shown and isinstance(placed, tuple):
                is_shown = True
                show(placed[0])
            return placed

        return at

    return replace(loader, open=open_at)


@dataclass(frozen=True)
class _BatchSource:
    """The batches of one segment of training."""

    prefetch: data.Prefetch[PlacedBatch]
    context: AttemptContext

    def at(self, cursor: int) -> PlacedBatch | None:
        """Waits for a batch; None: a stop is requested, and this host is alone."""
        waits = 0

        def give_up() -> bool:
            nonlocal waits
            waits += 1
            if waits == 1:
                self.context.emit(PhaseChanged("wait for data"))
            # Other hosts may have entered the step already and would wait in it.
            return (
                self.context.peers.member.is_alone
                and self.context.requests.requested_stop() is not None
            )

        batch = self.prefetch.get(cursor, give_up=give_up)
        if waits:
            self.context.emit(PhaseChanged("train"))
        return batch


@dataclass(frozen=True)
class _Rows:
    """The rows behind the batches of one segment."""

    dataset: Dataset
    order: Order
    mesh: Mesh
    local: LocalRows
    skips: data.Skips

    def ids_at(self, cursor: int) -> tuple[np.ndarray, int]:
        """Returns the ids of a whole batch, and the cursor after it."""
        return data.sample_ids_at(self.order, cursor, self.local.num_rows, skips=self.skips)

    def local_ids(self, cursor: int) -> np.ndarray:
        """Returns the ids of this host's share of a batch."""
        return self.ids_at(cursor)[0][self.local.rows]

    def positions(self, cursor: int, indices: list[int]) -> list[int]:
        """Returns the positions in the stream of some rows of this host's share of a batch."""
        positions = data.positions_at(cursor, self.local.num_rows, skips=self.skips)
        return [int(positions[self.local.rows[index]]) for index in indices]

    def replacement(self, cursor: int) -> PlacedBatch:
        """Returns a batch with the shapes of a real one; it repeats one row."""
        ids, next_cursor = self.ids_at(cursor)
        row = data.first_row(self.dataset.train)
        arrays = {name: np.repeat(x, len(self.local.rows), axis=0) for name, x in row.items()}
        placed = meshes.place_batch(self.mesh, meshes.pack(arrays), local=self.local)
        return Batch(arrays=arrays, ids=ids, cursor=cursor, next_cursor=next_cursor), placed


class _IsolatingSource:
    """The batches of one segment, up to the first one with unusable rows, which it finds."""

    def __init__(self, source: _BatchSource, rows: _Rows, probe_seconds: float) -> None:
        self._source = source
        self._rows = rows
        self._probe_seconds = probe_seconds
        self._bad: BadRows | None = None

    def at(self, cursor: int) -> PlacedBatch | BadRows | None:
        """Waits for a batch as `_Source.at` does; after bad rows it returns only bad rows."""
        if self._bad is not None:
            return self._bad_rows(cursor, self._bad.rows, self._bad.reason)
        try:
            return self._source.at(cursor)
        except DataTimeout as error:
            found = self._find_hung(cursor)
            if not found:
                raise error from None
        except Exception as error:
            if not data.is_record_fault(error):
                raise
            found = data.find_bad_rows(self._rows.dataset.train, self._rows.local_ids(cursor))
            if not found:  # The failure did not repeat, so it is no proof against a record.
                raise
        positions = self._rows.positions(cursor, list(found))
        reasons = [
            f"position {position} of the stream: {reason}"
            for position, reason in zip(positions, found.values(), strict=True)
        ]
        more = f"; and {len(reasons) - MAX_REPORTED} more" if len(reasons) > MAX_REPORTED else ""
        rows = tuple((position, position + 1) for position in positions)
        return self._bad_rows(cursor, rows, "; ".join(reasons[:MAX_REPORTED]) + more)

    def _bad_rows(self, cursor: int, rows: tuple[tuple[int, int], ...], reason: str) -> BadRows:
        is_alone = self._source.context.peers.member.is_alone
        self._bad = BadRows(rows, reason, None if is_alone else self._rows.replacement(cursor))
        return self._bad

    def _find_hung(self, cursor: int) -> dict[int, str]:
        """Returns the row whose read times out although other rows are read; empty: no such row."""
        context, seconds = self._source.context, self._probe_seconds
        context.emit(PhaseChanged("wait for data", "looking for the row whose read hangs"))
        index = data.find_hung_row(
            self._rows.dataset.train, self._rows.local_ids(cursor), seconds=seconds
        )
        context.emit(PhaseChanged("train"))
        if index is None:
            return {}
        row = data.describe_row(self._rows.dataset.train, self._rows.local_ids(cursor)[index])
        return {index: f"{row} can't be read within data.timeout_seconds, other rows can"}
