"""Saves in the background, commits through the run log, restores the newest step on the line.

Order of a commit: arrays by Orbax (asynchronously, into a directory of this attempt) -> its
result -> progress.json and MANIFEST.json, everything fsynced (seal.py) -> the metrics lines too ->
the commit record (commits.py). Only the record makes the step count: a kill before it leaves the
older step in force.

Home of: storage_unavailable. A save that storage refuses leaves nothing behind and is said; the
run goes on, and the next save tries again, `checkpoint.max_failed_saves` times in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from jaxres.checkpoint import orbax_io
from jaxres.checkpoint.commit_tracker import Commits, Flight, Flying
from jaxres.checkpoint.finalize import seal
from jaxres.checkpoint.orbax_io import Tree, Writing, array_infos
from jaxres.checkpoint.readback import Report, gathered, report
from jaxres.checkpoint.restore import Restored, Search, none_is_whole, restore
from jaxres.checkpoint.throttle import Pace
from jaxres.checkpoint.verify import examine
from jaxres.clock import Clock
from jaxres.cluster.host_group import WORD_SECONDS, Peers
from jaxres.config.schema import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.faults import Continue, Stop, StorageUnavailable, Verdict, fault
from jaxres.runlog.events import (
    Emit,
    PartCommitted,
    SaveSkipped,
    SaveStarted,
    SaveWaited,
    StepQuarantined,
)
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, Line, Quarantine, RunLog
from jaxres.storage import files
from jaxres.storage.path import Place

BEGIN, NOTHING, COUNTS, ABANDONED = "begin ", "nothing to do", "counts", "abandoned"
"""The lead's words about a save; any other word is the reason why there is none."""


