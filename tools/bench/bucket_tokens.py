"""Benchmark of tokens in a bucket: how long a loop waits for rows that are fetched by ranges.

    python tools/bench/bucket_tokens.py [--mib 512] [--late 0.05] [--bandwidth 1e8]

Serves a folder of random tokens from the emulated bucket, in a process of its own, with a latency
for each request and a bandwidth for all of them. The local cache holds an eighth of the folder, so
nearly every row is fetched. A loop takes batches at a fixed rate, and then as fast as it can; the
first second is not counted. Prints the share of the time in which it waits, and what is fetched for
a row. Exits 1 if the loop waits at the quickstart's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from jaxres.config.schema.data import DataSection, TokensSource  # noqa: E402
from jaxres.data import Prefetch, batch_at, open_dataset, write_tokens  # noqa: E402
from jaxres.data.tokens import token_digests, token_writer  # noqa: E402
from jaxres.storage import gcs_objects  # noqa: E402
from jaxres.storage.path import GcsPath  # noqa: E402
from jaxres_emulators.gcs.server import CONTROL  # noqa: E402

QUICKSTART = 2.5
"""Steps in a second of the quickstart on two cores."""
VOCAB, DOCUMENT = 50_000, 1000
LIMIT = 0.01


@dataclass(frozen=True)
class Case:
    """A loop: rows of a batch, tokens of a row, and batches in a second; 0: as fast as it can."""

    name: str
    rows: int
    seq_len: int
    rate: float
    seconds: float


CASES = (
    Case("quickstart", 24, 128, QUICKSTART, 20),
    Case("quickstart, 4 times as fast", 24, 128, 4 * QUICKSTART, 10),
    Case("as fast as it can", 24, 128, 0, 10),
    Case("as fast as it can", 480, 1024, 0, 10),
)


def main() -> int:
    """Measures and prints; returns 1 if the quickstart's loop waits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--late", type=float, default=0.05, help="seconds that each answer takes")
    parser.add_argument("--bandwidth", type=float, default=1e8, help="bytes in a second")
    options = parser.parse_args()
    command = [sys.executable, "-m", "jaxres_emulators.gcs"]
    share = 0.0
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as temporary,
    ):
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        variables = [next(lines).removeprefix("export ").strip() for _ in range(5)]
        os.environ.update(line.split("=", 1) for line in variables)
        try:
            for kib in (64, 1024):
                there = upload(Path(temporary), mib=options.mib, block_kib=kib)
                control("limits", late_seconds=options.late, bytes_per_second=options.bandwidth)
                for case in CASES:
                    waited = measure(case, there, Path(temporary), mib=options.mib, kib=kib)
                    share = waited if (case, kib) == (CASES[0], 64) else share
                control("limits", late_seconds=0, bytes_per_second=None)
        finally:
            server.kill()
    return 1 if share > LIMIT else 0


def upload(folder: Path, *, mib: int, block_kib: int) -> GcsPath:
    """Writes random tokens to the bucket, with digests of blocks of this size."""
    chance, local = np.random.default_rng(0), folder / f"set-{block_kib}"
    for module in (token_digests, token_writer):
        vars(module)["BLOCK_BYTES"] = block_kib * 2**10
    documents = (chance.integers(0, VOCAB, DOCUMENT) for _ in range(mib * 2**19 // DOCUMENT))
    write_tokens(local, documents, vocab_size=VOCAB, tokenizer="random")
    for path in local.iterdir():
        gcs_objects.write(GcsPath("bucket", local.name) / path.name, path.read_bytes(), over=None)
    return GcsPath("bucket", local.name)


def measure(case: Case, there: GcsPath, folder: Path, *, mib: int, kib: int) -> float:
    """Runs the loop of a case on an empty cache; returns the share of the time that it waits."""
    cache = folder / f"cache-{kib}-{CASES.index(case)}"
    section = DataSection(
        source=TokensSource(path=there),
        seq_len=case.seq_len,
        cache_dir=cache,
        bucket_cache_gb=mib / 8 * 2**20 / 1e9,
    )
    begun = time.monotonic()
    dataset = open_dataset(section)
    opened, before = time.monotonic() - begun, control("counts")
    at = batch_at(
        dataset.train, dataset.order(seed=0, rows_per_step=case.rows), global_batch_size=case.rows
    )
    waits, num_batches, first, num_counted, counted_from = [], 0, 0.0, 0, 0.0
    with Prefetch(at, depth=8, timeout_seconds=60) as prefetch:
        cursor = 0
        while time.monotonic() < begun + opened + 1 + case.seconds:
            asked = time.monotonic()
            batch = prefetch.get(cursor)
            assert batch is not None
            now, cursor, num_batches = time.monotonic(), batch.next_cursor, num_batches + 1
            first = first or now - begun
            if asked > begun + opened + 1:
                counted_from = counted_from or asked
                waits.append(now - asked)
                num_counted += 1
            if case.rate:
                time.sleep(1 / case.rate)
        seconds = time.monotonic() - (counted_from or begun)
        num_fetched = max(num_batches * case.rows, cursor)
    after = control("counts")
    requests = after["requests"]["GET media"] - before["requests"].get("GET media", 0)
    sent = after["sent_bytes"] - before["sent_bytes"]
    waits = waits or [seconds]
    share = sum(waits) / seconds
    sys.stdout.write(
        f"blocks of {kib} KiB, {case.name}, {case.rows} rows of {case.seq_len}: first batch after "
        f"{first:.2f} s (open {opened:.2f}); waits {share:.2%} of the time, at most "
        f"{1e3 * max(waits):.0f} ms, median {1e3 * statistics.median(waits):.1f}; "
        f"{num_counted / seconds:.1f} batches/s, "
        f"{num_counted * case.rows * case.seq_len / seconds:,.0f} tokens/s; a row: "
        f"{requests / num_fetched:.2f} requests, {sent / num_fetched / 1e3:.0f} kB\n"
    )
    sys.stdout.flush()
    return share


def control(what: str, **limits: Any) -> Any:
    """Sends a request to the emulator's control API."""
    data = json.dumps(limits).encode() if limits else None
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}{CONTROL}{what}"
    with urllib.request.urlopen(urllib.request.Request(url, data)) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
