"""The training loop, over the frozen components of a run.

The device runs ahead of the host by LAG steps: before step k `process_completed` reads the metrics
of exactly the steps up to k - LAG, so decisions do not depend on timing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.data import sample_digest
from jaxres.data.text_bytes import bits_per_byte
from jaxres.engine.divergence import bounded_rollbacks, bounded_skips
from jaxres.engine.evaluate import LOSS
from jaxres.engine.guards import StepObservation, judge_step, most_severe
from jaxres.engine.state import Progress, TrainState, to_plain
from jaxres.engine.step import StepMetrics
from jaxres.exit_codes import ExitCode
from jaxres.faults import Continue, RollbackRun, RunError, SkipRows, StopRun, Verdict, Warn
from jaxres.runlog.attempt_result import AttemptResult
from jaxres.runlog.events import Evaluated, GuardWarned, PhaseChanged, UpdateSkipped
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.run_log import Skip
from jaxres.runlog.skip_causes import SkipCause
from jaxres.storage import codec
from jaxres.train.checks.host_times import LocalTimes
from jaxres.train.checks.replay_check import Replay
from jaxres.train.components import (
    NOT_COMPARED,
    BadRows,
    CompletedStep,
    InFlight,
    PlacedBatch,
    Trainer,
)
from jaxres.train.diagnostics import diagnose
from jaxres.train.resume import apply_rollback, bad_rows_topic, restore_or_start, withdraw_commits

LAG = 2
MAX_ROWS_REPORTED = 16
"""Largest number of rows in the event of a step with a non-finite loss."""


@dataclass(frozen=True)
class LoopResult:
    """How the loop ended, and the last state that the guards have judged."""

    result: AttemptResult
    state: TrainState
    progress: Progress


def train(run: Trainer) -> LoopResult:
    """Trains from the newest committed step to `run.steps`, or until a verdict ends the run."""
    with run.checkpoints as checkpoints, _announce_wait_on_error(run):
        entries = 0  # How often training was resumed within this attempt: equal on every host.
        state, progress, in_flight = restore_or_start(run, entry=entries)
        while True:
            due = run.schedule.at(
                progress,
                saved_step=checkpoints.saved_step,
                save_requested=run.consensus.save_requested(),
                epoch_before=in_flight.epoch_before,
            )
            last, hooks_due = progress.step == run.steps, run.hooks.are_due(progress.step)
            keeps = run.memory.is_due(progress.step)
            drain = due.any or hooks_due or last or keeps
            progress, verdict = process_completed(run, progress, in_flight, drain=drain)
            waits = due.evaluate or hooks_due
            is_kept = not waits and (due.save or keeps)
            verdict = compare_copies(run, state, progress, in_flight, verdict, is_kept=is_kept)
            if isinstance(verdict, RollbackRun | SkipRows):
                if isinstance(verdict, SkipRows) and verdict.state_is_good:
                    save(run, state, progress)
                replays = in_flight.replayed_step, in_flight.has_equal_replay
                state = in_flight = None  # Device memory must be free before the restore.
                entries += 1
                apply_rollback(run, verdict, entry=entries)
                state, progress, in_flight = restore_or_start(run, entry=entries, replays=replays)
                continue
            if isinstance(verdict, StopRun):
                if verdict.saves:
                    save(run, state, progress)
                verdict = diagnose(run, verdict, in_flight.recent, state, progress)
                return finalize(run, verdict, state, progress)
            if waits:
                progress = call_hooks(run, state, progress, in_flight, evaluates=due.evaluate)
                continue  # If a stop is requested, the next `process_completed` returns it.
            if due.save:
                may_skip = not (last or run.consensus.save_requested())
                save(run, state, progress, may_skip=may_skip)
            if keeps:
                run.memory.save(to_plain(state), progress, is_busy=run.consensus.any_host_keeping())
            if last:
                return finalize(run, None, state, progress)
            if not in_flight.steps:
                in_flight.rest(run.clock.monotonic())
            measure_devices(run, in_flight, step=progress.step + 1)
            placed = next_batch(run, in_flight, progress, entry=entries + 1)
            if placed is None:
                continue
            batch, arrays = placed
            no_batch = in_flight.bad is not None
            flags = run.consensus.local_flags(times=_local_times(run, in_flight), no_batch=no_batch)
            inputs = (arrays, flags, in_flight.peak_rate(progress.step + 1))
            state, metrics = dispatch(run, in_flight, state, inputs, step=progress.step + 1)
            in_flight.epoch_before = progress.epoch
            progress = progress.after(
                next_cursor=batch.next_cursor,
                num_rows=run.data_loader.num_rows,
                tokens=run.data_loader.tokens_per_step,
            )
            in_flight.steps.append((progress, batch.ids, metrics))


@contextlib.contextmanager
def _announce_wait_on_error(run: Trainer) -> Iterator[None]:
    """Enters the phase "settle" on an error: the wait for the save in flight has a longer limit.

    Otherwise a slow disk would turn a divergence into a hang.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(RunError):
            run.emit(PhaseChanged("settle", "ending; waiting for the save in flight"))
        raise


