"""A decoder of the Llama family: RMSNorm, rotary positions, grouped queries, SwiGLU.

Shape suffixes: B batch (rows), T position, S position attended to, D width of the residual stream,
H query heads, K key and value heads, C width of a head, F feed-forward, V vocabulary, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxres.config.schema import GptModel
from jaxres.faults import ConfigError
from jaxres.models.interface import (
    BatchArrays,
    KeepRows,
    LossSums,
    Model,
    Params,
    anywhere,
    cross_entropy,
    embedding_rows,
    normal,
    split,
    stack,
)


class RmsNorm(nnx.Module):
    """Divides by the root mean square over the last dim and scales. (arXiv 1910.07467)"""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), out_sharding=(None,))
        self.eps = eps

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Normalises in float32; returns the type of the input."""
        x = x_BTD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * self.scale[...]).astype(x_BTD.dtype)


def rotate(
    x_BTHC: Float[Array, "B T H C"], angles_BTC: Float[Array, "B T half"]
) -> Float[Array, "B T H C"]:
    """Rotates each pair (i, i + C/2) by its angle; float32. (arXiv 2104.09864; halves as in HF)"""
    cos, sin = jnp.cos(angles_BTC)[:, :, None], jnp.sin(angles_BTC)[:, :, None]
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)


def rope_angles(
    positions_BT: Int[Array, "B T"], *, width: int, theta: float
) -> Float[Array, "B T half"]:
    """Returns the angle of each position and pair; float32."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    return positions_BT[..., None].astype(jnp.float32) * theta**-exponents


def attention_mask(segment_ids_BT: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Returns the mask: a position attends to itself and to earlier ones of its document."""
    T = segment_ids_BT.shape[1]
    causal_TS = jnp.tril(jnp.ones((T, T), jnp.bool_))
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return (causal_TS & same_BTS)[:, None]


def dropout(x: Array, key: Key[Array, ""] | None, *, rate: float) -> Array:
    """Sets a random share of the numbers to 0 and scales up the rest; without a key returns x."""
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with grouped queries. (arXiv 2305.13245)"""

    def __init__(self, config: GptModel, *, kernel: str, rngs: nnx.Rngs):
        D, H = config.d_model, config.num_heads
        K, C = config.num_kv_heads or H, D // H
        self.query = normal(rngs, (D, H, C), ("embed", "heads", "head_dim"))
        self.key = normal(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"))
        self.value = normal(rngs, (D, K, C), ("embed", "kv_heads", "head_dim"))
        std = output_std(config)
        self.output = normal(rngs, (H, C, D), ("heads", "head_dim", "embed"), std=std)
        self.kernel = kernel

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        angles_BTC: Float[Array, "B T half"],
        mask_B1TS: Bool[Array, "B 1 T S"],
    ) -> Float[Array, "B T D"]:
        """Applies attention over the positions; softmax in float32."""
        q_BTHC = rotate(jnp.einsum("btd,dhc->bthc", x_BTD, self.query[...]), angles_BTC)
        k_BSKC = rotate(jnp.einsum("btd,dkc->btkc", x_BTD, self.key[...]), angles_BTC)
        v_BSKC = jnp.einsum("btd,dkc->btkc", x_BTD, self.value[...])
        mixed_BTHC = attend(q_BTHC, k_BSKC, v_BSKC, mask_B1TS, kernel=self.kernel)
        return jnp.einsum("bthc,hcd->btd", mixed_BTHC, self.output[...])


def attend(
    q_BTHC: Array, k_BSKC: Array, v_BSKC: Array, mask_B1TS: Array, *, kernel: Any
) -> Float[Array, "B T H C"]:
    """Applies attention by a kernel; `float32` is XLA's kernel on inputs cast to float32."""
    dtype = q_BTHC.dtype
    if kernel == "float32":
        q_BTHC, k_BSKC, v_BSKC = (x.astype(jnp.float32) for x in (q_BTHC, k_BSKC, v_BSKC))
        kernel = "xla"
    mixed_BTHC = jax.nn.dot_product_attention(
        q_BTHC, k_BSKC, v_BSKC, mask=mask_B1TS, implementation=kernel
    )
    return mixed_BTHC.astype(dtype)


