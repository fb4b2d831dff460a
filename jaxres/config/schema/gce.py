"""Schema of a job on VMs of Google Compute Engine: number, type and place of VMs, and software."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from jaxres.config.schema.base import (
    Hours,
    LocalPath,
    Minutes,
    NonNegativeMinutes,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    form,
    free,
)

_RESOURCE = form(
    r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
    "1 to 63 small letters, digits and -, the first a letter and the last no -",
)
Zone = Annotated[str, form(r"[a-z]+-[a-z]+[0-9]+-[a-z]", "a zone such as us-central1-a")]
LabelKey = Annotated[
    str,
    form(r"[a-z][-_a-z0-9]{0,62}", "1 to 63 small letters, digits, - and _, the first a letter"),
]
LabelValue = Annotated[str, form(r"[-_a-z0-9]{0,63}", "at most 63 small letters, digits, - and _")]
Tag = Annotated[str, _RESOURCE]
MetadataKey = Annotated[str, form(r"[-_a-zA-Z0-9]{1,128}", "1 to 128 letters, digits, - and _")]
PolicyName = Annotated[str, _RESOURCE]
PythonVersion = Annotated[
    str, form(r"3\.1[1-9](\.[0-9]+)?", "a version of Python from 3.11, such as 3.12")
]
NicType = Literal["GVNIC", "VIRTIO_NET", "IDPF", "MRDMA", "IRDMA"]
VariableName = Annotated[
    str, form(r"[A-Za-z_][A-Za-z0-9_]*", "letters, digits and _, the first no digit")
]


MOST_HOSTS = 10_000
"""Largest number of VMs of a job, all of which connect to its first host."""


def _parse_hosts(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_HOSTS:
        return value
    found = re.fullmatch(r"([1-9][0-9]{0,5})\.\.([1-9][0-9]{0,5})", str(value))
    if found is None or not int(found[1]) <= int(found[2]) <= MOST_HOSTS:
        text = "must be a whole number from 1 to {most}, or a range A..B of such"
        raise PydanticCustomError("num_hosts", text, {"most": MOST_HOSTS})
    return found[0]


NumHosts = Annotated[int | str, PlainValidator(_parse_hosts)]
"""A number, or a range A..B with the smaller number first."""


class CommonOptionFields(Section):
    """Fields of every capacity option: where and by which machine type VMs are created."""

    uses_reservation: ClassVar[bool] = False
    """Whether its VMs are of a reservation: their quota is used and paid for without them too."""
    waits_in_queue: ClassVar[bool] = False
    """Whether a request waits for capacity; before that no VM exists or is paid for."""
    zones: tuple[Zone, ...] = free(...)
    """Zones, tried in this order; all VMs of a job are in one zone."""
    machine_type: str = free(...)
    """Machine type, such as a3-megagpu-8g, which includes its GPUs."""
    dollars_per_hour: PositiveFloat | None = free(None)
    """Price of one VM, for launch.max_dollars and for the costs that `status` prints.

    null: unknown; launch.max_dollars and alerts.spend_dollars need it."""


class SpotOption(CommonOptionFields):
    """Capacity option: spot VMs."""

    kind: Literal["spot"] = "spot"
    """Spot VMs: Compute Engine may preempt them at any time."""
    notice_seconds: Literal[0, 120] = free(120)
    """Preemption notice that is requested for the VM.

    If the API refuses it, there is only the 30 s of the shutdown period."""


class FlexStartOption(CommonOptionFields):
    """Capacity option: flex-start VMs, which wait in a queue."""

    waits_in_queue: ClassVar[bool] = True
    kind: Literal["flex_start"] = "flex_start"
    """Flex-start VMs: wait in a queue, then run for at most seven days."""
    wait_minutes: PositiveInt = free(10)
    """Longest wait in the queue before the next option is tried; at most 120 minutes."""


class ReservationOption(CommonOptionFields):
    """Capacity option: VMs of a reservation."""

    uses_reservation: ClassVar[bool] = True
    kind: Literal["reservation"] = "reservation"
    """VMs of a reservation of your project."""
    reservation: str = free(...)
    """Name of the reservation."""
    provisioning_model: Literal["reservation_bound", "standard"] = free("reservation_bound")
    """Provisioning model: `standard` for an ordinary reservation that you have created yourself.

    `reservation_bound` is for blocks that Google delivers for a fixed time: future reservations in
    calendar mode, dense deployments."""


class StandardOption(CommonOptionFields):
    """Capacity option: on-demand VMs."""

    kind: Literal["standard"] = "standard"
    """On-demand VMs."""


CapacityOption = Annotated[
    SpotOption | FlexStartOption | ReservationOption | StandardOption, Field(discriminator="kind")
]


class PythonRuntime(Section):
    """Software environment: a virtual environment on the VM's image."""

    kind: Literal["python"] = "python"
    python: str = free("python3")
    """Python interpreter of the VM's image."""
    python_version: PythonVersion | None = free(None)
    """Version of Python, such as "3.12", that uv installs with packages; null: the image's Python.

    The image then needs neither Python nor pip; `python` is not used. Needs the internet."""
    packages: tuple[str, ...] = free(())
    """Packages that pip installs into a separate environment at the first boot of a VM.

    The image then needs only the interpreter. Empty: the interpreter's packages are used."""


