"""The hook of `jaxres chaos` plants a fault into its worker: on its host, from its step on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxres.clock import SystemClock
from jaxres.faults import UnhealthyHost
from jaxres.models.target import load_target
from jaxres.train import loop
from jaxres.train.chaos_hooks import break_hook, fault_request, faulty_worker_hook
from jaxres.train.chaos_hooks.fault_request import WORKER_HOOK, FaultRequest
from jaxres.train.checks import oom_advice, preflight

SMALL = preflight.Extent(64, 1, 1.0, 2**16, 2**16, 2**16)
SECONDS = 0.001


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    break_hook.folder_of(tmp_path / "run").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> list[int]:
    """The steps that a loop with the hook of host 1 has dispatched; `loop.dispatch` does it."""
    steps: list[int] = []
    monkeypatch.setattr(loop, "dispatch", loop.dispatch)  # Restored at the end.
    monkeypatch.setattr(faulty_worker_hook, "_dispatch", lambda *_, step: steps.append(step))
    context: Any = SimpleNamespace(run_dir=run_dir, host=1)
    hook = load_target(WORKER_HOOK, key="hooks[0]")
    for _ in range(2):  # It is called after each step.
        hook(context)
    return steps


def dispatch(step: int) -> None:
    nothing: Any = None
    loop.dispatch(nothing, nothing, nothing, nothing, step=step)


def test_memory_runs_out_in_each_later_step_until_the_request_is_withdrawn(
    run_dir: Path, dispatched: list[int]
) -> None:
    dispatch(4)
    fault_request.write(run_dir, FaultRequest(number=3, step=5, kind="exhaust", host=1))
    dispatch(5)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            dispatch(6)
        assert oom_advice.is_oom(raised.value)
    assert "for step 6" in fault_request.done(run_dir, number=3, host=1)
    fault_request.withdraw(run_dir)
    dispatch(6)
    assert dispatched == [4, 5, 6]


def test_a_fault_of_another_host_is_not_met(run_dir: Path, dispatched: list[int]) -> None:
    fault_request.write(run_dir, FaultRequest(number=0, step=5, kind="exhaust", host=0))
    dispatch(6)
    assert dispatched == [6]
    assert fault_request.done(run_dir, number=0, host=1) == ""


def test_a_slow_host_sleeps_in_each_later_step(
    run_dir: Path, dispatched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(SystemClock, "sleep", lambda _, seconds: slept.append(seconds))
    request = FaultRequest(number=0, step=5, kind="sleep", seconds=SECONDS)
    fault_request.write(run_dir, request)
    for step in (5, 6, 7):
        dispatch(step)
    assert (dispatched, slept) == ([5, 6, 7], [SECONDS, SECONDS])
    text = "0.001 s longer for each step from 6 on"
    assert fault_request.done(run_dir, number=0, host=1) == text


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_wrong_product_fails_the_test_of_the_first_device_of_its_host(
    host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "product", preflight.product)  # Restored at the end.
    faulty_worker_hook.plant_wrong_product(host)
    tests = preflight.run(
        SMALL, dtypes=["float32"], places=[tmp_path], host="node-7", clock=SystemClock()
    )
    if host == 1:
        assert list(tests), "this is host 0"
        return
    with pytest.raises(UnhealthyHost, match=r"node-7: device 0 .* product of float32"):
        list(tests)
