"""The page of `jaxres plan --plot`, from the plan's JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxres.operate.report import charts, number_text, time_charts
from jaxres.operate.report.charts import Curve
from jaxres.operate.report.markup import Markup, element, joined
from jaxres.operate.report.page import document

Found = Mapping[str, Any]
COLORS = {
    "useful": "useful",
    "saves": "waits",
    "trained again": "lost",
    "restarts": "interrupted",
}
"""Share of the time -> its color."""


def plan_page(found: Found, *, by_interval: Sequence[Found], by_gpus: Sequence[Found]) -> str:
    """Returns the HTML page of a plan.

    Args:
      found: the plan, as `--json` has it.
      by_interval: goodput (`mean`, `p5`, `p95`) by `seconds` between saves.
      by_gpus: the same by `num_gpus`.
    """
    fleet = found["fleet"]
    title = f"{fleet['num_gpus']:,} GPUs on {fleet['num_hosts']:,} hosts"
    hours = f"{fleet['hours']:,.0f} hours, state of {fleet['state_bytes'] / 1e9:,.1f} GB"
    heading = element("header", element("h1", f"Plan: {title}"), element("p", hours))
    interval = found["saves"]["interval_seconds"]
    sections = [
        _tiles(found),
        element("h2", "Where the time goes"),
        _shares(found),
        element("h2", "What each measure brings"),
        _measures(found["measures"]),
        element("h2", "How often to save"),
        element("p", f"This plan: every {number_text.duration(interval)}."),
        _curves(by_interval, "seconds", "goodput in %, by seconds between saves"),
        element("h2", "How it grows with the fleet"),
        _curves(by_gpus, "num_gpus", "goodput in %, by GPUs"),
        element("p", "The middle curve is the mean of simulated runs, the others p5 and p95."),
        element("h2", "Assumed"),
        _assumed(found["assumed"]),
    ]
    return document(f"plan: {title}", heading, joined(sections))


def _tiles(found: Found) -> Markup:
    goodput, failures = found["goodput"], found["failures"]
    rows = [
        (_percent(goodput["mean"]), "goodput"),
        (f"{100 * goodput['p5']:.2f} to {_percent(goodput['p95'])}", "p5 to p95"),
        (f"{failures['expected']:,.1f}", "failures expected"),
        (number_text.duration(found["saves"]["interval_seconds"]), "between saves"),
        (f"{goodput['lost_hours']:,.1f} h", "lost"),
        (f"${found['measures'][0]['dollars']:,.0f}", "for the GPUs"),
    ]
    if preempted := failures["preemptions_expected"]:
        rows.insert(3, (f"{preempted:,.1f}", "preemptions expected"))
    tiles = [element("div", element("b", value), element("span", name)) for value, name in rows]
    return element("div", *tiles, class_="tiles")


def _shares(found: Found) -> Markup:
    seconds, at = 3600 * found["fleet"]["hours"], 0.0
    rows: list[Markup] = []
    for name, share in found["goodput"]["shares"].items():
        own = share * seconds
        rows.append(time_charts.bar_row(name, COLORS.get(name, "unknown"), at, own, seconds))
        at += own
    rows.append(time_charts.bar_row("wall time", "whole", 0.0, seconds, seconds))
    return element("div", *rows, class_="waterfall")


def _measures(measures: Sequence[Found]) -> Markup:
    head = element("tr", *(element("th", name) for name in _HEADS))
    rows = [element("tr", *map(_cell, _measure_cells(one))) for one in measures]
    table = element("table", head, *rows, class_="numbers")
    return element("div", table, class_="scroll")


_HEADS = ("", "goodput", "hours lost", "dollars", "$ a useful GPU hour")


def _measure_cells(one: Found) -> Iterator[str]:
    yield one["name"]
    yield _percent(one["goodput"])
    yield f"{one['lost_hours']:,.1f}"
    yield f"{one['dollars']:,.0f}"
    yield f"{one['dollars_per_useful_hour']:.3f}"


def _cell(text: str) -> Markup:
    return element("td", text)


def _curves(points: Sequence[Found], name: str, label: str) -> Markup:
    x = np.array([point[name] for point in points], np.float64)
    curves = [
        Curve(x, 100 * np.array([point[kind] for point in points], np.float64), class_)
        for kind, class_ in (("p5", "line run2"), ("p95", "line run2"), ("mean", "line"))
    ]
    return charts.line_chart(curves, label)


def _assumed(assumed: Sequence[Found]) -> Markup:
    if not assumed:
        return element("p", "Nothing: all values were given or measured.")
    head = element("tr", *(element("th", name) for name in ("flag", "value", "source")))
    rows = [
        element(
            "tr",
            _cell(one["flag"]),
            _cell(f"{one['value']:,.10g} {one['unit']}"),
            _cell(one["source"]),
        )
        for one in assumed
    ]
    return element("div", element("table", head, *rows), class_="scroll")


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
