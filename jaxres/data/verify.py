"""Verifies the data of a config: reads every byte of the token folder, and of its source.

A run checks a block when it first reads it; this checks all of them, and the fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from jaxres.config.schema.data import (
    CustomSource,
    DataSection,
    MixtureSource,
    Source,
    TokensSource,
)
from jaxres.config.schema.training import BadRecordsSection
from jaxres.data.bucket import download_cache, remote_tokens
from jaxres.data.bucket.remote_items import RemoteItems
from jaxres.data.corpus import BAD_RECORDS, Corpus, describe_corpus, fingerprint_of, open_cached
from jaxres.data.mixture import mixture_fingerprint
from jaxres.data.sources.source_files import token_folder_of
from jaxres.data.tokens.token_digests import CheckedBlocks
from jaxres.data.tokens.token_folder import (
    CacheDamaged,
    Items,
    TokenFolder,
    TokensDamaged,
    open_tokens,
)
from jaxres.faults import UsageError
from jaxres.storage import files
from jaxres.storage.path import is_remote

CHUNK_ITEMS = 2**20
NAMED = 20
"""Number of damaged blocks of a file that are listed; of the others the number is given."""


@dataclass(frozen=True)
class DataReport:
    """Result of a complete verification of a data set."""

    problems: tuple[str, ...]
    """The errors, each with its file and block."""
    verified: str = ""
    """Description of the verified data, for a line of text."""
    fingerprint: str | None = None
    """The fingerprint that the tokens have; None: there is no token folder."""


def verify_data(
    config: DataSection, bad_records: BadRecordsSection | None = BAD_RECORDS
) -> DataReport:
    """Verifies the token folder of a config, its copy of a bucket, and the text it was made from.

    Raises:
      ConfigError: the source can't be listed.
      UsageError: the source is custom.
      StorageUnavailable: the bucket does not respond.
    """
    if isinstance(config.source, MixtureSource):
        return _of_mixture(config, config.source, bad_records)
    if isinstance(config.source, CustomSource):
        raise UsageError(
            "data.source.kind=custom: jaxres has neither a copy nor digests of this data set, so "
            "there is nothing to verify"
        )
    source, problems = config.source, list[str]()
    place = token_folder_of(source)
    if place is not None and is_remote(place):
        try:
            opened = remote_tokens.open_in_bucket(config, place, progress=lambda _: None)
        except (TokensDamaged, CacheDamaged) as damage:
            return DataReport((str(damage),))
        if opened is not None:
            return _of_bucket(opened)
    if download_cache.is_in_bucket(config.source):
        copied, problems = download_cache.verify_copy(config)
        if copied is None:
            return DataReport(tuple(problems))
        source = copied
    place = token_folder_of(source)
    if place is not None:
        assert not is_remote(place), place
        return _of_folder(place.expanduser(), problems)
    return _of_corpus(config, source, problems, bad_records)


def _of_corpus(
    config: DataSection,
    source: Source,
    problems: list[str],
    bad_records: BadRecordsSection | None,
) -> DataReport:
    """Verifies the cached corpus of a source, and that it is still made of the same files."""
    assert not isinstance(source, CustomSource | MixtureSource | TokensSource), source
    corpus = describe_corpus(
        source, config.tokenizer, cache_dir=config.cache_dir, bad_records=bad_records
    )
    if not corpus.entry.exists():
        problems.append(f"{corpus.entry}: no cached corpus; a run builds it at its start")
        return DataReport(tuple(problems))
    report = _of_folder(corpus.entry, problems, cached=corpus)
    now = fingerprint_of(corpus)
    if report.fingerprint in (None, now):
        return report
    problem = (
        f"data.source.path: {source.path}: the files have the fingerprint {now} now, the cached "
        f"corpus has {report.fingerprint}"
    )
    return replace(report, problems=(*report.problems, problem))


def _of_mixture(
    config: DataSection, mixture: MixtureSource, bad_records: BadRecordsSection | None
) -> DataReport:
    """Verifies each source; custom ones are left out."""
    problems, verified, fingerprints = list[str](), list[str](), dict[str, str]()
    for part in mixture.sources:
        if isinstance(part.source, CustomSource):
            verified.append(f"{part.name}: kind=custom, not verified")
            continue
        report = verify_data(config.model_copy(update={"source": part.source}), bad_records)
        problems += [f"{part.name}: {text}" for text in report.problems]
        verified.append(f"{part.name}: {report.verified}")
        if report.fingerprint is not None:
            fingerprints[part.name] = report.fingerprint
    # With packing, the fingerprint of a source also covers the plans of its rows.
    is_known = config.packing == "concat" and len(fingerprints) == len(mixture.sources)
    fingerprint = mixture_fingerprint(fingerprints) if is_known else None
    return DataReport(tuple(problems), "\n".join(verified), fingerprint)


def _of_folder(folder: Path, problems: list[str], *, cached: Corpus | None = None) -> DataReport:
    try:
        corpus = open_cached(cached) if cached else open_tokens(folder)
    except TokensDamaged as damage:
        return DataReport((*problems, str(damage)))
    found = _damaged_blocks(corpus)
    fingerprint = _fingerprint(corpus.tokens, corpus.offsets)
    if fingerprint != corpus.meta.fingerprint:
        found.append(_other_fingerprint(corpus, fingerprint))
    if found and cached:
        found.append(f"Remove {folder}; the next start builds it again from data.source.path")
    if corpus.token_blocks is None or corpus.offset_blocks is None:
        checked = "no block digests, so a run does not check what it reads"
    else:
        checked = f"{corpus.token_blocks.num_blocks + corpus.offset_blocks.num_blocks:,} blocks"
    size_bytes = corpus.tokens.nbytes + corpus.offsets.nbytes
    verified = f"{folder}: {size_bytes:,} bytes, {checked}, fingerprint {fingerprint}"
    return DataReport((*problems, *found), verified, fingerprint)


def _damaged_blocks(corpus: TokenFolder) -> list[str]:
    named = (("tokens.bin", corpus.token_blocks), ("offsets.npy", corpus.offset_blocks))
    return [
        line
        for name, blocks in named
        if isinstance(blocks, CheckedBlocks)
        for line in _describe(blocks, corpus.folder / name)
    ]


def _describe(blocks: CheckedBlocks, path: Path) -> list[str]:
    files.drop_page_cache(path)
    damaged = blocks.all_damaged()
    lines = [blocks.describe(block, path) for block in damaged[:NAMED]]
    return [*lines, *_more(len(damaged), str(path))]


def _fingerprint(tokens: Items, offsets: Items) -> str:
    digest = xxhash.xxh3_128()
    for items in (tokens, offsets):
        for chunk in _chunks(items):
            digest.update(chunk.data)
    return digest.hexdigest()


def _chunks(items: Items) -> Iterator[NDArray[Any]]:
    for start in range(0, len(items), CHUNK_ITEMS):
        yield np.ascontiguousarray(items[start : start + CHUNK_ITEMS])


def _of_bucket(corpus: TokenFolder) -> DataReport:
    """Reads every block from the bucket once."""
    digest, damaged, num_blocks, size_bytes = xxhash.xxh3_128(), list[str](), 0, 0
    for items in (corpus.tokens, corpus.offsets):
        if isinstance(items, RemoteItems):
            num_blocks += items.num_blocks
            for data, wrong in items.scan():
                digest.update(data.data)
                damaged += wrong
        else:  # Opening has compared its blocks with the digests.
            for chunk in _chunks(items):
                digest.update(chunk.data)
        size_bytes += items.nbytes
    problems = [*damaged[:NAMED], *_more(len(damaged), str(corpus.source))]
    fingerprint, recorded = digest.hexdigest(), corpus.meta.fingerprint
    if fingerprint != recorded:
        problems.append(_other_fingerprint(corpus, fingerprint))
    verified = f"{corpus.source}: {size_bytes:,} bytes, {num_blocks:,} blocks of them in the bucket"
    return DataReport(tuple(problems), f"{verified}, fingerprint {fingerprint}", fingerprint)


def _more(count: int, where: str) -> list[str]:
    return [f"{where}: and {count - NAMED:,} more blocks"] if count > NAMED else []


def _other_fingerprint(corpus: TokenFolder, fingerprint: str) -> str:
    return (
        f"{corpus.source or corpus.folder}: the tokens and offsets have the fingerprint "
        f"{fingerprint}, meta.json records {corpus.meta.fingerprint}"
    )
