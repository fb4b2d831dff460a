"""Writes the arrays of a step into a bucket, and reads each part back at once.

A part is some arrays, with the pieces of them that this host writes: one object, whose bytes are
sent from where they lie in memory. While parts are uploaded, those before are downloaded and
compared with the digests of the snapshot. A part that has not changed since an earlier step is
copied by the service instead of uploaded (linked_parts.py), and downloaded all the same. All parts
of a host are one OCDBT database, whose index is written here (ocdbt.py) beside the last parts; host
0 writes one for those of all hosts: beside the last parts, too, if it is alone. TensorStore reads
them back.
"""

from __future__ import annotations

import functools
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from jaxres.checkpoint.bit_sums import Corrupted
from jaxres.checkpoint.digests.block_digests import ArrayInfo, Digests, encode
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read import ocdbt
from jaxres.checkpoint.read.readback import HostReport, report_of, verify_index, verify_object
from jaxres.checkpoint.read.stored_chunks import Chunk, entries_of
from jaxres.checkpoint.read.tensorstore_reader import key_of
from jaxres.checkpoint.snapshot import digests_name
from jaxres.checkpoint.throttle import Throttle
from jaxres.checkpoint.write import linked_parts
from jaxres.checkpoint.write.array_writer import (
    DIGESTS_OF,
    append_array,
    chunk_key,
    database_name,
    databases,
    parts_of,
)
from jaxres.checkpoint.write.host_arrays import HostArrays, HostPieces
from jaxres.checkpoint.write.linked_parts import WrittenPart, WrittenParts
from jaxres.faults import RunError, StorageUnavailable
from jaxres.storage import files, gcs_objects, object_copies
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.object_streams import MemoryFile
from jaxres.storage.path import GcsPath, is_remote

PARTS = 64
"""Parts of a save, unless they would be smaller or larger than the next two."""
MIN_PART_BYTES, MAX_PART_BYTES = 2**21, 2**26
"""Sizes from which a host begins another part; an array is never split."""
MAX_STREAMS = 8
"""Most parts of a host that are uploaded at a time, and as many that are downloaded."""
AT_ONCE = 1 / 8
"""Share of a save that may be uploaded at a time: so much is downloaded after the last upload."""
APART_SECONDS = 0.05
"""Time between the first uploads of two streams, about the latency of a bucket.

Streams that begin together, with parts of equal size, also wait for their answers together, and the
link is idle then.
"""
Entries = Mapping[str, bytes | ocdbt.ValuePlace]
"""Key -> the value, or its place, in the index of a database."""
SUCCESS = "commit_success.txt"
"""File that makes a step in a bucket a complete one for stock Orbax."""


@dataclass(frozen=True)
class BucketPart:
    """The arrays of one object, and where they are in it."""

    name: str
    """Name of the object in the step."""
    file: MemoryFile
    values: Entries
    """Entries of the host's database."""
    infos: Mapping[str, ArrayInfo]
    chunks: Mapping[str, list[Chunk]]
    """Path -> the chunks of an array in this object; none if they are in the index."""
    digests: Mapping[str, Digests]
    """Path -> digests of the snapshot."""


