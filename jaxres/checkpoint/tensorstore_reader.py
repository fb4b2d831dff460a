"""Reads the arrays of a step through TensorStore, whole or in part, without jax and orbax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxres.checkpoint.block_digests import ArrayInfo, Box
from jaxres.checkpoint.content_digest import blocks
from jaxres.storage.path import BucketPath, Place

ARRAYS = "state"
"""Orbax's folder of the arrays inside a step directory."""
REGION_BYTES = 2**26
"""How much of an array is in memory at a time."""


class ArrayReader:
    """Opens every array once; safe to read from by several threads.

    A new one has seen nothing: it reads the index of the arrays anew.
    """

    def __init__(self, step_dir: Place, arrays: Mapping[str, ArrayInfo]) -> None:
        import tensorstore

        self._base = _base(step_dir / ARRAYS)
        self._arrays = arrays
        self._tensorstore: Any = tensorstore
        self._context = tensorstore.Context()
        self._open: dict[str, Any] = {}

    def read(self, path: str, box: Box | None = None) -> np.ndarray:
        """Returns an array, or a box of its items.

        Raises:
          ValueError, OSError: it can't be read, or is another one than is said.
        """
        stored = self._stored(path)
        if box is not None:
            stored = stored[tuple(slice(start, stop) for start, stop in box)]
        return np.asarray(stored.read().result())

    def region_bytes(self, path: str) -> int:
        """Returns how much of an array to read at a time: a chunk is always read as a whole."""
        chunk = self._stored(path).chunk_layout.read_chunk.shape or ()
        return max(REGION_BYTES, math.prod(chunk) * self._arrays[path].itemsize)

    def regions(self, path: str) -> Iterator[Box]:
        """Yields boxes of items that make up an array, each of whole blocks of its digest."""
        info = self._arrays[path]
        limit = self.region_bytes(path)
        for index in blocks(info.shape, info.itemsize, limit_bytes=limit):
            yield tuple((part.start, part.stop) for part in index)

    def _stored(self, path: str) -> Any:
        if path not in self._open:
            self._open[path] = self._opened(path)
        return self._open[path]

    def _opened(self, path: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": self._base,
                "path": f"{path.replace('/', '.')}/",
            },
        }
        stored = self._tensorstore.open(spec, read=True, context=self._context).result()
        there = ArrayInfo(stored.dtype.numpy_dtype.name, tuple(stored.shape))
        if there != self._arrays[path]:
            raise ValueError(f"{path} is {there}, the manifest says {self._arrays[path]}")
        return stored


def _base(folder: Place) -> dict[str, str]:
    """Returns what TensorStore calls a folder."""
    if isinstance(folder, BucketPath):
        return {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/"}
    return {"driver": "file", "path": f"{folder}/"}
