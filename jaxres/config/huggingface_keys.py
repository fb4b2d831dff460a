"""Which keys of Hugging Face's config.json are read, and which change nothing, by family.

Any other key that has a value is named: another version of the library, or another program, may
compute otherwise because of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


QUANTIZATION = ("quantization_config", "compression_config", "quantization")
"""Keys of a config.json whose model has its weights as small numbers with scales beside them."""
_ROTARY = _keys(
    """hidden_size num_attention_heads head_dim hidden_act num_hidden_layers num_key_value_heads
    intermediate_size vocab_size tie_word_embeddings rms_norm_eps rope_parameters rope_scaling
    rope_theta"""
)
_QWEN = _ROTARY | {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers"}
_GEMMA = _ROTARY | {"hidden_activation"}
READ: Mapping[str, frozenset[str]] = {
    "llama": _ROTARY,
    "mistral": _ROTARY | {"sliding_window", "layer_types"},
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gemma": _GEMMA,
    "gemma3_text": _GEMMA
    | {"sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"}
    | {"rope_local_base_freq", "query_pre_attn_scalar"},
    "gpt2": _keys("""n_layer n_embd n_head n_inner n_positions vocab_size tie_word_embeddings
        activation_function layer_norm_epsilon"""),
}
"""model_type -> keys that jaxres reads."""
HARMLESS = _keys(
    # What it is called, and by which version it was written.
    """ _name_or_path _commit_hash model_type architectures transformers_version name_or_path
    tokenizer_class unsloth_version unsloth_fixed is_llama_config transformers.js_config
    """
    # In which type the numbers are stored, and how another program computes the same.
    """ torch_dtype dtype use_bfloat16 tf_legacy_loss torchscript pretraining_tp
    reorder_and_upcast_attn gradient_checkpointing chunk_size_feed_forward use_cache
    cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _flash_attn_2_enabled use_flash_attn output_past"""
    # Tokens, and the longest text.
    """ bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id
    mask_token_id decoder_start_token_id max_position_embeddings max_sequence_length
    model_max_length n_ctx"""
    # Dropout and first numbers of its own training, and heads for classes.
    """ initializer_range attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    id2label label2id num_labels _num_labels problem_type finetuning_task classifier_dropout
    task_specific_params"""
    # What a call returns, and how text is generated.
    """ return_dict output_hidden_states output_attentions output_scores return_dict_in_generate
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens prefix is_decoder tie_encoder_decoder"""
)
"""Keys that change no number of a forward pass."""
OTHER_PARTS = _keys(
    """architectures model_type text_config vision_config audio_config image_token_index
    image_token_id video_token_id audio_token_id boi_token_index eoi_token_index boi_token_id
    eoi_token_id boa_token_id eoa_token_id vision_start_token_id vision_end_token_id
    vision_token_id mm_tokens_per_image image_seq_length projector_hidden_act
    multimodal_projector_bias vision_feature_layer vision_feature_select_strategy
    spatial_merge_size"""
)
"""Keys, beside `text_config`, about the parts of a model that are not about text."""
_ROPE = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor"))
ROPE_READ: Mapping[str, frozenset[str]] = {
    "default": _ROPE,
    "linear": _ROPE | {"factor"},
    "llama3": _ROPE
    | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""Kind of scaled angles -> its keys that are read."""
_HEADS = ("ForCausalLM", "Model", "ForSequenceClassification", "ForTokenClassification")
ARCHITECTURE_NAMES: Mapping[str, frozenset[str]] = {
    family: frozenset(f"{stem}{head}" for stem in stems for head in _HEADS) | frozenset(more)
    for family, stems, more in (
        ("llama", ("Llama", "LLaMA"), ()),
        ("mistral", ("Mistral",), ()),
        ("qwen2", ("Qwen2",), ()),
        ("qwen3", ("Qwen3",), ()),
        ("gemma", ("Gemma",), ()),
        ("gemma3_text", ("Gemma3", "Gemma3Text"), ("Gemma3ForConditionalGeneration",)),
        ("gpt2", ("GPT2",), ("GPT2LMHeadModel", "GPT2DoubleHeadsModel")),
    )
}
"""model_type -> classes with the decoder's computation, but for their heads."""


def unknown(
    family: str, fields: Mapping[str, Any], *, compared: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the keys of a config.json, with values, that may change the computation.

    Args:
      family: its model_type, one of `READ`.
      compared: keys whose value is compared elsewhere.
    """
    known = READ[family] | HARMLESS | compared.keys()
    rest = {key: value for key, value in fields.items() if value is not None and key not in known}
    given = fields.get("architectures") or []
    others = [name for name in given if name not in ARCHITECTURE_NAMES[family]]
    return rest | ({"architectures": given} if others else {})


def cannot_compute(settings: Mapping[str, Any]) -> str:
    """Returns the message for settings of a config.json that the decoder does not compute with."""
    quantized = [key for key in QUANTIZATION if key in settings]
    if quantized:
        return (
            f"{quantized[0]}: {json.dumps(settings[quantized[0]])[:200]}: the weights are "
            "quantized, so their numbers mean nothing without scales, which jaxres does not apply. "
            "Convert the model to bfloat16 with the program that quantized it, or take the "
            "original; if its numbers are no longer quantized, remove this key from config.json"
        )
    return (
        f"jaxres can't compute with {json.dumps(dict(settings))}. If a setting changes nothing "
        "that the model computes, remove it from a copy of config.json"
    )
