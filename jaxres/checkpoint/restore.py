"""Reads a committed step: every process its own shards, into whatever sharding is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.arrays import Tree, array_infos
from jaxres.checkpoint.manifest import ArrayInfo
from jaxres.faults import ConfigError
from jaxres.runlog import Commit
from jaxres.state import Progress


def restore(
    step_dir: Path, commit: Commit, like: Tree, context: ocp.Context
) -> tuple[Tree, Progress]:
    """Reads a committed step into arrays sharded as asked for.

    Args:
      step_dir: absolute, of that step.
      commit: the step's record.
      like: nested dict of jax.ShapeDtypeStruct with shardings.
      context: Orbax's settings.

    Raises:
      Unrestorable: the step is damaged.
      StorageUnavailable: storage did not let it be read; nothing is judged.
      ConfigError: it was read, but holds other arrays than the model wants.
    """
    manifest = manifests.read(step_dir, commit)
    _refuse_differences(step_dir, manifest.arrays, array_infos(like))
    try:
        state = load(step_dir, like, context)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        # Orbax checks none of its JSON files: a flipped letter shows as any of these.
        raise manifests.unreadable(step_dir, commit.step, error) from error
    assert isinstance(state, dict), type(state)
    facts = manifests.read_progress(step_dir, commit)
    try:
        return state, Progress(**facts)
    except TypeError as error:
        what = f"{manifests.PROGRESS} is not this version's ({error})"
        raise manifests.damaged(step_dir, commit.step, what) from error


def load(step_dir: Path, like: Tree, context: ocp.Context) -> Any:
    """Reads the arrays, laid out as asked for, and checks nothing."""
    with context:
        return ocp.load(str(step_dir), like, checkpointable_name=manifests.ARRAYS)


def _refuse_differences(
    step_dir: Path, there: Mapping[str, ArrayInfo], here: Mapping[str, ArrayInfo]
) -> None:
    rows = [
        f"  {path}: {there.get(path, 'absent')} there, {here.get(path, 'absent')} here"
        for path in sorted({*there, *here})
        if there.get(path) != here.get(path)
    ]
    if rows:
        raise ConfigError(
            f"{step_dir}: the checkpoint holds other arrays than this model and optimizer\n"
            + "\n".join(rows)
            + "\nThe config is the same, so the code has changed: go back to the code that started "
            "the run, or start a new run in another run.dir."
        )
