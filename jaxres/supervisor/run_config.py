"""The config of a run: what is asked for, held against what the run was started with."""

from __future__ import annotations

from collections.abc import Sequence

from jaxres import config as configs
from jaxres.config import Loaded
from jaxres.faults import ConfigError, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import BucketPath, Place, place


def target_of(words: Sequence[str], *, usage: str) -> tuple[Place, list[str]]:
    """Returns the config file or run directory that a command's words name, and the overrides.

    Raises:
      UsageError: unknown flags, or not exactly one file or directory.
    """
    targets = [word for word in words if "=" not in word]
    unknown = [word for word in targets if word.startswith("-")]
    if unknown:
        raise UsageError(f"{unknown[0]}: unknown flag\n{usage}")
    if len(targets) != 1:
        given = " ".join(targets) or "nothing"
        raise UsageError(f"expected one config file or run directory, got {given}\n{usage}")
    try:
        return place(targets[0]), [word for word in words if "=" in word]
    except ValueError as error:
        raise UsageError(f"{targets[0]}: {error}") from error


def resolve(target: Place, overrides: Sequence[str]) -> tuple[Loaded, RunDir]:
    """Returns the config and the run directory; a recorded run must have the same trajectory."""
    if isinstance(target, BucketPath) or target.is_dir():
        run_dir = RunDir(target)
        if files.read(run_dir.config) is None:
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
    started = run_log.fold(run_log.read_records(run_dir.log)).starts
    if started:
        recorded = configs.load_recorded(_record(run_dir, started[0].attempt), ()).config
        configs.check_same(recorded, loaded.config, run_dir.root, origins=loaded.origins)
    return loaded, run_dir


def _record(run_dir: RunDir, attempt: int) -> Place:
    """Returns the config that the first attempt to start has trained with.

    Its own copy, since config.yaml may be edited, or come late from an attempt that was fenced.
    """
    copy = run_dir.attempt(attempt) / "config.yaml"
    for path in (copy, run_dir.config):
        if files.read(path) is not None:
            return path
    raise ConfigError(
        f"{run_dir.root}: this run has started, and the config that it was started with is in "
        f"neither {copy} nor {run_dir.config}. Restore one of them from a copy."
    )


def _newest_config(run_dir: RunDir) -> Place:
    """Returns the config of the last attempt that trained: free keys may have changed since the
    first, and one of an attempt that never got to train may be what is wrong with it.
    """
    starts = run_log.fold(run_log.read_records(run_dir.log)).starts
    return _record(run_dir, starts[-1].attempt) if starts else run_dir.config
