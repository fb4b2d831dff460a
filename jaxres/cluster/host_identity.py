"""Identity of a host's machine, equal in later attempts whatever its role. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import pydantic

HOST_NAME = "JAXRES_HOST_NAME"
"""Environment variable with the name of the machine: in Kubernetes, `spec.nodeName`."""
INSTANCE, PHYSICAL_HOST = "JAXRES_INSTANCE", "JAXRES_PHYSICAL_HOST"
"""Environment variables that `launch gce` sets: the VM's id, and the server that it runs on."""
SLURM_NODE, KUBERNETES = "SLURMD_NODENAME", "KUBERNETES_SERVICE_HOST"
MAX_NAME = 256

Name = Annotated[str, pydantic.Field(max_length=MAX_NAME)]


@dataclass(frozen=True)
class HostIdentity:
    """The machine of a host."""

    name: Name = ""
    """Name of the machine; empty: unknown, so that the machine can't be recognised."""
    instance: Name = ""
    """Id of the VM, which a later VM of the same name does not have; empty: unknown, or no VM."""
    physical_host: Name = ""
    """The server that the VM runs on; empty: unknown, or no VM."""


UNKNOWN = HostIdentity()


def identify(env: Mapping[str, str], *, hostname: str) -> HostIdentity:
    """Returns the identity of this machine.

    The host name of a pod in Kubernetes is that of its role, not of its machine.

    >>> identify({"SLURMD_NODENAME": "node17"}, hostname="localhost").name
    'node17'
    >>> identify({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, hostname="train-0").name
    ''
    """
    default = "" if KUBERNETES in env else hostname
    name = env.get(HOST_NAME) or env.get(SLURM_NODE) or default
    instance, physical_host = env.get(INSTANCE, ""), env.get(PHYSICAL_HOST, "")
    return HostIdentity(name[:MAX_NAME], instance[:MAX_NAME], physical_host[:MAX_NAME])
