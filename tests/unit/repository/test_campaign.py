"""The campaign of kills: its schedule is a function of the seed, and slices go on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from jaxres.operate.chaos import scenarios
from jaxres.operate.resume_verdict import AttemptFacts, RunFacts
from jaxres.runlog.records import Body, Commit, Quarantine, Record, Start
from tests.promises.trainer import Workspace
from tools.campaign import results
from tools.campaign.killed_run import Execution, unbroken
from tools.campaign.pairs import all_pairs
from tools.campaign.plan import (
    LAYOUTS,
    LEAST_KILLS,
    MOST_KILLS,
    PLACES,
    TARGETS,
    Kill,
    RunPlan,
    plan_run,
    schedule,
)
from tools.campaign.verdict import KilledFacts, judge, wrong_starts


def test_a_seed_replays_its_schedule_and_a_longer_one_begins_with_a_shorter_one() -> None:
    short, long = (list(schedule(3, kills=kills)) for kills in (50, 500))
    assert long[: len(short)] == short
    assert list(schedule(4, kills=50)) != short
    assert sum(len(run.kills) for run in short) >= 50 > sum(len(r.kills) for r in short[:-1])
    assert short[2] == plan_run(3, 2)


def test_a_thousand_kills_are_at_every_place_of_every_process_host_and_storage() -> None:
    runs = list(schedule(0, kills=1000))
    kills = [kill for run in runs for kill in run.kills]
    assert {kill.place for kill in kills} == set(PLACES)
    assert {kill.target for kill in kills} == set(TARGETS)
    assert {(run.hosts, run.storage) for run in runs} == set(LAYOUTS)
    for run in runs:
        assert LEAST_KILLS <= len(run.kills) <= MOST_KILLS
        for kill in run.kills:
            assert run.storage in PLACES[kill.place].storages
            assert 0 <= kill.host < run.hosts
            assert 0.0 <= kill.fraction < 1.0
            assert kill.target != "fork server" or kill.place == "any time"


@pytest.mark.parametrize("place", PLACES)
def test_only_some_places(place: str) -> None:
    runs = list(schedule(1, kills=40, only=(place,)))
    assert {kill.place for run in runs for kill in run.kills} == {place}
    assert {run.storage for run in runs} <= set(PLACES[place].storages)


def line(**changes: Any) -> dict[str, Any]:
    kill = {"place": "save", "target": "worker", "phase": "train", "in_save": True}
    fields = {"seed": 0, "run": 0, "only": [], "kills": [kill], "missed": [], "attempts": 2}
    fields |= {"commit": "abc", "date": "2026-01-01", "hosts": 1, "storage": "disk"}
    return fields | {"outcome": results.HELD, "cpu_seconds": 4.0} | changes


def test_a_slice_goes_on_with_the_runs_that_are_not_recorded(tmp_path: Path) -> None:
    path, plans = tmp_path / "kills.jsonl", list(schedule(0, kills=60))
    assert results.left(plans, results.read(path), seed=0, only=()) == plans
    results.append(path, line(run=0))
    results.append(path, line(run=2))
    results.append(path, line(run=1, seed=1))
    results.append(path, line(run=1, only=["save"]))
    with path.open("a") as file:
        file.write(json.dumps(line(run=3))[:20])  # The slice was killed.
    left = results.left(plans, results.read(path), seed=0, only=())
    assert left == [plans[1], *plans[3:]]


def test_the_tables_count_what_has_happened(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{results.BEGIN}\nold\n{results.END}\nafter\n")
    bad = line(run=1, missed=["save"], outcome=["step 3, loss: 1 unbroken, 2 killed"])
    results.write_tables(readme, [line(), bad])
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "2 kills in 2 runs with 4 attempts: **a promise was broken in 1 run(s)**" in text
    assert "1 planned kills came after the end" in text
    assert "| worker | 2 |" in text
    assert "step 3, loss" in text


def test_without_a_recorded_run_no_promise_has_held() -> None:
    assert results.tables([]) == "No run is recorded yet."


def records(*bodies: Body) -> list[Record]:
    return [Record(seq, 1, 0.0, body) for seq, body in enumerate(bodies)]


def started(step: int) -> Start:
    return Start(step=step, path=None, dataset="", computation={})


def committed(step: int) -> Commit:
    return Commit(step=step, path="", manifest="", bytes=0)


def test_a_start_is_at_the_newest_committed_step() -> None:
    good = records(started(0), committed(6), committed(12), started(12))
    assert list(wrong_starts(good)) == []
    (text,) = wrong_starts(records(committed(6), committed(12), started(6)))
    assert "started at step 6, committed was 12" in text
    (text,) = wrong_starts(records(committed(6), Quarantine(step=6, path="", evidence="bits")))
    assert "damaged" in text


RUN = RunFacts("run", 0, (), {6: "a", 12: "b"}, (AttemptFacts(1, 0, 0, 12),))
GOOD = KilledFacts(run=RUN, records=(), seen_digests={6: "a"})


def test_a_run_that_equals_the_unbroken_one_breaks_nothing() -> None:
    assert judge(RUN, GOOD) == ()
    pruned = dataclasses.replace(RUN, digests={12: "b"})
    assert judge(RUN, dataclasses.replace(GOOD, run=pruned)) == ()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": dataclasses.replace(RUN, digests={12: "c"})}, "step 12, state"),
        ({"run": dataclasses.replace(RUN, digests={6: "a"})}, "step 12, missing"),
        ({"run": dataclasses.replace(RUN, exit=70)}, "the run ended with"),
        ({"seen_digests": {6: "c"}}, "step 6 was committed with another digest"),
        (
            {"run": dataclasses.replace(RUN, attempts=(AttemptFacts(1, 70, 0, 12),))},
            "attempt 1 ended with",
        ),
        ({"records": records(started(6))}, "started at step 6"),
        ({"damaged": ("step 12: x",)}, "step 12: x"),
        ({"left": ("process 3",)}, "left behind: process 3"),
        ({"problem": "no save"}, "given up: no save"),
    ],
)
def test_each_broken_promise_is_named(changes: dict[str, Any], text: str) -> None:
    assert any(text in found for found in judge(RUN, dataclasses.replace(GOOD, **changes)))


def test_every_pair_of_scenarios_that_can_share_a_run_is_planned_in_both_orders() -> None:
    pairs = all_pairs(0)
    names = {(one.first, one.second) for one in pairs}
    assert len(names) == len(pairs)
    assert {(second, first) for first, second in names} == names
    shared = [one for one in scenarios.ALL if not one.is_alone and one.place != "hosts"]
    for a, b in itertools.permutations(shared, 2):
        assert ((a.name, b.name) in names) == (a.place == b.place)
    assert [one.number for one in all_pairs(1)] == list(range(len(pairs)))
    assert {(one.first, one.second) for one in all_pairs(1)} == names
    assert all_pairs(1) != pairs


def test_a_pair_is_injected_in_its_order_and_a_seed_replays_it() -> None:
    for pair in all_pairs(2):
        planned = pair.planned(2)
        first, second = planned.faults
        assert (first.scenario, second.scenario) == (pair.first, pair.second)
        assert first.step < second.step
        assert planned == pair.planned(2)


def test_the_table_of_pairs_counts_each_once(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    begin, end = results.PAIRS
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    pair = {**line(), "pair": ["notice", "stop"], "faults": []}
    results.write_pairs(readme, [pair, {**pair, "seed": 1}], 96)
    text = readme.read_text()
    assert "1 of 96 pairs have run, in 2 runs: every promise held in every run" in text
    assert "old" not in text
    results.write_pairs(readme, [{**pair, "outcome": ["causes: x"]}], 96)
    assert "1 broke a promise" in readme.read_text()
    assert results.pair_table([], 96) == "No pair is recorded yet."


KILLS = (
    Kill("save: commit", "worker"),
    Kill("prune: bytes", "worker"),
    Kill("between attempts", "both", fraction=0.5),
    Kill("first step", "supervisor"),
)


@pytest.mark.campaign
def test_a_run_killed_at_chosen_places_ends_bit_exact_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path, tmp_path / "caches", more_spares=2)
    plan = RunPlan(0, 1, "disk", 0, KILLS)
    try:
        reference, timing = unbroken(workspace, plan, "unbroken")
        seen, landed = Execution(workspace, plan, timing).execute()
    finally:
        workspace.end_all()
    assert [kill.place for kill in landed] == [kill.place for kill in KILLS]
    assert judge(reference, seen) == ()
    assert len(seen.run.attempts) > len(KILLS)
    assert max(attempt.start_step or 0 for attempt in seen.run.attempts) >= 6, "nothing restored"
    wrong = dataclasses.replace(reference, digests=dict.fromkeys(reference.digests, "other"))
    assert judge(wrong, seen), "the verdict sees no other state"
