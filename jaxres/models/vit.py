"""Vision Transformer: patches of an image, encoder blocks, mean, classes. (arXiv 2010.11929)

Difference from the paper: no class token; the mean over all patches goes to the output layer, as in
arXiv 2205.01580.

Shape suffixes: B batch (rows), N patches, P numbers of a patch, D width of the residual stream,
H heads, C width of a head, F feed-forward, K classes, L layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt8

from jaxres.config.schema.model import VitModel
from jaxres.models.interface import (
    BatchArrays,
    KeepRows,
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

NORM_EPS = 1e-6


class EncoderNorm(nnx.Module):
    """Subtracts the mean over the last dim, divides by the deviation. (arXiv 1607.06450)"""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), out_sharding=(None,))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), out_sharding=(None,))

    def __call__(self, x_BND: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises in float32; returns the type of the input."""
        x = x_BND.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)
        return (x * self.scale[...] + self.bias[...]).astype(x_BND.dtype)


class EncoderBlock(nnx.Module):
    """Encoder block: attention over all patches, then feed-forward, each after a norm."""

    def __init__(self, config: VitModel, *, rngs: nnx.Rngs):
        D, H, F = config.d_model, config.num_heads, config.d_ff or 4 * config.d_model
        C, std = D // H, 0.02 / (2 * config.num_layers) ** 0.5
        self.attention_norm = EncoderNorm(D)
        self.query = normal(rngs, (D, H, C), ("embed", "heads", "head_dim"))
        self.key = normal(rngs, (D, H, C), ("embed", "heads", "head_dim"))
        self.value = normal(rngs, (D, H, C), ("embed", "heads", "head_dim"))
        self.output = normal(rngs, (H, C, D), ("heads", "head_dim", "embed"), std=std)
        self.feed_forward_norm = EncoderNorm(D)
        self.up = normal(rngs, (D, F), ("embed", "mlp"))
        self.up_bias = nnx.Param(jnp.zeros(F, jnp.float32), out_sharding=("mlp",))
        self.down = normal(rngs, (F, D), ("mlp", "embed"), std=std)
        self.down_bias = nnx.Param(jnp.zeros(D, jnp.float32), out_sharding=(None,))
        self.rate = config.dropout

    def __call__(
        self, x_BND: Float[Array, "B N D"], key: Key[Array, ""] | None
    ) -> Float[Array, "B N D"]:
        """Adds the outputs of attention and feed-forward to the residual stream."""
        keys = (None, None) if key is None else jax.random.split(key)
        h_BND, dtype = self.attention_norm(x_BND), x_BND.dtype
        q, k, v = (
            jnp.einsum("bnd,dhc->bnhc", h_BND, weights[...].astype(dtype))
            for weights in (self.query, self.key, self.value)
        )
        mixed_BNHC = jax.nn.dot_product_attention(q, k, v)
        mixed_BND = jnp.einsum("bnhc,hcd->bnd", mixed_BNHC, self.output[...].astype(dtype))
        x_BND = x_BND + dropout(mixed_BND, keys[0], rate=self.rate)
        h_BNF = self.feed_forward_norm(x_BND) @ self.up[...].astype(dtype)
        h_BNF = jax.nn.gelu(h_BNF + self.up_bias[...].astype(dtype))
        h_BND = h_BNF @ self.down[...].astype(dtype) + self.down_bias[...].astype(dtype)
        return x_BND + dropout(h_BND, keys[1], rate=self.rate)


