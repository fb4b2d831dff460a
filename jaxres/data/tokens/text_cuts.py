"""Where a long text may be cut so that its parts have the tokens of the whole.

A tokenizer of the library `tokenizers` is a normalizer, a pre-tokenizer that divides the text into
words, and a model that encodes each word by itself. A cut is certain to change nothing if it is
between two words of the whole text, whatever is around it, or if no token reaches over it. Of a
tokenizer that is not known to have such places a document is encoded as one.
"""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_WHOLE_CHARS = 2**26
"""Longest text that is encoded as one; the library needs about 110 bytes of memory a character."""
NEAR_CHARS = 2**16
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REGEXES = frozenset(
    (
        GPT2,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        _LLAMA3.replace("DIGITS", "{1,3}"),
        _LLAMA3.replace("DIGITS", ""),
        _LLAMA3.replace("DIGITS", "+"),
    )
)
"""Patterns of words, of GPT-2, Llama 3 and Qwen, in which a letter or digit ends a word before a
blank or a line end: no word has a letter or digit and then one of these, and none looks back."""
CHARWISE = frozenset(("NFC", "NFKC", "NFD", "NFKD", "Lowercase", "BertNormalizer"))
"""Normalizers that change nothing across a blank or line end."""
WORD_SPLITS = frozenset(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))
"""Pre-tokenizers that divide at each blank and line end."""
INNER_SPLITS = frozenset(("Digits", "Punctuation"))
"""Pre-tokenizers that only look at the kinds of neighbouring characters."""
NOT_PLAIN_MERGES = (
    "dropout",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "ignore_merges",
)
"""Settings of a BPE that make its tokens depend on more than which neighbours may be merged."""
AFTER_WORD = re.compile(r"[^\W_](?=[ \n])")
SPACE = "\u2581"
"""Character by which a tokenizer of sentencepiece replaces a blank."""


@dataclass(frozen=True)
class Cuts:
    """Where a text may be cut."""

    places: re.Pattern[str] | None
    """Matches the character before a place; None: there is no such place."""
    anywhere: bool = False
    """Whether it may be cut anywhere, if there is no such place nearby."""
    normalizers: tuple[str, ...] = ()
    """Kinds of the tokenizer's normalizers, in order, where the places are after words."""

    def last_before(self, text: str, size: int) -> int | None:
        """Returns the last place within the first `size` characters, but near them; else None."""
        if self.places is None:
            return None
        found = self.places.finditer(text, max(0, size - NEAR_CHARS), size)
        ends = [one.end() for one in found if self._is_certain(one.group())]
        return ends[-1] if ends else None

    def first_after(self, text: str, size: int) -> int | None:
        """Returns the first place after `size` characters; None: there is none yet."""
        if self.anywhere:
            return size
        if self.places is None:
            return None
        found = self.places.finditer(text, max(0, size - 1))
        return next((one.end() for one in found if self._is_certain(one.group())), None)

    def _is_certain(self, char: str) -> bool:
        """Returns whether a tokenizer of any Unicode version takes a letter or digit for one.

        It must have been one in Unicode 3.2, and its normal form must end with one: of some letters
        that ends with a mark, which takes the line end into its word.
        """
        if self.places is not AFTER_WORD:
            return True
        for kind in self.normalizers:
            if not _is_word_char(char):
                return False
            char = char.lower() if kind == "Lowercase" else _normal_form(char, kind)
        return _is_word_char(char)


def _normal_form(char: str, kind: str) -> str:
    form = "NFD" if kind == "BertNormalizer" else kind
    return unicodedata.normalize(form, char)  # type: ignore[arg-type]


def _is_word_char(text: str) -> bool:
    """Returns whether a text ends with a letter or digit of Unicode 3.2."""
    return unicodedata.ucd_3_2_0.category(text[-1])[0] in "LN"


ANYWHERE = Cuts(re.compile(r"\w(?=\n)"), anywhere=True)
"""Of a tokenizer whose tokens depend on one character each."""
NOWHERE = Cuts(None)


def cuts_of(data: str, *, control: bool) -> tuple[Cuts, str | None]:
    """Returns where a text may be cut for a tokenizer, and the tokenizer for later parts.

    The latter is a tokenizer.json that puts no blank before a text; None: it is the same.

    Args:
      data: the tokenizer.json, as the library writes it.
      control: whether special tokens are found in a text.
    """
    fields = json.loads(data)
    found = [one for one in fields["added_tokens"] if control or not one["special"]]
    # One of a single word is none after a letter; at the beginning of a part it would be one.
    if any(
        one["rstrip"] or re.search(r"\S\s" if not one["single_word"] else r"\s", one["content"])
        for one in found
    ):
        return NOWHERE, None
    normalizers = list(sequence(fields["normalizer"], "normalizers"))
    splits = list(sequence(fields["pre_tokenizer"], "pretokenizers"))
    kinds = {part["type"] for part in normalizers}
    # That of BERT writes blanks beside Chinese characters, which count where blanks are text.
    is_bert = "BertNormalizer" in kinds and not any(each["type"] in WORD_SPLITS for each in splits)
    if (
        not is_bert
        and kinds <= CHARWISE
        and any(map(_ends_words, splits))
        and all(map(_is_local, splits))
    ):
        return Cuts(AFTER_WORD, normalizers=tuple(part["type"] for part in normalizers)), None
    places = _places_between_tokens(fields, normalizers, splits)
    if places is None:
        return NOWHERE, None
    later = _without_first_blank(fields)
    if later == fields:
        return Cuts(places), None
    # After a token that is found in the text, too, the library puts a blank.
    return (NOWHERE, None) if found else (Cuts(places), json.dumps(later))


def sequence(part: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """Yields the parts of a normalizer or pre-tokenizer, in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for below in part[key]:
        yield from sequence(below, key)


def _regex(part: Mapping[str, Any]) -> str | None:
    return part["pattern"].get("Regex") if part["type"] == "Split" else None


def _ends_words(part: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer ends a word at a letter or digit before a blank."""
    if part["type"] == "ByteLevel":
        return part.get("use_regex", True)
    return part["type"] in WORD_SPLITS or _regex(part) in REGEXES


def _is_local(part: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer divides the parts as it divides the whole."""
    if part["type"] == "ByteLevel":
        return not part["add_prefix_space"]
    if part["type"] == "Split":
        return _regex(part) in REGEXES and part["behavior"] == "Isolated" and not part["invert"]
    return part["type"] in WORD_SPLITS | INNER_SPLITS


def _places_between_tokens(
    fields: Mapping[str, Any],
    normalizers: list[Mapping[str, Any]],
    splits: list[Mapping[str, Any]],
) -> re.Pattern[str] | None:
    """Returns the places that no token of a tokenizer like Llama 2's reaches over.

    Such a tokenizer merges neighbours over a whole text. If no token has a line end after another
    character, none is ever merged with the character before it, and both sides are merged as if
    they were alone. The same for the blank.
    """
    model = fields["model"]
    plain = all(
        part["type"] in CHARWISE - {"BertNormalizer"} | {"Prepend"} or _is_blank(part)
        for part in normalizers
    )
    metaspace = [part for part in splits if part["type"] == "Metaspace"]
    replaced = bool(metaspace) or any(map(_is_blank, normalizers))
    merges = model["type"] == "BPE" and not any(map(model.get, NOT_PLAIN_MERGES))
    no_split = all(part["type"] == "Metaspace" or _is_no_split(part) for part in splits)
    if not (plain and replaced and merges and no_split):
        return None
    # Without them a letter may be the unknown token, of which the library makes one of several.
    if not (model["byte_fallback"] and all(f"<0x{n:02X}>" in model["vocab"] for n in range(256))):
        return None
    chars = ""
    for char, there in (("\n", "\n|<0x0A>"), (" ", SPACE)):
        over = re.compile(f"[^{there[0]}](?:{there})")
        if not any(over.search(token) for token in model["vocab"]):
            chars += char
    return re.compile(rf"[^\s{SPACE}](?=[{chars}])") if chars else None


def _is_blank(part: Mapping[str, Any]) -> bool:
    """Returns whether a normalizer only writes another character for each blank."""
    return part["type"] == "Replace" and (part["pattern"], part["content"]) == (
        {"String": " "},
        SPACE,
    )


def _is_no_split(part: Mapping[str, Any]) -> bool:
    """Returns whether a pre-tokenizer divides at blanks only, of which there are none."""
    return part["type"] == "Split" and part["pattern"] == {"String": " "}


def _without_first_blank(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer.json that puts no blank before a text."""
    changed = copy.deepcopy(dict(fields))
    normalizer = changed["normalizer"]
    if normalizer is not None and normalizer["type"] == "Prepend":
        changed["normalizer"] = None
    elif normalizer is not None and normalizer["type"] == "Sequence":
        rest = [part for part in sequence(normalizer, "normalizers") if part["type"] != "Prepend"]
        if len(rest) < len(normalizer["normalizers"]):
            changed["normalizer"] = {"type": "Sequence", "normalizers": rest}
    for part in sequence(changed["pre_tokenizer"], "pretokenizers"):
        if part["type"] == "Metaspace" and part.get("prepend_scheme") != "never":
            assert isinstance(part, dict)
            part["prepend_scheme"] = "never"
    return changed
