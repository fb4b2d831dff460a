"""The door: `python -m jaxres.train CONFIG.yaml|RUN_DIR [section.field=value ...]`; no jax.

Reads the config, owns the run directory, takes the run over by a claim, fixes what decides bits
(NPROC), starts the worker behind it, answers signals at once, and turns the worker's end into the
exit code. `--inline` runs the worker in this process: same codes, no deadlines.
"""

from __future__ import annotations

from jaxres.supervise import signals

if __name__ == "__main__":
    signals.hold()  # First of all: a signal during the other imports waits for `main`.

import dataclasses
import importlib.metadata
import os
import platform
import secrets
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from jaxres import config as configs
from jaxres import faults, runlog, screen, storage
from jaxres.beat import Leaving
from jaxres.clock import SystemClock
from jaxres.config import Loaded, RunConfig
from jaxres.faults import ConfigError, Exit, TypedEnd, UsageError
from jaxres.hosts import ALONE
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, Line, RunLog, Stop
from jaxres.supervise.owner import Owner
from jaxres.supervise.supervisor import Ended, supervise
from jaxres.train import memory

USAGE = """\
usage: python -m jaxres.train CONFIG.yaml [section.field=value ...]   start a run, or go on with it
       python -m jaxres.train RUN_DIR [section.field=value ...]       go on with a recorded run

The same command starts a run and resumes it, also after kill -9, from the newest committed step.
Ctrl-C or `touch RUN_DIR/stop`: save and stop (76); SIGTERM: save and stop (75); a second one ends
at once. `touch RUN_DIR/save`: one extra checkpoint. `kill -USR1`: stacks of all threads.
--inline: train in this very process, for debuggers and notebooks; no deadlines.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        sys.stdout.write(USAGE + "\n" + configs.describe() + "\n")
        return Exit.DONE
    sys.excepthook = _leave_as_bug
    try:
        signals.raise_stops()
        return _train(*_parse(arguments))
    except TypedEnd as end:
        screen.flush()
        screen.tell(faults.message(end.exit, str(end)))
        return end.exit


def _leave_as_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ends the door with its own code; the worker is gone by now."""
    screen.tell("".join(traceback.format_exception(kind, error, trace)))
    screen.tell(f"this is a bug in jaxres (exit {Exit.BUG.value} BUG)\n")
    leave(Exit.BUG)


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str], bool]:
    inline = "--inline" in arguments
    arguments = [word for word in arguments if word != "--inline"]
    words = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]}: unknown flag\n{USAGE}")
    if len(words) != 1:
        given = "nothing" if not words else " ".join(words)
        raise UsageError(f"expected one config file or run directory, got {given}\n{USAGE}")
    return Path(words[0]), overrides, inline


def _train(target: Path, overrides: Sequence[str], inline: bool) -> int:
    loaded, run_dir = _resolve(target, overrides)
    config = loaded.config
    if _is_done(run_dir, config):
        return Exit.DONE
    clock = SystemClock()
    with Owner(run_dir, clock=clock) as owner:
        signals.hold()  # Until somebody can answer them: the attempt is to end on record.
        records = runlog.read_records(run_dir.log)
        claim = _claim(config, runlog.fold(records))
        if inline:
            _refuse_other_threads(claim)
        log = RunLog.claim(run_dir.log, claim, after=records, clock=clock)
        _record_config(config, run_dir, claim, is_first=not runlog.fold(records).starts)
        if (stopped := _stop_that_was_asked(run_dir, claim)) is not None:
            ended = stopped
        elif inline:
            ended = _inline(config, run_dir, log, claim)
        else:
            ended = supervise(
                _worker_command(run_dir, claim),
                run_dir=run_dir,
                attempt=claim.attempt,
                last_seq=len(records) + 1,
                limits=config.deadlines,
                owner=owner,
                clock=clock,
                env=os.environ | {"NPROC": str(claim.threads)},
            )
            if ended.code == Exit.OUT_OF_MEMORY and ended.to_be_said:
                advice = memory.host_advice(config, ended.reason)
                ended = dataclasses.replace(ended, reason=advice)
        if ended.on_record:
            _put_down(log, Leaving(ended.code, ended.reason, ended.committed))
    if ended.to_be_said:
        screen.tell(faults.message(ended.code, ended.reason))
    return ended.code


def _is_done(run_dir: RunDir, config: RunConfig) -> bool:
    step = runlog.fold(runlog.read_records(run_dir.log)).step
    if step < config.train.steps:
        return False
    sys.stdout.write(
        f"{run_dir.root}: step {step} of {config.train.steps} is committed already; "
        "nothing to do. A new run: another run.seed, run.dir or config.\n"
    )
    return True


def _record_config(config: RunConfig, run_dir: RunDir, claim: Claim, *, is_first: bool) -> None:
    """Writes the resolved config; only the owner does, never who lost the race for the claim."""
    text = configs.dump_yaml(config).encode()
    if is_first:
        storage.replace(run_dir.config, text)
    storage.make_dir(run_dir.attempt(claim.attempt))
    storage.replace(run_dir.attempt(claim.attempt) / "config.yaml", text)


