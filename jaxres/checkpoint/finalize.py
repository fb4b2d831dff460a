"""Finalizes a step whose arrays are written: facts and manifest, all of it verified on disk.

This is the last action before the commit record. Only the saver thread of host 0 runs it. What does
not depend on each other runs at the same time: in a bucket all of it is requests, whose latency is
most of the time that is left here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxres.checkpoint.digests.block_digests import (
    ArrayInfo,
    BlockTable,
    Box,
    Digests,
    decode,
    encode,
    index_of,
    items_of,
)
from jaxres.checkpoint.digests.content_digest import block_digest, digest_of_rows
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import (
    DIGESTS,
    FORMAT,
    FROZEN_DIGESTS,
    FROZEN_FORMAT,
    HELDOUT_DATA,
    MANIFEST,
    PROGRESS,
    FileInfo,
    Manifest,
)
from jaxres.checkpoint.read.readback import HostReport, checksums, drop_from_memory, file_info
from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.checkpoint.write.frozen_arrays import NOTHING_LINKED, LinkedFiles
from jaxres.engine.state import Progress
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Claim, Commit, Record
from jaxres.runlog.step_dirs import LOG_COPY
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import RunPath, relative

CUT_BLOCKS = "read_back.json"
"""File of the digests of blocks shared by several processes, computed from the written data."""
_FOLDERS = (DIGESTS, FROZEN_DIGESTS)


@dataclasses.dataclass(frozen=True)
class WrittenArrays:
    """The arrays of a step whose files all hosts have written."""

    infos: Mapping[str, ArrayInfo]
    """Path -> dtype and shape of all arrays of the step."""
    frozen: Collection[str] = ()
    """Paths of the arrays in the folder of the frozen parameters."""
    linked: LinkedFiles = NOTHING_LINKED
    """Files of the frozen arrays that are links; they are not read again."""
    markers: Mapping[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])
    """Name -> content of files that must follow all others of the arrays."""


def finalize(
    step_dir: RunPath,
    progress: Progress,
    written: WrittenArrays,
    reports: Sequence[HostReport],
    *,
    root: RunPath,
    claim: Claim,
    records: Callable[[], Sequence[Record]],
) -> Commit:
    """Writes progress.json, a copy of the log and the manifest; returns the step's commit record.

    Args:
      step_dir: absolute path of the step directory.
      reports: every process's report on its own files.
      root: absolute path of the run directory.
      records: returns the run log; `checkpoints adopt` rebuilds a lost one from this copy.

    Raises:
      StorageUnavailable: storage has failed, or returns other data than were written.
    """
    _require_no_failure(reports)
    facts, arrays, frozen = progress.facts, written.infos, written.frozen
    with files.typed_errors(step_dir):
        with ThreadPoolExecutor(1, "jaxres-finalize") as pool:
            log = pool.submit(_encoded_log, records)
            digests, infos = _digests_and_files(step_dir, arrays, reports, frozen, written.linked)
        content = {PROGRESS: canonical_json(facts), LOG_COPY: log.result(), **written.markers}
        if progress.heldout_data:
            content[HELDOUT_DATA] = progress.heldout_data.encode()
        manifest = Manifest(
            format=FROZEN_FORMAT if frozen else FORMAT,
            step=progress.step,
            attempt=claim.attempt,
            files=infos | {name: manifests.info_of(data) for name, data in content.items()},
            arrays=arrays,
            digests=digests,
            frozen=tuple(sorted(frozen)),
            digest=digest_of_rows(_rows(arrays, digests), progress=facts),
            versions=claim.versions,
            fingerprint=claim.fingerprint,
            trajectory=claim.trajectory,
        )
        data = _write_last(step_dir, content, manifest)
    size = sum(info.size for info in manifest.files.values()) + len(data)
    return _commit_record(progress, relative(step_dir, root), manifest=data, size_bytes=size)


def _commit_record(progress: Progress, path: str, *, manifest: bytes, size_bytes: int) -> Commit:
    return Commit(
        step=progress.step,
        path=path,
        manifest=manifests.digest_of(manifest),
        bytes=size_bytes,
        heldout_loss=progress.heldout_loss,
        evaluated_step=progress.evaluated_step,
        heldout_data=progress.heldout_data,
    )


def _write_last(step_dir: RunPath, facts: Mapping[str, bytes], manifest: Manifest) -> bytes:
    """Writes facts and manifest, and makes all of the step durable; returns the manifest's bytes.

    On a disk the manifest is the last one. In a bucket, where an object is there as a whole or not
    at all, they are written at the same time.
    """
    content = {**facts, MANIFEST: manifest.encode()}
    files.replace_all({step_dir / name: data for name, data in content.items()})
    files.sync_tree(step_dir)
    drop_from_memory(step_dir, list(content))
    with ThreadPoolExecutor(1, "jaxres-readback") as pool:
        listing = pool.submit(manifests.inventory, step_dir)
        found = files.read_all([step_dir / name for name in content])
    for (name, data), read in zip(content.items(), found, strict=True):
        if read != data:
            raise StorageUnavailable(
                f"{step_dir}: {name} reads back differently from what was written. The step is "
                "discarded; nothing committed is lost."
            )
    if listing.result() != {name: info.size for name, info in manifest.files.items()}:
        raise StorageUnavailable(f"{step_dir}: reads back differently from what was written.")
    return content[MANIFEST]


def _require_no_failure(reports: Sequence[HostReport]) -> None:
    if failures := [report.failure for report in reports if report.failure]:
        raise StorageUnavailable("; ".join(failures))


def _encoded_log(records: Callable[[], Sequence[Record]]) -> bytes:
    return b"".join(record.encode() + b"\n" for record in records())


def _rows(arrays: Mapping[str, ArrayInfo], digests: Mapping[str, str]) -> list[list[Any]]:
    """Returns the rows of the content digest, in their order."""
    return [
        [path, arrays[path].dtype, list(arrays[path].shape), digests[path]]
        for path in sorted(arrays)
    ]


def _digests_and_files(
    step_dir: RunPath,
    arrays: Mapping[str, ArrayInfo],
    reports: Sequence[HostReport],
    frozen: Collection[str],
    linked: LinkedFiles,
) -> tuple[dict[str, str], dict[str, FileInfo]]:
    """Returns the digest of every array, and size and checksum of every file that is written."""
    with ThreadPoolExecutor(1, "jaxres-finalize") as pool:
        listing = pool.submit(_written_files, step_dir, reports, linked)
        digests, cut_blocks = _array_digests(
            step_dir, _digest_files(reports), arrays, frozen, linked
        )
    return digests, listing.result() | cut_blocks


def _written_files(
    step_dir: RunPath, reports: Sequence[HostReport], linked: LinkedFiles
) -> dict[str, FileInfo]:
    """Returns size and checksum of every file; reads files neither reported nor linked.

    Digests of cut blocks are left out, and their temporary file: they are written meanwhile.
    """
    reported = dict(linked.files)
    for report in reports:
        reported |= report.files
    present = manifests.inventory(step_dir)
    missing = sorted(reported.keys() - present.keys())
    if missing:
        raise StorageUnavailable(f"{step_dir}: {missing[0]} was written and is missing.")
    others = sorted(name for name in present.keys() - reported.keys() if CUT_BLOCKS not in name)
    drop_from_memory(step_dir, others)
    return reported | checksums(step_dir, others)


def _digest_files(reports: Sequence[HostReport]) -> list[str]:
    """Returns the names of all hosts' block digests."""
    names = (name for report in reports for name in report.files)
    return sorted(name for name in names if name.partition("/")[0] in _FOLDERS)


