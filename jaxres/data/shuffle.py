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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8
MAX_ROWS = 10**12


@dataclass(frozen=True)
class Permutation:
    """Order of one source: in every epoch each row once, in an order of its own."""

    num_rows: int
    seed: int
    name: str = ""
    """Name of the source within a mixture, whose sources are shuffled independently."""
    epoch_in_ids: bool = False
    """Whether an id is epoch * num_rows + row, for rows that differ from epoch to epoch."""

    def __post_init__(self) -> None:
        """Raises ValueError if there are no rows, or too many."""
        if not 1 <= self.num_rows <= MAX_ROWS:
            raise ValueError(f"can't shuffle {self.num_rows} rows; 1 to {MAX_ROWS} are possible")

    def ids(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the ids of the rows at ascending stream positions; needs at least one."""
        epochs, rows = self._rows(positions)
        return epochs * self.num_rows + rows if self.epoch_in_ids else rows

    def later_positions(
        self, positions: NDArray[np.int64], *, num_served: int
    ) -> NDArray[np.int64]:
        """Returns the positions of the same rows in the epochs after their own.

        The result is complete up to where a run ends that serves `num_served` rows, unless more
        than half of the rows are bad.
        """
        # If most rows are bad they may be served again; then the budget of skips ends the run.
        served_an_epoch = max(self.num_rows - len(positions), self.num_rows // 2, 1)
        num_epochs = num_served // served_an_epoch + 2
        epochs, rows = self._rows(positions)
        first = int(epochs[0]) + 1
        all_epochs = np.arange(first, max(first, num_epochs))
        which, index = np.nonzero(all_epochs[:, None] > epochs[None, :])
        offsets = inverse_permute(
            rows[index].astype(np.uint64),
            num_rows=self.num_rows,
            keys_BK=self._keys(all_epochs)[which],
        )
        return all_epochs[which] * self.num_rows + offsets.astype(np.int64)

    def _rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the epochs and rows of ascending positions."""
        epochs, offsets = np.divmod(positions, self.num_rows)
        first = int(epochs[0])
        keys_EK = self._keys(np.arange(first, int(epochs[-1]) + 1))
        rows = permute(
            offsets.astype(np.uint64), num_rows=self.num_rows, keys_BK=keys_EK[epochs - first]
        )
        return epochs, rows.astype(np.int64)

    def _keys(self, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
        keys = [epoch_keys(self.seed, epoch, self.name) for epoch in epochs.tolist()]
        return np.array(keys, np.uint64).reshape(-1, NUM_ROUNDS)


@lru_cache(maxsize=4096)
def epoch_keys(seed: int, epoch: int, name: str = "") -> tuple[int, ...]:
    """Returns the round keys of one epoch; hashed, so that (5, 1) and (6, 0) are unrelated.

    (grain 0.2.18 adds them: its epoch 1 of seed 5 is epoch 0 of seed 6.)
    """
    text = f"order {seed} {epoch} {name}" if name else f"order {seed} {epoch}"
    keys = hashlib.blake2b(text.encode(), digest_size=8 * NUM_ROUNDS).digest()
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
        right = (right + b - hash_uint64(left ^ keys_BK[:, k + 1]) % b) % b
        left = (left + a - hash_uint64(right ^ keys_BK[:, k]) % a) % a
    return left * b + right


def _feistel(
    values: NDArray[np.uint64], radix_a: int, radix_b: int, keys_BK: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permutes [0, radix_a * radix_b): each round adds a hash of one digit to the other."""
    a, b = np.uint64(radix_a), np.uint64(radix_b)
    left, right = values // b, values % b
    for k in range(0, NUM_ROUNDS, 2):
        left = (left + hash_uint64(right ^ keys_BK[:, k]) % a) % a
        right = (right + hash_uint64(left ^ keys_BK[:, k + 1]) % b) % b
    return left * b + right


def hash_uint64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hashes 64-bit integers (the finaliser of splitmix64, Steele et al., OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
