"""Resume: the one way into training, for first starts, restarts and rollbacks; and rollbacks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxres.cluster.host_group import MESSAGE_SECONDS
from jaxres.data.dataset import CUT_MARK, PLAN_MARK
from jaxres.engine.divergence import looks_back_steps
from jaxres.engine.state import Progress, TrainState, from_plain, to_plain
from jaxres.faults import (
    ConfigError,
    RollbackRun,
    SkipRows,
    StopRun,
    StorageUnavailable,
    Unrestorable,
)
from jaxres.runlog import run_log
from jaxres.runlog.events import (
    BadRecordsSkipped,
    Noted,
    PhaseChanged,
    RolledBack,
    TrainingStarted,
)
from jaxres.runlog.guarantee import guarantee_level, is_at_least
from jaxres.runlog.run_log import Record, RunHistory, Start, fold
from jaxres.secret_values import redact_text
from jaxres.storage import codec
from jaxres.train.components import InFlight, Trainer

OTHER_LOSSES = (
    "other validation data, or evaluation.batches, than at the last evaluation: once a step has a "
    "loss on them, checkpoint.keep.best and `--step best` compare only steps with such a loss. To "
    "keep an earlier one, pin it: jaxres checkpoints pin RUN_DIR --step N"
)
UNKNOWN_LOSSES = (
    "the last evaluation was made by an earlier version, which has not recorded its data: "
    "checkpoint.keep.best and `--step best` compare its loss as if it was of the same data"
)
POLL_SECONDS = 0.1
RESTORE_SHARE = 0.9
"""Share of the restore deadline: hanging storage is reported before the watchdog's hang."""


def bad_rows_topic(entry: int) -> str:
    """Returns the topic under which hosts publish the bad records that they have read."""
    return f"bad_records/{entry}"


def apply_rollback(run: Trainer, verdict: RollbackRun | SkipRows, *, entry: int) -> None:
    """Records why training resumes from an older step, and which rows it leaves out."""
    run.emit(PhaseChanged("rollback", verdict.reason))
    run.memory.discard()
    if isinstance(verdict, SkipRows):
        _leave_out(run, verdict, entry=entry)
    else:
        _roll_back(run, verdict, entry=entry)


def _leave_out(run: Trainer, verdict: SkipRows, *, entry: int) -> None:
    """Records unusable rows; the save in flight is of an earlier step, so it may be committed."""
    run.checkpoints.discard_from(run.checkpoints.saved_step + 1)

    def decide() -> str:
        texts = run.peers.poll(bad_rows_topic(entry)).values()
        published = [codec.from_text(run_log.Skip, text) for text in texts]
        rows = {pair for skip in published for pair in skip.rows} or verdict.rows
        reason = "; ".join(skip.reason for skip in published) or verdict.reason
        skip = run_log.Skip(rows=tuple(sorted(rows)), reason=redact_text(reason))
        run.log.append(skip)
        step = run.log.history().step
        return codec.to_text(BadRecordsSkipped(rows=skip.rows, step=step, reason=skip.reason))

    text = run.peers.broadcast(f"skip/{entry}", decide, seconds=MESSAGE_SECONDS)
    skipped = codec.from_text(BadRecordsSkipped, text)
    run.checkpoints.rewind(skipped.step)
    run.emit(skipped)


def _roll_back(run: Trainer, verdict: RollbackRun, *, entry: int) -> None:
    """Records that training resumes from before the onset: the durable decision.

    A save in flight of the onset or later is discarded. If the process is killed right before the
    record, the next attempt repeats the same steps and reaches the same verdict. If it is killed
    right after the record, `restore_or_start` of the next attempt reads it. A branch goes back to
    its first step at most, also if the onset is in the run that it comes from.
    """
    origin = run.log.history().origin
    onset = verdict.onset if origin is None else max(verdict.onset, origin.step + 1)
    run.checkpoints.discard_from(onset)
    history, section = run.log.history(), run.limits.rollback
    assert section is not None, "rollbacks are off"
    steps = [commit.step for commit in history.committed if commit.step < onset]
    record = run_log.Rollback(
        onset=onset,
        target=max(steps, default=0),
        rows=(verdict.rows,),
        reason=verdict.reason,
        rate_factor=section.rate_factor,
        rate_steps=section.rate_steps if section.rate_factor < 1 else 0,
    )
    run.peers.broadcast(
        f"rollback/{entry}", lambda: str(run.log.append(record).seq), seconds=MESSAGE_SECONDS
    )
    run.checkpoints.rewind(record.target)
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


