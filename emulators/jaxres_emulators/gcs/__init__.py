"""Google Cloud Storage on loopback: what its JSON API enforces, with faults on request.

By hand: `python -m jaxres_emulators.gcs` prints the environment to set. The state is in memory.
"""

from jaxres_emulators.gcs.faults import FaultRule
from jaxres_emulators.gcs.server import GcsServer

__all__ = ["FaultRule", "GcsServer"]
