"""`jaxres.attempt`: a user's own training loop, which survives kills, notices and bad steps."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from jaxres import faults
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.state_arrays import array_infos
from jaxres.clock import SystemClock
from jaxres.config.schema.checkpoint import CheckpointSection, EpochsWhen, StepsWhen
from jaxres.engine.state import Progress
from jaxres.exit_codes import ExitCode
from jaxres.faults import (
    ConfigError,
    Continue,
    DivergedError,
    PeerLost,
    RollbackRun,
    RunError,
    StopRun,
    StorageUnavailable,
    UsageError,
    Verdict,
    Warn,
)
from jaxres.own_loop import hosts, ownership, trees
from jaxres.own_loop.checkpoints import SHOWN, loop_console
from jaxres.own_loop.ownership import Observed, OwnedRun, own
from jaxres.own_loop.positions import position_of, set_position
from jaxres.own_loop.verdicts import (
    LAG,
    OnSpike,
    StepVerdicts,
    guards_of,
    looks_back_steps,
    observation,
)
from jaxres.runlog import events
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.events import Event, GuardWarned, PhaseChanged, TrainingStarted
from jaxres.runlog.metrics import MetricsLine, MetricsLog
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Rollback, Start
from jaxres.supervisor import run_dir_watcher
from jaxres.telemetry import stdio
from jaxres.telemetry.heartbeat import StatusWriter, exit_message
from jaxres.telemetry.observers import Observers
from jaxres.train import worker
from jaxres.train.consensus import never
from jaxres.train.jax_coordination import first_line, is_peer_lost
from jaxres.train.save_scheduler import SaveScheduler
from jaxres.train.stop_requests import InlineSignals

STATUS_FD = "JAXRES_STATUS_FD"
"""Variable of a program's supervisor: the pipe for messages."""
RESTORE_SECONDS = 3600.0
_open = threading.Lock()
"""Held by the attempt of this process."""


@dataclass(frozen=True)
class _Finished:
    """A step whose metrics were not read yet."""

    step: int
    metrics: Mapping[str, Any]
    facts: Any
    """Flags of all hosts; None: there is one host."""


