"""The learning rate after rollbacks: a factor that enters the step, so nothing is compiled anew.

Which factor holds at which step, the run log says (`Line.rate_factor`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres import mesh as meshes
from jaxres.config.guards import RollbackSection


def shape(section: RollbackSection | None, mesh: Mesh) -> jax.ShapeDtypeStruct | None:
    """Returns the factor without its value; None where the config knows of no other rate."""
    if section is None or section.rate_factor == 1.0:
        return None
    return jax.ShapeDtypeStruct((), np.float32, sharding=meshes.replicated(mesh))


def factors(section: RollbackSection | None, mesh: Mesh) -> Callable[[float], jax.Array | None]:
    """Returns what lays a factor on every device, each only once; None as `shape` has it."""
    form = shape(section, mesh)
    if form is None:
        return lambda factor: None
    sharding = form.sharding
    assert sharding is not None

    @functools.cache  # As many as there are rollbacks, which are bounded.
    def laid(factor: float) -> jax.Array:
        return jax.make_array_from_callback((), sharding, lambda index: np.float32(factor))

    return laid
