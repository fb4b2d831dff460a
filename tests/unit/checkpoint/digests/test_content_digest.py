import dataclasses
import itertools
import math
import random
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxres.checkpoint.digests import content_digest as digests
from jaxres.checkpoint.digests.content_digest import (
    array_digest,
    block_grid,
    blocks,
    content_digest,
)
from jaxres.checkpoint.read import manifest
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.runlog.records import Commit, Prune, Quarantine, Record, Rollback
from jaxres.runlog.run_log import fold, read_records
from tests.unit.checkpoint import independent_reader
from tests.unit.runlog.example_records import CLAIM

FACTS = {"step": 8, "cursor": 192, "epoch": 0, "tokens": 12288}


@pytest.mark.slow
def test_an_independent_reader_computes_the_same_digest_of_a_run(attempt, capsys):
    attempt.save(8, 16, 24)
    assert checkpoints_cli.main(["checkpoints", "digest", str(attempt.run_dir.root)], usage="") == 0
    assert capsys.readouterr().out == independent_reader.checked_digest(attempt.run_dir.root) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_an_independent_reader_verifies_steps_of_one_and_two_hosts(written_by, num_hosts):
    run_dir = written_by(num_hosts)
    newest = fold(read_records(run_dir.log)).newest
    assert (run_dir.root / newest.path / "digests/read_back.json").exists() == (num_hosts == 2)
    digest = independent_reader.checked_digest(run_dir.root)
    assert digest == manifest.load(run_dir.root / newest.path, newest).digest


def test_the_independent_reader_has_at_most_60_lines_and_imports_neither_jax_nor_jaxres():
    text = Path(independent_reader.__file__).read_text()
    assert len(text.splitlines()) <= 60
    imports = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imports == {"hashlib", "json", "numpy", "tensorstore", "xxhash"}


def commit(step, path="a"):
    return Commit(step=step, path=f"checkpoints/{step}-{path}", manifest="sha256:0", bytes=1)


COMMITS = [(1, CLAIM), (1, commit(8)), (1, commit(16)), (1, commit(24))]
SECOND = dataclasses.replace(CLAIM, attempt=2)
ROLLBACK = Rollback(onset=12, target=8, rows=((9, 10),), reason="spike")
LOGS = {
    "prune": ([*COMMITS, (1, Prune(steps=(8, 16)))], [24]),
    "pruned and committed again": (
        [*COMMITS, (1, Prune(steps=(24,))), (1, commit(24, "b"))],
        [8, 16, 24],
    ),
    "rollback": ([*COMMITS, (1, ROLLBACK)], [8]),
    "quarantine": (
        [*COMMITS, (1, Quarantine(step=16, path=commit(16).path, evidence=""))],
        [8, 24],
    ),
    "quarantine of another directory": (
        [*COMMITS, (1, Quarantine(step=16, path="checkpoints/16-b", evidence=""))],
        [8, 16, 24],
    ),
    "late commit": ([*COMMITS[:3], (2, SECOND), COMMITS[3]], [8, 16]),
}


@pytest.mark.parametrize("name", LOGS)
def test_an_independent_reader_and_the_run_history_find_the_same_steps(tmp_path, name):
    bodies, steps = LOGS[name]
    records = [
        Record(seq=seq, time=1.0, attempt=attempt, body=body)
        for seq, (attempt, body) in enumerate(bodies, start=1)
    ]
    for record in records:
        (tmp_path / f"{record.seq:08}.json").write_bytes(record.encode())
    found = independent_reader.committed_steps(tmp_path)
    committed = fold(records).committed
    assert sorted(found) == [c.step for c in committed] == steps
    assert [found[c.step]["path"] for c in committed] == [c.path for c in committed]


