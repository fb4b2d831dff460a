"""Benchmarks of the data pipeline.

    python tools/bench/data.py digests|tokenise|rate|start|images|peers [--repeats N]

`digests`: batches of a token folder with checks of its block digests, against batches without, in
turns; exits 1 if those of checked blocks take more than 1.2 times as long. `tokenise`: builds a
corpus with a BPE tokenizer, in turns with the library `tokenizers` alone on the same texts in
memory. `rate`: batches of random tokens through the prefetch thread. `start`: new processes, until
the first batch of a sparse token folder of 1 TB. `images`: random crops with one and more threads.
`peers`: processes of jaxres, of grain and of `datasets` in turns, on windows of the same tokens in
random order, each with its defaults; `--python` is an interpreter that has grain and datasets.
Prints medians, with bootstrapped 95 % intervals of ratios, and the machine's load.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import xxhash  # noqa: E402

from jaxres.config.schema.data import (  # noqa: E402
    DataSection,
    DocumentSource,
    HuggingfaceTokenizer,
    ImagesSource,
    JsonlSource,
    TextSource,
    TokensSource,
)
from jaxres.data import Prefetch, batch_at, open_dataset, write_tokens  # noqa: E402
from jaxres.data.corpus import describe_corpus, open_corpus  # noqa: E402
from jaxres.data.sources import images  # noqa: E402
from jaxres.data.tokens.token_digests import BLOCK_BYTES, num_blocks  # noqa: E402
from jaxres.data.tokens.token_folder import TokenFolder, TokenRows, open_tokens  # noqa: E402
from tests import bpe  # noqa: E402

LIMIT = 1.2
VOCAB, DOCUMENT = 50_000, 1000
ROWS, SEQ_LEN = 24, 256
BATCHES = 50
SHAPES = ((480, 1024), (24, 256))
"""Rows of a batch, and tokens of a row."""
FIRST_BATCH = """
import sys
from pathlib import Path
from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.data import batch_at, open_dataset
import time
begun = time.perf_counter()
path = Path(sys.argv[1])
section = DataSection(source=TokensSource(path=path), seq_len=1024, cache_dir=path.parent / "c")
dataset = open_dataset(section)
opened = time.perf_counter()
order = dataset.order(seed=int(sys.argv[2]), rows_per_step=480)
batch_at(dataset.train, order, global_batch_size=480)(0)
print(opened - begun, time.perf_counter() - opened)
"""
PEER = """
import sys, time
import numpy as np
kind, path, rows, seq_len = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokens = np.memmap(path + "/tokens.bin", "<u2", "r")
count = (len(tokens) - 1) // seq_len
class Windows:
    def __len__(self):
        return count
    def __getitem__(self, i):
        window = tokens[int(i) * seq_len : int(i) * seq_len + seq_len + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}
def jaxres():
    from pathlib import Path
    from jaxres.config.schema.data import DataSection, TokensSource
    from jaxres.data import Prefetch, batch_at, open_dataset
    folder = Path(path)
    section = DataSection(source=TokensSource(path=folder), seq_len=seq_len, heldout_fraction=0.0)
    dataset = open_dataset(section)
    order = dataset.order(seed=0, rows_per_step=rows)
    at = batch_at(dataset.train, order, global_batch_size=rows)
    cursor = 0
    with Prefetch(at, depth=section.prefetch_batches, timeout_seconds=60) as prefetch:
        while True:
            batch = prefetch.get(cursor)
            cursor = batch.next_cursor
            yield batch
def mapdataset():
    import grain
    data = grain.MapDataset.source(Windows()).shuffle(seed=0).repeat().batch(rows)
    yield from data.to_iter_dataset()
def dataloader():
    import grain
    sampler = grain.samplers.IndexSampler(count, shuffle=True, seed=0)
    yield from grain.DataLoader(data_source=Windows(), sampler=sampler, worker_count=0,
        operations=[grain.transforms.Batch(rows, drop_remainder=True)])
