"""Restores the newest whole step: what looks damaged is read again, and only proof passes it over.

Every host reads and verifies its own part and says how that went; the lead decides for all, so all
take the same step. Storage that does not answer proves nothing: it is asked a few times, then the
run ends as 74 and no step is judged.

Reads a committed step and verifies what was read: every process its own shards, all replicas.

What is wrong here was read once, which proves nothing yet: checkpoint/restore.py looks again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.block_digests import (
    ArrayInfo,
    Box,
    Table,
    digests_of,
    index_of,
    items_of,
    position_of,
)
from jaxres.checkpoint.content_digest import as_bytes, block_digest
from jaxres.checkpoint.manifest import CheckpointDamaged
from jaxres.checkpoint.orbax_io import Tree, array_infos, named_arrays
from jaxres.checkpoint.snapshot import box_of
from jaxres.checkpoint.tensorstore_reader import ARRAYS, ArrayReader
from jaxres.checkpoint.verify import Findings
from jaxres.clock import Clock
from jaxres.cluster.host_group import WORD_SECONDS, Peers
from jaxres.engine.state import Progress
from jaxres.faults import (
    ConfigError,
    StorageUnavailable,
    TypedEnd,
    Unrestorable,
)
from jaxres.runlog.events import Emit, Noted, PhaseChanged
from jaxres.runlog.run_log import Commit, Quarantine
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import Place

TRIES = 3
BACKOFF_SECONDS = 1.0
"""Before the second try, twice as long before the third."""
WHOLE, DAMAGED, STORAGE, SILENT, CONFIG, AGAIN = (
    "whole",
    "damaged",
    "storage",
    "silent",
    "config",
    "again",
)
T = TypeVar("T")


class StorageSilent(StorageUnavailable):
    """Storage has said nothing for so long that asking again would only take as long again."""


@dataclass(frozen=True)
class Word:
    """How reading a step went, on one host or over all."""

    kind: str
    what: str = ""

    def encode(self) -> str:
        """Returns it as a word between hosts."""
        return canonical_json(asdict(self)).decode()

    @staticmethod
    def decode(word: str) -> Word:
        """Reads it back."""
        return Word(**json.loads(word))


@dataclass(frozen=True, kw_only=True)
class Search:
    """What it takes to find the newest whole step."""

    read: Callable[[Commit], Restored]
    """Reads and verifies this host's part."""
    examine: Callable[[Commit], Findings]
    """Reads all of a step once more, without jax."""
    peers: Peers
    topic: str
    """Unique within the attempt, the same on all hosts."""
    seconds: float
    """Longest reading of one step."""
    emit: Emit
    clock: Clock

    def newest_whole(self, commits: Sequence[Commit]) -> tuple[Restored, list[Quarantine]]:
        """Returns the newest whole one of the committed steps, and the newer ones that are not.

        Raises:
          Unrestorable: none is whole.
          StorageUnavailable: storage did not let that be told.
          ConfigError: a step holds other arrays than the model wants.
        """
        damaged: list[Quarantine] = []
        for commit in sorted(commits, key=lambda commit: -commit.step):
            found = self._at(commit)
            if isinstance(found, Restored):
                return found, damaged
            damaged.append(Quarantine(step=commit.step, path=commit.path, evidence=found))
        raise none_is_whole(damaged)

    def _at(self, commit: Commit) -> Restored | str:
        """Returns a step, or the evidence that it is damaged."""
        for number in range(1, TRIES + 1):
            again = f", try {number} of {TRIES}" if number > 1 else ""
            self.emit(PhaseChanged("restore", f"step {commit.step}{again}"))
            restored, own = self._read(commit)
            word = self._agreed(commit, own, number)
            if word.kind == WHOLE:
                assert restored is not None, own
                return restored
            if word.kind == DAMAGED:
                return word.what
            if word.kind == CONFIG:
                raise ConfigError(word.what)
            if word.kind != AGAIN:
                raise StorageUnavailable(word.what)
            restored = None  # The devices must be free before the next try.
            self.emit(Noted(f"step {commit.step} is read once more: {word.what}"))
            self.clock.sleep(BACKOFF_SECONDS * 2 ** (number - 1))
        raise AssertionError("the last try never says AGAIN")

    def _read(self, commit: Commit) -> tuple[Restored | None, Word]:
        try:
            what = f"step {commit.step}"
            return bounded(lambda: self.read(commit), seconds=self.seconds, what=what), Word(WHOLE)
        except TypedEnd as end:
            return None, Word(_kind_of(end), str(end))

    def _agreed(self, commit: Commit, own: Word, number: int) -> Word:
        """Returns the lead's word on what every host has found."""
        topic = f"{self.topic}/{commit.step}/{number}"
        if not self.peers.member.is_alone:
            self.emit(PhaseChanged("restore", f"step {commit.step}, waiting for the other hosts"))
        words = self.peers.collect(topic, own.encode(), seconds=self.seconds + WORD_SECONDS)
        # Until the slowest host has read, and the lead has read all of it once more.
        seconds = 2 * (self.seconds + WORD_SECONDS)
        said = self.peers.same(topic, lambda: self._decide(commit, words, number), seconds=seconds)
        return Word.decode(said)

    def _decide(self, commit: Commit, words: Sequence[str], number: int) -> str:
        """Weighs what the hosts have found; what proves least about the data weighs most."""
        found = list(map(Word.decode, words))
        if len(found) > 1:
            found = [Word(one.kind, f"host {n}: {one.what}") for n, one in enumerate(found)]
        return self._weighed(commit, found, number).encode()

    def _weighed(self, commit: Commit, named: Sequence[Word], number: int) -> Word:
        for kind in (SILENT, STORAGE, CONFIG):
            if one := next((word for word in named if word.kind == kind), None):
                return self._or_again(one, number)
        suspect = next((word for word in named if word.kind == DAMAGED), None)
        return Word(WHOLE) if suspect is None else self._proved(commit, suspect, number)

    def _or_again(self, word: Word, number: int) -> Word:
        return Word(AGAIN, word.what) if word.kind == STORAGE and number < TRIES else word

    def _proved(self, commit: Commit, suspect: Word, number: int) -> Word:
        """Reads all of the step once more: that, and not the first look, decides."""
        self.emit(PhaseChanged("restore", f"step {commit.step} looks damaged; reading it again"))
        try:
            what = f"step {commit.step}"
            found = bounded(lambda: self.examine(commit), seconds=self.seconds, what=what)
        except StorageUnavailable as refusal:
            return self._or_again(Word(_kind_of(refusal), str(refusal)), number)
        if found.problems:
            return Word(DAMAGED, found.evidence)
        why = (
            f"{suspect.what} But every byte on storage is as committed. Nothing was judged damaged."
        )
        return self._or_again(Word(STORAGE, why), number)


