"""The page of one run."""

from __future__ import annotations

from jaxres.operate.report import charts, number_text, tables, time_charts
from jaxres.operate.report.contents import Contents
from jaxres.operate.report.markup import Markup, element, joined
from jaxres.operate.report.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page loads nothing and runs no script."""


def run_page(contents: Contents) -> str:
    """Returns the HTML page of a run."""
    name = contents.sources.name or contents.sources.root
    return document(f"{name}: report", _heading(contents), run_sections(contents))


def document(title: str, *body: str) -> str:
    """Returns a whole HTML page."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(CSS)),
    )
    page = element("html", head, element("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def run_sections(contents: Contents) -> Markup:
    """Returns all sections about a run."""
    summary, events = contents.summary, contents.sources.launch_events
    sections = [
        _tiles(contents),
        _training(contents),
        element("h2", "Where the time went"),
        _not_recorded(contents),
        time_charts.waterfall(summary),
        time_charts.legend(),
        element("h2", "Timeline"),
        time_charts.timeline(contents),
        element("h2", "Incidents"),
        tables.incidents(contents),
        element("h2", "Checkpoints"),
        tables.saves_text(contents),
    ]
    if contents.saves:
        sections += [charts.save_chart(contents), _save_legend(), tables.saves(contents)]
    sections += [element("h2", "Speed"), charts.rate_chart(contents)]
    if events:
        sections += [element("h2", "VMs"), tables.vm_events(events)]
    sections += [element("h2", "Attempts"), tables.attempts(contents)]
    return joined(sections)


def _heading(contents: Contents) -> Markup:
    sources = contents.sources
    where = sources.root if sources.name else ""
    began = f"began {tables.utc(contents.summary.began)} UTC; "
    state = "it is running" if sources.is_alive else "it is not running"
    return element(
        "header",
        element("h1", sources.name or sources.root),
        element("p", where),
        element("p", began + state),
    )


def _tiles(contents: Contents) -> Markup:
    rows = figures(contents)
    tiles = [element("div", element("b", value), element("span", name)) for name, value in rows]
    guarantee = contents.guarantee or "unknown, since nothing was trained"
    return joined(
        [
            element("div", *tiles, class_="tiles"),
            element("p", element("b", "Guarantee: "), guarantee),
        ]
    )


def figures(contents: Contents) -> list[tuple[str, str]]:
    """Returns the main figures of a run: name and value."""
    summary, kept = contents.summary, contents.kept
    rows = [
        ("goodput", "-" if summary.goodput is None else f"{100 * summary.goodput:.1f} %"),
        ("wall time", number_text.duration(summary.seconds)),
        ("attempts", f"{summary.num_attempts:,}"),
        ("incidents", f"{len(summary.incidents):,}"),
    ]
    if len(kept):
        rows.append(("last step", f"{int(kept.step[-1]):,}"))
        rows.append(("last loss", f"{kept.loss[-1]:.4g}"))
        rows.append(("steps lost", f"{len(contents.lost):,}"))
    if contents.speeds:
        speed = contents.speeds[max(contents.speeds)]
        rows.append(("tokens/s, newest attempt", number_text.short(speed.tokens_per_second)))
        if speed.mfu is not None:
            rows.append(("MFU, newest attempt", f"{100 * speed.mfu:.1f} %"))
    if summary.device_hours is not None and summary.useful_device_hours is not None:
        useful = f"{summary.useful_device_hours:,.3g} of {summary.device_hours:,.3g}"
        rows.append(("device hours useful", useful))
    if summary.dollars is not None and summary.useful_dollars is not None:
        rows.append(("useful", f"${summary.useful_dollars:,.2f}"))
        rows.append(("lost", f"${summary.dollars - summary.useful_dollars:,.2f}"))
    return rows


def _training(contents: Contents) -> Markup:
    names = {
        "line": "steps of the run",
        "lost": "lost steps, trained again",
        "interrupted": "attempt ended",
        "rollback": "rolled back",
        "skip": "masked update",
    }
    colors = [element("span", element("i", class_=f"box {n}"), text) for n, text in names.items()]
    return joined(
        [
            element("h2", "Training"),
            element("p", *colors, class_="legend"),
            charts.metric_chart(contents, "loss", "training loss"),
            charts.metric_chart(contents, "grad_norm", "gradient norm"),
        ]
    )


def _save_legend() -> Markup:
    names = {"interrupted": "training waits", "waits": "written beside the training"}
    colors = [element("span", element("i", class_=f"box {n}"), text) for n, text in names.items()]
    return element("p", *colors, class_="legend")


def _not_recorded(contents: Contents) -> Markup:
    names = " and ".join(name.replace("_", " ") for name in contents.summary.not_recorded)
    if not names:
        return joined([])
    return element(
        "p", f"Not recorded, so in other classes: {names}. Only launch gce records them."
    )
