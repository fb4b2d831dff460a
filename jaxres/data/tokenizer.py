"""The byte tokenizer: token = byte, and one more token that ends a document."""

from __future__ import annotations

from collections.abc import Sequence

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
NAME = "bytes"


def encode(text: str) -> list[int]:
    """Returns the text's UTF-8 bytes; no end of document, so that a prompt can go on.

    >>> encode("é!")
    [195, 169, 33]
    """
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    r"""Returns the text of tokens: the end of a document as a newline, what is not UTF-8 as \ufffd.

    So are tokens beyond the vocabulary, which the padded rows of an embedding can produce.

    >>> decode([*encode("a"), END_OF_DOCUMENT, 255, 300])
    'a\n\ufffd\ufffd'
    """
    return b"".join(_byte(token) for token in tokens).decode(errors="replace")


def _byte(token: int) -> bytes:
    """Returns the byte of a token; 0xff, which UTF-8 never uses, for what is none."""
    if token == END_OF_DOCUMENT:
        return b"\n"
    return bytes([token]) if 0 <= token < END_OF_DOCUMENT else b"\xff"
