"""The process that trains: builds the run, tells its story, and leaves the end on record."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console as Terminal

from jaxres import metrics
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.events import Emit, EventLog, PhaseChanged, RunEnded, RunOpened, SampleWritten
from jaxres.faults import Exit, Fenced, TypedEnd
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, RunLog, Stop
from jaxres.telemetry import Console
from jaxres.train import farewell
from jaxres.train.build import Built, Place, build
from jaxres.train.loop import Ended, train


def work(config: RunConfig, run_dir: RunDir, log: RunLog, claim: Claim) -> Exit:
    """Trains as the attempt that `claim` has opened, and returns how it ended.

    Raises:
      TypedEnd: for an end that is nobody's success; it is on record already.
    """
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        console = stack.enter_context(
            Console(
                attempt=claim.attempt,
                log_every_seconds=config.telemetry.log_every_seconds,
                clock=clock,
                terminal=Terminal(file=sys.stdout, highlight=False, soft_wrap=True),
            )
        )
        events = stack.enter_context(
            EventLog(run_dir.events(claim.attempt, 0), clock=clock, listeners=[console.heard])
        )
        emit = events.emit
        emit(RunOpened(str(run_dir.root), claim.attempt, claim.threads))
        place = Place(run_dir, log, claim, emit, clock, console.landed)
        try:
            built = build(config, place, stack)
            ended = train(built.run)
        except TypedEnd as end:
            _leave_on_record(end, emit, log)
            raise
        committed = log.line().step == ended.progress.step
        log.append(Stop(exit=ended.exit, reason=ended.reason, committed=committed))
        if ended.exit == Exit.DONE and config.telemetry.sample_tokens:
            _sample(config, built, ended, emit)
        emit(RunEnded(ended.exit, ended.exit.name, ended.progress.step, committed, ended.reason))
    _farewell(run_dir, log, ended)
    return ended.exit


def _leave_on_record(end: TypedEnd, emit: Emit, log: RunLog) -> None:
    """Records a typed end where that is still possible; a full disk must not hide the cause."""
    with contextlib.suppress(TypedEnd):
        emit(RunEnded(end.exit, end.exit.name, 0, False, str(end)))
    if not isinstance(end, Fenced):
        with contextlib.suppress(TypedEnd):
            log.append(Stop(exit=end.exit, reason=str(end), committed=False))


def _sample(config: RunConfig, built: Built, ended: Ended, emit: Emit) -> None:
    emit(PhaseChanged("sample", f"{config.telemetry.sample_tokens} tokens from the model"))
    text = farewell.sample(
        built.model,
        ended.state.params,
        built.dataset,
        config.telemetry,
        seq_len=config.data.seq_len,
        seed=config.run.seed,
    )
    emit(SampleWritten(config.telemetry.sample_prompt, text))


def _farewell(run_dir: RunDir, log: RunLog, ended: Ended) -> None:
    terminal = Terminal(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    if ended.exit != Exit.DONE:
        terminal.print(f"{run_dir.root}: {ended.exit.name} (exit {ended.exit}): {ended.reason}")
        return
    history = metrics.read_history(run_dir, log.line())
    terminal.print(farewell.loss_curve(history))
    terminal.print(farewell.directions(run_dir, step=ended.progress.step))