def datasets():
    import datasets, os
    folder = f"{path}/saved-{seq_len}"
    if not os.path.exists(folder):
        width = seq_len + 1
        part = np.lib.stride_tricks.sliding_window_view(tokens, width)[::seq_len]
        features = {"window": datasets.Sequence(datasets.Value("uint16"), length=width)}
        whole = datasets.Dataset.from_dict({"window": part}, features=datasets.Features(features))
        whole.save_to_disk(folder)
    saved = datasets.load_from_disk(folder).with_format("numpy").shuffle(seed=0)
    while True:
        for batch in saved.iter(rows, drop_last_batch=True):
            windows = batch["window"].astype(np.int32)
            yield {"inputs": windows[:, :-1].copy(), "targets": windows[:, 1:].copy()}
batches = globals()[kind]()
warm = time.perf_counter() + 2
while time.perf_counter() < warm:
    next(batches)
begun, taken = time.perf_counter(), 0
while time.perf_counter() < begun + 4:
    next(batches)
    taken += 1
print(taken * rows * seq_len / (time.perf_counter() - begun), flush=True)
import os
os._exit(0)
"""
PEERS = {"mapdataset": "grain", "dataloader": "grain", "datasets": "datasets"}
"""Kind of a loop -> the package that it needs."""


def rows_of(corpus: TokenFolder, *, has_digests: bool) -> TokenRows:
    """Returns the training rows of a folder; the last tokens are held out, and never checked."""
    if not has_digests:
        corpus = replace(corpus, token_blocks=None, offset_blocks=None)
    return TokenRows(corpus, SEQ_LEN, 0, int(0.98 * corpus.meta.num_tokens))


def seconds_of(rows: TokenRows, chance: np.random.Generator, *, count: int) -> float:
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
            found[side] = seconds_of(rows, chance, count=batches)
        if block >= 2:
            yield found


def timed(function: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def tell(message: str) -> None:
    """Prints a line with the machine's load."""
    sys.stdout.write(f"{message} (load {os.getloadavg()[0]:.1f})\n")
    sys.stdout.flush()


def digests(folder: Path, *, repeats: int) -> int:
    """Compares batches with and without checks; returns 1 if later ones are above the limit."""
    path, later = write_random(folder, mib=256), 0.0
    for name in ("first", "later"):
        pairs = list(measure(path, blocks=6 * repeats, batches=BATCHES, first=name == "first"))
        ratio, low, high = interval([checked / bare for checked, bare in pairs])
        times = [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)]
        tell(
            f"{name}: {ratio:.2f} (95 %: {low:.2f} to {high:.2f}); {times[0]:.0f} us a batch "
            f"with digests, {times[1]:.0f} us without"
        )
        later = ratio
    return 1 if later > LIMIT else 0


def tokenise(folder: Path, *, repeats: int) -> None:
    """Compares the build of a corpus with the library alone."""
    paths = sorted(Path(os.__file__).parent.rglob("*.py"))
    paths = [path for path in paths if "-packages" not in str(path)][::2]
    texts = [text for path in paths if (text := path.read_text(errors="replace"))]
    trained = bpe.train(folder / "bpe", vocab_size=4000, texts=texts[::12])
    tokenizer = HuggingfaceTokenizer(path=trained)
    (folder / "text").mkdir()
    for number, text in enumerate(texts):
        (folder / "text" / f"{number}.py").write_text(text)
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "all.jsonl").write_text("\n".join(lines))
    sources: dict[str, DocumentSource] = {
        "text": TextSource(path=str(folder / "text")),
        "jsonl": JsonlSource(path=str(folder / "all.jsonl")),
    }
    for name, source in sources.items():
        corpus = describe_corpus(source, tokenizer, cache_dir=folder / "cache")
        library, ratios, rates = corpus.tokenizer.library, [], []  # type: ignore[union-attr]

        def build() -> None:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            open_corpus(corpus, progress=lambda _: None)  # noqa: B023

        def alone() -> None:
            library.encode_batch_fast(texts, add_special_tokens=False)  # noqa: B023

        for turn in range(repeats + 1):
            calls = (build, alone) if turn % 2 else (alone, build)
            took = {call.__name__: timed(call) for call in calls}
            if turn:  # The first one warms the caches of the library and of the disk.
                ratios.append(took["alone"] / took["build"])
                rates.append(sum(map(len, texts)) / took["build"] / 1e6)
        ratio, low, high = interval(ratios)
        tell(
            f"tokenise {name}: {ratio:.2f} of the library's rate (95 %: {low:.2f} to {high:.2f}); "
            f"{statistics.median(rates):.1f} M characters/s"
        )


