"""Hook of `jaxres resume-check`: holds a run after a step until the check has broken it there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Protocol

from jaxres.clock import SystemClock
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import RunPath, is_path

TARGET = "jaxres.train.chaos_hooks.break_hook:hold"
POLL_SECONDS = 0.02
HOLD_SECONDS = 3600.0
"""Longest hold. The supervisor's deadline of hooks ends it earlier."""


class HoldContext(Protocol):
    """The part of a hook's context that the hold needs."""

    @property
    def step(self) -> int:
        """The step after which the hook is called."""
        ...

    @property
    def run_dir(self) -> object:
        """The run directory."""
        ...

    @property
    def host(self) -> int:
        """Number of this host."""
        ...


def folder_of(run_dir: RunPath) -> Path:
    """Returns the folder by which check and hook communicate: beside the run's local files."""
    local = RunDir(run_dir).local
    return local.with_name(f"{local.name}.breaks")


def plan_next(run_dir: RunPath, *, number: int, step: int) -> None:
    """Makes every host hold after a step; the hold has a number, and happens once."""
    folder = folder_of(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "plan.new"
    new.write_text(json.dumps({"number": number, "step": step}))
    new.replace(folder / "plan.json")


def reached(run_dir: RunPath, *, number: int, host: int = 0) -> Path:
    """Returns the file with the pid of a host's worker that holds."""
    return folder_of(run_dir) / _reached(number, host)


def _reached(number: int, host: int) -> str:
    return f"reached-{number}-{host}"


def release(run_dir: RunPath, *, number: int) -> None:
    """Ends a hold on all hosts that are still there."""
    (folder_of(run_dir) / _released(number)).touch()


def _released(number: int) -> str:
    return f"released-{number}"


def hold(context: HoldContext, *, folder: str | None = None) -> None:
    """Holds if a hold is planned after this step; a hook, called after each step on each host.

    Args:
      folder: that of `folder_of` where the check runs; None: the same as here.
    """
    run_dir = context.run_dir
    assert is_path(run_dir), run_dir
    here = folder_of(run_dir) if folder is None else Path(folder)
    try:
        plan = json.loads((here / "plan.json").read_text())
    except FileNotFoundError:  # This run is not broken.
        return
    number = plan["number"]
    mine = here / _reached(number, context.host)
    if context.step != plan["step"] or mine.exists():
        return
    new = mine.with_name(f"{mine.name}.new")
    new.write_text(str(os.getpid()))
    new.replace(mine)
    released, clock = here / _released(number), SystemClock()
    for _ in range(int(HOLD_SECONDS / POLL_SECONDS)):
        if released.exists():
            return
        clock.sleep(POLL_SECONDS)
