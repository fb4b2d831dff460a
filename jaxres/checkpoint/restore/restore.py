"""Restores the newest valid step; a newer step is skipped only if its damage is proved.

Every host reads its own shards of a committed step, verifies all their replicas and publishes the
result. Host 0 decides for all hosts, so that all restore the same step. A single wrong read does
not prove damage: host 0 then verifies the whole step with a second read, whose result is final. If
storage does not answer, the read is retried a few times; then the run exits with 74, and no step is
judged damaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np

from jaxres.checkpoint.digests.block_digests import (
    ArrayInfo,
    BlockTable,
    Box,
    digests_of,
    index_of,
    items_of,
    position_of,
)
from jaxres.checkpoint.digests.content_digest import as_bytes, block_digest
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import CheckpointDamaged
from jaxres.checkpoint.read.tensorstore_reader import ArrayReader
from jaxres.checkpoint.read.verify import VerificationReport
from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.snapshot import box_of
from jaxres.checkpoint.state_arrays import Tree, array_infos, named_arrays
from jaxres.clock import Clock
from jaxres.cluster.host_group import MESSAGE_SECONDS, HostGroup
from jaxres.engine.state import Progress
from jaxres.faults import ConfigError, RunError, StorageUnavailable, Unrestorable
from jaxres.runlog.events import Emit, Noted, PhaseChanged
from jaxres.runlog.run_log import Commit, Quarantine
from jaxres.storage import codec
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import RunPath
from jaxres.storage.timeouts import CallTimeout, call_with_timeout

TRIES = 3
BACKOFF_SECONDS = 1.0
"""Delay before the second try; doubled before the third."""
VALID, DAMAGED, STORAGE, TIMEOUT, CONFIG, RETRY = (
    "valid",
    "damaged",
    "storage",
    "timeout",
    "config",
    "retry",
)
T = TypeVar("T")


class StorageTimeout(StorageUnavailable):
    """Storage has not answered within a read's time limit; the read is not retried."""


@dataclass(frozen=True)
class ReadResult:
    """The result of reading a step, on one host or over all hosts."""

    kind: str
    detail: str = ""

    def encode(self) -> str:
        """Returns the result as a message between hosts."""
        return canonical_json(codec.encode(self)).decode()

    @staticmethod
    def decode(message: str) -> ReadResult:
        """Parses an encoded result."""
        return codec.decode(ReadResult, json.loads(message))


