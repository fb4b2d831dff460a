"""`jaxres report`: the time of a run by activity, and the cost of each interruption."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxres.cli.runs import differences
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import require_writable
from jaxres.exit_codes import ExitCode, exit_row
from jaxres.faults import ConfigError, UsageError
from jaxres.goodput import read_timeline, run_timeline, summary
from jaxres.goodput.intervals import Activity
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.goodput.summary import CostlyInterruption, Summary
from jaxres.launch.gce.checks import option_prices
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.desired_state import DesiredState
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import StateObject
from jaxres.operate.report import comparison, number_text
from jaxres.operate.report.contents import Contents, Sources, collect
from jaxres.operate.report.page import DOCTYPE, run_page
from jaxres.runlog import launch_events, metrics_columns, run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor import run_config, run_lock
from jaxres.telemetry import stdio


@dataclass(frozen=True)
class _Run:
    """The inputs read of a run, and the results computed from them."""

    run_dir: RunDir
    sources: Sources
    timeline: RunTimeline
    summary: Summary
    spending: VmSpending


@dataclass(frozen=True)
class VmSpending:
    """Cost of the VMs of `launch gce`, by capacity option and cause."""

    rows: Sequence[dict[str, Any]] = ()
    """Fields of JSON objects."""
    lines: Sequence[str] = ()


def text(
    run_dir: RunDir, *, as_json: bool, out: RunPath | None = None, compare: RunDir | None = None
) -> str:
    """Returns the report: text, or one JSON object for each run.

    Args:
      as_json: whether to return JSON.
      out: file to which the HTML page is written.
      compare: another run; the text, and the page, then have both.

    Raises:
      UsageError: the folder of `out` does not exist, or `out` is a file that is no page.
    """
    if isinstance(out, Path) and not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: its folder does not exist. Create it, or give another file")
    require_writable("--out", out)
    there = None if out is None else files.read(out)
    if there and not there.startswith(DOCTYPE):
        raise UsageError(f"--out {out}: exists, and is no page of this command. Give another file")
    runs = [_read_all(one) for one in (run_dir, compare) if one is not None]
    if as_json:
        texts = [as_json_text(run.timeline, run.summary, run.spending) for run in runs]
    else:
        texts = [as_text(run.run_dir, run.summary, run.spending) for run in runs]
    if out is None and compare is None:
        return texts[0]
    contents = [collect(run.sources, run.timeline, run.summary) for run in runs]
    if compare is not None and not as_json:
        texts.append(comparison.difference_text(*contents) + "\n")
    if out is not None:
        page = _page(runs, contents).encode()
        files.replace(out, page)
        if not as_json:
            texts.append(f"{out}: {len(page):,} bytes, open it in a browser\n")
    return "".join(texts)


def _page(runs: Sequence[_Run], contents: Sequence[Contents]) -> str:
    if len(contents) == 1:
        return run_page(contents[0])
    configs = [config for run in runs if (config := _config(run.run_dir)) is not None]
    found = differences(configs) if len(configs) == len(runs) else None
    return comparison.comparison_page(*contents, config_differences=found)


def _read_all(run_dir: RunDir) -> _Run:
    config = _config(run_dir)
    sources = _sources(run_dir, name=None if config is None else config.run.name)
    timeline = _timeline(run_dir, sources)
    vms, state = VmSpending(), _launch_state(run_dir)
    if config is not None and config.launch.gce is not None and state is not None:
        vms = _vm_spending(state, config)
    price = None if config is None else config.launch.dollars_per_host_hour
    found = summary.summarize(timeline, dollars_per_host_hour=price)
    return _Run(run_dir, sources, timeline, found, vms)


def _launch_state(run_dir: RunDir) -> DesiredState | None:
    """Returns the desired state of `launch gce`; None: there is none, or it can't be read."""
    if not is_remote(run_dir.root):
        return None
    state = StateObject(LaunchPaths(run_dir.root).desired_state)
    try:
        found, problem = state.read_valid(), state.damage
    except ConfigError as error:
        found, problem = None, str(error)
    if problem:
        stdio.warn(f"{problem.rstrip('.')}. The report is without the cost of the VMs.")
    return found


def _vm_spending(state: DesiredState, config: RunConfig) -> VmSpending:
    gce = config.launch.gce
    assert gce is not None, config
    now = SystemClock().wall()
    rows = spending.rows(spending.so_far(state, gce, now=now), gce)
    hours = sum(row["vm_hours"] for row in rows)
    total = sum(row["dollars"] or 0.0 for row in rows)
    is_known = all(row["dollars"] is not None for row in rows)
    cost = f"${total:.2f}" if is_known else "price unknown"
    lines = [f"VMs: {cost}, {hours:.2f} VM hours", *option_prices.cost_lines(state, gce, now=now)]
    return VmSpending(rows, lines if rows else ())


def read(run_dir: RunDir) -> RunTimeline:
    """Reads log, events and metrics of a run and returns its timeline."""
    return read_timeline.read(run_dir, is_alive=_is_alive(run_dir), warn=stdio.warn)