def withdraw_commits(run: Trainer, stop: StopRun) -> None:
    """Records that states after a stop's last good step are not trusted.

    No rows are left out: the next attempt computes the same steps again. A save in flight of such a
    step is discarded. The record is written also if no commit is withdrawn: without it the run
    would go on from a state in the memory of a host that has not discarded it.
    """
    if stop.last_good_step is None:
        return
    onset = stop.last_good_step + 1
    run.checkpoints.discard_from(onset)
    steps = [commit.step for commit in run.log.history().committed]
    target = max((step for step in steps if step < onset), default=0)
    record = run_log.Rollback(onset=onset, target=target, rows=(), reason=stop.reason)
    run.peers.broadcast(
        "withdrawn", lambda: str(run.log.append(record).seq), seconds=MESSAGE_SECONDS
    )
    run.memory.discard()
    run.checkpoints.rewind(target)


def restore_or_start(
    run: Trainer, *, entry: int, replays: tuple[int, bool] | None = None
) -> tuple[TrainState, Progress, InFlight]:
    """Restores the newest valid state, or creates the initial one, and records the start.

    A newer state in host memory, of which the run continues, precedes the committed steps.

    Args:
      entry: how often this attempt has called this before.
      replays: InFlight.replayed_step and has_equal_replay of this attempt before a rollback; a
        commit after that step is not known to be good because the run continues from it.

    Raises:
      ConfigError: the rows are not the ones that the run has trained on.
      Unrestorable: steps are committed and none is valid.
    """
    history = _agreed_history(run, entry=entry)
    _check_rows(run, history, entry=entry)
    begin = _newest_state(run, history, entry=entry)
    state, progress = begin.state, begin.progress
    run.hooks.begin(progress.step)
    _note_other_losses(run, progress)
    start = Start(
        step=progress.step,
        path=begin.path,
        dataset=run.dataset,
        computation=run.computation,
        init=begin.init,
        devices=run.devices,
        looks_back_steps=looks_back_steps(run.limits, run.loss_scale),
        tokenizer=run.tokenizer,
        tier=begin.tier,
    )
    level = _guarantee_level(run, history, start)
    seq = _record_start(run, start, entry=entry)
    run.memory.begin(seq, step=progress.step)
    committed = None if begin.tier is None else history.step
    run.emit(TrainingStarted(progress.step, begin.path, level, committed))
    run.emit(PhaseChanged("train"))
    return state, progress, _new_in_flight(run, history, progress, seq=seq, replays=replays)


def _new_in_flight(
    run: Trainer,
    history: RunHistory,
    progress: Progress,
    *,
    seq: int,
    replays: tuple[int, bool] | None,
) -> InFlight:
    """Returns the steps in flight at a start, of which `seq` is the record: none yet."""
    now, loader = run.clock.monotonic(), run.data_loader
    replayed_step, has_equal_replay = replays or (progress.step, False)
    return InFlight(
        seq,
        batch_at=loader.open(history),
        rollbacks=history.num_rollbacks,
        skips=history.num_skips,
        peak_rate=lambda step: run.peak_rate(history.rate_factor(step)),
        cursor=progress.cursor,
        epoch_before=max(0, progress.cursor - loader.rows_per_step) // loader.num_rows,
        completed_at=now,
        dispatched_at=now,
        replayed_step=min(replayed_step, progress.step),
        has_equal_replay=has_equal_replay,
    )


def _note_other_losses(run: Trainer, progress: Progress) -> None:
    """Reports that held-out losses so far were computed on other, or on unknown, rows."""
    if progress.heldout_loss is None or progress.heldout_data == run.heldout_data:
        return
    if not run.heldout_data or not run.peers.member.leads:
        return
    run.emit(Noted(OTHER_LOSSES if progress.heldout_data else UNKNOWN_LOSSES))


@dataclass(frozen=True)
class _Begin:
    """The state that training begins with, and its fields for the start record."""

    state: TrainState
    progress: Progress
    path: str | None = None
    init: dict[str, str] | None = None
    tier: str | None = None


def _newest_state(run: Trainer, history: RunHistory, *, entry: int) -> _Begin:
    """Returns the newest valid state of the run, from host memory or a committed step."""
    seconds = RESTORE_SHARE * run.barrier_seconds
    topic = f"memory/{entry}"
    kept = run.memory.restore(history, dataset=run.dataset, topic=topic, seconds=seconds)
    if kept is not None:
        return _Begin(from_plain(kept.state), kept.progress, tier="memory")
    shapes = to_plain(run.shapes)
    restored = run.checkpoints.restore(history, shapes, seconds=seconds, last_step=run.steps)
    if restored is not None:
        state = from_plain(restored.state)
        return _Begin(state, restored.progress, path=restored.commit.path)
    _refuse_unfinished_branch(history)
    run.emit(PhaseChanged("init", "new parameters"))
    state, init = run.init(history)
    return _Begin(state, Progress(), init=init)