class Vit(nnx.Module):
    """The model: patches, positions, stacked blocks, norm, mean, output layer."""

    def __init__(self, config: VitModel, *, scans: bool = True, rngs: nnx.Rngs):
        D, num_patches = config.d_model, (config.image_size // config.patch_size) ** 2
        P = 3 * config.patch_size**2
        self.patches = normal(rngs, (P, D), (None, "embed"), std=P**-0.5)
        self.positions = normal(rngs, (num_patches, D), (None, "embed"))
        self.blocks = stack(
            lambda rngs: EncoderBlock(config, rngs=rngs), num_layers=config.num_layers, rngs=rngs
        )
        self.norm = EncoderNorm(D)
        self.head = normal(rngs, (D, config.num_classes), ("embed", None))
        self.head_bias = nnx.Param(jnp.zeros(config.num_classes, jnp.float32), out_sharding=(None,))
        self.config, self.scans = config, scans

    def __call__(
        self,
        images: UInt8[Array, "B S S 3"],
        key: Key[Array, ""] | None,
        keep_rows: KeepRows = anywhere,
    ) -> Float[Array, "B K"]:
        """Returns float32 logits; a key draws the dropout."""
        dtype = jnp.dtype(self.config.compute_dtype)
        x_BNP = patches_of(images, self.config.patch_size).astype(dtype)
        x_BND = x_BNP @ self.patches[...].astype(dtype) + self.positions[...].astype(dtype)
        definition, layers = nnx.split(self.blocks)

        def block(x_BND: Array, layer: Any) -> Array:
            weights, layer_key = layer
            return keep_rows(nnx.merge(definition, weights)(x_BND, layer_key))

        keys_L = None
        if key is not None and self.config.dropout > 0:
            keys_L = jax.random.split(key, self.config.num_layers)
        x_BND = apply_layers(
            block, keep_rows(x_BND), (layers, keys_L), remat=self.config.remat, scan=self.scans
        )
        mean_BD = self.norm(x_BND).astype(jnp.float32).mean(1)
        return mean_BD @ self.head[...] + self.head_bias[...]


def patches_of(images: UInt8[Array, "B S S 3"], size: int) -> Float[Array, "B N P"]:
    """Returns the numbers of each patch, row by row, from -1 to 1; float32."""
    B, S = images.shape[:2]
    x = (images.astype(jnp.float32) / 127.5 - 1.0).reshape(B, S // size, size, S // size, size, 3)
    return x.swapaxes(2, 3).reshape(B, (S // size) ** 2, 3 * size**2)


def build(config: VitModel, *, platform: str, keep_rows: KeepRows = anywhere) -> Model:
    """Builds the model; the config has checked the sizes. Its metric is `accuracy`."""
    scans = scans_layers(config.scan_layers, num_layers=config.num_layers, platform=platform)
    init, axes, definition = split(lambda rngs: Vit(config, scans=scans, rngs=rngs))

    def loss(params: Params, batch: BatchArrays, key: Key[Array, ""] | None) -> Any:
        logits_BK = nnx.merge(definition, params)(batch["image"], key, keep_rows)
        label_B: Int[Array, " B"] = batch["label"]
        ones_B1 = jnp.ones((label_B.shape[0], 1), jnp.float32)
        loss_B, weight_B = cross_entropy(logits_BK[:, None], label_B[:, None], ones_B1)
        # A label that is no class makes the row not finite, so that it is reported and left out.
        loss_B = jnp.where((label_B >= 0) & (label_B < config.num_classes), loss_B, jnp.nan)
        is_right_B = (jnp.argmax(logits_BK, -1) == label_B).astype(jnp.float32)
        return loss_B, weight_B, {"accuracy": (is_right_B, weight_B)}

    flops = flops_per_image(config)
    return Model(init=init, axes=axes, loss=loss, logits=None, flops_per_token=flops)


def flops_per_image(config: VitModel) -> float:
    """Returns 6 operations per weight and patch, plus 12 L D N^2 for attention (PaLM, appendix B).

    An image counts as one token of its data set.
    """
    D, F = config.d_model, config.d_ff or 4 * config.d_model
    num_patches = (config.image_size // config.patch_size) ** 2
    weights = config.num_layers * (4 * D * D + 2 * D * F) + 3 * config.patch_size**2 * D
    return 6.0 * weights * num_patches + 12.0 * config.num_layers * D * num_patches**2
