"""Options of XLA for the compiled steps: chosen by `compilation`, less what XLA_FLAGS sets.

They are options of each compilation, not variables of the process: XLA refuses an unknown one by an
error where an unknown flag ends the process, and a notebook that has used JAX can still set them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
import numpy as np

from jaxres.config.schema.model import GptModel, VitModel
from jaxres.config.schema.run_config import CompileSection
from jaxres.faults import ConfigError
from jaxres.train.components import Components

Value = bool | int | float | str
LEAST_BYTES = 30 * 2**20
"""XLA's own threshold for combined collectives: smaller ones are bound by their latency."""
MOST_BYTES = 2**30
"""Most memory that one combined collective takes; NVIDIA's scripts for AXLearn have this value."""
PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")
"""Collectives of which those of a layer, a pass of a loop, run beside the next pass."""
RENAMED_IN = (0, 11, 1)
"""Version of jaxlib whose options of pipelined collectives have other names than their flags."""
UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")
BAD_VALUE = re.compile(r"While setting option (\w+), (.*)")


@dataclass(frozen=True)
class XlaOptions:
    """The options of the compiled steps."""

    values: Mapping[str, Value]
    """Name -> value, of the profile and of `compilation.xla_options`."""
    in_flags: tuple[str, ...] = ()
    """Options that were left out because XLA_FLAGS has them."""

    @property
    def text(self) -> str:
        """The options as text for records and keys; "": none.

        >>> XlaOptions({"xla_b": True, "xla_a": 1}).text
        'xla_a=1 xla_b=true'
        """
        return " ".join(f"{name}={_text(self.values[name])}" for name in sorted(self.values))

    def note(self) -> str | None:
        """Returns the report of a start about the options; None: there are none."""
        if not self.values and not self.in_flags:
            return None
        text = f"options of XLA: {self.text or 'none'}"
        if self.in_flags:
            text += f"; XLA_FLAGS has {', '.join(self.in_flags)}, which jaxres does not replace"
        return text


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def of(parts: Components, *, flags: str) -> XlaOptions:
    """Returns the options of a run's compiled steps.

    Args:
      parts: components of the run; on an abstract mesh the profile has no options.
      flags: the value of XLA_FLAGS.
    """
    profile = dict[str, Value]()
    if isinstance(parts.mesh, jax.sharding.Mesh) and parts.mesh.size > 1:
        first = parts.mesh.devices.flat[0]
        if first.platform == "gpu" and "cuda" in first.client.platform_version.lower():
            profile = profile_of(parts)
    return choose(parts.config.compilation, profile, flags=flags)


def profile_of(parts: Components) -> dict[str, Value]:
    """Returns the options of `compilation.profile: auto` on several GPUs of CUDA."""
    model = parts.config.model
    dtype = model.compute_dtype if isinstance(model, GptModel | VitModel) else None
    layer = layer_bytes(parts.shapes.params, parts.model.axes, dtype=dtype)
    return profile_options(layer, shape=parts.mesh.shape)


def choose(section: CompileSection, profile: Mapping[str, Value], *, flags: str) -> XlaOptions:
    """Returns the options of a config, less those of XLA_FLAGS, which win.

    >>> section = CompileSection(xla_options={"xla_a": 1, "xla_b": 2})
    >>> choose(section, {"xla_a": 0, "xla_c": 3}, flags="--xla_b=5")
    XlaOptions(values={'xla_a': 1, 'xla_c': 3}, in_flags=('xla_b',))
    """
    wanted = {**(profile if section.profile == "auto" else {}), **section.xla_options}
    named = {flag.removeprefix("--").partition("=")[0] for flag in flags.split()}
    named |= {name.replace("enable_pipelined", "pipeline") for name in named}
    kept = {name: value for name, value in wanted.items() if name not in named}
    return XlaOptions(kept, tuple(sorted(wanted.keys() & named)))


def profile_options(
    layer: int,
    *,
    shape: Mapping[str, int],
    version: tuple[int, ...] = jaxlib.version.__version_info__,
) -> dict[str, Value]:
    """Returns the options of `compilation.profile: auto` on several GPUs.

    Args:
      layer: bytes of the parameters of a layer on all devices; 0: not known.
      shape: number of devices along each axis of the mesh.
      version: version of jaxlib.
    """
    whole = min(max(layer // shape["tensor"], LEAST_BYTES), MOST_BYTES)
    return {
        **_pipelined(version),
        "xla_gpu_all_gather_combine_threshold_bytes": whole,
        "xla_gpu_all_reduce_combine_threshold_bytes": whole,
        # XLA counts the result here, which is one device's part.
        "xla_gpu_reduce_scatter_combine_threshold_bytes": whole // shape["fsdp"],
    }


def _pipelined(version: tuple[int, ...]) -> dict[str, Value]:
    if version < RENAMED_IN:
        return {f"xla_gpu_enable_pipelined_{kind}": True for kind in PIPELINED}
    return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in PIPELINED}


def layer_bytes(params: Any, axes: Any, *, dtype: str | None) -> int:
    """Returns the bytes of a layer's parameters; 0: no parameters are stacked over layers.

    Args:
      axes: tree of the names of their dims.
      dtype: type in which the model computes; None: that of the parameters.
    """
    total = 0
    leaves, tree = jax.tree.flatten(params)
    for leaf, names in zip(leaves, tree.flatten_up_to(axes), strict=True):
        if names and names[0] == "layers":
            total += math.prod(leaf.shape[1:]) * np.dtype(dtype or leaf.dtype).itemsize
    return total


def compile_with(lowered: Any, options: XlaOptions) -> Any:
    """Compiles a jax.stages.Lowered.

    Raises:
      ConfigError: XLA does not know an option, or can't read its value.
    """
    try:
        return lowered.compile(compiler_options=dict(options.values) or None)
    except jax.errors.JaxRuntimeError as error:
        problem = UNKNOWN_OPTION.search(str(error)) or BAD_VALUE.search(str(error))
        if problem is None or problem[1] not in options.values:
            raise
        name, value = problem[1], _text(options.values[problem[1]])
        version = jaxlib.version.__version__
        raise ConfigError(
            f"compilation.xla_options.{name}={value}: XLA of jaxlib {version} refuses "
            f"it: {problem[0]}. Correct or remove it; an option of compilation.profile=auto is "
            "absent with compilation.profile=none"
        ) from error
