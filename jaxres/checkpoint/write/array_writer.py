"""Writes the arrays of a step on file systems, and reads each part back at once.

A part is some arrays, with the pieces of them that this host writes, in an OCDBT database of its
own (`state/ocdbt.process_HOST.PART`). Its values are in one file, which is written past the page
cache. While parts are written, other threads read those before back from the disk: many disks have
one limit for writing and another for reading. A part whose arrays have not changed is linked
(linked_parts.py). When all hosts have written theirs, host 0 lets TensorStore merge the indexes of
all parts into the index of the folder, in which stock Orbax and TensorStore find the arrays.

Sources: https://google.github.io/tensorstore/kvstore/ocdbt/index.html,
https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import tensorstore

from jaxres.checkpoint.bit_sums import Corrupted
from jaxres.checkpoint.digests.block_digests import ArrayInfo, Box, Digests, dtype_named, encode
from jaxres.checkpoint.digests.content_digest import as_bytes
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import ocdbt
from jaxres.checkpoint.read.readback import HostReport, drop_from_memory, file_info, verify_part
from jaxres.checkpoint.read.stored_chunks import chunk_index, entries_of
from jaxres.checkpoint.read.tensorstore_reader import (
    ARRAYS,
    FROZEN,
    file_locking,
    key_of,
    kvstore,
)
from jaxres.checkpoint.snapshot import digests_name
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.checkpoint.write import linked_parts
from jaxres.checkpoint.write.host_arrays import HostArrays, HostPieces
from jaxres.checkpoint.write.linked_parts import WrittenParts
from jaxres.faults import StorageUnavailable
from jaxres.runlog import step_dirs
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.direct_file import DirectWriter

PART_BYTES = 2**26
"""Size from which another part begins; an array is never split."""
THREADS = 2
"""Number of parts that are written at a time; as many are read back meanwhile."""
CHUNK_ALIGNMENT = 64
"""Chunks begin at a multiple of this in their file, so that items are aligned where it is read."""
_STORE = {
    "driver": "ocdbt",
    "assume_config": True,
    "config": {
        "max_inline_value_bytes": ocdbt.MAX_INLINE_BYTES,
        "max_decoded_node_bytes": ocdbt.MAX_NODE_BYTES,
        "manifest_kind": "single",
    },
}
"""Settings of the database, as Orbax has them: descriptions of arrays, and very small arrays, are
inside the index, which is one node."""


class ArrayWriter:
    """One host's save of the arrays of a step."""

    is_collective = False
    """Whether all hosts begin and end the save together, so that none can leave it out."""
    markers: Mapping[str, bytes] = MappingProxyType({})
    """Name -> content of files that must follow all others of the arrays."""

    def __init__(
        self,
        step_dir: Path,
        arrays: HostArrays,
        *,
        process: int,
        pace: Throttle,
        earlier: WrittenParts | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
          step_dir: directory of the step, which does not exist yet.
          process: number of this host.
          earlier: this host's parts of a committed step; those that are the same are linked.
        """
        self.step_dir = step_dir
        """Directory of the step."""
        self._arrays, self._process, self._pace = arrays, process, pace
        self._earlier = earlier
        self.written = WrittenParts(step_dir)
        """This host's parts of the arrays that training changes, as they are read back."""
        self._folder = step_dir.with_name(step_dirs.temporary_name(step_dir.name))
        self.report = HostReport({}, "was not written")
        """Report on this host's part of the step, once `result` has returned."""

    def result(self) -> None:
        """Writes this host's pieces, reads them back, and writes their digests.

        Raises:
          StorageUnavailable, ValueError: storage has failed.
        """
        try:
            with files.typed_errors(self.step_dir):
                self.report = self._write()
        finally:
            self._arrays.release()

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """Makes the parts of all hosts one checkpoint, under the step's name.

        Host 0 calls it when all have written. Returns a report on nothing: what this writes is read
        once it is durable.

        Args:
          reports: those of all hosts, which name the files of their parts.

        Raises:
          StorageUnavailable: the index of a part can't be read, or that of the folder reads back
            differently, or storage has failed.
        """
        with files.typed_errors(self.step_dir):
            self._folder.stat()  # TensorStore would make it, if it is gone.
            for folder in self._arrays.folders:
                names = databases(folder, reports)
                try:
                    _merge(self._folder, folder, names)
                except (ValueError, KeyError) as error:  # The parts were valid a moment ago.
                    raise StorageUnavailable(
                        f"{self.step_dir}: the indexes of its parts can't be merged "
                        f"({str(error).partition(chr(10))[0]}). The step is discarded; nothing "
                        "committed is lost. Is the disk, or this machine's memory, faulty?"
                    ) from error
            for name, content in self._arrays.described.items():
                (self._folder / name).write_bytes(content)
            self._folder.rename(self.step_dir)
        return HostReport({})

    def _write(self) -> HostReport:
        self._arrays.begin()
        self._folder.mkdir(exist_ok=True)
        report = HostReport({})
        for folder in self._arrays.folders:
            (self._folder / folder).mkdir(exist_ok=True)
            report = self._write_folder(folder, report)
        return report

    def _write_folder(self, folder: str, so_far: HostReport) -> HostReport:
        paths = list(parts_of(self._arrays.of(folder), PART_BYTES))
        readers = ThreadPoolExecutor(THREADS, "jaxres-read-back")
        with readers, ThreadPoolExecutor(THREADS, "jaxres-write") as writers:
            written = writers.map(
                lambda numbered: self._write_part(folder, readers, *numbered), enumerate(paths)
            )
            parts = [part.result() for part in list(written)]
        digests = {path: each for _, own in parts for path, each in own.items()}
        below = DIGESTS_OF[folder]
        (self._folder / below).mkdir(exist_ok=True)
        name = f"{below}/{digests_name(self._process)}"
        content = encode(digests)
        files.replace(self._folder / name, content)
        infos, failures = {name: file_info(self._folder / name)}, []
        if infos[name] != manifests.info_of(content):
            failures.append(f"{self._folder / name} reads back differently from what was written")
        for report in [so_far, *(report for report, _ in parts)]:
            infos |= report.files
            failures += [report.failure] if report.failure else []
        linked_bytes = so_far.linked_bytes + sum(report.linked_bytes for report, _ in parts)
        return HostReport(infos, failures[0] if failures else "", linked_bytes)

    def _write_part(
        self, folder: str, readers: Executor, number: int, paths: list[str]
    ) -> Future[tuple[HostReport, dict[str, Digests]]]:
        """Writes or links a part; returns the report on it, which a reader makes meanwhile."""
        database = database_name(folder, self._process, number)
        held = {path: self._arrays.take(folder, path) for path in paths}
        digests: dict[str, Digests] = {}
        try:
            is_linked = self._link(database, held, digests)
            if not is_linked:
                for path, each in _write_database(self._folder / database, held, self._pace):
                    self._digest(path, each, digests)
        except Corrupted as error:
            return _failed(str(error))
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  Host 0 refuses the step.
            return _failed(
                f"this process could not digest its data: {type(error).__name__}: {error}"
            )
        infos = {path: each.info for path, each in held.items()}
        boxes = {path: tuple(each.items) for path, each in held.items()}

        def verify() -> tuple[HostReport, dict[str, Digests]]:
            report = verify_part(self._folder, database, infos, boxes, digests, self._pace)
            if folder == ARRAYS and not report.failure:
                self.written.add(database, report.files, digests)
            if is_linked:
                size = sum(file.size for file in report.files.values())
                report = replace(report, linked_bytes=size)
            return report, digests

        return readers.submit(verify)

    def _digest(self, path: str, each: HostPieces, digests: dict[str, Digests]) -> Digests:
        """Returns the digests of an array's pieces, which are computed once."""
        if path not in digests:
            digests[path] = self._arrays.digest(path, each)
        return digests[path]

    def _link(
        self, database: str, held: Mapping[str, HostPieces], digests: dict[str, Digests]
    ) -> bool:
        """Links a part of the earlier step if none of its arrays has changed; adds to `digests`."""
        part = self._earlier and self._earlier.parts.get(database)
        if not part or part.sums.keys() != held.keys():
            return False
        assert self._earlier is not None
        are_same = all(
            linked_parts.sum_of(self._digest(path, each, digests)) == part.sums[path]
            for path, each in held.items()  # Up to the first that differs.
        )
        return are_same and linked_parts.link(self._earlier, database, self._folder)


def _failed(why: str) -> Future[tuple[HostReport, dict[str, Digests]]]:
    """Returns the report on a part that can't be digested, for which nothing is read back."""
    report = Future[tuple[HostReport, dict[str, Digests]]]()
    report.set_result((HostReport({}, why), {}))
    return report


DIGESTS_OF = {ARRAYS: manifests.DIGESTS, FROZEN: manifests.FROZEN_DIGESTS}
"""Folder of arrays -> folder of their block digests."""


def database_name(folder: str, process: int, number: int) -> str:
    """Returns the name of a part's database in the step directory."""
    return f"{folder}/ocdbt.process_{process}.{number}"


def parts_of(arrays: Mapping[str, tuple[ArrayInfo, Any]], least_bytes: int) -> Iterator[list[str]]:
    """Yields the paths of the arrays of each part; the same on every host.

    A part ends once its arrays have so many bytes. An array of as many is a part of its own: it may
    be the same as in the step before.
    """
    part: list[str] = []
    size_bytes = 0
    sizes = {path: math.prod(info.shape) * info.itemsize for path, (info, _) in arrays.items()}
    for path in sorted(arrays, key=lambda path: sizes[path] < least_bytes):
        part.append(path)
        size_bytes += sizes[path]
        if size_bytes >= least_bytes:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _write_database(
    database: Path, held: Mapping[str, HostPieces], pace: Throttle = UNTHROTTLED
) -> Iterator[tuple[str, HostPieces]]:
    """Writes pieces into a new database; yields each array with its path once it is handed over.

    The database is complete when the iterator has ended.
    """
    (database / ocdbt.DATA_FILE).parent.mkdir(parents=True)
    values: dict[str, bytes | ocdbt.ValuePlace] = {}
    with DirectWriter(database / ocdbt.DATA_FILE) as file:
        for path, each in held.items():
            values |= append_array(file, path, each, pace)
            yield path, each
    ocdbt.write_index(database, values)


class Appendable(Protocol):
    """A data file that is written from its start to its end."""

    @property
    def size_bytes(self) -> int: ...

    def append(self, data: np.ndarray | bytes | memoryview) -> None: ...

    def align(self, num_bytes: int) -> None: ...


def append_array(
    file: Appendable,
    path: str,
    each: HostPieces,
    pace: Throttle,
    *,
    data_file: str = ocdbt.DATA_FILE,
) -> dict[str, bytes | ocdbt.ValuePlace]:
    """Appends the pieces of an array to a data file; returns the entries of the index."""
    key = key_of(path)
    values: dict[str, bytes | ocdbt.ValuePlace] = {
        f"{key}zarr.json": canonical_json(_metadata(each))
    }
    for box, items in each.items.items():
        if items.size:
            with pace.piece():
                values[key + chunk_key(box, each.chunk_shape)] = _append(file, items, data_file)
    return values


def _append(file: Appendable, items: np.ndarray, name: str) -> bytes | ocdbt.ValuePlace:
    """Appends a chunk, as the codec `sharding_indexed` has it, unless it belongs into the index."""
    data = as_bytes(items)
    index = chunk_index(len(data))
    if len(data) + len(index) <= ocdbt.MAX_INLINE_BYTES:
        return bytes(data) + index
    file.align(CHUNK_ALIGNMENT)
    offset = file.size_bytes
    file.append(data)
    file.append(index)
    return ocdbt.ValuePlace(offset, len(data) + len(index), name)


def chunk_key(box: Box, chunk_shape: Sequence[int]) -> str:
    """Returns the key of a chunk below its array's key.

    >>> chunk_key(((4, 8), (0, 64)), (4, 64)), chunk_key((), ())
    ('c/1/0', 'c')
    """
    return "/".join(["c", *(str(a // n) for (a, _), n in zip(box, chunk_shape, strict=True))])


def _metadata(each: HostPieces) -> dict[str, Any]:
    """Returns the description of an array as Orbax writes it (zarr3)."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    chunk = {
        "chunk_shape": each.chunk_shape,
        "codecs": [little if each.info.itemsize > 1 else {"name": "bytes"}],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    return {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": each.chunk_shape}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": chunk}],
        "data_type": each.info.dtype,
        "fill_value": _fill_value(dtype_named(each.info.dtype)),
        "node_type": "array",
        "shape": each.info.shape,
        "zarr_format": 3,
    }


def _fill_value(dtype: np.dtype) -> Any:
    if dtype.kind == "c":
        return [0.0, 0.0]
    return np.zeros((), dtype).item()


def databases(folder: str, reports: Sequence[HostReport]) -> list[str]:
    """Returns the names of all hosts' parts in a folder.

    They are taken from the reports: the list of a folder on a network may be old.
    """
    names = (name.split("/") for report in reports for name in report.files)
    return sorted({below[0] for first, *below in names if first == folder})


def _merge(step_dir: Path, folder: str, names: Sequence[str]) -> None:
    """Merges the indexes of all hosts' parts into the folder's index, and verifies it on disk."""
    base = step_dir / folder
    context = tensorstore.Context({"file_io_locking": file_locking(base)})
    merged = tensorstore.KvStore.open({**_STORE, "base": kvstore(base)}, context=context).result()
    transaction = tensorstore.Transaction(atomic=True)
    expected: dict[str, str | bytes] = {}
    for name in names:
        part = {**_STORE, "base": kvstore(base / name)}
        opened = tensorstore.KvStore.open(part, context=context).result()
        opened.experimental_copy_range_to(merged.with_transaction(transaction)).result()
        entries = entries_of(base / name)
        if not entries:  # TensorStore takes a folder that is missing for an empty one.
            raise StorageUnavailable(f"{base / name}: was written and is missing.")
        expected |= {
            key: value if isinstance(value, bytes) else f"{name}/{value}"
            for key, value in entries.items()
        }
    transaction.commit_async().result()
    own = [
        f"{folder}/{name}" for name in manifests.inventory(base) if not name.startswith("ocdbt.")
    ]
    drop_from_memory(step_dir, own)
    try:
        is_same = entries_of(base) == expected
    except ValueError:
        is_same = False
    if not is_same:
        raise StorageUnavailable(f"{base}: its index reads back differently from what was written.")