def next_batch(
    run: Trainer, in_flight: InFlight, progress: Progress, *, entry: int
) -> PlacedBatch | None:
    """Returns the next batch or its replacement; None: the next verdict ends this segment.

    Bad records are published to the other hosts before the step that all hosts enter, so every
    host that has completed that step can read them.
    """
    begun = run.clock.monotonic()
    placed = in_flight.batch_at(progress.cursor)
    in_flight.data_seconds = run.clock.monotonic() - begun
    if not isinstance(placed, BadRows):
        return placed
    if in_flight.bad is None:
        skip = Skip(rows=placed.rows, reason=placed.reason)
        run.peers.publish(bad_rows_topic(entry), codec.to_text(skip))
    in_flight.bad = placed
    return placed.replacement


def measure_devices(run: Trainer, in_flight: InFlight, *, step: int) -> None:
    """Measures this host's devices before a step, if it is due, while they are idle."""
    probe = run.device_probe
    if probe is None or not probe.is_due(step):
        return
    begun = run.clock.monotonic()
    for _, _, metrics in in_flight.steps:
        jax.block_until_ready(metrics)
    probe.measure()
    in_flight.waited_seconds += run.clock.monotonic() - begun


def _local_times(run: Trainer, in_flight: InFlight) -> LocalTimes:
    times = in_flight.local_times(run.clock.monotonic())
    if run.device_probe is None:
        return times
    run.device_probe.on_dispatch(times.busy_seconds)
    return dataclasses.replace(times, probe_seconds=dict(run.device_probe.seconds))


def process_completed(
    run: Trainer, progress: Progress, in_flight: InFlight, *, drain: bool
) -> tuple[Progress, Verdict]:
    """Processes completed steps in order: writes their metrics and applies the guards to each.

    Returns the progress with the state of the guards, and the most severe verdict. After a verdict
    other than Continue the steps in flight are processed too. An error of a background save is
    raised here, unless storage refused the save.
    """
    run.checkpoints.check()
    memory = progress.guards
    verdict = most_severe([in_flight.verdict(), run.consensus.verdict()])
    verdict = bounded_skips(verdict, skips=in_flight.skips, section=run.limits.bad_records)
    is_discarded = False
    while in_flight.steps:
        oldest = in_flight.steps[0][0].step
        if not drain and isinstance(verdict, Continue) and oldest > progress.step + 1 - LAG:
            break
        seen = complete_step(run, in_flight)
        is_discarded |= run.consensus.any_host_without_batch()
        if is_discarded:  # From here on no step has the batch that it should have.
            reason = in_flight.bad.reason if in_flight.bad else "another host has bad records"
            skip = SkipRows((), reason, state_is_good=False)
            judged = bounded_skips(skip, skips=in_flight.skips, section=run.limits.bad_records)
            verdict = most_severe([verdict, judged])
            continue
        memory, judged = judge_step(run.guards, memory, seen)
        judged = _without_warning(run, judged, step=seen.step)
        judged = bounded_rollbacks(
            judged, rollbacks=in_flight.rollbacks, section=run.limits.rollback
        )
        devices = [
            _judge_replay(run, in_flight, seen.step),
            _judge_copies(run, in_flight, seen.step),
        ]
        verdict = most_severe([verdict, judged, *devices, run.consensus.verdict()])
    return dataclasses.replace(progress, guards=memory), verdict


def dispatch(
    run: Trainer, in_flight: InFlight, state: TrainState, inputs: tuple[Any, Any, Any], *, step: int
) -> tuple[TrainState, jax.Array]:
    """Dispatches a step, twice if a replay is due, and the comparisons that are due after it.

    Args:
      in_flight: receives the fingerprints.
      state: the state before the step, which is donated.
      inputs: the other inputs of the step.
    """
    replay = run.replay_check
    first = None
    if replay is not None and replay.is_due(step):
        first = replay.compute(run.step, state, inputs)
    state, metrics = run.step(state, *inputs)
    if replay is not None and first is not None:
        second = replay.fingerprints(state), metrics
        in_flight.replays[step] = Replay(*zip(first, second, strict=True))
    if run.replica_check is not None and run.replica_check.is_due(step):
        in_flight.fingerprints[step] = run.replica_check.fingerprints(state)
    return state, metrics


