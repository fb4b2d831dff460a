"""Refuses, before an attempt is claimed, a config that names missing things. No jax.

An attempt finds the same errors only once it has imported jax, and leaves a run directory. Checks
that are impossible here, as where storage does not answer, are left to it. Several supervisors
leave all checks to their attempt, which ends on all hosts if it can't begin on one of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxres.config import RunConfig
from jaxres.config.errors import Problem, raise_all
from jaxres.config.schema.data import CustomSource, HuggingfaceTokenizer, single_sources
from jaxres.config.schema.model import CustomModel
from jaxres.config.schema.optimizer import CustomOptimizer
from jaxres.config.schema.training import FromSeed
from jaxres.data.sources import source_files
from jaxres.faults import ConfigError, RunError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.telemetry import stdio
from jaxres.train import completion
from jaxres.train.checks import program_checks


def is_complete(run_dir: RunDir, config: RunConfig, *, env: Mapping[str, str]) -> bool:
    """Returns whether there is nothing left to train; as `completion.check`.

    `env`: the environment of a program.

    Raises:
      ConfigError: there is, and what the config names is not there.
    """
    if completion.is_complete(run_dir, config):
        return True
    require_inputs(run_dir, config, env=env)
    for line in unreached(config) if config.program is None else ():
        stdio.warn(line)
    return False


def unreached(config: RunConfig) -> list[str]:
    """Returns a line for each setting whose step comes after the run's last one.

    They count if train.steps grows later, so none is an error.
    """
    schedule, source, last = config.optimizer.schedule, config.data.source, config.train.steps
    changes = {
        "optimizer.schedule.changes": getattr(schedule, "changes", ()),
        "data.source.schedule": getattr(source, "schedule", ()),
    }
    found = [
        f"{key}: the change after step {made[-1].after_step}"
        for key, made in changes.items()
        if made and made[-1].after_step >= last
    ]
    horizon = schedule.horizon_steps or last
    if schedule.warmup_steps is not None and schedule.warmup_steps > last:
        found.append(f"optimizer.schedule: warmup_steps={schedule.warmup_steps}")
    elif schedule.warmup_steps is None and schedule.warmup_fraction * horizon > last:
        found.append(f"optimizer.schedule: the end of warmup_fraction={schedule.warmup_fraction}")
    intervals = {
        "guards.corruption.replay_every_steps": getattr(
            config.guards.corruption, "replay_every_steps", None
        ),
        "checkpoint.memory.every_steps": getattr(config.checkpoint.memory, "every_steps", None),
        **{f"hooks[{n}].every_steps": hook.every_steps for n, hook in enumerate(config.hooks)},
    }
    for key, steps in intervals.items():
        if steps is not None and steps > last:
            found.append(f"{key}={steps}")
    lines = [f"{each} lies beyond the last step, train.steps={last}" for each in found]
    if horizon < last and getattr(schedule, "final_fraction", None) == 0:
        lines.append(f"optimizer.schedule: the learning rate is 0 from step {horizon} on")
    return lines


def require_inputs(run_dir: RunDir, config: RunConfig, *, env: Mapping[str, str]) -> None:
    """Raises ConfigError with a line for each path and module of the config that is not there."""
    if config.program is not None:
        raise_all(program_checks.problems(config.program, env))
        return
    raise_all([*_sources(config), *_paths(run_dir, config), *_modules(config)])


def _sources(config: RunConfig) -> Iterator[Problem]:
    named = dict(single_sources(config.data.source))
    for part in config.data.validation:
        named[f"data.validation[{part.name}].source"] = part.source
    for key, source in named.items():
        try:
            source_files.refuse(source)
        except ConfigError as error:
            yield Problem("" if key == "data.source" else key, str(error))
        except (RunError, RuntimeError):  # RuntimeError: no such home folder.
            continue


def _paths(run_dir: RunDir, config: RunConfig) -> Iterator[Problem]:
    tokenizer, init = config.data.tokenizer, config.init_from
    if isinstance(tokenizer, HuggingfaceTokenizer) and _is_absent(tokenizer.path):
        text = f"{tokenizer.path} does not exist. If it has moved, give the new path"
        yield Problem("data.tokenizer.path", text)
    if not isinstance(init, FromSeed) and _is_absent(init.path):
        history = run_log.fold(run_log.read_records(run_dir.log))
        if history.newest is None:  # Later they are not needed.
            yield Problem("init_from.path", f"{init.path}: no such file or folder")


def _is_absent(path: RunPath) -> bool:
    try:
        return not is_remote(path) and not files.name_exists(Path(path).expanduser())
    except (RunError, OSError, RuntimeError):  # RuntimeError: no such home folder.
        return False


def _modules(config: RunConfig) -> Iterator[Problem]:
    targets = {f"hooks[{number}]": hook.target for number, hook in enumerate(config.hooks)}
    for key, section in {
        "model": config.model,
        "optimizer": config.optimizer,
        **single_sources(config.data.source),
    }.items():
        if isinstance(section, CustomModel | CustomOptimizer | CustomSource):
            targets[key] = section.target
    for key, target in targets.items():
        package = target.partition(":")[0].partition(".")[0]
        if not _is_found(package):
            text = f"no module {package} (from {target}). Install the package, or put its folder "
            yield Problem(f"{key}.target", f"{text}on PYTHONPATH")


def _is_found(package: str) -> bool:
    """Returns whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: it is imported already, from no file.
        return True
