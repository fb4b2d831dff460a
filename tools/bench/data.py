"""Benchmark of the block digests of a token folder: batches with checks against batches without.

    python tools/bench/data.py [--mib 256] [--blocks 40] [--batches 50]

Writes a folder of random tokens, and computes batches of it with and without digests, in turns.
`later` are batches of a folder whose blocks have all been checked; `first` are those of a newly
opened folder, where nearly every row reads a whole block for its digest. The page cache is warm.
Prints ratios with their intervals, and microseconds a batch. Exits 1 if `later` is above 1.2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxres.data import write_tokens
from jaxres.data.token_folder import TokenFolder, TokenRows, open_tokens

LIMIT = 1.2
ROWS, SEQ_LEN, VOCAB = 24, 256, 50_000
DOCUMENT = 1000


def rows_of(corpus: TokenFolder, *, has_digests: bool) -> TokenRows:
    """Returns the training rows of a folder; the last tokens are held out, and never checked."""
    if not has_digests:
        corpus = replace(corpus, token_blocks=None, offset_blocks=None)
    return TokenRows(corpus, SEQ_LEN, 0, int(0.98 * corpus.meta.num_tokens))


def seconds(rows: TokenRows, chance: np.random.Generator, *, count: int) -> float:
    """Returns the seconds of a batch of random rows."""
    batches = chance.integers(0, len(rows), (count, ROWS))
    started = time.perf_counter()
    for ids in batches:
        rows.rows(ids)
    return (time.perf_counter() - started) / count


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Returns the median and the bootstrapped 95 % interval of it."""
    chosen = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.quantile(np.median(np.asarray(ratios)[chosen], axis=1), [0.025, 0.975])
    return statistics.median(ratios), float(low), float(high)


def measure(folder: Path, *, blocks: int, batches: int, first: bool) -> Iterator[list[float]]:
    """Yields seconds of a batch with and without digests, in alternating order."""
    chance = np.random.default_rng(0)
    kept = [rows_of(open_tokens(folder), has_digests=side == 0) for side in (0, 1)]
    for rows in kept:
        rows.rows(np.arange(len(rows)))  # Reads every page, and checks every block.
    for block in range(blocks + 2):
        found = [0.0, 0.0]
        for side in (0, 1) if block % 2 else (1, 0):
            rows = rows_of(open_tokens(folder), has_digests=side == 0) if first else kept[side]
            found[side] = seconds(rows, chance, count=batches)
        if block >= 2:
            yield found


def main() -> int:
    """Measures and prints; returns 1 if the ratio of later batches is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--batches", type=int, default=50, help="batches a block")
    options = parser.parse_args()
    chance, later = np.random.default_rng(0), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "set"
        count = options.mib * 2**19 // DOCUMENT
        documents = (chance.integers(0, VOCAB, DOCUMENT) for _ in range(count))
        write_tokens(folder, documents, vocab_size=VOCAB, tokenizer="random")
        for name in ("first", "later"):
            pairs = list(
                measure(
                    folder, blocks=options.blocks, batches=options.batches, first=name == "first"
                )
            )
            ratio, low, high = interval([checked / bare for checked, bare in pairs])
            times = [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)]
            sys.stdout.write(
                f"{name}: {ratio:.2f} (95 %: {low:.2f} to {high:.2f}); {times[0]:.0f} us a batch "
                f"with digests, {times[1]:.0f} us without\n"
            )
            later = ratio
    return 1 if later > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
