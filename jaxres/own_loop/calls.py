"""The calls `jaxres.checkpoints` and `jaxres.attempt` of a loop of the user's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres.config.schema.checkpoint import EpochsWhen
from jaxres.config.schema.supervision import HostsSection
from jaxres.faults import ConfigError, UsageError
from jaxres.own_loop import ownership
from jaxres.own_loop.attempt import Attempt
from jaxres.own_loop.checkpoints import Checkpoints
from jaxres.own_loop.hosts import NUM_HOSTS
from jaxres.own_loop.ownership import SETTINGS, section_of
from jaxres.own_loop.verdicts import OnSpike
from jaxres.runlog.paths import RunDir, root_of
from jaxres.storage.path import RunPath


def checkpoints(folder: str | Path | RunPath, **settings: Any) -> Checkpoints:
    """Returns the checkpoints of a folder or `gs://BUCKET/FOLDER`; see `Checkpoints`.

    Args:
      folder: made by the first `with`.
      settings: keys of the section `checkpoint` of a config, such as `keep_last=5`.

    Raises:
      ConfigError: a setting is unknown, or has no effect here.
    """
    section = section_of(settings, call="jaxres.checkpoints")
    return Checkpoints(RunDir(root_of(folder)), section, env=os.environ)


def attempt(
    folder: str | Path | RunPath | None = None, *, on_spike: OnSpike = "warn", **settings: Any
) -> Attempt:
    """Returns an attempt at a run, for one `with`; see `Attempt`.

    Args:
      folder: the run directory; under a supervisor that has started the program, its own one.
      on_spike: what follows a loss that stays high: stop (81), warn, or off.
      settings: keys of the section `checkpoint` of a config, such as `save_every_steps=100`; by
        default those of the config under a supervisor.

    Raises:
      UsageError: no folder is known.
      ConfigError: a setting is unknown, or has no effect here.
    """
    env = os.environ
    root = env.get(ownership.RUN_DIR) if ownership.ATTEMPT in env else folder
    if root is None:
        raise UsageError("jaxres.attempt: give a folder, such as jaxres.attempt('runs/mine').")
    run_dir = RunDir(root_of(root))
    keys = (*SETTINGS, "when", "save_every_steps")
    section = section_of(settings, call="jaxres.attempt", keys=keys)
    heartbeat_seconds = HostsSection().heartbeat_seconds
    is_alone = env.get(NUM_HOSTS, "1") == "1"
    if ownership.is_supervised(run_dir, env) and not (settings and is_alone):
        recorded = run_dir.attempt(int(env[ownership.ATTEMPT])) / "config.yaml"
        config = configs.load_recorded(recorded, ()).config
        heartbeat_seconds = config.hosts.heartbeat_seconds
        section = section if settings else config.checkpoint
    elif not is_alone:
        raise UsageError(
            f"jaxres.attempt: {NUM_HOSTS}={env[NUM_HOSTS]}, and no supervisor has started this "
            "process. For several hosts give the command as `program` in a config."
        )
    if isinstance(section.when, EpochsWhen):
        raise ConfigError(
            "jaxres.attempt: when.kind=epochs: jaxres does not know the epochs of a loop of one's "
            "own. Give save_every_steps, or `when` of another kind."
        )
    return Attempt(
        run_dir, section, on_spike=on_spike, heartbeat_seconds=heartbeat_seconds, env=env
    )
