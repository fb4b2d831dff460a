"""Tiny decoders of Hugging Face's families, with numbers that any program can draw again."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROWS, T, COMPARED = 96, 12, 4
TOKENS = np.random.default_rng(1).integers(0, ROWS, (2, T))
BASE = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
CONFIGS = {
    "llama": BASE | {"model_type": "llama", "rope_scaling": LLAMA3},
    "llama-linear": BASE
    | {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    | {"head_dim": 16, "tie_word_embeddings": True},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 5},
    "qwen2": BASE | {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16},
    "gemma": BASE | GEMMA | {"model_type": "gemma"},
    "gemma3": BASE
    | GEMMA
    | {
        "model_type": "gemma3_text",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 100.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": ROWS,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 16,
        "n_inner": None,
        "activation_function": "gelu_new",
    },
}
"""Name of a case -> fields of its config.json."""


def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the numbers of a tensor, from its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    is_scale = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
    return (float(is_scale) + rng.normal(0, 0.2, shape)).astype(np.float32)


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Writes a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))


def write_folder(folder: Path, fields: Mapping[str, Any]) -> Path:
    """Writes config.json and the numbers of a model, under Hugging Face's names."""
    from jaxres.checkpoint.read.manifest import ArrayInfo
    from jaxres.checkpoint.weights import hf_tensors, safetensors
    from jaxres.config import huggingface

    write_config(folder, fields)
    model, unsupported = huggingface.model_of(fields)
    assert unsupported == {}
    shapes = hf_tensors.shapes(model, rows=fields["vocab_size"])
    infos = {}
    for group in hf_tensors.groups(shapes, hf_tensors.rules_of(fields["model_type"])):
        rule, shape = group[0], shapes[group[0].path]
        stored = rule.hf_shape(shape[1:] if "{}" in rule.name else shape)
        infos |= {name: ArrayInfo("float32", stored) for name in rule.names(shape)}
    contents = ((name, numbers(name, info.shape)) for name, info in infos.items())
    safetensors.write_file(folder / safetensors.SINGLE_FILE, infos, contents)
    return folder
