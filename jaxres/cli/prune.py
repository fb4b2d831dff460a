"""Looking after the checkpoints of a run by hand: what is kept and why, pruning, pins.

Who prunes owns the run, as any attempt does: he claims the next attempt, so that an owner which was
only paused is fenced before a byte goes. A run that is alive prunes by itself, and refuses (83).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jaxres.checkpoint import pruning, retention
from jaxres.clock import Clock
from jaxres.config.schema_operations import KeepSection
from jaxres.faults import Exit, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line, Stop
from jaxres.storage import files
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.run_config import resolve
from jaxres.supervisor.run_lock import Owner
from jaxres.supervisor.worker_group import Job
from jaxres.telemetry.stdio import size

KEEP = "checkpoint.keep"


@dataclass(frozen=True)
class Outline:
    """What pruning a run would do, or has done."""

    plan: retention.Plan
    leftovers: Mapping[str, int]
    """Name -> bytes of directories that count for nothing: of killed saves and killed prunes."""
    is_alive: bool
    """Whether somebody owns the run: then it prunes by itself, and may be writing a leftover."""


def keep_of(run_dir: RunDir, overrides: Sequence[str]) -> KeepSection:
    """Returns what the run keeps, by its newest config and overrides of `checkpoint.keep`.

    Raises:
      UsageError: an override of anything else.
    """
    for word in overrides:
        if not word.startswith((f"{KEEP}.", f"{KEEP}=", f"{KEEP}_last=")):
            raise UsageError(f"{word}: only {KEEP}.* can be given here, as in {KEEP}.last=2")
    return resolve(run_dir.root, overrides)[0].config.checkpoint.keep


def outline(run_dir: RunDir, line: Line, keep: KeepSection, *, is_alive: bool) -> Outline:
    """Returns what pruning would do; writes nothing."""
    left = [] if is_alive else pruning.leftovers(line, run_dir=run_dir)
    return Outline(
        pruning.plan(line, keep, run_dir=run_dir),
        {path.name: sum(files.sizes(path).values()) for path in left},
        is_alive,
    )


def prune(run_dir: RunDir, keep: KeepSection, *, clock: Clock, env: Mapping[str, str]) -> Outline:
    """Prunes a run that nobody owns; returns what was to be done when it was claimed.

    Raises:
      Fenced: somebody owns it, and lives, or came first; nothing was deleted.
    """
    config = resolve(run_dir.root, ())[0].config
    with Owner(run_dir, clock=clock) as holder:
        before = run_log.fold(run_log.read_records(run_dir.log))
        found = outline(run_dir, before, keep, is_alive=False)
        if not found.plan.dead and not found.leftovers:
            return found
        log, _ = attempt_runner.claim_next(
            config, run_dir, job=Job(), owner=holder, clock=clock, env=env
        )
        pruned = pruning.prune(log, keep, run_dir=run_dir)
        pruning.delete_all_but(log.line(), run_dir=run_dir, attempt=log.attempt)
        log.append(_end(before, pruned))
    return found


def _end(before: Line, pruned: Sequence[int]) -> Stop:
    """Returns the end of an attempt that has pruned only: what the run had come to still holds."""
    steps = ", ".join(map(str, pruned)) or "none"
    said = f"checkpoints prune: took steps off the line ({steps}); nothing was trained"
    last = before.last_stop
    if last is None or last.attempt != before.attempt:
        return Stop(exit=Exit.STOPPED, reason=said, committed=True)
    assert isinstance(last.body, Stop), last
    return Stop(
        exit=last.body.exit,
        reason=f"{said}. Attempt {last.attempt} before: {last.body.reason}",
        committed=last.body.committed,
    )


def as_text(found: Outline, *, is_done: bool) -> str:
    """Returns a table for a person."""
    plan = found.plan
    text = f"{'step':>8} {'committed (UTC)':>19} {'bytes':>16}  kept as\n"
    for one in plan.steps:
        at = datetime.fromtimestamp(one.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        why = ", ".join(plan.reasons[one.step]) or ("(pruned)" if is_done else "- goes")
        text += f"{one.step:>8} {at:>19} {one.bytes:>16,}  {why}\n"
    for name, count in found.leftovers.items():
        text += f"{name:>28} {count:>16,}  left over by a kill, counts for nothing\n"
    gone = sum(s.bytes for s in plan.steps if s.step in plan.dead) + sum(found.leftovers.values())
    verb = "were pruned" if is_done else "would go"
    text += (
        f"{len(plan.dead)} of {len(plan.steps)} steps and {len(found.leftovers)} leftovers {verb}: "
        f"{gone:,} bytes ({size(gone)})\n"
    )
    if found.is_alive:
        text += "The run is alive: it prunes by itself after every commit, by its own config.\n"
    return text


def as_json(found: Outline) -> str:
    """Returns one object a line."""
    plan = found.plan
    rows: list[dict[str, object]] = [
        {
            "step": one.step,
            "bytes": one.bytes,
            "goes": one.step in plan.dead,
            "kept_as": plan.reasons[one.step],
        }
        for one in plan.steps
    ]
    rows += [{"leftover": name, "bytes": count} for name, count in found.leftovers.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)


def pin(run_dir: RunDir, step: int) -> str:
    """Pins a committed step and says so.

    Raises:
      UsageError: it is not committed, or was pruned just before the pin came.
    """
    if step not in _steps(run_dir):
        steps = ", ".join(map(str, _steps(run_dir))) or "none"
        raise UsageError(f"{run_dir.root}: step {step} is not committed (committed: {steps})")
    pruning.pin(run_dir, step)
    if step not in _steps(run_dir):
        pruning.unpin(run_dir, step)
        raise UsageError(f"{run_dir.root}: step {step} was pruned meanwhile, and can't be pinned")
    return f"step {step} is pinned: it is kept until `checkpoints unpin {run_dir.root}`\n"


def unpin(run_dir: RunDir, step: int) -> str:
    """Takes a pin back and says so."""
    was = "is not pinned any more" if pruning.unpin(run_dir, step) else "was not pinned"
    return f"step {step} {was}\n"


def _steps(run_dir: RunDir) -> list[int]:
    return [c.step for c in run_log.fold(run_log.read_records(run_dir.log)).committed]
