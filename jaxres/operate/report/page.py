"""The page of one run."""

from __future__ import annotations

from jaxres.operate.report import charts, number_text, tables, time_charts
from jaxres.operate.report.contents import Contents
from jaxres.operate.report.markup import Markup, element, joined

DOCTYPE = b"<!DOCTYPE html>"
"""Beginning of every page."""


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
    return f"{DOCTYPE.decode()}\n{page}\n"


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


CSS = """
:root{color-scheme:light dark;--page:#fff;--text:#1b1f24;--soft:#5c6570;--rule:#dde1e6;
--card:#f5f7f9;
--useful:#1f8a63;--lost:#c8372d;--waits:#2f74c0;--setup:#7e5bb5;--interrupted:#d08a1d;
--unknown:#959ca5;
--line:#1d5fae;--second:#c2571a}
@media (prefers-color-scheme:dark){:root{--page:#12161b;--text:#e4e8ec;--soft:#98a2ae;
--rule:#2c343d;
--card:#1a2027;--useful:#3fb98a;--lost:#ef6a5f;--waits:#5ea2ea;--setup:#a98be0;
--interrupted:#e5aa4a;
--unknown:#7b848e;--line:#74b3f5;--second:#f0925a}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 20px 48px;max-width:1080px;background:var(--page);
color:var(--text);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px;border-top:1px solid var(--rule);padding-top:14px}
p{margin:6px 0;color:var(--soft);overflow-wrap:anywhere}p:empty{display:none}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;
margin:18px 0}
.tiles>div{background:var(--card);border-radius:8px;padding:9px 12px}
.tiles b{display:block;font-size:19px;font-weight:600;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:13px}
figure{margin:14px 0 20px}figcaption{font-weight:600;font-size:14px;margin-bottom:6px}
.plot{position:relative;padding-left:50px}
.plot svg{display:block;width:100%;height:200px;overflow:visible}
.y span{position:absolute;right:8px;transform:translateY(-50%)}
.y{position:absolute;left:0;top:0;width:50px;height:200px}
.x{position:relative;height:20px;margin-top:4px}
.x span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.x span:first-child[style="left:0%"]{transform:none}
.x span:last-child[style="left:100%"]{transform:translateX(-100%)}
.x,.y{font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums}
path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--rule)}
.line{stroke:var(--line);stroke-width:1.5;stroke-linejoin:round}.run2{stroke:var(--second);opacity:.75}
.lost{stroke:var(--lost)}path.lost{stroke-width:1.5;opacity:.8}
.mark{stroke:var(--interrupted);stroke-width:1.5;stroke-dasharray:4 3}
.rollback{stroke:var(--setup)}
.dots{stroke-width:6;stroke-linecap:round;stroke:var(--waits)}path.dots{opacity:1;stroke-width:6}
.dots.stall,.dots.skip,.dots.interrupted{stroke:var(--interrupted)}.dots.skip{stroke:var(--lost)}
.dots.lost{stroke:var(--lost)}.dots.useful{stroke:var(--useful)}
rect.useful,path.hosts{fill:var(--useful)}rect.lost{fill:var(--lost)}rect.waits{fill:var(--waits)}
rect.set-up{fill:var(--setup)}rect.interrupted{fill:var(--interrupted)}
rect.unknown{fill:var(--unknown)}
rect.band{opacity:.16}rect.whole{fill:var(--soft)}rect{stroke:none;shape-rendering:crispEdges}
rect.attempt{stroke:var(--page);stroke-width:1;vector-effect:non-scaling-stroke}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px}
.legend span{white-space:nowrap}
.box{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.box.useful{background:var(--useful)}.box.lost{background:var(--lost)}
.box.waits{background:var(--waits)}
.box.set-up{background:var(--setup)}.box.interrupted{background:var(--interrupted)}
.box.unknown{background:var(--unknown)}.box.line{background:var(--line)}
.box.run2{background:var(--second)}
.box.rollback{background:var(--setup)}.box.skip{background:var(--lost);border-radius:50%}
.waterfall>div{display:grid;grid-template-columns:104px 1fr 104px 80px;gap:10px;align-items:center;
padding:2px 0;font-variant-numeric:tabular-nums}
.waterfall>div:last-child{border-top:1px solid var(--rule);margin-top:4px;padding-top:6px;
font-weight:600}
.waterfall svg{width:100%;height:16px;background:var(--card);border-radius:3px}
.waterfall span:nth-child(n+3){text-align:right;white-space:nowrap}
.lane{display:grid;grid-template-columns:104px 1fr;gap:10px;align-items:center;margin:5px 0}
.lane>span{color:var(--soft);font-size:13px}
.lane svg{width:100%;height:24px;display:block;background:var(--card)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;width:100%}
th{font-weight:600;color:var(--soft);text-align:left;white-space:nowrap}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
.numbers td{white-space:nowrap}
small{display:block;color:var(--soft);font-size:12.5px;overflow-wrap:anywhere}
.incidents td:nth-child(1),.incidents td:nth-child(6){white-space:nowrap}
.incidents td:nth-child(3){min-width:170px}.incidents td:nth-child(5){min-width:260px}
.parts{width:100%;height:9px;display:block;margin-top:5px;background:var(--card)}
.two{display:grid;grid-template-columns:1fr 1fr;gap:28px}
.two .waterfall>div{grid-template-columns:92px 1fr 96px}
.two .waterfall span:nth-child(4){display:none}
details{margin:18px 0;border-top:1px solid var(--rule)}
summary{cursor:pointer;font-size:17px;font-weight:600;padding:14px 0}
@media (max-width:640px){body{padding:16px 12px 40px;font-size:14px}
.tiles{grid-template-columns:1fr 1fr}.tiles b{font-size:18px}
.plot{padding-left:40px}.y{width:40px}.plot .x span:nth-child(even){display:none}
.waterfall>div,.two .waterfall>div{grid-template-columns:84px 1fr 96px;gap:7px}
.waterfall span:nth-child(4){display:none}
.lane{grid-template-columns:1fr;gap:2px}.lane .x span:nth-child(even){display:none}
.two{grid-template-columns:1fr}}
"""
"""The style sheet: light or dark as the system asks for, also on a phone."""
