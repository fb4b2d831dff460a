"""Verifies the files that a host has just written, before the step is committed. No jax.

Every host makes its own files durable and drops them from the page cache. Then it reads each of
them once, from the disk, for its checksum and for the digests of the chunks in it, which are
compared with those of the snapshot (stored_chunks.py). In a bucket, and for arrays that are stored
in another way, TensorStore reads the arrays.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from jaxres.checkpoint.digests.block_digests import (
    ArrayInfo,
    Box,
    Digests,
    decode,
    digests_of,
    dtype_named,
    grid_box,
    index_of,
    rows_of,
    split,
)
from jaxres.checkpoint.digests.content_digest import block_digest, block_digests
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import FileInfo
from jaxres.checkpoint.read.step_download import LocalCopies
from jaxres.checkpoint.read.stored_chunks import (
    Chunk,
    by_file,
    locate_below,
    locate_chunks,
    scan,
    scan_opened,
)
from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.cluster.host_group import HostGroup
from jaxres.faults import PeerLost, RunError, StorageUnavailable
from jaxres.storage import codec, gcs_objects
from jaxres.storage import files as storage
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.gcs_objects import Stat
from jaxres.storage.object_streams import ChunkReader
from jaxres.storage.path import GcsPath, RunPath, is_remote

THREADS = 4
READ_BYTES = 2**22
REMOTE_TRIES = 4
_PROCESS_FILE = re.compile(
    r"(?:state|frozen)/ocdbt\.process_(\d+)(?:\.\d+)?/.*|"
    r"(?:state|frozen)/array_metadatas/process_(\d+)|"
    r"(?:frozen_)?digests/process_(\d+)\.json"
)


@dataclass(frozen=True)
class HostReport:
    """One host's report to host 0 on its part of a written step."""

    files: Mapping[str, FileInfo]
    """Name -> size and checksum of the host's own files, as read back."""
    failure: str = ""
    """Reason why the host's part is missing or wrong; empty if it is valid."""
    linked_bytes: int = 0
    """Bytes of the files that are links to files of an earlier step."""

    def of(self, host: int) -> HostReport:
        """Returns the report; its failure, if any, begins with the host's number."""
        return replace(self, failure=self.failure and f"host {host}: {self.failure}")

    def encode(self) -> str:
        """Returns the report as a message between hosts."""
        return canonical_json(codec.encode(self)).decode()

    @staticmethod
    def decode(text: str) -> HostReport:
        """Reads a report back."""
        return codec.decode(HostReport, json.loads(text))


def verify_own_files(
    step_dir: RunPath,
    arrays: Mapping[str, ArrayInfo],
    process: int,
    pace: Throttle,
    *,
    frozen: Collection[str] = (),
    copies: LocalCopies | None = None,
) -> HostReport:
    """Verifies one process's part of a step that Orbax has written; returns the report.

    In a bucket a failed verification is repeated, without the copies: the data may be damaged in
    transfer.

    Args:
      arrays: those that the save has written.
      frozen: paths of those arrays that are in the folder of the frozen parameters.
      copies: its data files, as the bucket has sent them.
    """
    sources = iter([copies])

    def check() -> HostReport:
        own_copies = next(sources, None)
        files = dict(own_copies.files) if own_copies else {}
        names = [name for name in manifests.inventory(step_dir) if name not in files]
        own = [name for name in names if writer_of(name) == process]
        drop_from_memory(step_dir, own)
        if process == 0:  # The index of the arrays is read from the disk, too.
            drop_from_memory(step_dir, [name for name in names if writer_of(name) is None])
        expected = _snapshot_digests(step_dir, process, frozen)
        chunks = _own_chunks(step_dir, arrays, expected, process, frozen)
        copied = {n: own_copies.root / n for n in own_copies.folders} if own_copies else {}
        reader = ArrayReader(step_dir, arrays, frozen=frozen, copied=copied)
        found, wrong = _read_back(own, reader, arrays, chunks, expected, pace)
        return _reads_differently(step_dir, wrong) if wrong else HostReport(files | found)

    return report_of(step_dir, check)


