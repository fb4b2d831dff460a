"""`jaxres branch`: a new run that begins with a committed step of another one.

The step is copied, verified, and committed in the new run, whose log begins with a record of the
origin. So parameters, optimizer, PRNG key, step and position in the data go on, with another
learning rate, batch size or schedule. The runs share nothing afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.weights import source as weights_source
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser, require_writable
from jaxres.config.errors import show
from jaxres.config.schema.data import MixtureSource
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, StorageUnavailable, UsageError, command_line
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir, root_of
from jaxres.runlog.records import Branch
from jaxres.runlog.run_log import AttemptEnded, Commit, RunHistory, RunLog, Skip
from jaxres.runlog.step_dirs import LOG_COPY, MANIFEST
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor import attempt_runner, run_config
from jaxres.supervisor.process.worker_group import WorkerGroup
from jaxres.supervisor.run_lock import RunLock

KEPT = ("run.seed", "data", "model", "lora", "init_from", "train.loss_scale")
KEPT_OPTIMIZER = ("kind", "target", "args", "freeze", "ema_decay", "min_dim_size_to_factor")
COPY_BYTES = 4 * 2**20
"""Trajectory keys that decide the arrays or the rows, which a branch takes as they are."""


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs the command and returns its exit code."""
    parser = Parser(prog="jaxres branch")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run to branch from")
    parser.add_argument("--to", required=True, metavar="DIR", help="directory of the new run")
    parser.add_argument("--step", metavar="N|best", help="committed step; default: the newest")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    try:
        options = parser.parse_intermixed_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0) and ExitCode.USAGE
    origin, to = (RunDir(root_of(text)) for text in (options.run_dir, options.to))
    step = weights_source.parse_step(options.step)
    run_config.tell_repeated(options.overrides)
    sys.stdout.write(branch(origin, to, step=step, overrides=options.overrides, env=env))
    return ExitCode.DONE


def branch(
    origin: RunDir,
    to: RunDir,
    *,
    step: weights_source.Step,
    overrides: Sequence[str],
    env: Mapping[str, str],
    clock: Clock | None = None,
) -> str:
    """Creates the new run and returns the next commands for the user.

    Args:
      origin: the run to branch from; it may be live.
      to: directory of the new run; must not exist.
      step: committed step of the origin.
      env: environment, for the record of the claim.
      clock: time of the records; None: the system's.

    Raises:
      ConfigError: the step is not committed, or an override changes arrays or rows.
      Unrestorable: the step is damaged.
      UsageError: the directory exists.
      StorageUnavailable: storage failed; nothing usable was left.
    """
    if files.exists(to.root) or files.list_names(to.root):
        raise UsageError(f"{to.root}: exists already. Choose another directory with --to.")
    require_writable("--to", to.root)
    commit = weights_source.commit_of(origin, step)
    history = run_log.fold(run_log.read_records(origin.log))
    config = _config(origin, to, overrides, step=commit.step)
    clock = clock or SystemClock()
    if is_remote(to.root):
        _build(origin, to, commit, history, config, clock=clock, env=env)
    else:
        with _built_beside(to.root) as building:
            _build(origin, building, commit, history, config, clock=clock, env=env)
    changes = "".join(
        f"  {key}: {show(old)} -> {show(new)}\n"
        for key, old, new in configs.diff(run_config.newest_config(origin), config)
    )
    return (
        f"{to.root}: begins with step {commit.step} of {origin.root}, copied and verified\n"
        f"{changes}{command_line('python -m jaxres.train', to.root)}\n"
    )


@contextlib.contextmanager
def _built_beside(root: Path) -> Iterator[RunDir]:
    """Yields a directory beside the new run, which takes its place after the block."""
    _delete_killed(root)
    building = root.with_name(f".{root.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield RunDir(building)
        files.move(building, root)
    finally:
        with contextlib.suppress(StorageUnavailable):
            files.delete_tree(building)


def _config(origin: RunDir, to: RunDir, overrides: Sequence[str], *, step: int) -> RunConfig:
    """Returns the config of the new run; raises ConfigError for changes that can't be made."""
    if any(word.startswith("run.dir=") for word in overrides):
        raise UsageError("run.dir: the directory of the new run is given by --to.")
    recorded = run_config.newest_config(origin)
    configs.require_trainer(recorded, "jaxres branch")
    path = run_config.newest_config_path(origin)
    config = configs.load_recorded(path, overrides).config
    own = config.run.model_copy(update={"dir": to.root})
    config = config.model_copy(update={"run": own})
    changes = configs.diff(recorded, config)
    refused = [key for key, old, new in changes if decides_arrays_or_rows(recorded, key, old, new)]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: a branch takes arrays and rows as they are. To take only the "
            f"parameters, start a new run with init_from={{kind: run, path: {origin.root}}}."
        )
    if config.train.steps < step:
        raise ConfigError(
            f"train.steps: {config.train.steps} is before step {step}, with which the branch "
            "begins. Give more, or an earlier --step."
        )
    return config


