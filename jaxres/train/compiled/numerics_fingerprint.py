"""Fingerprint of everything that affects the bits of a run besides the config's trajectory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.config.schema.data import single_sources
from jaxres.engine import executable
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.runlog.guarantee import (
    DATA_CODE,
    INVARIANT,
    MODEL_CODE,
    PROGRAM,
    REDUCTION,
    UNKNOWN,
    XLA_OPTIONS,
)
from jaxres.runlog.run_log import Claim
from jaxres.train.compiled import compile_cache
from jaxres.train.compiled.jitted_steps import CompiledSteps

UNSET = object()
"""The default of a setting that is in no table: it is recorded if the environment has it."""
DEFAULTS: Mapping[str, Any] = {
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_enable_x64": False,
    "jax_random_seed_offset": 0,
    "jax_threefry_partitionable": True,
}
"""Settings of JAX that change numbers, and that are known to be set often, with JAX's defaults. One
that code has changed counts like one that the environment has."""
BITS_UNCHANGED = (
    *("jax_platform", "jax_num_cpu_devices", "jax_cuda_visible", "jax_rocm_visible"),
    *("jax_compilation_cache_", "jax_persistent_cache_", "jax_enable_compilation_cache"),
    *("jax_raise_persistent_cache_errors", "jax_explain_cache_misses", "jax_check_tracer_leaks"),
    *("jax_log", "jax_debug_", "jax_dump_", "jax_include_", "jax_traceback_", "jax_tracer_error_"),
    *("jax_hlo_source_", "jax_source_", "jax_pprint_", "jax_captured_constants_"),
    *("jax_transfer_guard", "jax_distributed_debug", "jax_numpy_rank_promotion"),
    *("jax_array_garbage_collection_guard", "jax_compiler_detailed_", "jax_legacy_prng_key"),
    *("jax_enable_checks", "jax_thread_guard"),
)
"""Beginnings of the settings that change no bit: caches of programs, output, checks, and devices,
which are an entry of their own."""


def library_settings_here() -> dict[str, str]:
    """Returns the variables of this process by which libraries below XLA may change bits."""
    given = compile_cache.environment_here()
    return {name: given[name] for name in sorted(given) if name.startswith(executable.LIBRARIES)}


def jax_settings_here() -> dict[str, str]:
    """Returns the settings of JAX in this process that may change bits and are not its defaults."""
    environment, values = compile_cache.environment_here(), jax.config.values
    given = {name for name in values if name.upper() in environment} | DEFAULTS.keys()
    return {
        name.upper(): str(values[name])
        for name in sorted(given & values.keys())
        if not name.startswith(BITS_UNCHANGED) and values[name] != DEFAULTS.get(name, UNSET)
    }


def numerics_fingerprint(
    config: RunConfig, claim: Claim, mesh: Mesh, plan: MeshPlan, compiled: CompiledSteps
) -> dict[str, str]:
    """Returns all that affects bits besides the config's trajectory; equal ones, equal bits.

    Not in it: what a host callback of custom code computes, and what custom code reads from files.

    Args:
      compiled: the compiled steps. On a GPU the compiler chooses kernels by timing them, so only
        the executable of the train step identifies them.
    """
    fingerprint = {
        "devices": meshes.format_devices(mesh),
        "mesh": " ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.axis_names),
        "microbatches": str(plan.microbatches),
        "threads": str(claim.threads),
        PROGRAM: compiled.text[:16],
        MODEL_CODE: _code_digest(("engine", "models"), [config.model, config.optimizer]),
        DATA_CODE: _code_digest(("data",), single_sources(config.data.source).values()),
    }
    if plan.virtual_shards is not None:
        fingerprint[REDUCTION] = INVARIANT
    if config.model.kind == "gpt":
        model = config.model
        fingerprint |= {"attention": model.attention, "remat": model.remat}
        fingerprint["scan_layers"] = str(model.scan_layers).lower()
        if model.loss_blocks > 1:
            fingerprint["loss_blocks"] = str(model.loss_blocks)
    if any(part.kind == "images" for part in single_sources(config.data.source).values()):
        fingerprint["pillow"] = importlib.metadata.version("pillow")
    if mesh.devices.flat[0].platform != "cpu":
        fingerprint["executable"] = str(compiled.train.runtime_executable().fingerprint)
    if compiled.xla_options:
        fingerprint[XLA_OPTIONS] = compiled.xla_options
    flags = {"xla_flags": compile_cache.xla_flags_here(), **jax_settings_here()}
    flags |= library_settings_here()
    return fingerprint | dict(claim.fingerprint) | dict(claim.versions) | flags


def _code_digest(folders: Sequence[str], sections: Iterable[Any]) -> str:
    """Returns a digest of the source of some folders of this package, and of custom targets.

    Args:
      folders: names of folders of this package.
      sections: sections of the config; with `kind: custom`, the module of its target is included
        and, if that is in a package, the other modules in its folder.
    """
    digests = [compile_cache.own_sources(folder) for folder in folders]
    for section in sections:
        if section.kind == "custom":
            digests.append(_module_digest(section.target.partition(":")[0]))
    known = [digest for digest in digests if digest is not None]
    if len(known) < len(digests):
        return UNKNOWN
    return hashlib.sha256("".join(known).encode()).hexdigest()[:16]


def _module_digest(name: str) -> str | None:
    """Returns a digest of an imported module's source; None: it has none, or it has changed."""
    module = sys.modules[name]
    source = getattr(module, "__file__", None)
    if source is None or not source.endswith(".py"):
        return None
    path = Path(source)
    paths = sorted(path.parent.glob("*.py")) if module.__package__ else [path]
    since, now = compile_cache.import_times(SystemClock())
    return executable.sources(path.parent, paths, since=since, now=now)