def write_random(folder: Path, *, mib: int) -> Path:
    """Writes a token folder of random tokens."""
    chance = np.random.default_rng(0)
    documents = (chance.integers(0, VOCAB, DOCUMENT) for _ in range(mib * 2**19 // DOCUMENT))
    write_tokens(folder / "set", documents, vocab_size=VOCAB, tokenizer="random")
    return folder / "set"


def loop_of(path: Path, rows: int, seq_len: int) -> tuple[Prefetch, Callable[[int], float]]:
    """Returns the prefetch of a token folder, and the function that times batches of it."""
    section = DataSection(source=TokensSource(path=path), seq_len=seq_len, cache_dir=path.parent)
    dataset = open_dataset(section)
    order = dataset.order(seed=0, rows_per_step=rows)
    at = batch_at(dataset.train, order, global_batch_size=rows)
    prefetch = Prefetch(at, depth=2, timeout_seconds=60)
    cursor = 0

    def take(count: int) -> float:
        nonlocal cursor
        begun = time.perf_counter()
        for _ in range(count):
            batch = prefetch.get(cursor)
            assert batch is not None
            cursor = batch.next_cursor
        return time.perf_counter() - begun

    return prefetch, take


def rate(folder: Path, *, repeats: int) -> None:
    """Prints the tokens in a second of the input pipeline."""
    path = write_random(folder, mib=256)
    for rows, seq_len in SHAPES:
        count = max(1, 2**21 // (rows * seq_len))
        prefetch, take = loop_of(path, rows, seq_len)
        with prefetch:
            first = count * rows * seq_len / take(count)
            rates = [count * rows * seq_len / take(count) for _ in range(10 * repeats)]
        middle, low, high = interval(rates)
        tell(
            f"rate {rows} x {seq_len}: {middle / 1e6:.1f} M tokens/s (95 %: {low / 1e6:.1f} to "
            f"{high / 1e6:.1f}); the first 2 M, blocks unchecked: {first / 1e6:.1f}"
        )


def start(folder: Path, *, repeats: int) -> None:
    """Times processes until the first batch of a sparse folder of 1 TB."""
    path, num_tokens, document = folder / "set", 500 * 10**9, 10_000
    path.mkdir()
    with (path / "tokens.bin").open("wb") as file:
        file.truncate(2 * num_tokens)
    offsets = np.arange(0, num_tokens + 1, document, dtype="<i8")
    np.save(path / "offsets.npy", offsets)
    sizes, zeros = 2 * num_tokens, bytes(BLOCK_BYTES)
    digests = np.full(num_blocks(sizes, BLOCK_BYTES), xxhash.xxh3_64_intdigest(zeros), "<u8")
    if sizes % BLOCK_BYTES:
        digests[-1] = xxhash.xxh3_64_intdigest(zeros[: sizes % BLOCK_BYTES])
    view = offsets.view(np.uint8)
    of_offsets = [
        xxhash.xxh3_64_intdigest(view[begin : begin + BLOCK_BYTES].data)
        for begin in range(0, len(view), BLOCK_BYTES)
    ]
    np.save(path / "digests.npy", np.concatenate([digests, np.array(of_offsets, "<u8")]))
    meta = {
        "format": 1,
        "dtype": "uint16",
        "vocab_size": VOCAB,
        "num_tokens": num_tokens,
        "num_documents": len(offsets) - 1,
        "tokenizer": "random",
        "fingerprint": "0" * 32,
        "block_bytes": BLOCK_BYTES,
    }
    (path / "meta.json").write_text(json.dumps(meta))
    found = []
    for file_path in path.iterdir():
        with file_path.open("rb") as file:
            os.fsync(file)
    for seed in range(repeats):  # Other rows each time, whose tokens are not in the page cache.
        begun = time.perf_counter()
        command = [sys.executable, "-c", FIRST_BATCH, str(path), str(seed)]
        output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        found.append((time.perf_counter() - begun, *map(float, output.split())))
    for name, column in zip(
        ("process until its end", "open", "first batch"), zip(*found, strict=True), strict=True
    ):
        tell(f"start: {name}: {', '.join(f'{seconds:.3f}' for seconds in column)} s")


def crops(folder: Path, *, repeats: int) -> None:
    """Prints the random crops in a second, of JPEG files of 500 x 375, with numbers of threads."""
    from PIL import Image

    chance, place = np.random.default_rng(0), folder / "photos" / "one"
    place.mkdir(parents=True)
    for number in range(64):
        coarse = Image.fromarray(chance.integers(0, 255, (30, 40, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        (place / f"{number}.jpg").write_bytes(file.getvalue())
    source = ImagesSource(path=str(folder / "photos"), augment="crop_flip")
    section = DataSection(source=source, heldout_fraction=0.0, cache_dir=folder / "cache")
    rows, usual = open_dataset(section).train, images.num_threads
    for threads in sorted({1, usual(64)}):
        images.num_threads = lambda num_rows, threads=threads: threads
        took = [timed(lambda at=at: rows.rows(np.arange(64) + 64 * at)) for at in range(repeats)]
        tell(f"images: {64 / statistics.median(took):.0f} a second, {threads} threads")


def peers(folder: Path, *, repeats: int, python: str) -> None:
    """Compares the speed of batches with other libraries, from the same file of tokens."""
    path = write_random(folder, mib=128)

    def tokens_per_second(kind: str, rows: int, seq_len: int) -> float:
        program = sys.executable if kind == "jaxres" else python
        command = [program, "-c", PEER, kind, str(path), str(rows), str(seq_len)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return float(done.stdout)

    for kind, package in PEERS.items():
        if subprocess.run(
            [python, "-c", f"import {package}"], stderr=subprocess.DEVNULL
        ).returncode:
            tell(f"{kind}: {python} has no package {package}; give one that has: --python")
            continue
        for rows, seq_len in SHAPES:
            found = []
            for turn in range(repeats):
                kinds = ("jaxres", kind) if turn % 2 else (kind, "jaxres")
                found.append({one: tokens_per_second(one, rows, seq_len) for one in kinds})
            ratio, low, high = interval([pair["jaxres"] / pair[kind] for pair in found])
            rates = [
                statistics.median(pair[one] / 1e6 for pair in found) for one in ("jaxres", kind)
            ]
            tell(
                f"{kind} {rows} x {seq_len}: jaxres has {ratio:.1f} times its rate (95 %: "
                f"{low:.1f} to {high:.1f}), {rates[0]:.0f} and {rates[1]:.0f} M tokens/s"
            )


def main() -> int:
    """Runs one benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    runs = {
        "digests": digests,
        "tokenise": tokenise,
        "rate": rate,
        "start": start,
        "images": crops,
        "peers": peers,
    }
    parser.add_argument("what", choices=runs)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        more = {"python": options.python} if options.what == "peers" else {}
        return runs[options.what](Path(temporary), repeats=options.repeats, **more) or 0


if __name__ == "__main__":
    sys.exit(main())
