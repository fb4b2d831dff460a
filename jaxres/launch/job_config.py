"""The config that a verb of `launch gce` uses: the recorded one, or else the given one.

`up` uploads the resolved config under its digest. The desired state has that digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.faults import ConfigError, UsageError
from jaxres.launch import instance_spec
from jaxres.launch.code_package import digest_of
from jaxres.launch.desired_state import DesiredState
from jaxres.launch.paths import LaunchPaths
from jaxres.storage import gcs_objects


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