def _refuse_unfinished_branch(history: RunHistory) -> None:
    """Raises if a run without a committed step was to begin with a step of another run."""
    if history.origin is not None:
        raise Unrestorable(
            f"this run begins with step {history.origin.step} of {history.origin.path}, and no "
            "step is committed here: `jaxres branch` was interrupted. Delete this directory and "
            "run that command again."
        )


def _guarantee_level(run: Trainer, history: RunHistory, start: Start) -> str:
    """Returns the level of a start. Raises ConfigError if the config refuses it."""
    own = Record(seq=0, attempt=run.log.attempt, time=0.0, body=start)  # Two fields are unused.
    level = guarantee_level([*history.starts, own])
    if not is_at_least(level, run.least_guarantee):
        raise ConfigError(
            f"run.guarantee: {run.least_guarantee} is asked for, and this start would be "
            f"{level}. Restore what differs, or accept it with run.guarantee=any."
        )
    return level


def check_dataset(fingerprint: str, history: RunHistory) -> None:
    """Raises ConfigError if the run has committed a step that was trained on other rows.

    Before the first commit the data may change: a corrected data set can use the same run.
    """
    recorded = history.dataset or ""
    if history.newest is None or recorded == fingerprint:
        return
    check_cut(fingerprint, history)
    (tokens, _, plan), (known, _, known_plan) = (
        text.partition(PLAN_MARK) for text in (fingerprint, recorded)
    )
    if tokens == known and plan and known_plan:
        raise ConfigError(
            "data.packing: the same documents are packed into other rows than those that this run "
            f"was started with (plan {plan} now, {known_plan} recorded). Restore "
            "data.cache_dir/packings from a copy or use the version of jaxres that started the "
            "run, or start a new run in another run.dir."
        )
    raise ConfigError(
        f"data.source: the rows are not the ones that this run was started with (fingerprint "
        f"{fingerprint} now, {recorded} recorded). Restore the old data, or start a new "
        "run in another run.dir."
    )


def check_cut(fingerprint: str, history: RunHistory) -> None:
    """Raises ConfigError if the run has held out another part of the same documents."""
    recorded = history.dataset or ""
    if recorded != fingerprint and recorded == fingerprint.partition(CUT_MARK)[0]:
        raise ConfigError(
            "data.heldout_fraction: an earlier version of jaxres has started this run, and held "
            "out less than half or more than twice that share, up to a document boundary; this "
            "version cuts a document instead, so it would train on other rows. Use that version, "
            "or start a new run in another run.dir."
        )


def _check_rows(run: Trainer, history: RunHistory, *, entry: int) -> None:
    """Raises ConfigError if this host reads other rows than the run has trained on, or host 0."""
    check_dataset(run.dataset, history)
    expected = run.peers.broadcast(
        f"dataset/{entry}", lambda: run.dataset, seconds=run.barrier_seconds
    )
    if expected != run.dataset:
        raise ConfigError(
            f"data.source: this host reads other rows than host 0 (fingerprint {run.dataset} here, "
            f"{expected} on host 0). Check that both read the same data."
        )


def _agreed_history(run: Trainer, *, entry: int) -> RunHistory:
    """Returns the run history as host 0 has read it; other hosts wait for its records."""
    records = run.log.records()
    seen = int(
        run.peers.broadcast(  # Host 0 may still delete steps that a rollback has discarded.
            f"records/{entry}", lambda: str(run_log.last_seq(records)), seconds=run.barrier_seconds
        )
    )
    end = run.clock.monotonic() + MESSAGE_SECONDS
    while run_log.last_seq(records) < seen:
        if run.clock.monotonic() > end:
            raise StorageUnavailable(
                f"{run.log.folder}: host 0 has read {seen} records here, this host finds only "
                f"{run_log.last_seq(records)} after {MESSAGE_SECONDS:.0f} s. Check that both use "
                "the same storage."
            )
        run.clock.sleep(POLL_SECONDS)
        records = run.log.records()
    return fold(run.log.records_through(seen))


def _record_start(run: Trainer, start: Start, *, entry: int) -> int:
    """Records the start of training, once every host has the state; returns the record's number.

    The barrier keeps the hosts close to each other: the first collective of a job has a short time
    limit.
    """
    run.peers.barrier(f"restored/{entry}", seconds=run.barrier_seconds)
    seq = run.peers.broadcast(
        f"start/{entry}", lambda: str(run.log.append(start).seq), seconds=MESSAGE_SECONDS
    )
    return int(seq)
