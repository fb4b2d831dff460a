"""A decoder: by default as Llama (RMSNorm, rotary positions, grouped queries, SwiGLU).

Shape suffixes: B batch (rows), T position, S position attended to, D width of the residual stream,
H query heads, K key and value heads, C width of a head, F feed-forward, V vocabulary, L layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxres.config.schema.model import GptModel, embedding_rows
from jaxres.faults import ConfigError
from jaxres.models.attention import (
    Attention,
    attention_kernel,
    attention_mask,
    bias,
    cudnn_runs,
    rope_angles,
)
from jaxres.models.blockwise_loss import blockwise_cross_entropy
from jaxres.models.interface import (
    BatchArrays,
    Decoder,
    KeepRows,
    LossSums,
    Model,
    Params,
    anywhere,
    apply_layers,
    cross_entropy,
    dropout,
    normal,
    scans_layers,
    split,
    stack,
)

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class RmsNorm(nnx.Module):
    """Divides by the root mean square over the last dim and scales. (arXiv 1910.07467)

    With an offset the scale is the offset plus the weight, as in Gemma.
    """

    def __init__(self, width: int, *, eps: float, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32), out_sharding=(None,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises in float32; returns the type of the input."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...]
        return (y * (self.offset + scale if self.offset else scale)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Subtracts the mean, divides by the standard deviation, scales and shifts. (1607.06450)"""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), out_sharding=(None,))
        self.bias = bias(width, None)
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalises in float32; returns the type of the input."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


def norm(config: GptModel, width: int | None = None) -> RmsNorm | LayerNorm:
    """Returns a norm of the configured kind; by default of the residual stream's width."""
    width = width or config.d_model
    if config.norm == "layer":
        return LayerNorm(width, eps=config.norm_eps)
    return RmsNorm(width, eps=config.norm_eps, offset=float(config.norm == "rms_plus_1"))


class FeedForward(nnx.Module):
    """Feed-forward layer, by default with SwiGLU. (arXiv 2002.05202)"""

    def __init__(self, config: GptModel, *, rngs: nnx.Rngs):
        D, F = config.d_model, config.ff_width
        if config.gated:
            self.gate = normal(rngs, (D, F), ("embed", "mlp"))
        self.up = normal(rngs, (D, F), ("embed", "mlp"))
        self.down = normal(rngs, (F, D), ("mlp", "embed"), std=output_std(config))
        if config.bias == "all":
            self.up_bias, self.down_bias = bias(F, "mlp"), bias(D, None)
            if config.gated:
                self.gate_bias = bias(F, "mlp")
        self.activation = ACTIVATIONS[config.activation]
        self.is_gated = config.gated

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the layer to each position."""
        if self.is_gated:
            hidden_BTF = self.activation(self._linear(x_BTD, "gate")) * self._linear(x_BTD, "up")
        else:
            hidden_BTF = self.activation(self._linear(x_BTD, "up"))
        return self._linear(hidden_BTF, "down")

    def _linear(self, x: Array, name: str) -> Array:
        y, shift = x @ getattr(self, name)[...], getattr(self, f"{name}_bias", None)
        return y if shift is None else y + shift[...].astype(y.dtype)


class Block(nnx.Module):
    """Decoder block: attention, then feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: GptModel, *, kernel: str, rngs: nnx.Rngs):
        head_norms = None
        if config.qk_norm:
            head_norms = (norm(config, config.head_width), norm(config, config.head_width))
        self.attention_norm = norm(config)
        self.attention = Attention(
            config, kernel=kernel, std=output_std(config), head_norms=head_norms, rngs=rngs
        )
        self.feed_forward_norm = norm(config)
        self.feed_forward = FeedForward(config, rngs=rngs)
        if config.post_norms:
            self.attention_post_norm = norm(config)
            self.feed_forward_post_norm = norm(config)
        self.has_post_norms = config.post_norms
        self.rate = config.dropout

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        key: Key[Array, ""] | None,
        angles_BTC: Float[Array, "B T half"] | None,
        mask_B1TS: Bool[Array, "B 1 T S"],
    ) -> Float[Array, "B T D"]:
        """Adds the outputs of attention and feed-forward to the residual stream."""
        keys = (None, None) if key is None else jax.random.split(key)
        mixed_BTD = self.attention(self.attention_norm(x_BTD), angles_BTC, mask_B1TS)
        return self.after_attention(x_BTD, mixed_BTD, keys)

    def after_attention(self, x_BTD: Array, mixed_BTD: Array, keys: Any) -> Float[Array, "B T D"]:
        """Adds the outputs of attention and of the feed-forward layer to the residual stream."""
        if self.has_post_norms:
            mixed_BTD = self.attention_post_norm(mixed_BTD)
        x_BTD = x_BTD + dropout(mixed_BTD, keys[0], rate=self.rate)
        mixed_BTD = self.feed_forward(self.feed_forward_norm(x_BTD))
        if self.has_post_norms:
            mixed_BTD = self.feed_forward_post_norm(mixed_BTD)
        return x_BTD + dropout(mixed_BTD, keys[1], rate=self.rate)


