"""Pins, and the two phases of pruning: a record makes steps dead for everyone, then bytes go.

A kill between the phases leaves directories that no record names; the next sweep takes them. Only
who owns the run prunes; anybody may pin.
"""

from __future__ import annotations

from jaxres.checkpoint import retention
from jaxres.config.schema_operations import KeepSection
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Line, Prune, RunLog
from jaxres.storage import files
from jaxres.storage.path import Place


def pinned(run_dir: RunDir) -> set[int]:
    """Returns the steps that are pinned; other names in the folder are nobody's pin."""
    return {int(name) for name in files.list_names(run_dir.pins) if name.isdecimal()}


def pin(run_dir: RunDir, step: int) -> None:
    """Pins a step, durably; it holds from the owner's next look at the pins on."""
    files.make_dir(run_dir.pins)
    files.create(run_dir.pins / str(step), b"")


def unpin(run_dir: RunDir, step: int) -> bool:
    """Takes a pin back; False: there was none."""
    return files.delete(run_dir.pins / str(step))


def plan(line: Line, keep: KeepSection, *, run_dir: RunDir) -> retention.Plan:
    """Returns what becomes of each committed step now."""
    return retention.plan(retention.steps_of(line), keep, pinned=pinned(run_dir))


def prune(log: RunLog, keep: KeepSection, *, run_dir: RunDir) -> tuple[int, ...]:
    """Takes the steps that nothing keeps off the line, and returns them; deletes no byte.

    A pin may come between the look at the pins and the record. Who pins looks at the log
    afterwards: where it still shows the step, the pin was there before the record and is seen here,
    and the step gets its commit back.

    Raises:
      StorageUnavailable: the record may stand all the same; the log says.
    """
    line = log.line()
    dead = plan(line, keep, run_dir=run_dir).dead
    if not dead:
        return ()
    log.append(Prune(steps=dead))
    late = pinned(run_dir) & set(dead)
    for commit in line.committed:
        if commit.step in late:
            log.append(commit)
    return tuple(step for step in dead if step not in late)


def leftovers(line: Line, *, run_dir: RunDir) -> list[Place]:
    """Returns what is off the line, half deleted or whole, of a run that nobody owns."""
    names = retention.leftovers(run_dir.checkpoints, keep=line.stay, attempt=line.attempt)
    trash = files.trash(run_dir.checkpoints)
    return [*(run_dir.checkpoints / name for name in names), *trash]


def delete_all_but(line: Line, *, run_dir: RunDir, attempt: int) -> list[str]:
    """Deletes the step directories, of this attempt or earlier ones, that are off the line."""
    return retention.sweep(run_dir.checkpoints, keep=line.stay, attempt=attempt)
