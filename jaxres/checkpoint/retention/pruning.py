"""Pins, and the two phases of pruning: first a prune record, then the deletion of directories.

A kill between the phases leaves directories of steps that are no longer committed; the next sweep
deletes them. Only the lock holder of a run prunes; any process may pin.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxres.checkpoint.retention import retention
from jaxres.config.schema.checkpoint import KeepSection
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Prune, RunHistory, RunLog
from jaxres.runlog.step_dirs import StepDir
from jaxres.storage import files
from jaxres.storage.path import RunPath


def pinned(run_dir: RunDir) -> set[int]:
    """Returns the pinned steps; files in the folder whose names are no numbers are ignored."""
    return {int(name) for name in files.list_names(run_dir.pins) if name.isdecimal()}


def pin(run_dir: RunDir, step: int) -> None:
    """Pins a step, durably; takes effect when the lock holder next reads the pins."""
    files.make_dir(run_dir.pins)
    files.create(run_dir.pins / str(step), b"")


def unpin(run_dir: RunDir, step: int) -> bool:
    """Removes a pin; returns False if there was none."""
    return files.delete(run_dir.pins / str(step))


def plan(history: RunHistory, keep: KeepSection, *, run_dir: RunDir) -> retention.PrunePlan:
    """Returns which committed steps are kept under the config and the current pins."""
    return retention.plan(retention.steps_of(history), keep, pinned=pinned(run_dir))


def prune(log: RunLog, keep: KeepSection, *, run_dir: RunDir) -> tuple[int, ...]:
    """Appends a prune record of the steps that no policy keeps; returns them; deletes no file.

    A pin may be created after the pins were read and before the record is appended. The command
    that pins reads the log afterwards: if the log still shows the step, the pin existed before the
    record. So the pins are read again here, and a late pin makes the step committed again.

    Raises:
      StorageUnavailable: storage failed; the log shows whether the record exists.
    """
    with ThreadPoolExecutor(1, "jaxres-pins") as pool:  # In a bucket both are requests.
        pins = pool.submit(pinned, run_dir)
        history = log.history()
    dead = retention.plan(retention.steps_of(history), keep, pinned=pins.result()).dead
    if not dead:
        return ()
    log.append(Prune(steps=dead))
    late = pinned(run_dir) & set(dead)
    for commit in history.committed:
        if commit.step in late:
            log.append(commit)
    return tuple(step for step in dead if step not in late)


def leftovers(history: RunHistory, *, run_dir: RunDir) -> list[RunPath]:
    """Returns the leftover directories, complete or half deleted, of a run that is not locked."""
    names = retention.leftovers(run_dir, history, attempt=history.attempt)
    trash = files.trash(run_dir.checkpoints)
    return [*(run_dir.checkpoints / name for name in names), *trash]


def delete_all_but(
    history: RunHistory,
    *,
    run_dir: RunDir,
    attempt: int,
    listed: Sequence[StepDir] | None = None,
) -> list[str]:
    """Deletes the leftover step directories (`retention.leftovers`)."""
    return retention.sweep(run_dir, history, attempt=attempt, listed=listed)
