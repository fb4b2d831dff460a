"""Folds the run log into the surviving history of a run and its owner. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxres.runlog.records import (
    PROGRAM_START,
    AttemptEnded,
    Branch,
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
)


@dataclass(frozen=True)
class RunHistory:
    """The surviving history of a run, and the attempts that owned it."""

    claims: tuple[Claim, ...] = ()
    starts: tuple[Record, ...] = ()
    """Records whose body is a Start: each opens a segment of metrics lines."""
    commits: tuple[Record, ...] = ()
    """Records whose body is a Commit, of steps that are still committed, ascending by step."""
    quarantined: tuple[tuple[Record, Quarantine], ...] = ()
    """Commit records of damaged steps, each with its Quarantine, ascending by step."""
    paths: frozenset[str] = frozenset()
    """Paths of all commit records, ignored ones too; they are never reused. Of a log that was read
    from its summary, without those of pruned steps whose directories are gone."""
    skips: tuple[tuple[int, int], ...] = ()
    bad_rows: tuple[tuple[int, int], ...] = ()
    """The skips of bad records, which are skipped in every later epoch too."""
    num_skips: int = 0
    """Number of Skip records."""
    rollbacks: tuple[Record, ...] = ()
    """Records whose body is a Rollback."""
    last_stop: Record | None = None
    origin: Branch | None = None
    """The step of another run that this one begins with; None: it begins at step 0."""
    verified_through: int | None = None
    """Newest step that no later rollback can reach: commits up to it are known good. None:
    unknown."""
    last_change_seq: int = 0
    """Number of the newest record after which other steps are trained than before: a rollback, a
    skip, a quarantine or a branch; 0: there is none."""

    @property
    def attempt(self) -> int:
        """The newest attempt; 0 before the first."""
        return self.claims[-1].attempt if self.claims else 0

    @property
    def newest(self) -> Commit | None:
        """The newest commit; None: there is none."""
        return self.committed[-1] if self.commits else None

    @property
    def committed(self) -> tuple[Commit, ...]:
        """The commits, ascending by step."""
        return tuple(_commit_of(record) for record in self.commits)

    def commits_of(self, attempt: int) -> list[Commit]:
        """Returns the commits that one attempt has made, ascending by step."""
        return [_commit_of(record) for record in self.commits if record.attempt == attempt]

    @property
    def protected_dirs(self) -> frozenset[str]:
        """Names of the step directories that must not be deleted: committed or quarantined ones."""
        paths = [commit.path for commit in self.committed]
        paths += [quarantine.path for _, quarantine in self.quarantined]
        return frozenset(path.rpartition("/")[2] for path in paths)

    @property
    def step(self) -> int:
        """The newest committed step; 0 if there is none."""
        return self.newest.step if self.newest else 0

    @property
    def init(self) -> dict[str, str] | None:
        """The initial weights of the run; None: drawn from the seed, or not started."""
        inits = (start_of(record).init for record in self.starts)
        return next((init for init in inits if init is not None), None)

    def continues(self, *, seq: int, nonce: str, step: int, dataset: str) -> bool:
        """Returns whether a state that no commit record names is the run's state at its step.

        Only if the log has the start under which it was trained, nothing since that start has
        changed which steps are trained, every later start has begun at this step or after it, and
        the step is newer than every committed one.

        Args:
          seq: number of the start record under which the state was trained.
          nonce: nonce of the claim of that attempt; the numbers of a rebuilt log may repeat.
          dataset: fingerprint of the data set as it is now.
        """
        nonces = {claim.attempt: claim.nonce for claim in self.claims}
        own = next((record for record in self.starts if record.seq == seq), None)
        if own is None or nonces.get(own.attempt) != nonce or start_of(own).dataset != dataset:
            return False
        later = [start_of(record).step for record in self.starts if record.seq > seq]
        is_undone = seq < self.last_change_seq or any(start < step for start in later)
        return not is_undone and step > max(self.step, start_of(own).step)

    @property
    def num_rollbacks(self) -> int:
        """Number of rollbacks after high losses, without records that only withdraw commits."""
        bodies = [record.body for record in self.rollbacks]
        return sum(isinstance(body, Rollback) and bool(body.rows) for body in bodies)

    def rate_factor(self, step: int) -> float:
        """Returns the factor of all rollbacks on the learning rate of a step."""
        return math.prod(
            factor for first, factor, steps in self.lower_rates() if 0 <= step - first < steps
        )

    def lower_rates(self, *, before_seq: int | None = None) -> list[tuple[int, float, int]]:
        """Returns first step, factor and number of steps of each lower learning rate.

        `before_seq`: only of rollbacks that the log had before this record.
        """
        found = list(self.origin.lower_rates) if self.origin else []
        for record in self.rollbacks:
            body, is_known = record.body, before_seq is None or record.seq < before_seq
            if isinstance(body, Rollback) and is_known and body.rate_steps:
                found.append((body.onset, body.rate_factor, body.rate_steps))
        return found

    @property
    def dataset(self) -> str | None:
        """Fingerprint of the data set that the run, or the one it begins with, has trained on."""
        if self.starts:
            return start_of(self.starts[-1]).dataset
        return self.origin.dataset if self.origin else None

    @property
    def tokenizer(self) -> str | None:
        """Name of the tokenizer with which the run trains; None: unknown."""
        if self.starts:
            return start_of(self.starts[-1]).tokenizer
        return self.origin.tokenizer if self.origin else None


def _commit_of(record: Record) -> Commit:
    """Returns the body of a commit record."""
    assert isinstance(record.body, Commit), record
    return record.body


def start_of(record: Record) -> Start:
    """Returns the body of a start record."""
    assert isinstance(record.body, Start), record
    return record.body


def recorded_tokenizer(records: Sequence[Record]) -> str | None:
    """Returns the name of the tokenizer with which the run trains; None: unknown."""
    return fold(records).tokenizer


def in_force(records: Sequence[Record]) -> list[Record]:
    """Returns the records without late ones and without starts of programs that are replaced.

    Attempts write no record after a newer claim that they have read. But a bucket may execute a
    request long after its sender has ended.
    """
    newest, kept = 0, list[Record]()
    for record in records:
        if record.attempt >= newest:
            kept.append(record)
        if isinstance(record.body, Claim):
            newest = max(newest, record.attempt)
    loops = {r.attempt for r in kept if isinstance(r.body, Start) and not _is_of_program(r)}
    return [r for r in kept if not (r.attempt in loops and _is_of_program(r))]


def _is_of_program(record: Record) -> bool:
    return isinstance(record.body, Start) and record.body.dataset == PROGRAM_START


def fold(records: Sequence[Record]) -> RunHistory:
    """Returns the run history of the records; pure, and their only interpretation."""
    claims: list[Claim] = []
    starts: list[Record] = []
    commits: dict[int, Record] = {}
    quarantined: list[tuple[Record, Quarantine]] = []
    paths = {record.body.path for record in records if isinstance(record.body, Commit)}
    skips: list[tuple[int, int]] = []
    bad_rows: list[tuple[int, int]] = []
    num_skips = 0
    rollbacks: list[Record] = []
    last_stop, origin = None, None
    looks_back: int | None = None
    good_through: dict[int, int] = {}
    """Step of a commit -> newest step that no rollback after that commit can reach."""
    for record in in_force(records):
        match record.body:
            case Claim():
                claims.append(record.body)
            case Start(looks_back_steps=looks_back):
                starts.append(record)
            case Branch():
                origin = record.body
            case Commit(step=step):
                commits[step] = record
                good_through[step] = -1 if looks_back is None else max(0, step - looks_back)
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
            case AttemptEnded():
                last_stop = record
            case SupervisorEnded() | HostFault() | Dropped():
                pass  # Only supervisor/restart_policy.py and faulty_hosts.py read the former.
    return RunHistory(
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
        origin=origin,
        verified_through=_verified(good_through[step] for step in commits),
        last_change_seq=_last_change(records),
    )


def _verified(good_through: Iterable[int]) -> int | None:
    """Returns the newest step that is known to be good by one of the commits; None: unknown."""
    newest = max(good_through, default=-1)
    return newest if newest >= 0 else None


def _last_change(records: Sequence[Record]) -> int:
    """Returns the number of the newest record that changes which steps are trained; 0: none."""
    changes = (
        record.seq
        for record in in_force(records)
        if isinstance(record.body, Rollback | Skip | Quarantine | Branch)
    )
    return max(changes, default=0)


def _merged(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns sorted, disjoint ranges; the rows of a rollback may contain older skips.

    >>> _merged([(5, 9), (0, 2), (7, 12), (12, 13)])
    ((0, 2), (5, 13))
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
