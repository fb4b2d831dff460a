"""Experiments that are arithmetic give the committed results again."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from jaxres.cli import plan
from tests.tiers import campaign, slow_but
from tools.experiments import plans

ROOT = Path(__file__).parents[4]
SLOW = (
    *("interruptions_of_16384_gpus", "spare_hosts"),
    *("failure_arithmetic", "insurance", "notice_budget"),
)
SLOWEST = ("goodput_without_each_measure",)
CHEAP = ("retention_bill",)


@pytest.mark.parametrize("name", [*slow_but([*CHEAP, *SLOW], *CHEAP), *campaign(SLOWEST)])
def test_an_experiment_gives_its_committed_result(name, monkeypatch):
    """Calls the planner in this process, where the experiment starts one for each plan."""

    def planned(*words):
        found = plan.compute(plan.read_inputs(plan._parse(list(map(str, words)))))
        return json.loads(json.dumps(found))

    monkeypatch.setattr(plans, "planned", planned)
    experiment = importlib.import_module(f"tools.experiments.{name}")
    found = json.loads(json.dumps(experiment.result()))
    path = ROOT / "experiments" / name / "results" / "results.json"
    committed = json.loads(path.read_text())
    del committed["date"], committed["machine"]
    now, before = flat(found), flat(committed)
    numbers = {name: value for name, value in before.items() if type(value) in (int, float)}
    assert {n: now.pop(n, None) for n in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-3)
    assert now == {name: value for name, value in before.items() if name not in numbers}


def flat(value, name=""):
    """Returns the leaves of a JSON value by path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: v for n, item in enumerate(value) for k, v in flat(item, f"{name}/{n}").items()}
    return {name: value}
