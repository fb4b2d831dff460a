"""Mixture: rows of several sources in one stream, by weights that may change at stated steps.

Which source a position of the stream has is a pure function of the position. A *phase* is a range
of positions with constant weights. It is divided into blocks of BLOCK_ROWS positions, in each of
which every source has the number of rows that its weight says, at positions drawn by a hash. So the
share of a source is exact over each block. Each source's rows come in its own order, `Permutation`,
by counting its rows in the stream: changed weights neither repeat nor leave out rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.data.batching import Arrays, Rows
from jaxres.data.shuffle import Permutation, hash_uint64
from jaxres.faults import ConfigError
from jaxres.storage.checksummed_json import canonical_json

SOURCE_KEY = "source_B"
"""Name of the array with the number of each row's source."""
BLOCK_ROWS = 65_536
"""Positions of a block. A weight is rounded to this fraction of the sum of all weights."""


@dataclass(frozen=True)
class MixturePart:
    """A source of a mixture."""

    order: Permutation
    weight: float
    """Share of the rows, relative to the other sources; 0: none before a change."""
    epochs: int | None = None
    """How often each row is served; then the weight goes to the other sources. None: no limit."""

    @property
    def limit(self) -> int | None:
        """Number of rows that the source has in the whole stream."""
        return None if self.epochs is None else self.epochs * self.order.num_rows


Change = tuple[int, Mapping[str, float]]
"""(number of the last step with the weights before, new weight of each source by name)."""


@dataclass(frozen=True)
class Phase:
    """A range of positions with constant weights; it ends where the next one begins."""

    start: int
    quotas: tuple[int, ...]
    """Rows of each source in a block of BLOCK_ROWS positions."""
    before: tuple[int, ...]
    """Rows of each source at positions before `start`."""


@dataclass(frozen=True)
class MixtureBlock:
    """Which source each position of a block has."""

    parts: NDArray[np.int64]
    """Offset in the block -> number of the source."""
    ranks: NDArray[np.int64]
    """Offset in the block -> rows of that source at smaller offsets."""
    offsets: tuple[NDArray[np.int64], ...]
    """Number of the source -> its offsets in the block, ascending."""


