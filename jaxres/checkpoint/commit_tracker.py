"""Tracks the commits of one attempt and the one save in flight.

After a durable write the tracker appends the commit record, applies retention and deletes leftover
step directories. Claims, commits and prunes are recorded in the run log only: a step directory that
no record names is not committed, even if it is complete.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from jaxres.checkpoint.digests.block_digests import ArrayInfo
from jaxres.checkpoint.retention import pruning
from jaxres.checkpoint.write.background_save import BackgroundSave
from jaxres.checkpoint.write.frozen_arrays import FrozenSums, LinkSource
from jaxres.clock import Clock
from jaxres.cluster.host_group import HostGroup
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Judged, Progress, already_judged
from jaxres.faults import ConfigError, StorageUnavailable, Unrestorable
from jaxres.runlog import step_dirs
from jaxres.runlog.events import Emit, Noted, SaveCommitted, SaveFailed, StepsPruned
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunLog
from jaxres.storage import files
from jaxres.storage.path import RunPath


class CommitTracker:
    """The committed steps as known to one host of this attempt; only host 0 writes the log."""

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: RunDir,
        log: RunLog,
        peers: HostGroup,
        emit: Emit,
        clock: Clock,
    ) -> None:
        """Reads the log; for the arguments see `Checkpointer`."""
        self._section = section
        self._run_dir = run_dir
        self._log = log
        self._peers = peers
        self._emit = emit
        self._clock = clock
        self._unsure: tuple[Commit, float, int] | None = None
        """A commit whose record storage has not confirmed, and the arguments of `commit`."""
        history = log.history()
        self.names = {path.rpartition("/")[2] for path in history.paths}
        """Directory names of all steps that were ever committed, even if pruned since."""
        self._tried: set[str] = set()
        """Directory names of all saves of this attempt."""
        self.committed_step = self.saved_step = history.step
        """Newest committed step, and newest step that is committed or being saved."""
        self.longest_seconds = 0.0
        """Longest duration of a committed save."""
        self.failures = 0
        """Number of saves in a row that storage has refused."""
        self.why = ""
        """Reason of the newest failed save; empty if none has failed since the last commit."""

    def commit(self, commit: Commit, started: float, *, linked_bytes: int = 0) -> None:
        """Commits a durable step by appending its record.

        Args:
          started: monotonic time of the start of its save.
          linked_bytes: how many of its bytes are links to files of an earlier step.
        """
        try:
            self._log.append(commit)
        except StorageUnavailable:
            # The record may exist all the same; then the step is committed, so keep its files.
            self._unsure = commit, started, linked_bytes
            if not self.confirm():
                raise
            return
        self._on_committed(commit, started, linked_bytes)

    @property
    def is_unsure(self) -> bool:
        """Whether storage has not confirmed yet if a commit record exists."""
        return self._unsure is not None

    def confirm(self) -> bool:
        """Completes the unconfirmed commit if its record exists; returns whether it does.

        Raises:
          StorageUnavailable: storage does not answer yet.
        """
        if self._unsure is None:
            return False
        exists = self._log.confirm_pending()
        arguments, self._unsure = self._unsure, None
        if exists:
            self._on_committed(*arguments)
        return exists

    def free_name(self, step: int) -> str:
        """Returns a name for a step directory that no save has ever had.

        A disk or bucket may complete writes of a save that has timed out: they must not reach
        another save's directory.

        Raises:
          StorageUnavailable: files of a failed save can't be deleted yet.
        """
        if not self._run_dir.is_remote and self._failed_dirs():
            self.sweep()
            if left := self._failed_dirs():
                raise StorageUnavailable(f"{left[0]}: a failed save's files can't be deleted yet.")
        names = step_dirs.step_names(step, attempt=self._log.attempt)
        name = next(name for name in names if name not in self.names | self._tried)
        self._tried.add(name)
        return name

    def _failed_dirs(self) -> list[RunPath]:
        """Returns the existing directories of this attempt's failed saves."""
        names = sorted(self._tried - self.names)
        both = [(name, step_dirs.temporary_name(name)) for name in names]
        folders = [self._run_dir.checkpoints / name for pair in both for name in pair]
        return [folder for folder in folders if files.exists(folder)]

    def rewind(self, step: int) -> None:
        """Makes an older step the newest committed one, after a rollback record.

        Also deletes the abandoned save, so that a killed attempt leaves one complete step at most.
        """
        self._unsure = None
        self.committed_step = self.saved_step = step
        self.failures, self.why = 0, ""
        if self._peers.member.leads:
            self.sweep()

    def mark(self, step: int) -> None:
        """Notes that a step is committed, once its record is in the log."""
        self.committed_step = step
        self.saved_step = max(self.saved_step, step)
        self.failures, self.why = 0, ""

    def _on_committed(self, commit: Commit, started: float, linked_bytes: int) -> None:
        """Emits the event of a commit, prunes old steps and deletes leftovers."""
        self.mark(commit.step)
        self.names.add(commit.path.rpartition("/")[2])
        seconds = self._clock.monotonic() - started
        self.longest_seconds = max(self.longest_seconds, seconds)
        self._emit(SaveCommitted(commit.step, commit.path, commit.bytes, seconds, linked_bytes))
        try:
            self._prune()
        except (StorageUnavailable, OSError) as error:
            self._emit(
                Noted(f"old steps could not be pruned; the next commit tries again: {error}")
            )
        self.sweep()

    def fail(self, step: int, why: str) -> None:
        """Counts and reports a save that storage has refused, and deletes its files."""
        if self._peers.member.leads:
            self.sweep()
        if self.committed_step >= step:
            return  # Its record exists after all.
        self.failures += 1
        self.why = why
        self.saved_step = self.committed_step
        self._emit(SaveFailed(step, self.why, self.failures))

    def _prune(self) -> None:
        pruned = pruning.prune(self._log, self._section.keep, run_dir=self._run_dir)
        if pruned:
            self._emit(StepsPruned(pruned))

    def sweep(self) -> None:
        """Deletes leftover step directories; after a failure the next save tries again."""
        try:
            if self._run_dir.is_remote:
                self.confirm()  # A late record must not name a step that was deleted.
            with ThreadPoolExecutor(1, "jaxres-sweep") as pool:  # In a bucket both are requests.
                listing = pool.submit(step_dirs.listed, self._run_dir.checkpoints)
                history = self._log.history()
            pruning.delete_all_but(
                history,
                run_dir=self._run_dir,
                attempt=self._log.attempt,
                listed=listing.result(),
            )
        except (StorageUnavailable, ConfigError, Unrestorable, OSError) as error:
            self._emit(
                Noted(f"leftover steps could not be deleted; the next save tries again: {error}")
            )


