"""The run log: numbered records, each created only if absent, folded into the run history.

Home of: zombie. A process that finds a newer attempt's record in the slot it wanted is fenced, and
has written nothing. So there is one linearisation point, however long a process was paused. A late
record of an older attempt fences no newer one: it is skipped. If it precedes the newer claim it is
part of the history; if it follows, `fold` ignores it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from jaxres.clock import Clock
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable
from jaxres.runlog.history import RunHistory, fold, in_force, recorded_tokenizer, start_of
from jaxres.runlog.records import (
    AttemptEnded,
    Body,
    Claim,
    Commit,
    HostFault,
    Prune,
    Quarantine,
    Record,
    Rollback,
    Skip,
    Start,
    SupervisorEnded,
    file_name,
)
from jaxres.storage import files
from jaxres.storage.path import GcsPath, RunPath, is_remote

# Other modules import all names of the run log from here.
__all__ = [
    "AttemptEnded",
    "Body",
    "Claim",
    "Commit",
    "HostFault",
    "Prune",
    "Quarantine",
    "Record",
    "Rollback",
    "RunHistory",
    "RunLog",
    "Skip",
    "Start",
    "SupervisorEnded",
    "claim_of",
    "file_name",
    "fold",
    "in_force",
    "newer_claim",
    "read_after",
    "read_records",
    "recorded_tokenizer",
    "refuse_lost",
    "start_of",
    "superseded_message",
]


def read_records(folder: RunPath, *, known: int = 0) -> list[Record]:
    """Reads the whole log in order; a gap in the numbers is an error.

    Args:
      folder: the folder of the log.
      known: number of records that this process has read or written before.

    Raises:
      StorageUnavailable: there are fewer records: the folder is being deleted, or unmounted.
    """
    if is_remote(folder):
        return list(_known.newest(folder))
    names = files.list_names(folder)
    refuse_lost(folder, len(names), known=known)
    _refuse_gaps(folder, names, first=1)
    return [_read(folder / name) for name in names]


def _refuse_gaps(folder: RunPath, names: Sequence[str], *, first: int) -> None:
    for number, name in enumerate(names, start=first):
        if name != file_name(number):
            raise ConfigError(
                f"{folder / name}: expected record {file_name(number)} here. A record is missing "
                "or a file does not belong. Restore the folder from a copy, or rebuild the log: "
                f"jaxres checkpoints adopt {folder.parent}. Nothing was changed."
            )


class _Known:
    """Cache of records that this process has read from buckets: a record never changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[RunPath, list[Record]] = {}

    def forget(self, folder: RunPath) -> None:
        """Forgets the records of a log that was deleted."""
        with self._lock:
            self._logs.pop(folder, None)

    def newest(self, folder: GcsPath) -> list[Record]:
        """Returns all records; lists them once, then requests only the next ones.

        A list may be stale, so later records are requested by name.
        """
        with self._lock:
            records = self._logs.setdefault(folder, [])
            if not records:
                names = files.list_names(folder)
                _refuse_gaps(folder, names, first=1)
                contents = files.read_all([folder / name for name in names])
                records += [
                    _decoded(folder / n, data) for n, data in zip(names, contents, strict=True)
                ]
            records += _probed(folder, len(records))
            return records

    def add(self, folder: GcsPath, record: Record) -> None:
        """Adds a record that this process has written, if all before it are known."""
        with self._lock:
            records = self._logs.get(folder, [])
            if records and record.seq == len(records) + 1:
                records.append(record)


_known = _Known()


def forget(folder: RunPath) -> None:
    """Forgets the records that this process has read of a log that is deleted now."""
    _known.forget(folder)


def _read(path: RunPath) -> Record:
    return _decoded(path, files.read(path))


def _decoded(path: RunPath, data: bytes | None) -> Record:
    """Returns a listed record. Records are never deleted: without bytes, storage is unavailable."""
    try:
        return Record.decode(_require(path, data), path=path)
    except Unrestorable:  # One damaged read is no proof; the second one decides.
        files.drop_page_cache(path)
        return Record.decode(_require(path, files.read(path)), path=path)


