"""Resolves the config of a run, checks it against the one it was started with, and records it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxres import config as configs
from jaxres.config import Loaded, RunConfig
from jaxres.faults import ConfigError, StorageRefused, UsageError
from jaxres.runlog import replica_files, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import OWN_LOOP
from jaxres.secret_values import redact_words
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote, parse_path, run_root
from jaxres.supervisor.process import worker_group
from jaxres.telemetry import stdio


def parse_target(arguments: Sequence[str], *, command: str) -> tuple[RunPath, list[str]]:
    """Returns the config file or run directory among a command's arguments, and the overrides.

    `command` is named in messages, as the command that prints the usage with --help.

    Raises:
      UsageError: unknown flags, or not exactly one file or directory.
    """
    overrides = [argument for argument in arguments if _is_override(argument)]
    targets = [argument for argument in arguments if not _is_override(argument)]
    unknown = [target for target in targets if target.startswith("-")]
    if unknown:
        raise UsageError(f"{redact_words(unknown[0])}: unknown flag (usage: `{command} --help`)")
    if len(targets) != 1:
        given = redact_words(" ".join(targets)) or "nothing"
        raise UsageError(
            f"expected one config file or run directory, got {given} (usage: `{command} --help`)"
        )
    tell_repeated(overrides)
    try:
        return parse_path(os.path.expanduser(targets[0])), overrides
    except ValueError as error:
        raise UsageError(f"{redact_words(targets[0])}: {error}") from error


def tell_repeated(overrides: Sequence[str]) -> None:
    """Prints a warning for each key that a command line gives twice, with different values."""
    for line in configs.repeated(overrides):
        stdio.warn(line)


def _is_override(argument: str) -> bool:
    """Whether an argument is `section.field=value`, and not a path that contains `=`."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in name


def resolve_run(target: RunPath, overrides: Sequence[str]) -> tuple[Loaded, RunDir]:
    """Returns the config and the run directory; a recorded run must have the same trajectory."""
    if is_remote(target) or _is_folder(target):
        run_dir = RunDir(recorded_root(target))
        replica_files.prepare_start(run_dir)
        if files.read(run_dir.config) is None:
            raise UsageError(
                f"{target}: no config.yaml here, so this is not a run directory. Give a config "
                "file (configs/quickstart.yaml) or the directory of a run."
            )
        records = run_log.read_records(run_dir.log)
        history = run_log.fold(records)
        _tell_edited_root(run_dir, history.starts)
        loaded = configs.load_recorded(_newest_config_path(run_dir, history.starts), overrides)
        configured_dir = loaded.config.run.dir
        if configured_dir is not None and configured_dir != run_dir.root:
            raise ConfigError(
                f"run.dir={configured_dir}: the run directory is given already, as {target}. Leave "
                "run.dir out, or give the config file instead of the directory."
            )
    else:
        loaded = configs.load(target, overrides)
        run_dir = find_run_dir(loaded)
        _refuse_other_case(run_dir.root)
        replica_files.prepare_start(run_dir)
        records = run_log.read_records(run_dir.log)
        history = run_log.fold(records)
    if loaded.config.run.must_exist and not records:
        raise ConfigError(
            f"{run_dir.root}: no run is here, and run.must_exist is true. Is the disk mounted? "
            "Mount it, or start the run with run.must_exist=false."
        )
    if history.claims and history.claims[-1].trajectory == OWN_LOOP:
        raise ConfigError(
            f"{run_dir.root}: has the checkpoints of a loop of its own (jaxres.checkpoints or "
            "jaxres.attempt), with which this config can't go on. Give another run.dir."
        )
    started = history.starts
    if started:
        path = _record(run_dir, started[0].attempt)
        recorded = configs.load_recorded(path, ()).config
        _refuse_edited(path, recorded, history, attempt=started[0].attempt)
        configs.check_same(recorded, loaded.config, run_dir.root, origins=loaded.origins)
    return loaded, run_dir


def _refuse_other_case(root: RunPath) -> None:
    """Raises ConfigError if the directory is that of a run whose name differs only in case.

    Some disks (macOS, exFAT, SMB) have one directory for both names.
    """
    if is_remote(root) or not files.exists(root):
        return
    names = []
    with contextlib.suppress(StorageRefused):  # A folder that may not be listed names no other run.
        names = files.list_names(root.parent)
    for name in names:
        if root.name not in names and name.casefold() == root.name.casefold():
            raise ConfigError(
                f"{root}: on this disk that is {root.parent / name}, because it ignores upper and "
                "lower case. Give that name to go on with that run, or the new run another name "
                "(run.name, run.dir)."
            )