class Attempt:
    """One attempt at a run, as a context manager around a loop:

        with jaxres.attempt("runs/mine", save_every_steps=100) as attempt:
            state, position, step = attempt.restore_or(make_state, position=0)
            for step in attempt.steps(step, 10_000):
                state, loss = train_step(state, batch_at(position))
                position += 1
                attempt.finished(step, state, metrics={"loss": loss}, position=position)

    The block ends normally once the last step is committed (0). A stop exits the process behind the
    block with its code (SIGTERM: 75; Ctrl-C, RUN_DIR/stop: 76), after the save of the last finished
    step, and so does an error whose cause is known. Any other error is raised again.
    """

    def __init__(
        self,
        run_dir: RunDir,
        section: CheckpointSection,
        *,
        on_spike: OnSpike,
        heartbeat_seconds: float,
        env: Mapping[str, str],
    ) -> None:
        """Reads and writes nothing yet."""
        self._run_dir, self._section, self._env = run_dir, section, env
        self._heartbeat_seconds = heartbeat_seconds
        self._on_spike: OnSpike = on_spike
        self._signals = InlineSignals(is_command=False)
        self._requests = self._signals.requests
        self._observers = Observers([self._requests])
        self._verdicts = StepVerdicts(guards_of(on_spike))
        self._pending: deque[_Finished] = deque()
        self._stack = contextlib.ExitStack()
        self._started_at: int | None = None
        """Step that was restored, or 0; None: not yet."""
        self._step, self._last = 0, math.inf
        """Newest finished step, and the last one."""
        self._current: int | None = None
        """Step that the loop computes at the moment."""
        self._stop: StopRun | None = None
        """The stop that the loop has ended by."""
        self._seq, self._begun, self._saving = 0, 0.0, 0

    def __enter__(self) -> Attempt:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "jaxres.attempt: only the main thread of a process can handle its signals."
            )
        if not _open.acquire(blocking=False):
            raise UsageError("jaxres.attempt: this process has an attempt already.")
        with contextlib.ExitStack() as stack:
            stack.callback(_open.release)
            try:
                self._enter(stack)
            except RunError as error:
                _exit(error.exit_code, str(error), error)
            self._stack = stack.pop_all()
        return self

    def _enter(self, stack: contextlib.ExitStack) -> None:
        seconds = self._heartbeat_seconds
        peers = self._peers = hosts.join(self._env, heartbeat_seconds=seconds, clock=SystemClock())
        stack.enter_context(self._signals)  # After JAX's, which would take SIGTERM for itself.
        observed = Observed(
            self._on_event, self._signals.on_watcher_event, lambda: self._requests.step
        )
        owned = self._owned = stack.enter_context(
            own(self._run_dir, observed, env=self._env, peers=peers)
        )
        attempt = owned.claim.attempt
        self._status: StatusWriter | None = None
        if (descriptor := self._env.get(STATUS_FD, "")).isdecimal():
            self._status = stack.enter_context(StatusWriter(int(descriptor)))
            self._observers.append(self._status)
        stacks = stack.enter_context(worker.inline_stacks(self._run_dir, attempt, peers.member))
        self._signals.on_attempt(stacks, lambda exit: None)
        self._metrics: MetricsLog | None = None
        if peers.member.leads:
            self._metrics = stack.enter_context(MetricsLog(self._run_dir.metrics(attempt)))
        self._saver = stack.enter_context(
            Checkpointer(
                self._section,
                run_dir=owned.run_dir,
                log=owned.log,
                claim=owned.claim,
                peers=peers,
                emit=owned.emit,
                before_commit=self._metrics.sync if self._metrics else lambda: None,
            )
        )
        self._agreement = hosts.Agreement(
            peers, self._requests, self._saver.verdict, is_due=self._scheduled(owned)
        )
        stack.callback(self._verdicts.end)
        self._signals.allow_interrupts()

    def _scheduled(self, owned: OwnedRun) -> Callable[[], bool]:
        """Returns whether a save is due by the clock, of which host 0 decides."""
        when = self._section.when
        if isinstance(when, StepsWhen) or not self._peers.member.leads:
            return never
        assert not isinstance(when, EpochsWhen), "calls.py refuses it"
        scheduler = SaveScheduler(when, log=owned.log, emit=owned.emit, clock=owned.clock)
        self._observers.append(scheduler)
        return lambda: not self._saver.in_flight and scheduler.is_due()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        end, is_alone = self._named(error), self._peers.member.is_alone
        with contextlib.suppress(_LeavesOthers), contextlib.ExitStack() as rest:
            rest.push(self._stack)
            if end is None or isinstance(end, SystemExit):
                try:
                    self._owned.result = self._settle()
                except (RunError, jax.errors.JaxRuntimeError) as refusal:
                    end = self._named(refusal)
                    if not isinstance(end, RunError):
                        raise
            elif not isinstance(end, RunError) and is_alone:
                self._finish_saves()
            if end is not None and not isinstance(end, SystemExit):
                self._owned.result = ownership.end_by(end)
            if self._status is not None:
                self._status.on_exit(exit_message(self._owned.result))
            if end is not None:  # So that nothing that was not judged is committed.
                self._verdicts.end()
            if isinstance(end, Exception) and not is_alone:
                raise _LeavesOthers  # The save in flight may wait for a host that is gone.
        result = self._owned.result
        if not ownership.is_supervised(self._run_dir, self._env):
            run_dir_watcher.end_stop_request(self._run_dir, self._owned.claim.attempt, result.code)
        if not isinstance(end, Exception) and result.code != ExitCode.DONE:
            _exit(result.code, result.reason, None)
        if isinstance(end, RunError):
            _exit(end.exit_code, str(end), end, waits=is_alone)
        if isinstance(end, Exception) and not is_alone:
            sys.excepthook = _exit_by_error

    def _named(self, error: Any) -> Any:
        """Returns an error of JAX that a lost host has caused as such, any other one as it is."""
        is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
        if is_of_jax and not self._peers.member.is_alone and is_peer_lost(error):
            return PeerLost(f"another host is gone: {first_line(error)}")
        return error

    def restore_or(self, make_state: Callable[[], Any], *, position: Any = None) -> Any:
        """Returns state, position and step of the newest valid step, or of the beginning.

        Args:
          make_state: returns the state before the first step: a pytree of arrays, PRNG keys and
            numbers; also called before a restore, for structure, types and shardings.
          position: JSON, or an object with `get_state` and `set_state`: the position in the data
            before the first step.

        Raises:
          ConfigError: the step has other arrays than `make_state`; all are named.
          Unrestorable: steps are committed, and none is valid.
        """
        if self._started_at is not None:
            raise UsageError("attempt.restore_or was called already.")
        owned = self._owned
        owned.emit(PhaseChanged("init", "state of the program"))
        state = make_state()
        if not self._peers.member.is_alone:
            hosts.require_global(state)
        like = self._like = trees.abstract(state)
        history = owned.log.history()
        wanted = trees.like_of(like, ownership.recorded_arrays(self._run_dir, history))
        position_of(position)
        progress, path = Progress(), None
        if history.commits or history.quarantined:
            state = None  # Device memory must be free before the restore.
            restored = self._saver.restore(history, wanted, seconds=RESTORE_SECONDS)
            assert restored is not None, history
            state = trees.from_plain(restored.state, like)
            progress, path = restored.progress, restored.commit.path
            own = hosts.own_position(progress.position, self._peers.member)
            position = set_position(position, own)
        self._verdicts.begin(progress)
        self._started_at = self._step = self._saving = progress.step
        if self._peers.member.leads:
            self._seq = owned.log.append(self._start(progress.step, path)).seq
        owned.emit(TrainingStarted(progress.step, path, "unknown: a loop of the user's own"))
        return state, position, progress.step

    def _start(self, step: int, path: str | None) -> Start:
        places = [device.process_index for device in jax.devices()]
        return Start(
            step=step,
            path=path,
            dataset="",
            computation={"devices": f"{len(places)} {jax.devices()[0].device_kind}"},
            devices=tuple(map(places.count, range(jax.process_count()))),
            looks_back_steps=looks_back_steps(self._on_spike),
        )

    def steps(self, step: int, last: int) -> Iterator[int]:
        """Returns the numbers of the steps to compute, from `step + 1` to `last`.

        They end earlier at a stop. `finished` must be called for each of them.

        Args:
          step: the step that `restore_or` has returned.
          last: the last step of the run.
        """
        if self._started_at is None:
            raise UsageError("attempt.steps: call attempt.restore_or first.")
        if step != self._started_at or self._last != math.inf:
            raise UsageError(
                f"attempt.steps({step}, {last}): the loop begins once, after step "
                f"{self._started_at}, which attempt.restore_or has returned."
            )
        self._last = operator.index(last)
        self._owned.emit(PhaseChanged("train"))
        self._begun = self._owned.clock.monotonic()
        return self._steps(step)

    def _steps(self, step: int) -> Iterator[int]:
        if self._peers.member.is_alone:  # Several agree after their first steps.
            self._heed_stop()
        while step < self._last and self._stop is None:
            step += 1
            self._current = step
            yield step
            if self._current is not None:
                raise UsageError(
                    f"attempt.finished was not called for step {step}: call it at the end of each "
                    "step, with the state after it."
                )

    def finished(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        position: Any = None,
    ) -> None:
        """Reports a step, and starts to save its state if a save is due, the last step, or a stop.

        It does not wait for the step: metrics are read LAG steps later, and no save is committed
        before that. The state may be donated as soon as this returns.

        Args:
          step: the number that `steps` has yielded.
          state: the state after the step.
          metrics: scalars, on a device or not. `loss` and `grad_norm` must be finite.
          position: the position in the data after the step, as for `restore_or`.

        Raises:
          DivergedError: an earlier step has a metric that is not finite, or the loss stays high.
          ConfigError: a leaf of the state, or the position, can't be stored; the message names it.
          StorageUnavailable: too many saves in a row have failed.
          Fenced: another process has taken the run over.
        """
        if self._current is None or step != self._current:
            raise UsageError(f"attempt.finished({step}): the loop computes step {self._current}.")
        self._current, self._step = None, self._current
        facts = self._agreement.send()
        self._pending.append(_Finished(self._step, dict(metrics or {}), facts))
        self._judge_through(self._step - LAG)
        self._saver.check()
        if self._step < self._last:
            self._heed_stop()
        if self._stop is not None or self._step == self._last or self._is_save_due():
            self._save(state, position)

    def _heed_stop(self) -> None:
        """Ends the loop after this step if all hosts agree, or storage refuses all saves."""
        verdict = self._agreement.consensus.verdict()
        if not isinstance(verdict, StopRun):
            return
        if verdict.fault.exit == ExitCode.STORAGE:
            raise StorageUnavailable(f"{verdict.reason}: {self._saver.last_error}")
        self._stop = verdict

    def _is_save_due(self) -> bool:
        when = self._section.when
        is_at = isinstance(when, StepsWhen) and self._step % when.every_steps == 0
        return is_at or self._agreement.consensus.save_requested()

    def _save(self, state: Any, position: Any) -> None:
        saved_position, plain = position_of(position), trees.to_plain(state)
        self._require_restorable(plain)
        saved_position = hosts.position_of_all(saved_position, self._peers, step=self._step)
        if self._saver.in_flight:  # It ends only after the verdict on its step.
            self._judge_through(self._saving)
        if self._peers.member.leads:
            self._verdicts.expect(self._step)
        self._saving = self._step
        progress = Progress(step=self._step, position=saved_position)
        self._saver.save(plain, progress, judged=self._verdicts.judged)
        self._agreement.consensus.clear_save_request()

    def _require_restorable(self, plain: trees.Tree) -> None:
        """Raises ConfigError if a restart could not restore a state by `make_state`."""
        given = array_infos(plain)
        wanted = array_infos(trees.like_of(self._like, given))
        rows = [
            f"  {path}: {given.get(path, 'absent')}, make_state returns {wanted.get(path, 'none')}"
            for path in sorted(given.keys() | wanted.keys())
            if given.get(path) != wanted.get(path)
        ]
        if rows:
            lines = "\n".join(rows)
            raise ConfigError(
                f"attempt.finished({self._step}): a restart could not restore the state, which is "
                f"another one than make_state returns:\n{lines}\nReturn the same tree in both."
            )

    def _judge_through(self, step: int) -> None:
        """Reads the metrics of steps up to this one, which waits for them, and judges them."""
        while self._pending and self._pending[0].step <= step:
            self._complete(self._pending.popleft())

    def _complete(self, done: _Finished) -> None:
        self._agreement.receive(done.facts, is_saved=done.step <= self._saving)
        values = {name: _scalar(name, value) for name, value in done.metrics.items()}
        now = self._owned.clock.monotonic()
        loss, norm = values.pop("loss", None), values.pop("grad_norm", None)
        line = MetricsLine(
            seq=self._seq,
            step=done.step,
            attempt=self._owned.claim.attempt,
            loss=loss,
            grad_norm=norm,
            learning_rate=values.pop("learning_rate", None),
            tokens=0,
            step_seconds=now - self._begun,
            skipped=False,
            samples="",
            model_metrics=values,
        )
        self._begun = now
        self._observers.on_step(line)
        if self._metrics is not None:
            self._metrics.append(line)
        seen = observation(done.step, loss=loss, grad_norm=norm)
        self._obey(self._verdicts.judge(seen), step=done.step)

    def _obey(self, verdict: Verdict, *, step: int) -> None:
        """Warns, or withdraws the commits since a high loss began and raises."""
        if isinstance(verdict, Continue):
            return
        if isinstance(verdict, Warn):
            self._owned.emit(GuardWarned(step, verdict.reason))
            return
        if isinstance(verdict, RollbackRun):
            saver, log = self._saver, self._owned.log
            saver.discard_from(verdict.onset)
            good = [c.step for c in log.history().committed if c.step < verdict.onset]
            target, reason = max(good, default=0), verdict.reason
            if self._peers.member.leads:
                log.append(Rollback(onset=verdict.onset, target=target, rows=(), reason=reason))
            saver.rewind(target)
        raise DivergedError(verdict.reason)  # type: ignore[union-attr]

    def _finish_saves(self) -> None:
        """Judges what was computed before an error of the program, and ends its save."""
        with contextlib.suppress(Exception):
            self._judge_through(self._step)
            self._saver.wait()

    def _settle(self) -> AttemptResult:
        """Judges all steps, waits for the last save, and returns how the loop has ended."""
        self._owned.emit(PhaseChanged("settle", "waiting for the last save"))
        self._judge_through(self._step)
        self._saver.wait()
        self._saver.check()
        committed, step = self._saver.committed_step, self._step
        is_committed = committed == step
        if self._started_at is None or self._last == math.inf or self._current is not None:
            raise RunError("the block of jaxres.attempt has ended without its loop of steps.")
        if self._stop is not None:
            lost = f"; step {step} is not committed: {self._saver.last_error}"
            reason = self._stop.reason + lost * (not is_committed and step > 0)
            return AttemptResult(self._stop_code(self._stop), reason, committed=is_committed)
        if step < self._last:
            raise RunError(
                f"the loop has ended at step {step} of {self._last} without a stop, so the run is "
                f"not done. The newest committed step is {committed}."
            )
        ownership.require_committed("" if is_committed else self._saver.last_error, committed)
        return AttemptResult(ExitCode.DONE, "the last step is committed", committed=True)

    def _stop_code(self, stop: StopRun) -> ExitCode:
        """Returns the exit of a stop: a supervisor sends SIGTERM for a `stop` file, too."""
        is_asked = ownership.is_supervised(self._run_dir, self._env) and os.path.exists(
            str(self._run_dir.request("stop"))
        )
        return ExitCode.STOPPED if is_asked else ExitCode(stop.fault.exit or ExitCode.BUG)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, events.RunOpened):
            self._console = loop_console(event.attempt)
        self._observers.on_event(event)
        if isinstance(event, (*SHOWN, events.GuardWarned)):
            self._console.on_event(event)


def _scalar(name: str, value: Any) -> float:
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind in "OUSMmc":
        raise UsageError(
            f"attempt.finished: the metric {name} is no number (shape {list(array.shape)}, "
            f"{array.dtype}). Give scalars."
        )
    return float(array)


class _LeavesOthers(Exception):
    """A block ends without the other hosts, of which one may be gone."""


def _exit(code: int, reason: str, cause: BaseException | None, *, waits: bool = True) -> NoReturn:
    """Ends the process with an exit code, and prints why, as the trainer does.

    `waits`: whether the exit may wait for threads, which may wait minutes for a host that is gone.
    """
    stdio.flush()
    stdio.eprint(faults.format_exit_message(code, reason))
    if not waits:
        os._exit(int(code))
    raise SystemExit(int(code)) from cause


def _exit_by_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Ends the process after an error that nothing has caught, without waiting for threads."""
    traceback.print_exception(kind, error, trace)
    stdio.flush()
    os._exit(1)