class BucketWriter:
    """One host's save of the arrays of a step in a bucket."""

    is_collective = False

    def __init__(
        self,
        step_dir: GcsPath,
        arrays: HostArrays,
        *,
        process: int,
        num_hosts: int,
        pace: Throttle,
        earlier: WrittenParts | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
          step_dir: directory of the step, which no object is in yet.
          process: number of this host.
          num_hosts: number of hosts that write a share of the arrays each.
          earlier: this host's parts of a committed step; those that are the same are copied.
        """
        self.step_dir = step_dir
        """Directory of the step."""
        self._arrays, self._pace = arrays, pace
        self._process, self._num_hosts = process, num_hosts
        self._earlier, self.written = earlier, WrittenParts(step_dir)
        self.report = HostReport({}, "was not written")
        """Report on this host's part of the step, once `result` has returned."""
        self.markers = {SUCCESS: str(step_dir).encode()}
        """Files that must follow all others of the arrays."""

    def result(self) -> None:
        """Uploads this host's pieces and their digests, and downloads them again.

        Raises:
          StorageUnavailable, ValueError: storage has failed.
        """
        try:
            with files.typed_errors(self.step_dir):
                self._arrays.begin()
                reports = [self._write_folder(folder) for folder in self._arrays.folders]
                self.report = _joined(reports)
        except Corrupted as error:
            self.report = HostReport({}, str(error))
        finally:
            self._arrays.release()

    def complete(self, reports: Sequence[HostReport]) -> HostReport:
        """Merges the databases of all hosts into one checkpoint; reports the written files.

        Host 0 calls it when all have written. If it is alone, `result` has done that.

        Args:
          reports: those of all hosts, which name the objects of their databases.

        Raises:
          StorageUnavailable: an index can't be read or reads back differently, or storage has
            failed.
        """
        if self._num_hosts == 1:
            return HostReport({})
        with files.typed_errors(self.step_dir):
            entries = {
                folder: _entries(self.step_dir, folder, databases(folder, reports))
                for folder in self._arrays.folders
            }
            contents = dict(self._arrays.described)
            for folder, own in entries.items():
                contents |= _index_files(folder, own)
            written = _write_all(self.step_dir, contents)
            for folder, own in entries.items():
                written.append(self._check_folder(folder, functools.partial(dict, own)))
        if failure := _joined(written).failure:
            raise StorageUnavailable(
                f"{failure}. The step is discarded; nothing committed is lost."
            )
        return _joined(written)

    def _write_folder(self, folder: str) -> HostReport:
        arrays = self._arrays.of(folder)
        least = part_bytes(arrays, self._num_hosts)
        paths = list(parts_of(arrays, least))
        streams = num_streams(arrays, paths)
        uploads = ThreadPoolExecutor(streams, "jaxres-upload")
        downloads = ThreadPoolExecutor(streams, "jaxres-download")
        laid_out: queue.SimpleQueue[BucketPart | None] = queue.SimpleQueue()
        try:
            jobs = [
                uploads.submit(
                    self._upload,
                    folder,
                    number,
                    each,
                    laid_out,
                    downloads,
                    wait_seconds=APART_SECONDS * number if number < streams else 0.0,
                )
                for number, each in enumerate(paths)
            ]
            parts, reports = list[BucketPart](), list[HostReport]()
            while len(parts) < len(jobs) and (part := laid_out.get()) is not None:
                parts.append(part)
            checks: list[Future[HostReport] | None] = []
            if len(parts) == len(jobs):  # The last parts are being uploaded meanwhile.
                reports += self._write_index(folder, parts)
                if self._num_hosts == 1:
                    name = database_name(folder, self._process, 0).removeprefix(f"{folder}/")
                    own = functools.partial(_entries, self.step_dir, folder, [name])
                    checks.append(downloads.submit(self._check_folder, folder, own))
            ended, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            checks += [job.result() for job in ended]
            reports.append(self._check_index(folder, parts))
            return _joined([*reports, *(check.result() for check in checks if check)])
        finally:
            uploads.shutdown(cancel_futures=True)
            downloads.shutdown(cancel_futures=True)

    def _upload(
        self,
        folder: str,
        number: int,
        paths: list[str],
        laid_out: queue.SimpleQueue[BucketPart | None],
        downloads: Executor,
        *,
        wait_seconds: float,
    ) -> Future[HostReport] | None:
        """Waits, uploads one part; returns its download's report, unless it is in the index."""
        try:
            try:
                part = self._lay_out(folder, number, paths)
            except (Corrupted, RunError, OSError):
                raise
            except Exception as error:
                why = f"this process could not digest its data: {type(error).__name__}: {error}"
                raise Corrupted(why) from error  # Host 0 refuses the step.
            laid_out.put(part)
            if not part.file.size_bytes:
                return None
            self._pace.clock.sleep(wait_seconds)
            path = self.step_dir / part.name
            stat = self._copy(part) or gcs_objects.write_stream(path, part.file)
        except BaseException:
            laid_out.put(None)  # The save ends here: it waits for no other part.
            raise
        part.file.release()
        return downloads.submit(self._verify, part, stat)

    def _copy(self, part: BucketPart) -> Stat | None:
        """Copies the object of an earlier step if no array in it has changed; None: it did not."""
        earlier = self._earlier
        known = earlier and earlier.parts.get(part.name)
        if not earlier or not known or known.stat is None or not is_remote(earlier.step_dir):
            return None
        if known.sums != _sums(part) or known.values != part.values:
            return None
        source, to = earlier.step_dir / part.name, self.step_dir / part.name
        return object_copies.copy(source, known.stat, to)

    def _verify(self, part: BucketPart, stat: Stat) -> HostReport:
        """Downloads a part and compares it; a whole one may be copied by a later save."""
        report = verify_object(
            self.step_dir, part.name, stat, part.chunks, part.digests, self._pace
        )
        if not report.failure:
            whole = WrittenPart((part.name,), _sums(part), stat, part.values)
            self.written.parts[part.name] = whole
        return report

    def _lay_out(self, folder: str, number: int, paths: list[str]) -> BucketPart:
        """Fetches and digests some arrays, and decides where they are in an object."""
        arrays, file = self._arrays.of(folder), MemoryFile()
        database, data_file = database_name(folder, self._process, 0), f"d/{number}"
        values: dict[str, bytes | ocdbt.ValuePlace] = {}
        name = f"{database}/{data_file}"
        infos = {path: arrays[path][0] for path in paths}
        chunks: dict[str, list[Chunk]] = {}
        digests: dict[str, Digests] = {}
        for path in paths:
            each = self._arrays.take(folder, path)
            own = append_array(file, path, each, self._pace, data_file=data_file)
            values |= own
            digests[path] = self._arrays.digest(path, each)
            chunks[path] = _chunks(path, each, own, name)
        return BucketPart(name, file, values, infos, chunks, digests)

    def _write_index(self, folder: str, parts: Sequence[BucketPart]) -> list[HostReport]:
        """Writes the index of this host's database and the digests, and reads them back.

        If this host is alone: also the index of the folder, and the descriptions of the arrays.
        """
        values = {key: value for part in parts for key, value in part.values.items()}
        digests = {path: each for part in parts for path, each in part.digests.items()}
        contents = _index_files(database_name(folder, self._process, 0), values)
        contents[f"{DIGESTS_OF[folder]}/{digests_name(self._process)}"] = encode(digests)
        if self._num_hosts == 1:
            contents |= _index_files(folder, self._entries_above(folder, parts))
            contents |= self._arrays.described if folder == self._arrays.folders[0] else {}
        return _write_all(self.step_dir, contents)

    def _entries_above(self, folder: str, parts: Sequence[BucketPart]) -> Entries:
        """Returns the entries of this host's database as the index of the folder has them."""
        name = database_name(folder, self._process, 0).removeprefix(f"{folder}/")
        return {
            key: value if isinstance(value, bytes) else replace(value, file=f"{name}/{value.file}")
            for part in parts
            for key, value in part.values.items()
        }

    def _check_folder(self, folder: str, expected: Callable[[], Entries]) -> HostReport:
        """Returns the report on whether TensorStore reads the expected entries from a folder."""

        def check() -> HostReport:
            with ThreadPoolExecutor(1, "jaxres-download") as pool:
                wanted = pool.submit(expected)
                found = entries_of(self.step_dir / folder)
            is_same = wanted.result() == {
                key: value if isinstance(value, bytes) else _place(value)
                for key, value in found.items()
            }
            where = f"{self.step_dir / folder}"
            return HostReport({}, "" if is_same else f"{where}: its index reads differently")

        return report_of(self.step_dir, check)

    def _check_index(self, folder: str, parts: Sequence[BucketPart]) -> HostReport:
        return verify_index(
            self.step_dir,
            database_name(folder, self._process, 0),
            {path: info for part in parts for path, info in part.infos.items()},
            {path: chunks for part in parts for path, chunks in part.chunks.items()},
            {path: each for part in parts for path, each in part.digests.items()},
            self._pace,
        )


def _sums(part: BucketPart) -> dict[str, bytes]:
    return {path: linked_parts.sum_of(each) for path, each in part.digests.items()}


def part_bytes(arrays: Mapping[str, tuple[ArrayInfo, Any]], num_hosts: int) -> int:
    """Returns the size of all hosts' arrays from which another part begins."""
    total = sum(_size_bytes(info) for info, _ in arrays.values())
    return min(max(total // PARTS, num_hosts * MIN_PART_BYTES), num_hosts * MAX_PART_BYTES)


def num_streams(arrays: Mapping[str, tuple[ArrayInfo, Any]], parts: Sequence[Sequence[str]]) -> int:
    """Returns the number of concurrent uploads of parts: at least two, to keep the link busy.

    Parts that are uploaded at the same time end together; their download begins only then.
    """
    sizes = [sum(_size_bytes(arrays[path][0]) for path in part) for part in parts]
    return max(2, min(MAX_STREAMS, int(AT_ONCE * sum(sizes) / max(sizes, default=1))))


def _size_bytes(info: ArrayInfo) -> int:
    return math.prod(info.shape) * info.itemsize


def _chunks(path: str, each: HostPieces, values: Entries, name: str) -> list[Chunk]:
    """Returns the chunks of an array that an object contains."""
    keys = {box: key_of(path) + chunk_key(box, each.chunk_shape) for box in each.items}
    places = {box: values.get(key) for box, key in keys.items()}
    return [
        Chunk(path, each.info, box, name, place.offset)
        for box, place in places.items()
        if isinstance(place, ocdbt.ValuePlace)
    ]


def _index_files(database: str, entries: Entries) -> dict[str, bytes]:
    """Returns name -> content of the files of the index of a database in the step."""
    return {f"{database}/{name}": data for name, data in ocdbt.encode_index(entries).items()}


def _entries(step_dir: GcsPath, folder: str, names: Sequence[str]) -> Entries:
    """Returns the merged index of all hosts' databases in a folder, as TensorStore reads them."""
    with ThreadPoolExecutor(gcs_objects.THREADS, "jaxres-download") as pool:
        found = list(pool.map(lambda name: entries_of(step_dir / folder / name), names))
    values: dict[str, bytes | ocdbt.ValuePlace] = {}
    for name, entries in zip(names, found, strict=True):
        if not entries:  # TensorStore takes a database that is missing for an empty one.
            raise StorageUnavailable(f"{step_dir / folder / name}: was written and is missing.")
        for key, value in entries.items():
            values[key] = value if isinstance(value, bytes) else _place(f"{name}/{value}")
    return values


def _place(text: str) -> ocdbt.ValuePlace:
    file, offset, size = text.rsplit(":", 2)
    return ocdbt.ValuePlace(int(offset), int(size), file)


def _write_all(step_dir: GcsPath, contents: Mapping[str, bytes]) -> list[HostReport]:
    """Writes small objects at the same time and reads them back; returns a report on each."""

    def write(name: str) -> HostReport:
        path, content = step_dir / name, contents[name]
        if gcs_objects.write(path, content, over=0) is None:
            raise StorageUnavailable(f"{path}: exists already; is another process writing there?")
        if files.read_whole(path) != content:
            return HostReport({}, f"{path} reads back differently from what was written")
        return HostReport({name: manifests.info_of(content)})

    with ThreadPoolExecutor(max(1, len(contents)), "jaxres-upload") as pool:
        return list(pool.map(write, contents))


def _joined(reports: Sequence[HostReport]) -> HostReport:
    """Returns one report on the files of several."""
    infos = {name: info for report in reports for name, info in report.files.items()}
    return HostReport(infos, next((each.failure for each in reports if each.failure), ""))
