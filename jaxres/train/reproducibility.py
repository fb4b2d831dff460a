"""Reproducibility level of a run: whether a resumed run is bitwise equal to an unbroken one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxres.config import RunConfig
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh_plan import MeshPlan
from jaxres.runlog.run_log import Claim

BITWISE = "bitwise on this topology"


def reproducibility_level(before: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> str:
    """Returns the level and, if it is not bitwise, the reason.

    Args:
      before: numerics fingerprints of all earlier segments of the run (Start.computation).
      now: numerics fingerprint of the segment that begins.

    >>> reproducibility_level([{"jax": "0.10.2"}], {"jax": "0.10.2", "devices": "1 x cpu cpu"})
    'statistical: devices not recorded -> 1 x cpu cpu'
    """
    changes: dict[str, list[str]] = {}
    for earlier in before:
        for name in {*earlier, *now}:
            was = earlier.get(name, "not recorded")
            if was != now.get(name) and was not in changes.setdefault(name, []):
                changes[name].append(was)
    differences = [
        f"{name} {' and '.join(was)} -> {now.get(name, 'not recorded')}"
        for name, was in sorted(changes.items())
        if was
    ]
    if differences:
        return "statistical: " + ", ".join(differences)
    if " gpu " in now.get("devices", "") and "deterministic_ops=true" not in now.get(
        "xla_flags", ""
    ):
        return (
            "statistical: GPU kernels may add in any order; for bitwise set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    return BITWISE


def numerics_fingerprint(
    config: RunConfig, claim: Claim, mesh: Mesh, plan: MeshPlan, step: Any, *, program: str
) -> dict[str, str]:
    """Returns what affects bits besides the config's trajectory; equal fingerprints, equal bits.

    Args:
      config: config of the run.
      claim: claim of the attempt.
      mesh: mesh of the devices.
      plan: how the devices share the work.
      step: the compiled train step. On a GPU the compiler chooses kernels by timing them, so only
        the program itself identifies them.
    """
    fingerprint = {
        "devices": meshes.format_devices(mesh),
        "mesh": " ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.axis_names),
        "microbatches": str(plan.microbatches),
        "threads": str(claim.threads),
    }
    if config.model.kind == "gpt":
        fingerprint |= {"attention": config.model.attention, "remat": config.model.remat}
    if mesh.devices.flat[0].platform != "cpu":
        fingerprint["program"] = str(step.runtime_executable().fingerprint)
    return fingerprint | dict(claim.fingerprint) | dict(claim.versions)
