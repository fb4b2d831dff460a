"""What a config names and is not there is refused before an attempt is claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxres.config import RunConfig, load
from jaxres.faults import ConfigError
from jaxres.runlog.paths import RunDir
from jaxres.train.checks import start_checks

CUSTOM = "{kind: custom, target: 'no_such_module.part:f'}"
HERE = "{kind: text, path: .}"


def config_of(*overrides: str) -> RunConfig:
    fixed = ("data.tokenizer={kind: bytes}", "telemetry.sample_tokens=0")
    return load(Path("quickstart"), [*overrides, *fixed]).config


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.source.path=absent", r"data\.source\.path: absent does not exist \("),
        ("data.source={kind: tokens, path: absent}", "absent does not exist"),
        ("data.source={kind: jsonl, path: absent}", "absent does not exist"),
        (
            f"data.source={{kind: mixture, sources: [{{name: a, weight: 1, source: {HERE}}},"
            " {name: b, weight: 1, source: {kind: text, path: absent}}]}",
            r"data\.source\.sources\[1\]\.source: .*absent does not exist",
        ),
        (
            "data.validation=[{name: v, source: {kind: text, path: absent}}]",
            r"data\.validation\[v\]\.source: .*absent does not exist",
        ),
        ("data.source.include=[../x]", "'../x' is not a valid pattern"),
        ("init_from={kind: orbax, path: absent}", r"init_from\.path: .*absent: no such file"),
        (f"data.source={CUSTOM}", r"data\.source\.target: no module no_such_module \("),
        (f"model={CUSTOM}", r"model\.target: no module no_such_module \("),
        (f"optimizer={CUSTOM}", r"optimizer\.target: no module no_such_module \("),
        ("hooks=[{target: 'no_such_module:f'}]", r"hooks\[0\]\.target: no module no_such_mod"),
    ],
)
def test_what_is_not_there_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        start_checks.require_inputs(RunDir(tmp_path / "run"), config_of(override), env={})


@pytest.mark.parametrize(
    "override",
    [
        "data.source.path=.",
        "data.source.path='{stdlib}'",
        "data.source.path=gs://bucket/absent",
        "data.source.path='*.txt'",
        "data.source={kind: custom, target: 'own:f'}",
        "hooks=[{target: '__main__:f'}]",
        "hooks=[{target: 'own:absent'}]",
        "init_from={kind: orbax, path: gs://bucket/absent}",
    ],
)
def test_what_is_there_or_can_not_be_known_is_left_to_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own.py").write_text("raise ImportError('it is imported')")
    start_checks.require_inputs(RunDir(tmp_path / "run"), config_of(override), env={})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.schedule.warmup_steps=11", "optimizer.schedule: warmup_steps=11 lies beyond"),
        (
            "optimizer.schedule={warmup_fraction: 0.5, horizon_steps: 21}",
            "optimizer.schedule: the end of warmup_fraction=0.5 lies beyond",
        ),
        ("optimizer.schedule={warmup_fraction: 0.5, horizon_steps: 20}", None),
        ("hooks=[{target: 'json:loads'}]", "hooks[0].every_steps=100 lies beyond"),
        (
            "guards.corruption.replay_every_steps=11",
            "guards.corruption.replay_every_steps=11 lies beyond",
        ),
        ("checkpoint.memory={every_steps: 11}", "checkpoint.memory.every_steps=11 lies beyond"),
        (
            "optimizer.schedule={kind: linear, horizon_steps: 9}",
            "optimizer.schedule: the learning rate is 0 from step 9 on",
        ),
        ("optimizer.schedule.warmup_steps=10", None),
        (
            "optimizer.schedule={kind: piecewise, changes: [{after_step: 10, factor: 0.1}]}",
            "optimizer.schedule.changes: the change after step 10 lies beyond",
        ),
        ("optimizer.schedule={kind: piecewise, changes: [{after_step: 9, factor: 0.1}]}", None),
        (
            f"data.source={{kind: mixture, sources: [{{name: a, weight: 1, source: {HERE}}}],"
            " schedule: [{after_step: 99, weights: {a: 2}}]}",
            "data.source.schedule: the change after step 99 lies beyond",
        ),
    ],
)
def test_a_setting_beyond_the_last_step_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    says: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(override, "train.steps=10")
    assert not start_checks.is_complete(RunDir(tmp_path / "run"), config, env={})
    told = capsys.readouterr().err
    assert ("WARNING" in told) == (says is not None)
    assert says is None or says in told
