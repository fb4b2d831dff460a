"""A chart of many points has those that a person would see in a chart of all of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from jaxres.goodput.intervals import Activity, ActivityInterval
from jaxres.operate.report import curves, time_charts
from jaxres.operate.report.charts import Scale, fit


@pytest.mark.parametrize("seed", range(5))
def test_each_column_keeps_its_smallest_and_its_largest_value(seed: int):
    rng = np.random.default_rng(seed)
    x = np.cumsum(rng.integers(1, 4, 20_000))
    y = np.where(rng.random(20_000) < 0.1, np.nan, rng.standard_normal(20_000))
    index = curves.thin(x, y, columns=50)
    finite = np.isfinite(y)
    column = curves.column_of(x, float(x[finite][0]), float(x[finite][-1]), columns=50)
    assert len(index) <= 100
    assert (np.diff(index) > 0).all()
    for number in range(50):
        own, kept = y[(column == number) & finite], y[index[column[index] == number]]
        assert (kept.min(), kept.max()) == (own.min(), own.max())


def test_a_single_spike_among_a_million_points_stays():
    y = np.zeros(1_000_000)
    y[123_456] = 7.0
    assert 123_456 in curves.thin(np.arange(1_000_000), y)


def test_few_points_all_stay():
    y = np.array([1.0, np.nan, 2.0])
    assert curves.thin(np.arange(3), y).tolist() == [0, 2]


def test_shares_of_columns_sum_up_to_the_seconds_of_each_color():
    rng = np.random.default_rng(0)
    edges = np.concatenate([[0.0], np.cumsum(rng.exponential(1.0, 5000))])
    kinds = list(Activity)
    intervals = [
        ActivityInterval(kinds[n % len(kinds)], float(a), float(b), 1)
        for n, (a, b) in enumerate(pairwise(edges))
    ]
    total = float(edges[-1])
    shares = time_charts.column_shares(intervals, total)
    assert shares.sum(axis=0) == pytest.approx(np.ones(curves.COLUMNS))
    for name, row in zip(time_charts.GROUPS, shares, strict=True):
        own = sum(i.seconds for i in intervals if time_charts.GROUP_OF[i.activity] == name)
        assert row.sum() * total / curves.COLUMNS == pytest.approx(own)


def test_every_class_of_time_has_a_color():
    assert set(time_charts.GROUP_OF) == set(Activity)


def test_ticks_are_round_and_on_the_axis():
    assert fit(np.array([1.0, 9.0])).ticks() == [2.0, 4.0, 6.0, 8.0]
    assert fit(np.array([0.01, np.nan, 900.0])).is_log
    assert fit(np.array([2.0, 2.0])).share(np.array([2.0])) == pytest.approx([0.5])
    assert Scale(1.0, 1e6, is_log=True).ticks() == [10.0**n for n in range(7)]
