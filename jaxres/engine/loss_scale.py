"""Dynamic loss scale of a run that computes in float16; part of the saved state.

The backward pass starts from a factor, a power of two, and every microbatch's gradient is divided
by it in float32 before use. This is exact unless a number leaves float16's range. If the gradient
is not finite although the loss is, the factor is halved; after many steps without such an overflow
it is doubled. (arXiv 1710.03740, section 3.2; PyTorch's GradScaler)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxres.config.schema.training import LEAST, MOST, LossScaleSection

EXPONENT = 0x7F800000
"""Bit mask of the exponent of a float32."""


def init(section: LossScaleSection | None) -> dict[str, jax.Array] | None:
    """Returns the scale before the first step, float32 and int32; None for a run without one."""
    if section is None:
        return None
    factor = jnp.asarray(section.first, jnp.float32)
    return {"factor": factor, "good_steps": jnp.zeros((), jnp.int32)}


def value_and_grad(loss_sum: Callable[..., Any], factor: Float[Array, ""]) -> Callable[..., Any]:
    """Returns jax.value_and_grad(loss_sum, has_aux=True) with a scaled backward pass.

    The factor multiplies the mean over a microbatch to within a factor of two: the microbatch's
    weight, the first of `aux`, is rounded down to a power of two. One without weight has no mean,
    and a gradient of 0.
    """

    def gradient(params: Any, *more: Any) -> Any:
        total, backward, aux = jax.vjp(lambda p: loss_sum(p, *more), params, has_aux=True)
        scale = factor / _power_of_two(jnp.where(aux[0] == 0, 1.0, aux[0]))
        (grads,) = backward(scale)
        return (total, aux), jax.tree.map(lambda grad: grad / scale, grads)

    return gradient


def overflowed(loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Returns whether only the backward pass overflowed, which alone depends on the factor."""
    return jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)


def update(
    scale: Any, *, loss: Float[Array, ""], grad_norm: Float[Array, ""], section: LossScaleSection
) -> dict[str, jax.Array]:
    """Returns the scale after a step; a step whose loss is not finite does not change it."""
    factor, good = scale["factor"], scale["good_steps"] + 1
    grows = good >= section.grow_every_steps
    grown = {
        "factor": jnp.where(grows, jnp.minimum(2 * factor, MOST), factor),
        "good_steps": jnp.where(grows, 0, good),
    }
    halved = {"factor": jnp.maximum(factor / 2, LEAST), "good_steps": jnp.zeros((), jnp.int32)}
    backs_off, is_valid = overflowed(loss, grad_norm), jnp.isfinite(loss)
    new = jax.tree.map(lambda h, g: jnp.where(backs_off, h, g), halved, grown)
    return jax.tree.map(lambda n, o: jnp.where(is_valid, n, o), new, dict(scale))


def _power_of_two(number: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the number rounded down to a power of two, exactly (a logarithm would round)."""
    bits = jax.lax.bitcast_convert_type(number, jnp.int32) & EXPONENT
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
