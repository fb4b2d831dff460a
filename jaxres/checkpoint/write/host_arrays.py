"""The arrays of a save as one host writes them, for the writers of disks and of buckets.

Each array is fetched when its part is written, digested once, and let go of after.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxres.checkpoint.bit_sums import NO_SUMS, BitSums, Part, require_equal
from jaxres.checkpoint.digests.block_digests import ArrayInfo, Box, Digests, digests_of
from jaxres.checkpoint.snapshot import shape_and_pieces
from jaxres.checkpoint.throttle import Throttle


@dataclass(frozen=True)
class HostPieces:
    """The pieces of an array that this host writes."""

    info: ArrayInfo
    chunk_shape: tuple[int, ...]
    """Shape of every piece of the array, on all hosts."""
    items: Mapping[Box, np.ndarray]


class HostArrays:
    """The arrays of one save, until they are written."""

    def __init__(
        self,
        folders: Mapping[str, Mapping[str, tuple[ArrayInfo, Any]]],
        describe: Callable[[], Mapping[str, bytes]],
        *,
        is_own: bool,
        pace: Throttle,
        sums: BitSums = NO_SUMS,
    ) -> None:
        """Fetches the pieces to the host, unless the arrays are a copy that is never donated.

        Args:
          folders: folder of the step -> path -> info and jax.Array.
          describe: returns name -> content of Orbax's files (orbax_files.py), if Orbax writes none.
          is_own: whether the arrays are such a copy.
          sums: sums of the bits of the state itself, with which what is written is compared.
        """
        self.is_own = is_own
        """Whether the arrays are a copy that is never donated."""
        self.folders = tuple(folders)
        """Folders of the step."""
        self.described: Mapping[str, bytes] = {}
        """Name -> content of Orbax's files, once `begin` was called."""
        self._describe = describe if is_own else functools.partial(dict, describe())
        self._pace, self._sums = pace, sums
        self._expected: Mapping[Part, int] = {}
        self._arrays = {name: dict(arrays) for name, arrays in folders.items()}
        self._fetched: dict[str, HostPieces] = {}
        if not is_own:
            for path, array in itertools.chain(*(a.items() for a in folders.values())):
                self._fetched[path] = _fetch(*array)

    def begin(self) -> None:
        """Reads the sums that the arrays are compared with, and describes the arrays.

        Not while parts are written: JAX makes an array's list of shards at the first access, and
        two threads there at a time get wrong ones (jaxlib 0.10.2).
        """
        self.described, self._expected = self._describe(), self._sums.read()

    def of(self, folder: str) -> Mapping[str, tuple[ArrayInfo, Any]]:
        """Returns the arrays of a folder that were not taken yet, by path."""
        return self._arrays[folder]

    def take(self, folder: str, path: str) -> HostPieces:
        """Returns this host's pieces of an array, in its memory, and lets go of the array."""
        info, array = self._arrays[folder].pop(path)
        return self._fetched.pop(path, None) or _fetch(info, array)

    def digest(self, path: str, each: HostPieces) -> Digests:
        """Returns the digests of an array's pieces.

        Raises:
          Corrupted: the pieces are not what the devices held.
        """
        with self._pace.piece():
            digests = digests_of(each.info, each.items)
            # After the digests: what changes later differs from them when it is read back.
            require_equal(self._expected, path, each.items)
        return digests

    def release(self) -> None:
        """Lets go of all arrays."""
        self._arrays, self._fetched, self._describe = {}, {}, dict


def _fetch(info: ArrayInfo, array: Any) -> HostPieces:
    return HostPieces(info, *shape_and_pieces(array))
