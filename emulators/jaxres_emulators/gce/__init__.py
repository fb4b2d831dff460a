"""Google Compute Engine on loopback: VMs that are processes, with faults on request.

Manual use: `python -m jaxres_emulators.gce` prints the environment to set. The state is in memory.

    with GceEmulator(speed=60) as gce:     # one emulated minute is a real second
        ...                                # a launcher with gce.env in its environment
        gce.preempt("jx-run-p1-0")         # with the VM's requested notice
        gce.stockout(zone="us-central1-a", model="SPOT")
        gce.fail("503", call="instances.bulkInsert", times=2)
        gce.wait_for(lambda: gce.vms() == {})

Each VM is a process tree in a session of its own, with a home, an address of its own in 127.0.0.0/8
(its internal IP) and a metadata server there. What it has started is found and ended with it,
daemons too, by a mark in its environment; a process that is begun with an empty environment is not
found.

What it does not have, against the real one:
- SSH, disks, networks, firewalls, several NICs, boot of an image: VMs are this machine, run as
  the user that starts the emulator, and share its files and the ports of 0.0.0.0.
- The order of systemd at shutdown: all processes get SIGTERM at once, and the shutdown script runs
  beside them; the VM is off as soon as the last one has ended.
- Managed instance groups but zonal ones for resize requests with names of Flex-start VMs;
  reservations but specific ones of one machine type, the queue of single Flex-start VMs (status
  PENDING), REPAIRING, graceful shutdown (PENDING_STOP), placement policies.
- Limits of rate and of capacity but where a test sets them; quotas but of GPUs, CPUs, instances,
  boot disks and the local SSDs of A2, and two of all regions.
- Firewalls: their rules can be read, and nothing enforces them. Subnetworks have Private Google
  Access until a test takes it (the real ones have none at first): their VMs do not reach the bucket
  then, without an external address or Cloud NAT.
- GPUs: a VM of a machine type with GPUs has an nvidia-smi that lists them, and no device.
- Filters of lists: no functions, and a * only at the end of a word.

What is not documented of the real one, and may differ there: the error messages where a comment
marks them; whether missing quota or a used name (bulkInsert) is reported at once or by the
operation (both are supported); the status of a full reservation, and whether it is reported at once
(here: by the operation); what a list of all zones has for an unreachable zone (here: a warning
UNREACHABLE and `unreachables` with returnPartialSuccess; else it fails); whether bulkInsert accepts
FLEX_START (here: yes, with the VMs at once); whether a VM without capacity is listed meanwhile
(here: as PROVISIONING); the codes when a Spot VM is preempted during its creation; whether
`preempted` changes before the power button without a requested notice (here: before); the state of
a Spot VM with DELETE after a host error (here: TERMINATED, and it keeps its name); how long request
ids are remembered (here: forever); all durations.
"""

from jaxres_emulators.gce.emulator import GceEmulator

__all__ = ["GceEmulator"]
