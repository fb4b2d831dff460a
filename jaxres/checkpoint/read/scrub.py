"""Verifies a committed step again while it lies on storage, at a limited rate. No jax.

Nothing is written to the step, and none is quarantined: a restore does that, on its own proof.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.verify import VerificationReport, verify_step
from jaxres.checkpoint.throttle import BandwidthLimit, Throttle
from jaxres.clock import Clock
from jaxres.faults import RunError
from jaxres.runlog import replica_files, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.runlog.scrub_progress import UNREADABLE_TRIES, Damage, StepCheck, with_damage
from jaxres.storage import files
from jaxres.storage.path import RunPath

Result = VerificationReport | RunError
"""Result or error of a verification; an error of storage is no proof of damage."""


def verify(run_dir: RunDir, commit: Commit, *, limit: BandwidthLimit, clock: Clock) -> Result:
    """Reads all of a step from storage at a limited rate, and leaves none of it in the cache."""
    step_dir = (run_dir.root / commit.path).absolute()
    try:
        return verify_step(step_dir, commit, pace=Throttle(clock=clock, bandwidth=limit))
    except RunError as error:
        return error
    finally:
        _drop_cached(step_dir)


def judge(result: Result, commit: Commit, before: StepCheck | None, *, now: float) -> StepCheck:
    """Returns the check that a verification is. Pure.

    An error of storage proves no damage. But a step that stays unreadable while others can be read
    (a bad sector) is an incident.

    Args:
      result: what the verification has returned or raised. An error: another step can be read.
      commit: the step, which is still committed: a step is pruned in the log before its files are.
      now: wall-clock time.
    """
    check = StepCheck(commit.step, commit.path, now)
    if isinstance(result, VerificationReport):
        if not result.problems:
            return check
        wrong = [problem.file for problem in result.problems if problem.file is not None]
        arrays = [problem.array for problem in result.problems if problem.array is not None]
        damage = Damage("damaged", now, result.evidence, tuple(wrong), tuple(arrays))
        return with_damage(check, damage, before)
    failures = 1 + (0 if before is None else before.num_failures)
    check = StepCheck(commit.step, commit.path, now, failures)
    if failures >= UNREADABLE_TRIES:
        text = f"storage has failed to return it {failures} times, most recently: {result}"
        return with_damage(check, Damage("unreadable", now, text), before)
    return check if before is None else replace(check, damage=before.damage)


def can_read_another(run_dir: RunDir, commits: Iterable[Commit], but: Commit) -> bool:
    """Returns whether storage returns the manifest of a committed step other than this one."""
    for commit in commits:
        if commit != but:
            with contextlib.suppress(RunError):
                manifests.load((run_dir.root / commit.path).absolute(), commit)
                return True
    return False


def intact_copy(
    run_dir: RunDir, commit: Commit, replica: RunPath, *, limit: BandwidthLimit, clock: Clock
) -> str | None:
    """Returns the directory of a step's copy in the replica if every byte of it is intact."""
    try:
        progress = replica_files.read_progress(run_dir)
        target = RunDir(replica)
        there = run_log.fold(run_log.read_records(target.log)).committed
    except RunError:
        return None
    if progress is None or progress.path != str(replica) or commit not in there:
        return None
    result = verify(target, commit, limit=limit, clock=clock)
    is_intact = isinstance(result, VerificationReport) and not result.problems
    return str(replica / commit.path) if is_intact else None


def _drop_cached(step_dir: RunPath) -> None:
    with contextlib.suppress(OSError):  # It is pruned meanwhile, or storage fails.
        for path in files.cached_files(step_dir):
            files.drop_page_cache(path)
