"""Charts over time: the waterfall of the classes, the timeline, the parts of a recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from jaxres.goodput.intervals import Activity, ActivityInterval
from jaxres.goodput.run_timeline import AttemptTime, RunTimeline
from jaxres.goodput.summary import CostlyInterruption, Summary
from jaxres.operate.report import contents as c
from jaxres.operate.report import curves, number_text
from jaxres.operate.report.contents import Contents
from jaxres.operate.report.curves import COLUMNS
from jaxres.operate.report.markup import Markup, element, number
from jaxres.runlog.launch_events import LaunchEvent

LANE = 24
"""Height of a lane of the timeline."""
LEAST_SECONDS = 1e-3
"""Time below which a class has no bar: a rest of rounding."""
MAX_RECTS = 600
"""Largest number of intervals, or attempts, that are drawn one by one."""
GROUPS: Mapping[str, Sequence[Activity]] = {
    "useful": (Activity.PRODUCTIVE,),
    "lost": (Activity.REPLAYED, Activity.SKIPPED),
    "waits": (Activity.DATA_WAIT, Activity.SAVE_STALL, Activity.EVALUATION, Activity.HOOK),
    "set-up": (Activity.START_UP, Activity.COMPILE, Activity.RESTORE),
    "interrupted": (
        Activity.DETECTION,
        Activity.CAPACITY_WAIT,
        Activity.VM_BOOT,
        Activity.DOWN,
    ),
    "unknown": (Activity.UNKNOWN,),
}
"""Classes of time that have one color, and their name in the legend."""
GROUP_OF = {activity: name for name, group in GROUPS.items() for activity in group}
VM_EVENTS = {
    "vm_lost": "lost",
    "request_failed": "interrupted",
    "shrunk": "interrupted",
    "spare_lost": "interrupted",
    "vms_created": "useful",
    "grown": "useful",
    "moved": "useful",
}
"""Events of the launcher that the timeline shows, with their color."""


def legend(names: Sequence[str] = tuple(GROUPS)) -> Markup:
    """Returns the colors with their names."""
    entries = [element("span", element("i", class_=f"box {name}"), name) for name in names]
    return element("p", *entries, class_="legend")


def waterfall(summary: Summary) -> Markup:
    """Returns a bar for each class that has time, each from the end of the one before."""
    rows: list[Markup] = []
    at = 0.0
    for activity in (activity for group in GROUPS.values() for activity in group):
        seconds = summary.by_activity[activity]
        if seconds < LEAST_SECONDS:
            continue
        name = activity.replace("_", " ")
        rows.append(bar_row(name, GROUP_OF[activity], at, seconds, summary.seconds))
        at += seconds
    rows.append(bar_row("wall time", "whole", 0.0, summary.seconds, summary.seconds))
    return element("div", *rows, class_="waterfall")


def bar_row(name: str, class_: str, start: float, seconds: float, total: float) -> Markup:
    """Returns a row of a waterfall: name, bar from its start on, duration, share of the total."""
    share = 100 / (total or 1.0)
    bar = element("rect", x=start * share, width=seconds * share, y=0, height=1, class_=class_)
    return element(
        "div",
        element("span", name),
        element("svg", bar, viewBox="0 0 100 1", preserveAspectRatio="none", aria_hidden="true"),
        element("span", number_text.duration(seconds), title=f"{seconds:,.3f} s"),
        element("span", f"{seconds * share:.2f} %"),
    )


def timeline(contents: Contents) -> Markup:
    """Returns lanes over the time of the run: classes, attempts, hosts, and events of VMs."""
    whole = contents.timeline
    seconds = whole.seconds
    if not seconds:
        return element("p", "no time yet")
    scale = COLUMNS / seconds
    lanes = [
        ("time", _class_rects(whole.intervals, seconds)),
        ("attempts", list(_attempt_rects(whole.attempts, scale))),
    ]
    most = max(attempt.num_hosts for attempt in whole.attempts)
    if most > 1:
        lanes.append((f"hosts (most: {most})", list(_host_rects(whole.attempts, scale, most))))
    if events := contents.sources.launch_events:
        lanes.append(("VMs", list(_vm_dots(events, whole))))
    rows = [
        element("div", element("span", name), _lane(drawn, name), class_="lane")
        for name, drawn in lanes
    ]
    ticks = _time_ticks(seconds)
    labels = [element("span", text, style=f"left:{number(100 * at)}%") for at, text in ticks]
    axis = element("div", element("span", ""), element("div", *labels, class_="x"), class_="lane")
    return element("div", *rows, axis, class_="timeline")


def recovery_bar(incident: CostlyInterruption, longest: float) -> Markup:
    """Returns the parts of an incident's time as one bar, as long as its share of the longest."""
    parts = recovery_parts(incident)
    rects: list[Markup] = []
    at = 0.0
    for name, (seconds, class_) in parts.items():
        width = 100 * seconds / (longest or 1.0)
        title = element("title", f"{name} {number_text.duration(seconds)}")
        rects.append(element("rect", title, x=at, width=width, y=0, height=1, class_=class_))
        at += width
    return element("svg", *rects, viewBox="0 0 100 1", preserveAspectRatio="none", class_="parts")