def array(shape, dtype, *, seed=0):
    data = np.random.default_rng(seed).integers(0, 2, size=(*shape, 64 // 8), dtype=np.uint8)
    return data.sum(axis=-1).astype(dtype).reshape(shape)


DTYPES = ["float32", "float64", "int8", "uint32", "bool", "float16"]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SHAPES = [(), (0,), (0, 5), (1,), (7,), (3, 5), (64, 128), (257, 64), (2, 3, 1024), (100_000,)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_independent_reader_computes_the_same_digest_of_any_array(shape, dtype):
    values = array(shape, dtype)
    assert array_digest("params/é", values) == independent_reader.array_digest("params/é", values)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2"])
def test_byte_order_and_memory_layout_do_not_matter(dtype):
    values = array((64, 256), dtype)
    little = values.astype(values.dtype.newbyteorder("<"))
    assert values.tobytes() != little.tobytes()
    wanted = array_digest("w", little)
    assert array_digest("w", values) == wanted
    assert array_digest("w", np.asfortranarray(little)) == wanted
    assert array_digest("w", np.ascontiguousarray(little.T).T) == wanted


def random_shapes(count):
    chance = random.Random(0)
    for _ in range(count):
        dims = chance.randrange(0, 4)
        yield tuple(chance.choice((1, 2, 3, 6, 8, 12, 33, 64, 100)) for _ in range(dims))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_blocks_cover_an_array_exactly_and_have_one_shape(itemsize, monkeypatch):
    monkeypatch.setattr(digests, "MIN_BLOCK_BYTES", 64)
    split = 0
    for shape in [*random_shapes(60), (0, 8), (512, 512)]:
        counts = np.zeros(shape, np.int64)
        lengths = set()
        for index in blocks(shape, itemsize):
            counts[index] += 1
            lengths.add(tuple(part.stop - part.start for part in index))
        assert (counts == 1).all(), shape
        assert len(lengths) == 1, shape
        split += math.prod(block_grid(shape, itemsize)) > 1
    assert split > 20


def test_shards_of_meshes_of_powers_of_two_hold_whole_blocks():
    grid = block_grid((4096, 4096), 4)
    assert all(count % 8 == 0 for count in grid)
    assert math.prod(grid) <= 2 * digests.MAX_BLOCKS


def test_every_flipped_bit_of_a_large_array_changes_the_digest():
    values = array((512, 64), "float32")
    wanted, seen = array_digest("w", values), set()
    for row, column in itertools.product((0, 255, 256, 511), (0, 31, 63)):
        changed = values.copy()
        changed.view(np.uint32)[row, column] ^= 1
        seen.add(array_digest("w", changed))
    assert wanted not in seen
    assert len(seen) == 12


def test_swapped_blocks_change_the_digest():
    values = array((8192,), "float32")
    index = list(blocks(values.shape, 4))
    assert len(index) > 1
    swapped = values.copy()
    swapped[index[0]], swapped[index[1]] = values[index[1]], values[index[0]]
    assert swapped.tobytes() != values.tobytes()
    assert array_digest("w", swapped) != array_digest("w", values)


def test_path_dtype_and_shape_are_part_of_an_arrays_digest():
    zeros = np.zeros((4, 4), np.float32)
    others = [("v", zeros), ("w", zeros.reshape(16)), ("w", zeros.view(np.int32))]
    digests = {array_digest("w", zeros), *(array_digest(*other) for other in others)}
    assert len(digests) == 4


def test_zero_and_minus_zero_differ():
    zeros = np.zeros(4, np.float32)
    assert array_digest("w", zeros) != array_digest("w", -zeros)


def test_only_the_four_digested_facts_matter_and_not_the_order_of_arrays():
    arrays = {"b": np.arange(3), "a": np.arange(4), "a/b": np.arange(2)}
    wanted = content_digest(arrays, progress=FACTS)
    reordered = dict(reversed(arrays.items()))
    assert content_digest(reordered, progress=FACTS | {"best_step": 3}) == wanted
    changed = {content_digest(arrays, progress=FACTS | {name: 7}) for name in FACTS}
    assert len(changed - {wanted}) == 4
    with pytest.raises(KeyError):
        content_digest(arrays, progress={"step": 1})


def test_the_digest_of_a_known_state_never_changes():
    arrays = {
        "params/w": (np.arange(8192) % 251).astype(np.float32).reshape(64, 128),
        "params/b": np.ones(3, ml_dtypes.bfloat16),
        "key": np.asarray([1, 2], np.uint32),
        "step": np.asarray(8, np.int32),
    }
    assert content_digest(arrays, progress=FACTS) == (
        "sha256:c92f5889ea161c69ff5e5b36813592e2dc32effaeb9d4ae116b3e45a52b23d81"
    )
