"""Google Compute Engine on loopback: VMs that are processes, with faults where a test asks.

By hand: `python -m tests.emulators.gce` prints the environment to set. The state is in memory.

    with GceEmulator(speed=60) as gce:     # a minute of theirs is a second of ours
        ...                                # a launcher with gce.env in its environment
        gce.preempt("jx-run-p1-0")         # with the notice that the VM has asked for
        gce.stockout(zone="us-central1-a", model="SPOT")
        gce.fail("503", call="instances.bulkInsert", times=2)
        gce.wait_for(lambda: gce.vms() == {})

Each VM is a process tree in a session of its own, with a home, an address of its own in 127.0.0.0/8
(its internal IP) and a metadata server there. What it has started is found and ended with it,
daemons too, by a mark in its environment; a process that is begun with an empty environment is not
found.

What it does not have, against the real one:
- SSH, disks, networks, firewalls, several NICs, boot of an image: VMs are this machine, run as
  whoever starts the emulator, and share its files and the ports of 0.0.0.0.
- The order of systemd at shutdown: all processes get SIGTERM at once, and the shutdown script runs
  beside them; the VM is off as soon as the last one has ended.
- Managed instance groups, resize requests, reservations (only that one is named), the queue of
  Flex-start (status PENDING), REPAIRING, graceful shutdown (PENDING_STOP), placement policies.
- Limits of rate and of capacity but where a test sets them; quotas but of GPUs, CPUs and instances.
- Filters of lists: no functions, and a * only at the end of a word.

What is not known of the real one, and may be otherwise there: the words of refusals where a comment
says so; whether want of quota or a name that is taken (bulkInsert) is told at once or by the
operation (both can be had); whether bulkInsert takes FLEX_START (here: yes, and has the VMs at
once); whether a VM that finds no place is shown meanwhile (here it is, as PROVISIONING); the codes
when a Spot VM is preempted while it is created; whether `preempted` changes before the power button
where no notice was asked for (here: before); what becomes of a Spot VM with DELETE after a host
error (here it is TERMINATED and keeps its name); how long requests of the same id are known (here:
for ever); all durations.
"""

from tests.emulators.gce.emulator import GceEmulator

__all__ = ["GceEmulator"]
