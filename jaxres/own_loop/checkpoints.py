"""`jaxres.checkpoints`: verified, asynchronous checkpoints beside any trainer."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console as Terminal

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.read.verify import VerificationReport, verify_step
from jaxres.checkpoint.restore.restore import NewestValid, Restored, all_damaged_error, restore
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.engine.state import Progress
from jaxres.faults import RunError, StopRun, StorageUnavailable, UsageError
from jaxres.own_loop.hosts import require_one_process
from jaxres.own_loop.ownership import (
    Observed,
    OwnedRun,
    own,
    recorded_arrays,
    require_committed,
)
from jaxres.own_loop.positions import position_of
from jaxres.own_loop.trees import from_plain, like_of, to_plain
from jaxres.runlog import events, run_log
from jaxres.runlog.events import Event
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, RunHistory
from jaxres.storage.path import RunPath
from jaxres.supervisor import run_dir_watcher
from jaxres.supervisor.run_dir_watcher import WatcherEvent
from jaxres.telemetry import stdio
from jaxres.telemetry.console import Console

SHOWN = (
    *(events.SaveFailed, events.SaveCommitted, events.StepQuarantined),
    events.Noted,
)
"""Events that are printed: of a loop that has its own output."""
QUIET_SECONDS = 3600.0


@dataclass(frozen=True)
class RestoredStep:
    """A step that was read back and verified."""

    step: int
    tree: Any
    """Its arrays, in the structure of `like`."""
    position: Any
    """The position that was saved with it; None: none was."""


class Checkpoints:
    """Verified checkpoints of one loop; a context manager that owns the folder.

    Without `with` the steps can be read, beside a process that saves. Within it this process is the
    only one that saves there. Its end waits until the save in flight is committed.
    """

    def __init__(
        self, run_dir: RunDir, section: CheckpointSection, *, env: Mapping[str, str]
    ) -> None:
        """Reads and writes nothing yet."""
        self._run_dir, self._section, self._env = run_dir, section, env
        self._owned: OwnedRun | None = None
        self._saver: Checkpointer | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Checkpoints:
        if self._saver is not None:
            raise UsageError(f"{self._run_dir.root}: its checkpoints are open already.")
        observed = Observed(self._on_event, self._on_watcher_event, lambda: self._newest)
        require_one_process()
        with contextlib.ExitStack() as stack:
            owned = stack.enter_context(own(self._run_dir, observed, env=self._env))
            saver = Checkpointer(
                self._section,
                run_dir=owned.run_dir,
                log=owned.log,
                claim=owned.claim,
                peers=SingleHost(),
                emit=owned.emit,
                before_commit=lambda: None,
            )
            stack.push(self._close)
            self._saver = stack.enter_context(saver)
            self._owned, self._stack = owned, stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._stack:
            try:
                self.wait()
            except RunError:
                if error[0] is None:
                    raise
            if error[0] is not None:
                raise error[1]

    def _close(self, *_: object) -> None:
        self._saver = self._owned = None

    def save(self, step: int, tree: Any, *, position: Any = None) -> None:
        """Starts to save a tree in the background; waits for the save before, if it is in flight.

        A save that storage refuses is printed and counted; the next one tries again. The arrays may
        be donated or changed as soon as this returns.

        Args:
          step: number of batches that the tree was trained with.
          tree: a pytree of arrays, PRNG keys and numbers, such as `nnx.state(model)`.
          position: JSON that is restored with it, such as the position in the data, or an object
            whose `get_state` returns it.

        Raises:
          UsageError: not within `with`, or the step does not follow the newest one.
          ConfigError: a leaf of the tree, or the position, can't be stored; the message names it.
          StorageUnavailable: too many saves in a row have failed.
          Fenced: another process has taken the folder over.
        """
        saver = self._require_open()
        step = self._next_step(step, saver)
        saved_position, plain = position_of(position), to_plain(tree)
        saver.check()
        if isinstance(stop := saver.verdict(), StopRun):
            raise StorageUnavailable(f"{stop.reason}: {saver.last_error}")
        saver.save(plain, Progress(step=step, position=saved_position))

    def wait(self) -> None:
        """Waits until the save in flight is committed.

        Raises:
          StorageUnavailable: the newest save has failed.
        """
        saver = self._require_open()
        saver.wait()
        saver.check()
        require_committed(saver.last_error, saver.committed_step)

    def restore(self, like: Any, step: int | Literal["newest"] = "newest") -> RestoredStep | None:
        """Reads a step and verifies every byte; returns None if nothing was ever saved.

        If the newest step is damaged, the one before it is restored, and the damage is printed;
        within `with` it is also recorded, so that the damaged step is never tried again.

        Args:
          like: a tree of the same structure: arrays with the shardings that are wanted, or
            jax.ShapeDtypeStruct. Its values are not used.
          step: a committed step, or "newest".

        Raises:
          ConfigError: the tree has other leaves, shapes or dtypes than the step; all are named.
          UsageError: the step is not committed.
          Unrestorable: the step is damaged, or every committed step is.
          StorageUnavailable: storage does not answer.
        """
        if self._saver is not None:
            self._saver.wait()
        wanted = like_of(like, recorded_arrays(self._run_dir, self._history()))
        if self._saver is None or self._owned is None or step != "newest":
            restored = self._read(wanted, step)
        else:
            history = self._owned.log.history()
            restored = self._saver.restore(history, wanted, seconds=self._section.timeout_seconds)
        if restored is None:
            return None
        tree = from_plain(restored.state, like)
        return RestoredStep(restored.commit.step, tree, restored.progress.position)

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending."""
        return [commit.step for commit in self._history().committed]

    def verify(self, step: int | None = None) -> list[VerificationReport]:
        """Reads every byte of a step, or of all, and compares it with what was committed.

        A report of a valid step has no `problems`.

        Raises:
          UsageError: the step is not committed.
        """
        commits = self._history().committed if step is None else [self._commit(step)]
        return [verify_step(self._dir_of(commit), commit) for commit in commits]

    def _require_open(self) -> Checkpointer:
        if self._saver is None:
            raise UsageError(
                f"{self._run_dir.root}: to save, own the folder first: "
                "`with jaxres.checkpoints(...) as saves:`."
            )
        return self._saver

    def _next_step(self, step: Any, saver: Checkpointer) -> int:
        try:
            number = operator.index(step)
        except TypeError:
            number = 0
        if number < 1:
            raise UsageError(f"step {step!r:.60}: give a whole number from 1 on.")
        if number <= saver.saved_step:
            raise UsageError(
                f"{self._run_dir.root}: step {number} does not follow step {saver.saved_step}, "
                "which is saved already. Restore that one and go on from it, or give another "
                "folder."
            )
        return number

    def _read(self, wanted: Any, step: int | Literal["newest"]) -> Restored | None:
        """Restores a step without recording anything: another process may own the folder."""
        history = self._history()
        if not history.commits and history.quarantined:
            raise all_damaged_error([damaged for _, damaged in history.quarantined])
        commits: Sequence[Commit] = history.committed if step == "newest" else [self._commit(step)]
        if not commits:
            return None
        search = NewestValid(
            read=lambda commit: restore(self._dir_of(commit), commit, wanted),
            examine=lambda commit: verify_step(self._dir_of(commit), commit),
            peers=SingleHost(),
            topic="restore",
            seconds=self._section.timeout_seconds,
            emit=lambda event: None,
            clock=SystemClock(),
        )
        restored, damaged = search.newest_valid(commits)
        for each in damaged:
            stdio.eprint(f"jaxres: ALARM: step {each.step} is damaged: {each.evidence}\n")
        return restored

    def _history(self) -> RunHistory:
        return run_log.fold(run_log.read_records(self._run_dir.log))

    def _commit(self, step: int) -> Commit:
        commits = self._history().committed
        found = next((commit for commit in commits if commit.step == step), None)
        if found is None:
            steps = ", ".join(str(commit.step) for commit in commits) or "none"
            raise UsageError(
                f"{self._run_dir.root}: step {step} is not committed (committed: {steps})."
            )
        return found

    def _dir_of(self, commit: Commit) -> RunPath:
        return (self._run_dir.root / commit.path).absolute()

    @property
    def _newest(self) -> int:
        return 0 if self._saver is None else self._saver.committed_step

    def _on_event(self, event: Event) -> None:
        if isinstance(event, events.RunOpened):
            self._console = loop_console(event.attempt)
        if isinstance(event, SHOWN):
            self._console.on_event(event)

    def _on_watcher_event(self, event: WatcherEvent) -> None:
        match event:
            case run_dir_watcher.Superseded(claim):
                text = f"attempt {claim.attempt} has taken the folder over: nothing is saved here"
            case run_dir_watcher.WatcherFailed(error):
                text = f"no heartbeat is written any more: {error}"
            case _:
                text = "the files `stop` and `save` have no effect on checkpoints alone"
        stdio.eprint(f"jaxres: {self._run_dir.root}: {text}\n")


def loop_console(attempt: int) -> Console:
    """Returns a console that prints events to standard error."""
    terminal = Terminal(
        file=sys.stderr, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False
    )
    clock = SystemClock()
    return Console(attempt=attempt, log_every_seconds=QUIET_SECONDS, clock=clock, terminal=terminal)
