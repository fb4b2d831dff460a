"""Running statistics of the gradient norm inside the step, robust against spikes.

The statistics are an exponentially weighted mean and variance of the norm's logarithm. A norm is
limited to the clip band before it is added, so that one spike, or several in a row, do not become
usual at once. A norm that is not finite is not added, so that later comparisons remain valid. After
ZClip (arXiv 2504.02507), with the logarithm, because norms vary by factors.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxres.config.schema.training import SpikesSection

MIN_DEVIATION = 0.2
"""Least deviation of the logarithm: a change by a tenth is no spike if norms hardly vary."""


def init() -> dict[str, jax.Array]:
    """Returns the statistics before the first step; scalars, float32 and int32."""
    zero = jnp.zeros((), jnp.float32)
    return {"count": jnp.zeros((), jnp.int32), "mean": zero, "variance": zero}


def score(norms: Any, norm: Float[Array, ""], section: SpikesSection) -> Float[Array, ""]:
    """Returns the number of deviations by which a norm exceeds the usual; 0 in the warm-up."""
    above = (_log(norm) - norms["mean"]) / _deviation(norms)
    return jnp.where(norms["count"] >= section.warmup_steps, above, 0.0)


def limit(norms: Any, section: SpikesSection) -> Float[Array, ""]:
    """Returns the norm at the edge of the clip band; infinite during the warm-up."""
    edge = jnp.exp(norms["mean"] + section.clip_deviations * _deviation(norms))
    return jnp.where(norms["count"] >= section.warmup_steps, edge, jnp.inf)


def update(norms: Any, norm: Float[Array, ""], section: SpikesSection) -> dict[str, jax.Array]:
    """Returns the statistics with one more norm, limited to `limit`."""
    count = norms["count"] + 1
    share = jnp.maximum(1.0 / count, 1.0 / section.window_steps)
    delta = _log(jnp.minimum(norm, limit(norms, section))) - norms["mean"]
    new = {
        "count": count,
        "mean": norms["mean"] + share * delta,
        "variance": (1 - share) * (norms["variance"] + share * delta * delta),
    }
    return jax.tree.map(lambda n, o: jnp.where(jnp.isfinite(norm), n, o), new, dict(norms))


def _log(norm: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.log(jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))


def _deviation(norms: Any) -> Float[Array, ""]:
    return jnp.maximum(jnp.sqrt(norms["variance"]), MIN_DEVIATION)
