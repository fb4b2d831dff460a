"""The config that a verb of `launch gce` uses: the recorded one, or else the given one.

`up` uploads the resolved config under its digest. The desired state has that digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.faults import ConfigError, UsageError
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.launch.gce.vm import instance_spec
from jaxres.launch.gce.vm.code_package import digest_of
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath, RunPath, is_remote
from jaxres.supervisor.run_config import parse_target, resolve_run


def find_run(arguments: Sequence[str], *, command: str) -> tuple[GcsPath, RunConfig | None]:
    """Returns the run directory that the arguments name, and the config if they name its file."""
    target, overrides = parse_target(arguments, command=command)
    if is_remote(target):
        if overrides:
            raise UsageError(f"{overrides[0]}: a run directory takes no overrides")
        return target, None
    if not target.is_file():
        raise UsageError(
            f"{target}: runs of `launch gce` are in buckets; give gs://BUCKET/FOLDER, or the "
            "config file"
        )
    config, run = find_without_bucket(target, overrides)
    return run, config


def find(target: RunPath, overrides: Sequence[str]) -> tuple[RunConfig, GcsPath]:
    """Returns the config of a job and its run directory.

    Raises:
      ConfigError: the config has no section on VMs, or the run directory is not in a bucket.
    """
    if is_remote(target):
        desired = StateObject(LaunchPaths(target).desired_state).read()
        if desired is None:
            raise UsageError(
                f"{target}: no job of `launch gce` was started here. Give the config file first."
            )
        return recorded(LaunchPaths(target), desired.config, overrides), target
    loaded, run_dir = resolve_run(target, overrides)
    return _require_gce(target, loaded.config, run_dir.root)


def find_without_bucket(target: RunPath, overrides: Sequence[str]) -> tuple[RunConfig, GcsPath]:
    """Returns the config of a job and its run directory, whose bucket need not exist."""
    if is_remote(target):
        return find(target, overrides)
    config = configs.load(target, overrides).config
    return _require_gce(target, config, config.run.dir)


def _require_gce(
    target: RunPath, config: RunConfig, root: RunPath | None
) -> tuple[RunConfig, GcsPath]:
    """Checks that a config describes a job on VMs with a run directory in a bucket."""
    if config.launch.gce is None:
        raise ConfigError(
            f"{target}: launch.gce is missing, which describes the VMs; docs/gce.md has an example."
        )
    if root is None or not is_remote(root):
        raise ConfigError(
            f"{target}: run.dir must be in a bucket, because VMs are lost with their disks: give "
            "run.dir=gs://BUCKET/FOLDER"
        )
    return config, root


def recorded(paths: LaunchPaths, digest: str, overrides: Sequence[str]) -> RunConfig:
    """Returns the config that `up` has uploaded under a digest.

    Raises:
      ConfigError: it is missing, or was changed since.
    """
    path = paths.config(digest)
    if instance_spec.read_uploaded(path, digest) is None:
        raise ConfigError(f"{path} is missing; restore it from a copy, or give the config file.")
    return configs.load_recorded(path, overrides).config


def any_config(
    paths: LaunchPaths, desired: DesiredState | None, given: RunConfig | None
) -> RunConfig:
    """Returns a config that has the project of a job's VMs: all that `status` and `down` need.

    Raises:
      ConfigError: the recorded one can't be used, and none is given.
      UsageError: there is no desired state, and none is given.
    """
    if desired is not None:
        try:
            return recorded(paths, desired.config, ())
        except ConfigError:
            if given is None:
                raise
    if given is not None:
        return given
    names = gcs_objects.list_names(paths.configs)
    if len(names) == 1:
        return recorded(paths, names[0].removesuffix(".yaml"), ())
    raise UsageError(
        f"{paths.run}: no job of `launch gce` was started here, or its folder was deleted. Give "
        "the config file instead: its project and run.dir are what VMs are found by"
    )


def adopt(
    config: RunConfig, desired: DesiredState, paths: LaunchPaths, console: Callable[[str], None]
) -> RunConfig:
    """Returns the config of the running job, which may differ from the given one."""
    text = configs.dump_yaml(config)
    try:
        found = recorded(paths, desired.config, ())
    except ConfigError:
        if digest_of(text.encode()) != desired.config:
            raise
        instance_spec.upload(text.encode(), paths.configs, ".yaml")
        console(f"{paths.config(desired.config)} was missing or changed; uploaded again")
        return config
    if configs.dump_yaml(found) != text:
        console(
            "the job runs with the config of its first `up`; changes apply after `launch gce stop`"
        )
    return found