def _require(path: RunPath, data: bytes | None) -> bytes:
    if data is None:
        raise StorageUnavailable(
            f"{path}: existed a moment ago. Was the run directory moved, deleted or unmounted?"
        )
    return data


def refuse_lost(folder: RunPath, count: int, *, known: int) -> None:
    """Raises StorageUnavailable if a log has fewer records than this process knows of.

    Otherwise a disk that is not mounted any more would look like a run that has not begun.
    """
    if count < known:
        raise StorageUnavailable(
            f"{folder}: {known} records existed, {count} are left. Was the run directory "
            "deleted or unmounted? Restore the folder; nothing was changed."
        )


def claim_of(records: Sequence[Record], *, attempt: int, folder: RunPath) -> Claim:
    """Returns the claim that opened an attempt; raises StorageUnavailable if it is gone."""
    for record in records:
        if record.attempt == attempt and isinstance(record.body, Claim):
            return record.body
    raise StorageUnavailable(
        f"{folder}: the claim of attempt {attempt} is missing. Was the run directory moved, "
        "deleted or unmounted? Restore it, then rerun the same command."
    )


def first_claim(folder: RunPath) -> Claim | None:
    """Returns the claim that began the run, which fixes its threads; None: there is none yet."""
    data = files.read(path := folder / file_name(1))
    body = None if data is None else Record.decode(data, path=path).body
    return body if isinstance(body, Claim) else None


def newer_claim(folder: RunPath, *, attempt: int, after: int) -> tuple[Claim | None, int]:
    """Reads the records after number `after`; cheap enough for once a second.

    Returns the claim of a later attempt, or None, and the number of the newest record.
    """
    while (data := files.read(folder / file_name(after + 1))) is not None:
        after += 1
        record = Record.decode(data, path=folder / file_name(after))
        if isinstance(record.body, Claim) and record.attempt > attempt:
            return record.body, after
    return None, after


def read_after(folder: RunPath, after: int) -> list[Record]:
    """Reads the records after number `after`, in order."""
    if is_remote(folder):
        return _known.newest(folder)[after:]
    return _probed(folder, after)


def _probed(folder: RunPath, after: int) -> list[Record]:
    records: list[Record] = []
    while (data := files.read(path := folder / file_name(after + len(records) + 1))) is not None:
        records.append(Record.decode(data, path=path))
    return records


