"""Characters for which a tokenizer of the library has no token at all, so that texts lose them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable

from jaxres.data.tokens.tokenizer import LibraryTokenizer
from jaxres.faults import ConfigError


def may_drop(tokenizer: LibraryTokenizer) -> bool:
    """Returns whether there can be such characters.

    Other models than byte pairs have an unknown token, or do not encode them at all.
    """
    model = tokenizer.library.model
    if type(model).__name__ != "BPE" or model.unk_token is not None:
        return False
    known = tokenizer.library.get_vocab(with_added_tokens=False).keys()
    byte_level = set(importlib.import_module("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    if known >= byte_level >= set("".join(_pieces(tokenizer, "\u4e2d"))):
        return False
    return not model.byte_fallback or any(f"<0x{byte:02X}>" not in known for byte in range(256))


def dropped(tokenizer: LibraryTokenizer, characters: Iterable[str]) -> list[str]:
    """Returns the characters of which a part has no token, sorted.

    What the tokenizer's own normalizer or pre-tokenizer takes away, as white space, is no part.
    """
    return [one for one in sorted(characters) if _drops(tokenizer, one)]


def _drops(tokenizer: LibraryTokenizer, character: str) -> bool:
    with contextlib.suppress(ConfigError):  # A build tells what it does not encode at all.
        tokens = map(tokenizer.library.id_to_token, tokenizer.encode(character))
        return sum(map(len, tokens)) < sum(map(len, _pieces(tokenizer, character)))
    return False


def _pieces(tokenizer: LibraryTokenizer, text: str) -> list[str]:
    """Returns the pieces of a text that the model is given."""
    library = tokenizer.library
    if library.normalizer is not None:
        text = library.normalizer.normalize_str(text)
    if library.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]
