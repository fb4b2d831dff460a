"""Google Cloud Storage on loopback: what its JSON API enforces, with faults on request.

By hand: `python -m jaxres.testing.gcs` prints the environment to set. The state is in memory.
"""

from jaxres.testing.gcs.faults import FaultRule
from jaxres.testing.gcs.server import GcsServer

__all__ = ["FaultRule", "GcsServer"]
