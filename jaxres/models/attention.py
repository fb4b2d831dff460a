"""Causal attention with rotary positions, grouped queries and sliding windows.

Shape suffixes: as in models/gpt.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxres.config.schema.model import GptModel, LinearScaling, Llama3Scaling
from jaxres.models.interface import normal

Norm = Any
"""A module that normalises the last dim."""


def rotate(
    x_BTHC: Float[Array, "B T H C"], angles_BTC: Float[Array, "B T half"]
) -> Float[Array, "B T H C"]:
    """Rotates each pair (i, i + C/2) by its angle; float32. (arXiv 2104.09864; halves as in HF)"""
    cos, sin = jnp.cos(angles_BTC)[:, :, None], jnp.sin(angles_BTC)[:, :, None]
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


def rope_angles(
    positions_BT: Int[Array, "B T"],
    *,
    width: int,
    theta: float,
    scaling: LinearScaling | Llama3Scaling | None = None,
) -> Float[Array, "B T half"]:
    """Returns the angle of each position and pair; float32."""
    positions_BT1 = positions_BT[..., None].astype(jnp.float32)
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    match scaling:
        case None:
            return positions_BT1 * theta**-exponents
        case LinearScaling():
            return positions_BT1 * (theta**-exponents / scaling.factor)
        case Llama3Scaling():
            return positions_BT1 * jnp.asarray(_llama3_rates(width, theta, scaling))


def _llama3_rates(width: int, theta: float, scaling: Llama3Scaling) -> np.ndarray:
    """Returns the angle per position of each pair. (transformers, `_compute_llama3_parameters`)"""
    rates = theta ** -(np.arange(0, width, 2) / width)
    turns = scaling.original_max_positions * rates / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: unchanged; 0: divided by the factor.
    return (rates * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def attention_mask(
    segment_ids_BT: Int[Array, "B T"], window: int | None = None
) -> Bool[Array, "B 1 T T"]:
    """Returns the mask: a position attends to itself and to earlier ones of its document.

    With a window it attends to so many positions, itself included.
    """
    T = segment_ids_BT.shape[1]
    causal_TS = jnp.tril(jnp.ones((T, T), jnp.bool_))
    if window is not None and window < T:
        causal_TS = jnp.triu(causal_TS, 1 - window)
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return (causal_TS & same_BTS)[:, None]


class Attention(nnx.Module):
    """Causal attention with grouped queries. (arXiv 2305.13245)"""

    def __init__(
        self,
        config: GptModel,
        *,
        kernel: str,
        std: float,
        head_norms: tuple[Norm, Norm] | None,
        rngs: nnx.Rngs,
    ):
        D, H, C = config.d_model, config.num_heads, config.head_width
        K = config.num_kv_heads or H
        self.query = normal(rngs, (D, H, C), ("embed", "heads", "head_dim"))
        self.key = normal(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"))
        self.value = normal(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"))
        self.output = normal(rngs, (H, C, D), ("heads", "head_dim", "embed"), std=std)
        if config.bias != "none":
            self.query_bias = bias(H * C, "heads")
            self.key_bias = bias(K * C, "kv_heads")
            self.value_bias = bias(K * C, "kv_heads")
        if config.bias == "all":
            self.output_bias = bias(D, None)
        if head_norms is not None:
            self.query_norm, self.key_norm = head_norms
        self.is_rotary = config.positions == "rotary"
        self.kernel = kernel

    def project(
        self, x_BTD: Float[Array, "B T D"], angles_BTC: Float[Array, "B T half"] | None
    ) -> tuple[Array, Array, Array]:
        """Returns q_BTHC, k_BTKC and v_BTKC, normalised and rotated if the model does so."""
        q_BTHC = jnp.einsum("btd,dhc->bthc", x_BTD, self.query[...])
        k_BSKC = jnp.einsum("btd,dkc->btkc", x_BTD, self.key[...])
        v_BSKC = jnp.einsum("btd,dkc->btkc", x_BTD, self.value[...])
        if hasattr(self, "query_bias"):
            q_BTHC, k_BSKC, v_BSKC = (
                x + b[...].astype(x.dtype).reshape(x.shape[2:])
                for x, b in (
                    (q_BTHC, self.query_bias),
                    (k_BSKC, self.key_bias),
                    (v_BSKC, self.value_bias),
                )
            )
        if hasattr(self, "query_norm"):
            q_BTHC, k_BSKC = self.query_norm(q_BTHC), self.key_norm(k_BSKC)
        if angles_BTC is not None:
            q_BTHC, k_BSKC = rotate(q_BTHC, angles_BTC), rotate(k_BSKC, angles_BTC)
        return q_BTHC, k_BSKC, v_BSKC

    def mix(
        self, q_BTHC: Array, k_BSKC: Array, v_BSKC: Array, mask_B1TS: Bool[Array, "B 1 T S"]
    ) -> Float[Array, "B T D"]:
        """Applies attention over the positions, softmax in float32, and the output layer."""
        mixed_BTHC = attend(q_BTHC, k_BSKC, v_BSKC, mask_B1TS, kernel=self.kernel)
        y_BTD = jnp.einsum("bthc,hcd->btd", mixed_BTHC, self.output[...])
        if hasattr(self, "output_bias"):
            y_BTD = y_BTD + self.output_bias[...].astype(y_BTD.dtype)
        return y_BTD

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        angles_BTC: Float[Array, "B T half"] | None,
        mask_B1TS: Bool[Array, "B 1 T S"],
    ) -> Float[Array, "B T D"]:
        """Applies attention of each position to the positions of its row."""
        return self.mix(*self.project(x_BTD, angles_BTC), mask_B1TS)


def bias(width: int, axis: str | None) -> nnx.Param:
    """Returns a bias of zeros; the biases of heads are stored flat, [heads x width]."""
    return nnx.Param(jnp.zeros(width, jnp.float32), out_sharding=(axis,))


def attend(
    q_BTHC: Array, k_BSKC: Array, v_BSKC: Array, mask_B1TS: Array, *, kernel: Any
) -> Float[Array, "B T H C"]:
    """Applies attention by a kernel; `float32` is XLA's kernel on inputs cast to float32."""
    dtype = q_BTHC.dtype
    if kernel == "float32":
        q_BTHC, k_BSKC, v_BSKC = (x.astype(jnp.float32) for x in (q_BTHC, k_BSKC, v_BSKC))
        kernel = "xla"
    # The mask is causal itself; told so, cuDNN leaves out the half above the diagonal.
    is_causal = kernel == "cudnn"
    mixed_BTHC = jax.nn.dot_product_attention(
        q_BTHC, k_BSKC, v_BSKC, mask=mask_B1TS, is_causal=is_causal, implementation=kernel
    )
    return mixed_BTHC.astype(dtype)


def cudnn_runs(config: GptModel, *, platform: str, max_width: int) -> bool:
    """Returns whether cuDNN's flash attention supports these types and sizes on this platform."""
    width = config.head_width
    on_gpu = platform in ("gpu", "cuda")
    return on_gpu and config.compute_dtype == "bfloat16" and width % 8 == 0 and width <= max_width


def attention_kernel(config: GptModel, *, seq_len: int, platform: str) -> str:
    """Returns the attention kernel: cuDNN must be requested, and can't be traced for CPU."""
    # jax 0.10 uses a float16 product that XLA implements on GPUs only; elsewhere lowering fails.
    if config.compute_dtype == "float16" and platform not in ("gpu", "cuda"):
        return "float32"
    if config.attention != "auto":
        return config.attention
    # Every GPU supports widths up to 128. With a mask cuDNN trains on even lengths only.
    cudnn = cudnn_runs(config, platform=platform, max_width=128) and seq_len % 2 == 0
    return "cudnn" if cudnn else "xla"
