"""Which settings of a tokenizer_config.json would change the tokens of a text.

Hugging Face's libraries apply them to what tokenizer.json says; jaxres reads tokenizer.json alone.
So a setting must agree with it, or be known to change no token, or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxres.data.text_cuts import sequence
from jaxres.faults import ConfigError

HARMLESS = frozenset(
    (
        # Which files and classes it is made of.
        *("tokenizer_class", "name_or_path", "vocab_file", "merges_file", "tokenizer_file"),
        *("special_tokens_map_file", "processor_class", "backend", "is_local", "local_files_only"),
        *("tokenizer_type", "vocab_size", "transformers_version", "model_type", "device_map"),
        *("revision", "trust_remote_code", "use_fast", "from_slow", "legacy", "sp_model_kwargs"),
        *("_commit_hash", "commit_hash"),
        # Lengths, padding, truncation and templates, which a document does not have.
        *("model_max_length", "max_length", "max_len", "max_model_input_sizes", "stride"),
        *("padding_side", "truncation_side", "truncation_strategy", "pad_to_multiple_of"),
        *("pad_token_type_id", "padding", "truncation", "model_input_names", "trim_offsets"),
        *("chat_template", "use_default_system_prompt", "response_schema", "default_chat_template"),
        # Tokens that it adds before and after a text.
        *("add_bos_token", "add_eos_token"),
        # Only from tokens to text.
        *("clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors"),
        # Special tokens in a text: data.tokenizer.special_tokens says it.
        "split_special_tokens",
        # Which token means what; read: eos_token.
        *("eos_token", "bos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
        *("mask_token", "eos_token_id", "bos_token_id", "pad_token_id", "unk_token_id"),
        *("image_token", "audio_token", "video_token", "boi_token", "eoi_token", "eot_token"),
        *("boa_token", "eoa_token", "sot_token", "etr_token", "sor_token", "std_token"),
        *("prefix_token", "middle_token", "suffix_token", "fill_token", "suffix_first"),
        *("spm_token", "vision_bos_token", "vision_eos_token", "image_token_id"),
    )
)
"""Keys that change no token of a text, or only add some at its ends."""
ADDED = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
"""Keys with tokens, which the libraries add if tokenizer.json has them not."""
NORMALIZING = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
NORMALIZING["tokenize_chinese_chars"] = "handle_chinese_chars"
"""Keys of a BERT tokenizer -> the same in its normalizer, which the libraries change."""


def check(settings: Mapping[str, Any], data: bytes, ids: Mapping[str, int], *, where: str) -> None:
    """Raises ConfigError if a setting would change tokens, or may.

    Args:
      settings: fields of tokenizer_config.json.
      data: contents of tokenizer.json, which is valid.
      ids: its tokens with their ids.
      where: begin of error messages.
    """
    others = {k: v for k, v in settings.items() if v is not None and k not in HARMLESS}
    fields = json.loads(data) if others else {}
    parts = [
        *sequence(fields.get("normalizer"), "normalizers"),
        *sequence(fields.get("pre_tokenizer"), "pretokenizers"),
    ]
    changes = {k: v for k, v in others.items() if not _agrees(k, v, parts, ids)}
    if changes:
        text = json.dumps(changes)
        raise ConfigError(
            f"{where}: tokenizer_config.json beside it has {text[:400]}, of which tokenizer.json "
            "has nothing, or something else, and which may change the tokens: jaxres reads "
            "tokenizer.json alone. Save the tokenizer with `AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)`, which writes a tokenizer.json that has it, or remove the key "
            "from a copy of tokenizer_config.json if it changes nothing."
        )


def _agrees(key: str, value: Any, parts: list[Mapping[str, Any]], ids: Mapping[str, int]) -> bool:
    """Returns whether tokenizer.json does what a setting says."""
    if key == "add_prefix_space":
        return bool(value) == any(map(_adds_space, parts))
    if key in NORMALIZING:
        found = [part.get(NORMALIZING[key]) for part in parts if part["type"] == "BertNormalizer"]
        if found:
            return found == [value]
        has_it = {"do_lower_case": "Lowercase", "strip_accents": "StripAccents"}.get(key)
        return bool(value) == any(part["type"] == has_it for part in parts)
    if key in ADDED and isinstance(value, list | dict):
        return _added(value, ids)
    return value == [] or value == {}


def _adds_space(part: Mapping[str, Any]) -> bool:
    """Returns whether a normalizer or pre-tokenizer puts a space before a text."""
    if part["type"] == "Prepend":
        return True
    if part["type"] == "Metaspace":
        return part.get("prepend_scheme", "always") != "never"
    return part["type"] == "ByteLevel" and bool(part.get("add_prefix_space"))


def _added(value: Any, ids: Mapping[str, int]) -> bool:
    """Returns whether all tokens that a setting adds are there already, under their ids."""
    if isinstance(value, Mapping):
        pairs = [(_content(token), id_) for id_, token in value.items()]
    else:
        pairs = [(_content(token), None) for token in value]
    return all(
        name in ids and (id_ is None or not str(id_).isdecimal() or ids[name] == int(id_))
        for name, id_ in pairs
    )


def _content(token: Any) -> str:
    return str(token.get("content") if isinstance(token, Mapping) else token)