class Places(NamedTuple):
    """How the positions of a row see each other in a layer."""

    angles_BTC: Float[Array, "B T half"] | None
    mask_B1TS: Bool[Array, "B 1 T S"]


class Cache(NamedTuple):
    """Keys and values of all layers and positions so far; the later ones are not read."""

    k_LBSKC: Float[Array, "L B S K C"]
    v_LBSKC: Float[Array, "L B S K C"]


class Gpt(nnx.Module):
    """The decoder: embedding, stacked blocks, norm, output layer."""

    def __init__(
        self,
        config: GptModel,
        *,
        rows: int,
        seq_len: int,
        kernel: str,
        scans: bool = True,
        rngs: nnx.Rngs,
    ):
        self.embedding = normal(rngs, (rows, config.d_model), ("vocab", "embed"))
        self.blocks = stack(
            lambda rngs: Block(config, kernel=kernel, rngs=rngs),
            num_layers=config.num_layers,
            rngs=rngs,
        )
        self.norm = norm(config)
        if not config.tie_embeddings:
            self.head = normal(rngs, (config.d_model, rows), ("embed", "vocab"))
        if config.positions == "learned":
            num_positions = config.max_positions or seq_len
            self.positions = normal(rngs, (num_positions, config.d_model), (None, "embed"))
        self.config, self.scans = config, scans

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segment_ids_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        key: Key[Array, ""] | None,
        keep_rows: KeepRows = anywhere,
    ) -> Float[Array, "B T D"]:
        """Returns the input of the output layer; a key draws the dropout."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        x_BTD = keep_rows(self.embed(tokens_BT, positions_BT))
        places = self.places(positions_BT, lambda window: attention_mask(segment_ids_BT, window))
        definition, layers = nnx.split(self.blocks)

        def block(x_BTD: Array, layer: Any) -> Array:
            weights, layer_key, is_full = layer
            layer_block = nnx.merge(definition, weights)
            return keep_rows(layer_block(x_BTD, layer_key, *places(is_full)))

        keys_L = None
        if key is not None and config.dropout > 0:
            keys_L = jax.random.split(key, config.num_layers)
        layers = cast_matrices(layers, dtype)
        stacked = (layers, keys_L, full_layers(config))
        x_BTD = apply_layers(block, x_BTD, stacked, remat=config.remat, scan=self.scans)
        return self.norm(x_BTD)

    def decode(
        self, tokens_BT: Int[Array, "B T"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Returns the logits of tokens that follow the cached ones, and the extended cache.

        Args:
          tokens_BT: tokens of one document per row, at the positions from `start` on.
          cache: keys and values of the earlier positions.
          start: position of the first of these tokens.
        """
        B, T = tokens_BT.shape
        positions_T, positions_S = start + jnp.arange(T), jnp.arange(cache.k_LBSKC.shape[2])

        def mask(window: int | None) -> Array:
            distance_TS = positions_T[:, None] - positions_S
            seen_TS = (distance_TS >= 0) & (window is None or distance_TS < window)
            return jnp.broadcast_to(seen_TS, (B, 1, *seen_TS.shape))

        x_BTD = self.embed(tokens_BT, jnp.broadcast_to(positions_T, (B, T)))
        places = self.places(jnp.broadcast_to(positions_T, (B, T)), mask)
        definition, layers = nnx.split(self.blocks)

        def block(x_BTD: Array, layer: Any) -> tuple[Array, tuple[Array, Array]]:
            weights, k_BSKC, v_BSKC, is_full = layer
            block, (angles_BTC, mask_B1TS) = nnx.merge(definition, weights), places(is_full)
            normed_BTD = block.attention_norm(x_BTD)
            q_BTHC, k_BTKC, v_BTKC = block.attention.project(normed_BTD, angles_BTC)
            k_BSKC = jax.lax.dynamic_update_slice_in_dim(k_BSKC, k_BTKC, start, axis=1)
            v_BSKC = jax.lax.dynamic_update_slice_in_dim(v_BSKC, v_BTKC, start, axis=1)
            mixed_BTD = block.attention.mix(q_BTHC, k_BSKC, v_BSKC, mask_B1TS)
            return block.after_attention(x_BTD, mixed_BTD, (None, None)), (k_BSKC, v_BSKC)

        layers = cast_matrices(layers, jnp.dtype(self.config.compute_dtype))
        xs = (layers, cache.k_LBSKC, cache.v_LBSKC, full_layers(self.config))
        x_BTD, (k_LBSKC, v_LBSKC) = jax.lax.scan(block, x_BTD, xs)
        return self.unembed(self.norm(x_BTD)), Cache(k_LBSKC, v_LBSKC)

    def embed(
        self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns the embeddings; adds the embeddings of the positions if these are learned."""
        config, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        # The look-up is in float32: the gradients of a frequent token are added one by one, and
        # bfloat16's 8 bits would lose the later ones.
        x_BTD = self.embedding[...][tokens_BT]
        if config.positions == "learned":
            x_BTD = x_BTD + self.positions[...][positions_BT]
        x_BTD = x_BTD.astype(dtype)
        if config.scale_embeddings:
            x_BTD = x_BTD * jnp.asarray(config.d_model**0.5, dtype)
        return x_BTD

    def places(
        self, positions_BT: Int[Array, "B T"], mask: Callable[[int | None], Array]
    ) -> Callable[[Any], Places]:
        """Returns the function from a layer's entry in `full_layers` to its angles and mask.

        `mask` returns the mask of a window; None: of all earlier positions.
        """
        config, width = self.config, self.config.head_width

        def angles(theta: float, scaling: Any) -> Array | None:
            if config.positions == "learned":
                return None
            return rope_angles(positions_BT, width=width, theta=theta, scaling=scaling)

        def full() -> Places:
            return Places(angles(config.rope_theta, config.rope_scaling), mask(None))

        def sliding() -> Places:
            if config.sliding_rope_theta is None:
                of_all = angles(config.rope_theta, config.rope_scaling)
            else:
                of_all = angles(config.sliding_rope_theta, None)
            return Places(of_all, mask(config.sliding_window))

        if config.sliding_window is None or config.full_attention_every is None:
            only = full() if config.sliding_window is None else sliding()
            return lambda is_full: only
        both = full(), sliding()
        return lambda is_full: jax.tree.map(lambda *kinds: jnp.where(is_full, *kinds), *both)

    def unembed(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns logits, accumulated in float32."""
        return logits_product(x_BTD, self.head_matrix())

    def head_matrix(self) -> Float[Array, "D V"]:
        """Returns the weights of the output layer."""
        return self.embedding[...].T if self.config.tie_embeddings else self.head[...]


@jax.custom_vjp
def logits_product(
    x_BTD: Float[Array, "B T D"], head_DV: Float[Array, "D V"]
) -> Float[Array, "B T V"]:
    """Returns the product in float32, of factors in the type of `x_BTD`.

    Its gradients are products in that type too, as those of all layers before it are. JAX's own
    would convert the weights to float32, which the gradient of the logits has: at half the speed or
    less. float16 is an exception, since small gradients of logits would be 0 in it.
    """
    return jnp.matmul(x_BTD, head_DV.astype(x_BTD.dtype), preferred_element_type=jnp.float32)


def _forward(x_BTD: Array, head_DV: Array) -> tuple[Array, tuple[Array, Array]]:
    return logits_product(x_BTD, head_DV), (x_BTD, head_DV)


def _backward(saved: tuple[Array, Array], gradient_BTV: Array) -> tuple[Array, Array]:
    x_BTD, head_DV = saved
    dtype = jnp.float32 if x_BTD.dtype == jnp.float16 else x_BTD.dtype
    g_BTV = gradient_BTV.astype(dtype)
    weights_DV = head_DV.astype(x_BTD.dtype).astype(dtype)
    x_gradient_BTD = jnp.einsum("btv,dv->btd", g_BTV, weights_DV)
    head_gradient_DV = jnp.einsum("btd,btv->dv", x_BTD.astype(dtype), g_BTV)
    return x_gradient_BTD.astype(x_BTD.dtype), head_gradient_DV.astype(head_DV.dtype)


logits_product.defvjp(_forward, _backward)


def full_layers(config: GptModel) -> Bool[Array, " L"] | None:
    """Returns which layers attend to all earlier positions; None: all of them, or none."""
    if config.sliding_window is None or config.full_attention_every is None:
        return None
    return (jnp.arange(config.num_layers) + 1) % config.full_attention_every == 0


def cast_matrices(layers: Any, dtype: jnp.dtype) -> Any:
    """Casts stacked matrices, all layers at once; stacked vectors (norm scales) stay float32."""
    return jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 2 else w, layers)