def compare_copies(
    run: Trainer,
    state: TrainState,
    progress: Progress,
    in_flight: InFlight,
    verdict: Verdict,
    *,
    is_kept: bool,
) -> Verdict:
    """Compares the copies of a state that is kept, or that a verdict is about, once a step.

    Returns the more severe one of the verdict on them and the given verdict: a faulty device may be
    the cause of any other.
    """
    step = progress.step
    is_decided = isinstance(verdict, StopRun) and verdict.fault.exit == ExitCode.UNHEALTHY
    is_due = (is_kept or not isinstance(verdict, Continue)) and not is_decided
    if run.replica_check is None or not is_due or in_flight.compared_step == step:
        return verdict
    in_flight.fingerprints[step] = run.replica_check.fingerprints(state)
    return most_severe([verdict, _judge_copies(run, in_flight, step)])


def _judge_copies(run: Trainer, in_flight: InFlight, step: int) -> Verdict:
    """Returns the verdict on the copies after a step whose fingerprints were dispatched."""
    values = in_flight.fingerprints.pop(step, None)
    if run.replica_check is None or values is None:
        return Continue()
    in_flight.compared_step = step
    _wait_for(run, in_flight, values)
    return _without_warning(run, run.replica_check.judge(values, step=step), step=step)


def _judge_replay(run: Trainer, in_flight: InFlight, step: int) -> Verdict:
    """Returns the verdict on a step that was computed twice."""
    replay = in_flight.replays.pop(step, None)
    if run.replay_check is None or replay is None:
        return Continue()
    good = in_flight.replayed_step
    _wait_for(run, in_flight, (replay.fingerprints, replay.metrics))
    was_equal = in_flight.has_equal_replay
    verdict = run.replay_check.judge(replay, step=step, last_good_step=good, was_equal=was_equal)
    if isinstance(verdict, Continue):
        in_flight.replayed_step, in_flight.has_equal_replay = step, True
    return _without_warning(run, verdict, step=step)


def _wait_for(run: Trainer, in_flight: InFlight, values: Any) -> None:
    """Waits for the devices: the time is no work of this host."""
    begun = run.clock.monotonic()
    jax.block_until_ready(values)
    in_flight.waited_seconds += run.clock.monotonic() - begun


def _without_warning(run: Trainer, verdict: Verdict, *, step: int) -> Verdict:
    """Returns the verdict; a warning is emitted, and training continues."""
    if not isinstance(verdict, Warn):
        return verdict
    run.emit(GuardWarned(step, verdict.reason))
    return Continue()


def complete_step(run: Trainer, in_flight: InFlight) -> StepObservation:
    """Waits for the oldest step in flight, writes its metrics, returns the guards' input."""
    progress, ids, metrics = in_flight.steps.popleft()
    rows, in_flight.cursor = (in_flight.cursor, progress.cursor), progress.cursor
    begun = run.clock.monotonic()
    values = np.asarray(metrics)
    now = run.clock.monotonic()
    in_flight.waited_seconds += now - begun
    measured, facts = run.metrics_layout.read(values)
    times, step_seconds = run.consensus.on_flags(facts), now - in_flight.completed_at
    line = MetricsLine(
        seq=in_flight.seq,
        step=progress.step,
        attempt=run.log.attempt,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        learning_rate=measured.learning_rate,
        tokens=progress.tokens,
        step_seconds=step_seconds,
        skipped=not measured.applied,
        samples=sample_digest(ids),
        busy_seconds=times.busy_seconds if len(times.busy_seconds) > 1 else (),
        usual_step_seconds=run.performance and run.performance.usual_step_seconds(),
        loss_scale=measured.loss_scale,
        model_metrics=measured.model_metrics,
    )
    run.on_step(line)
    if run.device_probe is not None:
        run.device_probe.on_step(step_seconds)
    if run.performance is not None:
        run.performance.on_times(progress.step, step_seconds, times)
    in_flight.recent.append(CompletedStep(line, measured, rows, ids))
    in_flight.completed_at = now
    if not measured.applied:
        _emit_skipped(run, progress.step, measured, ids)
    return StepObservation(
        step=progress.step,
        rows=rows,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        spike_score=measured.spike_score,
        applied=measured.applied,
        state_is_finite=measured.state_is_finite,
        backs_off=measured.skip_cause is SkipCause.LOSS_SCALE,
    )