def _refuse_edited(
    path: RunPath, recorded: RunConfig, history: run_log.RunHistory, *, attempt: int
) -> None:
    """Raises ConfigError if a recorded config is not the one whose digest the attempt's claim has.

    Another version of jaxres may compute another digest.
    """
    claim = next((one for one in history.claims if one.attempt == attempt), None)
    if claim is None or claim.versions.get("jaxres") != worker_group.versions()["jaxres"]:
        return
    digests = configs.digests(recorded)
    if claim.trajectory not in digests:
        raise ConfigError(
            f"{path}: was edited, or is damaged: its trajectory has the digest "
            f"{digests[-1][:16]}, and attempt {attempt} was started with {claim.trajectory[:16]}. "
            "Restore the file from a copy. To train on with other settings, make a branch: "
            "`jaxres branch`."
        )


def _tell_edited_root(run_dir: RunDir, starts: Sequence[run_log.Record]) -> None:
    """Prints a warning if config.yaml was changed since the run wrote it: nothing reads it then.

    It has the config of the first attempt that trained. An error would end a job at its restart.
    """
    if not starts:
        return
    first = run_dir.attempt(starts[0].attempt) / "config.yaml"
    if files.read(first) in (None, files.read(run_dir.config)):
        return
    try:
        is_same = (
            configs.load_recorded(run_dir.config).config == configs.load_recorded(first).config
        )
    except ConfigError:
        is_same = False
    if not is_same:
        stdio.eprint(
            f"WARNING: {run_dir.config} differs from {first}, with which the run was started: "
            "edits of it have no effect. Give changes as arguments (section.field=value).\n"
        )


def find_run_dir(loaded: Loaded) -> RunDir:
    """Returns the run directory of a config; a run keeps the directory that it was started in."""
    *earlier, current = map(RunDir, configs.run_dirs(loaded.config, loaded.name))
    return next((run_dir for run_dir in earlier if files.exists(run_dir.root)), current)


def newest_config(run_dir: RunDir) -> RunConfig:
    """Returns the config of the last attempt that trained."""
    return configs.load_recorded(newest_config_path(run_dir)).config


def recorded_root(path: RunPath) -> RunPath:
    """Returns the normal form of the path of a run directory that was given as an argument."""
    try:
        return run_root(path)
    except ValueError as error:
        raise ConfigError(f"RUN_DIR: {error}") from error


def _is_folder(target: Path) -> bool:
    with files.typed_errors(target):  # A name may be too long.
        return files.is_folder(target)


def _record(run_dir: RunDir, attempt: int) -> RunPath:
    """Returns the path of the config that an attempt has trained with.

    This is the attempt's own copy, because config.yaml may have been edited, or written late by an
    attempt that was fenced.
    """
    copy = run_dir.attempt(attempt) / "config.yaml"
    for path in (copy, run_dir.config):
        if files.read(path) is not None:
            return path
    raise ConfigError(
        f"{run_dir.root}: this run has started, and the config that it was started with is in "
        f"neither {copy} nor {run_dir.config}. Restore one of them from a copy."
    )


def newest_config_path(run_dir: RunDir) -> RunPath:
    """Returns the path of the config of the last attempt that trained.

    Free keys may have changed since the first attempt, and the config of an attempt that never
    trained may be the reason for that.
    """
    return _newest_config_path(run_dir, run_log.fold(run_log.read_records(run_dir.log)).starts)


def _newest_config_path(run_dir: RunDir, starts: Sequence[run_log.Record]) -> RunPath:
    return _record(run_dir, starts[-1].attempt) if starts else run_dir.config


def record(
    config: RunConfig,
    run_dir: RunDir,
    attempt: int,
    starts: Sequence[run_log.Record],
    report: Callable[[str], object],
) -> None:
    """Writes the resolved config of an attempt; after its claim: only the lock's holder writes it.

    Args:
      starts: records of the starts before; none: the run directory gets the config too.
      report: called with a line for each change since the last of them that is to be told.
    """
    config = configs.with_absolute_paths(config)
    text = configs.dump_yaml(config)
    mode = configs.file_mode(text)
    if starts:
        with contextlib.suppress(ConfigError):  # It is there: `resolve_run` has compared it.
            path = _record(run_dir, starts[-1].attempt)
            if files.read(path) != text.encode():
                before = configs.load_recorded(path).config
                for key in configs.changed_secrets(before, config):
                    report(f"{key}: changed; it is a secret, which is no part of the trajectory")
    else:
        files.replace(run_dir.config, text.encode(), mode=mode)
    files.make_dir(run_dir.attempt(attempt))
    files.replace(run_dir.attempt(attempt) / "config.yaml", text.encode(), mode=mode)