def _stop_that_was_asked(run_dir: RunDir, claim: Claim) -> Ended | None:
    """Honours a `stop` file that lies there already; it never bars the start after this one."""
    if not run_dir.request("stop").exists():
        return None
    storage.move(run_dir.request("stop"), run_dir.attempt(claim.attempt) / "stop")
    reason = f"{run_dir.request('stop')} was there at the start; the next start goes on"
    return Ended(Exit.STOPPED, reason, committed=False, to_be_said=True)


def _worker_command(run_dir: RunDir, claim: Claim) -> list[str]:
    command = [sys.executable, "-m", "jaxres.train.worker", str(run_dir.root)]
    return [*command, "--attempt", str(claim.attempt), "--parent", str(os.getpid())]


def _inline(config: RunConfig, run_dir: RunDir, log: RunLog, claim: Claim) -> Ended:
    """Trains in this process, for debuggers and notebooks."""
    os.environ["NPROC"] = str(claim.threads)
    from jaxres.train import worker
    from jaxres.train.requests import Requests

    with Requests(alone=True) as requests:
        worker.catch_bugs(run_dir, claim.attempt, ALONE, tell=lambda word: _put_down(log, word))
        requests.before_early_end(
            lambda exit: _put_down(log, Leaving(exit, "before the first finished step", False))
        )
        leaving = worker.work(config, run_dir, log, claim, requests=requests)
    on_record = leaving.exit != Exit.FENCED
    said = leaving.exit != Exit.DONE
    return Ended(leaving.exit, leaving.reason, leaving.committed, on_record, to_be_said=said)


def _put_down(log: RunLog, leaving: Leaving) -> None:
    """Records the end; where that can't be done, says so, and the end keeps its code."""
    try:
        log.append(Stop(exit=leaving.exit, reason=leaving.reason, committed=leaving.committed))
    except (TypedEnd, OSError) as error:
        screen.tell(f"jaxres: the end could not be recorded: {error}\n")


def _refuse_other_threads(claim: Claim) -> None:
    here = len(os.sched_getaffinity(0))
    if claim.threads != here:
        raise ConfigError(
            f"--inline: this run computes with {claim.threads} CPU threads, this process would "
            f"with {here}, which changes bits. Leave --inline out: the door sets the number."
        )


def _resolve(target: Path, overrides: Sequence[str]) -> tuple[Loaded, RunDir]:
    """Returns the config and the run directory; a recorded run must have the same trajectory."""
    if target.is_dir():
        run_dir = RunDir(target)
        if storage.read(run_dir.config) is None:
            raise UsageError(
                f"{target}: no config.yaml here, so this is not a run directory. Give a config "
                "file (configs/quickstart.yaml) or the directory of a run."
            )
        loaded = configs.load_recorded(_newest_config(run_dir), overrides)
        elsewhere = loaded.config.run.dir
        if elsewhere is not None and elsewhere.absolute() != target.absolute():
            raise ConfigError(
                f"run.dir={elsewhere}: the run directory is given already, as {target}. Leave "
                "run.dir out, or give the config file instead of the directory."
            )
    else:
        loaded = configs.load(target, overrides)
        run_dir = RunDir(configs.run_dir(loaded.config, loaded.name))
    started = runlog.fold(runlog.read_records(run_dir.log)).starts
    if started:
        recorded = configs.load_recorded(_record(run_dir, started[0].attempt), ()).config
        configs.check_same(recorded, loaded.config, run_dir.root, origins=loaded.origins)
    return loaded, run_dir


def _record(run_dir: RunDir, attempt: int) -> Path:
    """Returns the config that the first attempt to start has trained with.

    Its own copy, since config.yaml may be edited, or come late from an attempt that was fenced.
    """
    copy = run_dir.attempt(attempt) / "config.yaml"
    for path in (copy, run_dir.config):
        if storage.read(path) is not None:
            return path
    raise ConfigError(
        f"{run_dir.root}: this run has started, and the config that it was started with is in "
        f"neither {copy} nor {run_dir.config}. Restore one of them from a copy."
    )


def _newest_config(run_dir: RunDir) -> Path:
    """Returns the config of the last attempt that trained: free keys may have changed since the
    first, and one of an attempt that never got to train may be what is wrong with it.
    """
    starts = runlog.fold(runlog.read_records(run_dir.log)).starts
    return _record(run_dir, starts[-1].attempt) if starts else run_dir.config


def _claim(config: RunConfig, line: Line) -> Claim:
    cores = len(os.sched_getaffinity(0))
    return Claim(
        attempt=line.attempt + 1,
        host=socket.gethostname(),
        pid=os.getpid(),
        boot_id=_first_line(Path("/proc/sys/kernel/random/boot_id")),
        nonce=secrets.token_hex(8),
        coordinator=None,
        num_hosts=1,
        threads=line.claims[0].threads if line.claims else cores,
        versions=_versions(),
        fingerprint={
            "cpu": _cpu_model(),
            "machine": platform.machine(),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        },
        trajectory=configs.digest(config),
    )


def _versions() -> dict[str, str]:
    """Returns the versions of the libraries that decide bits, without importing them."""
    names = ("jaxres", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _first_line(path: Path) -> str:
    return path.read_text().splitlines()[0]


def leave(code: int) -> NoReturn:
    """Ends the process for sure: after a failed save Orbax's threads would hold it for minutes."""
    screen.flush()
    os._exit(code)


if __name__ == "__main__":
    screen.never_fail()
    leave(main(sys.argv[1:]))
