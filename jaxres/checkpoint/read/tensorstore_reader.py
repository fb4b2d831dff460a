"""Reads the arrays of a step through TensorStore, in full or in part, without jax and orbax."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxres.checkpoint.digests.block_digests import ArrayInfo, Box
from jaxres.checkpoint.digests.content_digest import blocks
from jaxres.faults import ConfigError
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote

ARRAYS = "state"
"""Orbax's folder of the arrays inside a step directory."""
FROZEN = "frozen"
"""Orbax's folder of the frozen parameters, in a run that has some."""
INDEX_BYTES = 2**26
"""Cache of a store's index (B-tree nodes of OCDBT); the arrays themselves are not cached."""
REGION_BYTES = 2**26
"""Largest part of an array that is in memory at a time."""


class ArrayReader:
    """Reads the arrays of one step; each is opened once. Safe to use from several threads.

    A new reader has an empty cache, so it reads the index of the arrays from storage again.
    """

    def __init__(
        self,
        step_dir: RunPath,
        arrays: Mapping[str, ArrayInfo],
        *,
        frozen: Collection[str],
        copied: Mapping[str, Path] | None = None,
        database: str = "",
    ) -> None:
        """Opens nothing yet.

        Args:
          arrays: path -> expected dtype and shape of every array to be read.
          frozen: paths of the arrays that are in the folder of the frozen parameters.
          copied: folder of the step, as `state/ocdbt.process_0/d` -> local folder with copies of
            all its files, which are read instead.
          database: name of the database of one part of a save; all arrays are read from there.
        """
        import tensorstore

        self.step_dir = step_dir
        """Directory of the step."""
        self._arrays = arrays
        self._frozen = frozenset(frozen)
        self._copied = copied or {}
        self._database = database
        self._tensorstore: Any = tensorstore
        self._context = tensorstore.Context()
        self._open: dict[str, Any] = {}
        self._stores: dict[str, Any] = {}
        """Folder -> its store: one for all its arrays, so that its index is read once."""

    def read(self, path: str, box: Box | None = None) -> np.ndarray:
        """Returns an array, or a box of its items.

        Raises:
          ValueError, OSError: it can't be read, or its dtype or shape is not the expected one.
        """
        stored = self._stored(path)
        if box is not None:
            stored = stored[tuple(slice(start, stop) for start, stop in box)]
        return np.asarray(stored.read().result())

    def region_bytes(self, path: str) -> int:
        """Returns the bytes of an array to read at a time, at least one whole chunk."""
        chunk = self._stored(path).chunk_layout.read_chunk.shape or ()
        return max(REGION_BYTES, math.prod(chunk) * self._arrays[path].itemsize)

    def regions(self, path: str) -> Iterator[Box]:
        """Yields boxes of items that cover an array; each consists of whole digest blocks."""
        info = self._arrays[path]
        limit = self.region_bytes(path)
        for index in blocks(info.shape, info.itemsize, limit_bytes=limit):
            yield tuple((part.start, part.stop) for part in index)

    def _stored(self, path: str) -> Any:
        if path not in self._open:
            self._open[path] = self._opened(path)
        return self._open[path]

    def _opened(self, path: str) -> Any:
        name = self._database or (FROZEN if path in self._frozen else ARRAYS)
        if name not in self._stores:
            self._stores[name] = self._store(name)
        spec = {"driver": "zarr3", "recheck_cached_metadata": False, "recheck_cached_data": False}
        stored = self._tensorstore.open(
            spec, kvstore=self._stores[name] / key_of(path), read=True, context=self._context
        ).result()
        info = ArrayInfo(stored.dtype.numpy_dtype.name, tuple(stored.shape))
        if info != self._arrays[path]:
            raise ValueError(f"{path} is {info}, the manifest records {self._arrays[path]}")
        return stored

    def _store(self, name: str) -> Any:
        """Opens the store of a folder of the step, in which the copied files are local."""
        layers: list[dict[str, Any]] = [{"base": kvstore(self.step_dir / name)}]
        for folder, local in self._copied.items():
            if folder.startswith(f"{name}/"):
                prefix = folder.removeprefix(f"{name}/")
                layers.append({"base": kvstore(local), "prefix": f"{prefix}/"})
        base = {"driver": "kvstack", "layers": layers} if len(layers) > 1 else layers[0]["base"]
        spec = {"driver": "ocdbt", "base": base}
        caching = self._tensorstore.Context({"cache_pool": {"total_bytes_limit": INDEX_BYTES}})
        return self._tensorstore.KvStore.open(spec, context=caching).result()


def array_spec(folder: RunPath, path: str) -> dict[str, Any]:
    """Returns TensorStore's spec of an array in a folder, in the format that Orbax writes."""
    store = {"driver": "ocdbt", "base": kvstore(folder), "path": key_of(path)}
    return {"driver": "zarr3", "kvstore": store}


def key_of(path: str) -> str:
    """Returns the prefix of an array's keys in the store of its folder.

    >>> key_of("params/out/w")
    'params.out.w/'
    """
    return f"{path.replace('/', '.')}/"


def kvstore(folder: RunPath) -> dict[str, str]:
    """Returns TensorStore's key-value store spec of a folder.

    Raises:
      ConfigError: TensorStore would open another folder, so that a whole step looks damaged.
    """
    if is_remote(folder):
        return {"driver": "gcs", "bucket": folder.bucket, "path": f"{folder.key}/"}
    if "\\" in str(folder):
        raise ConfigError(
            f"{folder}: TensorStore takes a backslash in a path for a slash. Rename the folder."
        )
    return {"driver": "file", "path": f"{folder}/"}


def file_locking(folder: RunPath) -> dict[str, str]:
    """Returns TensorStore's setting `file_io_locking`: lock files on a mount that refuses locks.

    Only one attempt writes into a step directory, so a lock file that a killed process leaves there
    blocks no other writer.
    """
    return {"mode": "lockfile" if files.refuses_locks(folder) else "os"}
