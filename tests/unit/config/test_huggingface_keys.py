"""Settings of a config.json that may change what a model computes are read, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.config import huggingface
from jaxres.faults import ConfigError

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 16,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "rope_interleaved": False,
        "tie_word_embeddings": True,
        "is_llama_config": True,
        "unsloth_fixed": True,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_window_layers": 28,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 320,
        "reorder_and_upcast_attn": False,
        "scale_attn_weights": True,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    },
}
"""The keys of a published config.json of each family, with their values but for the sizes."""


def published(family: str) -> dict[str, Any]:
    sizes = {} if family == "gpt2" else SIZES
    return {"model_type": family, **sizes, **PUBLISHED[family]}


def test_there_is_a_published_config_of_every_family() -> None:
    assert PUBLISHED.keys() == huggingface.STYLES.keys()


@pytest.mark.parametrize("family", PUBLISHED)
def test_all_keys_of_a_published_config_are_known(family: str) -> None:
    assert huggingface.model_of(published(family))[1] == {}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_key_that_is_not_known_is_named_with_its_value(family: str) -> None:
    for change in ({"residual_multiplier": 0.22}, {"num_experts": 8}, {"use_qk_norm": True}):
        assert huggingface.model_of(published(family) | change)[1] == change
    nothing = {"residual_multiplier": None}
    assert huggingface.model_of(published(family) | nothing)[1] == {}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_interleaved": True}),
        ("llama", {"sliding_window": 64}),
        ("llama", {"hidden_activation": "relu"}),
        ("llama", {"architectures": ["LlamaBidirectionalModel"]}),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}),
        ("qwen2", {"use_mrope": True}),
        ("gemma", {"hidden_act": "relu"}),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}),
        ("gpt2", {"pruned_heads": {"0": [1]}}),
        ("gpt2", {"rope_theta": 10000.0}),
    ],
)
def test_a_setting_that_the_family_does_not_have_is_never_ignored(
    family: str, change: dict[str, Any]
) -> None:
    assert huggingface.model_of(published(family) | change)[1] == change


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0, "attention_factor": 0.5},
        {"rope_type": "default", "mrope_section": [16, 24, 24]},
    ],
)
def test_a_setting_of_scaled_angles_that_is_not_read_is_named(scaling: dict[str, Any]) -> None:
    found = huggingface.model_of(published("llama") | {"rope_scaling": scaling})[1]
    assert found == {"rope_scaling": scaling}


LINEAR = {"rope_type": "linear", "factor": 2.0}
HALF = {"rope_type": "default", "partial_rotary_factor": 0.5}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("llama", {"rope_scaling": {**LINEAR, "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 7e5}}, {"rope_theta": 7e5}),
        ("gemma3_text", {"rope_scaling": {**LINEAR, "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ("gemma3_text", {}, {"rope_theta": 1e6, "sliding_rope_theta": 1e4, "sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": True}, {"sliding_window": None}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, {"sliding_window": 4096}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, {"sliding_window": None}),
        ("mistral", {"num_attention_heads": 16}, {"sliding_window": 4096, "num_kv_heads": 8}),
        ("qwen3", {"num_attention_heads": 64}, {"num_kv_heads": 32, "head_dim": 128}),
        ("gemma", {"num_attention_heads": 32}, {"num_kv_heads": 16, "head_dim": 256}),
        ("llama", {"num_attention_heads": 8}, {"num_kv_heads": 8, "activation": "silu"}),
    ],
)
def test_what_a_config_does_not_say_is_the_default_of_transformers(
    family: str, change: dict[str, Any], expected: dict[str, Any]
) -> None:
    model, unsupported = huggingface.model_of({**bare(family), **change})
    assert unsupported == {}
    assert {name: getattr(model, name) for name in expected} == expected


def bare(family: str) -> dict[str, Any]:
    """Returns the keys that have no default here."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    heads = {"mistral": 8, "qwen2": 32, "qwen3": 32, "gemma": 16}.get(family, 4)
    sizes = {name: SIZES[name] for name in names}
    return {"model_type": family, **sizes, "num_attention_heads": heads}


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"rope_scaling": HALF}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": HALF}, "partial_rotary_factor"),
        ("gemma3_text", {"rope_parameters": {SLIDING: HALF}}, "partial_rotary_factor"),
        ("gemma3_text", {"rope_parameters": {FULL: HALF}}, "partial_rotary_factor"),
        ("gemma3_text", {"rope_parameters": LINEAR}, "rope_parameters"),
        ("llama", {"rope_scaling": {**LINEAR, "rope_theta": 5e5}, "rope_theta": 7e5}, "rope_theta"),
        (
            "llama",
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {SLIDING: {"rope_theta": 1e3}}, "rope_local_base_freq": 1e4},
            "rope_theta",
        ),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "max_window_layers"),
        ("qwen3", {"sliding_window": 8, "layer_types": [SLIDING] * 4}, "layer_types"),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 4}, "layer_types"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window"),
        ("gemma3_text", {"_sliding_window_pattern": 3}, "_sliding_window_pattern"),
        ("gemma3_text", {"head_dim": 16}, "query_pre_attn_scalar"),
        ("llama", {"hidden_act": None}, "hidden_act"),
    ],
)
def test_what_changes_the_numbers_or_is_said_twice_is_named(
    family: str, change: dict[str, Any], named: str
) -> None:
    fields = {**bare(family), **change}
    assert named in huggingface.model_of(fields)[1]


def test_settings_beside_a_text_config_count_too() -> None:
    inner = published("gemma3_text")
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": inner,
        "vision_config": {"hidden_size": 8},
        "image_token_index": 7,
        "transformers_version": "4.50.0",
    }
    assert huggingface.model_of(huggingface.of_text(outer))[1] == {}
    quantized = outer | {"quantization_config": {"quant_method": "fp8"}}
    found = huggingface.model_of(huggingface.of_text(quantized))[1]
    assert found == {"quantization_config": {"quant_method": "fp8"}}


def test_a_mistral_without_the_key_has_the_window_of_its_class() -> None:
    fields = published("mistral")
    assert huggingface.model_of(fields)[0].sliding_window is None
    fields.pop("sliding_window")
    assert huggingface.model_of(fields)[0].sliding_window == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantized.*bfloat16"),
        ({"logit_scale": 0.5}, "logit_scale.*remove it from a copy of config.json"),
    ],
)
def test_a_model_folder_with_such_a_setting_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published("llama") | change))
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{kind: huggingface, path: {tmp_path}}}\ntrain: {{steps: 1}}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        configs.load(config)
    assert "allow_extra" not in str(caught.value)
