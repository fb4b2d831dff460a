"""The one way into training: first starts, restarts and rollbacks alike; and the way back to it."""

from __future__ import annotations

import json

from jaxres.cluster.host_group import WORD_SECONDS
from jaxres.engine.divergence import looks_back_steps
from jaxres.engine.state import Progress, TrainState, from_plain, to_plain
from jaxres.faults import ConfigError, LeaveOut, Rollback, StorageUnavailable
from jaxres.runlog import run_log
from jaxres.runlog.events import PhaseChanged, RecordsLeftOut, RolledBack, TrainingStarted
from jaxres.runlog.run_log import Line, Start, fold, start_of
from jaxres.train.components import Flight, Run
from jaxres.train.reproducibility import guarantee

LOOK_SECONDS = 0.1
RESTORE_SHARE = 0.9
"""Of the deadline of a restore: storage that hangs is storage's fault, before it is a hang."""


def met(entry: int) -> str:
    """Returns the topic under which hosts tell of bad records that they have met."""
    return f"bad_records/{entry}"


def go_back(run: Run, verdict: Rollback | LeaveOut, *, entry: int) -> None:
    """Records why training goes on from an older step, and which rows it leaves out from then."""
    run.emit(PhaseChanged("rollback", verdict.reason))
    if isinstance(verdict, LeaveOut):
        _leave_out(run, verdict, entry=entry)
    else:
        _roll_back(run, verdict, entry=entry)


def _leave_out(run: Run, verdict: LeaveOut, *, entry: int) -> None:
    """Records rows that can't be used; the save in flight, of a step before them, may count."""
    run.checkpoints.abandon(run.checkpoints.saved_step + 1)

    def decide() -> str:
        told = [json.loads(word.partition(": ")[2]) for word in run.peers.told(met(entry))]
        rows = sorted({tuple(one) for word in told for one in word["rows"]} or verdict.rows)
        reason = "; ".join(word["reason"] for word in told) or verdict.reason
        run.log.append(run_log.Skip(rows=tuple(rows), reason=reason))
        return json.dumps({"rows": rows, "reason": reason, "step": run.log.line().step})

    word = json.loads(run.peers.same(f"skip/{entry}", decide, seconds=WORD_SECONDS))
    run.checkpoints.go_back(word["step"])
    rows = tuple((start, stop) for start, stop in word["rows"])
    run.emit(RecordsLeftOut(rows=rows, step=word["step"], reason=word["reason"]))


def _roll_back(run: Run, verdict: Rollback, *, entry: int) -> None:
    """Records that training goes on from before the onset: the durable decision.

    No save that was in flight counts afterwards if it may hold what the verdict is about. Killed
    right before the record, the next attempt meets the same steps and judges alike; killed right
    after it, the one way in reads it.
    """
    run.checkpoints.abandon(verdict.onset)
    line, section = run.log.line(), run.limits.rollback
    assert section is not None, "no rollback is allowed"
    steps = [commit.step for commit in line.committed if commit.step < verdict.onset]
    record = run_log.Rollback(
        onset=verdict.onset,
        target=max(steps, default=0),
        rows=(verdict.rows,),
        reason=verdict.reason,
        rate_factor=section.rate_factor,
        rate_steps=section.rate_steps if section.rate_factor < 1 else 0,
    )
    run.peers.same(
        f"rollback/{entry}", lambda: str(run.log.append(record).seq), seconds=WORD_SECONDS
    )
    run.checkpoints.go_back(record.target)
    run.emit(
        RolledBack(
            onset=record.onset,
            target=record.target,
            rows=verdict.rows,
            reason=verdict.reason,
            rate_factor=record.rate_factor,
            rate_steps=record.rate_steps,
        )
    )


def restore_or_start(run: Run, *, entry: int) -> tuple[TrainState, Progress, Flight]:
    """Enters training: the one way in, for first starts, restarts and rollbacks alike.

    Args:
      run: the run.
      entry: how often this attempt has come here before.

    Raises:
      ConfigError: the rows are not the ones that the run has trained on.
      Unrestorable: steps are committed, and none is whole.
    """
    line = _same_line(run, entry=entry)
    # Rows that no committed step has seen bind nobody: mended data may go on in the same place.
    if line.newest is not None and line.dataset != run.dataset:
        raise ConfigError(
            f"data.source: the rows are not the ones that this run was started with (fingerprint "
            f"{run.dataset} here, {line.dataset} there). Bring the old data back, or start a new "
            "run in another run.dir."
        )
    shapes, seconds = to_plain(run.shapes), RESTORE_SHARE * run.meeting_seconds
    restored = run.checkpoints.restore(line, shapes, seconds=seconds)
    if restored is None:
        run.emit(PhaseChanged("init", "new parameters"))
        (state, init), progress = run.init(line), Progress()
    else:
        (state, init), progress = (from_plain(restored.state), None), restored.progress
    path = restored.commit.path if restored else None
    seq = _begin_segment(
        run,
        Start(
            step=progress.step,
            path=path,
            dataset=run.dataset,
            computation=run.computation,
            init=init,
            looks_back_steps=looks_back_steps(run.limits, run.loss_scale),
        ),
        entry=entry,
    )
    before = [start_of(record).computation for record in line.starts]
    is_verified = restored is None or restored.is_verified
    level = guarantee(before, run.computation, is_verified=is_verified)
    run.emit(TrainingStarted(progress.step, path, level))
    run.emit(PhaseChanged("train"))
    now = run.clock.monotonic()
    flight = Flight(
        seq,
        at=run.feed.open(line),
        rollbacks=len(line.rollbacks),
        skips=line.num_skips,
        rate_factor=lambda step: run.rate_factor(line.rate_factor(step)),
        cursor=progress.cursor,
        landed_at=now,
        dispatched_at=now,
    )
    return state, progress, flight


def _same_line(run: Run, *, entry: int) -> Line:
    """Returns the line as the lead has read it; on the others, once they see as much of it."""
    records = run.log.records()
    seen = int(run.peers.same(f"records/{entry}", lambda: str(len(records)), seconds=WORD_SECONDS))
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


def _begin_segment(run: Run, start: Start, *, entry: int) -> int:
    """Records that training begins, once every host has the state; returns the record's number.

    From here to the first step no host is far behind: the first collective of a job has a short
    limit of its own.
    """
    run.peers.meet(f"restored/{entry}", seconds=run.meeting_seconds)
    word = run.peers.same(
        f"start/{entry}", lambda: str(run.log.append(start).seq), seconds=WORD_SECONDS
    )
    return int(word)
