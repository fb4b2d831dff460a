"""The run log: numbered records, each created only if absent, folded into the run history.

Home of: zombie. A process that finds a newer attempt's record in the slot it wanted is fenced, and
has written nothing. So there is one linearisation point, however long a process was paused. A late
record of an older attempt fences no newer one: it is skipped. If it precedes the newer claim it is
part of the history; if it follows, `fold` ignores it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence

from jaxres.clock import Clock
from jaxres.faults import (
    ConfigError,
    Fenced,
    RunError,
    StorageUnavailable,
    Unrestorable,
    command_line,
)
from jaxres.runlog.history import RunHistory, fold, in_force, recorded_tokenizer, start_of
from jaxres.runlog.log_summary import EVERY, LogSummary, summarized
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import (
    AttemptEnded,
    Body,
    Claim,
    Commit,
    Dropped,
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
from jaxres.storage.path import RunPath, is_remote

# Other modules import all names of the run log from here.
__all__ = [
    "AttemptEnded",
    "Body",
    "Claim",
    "Commit",
    "HostFault",
    "LogReader",
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
    "last_seq",
    "newer_claim",
    "read_records",
    "read_whole",
    "reader_of",
    "recorded_tokenizer",
    "refuse_lost",
    "start_of",
    "superseded_message",
]


def read_records(folder: RunPath, *, known: int = 0) -> list[Record]:
    """Reads the records that decide something, in order; a gap in the files is an error.

    These are all records of a short log, and else those of its summary and all that follow: then
    numbers are left out.

    Args:
      known: number of the newest record that this process has read or written before.

    Raises:
      StorageUnavailable: there are fewer records: the folder is being deleted, or unmounted.
    """
    return reader_of(folder).read(known=known)


def read_whole(folder: RunPath) -> list[Record]:
    """Reads all records in order, also records without effect any more; a gap is an error."""
    names = files.list_names(folder)
    _refuse_gaps(folder, names, first=1)
    return _listed(folder, names)


def last_seq(records: Sequence[Record]) -> int:
    """Returns the number of the newest record; 0: there are none."""
    return records[-1].seq if records else 0


def _listed(folder: RunPath, names: Sequence[str]) -> list[Record]:
    """Returns the records of the files that a list has named."""
    contents: Iterable[bytes | None] = (files.read(folder / name) for name in names)
    if is_remote(folder):
        contents = files.read_all([folder / name for name in names])
    found = (_decoded(folder / name, data) for name, data in zip(names, contents, strict=True))
    return [record for record in found if not isinstance(record.body, Dropped)]


def _refuse_gaps(folder: RunPath, names: Sequence[str], *, first: int) -> None:
    for number, name in enumerate(names, start=first):
        if name != file_name(number):
            raise ConfigError(
                f"{folder / name}: expected record {file_name(number)} here. A record is missing "
                "or a file does not belong. Restore the folder from a copy, or rebuild the log: "
                f"{command_line('jaxres checkpoints adopt', folder.parent)}. Nothing was changed."
            )


AHEAD = 64
"""Number of records whose files must not exist after the newest one, where no list is made."""


class LogReader:
    """Reads the log of a run once, from its summary, and then only new records.

    Several threads may use it.
    """

    def __init__(self, folder: RunPath) -> None:
        """Reads nothing yet; `folder` is the log's."""
        self._folder = folder
        self._lock = threading.Lock()
        self._records: list[Record] = []
        self._through = 0
        """Number of the newest record of the summary that the records begin with; 0: none."""

    def read(self, *, known: int = 0) -> list[Record]:
        """Returns the records that decide something, as `read_records`."""
        with self._lock:
            self._refuse_lost()
            if last_seq(self._records) - self._through >= 2 * EVERY:
                self._begin_again()
            is_first = not self._records
            if is_first:
                self._read_first(known)
            self._records += _probed(self._folder, last_seq(self._records))
            if is_first and self._through and not is_remote(self._folder):
                self._look_ahead()
            refuse_lost(self._folder, last_seq(self._records), known=known)
            return list(self._records)

    def read_through(self, seq: int) -> list[Record]:
        """Returns the records that decided something when the log had `seq` records."""
        records = self.read()
        with self._lock:
            records = read_whole(self._folder) if self._through > seq else records
        return [record for record in records if record.seq <= seq]

    def add(self, record: Record) -> None:
        """Adds a record that this process has written, if all before it are known."""
        with self._lock:
            if self._records and record.seq == last_seq(self._records) + 1:
                self._records.append(record)

    def summarize(self) -> None:
        """Writes a new summary once many records have followed the last one.

        Raises:
          RunError: storage has refused it; the log does without.
        """
        with self._lock:
            if last_seq(self._records) - self._through < EVERY:
                return
            # Listed after the records were read: no step that they commit can appear any more.
            run_dir = RunDir(self._folder.parent)
            present = frozenset(files.list_names(run_dir.checkpoints))
            summary = LogSummary(tuple(summarized(self._records, present=present)))
            files.replace(run_dir.log_summary, summary.encode())
            self._records, self._through = list(summary.records), summary.through

    def _refuse_lost(self) -> None:
        """Raises StorageUnavailable if the newest record that was read is gone."""
        if not self._records or is_remote(self._folder):
            return  # An object that is gone was deleted; a disk may be unmounted.
        newest = last_seq(self._records)
        if files.read(self._folder / file_name(newest)) is None:
            names = files.list_names(self._folder)
            refuse_lost(self._folder, min(len(names), newest - 1), known=newest)

    def _begin_again(self) -> None:
        """Continues from a newer summary, so that a process that runs for long stays small."""
        if (summary := self._stored()) is not None and summary.through > self._through:
            self._records, self._through = list(summary.records), summary.through

    def _read_first(self, known: int) -> None:
        """Reads the summary, and the records listed after it."""
        if (summary := self._stored()) is not None:
            self._records, self._through = list(summary.records), summary.through
            if not is_remote(self._folder):
                return  # To list a folder takes the longer, the more files it has.
        before = file_name(self._through)
        names = [name for name in files.list_names(self._folder, after=before) if name > before]
        refuse_lost(self._folder, self._through + len(names), known=known)
        _refuse_gaps(self._folder, names, first=self._through + 1)
        self._records += _listed(self._folder, names)

    def _look_ahead(self) -> None:
        """Refuses a log of which the next record is missing and one of the following is there."""
        after = last_seq(self._records) + 1
        ahead = (file_name(number) for number in range(after + 1, after + 1 + AHEAD))
        found = next((name for name in ahead if files.exists(self._folder / name)), None)
        if found is not None:
            _refuse_gaps(self._folder, [found], first=after)

    def _stored(self) -> LogSummary | None:
        """Returns the summary in storage if it ends with a record that the log has."""
        data = files.read(RunDir(self._folder.parent).log_summary)
        summary = None if data is None else LogSummary.decode(data)
        if summary is None:
            return None
        newest = summary.records[-1]
        is_of_log = files.read(self._folder / file_name(newest.seq)) == newest.encode()
        return summary if is_of_log else None