def output_std(config: GptModel) -> float:
    """Returns the initial std of layers that write to the residual stream. (GPT-2, section 2.3)"""
    return 0.02 / (2 * config.num_layers) ** 0.5


def flops_per_token(config: GptModel, *, rows: int, seq_len: int) -> float:
    """Returns 6 operations per weight of a matrix product, plus 12 L H C T for attention.

    Source: PaLM (arXiv 2204.02311), appendix B. The embedding look-up is not a matrix product; the
    output layer is one, tied or not.
    """
    D, H, L = config.d_model, config.num_heads, config.num_layers
    K, C, F = config.num_kv_heads or H, config.head_width, config.ff_width
    feed_forward = (3 if config.gated else 2) * D * F
    weights = L * (2 * D * H * C + 2 * D * K * C + feed_forward) + D * rows
    return 6.0 * weights + attention_flops_per_token(config, seq_len=seq_len)


def attention_flops_per_token(config: GptModel, *, seq_len: int) -> float:
    """Returns the operations of attention's two products, forward and backward: 12 L H C T."""
    return 12.0 * config.num_layers * config.num_heads * config.head_width * seq_len


def check(config: GptModel, *, platform: str) -> None:
    """Raises ConfigError if the platform lacks the kernel; the config has checked the sizes."""
    H, K = config.num_heads, config.num_kv_heads or config.num_heads
    assert config.head_dim or config.d_model % H == 0, (config.d_model, H)
    assert H % K == 0, (H, K)
    if config.attention == "cudnn" and not cudnn_runs(config, platform=platform, max_width=256):
        raise ConfigError(
            f"model.attention: cudnn needs a GPU, model.compute_dtype bfloat16 and a head width "
            f"that is a multiple of 8, at most 128 (256 from Hopper on); this run has {platform}, "
            f"{config.compute_dtype} and {config.head_width}. Use auto, which falls back to xla."
        )


