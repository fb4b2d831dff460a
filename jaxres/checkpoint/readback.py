"""Reads back what a host has just written, before anything may count on it. No jax.

Every host makes its own files durable, drops them from memory, reads them again for their
checksums, and holds its own blocks, read through TensorStore, against the digests of the snapshot.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import xxhash

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import ArrayInfo, Digests, decode, split
from jaxres.checkpoint.content_digest import block_digest, block_digests
from jaxres.checkpoint.manifest import FileInfo
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.checkpoint.throttle import AT_ONCE, Pace
from jaxres.cluster.host_group import Peers
from jaxres.faults import PeerLost, StorageUnavailable, TypedEnd
from jaxres.storage import files as storage
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import BucketPath, Place

THREADS = 2
READ_BYTES = 2**22
REMOTE_TRIES = 4
_OF_A_PROCESS = re.compile(
    r"state/ocdbt\.process_(\d+)/.*|state/array_metadatas/process_(\d+)|digests/process_(\d+)\.json"
)


@dataclass(frozen=True)
class Report:
    """What one host tells the lead when its part of a step is written."""

    files: Mapping[str, FileInfo]
    """The host's own, as they were read back."""
    failure: str = ""
    """Why the host's part is not there; empty: it is."""

    def of(self, host: int) -> Report:
        """Returns the report with the host's name."""
        return Report(self.files, self.failure and f"host {host}: {self.failure}")

    def encode(self) -> str:
        """Returns the report as a word between hosts."""
        files = {name: asdict(info) for name, info in self.files.items()}
        return canonical_json({"files": files, "failure": self.failure}).decode()

    @staticmethod
    def decode(word: str) -> Report:
        """Reads a report back."""
        fields = json.loads(word)
        files = {name: FileInfo(**row) for name, row in fields["files"].items()}
        return Report(files, fields["failure"])


def report(step_dir: Place, arrays: Mapping[str, ArrayInfo], process: int, pace: Pace) -> Report:
    """Returns what one process reports of its part of a step that Orbax has finished.

    What comes from a bucket may have been damaged on its way, so it is read a few times.
    """
    found = Report({})
    for _ in range(REMOTE_TRIES if isinstance(step_dir, BucketPath) else 1):
        found, may_pass = _report(step_dir, arrays, process, pace)
        if not may_pass:
            break
    return found


def _report(
    step_dir: Place, arrays: Mapping[str, ArrayInfo], process: int, pace: Pace
) -> tuple[Report, bool]:
    """Returns the report, and whether what is wrong may be so only once.

    A bucket that does not answer was asked for long enough.
    """
    try:
        with storage.typed_errors(step_dir):
            own = [name for name in manifests.inventory(step_dir) if process_of(name) == process]
            files = read_back(step_dir, own, pace)
            wrong = _wrong_arrays(step_dir, arrays, process=process, pace=pace)
    except (TypedEnd, OSError, ValueError, KeyError, TypeError) as error:
        is_away = isinstance(error, StorageUnavailable) and not isinstance(error, storage.OnItsWay)
        return Report({}, f"{step_dir}: could not be read back ({error})"), not is_away
    if wrong:
        text = (
            f"{step_dir}: {', '.join(wrong)} read back differently from what was written. Is the "
            "disk, or this machine's memory, sound?"
        )
        return Report({}, text), True
    return Report(files), False


def process_of(name: str) -> int | None:
    """Returns which process writes a file of a step; None: the lead alone.

    >>> process_of("state/ocdbt.process_1/d/9f"), process_of("digests/process_0.json")
    (1, 0)
    >>> process_of("state/manifest.ocdbt")
    """
    found = _OF_A_PROCESS.fullmatch(name)
    return None if found is None else int(next(filter(None, found.groups())))


def read_back(step_dir: Place, names: Sequence[str], pace: Pace = AT_ONCE) -> dict[str, FileInfo]:
    """Makes files durable and returns what they are when they are read from the disk again."""
    for name in names:
        storage.sync_file(step_dir / name)
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        found = pool.map(lambda name: file_info(step_dir / name, pace), names)
        return dict(zip(names, found, strict=True))


def file_info(path: Place, pace: Pace = AT_ONCE) -> FileInfo:
    """Reads a file from the disk, not from memory; raises whatever storage says."""
    for _ in range(REMOTE_TRIES - 1 if isinstance(path, BucketPath) else 0):
        with contextlib.suppress(storage.OnItsWay):
            return _file_info(path, pace)
    return _file_info(path, pace)


def _file_info(path: Place, pace: Pace) -> FileInfo:
    storage.forget(path)
    size, checksum = 0, xxhash.xxh3_128()
    for part in pace.each(storage.blocks(path, size_bytes=READ_BYTES)):
        size += len(part)
        checksum.update(part)
    return FileInfo(size, checksum.hexdigest())


def _wrong_arrays(
    step_dir: Place, arrays: Mapping[str, ArrayInfo], *, process: int, pace: Pace
) -> list[str]:
    """Returns the arrays of which a reader of the step gets other blocks than were digested."""
    name = f"{manifests.DIGESTS}/process_{process}.json"
    mine = decode(storage.read_whole(step_dir / name))
    reader = ArrayReader(step_dir, arrays)
    with ThreadPoolExecutor(THREADS, "jaxres-readback") as pool:
        same = pool.map(lambda path: _is_same(reader, path, arrays[path], mine[path], pace), mine)
        return [path for path, is_same in zip(mine, same, strict=True) if not is_same]


def _is_same(reader: ArrayReader, path: str, info: ArrayInfo, digests: Digests, pace: Pace) -> bool:
    limit = reader.region_bytes(path)
    for box, wanted in digests.blocks:
        for items, one in split(info, box, wanted, limit_bytes=limit):
            with pace.piece():
                if block_digests(reader.read(path, items), info.block) != one:
                    return False
    return all(block_digest(reader.read(path, box)) == one for box, one in digests.parts)


def gathered(
    own: Report, step_dir: Place, peers: Peers, *, topic: str, seconds: float
) -> list[Report]:
    """Returns on the lead every host's report, once all are there.

    Raises:
      StorageUnavailable: one did not come in time; the step is given up.
    """
    try:
        words = peers.collect(f"{topic}/written", own.encode(), seconds=seconds)
    except PeerLost as lost:
        raise StorageUnavailable(
            f"{step_dir}: not every host has said within {seconds:.0f} s "
            f"(checkpoint.timeout_seconds) that its part is written ({lost}). The step is "
            "given up; nothing committed is lost."
        ) from lost
    found = [Report.decode(word) for word in words]
    return found if len(found) == 1 else [one.of(host) for host, one in enumerate(found)]
