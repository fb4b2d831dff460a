"""Requests of `jaxres chaos run` to the hooks in the workers of its runs, and their answers.

A request is written while the workers are held by `break_hook.py`, and is a file beside theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxres.storage.path import RunPath
from jaxres.train.chaos_hooks.break_hook import folder_of

WORKER_HOOK = "jaxres.train.chaos_hooks.faulty_worker_hook:plant"
"""The hook that does `exhaust` and `sleep`; its module imports jax."""
WRONG_PRODUCT = "JAXRES_CHAOS_WRONG_PRODUCT"
"""Environment variable of that module: number of the host whose first device computes wrongly."""
Kind = Literal["overflow", "restore", "nan", "flip", "scale", "exhaust", "sleep"]


@dataclass(frozen=True, kw_only=True)
class FaultRequest:
    """A fault for a hook to cause."""

    number: int
    """Its number in the run."""
    step: int
    """The step after which it is done."""
    kind: Kind
    host: int | None = None
    """Whose worker does it; None: every host's."""
    seconds: float = 0.0
    """How long `sleep` sleeps in each step."""


def write(run_dir: RunPath, request: FaultRequest) -> None:
    """Makes a request, in place of an earlier one."""
    new = folder_of(run_dir) / "fault.new"
    new.write_text(json.dumps(dataclasses.asdict(request)))
    new.replace(_path(run_dir))


def withdraw(run_dir: RunPath) -> None:
    """Takes the newest request back."""
    _path(run_dir).unlink(missing_ok=True)


def read(run_dir: RunPath, *, host: int) -> FaultRequest | None:
    """Returns the newest request to a host; None: there is none."""
    with contextlib.suppress(FileNotFoundError):
        request = FaultRequest(**json.loads(_path(run_dir).read_text()))
        return request if request.host in (None, host) else None
    return None


def _path(run_dir: RunPath) -> Path:
    return folder_of(run_dir) / "fault.json"


def answer(run_dir: RunPath, request: FaultRequest, text: str, *, host: int) -> None:
    """Writes a host's answer to a request."""
    mine = _answer(run_dir, request.number, host)
    new = mine.with_name(f"{mine.name}.new")
    new.write_text(text)
    new.replace(mine)


def done(run_dir: RunPath, *, number: int, host: int) -> str:
    """Returns a host's answer to a request, a text about the fault; empty: no answer."""
    with contextlib.suppress(FileNotFoundError):
        return _answer(run_dir, number, host).read_text()
    return ""


def _answer(run_dir: RunPath, number: int, host: int) -> Path:
    return folder_of(run_dir) / f"fault-{number}-{host}"
