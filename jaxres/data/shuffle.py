"""Shuffling: maps a position of the stream to a row by arithmetic, without reading the rows before.

Stream position p is offset p % num_rows of epoch p // num_rows, and each epoch is an exact
permutation of the rows with its own keys. The permutation is a Feistel network over digits of two
radices a x b >= num_rows (generalised Feistel: Black and Rogaway, CT-RSA 2002, "Ciphers with
arbitrary finite domains"). A value outside the range is permuted again until it is inside (cycle
walking). a * b exceeds num_rows by less than a, about its square root, so this is rare.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

Skips = Sequence[tuple[int, int]] | NDArray[np.int64]
"""Sorted half-open ranges of stream positions that are not served."""

NUM_ROUNDS = 8
MAX_ROWS = 10**12


def sample_ids_at(
    cursor: int, count: int, *, num_rows: int, seed: int, skips: Skips = ()
) -> tuple[NDArray[np.int64], int]:
    """Returns the ids of the `count` rows served from `cursor` on, and the cursor after them.

    The cursor is the index of the next row of the permuted stream, skipped rows included. The cost
    depends on `count` and on the number of skips, not on the cursor.

    >>> ids, cursor = sample_ids_at(0, 4, num_rows=4, seed=0)
    >>> sorted(ids.tolist()), cursor
    ([0, 1, 2, 3], 4)
    >>> sample_ids_at(0, 4, num_rows=4, seed=0, skips=[(1, 3)])[1]
    6
    """
    _check(cursor, count, num_rows)
    positions = positions_at(cursor, count, skips=skips)
    if count == 0:
        return positions, cursor
    return _ids(positions, num_rows=num_rows, seed=seed), int(positions[-1]) + 1


def batches_at(
    cursor: int, count: int, *, num_batches: int, num_rows: int, seed: int, skips: Skips = ()
) -> dict[int, tuple[NDArray[np.int64], int]]:
    """Returns cursor -> (ids, cursor after them) of consecutive batches of `count` rows.

    Equals successive calls of rows_at, at about the cost of one call.
    """
    _check(cursor, count, num_rows)
    positions = positions_at(cursor, count * num_batches, skips=skips)
    ids = _ids(positions, num_rows=num_rows, seed=seed)
    nexts = (positions[count - 1 :: count] + 1).tolist()
    cursors = [cursor, *nexts[:-1]]
    return {
        at: (ids[i * count : (i + 1) * count], after)
        for i, (at, after) in enumerate(zip(cursors, nexts, strict=True))
    }


def _check(cursor: int, count: int, num_rows: int) -> None:
    if cursor < 0 or count < 0 or not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"no such rows: cursor {cursor}, count {count}, num_rows {num_rows}")


def _ids(positions: NDArray[np.int64], *, num_rows: int, seed: int) -> NDArray[np.int64]:
    """Returns the ids of the rows at ascending stream positions; needs at least one."""
    epochs, offsets = np.divmod(positions, num_rows)
    first = int(epochs[0])
    keys_EK = np.array([epoch_keys(seed, e) for e in range(first, int(epochs[-1]) + 1)], np.uint64)
    keys_BK = keys_EK[epochs - first]
    ids = permute(offsets.astype(np.uint64), num_rows=num_rows, keys_BK=keys_BK)
    return ids.astype(np.int64)


def positions_at(cursor: int, count: int, *, skips: Skips) -> NDArray[np.int64]:
    """Returns the first `count` stream positions at or after `cursor` that no skip covers."""
    ranges = np.array(skips, np.int64).reshape(-1, 2)
    starts, stops = ranges[:, 0], ranges[:, 1]
    if (starts >= stops).any() or (starts[1:] < stops[:-1]).any():
        raise ValueError("skips must be sorted half-open ranges that do not overlap")
    # Ranks number the served positions; a range's rank is that of the first position after it.
    skipped = np.concatenate([[0], np.cumsum(stops - starts)])
    range_ranks = starts - skipped[:-1]
    before = np.clip(cursor - starts, 0, stops - starts).sum()
    ranks = cursor - before + np.arange(count, dtype=np.int64)
    return ranks + skipped[np.searchsorted(range_ranks, ranks, side="right")]


def skip_ranges(
    skips: Skips, bad: Skips, *, num_rows: int, seed: int, num_served: int
) -> NDArray[np.int64]:
    """Returns the skips, extended by the later positions of the rows of the bad ranges.

    Args:
      skips: all skipped ranges.
      bad: those of them whose rows are skipped in every later epoch too.
      num_rows: number of rows of the data set.
      seed: seed of the order.
      num_served: number of rows that the run serves in total; the result is complete up to there.
    """
    ranges = np.array(skips, np.int64).reshape(-1, 2)
    bad_positions = [
        np.arange(start, stop) for start, stop in np.array(bad, np.int64).reshape(-1, 2)
    ]
    if not bad_positions:
        return ranges
    positions = np.unique(np.concatenate(bad_positions))
    # If most rows are bad they may be served again; then the budget of skips ends the run.
    served_an_epoch = max(num_rows - len(positions), num_rows // 2, 1)
    skipped = int((ranges[:, 1] - ranges[:, 0]).sum())
    num_epochs = (num_served + skipped) // served_an_epoch + 2
    later = _later_positions(positions, num_epochs=num_epochs, num_rows=num_rows, seed=seed)
    all_bad = np.unique(np.concatenate([*bad_positions, later]))
    before = np.searchsorted(ranges[:, 0], all_bad, side="right") - 1
    free = all_bad[(before < 0) | (all_bad >= ranges[before, 1])]
    merged = np.concatenate([ranges, np.stack([free, free + 1], axis=1)])
    return merged[np.argsort(merged[:, 0])]


def _later_positions(
    positions: NDArray[np.int64], *, num_epochs: int, num_rows: int, seed: int
) -> NDArray[np.int64]:
    """Returns the positions of the same rows in the epochs after their own."""
    ids, epochs = _ids(positions, num_rows=num_rows, seed=seed), positions // num_rows
    first = int(epochs[0]) + 1
    all_epochs = np.arange(first, max(first, num_epochs))
    which, row = np.nonzero(all_epochs[:, None] > epochs[None, :])
    keys_EK = np.array([epoch_keys(seed, int(epoch)) for epoch in all_epochs], np.uint64)
    keys_BK = keys_EK.reshape(-1, NUM_ROUNDS)[which]
    offsets = inverse_permute(ids[row].astype(np.uint64), num_rows=num_rows, keys_BK=keys_BK)
    return all_epochs[which] * num_rows + offsets.astype(np.int64)


@lru_cache(maxsize=4096)
def epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Returns the round keys of one epoch; hashed, so that (5, 1) and (6, 0) are unrelated.

    (grain 0.2.18 adds them: its epoch 1 of seed 5 is epoch 0 of seed 6.)
    """
    keys = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * NUM_ROUNDS).digest()
    return tuple(np.frombuffer(keys, "<u8").tolist())


