import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from jaxres.data.tokens.packing import best_fit, plan_rows

SEQ_LENS = (1, 2, 7, 64)


def offsets(seed, *, count=60, longest=90):
    lengths = np.random.default_rng(seed).integers(0, longest, size=count)
    return np.concatenate([[0], np.cumsum(lengths)])


def planned(bounds, packing, *, seq_len, start=0, stop=None):
    stop = int(bounds[-1]) if stop is None else stop
    return plan_rows(bounds, start=start, stop=stop, seq_len=seq_len, packing=packing)


def rows_of(plan):
    """Returns each row's pieces, as (first token, number of tokens)."""
    pieces = list(zip(plan.starts_P.tolist(), plan.lengths_P.tolist(), strict=True))
    return [pieces[first:end] for first, end in pairwise(plan.begins_R.tolist())]


def naive_best_fit(lengths, width):
    """Returns the free space of each row; one piece is placed at a time."""
    free = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= length]
        if not fitting:
            free, fitting = [*free, width], [len(free)]
        best = min(fitting, key=lambda i: free[i])
        free[best] -= length
    return sorted(free)


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("seed", range(8))
def test_every_target_of_every_document_appears_once_and_no_row_overflows(seed, seq_len, packing):
    bounds = offsets(seed)
    start, stop = int(bounds[3]) + seed % 2, int(bounds[-2])  # Also a part that cuts a document.
    rows = rows_of(planned(bounds, packing, seq_len=seq_len, start=start, stop=stop))
    targets = [t for row in rows for first, n in row for t in range(first + 1, first + n)]
    inside = np.arange(start, stop)
    assert sorted(targets) == inside[(inside > start) & ~np.isin(inside, bounds)].tolist()
    owners = np.searchsorted(bounds, np.arange(bounds[-1]), side="right")
    for row in rows:
        assert 0 < sum(n for _, n in row) <= seq_len + 1
        assert row == sorted(row), "the pieces of a row are in the order of the documents"
        assert all(n > 1 and owners[first] == owners[first + n - 1] for first, n in row)
        assert packing == "best_fit" or len(row) == 1
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("seed", range(8))
def test_a_document_that_fits_in_a_row_is_not_cut_and_others_lose_no_full_row(seed, seq_len):
    bounds = offsets(seed)
    plan = planned(bounds, "best_fit", seq_len=seq_len)
    pieces = sorted(zip(plan.starts_P.tolist(), plan.lengths_P.tolist(), strict=True))
    for begin, end in pairwise(bounds.tolist()):
        own = [piece for piece in pieces if begin <= piece[0] < end]
        if 2 <= end - begin <= seq_len + 1:
            assert own == [(begin, end - begin)], "a document is cut where it need not be"
        longer = [n for _, n in own[:-1]]
        assert longer == [seq_len + 1] * len(longer), "a document is cut where it need not be"


@pytest.mark.parametrize("seq_len", SEQ_LENS)
@pytest.mark.parametrize("seed", range(8))
def test_best_fit_equals_a_loop_that_places_one_piece_at_a_time(seed, seq_len):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, seq_len + 2, size=300)
    rows = best_fit(lengths, width=seq_len + 1)
    assert rows.max() + 1 == len(np.unique(rows))
    free = seq_len + 1 - np.bincount(rows, weights=lengths).astype(int)
    assert sorted(free.tolist()) == naive_best_fit(lengths.tolist(), seq_len + 1)


def test_best_fit_pads_less_than_pad_and_both_shares_are_counted():
    bounds = offsets(0, count=500)
    shares = {}
    for packing in ("best_fit", "pad"):
        plan = planned(bounds, packing, seq_len=128)
        tokens = [min(sum(n for _, n in row), 128) for row in rows_of(plan)]
        shares[packing] = plan.padding
        assert plan.padding == pytest.approx(1 - sum(tokens) / (128 * len(tokens)))
    assert shares["best_fit"] < 0.02 < 0.5 < shares["pad"]


def test_a_part_without_targets_has_no_rows():
    for bounds in ([0, 1, 2, 2], [0, 0], [0]):
        for packing in ("best_fit", "pad"):
            plan = planned(np.array(bounds), packing, seq_len=4)
            assert (len(plan), plan.padding, len(plan.starts_P)) == (0, 0.0, 0)


PRINT = """
import zlib
import numpy as np
from jaxres.data.tokens.packing import plan_rows
lengths = np.random.default_rng(3).integers(0, 90, size=2000)
bounds = np.concatenate([[0], np.cumsum(lengths)])
plan = plan_rows(bounds, start=0, stop=int(bounds[-1]), seq_len=64, packing="best_fit")
print([zlib.crc32(x.tobytes()) for x in (plan.begins_R, plan.starts_P, plan.lengths_P)])
"""


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_process_or_its_hash_seed():
    printed = {
        subprocess.run(
            [sys.executable, "-c", PRINT],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(printed) == 1
