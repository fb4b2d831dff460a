"""Loads, validates, describes and compares the configuration of a run.

Home of: bad_config
"""

from jaxres.config.cross_checks import check
from jaxres.config.describe import describe, dump_yaml, file_mode
from jaxres.config.errors import Problem
from jaxres.config.load import Loaded, load, load_recorded, repeated
from jaxres.config.programs import require_trainer
from jaxres.config.schema.run_config import RunConfig
from jaxres.config.trajectory import (
    changed_secrets,
    check_same,
    diff,
    digest,
    digests,
    free_changes,
    horizon_steps,
    loss_scale,
    moved_content,
    run_dirs,
    trajectory,
    with_absolute_paths,
)

__all__ = [
    "Loaded",
    "Problem",
    "RunConfig",
    "changed_secrets",
    "check",
    "check_same",
    "describe",
    "diff",
    "digest",
    "digests",
    "dump_yaml",
    "file_mode",
    "free_changes",
    "horizon_steps",
    "load",
    "load_recorded",
    "loss_scale",
    "moved_content",
    "repeated",
    "require_trainer",
    "run_dirs",
    "trajectory",
    "with_absolute_paths",
]
