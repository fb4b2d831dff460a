"""The training loop, as a story over the frozen parts of a run.

The device runs ahead of the host by LAG steps: `look` before step k lands the metrics of exactly
the steps up to k - LAG, so decisions depend neither on timing nor on who looks when.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxres.checkpoint.store import Checkpoints
from jaxres.clock import Clock
from jaxres.data import Batch, sample_digest
from jaxres.events import Emit, Evaluated, PhaseChanged, TrainingStarted
from jaxres.faults import ConfigError, Continue, Exit, Stop, TypedEnd, Verdict
from jaxres.guards import Guard, Seen, gravest, judge_step, preemption
from jaxres.metrics import MetricsLine
from jaxres.models import Params
from jaxres.runlog import RunLog, Start, start_of
from jaxres.state import Progress, TrainState, from_plain, to_plain
from jaxres.train.guarantee import guarantee
from jaxres.train.requests import Requests

LAG = 2


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
    """Cursor -> the batch there, and its arrays on the devices; None: gave up, a stop is asked."""
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
    step: Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, jax.Array]]
    """Donates the state."""
    evaluate: Callable[[Params, Callable[[], bool]], float | None]
    """(params, give up?) -> held-out loss; None: gave up between two batches."""
    dataset: str
    computation: dict[str, str]
    landed: Callable[[MetricsLine], None]
    """Told of every finished step, in order."""
    requests: Requests
    emit: Emit
    clock: Clock


@dataclass
class Flight:
    """The steps that were dispatched and not yet landed, oldest first."""

    seq: int
    """Number of the start record whose segment they belong to."""
    landed_at: float
    """When the last step landed, or, with none in flight, when the next one was begun."""
    steps: deque[tuple[Progress, str, jax.Array]] = dataclasses.field(default_factory=deque)


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
                progress, saved_step=checkpoints.saved_step, asked=run.requests.save_asked()
            )
            last = progress.step == run.steps
            progress, verdict = look(run, progress, flight, drain=due.save or due.evaluate or last)
            if isinstance(verdict, Stop):
                if verdict.fault.state_is_good:
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
                flight.landed_at = run.clock.monotonic()
            fed = run.feed.at(progress.cursor)
            if fed is None:
                continue
            batch, arrays = fed
            state, metrics = run.step(state, arrays)
            progress = progress.after(
                next_cursor=batch.next_cursor,
                num_rows=run.feed.num_rows,
                tokens=run.feed.tokens_per_step,
            )
            flight.steps.append((progress, sample_digest(batch.ids), metrics))


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
    line = run.log.line()
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
    start = run.log.append(
        Start(step=progress.step, path=path, dataset=run.dataset, computation=run.computation)
    )
    before = [start_of(record).computation for record in line.starts]
    run.emit(TrainingStarted(progress.step, path, guarantee(before, run.computation)))
    run.emit(PhaseChanged("train"))
    return state, progress, Flight(seq=start.seq, landed_at=run.clock.monotonic())


def look(run: Run, progress: Progress, flight: Flight, *, drain: bool) -> tuple[Progress, Verdict]:
    """Lands finished steps, writes their lines, and folds the guards over each in order.

    Returns the progress with the guards' memory, and the gravest verdict; a verdict other than
    Continue lands and judges the steps in flight too. What a background save has failed with is
    raised here, unless storage refused it.
    """
    run.checkpoints.poll()
    memory = progress.guards
    # A stop that is asked for keeps its code on a full disk too: of two alike the first stands.
    verdict = gravest([preemption.judge(run.requests.stop_asked()), run.checkpoints.verdict()])
    while flight.steps:
        landing = flight.steps[0][0].step
        if not drain and isinstance(verdict, Continue) and landing > progress.step + 1 - LAG:
            break
        seen = land(run, flight)
        memory, judged = judge_step(run.guards, memory, seen)
        verdict = gravest([verdict, judged])
    return dataclasses.replace(progress, guards=memory), verdict


def land(run: Run, flight: Flight) -> Seen:
    """Waits for the oldest step in flight, writes its line, and returns what the guards may see."""
    progress, samples, metrics = flight.steps.popleft()
    loss, grad_norm, learning_rate, finite = (float(value) for value in np.asarray(metrics))
    now = run.clock.monotonic()
    run.landed(
        MetricsLine(
            seq=flight.seq,
            step=progress.step,
            attempt=run.log.attempt,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens=progress.tokens,
            step_seconds=now - flight.landed_at,
            skipped=False,
            samples=samples,
        )
    )
    flight.landed_at = now
    return Seen(step=progress.step, loss=loss, grad_norm=grad_norm, state_is_finite=finite == 1.0)


def evaluate(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Measures the held-out loss; before the save of the same step, so that a resume has it."""
    run.emit(PhaseChanged("evaluate"))
    loss = run.evaluate(state.params, lambda: run.requests.stop_asked() is not None)
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
    run.requests.save_taken()
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
    is_wanted = stop is None or stop.fault.state_is_good
    if is_wanted and checkpoints.committed_step < progress.step:
        run.emit(PhaseChanged("settle", "the last save has failed; one more try"))
        checkpoints.save(to_plain(state), progress)
        checkpoints.wait()
    committed = checkpoints.committed_step == progress.step
    exit = Exit.DONE if stop is None else stop.fault.exit or Exit.BUG
    reason = "the last step is committed" if stop is None else stop.reason
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
