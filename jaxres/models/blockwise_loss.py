"""Cross entropy of the output layer by blocks of the vocabulary: logits are never whole in memory.

Both passes compute the logits of one block after the other, so the output layer's product is
computed twice: 1/3 more of that layer's work for 1/blocks of its memory. The softmax is kept as its
running maximum and sum. (arXiv 1805.02867; for this layer: arXiv 2411.09009)

Shape suffixes: B batch (rows), T position, D width, V vocabulary, N blocks, W width of a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxres.models.interface import LossSums, row_sums


def blockwise_cross_entropy(
    x_BTD: Float[Array, "B T D"],
    head_DV: Float[Array, "D V"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    *,
    blocks: int,
) -> LossSums:
    """Returns the sums of `cross_entropy` for the logits `x_BTD @ head_DV`.

    The gradients are products in the type of `x_BTD`, as those of `logits_product`, but that of
    `x_BTD` adds up its blocks in float32.

    Args:
      x_BTD: input of the output layer.
      head_DV: its weights.
      targets_BT: the tokens to predict.
      weights_BT: weight of each position.
      blocks: number of blocks; it has to divide V.
    """
    nats_BT: Any = _nats(x_BTD, head_DV, targets_BT, blocks)
    return row_sums(nats_BT, weights_BT)


def _blocks_of(head_DV: Array, dtype: jnp.dtype, blocks: int) -> Float[Array, "N D W"]:
    """Returns the columns as blocks: column v is in block v % N.

    So a vocabulary that is split over devices gives every device its share of every block.
    """
    D, V = head_DV.shape
    return jnp.moveaxis(head_DV.astype(dtype).reshape(D, V // blocks, blocks), 2, 0)


def _logits(x_BTD: Array, head_DW: Array) -> Float[Array, "B T W"]:
    return jnp.matmul(x_BTD, head_DW, preferred_element_type=jnp.float32)


def _is_target(targets_BT: Array, block: Array, width: int, blocks: int) -> Array:
    return jnp.arange(width) * blocks + block == targets_BT[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nats(x_BTD: Array, head_DV: Array, targets_BT: Array, blocks: int) -> Float[Array, "B T"]:
    return _forward(x_BTD, head_DV, targets_BT, blocks)[0]


def _forward(
    x_BTD: Array, head_DV: Array, targets_BT: Array, blocks: int
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    head_NDW = _blocks_of(head_DV, x_BTD.dtype, blocks)
    width = head_NDW.shape[2]

    def add(carry: tuple[Array, ...], of_block: tuple[Array, Array]) -> tuple[Any, None]:
        maximum_BT, sum_BT, target_BT = carry
        block, head_DW = of_block
        logits_BTW = _logits(x_BTD, head_DW)
        higher_BT = jnp.maximum(maximum_BT, jnp.max(logits_BTW, axis=-1))
        exponentials_BT = jnp.sum(jnp.exp(logits_BTW - higher_BT[..., None]), axis=-1)
        sum_BT = sum_BT * jnp.exp(maximum_BT - higher_BT) + exponentials_BT
        is_target_BTW = _is_target(targets_BT, block, width, blocks)
        target_BT = target_BT + jnp.sum(jnp.where(is_target_BTW, logits_BTW, 0), axis=-1)
        return (higher_BT, sum_BT, target_BT), None

    zeros_BT = jnp.zeros(targets_BT.shape, jnp.float32)
    begin = (jnp.full_like(zeros_BT, -jnp.inf), zeros_BT, zeros_BT)
    (maximum_BT, sum_BT, target_BT), _ = jax.lax.scan(add, begin, (jnp.arange(blocks), head_NDW))
    log_sum_BT = maximum_BT + jnp.log(sum_BT)
    return log_sum_BT - target_BT, (x_BTD, head_DV, targets_BT, log_sum_BT)


def _backward(
    blocks: int, saved: tuple[Array, Array, Array, Array], gradient_BT: Array
) -> tuple[Array, Array, None]:
    x_BTD, head_DV, targets_BT, log_sum_BT = saved
    head_NDW = _blocks_of(head_DV, x_BTD.dtype, blocks)
    width = head_NDW.shape[2]
    # float16 would make small gradients of logits 0.
    dtype = jnp.float32 if x_BTD.dtype == jnp.float16 else x_BTD.dtype

    def add(x_gradient_BTD: Array, of_block: tuple[Array, Array]) -> tuple[Array, Array]:
        block, head_DW = of_block
        shares_BTW = jnp.exp(_logits(x_BTD, head_DW) - log_sum_BT[..., None])
        shares_BTW = shares_BTW - _is_target(targets_BT, block, width, blocks)
        g_BTW = (shares_BTW * gradient_BT[..., None]).astype(dtype)
        part_BTD = jnp.einsum(
            "btw,dw->btd", g_BTW, head_DW.astype(dtype), preferred_element_type=jnp.float32
        )
        head_gradient_DW = jnp.einsum("btd,btw->dw", x_BTD.astype(dtype), g_BTW)
        return x_gradient_BTD + part_BTD, head_gradient_DW

    begin = jnp.zeros(x_BTD.shape, jnp.float32)
    x_gradient_BTD, head_gradient_NDW = jax.lax.scan(add, begin, (jnp.arange(blocks), head_NDW))
    head_gradient_DV = jnp.moveaxis(head_gradient_NDW, 0, 2).reshape(head_DV.shape)
    return x_gradient_BTD.astype(x_BTD.dtype), head_gradient_DV.astype(head_DV.dtype), None


_nats.defvjp(_forward, _backward)
