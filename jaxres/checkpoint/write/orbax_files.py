"""Orbax's own files of a step: the description of its arrays, for readers with stock Orbax.

jaxres reads none of them. Source: orbax-checkpoint 0.12.8, `metadata/tree.py`,
`metadata/sharding.py`, `metadata/checkpoint.py`.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxres.checkpoint.snapshot import local_shape

_DICT_KEY = 2
"""Orbax's number of the key kind "key of a dict"."""
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def describe(folders: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns name -> content of Orbax's files of a step.

    Args:
      folders: folder of the step -> nested dict of jax.Array or NumPy arrays.
    """
    checkpoint = {
        "item_handlers": dict.fromkeys(folders, _HANDLER),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": None,
        "commit_timestamp_nsecs": None,
        "custom_metadata": {},
    }
    found = {"_CHECKPOINT_METADATA": json.dumps(checkpoint).encode(), "orbax.checkpoint": b""}
    for folder, tree in folders.items():
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
        arrays = {tuple(key.key for key in keys): array for keys, array in leaves}
        found[f"{folder}/_METADATA"] = json.dumps(_tree(arrays)).encode()
        found[f"{folder}/_sharding"] = json.dumps(_shardings(arrays)).encode()
    return found


def _tree(arrays: Mapping[tuple[str, ...], jax.Array]) -> dict[str, Any]:
    shapes: dict[Any, tuple[int, ...]] = {}

    def write_shape(array: jax.Array) -> list[int]:  # Most arrays are laid out like others.
        layout = array.shape, array.dtype, getattr(array, "sharding", None)
        if layout not in shapes:
            shapes[layout] = local_shape(array)
        return list(shapes[layout])

    return {
        "tree_metadata": {
            str(keys): {
                "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
                "value_metadata": {
                    "value_type": "np.ndarray" if _is_numpy(array) else "jax.Array",
                    "skip_deserialize": False,
                    "write_shape": write_shape(array),
                },
            }
            for keys, array in arrays.items()
        },
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _is_numpy(array: jax.Array | np.ndarray) -> bool:
    return isinstance(array, np.ndarray)


def _shardings(arrays: Mapping[tuple[str, ...], jax.Array]) -> dict[str, str]:
    found: dict[str, str] = {}
    for keys, array in arrays.items():
        described = None if _is_numpy(array) else _described(array.sharding)
        if described is not None:
            name = base64.b64encode(".".join(keys).encode()).decode()
            found[name] = described
    return found


@functools.lru_cache(maxsize=1024)
def _described(sharding: jax.sharding.Sharding) -> str | None:
    """Returns a sharding as Orbax describes it, with all devices; None: Orbax does not."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh
    devices = jax.tree.map(lambda device: {"id": device.id}, np.asarray(mesh.devices).tolist())
    described = {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.shape.values()),
        "axis_names": mesh.axis_names,
        "axis_types": [str(kind) for kind in mesh.axis_types],
        "partition_spec": tuple(sharding.spec),
        "device_mesh": {"mesh": devices},
    }
    return json.dumps(described)
