"""`jaxres checkpoints adopt`: rebuilds a lost, old or damaged run log from the checkpoints.

Each step directory has a copy of the log up to its save, of a long log without the records that
decided nothing any more (runlog/log_summary.py). The longest copy of a valid step gives the missing
records, byte for byte, and the others' places are taken (`Dropped`); the step itself is then
committed by a new attempt. Records that can't be kept are moved aside; no file is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import CheckpointDamaged
from jaxres.checkpoint.read.verify import verify_step
from jaxres.clock import Clock
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, RunError, Unrestorable, UsageError, command_line
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import DROPPED, Record
from jaxres.runlog.run_log import AttemptEnded, Commit, Prune, Quarantine, RunLog, file_name
from jaxres.runlog.step_dirs import LOG_COPY, MANIFEST, StepDir
from jaxres.storage import files
from jaxres.supervisor import attempt_runner
from jaxres.supervisor.process.worker_group import WorkerGroup
from jaxres.supervisor.run_config import resolve_run
from jaxres.supervisor.run_lock import RunLock

ASIDE = "log-replaced"
"""Folder in the run directory for log files that could not be kept."""

REASON = "checkpoints adopt: the run log was rebuilt; nothing was trained"


@dataclass(frozen=True)
class Candidate:
    """A complete step directory with a copy of the log."""

    found: StepDir
    records: Mapping[int, bytes]
    """The encoded records of the copy, by their number."""

    @property
    def length(self) -> int:
        """Number of records that the log had when the step was saved."""
        return max(self.records, default=0)


@dataclass(frozen=True)
class RebuildPlan:
    """Changes by a rebuild to the folder of the log."""

    write: Mapping[str, bytes]
    """Name -> bytes of the records that are missing or damaged."""
    move_aside: tuple[str, ...]
    """Names of files that are damaged, or that follow a missing record."""
    commit: Commit | None
    """The step whose copy was used; None: the log records it already."""
    source: str
    """Name of its directory."""
    num_records: int
    """Length of the rebuilt log."""


def plan_rebuild(stored: Mapping[str, bytes], candidate: Candidate, commit: Commit) -> RebuildPlan:
    """Plans the rebuild of the log from its stored files and the longest copy. Pure.

    Args:
      stored: name -> bytes of the files in the folder of the log.
      candidate: the copy to use.
      commit: the commit of the candidate's step.

    Raises:
      ConfigError: a readable record differs from the copy, so they belong to different runs.
    """
    write: dict[str, bytes] = {}
    aside: list[str] = []
    records: list[Record] = []
    for number in range(1, candidate.length + 1):
        name, data = file_name(number), candidate.records.get(number)
        present = None if name not in stored else _readable(name, stored[name])
        if present is None:
            write[name] = DROPPED if data is None else data
            aside += [name] if name in stored else []
        elif data is not None and stored[name] != data:
            raise ConfigError(
                f"log/{name} is not the record that {candidate.found.name}/{LOG_COPY} has: the "
                "log and the checkpoints belong to different runs. Move one of them to "
                "another folder. Nothing was changed."
            )
        records.append(present or _decode(name, write[name]))
    number = candidate.length + 1
    while (record := _readable(file_name(number), stored.get(file_name(number), b""))) is not None:
        records.append(record)
        number += 1
    kept = {file_name(record.seq) for record in records}
    aside += sorted(set(stored) - kept)
    is_recorded = commit.path in run_log.fold(records).paths
    return RebuildPlan(
        write,
        tuple(aside),
        None if is_recorded else commit,
        candidate.found.name,
        len(records),
    )


def _decode(name: str, data: bytes) -> Record:
    return Record.decode(data, path=Path(name))


def _readable(name: str, data: bytes) -> Record | None:
    try:
        return _decode(name, data)
    except RunError:
        return None


def adopt(run_dir: RunDir, *, yes: bool, clock: Clock, env: Mapping[str, str]) -> str:
    """Rebuilds the log and returns a description; without `yes` only describes the changes.

    Raises:
      UsageError: there are no step directories.
      Unrestorable: no complete, valid step has a copy of the log.
      Fenced: the run is live.
    """
    if not step_dirs.listed(run_dir.checkpoints):
        raise UsageError(f"{run_dir.checkpoints}: no checkpoints here. Give a run directory.")
    with RunLock(run_dir, clock=clock) as lock:
        candidate, commit = _longest_valid(run_dir)
        stored = files.list_names(run_dir.log)
        contents = files.read_all([run_dir.log / name for name in stored])
        plan = plan_rebuild(
            {name: data or b"" for name, data in zip(stored, contents, strict=True)},
            candidate,
            commit,
        )
        if not (plan.write or plan.move_aside or plan.commit):
            return f"{run_dir.log}: all {plan.num_records} records are there; nothing to do.\n"
        if not yes:
            return (
                f"{_summary(run_dir, plan)}"
                "nothing was changed; rerun the same command with --yes to do so\n"
            )
        _apply(run_dir, plan)
        _commit(run_dir, plan, lock=lock, env=env)
    resume = command_line("python -m jaxres.train", run_dir.root)
    return f"{_summary(run_dir, plan)}Done. `{resume}` resumes it.\n"


def _longest_valid(run_dir: RunDir) -> tuple[Candidate, Commit]:
    """Returns the valid step with the longest copy of the log, and its commit.

    Of copies of the same length the one of the newest step is used.
    """
    candidates = [
        Candidate(found, {Record.seq_of(line): line for line in data.splitlines()})
        for found in step_dirs.listed(run_dir.checkpoints)
        if step_dirs.is_complete(run_dir.checkpoints / found.name)
        and (data := files.read(run_dir.checkpoints / found.name / LOG_COPY)) is not None
    ]
    candidates.sort(key=lambda c: (c.length, c.found.step), reverse=True)
    evidence: list[str] = []
    for candidate in candidates:
        step_dir = (run_dir.checkpoints / candidate.found.name).absolute()
        commit = _commit_of(run_dir, candidate.found)
        findings = verify_step(step_dir, commit)
        if not findings.problems:
            return candidate, commit
        evidence.append(f"\n  {candidate.found.name}: {findings.evidence}")
    raise Unrestorable(
        f"{run_dir.checkpoints}: no complete and valid step has a copy of the log ({LOG_COPY}), so "
        "the log can't be rebuilt. Restore the folder log/ from a copy. Steps that an older "
        f"version has saved have no copy. Nothing was changed.{''.join(evidence)}"
    )


def _commit_of(run_dir: RunDir, found: StepDir) -> Commit:
    """Returns the commit record of a complete step directory, as the killed save would have."""
    step_dir = run_dir.checkpoints / found.name
    data = files.read(step_dir / MANIFEST) or b""
    commit = Commit(
        step=found.step,
        path=f"checkpoints/{found.name}",
        manifest=manifests.digest_of(data),
        bytes=len(data),
    )
    try:
        manifest = manifests.load(step_dir.absolute(), commit)
        facts = manifests.read_progress(step_dir.absolute(), commit, manifest)
        heldout_data = manifests.read_heldout_data(step_dir.absolute(), commit, manifest)
    except CheckpointDamaged:
        return commit
    return replace(
        commit,
        bytes=len(data) + sum(info.size for info in manifest.files.values()),
        heldout_loss=facts.get("heldout_loss"),
        evaluated_step=facts.get("evaluated_step", 0),
        heldout_data=heldout_data,
    )


def _apply(run_dir: RunDir, plan: RebuildPlan) -> None:
    """Moves files aside and writes the missing records; a kill leaves a log that is refused.

    For the first one comes last, and a log without it has a gap.
    """
    files.make_dir(run_dir.log)
    if plan.move_aside:
        files.make_dir(run_dir.root / ASIDE)
    for name in plan.move_aside:
        free = _free_name(run_dir, name)
        files.move(run_dir.log / name, run_dir.root / ASIDE / free)
    places = [run_dir.log / name for name, data in plan.write.items() if data == DROPPED]
    files.create_copies(places, DROPPED)
    for name, data in reversed(list(plan.write.items())):
        if data != DROPPED:
            files.create(run_dir.log / name, data)


def _free_name(run_dir: RunDir, name: str) -> str:
    taken = files.list_names(run_dir.root / ASIDE)
    names = [name, *(f"{name}.{number}" for number in range(1, len(taken) + 2))]
    return next(candidate for candidate in names if candidate not in taken)


def _commit(run_dir: RunDir, plan: RebuildPlan, *, lock: RunLock, env: Mapping[str, str]) -> None:
    """Commits the step by a new attempt, whose claim fences every process of the lost ones.

    Complete steps that the log still does not explain are quarantined, which keeps their files.
    Committed steps whose directories are gone are recorded as pruned: that record was lost.
    """
    _, log = attempt_runner.claim_attempt(
        resolve_run(run_dir.root, ())[0].config,
        lock,
        job=WorkerGroup(),
        env=env,
        known=plan.num_records,
        attempt=_newest_attempt(run_dir) + 1,
    )
    if plan.commit is not None:
        log.append(plan.commit)
    history = log.history()
    for found in step_dirs.unexplained(history, step_dirs.unrecorded(run_dir, history)):
        evidence = f"unrecorded when the log was rebuilt from {plan.source}"
        _quarantine(log, _commit_of(run_dir, found), evidence)
    present = {found.name for found in step_dirs.listed(run_dir.checkpoints)}
    gone = [c.step for c in log.history().committed if c.path.rpartition("/")[2] not in present]
    if gone:
        log.append(Prune(steps=tuple(gone)))
    log.append(AttemptEnded(exit=ExitCode.STOPPED, reason=REASON, committed=True))


def _quarantine(log: RunLog, commit: Commit, evidence: str) -> None:
    """Quarantines an unrecorded step; a commit of the same step stays in force."""
    same_step = [other for other in log.history().committed if other.step == commit.step]
    log.append(commit)
    log.append(Quarantine(step=commit.step, path=commit.path, evidence=evidence))
    for other in same_step:
        log.append(other)


def _newest_attempt(run_dir: RunDir) -> int:
    """Returns the newest attempt that has left a record, a folder or a step directory."""
    history = run_log.fold(run_log.read_records(run_dir.log))
    folders = files.list_names(run_dir.attempts)
    return max(
        history.attempt,
        *(int(name) for name in folders if name.isdecimal()),
        *(found.attempt for found in step_dirs.listed(run_dir.checkpoints)),
    )


def _summary(run_dir: RunDir, plan: RebuildPlan) -> str:
    lines = [
        f"{run_dir.log}: {_count(plan.write)} from the copy in {plan.source}/{LOG_COPY}, of "
        f"{plan.num_records} in all"
    ]
    if plan.move_aside:
        lines.append(f"moved to {run_dir.root / ASIDE}/: {', '.join(plan.move_aside)}")
    if plan.commit is not None:
        lines.append(f"step {plan.commit.step} ({plan.source}) is verified and gets a new record")
    return "".join(f"{line}\n" for line in lines)


def _count(names: Mapping[str, bytes]) -> str:
    return f"{len(names)} record{'s' * (len(names) != 1)}"