MIN_LATE_SECONDS = 5.0
"""Least duration after which a save is late."""
LATE = 2.0
"""A save is late after this many times the longest duration of a committed save."""
LATE_AFTER_REFUSAL_SECONDS = 1.0
"""Duration after which a save is late if storage has refused the previous one: a full disk refuses
the next save at once, and a bucket that does not answer fails it after half a minute.
"""


@dataclass(frozen=True)
class FrozenPart:
    """The frozen arrays of a save."""

    paths: tuple[str, ...] = ()
    """Their paths; empty if the run trains everything."""
    sums: FrozenSums = ()
    """Result of `sums_of` for them."""
    source: LinkSource | None = None
    """The step whose files are linked; None if they are written."""


@dataclass(frozen=True)
class PendingSave:
    """A save that has been started and is not finalized yet."""

    writing: BackgroundSave
    step_dir: RunPath
    progress: Progress
    infos: Mapping[str, ArrayInfo]
    started: float
    topic: str
    """Topic of the messages between hosts about this save."""
    frozen: FrozenPart = FrozenPart()
    judged: Judged = already_judged
    """Waits for the verdict on the step."""


class SaveSlot:
    """The save in flight, as a future of the saver thread; one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: Future[None] | None = None
        self._began = 0.0

    def begin(self, work: Future[None]) -> None:
        """Stores the future of the task that was submitted to the saver thread."""
        self._work, self._began = work, self._clock.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether the save is still in flight."""
        return self._work is not None and not self._work.done()

    def result(self, *, seconds: float) -> bool:
        """Waits until the save has ended and raises its error; False: timeout."""
        if self._work is None:
            return True
        if not self._done_within(seconds):
            return False
        self._work.result()
        return True

    def is_over_in_time(self, *, longest_seconds: float, is_refused: bool) -> bool:
        """Waits until the save ends or is late; returns whether it has ended.

        Args:
          longest_seconds: longest duration of a committed save so far.
          is_refused: whether storage has refused the previous save.
        """
        usual = max(MIN_LATE_SECONDS, LATE * longest_seconds)
        return self._done_within(
            (LATE_AFTER_REFUSAL_SECONDS if is_refused else usual) - self.seconds
        )

    @property
    def seconds(self) -> float:
        """Time since the save started."""
        return self._clock.monotonic() - self._began

    def _done_within(self, seconds: float) -> bool:
        assert self._work is not None
        return bool(concurrent.futures.wait([self._work], max(0.0, seconds)).done)
