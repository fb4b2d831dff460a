"""Google Cloud Storage on loopback: the rules of its JSON API, with faults on request.

By hand: `python -m jaxres_emulators.gcs` prints the environment to set. The state is in memory.
"""

from jaxres_emulators.gcs.faults import FaultRule
from jaxres_emulators.gcs.server import GcsServer

__all__ = ["FaultRule", "GcsServer"]
