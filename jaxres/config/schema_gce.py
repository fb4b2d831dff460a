"""A job on VMs of Google Compute Engine: how many, of which kind, where, and what runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from jaxres.config.base import PositiveFloat, Section, free

Zone = Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]+-[a-z]$")]

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class RungCommon(Section):
    zones: tuple[Zone, ...] = free(...)
    """Zones that are tried, in this order; all VMs of a job are in one."""
    machine_type: str = free(...)
    """Such as a3-megagpu-8g; its GPUs come with it."""
    dollars_per_hour: PositiveFloat | None = free(None)
    """Price of one VM; needed for launch.max_dollars, and for what `status` says is spent."""


class SpotRung(RungCommon):
    kind: Literal["spot"] = "spot"
    """May be taken away at any time."""
    notice_seconds: Literal[0, 120] = free(120)
    """Notice of preemption that is asked for; where the API refuses it, there is none but the 30 s
    of the shutdown."""


class FlexStartRung(RungCommon):
    kind: Literal["flex_start"] = "flex_start"
    """Waits in a queue, then runs for at most seven days."""
    wait_minutes: PositiveInt = free(10)
    """Longest wait in the queue before the next rung is tried; at most 120."""


class ReservationRung(RungCommon):
    kind: Literal["reservation"] = "reservation"
    """VMs of a reservation (RESERVATION_BOUND)."""
    reservation: str = free(...)
    """Name of the reservation."""


class StandardRung(RungCommon):
    kind: Literal["standard"] = "standard"
    """On demand."""


Rung = Annotated[
    SpotRung | FlexStartRung | ReservationRung | StandardRung, Field(discriminator="kind")
]


class PythonRuntime(Section):
    kind: Literal["python"] = "python"
    python: str = free("python3")
    """Interpreter on the VM's image."""
    packages: tuple[str, ...] = free(())
    """What pip installs into an environment of its own at the first boot of a VM; the image needs
    nothing but the interpreter then. Empty: the interpreter has everything."""


class ContainerRuntime(Section):
    kind: Literal["container"] = "container"
    image: str = free(...)
    """Container image with Python, JAX and what jaxres needs; the VM's image has docker."""
    flags: tuple[str, ...] = free(("--gpus=all",))
    """Further words for `docker run`."""


Runtime = Annotated[PythonRuntime | ContainerRuntime, Field(discriminator="kind")]


class GceSection(Section):
    project: str = free(...)
    """Project that is billed."""
    num_hosts: PositiveInt = free(1)
    """VMs of the job."""
    ladder: tuple[Rung, ...] = free(...)
    """Where and how VMs are asked for, the best first: whatever has no capacity or no quota is left
    alone for a while, and the next is tried."""
    image: str | None = free(None)
    """Boot image, as projects/P/global/images/I or .../images/family/F; null: the template's."""
    template: str | None = free(None)
    """Instance template whose properties hold where nothing here says otherwise."""
    disk_gb: PositiveInt = free(200)
    """Size of the boot disk."""
    disk_type: str | None = free(None)
    """Such as hyperdisk-balanced, which A3 Ultra and A4 need; null: the service's default."""
    subnetworks: tuple[str, ...] = free(())
    """One network interface each, as regions/R/subnetworks/S or a name; {region} stands for the
    region of the zone. Empty: the default network, or the template's."""
    service_account: str | None = free(None)
    """Whose rights the VMs have; null: the project's default one, or the template's."""
    runtime: Runtime = PythonRuntime()
    """What runs the training on a VM."""
    package: Path | None = free(None)
    """Folder of your own code, put on every VM with jaxres' own: its Python modules can be named as
    targets, and it is the working folder. Every attempt runs the code of the first `up`."""
    env: dict[VariableName, str] = free({})
    """Further environment variables of the training, such as NCCL's; no secrets, they are stored in
    the run directory."""
    port: Annotated[int, Field(ge=1024, le=60_000)] = free(8470)
    """First of 1000 ports where hosts meet, one after the other by attempt."""
    max_run_hours: PositiveFloat = free(168.0)
    """Age at which a VM deletes itself, whatever has become of the launcher."""
    ready_minutes: PositiveFloat = free(15.0)
    """Longest time from the creation of a VM until its agent is heard of."""
    repair_minutes: PositiveFloat = free(10.0)
    """Longest try to replace lost VMs where the others are, before all are placed anew."""
    lost_seconds: PositiveFloat = free(8.0)
    """A VM whose agent has not been heard of for so long is lost, if the bucket answers."""
    stall_minutes: PositiveFloat | None = free(None)
    """An attempt without a new committed step for so long is restarted; null: 3 times the longest
    wait so far between two commits of an attempt, at least an hour; never before there were two."""
    lease_seconds: PositiveFloat = free(60.0)
    """A launcher that has not renewed its lease for 1.5 times as long is succeeded by another."""
    endpoint: str | None = free(None)
    """Address of the Compute API; null: Google's, or JAXRES_GCE_ENDPOINT."""
    max_cool_minutes: NonNegativeInt = free(60)
    """Longest time that a rung is left alone after it had no capacity."""
