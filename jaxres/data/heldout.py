"""Cuts a data set into the rows to train on and the held-out ones, which are its last part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxres.config.schema.data import CustomSource, ImagesSource
from jaxres.data.batching import first_usable
from jaxres.data.sources.custom import CustomItems, CustomRows, read_item, spec_of, vocab_size_of
from jaxres.data.sources.images import ImageRows
from jaxres.data.tokens.token_folder import TokenFolder, TokenRows
from jaxres.faults import ConfigError


def _first_heldout(num_items: int, fraction: float, *, what: str) -> int:
    """Returns the index of the first held-out item; at least one is held out if a share is given.

    `what` names the data set and its size in the error.
    """
    num_heldout = max(1, round(num_items * fraction)) if fraction else 0
    if num_heldout >= num_items:
        raise ConfigError(f"{what}, and data.heldout_fraction {fraction} leaves none to train on")
    return num_items - num_heldout


def heldout_start(corpus: TokenFolder, fraction: float, *, least: int) -> int:
    """Returns the first held-out token: at the document boundary nearest to the share.

    A document is cut inside if the part after that boundary is less than half or more than twice
    the share, as it can be with few documents.

    Args:
      fraction: the share to hold out.
      least: tokens of the smallest part that has a row; a smaller share is no reason to cut.
    """
    total = corpus.meta.num_tokens
    if fraction == 0:
        return total
    boundary, ideal = nearest_boundary(corpus, fraction), _ideal_start(corpus, fraction)
    share = total - ideal
    if boundary is not None and (share < least or _is_near_share(total - boundary, share)):
        return boundary
    return min(max(ideal, 1), total - 1)


def _is_near_share(num_tokens: int, share: int) -> bool:
    return share <= 2 * num_tokens <= 4 * share


def share_warning(corpus: TokenFolder, fraction: float, *, start: int) -> str | None:
    """Returns a warning of a held-out part that is not near the share; None: it is."""
    total = corpus.meta.num_tokens
    if start == total or _is_near_share(total - start, total - _ideal_start(corpus, fraction)):
        return None
    return (
        f"WARNING: {(total - start) / total:.1%} of the tokens are held out, not "
        f"{fraction:.1%} (data.heldout_fraction): a row takes more than that share, so the data is "
        "cut at the end of a document. Use more data, or lower data.seq_len"
    )


def _ideal_start(corpus: TokenFolder, fraction: float) -> int:
    return round(corpus.meta.num_tokens * (1 - fraction))


def nearest_boundary(corpus: TokenFolder, fraction: float) -> int | None:
    """Returns the end of a document that is nearest to the share; None: there is one document.

    Earlier versions cut there, however far it is.
    """
    total, ideal = corpus.meta.num_tokens, _ideal_start(corpus, fraction)
    after = int(corpus.offsets.searchsorted(np.int64(ideal), side="right"))
    last = min(after, len(corpus.offsets) - 1)
    corpus.check_offsets(np.array([max(after - 1, 0)]), np.array([last + 1]))
    near = {
        int(corpus.offsets[after - 1]),
        int(corpus.offsets[last]),
    }
    inner = near - {0, total}
    return min(inner, key=lambda boundary: (abs(boundary - ideal), boundary), default=None)


def split_tokens(
    corpus: TokenFolder, *, seq_len: int, heldout_fraction: float
) -> tuple[TokenRows, TokenRows]:
    """Returns training and held-out rows, split where `heldout_start` says."""
    cut = heldout_start(corpus, heldout_fraction, least=seq_len + 1)
    total = corpus.meta.num_tokens
    train = TokenRows(corpus, seq_len, 0, cut)
    heldout = TokenRows(corpus, seq_len, cut, total)
    for name, rows in (("training", train), ("held-out", heldout)):
        if len(rows) == 0 and rows.start < rows.stop:
            raise ConfigError(
                f"{corpus.source or corpus.folder}: the {name} part has "
                f"{rows.stop - rows.start:,} of {total:,} tokens, and a row takes "
                f"{seq_len + 1}. Lower data.seq_len, change data.heldout_fraction "
                f"({heldout_fraction}; 0: none), or use more data."
            )
    return train, heldout


def split_images(
    corpus: TokenFolder, source: ImagesSource, *, heldout_fraction: float
) -> tuple[ImageRows, ImageRows]:
    """Returns training and held-out rows; both have rows of all classes."""
    total = corpus.meta.num_documents
    what = f"{corpus.path('tokens.bin')}: {total} images"
    cut = _first_heldout(total, heldout_fraction, what=what)
    train = ImageRows(corpus, source.size, source.augment != "none", source.augment_seed, 0, cut)
    return train, replace(train.evaluated(), start=cut, stop=total)


def split_items(
    items: CustomItems, source: CustomSource, *, seq_len: int, heldout_fraction: float
) -> tuple[CustomRows, CustomRows]:
    """Returns training and held-out rows; the last items are held out."""
    num_items = len(items)
    what = f"data.source.target: {source.target} has {num_items} items"
    cut = _first_heldout(num_items, heldout_fraction, what=what)
    vocab_size = vocab_size_of(items)
    first = first_usable(
        lambda index: read_item(
            items, index, target=source.target, seq_len=seq_len, vocab_size=vocab_size
        ),
        num_items,
    )

    def part(start: int, stop: int, *, varies: bool) -> CustomRows:
        return CustomRows(
            items, source.target, seq_len, vocab_size, spec_of(first), start, stop, varies
        )

    varies = callable(getattr(items, "item_at", None))
    return part(0, cut, varies=varies), part(cut, num_items, varies=False)
