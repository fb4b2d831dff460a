"""Makes a step that Orbax has written whole: facts, manifest, all of it read back from the disk.

The last thing before the commit record; only the lead's saver calls it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import (
    ArrayInfo,
    Box,
    Digests,
    Table,
    decode,
    encode,
    index_of,
    items_of,
)
from jaxres.checkpoint.content_digest import block_digest, digest_of_rows
from jaxres.checkpoint.manifest import DIGESTS, MANIFEST, PROGRESS, FileInfo, Manifest
from jaxres.checkpoint.readback import Report, file_info, read_back
from jaxres.checkpoint.tensorstore_reader import ArrayReader
from jaxres.engine.state import Progress
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Claim, Commit
from jaxres.storage import files
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import Place, relative

CUT_BLOCKS = f"{DIGESTS}/read_back.json"
"""Blocks that lie on several processes: digested from what was written, part by part as it was."""


def seal(
    step_dir: Place,
    progress: Progress,
    arrays: Mapping[str, ArrayInfo],
    reports: Sequence[Report],
    *,
    root: Place,
    claim: Claim,
) -> Commit:
    """Writes what Orbax leaves out and returns the record of a step that is durable and whole.

    Args:
      step_dir: absolute; Orbax has finished there.
      progress: the host's facts at the step.
      arrays: what was written.
      reports: every process's of its own files.
      root: absolute, of the run directory.
      claim: of this attempt.

    Raises:
      StorageUnavailable: storage did not take it, or gives something else back.
    """
    failures = [report.failure for report in reports if report.failure]
    if failures:
        raise StorageUnavailable("; ".join(failures))
    facts = dataclasses.asdict(progress)
    with files.typed_errors(step_dir):
        digests = _array_digests(step_dir, arrays)
        files.replace(step_dir / PROGRESS, canonical_json(facts))
        rows = [
            [path, arrays[path].dtype, list(arrays[path].shape), digests[path]]
            for path in sorted(arrays)
        ]
        manifest = Manifest(
            step=progress.step,
            attempt=claim.attempt,
            files=_files(step_dir, reports),
            arrays=arrays,
            digests=digests,
            digest=digest_of_rows(rows, progress=facts),
            versions=claim.versions,
            fingerprint=claim.fingerprint,
            trajectory=claim.trajectory,
        )
        data = manifest.encode()
        files.replace(step_dir / MANIFEST, data)
        files.sync_tree(step_dir)
        if manifests.inventory(step_dir) != {n: f.size for n, f in manifest.files.items()} or (
            file_info(step_dir / MANIFEST) != manifests.info_of(data)
        ):
            raise StorageUnavailable(f"{step_dir}: reads back differently from what was written.")
    return Commit(
        step=progress.step,
        path=relative(step_dir, root),
        manifest=manifests.digest_of(data),
        bytes=sum(info.size for info in manifest.files.values()) + len(data),
        known_good=False,
        heldout_loss=progress.heldout_loss,
        evaluated_step=progress.evaluated_step,
    )


def _files(step_dir: Place, reports: Sequence[Report]) -> dict[str, FileInfo]:
    """Returns what every file is: those that no process has reported are the lead's to read."""
    reported = {name: info for report in reports for name, info in report.files.items()}
    present = manifests.inventory(step_dir)
    missing = sorted(reported.keys() - present.keys())
    if missing:
        raise StorageUnavailable(f"{step_dir}: {missing[0]} was written and is not there.")
    return reported | read_back(step_dir, sorted(present.keys() - reported.keys()))


def _array_digests(step_dir: Place, arrays: Mapping[str, ArrayInfo]) -> dict[str, str]:
    """Returns the digest of every array, from the blocks that all processes have digested."""
    tables = {path: Table(info) for path, info in arrays.items()}
    try:
        for name in files.list_names(step_dir / DIGESTS):
            if fnmatch.fnmatch(name, "process_*.json"):
                for path, found in decode(files.read_whole(step_dir / DIGESTS / name)).items():
                    tables[path].add(found)
        cut = _digest_cut_blocks(step_dir, tables)
        if cut:
            files.replace(step_dir / CUT_BLOCKS, encode(cut))
        return {path: table.root(path) for path, table in tables.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise StorageUnavailable(
            f"{step_dir}: the digests of what was written are not whole ({error}). The step is "
            "given up; nothing committed is lost."
        ) from error


def _digest_cut_blocks(step_dir: Place, tables: Mapping[str, Table]) -> dict[str, Digests]:
    reader = ArrayReader(step_dir, {path: table.info for path, table in tables.items()})
    found: dict[str, Digests] = {}
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
            found[path] = Digests(tuple(blocks))
            table.add(found[path])
    return found