@dataclass(frozen=True, kw_only=True)
class NewestValid:
    """Finds and restores the newest valid step, together with the other hosts."""

    read: Callable[[Commit], Restored]
    """Reads and verifies this host's part of a step."""
    examine: Callable[[Commit], VerificationReport]
    """Reads and verifies all of a step, without jax."""
    peers: HostGroup
    topic: str
    """Prefix of the message topics; unique within the attempt, the same on all hosts."""
    seconds: float
    """Time limit for reading one step."""
    emit: Emit
    clock: Clock

    def newest_valid(self, commits: Sequence[Commit]) -> tuple[Restored, list[Quarantine]]:
        """Returns the newest valid step, restored, and the newer damaged ones.

        Raises:
          Unrestorable: no step is valid.
          StorageUnavailable: storage failed, so that a step could not be judged.
          ConfigError: the arrays of a step are not those that the model needs.
        """
        damaged: list[Quarantine] = []
        for commit in sorted(commits, key=lambda commit: -commit.step):
            found = self._restore_step(commit)
            if isinstance(found, Restored):
                return found, damaged
            damaged.append(Quarantine(step=commit.step, path=commit.path, evidence=found))
        raise all_damaged_error(damaged)

    def _restore_step(self, commit: Commit) -> Restored | str:
        """Returns the restored step, or the evidence that it is damaged."""
        for number in range(1, TRIES + 1):
            again = f", try {number} of {TRIES}" if number > 1 else ""
            self.emit(PhaseChanged("restore", f"step {commit.step}{again}"))
            restored, own = self._read(commit)
            decision = self._agree(commit, own, number)
            if decision.kind == VALID:
                assert restored is not None, own
                return restored
            if decision.kind == DAMAGED:
                return decision.detail
            if decision.kind == CONFIG:
                raise ConfigError(decision.detail)
            if decision.kind != RETRY:
                raise StorageUnavailable(decision.detail)
            restored = None  # Frees device memory before the next try.
            self.emit(Noted(f"reading step {commit.step} again: {decision.detail}"))
            self.clock.sleep(BACKOFF_SECONDS * 2 ** (number - 1))
        raise AssertionError("the last try never returns RETRY")

    def _read(self, commit: Commit) -> tuple[Restored | None, ReadResult]:
        try:
            what = f"step {commit.step}"
            return bounded(lambda: self.read(commit), seconds=self.seconds, what=what), ReadResult(
                VALID
            )
        except RunError as end:
            return None, ReadResult(_kind_of(end), str(end))

    def _agree(self, commit: Commit, own: ReadResult, number: int) -> ReadResult:
        """Returns host 0's decision on the results of all hosts."""
        topic = f"{self.topic}/{commit.step}/{number}"
        if not self.peers.member.is_alone:
            self.emit(PhaseChanged("restore", f"step {commit.step}, waiting for the other hosts"))
        messages = self.peers.gather(topic, own.encode(), seconds=self.seconds + MESSAGE_SECONDS)
        # Enough for the slowest host's read, and then for host 0's second read of the step.
        seconds = 2 * (self.seconds + MESSAGE_SECONDS)
        message = self.peers.broadcast(
            topic, lambda: self._decide(commit, messages, number), seconds=seconds
        )
        return ReadResult.decode(message)

    def _decide(self, commit: Commit, messages: Sequence[str], number: int) -> str:
        """Returns the encoded decision on all hosts' encoded results."""
        results = list(map(ReadResult.decode, messages))
        if len(results) > 1:
            results = [ReadResult(r.kind, f"host {n}: {r.detail}") for n, r in enumerate(results)]
        return self._combine(commit, results, number).encode()

    def _combine(self, commit: Commit, results: Sequence[ReadResult], number: int) -> ReadResult:
        """Combines all hosts' results: a failure of storage or config precedes suspected damage."""
        for kind in (TIMEOUT, STORAGE, CONFIG):
            if failure := next((result for result in results if result.kind == kind), None):
                return self._or_retry(failure, number)
        suspect = next((result for result in results if result.kind == DAMAGED), None)
        return (
            ReadResult(VALID) if suspect is None else self._confirm_damage(commit, suspect, number)
        )

    def _or_retry(self, result: ReadResult, number: int) -> ReadResult:
        """Replaces a storage failure by RETRY, except on the last try."""
        return (
            ReadResult(RETRY, result.detail)
            if result.kind == STORAGE and number < TRIES
            else result
        )

    def _confirm_damage(self, commit: Commit, suspect: ReadResult, number: int) -> ReadResult:
        """Verifies all of the step with a second read, which decides."""
        self.emit(PhaseChanged("restore", f"step {commit.step} looks damaged; reading it again"))
        try:
            what = f"step {commit.step}"
            findings = bounded(lambda: self.examine(commit), seconds=self.seconds, what=what)
        except StorageUnavailable as refusal:
            return self._or_retry(ReadResult(_kind_of(refusal), str(refusal)), number)
        if findings.problems:
            return ReadResult(DAMAGED, findings.evidence)
        why = (
            f"{suspect.detail} A second read found all bytes as committed. Nothing was judged "
            "damaged."
        )
        return self._or_retry(ReadResult(STORAGE, why), number)


def _kind_of(end: RunError) -> str:
    match end:
        case CheckpointDamaged():
            return DAMAGED
        case StorageTimeout():
            return TIMEOUT
        case StorageUnavailable():
            return STORAGE
        case ConfigError():
            return CONFIG
        case _:
            raise end


def bounded(call: Callable[[], T], *, seconds: float, what: str) -> T:
    """Runs a call in a thread; returns its result or raises its error.

    Raises:
      StorageTimeout: the call has not ended in time. Its thread keeps running.
    """
    try:
        return call_with_timeout(call, seconds=seconds, name="restore")
    except CallTimeout as error:
        raise StorageTimeout(
            f"{what} could not be read within {seconds:.0f} s (deadlines.restore_seconds): storage "
            "does not answer. Nothing was judged damaged; rerun the same command when it answers."
        ) from error


def all_damaged_error(damaged: Sequence[Quarantine]) -> Unrestorable:
    """Returns the error for a run whose checkpoints are all damaged."""
    rows = "\n".join(f"  {q.path}: step {q.step}: {q.evidence}" for q in damaged)
    return Unrestorable(
        f"checkpoints are committed and none is valid:\n{rows}\nThe run is left unchanged and "
        "does not start again from step 0. Restore one of the folders from a copy, or start a new "
        "run in another run.dir."
    )


VERIFY_THREADS = 4


@dataclass(frozen=True)
class Restored:
    """A committed step, read into memory and verified."""

    commit: Commit
    state: Tree
    progress: Progress
    frozen: tuple[str, ...] = ()
    """Paths of the arrays in the folder of the frozen parameters."""