def decides_arrays_or_rows(recorded: RunConfig, key: str, old: Any, new: Any) -> bool:
    """Returns whether a change of a key would leave arrays or rows that do not fit together."""
    section, _, rest = key.partition(".")
    if key == "optimizer.momentum" and None in (old, new):
        return True  # Adafactor's first moment, which is there or is not.
    if key == "train.global_batch_size":  # Changes of the weights are at multiples of it.
        source = recorded.data.source
        return isinstance(source, MixtureSource) and bool(source.schedule)
    if section == "optimizer":
        return rest.partition(".")[0] in KEPT_OPTIMIZER
    return any(f"{key}.".startswith(f"{kept}.") for kept in KEPT)


def _build(
    origin: RunDir,
    to: RunDir,
    commit: Commit,
    history: RunHistory,
    config: RunConfig,
    *,
    clock: Clock,
    env: Mapping[str, str],
) -> None:
    """Writes the new run. Its commit record is last, and without it no start is possible."""
    with RunLock(to, clock=clock) as lock:
        claimed, log = attempt_runner.claim_attempt(
            config, lock, job=WorkerGroup(), env=env, known=0
        )
        dataset, tokenizer = history.dataset or "", history.tokenizer
        seq = next(record.seq for record in history.commits if record.body == commit)
        log.append(
            Branch(
                path=str(origin.root),
                step=commit.step,
                manifest=commit.manifest,
                dataset=dataset,
                tokenizer=tokenizer,
                lower_rates=tuple(history.lower_rates(before_seq=seq)),
            )
        )
        if history.bad_rows:
            log.append(Skip(rows=history.bad_rows, reason=f"bad records of {origin.root}"))
        if tokenizer is not None:
            folder = origin.tokenizer(tokenizer)
            _copy(folder, to.tokenizer(tokenizer), files.sizes(folder))
        log.append(_copy_step(origin, to, commit, log, trajectory=claimed.claim.trajectory))
        text = f"branch of {origin.root} at step {commit.step}; nothing was trained"
        log.append(AttemptEnded(exit=ExitCode.STOPPED, reason=text, committed=True))


def _delete_killed(to: Path) -> None:
    """Deletes the leftovers of this branch by killed processes; a live one holds its lock file."""
    for left in to.parent.glob(f".{glob.escape(to.name)}.{12 * '[0-9a-f]'}.tmp"):
        lock = RunDir(left).lock
        with (
            contextlib.suppress(OSError, StorageUnavailable),
            open(lock, "rb+", opener=files.only_files) as file,
        ):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files.delete_tree(left)


def _copy_step(
    origin: RunDir, to: RunDir, commit: Commit, log: RunLog, *, trajectory: str
) -> Commit:
    """Copies and verifies a step; returns its commit record in the new run."""
    source, target = origin.root / commit.path, to.root / commit.path
    manifest = manifests.read(source.absolute(), commit)
    _copy(source, target, manifest.files)
    records = b"".join(record.encode() + b"\n" for record in log.records())
    files.replace(target / LOG_COPY, records)
    inventory = {**manifest.files, LOG_COPY: manifests.info_of(records)}
    data = dataclasses.replace(manifest, files=inventory, trajectory=trajectory).encode()
    files.replace(target / MANIFEST, data)
    files.sync_tree(target)
    copied = dataclasses.replace(
        commit,
        manifest=manifests.digest_of(data),
        bytes=sum(info.size for info in inventory.values()) + len(data),
    )
    findings = verify_step(target.absolute(), copied)
    if findings.problems:
        check = command_line("jaxres checkpoints verify", origin.root, "--step", commit.step)
        raise StorageUnavailable(
            f"{target}: the copy differs from {source} ({findings.evidence}). Is that step valid? "
            f"Check it: {check}"
        )
    return copied


def _copy(source: RunPath, target: RunPath, names: Iterable[str]) -> None:
    """Copies files below a folder; between two disks in pieces, else whole."""
    for name in names:
        there: Any = target / name
        files.make_dir(there.parent)
        if isinstance(there, Path) and isinstance(source, Path):
            with files.typed_errors(source / name):
                files.open_file(source / name).close()
            with files.typed_errors(there):
                shutil.copyfile(source / name, there)
        else:
            parts = files.iter_chunks(source / name, size_bytes=COPY_BYTES)
            files.replace(there, b"".join(map(bytes, parts)))
