"""What follows a durable write: the commit record, retention, the sweep of what does not count.

One per attempt. Claims, commits and prunes go only through the run log; a step directory that no
record names is dead, whoever wrote it.

The save in flight, and how long the next one may wait for it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from jaxres.checkpoint import pruning, retention
from jaxres.checkpoint.block_digests import ArrayInfo
from jaxres.checkpoint.orbax_io import Writing
from jaxres.clock import Clock
from jaxres.cluster.host_group import Peers
from jaxres.config.schema import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable
from jaxres.runlog.events import Emit, Noted, SaveCommitted, SaveFailed, StepsPruned
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Line, RunLog
from jaxres.storage import files
from jaxres.storage.path import BucketPath, Place


class Commits:
    """Which steps count, as one host of this attempt knows it; only the lead's writes the log."""

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: RunDir,
        log: RunLog,
        peers: Peers,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Reads the log; see Checkpoints for the arguments."""
        self._section = section
        self._run_dir = run_dir
        self._log = log
        self._peers = peers
        self._emit = emit
        self._clock = clock
        self._unsure: tuple[Commit, float] | None = None
        """A commit whose record storage failed to confirm, and when its save began."""
        line = log.line()
        self.names = {path.rpartition("/")[2] for path in line.paths}
        """Of all steps that were ever committed, whatever became of them."""
        self._tried: set[str] = set()
        """Of all saves of this attempt to a bucket."""
        self.committed_step = self.saved_step = line.step
        """Newest step that counts, and newest that is saved or being saved."""
        self.longest_seconds = 0.0
        """What a save that was committed has taken at most."""
        self.failures = 0
        """Saves in a row that storage has refused."""
        self.why = ""
        """Why the newest save that failed did; empty if none has failed since the last commit."""

    def commit(self, commit: Commit, started: float) -> None:
        """Makes a durable step count, by its record."""
        try:
            self._log.append(commit)
        except StorageUnavailable:
            # The record may stand all the same; then its step counts, and may not be deleted.
            self._unsure = commit, started
            if not self.confirm():
                raise
            return
        self._count(commit, started)

    @property
    def is_unsure(self) -> bool:
        """Whether a commit's record may stand, and storage has not said so."""
        return self._unsure is not None

    def confirm(self) -> bool:
        """Counts the commit whose record storage failed to confirm, if the record stands.

        Raises:
          StorageUnavailable: that can't be told yet.
        """
        if self._unsure is None:
            return False
        stands = self._log.confirm()
        (commit, started), self._unsure = self._unsure, None
        if stands:
            self._count(commit, started)
        return stands

    def free_name(self, step: int) -> str:
        """Returns a name for a step directory, where nothing is.

        No committed step has ever had it, whatever became of that. In a bucket no other save has,
        either: what was asked of it may still be done after everybody has given up.

        Raises:
          StorageUnavailable: what a failed save of this very step has left can't be deleted yet.
        """
        names = retention.step_names(step, attempt=self._log.attempt)
        name = next(name for name in names if name not in self.names | self._tried)
        step_dir = self._run_dir.checkpoints / name
        if isinstance(step_dir, BucketPath):
            self._tried.add(name)
            return name
        if files.exists(step_dir):
            self.sweep()
        if files.exists(step_dir):
            raise StorageUnavailable(f"{step_dir}: an earlier save's files can't be deleted yet.")
        return name

    def go_back(self, step: int) -> None:
        """Counts from an older step on: the log says that nothing above it is on the line."""
        self._unsure = None
        self.committed_step = self.saved_step = step
        self.failures, self.why = 0, ""

    def mark(self, step: int) -> None:
        """Notes that a step counts; the record says so."""
        self.committed_step = step
        self.saved_step = max(self.saved_step, step)
        self.failures, self.why = 0, ""

    def _count(self, commit: Commit, started: float) -> None:
        self.mark(commit.step)
        self.names.add(commit.path.rpartition("/")[2])
        seconds = self._clock.monotonic() - started
        self.longest_seconds = max(self.longest_seconds, seconds)
        self._emit(SaveCommitted(commit.step, commit.path, commit.bytes, seconds))
        try:
            self._prune()
        except (StorageUnavailable, OSError) as error:
            self._emit(
                Noted(f"old steps could not be pruned, the next commit tries again: {error}")
            )
        self.sweep()

    def fail(self, step: int, why: str) -> None:
        """Counts and tells a save that storage has refused, and gives back what room it took."""
        if self._peers.member.leads:
            self.sweep()
        if self.committed_step >= step:
            return  # Its record stood after all.
        self.failures += 1
        self.why = why
        self.saved_step = self.committed_step
        self._emit(SaveFailed(step, self.why, self.failures))

    def _prune(self) -> None:
        pruned = pruning.prune(self._log, self._section.keep, run_dir=self._run_dir)
        if pruned:
            self._emit(StepsPruned(pruned))

    def sweep(self) -> None:
        """Deletes what is not on the line; what does not go now goes at the next save's end."""
        try:
            if isinstance(self._run_dir.root, BucketPath):
                self.confirm()  # A record that is on its way may not come to name what is gone.
            self.delete_all_but(self._log.line())
        except (StorageUnavailable, ConfigError, Unrestorable, OSError) as error:
            self._emit(
                Noted(f"dead steps could not be deleted, the next save tries again: {error}")
            )

    def delete_all_but(self, line: Line) -> None:
        """Deletes the step directories, of this attempt or earlier ones, that are off the line."""
        pruning.delete_all_but(line, run_dir=self._run_dir, attempt=self._log.attempt)


LEAST_PATIENCE_SECONDS = 5.0
"""What a save may take before it counts as late, whatever earlier ones took."""
LATE = 2.0
"""So many times the longest one that was committed."""
REFUSED_PATIENCE_SECONDS = 1.0
"""The same after one that storage has refused: a full disk refuses the next at once, and a bucket
that is away does so after half a minute.
"""


@dataclass(frozen=True)
class Flying:
    """A save that has begun."""

    writing: Writing
    step_dir: Place
    progress: Progress
    infos: Mapping[str, ArrayInfo]
    started: float
    topic: str
    """Under which hosts speak of it."""


class Flight:
    """What the saver's thread is at; only one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: Future[None] | None = None
        self._began = 0.0

    def begin(self, work: Future[None]) -> None:
        """Takes what was given to the saver."""
        self._work, self._began = work, self._clock.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether it is not over."""
        return self._work is not None and not self._work.done()

    def result(self, *, seconds: float) -> bool:
        """Waits for the end, and raises what it has failed with; False: it is not over in time."""
        if self._work is None:
            return True
        if not self._done_within(seconds):
            return False
        self._work.result()
        return True

    def is_over_in_time(self, *, longest_seconds: float, is_refused: bool) -> bool:
        """Waits for the end for as long as a save takes that storage does take.

        Args:
          longest_seconds: what the longest one so far has taken.
          is_refused: whether storage has refused the one before that.
        """
        usual = max(LEAST_PATIENCE_SECONDS, LATE * longest_seconds)
        return self._done_within((REFUSED_PATIENCE_SECONDS if is_refused else usual) - self.seconds)

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return self._clock.monotonic() - self._began

    def _done_within(self, seconds: float) -> bool:
        assert self._work is not None
        return bool(concurrent.futures.wait([self._work], max(0.0, seconds)).done)
