"""The guarantee level of a run: whether it ends bit for bit where an unbroken one would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from jaxres.config import RunConfig
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh_plan import Plan
from jaxres.runlog.run_log import Claim

BITWISE = "bitwise on this topology"


def guarantee(
    before: Sequence[Mapping[str, str]], now: Mapping[str, str], *, is_verified: bool = True
) -> str:
    """Returns the level and, where it is lower, why.

    Args:
      before: what decided bits in every earlier segment of the run (runlog.Start.computation).
      now: the same for the segment that begins.
      is_verified: whether what was restored could be held against its digests.

    >>> guarantee([{"jax": "0.10.2"}], {"jax": "0.10.2", "devices": "1 x cpu cpu"})
    'statistical: devices not recorded -> 1 x cpu cpu'
    """
    changes: dict[str, list[str]] = {}
    for there in before:
        for name in {*there, *now}:
            was = there.get(name, "not recorded")
            if was != now.get(name) and was not in changes.setdefault(name, []):
                changes[name].append(was)
    told = [
        f"{name} {' and '.join(was)} -> {now.get(name, 'not recorded')}"
        for name, was in sorted(changes.items())
        if was
    ]
    if not is_verified:
        told.append("restored from a checkpoint without digests (format 1): content not verified")
    if told:
        return "statistical: " + ", ".join(told)
    if " gpu " in now.get("devices", "") and "deterministic_ops=true" not in now.get(
        "xla_flags", ""
    ):
        return (
            "statistical: GPU kernels may add in any order; for bitwise set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true"
        )
    return BITWISE


def computation(
    config: RunConfig, claim: Claim, mesh: Mesh, plan: Plan, step: Any
) -> dict[str, str]:
    """Returns what decides bits besides the trajectory; equal words, equal bits.

    Args:
      config: the run's.
      claim: of the attempt.
      mesh: the devices.
      plan: how they share the work.
      step: the compiled train step. On a GPU the compiler tries out which kernels are the fastest,
        so that only the program itself tells.
    """
    words = {
        "devices": meshes.devices_in_words(mesh),
        "mesh": " ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh.axis_names),
        "microbatches": str(plan.microbatches),
        "threads": str(claim.threads),
    }
    if config.model.kind == "gpt":
        words |= {"attention": config.model.attention, "remat": config.model.remat}
    if mesh.devices.flat[0].platform != "cpu":
        words["program"] = str(step.runtime_executable().fingerprint)
    return words | dict(claim.fingerprint) | dict(claim.versions)
