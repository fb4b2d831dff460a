"""`jaxres checkpoints prune`, `pin` and `unpin`: manual retention of a run's checkpoints.

Pruning takes the run lock and claims the next attempt, like any attempt. A lock holder that was
only suspended is therefore fenced before anything is deleted. A live run prunes its checkpoints
itself; pruning it manually fails with exit code 83.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jaxres.checkpoint.retention import pruning, retention
from jaxres.clock import Clock
from jaxres.config.schema.checkpoint import KeepSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError, command_line
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded, RunHistory
from jaxres.storage import files, object_holds
from jaxres.storage.path import is_remote
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.process.worker_group import WorkerGroup
from jaxres.supervisor.run_config import resolve_run, tell_repeated
from jaxres.supervisor.run_lock import RunLock
from jaxres.telemetry.stdio import format_bytes

KEEP = "checkpoint.keep"


@dataclass(frozen=True)
class PrunePreview:
    """Steps and leftovers that pruning deletes or has deleted."""

    plan: retention.PrunePlan
    leftovers: Mapping[str, int]
    """Name -> bytes of directories outside the run history, left by killed saves and prunes."""
    shared_bytes: int
    """Bytes of the deleted files that this does not free: other steps share them."""
    is_alive: bool
    """Whether the run is live: then it prunes by itself, and leftovers may be saves in flight."""


def keep_policy(run_dir: RunDir, overrides: Sequence[str]) -> KeepSection:
    """Returns the run's retention policy: its newest config with overrides of `checkpoint.keep`.

    Raises:
      UsageError: an override of another key.
    """
    for override in overrides:
        if not override.startswith((f"{KEEP}.", f"{KEEP}=", f"{KEEP}_last=")):
            raise UsageError(f"{override}: only {KEEP}.* can be given here, as in {KEEP}.last=2")
    tell_repeated(overrides)
    return resolve_run(run_dir.root, overrides)[0].config.checkpoint.keep


def preview(
    run_dir: RunDir, history: RunHistory, keep: KeepSection, *, is_alive: bool
) -> PrunePreview:
    """Returns the steps and leftovers that pruning would delete; writes nothing."""
    leftovers = [] if is_alive else pruning.leftovers(history, run_dir=run_dir)
    plan = pruning.plan(history, keep, run_dir=run_dir)
    dead = [run_dir.root / c.path for c in history.committed if c.step in plan.dead]
    return PrunePreview(
        plan,
        {path.name: sum(files.sizes(path).values()) for path in leftovers},
        files.shared_bytes([*dead, *leftovers]),
        is_alive,
    )


def prune(
    run_dir: RunDir, keep: KeepSection, *, clock: Clock, env: Mapping[str, str]
) -> PrunePreview:
    """Prunes a run that is not live; returns the deletions as planned when it was claimed.

    Raises:
      Fenced: another process holds the run lock or has claimed the attempt; nothing was deleted.
    """
    config = resolve_run(run_dir.root, ())[0].config
    with RunLock(run_dir, clock=clock) as lock:
        records = run_log.read_records(run_dir.log)
        before = run_log.fold(records)
        planned = preview(run_dir, before, keep, is_alive=False)
        if not planned.plan.dead and not planned.leftovers:
            return planned
        job, known = WorkerGroup(), run_log.last_seq(records)
        _, log = attempt_runner.claim_attempt(config, lock, job=job, env=env, known=known)
        pruned = pruning.prune(log, keep, run_dir=run_dir)
        pruning.delete_all_but(log.history(), run_dir=run_dir, attempt=log.attempt)
        log.append(_end(before, pruned))
    return planned


def _end(before: RunHistory, pruned: Sequence[int]) -> AttemptEnded:
    """Returns the end of an attempt that only pruned: with the exit of the attempt before it."""
    steps = ", ".join(map(str, pruned)) or "none"
    reason = f"checkpoints prune: pruned steps {steps}; nothing was trained"
    last = before.last_stop
    if last is None or last.attempt != before.attempt:
        return AttemptEnded(exit=ExitCode.STOPPED, reason=reason, committed=True)
    assert isinstance(last.body, AttemptEnded), last
    return AttemptEnded(
        exit=last.body.exit,
        reason=f"{reason}. Attempt {last.attempt} before: {last.body.reason}",
        committed=last.body.committed,
    )


def as_text(preview: PrunePreview, *, is_done: bool) -> str:
    """Returns a text table."""
    plan = preview.plan
    text = f"{'step':>8} {'committed (UTC)':>19} {'bytes':>16}  kept as\n"
    for step in plan.steps:
        at = datetime.fromtimestamp(step.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        why = ", ".join(plan.reasons[step.step]) or ("(pruned)" if is_done else "(to be pruned)")
        text += f"{step.step:>8} {at:>19} {step.bytes:>16,}  {why}\n"
    for name, count in preview.leftovers.items():
        text += f"{name:>28} {count:>16,}  left by a killed process, not in the run history\n"
    deleted = sum(step.bytes for step in plan.steps if step.step in plan.dead)
    deleted += sum(preview.leftovers.values()) - preview.shared_bytes
    verb = "were pruned" if is_done else "would be pruned"
    text += (
        f"{len(plan.dead)} of {len(plan.steps)} steps and {len(preview.leftovers)} leftovers "
        f"{verb}: {deleted:,} bytes ({format_bytes(deleted)})\n"
    )
    if preview.shared_bytes:
        text += (
            f"{preview.shared_bytes:,} bytes of frozen parameters are not counted: steps share "
            "their files, and one that is kept keeps them\n"
        )
    if preview.is_alive:
        text += "The run is alive: it prunes by itself after every commit, by its own config.\n"
    return text


def as_json(preview: PrunePreview) -> str:
    """Returns one JSON object per line."""
    plan = preview.plan
    rows: list[dict[str, object]] = [
        {
            "step": step.step,
            "bytes": step.bytes,
            "pruned": step.step in plan.dead,
            "kept_as": plan.reasons[step.step],
        }
        for step in plan.steps
    ]
    if preview.shared_bytes:
        rows.append({"shared_bytes": preview.shared_bytes})
    rows += [{"leftover": name, "bytes": count} for name, count in preview.leftovers.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)


def pin(run_dir: RunDir, step: int, *, holds: bool = False) -> str:
    """Pins a committed step; returns a message.

    Args:
      run_dir: the run.
      step: the step.
      holds: whether its objects get a temporary hold of Cloud Storage, too.

    Raises:
      UsageError: the step is not committed, was pruned before the pin was written, or is on a disk
        that has no holds.
    """
    if holds and not is_remote(run_dir.root):
        raise UsageError(f"--hold: {run_dir.root} is in no bucket; a hold is that of an object")
    if step not in _steps(run_dir):
        steps = ", ".join(map(str, _steps(run_dir))) or "none"
        raise UsageError(f"{run_dir.root}: step {step} is not committed (committed: {steps})")
    pruning.pin(run_dir, step)
    if step not in _steps(run_dir):
        pruning.unpin(run_dir, step)
        raise UsageError(f"{run_dir.root}: step {step} was pruned meanwhile and can't be pinned")
    unpin = command_line("python -m jaxres checkpoints unpin", run_dir.root, "--step", step)
    if holds:
        _set_hold(run_dir, step, is_held=True)
        return f"step {step} is pinned and held: no account can delete it until `{unpin}`\n"
    return f"step {step} is pinned: it is kept until `{unpin}`\n"


def unpin(run_dir: RunDir, step: int) -> str:
    """Removes the holds of a step, then its pin; returns a message."""
    released = _set_hold(run_dir, step, is_held=False)
    outcome = "is no longer pinned" if pruning.unpin(run_dir, step) else "was not pinned"
    return f"step {step} {outcome}{f'; {released} objects are no longer held' * bool(released)}\n"


def _set_hold(run_dir: RunDir, step: int, *, is_held: bool) -> int:
    """Sets or removes the holds of a committed step; returns the number of objects that changed."""
    history = run_log.fold(run_log.read_records(run_dir.log))
    paths = [run_dir.root / commit.path for commit in history.committed if commit.step == step]
    return sum(object_holds.set_all(path, is_held=is_held) for path in paths if is_remote(path))


def _steps(run_dir: RunDir) -> list[int]:
    return [c.step for c in run_log.fold(run_log.read_records(run_dir.log)).committed]