def _is_alive(run_dir: RunDir) -> bool:
    return run_lock.liveness(run_dir, clock=SystemClock()) != "gone"


def _sources(run_dir: RunDir, *, name: str | None) -> Sources:
    records = run_log.in_force(run_log.read_whole(run_dir.log))
    numbers = [record.attempt for record in records if isinstance(record.body, Claim)]
    return Sources(
        root=str(run_dir.root),
        name=name,
        records=records,
        events={n: read_events(run_dir.events(n, 0)) for n in numbers},
        lines={n: metrics_columns.read_attempt(run_dir, n) for n in numbers},
        launch_events=launch_events.read(run_dir, warn=stdio.warn),
        is_alive=_is_alive(run_dir),
    )


def _timeline(run_dir: RunDir, sources: Sources) -> RunTimeline:
    return run_timeline.fold(
        sources.records,
        events=sources.events,
        supervisor_events=read_timeline.supervisor_events(run_dir, sources.events),
        lines=sources.lines,
        is_alive=sources.is_alive,
        launch_events=sources.launch_events,
    )


def _config(run_dir: RunDir) -> RunConfig | None:
    """Returns the newest config; None, after a warning: it can't be read."""
    try:
        return run_config.newest_config(run_dir)
    except ConfigError as error:
        stdio.warn(f"{error} The report is without the config: no name, no price.")
        return None


def as_json_text(timeline: RunTimeline, found: Summary, vms: VmSpending) -> str:
    """Returns the summary with all intervals as one JSON object, in seconds since the begin."""
    intervals = [dataclasses.asdict(interval) for interval in timeline.intervals]
    more = {"spending": [*vms.rows], "intervals": intervals}
    return json.dumps(dataclasses.asdict(found) | more) + "\n"


def as_text(run_dir: RunDir, found: Summary, vms: VmSpending) -> str:
    """Returns the summary as text for a terminal."""
    return "".join(f"{line}\n" for line in _lines(run_dir, found, vms))


def _lines(run_dir: RunDir, found: Summary, vms: VmSpending) -> Iterator[str]:
    at = datetime.fromtimestamp(found.began).isoformat(sep=" ", timespec="seconds")
    attempts = number_text.count(found.num_attempts, "attempt")
    incidents = number_text.count(len(found.incidents), "incident")
    took = number_text.duration(found.seconds)
    yield f"{run_dir.root}: {attempts}, {incidents}; {took} since {at}"
    if found.goodput is None:
        return
    share = 100 * found.goodput
    yield f"goodput {share:.1f} %: the share of the time in steps that the run still has"
    for activity in Activity:
        seconds = found.by_activity[activity]
        if activity.value not in found.not_recorded:
            name = activity.replace("_", " ")
            dollars = (found.dollars_by_activity or {}).get(activity.value)
            cost = "" if dollars is None else f"{f'${dollars:,.2f}':>12}"
            yield f"  {name:<13}{seconds:>14,.1f} s {100 * seconds / found.seconds:>6.1f} %{cost}"
    yield f"  {'sum':<13}{found.seconds:>14,.1f} s"
    if names := " and ".join(name.replace("_", " ") for name in found.not_recorded):
        yield f"not recorded, so in other classes: {names} (only `launch gce` records them)"
    yield from _cost(found)
    yield from vms.lines
    for incident in found.incidents:
        yield from _incident(incident)


def _cost(found: Summary) -> Iterator[str]:
    if found.device_hours is not None and found.useful_device_hours is not None:
        lost = found.device_hours - found.useful_device_hours
        yield (
            f"devices: {found.useful_device_hours:.3f} hours useful, {lost:.3f} not, "
            "while attempts ran"
        )
    if found.dollars is not None and found.useful_dollars is not None:
        lost = found.dollars - found.useful_dollars
        yield f"money: ${found.useful_dollars:.2f} useful, ${lost:.2f} not, while attempts ran"


def _incident(incident: CostlyInterruption) -> Iterator[str]:
    host = "" if incident.culprit is None else f", host {incident.culprit}"
    hours = "" if incident.device_hours is None else f", {incident.device_hours:.3f} device hours"
    dollars = "" if incident.dollars is None else f", ${incident.dollars:.2f}"
    at, took = number_text.duration(incident.at), number_text.duration(incident.seconds)
    yield f"after {at}: attempt {incident.attempt} {incident.cause}{host}: {took}{hours}{dollars}"
    of_vms = {
        "capacity wait": incident.capacity_wait_seconds,
        "VM boot": incident.vm_boot_seconds,
    }
    parts = {
        f"{number_text.count(incident.steps_lost, 'step')} lost": incident.replayed_seconds,
        "detection": incident.detection_seconds,
        **({} if not any(of_vms.values()) else of_vms),
        "down": incident.down_seconds,
        **{name.replace("_", " "): s for name, s in incident.setup_seconds.items()},
    }
    yield "    " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    if incident.reason and incident.cause != exit_row(ExitCode.STOPPED).name:
        yield f"    {incident.reason.splitlines()[0]}"
