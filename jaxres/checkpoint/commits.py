"""What follows a durable write: the commit record, retention, the sweep of what does not count.

One per attempt. Claims, commits and prunes go only through the run log; a step directory that no
record names is dead, whoever wrote it.
"""

from __future__ import annotations

from jaxres import storage
from jaxres.checkpoint import pruning, retention
from jaxres.clock import Clock
from jaxres.config.schema import CheckpointSection
from jaxres.events import Emit, Noted, SaveCommitted, SaveFailed, StepsPruned
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable
from jaxres.hosts import Peers
from jaxres.place import BucketPath
from jaxres.rundir import RunDir
from jaxres.runlog import Commit, Line, RunLog


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
        if storage.exists(step_dir):
            self.sweep()
        if storage.exists(step_dir):
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
