"""The checkpointer: saves in the background, commits through the run log, restores steps.

Order of a commit:
1. What `checkpoint.writer` names writes the arrays in the background into a directory of this
   attempt.
2. The saver waits for the result of that write.
3. Files of frozen parameters that an earlier step has are linked (frozen_arrays.py).
4. progress.json and MANIFEST.json are written, and everything is fsynced (finalize.py).
5. The metrics lines are made durable.
6. The commit record is appended to the run log (commit_tracker.py).
Only the record commits the step. After a kill before it, the previous commit is in force.

Home of: storage_unavailable. A save that storage refuses leaves no files behind and is reported as
an event. Training continues, and the next save tries again, at most
`checkpoint.max_failed_saves` times in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from jaxres.checkpoint import save_messages
from jaxres.checkpoint.commit_tracker import CommitTracker, FrozenPart, PendingSave, SaveSlot
from jaxres.checkpoint.finalize import WrittenArrays, finalize
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.readback import HostReport, gather_reports
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.restore.restore import NewestValid, Restored, all_damaged_error, restore
from jaxres.checkpoint.save_messages import (
    Abandoned,
    Begin,
    Committed,
    Failed,
    NothingToDo,
    SaveDecision,
    SaveOutcome,
)
from jaxres.checkpoint.snapshot import SnapshotMemory
from jaxres.checkpoint.state_arrays import Tree, array_infos
from jaxres.checkpoint.throttle import Throttle
from jaxres.checkpoint.write import background_save, frozen_arrays
from jaxres.checkpoint.write.background_save import BackgroundSave, SaveSettings
from jaxres.checkpoint.write.frozen_arrays import LinkedFiles, LinkSource, split_state
from jaxres.checkpoint.write.linked_parts import WrittenParts
from jaxres.cluster.host_group import MESSAGE_SECONDS, HostGroup
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Judged, Progress, already_judged
from jaxres.engine.trainable import ALL, Trainable
from jaxres.faults import Continue, StopRun, StorageUnavailable, Verdict, fault
from jaxres.runlog.events import (
    Emit,
    PartCommitted,
    SaveSkipped,
    SaveStarted,
    SaveWaited,
    StepQuarantined,
)
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, Quarantine, RunHistory, RunLog
from jaxres.storage import files
from jaxres.storage.path import RunPath

SPARE_BYTES = 4 * 2**20
"""Free bytes that a save leaves for logs, besides a 20th of its size for descriptions of arrays."""


class Checkpointer:
    """Owns the step directories of one attempt and the save in flight; a context manager.

    If the `with` block raises, the save in flight is not committed. Storage failures of background
    saves are counted. Any other failure is raised by the next call of a method.
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: RunDir,
        log: RunLog,
        claim: Claim,
        peers: HostGroup,
        emit: Emit,
        before_commit: Callable[[], None],
        trainable: Trainable = ALL,
    ) -> None:
        """Prepares without side effects on storage, which begin in `__enter__`.

        Args:
          section: intervals, retention, limits.
          run_dir: run directory that receives the steps.
          log: run log that receives commit and prune records; its clock times the saves.
          claim: claim of this attempt; versions and fingerprint are copied into every manifest.
          peers: other hosts of the job. Each writes its shards; host 0 decides and commits.
          before_commit: makes durable what a commit depends on (the metrics lines).
          trainable: which parameters are frozen: unchanged ones are not written again.
        """
        self._section, self._run_dir = section, run_dir
        self._log = log
        self._claim = claim
        self._peers = peers
        self._emit, self._clock = emit, log.clock
        self._before_commit = before_commit
        self._trainable = trainable
        self._sources: list[LinkSource] = []
        """Steps with different copies of the frozen parameters; saves link them in turn."""
        self._parts: list[WrittenParts] = []  # Of the newest steps of this attempt.
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="jaxres-saver")
        self._flight = SaveSlot(self._clock)
        self._leaving = False
        """Whether the `with` block has raised, so that nothing is committed any more."""
        self._refused_from: int | None = None
        """First step that must not be committed; None: no limit."""
        self._calls = 0
        """Number of calls of `save` so far; the same on every host."""
        self._commits = CommitTracker(
            section, run_dir=run_dir, log=log, peers=peers, emit=emit, clock=self._clock
        )
        self._writer: BackgroundSave | None = None
        """A save that timed out while it was still being written."""
        self._silence_seconds = 2 * section.timeout_seconds  # For Orbax, then for finalizing.
        self._is_silent = False
        """Whether storage has not answered for so long that no further save is attempted."""
        self._restores = 0
        """Number of restores by this attempt; the same on every host."""
        self._pace = Throttle(section.background_share, self._clock)
        self._memory = SnapshotMemory()
        self._settings = SaveSettings(
            snapshot=section.snapshot,
            writer=section.writer,
            check=section.check_snapshot,
            pace=self._pace,
            timeout_seconds=section.timeout_seconds,
            downloads=run_dir.read_back(peers.member.host),
        )

    def __enter__(self) -> Checkpointer:
        background_save.import_writer(self._section.writer)
        if self._peers.member.leads:
            files.make_dir(self._run_dir.checkpoints)
        if self._run_dir.is_remote:  # A killed attempt has left its downloads.
            files.delete_tree(self._run_dir.read_back(self._peers.member.host))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving = kind is not None
        # On several hosts one may be dead, and Orbax would wait for it for minutes.
        may_hang = self._is_silent or (self._leaving and not self._peers.member.is_alone)
        self._saver.shutdown(wait=not may_hang)
        if kind is None:
            self.check()

    @property
    def saved_step(self) -> int:
        """The newest step that is committed or being saved."""
        return self._commits.saved_step

    @property
    def committed_step(self) -> int:
        """The newest committed step."""
        return self._commits.committed_step

    @property
    def last_error(self) -> str:
        """Reason of the newest failed save; empty if none has failed since the last commit."""
        return self._commits.why

    def verdict(self) -> Verdict:
        """Returns Stop after too many failed saves or once storage has stopped answering."""
        if self._is_silent:
            return StopRun(fault("storage_unavailable"), "storage does not answer")
        if self._commits.failures >= self._section.max_failed_saves:
            text = "saves in a row have failed (checkpoint.max_failed_saves)"
            return StopRun(fault("storage_unavailable"), f"{self._commits.failures} {text}")
        return Continue()

    @property
    def in_flight(self) -> bool:
        """Whether a save is in flight."""
        return self._flight.is_busy

    def save(
        self,
        state: Tree,
        progress: Progress,
        *,
        may_skip: bool = False,
        judged: Judged = already_judged,
    ) -> None:
        """Snapshots a state and writes it in the background; a no-op for a committed step.

        One save is in flight at a time: the next one waits for it, or is skipped.

        Args:
          state: the plain nested dict of arrays; may be donated as soon as this returns.
          may_skip: whether the save may be skipped: if `checkpoint.busy` allows it, and while the
            previous save is late. Host 0 decides for all hosts, because their parts of the
            previous save may end at different times.
          judged: waits, in the thread that saves, for the verdict on the step, once its arrays are
            written; returns its progress, or None: the step is not committed.
        """
        self._calls += 1
        text = self._peers.broadcast(
            f"save/{self._calls}",
            lambda: save_messages.encode(self._decide(state, progress.step, may_skip=may_skip)),
            seconds=self._silence_seconds + MESSAGE_SECONDS,
        )
        decision = save_messages.decode(text)
        if isinstance(decision, Committed) and progress.step > self._commits.committed_step:
            self._commits.mark(progress.step)  # Host 0 has found the record of an earlier try.
        elif isinstance(decision, Failed):
            self._commits.fail(progress.step, decision.reason)
        elif isinstance(decision, Begin):
            try:
                self._begin(state, progress, decision, judged)
            except StorageUnavailable as refusal:
                self._commits.fail(progress.step, str(refusal))

    def _decide(self, state: Tree, step: int, *, may_skip: bool) -> SaveDecision:
        """Returns host 0's decision on a due save."""
        if step <= self._commits.saved_step or self._is_silent:
            return NothingToDo()
        started = self._clock.monotonic()
        if self._run_dir.is_remote and may_skip and self._commits.is_unsure and not self.in_flight:
            self._flight.begin(self._saver.submit(self._confirm, step))
        if self.in_flight:
            if may_skip and self._may_skip():
                self._emit(SaveSkipped(step))
                return NothingToDo()
            self.wait()
            self._emit(SaveWaited(step, self._clock.monotonic() - started))
        self.check()
        if self._is_silent:
            return NothingToDo()
        try:
            self._commits.confirm()
            if step <= self._commits.committed_step:
                return Committed()
            self._require_no_other_writer()
            name = self._commits.free_name(step)
            source = self._linkable()
            written, _ = split_state(state, self._trainable) if source else (state, {})
            size_bytes = sum(x.nbytes for x in jax.tree.leaves(written))
            _require_free_space(self._run_dir.checkpoints.absolute(), size_bytes)
        except StorageUnavailable as refusal:
            return Failed(str(refusal))
        return Begin(name, source)

    def _linkable(self) -> str | None:
        """Returns the directory name of the step whose frozen arrays can be linked, if any."""
        if len(self._sources) < frozen_arrays.COPIES:
            return None
        source = self._sources[0]
        if self._commit_of(source.name) is None:
            return None
        return source.name if frozen_arrays.can_link(self._step_dir(source.name)) else None

    def _commit_of(self, name: str) -> Commit | None:
        """Returns the commit record of a step directory that is part of the run."""
        commits = self._log.history().committed
        return next((one for one in commits if self._dir_of(one).name == name), None)

    def _may_skip(self) -> bool:
        """Returns whether a due save is skipped, after waiting for the one in flight.

        Until a save ends, a refusal by storage looks the same as a slow write. So a save that is
        late, or that follows a refused one, does not delay training.
        """
        longest, failures = self._commits.longest_seconds, self._commits.failures
        if self._section.busy == "wait" and self._flight.is_over_in_time(
            longest_seconds=longest, is_refused=failures > 0
        ):
            return False
        if self._flight.seconds > self._silence_seconds and self.in_flight:
            self._give_up_on_storage()
        return True

    def _confirm(self, step: int) -> None:
        """Checks in the bucket whether a commit record exists; the answer may take long."""
        try:
            self._commits.confirm()
        except StorageUnavailable as refusal:
            self._commits.fail(step, str(refusal))

    def _step_dir(self, name: str) -> RunPath:
        return (self._run_dir.checkpoints / name).absolute()

    def _begin(self, state: Tree, progress: Progress, decision: Begin, judged: Judged) -> None:
        """Takes a snapshot and starts its write, unless this host still writes an earlier one."""
        started, infos = self._clock.monotonic(), array_infos(state)
        topic, step_dir = f"saved/{self._calls}", self._step_dir(decision.step_dir)
        if not self._peers.member.leads:
            self.wait()  # Host 0 has waited before it decided.
            try:
                self._require_no_other_writer()
            except StorageUnavailable as refusal:
                self._commits.saved_step = progress.step
                own = HostReport({}, str(refusal))
                self._flight.begin(
                    self._saver.submit(self._leave_out, progress.step, step_dir, topic, own)
                )
                return
        changing, still = split_state(state, self._trainable)
        frozen = self._frozen_part(still, decision.linked)
        writing = background_save.start_save(
            changing,
            step_dir,
            self._settings,
            frozen={} if frozen.source else still,
            memory=self._memory,
            earlier=self._parts[0] if len(self._parts) == frozen_arrays.COPIES else None,
        )
        self._commits.saved_step = progress.step
        self._emit(SaveStarted(progress.step, self._clock.monotonic() - started))
        finish = self._finish if self._peers.member.leads else self._follow
        flying = PendingSave(writing, step_dir, progress, infos, started, topic, frozen, judged)
        self._flight.begin(self._saver.submit(finish, flying))

    def _frozen_part(self, still: Tree, source: str | None) -> FrozenPart:
        """Returns the frozen part of a save; `source`: the earlier step that host 0 can link."""
        if not still:
            return FrozenPart()
        paths, sums = tuple(array_infos(still)), frozen_arrays.sums_of(still)
        linked = {one.name: one for one in self._sources}[source] if source else None
        return FrozenPart(paths, sums, linked)

    def _require_no_other_writer(self) -> None:
        """Keeps one snapshot in memory: raises while a timed-out save is still being written."""
        if self._writer is not None and not self._writer.is_over():
            raise StorageUnavailable(
                f"{self._run_dir.checkpoints}: an earlier save is still being written, after more "
                f"than {self._section.timeout_seconds:.0f} s (checkpoint.timeout_seconds)."
            )
        self._writer = None

    def _finish(self, save: PendingSave) -> None:
        """Makes one step durable, then commits it. Runs in the saver thread."""
        step = save.progress.step
        try:
            written = self._write(save)
            if self._leaving:
                return
            if written is None:  # The verdict on it is bad, which the other hosts must learn.
                self._refused_from = step
            elif self._refused_from is None or step < self._refused_from:
                commit, linked_bytes = written
                self._commits.commit(commit, save.started, linked_bytes=linked_bytes)
        except StorageUnavailable as refusal:
            if self._leaving:
                return
            whys = [f"host {host}: {why}" for host, why in self._peers.poll(save.topic).items()]
            self._commits.fail(step, "; ".join([*whys, str(refusal)]))
        outcome = self._outcome(step)
        self._share(save, is_committed=isinstance(outcome, Committed))
        self._peers.broadcast(save.topic, lambda: save_messages.encode(outcome), seconds=0)

    def _outcome(self, step: int) -> SaveOutcome:
        """Returns the outcome of the save of a step, on host 0."""
        if self._commits.committed_step >= step:
            return Committed()
        return Failed(self._commits.why) if self._refused_from is None else Abandoned()

    def _follow(self, save: PendingSave) -> None:
        """Writes this host's shards and receives the outcome. Runs in the saver thread."""
        step, is_collective = save.progress.step, save.writing.writer.is_collective
        if not is_collective:
            self._writer = save.writing
        try:
            background_save.wait_save(
                save.writing, save.step_dir, timeout=self._section.timeout_seconds
            )
            self._writer = None
            self._reports(save)
        except StorageUnavailable as refusal:
            if is_collective:  # It fails on host 0, too, without the reason.
                self._peers.publish(save.topic, str(refusal))
            else:  # Host 0 may have written its part, and waits for this host's report.
                self._gather(save.step_dir, save.topic, HostReport({}, str(refusal)))
        is_committed = self._receive_outcome(step, save.topic)
        if is_committed:
            self._emit(PartCommitted(step, self._clock.monotonic() - save.started))
        self._share(save, is_committed=is_committed)

    def _leave_out(self, step: int, step_dir: RunPath, topic: str, own: HostReport) -> None:
        """Reports why this host writes no part of a step. Runs in the saver thread."""
        self._gather(step_dir, topic, own)
        self._receive_outcome(step, topic)

    def _receive_outcome(self, step: int, topic: str) -> bool:
        """Waits until host 0 has committed or discarded a step; returns whether it is committed."""
        committed = save_messages.encode(Committed())
        text = self._peers.broadcast(topic, lambda: committed, seconds=self._silence_seconds)
        outcome = save_messages.decode(text)
        if isinstance(outcome, Committed):
            self._commits.mark(step)
        elif isinstance(outcome, Failed):
            self._commits.fail(step, outcome.reason)
        return isinstance(outcome, Committed)

    def _share(self, save: PendingSave, *, is_committed: bool) -> None:
        """Makes a committed step the newest source of files that later saves can share.

        After a save that has failed the next ones write all parts: a file may be damaged.
        """
        written = save.writing.writer.written
        parts = [*self._parts, written] if is_committed and written else []
        self._parts = parts[-frozen_arrays.COPIES :]
        if save.frozen.paths and is_committed:
            others = [source for source in self._sources if source is not save.frozen.source]
            new = LinkSource(save.step_dir.name, save.frozen.sums)
            self._sources = [*others, new][-frozen_arrays.COPIES :]

    def _write(self, save: PendingSave) -> tuple[Commit, int] | None:
        """Returns the record of a step that is durable, as are the metrics lines up to it.

        Also returns how many of its bytes are in linked files. None: its verdict refuses it.
        """
        self._writer = save.writing
        background_save.wait_save(
            save.writing, save.step_dir, timeout=self._section.timeout_seconds
        )
        self._writer = None
        progress = save.judged(save.progress)
        if progress is None:
            return None
        reports = self._reports(save)
        if any(frozen_arrays.CHANGED in report.failure for report in reports):
            self._sources = []  # The next saves write the frozen arrays.
        if not any(report.failure for report in reports):
            reports.append(save.writing.complete(reports))
        linked = self._link(save)
        root = self._run_dir.root.absolute()
        commit = finalize(
            save.step_dir,
            progress,
            WrittenArrays(save.infos, save.frozen.paths, linked, save.writing.writer.markers),
            reports,
            root=root,
            claim=self._claim,
            records=self._log.records,
        )
        self._before_commit()
        return commit, linked.size_bytes + sum(report.linked_bytes for report in reports)

    def _link(self, save: PendingSave) -> LinkedFiles:
        """Links the frozen arrays of an earlier step into a written one, unless it has its own."""
        source = save.frozen.source
        if source is None:
            return frozen_arrays.NOTHING_LINKED
        commit = self._commit_of(source.name)
        assert commit is not None, source.name
        try:
            return frozen_arrays.link(
                self._step_dir(source.name),
                commit,
                save.step_dir,
                verifies=not source.are_files_verified,
                pace=self._pace,
            )
        except StorageUnavailable:
            self._sources = []  # The next saves write the frozen arrays.
            raise

    def discard_from(self, onset: int) -> None:
        """Prevents commits of steps from the onset on, until the rollback.

        Returns once the save in flight has ended.

        Raises:
          StorageUnavailable: storage does not answer, so it is unknown how that save ended.
        """
        self._refused_from = onset
        self.wait()
        if self._is_silent:
            raise StorageUnavailable(self._commits.why)

    def rewind(self, step: int) -> None:
        """Makes an older step the newest committed one, once the log records the rollback."""
        self._commits.rewind(step)
        self._refused_from = None
        self._sources, self._parts = [], []

    def _reports(self, save: PendingSave) -> list[HostReport]:
        """Returns, on host 0, every host's report on its part of the step."""
        frozen = save.frozen
        own = save.writing.writer.report
        if frozen.source is not None and not frozen_arrays.are_equal(
            frozen.source.sums, frozen.sums
        ):
            own = HostReport({}, frozen_arrays.CHANGED)
        return self._gather(save.step_dir, save.topic, own)

    def _gather(self, step_dir: RunPath, topic: str, own: HostReport) -> list[HostReport]:
        limit = self._section.timeout_seconds
        return gather_reports(own, step_dir, self._peers, topic=topic, seconds=limit)

    def check(self) -> None:
        """Raises the error of the newest background save, unless storage refused the save."""
        if not self.in_flight:
            self._flight.result(seconds=0)

    def wait(self) -> None:
        """Waits until the save in flight is committed or has failed; raises errors of ours.

        If that takes too long, storage is considered unresponsive and no further save is attempted.
        """
        if not self._is_silent and not self._flight.result(seconds=self._silence_seconds):
            self._give_up_on_storage()

    def _give_up_on_storage(self) -> None:
        self._is_silent = True
        self._commits.why = (
            f"{self._run_dir.checkpoints}: a save was not durable within "
            f"{self._silence_seconds:.0f} s. Is the disk slow? checkpoint.timeout_seconds sets the "
            "limit. Nothing committed is lost."
        )

    def restore(
        self, history: RunHistory, like: Tree, *, seconds: float, last_step: float = math.inf
    ) -> Restored | None:
        """Restores the newest valid step and quarantines damaged newer ones; None: none exists.

        Only then are leftovers of earlier attempts deleted.

        Args:
          history: the run history from the log; the same on every host.
          like: nested dict of jax.ShapeDtypeStruct with shardings.
          seconds: time limit for reading one step.
          last_step: the step at which training ends: no other step will follow it.

        Raises:
          Unrestorable: steps were committed, and none is valid; nothing is changed.
          StorageUnavailable: storage failed, so that no step could be judged.
          ConfigError: the arrays of a step are not those that the model needs.
        """
        if not history.commits and history.quarantined:
            raise all_damaged_error([decided for _, decided in history.quarantined])
        if not history.commits:
            self._sweep()
            return None
        self._restores += 1
        topic = f"restore/{self._restores}"
        search = NewestValid(
            read=lambda commit: self._read(commit, like, last_step=last_step),
            examine=lambda commit: verify_step(self._dir_of(commit), commit),
            peers=self._peers,
            topic=topic,
            seconds=seconds,
            emit=self._emit,
            clock=self._clock,
        )
        restored, damaged = search.newest_valid(history.committed)
        self._peers.broadcast(topic, lambda: self._quarantine(damaged), seconds=MESSAGE_SECONDS)
        for quarantine in damaged:
            self._emit(StepQuarantined(quarantine.step, quarantine.path, quarantine.evidence))
        self._commits.committed_step = self._commits.saved_step = restored.commit.step
        self._sweep()
        _, still = split_state(restored.state, self._trainable)
        is_shared = bool(still) and restored.frozen == tuple(array_infos(still))
        name = self._dir_of(restored.commit).name
        own = LinkSource(name, frozen_arrays.sums_of(still), are_files_verified=False)
        self._sources = [own] if is_shared else []
        return restored

    def _sweep(self) -> None:
        if self._peers.member.leads:
            self._commits.sweep()

    def _read(self, commit: Commit, like: Tree, *, last_step: float) -> Restored:
        """Reads this host's part of a step; host 0 verifies every file of the last step too."""
        step_dir = self._dir_of(commit)
        if commit.step >= last_step and self._peers.member.leads:
            found = verify_step(step_dir, commit)
            if found.problems:
                raise manifests.damaged(step_dir, commit.step, found.evidence)
        return restore(step_dir, commit, like)

    def _dir_of(self, commit: Commit) -> RunPath:
        return (self._run_dir.root / commit.path).absolute()

    def _quarantine(self, damaged: Sequence[Quarantine]) -> str:
        """Records the damaged steps; only called once an older step is known to be valid."""
        for quarantine in damaged:
            self._log.append(quarantine)
        return str(len(damaged))


def _require_free_space(folder: RunPath, state_bytes: int) -> None:
    """Raises StorageUnavailable if a save would leave too little space for logs."""
    needed, free = state_bytes + state_bytes // 20 + SPARE_BYTES, files.free_bytes(folder)
    if free < needed:
        raise StorageUnavailable(
            f"{folder}: no space left: a save needs {needed / 2**20:,.1f} MiB, "
            f"{free / 2**20:,.1f} MiB are free. Nothing committed is lost. Free some space there."
        )
