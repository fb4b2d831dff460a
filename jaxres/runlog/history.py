"""What the log says by now: the surviving history of a run, and who owns it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxres.runlog.records import (
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
)


@dataclass(frozen=True)
class Line:
    """The surviving history of a run, and who owns it."""

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
