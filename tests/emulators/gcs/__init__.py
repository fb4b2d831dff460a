"""Google Cloud Storage on loopback: what its JSON API enforces, with faults on request.

By hand: `python -m tests.emulators.gcs` prints the environment to set. The state is in memory.
"""

from tests.emulators.gcs.faults import FaultRule
from tests.emulators.gcs.server import GcsServer

__all__ = ["FaultRule", "GcsServer"]