def permute(
    values: NDArray[np.uint64], *, num_rows: int, keys_BK: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Returns the image of each value in [0, num_rows) under the permutation of its keys."""
    return _cycle_walk(values, num_rows=num_rows, keys_BK=keys_BK, rounds=_feistel)


def inverse_permute(
    images: NDArray[np.uint64], *, num_rows: int, keys_BK: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Returns the value that `permute` maps to each image (its inverse)."""
    return _cycle_walk(images, num_rows=num_rows, keys_BK=keys_BK, rounds=_inverse_feistel)


def _cycle_walk(
    values: NDArray[np.uint64],
    *,
    num_rows: int,
    keys_BK: NDArray[np.uint64],
    rounds: Callable[..., NDArray[np.uint64]],
) -> NDArray[np.uint64]:
    """Applies a permutation of a larger range until each value is back in [0, num_rows)."""
    radix_a = math.isqrt(num_rows - 1) + 1
    radix_b = -(-num_rows // radix_a)
    outside = np.arange(len(values))
    # A cycle is outside the range for at most as many steps as values are outside it.
    for _ in range(radix_a * radix_b - num_rows + 1):
        values = values.copy()
        values[outside] = rounds(values[outside], radix_a, radix_b, keys_BK[outside])
        outside = np.flatnonzero(values >= num_rows)
        if len(outside) == 0:
            return values
    raise AssertionError("the cycle walk did not return into the range")


def _inverse_feistel(
    values: NDArray[np.uint64], radix_a: int, radix_b: int, keys_BK: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Inverts `_feistel`, last round first."""
    a, b = np.uint64(radix_a), np.uint64(radix_b)
    left, right = values // b, values % b
    for k in reversed(range(0, NUM_ROUNDS, 2)):
        right = (right + b - _hash(left ^ keys_BK[:, k + 1]) % b) % b
        left = (left + a - _hash(right ^ keys_BK[:, k]) % a) % a
    return left * b + right


def _feistel(
    values: NDArray[np.uint64], radix_a: int, radix_b: int, keys_BK: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permutes [0, radix_a * radix_b): each round adds a hash of one digit to the other."""
    a, b = np.uint64(radix_a), np.uint64(radix_b)
    left, right = values // b, values % b
    for k in range(0, NUM_ROUNDS, 2):
        left = (left + _hash(right ^ keys_BK[:, k]) % a) % a
        right = (right + _hash(left ^ keys_BK[:, k + 1]) % b) % b
    return left * b + right


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes 64-bit integers (the finaliser of splitmix64, Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_digest(ids: NDArray[np.int64]) -> str:
    """Returns xxh3-64 of the ids as little-endian int64, in order, as 16 hex digits.

    >>> sample_digest(np.arange(3)) == sample_digest(np.arange(3)[::-1])
    False
    """
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(ids, "<i8").tobytes())
