"""Hooks see the run, change nothing, and their failures are warnings."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from jaxres.config.schema.training import HookSection
from jaxres.faults import ConfigError
from jaxres.runlog.events import Noted, PhaseChanged
from jaxres.train.hooks import Hooks, load
from tests.waiting import SURE_SECONDS

SEEN: list = []
RELEASE = threading.Event()


def look(context, word="") -> None:
    SEEN.append((context.step, context.params, context.metrics["loss"], word))


def fail(context) -> None:
    raise SystemExit("my bug")


def interrupt(context) -> None:
    raise KeyboardInterrupt("my own")


def write(context) -> None:
    context.params["layer"]["w"] = 0
    context.model_state.clear()


def hang(context) -> None:
    RELEASE.wait(SURE_SECONDS)


def hooks_of(tmp_path, *sections: HookSection):
    events: list = []
    hooks = Hooks(
        load(sections),
        params_of=lambda state: state.params,
        emit=events.append,
        run_dir=tmp_path,
    )
    return hooks, events


def section(name: str, **fields) -> HookSection:
    return HookSection(target=f"{__name__}:{name}", **fields)


def line(step: int):
    return SimpleNamespace(step=step, fields=lambda: {"loss": 0.5, "step": step})


STATE = SimpleNamespace(params={"w": 1}, model_state=None)


def test_a_hook_is_called_at_its_steps_once_and_not_for_the_restored_step(tmp_path):
    SEEN.clear()
    hooks, _ = hooks_of(tmp_path, section("look", every_steps=4, args={"word": "hi"}))
    hooks.begin(4)
    for step in range(4, 13):
        for _ in range(2):  # The loop may come to a step twice, as after an evaluation.
            if hooks.are_due(step):
                hooks.call(STATE, line(step))
    assert SEEN == [(8, {"w": 1}, 0.5, "hi"), (12, {"w": 1}, 0.5, "hi")]
    hooks.begin(6)
    assert hooks.are_due(8), "after a rollback"


def test_a_hook_that_fails_is_a_warning_and_is_called_again(tmp_path):
    hooks, events = hooks_of(tmp_path, section("fail", every_steps=1))
    for step in (1, 2):
        hooks.call(STATE, line(step))
    notes = [event.message for event in events if isinstance(event, Noted)]
    assert notes == [
        f"WARNING: hook {__name__}:fail at step {step}: SystemExit: my bug; training goes on"
        for step in (1, 2)
    ]
    assert events[-1] == PhaseChanged("train")


def test_a_hook_that_hangs_is_off_and_the_others_go_on(tmp_path):
    SEEN.clear()
    RELEASE.clear()
    hooks, events = hooks_of(
        tmp_path,
        section("hang", every_steps=1, timeout_seconds=0.05),
        section("look", every_steps=1),
    )
    hooks.call(STATE, line(1))
    hooks.call(STATE, line(2))
    RELEASE.set()
    assert [seen[0] for seen in SEEN] == [1, 2]
    (note,) = [event.message for event in events if isinstance(event, Noted)]
    assert "hang at step 1: took longer than 0.05 s; it is off from now on" in note


def test_a_hook_that_is_off_on_one_host_leaves_the_steps_at_which_all_hosts_wait(tmp_path):
    """A stop or a save that the step's flags request would be obeyed at different steps."""
    hooks, _ = hooks_of(tmp_path, section("hang", every_steps=2, timeout_seconds=0.05))
    others, _ = hooks_of(tmp_path, section("look", every_steps=2))
    RELEASE.clear()
    for each in (hooks, others):
        each.call(STATE, line(2))
    RELEASE.set()
    due = [[each.are_due(step) for step in range(3, 9)] for each in (hooks, others)]
    assert due[0] == due[1] == [False, True, False, True, False, True]


def test_a_function_that_does_not_exist_is_an_error_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"hooks\[0\]\.target: .* has no `absent`"):
        hooks_of(tmp_path, section("absent"))


def test_a_function_that_can_not_be_called_is_an_error_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"hooks\[0\]\.target: .* with run, word: .*hooks\[0\]"):
        hooks_of(tmp_path, section("fail", args={"word": "hi"}))


def test_a_hook_that_writes_into_what_it_gets_changes_nothing(tmp_path):
    SEEN.clear()
    hooks, _ = hooks_of(tmp_path, section("write"), section("look"))
    state = SimpleNamespace(params={"layer": {"w": 1}}, model_state={"mean": 2})
    hooks.call(state, line(100))
    assert (state.params, state.model_state) == ({"layer": {"w": 1}}, {"mean": 2})
    assert SEEN[0][1] == {"layer": {"w": 1}}, "the next hook"


def test_a_keyboard_interrupt_of_a_hook_is_a_warning(tmp_path):
    hooks, events = hooks_of(tmp_path, section("interrupt", every_steps=1))
    hooks.call(STATE, line(1))
    notes = [event.message for event in events if isinstance(event, Noted)]
    assert "interrupt at step 1: KeyboardInterrupt: my own; training goes on" in notes[0]