def _kind_of(end: TypedEnd) -> str:
    match end:
        case CheckpointDamaged():
            return DAMAGED
        case StorageSilent():
            return SILENT
        case StorageUnavailable():
            return STORAGE
        case ConfigError():
            return CONFIG
        case _:
            raise end


def bounded(call: Callable[[], T], *, seconds: float, what: str) -> T:
    """Returns what a call returns, or raises what it raises.

    Raises:
      StorageSilent: it has not ended in time. Its thread is left behind.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  It crosses to the waiter's thread.
            errors.append(error)

    thread = threading.Thread(target=run, name="jaxres-restore", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise StorageSilent(
            f"{what} could not be read within {seconds:.0f} s (deadlines.restore_seconds): storage "
            "does not answer. Nothing was judged damaged; start the same command when it does."
        )
    return results[0]


def none_is_whole(damaged: Sequence[Quarantine]) -> Unrestorable:
    """Returns the end of a run whose checkpoints are all damaged."""
    rows = "\n".join(f"  {one.path}: step {one.step}: {one.evidence}" for one in damaged)
    return Unrestorable(
        f"checkpoints are committed and none is whole:\n{rows}\nThe run is left as it is and does "
        "not start again from step 0. Restore one of the folders from a copy, or start a new run "
        "in another run.dir."
    )


VERIFY_THREADS = 4


@dataclass(frozen=True)
class Restored:
    """A committed step in memory."""

    commit: Commit
    state: Tree
    progress: Progress
    is_verified: bool
    """False: the step was saved by a version that kept no digests."""


def restore(step_dir: Place, commit: Commit, like: Tree, context: ocp.Context) -> Restored:
    """Reads a committed step into arrays sharded as asked for.

    Args:
      step_dir: absolute, of that step.
      commit: the step's record.
      like: nested dict of jax.ShapeDtypeStruct with shardings.
      context: Orbax's settings.

    Raises:
      CheckpointDamaged: what was read is not what was committed.
      StorageUnavailable: storage did not let it be read; nothing is judged.
      ConfigError: it was read, but holds other arrays than the model wants.
    """
    manifest = manifests.read(step_dir, commit)
    _refuse_differences(step_dir, manifest.arrays, array_infos(like))
    tables = manifests.read_tables(step_dir, commit, manifest) if manifest.tells_content else {}
    facts = manifests.read_progress(step_dir, commit, manifest)
    try:
        state = load(step_dir, like, context)
    except Exception as error:
        # Orbax checks none of its JSON files: a flipped letter shows as any of these.
        of_files = isinstance(error, ValueError | KeyError | TypeError | AttributeError | OSError)
        if not (of_files or manifests.is_storage_fault(error)):
            raise
        raise manifests.unreadable(step_dir, commit.step, error) from error
    assert isinstance(state, dict), type(state)
    with manifests.reading(step_dir, commit.step):
        wrong = _wrong_arrays(step_dir, state, tables)
    if wrong:
        what = f"what was read of {', '.join(wrong)} has other digests than were committed"
        raise manifests.damaged(step_dir, commit.step, what)
    try:
        progress = Progress(**facts)
    except TypeError as error:
        what = f"{manifests.PROGRESS} is not this version's ({error})"
        raise manifests.damaged(step_dir, commit.step, what) from error
    return Restored(commit, state, progress, manifest.tells_content)


def load(step_dir: Place, like: Tree, context: ocp.Context) -> Any:
    """Reads the arrays, laid out as asked for, and checks nothing."""
    with context:
        return ocp.load(str(step_dir), like, checkpointable_name=ARRAYS)


def _wrong_arrays(step_dir: Place, state: Tree, tables: Mapping[str, Table]) -> list[str]:
    """Returns the arrays of which some device of this process has got something else."""
    arrays = named_arrays(state)
    reader = ArrayReader(step_dir, {path: info for path, (info, _) in arrays.items()})
    with ThreadPoolExecutor(VERIFY_THREADS, "jaxres-verify") as pool:
        same = pool.map(lambda path: _is_same(reader, path, *arrays[path], tables[path]), tables)
        return [path for path, is_same in zip(tables, same, strict=True) if not is_same]


def _is_same(
    reader: ArrayReader, path: str, info: ArrayInfo, array: jax.Array, table: Table
) -> bool:
    """Says whether all that this process's devices hold of an array is what was committed."""
    pieces: dict[Box, np.ndarray] = {}
    for shard in array.addressable_shards:
        box, data = box_of(shard.index, info.shape), np.asarray(shard.data)
        if not _is_equal(pieces.setdefault(box, data), data):
            return False
    found = digests_of(info, pieces)
    return not table.wrong(found) and all(
        digest == wanted for digest, wanted in _parts(reader, path, info, table, found.parts)
    )


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Says whether two replicas have the same bits."""
    if one is other:
        return True
    a, b = (np.asarray(as_bytes(data)) for data in (one, other))
    return np.array_equal(a, b)


def _parts(
    reader: ArrayReader,
    path: str,
    info: ArrayInfo,
    table: Table,
    parts: tuple[tuple[Box, bytes], ...],
) -> Iterator[tuple[bytes, bytes]]:
    """Yields pairs of digests that must be equal, of blocks of which others hold the rest.

    Such a block is read once more as a whole, without jax.
    """
    for box, digest in parts:
        position = position_of(info, box)
        items = items_of(info, position)
        block = reader.read(path, items)
        yield block_digest(block), table.at(position)
        yield digest, block_digest(block[index_of(box, within=items)])


def _refuse_differences(
    step_dir: Place, there: Mapping[str, ArrayInfo], here: Mapping[str, ArrayInfo]
) -> None:
    rows = [
        f"  {path}: {there.get(path, 'absent')} there, {here.get(path, 'absent')} here"
        for path in sorted({*there, *here})
        if there.get(path) != here.get(path)
    ]
    if rows:
        raise ConfigError(
            f"{step_dir}: the checkpoint holds other arrays than this model and optimizer\n"
            + "\n".join(rows)
            + "\nThe config is the same, so the code has changed: go back to the code that started "
            "the run, or start a new run in another run.dir."
        )
