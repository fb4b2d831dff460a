"""Finalizes a step whose arrays are written: facts and manifest, all of it verified on disk.

This is the last action before the commit record. Only the saver thread of host 0 runs it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import (
    ArrayInfo,
    BlockTable,
    Box,
    Digests,
    decode,
    encode,
    index_of,
    items_of,
)
from jaxres.checkpoint.content_digest import block_digest, digest_of_rows
from jaxres.checkpoint.frozen_arrays import NOTHING_LINKED, LinkedFiles
from jaxres.checkpoint.manifest import (
    DIGESTS,
    FORMAT,
    FROZEN_DIGESTS,
    FROZEN_FORMAT,
    MANIFEST,
    PROGRESS,
    FileInfo,
    Manifest,
)
from jaxres.checkpoint.readback import HostReport, checksums, drop_from_memory, file_info
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.engine.state import Progress
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Claim, Commit, Record
from jaxres.runlog.step_dirs import LOG_COPY
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import RunPath, relative

CUT_BLOCKS = "read_back.json"
"""File of the digests of blocks shared by several processes, computed from the written data."""


def finalize(
    step_dir: RunPath,
    progress: Progress,
    arrays: Mapping[str, ArrayInfo],
    reports: Sequence[HostReport],
    *,
    root: RunPath,
    claim: Claim,
    records: Sequence[Record],
    frozen: Collection[str] = (),
    linked: LinkedFiles = NOTHING_LINKED,
) -> Commit:
    """Writes progress.json, a copy of the log and the manifest; returns the step's commit record.

    Args:
      step_dir: absolute path of the step directory; Orbax has finished writing it.
      progress: the host's facts at the step.
      arrays: path -> dtype and shape of all arrays of the step.
      reports: every process's report on its own files.
      root: absolute path of the run directory.
      claim: claim of this attempt.
      records: the run log so far; `checkpoints adopt` rebuilds a lost log from this copy.
      frozen: paths of the arrays in the folder of the frozen parameters.
      linked: those of these whose files are links; they are not read again.

    Raises:
      StorageUnavailable: storage has failed, or returns other data than were written.
    """
    failures = [report.failure for report in reports if report.failure]
    if failures:
        raise StorageUnavailable("; ".join(failures))
    facts = dataclasses.asdict(progress)
    with files.typed_errors(step_dir):
        digests = _array_digests(step_dir, arrays, frozen, linked)
        log = b"".join(record.encode() + b"\n" for record in records)
        content = {PROGRESS: canonical_json(facts), LOG_COPY: log}
        for name, data in content.items():
            files.replace(step_dir / name, data)
        manifest = Manifest(
            format=FROZEN_FORMAT if frozen else FORMAT,
            step=progress.step,
            attempt=claim.attempt,
            files=_files(step_dir, reports, linked, content),
            arrays=arrays,
            digests=digests,
            frozen=tuple(sorted(frozen)),
            digest=digest_of_rows(_rows(arrays, digests), progress=facts),
            versions=claim.versions,
            fingerprint=claim.fingerprint,
            trajectory=claim.trajectory,
        )
        data = _write_manifest(step_dir, manifest)
    return Commit(
        step=progress.step,
        path=relative(step_dir, root),
        manifest=manifests.digest_of(data),
        bytes=sum(info.size for info in manifest.files.values()) + len(data),
        heldout_loss=progress.heldout_loss,
        evaluated_step=progress.evaluated_step,
    )


def _write_manifest(step_dir: RunPath, manifest: Manifest) -> bytes:
    """Writes the manifest, makes all of the step durable, and returns the manifest's bytes."""
    data = manifest.encode()
    files.replace(step_dir / MANIFEST, data)
    files.sync_tree(step_dir)
    if manifests.inventory(step_dir) != {n: f.size for n, f in manifest.files.items()} or (
        file_info(step_dir / MANIFEST) != manifests.info_of(data)
    ):
        raise StorageUnavailable(f"{step_dir}: reads back differently from what was written.")
    return data


def _rows(arrays: Mapping[str, ArrayInfo], digests: Mapping[str, str]) -> list[list[Any]]:
    """Returns the rows of the content digest, in their order."""
    return [
        [path, arrays[path].dtype, list(arrays[path].shape), digests[path]]
        for path in sorted(arrays)
    ]


def _files(
    step_dir: RunPath,
    reports: Sequence[HostReport],
    linked: LinkedFiles,
    content: Mapping[str, bytes],
) -> dict[str, FileInfo]:
    """Returns size and checksum of every file; reads those that are neither reported nor linked.

    Those whose content is given must read back as it.
    """
    reported = dict(linked.files)
    for report in reports:
        reported |= report.files
    present = manifests.inventory(step_dir)
    missing = sorted(reported.keys() - present.keys())
    if missing:
        raise StorageUnavailable(f"{step_dir}: {missing[0]} was written and is missing.")
    others = sorted(present.keys() - reported.keys())
    drop_from_memory(step_dir, others)
    found = reported | checksums(step_dir, others)
    for name, data in content.items():
        if found.get(name) != manifests.info_of(data):
            raise StorageUnavailable(
                f"{step_dir}: {name} reads back differently from what was written. The step is "
                "discarded; nothing committed is lost."
            )
    return found


def _array_digests(
    step_dir: RunPath,
    arrays: Mapping[str, ArrayInfo],
    frozen: Collection[str],
    linked: LinkedFiles,
) -> dict[str, str]:
    """Returns the digest of every array; of a written one from its block digests."""
    written = {path: info for path, info in arrays.items() if path not in linked.digests}
    changing = {path: info for path, info in written.items() if path not in frozen}
    still = {path: info for path, info in written.items() if path in frozen}
    digests = _digests_below(step_dir, DIGESTS, changing, frozen)
    digests |= _digests_below(step_dir, FROZEN_DIGESTS, still, frozen)
    return digests | dict(linked.digests)


def _digests_below(
    step_dir: RunPath, folder: str, arrays: Mapping[str, ArrayInfo], frozen: Collection[str]
) -> dict[str, str]:
    """Returns the digest of the arrays whose block digests are in one folder."""
    tables = {path: BlockTable(info) for path, info in arrays.items()}
    try:
        names = files.list_names(step_dir / folder) if arrays else []
        wanted = fnmatch.filter(names, "process_*.json")
        for data in files.read_all([step_dir / folder / name for name in wanted]):
            for path, digests in decode(data or b"").items():
                tables[path].add(digests)
        cut = _digest_cut_blocks(step_dir, tables, frozen)
        if cut:
            path, data = step_dir / folder / CUT_BLOCKS, encode(cut)
            files.replace(path, data)
            if file_info(path) != manifests.info_of(data):
                raise ValueError(f"{path.name} reads back differently from what was written")
        return {path: table.root(path) for path, table in tables.items()}
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