def restore(step_dir: RunPath, commit: Commit, like: Tree) -> Restored:
    """Reads this process's part of a committed step into sharded arrays and verifies it.

    Args:
      step_dir: absolute path of the step directory.
      like: nested dict of jax.ShapeDtypeStruct with shardings.

    Raises:
      CheckpointDamaged: the data differs from what was committed, or can't be parsed.
      StorageUnavailable: storage could not be read; the step may be valid.
      ConfigError: the arrays of the step are not those that the model needs.
    """
    manifest = manifests.read(step_dir, commit)
    _refuse_differences(step_dir, manifest.arrays, array_infos(like))
    tables = manifests.read_tables(step_dir, commit, manifest)
    facts = manifests.read_progress(step_dir, commit, manifest)
    try:
        state = load(step_dir, like, frozen=manifest.frozen)
    except Exception as error:
        # The index holds JSON and names: a flipped bit may raise any of these.
        from_files = isinstance(error, ValueError | KeyError | TypeError | AttributeError | OSError)
        if not (from_files or manifests.is_storage_fault(error)):
            raise
        raise manifests.unreadable(step_dir, commit.step, error) from error
    with manifests.reading(step_dir, commit.step):
        wrong = _wrong_arrays(step_dir, state, tables, manifest.frozen)
    if wrong:
        what = f"the data read for {', '.join(wrong)} has other digests than were committed"
        raise manifests.damaged(step_dir, commit.step, what)
    try:
        progress = Progress(**facts, heldout_data=commit.heldout_data)
    except TypeError as error:
        what = f"{manifests.PROGRESS} does not have the fields of this version ({error})"
        raise manifests.damaged(step_dir, commit.step, what) from error
    return Restored(commit, state, progress, manifest.frozen)


def _wrong_arrays(
    step_dir: RunPath, state: Tree, tables: Mapping[str, BlockTable], frozen: Collection[str]
) -> list[str]:
    """Returns the arrays whose data is wrong on a device of this process."""
    arrays = named_arrays(state)
    infos = {path: info for path, (info, _) in arrays.items()}
    reader = ArrayReader(step_dir, infos, frozen=frozen)
    # Submitted one by one: while an array is copied from a device, those before it are verified.
    shards = (_shards(*arrays[path]) for path in tables)

    def is_same(path: str, shards: Sequence[tuple[Box, np.ndarray]]) -> bool:
        return _is_same(reader, path, infos[path], shards, tables[path])

    with ThreadPoolExecutor(VERIFY_THREADS, "jaxres-verify") as pool:
        same = pool.map(is_same, tables, shards)
        return [path for path, is_same in zip(tables, same, strict=True) if not is_same]


def _shards(info: ArrayInfo, array: jax.Array | np.ndarray) -> list[tuple[Box, np.ndarray]]:
    """Returns the shards of an array on this process's devices; not for threads (load_arrays)."""
    if isinstance(array, np.ndarray):
        return [(tuple((0, size) for size in info.shape), array)]
    return [
        (box_of(shard.index, info.shape), np.asarray(shard.data))
        for shard in array.addressable_shards
    ]


def _is_same(
    reader: ArrayReader,
    path: str,
    info: ArrayInfo,
    shards: Sequence[tuple[Box, np.ndarray]],
    table: BlockTable,
) -> bool:
    """Returns whether the shards of an array match the digests."""
    pieces: dict[Box, np.ndarray] = {}
    for box, data in shards:
        if not _is_equal(pieces.setdefault(box, data), data):
            return False
    own = digests_of(info, pieces)
    return not table.wrong(own) and all(
        digest == wanted for digest, wanted in _parts(reader, path, info, table, own.parts)
    )


def _is_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether two replicas have the same bits."""
    if first is second:
        return True
    a, b = (np.asarray(as_bytes(data)) for data in (first, second))
    return np.array_equal(a, b)


def _parts(
    reader: ArrayReader,
    path: str,
    info: ArrayInfo,
    table: BlockTable,
    parts: tuple[tuple[Box, bytes], ...],
) -> Iterator[tuple[bytes, bytes]]:
    """Yields pairs of digests that must be equal, for blocks shared with other processes.

    Such a block is read again in full, without jax.
    """
    for box, digest in parts:
        position = position_of(info, box)
        items = items_of(info, position)
        block = reader.read(path, items)
        yield block_digest(block), table.at(position)
        yield digest, block_digest(block[index_of(box, within=items)])


def _refuse_differences(
    step_dir: RunPath, stored: Mapping[str, ArrayInfo], needed: Mapping[str, ArrayInfo]
) -> None:
    rows = [
        f"  {path}: {stored.get(path, 'absent')}, expected {needed.get(path, 'absent')}"
        for path in sorted({*stored, *needed})
        if stored.get(path) != needed.get(path)
    ]
    if rows:
        raise ConfigError(
            f"{step_dir}: the arrays of the checkpoint are not those of this model and optimizer:\n"
            + "\n".join(rows)
            + "\nIf the config is the same, the code has changed, or the setting "
            "JAX_DEFAULT_PRNG_IMPL, which decides the size of a PRNG key's array. Restore what "
            "the run was started with, or start a new run in another directory."
        )