class RunLog:
    """Writer of the run log for one attempt; several threads may append."""

    def __init__(self, folder: RunPath, *, attempt: int, last_seq: int, clock: Clock) -> None:
        self._folder = folder
        self._last_seq = last_seq
        self._clock = clock
        self._lock = threading.Lock()
        self._unconfirmed: bytes | None = None
        """A record whose write storage has not confirmed: the next slot may have it or not."""
        self._read: tuple[Record, ...] = ()
        """The records that this process has read from a disk; a record never changes."""
        self.attempt = attempt

    @classmethod
    def claim(
        cls, folder: RunPath, claim: Claim, *, after: Sequence[Record], clock: Clock
    ) -> RunLog:
        """Claims the run for `claim.attempt`, in the first free slot after the records `after`.

        Raises:
          Fenced: another process has claimed the run since these records were read.
        """
        files.make_dir(folder)
        log = cls(folder, attempt=claim.attempt, last_seq=len(after), clock=clock)
        log.append(claim)
        files.delete_temporaries(folder)
        return log

    @classmethod
    def of_attempt(
        cls, folder: RunPath, records: Sequence[Record], *, attempt: int, clock: Clock
    ) -> RunLog:
        """Returns the log for another process of an attempt that is claimed in the records.

        It begins right after the claim, so that a newer claim in the records fences it.
        """
        claims = (r.seq for r in records if r.attempt == attempt and isinstance(r.body, Claim))
        return cls(folder, attempt=attempt, last_seq=next(claims), clock=clock)

    @property
    def last_seq(self) -> int:
        """Number of the newest record of this attempt that this process knows."""
        return self._last_seq

    def append(self, body: Body) -> Record:
        """Writes the next record durably.

        The supervisor and its worker both write for their attempt: each skips slots that the other
        one has written, and slots with late records of older attempts.

        Raises:
          Fenced: a newer attempt owns the log; nothing was written.
        """
        with self._lock:
            self._settle_unconfirmed()
            while True:
                record = Record(self._last_seq + 1, self.attempt, self._clock.wall(), body)
                path = self._folder / file_name(record.seq)
                self._unconfirmed = record.encode()
                is_ours = files.create(path, self._unconfirmed)
                if not is_ours:
                    self._raise_if_fenced(path, body)
                self._unconfirmed = None
                self._last_seq = record.seq
                if is_ours:
                    if is_remote(self._folder):
                        _known.add(self._folder, Record.decode(record.encode(), path=path))
                    return record

    def _raise_if_fenced(self, path: RunPath, body: Body) -> None:
        winner = _read(path)
        is_other_claim = isinstance(body, Claim) and isinstance(winner.body, Claim)
        if is_other_claim or winner.attempt > self.attempt:
            raise _fenced(path, winner)

    def confirm_pending(self) -> bool:
        """Returns whether the record whose append has failed was written durably after all.

        Raises:
          StorageUnavailable: still unknown; call again.
        """
        with self._lock:
            return self._settle_unconfirmed()

    def _settle_unconfirmed(self) -> bool:
        """Skips an own record whose write failed after its name had appeared.

        A bucket may execute a request long after its sender timed out. So there the record is
        written again, unless the slot has another one.
        """
        path = self._folder / file_name(self._last_seq + 1)
        if self._unconfirmed is not None and is_remote(self._folder):
            files.create(path, self._unconfirmed)
        is_written = self._unconfirmed is not None and files.read(path) == self._unconfirmed
        if self._unconfirmed is not None and not is_written and not _folder_exists(self._folder):
            raise StorageUnavailable(f"{self._folder}: the run log is missing; restore the folder.")
        if is_written:
            with files.typed_errors(path):
                files.sync_dir(self._folder)
            self._last_seq += 1
        self._unconfirmed = None
        return is_written

    @property
    def folder(self) -> RunPath:
        """Folder of the records."""
        return self._folder

    def records(self) -> list[Record]:
        """Returns the whole log; reads only the records that this process has not read yet.

        Raises:
          StorageUnavailable: records that this process has seen are missing. A committed step must
            not be treated as deleted because storage does not show its record.
        """
        known = self._last_seq  # Before the list: other threads append.
        if is_remote(self._folder):
            records = read_records(self._folder)
        else:
            before, names = self._read, files.list_names(self._folder)
            refuse_lost(self._folder, len(names), known=known)
            _refuse_gaps(self._folder, names, first=1)
            records = [*before, *(_read(self._folder / name) for name in names[len(before) :])]
            self._read = tuple(records)
        refuse_lost(self._folder, len(records), known=known)
        return records

    def history(self) -> RunHistory:
        """Reads the log and folds it."""
        return fold(self.records())


def _folder_exists(folder: RunPath) -> bool:
    return files.is_dir(folder)


def _fenced(path: RunPath, winner: Record) -> Fenced:
    claim = winner.body if isinstance(winner.body, Claim) else None
    owner = superseded_message(path.parent.parent, winner.attempt, claim)
    return Fenced(f"{owner} Only one process may train in a run directory.")


def superseded_message(root: RunPath, attempt: int, claim: Claim | None) -> str:
    """Returns the message that another attempt owns the run, with its host if known."""
    owner = f"attempt {attempt}"
    if claim is not None:
        owner += f" (host {claim.host}, pid {claim.pid})"
    return f"{root}: {owner} owns this run now; this process has written nothing more."
