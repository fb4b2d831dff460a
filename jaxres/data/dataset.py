"""Opens the data set that a config describes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from jaxres.config.schema.data import (
    HELDOUT,
    CustomSource,
    DataSection,
    HuggingfaceTokenizer,
    ImagesSource,
    MixtureSource,
    TokensSource,
)
from jaxres.config.schema.model import AnyModel, VitModel
from jaxres.config.schema.training import BadRecordsSection
from jaxres.data.batching import BadRecord, Rows, first_row
from jaxres.data.bucket import download_cache, remote_tokens
from jaxres.data.corpus import BAD_RECORDS, describe_corpus, open_corpus
from jaxres.data.heldout import (
    heldout_start,
    nearest_boundary,
    share_warning,
    split_images,
    split_items,
    split_tokens,
)
from jaxres.data.mixture import SOURCE_KEY, MixedRows, MixturePart, mix, mixture_fingerprint
from jaxres.data.order import Order
from jaxres.data.row_values import limits_of
from jaxres.data.shuffle import Permutation
from jaxres.data.sources.custom import (
    CustomRows,
    build_items,
    fingerprints_of,
    tokens_per_row_of,
    vocab_size_of,
)
from jaxres.data.sources.images import IMAGES, ImageRows, classes_of
from jaxres.data.sources.source_files import shared_files, token_folder_of
from jaxres.data.tokens import tokenizer as tokenizers
from jaxres.data.tokens import tokenizer_names
from jaxres.data.tokens.packed_rows import PackedRows, open_packed_rows
from jaxres.data.tokens.packing import Packing
from jaxres.data.tokens.token_folder import TokenFolder, TokenRows, open_tokens
from jaxres.data.tokens.tokenizer import (
    LibraryTokenizer,
    Tokenizer,
    limited,
    open_tokenizer,
)
from jaxres.faults import ConfigError
from jaxres.storage.checksummed_json import canonical_json
from jaxres.storage.path import is_remote

PLAN_MARK = "+"
"""Separates the digest of the tokens from the digest of the packing plans in a fingerprint."""
CUT_MARK = f"{PLAN_MARK}cut:"
"""Separates it from the first held-out token, if earlier versions have held out another part."""


@dataclass(frozen=True)
class Dataset:
    """A data set: training rows, held-out rows, and properties of their tokens."""

    fingerprint: str
    """Fingerprint of the content, independent of its path; with the config it defines every row.

    Packed rows: that of the tokens, then PLAN_MARK and the digest of the packing plans. Others:
    that of the tokens, for some then CUT_MARK and the first held-out token."""
    vocab_size: int | None
    """Upper bound of the token ids; None: the source does not define one."""
    tokens_per_row: int
    train: Rows
    heldout: Rows
    """Held-out rows, which share no token or item with `train`; empty if the fraction is 0."""
    tokenizer: Tokenizer | None
    """None: it is not known."""
    tokenizer_names: tuple[str, ...] = ()
    """Names of the tokenizers of the tokens, as in meta.json; none: images or custom rows."""
    validation: Mapping[str, Rows] = field(default_factory=dict)
    """Name -> rows to evaluate on; first the held-out part, of a mixture one for each source."""
    heldout_fingerprint: str = ""
    """Fingerprint of the data of the first of them; empty: there is none."""
    padding: float | None = None
    """Share of the positions of the training rows that have no token; None: the rows are full."""

    classes: tuple[str, ...] = ()
    """Names of the classes of images, by label; none: they are not known."""
    earlier_fingerprint: str = ""
    """Fingerprint of versions that included secrets in arguments; empty: it is the same."""
    mixture: MixtureSource | None = None
    """Shares of the sources, whose rows are `MixedRows`; None: it is one source."""

    def order(self, *, seed: int, rows_per_step: int) -> Order:
        """Returns the order in which a run with this seed trains on the rows.

        Raises:
          ConfigError: all sources of a mixture are used up at some step.
        """
        if self.mixture is None:
            return _permutation(self.train, seed)
        assert isinstance(self.train, MixedRows)
        parts = [
            MixturePart(_permutation(rows, seed, name=part.name), part.weight, part.epochs)
            for part, rows in zip(self.mixture.sources, self.train.parts.values(), strict=True)
        ]
        changes = [(change.after_step, change.weights) for change in self.mixture.schedule]
        return mix(parts, changes, seed=seed, rows_per_step=rows_per_step)

    def for_model(self, model: AnyModel, *, has_64_bits: bool) -> Dataset:
        """Returns the data set for a model, whose rows are refused if it can't compute with them.

        Args:
          has_64_bits: whether the devices keep numbers of 64 bits (JAX_ENABLE_X64).
        """
        limits = functools.partial(
            _limited_rows, model=model, vocab_size=self.vocab_size, has_64_bits=has_64_bits
        )
        return self._changed(limits)._without_special(model)

    def _without_special(self, model: AnyModel) -> Dataset:
        """Returns the data set for a model whose embedding may lack rows for special tokens.

        Published models have a tokenizer with such tokens (Gemma 3's is of images). Rows and texts
        that have one are refused when they are read; a smaller embedding is refused by the model.
        """
        rows, tokenizer = getattr(model, "vocab_size", None), self.tokenizer
        if rows is None or not isinstance(tokenizer, LibraryTokenizer):
            return self
        if tokenizer.vocab_size != self.vocab_size or rows >= tokenizer.vocab_size:
            return self
        if rows < tokenizer.text_vocab_size:
            return self
        ids = range(rows, tokenizer.vocab_size)
        tokens = {id_: str(tokenizer.library.id_to_token(id_)) for id_ in ids}
        changed = self._changed(functools.partial(_without_row, tokens=tokens))
        return replace(changed, vocab_size=rows, tokenizer=limited(tokenizer, rows))

    def _changed(self, change: Callable[[Rows], Rows]) -> Dataset:
        """Returns the data set with changed rows, in a mixture the rows of every source."""

        def of(rows: Rows) -> Rows:
            if isinstance(rows, MixedRows):
                return replace(rows, parts={name: of(x) for name, x in rows.parts.items()})
            return change(rows)

        sets = {name: of(rows) for name, rows in self.validation.items()}
        return replace(self, train=of(self.train), heldout=of(self.heldout), validation=sets)

    def tokens_of(self, num_rows: int) -> int:
        """Returns the mean number of tokens in `num_rows` training rows, without padding."""
        return round(num_rows * self.tokens_per_row * (1 - (self.padding or 0.0)))


def _permutation(rows: Rows, seed: int, name: str = "") -> Permutation:
    varies = isinstance(rows, ImageRows | CustomRows) and rows.varies_by_epoch
    return Permutation(len(rows), seed, name, epoch_in_ids=varies)


def _without_row(rows: Rows, tokens: Mapping[int, str]) -> Rows:
    """Returns rows that raise ConfigError where one has a token for which a model has no row."""
    if isinstance(rows, TokenRows | PackedRows):
        return replace(rows, corpus=replace(rows.corpus, without_row=tokens))
    return rows


def _limited_rows(
    rows: Rows, *, model: AnyModel, vocab_size: int | None, has_64_bits: bool
) -> Rows:
    """Returns rows whose values a model can compute with; others are bad records."""
    if isinstance(rows, CustomRows):
        size = vocab_size if rows.vocab_size is None else rows.vocab_size
        limits = limits_of(model, vocab_size=size, seq_len=rows.seq_len)
        return replace(rows, limits=limits, has_64_bits=has_64_bits)
    if isinstance(rows, ImageRows) and isinstance(model, VitModel):
        return replace(rows, num_classes=model.num_classes)
    return rows


def silent(message: str) -> None:
    """Discards a progress message."""


def open_dataset(
    config: DataSection,
    *,
    progress: Callable[[str], None] = silent,
    bad_records: BadRecordsSection | None = BAD_RECORDS,
) -> Dataset:
    """Opens the config's sources; tokenises text sources the first time.

    Of text some documents may be left out as bad records. Raises ConfigError if a source can't be
    used.
    """
    dataset = _open(config, progress, bad_records)
    sets = dict(dataset.validation)
    evaluated = [dataset.fingerprint] if sets or len(dataset.heldout) else []
    if len(dataset.heldout) and not dataset.mixture:
        sets[HELDOUT] = dataset.heldout
    for part in config.validation:
        alone = config.model_copy(update={"source": part.source, "heldout_fraction": 0.0})
        where = f"data.validation[{part.name}]"
        opened = _open_part(alone, where, progress, bad_records)
        _check_validation(opened, dataset, where)
        same = _unknown_classes(opened, dataset, where, "the training data")
        for warning in (*_compare_tokenizers(opened, dataset, where), *same):
            progress(warning)
        sets[part.name] = _not_augmented(opened.train)
        evaluated.append(opened.fingerprint)
        if _content(opened.fingerprint) == _content(dataset.fingerprint):
            progress(f"WARNING: {where} is the training data itself")
        elif shared := shared_files(part.source, config.source):
            progress(f"WARNING: {where}: {shared:,} of its files are trained on")
    return replace(dataset, validation=sets, heldout_fingerprint="".join(evaluated[:1]))


def _content(fingerprint: str) -> str:
    """Returns the part of a fingerprint that does not depend on the rows."""
    return fingerprint.partition(PLAN_MARK)[0]


def _not_augmented(rows: Rows) -> Rows:
    """Returns the rows as they are evaluated: the same each time."""
    if isinstance(rows, CustomRows):
        return replace(rows, varies_by_epoch=False)
    return rows.evaluated() if isinstance(rows, ImageRows) else rows


def _check_validation(opened: Dataset, dataset: Dataset, where: str) -> None:
    """Raises ConfigError if the model can't compute the rows of a validation set."""
    if (opened.vocab_size or 0) > (dataset.vocab_size or 0):
        raise ConfigError(
            f"{where} has a vocabulary of {opened.vocab_size} tokens, the training data of "
            f"{dataset.vocab_size}. Tokenise both with the same tokenizer."
        )
    if opened.classes and dataset.classes and opened.classes != dataset.classes:
        raise ConfigError(
            f"{where} has the classes {', '.join(opened.classes[:10])}, the training data "
            f"{', '.join(dataset.classes[:10])}: their labels mean others. Give both the same list "
            "in `classes`."
        )
    specs = [_spec(rows) for rows in (opened.train, dataset.train)]
    if None not in specs and specs[0] != specs[1]:
        raise ConfigError(f"{where} has rows of {specs[0]}, the training data of {specs[1]}")


def _compare_tokenizers(opened: Dataset, dataset: Dataset, where: str) -> list[str]:
    """Returns warnings of a validation set; raises ConfigError if it has other tokens."""
    pairs = itertools.product(opened.tokenizer_names, dataset.tokenizer_names)
    found = [
        tokenizer_names.check({where: one, "the training data": other}) for one, other in pairs
    ]
    return list(itertools.chain.from_iterable(found))


def _unknown_classes(one: Dataset, other: Dataset, name: str, other_name: str) -> list[str]:
    """Returns a warning if two sources have labels, and one of them no names of classes."""
    without = [each for each, data in ((name, one), (other_name, other)) if not data.classes]
    rows = [data.train for data in (one, other)]
    first = [each.parts.values() if isinstance(each, MixedRows) else (each,) for each in rows]
    has_labels = all(isinstance(next(iter(each)), ImageRows) for each in first)
    if not (has_labels and without):
        return []
    return [
        f"WARNING: whether a label is the same class in {name} and in {other_name} is not known: "
        f"{' and '.join(without)} has no names of classes"
    ]


def _spec(rows: Rows) -> dict[str, str] | None:
    """Returns the dtype and shape of each array of a row; None: the first rows can't be read."""
    with contextlib.suppress(BadRecord):
        arrays = {name: x for name, x in first_row(rows).items() if name != SOURCE_KEY}
        return {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in sorted(arrays.items())}
    return None


def _open_part(
    config: DataSection,
    where: str,
    progress: Callable[[str], None],
    bad_records: BadRecordsSection | None,
) -> Dataset:
    """Opens a source of several; `where` names it in messages."""
    try:
        return _open(config, lambda what: progress(f"{where}: {what}"), bad_records)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from error


def _mixture(
    source: MixtureSource,
    config: DataSection,
    progress: Callable[[str], None],
    bad_records: BadRecordsSection | None,
) -> Dataset:
    parts = {
        part.name: _open_part(
            config.model_copy(update={"source": part.source}),
            f"data.source.sources[{part.name}]",
            progress,
            bad_records,
        )
        for part in source.sources
    }
    first, *others = parts
    for name in others:
        _check_alike(parts[first], first, parts[name], name)
        for warning in _unknown_classes(parts[first], parts[name], first, name):
            progress(warning)
    sources = {f"data.source.sources[{name}]": part for name, part in parts.items()}
    for warning in tokenizer_names.check(_names_of(sources)):
        progress(warning)
    if config.heldout_fraction:
        for one, other in itertools.combinations(source.sources, 2):
            contents = {_content(parts[each.name].fingerprint) for each in (one, other)}
            shared = shared_files(one.source, other.source)
            if shared or len(contents) == 1:
                what = f"{shared:,} files in common" if shared else "the same content"
                progress(
                    f"WARNING: data.source.sources[{one.name}] and [{other.name}] have {what}: "
                    "data held out of one are trained on in the other. Leave them out of one with "
                    "`exclude`, or evaluate on data.validation"
                )
    weights = np.array([part.weight for part in source.sources])
    shares = weights / weights.sum()
    earlier = {name: part.earlier_fingerprint or part.fingerprint for name, part in parts.items()}
    padding = float(shares @ [part.padding or 0.0 for part in parts.values()])
    return Dataset(
        fingerprint=_mixed({name: part.fingerprint for name, part in parts.items()}),
        vocab_size=parts[first].vocab_size,
        tokens_per_row=parts[first].tokens_per_row,
        train=MixedRows({name: part.train for name, part in parts.items()}),
        heldout=MixedRows({name: part.heldout for name, part in parts.items()}),
        classes=parts[first].classes,
        tokenizer=next((part.tokenizer for part in parts.values() if part.tokenizer), None),
        tokenizer_names=tuple(dict.fromkeys(_names_of(parts).values())),
        validation={name: part.heldout for name, part in parts.items() if len(part.heldout)},
        padding=padding or None,
        earlier_fingerprint=_mixed(earlier),
        mixture=source,
    )


def _mixed(fingerprints: Mapping[str, str]) -> str:
    """Returns the fingerprint of a mixture: of its sources without their cuts, then the cuts."""
    parts = {name: text.partition(CUT_MARK) for name, text in fingerprints.items()}
    cuts = ",".join(cut or "-" for _, _, cut in parts.values())
    fingerprint = mixture_fingerprint({name: rest for name, (rest, _, _) in parts.items()})
    return f"{fingerprint}{CUT_MARK}{cuts}" if cuts.strip("-,") else fingerprint


def _check_alike(one: Dataset, name: str, other: Dataset, other_name: str) -> None:
    """Raises ConfigError if rows of two sources can't be in one batch, or have other tokens."""
    specs = (_spec(one.train), _spec(other.train))
    compared = {
        "rows of": specs if None not in specs else (),
        "the classes": (one.classes, other.classes) if one.classes and other.classes else (),
        "a vocabulary of": (one.vocab_size, other.vocab_size),
        "tokens a row:": (one.tokens_per_row, other.tokens_per_row),
    }
    for what, values in compared.items():
        if values and values[0] != values[1]:
            raise ConfigError(
                f"data.source.sources: {name} has {what} {values[0]}, {other_name} has {what} "
                f"{values[1]}. A mixture needs equal rows of the same tokens or classes: build "
                "both with the same tokenizer (`jaxres data build`), or give the same `classes`; a "
                "custom object tells its vocabulary as `vocab_size`."
            )


def _names_of(parts: Mapping[str, Dataset]) -> dict[str, str]:
    """Returns the names of the tokenizers of sources that have tokens."""
    return {name: part.tokenizer_names[0] for name, part in parts.items() if part.tokenizer_names}


def _open(
    config: DataSection,
    progress: Callable[[str], None],
    bad_records: BadRecordsSection | None,
) -> Dataset:
    if isinstance(config.source, MixtureSource):
        return _mixture(config.source, config, progress, bad_records)
    place = token_folder_of(config.source)
    if place is not None and is_remote(place):
        opened = remote_tokens.open_in_bucket(config, place, progress=progress)
        if opened is not None:
            return _of_folder(opened, config, progress)
    source = download_cache.localize(config, progress=progress)
    if isinstance(source, CustomSource):
        return _custom(source, config)
    place = token_folder_of(source)
    if place is None:
        assert not isinstance(source, TokensSource)
        corpus = describe_corpus(
            source,
            config.tokenizer,
            cache_dir=config.cache_dir,
            bad_records=bad_records,
            progress=progress,
        )
        if isinstance(corpus.tokenizer, LibraryTokenizer) and corpus.tokenizer.note:
            progress(corpus.tokenizer.note)
        opened = open_corpus(corpus, progress=progress)
        return _of_folder(opened, config, progress, tokenizer=corpus.tokenizer)
    assert not is_remote(place), place
    opened = open_tokens(place.expanduser())
    if download_cache.is_in_bucket(config.source):
        opened = download_cache.as_cached(opened)
    return _of_folder(opened, config, progress)


def _of_folder(
    opened: TokenFolder,
    config: DataSection,
    progress: Callable[[str], None],
    *,
    tokenizer: Tokenizer | None = None,
) -> Dataset:
    has_images = opened.meta.tokenizer == IMAGES
    if has_images != isinstance(config.source, ImagesSource):
        kinds = ("images", "tokens") if has_images else ("tokens", "images")
        raise ConfigError(
            f"data.source.kind={config.source.kind}: {opened.source or opened.folder} has "
            f"{kinds[0]}. Set data.source.kind={kinds[0]}."
        )
    if isinstance(config.source, ImagesSource):
        if config.source.classes and not classes_of(opened.folder):
            progress("WARNING: data.source.classes names folders; the labels are those of Parquet")
        return _images(opened, config.source, config)
    return _tokens(opened, tokenizer or _tokenizer(opened, config), config, progress)


def _images(opened: TokenFolder, source: ImagesSource, config: DataSection) -> Dataset:
    classes = classes_of(opened.folder)
    if source.classes and classes not in ((), source.classes):
        raise ConfigError(
            f"data.source.classes: the labels of {opened.source or opened.folder} are those of "
            f"{', '.join(classes[:10])}, in this order. Leave `classes` out, or give the same list."
        )
    train, heldout = split_images(opened, source, heldout_fraction=config.heldout_fraction)
    return Dataset(
        fingerprint=opened.meta.fingerprint,
        vocab_size=None,
        tokens_per_row=1,
        train=train,
        heldout=heldout,
        tokenizer=None,
        classes=classes,
    )


def _tokenizer(opened: TokenFolder, config: DataSection) -> Tokenizer | None:
    """Returns the tokenizer of a source of token ids: the configured one, or the folder's own."""
    name = opened.meta.tokenizer
    if not isinstance(config.tokenizer, HuggingfaceTokenizer):
        return tokenizers.of_folder(opened.folder, name)
    tokenizer = open_tokenizer(config.tokenizer)
    if isinstance(tokenizer, LibraryTokenizer):
        tokenizer.require_unambiguous()
    if tokenizer_names.compare(name, tokenizer.name) == "other":
        raise ConfigError(
            f"data.tokenizer.path: {config.tokenizer.path} is {tokenizer.name}, but the tokens of "
            f"{opened.source or opened.folder} were made with {name}. Give that tokenizer, or "
            "leave data.tokenizer out: the folder has its own."
        )
    return tokenizer


def _names(opened: TokenFolder, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    return (opened.meta.tokenizer if tokenizer is None else tokenizer.name,)


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
    fingerprint, cut = opened.meta.fingerprint, train.stop
    if warning := share_warning(opened, config.heldout_fraction, start=cut):
        progress(warning)
    if nearest_boundary(opened, config.heldout_fraction) not in (None, cut):
        fingerprint += f"{CUT_MARK}{cut}"
    return Dataset(
        fingerprint=fingerprint,
        vocab_size=opened.meta.vocab_size,
        tokens_per_row=config.seq_len,
        train=train,
        heldout=heldout,
        tokenizer=tokenizer,
        tokenizer_names=_names(opened, tokenizer),
    )


def _packed(
    opened: TokenFolder,
    tokenizer: Tokenizer | None,
    config: DataSection,
    packing: Packing,
    progress: Callable[[str], None],
) -> Dataset:
    total = opened.meta.num_tokens
    cut = heldout_start(opened, config.heldout_fraction, least=2)
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
        tokenizer_names=_names(opened, tokenizer),
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
    fingerprint, earlier = fingerprints_of(items, source, seq_len=config.seq_len)
    return Dataset(
        fingerprint=fingerprint,
        earlier_fingerprint=earlier,
        vocab_size=vocab_size_of(items),
        tokens_per_row=tokens_per_row_of(items, default=config.seq_len),
        train=train,
        heldout=heldout,
        tokenizer=None,
    )
