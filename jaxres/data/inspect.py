"""Prints rows as the model gets them, and statistics of a corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.data.batching import Arrays, Rows
from jaxres.data.dataset import Dataset
from jaxres.data.mixture import SOURCE_KEY, describe_row
from jaxres.data.order import Order, sample_ids_at
from jaxres.data.sources.images import LABEL_BYTES, ImageRows, label_of, undecodable_images
from jaxres.data.tokens.packed_rows import PackedRows
from jaxres.data.tokens.token_folder import TokenRows
from jaxres.faults import UsageError

QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
DOCUMENTS_AT_ONCE = 4096
IMAGES_AT_ONCE = 256


@dataclass(frozen=True)
class CorpusStatistics:
    """Counts of a token folder."""

    num_documents: int
    num_tokens: int
    lengths: dict[str, int]
    """Name of a quantile -> tokens of a document, with the end of the document."""
    num_duplicates: int
    """Documents that equal an earlier one."""
    num_tokens_used: int
    """Number of different token ids."""
    vocab_size: int
    num_tokens_beyond: int
    """Tokens with an id that no row may have: beyond the vocabulary, or the model's embedding."""
    num_ids: int
    """Number of the ids that a row may have."""


def show_rows(dataset: Dataset, order: Order, *, count: int, position: int) -> Iterator[str]:
    """Yields a description of each of some rows, in the order in which a run trains on them."""
    for at in range(position, position + count):
        ids, _ = sample_ids_at(order, at, 1)
        arrays = dataset.train.rows(ids)
        where = f"position {at:,}: {describe_row(dataset.train, int(ids[0]))}"
        if "tokens_BT" in arrays:
            lines = _token_row(arrays, dataset)
        else:
            lines = _other_row(arrays, dataset.classes)
        yield "\n".join([where, *(f"  {line}" for line in lines)]) + "\n"


def _token_row(arrays: Arrays, dataset: Dataset) -> Iterator[str]:
    """Yields a line for each document in a row: segment, tokens, weight, text."""
    tokens_T, segments_T = arrays["tokens_BT"][0], arrays["segment_ids_BT"][0]
    weights_T = arrays["weights_BT"][0]
    num_padded = int((segments_T == 0).sum())
    for segment in np.unique(segments_T[segments_T > 0]).tolist():
        inside_T = segments_T == segment
        tokens = tokens_T[inside_T].tolist()
        if dataset.tokenizer is None:
            content = " ".join(map(str, tokens))
        else:
            content = repr(dataset.tokenizer.decode(tokens))
        weight = f"{weights_T[inside_T].sum():g} of {len(tokens):,} weighted"
        yield f"segment {segment}, {weight}: {content}"
    if num_padded:
        yield f"padding: {num_padded:,} positions"


def _other_row(arrays: Arrays, classes: Sequence[str]) -> Iterator[str]:
    for name, values in arrays.items():
        if name == SOURCE_KEY:  # The description of the row names its source.
            continue
        with np.printoptions(threshold=20, edgeitems=3):
            text = " ".join(str(values[0]).split())
        if values[0].ndim >= 3:  # Of an image, numbers say nothing.
            text = f"mean {values[0].mean():.4g}, from {values[0].min()} to {values[0].max()}"
        if name == "label" and classes and int(values[0]) < len(classes):
            text += f" ({classes[int(values[0])]})"
        yield f"{name} {values.dtype}{list(values.shape[1:])}: {text}"


def statistics(rows: Rows, *, progress: Callable[[str], None]) -> CorpusStatistics:
    """Reads every token of the corpus that some rows are from.

    Raises:
      UsageError: the data set is not a token folder.
    """
    if not isinstance(rows, TokenRows | PackedRows):
        raise UsageError("data.source.kind=custom: jaxres can't count the documents of this data")
    corpus = rows.corpus
    offsets = corpus.offsets
    corpus.check_offsets(np.array([0]), np.array([len(offsets)]))
    used = np.zeros(corpus.meta.vocab_size, np.bool_)
    seen, num_duplicates, num_tokens_beyond = set[int](), 0, 0
    for first in range(0, len(offsets) - 1, DOCUMENTS_AT_ONCE):
        bounds = np.asarray(offsets[first : first + DOCUMENTS_AT_ONCE + 1])
        corpus.check_tokens(bounds[:1], bounds[-1:])
        tokens = np.asarray(corpus.tokens[bounds[0] : bounds[-1]])
        used[tokens[tokens < len(used)]] = True
        num_tokens_beyond += int((tokens >= corpus.num_ids).sum())
        for start, stop in zip(bounds - bounds[0], bounds[1:] - bounds[0], strict=False):
            digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens[start:stop]).data)
            num_duplicates += digest in seen
            seen.add(digest)
        progress(f"{first + len(bounds) - 1:,} of {len(offsets) - 1:,} documents")
    return CorpusStatistics(
        num_documents=len(offsets) - 1,
        num_tokens=corpus.meta.num_tokens,
        lengths=_lengths(np.diff(offsets[:])),
        num_duplicates=num_duplicates,
        num_tokens_used=int(used.sum()),
        vocab_size=len(used),
        num_tokens_beyond=num_tokens_beyond,
        num_ids=corpus.num_ids,
    )


@dataclass(frozen=True)
class ImageStatistics:
    """Counts of the images of a folder."""

    num_images: int
    labels: dict[int, int]
    """Label -> number of its images."""
    lengths: dict[str, int]
    """Name of a quantile -> bytes of a file."""
    num_duplicates: int
    """Files that equal an earlier one."""
    num_contradictions: int
    """Duplicates that have another label than the first file."""
    undecodable: list[str]
    """The error of each image that can't be decoded."""
    num_classes: int | None
    """Classes of the model, beyond which a label makes its image a bad record; None: not known."""


def image_statistics(rows: ImageRows, *, progress: Callable[[str], None]) -> ImageStatistics:
    """Reads and decodes every image."""
    total = rows.corpus.meta.num_documents
    labels, first, sizes = Counter[int](), dict[int, int](), list[int]()
    num_duplicates, num_contradictions, undecodable = 0, 0, list[str]()
    for begin in range(0, total, IMAGES_AT_ONCE):
        numbers = np.arange(begin, min(begin + IMAGES_AT_ONCE, total))
        documents = rows.read(numbers)
        undecodable += undecodable_images(numbers, documents)
        for document in documents:
            label, content = label_of(document), document[LABEL_BYTES:]
            labels[label] += 1
            sizes.append(len(content))
            digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(content).data)
            num_duplicates += digest in first
            num_contradictions += first.setdefault(digest, label) != label
        progress(f"{begin + len(numbers):,} of {total:,} images")
    return ImageStatistics(
        num_images=total,
        labels=dict(sorted(labels.items())),
        lengths=_lengths(np.array(sizes)),
        num_duplicates=num_duplicates,
        num_contradictions=num_contradictions,
        undecodable=undecodable,
        num_classes=rows.num_classes,
    )


def _lengths(lengths: NDArray[np.int64]) -> dict[str, int]:
    found = np.quantile(lengths, list(QUANTILES.values()), method="lower")
    return dict(zip(QUANTILES, found.tolist(), strict=True))
