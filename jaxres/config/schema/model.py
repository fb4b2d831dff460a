"""Sections of the configuration that describe a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from jaxres.config.schema.base import (
    Dimension,
    Folder,
    Layers,
    PositiveFloat,
    PositiveInt,
    Section,
    VocabSize,
    free,
    later,
)
from jaxres.config.schema.data import ImportPath
from jaxres.faults import ConfigError


class LinearScaling(Section):
    """Rotary positions divided by a factor. (arXiv 2306.15595)"""

    kind: Literal["linear"]
    """All angles are divided by the factor."""
    factor: PositiveFloat
    """Divisor of the positions."""


class Llama3Scaling(Section):
    """Rotary angles of Llama 3.1 and later: long wavelengths are divided by a factor."""

    kind: Literal["llama3"]
    """Angles are divided by wavelength. (arXiv 2407.21783; transformers' modeling_rope_utils)"""
    factor: PositiveFloat
    """Divisor of the angles of long wavelengths."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_positions / low_freq_factor are long."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_positions / high_freq_factor are unchanged."""
    original_max_positions: Dimension = 8192
    """Length of the rows that the model was first trained on."""


class GptModel(Section):
    """Model: a decoder (models/gpt.py); by default as Llama.

    The other families differ by the keys from `head_dim` on; docs/models.md has a table.
    `kind: huggingface` sets all of them from a folder.
    """

    kind: Literal["gpt"] = "gpt"
    num_layers: Layers = 12
    """Decoder blocks."""
    d_model: Dimension = 768
    """Width of the residual stream."""
    num_heads: Dimension = 12
    """Query heads; without head_dim they must divide d_model, into even widths for RoPE."""
    num_kv_heads: Dimension | None = None
    """Key and value heads; must divide num_heads. Default: num_heads. (GQA, arXiv 2305.13245)"""
    d_ff: Dimension | None = None
    """Width of the feed-forward layer. Default: 8/3 d_model up to a multiple of 64.

    Of a layer that is not gated: 4 d_model. (arXiv 2002.05202)"""
    vocab_size: VocabSize | None = None
    """Rows of the embedding. Default: the tokenizer's, up to a multiple of 64."""
    tie_embeddings: bool = True
    """Whether the output layer reuses the embedding."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate after attention and feed-forward."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary angles. (arXiv 2104.09864)"""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of activations and matrix products; weights, softmax and logits are float32.

    float16 uses a loss scale (train.loss_scale)."""
    attention: Literal["auto", "xla", "cudnn"] = free("auto")
    """Attention kernel. auto: cudnn on GPUs with bfloat16, else xla."""
    remat: Literal["none", "selective", "block"] = free("none")
    """What the backward pass computes again, for less memory: all (block) or some (selective).

    block takes 1/3 more work. selective keeps products with weights and cuDNN's attention."""
    scan_layers: Literal["auto", True, False] = free("auto")
    """Whether all layers are one compiled loop; if not, a GPU is faster, and compilation slower.

    auto: not on accelerators, up to 24 layers."""
    loss_blocks: Annotated[int, Field(ge=1, le=1024)] = free(1)
    """Parts of the vocabulary whose logits are in memory one after the other, for less memory.

    The output layer takes 1/3 more work. It must divide the vocabulary. 1: all logits at once."""
    head_dim: Dimension | None = later(None)
    """Width of a head. Default: d_model / num_heads."""
    norm: Literal["rms", "rms_plus_1", "layer"] = later("rms")
    """rms: RMSNorm; rms_plus_1: with scale 1 + weight (Gemma); layer: LayerNorm with bias (GPT-2).
    """
    post_norms: bool = later(False)
    """Whether the outputs of attention and feed-forward are normalised too. (Gemma 3)"""
    qk_norm: bool = later(False)
    """Whether the queries and keys of each head are normalised. (Qwen3, Gemma 3)"""
    bias: Literal["none", "qkv", "all"] = later("none")
    """Biases: none, of queries, keys and values (Qwen2), or of all linear layers (GPT-2)."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = later("silu")
    """Activation of the feed-forward layer; gelu_tanh is GELU by tanh. (arXiv 1606.08415)"""
    gated: bool = later(True)
    """Whether the feed-forward layer is gated, as SwiGLU. (arXiv 2002.05202)"""
    positions: Literal["rotary", "learned"] = later("rotary")
    """rotary: RoPE; learned: an embedding of each position (GPT-2)."""
    max_positions: Dimension | None = later(None)
    """Rows of the learned positions; at least data.seq_len. Default: data.seq_len."""
    scale_embeddings: bool = later(False)
    """Whether embeddings are multiplied by the square root of d_model. (Gemma)"""
    rope_scaling: LinearScaling | Llama3Scaling | None = later(None, discriminator="kind")
    """Rotary angles for longer rows than the model was first trained on."""
    sliding_window: Dimension | None = later(None)
    """Positions that a position attends to, itself included; null: all earlier ones."""
    full_attention_every: PositiveInt | None = later(None)
    """With sliding_window: each n-th layer attends to all earlier positions. (Gemma 3: 6)"""
    sliding_rope_theta: PositiveFloat | None = later(None)
    """Base of the angles in layers with a sliding window, unscaled. Default: as in the others."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def ff_width(self) -> int:
        """Width of the feed-forward layer."""
        if self.d_ff is not None:
            return self.d_ff
        return -(-8 * self.d_model // (3 * 64)) * 64 if self.gated else 4 * self.d_model

    def tensor_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of mesh.tensor that split the heads evenly."""
        both = math.gcd(self.num_heads, self.num_kv_heads or self.num_heads)
        return tuple(n for n in range(1, both + 1) if both % n == 0)


class HuggingfaceModel(Section):
    """Model: the decoder of a Hugging Face folder; recorded as `kind: gpt` with its sizes.

    `init_from` (its weights) and `data.tokenizer` (its tokenizer) are set too, unless they are
    given. Other fields of `kind: gpt` may be given as well, and replace those of the folder.
    """

    kind: Literal["huggingface"]
    path: Folder
    """Folder with config.json, and with safetensors files and tokenizer.json if it has them."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate after attention and feed-forward."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of activations and matrix products; weights, softmax and logits are float32."""
    attention: Literal["auto", "xla", "cudnn"] = free("auto")
    """Attention kernel. auto: cudnn on GPUs with bfloat16, else xla."""
    remat: Literal["none", "selective", "block"] = free("none")
    """What the backward pass computes again, for less memory: all (block) or some (selective).

    block takes 1/3 more work. selective keeps products with weights and cuDNN's attention."""
    scan_layers: Literal["auto", True, False] = free("auto")
    """Whether all layers are one compiled loop; if not, a GPU is faster, and compilation slower.

    auto: not on accelerators, up to 24 layers."""


class MlpModel(Section):
    """Model: a small network for tests (models/mlp.py)."""

    kind: Literal["mlp"] = "mlp"
    num_layers: Layers = 2
    """Hidden layers."""
    d_model: Dimension = 64
    """Width of the embedding and of the hidden layers."""
    vocab_size: VocabSize | None = None
    """Rows of the embedding. Default: the tokenizer's, up to a multiple of 64."""


class VitModel(Section):
    """Model: Vision Transformer for the images source (models/vit.py)."""

    kind: Literal["vit"] = "vit"
    num_classes: Dimension
    """Classes; at least those of the data."""
    image_size: Dimension = 224
    """Height and width of an image: data.source.size."""
    patch_size: Dimension = 16
    """Height and width of a patch; must divide image_size."""
    num_layers: Layers = 12
    """Encoder blocks. (The defaults are ViT-B/16, arXiv 2010.11929)"""
    d_model: Dimension = 768
    """Width of the residual stream."""
    num_heads: Dimension = 12
    """Heads; must divide d_model."""
    d_ff: Dimension | None = None
    """Width of the feed-forward layer. Default: 4 d_model."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate after attention and feed-forward."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations and matrix products; weights, softmax and logits are float32."""
    remat: Literal["none", "selective", "block"] = free("none")
    """What the backward pass computes again, for less memory: all (block) or some (selective).

    block takes 1/3 more work. selective keeps products with weights and cuDNN's attention."""
    scan_layers: Literal["auto", True, False] = free("auto")
    """Whether all layers are one compiled loop; if not, a GPU is faster, and compilation slower.

    auto: not on accelerators, up to 24 layers."""

    def tensor_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of mesh.tensor that split the heads evenly."""
        return tuple(n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0)


class CustomModel(Section):
    """Model: an object that the user's code returns."""

    kind: Literal["custom"] = "custom"
    target: ImportPath
    """Function `package.module:build` (args, vocab_size, seq_len) that returns a models.Model."""
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it.
    """Keyword arguments of the target."""


AnyModel = GptModel | MlpModel | VitModel | CustomModel
if TYPE_CHECKING:  # A loaded config has no HuggingfaceModel: config/huggingface.py replaces it.
    ModelSection = AnyModel
else:
    ModelSection = Annotated[AnyModel | HuggingfaceModel, Field(discriminator="kind")]


def embedding_rows(configured: int | None, *, vocab_size: int | None) -> int:
    """Returns the embedding's rows: configured, or the tokenizer's up to a multiple of 64.

    Raises ConfigError if neither is known, or if the tokenizer has more tokens.
    """
    if configured is None and vocab_size is None:
        raise ConfigError(
            "model.vocab_size: the data has no tokenizer that defines it. Set model.vocab_size."
        )
    if configured is None:
        return -(-(vocab_size or 0) // 64) * 64
    if vocab_size is not None and configured < vocab_size:
        raise ConfigError(
            f"model.vocab_size: {configured} rows for a tokenizer of {vocab_size} tokens. "
            "Raise it, or leave it out for the tokenizer's, up to a multiple of 64; stored weights "
            "need the tokenizer that they were trained with."
        )
    return configured
