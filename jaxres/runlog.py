"""The decision log: numbered records, created only if absent, folded into the one line of the run.

Home of: zombie. Whoever finds another attempt's record in the slot it wanted is fenced and has
written nothing: there is one linearisation point, however long a process was paused.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres import storage
from jaxres.clock import Clock
from jaxres.faults import ConfigError, Fenced, StorageUnavailable, Unrestorable
from jaxres.place import BucketPath, Place
from jaxres.records import (
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


def read_records(folder: Place) -> list[Record]:
    """Reads the whole log in order; a gap in the numbers is an error, not an end."""
    if isinstance(folder, BucketPath):
        return list(_known.newest(folder))
    names = storage.list_names(folder)
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
                names = storage.list_names(folder)
                _refuse_gaps(folder, names, first=1)
                found = storage.read_all([folder / name for name in names])
                records += [
                    _decoded(folder / n, data) for n, data in zip(names, found, strict=True)
                ]
            records += _probed(folder, len(records))
            return records


_known = _Known()


def _read(path: Place) -> Record:
    return _decoded(path, storage.read(path))


def _decoded(path: Place, data: bytes | None) -> Record:
    assert data is not None, path
    try:
        return Record.decode(data, path=path)
    except Unrestorable:  # One wrong read proves nothing.
        storage.forget(path)
        return Record.decode(storage.read(path) or b"", path=path)


def claim_of(records: Sequence[Record], *, attempt: int) -> Claim:
    """Returns the claim that opened an attempt."""
    bodies = (record.body for record in records if record.attempt == attempt)
    return next(body for body in bodies if isinstance(body, Claim))


def newer_claim(folder: Place, *, attempt: int, after: int) -> tuple[Claim | None, int]:
    """Looks at the records that have come since; cheap enough for every second.

    Returns the claim of a later attempt, or None, and the number of the newest record seen.
    """
    while (data := storage.read(folder / file_name(after + 1))) is not None:
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
    while (data := storage.read(path := folder / file_name(after + len(found) + 1))) is not None:
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
        storage.make_dir(folder)
        log = cls(folder, attempt=claim.attempt, last_seq=len(after), clock=clock)
        log.append(claim)
        storage.delete_temporaries(folder)
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
                is_ours = storage.create(path, self._unsure)
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
            storage.create(path, self._unsure)
        stands = self._unsure is not None and storage.read(path) == self._unsure
        if self._unsure is not None and not stands and not _is_there(self._folder):
            raise StorageUnavailable(f"{self._folder}: the run's log is gone; bring it back.")
        if stands:
            with storage.typed_errors(path):
                storage.sync_dir(self._folder)
            self._last_seq += 1
        self._unsure = None
        return stands

    @property
    def folder(self) -> Place:
        """Where the records are."""
        return self._folder

    def records(self) -> list[Record]:
        """Reads the whole log."""
        return read_records(self._folder)

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


@dataclass(frozen=True)
class Line:
    """What the log says by now: the surviving history, and who owns the run."""

    claims: tuple[Claim, ...] = ()
    starts: tuple[Record, ...] = ()
    """Records whose body is a Start: each opens a segment of metrics lines."""
    commits: tuple[Record, ...] = ()
    """Records whose body is a Commit, of steps that still count, ascending by step."""
    quarantined: tuple[tuple[Record, Quarantine], ...] = ()
    """Commit records of damaged steps, each with what was decided, ascending by step."""
    paths: frozenset[str] = frozenset()
    """Of all steps that were ever committed; no other step may take one's place."""
    skips: tuple[tuple[int, int], ...] = ()
    bad_rows: tuple[tuple[int, int], ...] = ()
    """Those of the skips that are bad records: they are left out in every later epoch too."""
    num_skips: int = 0
    """How often bad records were left out."""
    rollbacks: tuple[Record, ...] = ()
    """Records whose body is a Rollback."""
    last_stop: Record | None = None
    good_through: int | None = None
    """No rollback can begin at or before this step any more: commits up to it are known good. None:
    nobody can say."""

    @property
    def attempt(self) -> int:
        """The newest attempt; 0 before the first."""
        return self.claims[-1].attempt if self.claims else 0

    @property
    def newest(self) -> Commit | None:
        """The newest committed step on the line."""
        return self.committed[-1] if self.commits else None

    @property
    def committed(self) -> tuple[Commit, ...]:
        """The steps that count, ascending."""
        return tuple(_commit_of(record) for record in self.commits)

    @property
    def stay(self) -> frozenset[str]:
        """Names of the step directories that nobody may delete: they count, or are evidence."""
        paths = [commit.path for commit in self.committed]
        paths += [decided.path for _, decided in self.quarantined]
        return frozenset(path.rpartition("/")[2] for path in paths)

    @property
    def step(self) -> int:
        """The newest committed step; 0 if there is none."""
        return self.newest.step if self.newest else 0

    @property
    def init(self) -> dict[str, str] | None:
        """The weights that the run was started from; None: drawn from the seed, or not started."""
        found = (start_of(record).init for record in self.starts)
        return next((init for init in found if init is not None), None)

    def rate_factor(self, step: int) -> float:
        """The factor that rollbacks have put on the learning rate of a step."""
        bodies = (record.body for record in self.rollbacks)
        return math.prod(
            body.rate_factor
            for body in bodies
            if isinstance(body, Rollback) and 0 <= step - body.onset < body.rate_steps
        )

    @property
    def dataset(self) -> str | None:
        """Fingerprint of the rows that the run has trained on."""
        return start_of(self.starts[-1]).dataset if self.starts else None


