"""Step directories: their names, and complete ones that the run log does not record.

A save is complete before its commit record is written. So a killed attempt leaves at most one
complete step without a record. More of them, or any of a later attempt, mean that the log is
missing or older than the checkpoints: then they may be committed steps, and nothing is deleted.

Home of: lost_log. No attempt is claimed on a log that does not account for the complete steps in
`checkpoints/`, or that is not the one after which the newest of them was saved; `checkpoints adopt`
rebuilds a lost log.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxres.faults import RunError, Unrestorable, command_line
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Dropped, Record, file_name
from jaxres.runlog.run_log import RunHistory
from jaxres.storage import files
from jaxres.storage.path import RunPath

MANIFEST = "MANIFEST.json"
"""Inventory of all other files of a step directory; written last, in a bucket with some others."""
LOG_COPY = "run_log.jsonl"
"""Copy of the run log as it was when the step was saved, in the step's directory."""
NAMED = 5
"""Number of step directories that a message lists."""
_STEP_DIR = re.compile(r"(\d{8,})-(\d{4,})(-\d+)?(\.orbax-checkpoint-tmp(-\d+)?)?")
"""<step>-<attempt>, a number if an attempt saves a step again, Orbax's suffix while it writes."""


@dataclass(frozen=True)
class StepDir:
    """A step directory's name, parsed."""

    name: str
    step: int
    attempt: int


def step_names(step: int, *, attempt: int) -> Iterator[str]:
    """Yields the possible names of a step directory; an attempt may save a step repeatedly.

    >>> [name for name, _ in zip(step_names(8, attempt=2), range(2))]
    ['00000008-0002', '00000008-0002-2']
    """
    name = step_name(step, attempt=attempt)
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def step_name(step: int, *, attempt: int) -> str:
    """Returns the first name of a step directory; no two attempts share it."""
    return f"{step:08d}-{attempt:04d}"


def temporary_name(name: str) -> str:
    """Returns the name of a step directory until all its arrays are written, as Orbax has it.

    >>> temporary_name("00000008-0002")
    '00000008-0002.orbax-checkpoint-tmp'
    """
    return f"{name}.orbax-checkpoint-tmp"


def parse_name(name: str) -> StepDir | None:
    """Parses the name of a step directory; None: no save produces such a name.

    >>> parse_name("00000016-0002-3")
    StepDir(name='00000016-0002-3', step=16, attempt=2)
    >>> parse_name("00000016-0002.backup")
    """
    match = _STEP_DIR.fullmatch(name)
    return match and StepDir(name, step=int(match[1]), attempt=int(match[2]))


def listed(checkpoints: RunPath) -> list[StepDir]:
    """Returns the step directories in `checkpoints/`, complete or not; other names are ignored."""
    parsed = map(parse_name, files.list_names(checkpoints))
    return [step_dir for step_dir in parsed if step_dir is not None]


def is_complete(step_dir: RunPath) -> bool:
    """Returns whether a step directory has a manifest and every file of it in its size.

    A manifest that can't be read counts as complete: its step may be a committed one.

    Raises:
      StorageUnavailable: storage could not be read.
    """
    if (data := files.read(step_dir / MANIFEST)) is None:
        return False
    try:
        sizes = {name: info["size"] for name, info in json.loads(data)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return True
    with files.typed_errors(step_dir):
        present = files.sizes_of(step_dir, sizes.keys())
    return all(present.get(name) == size for name, size in sizes.items())


def unrecorded(run_dir: RunDir, history: RunHistory) -> list[StepDir]:
    """Returns the step directories that are complete and that no commit record has ever named."""
    names = {path.rpartition("/")[2] for path in history.paths}
    return [
        step_dir
        for step_dir in listed(run_dir.checkpoints)
        if step_dir.name not in names and is_complete(run_dir.checkpoints / step_dir.name)
    ]


def unexplained(history: RunHistory, complete: list[StepDir]) -> list[StepDir]:
    """Returns the unrecorded step directories that no killed save explains. Pure.

    Args:
      complete: complete step directories without a commit record.
    """
    per_attempt = collections.Counter(step_dir.attempt for step_dir in complete)
    return [
        step_dir
        for step_dir in complete
        if step_dir.attempt > history.attempt or per_attempt[step_dir.attempt] > 1
    ]


def require_complete_log(run_dir: RunDir, history: RunHistory) -> None:
    """Raises if `checkpoints/` has complete steps that the log should record and does not.

    Raises:
      Unrestorable: the log is missing or older than the checkpoints; nothing was changed.
      StorageUnavailable: storage could not be read.
    """
    found = unexplained(history, unrecorded(run_dir, history))
    if not found:
        return
    names = ", ".join(step_dir.name for step_dir in found[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    ends = f"ends with attempt {history.attempt}" if history.attempt else "is empty or missing"
    raise Unrestorable(
        f"{run_dir.checkpoints}: complete steps that the run log does not record: {names}{more}. "
        f"{run_dir.log} {ends}, so it is lost or older than the checkpoints. The run does not "
        "start again, and nothing was changed. Restore the folder log/ from its newest copy, or "
        "rebuild it from the checkpoints: "
        f"{command_line('jaxres checkpoints adopt', run_dir.root)}. For a new run, give another "
        "run.dir."
    )


def require_same_log(run_dir: RunDir, history: RunHistory, records: Sequence[Record]) -> None:
    """Raises if the newest committed step was saved by another course of the run.

    Two copies of a run directory that have both trained on have other records under the same
    numbers. Put together they make a log that no run has written.

    Args:
      records: the log; a summary of it is enough.

    Raises:
      Unrestorable: the copy of the log in the step has another record; nothing was changed.
      StorageUnavailable: storage could not be read.
    """
    if (newest := history.newest) is None:
        return
    data = files.read(run_dir.root / newest.path / LOG_COPY)
    own = {record.seq: record for record in records if not isinstance(record.body, Dropped)}
    for line in (data or b"").splitlines():
        try:
            saved = Record.decode(line, path=run_dir.log / file_name(Record.seq_of(line)))
        except (RunError, ValueError):
            return  # The restore compares the file with the manifest, and names the damage.
        if own.get(saved.seq, saved) != saved:
            raise Unrestorable(
                f"{run_dir.log / file_name(saved.seq)}: is not the record that step "
                f"{newest.step} was saved after ({newest.path}/{LOG_COPY}): the "
                "folder is put together of two copies of the run that have both trained on. "
                "Nothing was changed. Restore one of the copies whole, log/ and checkpoints/ "
                "together, into an empty folder, and give that as run.dir."
            )
