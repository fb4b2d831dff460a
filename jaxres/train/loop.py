"""The training loop, as a story over the frozen parts of a run.

The device runs ahead of the host by LAG steps: `look` before step k lands the metrics of exactly
the steps up to k - LAG, so decisions depend neither on timing nor on who looks when.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxres.checkpoint.checkpointer import Checkpoints
from jaxres.data import sample_digest
from jaxres.engine.divergence import bounded_rollbacks, bounded_skips
from jaxres.engine.guards import Seen, gravest, judge_step
from jaxres.engine.state import Progress, TrainState, to_plain
from jaxres.engine.step import Measured
from jaxres.faults import Continue, Exit, LeaveOut, Rollback, Stop, TypedEnd, Verdict, Warned
from jaxres.runlog.events import Evaluated, GuardWarned, PhaseChanged, UpdateSkipped
from jaxres.runlog.metrics import MetricsLine
from jaxres.train.components import Bad, Fed, Flight, Recent, Run
from jaxres.train.diagnostics import diagnose
from jaxres.train.resume import go_back, met, restore_or_start

LAG = 2
MAX_ROWS_TOLD = 16
"""Of a step whose loss is not finite."""


@dataclass(frozen=True)
class Ended:
    """How the loop ended, and the last state that was judged."""

    exit: Exit
    reason: str
    state: TrainState
    progress: Progress
    committed: bool
    """Whether that state is committed."""


def train(run: Run) -> Ended:
    """Trains from the newest committed step to `run.steps`, or until a verdict ends it."""
    with run.checkpoints as checkpoints, _waiting_told(run):
        entries = 0
        """How often training was entered: the same on every host."""
        state, progress, flight = restore_or_start(run, entry=entries)
        while True:
            due = run.agenda.at(
                progress, saved_step=checkpoints.saved_step, asked=run.agreement.save_asked()
            )
            last = progress.step == run.steps
            progress, verdict = look(run, progress, flight, drain=due.save or due.evaluate or last)
            if isinstance(verdict, Rollback | LeaveOut):
                if isinstance(verdict, LeaveOut) and verdict.state_is_good:
                    save(run, state, progress)
                state = flight = None  # The devices must be free before the restore.
                entries += 1
                go_back(run, verdict, entry=entries)
                state, progress, flight = restore_or_start(run, entry=entries)
                continue
            if isinstance(verdict, Stop):
                if verdict.saves:
                    save(run, state, progress)
                verdict = diagnose(run, verdict, flight.recent, state, progress)
                return settle(run, verdict, state, progress)
            if due.evaluate:
                progress = evaluate(run, state, progress)
                if progress.evaluated_step < progress.step:
                    continue  # It gave up because a stop is asked for: the next look sees to it.
            if due.save:
                may_skip = not (last or run.agreement.save_asked())
                save(run, state, progress, may_skip=may_skip)
            if last:
                return settle(run, None, state, progress)
            if not flight.steps:
                flight.rest(run.clock.monotonic())
            fed = take(run, flight, progress, entry=entries + 1)
            if fed is None:
                continue
            batch, arrays = fed
            busy_seconds = flight.busy_seconds(run.clock.monotonic())
            no_batch = flight.bad is not None
            word = run.agreement.facts(busy_seconds=busy_seconds, no_batch=no_batch)
            factor = flight.rate_factor(progress.step + 1)
            state, metrics = run.step(state, arrays, word, factor)
            progress = progress.after(
                next_cursor=batch.next_cursor,
                num_rows=run.feed.num_rows,
                tokens=run.feed.tokens_per_step,
            )
            flight.steps.append((progress, batch.ids, metrics))


@contextlib.contextmanager
def _waiting_told(run: Run) -> Iterator[None]:
    """Says after a failure that a save in flight is awaited, which has a longer limit than a step.

    Else a slow disk would turn a divergence into a hang.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(TypedEnd):
            run.emit(PhaseChanged("settle", "ending; waiting for the save in flight"))
        raise


def take(run: Run, flight: Flight, progress: Progress, *, entry: int) -> Fed | None:
    """Returns the next batch, or what stands in for it; None: the next look has something to say.

    Bad records are told to the others before the step that all of them are in: whoever has landed
    it can know of them.
    """
    fed = flight.at(progress.cursor)
    if not isinstance(fed, Bad):
        return fed
    if flight.bad is None:
        run.peers.tell(met(entry), fed.word())
    flight.bad = fed
    return fed.instead


def look(run: Run, progress: Progress, flight: Flight, *, drain: bool) -> tuple[Progress, Verdict]:
    """Lands finished steps, writes their lines, and folds the guards over each in order.

    Returns the progress with the guards' memory, and the gravest verdict; a verdict other than
    Continue lands and judges the steps in flight too. What a background save has failed with is
    raised here, unless storage refused it.
    """
    run.checkpoints.poll()
    memory = progress.guards
    verdict = gravest([flight.verdict(), run.agreement.verdict()])
    verdict = bounded_skips(verdict, skips=flight.skips, section=run.limits.bad_records)
    is_spoilt = False
    while flight.steps:
        landing = flight.steps[0][0].step
        if not drain and isinstance(verdict, Continue) and landing > progress.step + 1 - LAG:
            break
        seen = land(run, flight)
        is_spoilt |= run.agreement.had_no_batch()
        if is_spoilt:  # From here on nothing is of the batches that it should be of.
            why = flight.bad.reason if flight.bad else "another host has met bad records"
            met_bad = LeaveOut((), why, state_is_good=False)
            judged = bounded_skips(met_bad, skips=flight.skips, section=run.limits.bad_records)
            verdict = gravest([verdict, judged])
            continue
        memory, judged = judge_step(run.guards, memory, seen)
        if isinstance(judged, Warned):
            run.emit(GuardWarned(seen.step, judged.reason))
            judged = Continue()
        judged = bounded_rollbacks(judged, rollbacks=flight.rollbacks, section=run.limits.rollback)
        verdict = gravest([verdict, judged, run.agreement.verdict()])
    return dataclasses.replace(progress, guards=memory), verdict


