"""Compares the tokenizers of token ids by their names, which meta.json has.

`bytes` and `huggingface:DIGEST` name one tokenizer each. Any other name, such as `ids` of .bin
files, is a word of the program that wrote the tokens: two such names may be of one tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Literal

import xxhash

from jaxres.data.tokens.tokenizer import BYTES, LIBRARY, vocabulary
from jaxres.faults import ConfigError

Likeness = Literal["same", "other", "unknown"]


def compare(one: str, other: str) -> Likeness:
    """Returns whether two names are of one tokenizer.

    >>> compare("bytes", "huggingface:99"), compare("mine", "mine"), compare("ids", "bytes")
    ('other', 'same', 'unknown')
    """
    if one == other:
        return "same"
    return "other" if _is_known(one) and _is_known(other) else "unknown"


def compare_with_file(name: str, data: bytes, where: str) -> Likeness:
    """Returns whether a name is of a tokenizer.json, whatever the end of documents is.

    Raises ConfigError if the file can't be read; `where` is its path.
    """
    if not _is_known(name):
        return "unknown"
    try:
        added, own = vocabulary(data)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{where} is not a tokenizer.json: {error!r}") from error
    begin = xxhash.xxh3_128(data + b"\0")
    for word, _ in (*added, *own):
        digest = begin.copy()
        digest.update(word.encode())
        if name == f"{LIBRARY}{digest.hexdigest()}":
            return "same"
    return "other"


def check(names: Mapping[str, str]) -> list[str]:
    """Compares the tokenizers of all sources; returns a warning if some are not known.

    Args:
      names: name of each source for messages -> name of its tokenizer.

    Raises:
      ConfigError: two sources have other tokenizers.
    """
    unknown = list[str]()
    for (one, name), (other, other_name) in combinations(names.items(), 2):
        likeness = compare(name, other_name)
        if likeness == "other":
            raise ConfigError(
                f"{one} has the tokenizer {name}, {other} has the tokenizer {other_name}: their "
                "ids are other tokens. Tokenise both with the same tokenizer (`jaxres data build`)."
            )
        if likeness == "unknown":
            unknown.append(f"{one} ({name}) and {other} ({other_name})")
    if not unknown:
        return []
    more = f", and {len(unknown) - 1:,} more pairs" if len(unknown) > 1 else ""
    return [
        f"WARNING: whether {unknown[0]} have the same tokens is not known{more}: only a name of "
        "their tokenizer is. If they have, data.tokenizer={kind: huggingface, path: ...} says so "
        "for all, or the same `tokenizer` in each meta.json; otherwise an id is another token in "
        "each of them."
    ]


def _is_known(name: str) -> bool:
    return name == BYTES or name.startswith(LIBRARY)
