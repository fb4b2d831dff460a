"""Hugging Face's Llama format: tensor names and layouts, config.json, a byte tokenizer.

Hugging Face stores linear layers as [out, in] and every layer as tensors of its own; jaxres stores
them as [in, out] with heads and layers as separate dims. Both apply rotary embeddings to the two
halves of a head's width (not to neighbouring pairs), so no further permutation is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxres.config.schema import GptModel
from jaxres.data import tokenizer as byte_tokens
from jaxres.faults import ConfigError

BLOCKS = "params/blocks/"


@dataclass(frozen=True)
class Rule:
    """Name and layout of one of the decoder's arrays in Hugging Face's format."""

    path: str
    name: str
    """Name of the tensor; `{}` is replaced by the layer's number."""
    inputs: int = 0
    """Number of leading dims (without the layer's) that the matrix product sums over; 0: not a
    linear layer, stored unchanged."""

    def names(self, shape: Sequence[int]) -> list[str]:
        """Returns the names of the tensors that make up an array of this shape, layer by layer."""
        if "{}" not in self.name:
            return [self.name]
        return [self.name.format(layer) for layer in range(shape[0])]

    def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns Hugging Face's shape of a tensor, from our shape without the layers' dim."""
        if not self.inputs:
            return tuple(shape)
        return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])

    def to_hf(self, ours: np.ndarray) -> np.ndarray:
        """Converts one layer's array, or one without layers, to Hugging Face's layout."""
        if not self.inputs:
            return ours
        return ours.reshape(math.prod(ours.shape[: self.inputs]), -1).T

    def from_hf(self, theirs: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Converts one of Hugging Face's tensors to our layout; the inverse of `to_hf`."""
        return theirs.T.reshape(shape) if self.inputs else theirs


_LAYER = "model.layers.{}."
RULES = {
    rule.path: rule
    for rule in (
        Rule("params/embedding", "model.embed_tokens.weight"),
        Rule(f"{BLOCKS}attention_norm/scale", f"{_LAYER}input_layernorm.weight"),
        Rule(f"{BLOCKS}attention/query", f"{_LAYER}self_attn.q_proj.weight", inputs=1),
        Rule(f"{BLOCKS}attention/key", f"{_LAYER}self_attn.k_proj.weight", inputs=1),
        Rule(f"{BLOCKS}attention/value", f"{_LAYER}self_attn.v_proj.weight", inputs=1),
        Rule(f"{BLOCKS}attention/output", f"{_LAYER}self_attn.o_proj.weight", inputs=2),
        Rule(f"{BLOCKS}feed_forward_norm/scale", f"{_LAYER}post_attention_layernorm.weight"),
        Rule(f"{BLOCKS}feed_forward/gate", f"{_LAYER}mlp.gate_proj.weight", inputs=1),
        Rule(f"{BLOCKS}feed_forward/up", f"{_LAYER}mlp.up_proj.weight", inputs=1),
        Rule(f"{BLOCKS}feed_forward/down", f"{_LAYER}mlp.down_proj.weight", inputs=1),
        Rule("params/norm/scale", "model.norm.weight"),
        Rule("params/head", "lm_head.weight", inputs=1),
    )
}


def pieces(path: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and numbers of the tensors that one of the decoder's arrays is stored as."""
    rule = RULES[path]
    names = rule.names(array.shape)
    layers = array if "{}" in rule.name else [array]
    for name, layer in zip(names, layers, strict=True):
        yield name, rule.to_hf(layer)


def shapes(model: GptModel, *, rows: int) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of the decoder's arrays; `rows` is the length of the embedding."""
    L, D, H = model.num_layers, model.d_model, model.num_heads
    K, C, F = model.num_kv_heads or H, D // H, model.d_ff
    assert F is not None
    arrays: dict[str, tuple[int, ...]] = {
        "params/embedding": (rows, D),
        f"{BLOCKS}attention_norm/scale": (L, D),
        f"{BLOCKS}attention/query": (L, D, H, C),
        f"{BLOCKS}attention/key": (L, D, K, C),
        f"{BLOCKS}attention/value": (L, D, K, C),
        f"{BLOCKS}attention/output": (L, H, C, D),
        f"{BLOCKS}feed_forward_norm/scale": (L, D),
        f"{BLOCKS}feed_forward/gate": (L, D, F),
        f"{BLOCKS}feed_forward/up": (L, D, F),
        f"{BLOCKS}feed_forward/down": (L, F, D),
        "params/norm/scale": (D,),
    }
    return arrays if model.tie_embeddings else arrays | {"params/head": (D, rows)}


def write_config(
    model: GptModel,
    found: Mapping[str, Sequence[int]],
    *,
    dtype: str,
    seq_len: int,
    eos: int | None,
) -> dict[str, Any]:
    """Returns the fields of config.json of a decoder; `found` is path -> shape of its arrays."""
    rows, width = found["params/embedding"]
    heads, head_width = found[f"{BLOCKS}attention/query"][2:]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": found[f"{BLOCKS}feed_forward/gate"][2],
        "num_hidden_layers": found[f"{BLOCKS}attention/query"][0],
        "num_attention_heads": heads,
        "num_key_value_heads": found[f"{BLOCKS}attention/key"][2],
        "head_dim": head_width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "params/head" not in found,
        "max_position_embeddings": seq_len,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


NO_CHOICE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Settings of config.json that the decoder does not support, with the values that it computes."""


def read_config(fields: Mapping[str, Any]) -> tuple[GptModel, int, dict[str, Any]]:
    """Returns the decoder that a config.json describes, the embedding's rows, unsupported settings.

    The unsupported settings, under their names in config.json, are those that the decoder can't
    compute with.

    Raises:
      ConfigError: the file does not describe a Llama.
    """
    rope = fields.get("rope_parameters") or {}  # Written by transformers 5.
    scaling = fields.get("rope_scaling")
    settings = {**NO_CHOICE, "model_type": None, **fields}
    settings["rope_scaling"] = next(
        (part for part in (scaling, rope) if part and _rope_kind(part) != "default"), None
    )
    differing = {key: settings[key] for key, ours in NO_CHOICE.items() if settings[key] != ours}
    try:
        heads = fields["num_attention_heads"]
        model = GptModel(
            num_layers=fields["num_hidden_layers"],
            d_model=fields["hidden_size"],
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads", heads),
            d_ff=fields["intermediate_size"],
            vocab_size=fields["vocab_size"],
            tie_embeddings=fields.get("tie_word_embeddings", False),
            rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0))),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"model_type {fields.get('model_type')!r}: {type(error).__name__}: {error}"
        raise ConfigError(f"config.json: not a Llama config ({what})") from error
    width = fields.get("head_dim") or model.d_model // heads
    if width * heads != model.d_model:
        differing["head_dim"] = width
    return model, fields["vocab_size"], differing


def _rope_kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def bytes_tokenizer(*, seq_len: int) -> dict[str, bytes]:
    """Returns tokenizer files with which Hugging Face's tokenizers act as the bytes tokenizer."""
    # Byte-level BPE without merges: its alphabet represents the 256 bytes, in this order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    end = "<|end of document|>"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    added = {
        "id": byte_tokens.END_OF_DOCUMENT,
        "content": end,
        "special": True,
        "single_word": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added | {"lstrip": False, "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }
