"""Arrays that do not change: the frozen parameters of a state, and the files that steps share.

Frozen parameters are an Orbax checkpointable of their own, `frozen`, with the block digests in
`frozen_digests`. A step whose frozen parameters are those of an earlier committed step gets hard
links to its files instead of new ones. Every step directory stays complete: the file system counts
the references, and deleting one step leaves the files of the others.

Saves link two copies in turn, so that one damaged file leaves every second step valid. An attempt
links only copies that it has verified: the one that it has restored, whose files are compared with
the manifest before the first link, and those that it has written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import FROZEN_DIGESTS, FileInfo
from jaxres.checkpoint.read.readback import checksums, drop_from_memory
from jaxres.checkpoint.read.tensorstore_reader import FROZEN
from jaxres.checkpoint.throttle import Throttle
from jaxres.engine.replica_fingerprint import array_fingerprint
from jaxres.engine.trainable import Trainable
from jaxres.faults import StorageUnavailable, Unrestorable
from jaxres.runlog.run_log import Commit
from jaxres.storage import files
from jaxres.storage.path import RunPath

Tree = dict[str, Any]

PARAMS = "params"
CHANGED = (
    "parameters that the config freezes have changed since the save before. The step is discarded; "
    "nothing committed is lost, and the next save writes all of them"
)
FOLDERS = (FROZEN, FROZEN_DIGESTS)
"""Folders of a step directory whose files steps share."""
SAMPLE = 2**14
"""Number of items of a part of an array that are looked at on a CPU."""
FrozenSums = tuple[jax.Array | np.ndarray, ...]
"""For each device of this process, the checksums of its parts of the arrays."""
COPIES = 2
"""Number of copies of the frozen parameters that saves link in turn. Retention keeps at least as
many steps."""
PROBE = f"{FROZEN}/manifest.ocdbt"
"""A file that is in every step with frozen arrays."""


@dataclass(frozen=True)
class LinkSource:
    """A committed step whose frozen arrays this attempt has written and read back, or restored."""

    name: str
    """Name of its directory."""
    sums: FrozenSums
    """Result of `sums_of` for its frozen arrays."""
    are_files_verified: bool = True
    """Whether this attempt has compared its files with the manifest. A restore verifies the arrays:
    files that it does not need may be damaged."""


@dataclass(frozen=True)
class LinkedFiles:
    """The frozen arrays of a step whose files are links to files of an earlier step."""

    files: Mapping[str, FileInfo]
    """Relative path -> size and checksum, from the manifest of the earlier step."""
    digests: Mapping[str, str]
    """Path -> digest of every frozen array."""

    @property
    def size_bytes(self) -> int:
        """Size of the files together."""
        return sum(info.size for info in self.files.values())


NOTHING_LINKED = LinkedFiles({}, {})
"""Of a step that has written all its arrays."""


def split_state(state: Tree, trainable: Trainable) -> tuple[Tree, Tree]:
    """Returns the part of a state that training changes, and the frozen part; {} if none is."""
    trained, frozen = trainable.split(state[PARAMS]) if trainable.frozen else ({}, {})
    return ({**state, PARAMS: trained}, {PARAMS: frozen}) if frozen else (state, {})


def sums_of(frozen: Tree) -> FrozenSums:
    """Returns checksums of each array's parts on this process's devices.

    They show that an array has changed although the config says that it does not. An accelerator
    sums the bits of all items, each mixed with its position, while the caller goes on. On a CPU,
    whose next step would have to wait, a sample is looked at.
    """
    by_device: dict[Any, list[Any]] = {}
    for leaf in jax.tree.leaves(frozen):
        for shard in leaf.addressable_shards:
            by_device.setdefault(shard.device, []).append(shard.data)
    return tuple(
        _host_sums(shards) if device.platform == "cpu" else _sums(shards)
        for device, shards in by_device.items()
    )


def _host_sums(parts: list[Any]) -> np.ndarray:
    """Returns checksums of at most SAMPLE items of each part, at equal distances."""
    return np.asarray([xxhash.xxh3_64_intdigest(_sample(np.asarray(part))) for part in parts])


def _sample(array: np.ndarray) -> bytes:
    for dim in range(array.ndim):
        stride = min(array.shape[dim], -(-array.size // SAMPLE))
        array = array[(slice(None),) * dim + (slice(None, None, stride),)]
    return array.tobytes()


@jax.jit
def _sums(parts: list[Any]) -> jax.Array:
    return jnp.stack([array_fingerprint(part) for part in parts])


def are_equal(a: FrozenSums, b: FrozenSums) -> bool:
    """Returns whether two results of `sums_of` are equal; waits for the devices."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def can_link(source: RunPath) -> bool:
    """Returns whether the files of a step directory can be linked into another one beside it."""
    return files.can_link(source / PROBE, source.parent)


def link(
    source: RunPath, commit: Commit, step_dir: RunPath, *, verifies: bool, pace: Throttle
) -> LinkedFiles:
    """Links the files of the frozen arrays of a committed step into another step directory.

    Args:
      source: absolute path of the committed step.
      step_dir: absolute path of the step directory that Orbax has written.
      verifies: whether to read the files and to compare their checksums.

    Raises:
      StorageUnavailable: a file is missing, differs from the committed one, or can't be linked.
    """
    with files.typed_errors(step_dir):
        linked = _link(source, commit, step_dir)
        if verifies:
            _verify(source, step_dir, linked.files, pace)
        return linked


def _verify(
    source: RunPath, step_dir: RunPath, linked: Mapping[str, FileInfo], pace: Throttle
) -> None:
    drop_from_memory(step_dir, list(linked))
    found = checksums(step_dir, list(linked), pace)
    if wrong := next((name for name, info in linked.items() if found[name] != info), None):
        raise StorageUnavailable(
            f"{step_dir}: {source / wrong} differs from the committed file. Nothing committed is "
            "lost; the next save writes the frozen arrays again. Check the step: `jaxres "
            "checkpoints verify`."
        )


def _link(source: RunPath, commit: Commit, step_dir: RunPath) -> LinkedFiles:
    try:
        manifest = manifests.load(source, commit)
    except Unrestorable as damage:
        raise StorageUnavailable(f"{step_dir}: its frozen arrays: {damage}") from damage
    shared = {
        name: info for name, info in manifest.files.items() if name.partition("/")[0] in FOLDERS
    }
    for name in shared:
        files.make_dir((step_dir / name).parent)
        if not files.link(source / name, step_dir / name):
            raise StorageUnavailable(
                f"{step_dir}: {source / name} can't be linked. Nothing committed is lost; the next "
                "save writes the frozen arrays again."
            )
    for folder in FOLDERS:
        for name, size in files.sizes(step_dir / folder).items():
            if size != shared[f"{folder}/{name}"].size:
                raise StorageUnavailable(
                    f"{step_dir}: {source / folder / name} has {size} bytes, its manifest records "
                    f"{shared[f'{folder}/{name}'].size}. Nothing committed is lost; the next save "
                    f"writes the frozen arrays again. Check the step: `jaxres checkpoints verify`."
                )
    return LinkedFiles(shared, {path: manifest.digests[path] for path in manifest.frozen})
