"""Opening a token set and reading its first batch costs the same for a gigabyte and a terabyte.

Two measurements are added: the resident part of the memory maps (Rss in /proc/self/smaps: pages
mapped by faults, and those that the kernel maps around them), and the bytes of read() calls (rchar
in /proc/self/io), which exclude maps. A count of page faults would hide a scan, since one fault may
map many pages; mincore would include the kernel's read-ahead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.data import Dataset, batch_at, open_dataset

KIB, MIB, GB, TB = 2**10, 2**20, 10**9, 10**12
AROUND = 64 * KIB
"""Bytes that the kernel maps around a page fault (fault_around_bytes)."""
ROWS, SEQ_LEN = 24, 256
TAIL = 2048


def write_set(folder: Path, *, size_bytes: int, num_documents: int) -> Path:
    """Writes a sparse set of 16-bit tokens, all 0; its last TAIL documents have tokens."""
    num_tokens = size_bytes // 2
    folder.mkdir()
    with (folder / "tokens.bin").open("wb") as file:
        file.truncate(size_bytes)
        file.seek(-1, 2)
        file.write(b"\x01")
    with (folder / "offsets.npy").open("wb") as file:
        shape = (num_documents + 1,)
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": shape}
        )
        file.truncate(file.tell() + 8 * shape[0])
        file.seek(-8 * TAIL, 2)
        file.write(np.linspace(0, num_tokens, TAIL).astype("<i8").tobytes())
    meta = {
        "format": 1,
        "dtype": "uint16",
        "vocab_size": 9,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "tokenizer": "mine",
        "fingerprint": "f" * 32,
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def first_batch(folder: Path) -> tuple[Dataset, Any]:
    """Opens the set and computes its first batch; both keep the memory maps alive."""
    config = DataSection(source=TokensSource(path=folder), seq_len=SEQ_LEN, heldout_fraction=0.01)
    dataset = open_dataset(config)
    return dataset, batch_at(
        dataset.train, dataset.order(seed=0, rows_per_step=ROWS), global_batch_size=ROWS
    )(0)


def mapped_bytes(folder: Path, name: str) -> int:
    """Returns the resident bytes of all maps of a file."""
    resident, is_ours = 0, False
    for row in Path("/proc/self/smaps").read_text().splitlines():
        head = row.split()[0]
        if not head.endswith(":"):
            is_ours = row.endswith(str(folder / name))
        elif head == "Rss:" and is_ours:
            resident += int(row.split()[1]) * KIB
    return resident


def read_call_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Returns the bytes read to open a set of a size: (tokens, offsets, read calls)."""
    first_batch(write_set(tmp_path / "warm", size_bytes=GB, num_documents=9999))  # imports

    def read(*, size_bytes: int, num_documents: int) -> tuple[int, int, int]:
        name = f"{size_bytes}-{num_documents}"
        folder = write_set(tmp_path / name, size_bytes=size_bytes, num_documents=num_documents)
        before = read_call_bytes()
        kept = first_batch(folder)
        calls = read_call_bytes() - before
        assert len(kept[0].heldout) > 0
        assert kept[1].arrays["tokens_BT"].shape == (ROWS, SEQ_LEN)
        return mapped_bytes(folder, "tokens.bin"), mapped_bytes(folder, "offsets.npy"), calls

    return read


def test_opening_a_terabyte_costs_the_same_as_a_gigabyte(read: Any) -> None:
    small = read(size_bytes=GB, num_documents=10_000)
    large = read(size_bytes=TB, num_documents=10_000)
    assert small[0] >= ROWS * 4 * KIB, "the rows were not seen: nothing is measured"
    # The rows differ, so a few of them cross the end of the range mapped around a fault.
    assert abs(large[0] - small[0]) <= 4 * AROUND
    assert large[0] <= 2 * ROWS * AROUND
    assert abs(large[1] - small[1]) <= 2 * AROUND
    assert abs(large[2] - small[2]) <= 4 * KIB
    assert large[2] <= 64 * KIB


def test_a_thousand_times_the_documents_costs_only_a_few_more_probes(read: Any) -> None:
    few = read(size_bytes=TB, num_documents=10**6)  # 8 MB of offsets
    many = read(size_bytes=TB, num_documents=10**9)  # 8 GB of them
    # The cut and the rows use binary search: ten more probes for a thousand times as many.
    assert many[1] - few[1] <= 2 * 10 * AROUND
    assert many[1] <= 4 * MIB, "the offsets were scanned"
    assert many[2] <= 64 * KIB


def test_the_measurement_detects_a_scan(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", size_bytes=GB, num_documents=10**6)
    dataset, _ = first_batch(folder)
    assert mapped_bytes(folder, "offsets.npy") < 2 * MIB
    corpus: Any = dataset.train
    assert corpus.corpus.offsets.max() == GB // 2
    assert mapped_bytes(folder, "offsets.npy") >= 8 * 10**6
