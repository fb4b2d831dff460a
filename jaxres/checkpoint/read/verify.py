"""Verifies a committed step: reads every byte and compares it with the manifest. No jax.

Home of: damaged_checkpoint. A step is judged damaged only on proof: two reads from disk return
wrong bytes, or a file is missing while storage answers. checkpoint/restore/restore.py decides
whether a restore falls back to an older step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxres.checkpoint.digests.block_digests import BlockTable, Box, Digests, grid_box
from jaxres.checkpoint.digests.content_digest import block_digests, digest_of_rows
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import (
    MANIFEST,
    PROGRESS,
    CheckpointDamaged,
    FileInfo,
    Manifest,
)
from jaxres.checkpoint.read.readback import REMOTE_TRIES, file_info
from jaxres.checkpoint.read.stored_chunks import Chunk, by_file, locate_chunks, scan
from jaxres.checkpoint.read.tensorstore_reader import ARRAYS, FROZEN, ArrayReader
from jaxres.checkpoint.throttle import UNTHROTTLED, Throttle
from jaxres.faults import StorageUnavailable
from jaxres.runlog import step_dirs
from jaxres.runlog.run_log import Commit
from jaxres.storage import cpu_cores, files
from jaxres.storage.path import RunPath, is_remote

MAX_THREADS = 8
SCAN_THREADS = 4
"""Data files read at a time; each thread holds the largest chunk of its file."""
NAMED = 4
"""Number of problems that a summary lists; of the others it gives the number."""


Part = tuple[str, str]
"""A part of a step that is checked: `file` and its name, or `array` and its path."""


@dataclass(frozen=True)
class Defect:
    """One difference between the stored and the committed content of a step."""

    what: str
    file: str | None = None
    array: str | None = None


@dataclass(frozen=True)
class VerificationReport:
    """The result of one complete verification of a step."""

    step: int
    problems: tuple[Defect, ...]
    num_files: int = 0
    num_arrays: int = 0
    size_bytes: int = 0
    digest: str | None = None
    """The content digest, if the step is valid."""

    @property
    def evidence(self) -> str:
        """The problems in one sentence; empty if there are none."""
        named = [problem.what for problem in self.problems[:NAMED]]
        more = len(self.problems) - len(named)
        return "; ".join([*named, *([f"and {more} more"] if more > 0 else [])])


def verify_step(
    step_dir: RunPath, commit: Commit, *, pace: Throttle = UNTHROTTLED
) -> VerificationReport:
    """Verifies all of a committed step; repeats failed checks with the page cache dropped.

    Raises:
      StorageUnavailable: storage could not be read, or two reads of the same file differ.
    """
    with files.typed_errors(step_dir):
        return _verify_step(step_dir, commit, again=REMOTE_TRIES, pace=pace)


def _verify_step(
    step_dir: RunPath, commit: Commit, *, again: int, pace: Throttle
) -> VerificationReport:
    try:
        manifest = manifests.load(step_dir, commit)  # It repeats a failed read itself.
    except CheckpointDamaged as damage:
        return VerificationReport(commit.step, (Defect(damage.what, file=MANIFEST),))
    if defects := _unreadable(step_dir, commit, manifest):
        return VerificationReport(commit.step, defects)
    step_checks = _StepChecks(step_dir, commit, manifest, pace)
    checks: dict[Part, Callable[[], Defect | None]] = {
        **{("file", n): partial(step_checks.check_file, n, i) for n, i in manifest.files.items()},
        **{("array", path): partial(step_checks.check_array, path) for path in manifest.arrays},
    }
    known = step_checks.read_once()
    rest = [part for part in checks if part not in known]
    with ThreadPoolExecutor(min(MAX_THREADS, cpu_cores.usable()), "jaxres-verify") as pool:
        first_results = pool.map(_run, [checks[part] for part in rest])
        known |= {part: not problem for part, problem in zip(rest, first_results, strict=True)}
        failed = [checks[part] for part in checks if not known[part]]
        step_checks.drop_cached()
        second_results = list(pool.map(_run, failed))
    problems = [_naming_sharers(step_dir, defect) for defect in second_results if defect]
    if len(problems) < len(failed) and is_remote(step_dir) and again:
        # A transfer may corrupt data.
        return _verify_step(step_dir, commit, again=again - 1, pace=pace)
    if len(problems) < len(failed):
        raise StorageUnavailable(
            f"{step_dir}: two reads of the same part of step {commit.step} differ. Nothing was "
            "judged damaged. Is the disk, the network or this machine's memory faulty?"
        )
    if not problems:
        problems += step_checks.check_content()
    return VerificationReport(
        commit.step,
        tuple(problems),
        num_files=len(manifest.files) + 1,
        num_arrays=len(manifest.arrays),
        size_bytes=commit.bytes,
        digest=None if problems else manifest.digest,
    )


def _unreadable(step_dir: RunPath, commit: Commit, manifest: Manifest) -> tuple[Defect, ...]:
    """Returns defects that forbid a read: pipes or devices in place of files, larger files.

    TensorStore would wait for the former, and ask for as much memory as the latter have bytes.
    """
    with manifests.reading(step_dir, commit.step):
        present = files.sizes_of(step_dir, manifest.files.keys())
    others = {
        n: info for n, info in manifest.files.items() if present.get(n, info.size) != info.size
    }
    is_larger = any(present[name] > info.size for name, info in others.items())
    defects = [
        Defect(manifests.other_size(name, present[name], info), file=name)
        for name, info in others.items()
        if is_larger
    ]
    for name in () if is_remote(step_dir) else manifest.files:
        try:
            files.open_file(Path(str(step_dir / name))).close()
        except OSError as error:
            if error.errno == files.NO_FILE:
                defects.append(Defect(f"{name} is {error.strerror}", file=name))
    return tuple(defects)


def as_text(found: VerificationReport) -> str:
    """Returns the lines to print about a step: one line, or one for each problem."""
    if found.problems:
        return "".join(f"step {found.step}: damaged: {one.what}\n" for one in found.problems)
    read = f"{found.num_files} files, {found.num_arrays} arrays, {found.size_bytes:,} bytes"
    return f"step {found.step}: valid: {read}, {found.digest}\n"


def _naming_sharers(step_dir: RunPath, defect: Defect) -> Defect:
    """Returns a defect of a file; its text names the other steps that have the same file.

    Steps share the files of arrays that have not changed by hard links, so that one fault damages
    them all.
    """
    if defect.file is None:
        return defect
    others = [
        found.step
        for found in step_dirs.listed(step_dir.parent)
        if found.name != step_dir.name
        and files.is_same(step_dir / defect.file, step_dir.parent / found.name / defect.file)
    ]
    if not others:
        return defect
    steps = f"step{'s' * (len(others) > 1)} {', '.join(map(str, sorted(others)))}"
    return replace(
        defect, what=f"{defect.what} (the same file is a part of {steps}: damaged there too)"
    )


def _run(check: Callable[[], Defect | None]) -> Defect | None:
    return check()


class _StepChecks:
    """The checks of single files and arrays of one step; each can be repeated."""

    def __init__(
        self, step_dir: RunPath, commit: Commit, manifest: Manifest, pace: Throttle
    ) -> None:
        self._step_dir = step_dir
        self._pace = pace
        self._commit = commit
        self._manifest = manifest
        self._reader = ArrayReader(step_dir, manifest.arrays, frozen=manifest.frozen)
        self._tables: Mapping[str, BlockTable] = {}
        # Unreadable tables: the check of their file reports it. Arrays are compared as a whole.
        with contextlib.suppress(CheckpointDamaged):
            self._tables = manifests.read_tables(step_dir, commit, manifest)

    def read_once(self) -> dict[Part, bool]:
        """Reads the data files on a disk once each; returns which parts this shows valid or wrong.

        The others have to be checked one by one.
        """
        if is_remote(self._step_dir):
            return {}
        try:
            chunks = locate_chunks(
                self._step_dir, self._manifest.arrays, frozen=self._manifest.frozen
            )
        except (ValueError, KeyError, TypeError, OSError):
            return {}
        chunks = {
            path: own
            for path, own in chunks.items()
            if all(grid_box(chunk.info, chunk.box) for chunk in own)
        }
        tables = {path: BlockTable(self._manifest.arrays[path]) for path in chunks}
        in_files = by_file(chunks)
        with ThreadPoolExecutor(SCAN_THREADS, "jaxres-verify") as pool:
            found = pool.map(lambda name: self._scan(name, in_files[name], tables), in_files)
            read = {
                name: same for name, same in zip(in_files, found, strict=True) if same is not None
            }
        known: dict[Part, bool] = {("file", name): same for name, same in read.items()}
        for path, table in tables.items():
            if all(chunk.file in read for chunk in chunks[path]):
                known["array", path] = self._is_committed(path, table)
        return known

    def _scan(
        self, name: str, chunks: Sequence[Chunk], tables: Mapping[str, BlockTable]
    ) -> bool | None:
        """Adds the digests of a file's chunks to the tables; returns whether the file is valid.

        None: it could not be read to its end.
        """

        def add(chunk: Chunk, box: Box, items: np.ndarray) -> None:
            blocks = grid_box(chunk.info, box)
            assert blocks is not None, chunk
            tables[chunk.path].add(Digests(((blocks, block_digests(items, chunk.info.block)),)))

        path = Path(str(self._step_dir / name))
        try:
            files.drop_page_cache(path)
            return scan(path, chunks, add, self._pace) == self._manifest.files.get(name)
        except (ValueError, OSError):
            return None

    def _is_committed(self, path: str, table: BlockTable) -> bool:
        """Returns whether a table has the digests of all blocks of an array, as committed."""
        try:
            return table.root(path) == self._manifest.digests[path]
        except ValueError:
            return False

    def drop_cached(self) -> None:
        """Drops caches, so that all later reads come from disk."""
        manifest = self._manifest
        self._reader = ArrayReader(self._step_dir, manifest.arrays, frozen=manifest.frozen)
        for folder in (ARRAYS, *([FROZEN] if manifest.frozen else [])):
            for path in files.cached_files(self._step_dir / folder):
                with manifests.reading(self._step_dir, self._commit.step):
                    files.drop_page_cache(path)

    def check_file(self, name: str, info: FileInfo) -> Defect | None:
        """Checks size and checksum of one file."""
        path = self._step_dir / name
        try:
            stored = file_info(path, self._pace)
        except OSError as error:
            if manifests.is_storage_fault(error):
                raise manifests.unreadable(self._step_dir, self._commit.step, error) from error
            manifests.refuse_if_unavailable(self._step_dir, self._commit.step, name=name)
            return Defect(f"{name} is missing", file=name)
        if stored.size != info.size:
            return Defect(manifests.other_size(name, stored.size, info), file=name)
        if info.xxh3_128 != stored.xxh3_128:
            what = f"{name} has checksum {stored.xxh3_128}, the manifest records {info.xxh3_128}"
            return Defect(what, file=name)
        return None

    def check_array(self, path: str) -> Defect | None:
        """Compares the digest of one array, as TensorStore reads it, with the manifest."""
        info = self._manifest.arrays[path]
        blocks: list[tuple[Box, bytes]] = []
        try:
            for box in self._reader.regions(path):
                grid = tuple(
                    (start // n, -(-stop // n)) if n else (0, 1)
                    for (start, stop), n in zip(box, info.block, strict=True)
                )
                items = self._reader.read(path, box)
                blocks.append((grid, block_digests(items, info.block)))
                self._pace.spend(items.nbytes)
        except (ValueError, OSError) as error:
            if manifests.is_storage_fault(error):
                raise manifests.unreadable(self._step_dir, self._commit.step, error) from error
            return Defect(f"{path} can't be read ({str(error)[:200]})", array=path)
        found = BlockTable(info)
        found.add(Digests(tuple(blocks)))
        there, wanted = found.root(path), self._manifest.digests[path]
        if there == wanted:
            return None
        table = self._tables.get(path)
        wrong = [] if table is None else table.wrong(Digests(tuple(blocks)))
        where = f", in block {list(wrong[0])} of {list(info.grid)}" if wrong else ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"{path} has digest {there}, the manifest records {wanted}{where}{more}"
        return Defect(what, array=path)

    def check_content(self) -> list[Defect]:
        """Checks progress.json and the content digest of the whole step."""
        manifest = self._manifest
        try:
            facts = manifests.read_progress(self._step_dir, self._commit, manifest)
        except CheckpointDamaged as damage:
            return [Defect(damage.what, file=PROGRESS)]
        rows = [
            [path, info.dtype, list(info.shape), manifest.digests[path]]
            for path, info in sorted(manifest.arrays.items())
        ]
        if digest_of_rows(rows, progress=facts) == manifest.digest:
            return []
        return [Defect(f"{PROGRESS} does not match the content digest", file=PROGRESS)]
