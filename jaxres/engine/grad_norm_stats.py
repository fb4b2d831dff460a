"""What gradient norms are usual: a statistic inside the step that is robust against what it judges.

The logarithm of the norm has an exponentially weighted mean and variance. A norm counts for no more
than the clip band, so that a spike, or a row of them, can't make itself usual at once; one that is
not finite does not count at all, so that it blinds no later comparison. After ZClip (arXiv
2504.02507), with the logarithm, since norms spread by factors.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxres.config.schema_training import SpikesSection

MIN_DEVIATION = 0.2
"""Of the logarithm: norms that hardly vary make a change by a tenth no spike."""


def init() -> dict[str, jax.Array]:
    """Returns the statistic before the first step; scalars, float32 and int32."""
    zero = jnp.zeros((), jnp.float32)
    return {"count": jnp.zeros((), jnp.int32), "mean": zero, "variance": zero}


def score(norms: Any, norm: Float[Array, ""], section: SpikesSection) -> Float[Array, ""]:
    """Returns by how many deviations a norm is larger than usual; 0 during the warm-up."""
    above = (_log(norm) - norms["mean"]) / _deviation(norms)
    return jnp.where(norms["count"] >= section.warmup_steps, above, 0.0)


def limit(norms: Any, section: SpikesSection) -> Float[Array, ""]:
    """Returns the norm at the clip band's upper end; infinite during the warm-up."""
    edge = jnp.exp(norms["mean"] + section.clip_deviations * _deviation(norms))
    return jnp.where(norms["count"] >= section.warmup_steps, edge, jnp.inf)


def after(norms: Any, norm: Float[Array, ""], section: SpikesSection) -> dict[str, jax.Array]:
    """Returns the statistic with one more norm, which counts as `limit` at most."""
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