def land(run: Run, flight: Flight) -> Seen:
    """Waits for the oldest step in flight, writes its line, and returns what the guards may see."""
    progress, ids, metrics = flight.steps.popleft()
    rows, flight.cursor = (flight.cursor, progress.cursor), progress.cursor
    begun = run.clock.monotonic()
    values = np.asarray(metrics)
    now = run.clock.monotonic()
    flight.waited_seconds += now - begun
    measured, facts = run.form.read(values)
    line = MetricsLine(
        seq=flight.seq,
        step=progress.step,
        attempt=run.log.attempt,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        learning_rate=measured.learning_rate,
        tokens=progress.tokens,
        step_seconds=now - flight.landed_at,
        skipped=not measured.applied,
        samples=sample_digest(ids),
        busy_seconds=run.agreement.heard(facts),
        loss_scale=measured.loss_scale,
    )
    run.landed(line)
    flight.recent.append(Recent(line, measured, rows, ids))
    flight.landed_at = now
    if not measured.applied:
        _tell_skipped(run, progress.step, measured, ids)
    return Seen(
        step=progress.step,
        rows=rows,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        spike_score=measured.spike_score,
        applied=measured.applied,
        state_is_finite=measured.state_is_finite,
        backs_off=measured.backs_off,
    )


def _tell_skipped(run: Run, step: int, measured: Measured, ids: np.ndarray) -> None:
    rows = measured.bad_rows
    run.emit(
        UpdateSkipped(
            step=step,
            loss=measured.loss,
            grad_norm=measured.grad_norm,
            spike_score=measured.spike_score,
            params=measured.bad_params,
            num_rows=len(rows),
            rows=tuple((row, int(ids[row]), *run.row_places[row]) for row in rows[:MAX_ROWS_TOLD]),
            overflowed_scale=measured.loss_scale if measured.backs_off else None,
        )
    )


def evaluate(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Measures the held-out loss; before the save of the same step, so that a resume has it."""
    run.emit(PhaseChanged("evaluate"))
    loss = run.evaluate(state.params, run.agreement)
    run.emit(PhaseChanged("train"))
    if loss is None:
        return progress
    progress = progress.evaluated(loss)
    best = loss if progress.best_loss is None else progress.best_loss
    run.emit(Evaluated(progress.step, loss, best, progress.best_step))
    return progress


def save(run: Run, state: TrainState, progress: Progress, *, may_skip: bool = False) -> None:
    """Takes the snapshot of a judged state; the rest of the save goes on in the background."""
    run.emit(PhaseChanged("save"))
    run.checkpoints.save(to_plain(state), progress, may_skip=may_skip)
    run.agreement.save_taken()
    run.emit(PhaseChanged("train"))


def settle(run: Run, stop: Stop | None, state: TrainState, progress: Progress) -> Ended:
    """Sees to it that the last step is committed if it should be, and says if it is not.

    Args:
      run: the run.
      stop: the verdict that ends the run; None: the run is done.
      state: the state of the last step.
      progress: the host's facts at the last step.
    """
    checkpoints = run.checkpoints
    run.emit(PhaseChanged("settle", "waiting for the last save"))
    checkpoints.wait()
    is_wanted = stop is None or stop.saves
    if is_wanted:
        if checkpoints.committed_step < progress.step:
            run.emit(PhaseChanged("settle", "the last save has failed; one more try"))
        checkpoints.save(to_plain(state), progress)  # Nothing to do at a step that is committed.
        checkpoints.wait()
    committed = checkpoints.committed_step == progress.step
    exit = Exit.DONE if stop is None else stop.fault.exit or Exit.BUG
    reason = "the last step is committed" if stop is None else stop.reason
    if stop is not None and not stop.has_time and not committed:
        newest = checkpoints.committed_step
        reason = f"{stop.reason}; step {progress.step} is not committed, the newest is {newest}"
    if is_wanted and not committed:
        words = [] if stop is None else [stop.reason]
        words.append(f"step {progress.step} could not be committed")
        reason = f"{'; '.join(words)}: {checkpoints.why_not_committed} {go_on(checkpoints)}"
        exit = Exit.STORAGE if stop is None else exit
    return Ended(exit, reason, state, progress, committed)


def go_on(checkpoints: Checkpoints) -> str:
    """Says where the next start goes on after an end without a commit."""
    step = checkpoints.committed_step
    where = f"from step {step}" if step else "from the beginning, since no step is committed"
    return f"Then start the same command: it goes on {where}."
