"""The bytes tokenizer in the files of Hugging Face's tokenizers."""

from __future__ import annotations

import json

from jaxres.data.tokens import tokenizer as byte_tokens


def bytes_tokenizer(*, seq_len: int) -> dict[str, bytes]:
    """Returns tokenizer files with which Hugging Face's tokenizers act as the bytes tokenizer."""
    # Byte-level BPE without merges: its alphabet represents the 256 bytes, in this order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    end = "<|end of document|>"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    added = {
        "id": byte_tokens.END_OF_DOCUMENT,
        "content": end,
        "special": True,
        "single_word": False,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [added | {"lstrip": False, "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }
