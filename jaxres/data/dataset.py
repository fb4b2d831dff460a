"""Opens the data set that a config describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxres.config.schema import CustomSource, DataSection, TextSource
from jaxres.data import download_cache
from jaxres.data import text as text_data
from jaxres.data.batching import Rows
from jaxres.data.custom import (
    build_items,
    fingerprint_of,
    split_items,
    tokens_per_row_of,
    vocab_size_of,
)
from jaxres.data.text import open_text
from jaxres.data.token_folder import TokenFolder, open_tokens, split_tokens
from jaxres.faults import ConfigError
from jaxres.storage.path import is_remote


@dataclass(frozen=True)
class Dataset:
    """A data set: training rows, held-out rows, and properties of their tokens."""

    fingerprint: str
    """Fingerprint of the content, independent of its path; with the config it defines every row."""
    vocab_size: int | None
    """Upper bound of the token ids; None: the source does not define one."""
    tokens_per_row: int
    train: Rows
    heldout: Rows
    """Held-out rows, which share no token or item with `train`; empty if the fraction is 0."""
    encode: Callable[[str], list[int]] | None
    """Text -> token ids; None if the tokenizer is unknown."""
    decode: Callable[[Sequence[int]], str] | None


def silent(message: str) -> None:
    """Discards a progress message."""


def open_dataset(config: DataSection, *, progress: Callable[[str], None] = silent) -> Dataset:
    """Opens the config's source; the first time, tokenises a text corpus.

    Raises ConfigError if the source can't be used.
    """
    source = download_cache.localize(config, progress=progress)
    if isinstance(source, CustomSource):
        return _custom(source, config)
    if isinstance(source, TextSource):
        corpus = open_text(source, cache_dir=config.cache_dir, progress=progress)
    else:
        assert not is_remote(source.path), source.path
        corpus = open_tokens(source.path.expanduser())
        if download_cache.is_in_bucket(config.source):
            corpus = download_cache.as_cached(corpus)
    return _tokens(corpus, config)


def _tokens(corpus: TokenFolder, config: DataSection) -> Dataset:
    train, heldout = split_tokens(
        corpus, seq_len=config.seq_len, heldout_fraction=config.heldout_fraction
    )
    is_bytes = corpus.meta.tokenizer == text_data.NAME
    return Dataset(
        fingerprint=corpus.meta.fingerprint,
        vocab_size=corpus.meta.vocab_size,
        tokens_per_row=config.seq_len,
        train=train,
        heldout=heldout,
        encode=text_data.encode if is_bytes else None,
        decode=text_data.decode if is_bytes else None,
    )


def _custom(source: CustomSource, config: DataSection) -> Dataset:
    items = build_items(source)
    if source.path_args and not isinstance(getattr(items, "fingerprint", None), str):
        raise ConfigError(
            f"data.source.path_args: {source.target} returned a {type(items).__name__} without "
            "`fingerprint` (str), so nothing tells whether other paths have the same content. Add "
            "the attribute, or leave path_args out."
        )
    train, heldout = split_items(
        items, source, seq_len=config.seq_len, heldout_fraction=config.heldout_fraction
    )
    return Dataset(
        fingerprint=fingerprint_of(items, source, seq_len=config.seq_len),
        vocab_size=vocab_size_of(items),
        tokens_per_row=tokens_per_row_of(items, default=config.seq_len),
        train=train,
        heldout=heldout,
        encode=None,
        decode=None,
    )
