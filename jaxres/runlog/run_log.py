"""The decision log: numbered records, created only if absent, folded into the one line of the run.

Home of: zombie. Whoever finds another attempt's record in the slot it wanted is fenced and has
written nothing: there is one linearisation point, however long a process was paused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from jaxres.clock import Clock
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable
from jaxres.runlog.history import Line, fold, start_of
from jaxres.runlog.records import (
    Body,
    Claim,
    Commit,
    Leave,
    Prune,
    Quarantine,
    Record,
    Rollback,
    Skip,
    Start,
    Stop,
    file_name,
)
from jaxres.storage import files
from jaxres.storage.path import BucketPath, Place

# What is said of a log anywhere is said by its one name.
__all__ = [
    "Body",
    "Claim",
    "Commit",
    "Leave",
    "Line",
    "Prune",
    "Quarantine",
    "Record",
    "Rollback",
    "RunLog",
    "Skip",
    "Start",
    "Stop",
    "claim_of",
    "file_name",
    "fold",
    "newer_claim",
    "overtaken",
    "read_after",
    "read_records",
    "start_of",
]


def read_records(folder: Place) -> list[Record]:
    """Reads the whole log in order; a gap in the numbers is an error, not an end."""
    if isinstance(folder, BucketPath):
        return list(_known.newest(folder))
    names = files.list_names(folder)
    _refuse_gaps(folder, names, first=1)
    return [_read(folder / name) for name in names]


def _refuse_gaps(folder: Place, names: Sequence[str], *, first: int) -> None:
    for number, name in enumerate(names, start=first):
        if name != file_name(number):
            raise ConfigError(
                f"{folder / name}: expected record {file_name(number)} here. A record is missing "
                "or a file does not belong; restore the folder from a copy. Nothing was changed."
            )


class _Known:
    """The records of logs in buckets that this process has read already: none ever changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: dict[Place, list[Record]] = {}

    def newest(self, folder: BucketPath) -> list[Record]:
        """Returns all records; asks for the first list of them, then only for the next one.

        A list may be old; so what comes after it is asked for by name.
        """
        with self._lock:
            records = self._logs.setdefault(folder, [])
            if not records:
                names = files.list_names(folder)
                _refuse_gaps(folder, names, first=1)
                found = files.read_all([folder / name for name in names])
                records += [
                    _decoded(folder / n, data) for n, data in zip(names, found, strict=True)
                ]
            records += _probed(folder, len(records))
            return records


_known = _Known()


def _read(path: Place) -> Record:
    return _decoded(path, files.read(path))


def _decoded(path: Place, data: bytes | None) -> Record:
    """Returns a record that is there: nobody deletes one, so without bytes storage is away."""
    try:
        return Record.decode(_there(path, data), path=path)
    except Unrestorable:  # One wrong read proves nothing.
        files.forget(path)
        return Record.decode(_there(path, files.read(path)), path=path)


def _there(path: Place, data: bytes | None) -> bytes:
    if data is None:
        raise StorageUnavailable(
            f"{path}: was there a moment ago. Was the run directory moved, deleted or unmounted?"
        )
    return data


def claim_of(records: Sequence[Record], *, attempt: int) -> Claim:
    """Returns the claim that opened an attempt."""
    bodies = (record.body for record in records if record.attempt == attempt)
    return next(body for body in bodies if isinstance(body, Claim))


def newer_claim(folder: Place, *, attempt: int, after: int) -> tuple[Claim | None, int]:
    """Looks at the records that have come since; cheap enough for every second.

    Returns the claim of a later attempt, or None, and the number of the newest record seen.
    """
    while (data := files.read(folder / file_name(after + 1))) is not None:
        after += 1
        record = Record.decode(data, path=folder / file_name(after))
        if isinstance(record.body, Claim) and record.attempt > attempt:
            return record.body, after
    return None, after


def read_after(folder: Place, after: int) -> list[Record]:
    """Reads the records that have come since number `after`, in order."""
    if isinstance(folder, BucketPath):
        return _known.newest(folder)[after:]
    return _probed(folder, after)


