"""A small tokenizer of the library `tokenizers`, trained here: nothing is downloaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
SOURCES = sorted((Path(__file__).parents[1] / "jaxres" / "data").rglob("*.py"))


def train(folder: Path, *, vocab_size: int = 400, texts: Iterable[str] = ()) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the folder.

    As saved tokenizers often do, it truncates, pads and adds a token at the beginning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained(vocab_size, tuple(texts)))
    settings = {"eos_token": {"content": END, "special": True}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@functools.cache
def _trained(vocab_size: int, texts: tuple[str, ...]) -> str:
    """Returns a trained tokenizer as JSON; many tests use the same one."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, "<s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    given = texts or [path.read_text() for path in SOURCES]
    library.train_from_iterator(given, trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.enable_truncation(5)
    library.enable_padding(pad_token="<pad>", pad_id=library.token_to_id("<pad>"))
    return library.to_str(pretty=True)
