"""The text of `jaxres plan`, from its JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxres.estimate.job_estimate import clock_text
from jaxres.telemetry.stdio import format_bytes

Found = Mapping[str, Any]


def as_text(found: Found) -> str:
    """Returns the plan as text of one screen."""
    lines = [
        *_failures(found),
        *_saves(found),
        *_goodput(found),
        *_measures(found),
        *_money(found),
        *_assumed(found),
    ]
    return "".join(f"{line}\n" for line in lines)


def _failures(found: Found) -> Iterator[str]:
    fleet, failures = found["fleet"], found["failures"]
    yield (
        f"{fleet['num_gpus']:,} GPUs on {fleet['num_hosts']:,} hosts for {_time(fleet['hours'])}, "
        f"state {format_bytes(fleet['state_bytes'])}"
    )
    preempted = failures["preemptions_expected"]
    spot = f"; {preempted:,.1f} preemptions" if preempted else ""
    yield (
        f"failures: one every {failures['mtbf_hours']:,.1f} h, "
        f"{failures['expected']:,.1f} expected "
        f"(p5 {failures['p5']:,}, p95 {failures['p95']:,}){spot}"
    )
    yield (
        f"without any: a day {_percent(failures['survival_day'])}, the whole time "
        f"{_percent(failures['survival'])}"
    )


def _saves(found: Found) -> Iterator[str]:
    """Yields the estimate that doctor and start print too, and the interval that is simulated."""
    yield from found["estimate"]
    saves = found["saves"]
    formulas = ""
    if saves["young_seconds"] is not None:
        young, daly = (clock_text(saves[name]) for name in ("young_seconds", "daly_seconds"))
        formulas = f" (Young {young}, Daly {daly}; jaxres: also no shorter than a save takes)"
    yield f"goodput with a save every {clock_text(saves['interval_seconds'])}{formulas}"
    memory = saves["memory_interval_seconds"]
    in_memory = f"; in host memory every {clock_text(memory)}" if memory else ""
    yield f"a save stalls training {saves['stall_seconds']:.1f} s{in_memory}"
    if found["failures"]["preemptions_expected"]:
        most = format_bytes(saves["largest_state_at_notice_bytes"])
        yield f"the largest state that a preemption notice saves: {most}"


def _goodput(found: Found) -> Iterator[str]:
    goodput, run = found["goodput"], found["measured"]
    yield (
        f"goodput {_percent(goodput['mean'])} (p5 {_percent(goodput['p5'])}, "
        f"p95 {_percent(goodput['p95'])}): {goodput['lost_hours']:,.1f} of "
        f"{found['fleet']['hours']:,.0f} h lost"
    )
    shares = [f"{name} {_percent(share)}" for name, share in goodput["shares"].items()]
    yield f"  {', '.join(shares)}"
    if on_demand := goodput["on_demand_share"]:
        yield f"  {_percent(on_demand)} of the hosts are on demand: no Spot VM was free for them"
    if run is not None and run["goodput"] is not None:
        yield (
            f"  the run had {_percent(run['goodput'])} in {_time(run['seconds'] / 3600)}, "
            f"{run['failures']} failures, {run['preemptions']} preemptions"
        )
    if run is not None and (same := run["simulated"]) is not None:
        yield f"  simulated with its own failures and times: {_percent(same['goodput'])}"


def _measures(found: Found) -> Iterator[str]:
    yield f"{'':<26}{'goodput':>10}{'lost hours':>12}{'dollars':>16}{'$/useful GPU h':>16}"
    for one in found["measures"]:
        yield (
            f"{one['name']:<26}{_percent(one['goodput']):>10}{one['lost_hours']:>12,.1f}"
            f"{one['dollars']:>16,.0f}{one['dollars_per_useful_hour']:>16.3f}"
        )


def _money(found: Found) -> Iterator[str]:
    spot, prices, storage = found["spot"], found["prices"], found["storage"]
    if (limit := spot["break_even_preemptions_per_day"]) is not None:
        yield (
            f"Spot (${prices['spot']:g}) costs less than on demand (${prices['on_demand']:g}) "
            f"per useful hour up to {limit:.2f} preemptions per VM and day"
        )
    if (cost := spot["spot_dollars_per_useful_hour"]) is not None:
        other = spot["on_demand_dollars_per_useful_hour"]
        yield f"  a useful GPU hour: Spot ${cost:.3f}, on demand ${other:.3f}"
    yield (
        f"storage: {storage['kept']} checkpoints kept, {storage['end_gb']:,.0f} GB, "
        f"${storage['dollars']:,.0f}, "
        f"at the end ${storage['dollars_per_month_at_end']:,.0f} a month"
    )
    bills = found["insurance"]
    without = bills["without"]
    yield f"{'the same useful work':<26}{'by hand':>16}{'this plan':>16}"
    for number, line in enumerate(bills["with"]["lines"]):
        other = "" if without is None else f"{without['lines'][number]['dollars']:,.0f}"
        yield f"  {line['name']:<24}{other:>16}{line['dollars']:>16,.0f}"
    other = "no end" if without is None else f"{without['total']:,.0f}"
    yield f"  {'total':<24}{other:>16}{bills['with']['total']:>16,.0f}"


def _assumed(found: Found) -> Iterator[str]:
    """Yields the flags whose defaults were used, a few on a line."""
    words = [f"{one['flag'].removeprefix('--')} {one['value']:g}" for one in found["assumed"]]
    if words:
        yield "assumed (sources: docs/planning.md, --json):"
    for start in range(0, len(words), 5):
        yield f"  {', '.join(words[start : start + 5])}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.01 else f"{100 * share:.2f} %"


def _time(hours: float) -> str:
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:.3g} h"