@dataclass(frozen=True)
class Mixture:
    """Order of several sources. An id is row * number of sources + number of the source."""

    parts: tuple[MixturePart, ...]
    phases: tuple[Phase, ...]
    seed: int

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids of the rows at ascending stream positions; needs at least one."""
        which, ranks = self._ranks(positions)
        ids = np.empty(len(positions), np.int64)
        for number in np.unique(which).tolist():
            of_part = which == number
            rows = self.parts[number].order.ids(ranks[of_part])
            ids[of_part] = rows * len(self.parts) + number
        return ids

    def later_positions(
        self, positions: NDArray[np.int64], *, num_served: int
    ) -> NDArray[np.int64]:
        """Returns the positions at which the rows of these ascending positions come again.

        The result is complete up to where a run ends that serves `num_served` rows, unless more
        than half of the rows are bad.
        """
        which, ranks = self._ranks(positions)
        ends = self.rows_by_part(2 * num_served + BLOCK_ROWS)
        found = []
        for number in np.unique(which).tolist():
            order = self.parts[number].order
            again = order.later_positions(ranks[which == number], num_served=ends[number])
            found.append(self._positions(number, np.sort(again)))
        return np.unique(np.concatenate(found))

    def rows_by_part(self, position: int) -> list[int]:
        """Returns the number of rows of each source at positions before this one."""
        phase = next(phase for phase in reversed(self.phases) if phase.start <= position)
        return _rows_by_part(phase, position, self.seed)

    def epochs(self, position: int) -> dict[str, float]:
        """Returns the epochs of each source at positions before this one, by name."""
        rows = self.rows_by_part(position)
        return {
            part.order.name: count / part.order.num_rows
            for part, count in zip(self.parts, rows, strict=True)
        }

    def _ranks(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each position, and how many rows it has before."""
        starts = np.array([phase.start for phase in self.phases])
        numbers = np.searchsorted(starts, positions, side="right") - 1
        blocks, offsets = np.divmod(positions - starts[numbers], BLOCK_ROWS)
        which, ranks = np.empty_like(positions), np.empty_like(positions)
        for number, block in np.unique(np.stack([numbers, blocks]), axis=1).T.tolist():
            here, phase = (numbers == number) & (blocks == block), self.phases[number]
            found = _block(self.seed, phase.start, block, phase.quotas)
            which[here] = found.parts[offsets[here]]
            base = np.array(phase.before) + block * np.array(phase.quotas)
            ranks[here] = base[which[here]] + found.ranks[offsets[here]]
        return which, ranks

    def _positions(self, number: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the stream positions of rows of a source, without rows it never has."""
        befores = np.array([phase.before[number] for phase in self.phases])
        found = []
        for index, phase in enumerate(self.phases):
            here = ranks[np.searchsorted(befores, ranks, side="right") - 1 == index]
            if len(here) and phase.quotas[number]:
                found.append(_positions(phase, number, here, self.seed))
        return np.concatenate(found) if found else np.empty(0, np.int64)


def mix(
    parts: Sequence[MixturePart], changes: Sequence[Change], *, seed: int, rows_per_step: int
) -> Mixture:
    """Returns the order of a mixture.

    Args:
      parts: the sources.
      changes: changes of the weights, ascending.
      seed: seed of the positions of each source.
      rows_per_step: rows of a step; the weights change at multiples of it, skipped rows included.

    Raises:
      ConfigError: from some position on, no source has rows left.
    """
    weights, limits = [part.weight for part in parts], [part.limit for part in parts]
    start, before = 0, [0] * len(parts)
    upcoming = [(step * rows_per_step, new) for step, new in changes]
    phases: list[Phase] = []
    while True:
        if upcoming and upcoming[0][0] == start:
            weights = [upcoming[0][1][part.order.name] for part in parts]
            upcoming = upcoming[1:]
        left = [
            weight if limit is None or rows < limit else 0.0
            for weight, limit, rows in zip(weights, limits, before, strict=True)
        ]
        if not any(left):
            raise ConfigError(
                f"data.source.sources: after step {start // rows_per_step:,} no source with a "
                "weight has rows left: all of them have had their `epochs`. Leave `epochs` out for "
                "one source with a weight, or give more."
            )
        phase = Phase(start, quotas(left), tuple(before))
        phases.append(phase)
        ends = [at for at, _ in upcoming[:1]] + [
            int(_positions(phase, number, np.array([limit - 1]), seed)[0]) + 1
            for number, limit in enumerate(limits)
            if limit is not None and phase.quotas[number]
        ]
        if not ends:
            return Mixture(tuple(parts), tuple(phases), seed)
        start = min(ends)
        before = _rows_by_part(phase, start, seed)


def mixture_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """Returns the fingerprint of a mixture from its sources' fingerprints, by name, in order."""
    return xxhash.xxh3_128_hexdigest(canonical_json(list(map(list, fingerprints.items()))))


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the rows of each source in a block, by largest remainder; a weight has at least one.

    >>> quotas([0.7, 0.3, 0.0])
    (45875, 19661, 0)
    """
    shares = np.array(weights) / sum(weights) * BLOCK_ROWS
    counts = np.floor(shares).astype(np.int64)
    largest = np.argsort(counts - shares, kind="stable")
    counts[largest[: BLOCK_ROWS - int(counts.sum())]] += 1
    for number in np.flatnonzero((counts == 0) & (shares > 0)):
        counts[number] += 1
        counts[np.argmax(counts)] -= 1
    return tuple(counts.tolist())


@lru_cache(maxsize=256)
def _block(seed: int, start: int, block: int, quotas: tuple[int, ...]) -> MixtureBlock:
    """Returns a block of the phase that begins at `start`."""
    key = hashlib.blake2b(f"mixture {seed} {start} {block}".encode(), digest_size=8).digest()
    hashes = hash_uint64(np.arange(BLOCK_ROWS, dtype=np.uint64) ^ np.frombuffer(key, "<u8"))
    shuffled = np.argsort(hashes, kind="stable")
    ends = np.cumsum((0, *quotas)).tolist()
    offsets = tuple(np.sort(shuffled[first:end]) for first, end in pairwise(ends))
    parts, ranks = np.empty(BLOCK_ROWS, np.int64), np.empty(BLOCK_ROWS, np.int64)
    for number, own in enumerate(offsets):
        parts[own] = number
        ranks[own] = np.arange(len(own))
    return MixtureBlock(parts, ranks, offsets)


def _rows_by_part(phase: Phase, position: int, seed: int) -> list[int]:
    """Returns the number of rows of each source before a position of the phase, or its end."""
    block, offset = divmod(position - phase.start, BLOCK_ROWS)
    found = _block(seed, phase.start, block, phase.quotas)
    return [
        before + block * quota + int(np.searchsorted(own, offset))
        for before, quota, own in zip(phase.before, phase.quotas, found.offsets, strict=True)
    ]


def _positions(phase: Phase, number: int, ranks: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Returns the positions of the rows of a source that has some in the phase."""
    blocks, within = np.divmod(ranks - phase.before[number], phase.quotas[number])
    offsets = np.empty_like(ranks)
    for block in np.unique(blocks).tolist():
        own = _block(seed, phase.start, block, phase.quotas).offsets[number]
        offsets[blocks == block] = own[within[blocks == block]]
    return phase.start + blocks * BLOCK_ROWS + offsets


@dataclass(frozen=True)
class MixedRows:
    """The rows of several sources, under the ids of `Mixture`."""

    parts: Mapping[str, Rows]
    """Name of the source -> its rows."""

    def __len__(self) -> int:
        """Number of rows of all sources."""
        return sum(len(rows) for rows in self.parts.values())

    def rows(self, ids: NDArray[np.int64]) -> Arrays:
        """Returns the rows' arrays, stacked in the order of `ids`; raises BadRecord."""
        own, which = np.divmod(ids, len(self.parts))
        arrays: dict[str, NDArray[np.generic]] = {SOURCE_KEY: which.astype(np.int32)}
        for number, rows in enumerate(self.parts.values()):
            of_part = which == number
            if not of_part.any():
                continue
            for key, values in rows.rows(own[of_part]).items():
                if key not in arrays:
                    arrays[key] = np.empty((len(ids), *values.shape[1:]), values.dtype)
                arrays[key][of_part] = values
        return arrays


def describe_row(rows: Rows, row_id: int) -> str:
    """Returns which row an id means, such as "web, row 3 of 10"."""
    if isinstance(rows, MixedRows):
        own, which = divmod(row_id, len(rows.parts))
        name = list(rows.parts)[which]
        return f"{name}, {describe_row(rows.parts[name], own)}"
    epoch, row = divmod(row_id, len(rows))
    return f"row {row:,} of {len(rows):,}" + (f", epoch {epoch}" if epoch else "")