_readers: dict[RunPath, LogReader] = {}
"""Of logs in buckets: a record never changes, and each read is a request."""
_readers_lock = threading.Lock()


def reader_of(folder: RunPath) -> LogReader:
    """Returns a reader of a log; of one in a bucket all callers of this process share it."""
    if not is_remote(folder):
        return LogReader(folder)
    with _readers_lock:
        return _readers.setdefault(folder, LogReader(folder))


def forget(folder: RunPath) -> None:
    """Forgets the records that this process has read of a log that is deleted now."""
    with _readers_lock:
        _readers.pop(folder, None)


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


def _probed(folder: RunPath, after: int) -> list[Record]:
    """Reads the records after number `after`, in order."""
    records: list[Record] = []
    while (data := files.read(path := folder / file_name(after + 1))) is not None:
        after += 1
        records.append(_decoded(path, data))
    return [record for record in records if not isinstance(record.body, Dropped)]


class RunLog:
    """Writer of the run log for one attempt; several threads may append."""

    def __init__(self, folder: RunPath, *, attempt: int, last_seq: int, clock: Clock) -> None:
        self._folder = folder
        self._last_seq = last_seq
        self.clock = clock
        self._lock = threading.Lock()
        self._unconfirmed: bytes | None = None
        """A record whose write storage has not confirmed: the next slot may have it or not."""
        self._reader = reader_of(folder)
        self._claim: Record | None = None
        """The claim of the attempt; None: unknown."""
        self.attempt = attempt

    @classmethod
    def claim(
        cls, folder: RunPath, claim: Claim, *, after: Sequence[Record], clock: Clock
    ) -> RunLog:
        """Claims the run for `claim.attempt`, in the first free slot after the records `after`.

        Raises:
          Fenced: another process has claimed the run since these records were read.
          ConfigError: a record is missing, and later ones are there.
        """
        files.make_dir(folder)
        newest = file_name(last_seq(after))
        later = [name for name in files.list_names(folder, after=newest) if name > newest]
        _refuse_gaps(folder, later, first=last_seq(after) + 1)
        log = cls(folder, attempt=claim.attempt, last_seq=last_seq(after), clock=clock)
        log._claim = log.append(claim)
        files.delete_temporaries(folder)
        return log

    @classmethod
    def of_attempt(
        cls, folder: RunPath, records: Sequence[Record], *, attempt: int, clock: Clock
    ) -> RunLog:
        """Returns the log for another process of an attempt that is claimed in the records.

        It begins right after the claim, so that a newer claim in the records fences it.
        """
        claims = (r for r in records if r.attempt == attempt and isinstance(r.body, Claim))
        claim = next(claims)
        log = cls(folder, attempt=attempt, last_seq=claim.seq, clock=clock)
        log._claim = claim
        return log

    @property
    def last_seq(self) -> int:
        """Number of the newest record of this attempt that this process knows."""
        return self._last_seq

    def append(self, body: Body) -> Record:
        """Writes the next record durably.

        The supervisor and its worker both write for their attempt: each skips slots that the other
        one has written, and slots with late records of older attempts.

        Raises:
          Fenced: a newer attempt owns the log, or another run is in its place; nothing was written.
          StorageUnavailable: storage fails, or records of this attempt are gone.
        """
        with self._lock:
            self._refuse_replaced()
            self._settle_unconfirmed()
            while True:
                record = Record(self._last_seq + 1, self.attempt, self.clock.wall(), body)
                path = self._folder / file_name(record.seq)
                self._unconfirmed = record.encode()
                is_ours = files.create(path, self._unconfirmed)
                if not is_ours:
                    self._raise_if_fences(_decoded(path, files.read(path)), body)
                self._unconfirmed = None
                self._last_seq = record.seq
                if is_ours:
                    if is_remote(self._folder):
                        self._reader.add(Record.decode(record.encode(), path=path))
                    return record
                self._skip_written(body)

    def _refuse_replaced(self) -> None:
        """Raises if another run, or an older copy of this one, has been put in the log's place.

        Only folders of a disk can be renamed; in a bucket each record would cost a request more.

        Raises:
          Fenced: the claim of this attempt is another record.
          StorageUnavailable: the newest record that this process knows is gone.
        """
        if self._claim is None or is_remote(self._folder):
            return
        path = self._folder / file_name(self._claim.seq)
        data = files.read(path)
        if data is not None and _is_other(data, self._claim, path):
            raise Fenced(
                f"{path}: is not this attempt's claim any more: another run is in the place of "
                f"{self._folder.parent}. This process commits and deletes nothing there; start "
                "the run again where its directory is now."
            )
        newest = self._folder / file_name(self._last_seq)
        if _folder_exists(self._folder) and files.read(newest) is None:
            raise StorageUnavailable(
                f"{newest}: existed a moment ago. Was the run directory replaced by an older copy? "
                "Nothing was written. Put the directory back, or stop this run."
            )

    def _skip_written(self, body: Body) -> None:
        """Goes on after the records that are there: a supervisor's next slot may be far ahead.

        Raises:
          Fenced: a newer attempt has claimed the run in one of them.
        """
        for winner in self._reader.read():
            if winner.seq > self._last_seq:
                self._raise_if_fences(winner, body)
                self._last_seq = winner.seq

    def _raise_if_fences(self, winner: Record, body: Body) -> None:
        is_other_claim = isinstance(body, Claim) and isinstance(winner.body, Claim)
        if is_other_claim or winner.attempt > self.attempt:
            raise _fenced(self._folder / file_name(winner.seq), winner)

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
        """Returns the records that decide something; reads only the ones new to this process.

        Raises:
          StorageUnavailable: records that this process has seen are missing. A committed step must
            not be treated as deleted because storage does not show its record.
        """
        known = self._last_seq  # Before the read: other threads append.
        records = self._reader.read(known=known)
        with contextlib.suppress(RunError):  # The log does without, and the next call tries again.
            self._reader.summarize()
        return records

    def records_through(self, seq: int) -> list[Record]:
        """Returns the records that decided something when the log had `seq` records."""
        return self._reader.read_through(seq)

    def history(self) -> RunHistory:
        """Reads the log and folds it."""
        return fold(self.records())


def _is_other(data: bytes, record: Record, path: RunPath) -> bool:
    """Returns whether a file has another record; a damaged one is no other record."""
    try:
        return Record.decode(data, path=path) != record
    except (RunError, ValueError):
        return False


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
