"""Names and layouts of Hugging Face's tensors for the arrays of a decoder.

Hugging Face stores linear layers as [out, in] and every layer as tensors of its own; jaxres stores
them as [in, out] with heads and layers as separate dims. GPT-2 stores them as [in, out], with
queries, keys and values in one tensor. All apply rotary embeddings to the two halves of a head's
width (not to neighbouring pairs), so no further permutation is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxres.config.schema.model import GptModel
from jaxres.faults import ConfigError

BLOCKS = "params/blocks/"
Layout = Literal["same", "out_in", "in_out"]
"""same: stored unchanged; the others: a matrix, with inputs and outputs each as one dim."""


@dataclass(frozen=True)
class Rule:
    """Name and layout of one of the decoder's arrays in Hugging Face's format."""

    path: str
    name: str
    """Name of the tensor; `{}` is replaced by the layer's number."""
    inputs: int = 0
    """Number of leading dims (without the layer's) that the matrix product sums over."""
    layout: Layout = "same"
    part: tuple[int, int] = (0, 1)
    """(number, count): the array is this one of so many equal parts of the tensor's outputs."""

    def names(self, shape: Sequence[int]) -> list[str]:
        """Returns the names of the tensors that make up an array of this shape, layer by layer."""
        if "{}" not in self.name:
            return [self.name]
        return [self.name.format(layer) for layer in range(shape[0])]

    @property
    def output_dim(self) -> int:
        """The dim of a tensor that its parts lie along."""
        return 1 if self.layout == "in_out" else 0

    def hf_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns Hugging Face's shape of a tensor, from our shape without the layers' dim."""
        own = tuple(shape)
        if self.layout != "same":
            inputs, outputs = math.prod(shape[: self.inputs]), math.prod(shape[self.inputs :])
            own = (outputs, inputs) if self.layout == "out_in" else (inputs, outputs)
        dim = self.output_dim
        return (*own[:dim], own[dim] * self.part[1], *own[dim + 1 :])

    def to_hf(self, ours: np.ndarray) -> np.ndarray:
        """Converts one layer's array, or one without layers, to its part of the tensor."""
        if self.layout == "same":
            return ours
        matrix = ours.reshape(math.prod(ours.shape[: self.inputs]), -1)
        return matrix.T if self.layout == "out_in" else matrix

    def from_hf(self, theirs: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Converts one of Hugging Face's tensors to our layout; the inverse of `to_hf`."""
        number, count = self.part
        if count > 1:
            theirs = np.split(theirs, count, axis=self.output_dim)[number]
        return (theirs.T if self.layout == "out_in" else theirs).reshape(shape)


def _rules(*rules: Rule) -> dict[str, Rule]:
    return {rule.path: rule for rule in rules}


def _matrix(path: str, name: str, inputs: int = 1) -> Rule:
    return Rule(path, name, inputs, "out_in")


_LAYER, _SELF = "model.layers.{}.", "model.layers.{}.self_attn."
LLAMA = _rules(
    Rule("params/embedding", "model.embed_tokens.weight"),
    Rule(f"{BLOCKS}attention_norm/scale", f"{_LAYER}input_layernorm.weight"),
    _matrix(f"{BLOCKS}attention/query", f"{_SELF}q_proj.weight"),
    _matrix(f"{BLOCKS}attention/key", f"{_SELF}k_proj.weight"),
    _matrix(f"{BLOCKS}attention/value", f"{_SELF}v_proj.weight"),
    _matrix(f"{BLOCKS}attention/output", f"{_SELF}o_proj.weight", inputs=2),
    Rule(f"{BLOCKS}attention/query_bias", f"{_SELF}q_proj.bias"),
    Rule(f"{BLOCKS}attention/key_bias", f"{_SELF}k_proj.bias"),
    Rule(f"{BLOCKS}attention/value_bias", f"{_SELF}v_proj.bias"),
    Rule(f"{BLOCKS}attention/query_norm/scale", f"{_SELF}q_norm.weight"),
    Rule(f"{BLOCKS}attention/key_norm/scale", f"{_SELF}k_norm.weight"),
    Rule(f"{BLOCKS}feed_forward_norm/scale", f"{_LAYER}post_attention_layernorm.weight"),
    _matrix(f"{BLOCKS}feed_forward/gate", f"{_LAYER}mlp.gate_proj.weight"),
    _matrix(f"{BLOCKS}feed_forward/up", f"{_LAYER}mlp.up_proj.weight"),
    _matrix(f"{BLOCKS}feed_forward/down", f"{_LAYER}mlp.down_proj.weight"),
    Rule("params/norm/scale", "model.norm.weight"),
    _matrix("params/head", "lm_head.weight"),
)
"""Path -> rule, for families with Llama's names: Llama, Mistral, Qwen2, Qwen3 and Gemma."""
GEMMA3 = LLAMA | _rules(
    Rule(f"{BLOCKS}attention_post_norm/scale", f"{_LAYER}post_attention_layernorm.weight"),
    Rule(f"{BLOCKS}feed_forward_norm/scale", f"{_LAYER}pre_feedforward_layernorm.weight"),
    Rule(f"{BLOCKS}feed_forward_post_norm/scale", f"{_LAYER}post_feedforward_layernorm.weight"),
)


def _gpt2(prefix: str) -> dict[str, Rule]:
    layer = prefix + "h.{}."
    names = ("query", "key", "value")
    fused = [
        rule
        for n, name in enumerate(names)
        for rule in (
            Rule(f"{BLOCKS}attention/{name}", f"{layer}attn.c_attn.weight", 1, "in_out", (n, 3)),
            Rule(f"{BLOCKS}attention/{name}_bias", f"{layer}attn.c_attn.bias", part=(n, 3)),
        )
    ]
    linear = [
        rule
        for path, name, inputs in (
            ("attention/output", "attn.c_proj", 2),
            ("feed_forward/up", "mlp.c_fc", 1),
            ("feed_forward/down", "mlp.c_proj", 1),
        )
        for rule in (
            Rule(f"{BLOCKS}{path}", f"{layer}{name}.weight", inputs, "in_out"),
            Rule(f"{BLOCKS}{path}_bias", f"{layer}{name}.bias"),
        )
    ]
    norms = [
        Rule(f"{path}/{ours}", f"{name}.{theirs}")
        for path, name in (
            (f"{BLOCKS}attention_norm", f"{layer}ln_1"),
            (f"{BLOCKS}feed_forward_norm", f"{layer}ln_2"),
            ("params/norm", f"{prefix}ln_f"),
        )
        for ours, theirs in (("scale", "weight"), ("bias", "bias"))
    ]
    return _rules(
        Rule("params/embedding", f"{prefix}wte.weight"),
        Rule("params/positions", f"{prefix}wpe.weight"),
        _matrix("params/head", "lm_head.weight"),
        *fused,
        *linear,
        *norms,
    )


GPT2 = _gpt2("transformer.")
BARE_GPT2 = _gpt2("")
"""Names without prefix, as in the files of OpenAI's models."""
FAMILIES: Mapping[str, Mapping[str, Rule]] = {"gemma3_text": GEMMA3, "gpt2": GPT2}
"""model_type -> rules of the families whose names are not Llama's."""
NOT_PARAMETERS = ("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq")
"""Constants that some files store beside the parameters."""


def rules_of(family: str) -> Mapping[str, Rule]:
    """Returns the rules of a model_type."""
    return FAMILIES.get(family, LLAMA)


def rules_for(names: Iterable[str]) -> Mapping[str, Rule]:
    """Returns the rules of the family that the names of tensors are of."""
    found = set(names)
    if "wte.weight" in found:
        return BARE_GPT2
    if "transformer.wte.weight" in found:
        return GPT2
    is_gemma3 = any(name.endswith("pre_feedforward_layernorm.weight") for name in found)
    return GEMMA3 if is_gemma3 else LLAMA


ADAPTERS = "params/lora/"


def adapter_rules(family: str) -> dict[str, Rule]:
    """Returns the rules by which the package peft stores the adapters of a family.

    Only matrices that have a tensor of their own can have an adapter there.
    """
    found = []
    for path, rule in rules_of(family).items():
        if rule.layout != "out_in":
            continue
        place, module = ADAPTERS + path.removeprefix("params/"), rule.name.removesuffix(".weight")
        module = f"base_model.model.{module}"
        found.append(Rule(f"{place}/a", f"{module}.lora_A.weight", rule.inputs, "out_in"))
        found.append(Rule(f"{place}/b", f"{module}.lora_B.weight", 1, "out_in"))
    return _rules(*found)


def groups(paths: Iterable[str], rules: Mapping[str, Rule]) -> Iterator[tuple[Rule, ...]]:
    """Yields the rules of arrays; arrays that share their tensors are in one group.

    Raises ConfigError for an array that has no rule.
    """
    by_name: dict[str, list[Rule]] = {}
    for path in paths:
        rule = rules.get(path)
        if rule is None:
            raise ConfigError(
                f"{path}: Hugging Face's format has no such array. Export it with --names jaxres."
            )
        by_name.setdefault(rule.name, []).append(rule)
    for group in by_name.values():
        yield tuple(sorted(group, key=lambda rule: rule.part))


def pieces(group: Sequence[Rule], arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and numbers of the tensors in which a group of arrays is stored."""
    names = group[0].names(arrays[0].shape)
    layered = "{}" in group[0].name
    for layer, name in enumerate(names):
        parts = [
            rule.to_hf(array[layer] if layered else array)
            for rule, array in zip(group, arrays, strict=True)
        ]
        yield name, parts[0] if len(parts) == 1 else np.concatenate(parts, group[0].output_dim)


def shapes(model: GptModel, *, rows: int) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of the decoder's arrays; `rows` is the length of the embedding."""
    L, D, block = model.num_layers, model.d_model, _block_shapes(model)
    arrays = {f"{BLOCKS}{path}": (L, *shape) for path, shape in block.items()}
    arrays |= {"params/embedding": (rows, D), "params/norm/scale": (D,)}
    arrays |= {"params/norm/bias": (D,)} if model.norm == "layer" else {}
    if model.positions == "learned":
        assert model.max_positions is not None
        arrays["params/positions"] = (model.max_positions, D)
    return arrays if model.tie_embeddings else arrays | {"params/head": (D, rows)}


def _block_shapes(model: GptModel) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of the arrays of one block."""
    D, H, C, F = model.d_model, model.num_heads, model.head_width, model.ff_width
    K = model.num_kv_heads or H
    block: dict[str, tuple[int, ...]] = {
        "attention_norm/scale": (D,),
        "attention/query": (D, H, C),
        "attention/key": (D, K, C),
        "attention/value": (D, K, C),
        "attention/output": (H, C, D),
        "feed_forward_norm/scale": (D,),
        "feed_forward/up": (D, F),
        "feed_forward/down": (F, D),
    }
    if model.gated:
        block["feed_forward/gate"] = (D, F)
    if model.bias != "none":
        block |= {
            "attention/query_bias": (H * C,),
            "attention/key_bias": (K * C,),
            "attention/value_bias": (K * C,),
        }
    if model.bias == "all":
        block |= {
            "attention/output_bias": (D,),
            "feed_forward/up_bias": (F,),
            "feed_forward/down_bias": (D,),
        }
        block |= {"feed_forward/gate_bias": (F,)} if model.gated else {}
    if model.qk_norm:
        block |= {"attention/query_norm/scale": (C,), "attention/key_norm/scale": (C,)}
    if model.post_norms:
        block |= {"attention_post_norm/scale": (D,), "feed_forward_post_norm/scale": (D,)}
    if model.norm == "layer":
        block |= {
            path.replace("/scale", "/bias"): shape
            for path, shape in block.items()
            if path.endswith("norm/scale")
        }
    return block
