"""The training loop, as a story over the frozen parts of a run.

The device runs ahead of the host by LAG steps: `look` before step k lands the metrics of exactly
the steps up to k - LAG, so decisions depend neither on timing nor on who looks when.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxres.checkpoint.store import Checkpoints
from jaxres.clock import Clock
from jaxres.data import Batch, sample_digest
from jaxres.events import Emit, Evaluated, PhaseChanged, TrainingStarted, UpdateSkipped
from jaxres.faults import ConfigError, Continue, Exit, Stop, StorageUnavailable, TypedEnd, Verdict
from jaxres.guards import Guard, Seen, gravest, judge_step
from jaxres.hosts import WORD_SECONDS, Peers
from jaxres.metrics import MetricsLine
from jaxres.models import Params
from jaxres.runlog import Line, RunLog, Start, fold, start_of
from jaxres.state import Progress, TrainState, from_plain, to_plain
from jaxres.step import Form, Measured
from jaxres.train.agreement import Agreement
from jaxres.train.guarantee import guarantee

LAG = 2
LOOK_SECONDS = 0.1
MAX_ROWS_TOLD = 16
"""Of a step whose loss is not finite."""


@dataclass(frozen=True)
class Due:
    """What is to be done at a step before the next one is dispatched."""

    save: bool
    evaluate: bool


@dataclass(frozen=True)
class Agenda:
    """Says what is due at a step; nothing that the run already has. Pure."""

    steps: int
    save_every_steps: int
    evaluate_every_steps: int

    def at(self, progress: Progress, *, saved_step: int, asked: bool) -> Due:
        """Returns what is due: the last step is always saved, and evaluated if any step is.

        Args:
          progress: where the run is.
          saved_step: the newest step that is saved or being saved.
          asked: whether a person wants one extra save.
        """
        step, last = progress.step, progress.step == self.steps
        save = step > saved_step and (asked or last or step % self.save_every_steps == 0)
        evaluate = (
            self.evaluate_every_steps > 0
            and step > progress.evaluated_step
            and (last or step % self.evaluate_every_steps == 0)
        )
        return Due(save=save, evaluate=evaluate)


@dataclass(frozen=True)
class Feed:
    """The batches on their way to the devices, and what one step consumes."""

    at: Callable[[int], tuple[Batch, Mapping[str, jax.Array]] | None]
    """Cursor -> the batch there, and its arrays on the devices; None: gave up, since this host is
    alone and a stop is asked."""
    num_rows: int
    tokens_per_step: int


@dataclass(frozen=True)
class Run:
    """The frozen bundle of parts that the story is told over."""

    steps: int
    agenda: Agenda
    log: RunLog
    checkpoints: Checkpoints
    guards: tuple[Guard, ...]
    feed: Feed
    init: Callable[[], TrainState]
    shapes: TrainState
    """jax.ShapeDtypeStruct with sharding for every array of the state."""
    step: Callable[[TrainState, Mapping[str, jax.Array], Any], tuple[TrainState, jax.Array]]
    """(state, batch, own word) -> state, metrics and all hosts' words. Donates the state."""
    form: Form
    """How the step's metrics are read."""
    row_places: Sequence[tuple[int, int]]
    """Host and microbatch of every row of a batch."""
    evaluate: Callable[[Params, Agreement], float | None]
    """Params -> held-out loss; None: gave up between two batches, on all hosts alike."""
    dataset: str
    computation: dict[str, str]
    landed: Callable[[MetricsLine], None]
    """Told of every finished step, in order."""
    agreement: Agreement
    peers: Peers
    meeting_seconds: float
    """How long a host waits for the others before training, while they restore."""
    emit: Emit
    clock: Clock


@dataclass
class Flight:
    """The steps that were dispatched and not yet landed, oldest first."""

    seq: int
    """Number of the start record whose segment they belong to."""
    landed_at: float
    """When the last step landed, or, with none in flight, when the next one was begun."""
    dispatched_at: float
    """When the last step was dispatched, or, with none in flight, when the next one was begun."""
    waited_seconds: float = 0.0
    """How much of the time since then this host has waited for the devices, and so for others."""
    steps: deque[tuple[Progress, np.ndarray, jax.Array]] = dataclasses.field(default_factory=deque)

    def rest(self, now: float) -> None:
        """Has no step in flight: what was done meanwhile belongs to none."""
        self.landed_at = self.dispatched_at = now
        self.waited_seconds = 0.0

    def busy_seconds(self, now: float) -> float:
        """Returns how long this host has worked by itself for the step that it dispatches now."""
        busy = now - self.dispatched_at - self.waited_seconds
        self.dispatched_at, self.waited_seconds = now, 0.0
        return busy


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
        state, progress, flight = restore_or_start(run)
        while True:
            due = run.agenda.at(
                progress, saved_step=checkpoints.saved_step, asked=run.agreement.save_asked()
            )
            last = progress.step == run.steps
            progress, verdict = look(run, progress, flight, drain=due.save or due.evaluate or last)
            if isinstance(verdict, Stop):
                if verdict.saves:
                    save(run, state, progress)
                return settle(run, verdict, state, progress)
            if due.evaluate:
                progress = evaluate(run, state, progress)
                if progress.evaluated_step < progress.step:
                    continue  # It gave up because a stop is asked for: the next look sees to it.
            if due.save:
                save(run, state, progress)
            if last:
                return settle(run, None, state, progress)
            if not flight.steps:
                flight.rest(run.clock.monotonic())
            fed = run.feed.at(progress.cursor)
            if fed is None:
                continue
            batch, arrays = fed
            busy_seconds = flight.busy_seconds(run.clock.monotonic())
            word = run.agreement.facts(busy_seconds=busy_seconds)
            state, metrics = run.step(state, arrays, word)
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


def restore_or_start(run: Run) -> tuple[TrainState, Progress, Flight]:
    """Enters training: the one way in, for first starts and restarts alike.

    Raises:
      ConfigError: the rows are not the ones that the run has trained on.
      Unrestorable: there is a committed step, and it can't be read.
    """
    line = _same_line(run)
    # Rows that no committed step has seen bind nobody: mended data may go on in the same place.
    if line.newest is not None and line.dataset != run.dataset:
        raise ConfigError(
            f"data.source: the rows are not the ones that this run was started with (fingerprint "
            f"{run.dataset} here, {line.dataset} there). Bring the old data back, or start a new "
            "run in another run.dir."
        )
    commit = line.newest
    if commit is None:
        run.emit(PhaseChanged("init", "new parameters from the seed"))
        state, progress = run.init(), Progress()
    else:
        run.emit(PhaseChanged("restore", f"step {commit.step}"))
        plain, progress = run.checkpoints.restore(commit, to_plain(run.shapes))
        state = from_plain(plain)
    path = commit.path if commit else None
    seq = _begin_segment(
        run, Start(step=progress.step, path=path, dataset=run.dataset, computation=run.computation)
    )
    before = [start_of(record).computation for record in line.starts]
    run.emit(TrainingStarted(progress.step, path, guarantee(before, run.computation)))
    run.emit(PhaseChanged("train"))
    now = run.clock.monotonic()
    return state, progress, Flight(seq, landed_at=now, dispatched_at=now)


def _same_line(run: Run) -> Line:
    """Returns the line as the lead has read it; on the others, once they see as much of it."""
    records = run.log.records()
    seen = int(run.peers.same("records", lambda: str(len(records)), seconds=WORD_SECONDS))
    end = run.clock.monotonic() + WORD_SECONDS
    while len(records) < seen:
        if run.clock.monotonic() > end:
            raise StorageUnavailable(
                f"{run.log.folder}: host 0 has read {seen} records here, this host finds only "
                f"{len(records)} after {WORD_SECONDS:.0f} s. Is that the same storage?"
            )
        run.clock.sleep(LOOK_SECONDS)
        records = run.log.records()
    return fold(records[:seen])


def _begin_segment(run: Run, start: Start) -> int:
    """Records that training begins, once every host has the state; returns the record's number.

    From here to the first step no host is far behind: the first collective of a job has a short
    limit of its own.
    """
    run.peers.meet("restored", seconds=run.meeting_seconds)
    word = run.peers.same("start", lambda: str(run.log.append(start).seq), seconds=WORD_SECONDS)
    return int(word)


def look(run: Run, progress: Progress, flight: Flight, *, drain: bool) -> tuple[Progress, Verdict]:
    """Lands finished steps, writes their lines, and folds the guards over each in order.

    Returns the progress with the guards' memory, and the gravest verdict; a verdict other than
    Continue lands and judges the steps in flight too. What a background save has failed with is
    raised here, unless storage refused it.
    """
    run.checkpoints.poll()
    memory = progress.guards
    verdict = run.agreement.verdict()
    while flight.steps:
        landing = flight.steps[0][0].step
        if not drain and isinstance(verdict, Continue) and landing > progress.step + 1 - LAG:
            break
        seen = land(run, flight)
        memory, judged = judge_step(run.guards, memory, seen)
        verdict = gravest([verdict, judged, run.agreement.verdict()])
    return dataclasses.replace(progress, guards=memory), verdict


def land(run: Run, flight: Flight) -> Seen:
    """Waits for the oldest step in flight, writes its line, and returns what the guards may see."""
    progress, ids, metrics = flight.steps.popleft()
    begun = run.clock.monotonic()
    values = np.asarray(metrics)
    now = run.clock.monotonic()
    flight.waited_seconds += now - begun
    measured, facts = run.form.read(values)
    run.landed(
        MetricsLine(
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
        )
    )
    flight.landed_at = now
    if not measured.applied:
        _tell_skipped(run, progress.step, measured, ids)
    return Seen(
        step=progress.step,
        loss=measured.loss,
        grad_norm=measured.grad_norm,
        spike_score=measured.spike_score,
        applied=measured.applied,
        state_is_finite=measured.state_is_finite,
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


def save(run: Run, state: TrainState, progress: Progress) -> None:
    """Takes the snapshot of a judged state; the rest of the save goes on in the background."""
    run.emit(PhaseChanged("save"))
    run.checkpoints.save(to_plain(state), progress)
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