def _emit_skipped(run: Trainer, step: int, measured: StepMetrics, ids: np.ndarray) -> None:
    rows, cause = measured.bad_rows, measured.skip_cause
    run.emit(
        UpdateSkipped(
            step=step,
            loss=measured.loss,
            grad_norm=measured.grad_norm,
            spike_score=measured.spike_score,
            params=measured.bad_params,
            num_rows=len(rows),
            rows=tuple(
                (row, int(ids[row]), *run.row_origins[row]) for row in rows[:MAX_ROWS_REPORTED]
            ),
            overflowed_scale=measured.loss_scale if cause is SkipCause.LOSS_SCALE else None,
            cause=cause,
        )
    )


def call_hooks(
    run: Trainer, state: TrainState, progress: Progress, in_flight: InFlight, *, evaluates: bool
) -> Progress:
    """Evaluates, or calls the configured hooks; returns the progress with the evaluation."""
    if evaluates:
        progress = evaluate(run, state, progress)
    else:
        run.hooks.call(state, in_flight.recent[-1].line)
    in_flight.compared_step = NOT_COMPARED  # A bit may have flipped meanwhile.
    return progress


def evaluate(run: Trainer, state: TrainState, progress: Progress) -> Progress:
    """Measures the validation losses, before the save of the same step, so that a resume has them.

    The best step is that of the first set, which is the held-out part if there is one.
    """
    run.emit(PhaseChanged("evaluate"))
    means = run.evaluate(state, run.consensus)
    run.emit(PhaseChanged("train"))
    if means is None:
        return progress
    losses = {name: own[LOSS] for name, own in means.items()}
    loss = next(iter(losses.values()))
    progress = progress.evaluated(loss, data=run.heldout_data)
    best = loss if progress.best_loss is None else progress.best_loss
    bits = {
        name: bits_per_byte(losses[name], run.text_bytes[name])
        for name in losses
        if name in run.text_bytes
    }
    epochs = run.data_loader.epochs(progress.cursor)
    metrics = {
        name: {metric: value for metric, value in own.items() if metric != LOSS}
        for name, own in means.items()
        if len(own) > 1
    }
    step = progress.step
    run.emit(Evaluated(step, loss, best, progress.best_step, losses, bits, epochs, metrics))
    return progress


def save(run: Trainer, state: TrainState, progress: Progress, *, may_skip: bool = False) -> None:
    """Takes a snapshot of a judged state; the rest of the save runs in the background."""
    run.emit(PhaseChanged("save"))
    run.checkpoints.save(to_plain(state), progress, may_skip=may_skip)
    run.consensus.clear_save_request()
    run.emit(PhaseChanged("train"))


def finalize(
    run: Trainer, stop: StopRun | None, state: TrainState, progress: Progress
) -> LoopResult:
    """Commits the last step if it may be saved, and returns how the loop ended.

    Args:
      stop: the verdict that ends the run; None: the run is done.
    """
    checkpoints = run.checkpoints
    if stop is not None:
        withdraw_commits(run, stop)
    run.emit(PhaseChanged("settle", "waiting for the last save"))
    checkpoints.wait()
    is_wanted = stop is None or stop.saves
    if is_wanted:
        if checkpoints.committed_step < progress.step:
            run.emit(PhaseChanged("settle", "the last save has failed; trying again"))
        checkpoints.save(to_plain(state), progress)  # No-op at a step that is committed.
        checkpoints.wait()
    committed = checkpoints.committed_step == progress.step
    exit = ExitCode.DONE if stop is None else stop.fault.exit or ExitCode.BUG
    reason = "the last step is committed" if stop is None else stop.reason
    if stop is not None and not stop.has_time and not committed:
        newest = checkpoints.committed_step
        reason = f"{stop.reason}; step {progress.step} is not committed, the newest is {newest}"
    if is_wanted and not committed:
        reasons = [] if stop is None else [stop.reason]
        reasons.append(f"step {progress.step} could not be committed")
        reason = f"{'; '.join(reasons)}: {checkpoints.last_error} {resume_hint(checkpoints)}"
        exit = ExitCode.STORAGE if stop is None else exit
    culprit = None if stop is None else stop.culprit
    result = AttemptResult(exit, reason, committed=committed, culprit=culprit)
    return LoopResult(result, state, progress)


def resume_hint(checkpoints: Checkpointer) -> str:
    """Returns which step the next start resumes from, after an exit without a commit."""
    step = checkpoints.committed_step
    where = f"from step {step}" if step else "from the beginning, since no step is committed"
    return f"Then run the same command: it resumes {where}."