def recovery_parts(incident: CostlyInterruption) -> dict[str, tuple[float, str]]:
    """Returns name -> seconds and color of the parts of an incident that took time."""
    found = {
        "steps lost": (incident.replayed_seconds, "lost"),
        "detection": (incident.detection_seconds, "interrupted"),
        "capacity wait": (incident.capacity_wait_seconds, "interrupted"),
        "VM boot": (incident.vm_boot_seconds, "interrupted"),
        "down": (incident.down_seconds, "interrupted"),
    }
    setup = {n.replace("_", " "): (s, "set-up") for n, s in incident.setup_seconds.items()}
    return {name: part for name, part in (found | setup).items() if part[0] > 0}


def _lane(drawn: Sequence[Markup], label: str) -> Markup:
    view = f"0 0 {COLUMNS} {LANE}"
    return element(
        "svg", *drawn, viewBox=view, preserveAspectRatio="none", role="img", aria_label=label
    )


def _rect(x: float, width: float, class_: str, title: str = "", *, height: float = LANE) -> Markup:
    titles = [element("title", title)] if title else []
    y = LANE - height
    return element("rect", *titles, x=x, width=width, y=y, height=height, class_=class_)


def _class_rects(intervals: Sequence[ActivityInterval], seconds: float) -> list[Markup]:
    """Returns the intervals, or for many of them the share of each color in each column."""
    if len(intervals) <= MAX_RECTS:
        scale = COLUMNS / seconds
        return [
            _rect(
                interval.start * scale,
                interval.seconds * scale,
                GROUP_OF[interval.activity],
                f"{interval.activity.replace('_', ' ')}, "
                f"{number_text.duration(interval.seconds)}, attempt {interval.attempt}",
            )
            for interval in intervals
        ]
    shares = np.round(column_shares(intervals, seconds) * LANE, 1)
    rects: list[Markup] = []
    for (_, heights), group in groupby(enumerate(shares.T), key=lambda pair: (0, pair[1].tolist())):
        columns = [index for index, _ in group]
        y = float(LANE)
        for name, height in zip(GROUPS, heights, strict=True):
            if height:
                y -= height
                at = {"x": float(columns[0]), "width": float(len(columns))}
                rects.append(element("rect", **at, y=max(y, 0.0), height=height, class_=name))
    return rects


def column_shares(intervals: Sequence[ActivityInterval], seconds: float) -> NDArray[np.float64]:
    """Returns the share of each group in the time of each column: [groups, columns]."""
    ends = np.array([0.0, *(interval.end for interval in intervals)])
    own = np.array([interval.seconds for interval in intervals])
    names = np.array([GROUP_OF[interval.activity] for interval in intervals])
    edges = np.linspace(0.0, seconds, COLUMNS + 1)
    rows = []
    for name in GROUPS:
        total = np.append(0.0, np.cumsum(np.where(names == name, own, 0.0)))
        rows.append(np.diff(np.interp(edges, ends, total)) * COLUMNS / seconds)
    return np.array(rows)


