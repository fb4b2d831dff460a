"""Verifies the files that a host has just written, before the step is committed. No jax.

Every host makes its own files durable, drops them from the page cache, and reads them again to
compute their checksums. It then reads its own blocks through TensorStore and compares them with the
digests of the snapshot.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import ArrayInfo, Digests, decode, split
from jaxres.checkpoint.content_digest import block_digest, block_digests
from jaxres.checkpoint.manifest import FileInfo
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.cluster.host_group import HostGroup
from jaxres.faults import PeerLost, RunError, StorageUnavailable
from jaxres.storage import codec
from jaxres.storage import files as storage
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import RunPath, is_remote

THREADS = 2
READ_BYTES = 2**22
REMOTE_TRIES = 4
_PROCESS_FILE = re.compile(
    r"state/ocdbt\.process_(\d+)/.*|state/array_metadatas/process_(\d+)|digests/process_(\d+)\.json"
)


@dataclass(frozen=True)
class HostReport:
    """One host's report to host 0 on its part of a written step."""

    files: Mapping[str, FileInfo]
    """Name -> size and checksum of the host's own files, as read back."""
    failure: str = ""
    """Reason why the host's part is missing or wrong; empty if it is valid."""

    def of(self, host: int) -> HostReport:
        """Returns the report; its failure, if any, begins with the host's number."""
        return HostReport(self.files, self.failure and f"host {host}: {self.failure}")

    def encode(self) -> str:
        """Returns the report as a message between hosts."""
        return canonical_json(codec.encode(self)).decode()

    @staticmethod
    def decode(text: str) -> HostReport:
        """Reads a report back."""
        return codec.decode(HostReport, json.loads(text))


def verify_own_files(
    step_dir: RunPath, arrays: Mapping[str, ArrayInfo], process: int, pace: Throttle
) -> HostReport:
    """Verifies one process's part of a step that Orbax has written; returns the report.

    In a bucket a failed verification is repeated: the data may be damaged in transfer.
    """
    result = HostReport({})
    for _ in range(REMOTE_TRIES if is_remote(step_dir) else 1):
        result, may_pass = _report(step_dir, arrays, process, pace)
        if not may_pass:
            break
    return result


def _report(
    step_dir: RunPath, arrays: Mapping[str, ArrayInfo], process: int, pace: Throttle
) -> tuple[HostReport, bool]:
    """Returns the report, and whether its failure may be transient.

    If a bucket does not answer, the failure is not transient: its requests were retried already.
    """
    try:
        with storage.typed_errors(step_dir):
            own = [name for name in manifests.inventory(step_dir) if writer_of(name) == process]
            files = read_back(step_dir, own, pace)
            wrong = _wrong_arrays(step_dir, arrays, process=process, pace=pace)
    except (RunError, OSError, ValueError, KeyError, TypeError) as error:
        is_down = isinstance(error, StorageUnavailable) and not isinstance(
            error, storage.TransferCorrupted
        )
        return HostReport({}, f"{step_dir}: could not be read back ({error})"), not is_down
    if wrong:
        text = (
            f"{step_dir}: {', '.join(wrong)} differ from what was written, when read back. Is the "
            "disk, or this machine's memory, faulty?"
        )
        return HostReport({}, text), True
    return HostReport(files), False


def writer_of(name: str) -> int | None:
    """Returns the number of the process that writes a file of a step; None: host 0 writes it.

    >>> writer_of("state/ocdbt.process_1/d/9f"), writer_of("digests/process_0.json")
    (1, 0)
    >>> writer_of("state/manifest.ocdbt")
    """
    match = _PROCESS_FILE.fullmatch(name)
    return None if match is None else int(next(filter(None, match.groups())))


def read_back(
    step_dir: RunPath, names: Sequence[str], pace: Throttle = UNTHROTTLED
) -> dict[str, FileInfo]:
    """Makes files durable, reads them from disk, and returns their sizes and checksums."""
    for name in names:
        storage.sync_file(step_dir / name)
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        infos = pool.map(lambda name: file_info(step_dir / name, pace), names)
        return dict(zip(names, infos, strict=True))


def file_info(path: RunPath, pace: Throttle = UNTHROTTLED) -> FileInfo:
    """Returns size and checksum of a file as read from disk, bypassing the page cache."""
    for _ in range(REMOTE_TRIES - 1 if is_remote(path) else 0):
        with contextlib.suppress(storage.TransferCorrupted):
            return _file_info(path, pace)
    return _file_info(path, pace)


def _file_info(path: RunPath, pace: Throttle) -> FileInfo:
    storage.drop_page_cache(path)
    size, checksum = 0, xxhash.xxh3_128()
    for part in pace.each(storage.iter_chunks(path, size_bytes=READ_BYTES)):
        size += len(part)
        checksum.update(part)
    return FileInfo(size, checksum.hexdigest())


def _wrong_arrays(
    step_dir: RunPath, arrays: Mapping[str, ArrayInfo], *, process: int, pace: Throttle
) -> list[str]:
    """Returns the arrays whose stored blocks do not match the digests of the snapshot."""
    name = f"{manifests.DIGESTS}/process_{process}.json"
    own = decode(storage.read_whole(step_dir / name))
    reader = ArrayReader(step_dir, arrays)
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        same = pool.map(lambda path: _is_same(reader, path, arrays[path], own[path], pace), own)
        return [path for path, is_same in zip(own, same, strict=True) if not is_same]


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
