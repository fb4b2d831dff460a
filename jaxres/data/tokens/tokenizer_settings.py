"""Which settings and tokens in files beside a tokenizer.json would change the tokens of a text.

Hugging Face's libraries apply them to what tokenizer.json says; jaxres reads tokenizer.json alone.
So each must agree with it, or be known to change no token, or it is refused.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxres.data.tokens.text_cuts import sequence
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
NAMED = frozenset(k for k in HARMLESS if k.endswith("_token") and not k.startswith("add_"))
"""Keys that name one special token each, which the libraries add if tokenizer.json has it not."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
REMEDY = "Save the tokenizer with `AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
NORMALIZING = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
NORMALIZING["tokenize_chinese_chars"] = "handle_chinese_chars"
"""Keys of a BERT tokenizer -> the same in its normalizer, which the libraries change."""


def check(settings: Mapping[str, Any], data: bytes, ids: Mapping[str, int], *, where: str) -> None:
    """Raises ConfigError if a setting would change tokens, or may.

    Args:
      settings: fields of tokenizer_config.json.
      data: contents of tokenizer.json, which is valid.
      ids: its tokens with their ids.
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
            f"tokenizer.json alone. {REMEDY}, which writes a tokenizer.json that has it, or remove "
            "the key from a copy of tokenizer_config.json if it changes nothing."
        )


def _agrees(key: str, value: Any, parts: list[Mapping[str, Any]], ids: Mapping[str, int]) -> bool:
    """Returns whether tokenizer.json agrees with a setting."""
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


def content(token: Any) -> Any:
    """Returns the text of a token that a file gives as text, or as an object with its flags."""
    return token.get("content") if isinstance(token, Mapping) else token


def _content(token: Any) -> str:
    return str(content(token))


def check_tokens(
    library: Any,
    config: Mapping[str, Any],
    special: Mapping[str, Any],
    added: Mapping[str, Any],
    *,
    control: bool,
    where: str,
) -> None:
    """Raises ConfigError if a file beside tokenizer.json adds tokens of texts, or changes some.

    Special tokens are tokens of texts only with `control`; then they too must be there with the
    same flags (which spaces around it a token takes, and whether the normalized text is searched).

    Args:
      library: the `tokenizers.Tokenizer` of tokenizer.json.
      config: fields of tokenizer_config.json.
      special: fields of special_tokens_map.json.
      added: fields of added_tokens.json: token -> id.
      control: whether the spelling of a special token in a text becomes that token.
    """
    there = library.get_added_tokens_decoder()
    own = {token.content: token for token in there.values()}
    ids = {token.content: id_ for id_, token in there.items()}
    try:
        found = list(_tokens_beside(config, special, added, own))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: a file beside it has a token that can't be read: {error}. {REMEDY}, or "
            "correct a copy of that file."
        ) from error
    for place, token, id_ in found:
        known = own.get(token.content)
        changes = known != token and (control or not (token.special and known and known.special))
        if known is None:
            changes = control or not token.special
        if changes or (known and id_ is not None and ids[token.content] != id_):
            its_id = "" if id_ is None else f" with the id {id_}"
            other = f"has {known} with the id {ids[token.content]}" if known else "has it not"
            raise ConfigError(
                f"{where}: {place} beside it has the token {token}{its_id}, tokenizer.json {other}:"
                " which of them is meant is not known, and a text that spells it has other tokens "
                f"with each. {REMEDY}, which writes files that agree, or remove the token from a "
                "copy of the file that is wrong."
            )


def _tokens_beside(
    config: Mapping[str, Any],
    special: Mapping[str, Any],
    added: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Iterator[tuple[str, Any, int | None]]:
    """Yields place, `tokenizers.AddedToken` and id (None: none) of each token, as libraries add it.

    Where a file has only the text of a token, its flags are those of tokenizer.json.
    """
    named = [
        *(
            ("tokenizer_config.json", k, v)
            for k, v in config.items()
            if k in NAMED or k in ADDED[1:]
        ),
        *(("special_tokens_map.json", key, value) for key, value in special.items()),
    ]
    tokens = [(f"{file}: {key}", token) for file, key, value in named for token in _each(value)]
    specials = {_content(token) for _, token in tokens}
    decoder = config.get("added_tokens_decoder") or {}
    for id_, token in decoder.items():
        is_special = _content(token) in specials or _flags(token).get("special", False)
        yield "tokenizer_config.json: added_tokens_decoder", _token(token, is_special), int(id_)
    for text, id_ in added.items():
        yield "added_tokens.json", own.get(text) or _token(text, text in specials), int(id_)
    listed = {_content(token) for token in decoder.values()}
    for place, token in tokens:
        if (isinstance(token, str) and token in own) or _content(token) in listed:
            continue  # The libraries take the flags that they have.
        yield place, _token(token, is_special=True), None


def _each(value: Any) -> list[Any]:
    """Returns the tokens of a value: of one, of a list, or of names with theirs."""
    if isinstance(value, Mapping) and "content" not in value:
        value = list(value.values())
    return value if isinstance(value, list) else [value] if value else []


def _flags(token: Any) -> dict[str, bool]:
    return {k: token[k] for k in FLAGS if k in token} if isinstance(token, Mapping) else {}


def _token(token: Any, is_special: bool) -> Any:
    """Returns the `tokenizers.AddedToken` of a text or of fields; raises TypeError for others."""
    from tokenizers import AddedToken

    content = token.get("content") if isinstance(token, Mapping) else token
    return AddedToken(content, **_flags(token) | {"special": is_special})


def is_unigram(library: Any) -> bool:
    """Returns whether a tokenizer of the library has a Unigram model."""
    return type(library.model).__name__ == "Unigram"


def spell_special_words(library: Any) -> None:
    """Makes a text that spells a special word of a Unigram model have the tokens of its letters.

    The library's setting only keeps it from being looked for before the model, which finds it among
    its words. SentencePiece never takes a control symbol from a text. So a text is split within it.
    """
    pre_tokenizers = importlib.import_module("tokenizers.pre_tokenizers")
    endings = dict[str, list[str]]()
    for token in library.get_added_tokens_decoder().values():
        word = token.content
        if token.special and len(word) > 1 and library.model.token_to_id(word) is not None:
            endings.setdefault(re.escape(word[0]), []).append(re.escape(word[1:]))
    if not endings:
        return
    within = "|".join(f"(?<={first})(?={'|'.join(rest)})" for first, rest in endings.items())
    regex = importlib.import_module("tokenizers").Regex(within)
    split, before = pre_tokenizers.Split(regex, "isolated"), library.pre_tokenizer
    library.pre_tokenizer = split if before is None else pre_tokenizers.Sequence([before, split])
