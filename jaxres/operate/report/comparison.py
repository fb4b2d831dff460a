"""The page of two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxres.operate.report import charts, page, tables, time_charts
from jaxres.operate.report.contents import Contents, first_difference
from jaxres.operate.report.markup import Markup, element, joined


def comparison_page(
    first: Contents, second: Contents, *, config_differences: Sequence[Mapping[str, Any]] | None
) -> str:
    """Returns the HTML page of two runs.

    `config_differences`: `key` and `values` of each key of the configs that differs; None: a config
    could not be read.
    """
    runs = (first, second)
    labels = [f"{n}: {run.sources.name or run.sources.root}" for n, run in enumerate(runs, 1)]
    classes = ("line", "run2")
    colors = [
        element("span", element("i", class_=f"box {class_}"), label)
        for class_, label in zip(classes, labels, strict=True)
    ]
    rows = [(row["key"], *map(str, row["values"])) for row in config_differences or ()]
    none = "a config could not be read" if config_differences is None else "no difference"
    details = [
        element("details", element("summary", label), page.run_sections(run))
        for label, run in zip(labels, runs, strict=True)
    ]
    return page.document(
        "comparison of two runs",
        element("h1", "Two runs"),
        *(element("p", f"{n}: {run.sources.root}") for n, run in enumerate(runs, 1)),
        element("p", element("b", difference_text(first, second))),
        element("h2", "Training"),
        element("p", *colors, class_="legend"),
        charts.comparison_chart(runs, "training loss"),
        element("h2", "Figures"),
        _figures(runs, labels),
        element("h2", "Where the time went"),
        element("div", *map(_time, labels, runs), class_="two"),
        time_charts.legend(),
        element("h2", "Configs"),
        tables.table(("key", *labels), rows) if rows else element("p", none),
        joined(details),
    )


def difference_text(first: Contents, second: Contents) -> str:
    """Returns where the losses differ first, as a sentence."""
    if not set(first.kept.step.tolist()) & set(second.kept.step.tolist()):
        return "The runs have no step in common."
    step = first_difference(first.kept, second.kept)
    if step is None:
        last = min(int(first.kept.step[-1]), int(second.kept.step[-1]))
        return f"The losses are equal in all steps that both runs have, up to step {last:,}."
    return f"The losses differ first at step {step:,}."


def _figures(runs: Sequence[Contents], labels: Sequence[str]) -> Markup:
    """Returns the main figures as a table: a row for each, a column for each run."""
    found = [dict(page.figures(run)) | {"guarantee": run.guarantee or "-"} for run in runs]
    names = dict.fromkeys(name for figures in found for name in figures)
    rows = [(name, *(figures.get(name, "-") for figures in found)) for name in names]
    return tables.table(("", *labels), rows)


def _time(label: str, run: Contents) -> Markup:
    return element("div", element("p", label), time_charts.waterfall(run.summary))