class FeedForward(nnx.Module):
    """Feed-forward layer with SwiGLU. (arXiv 2002.05202)"""

    def __init__(self, config: GptModel, *, rngs: nnx.Rngs):
        D, F = config.d_model, ff_width(config)
        self.gate = normal(rngs, (D, F), ("embed", "mlp"))
        self.up = normal(rngs, (D, F), ("embed", "mlp"))
        self.down = normal(rngs, (F, D), ("mlp", "embed"), std=output_std(config))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the layer to each position."""
        hidden_BTF = jax.nn.silu(x_BTD @ self.gate[...]) * (x_BTD @ self.up[...])
        return hidden_BTF @ self.down[...]


class Block(nnx.Module):
    """Decoder block: attention, then feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: GptModel, *, kernel: str, rngs: nnx.Rngs):
        self.attention_norm = RmsNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, kernel=kernel, rngs=rngs)
        self.feed_forward_norm = RmsNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.rate = config.dropout

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        key: Key[Array, ""] | None,
        angles_BTC: Float[Array, "B T half"],
        mask_B1TS: Bool[Array, "B 1 T S"],
    ) -> Float[Array, "B T D"]:
        """Adds the outputs of attention and feed-forward to the residual stream."""
        keys = (None, None) if key is None else jax.random.split(key)
        mixed_BTD = self.attention(self.attention_norm(x_BTD), angles_BTC, mask_B1TS)
        x_BTD = x_BTD + dropout(mixed_BTD, keys[0], rate=self.rate)
        mixed_BTD = self.feed_forward(self.feed_forward_norm(x_BTD))
        return x_BTD + dropout(mixed_BTD, keys[1], rate=self.rate)


class Gpt(nnx.Module):
    """The decoder: embedding, stacked blocks, norm, output layer."""

    def __init__(self, config: GptModel, *, rows: int, kernel: str, rngs: nnx.Rngs):
        self.embedding = normal(rngs, (rows, config.d_model), ("vocab", "embed"))
        self.blocks = stack(
            lambda rngs: Block(config, kernel=kernel, rngs=rngs),
            num_layers=config.num_layers,
            rngs=rngs,
        )
        self.norm = RmsNorm(config.d_model, eps=config.norm_eps)
        if not config.tie_embeddings:
            self.head = normal(rngs, (config.d_model, rows), ("embed", "vocab"))
        self.config = config

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        key: Key[Array, ""] | None,
        keep_rows: KeepRows = anywhere,
    ) -> Float[Array, "B T V"]:
        """Returns float32 logits; a key draws the dropout."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        # The look-up is in float32: the gradients of a frequent token are added one by one, and
        # bfloat16's 8 bits would lose the later ones.
        x_BTD = keep_rows(self.embedding[...][tokens_BT].astype(dtype))
        width = config.d_model // config.num_heads
        angles_BTC = rope_angles(positions_BT, width=width, theta=config.rope_theta)
        mask_B1TS = attention_mask(segment_ids_BT)
        definition, layers = nnx.split(self.blocks)

        def block(x_BTD: Array, layer: Any) -> tuple[Array, None]:
            weights, layer_key = layer
            x_BTD = nnx.merge(definition, weights)(x_BTD, layer_key, angles_BTC, mask_B1TS)
            return keep_rows(x_BTD), None

        if config.remat == "block":
            block = jax.checkpoint(block, prevent_cse=False)  # not needed in the body of a scan
        keys_L = None
        if key is not None and config.dropout > 0:
            keys_L = jax.random.split(key, config.num_layers)
        x_BTD, _ = jax.lax.scan(block, x_BTD, (cast_matrices(layers, dtype), keys_L))
        return keep_rows(self.unembed(self.norm(x_BTD)))

    def unembed(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns logits, accumulated in float32."""
        head_DV = self.embedding[...].T if self.config.tie_embeddings else self.head[...]
        head_DV = head_DV.astype(x_BTD.dtype)
        return jnp.matmul(x_BTD, head_DV, preferred_element_type=jnp.float32)


