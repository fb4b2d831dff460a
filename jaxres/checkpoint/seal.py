"""Makes a step that Orbax has written whole: facts, manifest, and all of it on the disk.

The last thing before the commit record; only the lead's saver calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jaxres import storage
from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint.manifest import ArrayInfo, Manifest
from jaxres.runlog import Claim, Commit, canonical_json
from jaxres.state import Progress


def seal(
    step_dir: Path, progress: Progress, arrays: Mapping[str, ArrayInfo], *, root: Path, claim: Claim
) -> Commit:
    """Writes what Orbax leaves out and returns the record of a step that is durable.

    Args:
      step_dir: absolute; Orbax has finished there.
      progress: the host's facts at the step.
      arrays: what was written.
      root: absolute, of the run directory.
      claim: of this attempt.

    Raises:
      StorageUnavailable: storage did not take it.
    """
    storage.replace(step_dir / manifests.PROGRESS, canonical_json(dataclasses.asdict(progress)))
    files = manifests.inventory(step_dir)
    manifest = Manifest(
        step=progress.step,
        attempt=claim.attempt,
        files=files,
        arrays=arrays,
        versions=claim.versions,
        fingerprint=claim.fingerprint,
        trajectory=claim.trajectory,
    ).encode()
    storage.replace(step_dir / manifests.MANIFEST, manifest)
    storage.sync_tree(step_dir)
    return Commit(
        step=progress.step,
        path=step_dir.relative_to(root).as_posix(),
        manifest=manifests.digest_of(manifest),
        bytes=sum(files.values()) + len(manifest),
        known_good=False,
        heldout_loss=progress.heldout_loss,
        evaluated_step=progress.evaluated_step,
    )
