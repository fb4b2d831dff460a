"""When each committed step was last verified while it lay on storage: `RUN_DIR/scrub.json`.

The file decides only when a step is read again and which damage has been found; it changes no
step. If it is lost, every step counts as verified when it was committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Record
from jaxres.storage import codec, files
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed

FORMAT = 1
PROGRESS = "scrub.json"
RETRY_SECONDS = 600.0
"""Time after which a step is read again that storage did not return."""
UNREADABLE_TRIES = 3
"""Failed reads of a step, one after another, after which it is an incident."""


@dataclass(frozen=True)
class Damage:
    """Damage of a committed step."""

    kind: str
    """`damaged`: proved by two reads; `unreadable`: storage returns errors for this step alone."""
    found: float
    """Wall-clock time at which it was found first."""
    evidence: str
    files: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    copy: str | None = None
    """Directory of an intact copy in the replica; None: there is none."""


@dataclass(frozen=True)
class StepCheck:
    """The newest check of one committed step."""

    step: int
    path: str
    """Path of its directory in the run directory."""
    time: float
    """Wall-clock time at which the check has ended."""
    num_failures: int = 0
    """Number of checks, one after another, in which storage returned other steps but not this."""
    damage: Damage | None = None


def read(run_dir: RunDir) -> dict[str, StepCheck]:
    """Returns path -> newest check; empty if the file is missing or damaged.

    Raises:
      StorageUnavailable: storage could not be read.
    """
    try:
        fields = decode_checksummed(files.read(run_dir.root / PROGRESS) or b"", number=FORMAT)
        return {path: codec.decode(StepCheck, each) for path, each in fields["steps"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def write(run_dir: RunDir, checks: Mapping[str, StepCheck]) -> None:
    """Replaces the file."""
    steps = {path: codec.encode(check, omit_defaults=True) for path, check in checks.items()}
    files.replace(run_dir.root / PROGRESS, encode_checksummed({"format": FORMAT, "steps": steps}))


def due_steps(
    commits: Sequence[Record],
    checks: Mapping[str, StepCheck],
    *,
    now: float,
    every_seconds: float,
) -> list[Commit]:
    """Returns the committed steps that are to be read now, the oldest check first. Pure.

    A commit is a check: each save is read back before it. A check in the future is one by a clock
    that was wrong.
    """
    due: list[tuple[float, Commit]] = []
    for record in commits:
        commit = record.body
        assert isinstance(commit, Commit), record
        check = checks.get(commit.path)
        last = record.time if check is None else check.time
        is_retried = check is not None and 0 < check.num_failures < UNREADABLE_TRIES
        wait = min(every_seconds, RETRY_SECONDS) if is_retried else every_seconds
        if not 0 <= now - last < wait:
            due.append((last, commit))
    return [commit for _, commit in sorted(due, key=lambda each: (each[0], each[1].step))]


def with_damage(check: StepCheck, damage: Damage, before: StepCheck | None) -> StepCheck:
    """Returns a check that has found damage; the same damage keeps the time it was found at."""
    if before is not None and before.damage is not None and before.damage.kind == damage.kind:
        damage = replace(damage, found=before.damage.found)
    return replace(check, damage=damage)


def intact_steps(commits: Sequence[Commit], checks: Mapping[str, StepCheck]) -> tuple[int, ...]:
    """Returns the committed steps without known damage, ascending."""
    return tuple(
        commit.step
        for commit in commits
        if (check := checks.get(commit.path)) is None or check.damage is None
    )


def damaged_steps(
    commits: Sequence[Commit], checks: Mapping[str, StepCheck]
) -> tuple[StepCheck, ...]:
    """Returns the checks of the committed steps with known damage, ascending by step."""
    found = [checks[commit.path] for commit in commits if commit.path in checks]
    return tuple(check for check in found if check.damage is not None)
