"""The config.json of a decoder, for Hugging Face's libraries."""

from __future__ import annotations

import json
from typing import Any

from jaxres.config.huggingface import FULL, SLIDING, STYLES, layer_kinds, model_of
from jaxres.config.schema.model import GptModel, LinearScaling, Llama3Scaling
from jaxres.faults import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def family_of(model: GptModel) -> str:
    """Returns the model_type as which a decoder can be stored.

    Raises ConfigError if no family computes what it computes.
    """
    for family, style in STYLES.items():
        has_window = model.sliding_window is not None
        if (family == "llama" and has_window) or (family == "mistral" and not has_window):
            continue
        if family in ("mistral", "gemma") and model.full_attention_every is not None:
            continue
        if family == "gemma" and has_window:
            continue
        expected = {**_style(GptModel(), family), **style}
        if all(getattr(model, key) == expected[key] for key in _style(model, family)):
            return family
    raise ConfigError(
        "no family of Hugging Face's models has these keys of `model` together: "
        f"{json.dumps(_style(model, ''))}. Export it with --names jaxres."
    )


def _style(model: GptModel, family: str) -> dict[str, Any]:
    names = ["norm", "post_norms", "qk_norm", "bias", "gated", "positions", "scale_embeddings"]
    if family in ("gemma", "gemma3_text"):
        names.append("activation")  # Of the others config.json has a setting.
    return {name: getattr(model, name) for name in names}


NOT_OF_THE_FUNCTION = {
    *("kind", "vocab_size", "dropout", "compute_dtype"),
    *("attention", "remat", "scan_layers", "loss_blocks"),
}
"""Keys of a decoder that config.json has elsewhere, or that decide only how it is computed."""
STORED_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Our name of an activation -> that of config.json; GPT-2 has another one of the last."""


def _gpt2_fields(model: GptModel, seq_len: int) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.ff_width,
        "n_positions": model.max_positions or seq_len,
        "activation_function": {**STORED_ACTIVATIONS, "gelu_tanh": "gelu_new"}[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def fields_of(
    model: GptModel, *, rows: int, dtype: str, seq_len: int, eos: int | None
) -> dict[str, Any]:
    """Returns the fields of config.json of a decoder.

    Args:
      rows: rows of its embedding.
      dtype: type of the stored numbers.
      eos: token that ends a document; None: unknown.

    Raises:
      ConfigError: no family computes what it computes.
    """
    family = family_of(model)
    common = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": rows,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if family == "gpt2":
        fields = common | _gpt2_fields(model, seq_len)
    else:
        fields = common | _rotary_fields(model, family, seq_len)
    found, unsupported = model_of(fields)
    given, read = (function(one, seq_len=seq_len) for one in (model, found))
    lost = [f"model.{key}={value}" for key, value in given.items() if value != read[key]]
    if lost or unsupported:
        raise ConfigError(
            f"config.json of the family {family} can't say {', '.join(lost) or unsupported}: it "
            "would compute something else. Export it with --names jaxres."
        )
    return fields


def function(model: GptModel, *, seq_len: int) -> dict[str, Any]:
    """Returns the settings that decide the function of a decoder, each in one form only."""
    fields = model.model_dump(exclude=NOT_OF_THE_FUNCTION) | {
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_width,
        "d_ff": model.ff_width,
    }
    kinds = _layer_kinds(model)
    if not (has_window := SLIDING in kinds):
        fields["sliding_window"] = None
    if not has_window or FULL not in kinds:
        fields["full_attention_every"] = None
    theta = model.sliding_rope_theta
    local = (model.rope_theta, model.rope_scaling) if theta is None else (theta, None)
    fields["sliding_rope_theta"] = local if has_window else None
    if model.positions == "rotary":
        return fields | {"max_positions": None}
    positions = {"max_positions": model.max_positions or seq_len}
    return fields | dict.fromkeys(("rope_theta", "rope_scaling", "sliding_rope_theta")) | positions


def _rotary_fields(model: GptModel, family: str, seq_len: int) -> dict[str, Any]:
    fields = {
        "hidden_size": model.d_model,
        "intermediate_size": model.ff_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_width,
        "hidden_act": STORED_ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _stored_scaling(model.rope_scaling),
        "attention_bias": model.bias == "qkv",
        "mlp_bias": False,
        "max_position_embeddings": seq_len,
    }
    if family == "qwen2":
        fields.pop("attention_bias")  # It has them always.
    if family.startswith("gemma"):
        fields |= {"hidden_activation": fields["hidden_act"]}
    return fields | _stored_windows(model, family)


def _stored_scaling(scaling: LinearScaling | Llama3Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {"rope_type": scaling.kind, "factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return fields
    return fields | {
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def _layer_kinds(model: GptModel) -> list[str]:
    has_window = model.sliding_window is not None
    return layer_kinds(model.num_layers, has_window=has_window, every=model.full_attention_every)


def _stored_windows(model: GptModel, family: str) -> dict[str, Any]:
    window, kinds = model.sliding_window, _layer_kinds(model)
    if family == "mistral":
        return {"sliding_window": window}
    if family.startswith("qwen"):
        if window is None:
            return {"use_sliding_window": False}
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if family == "gemma3_text":
        return {
            "sliding_window": window or 4096,
            "layer_types": kinds,
            "query_pre_attn_scalar": model.head_width,
            "rope_local_base_freq": model.sliding_rope_theta or model.rope_theta,
        }
    return {}
