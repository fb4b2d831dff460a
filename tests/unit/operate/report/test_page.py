"""The HTML report of hand-written and random runs."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from jaxres.goodput import summary
from jaxres.operate.report.comparison import comparison_page, difference_text
from jaxres.operate.report.contents import Contents, Sources, collect
from jaxres.operate.report.curves import COLUMNS
from jaxres.operate.report.markup import element
from jaxres.operate.report.page import run_page
from jaxres.runlog.events import EVENTS, RunBuilt, SaveCommitted, SaveStarted
from jaxres.runlog.launch_events import LaunchEvent
from jaxres.runlog.metrics_columns import of_lines
from jaxres.runlog.records import AttemptEnded, Rollback
from tests.tiers import slow_but
from tests.unit.goodput.simulated_run import SimulatedRun, finished_run, random_run
from tests.unit.goodput.test_run_timeline import fold
from tests.unit.operate.report.parsed_page import Page, parse

MAX_BYTES = 5_000_000
KINDS = tuple(map(EVENTS.tag, (RunBuilt, SaveStarted, SaveCommitted)))
EVIL = "<script>alert(1)</script>\"' onload=x & \x00\x1b \ud800"
"""Text that must not become markup: elements, ends of attributes, control characters."""


def contents(run: SimulatedRun, *, is_alive: bool = False, **fields: Any) -> Contents:
    timeline = fold(run, is_alive=is_alive)
    sources = Sources(
        **{
            "root": "runs/x",
            "name": None,
            "records": run.records,
            "events": run.events,
            "lines": {n: of_lines(own) for n, own in run.lines.items()},
            "launch_events": (),
            "is_alive": is_alive,
        }
        | fields
    )
    return collect(sources, timeline, summary.summarize(timeline, dollars_per_host_hour=2.0))


def page_of(run: SimulatedRun, **fields: Any) -> Page:
    return parse(run_page(contents(run, **fields)))


def crashed_run() -> SimulatedRun:
    """Returns a run that hangs after step 4, resumes at step 2, masks a step, rolls back."""
    run = SimulatedRun()
    seq = run.begin(("import", 1.0), ("compile", 2.0))
    for _ in range(4):
        run.train(seq, 1.0)
        if run.step == 2:
            run.save(0.5)
    run.now += 3.0
    run.record_crash(80)
    run.now += 60.0
    seq = run.begin(("restore", 1.0))
    run.train(seq, 1.0)
    run.train(seq, 1.0, skipped=True)
    run.save(0.5)
    run.train(seq, 1.0)
    run.record(Rollback(onset=5, target=4, rows=((5, 6),), reason="spike"))
    seq = run.start(4)
    run.train(seq, 1.0)
    run.save(0.5)
    run.end(0, detection_seconds=0.0)
    return run


@pytest.mark.parametrize("seed", slow_but(range(30), *range(10)))
def test_any_run_is_a_page_that_is_well_formed_loads_nothing_and_has_finite_numbers(seed: int):
    run = random_run(seed, jumps=True)
    rng = random.Random(seed)
    for lines in run.lines.values():
        for index, line in enumerate(lines):
            loss = rng.choice((None, 0.0, -3.0, 1e-30, 1e300, 2.5))
            norm = rng.choice((None, 0.0, 1e-9, 1e9))
            lines[index] = dataclasses.replace(line, loss=loss, grad_norm=norm)
    for is_alive in (False, True):
        page_of(run, is_alive=is_alive)
    one = contents(run)
    parse(comparison_page(one, one, config_differences=[{"key": "a", "values": [1, None]}]))


@pytest.mark.parametrize("num_records", [0, 1, 2, 3, 4, 5])
def test_a_run_that_has_only_begun_is_a_page(num_records: int):
    run = crashed_run()
    run.records = run.records[:num_records]
    numbers = {record.attempt for record in run.records}
    for files in (run.events, run.supervisor_events, run.lines):
        for attempt in set(files) - numbers:
            del files[attempt]
    page_of(run)


def test_text_of_a_run_is_never_markup():
    run = crashed_run()
    run.records = [
        dataclasses.replace(
            record,
            body=dataclasses.replace(record.body, reason=EVIL)
            if isinstance(record.body, AttemptEnded)
            else record.body,
        )
        for record in run.records
    ]
    run.records[0] = dataclasses.replace(
        run.records[0], body=dataclasses.replace(run.records[0].body, host=EVIL)
    )
    event = LaunchEvent(1, "vm_lost", 1e9, vms=(EVIL,), zone=EVIL, cause=EVIL, reason=EVIL)
    made = contents(run, name=EVIL, root=EVIL, launch_events=[event])
    differences = [{"key": EVIL, "values": [EVIL, EVIL]}]
    for html in (run_page(made), comparison_page(made, made, config_differences=differences)):
        assert "<script" not in html, "the text of a run became an element"
        assert "alert(1)" in html
        assert not {"\x00", "\x1b", "\ud800"} & set(html)
        parse(html)


def test_an_attribute_can_not_be_ended_by_its_text():
    assert element("p", title='"><b>') == '<p title="&quot;&gt;&lt;b&gt;"></p>'


def test_lost_steps_interruptions_and_masked_updates_are_marked():
    page = page_of(crashed_run())
    titles = page.titles()
    assert titles.count("lost: steps 3 to 4") == 2, "in the loss and in the gradient norm"
    assert titles.count("lost: steps 5 to 5") == 2
    assert "attempt 1: HUNG after step 4, resumed at step 2" in titles
    assert "attempt 2: rolled back after step 5, resumed at step 4" in titles
    assert "step 4: update masked (cause not recorded)" in titles
    assert [len(page.of_class("path", kind)) for kind in ("restart", "rollback")] == [2, 2]
    assert len(page.of_class("rect", "band")) == 4


def test_the_bars_of_the_waterfall_follow_each_other_and_end_at_the_wall_time():
    html = run_page(contents(crashed_run()))
    begin, end = html.index('<div class="waterfall">'), html.index("<h2>Timeline")
    bars = [a for tag, a in parse(html[begin:end]).tags if tag == "rect"]
    *classes, whole = [(float(bar["x"]), float(bar["width"])) for bar in bars]
    at = 0.0
    for x, width in classes:
        assert x == pytest.approx(at, abs=0.02)
        at = x + width
    assert at == pytest.approx(100.0, abs=0.05)
    assert whole == (0.0, 100.0)


def test_an_incident_has_cause_steps_and_each_part_of_its_recovery():
    page = page_of(crashed_run())
    cells = [text for _, text in page.texts]
    assert "HUNG" in cells
    assert "after step 4, resumed at step 2" in cells
    wanted = "steps lost 2 s, detection 3 s, down 1 min 00 s, start up 1 s, restore 1 s"
    assert wanted in cells
    assert any(cell.startswith("$") for cell in cells)


def many_steps(steps: int, *, attempts: int) -> SimulatedRun:
    """Returns a run of that many steps; each attempt is lost in its middle, and its VM too."""
    run, rng = SimulatedRun(), random.Random(0)
    for number in range(1, attempts + 1):
        seq = run.begin(("compile", 3.0))
        while run.step < steps * number // attempts:
            run.train(seq, rng.uniform(0.5, 1.5), skipped=rng.random() < 0.01)
            line = run.lines[run.attempt][-1]
            values = {"loss": rng.gauss(3, 1), "grad_norm": rng.expovariate(1)}
            run.lines[run.attempt][-1] = dataclasses.replace(line, **values)
            if run.step == steps * number // attempts - steps // attempts // 2:
                run.save(0.1)
        run.record_crash(79)
        run.now += 10.0
    return run


def test_an_extended_run_has_its_vms_where_it_trains_and_all_attempts_in_the_table():
    run = finished_run()
    complete = run.now
    run.claim_only(0)
    run.now += 86400.0
    extended = run.now
    run.train(run.begin(), 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    events = [
        LaunchEvent(1, "vm_lost", at + run.wall_offset, vms=("vm",), cause=cause)
        for at, cause in ((complete / 2, "early"), (complete + 9.0, "between"), (run.now, "late"))
    ]
    page = page_of(run, launch_events=events)
    whole = complete + run.now - extended
    begins = [float(one["d"][1:].split()[0]) for one in page.of_class("path", "dots")][:3]
    places = [int(COLUMNS * min(0.999, at / whole)) + 0.5 for at in (complete / 2, complete, whole)]
    assert begins == places
    assert not any("The newest" in text for texts in page.texts for text in texts)


@pytest.mark.slow
def test_the_size_is_bounded_by_pixels_not_by_steps_or_attempts():
    more_steps = len(run_page(contents(many_steps(20_000, attempts=20))))
    many = many_steps(16_000, attempts=400)
    reason = AttemptEnded(exit=79, reason="x" * 100_000, committed=False)
    many.records = [
        dataclasses.replace(record, body=reason)
        if isinstance(record.body, AttemptEnded)
        else record
        for record in many.records
    ]
    events = [
        LaunchEvent(n, "vm_lost", many.records[0].time + n, vms=("vm",) * 1000)
        for n in range(20_000)
    ]
    most = len(run_page(contents(many, launch_events=events)))
    assert more_steps < MAX_BYTES / 10, "more steps than pixels"
    assert most < MAX_BYTES / 4, "what a run can have most of"


@pytest.mark.parametrize("value", ["x", None, [1], math.nan, 1e308, 10**400, -1])
def test_events_with_damaged_numbers_leave_the_page_whole(value: Any):
    run = crashed_run()
    numbers = dict.fromkeys(
        ("blocked_seconds", "seconds", "linked_bytes", "flops_per_token"), value
    )
    for own in run.events.values():
        own += [own[-1] | {"event": kind, "step": value} | numbers for kind in KINDS]
        own += [own[-1] | {"event": kind, "step": 2} | numbers for kind in KINDS]
    page_of(run)


def test_losses_at_the_edge_of_a_float_are_a_chart():
    run = crashed_run()
    for lines, loss in zip(run.lines.values(), (1.7e308, 5e-324), strict=True):
        lines[0] = dataclasses.replace(lines[0], loss=loss, grad_norm=-loss)
    page_of(run)


def test_two_runs_name_the_first_step_with_another_loss():
    first, second = contents(crashed_run()), crashed_run()
    assert difference_text(first, contents(second)) == (
        "The losses are equal in all steps that both runs have, up to step 5."
    )
    lines = second.lines[2]
    lines[0] = dataclasses.replace(lines[0], loss=0.9999999999999999)
    changed = contents(second)
    assert difference_text(first, changed) == "The losses differ first at step 3."
    page = parse(comparison_page(first, changed, config_differences=[]))
    assert ("b", "The losses differ first at step 3.") in page.texts
    assert [len(page.of_class("path", name)) for name in ("run1", "run2")] == [1, 1]
