"""Reads every byte of a committed step and holds it against what was committed. No jax.

Home of: damaged_checkpoint. A step is judged damaged on proof only: bytes that were read from the
disk as a whole, twice, and are others both times, or a file that is absent while storage answers.
Who lets a restore fall back on an older step is checkpoint/restore.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import Box, Digests, Table
from jaxres.checkpoint.content_digest import block_digests, digest_of_rows
from jaxres.checkpoint.manifest import MANIFEST, PROGRESS, CheckpointDamaged, FileInfo, Manifest
from jaxres.checkpoint.readback import REMOTE_TRIES, file_info
from jaxres.checkpoint.tensorstore_reader import ARRAYS, ArrayReader
from jaxres.faults import StorageUnavailable
from jaxres.runlog.run_log import Commit
from jaxres.storage import files
from jaxres.storage.path import Place

MAX_THREADS = 8
NAMED = 4
"""Problems that a sentence names before it only counts them."""


@dataclass(frozen=True)
class Problem:
    """What is not as it was committed."""

    what: str
    file: str | None = None
    array: str | None = None


@dataclass(frozen=True)
class Findings:
    """What a complete reading of one step has found."""

    step: int
    problems: tuple[Problem, ...]
    num_files: int = 0
    num_arrays: int = 0
    size_bytes: int = 0
    digest: str | None = None
    """The content digest that was committed and holds; None in format 1, or if it does not."""

    @property
    def evidence(self) -> str:
        """Says what is wrong in one sentence; empty if nothing is."""
        named = [problem.what for problem in self.problems[:NAMED]]
        more = len(self.problems) - len(named)
        return "; ".join([*named, *([f"and {more} more"] if more > 0 else [])])


def examine(step_dir: Place, commit: Commit, *, again: int = REMOTE_TRIES) -> Findings:
    """Reads all of a committed step; what is wrong it reads once more, from the disk.

    Args:
      step_dir: of the step.
      commit: its record.
      again: how often all is read anew where a bucket gives two answers to one question.

    Raises:
      StorageUnavailable: storage did not let it be read, or gave two answers to one question.
    """
    try:
        manifest = manifests.load(step_dir, commit)  # Which reads twice by itself.
    except CheckpointDamaged as damage:
        return Findings(commit.step, (Problem(damage.what, file=MANIFEST),))
    reading = _Reading(step_dir, commit, manifest)
    checks: list[Callable[[], Problem | None]] = [
        *(partial(reading.file, name, info) for name, info in manifest.files.items()),
        *(partial(reading.array, path) for path in manifest.arrays),
    ]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "jaxres-verify") as pool:
        found = pool.map(_run, checks)
        suspects = [check for check, problem in zip(checks, found, strict=True) if problem]
        reading.forget()
        proved = list(pool.map(_run, suspects))
    problems = [problem for problem in proved if problem is not None]
    if len(problems) < len(suspects) and not isinstance(step_dir, Path) and again:
        return examine(step_dir, commit, again=again - 1)  # Damaged on its way, as may happen.
    if len(problems) < len(suspects):
        raise StorageUnavailable(
            f"{step_dir}: some of step {commit.step} was read twice, with two results. Nothing was "
            "judged damaged. Is the disk, the network or this machine's memory sound?"
        )
    if not problems:
        problems += reading.content()
    return Findings(
        commit.step,
        tuple(problems),
        num_files=len(manifest.files) + 1,
        num_arrays=len(manifest.arrays),
        size_bytes=commit.bytes,
        digest=None if problems else manifest.digest,
    )


def as_text(found: Findings) -> str:
    """Returns what a person reads of a step: one line, or one for each problem."""
    if found.problems:
        return "".join(f"step {found.step}: damaged: {one.what}\n" for one in found.problems)
    read = f"{found.num_files} files, {found.num_arrays} arrays, {found.size_bytes:,} bytes"
    if found.digest is None:
        return f"step {found.step}: unverified content: {read}; saved without digests (format 1)\n"
    return f"step {found.step}: whole: {read}, {found.digest}\n"


def _run(check: Callable[[], Problem | None]) -> Problem | None:
    return check()


class _Reading:
    """The single checks, each of which may be made again."""

    def __init__(self, step_dir: Place, commit: Commit, manifest: Manifest) -> None:
        self._step_dir = step_dir
        self._commit = commit
        self._manifest = manifest
        self._reader = ArrayReader(step_dir, manifest.arrays)
        self._tables: Mapping[str, Table] = {}
        if manifest.tells_content:
            # Else the check of its file says so, and arrays are held against their own digests.
            with contextlib.suppress(CheckpointDamaged):
                self._tables = manifests.read_tables(step_dir, commit, manifest)

    def forget(self) -> None:
        """Has everything be read from the disk again."""
        self._reader = ArrayReader(self._step_dir, self._manifest.arrays)
        if isinstance(self._step_dir, Path):  # Of a bucket nothing is kept in memory.
            for path in (self._step_dir / ARRAYS).rglob("*"):
                if path.is_file():
                    with manifests.reading(self._step_dir, self._commit.step):
                        files.forget(path)

    def file(self, name: str, info: FileInfo) -> Problem | None:
        """Checks the bytes of one file."""
        path = self._step_dir / name
        try:
            found = file_info(path)
        except OSError as error:
            if manifests.is_storage_fault(error):
                raise manifests.unreadable(self._step_dir, self._commit.step, error) from error
            manifests.refuse_if_away(self._step_dir, self._commit.step, name=name)
            return Problem(f"{name} is missing", file=name)
        if found.size != info.size:
            what = f"{name} has {found.size} bytes, the manifest says {info.size} bytes"
            return Problem(what, file=name)
        if info.xxh3_128 not in (None, found.xxh3_128):
            what = f"{name} has checksum {found.xxh3_128}, the manifest says {info.xxh3_128}"
            return Problem(what, file=name)
        return None

    def array(self, path: str) -> Problem | None:
        """Checks what a reader gets of one array."""
        info = self._manifest.arrays[path]
        blocks: list[tuple[Box, bytes]] = []
        try:
            for box in self._reader.regions(path):
                grid = tuple(
                    (start // n, -(-stop // n)) if n else (0, 1)
                    for (start, stop), n in zip(box, info.block, strict=True)
                )
                blocks.append((grid, block_digests(self._reader.read(path, box), info.block)))
        except (ValueError, OSError) as error:
            if manifests.is_storage_fault(error):
                raise manifests.unreadable(self._step_dir, self._commit.step, error) from error
            return Problem(f"{path} can't be read ({str(error)[:200]})", array=path)
        if not self._manifest.tells_content:
            return None
        found = Table(info)
        found.add(Digests(tuple(blocks)))
        there, wanted = found.root(path), self._manifest.digests[path]
        if there == wanted:
            return None
        table = self._tables.get(path)
        wrong = [] if table is None else table.wrong(Digests(tuple(blocks)))
        where = f", in block {list(wrong[0])} of {list(info.grid)}" if wrong else ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"{path} has digest {there}, the manifest says {wanted}{where}{more}"
        return Problem(what, array=path)

    def content(self) -> list[Problem]:
        """Checks what is said of the whole: the facts, and the one digest over all."""
        manifest = self._manifest
        try:
            facts = manifests.read_progress(self._step_dir, self._commit, manifest)
        except CheckpointDamaged as damage:
            return [Problem(damage.what, file=PROGRESS)]
        rows = [
            [path, info.dtype, list(info.shape), manifest.digests[path]]
            for path, info in sorted(manifest.arrays.items())
            if manifest.tells_content
        ]
        if not rows or digest_of_rows(rows, progress=facts) == manifest.digest:
            return []
        return [Problem(f"{PROGRESS} is not that of the content digest", file=PROGRESS)]
