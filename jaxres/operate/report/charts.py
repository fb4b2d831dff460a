"""Charts over training steps: curves with interruptions, and points.

The drawing area is stretched to the width of the page; labels are text beside it, which keeps its
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxres.operate.report import curves, number_text
from jaxres.operate.report.contents import Contents, InterruptionMark
from jaxres.operate.report.curves import COLUMNS
from jaxres.operate.report.markup import Markup, element, joined, number
from jaxres.runlog import skip_causes
from jaxres.runlog.metrics_columns import MetricsColumns
from jaxres.runlog.skip_causes import SkipCause

T = TypeVar("T")
HEIGHT = 200
NOTHING = "M0 0"
"""A path that draws nothing."""
MAX_LOST_CURVES = 300
"""Largest number of lost segments that have a curve each; if there are more, they share one."""
NUM_RATES = 200
"""Columns of the chart of the throughput, each with its mean."""
LOG_RATIO = 50.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
LARGEST = 1e150
"""Values beyond are drawn at the edge of the axis: a difference of two would be infinite."""
MARGIN = 0.05
"""Free share of the axis on each side of the values."""


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, the ends of the axis, not of the values."""

    low: float
    high: float
    is_log: bool = False

    def share(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns where values lie on the axis: 0 at its begin, 1 at its end."""
        if self.is_log:
            values, low, high = np.log(values), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return np.clip((values - low) / (high - low), 0.0, 1.0)

    def ticks(self, about: int = 4) -> list[float]:
        """Returns round values on the axis, ascending."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if len(powers) <= 3 else (1,)
            found = [digit * 10.0**power for power in powers for digit in digits]
        else:
            step = _round_step((self.high - self.low) / about)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            found = [n * step for n in range(first, last + 1)]
        return [value for value in found if self.low <= value <= self.high]


@dataclass(frozen=True)
class Curve:
    """Points of one curve, ascending by step."""

    steps: NDArray[Any]
    values: NDArray[np.float64]
    class_: str


def metric_chart(contents: Contents, name: str, label: str) -> Markup:
    """Returns the chart of a metric: kept steps, lost steps, interruptions."""
    kept, lost = contents.kept, contents.lost
    curve = Curve(kept.step, getattr(kept, name), "line")
    lost_curves = list(_lost_curves(lost, name))
    steps = _step_scale([kept.step, lost.step, _skipped_steps(contents)])
    values = np.concatenate([getattr(kept, name), getattr(lost, name)])
    if steps is None or not np.isfinite(values).any():
        return _empty(label)
    scale = fit(values)
    drawn = [
        *_lost_bands(lost, steps),
        *_interruption_marks(contents.interruptions, steps),
        *(_path(one, steps, scale) for one in lost_curves),
        _path(curve, steps, scale),
        *_skip_marks(_skipped_steps(contents), contents.skip_causes(), steps),
    ]
    return chart(label, drawn, steps=steps, values=scale)


def comparison_chart(runs: Sequence[Contents], label: str) -> Markup:
    """Returns the losses of several runs in one chart."""
    found = [run.kept for run in runs]
    steps = _step_scale([lines.step for lines in found])
    losses = np.concatenate([lines.loss for lines in found])
    if steps is None or not np.isfinite(losses).any():
        return _empty(label)
    scale = fit(losses)
    drawn = [
        _path(Curve(lines.step, lines.loss, f"line run{index}"), steps, scale)
        for index, lines in enumerate(found, start=1)
    ]
    return chart(label, drawn, steps=steps, values=scale)


def line_chart(lines: Sequence[Curve], label: str) -> Markup:
    """Returns a chart of curves over any axis; each has at least one point that is finite."""
    across = fit(np.concatenate([curve.steps for curve in lines]))
    values = fit(np.concatenate([curve.values for curve in lines]))
    drawn = [_path(curve, across, values) for curve in lines]
    return chart(label, drawn, steps=across, values=values)


def rate_chart(contents: Contents) -> Markup:
    """Returns the chart of tokens per second."""
    lines = contents.kept
    tokens = np.diff(lines.tokens).astype(np.float64)
    if len(lines) < 3 or not (tokens > 0).any():
        return _empty("tokens per second")
    steps, columns = lines.step[1:], min(NUM_RATES, len(lines) // 2)
    seconds = curves.sums(steps, lines.step_seconds[1:], columns=columns)
    tokens = curves.sums(steps, tokens, columns=columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = tokens / seconds
    centers = np.linspace(float(steps[0]), float(steps[-1]), 2 * columns + 1)[1::2]
    scale = _step_scale([lines.step])
    good = np.isfinite(rates)
    if scale is None or not good.any():
        return _empty("tokens per second")
    values = from_zero(float(rates[good].max()) * 1.05)
    path = _path(Curve(centers[good], rates[good], "line"), scale, values)
    return chart("tokens per second", [path], steps=scale, values=values)


def save_chart(contents: Contents) -> Markup:
    """Returns the chart of the seconds of saves: the stall of training, and the write beside it."""
    saves = sorted(contents.saves, key=lambda save: save.step)
    steps = np.array([save.step for save in saves], np.int64)
    series = {
        "dots write": [save.write_seconds for save in saves],
        "dots stall": [save.stall_seconds for save in saves],
    }
    found = {name: np.array(values, np.float64) for name, values in series.items()}
    finite = np.concatenate([values[np.isfinite(values)] for values in found.values()])
    scale = _step_scale([steps])
    if scale is None or not len(finite):
        return joined([])
    values = from_zero(float(finite.max()) * 1.05)
    drawn = [_dots(Curve(steps, own, name), scale, values) for name, own in found.items()]
    return chart("seconds of a save", drawn, steps=scale, values=values)


def chart(label: str, drawn: Sequence[str], *, steps: Scale, values: Scale) -> Markup:
    """Returns a figure with axes around a drawing of COLUMNS x HEIGHT units."""
    y_ticks = [(tick, 1 - float(values.share(np.array([tick]))[0])) for tick in values.ticks()]
    x_ticks = [(tick, float(steps.share(np.array([tick]))[0])) for tick in steps.ticks(5)]
    grid = "".join(f"M0 {number(at * HEIGHT)}h{COLUMNS}" for _, at in y_ticks)
    svg = element(
        "svg",
        element("path", d=grid or NOTHING, class_="grid"),
        *drawn,
        viewBox=f"0 0 {COLUMNS} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    y_labels = [_label(number_text.short(tick), "top", at) for tick, at in y_ticks]
    x_labels = [_label(_step_text(tick), "left", at) for tick, at in x_ticks]
    scale = " (logarithmic)" if values.is_log else ""
    return element(
        "figure",
        element("figcaption", label + scale),
        element(
            "div",
            element("div", *y_labels, class_="y"),
            svg,
            element("div", *x_labels, class_="x"),
            class_="plot",
        ),
    )


def _label(text: str, side: str, share: float) -> Markup:
    return element("span", text, style=f"{side}:{number(100 * share)}%")


def _step_text(step: float) -> str:
    return f"{step:,.0f}" if step < 1e6 else number_text.short(step)


def _empty(label: str) -> Markup:
    return element("figure", element("figcaption", label), element("p", "nothing recorded"))


def _step_scale(steps: Sequence[NDArray[np.int64]]) -> Scale | None:
    """Returns the axis of all steps; None: there are none."""
    found = [own for own in steps if len(own)]
    if not found:
        return None
    low, high = min(int(own.min()) for own in found), max(int(own.max()) for own in found)
    return Scale(float(low), float(high)) if high > low else Scale(low - 1.0, high + 1.0)


def _path(curve: Curve, steps: Scale, values: Scale) -> Markup:
    index = curves.thin(curve.steps, curve.values)
    points = _points(curve.steps[index], curve.values[index], steps, values)
    path = "M" + "L".join(points) if len(points) != 1 else f"M{points[0]}h.1"
    return element("path", d=path if points else NOTHING, class_=curve.class_)


def _dots(curve: Curve, steps: Scale, values: Scale) -> Markup:
    index = curves.thin(curve.steps, curve.values)
    points = _points(curve.steps[index], curve.values[index], steps, values)
    d = "".join(f"M{point}h.01" for point in points)
    return element("path", d=d or NOTHING, class_=curve.class_)


def _points(x: NDArray[np.int64], y: NDArray[np.float64], steps: Scale, values: Scale) -> list[str]:
    across = steps.share(x.astype(np.float64)) * COLUMNS
    down = (1 - values.share(y)) * HEIGHT
    return [f"{a:.1f} {b:.1f}" for a, b in zip(across.tolist(), down.tolist(), strict=True)]


def _lost_curves(lost: MetricsColumns, name: str) -> Iterator[Curve]:
    """Yields a curve for each segment, or one for all if there are too many."""
    segments = lost.by_segment()
    if len(segments) > MAX_LOST_CURVES:
        order = np.argsort(lost.step, kind="stable")
        yield Curve(lost.step[order], getattr(lost, name)[order], "lost")
        return
    for index in segments.values():
        own = lost.take(index)
        yield Curve(own.step, getattr(own, name), "lost")


def _lost_bands(lost: MetricsColumns, steps: Scale) -> Iterator[Markup]:
    """Yields a band behind each lost segment, or behind each column if there are too many.

    A step that is trained again has the same loss bit for bit, so its curve alone would be hidden.
    """
    found = [lost.step[own] for own in lost.by_segment().values()]
    ranges = [(int(own.min()), int(own.max())) for own in found]
    places = [steps.share(np.array(pair, np.float64)) * COLUMNS for pair in ranges]
    titles = [f"lost: steps {first:,} to {last:,}" for first, last in ranges]
    if len(ranges) > MAX_LOST_CURVES:
        columns = np.unique(curves.column_of(steps.share(lost.step.astype(np.float64)), 0.0, 1.0))
        places, titles = [np.array([column, column + 1]) for column in columns], []
    for index, (start, end) in enumerate(places):
        title = [element("title", text) for text in titles[index : index + 1]]
        size = {"x": float(start), "width": max(float(end - start), 1.0)}
        yield element("rect", *title, **size, y=0, height=HEIGHT, class_="lost band")


def _skipped_steps(contents: Contents) -> NDArray[np.int64]:
    return contents.kept.step[contents.kept.skipped]


def _skip_marks(
    skipped: NDArray[np.int64], causes: Mapping[int, SkipCause | None], steps: Scale
) -> Iterator[Markup]:
    """Yields a point at the bottom for the masked steps of each pixel column."""
    for at, own in _by_column(skipped.tolist(), steps, int):
        first, last = f"{own[0]:,}", f"{own[-1]:,}"
        title = f"step {first}: update masked ({skip_causes.text(causes.get(own[0]))})"
        if len(own) > 1:
            of_each = skip_causes.counts_text(map(causes.get, own))
            title = f"{len(own):,} masked updates, steps {first} to {last} ({of_each})"
        d = f"M{number(at)} {HEIGHT - 6}h.01"
        yield element("path", element("title", title), d=d, class_="dots skip")


def _interruption_marks(
    interruptions: Sequence[InterruptionMark], steps: Scale
) -> Iterator[Markup]:
    """Yields a line for the interruptions of each pixel column."""
    ordered = sorted(interruptions, key=lambda one: one.step)
    for at, own in _by_column(ordered, steps, lambda one: one.step):
        class_ = "mark rollback" if all(one.is_rollback for one in own) else "mark restart"
        title = "; ".join(map(interruption_text, own[:5]))
        if len(own) > 5:
            title += f"; and {len(own) - 5:,} more"
        d = f"M{number(at)} 0v{HEIGHT}"
        yield element("path", element("title", title), d=d, class_=class_)


def interruption_text(one: InterruptionMark) -> str:
    """Returns an interruption as text for people.

    >>> interruption_text(InterruptionMark(2, "killed", 33, 20))
    'attempt 2: killed after step 33, resumed at step 20'
    """
    return f"attempt {one.attempt}: {one.cause} {one.steps_text}"


def _by_column(
    items: Sequence[T], steps: Scale, step_of: Callable[[T], int]
) -> Iterator[tuple[float, Sequence[T]]]:
    """Yields the items of each pixel column with the place of the first one."""
    if not len(items):
        return
    places = steps.share(np.array([step_of(item) for item in items], np.float64)) * COLUMNS
    columns = curves.column_of(places, 0.0, float(COLUMNS))
    begins = np.flatnonzero(np.diff(columns, prepend=-1)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(items)], strict=True):
        yield float(places[begin]), items[begin:end]


def fit(values: NDArray[np.float64]) -> Scale:
    """Returns an axis for values, of which the finite ones count; at least one is."""
    finite = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    low, high = float(finite.min()), float(finite.max())
    if low > 0 and high / low >= LOG_RATIO:
        low, high = max(low, 1 / LARGEST), max(high, 1 / LARGEST * LOG_RATIO)
        room = high**MARGIN / low**MARGIN
        return Scale(low / room, high * room, is_log=True)
    room = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    return Scale(low - room, high + room)


def from_zero(high: float) -> Scale:
    """Returns an axis from 0."""
    return Scale(0.0, high or 1.0)


def _round_step(step: float) -> float:
    """Returns 1, 2 or 5 times a power of 10, near `step`.

    >>> _round_step(0.03), _round_step(7)
    (0.05, 5.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next((n * power for n in (1, 2, 5) if n * power >= step * 0.7), 10 * power)
