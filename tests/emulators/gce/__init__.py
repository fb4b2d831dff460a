"""Google Compute Engine on loopback: VMs that are processes, with faults where a test asks.

By hand: `python -m tests.emulators.gce` prints the environment to set. The state is in memory.
"""

from tests.emulators.gce.emulator import GceEmulator

__all__ = ["GceEmulator"]
