"""The batches on their way: read and laid on the devices ahead of time, in the background."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxres import data
from jaxres.config.schema import DataSection, TrainSection
from jaxres.data import Batch, Dataset, DataTimeout
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh import LocalRows
from jaxres.runlog.events import PhaseChanged
from jaxres.runlog.run_log import Line
from jaxres.train.components import At, Bad, Fed, Feed
from jaxres.train.context import Seat

PROBE_SHARE = 0.5
"""Of data.timeout_seconds: how long a single row may take, once a batch has not come in time."""
MAX_TOLD = 5
"""Rows whose faults are told, of a batch that has more."""


def open_feed(
    dataset: Dataset,
    mesh: Mesh,
    seat: Seat,
    stack: contextlib.ExitStack,
    *,
    section: DataSection,
    train: TrainSection,
    leaves_out: bool,
    seed: int,
) -> Feed:
    """Returns the batches of a data set; `stack` ends what was opened last.

    With `leaves_out` rows that can't be used are told as `Bad`, else their error is raised.
    """
    global_batch_size = train.global_batch_size
    local = meshes.local_rows(mesh, global_batch_size)
    reading = stack.enter_context(contextlib.ExitStack())

    def laid(batch: Batch) -> Fed:
        return batch, meshes.place_batch(mesh, batch.arrays, local=local)

    def open_at(line: Line) -> At:
        reading.close()  # What was read ahead may have rows that are left out from now on.
        skips = data.left_out(
            line.skips,
            line.bad_rows,
            num_rows=len(dataset.train),
            seed=seed,
            num_served=train.steps * global_batch_size,
        )
        batch_at = data.batch_at(
            dataset.train,
            seed=seed,
            global_batch_size=global_batch_size,
            skips=skips,
            local=local.rows,
        )
        prefetch = data.Prefetch(
            batch_at,
            depth=section.prefetch_batches,
            timeout_seconds=section.timeout_seconds,
            place=laid,
        )
        source = _Source(reading.enter_context(prefetch), seat)
        if not leaves_out:
            return source.at
        rows = _Rows(dataset, mesh, local, skips, seed=seed)
        return _Watched(source, rows, PROBE_SHARE * section.timeout_seconds).at

    return Feed(
        open=open_at,
        num_rows=len(dataset.train),
        tokens_per_step=global_batch_size * dataset.tokens_per_row,
    )


@dataclass(frozen=True)
class _Source:
    """The batches of one segment."""

    prefetch: data.Prefetch[Fed]
    seat: Seat

    def at(self, cursor: int) -> Fed | None:
        """Waits for a batch; None: gave up, since this host is alone and a stop is asked."""
        waits = 0

        def give_up() -> bool:
            nonlocal waits
            waits += 1
            if waits == 1:
                self.seat.emit(PhaseChanged("wait for data"))
            # The others are in the step already, and can't be called back.
            return self.seat.peers.member.is_alone and self.seat.requests.stop_asked() is not None

        fed = self.prefetch.get(cursor, give_up=give_up)
        if waits:
            self.seat.emit(PhaseChanged("train"))
        return fed


@dataclass(frozen=True)
class _Rows:
    """The rows behind the batches of one segment."""

    dataset: Dataset
    mesh: Mesh
    local: LocalRows
    skips: data.Skips
    seed: int

    def ids_at(self, cursor: int) -> tuple[np.ndarray, int]:
        """Returns the ids of a whole batch, and the cursor after it."""
        return data.rows_at(
            cursor,
            self.local.num_rows,
            num_rows=len(self.dataset.train),
            seed=self.seed,
            skips=self.skips,
        )

    def mine(self, cursor: int) -> np.ndarray:
        """Returns the ids of this host's part of a batch."""
        return self.ids_at(cursor)[0][self.local.rows]

    def positions(self, cursor: int, indices: list[int]) -> list[int]:
        """Returns where in the stream some rows of this host's part of a batch lie."""
        positions = data.positions_at(cursor, self.local.num_rows, skips=self.skips)
        return [int(positions[self.local.rows[index]]) for index in indices]

    def instead(self, cursor: int) -> Fed:
        """Returns a batch of the shapes of a real one, of a row that was read when all began."""
        ids, next_cursor = self.ids_at(cursor)
        one = self.dataset.train.rows(np.zeros(1, np.int64))
        arrays = {name: np.repeat(x, len(self.local.rows), axis=0) for name, x in one.items()}
        placed = meshes.place_batch(self.mesh, arrays, local=self.local)
        return Batch(arrays=arrays, ids=ids, cursor=cursor, next_cursor=next_cursor), placed


class _Watched:
    """The batches of one segment, up to the first that has rows which can't be used."""

    def __init__(self, source: _Source, rows: _Rows, probe_seconds: float) -> None:
        self._source = source
        self._rows = rows
        self._probe_seconds = probe_seconds
        self._bad: Bad | None = None

    def at(self, cursor: int) -> Fed | Bad | None:
        """Waits for a batch as `_Source.at` does; after bad rows there is none any more."""
        if self._bad is not None:
            return self._told(cursor, self._bad.rows, self._bad.reason)
        try:
            return self._source.at(cursor)
        except DataTimeout as error:
            found = self._hung(cursor)
            if not found:
                raise error from None
        except Exception as error:
            if not data.is_its_own(error):
                raise
            found = data.bad_rows(self._rows.dataset.train, self._rows.mine(cursor))
            if not found:  # One wrong read proves nothing: it ends as it always has.
                raise
        positions = self._rows.positions(cursor, list(found))
        reasons = [
            f"position {position} of the stream: {why}"
            for position, why in zip(positions, found.values(), strict=True)
        ]
        more = f"; and {len(reasons) - MAX_TOLD} more" if len(reasons) > MAX_TOLD else ""
        rows = tuple((position, position + 1) for position in positions)
        return self._told(cursor, rows, "; ".join(reasons[:MAX_TOLD]) + more)

    def _told(self, cursor: int, rows: tuple[tuple[int, int], ...], reason: str) -> Bad:
        is_alone = self._source.seat.peers.member.is_alone
        self._bad = Bad(rows, reason, None if is_alone else self._rows.instead(cursor))
        return self._bad

    def _hung(self, cursor: int) -> dict[int, str]:
        """Returns the row that does not come although others do, if it is one."""
        seat, seconds = self._source.seat, self._probe_seconds
        seat.emit(PhaseChanged("wait for data", "looking for the row that does not come"))
        index = data.hung_row(self._rows.dataset.train, self._rows.mine(cursor), seconds=seconds)
        seat.emit(PhaseChanged("train"))
        if index is None:
            return {}
        row = self._rows.mine(cursor)[index]
        return {index: f"row {row} does not come, within data.timeout_seconds, while others do"}