class ContainerRuntime(Section):
    """Software environment: a container image."""

    kind: Literal["container"] = "container"
    image: str = free(...)
    """Container image with Python, JAX and jaxres' requirements; the VM's image needs docker."""
    install_docker: bool = free(False)
    """Whether docker and NVIDIA's container toolkit are installed on VMs whose image lacks them.

    At the first boot, on Debian and Ubuntu; needs the internet. The driver is not installed."""
    flags: tuple[str, ...] = free(("--gpus=all",))
    """Additional arguments of `docker run`."""


Runtime = Annotated[PythonRuntime | ContainerRuntime, Field(discriminator="kind")]


class GceSection(Section):
    """VMs of `launch gce`, and the software on them."""

    project: str = free(...)
    """Google Cloud project that is billed."""
    num_hosts: NumHosts = free(1)
    """Number of VMs of the job; A..B: B, and down to A of them while there is no capacity for more.

    The job then trains with as many as the mesh and the batch allow, and gets the others back once
    there is capacity for them and the time that is left pays for the restart."""
    spares: Annotated[int, Field(ge=0, le=MOST_HOSTS)] = free(0)
    """Number of further VMs that wait, ready, to replace lost VMs of the job at once.

    They are requested in the zone of the others once an attempt runs, and cost as much as these. No
    job waits for them, and none fails if there are none. Not with a flex_start option."""
    capacity_options: tuple[CapacityOption, ...] = free(...)
    """Capacity options in order of preference: machine type, zones, provisioning model.

    An option without capacity or quota is not tried again for a while, and the next one is
    tried."""
    return_to_cheaper: Literal["auto", "off"] = free("auto")
    """Whether a job that trains on a costlier option moves back to a preferred, cheaper one.

    auto: once all its VMs are ready beside the attempt, if that saves at least twice its costs. Of
    the same machine type only, and never without prices of both or to a flex_start option."""
    image: str | None = free(None)
    """Boot image, projects/P/global/images/I or .../images/family/F; null: the template's."""
    template: str | None = free(None)
    """Instance template, whose properties apply unless a key here overrides them."""
    disk_gb: Annotated[int, Field(gt=0, le=2**16)] = free(200)
    """Size of the boot disk in GB."""
    disk_type: str | None = free(None)
    """Boot disk type, as hyperdisk-balanced (required by A3 Ultra, A4); null: GCE's default."""
    subnetworks: tuple[str, ...] = free(())
    """Subnetworks, one per network interface, as regions/R/subnetworks/S or a name.

    {region} is replaced by the zone's region. One of a Shared VPC is
    projects/HOST_PROJECT/regions/{region}/subnetworks/S. Empty: the default network, or the
    template's."""
    nic_types: tuple[NicType, ...] = free(())
    """Types of the network interfaces, in the order of subnetworks; empty: Compute Engine chooses.

    Interfaces of an RDMA network (A3 Ultra, A4, A4X) must be MRDMA, all others may not be."""
    external_ip: bool = free(False)
    """Whether the first network interface of a VM gets an external IPv4 address.

    Without one, the VMs reach the bucket only if their subnetwork has Private Google Access, and
    the internet only through Cloud NAT. With a template and no subnetworks the template decides."""
    service_account: str | None = free(None)
    """Service account of the VMs; null: the project's default account, or the template's."""
    labels: dict[LabelKey, LabelValue] = free({})
    """Further labels of the VMs and their boot disks, such as those of a cost report.

    Keys that begin with jaxres- are jaxres' own. Disks of a template keep the template's labels."""
    tags: tuple[Tag, ...] = free(())
    """Network tags of the VMs, by which firewall rules select them; empty: the template's."""
    metadata: dict[MetadataKey, str] = free({})
    """Further metadata of the VMs, such as enable-oslogin: "TRUE"; never secrets.

    Metadata of the template is kept, unless a key here or one of jaxres' own has the same name."""
    resource_policies: tuple[PolicyName, ...] = free(())
    """Names of resource policies in the VMs' region, such as a compact placement policy.

    A reservation with a policy needs the same one. Empty: the template's."""
    host_error_timeout_seconds: Annotated[int, Field(ge=90, le=330, multiple_of=30)] | None = free(
        None
    )
    """Time after which Compute Engine ends a VM whose host does not respond; null: its default.

    90 to 330, in steps of 30. Until then the VM keeps its quota and its place in a reservation."""
    runtime: Runtime = PythonRuntime()
    """Software environment of the training on a VM."""
    package: LocalPath | None = free(None)
    """Folder of your own code, which is copied to every VM together with jaxres.

    It is the working directory, and its Python modules can be named as targets. Every attempt runs
    the code of the first `up`. Files that git ignores, or that the folder's .jaxresignore names,
    are not copied; secrets and links out of it are refused. `up --dry-run` lists the files."""
    env: dict[VariableName, str] = free({})
    """Additional environment variables of the training, such as NCCL's; never secrets.

    They are stored in the run directory."""
    cloud_logging: Literal["auto", "off"] = free("auto")
    """Whether the VMs send the console lines of training and agent to Cloud Logging.

    auto: where the image has Google's Ops Agent and no configuration of its own for it."""
    port: Annotated[int, Field(ge=1024, le=60_000)] = free(8470)
    """First of 1000 ports for the rendezvous of the hosts; each attempt uses the next one."""
    max_run_hours: Hours = free(168.0)
    """Age at which a VM deletes itself, whether or not a launcher is alive."""
    idle_minutes: Minutes | None = free(60.0)
    """Time after which a VM without training and without a launcher powers itself off; null: never.

    It then costs its disk only, and the next `up`, `stop` or `down` deletes it. A launcher that
    waits for capacity or for other VMs is active: its VMs stay."""
    ready_minutes: Minutes = free(15.0)
    """Longest time from the creation of a VM to the first heartbeat of its agent."""
    repair_minutes: Minutes = free(10.0)
    """Longest attempt to replace lost VMs in the same zone, before all VMs are recreated."""
    lost_seconds: Seconds = free(8.0)
    """Silence of an agent after which its VM is suspected to be lost, if the bucket is reachable.

    It counts as lost at once if the Compute API then has no such VM, or one that stops."""
    confirm_lost_seconds: Seconds = free(45.0)
    """Silence after which a suspected VM counts as lost though the Compute API lists it as running.

    While an attempt runs, new committed steps and heartbeats of its supervisor end this silence."""
    max_replacements_without_commit: PositiveInt = free(20)
    """Replacements of VMs without a new committed step, for any cause, before the job ends (84).

    VMs that are lost together count once."""
    stall_minutes: Minutes | None = free(None)
    """Time without a new committed step after which an attempt is restarted; null: automatic.

    Automatic: 3 times the longest time so far between two commits of an attempt, at least an hour;
    never before an attempt has had two commits."""
    lease_seconds: Seconds = free(18.0)
    """Lease of the launcher; after 1.5 times this without renewal another launcher takes over.

    18: the lease of a dead launcher is taken within 30 s."""
    endpoint: str | None = free(None)
    """URL of the Compute API, also asked for prices; null: JAXRES_GCE_ENDPOINT, else Google's."""
    max_backoff_minutes: NonNegativeMinutes = free(60.0)
    """Longest backoff before an option without capacity is tried again."""

    @property
    def least_hosts(self) -> int:
        """Smallest number of VMs with which the job trains."""
        return self._hosts()[0]

    @property
    def most_hosts(self) -> int:
        """Number of VMs that the job asks for."""
        return self._hosts()[1]

    def _hosts(self) -> tuple[int, int]:
        least, _, most = str(self.num_hosts).partition("..")
        return int(least), int(most or least)
