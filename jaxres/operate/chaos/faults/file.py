"""Scenarios that damage or delete files of a run on a disk, most of them while it is stopped.

Each function is called while every worker holds after the planned step, and returns what it did.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from jaxres.exit_codes import ExitCode, exit_name
from jaxres.operate.chaos import damage, leftovers
from jaxres.operate.chaos.held_run import HeldRun
from jaxres.operate.chaos.schedule import ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog import attempt_history, replica_files
from jaxres.runlog.paths import RunDir


def damage_step(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, damages its newest checkpoint, and starts it again."""
    if problem := run.wait_commit(fault.step) or run.stop(number):
        return Injection(fault, problem=problem)
    newest = run.history().newest
    if newest is None:
        return Injection(fault, problem="no step was committed")
    chance = random.Random(f"{fault}")
    did = damage.DAMAGES[fault.scenario](run.disk, newest, chance)
    run.mark_fault()
    run.resume(number)
    return Injection(fault, did, damaged_step=newest.step)


def tear_lines(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, appends half a line to its logs, and starts it again."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    run_dir, attempt = run.run_dir, run.history().attempt
    logs = [run_dir.metrics(attempt), run_dir.events(attempt, 0), run_dir.supervisor_events]
    ends = {p: damage.tear_last_line(p) for p in logs if isinstance(p, Path)}
    torn = [(path, end) for path, end in ends.items() if end is not None]
    run.torn += torn
    run.mark_fault()
    run.resume(number)
    names = ", ".join(path.name for path, _ in torn)
    if not names:
        return Injection(fault, problem="the run has no log with a line")
    return Injection(fault, f"half a line in {names}")


def lose_region(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Kills the run, deletes its directory, and resumes in the replica."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    newest, replica = run.history().step, RunDir(run.folder("replica"))

    def is_replicated() -> bool:
        marker = replica_files.read_marker(replica)
        return marker is not None and marker.step >= newest

    if not run.wait_limited(is_replicated):
        return Injection(fault, problem=f"the replica does not have step {newest}")
    root = run.disk
    run.mark_fault()
    run.runner.stop()
    if left := leftovers.wait_gone(root, run.runner.clock):
        return Injection(fault, problem=f"processes outlive the supervisor: {left}")
    shutil.rmtree(root)
    run.name = replica.root.name
    run.start()
    return Injection(fault, f"{root.name} is deleted")


def lose_log(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, deletes its log, and resumes as the message of the next start says."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    run.mark_fault()
    shutil.rmtree(run.disk / "log")
    run.resume(number)
    refused = run.runner.wait_exit()
    unkept = "" if refused == ExitCode.UNRESTORABLE else f"a start exited with {exit_name(refused)}"
    if refused == ExitCode.DONE:  # It has trained all steps again, without a log.
        return Injection(fault, "log/ is deleted", unkept=unkept)
    run.runner.start_verb(run.name, ["checkpoints", "adopt", str(run.disk), "--yes"])
    adopted = run.runner.wait_exit()
    if adopted != ExitCode.DONE:
        unkept = unkept or f"checkpoints adopt exited with {exit_name(adopted)}"
    run.set_aside.add(run.history().attempt)  # Adopting is an attempt that does not train.
    run.start()
    return Injection(fault, "log/ is deleted", unkept=unkept)


def damage_cache(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, cuts every compiled program in half, and starts it again."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    folder = run.folder("compiled")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in paths:
        _truncate(path)
    run.mark_fault()
    run.resume(number)
    if not paths:
        return Injection(fault, problem="the run has cached no compiled program")
    return Injection(fault, f"{len(paths)} files of the cache are cut in half")


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def damage_data(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, flips a bit in each block of its cached corpus, and starts it again."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    attempt = run.history().attempt
    paths = sorted(run.folder("data").glob("corpora/*/**/tokens.bin"))
    blocks = sum(damage.flip_blocks(path) for path in paths)
    run.mark_fault()
    run.resume(number)
    if not blocks:
        return Injection(fault, problem="the run has cached no corpus: data.source is no text")
    seconds = run.wait_trained(attempt, number)
    read = attempt_history.read(run.run_dir, is_alive=True)
    found = [one for one in read if one.attempt > attempt and one.exit == ExitCode.STORAGE]
    run.set_aside |= {one.attempt for one in found}
    return Injection(
        fault,
        f"a bit of each of {blocks} blocks is flipped",
        recovery_seconds=seconds,
        unkept="" if found else "no attempt has found the damage",
    )