def _scans_layers(config: GptModel, *, platform: str, deterministic: bool, kernel: str) -> bool:
    """Returns whether the layers are one loop; raises ConfigError if they must be, and may not.

    XLA can't execute a program with two equal backward passes of cuDNN's attention and
    deterministic kernels: it looks up the second by a key without `force_deterministic`, and fails
    (xla/service/gpu/transforms/cudnn_custom_call_compiler.cc; seen with jaxlib 0.11.2).
    """
    if deterministic and kernel == "cudnn":
        if config.scan_layers is False:
            raise ConfigError(
                "model.scan_layers: false does not work with cuDNN's attention and deterministic "
                "kernels (run.determinism: bitwise), because of an error in XLA. Use auto, or "
                "model.attention=xla."
            )
        return True
    return scans_layers(config.scan_layers, num_layers=config.num_layers, platform=platform)


def build(
    config: GptModel,
    *,
    vocab_size: int | None,
    seq_len: int,
    platform: str,
    keep_rows: KeepRows = anywhere,
    deterministic: bool = False,
) -> Model:
    """Builds a decoder; raises ConfigError if sizes or kernel are unsupported."""
    check(config, platform=platform)
    rows = embedding_rows(config.vocab_size, vocab_size=vocab_size)
    if rows % config.loss_blocks:
        raise ConfigError(
            f"model.loss_blocks: {config.loss_blocks} blocks do not divide a vocabulary of {rows} "
            "rows evenly. Use a divisor of it, or another model.vocab_size."
        )
    kernel = attention_kernel(config, seq_len=seq_len, platform=platform)
    scans = _scans_layers(config, platform=platform, deterministic=deterministic, kernel=kernel)

    def module(kernel: str) -> Callable[[nnx.Rngs], Gpt]:
        sizes: dict[str, Any] = {"rows": rows, "seq_len": seq_len}
        return lambda rngs: Gpt(config, **sizes, kernel=kernel, scans=scans, rngs=rngs)

    init, axes, definition = split(module(kernel))

    def forward(params: Params, *inputs: Any) -> tuple[Gpt, Float[Array, "B T D"]]:
        decoder = nnx.merge(definition, params)
        return decoder, decoder(*inputs)

    def loss(params: Params, batch: BatchArrays, key: Key[Array, ""] | None) -> LossSums:
        inputs = (batch["tokens_BT"], batch["segment_ids_BT"], batch["positions_BT"])
        truth, blocks = (batch["targets_BT"], batch["weights_BT"]), config.loss_blocks
        decoder, x_BTD = forward(params, *inputs, key, keep_rows)
        if blocks == 1:
            return cross_entropy(keep_rows(decoder.unembed(x_BTD)), *truth)
        return blockwise_cross_entropy(x_BTD, decoder.head_matrix(), *truth, blocks=blocks)

    def logits(params: Params, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        segment_ids_BT = jnp.zeros_like(tokens_BT)
        decoder, x_BTD = forward(params, tokens_BT, segment_ids_BT, positions_BT, None)
        return decoder.unembed(x_BTD)

    learned = config.max_positions or seq_len
    max_positions = learned if config.positions == "learned" else None

    def decode(
        params: Params, tokens_BT: Int[Array, "B T"], cache: Cache, start: Int[Array, ""]
    ) -> tuple[Float[Array, "B T V"], Cache]:
        decoding = split(module("xla"))[2] if kernel == "cudnn" else definition
        return nnx.merge(decoding, params).decode(tokens_BT, cache, start)

    return Model(
        init=init,
        axes=axes,
        loss=loss,
        logits=logits,
        flops_per_token=flops_per_token(config, rows=rows, seq_len=seq_len),
        attention_flops_per_token=attention_flops_per_token(config, seq_len=seq_len),
        decoder=Decoder(partial(_cache, config), decode, max_positions),
    )


def _cache(config: GptModel, num_rows: int, length: int) -> Cache:
    """Returns the empty cache of the keys and values of so many rows."""
    groups = config.num_kv_heads or config.num_heads
    shape = (config.num_layers, num_rows, length, groups, config.head_width)
    return Cache(*(jnp.zeros(shape, config.compute_dtype) for _ in range(2)))