def _commit_of(record: Record) -> Commit:
    """Returns the body of a commit record."""
    assert isinstance(record.body, Commit), record
    return record.body


def start_of(record: Record) -> Start:
    """Returns the body of a start record."""
    assert isinstance(record.body, Start), record
    return record.body


def fold(records: Sequence[Record]) -> Line:
    """Derives the line from the records; pure, and the only reading of them."""
    claims: list[Claim] = []
    starts: list[Record] = []
    commits: dict[int, Record] = {}
    quarantined: list[tuple[Record, Quarantine]] = []
    paths: set[str] = set()
    skips: list[tuple[int, int]] = []
    bad_rows: list[tuple[int, int]] = []
    num_skips = 0
    rollbacks: list[Record] = []
    last_stop = None
    looks_back: int | None = None
    good_through: dict[int, int] = {}
    """Step of a commit -> what all that is judged by then says of older ones."""
    for record in records:
        match record.body:
            case Claim():
                claims.append(record.body)
            case Start(looks_back_steps=looks_back):
                starts.append(record)
            case Commit(step=step, path=path):
                commits[step] = record
                if looks_back is not None:
                    good_through[step] = max(0, step - looks_back)
                paths.add(path)
            case Quarantine(step=step, path=path):
                if step in commits and _commit_of(commits[step]).path == path:
                    quarantined.append((commits.pop(step), record.body))
            case Skip(rows=rows):
                skips.extend(rows)
                bad_rows.extend(rows)
                num_skips += 1
            case Rollback(target=target, rows=rows):
                rollbacks.append(record)
                skips.extend(rows)
                commits = {step: kept for step, kept in commits.items() if step <= target}
            case Prune(steps=steps):
                for step in steps:
                    commits.pop(step, None)
            case Stop():
                last_stop = record
            case Leave():
                pass  # Of supervisors; `supervise.past` reads it.
    return Line(
        claims=tuple(claims),
        starts=tuple(starts),
        commits=tuple(commits[step] for step in sorted(commits)),
        quarantined=tuple(sorted(quarantined, key=lambda pair: pair[1].step)),
        paths=frozenset(paths),
        skips=_merged(skips),
        bad_rows=_merged(bad_rows),
        num_skips=num_skips,
        rollbacks=tuple(rollbacks),
        last_stop=last_stop,
        good_through=max((n for at, n in good_through.items() if at in commits), default=None),
    )


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns sorted ranges that neither overlap nor touch: a rollback may reach over older skips.

    >>> _merged([(5, 9), (0, 2), (7, 12), (12, 13)])
    ((0, 2), (5, 13))
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)