def _array_digests(
    step_dir: RunPath,
    names: Sequence[str],
    arrays: Mapping[str, ArrayInfo],
    frozen: Collection[str],
    linked: LinkedFiles,
) -> tuple[dict[str, str], dict[str, FileInfo]]:
    """Returns the digest of every array; of a written one from its block digests.

    Also returns the files that were written for blocks that several processes share.
    """
    written = {path: info for path, info in arrays.items() if path not in linked.digests}
    changing = {path: info for path, info in written.items() if path not in frozen}
    still = {path: info for path, info in written.items() if path in frozen}
    digests, infos = dict(linked.digests), dict[str, FileInfo]()
    for folder, below in ((DIGESTS, changing), (FROZEN_DIGESTS, still)):
        own = [name for name in names if name.startswith(f"{folder}/")]
        found, cut_blocks = _digests_below(step_dir, folder, own, below, frozen)
        digests, infos = digests | found, infos | cut_blocks
    return digests, infos


def _digests_below(
    step_dir: RunPath,
    folder: str,
    names: Sequence[str],
    arrays: Mapping[str, ArrayInfo],
    frozen: Collection[str],
) -> tuple[dict[str, str], dict[str, FileInfo]]:
    """Returns, for one folder of digests, every array's digest and the files that were written."""
    tables = {path: BlockTable(info) for path, info in arrays.items()}
    try:
        for data in files.read_all([step_dir / name for name in names] if arrays else []):
            for path, digests in decode(data or b"").items():
                tables[path].add(digests)
        cut = _digest_cut_blocks(step_dir, tables, frozen)
        infos: dict[str, FileInfo] = {}
        if cut:
            path, data = step_dir / folder / CUT_BLOCKS, encode(cut)
            files.replace(path, data)
            infos[f"{folder}/{CUT_BLOCKS}"] = manifests.info_of(data)
            if file_info(path) != manifests.info_of(data):
                raise ValueError(f"{path.name} reads back differently from what was written")
        return {path: table.root(path) for path, table in tables.items()}, infos
    except (ValueError, KeyError, TypeError) as error:
        raise StorageUnavailable(
            f"{step_dir}: the digests of the written data are incomplete or wrong ({error}). The "
            "step is discarded; nothing committed is lost."
        ) from error


def _digest_cut_blocks(
    step_dir: RunPath, tables: Mapping[str, BlockTable], frozen: Collection[str]
) -> dict[str, Digests]:
    """Reads and digests the blocks that several processes share; verifies their parts."""
    infos = {path: table.info for path, table in tables.items()}
    reader = ArrayReader(step_dir, infos, frozen=frozen)
    digests: dict[str, Digests] = {}
    for path, table in tables.items():
        blocks: list[tuple[Box, bytes]] = []
        for position in table.missing():
            items = items_of(table.info, position)
            block = reader.read(path, items)
            for part, digest in table.parts_of(position).items():
                if block_digest(block[index_of(part, within=items)]) != digest:
                    raise ValueError(f"{path} reads back differently from what was written")
            blocks.append((tuple((p, p + 1) for p in position), block_digest(block)))
        if blocks:
            digests[path] = Digests(tuple(blocks))
            table.add(digests[path])
    return digests