def _attempt_rects(attempts: Sequence[AttemptTime], scale: float) -> Iterator[Markup]:
    """Yields the attempts by their ends; merges attempts within one column."""
    if len(attempts) <= MAX_RECTS:
        groups = [[attempt] for attempt in attempts]
    else:
        column = [int(attempt.claimed * scale) for attempt in attempts]
        pairs = groupby(zip(column, attempts, strict=True), key=lambda pair: pair[0])
        groups = [[attempt for _, attempt in group] for _, group in pairs]
    for group in groups:
        first, last = group[0], group[-1]
        title = attempt_title(first) if first is last else f"{len(group):,} attempts: "
        title += "" if first is last else f"{first.attempt} to {last.attempt}"
        width = max((last.ended - first.claimed) * scale, 0.5)
        yield _rect(first.claimed * scale, width, f"attempt {_ended(group)}", title)


def attempt_title(attempt: AttemptTime) -> str:
    """Returns number, hosts, devices, time and end of an attempt."""
    devices = f", {attempt.num_devices} devices" if attempt.num_devices else ""
    return (
        f"attempt {attempt.attempt}: {number_text.count(attempt.num_hosts, 'host')}{devices}, "
        f"{number_text.duration(attempt.ended - attempt.claimed)}, "
        f"{c.cause_text(attempt.cause, attempt.culprit)}"
    )


def _ended(attempts: Sequence[AttemptTime]) -> str:
    if any(c.is_failure(attempt.cause) for attempt in attempts):
        return "lost"
    return "waits" if any(c.is_planned(attempt.cause) for attempt in attempts) else "useful"


def _host_rects(attempts: Sequence[AttemptTime], scale: float, most: int) -> Iterator[Markup]:
    """Yields the number of hosts over time; successive attempts with as many of them are one."""
    for num_hosts, group in groupby(attempts, key=lambda attempt: attempt.num_hosts):
        own = list(group)
        d = "".join(
            f"M{number(a.claimed * scale)} {LANE}"
            f"h{number(max((a.ended - a.claimed) * scale, 0.1))}v-{number(LANE * num_hosts / most)}"
            f"H{number(a.claimed * scale)}z"
            for a in (own if len(own) <= MAX_RECTS else own[:: len(own) // MAX_RECTS])
        )
        title = element("title", number_text.count(num_hosts, "host"))
        yield element("path", title, d=d, class_="hosts")


def _vm_dots(events: Sequence[LaunchEvent], whole: RunTimeline) -> Iterator[Markup]:
    """Yields lost VMs, refused requests and created VMs; one of a kind in each column."""
    shown = [event for event in events if event.kind in VM_EVENTS]
    times = np.array([event.time - whole.began for event in shown])
    for begin, end in whole.complete:
        times -= [max(0.0, min(event.time, end) - begin) for event in shown]
    columns = curves.column_of(times, 0.0, whole.seconds)
    for (kind, column), group in groupby(
        sorted(zip(columns.tolist(), shown, strict=True), key=lambda p: (p[1].kind, p[0])),
        key=lambda pair: (pair[1].kind, pair[0]),
    ):
        own = [event for _, event in group]
        names = ", ".join(own[0].vms[:3]) or own[0].zone
        title = f"{kind.replace('_', ' ')}: {names} {own[0].cause}".strip()
        title += "" if len(own) == 1 else f" and {len(own) - 1:,} more"
        d = f"M{number(column + 0.5)} {LANE / 2:.0f}h.01"
        yield element("path", element("title", title), d=d, class_=f"dots {VM_EVENTS[kind]}")


def _time_ticks(seconds: float) -> list[tuple[float, str]]:
    """Returns share and text of round times on the axis."""
    steps = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
    step = next((one for one in steps if seconds / one <= 6), None)
    if step is None:
        step = 86400 * max(1, round(seconds / 86400 / 5))
    return [(at / seconds, _tick_text(at)) for at in range(0, int(seconds) + 1, step)]


def _tick_text(seconds: int) -> str:
    if seconds == 0:
        return "0"
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds % unit == 0:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