def report_of(step_dir: RunPath, check: Callable[[], HostReport]) -> HostReport:
    """Returns the report of a check, in which an error is a failure.

    In a bucket a check that fails is repeated: the data may be damaged in transfer. Not if the
    bucket does not answer: its requests were retried already.
    """
    report = HostReport({})
    for _ in range(REMOTE_TRIES if is_remote(step_dir) else 1):
        try:
            with storage.typed_errors(step_dir):
                report = check()
        except (RunError, OSError, ValueError, KeyError, TypeError) as error:
            report = HostReport({}, f"{step_dir}: could not be read back ({error})")
            is_down = isinstance(error, StorageUnavailable)
            if is_down and not isinstance(error, storage.TransferCorrupted):
                break
        if not report.failure:
            break
    return report


def _read_back(
    names: Sequence[str],
    reader: ArrayReader,
    arrays: Mapping[str, ArrayInfo],
    chunks: Mapping[str, list[Chunk]],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> tuple[dict[str, FileInfo], set[str]]:
    """Reads files and arrays once; returns the files' checksums, and the arrays that are wrong."""
    rest = {path: expected[path] for path in expected.keys() - chunks.keys()}
    found, wrong = _scan_files(reader.step_dir, chunks, expected, pace)
    wrong |= _wrong_arrays(reader, arrays, rest, pace)
    found |= checksums(reader.step_dir, [name for name in names if name not in found], pace)
    return found, wrong


def _reads_differently(step_dir: RunPath, wrong: Collection[str]) -> HostReport:
    return HostReport(
        {},
        f"{step_dir}: {', '.join(sorted(wrong))} differ from what was written, when read back. "
        "Is the disk, or this machine's memory, faulty?",
    )


def verify_part(
    step_dir: RunPath,
    database: str,
    arrays: Mapping[str, ArrayInfo],
    boxes: Mapping[str, Collection[Box]],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> HostReport:
    """Verifies one part of a save, which is a database of its own; returns the report on its files.

    Args:
      arrays: path -> dtype and shape of the arrays in it.
      boxes: path -> boxes of items that are in it.
      expected: path -> digests of the snapshot.
    """

    def check() -> HostReport:
        own = [f"{database}/{name}" for name in manifests.inventory(step_dir / database)]
        drop_from_memory(step_dir, own)
        chunks = _with_digests(locate_below(step_dir, database, arrays, boxes), expected)
        reader = ArrayReader(step_dir, arrays, frozen=(), database=database)
        found, wrong = _read_back(own, reader, arrays, chunks, expected, pace)
        return _reads_differently(step_dir, wrong) if wrong else HostReport(found)

    return report_of(step_dir, check)


def verify_object(
    step_dir: GcsPath,
    name: str,
    stat: Stat,
    chunks: Mapping[str, list[Chunk]],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> HostReport:
    """Downloads an object of a save once, and compares it; returns the report on it.

    Args:
      stat: the generation that was written.
      chunks: path -> the chunks of an array, all of which are in the object.
      expected: path -> digests of the snapshot.
    """
    placed = {path: own for path, own in chunks.items() if own}
    by_chunk = _with_digests(placed, expected)

    def check() -> HostReport:
        wrong, compare = set[str](), _comparison(by_chunk, expected)
        pieces = {
            path: {c.box: np.empty(c.shape, dtype_named(c.info.dtype)) for c in placed[path]}
            for path in placed.keys() - by_chunk.keys()
        }

        def visit(chunk: Chunk, box: Box, items: np.ndarray) -> None:
            if chunk.path in pieces:
                pieces[chunk.path][chunk.box][index_of(box, within=chunk.box)] = items
            elif not compare(chunk, box, items):
                wrong.add(chunk.path)

        file = ChunkReader(gcs_objects.iter_generation(step_dir / name, stat), stat.size)
        flat = [chunk for own in placed.values() for chunk in own]
        info = scan_opened(file, step_dir / name, flat, visit, pace)
        file.end()
        for path, own in pieces.items():
            if digests_of(placed[path][0].info, own) != expected[path]:
                wrong.add(path)
        return _reads_differently(step_dir, wrong) if wrong else HostReport({name: info})

    return report_of(step_dir, check)


def verify_index(
    step_dir: GcsPath,
    database: str,
    infos: Mapping[str, ArrayInfo],
    chunks: Mapping[str, list[Chunk]],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> HostReport:
    """Verifies that the index of a database in a bucket has each chunk where it was written.

    Args:
      infos: path -> dtype and shape of the arrays in it.
      chunks: path -> the chunks of an array in the data files; the others are in the index.
      expected: path -> digests of the snapshot.
    """

    def check() -> HostReport:
        placed = {path: own for path, own in chunks.items() if own}
        boxes = {path: [chunk.box for chunk in own] for path, own in placed.items()}
        found = locate_below(step_dir, database, {p: infos[p] for p in placed}, boxes)
        wrong = {path for path, own in found.items() if {*own} != {*placed[path]}}
        rest = {path: each for path, each in expected.items() if path not in found}
        reader = ArrayReader(step_dir, infos, frozen=(), database=database)
        wrong |= _wrong_arrays(reader, infos, rest, pace)
        return _reads_differently(step_dir, wrong) if wrong else HostReport({})

    return report_of(step_dir, check)


def writer_of(name: str) -> int | None:
    """Returns the number of the process that writes a file of a step; None: host 0 writes it.

    >>> writer_of("state/ocdbt.process_1/d/9f"), writer_of("digests/process_0.json")
    (1, 0)
    >>> writer_of("state/manifest.ocdbt")
    """
    match = _PROCESS_FILE.fullmatch(name)
    return None if match is None else int(next(filter(None, match.groups())))


def drop_from_memory(step_dir: RunPath, names: Sequence[str]) -> None:
    """Makes files durable and drops them from the page cache: the next read is from the disk."""
    for name in names:
        storage.sync_file(step_dir / name)
        storage.drop_page_cache(step_dir / name)


def checksums(
    step_dir: RunPath, names: Sequence[str], pace: Throttle = UNTHROTTLED
) -> dict[str, FileInfo]:
    """Reads files, and returns their sizes and checksums."""
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        infos = pool.map(lambda name: _checksum(step_dir / name, pace), names)
        return dict(zip(names, infos, strict=True))


def file_info(path: RunPath, pace: Throttle = UNTHROTTLED) -> FileInfo:
    """Returns size and checksum of a file as read from disk, bypassing the page cache."""
    storage.drop_page_cache(path)
    return _checksum(path, pace)


def _checksum(path: RunPath, pace: Throttle) -> FileInfo:
    for _ in range(REMOTE_TRIES - 1 if is_remote(path) else 0):
        with contextlib.suppress(storage.TransferCorrupted):
            return _checksum_once(path, pace)
    return _checksum_once(path, pace)


def _checksum_once(path: RunPath, pace: Throttle) -> FileInfo:
    size, checksum = 0, xxhash.xxh3_128()
    for part in pace.each(storage.iter_chunks(path, size_bytes=READ_BYTES)):
        size += len(part)
        checksum.update(part)
        pace.spend(len(part))
    return FileInfo(size, checksum.hexdigest())


def _snapshot_digests(
    step_dir: RunPath, process: int, frozen: Collection[str]
) -> dict[str, Digests]:
    """Returns path -> the digests that this process has computed of its snapshot."""
    own: dict[str, Digests] = {}
    for folder in (manifests.DIGESTS, *([manifests.FROZEN_DIGESTS] if frozen else [])):
        own |= decode(storage.read_whole(step_dir / folder / f"process_{process}.json"))
    return own


def _own_chunks(
    step_dir: RunPath,
    arrays: Mapping[str, ArrayInfo],
    expected: Mapping[str, Digests],
    process: int,
    frozen: Collection[str],
) -> dict[str, list[Chunk]]:
    """Returns path -> chunks that this process has written, if each has digests of its own.

    Other arrays are read through TensorStore: small ones, those whose chunks cut blocks, and all in
    a bucket.
    """
    if is_remote(step_dir):
        return {}
    chunks = locate_chunks(step_dir, arrays, frozen=frozen)
    own = {
        path: [chunk for chunk in found if writer_of(chunk.file) == process]
        for path, found in chunks.items()
    }
    return _with_digests(own, expected)


def _with_digests(
    chunks: Mapping[str, list[Chunk]], expected: Mapping[str, Digests]
) -> dict[str, list[Chunk]]:
    """Returns the arrays each chunk of which has digests of its own."""
    found: dict[str, list[Chunk]] = {}
    for path, own in chunks.items():
        digests = expected.get(path, Digests())
        if not digests.parts and {grid_box(c.info, c.box) for c in own} == {*dict(digests.blocks)}:
            found[path] = own
    return found


def _scan_files(
    step_dir: RunPath,
    chunks: Mapping[str, list[Chunk]],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> tuple[dict[str, FileInfo], set[str]]:
    """Reads the files of these chunks; returns their checksums, and the arrays that are wrong."""
    files, compare = by_file(chunks), _comparison(chunks, expected)
    wrong: set[str] = set()

    def visit(chunk: Chunk, box: Box, items: np.ndarray) -> None:
        if not compare(chunk, box, items):
            wrong.add(chunk.path)

    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        infos = pool.map(lambda name: scan(step_dir / name, files[name], visit, pace), files)
        return dict(zip(files, infos, strict=True)), wrong


def _comparison(
    chunks: Mapping[str, list[Chunk]], expected: Mapping[str, Digests]
) -> Callable[[Chunk, Box, np.ndarray], bool]:
    """Returns whether the items of a box in a chunk have the digests of the snapshot."""
    wanted = {path: dict(expected[path].blocks) for path in chunks}

    def is_same(chunk: Chunk, box: Box, items: np.ndarray) -> bool:
        whole, part = grid_box(chunk.info, chunk.box), grid_box(chunk.info, box)
        return (
            whole is not None
            and part is not None
            and block_digests(items, chunk.info.block)
            == rows_of(whole, wanted[chunk.path][whole], part)
        )

    return is_same


def _wrong_arrays(
    reader: ArrayReader,
    arrays: Mapping[str, ArrayInfo],
    expected: Mapping[str, Digests],
    pace: Throttle,
) -> set[str]:
    """Returns the arrays whose blocks, as TensorStore reads them, have other digests."""
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        same = pool.map(
            lambda path: _is_same(reader, path, arrays[path], expected[path], pace), expected
        )
        return {path for path, is_same in zip(expected, same, strict=True) if not is_same}


def _is_same(
    reader: ArrayReader, path: str, info: ArrayInfo, digests: Digests, pace: Throttle
) -> bool:
    limit = reader.region_bytes(path)
    for box, block_bytes in digests.blocks:
        for items, expected in split(info, box, block_bytes, limit_bytes=limit):
            with pace.piece():
                if block_digests(reader.read(path, items), info.block) != expected:
                    return False
    return all(block_digest(reader.read(path, box)) == expected for box, expected in digests.parts)


def gather_reports(
    own: HostReport, step_dir: RunPath, peers: HostGroup, *, topic: str, seconds: float
) -> list[HostReport]:
    """Sends this host's report; returns, on host 0, the reports of all hosts.

    Raises:
      StorageUnavailable: a report did not arrive in time; the step is discarded.
    """
    try:
        messages = peers.gather(f"{topic}/written", own.encode(), seconds=seconds)
    except PeerLost as lost:
        raise StorageUnavailable(
            f"{step_dir}: not every host has reported its part as written within {seconds:.0f} s "
            f"(checkpoint.timeout_seconds; {lost}). The step is "
            "discarded; nothing committed is lost."
        ) from lost
    reports = [HostReport.decode(message) for message in messages]
    if len(reports) == 1:
        return reports
    return [host_report.of(host) for host, host_report in enumerate(reports)]
