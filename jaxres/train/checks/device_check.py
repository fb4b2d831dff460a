"""Finds out whether devices of this host are missing. Pure, no jax.

Home of: missing_device. A device that fails is often gone at the next start: JAX then finds fewer,
or only the CPU, and the run would be refused as if its config were wrong, or go on slowly. The
number that is expected is known in three cases only, so that a run that is resumed on purpose on
another machine raises no false alarm:
- JAXRES_MIN_DEVICES is set. The agent of a VM sets it to the number of GPUs of the machine type.
- An earlier attempt of the same supervisor process had more.
- The mesh has fixed sizes, and the run has trained with this mesh before.

Without its driver a host with one GPU has one device as before, a CPU. So the platform is compared
as well: with JAXRES_PLATFORM, and with that of the earlier attempts of the same supervisor.

Devices of another kind than before, or of several kinds, are no fault, but they round in other
ways: a warning, and the guarantee level of the start is `statistical`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from jaxres.engine.mesh_plan import AXES
from jaxres.faults import UnhealthyHost
from jaxres.runlog.guarantee import SEVERAL_KINDS
from jaxres.runlog.run_log import Claim, RunHistory, start_of
from jaxres.supervisor.attempt_runner import MIN_DEVICES, PLATFORM


def expected_devices(
    history: RunHistory, claim: Claim, host: int, *, given: int, mesh: Sequence[int]
) -> tuple[int, str]:
    """Returns the number of devices that a host must have, and why; 0: any number is right.

    Args:
      history: the run history, which contains the claim.
      host: the number of the host in this attempt.
      given: the number in JAXRES_MIN_DEVICES; 0: it is not set.
      mesh: the sizes of the mesh axes by the config; -1: all remaining devices.
    """
    expected = [(given, MIN_DEVICES)]
    claims = {each.attempt: each for each in history.claims}
    for record in history.starts:
        devices, earlier = start_of(record).devices, claims[record.attempt]
        if devices is None or earlier.attempt == claim.attempt:
            continue
        slots = earlier.slots or range(earlier.num_hosts)
        slot = host if claim.slots is None else claim.slots[host]
        if _process(earlier) == _process(claim) and claim.started and slot in slots:
            count = devices[list(slots).index(slot)]
            expected.append((count, f"as in attempt {earlier.attempt} of the same supervisor"))
        wanted = math.prod(mesh)  # Negative: one size is open.
        if sum(devices) == wanted and start_of(record).computation.get("mesh") == _text(mesh):
            why = f"the mesh needs {wanted} devices, as in attempt {earlier.attempt}"
            expected.append((wanted // claim.num_hosts, why))
    return max(expected, key=lambda pair: pair[0])


def check(found: int, expected: int, why: str, *, host: int, name: str) -> None:
    """Raises if a host has fewer devices than are expected.

    Raises:
      UnhealthyHost: devices are missing.
    """
    if found < expected:
        raise UnhealthyHost(
            f"host {host} ({name}): {expected} devices expected, {found} found ({why}). Check the "
            "devices of this host (nvidia-smi, dmesg). To go on with fewer: "
            "hardware.allow_fewer=true, and another mesh if its sizes are fixed"
        )


def expected_platform(history: RunHistory, claim: Claim, *, given: str) -> tuple[str, str]:
    """Returns the platform that the devices must have, and why; empty: any is right.

    Args:
      history: the run history, which contains the claim.
      given: the platform in JAXRES_PLATFORM; empty: it is not set.
    """
    if given:
        return given, PLATFORM
    claims = {each.attempt: each for each in history.claims}
    for record in reversed(history.starts):
        earlier = claims[record.attempt]
        is_ours = _process(earlier) == _process(claim) and bool(claim.started)
        _, _, devices = start_of(record).computation.get("devices", "").partition(" x ")
        if is_ours and devices and earlier.attempt != claim.attempt:
            platform = devices.partition(" ")[0]
            return platform, f"as in attempt {earlier.attempt} of the same supervisor"
    return "", ""


def check_platform(found: str, expected: str, why: str, *, host: int, name: str) -> None:
    """Raises if the devices of a host are CPUs and are expected to be something else.

    Raises:
      UnhealthyHost: they are.
    """
    if found == "cpu" and expected not in ("", "cpu"):
        raise UnhealthyHost(
            f"host {host} ({name}): JAX finds no {expected}, only CPUs ({why}). Check driver and "
            "devices of this host (nvidia-smi, dmesg) and its installation of jax. To train on "
            f"CPUs on purpose, start the command again with JAX_PLATFORMS=cpu, without {PLATFORM}"
        )


def kind_warnings(
    history: RunHistory, claim: Claim, kinds: Mapping[int, Sequence[str]]
) -> list[str]:
    """Returns warnings about devices of another kind than in the attempt before, or of several.

    Args:
      kinds: number of each host -> the kinds of its devices.
    """
    warnings: list[str] = []
    now = sorted({kind for each in kinds.values() for kind in each})
    if len(now) > 1:
        places = (f"{', '.join(sorted(set(each)))} on host {h}" for h, each in kinds.items())
        warnings.append(
            f"the job has devices of several kinds ({'; '.join(places)}): each step takes as long "
            "as on the slowest, and copies of the state may differ in their last bits, so "
            "guards.corruption only warns. Use hosts with devices of one kind, or refuse such a "
            "start with run.guarantee=bitwise"
        )
    earlier = [record for record in history.starts if record.attempt != claim.attempt]
    was = kinds_of(start_of(earlier[-1]).computation.get("devices", "")) if earlier else []
    if was and was != now:
        warnings.append(
            f"the devices are {SEVERAL_KINDS.join(now)}, in attempt {earlier[-1].attempt} they "
            f"were {SEVERAL_KINDS.join(was)}: they round in other ways, so from here on the run is "
            "only statistically the one that it would have been. Go on with the former kind of "
            "devices if that matters; run.guarantee=bitwise refuses such a start"
        )
    return warnings


def kinds_of(devices: str) -> list[str]:
    """Returns the kinds of devices of an entry `devices` of Start.computation, sorted.

    >>> kinds_of("8 x gpu NVIDIA H100 on 2 hosts"), kinds_of("4 x gpu A100 + H100"), kinds_of("")
    (['NVIDIA H100'], ['A100', 'H100'], [])
    """
    found = re.fullmatch(r"\d+ x \S+ (.+?)(?: on \d+ hosts)?", devices)
    return [] if found is None else sorted(found[1].split(SEVERAL_KINDS))


def _process(claim: Claim) -> tuple[str, int, int]:
    """Returns the identity of a claim's supervisor process: boot id, PID and start time."""
    return claim.boot_id, claim.pid, claim.started


def _text(mesh: Sequence[int]) -> str:
    """Returns the mesh as Start.computation has it."""
    return " ".join(f"{axis}={size}" for axis, size in zip(AXES, mesh, strict=True))