class Checkpoints:
    """Owns the step directories of one attempt and the save in flight; a context manager.

    On an exception the save in flight is not committed. Failures that are not storage's are raised
    at the next call, whichever it is; storage's are counted.
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: RunDir,
        log: RunLog,
        claim: Claim,
        peers: Peers,
        emit: Emit,
        clock: Clock,
        before_commit: Callable[[], None],
    ) -> None:
        """Prepares; touches nothing before `__enter__`.

        Args:
          section: intervals, retention, limits.
          run_dir: where the steps go.
          log: takes commits and prunes.
          claim: this attempt's; its versions and fingerprint go into every manifest.
          peers: the job's other hosts: each writes its shards; the lead decides and commits.
          emit: told of every save.
          clock: times the saves.
          before_commit: makes durable what must be so before a step counts (the metrics lines).
        """
        self._section = section
        self._run_dir = run_dir
        self._log = log
        self._claim = claim
        self._peers = peers
        self._emit = emit
        self._clock = clock
        self._before_commit = before_commit
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="jaxres-saver")
        self._flight = Flight(clock)
        self._leaving = False
        """Whether an exception ends it all, and nothing is to be committed any more."""
        self._refused_from: int | None = None
        """Steps from here on must not count; see `abandon`."""
        self._calls = 0
        """Saves that were asked for so far: the same number on every host."""
        self._commits = Commits(
            section, run_dir=run_dir, log=log, peers=peers, emit=emit, clock=clock
        )
        self._writer: Writing | None = None
        """A save that was given up while Orbax was still at it."""
        self._silence_seconds = 2 * section.timeout_seconds  # Orbax's limit, and the rest.
        self._is_silent = False
        """Whether storage has answered nothing for so long that nothing more is tried."""
        self._restores = 0
        """How often this attempt has restored: the same number on every host."""
        self._pace = Pace(section.background_share, clock)
        self._is_remote = not isinstance(run_dir.root, Path)
        self._context = orbax_io.context(
            timeout_seconds=section.timeout_seconds, is_remote=self._is_remote
        )
        self._reading = orbax_io.reading_context(host=peers.member.host)

    def __enter__(self) -> Checkpoints:
        orbax_io.allow_for_missing_locks(self._run_dir.root)
        if self._peers.member.leads:
            files.make_dir(self._run_dir.checkpoints)
            self._commits.delete_all_but(self._log.line())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaving = kind is not None
        # Of many hosts one may be gone, and Orbax waits for it for minutes.
        in_vain = self._is_silent or (self._leaving and not self._peers.member.is_alone)
        self._saver.shutdown(wait=not in_vain)
        if kind is None:
            self.poll()

    @property
    def saved_step(self) -> int:
        """The newest step that is saved or being saved."""
        return self._commits.saved_step

    @property
    def committed_step(self) -> int:
        """The newest step that counts."""
        return self._commits.committed_step

    @property
    def why_not_committed(self) -> str:
        """Why the newest save that failed did; empty if none has failed since the last commit."""
        return self._commits.why

    def verdict(self) -> Verdict:
        """Returns the stop that too many failed saves, or storage without an answer, call for."""
        if self._is_silent:
            return Stop(fault("storage_unavailable"), "storage does not answer")
        if self._commits.failures >= self._section.max_failed_saves:
            words = "saves in a row have failed (checkpoint.max_failed_saves)"
            return Stop(fault("storage_unavailable"), f"{self._commits.failures} {words}")
        return Continue()

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._flight.is_busy

    def save(self, state: Tree, progress: Progress, *, may_skip: bool = False) -> None:
        """Snapshots a state and writes it in the background; nothing to do if the line has it.

        One save is in flight at a time: the next one waits for it, or is left out.

        Args:
          state: the plain nested dict of arrays; may be donated as soon as this returns.
          progress: the host's facts at the same step.
          may_skip: whether it may be left out: where `checkpoint.busy` says so, and while storage
            does not take the one before. The lead's word counts: another host's part of that may
            be over earlier or later.
        """
        self._calls += 1
        seconds = self._silence_seconds + WORD_SECONDS
        word = self._peers.same(
            f"save/{self._calls}",
            lambda: self._decide(state, progress.step, may_skip=may_skip),
            seconds=seconds,
        )
        if word == NOTHING:
            return
        try:
            if not word.startswith(BEGIN):
                raise StorageUnavailable(word)
            self._begin(state, progress, self._named(word.removeprefix(BEGIN)))
        except StorageUnavailable as refusal:
            self._commits.fail(progress.step, str(refusal))

    def _decide(self, state: Tree, step: int, *, may_skip: bool) -> str:
        """Returns the lead's word: BEGIN and a step directory's name, NOTHING, or why not."""
        if step <= self._commits.saved_step or self._is_silent:
            return NOTHING
        started = self._clock.monotonic()
        if self._is_remote and may_skip and self._commits.is_unsure and not self.is_busy:
            self._flight.begin(self._saver.submit(self._confirm, step))
        if self.is_busy:
            if may_skip and self._leaves_out():
                self._emit(SaveSkipped(step))
                return NOTHING
            self.wait()
            self._emit(SaveWaited(step, self._clock.monotonic() - started))
        self.poll()
        if self._is_silent:
            return NOTHING
        try:
            self._commits.confirm()
            if step <= self._commits.committed_step:
                return NOTHING
            self._refuse_beside_another_writer()
            name = self._commits.free_name(step)
            size_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
            orbax_io.refuse_without_room(self._run_dir.checkpoints.absolute(), size_bytes)
        except StorageUnavailable as refusal:
            return str(refusal)
        return f"{BEGIN}{name}"

    def _leaves_out(self) -> bool:
        """Says whether a due save is left out for the one in flight, after a wait for that one.

        Whether storage refuses a save or only takes its time is not to be seen from here; one that
        is late, or comes after a refused one, holds up no training.
        """
        longest, failures = self._commits.longest_seconds, self._commits.failures
        if self._section.busy == "wait" and self._flight.is_over_in_time(
            longest_seconds=longest, is_refused=failures > 0
        ):
            return False
        if self._flight.seconds > self._silence_seconds and self.is_busy:
            self._fall_silent()
        return True

    def _confirm(self, step: int) -> None:
        """Asks the bucket whether a commit stands; it may wait for an answer for long."""
        try:
            self._commits.confirm()
        except StorageUnavailable as refusal:
            self._commits.fail(step, str(refusal))

    def _named(self, name: str) -> Place:
        return (self._run_dir.checkpoints / name).absolute()

    def _begin(self, state: Tree, progress: Progress, step_dir: Place) -> None:
        """Takes the snapshot and sends the rest to the background."""
        started, infos = self._clock.monotonic(), array_infos(state)
        if not self._peers.member.leads:
            self.wait()  # The lead has.
        writing = orbax_io.begin(state, step_dir, self._context, self._section.snapshot, self._pace)
        self._commits.saved_step = progress.step
        self._emit(SaveStarted(progress.step, self._clock.monotonic() - started))
        finish = self._finish if self._peers.member.leads else self._follow
        flying = Flying(writing, step_dir, progress, infos, started, f"saved/{self._calls}")
        self._flight.begin(self._saver.submit(finish, flying))

    def _refuse_beside_another_writer(self) -> None:
        """Has no more than one snapshot in memory: a save that was given up may still go on."""
        if self._writer is not None and not self._writer.is_over():
            raise StorageUnavailable(
                f"{self._run_dir.checkpoints}: an earlier save is still being written, after more "
                f"than {self._section.timeout_seconds:.0f} s (checkpoint.timeout_seconds)."
            )
        self._writer = None

    def _finish(self, save: Flying) -> None:
        """Makes one step durable, then makes it count. Runs in the saver's thread."""
        step = save.progress.step
        try:
            commit = self._write(save)
            if self._leaving:
                return
            if self._refused_from is None or step < self._refused_from:
                self._commits.commit(commit, save.started)
        except StorageUnavailable as refusal:
            if self._leaving:
                return
            why = "; ".join([*self._peers.told(save.topic), str(refusal)])
            self._commits.fail(step, why)
        word = self._commits.why if self._refused_from is None else ABANDONED
        if self._commits.committed_step >= step:
            word = COUNTS
        self._peers.same(save.topic, lambda: word, seconds=0)

    def _follow(self, save: Flying) -> None:
        """Writes this host's shards and hears whether the step counts. In the saver's thread."""
        step = save.progress.step
        try:
            orbax_io.settle(save.writing, save.step_dir, timeout=self._section.timeout_seconds)
            self._reports(save)
        except StorageUnavailable as refusal:
            self._peers.tell(save.topic, str(refusal))
        word = self._peers.same(save.topic, lambda: COUNTS, seconds=self._silence_seconds)
        if word == COUNTS:
            self._commits.mark(step)
            self._emit(PartCommitted(step, self._clock.monotonic() - save.started))
        elif word != ABANDONED:
            self._commits.fail(step, word)

    def _write(self, save: Flying) -> Commit:
        """Returns the record of a step that is durable, as are the metrics lines up to it."""
        self._writer = save.writing
        orbax_io.settle(save.writing, save.step_dir, timeout=self._section.timeout_seconds)
        self._writer = None
        reports = self._reports(save)
        root = self._run_dir.root.absolute()
        commit = seal(
            save.step_dir, save.progress, save.infos, reports, root=root, claim=self._claim
        )
        self._before_commit()
        return commit

    def abandon(self, onset: int) -> None:
        """Sees to it that no save of a step from the onset on counts, until `go_back`.

        Returns once the save in flight is over.

        Raises:
          StorageUnavailable: that can't be told, since storage does not answer.
        """
        self._refused_from = onset
        self.wait()
        if self._is_silent:
            raise StorageUnavailable(self._commits.why)

    def go_back(self, step: int) -> None:
        """Counts from an older step on, once the log says so; see `abandon`."""
        self._commits.go_back(step)
        self._refused_from = None

    def _reports(self, save: Flying) -> list[Report]:
        """Returns on the lead what every host has read back of its part of the step."""
        own = Report({}, save.writing.failure)
        if not own.failure:
            own = report(save.step_dir, save.infos, self._peers.member.host, self._pace)
        limit = self._section.timeout_seconds
        return gathered(own, save.step_dir, self._peers, topic=save.topic, seconds=limit)

    def poll(self) -> None:
        """Raises what the newest background save has failed with, unless storage refused it."""
        if not self.is_busy:
            self._flight.result(seconds=0)

    def wait(self) -> None:
        """Waits until the save in flight is over, committed or failed; raises as `poll` does.

        Where it takes too long, storage counts as silent, and no save is tried any more.
        """
        if not self._is_silent and not self._flight.result(seconds=self._silence_seconds):
            self._fall_silent()

    def _fall_silent(self) -> None:
        self._is_silent = True
        self._commits.why = (
            f"{self._run_dir.checkpoints}: a save was not durable within "
            f"{self._silence_seconds:.0f} s. Is the disk slow? checkpoint.timeout_seconds sets the "
            "limit. Nothing committed is lost."
        )

    def restore(self, line: Line, like: Tree, *, seconds: float) -> Restored | None:
        """Restores the newest whole step; damaged newer ones count no more. None: none was saved.

        Args:
          line: what the log says, the same on every host.
          like: nested dict of jax.ShapeDtypeStruct with shardings.
          seconds: longest reading of one step.

        Raises:
          Unrestorable: steps were committed, and none is whole; all is left as it is.
          StorageUnavailable: storage did not let that be told.
          ConfigError: a step holds other arrays than the model wants.
        """
        if not line.commits and line.quarantined:
            raise none_is_whole([decided for _, decided in line.quarantined])
        if not line.commits:
            return None
        self._restores += 1
        topic = f"restore/{self._restores}"
        search = Search(
            read=lambda commit: restore(self._dir_of(commit), commit, like, self._reading),
            examine=lambda commit: examine(self._dir_of(commit), commit),
            peers=self._peers,
            topic=topic,
            seconds=seconds,
            emit=self._emit,
            clock=self._clock,
        )
        found, damaged = search.newest_whole(line.committed)
        self._peers.same(topic, lambda: self._quarantine(damaged), seconds=WORD_SECONDS)
        for one in damaged:
            self._emit(StepQuarantined(one.step, one.path, one.evidence))
        self._commits.committed_step = self._commits.saved_step = found.commit.step
        return found

    def _dir_of(self, commit: Commit) -> Place:
        return (self._run_dir.root / commit.path).absolute()

    def _quarantine(self, damaged: Sequence[Quarantine]) -> str:
        """Records what is proved, only now that an older step is known to be whole."""
        for one in damaged:
            self._log.append(one)
        return str(len(damaged))
