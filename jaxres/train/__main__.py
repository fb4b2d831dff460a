"""The way in: `python -m jaxres.train CONFIG.yaml|RUN_DIR [section.field=value ...]`; no jax.

Reads the config, holds it against the run directory, takes the run over by a claim, fixes what
decides bits (NPROC), and only then imports the worker.
"""

from __future__ import annotations

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
from jaxres import runlog, storage
from jaxres.clock import SystemClock
from jaxres.config import Loaded, RunConfig
from jaxres.faults import ConfigError, Exit, TypedEnd, UsageError
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, Line, RunLog

USAGE = """\
usage: python -m jaxres.train CONFIG.yaml [section.field=value ...]   start a run, or go on with it
       python -m jaxres.train RUN_DIR [section.field=value ...]       go on with a recorded run

The same command starts a run and resumes it, also after kill -9, from the newest committed step.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        sys.stdout.write(USAGE + "\n" + configs.describe() + "\n")
        return Exit.DONE
    sys.excepthook = _leave_as_bug
    try:
        return _train(*_parse(arguments))
    except TypedEnd as end:
        sys.stdout.flush()
        sys.stderr.write(_message(end))
        return end.exit
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on from the newest committed step\n")
        return 130


def _message(end: TypedEnd) -> str:
    """Returns what a person reads: the message, and the exit code once."""
    text = str(end).rstrip()
    if f"(exit {end.exit.value})" in text:
        return f"{text}\n"
    before = "\n" if "\n" in text else " "
    return f"{text}{before}(exit {end.exit.value} {end.exit.name})\n"


def _leave_as_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ends the process for sure: an ordinary exit may wait minutes for other threads and hosts."""
    traceback.print_exception(kind, error, trace)
    sys.stderr.write(f"this is a bug, in jaxres or in custom code (exit {Exit.BUG.value} BUG)\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.BUG)


def _parse(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    words = [word for word in arguments if "=" not in word]
    overrides = [word for word in arguments if "=" in word]
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]}: unknown flag\n{USAGE}")
    if len(words) != 1:
        given = "nothing" if not words else " ".join(words)
        raise UsageError(f"expected one config file or run directory, got {given}\n{USAGE}")
    return Path(words[0]), overrides


def _train(target: Path, overrides: Sequence[str]) -> int:
    loaded, run_dir = _resolve(target, overrides)
    config = loaded.config
    records = runlog.read_records(run_dir.log)
    line = runlog.fold(records)
    if line.step >= config.train.steps:
        sys.stdout.write(
            f"{run_dir.root}: step {line.step} of {config.train.steps} is committed already; "
            "nothing to do. A new run: another run.seed, run.dir or config.\n"
        )
        return Exit.DONE
    claim = _claim(config, line)
    log = RunLog.claim(run_dir.log, claim, after=records, clock=SystemClock())
    text = configs.dump_yaml(config).encode()
    # Only the owner writes: whoever lost the race for the claim must not leave its config here.
    if not line.starts:
        storage.replace(run_dir.config, text)
    storage.make_dir(run_dir.attempt(claim.attempt))
    storage.replace(run_dir.attempt(claim.attempt) / "config.yaml", text)
    os.environ["NPROC"] = str(claim.threads)
    from jaxres.train.worker import work

    return work(config, run_dir, log, claim)


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
    sys.stdout.flush()
    sys.stderr.flush()
    if code == Exit.DONE:
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
