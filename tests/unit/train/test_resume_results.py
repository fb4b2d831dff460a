"""The first start of a run tells whether a resume of its config was tested, and goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.runlog.events import Noted
from jaxres.train import build, kept_results, resume_results
from jaxres.train.resume_results import ResumeCheckResult

TINY = Path(__file__).parents[3] / "tests" / "promises" / "tiny.yaml"
DEVICES = "2 x cpu cpu"
GOOD = ResumeCheckResult(
    config="tiny",
    trajectory="x",
    guarantee=resume_results.BITWISE,
    summary="guarantee: bitwise here",
    cause="",
    topologies={},
    first_difference=None,
    runs=(),
    versions=kept_results.versions_here(),
    devices="1 x cpu cpu",
    steps=12,
    seed=0,
    overridden=(),
    seconds=1.0,
    date="2026-11-26",
)


@pytest.fixture
def config(tmp_path: Path) -> configs.RunConfig:
    return configs.load(TINY, [f"data.cache_dir={tmp_path}"]).config


def told(config: configs.RunConfig, *, leads: bool = True, num_starts: int = 0) -> list[str]:
    """Returns the messages that a start emits."""
    events: list[Noted] = []
    context: Any = SimpleNamespace(
        peers=SimpleNamespace(member=SimpleNamespace(leads=leads)),
        log=SimpleNamespace(history=lambda: SimpleNamespace(starts=[object()] * num_starts)),
        emit=events.append,
    )
    build._note_resume_check(config, context, devices=DEVICES)
    return [event.message for event in events]


def test_the_first_start_of_a_config_that_was_never_tested_tells_so(
    config: configs.RunConfig,
) -> None:
    (text,) = told(config)
    assert "resume-check: a resume of this config was never tested here" in text
    assert "\n" not in text


def test_the_first_start_has_the_guarantee_and_its_date(config: configs.RunConfig) -> None:
    resume_results.store(config, GOOD)
    assert told(config) == ["resume-check: guarantee: bitwise here (2026-11-26, 1 x cpu cpu)"]


def test_a_result_of_other_devices_or_versions_is_no_result_for_these(
    config: configs.RunConfig,
) -> None:
    resume_results.store(config, dataclasses.replace(GOOD, devices="8 x gpu H100"))
    (text,) = told(config)
    assert text.endswith("not tested on 2 x cpu cpu")
    versions = {**GOOD.versions, "jax": "0.1"}
    resume_results.store(config, dataclasses.replace(GOOD, versions=versions))
    (text,) = told(config)
    assert "tested with other versions (jax 0.1 -> " in text


def test_later_starts_and_other_hosts_are_silent(config: configs.RunConfig) -> None:
    assert told(config, num_starts=1) == []
    assert told(config, leads=False) == []


@pytest.mark.parametrize("text", ["", "[]", '{"versions": 3}', "\xff"])
def test_a_damaged_result_ends_no_start(config: configs.RunConfig, text: str) -> None:
    resume_results.store(config, GOOD).write_text(text, encoding="latin-1")
    (printed,) = told(config)
    assert "can't be read" in printed


def test_a_result_of_an_older_version_has_no_date(config: configs.RunConfig) -> None:
    fields = GOOD.fields()
    del fields["date"]
    kept_results.write(resume_results.path_of(config), fields)
    assert told(config) == ["resume-check: guarantee: bitwise here (1 x cpu cpu)"]