def cast_matrices(layers: Any, dtype: jnp.dtype) -> Any:
    """Casts stacked matrices, all layers at once; stacked vectors (norm scales) stay float32."""
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 2 else w, layers)


def output_std(config: GptModel) -> float:
    """Returns the initial std of layers that write to the residual stream. (GPT-2, section 2.3)"""
    return 0.02 / (2 * config.num_layers) ** 0.5


def ff_width(config: GptModel) -> int:
    """Returns d_ff, or 8/3 d_model up to a multiple of 64."""
    return config.d_ff or -(-8 * config.d_model // (3 * 64)) * 64


def flops_per_token(config: GptModel, *, rows: int, seq_len: int) -> float:
    """Returns 6 operations per weight of a matrix product, plus 12 L H C T for attention.

    Source: PaLM (arXiv 2204.02311), appendix B. The embedding look-up is not a matrix product; the
    output layer is one, tied or not.
    """
    D, H, L = config.d_model, config.num_heads, config.num_layers
    K, C = config.num_kv_heads or H, D // H
    weights = L * (2 * D * H * C + 2 * D * K * C + 3 * D * ff_width(config)) + D * rows
    return 6.0 * weights + 12.0 * L * H * C * seq_len


def check(config: GptModel, *, platform: str) -> None:
    """Raises ConfigError if the platform lacks the kernel; the config has checked the sizes."""
    H, K = config.num_heads, config.num_kv_heads or config.num_heads
    assert config.d_model % (2 * H) == 0, (config.d_model, H)
    assert H % K == 0, (H, K)
    if config.attention == "cudnn" and not cudnn_runs(config, platform=platform, max_width=256):
        raise ConfigError(
            f"model.attention: cudnn needs a GPU, model.compute_dtype bfloat16 and a head width "
            f"that is a multiple of 8, at most 128 (256 from Hopper on); this run has {platform}, "
            f"{config.compute_dtype} and {config.d_model // H}. Use auto, which falls back to xla."
        )


def cudnn_runs(config: GptModel, *, platform: str, max_width: int) -> bool:
    """Returns whether cuDNN's flash attention supports these types and sizes on this platform."""
    width = config.d_model // config.num_heads
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


def build(
    config: GptModel,
    *,
    vocab_size: int | None,
    seq_len: int,
    platform: str,
    keep_rows: KeepRows = anywhere,
) -> Model:
    """Builds a decoder; raises ConfigError if sizes or kernel are unsupported."""
    check(config, platform=platform)
    rows = embedding_rows(config.vocab_size, vocab_size=vocab_size)
    kernel = attention_kernel(config, seq_len=seq_len, platform=platform)
    init, axes, definition = split(lambda rngs: Gpt(config, rows=rows, kernel=kernel, rngs=rngs))

    def forward(params: Params, *inputs: Any) -> Float[Array, "B T V"]:
        return nnx.merge(definition, params)(*inputs)

    def loss(params: Params, batch: BatchArrays, key: Key[Array, ""] | None) -> LossSums:
        inputs = (batch["tokens_BT"], batch["segment_ids_BT"], batch["positions_BT"])
        logits_BTV = forward(params, *inputs, key, keep_rows)
        return cross_entropy(logits_BTV, batch["targets_BT"], batch["weights_BT"])

    def logits(params: Params, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        return forward(params, tokens_BT, jnp.zeros_like(tokens_BT), positions_BT, None)

    flops = flops_per_token(config, rows=rows, seq_len=seq_len)
    return Model(init=init, axes=axes, loss=loss, logits=logits, flops_per_token=flops)
