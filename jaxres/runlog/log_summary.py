"""The summary of a run log: the records that still decide something, up to one of its numbers.

A run that saves continuously writes hundreds of thousands of commit and prune records, of which a
few matter. The summary has the others' place: a reader continues from it and reads only what the
log has since. It is derived from the log, which stays whole and decides alone: a summary that is
damaged, or whose last record is not the one that the log has, is not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxres.runlog.history import fold, in_force
from jaxres.runlog.records import FORMAT as RECORD_FORMAT
from jaxres.runlog.records import Commit, Prune, Record
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.codec import FORMAT

NUMBER = 1
"""Format number of the summary."""
EVERY = 512
"""Number of records after which a summary is renewed; a shorter log has none."""


@dataclass(frozen=True)
class LogSummary:
    """The records that decide something, of the first `through` records of a log."""

    records: tuple[Record, ...]

    @property
    def through(self) -> int:
        """Number of the last record, which every summary has."""
        return self.records[-1].seq

    def encode(self) -> bytes:
        """Returns the bytes of the file."""
        lines = [record.encode().decode() for record in self.records]
        return encode_checksummed({FORMAT: NUMBER, "records": lines})

    @staticmethod
    def decode(data: bytes) -> LogSummary | None:
        """Returns the summary of a file; None: it can't be used."""
        try:
            lines = decode_checksummed(data, number=NUMBER)["records"]
            records = [
                Record.from_fields(decode_checksummed(line.encode(), number=RECORD_FORMAT))
                for line in lines
            ]
            if any(after.seq <= before.seq for before, after in itertools.pairwise(records)):
                return None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return LogSummary(tuple(records)) if records else None


def summarized(records: Sequence[Record], *, present: Collection[str]) -> list[Record]:
    """Returns the records without commits and prunes that decide nothing any more. Pure.

    Whatever records follow, `fold` of the result and these is the same as of all records, but for
    the paths of steps that were pruned and whose directories are gone. So are the outcomes of
    attempts: of each attempt the first, the highest and the last commit stay.

    Args:
      records: all records, or the result of an earlier call and all that follow.
      present: names of the step directories that exist; their commits stay, also if pruned.
    """
    history = fold(records)
    kept = {record.seq for record in history.commits}
    kept |= {record.seq for record, _ in history.quarantined}
    own: dict[int, list[tuple[int, int]]] = {}
    for record in in_force(records):
        if isinstance(record.body, Commit):
            own.setdefault(record.attempt, []).append((record.body.step, record.seq))
    for commits in own.values():
        kept |= {commits[0][1], max(commits)[1], commits[-1][1]}
    last = {record.attempt: record.seq for record in records}
    kept |= {*last.values(), records[-1].seq}
    left: list[Record] = []
    steps: set[int] = set()
    """Steps of the commits that stay so far: their prunes stay too."""
    for record in records:
        match record.body:
            case Commit(step=step, path=path):
                if record.seq not in kept and path.rpartition("/")[2] not in present:
                    continue
                steps.add(step)
            case Prune(steps=pruned):
                if record.seq not in kept and steps.isdisjoint(pruned):
                    continue
            case _:
                pass
        left.append(record)
    return left
