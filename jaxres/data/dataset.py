"""Opens the data set that a config describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from jaxres.config.schema_data import (
    HELDOUT,
    CustomSource,
    DataSection,
    HuggingfaceTokenizer,
    TokensSource,
)
from jaxres.data import download_cache, remote_tokens
from jaxres.data import tokenizer as tokenizers
from jaxres.data.batching import Rows
from jaxres.data.corpus import describe_corpus, open_corpus
from jaxres.data.custom import (
    build_items,
    fingerprint_of,
    split_items,
    tokens_per_row_of,
    vocab_size_of,
)
from jaxres.data.order import Order
from jaxres.data.packed_rows import open_packed_rows
from jaxres.data.packing import Packing
from jaxres.data.shuffle import Permutation
from jaxres.data.token_folder import TokenFolder, heldout_start, open_tokens, split_tokens
from jaxres.data.tokenizer import LIBRARY, Tokenizer, open_tokenizer
from jaxres.faults import ConfigError
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import is_remote

PLAN_MARK = "+"
"""Separates, in a fingerprint, that of the tokens from the digest of the packing plans."""


@dataclass(frozen=True)
class Dataset:
    """A data set: training rows, held-out rows, and properties of their tokens."""

    fingerprint: str
    """Fingerprint of the content, independent of its path; with the config it defines every row.

    Packed rows: that of the tokens, then PLAN_MARK and the digest of the packing plans."""
    vocab_size: int | None
    """Upper bound of the token ids; None: the source does not define one."""
    tokens_per_row: int
    train: Rows
    heldout: Rows
    """Held-out rows, which share no token or item with `train`; empty if the fraction is 0."""
    tokenizer: Tokenizer | None
    """None: it is not known."""
    validation: Mapping[str, Rows] = field(default_factory=dict)
    """Name -> rows to evaluate on; first the held-out part, if there is one."""
    padding: float | None = None
    """Share of the positions of the training rows that have no token; None: the rows are full."""

    def order(self, *, seed: int) -> Order:
        """Returns the order in which a run with this seed trains on the rows."""
        return Permutation(len(self.train), seed)

    def tokens_of(self, num_rows: int) -> int:
        """Returns how many tokens some training rows have on average, without padding."""
        return round(num_rows * self.tokens_per_row * (1 - (self.padding or 0.0)))


def silent(message: str) -> None:
    """Discards a progress message."""


def open_dataset(config: DataSection, *, progress: Callable[[str], None] = silent) -> Dataset:
    """Opens the config's sources; the first time, tokenises those that are text.

    Raises ConfigError if a source can't be used.
    """
    dataset = _open(config, progress)
    sets = {HELDOUT: dataset.heldout} if len(dataset.heldout) else {}
    for part in config.validation:
        alone = config.model_copy(update={"source": part.source, "heldout_fraction": 0.0})
        where = f"data.validation[{part.name}]"
        try:
            opened = _open(alone, lambda what, where=where: progress(f"{where}: {what}"))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        _check_validation(opened, dataset, where)
        sets[part.name] = opened.train
        if opened.fingerprint == dataset.fingerprint:
            progress(f"WARNING: {where} is the training data itself")
    return replace(dataset, validation=sets)


def _check_validation(opened: Dataset, dataset: Dataset, where: str) -> None:
    """Raises ConfigError if the model can't compute the rows of a validation set."""
    if (opened.vocab_size or 0) > (dataset.vocab_size or 0):
        raise ConfigError(
            f"{where} has a vocabulary of {opened.vocab_size} tokens, the training data of "
            f"{dataset.vocab_size}. Tokenise both with the same tokenizer."
        )
    specs = []
    for rows in (opened.train, dataset.train):
        row = rows.rows(np.zeros(1, np.int64))
        specs.append({name: f"{row[name].dtype}{list(row[name].shape[1:])}" for name in row})
    if specs[0] != specs[1]:
        raise ConfigError(f"{where} has rows of {specs[0]}, the training data of {specs[1]}")