def _probed(folder: Place, after: int) -> list[Record]:
    found = []
    while (data := files.read(path := folder / file_name(after + len(found) + 1))) is not None:
        found.append(Record.decode(data, path=path))
    return found


class RunLog:
    """The log as one attempt's writer sees it; safe to append to from several threads."""

    def __init__(self, folder: Place, *, attempt: int, last_seq: int, clock: Clock) -> None:
        self._folder = folder
        self._last_seq = last_seq
        self._clock = clock
        self._lock = threading.Lock()
        self._unsure: bytes | None = None
        """A record that storage failed to confirm: it may stand in the next slot or not."""
        self.attempt = attempt

    @classmethod
    def claim(cls, folder: Place, claim: Claim, *, after: Sequence[Record], clock: Clock) -> RunLog:
        """Takes the run over for `claim.attempt`, right after the records that were read.

        Raises:
          Fenced: another process wrote first.
        """
        files.make_dir(folder)
        log = cls(folder, attempt=claim.attempt, last_seq=len(after), clock=clock)
        log.append(claim)
        files.delete_temporaries(folder)
        return log

    def append(self, body: Body) -> Record:
        """Writes the next record durably.

        The door and its worker both write for their attempt: a slot that the other has taken is
        passed over.

        Raises:
          Fenced: another attempt owns the log by now; nothing was written.
        """
        with self._lock:
            self._settle_unsure()
            while True:
                record = Record(self._last_seq + 1, self.attempt, self._clock.wall(), body)
                path = self._folder / file_name(record.seq)
                self._unsure = record.encode()
                is_ours = files.create(path, self._unsure)
                if not is_ours:
                    self._refuse_if_fenced(path, body)
                self._unsure = None
                self._last_seq = record.seq
                if is_ours:
                    return record

    def _refuse_if_fenced(self, path: Place, body: Body) -> None:
        winner = _read(path)
        if isinstance(body, Claim) or winner.attempt != self.attempt:
            raise _fenced(path, winner)

    def confirm(self) -> bool:
        """Says whether the record whose append has just failed stands after all, durably.

        Raises:
          StorageUnavailable: that can't be told yet; ask again.
        """
        with self._lock:
            return self._settle_unsure()

    def _settle_unsure(self) -> bool:
        """Steps over a record of our own whose writing failed after its name had appeared.

        To a bucket a request may come long after who made it has given up. So there the record is
        made to stand, unless another one does.
        """
        path = self._folder / file_name(self._last_seq + 1)
        if self._unsure is not None and isinstance(self._folder, BucketPath):
            files.create(path, self._unsure)
        stands = self._unsure is not None and files.read(path) == self._unsure
        if self._unsure is not None and not stands and not _is_there(self._folder):
            raise StorageUnavailable(f"{self._folder}: the run's log is gone; bring it back.")
        if stands:
            with files.typed_errors(path):
                files.sync_dir(self._folder)
            self._last_seq += 1
        self._unsure = None
        return stands

    @property
    def folder(self) -> Place:
        """Where the records are."""
        return self._folder

    def records(self) -> list[Record]:
        """Reads the whole log.

        Raises:
          StorageUnavailable: it lacks records that this process knows of. Nothing that counts may
            be taken for dead because storage hides its record.
        """
        known = self._last_seq  # Before the list: other threads append.
        records = read_records(self._folder)
        if len(records) < known:
            raise StorageUnavailable(f"{self._folder}: records are missing by now.")
        return records

    def line(self) -> Line:
        """Reads the log and folds it."""
        return fold(self.records())


def _is_there(folder: Place) -> bool:
    return isinstance(folder, BucketPath) or folder.is_dir()


def _fenced(path: Place, winner: Record) -> Fenced:
    claim = winner.body if isinstance(winner.body, Claim) else None
    owner = overtaken(path.parent.parent, winner.attempt, claim)
    return Fenced(f"{owner} Only one process may train in a run directory.")


def overtaken(root: Place, attempt: int, claim: Claim | None) -> str:
    """Says that another attempt owns the run, and whose it is where its claim is known."""
    who = f"attempt {attempt}"
    if claim is not None:
        who += f" (host {claim.host}, pid {claim.pid})"
    return f"{root}: {who} owns this run now; this process has written nothing more."