def _open(config: DataSection, progress: Callable[[str], None]) -> Dataset:
    if isinstance(config.source, TokensSource) and is_remote(config.source.path):
        opened = remote_tokens.open_in_bucket(config, config.source.path, progress=progress)
        if opened is not None:
            return _tokens(opened, _tokenizer(opened, config), config, progress)
    source = download_cache.localize(config, progress=progress)
    if isinstance(source, CustomSource):
        return _custom(source, config)
    if not isinstance(source, TokensSource):
        corpus = describe_corpus(source, config.tokenizer, cache_dir=config.cache_dir)
        opened = open_corpus(corpus, progress=progress)
        tokenizer = corpus.tokenizer or _tokenizer(opened, config)
        return _tokens(opened, tokenizer, config, progress)
    assert not is_remote(source.path), source.path
    opened = open_tokens(source.path.expanduser())
    if download_cache.is_in_bucket(config.source):
        opened = download_cache.as_cached(opened)
    return _tokens(opened, _tokenizer(opened, config), config, progress)


def _tokenizer(opened: TokenFolder, config: DataSection) -> Tokenizer | None:
    """Returns the tokenizer of a source of token ids: the configured one, or the folder's own."""
    name = opened.meta.tokenizer
    if not isinstance(config.tokenizer, HuggingfaceTokenizer):
        return tokenizers.of_folder(opened.folder, name)
    tokenizer = open_tokenizer(config.tokenizer)
    if name.startswith(LIBRARY) and name != tokenizer.name:
        raise ConfigError(
            f"data.tokenizer.path: {config.tokenizer.path} is {tokenizer.name}, but the tokens of "
            f"{opened.source or opened.folder} were made with {name}. Give that tokenizer, or "
            "leave data.tokenizer out: the folder has its own."
        )
    return tokenizer


def _tokens(
    opened: TokenFolder,
    tokenizer: Tokenizer | None,
    config: DataSection,
    progress: Callable[[str], None] = silent,
) -> Dataset:
    if config.packing != "concat":
        return _packed(opened, tokenizer, config, config.packing, progress)
    train, heldout = split_tokens(
        opened, seq_len=config.seq_len, heldout_fraction=config.heldout_fraction
    )
    return Dataset(
        fingerprint=opened.meta.fingerprint,
        vocab_size=opened.meta.vocab_size,
        tokens_per_row=config.seq_len,
        train=train,
        heldout=heldout,
        tokenizer=tokenizer,
    )


def _packed(
    opened: TokenFolder,
    tokenizer: Tokenizer | None,
    config: DataSection,
    packing: Packing,
    progress: Callable[[str], None],
) -> Dataset:
    cut, total = heldout_start(opened, config.heldout_fraction), opened.meta.num_tokens
    train, heldout = (
        open_packed_rows(
            opened,
            start=start,
            stop=stop,
            seq_len=config.seq_len,
            packing=packing,
            folder=config.cache_dir.expanduser() / "packings",
            progress=progress,
        )
        for start, stop in ((0, cut), (cut, total))
    )
    for name, rows in (("training", train), ("held-out", heldout)):
        if len(rows) == 0 and rows.start < rows.stop:
            raise ConfigError(
                f"{opened.folder}: the {name} part has {rows.stop - rows.start:,} of {total:,} "
                "tokens, and no document of two tokens. Change data.heldout_fraction "
                f"({config.heldout_fraction}; 0: none), or use more data."
            )
    plans = xxhash.xxh3_128_hexdigest(canonical_json([train.digest, heldout.digest]))
    return Dataset(
        fingerprint=f"{opened.meta.fingerprint}{PLAN_MARK}{plans}",
        vocab_size=opened.meta.vocab_size,
        tokens_per_row=config.seq_len,
        train=train,
        heldout=heldout,
        tokenizer=tokenizer,
        padding=train.plan.padding,
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
        tokenizer=None,
    )
