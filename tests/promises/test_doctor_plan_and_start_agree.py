"""`jaxres doctor`, `jaxres plan` and the start of the run say the same of one config."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxres import __main__ as jaxres_command
from jaxres import config as configs
from jaxres.estimate import storage_rate
from jaxres.estimate.storage_rate import StorageRate
from jaxres.jax_cli import doctor
from jaxres.launch.gce import job_config
from jaxres.launch.gce.checks import preflight
from tests.promises.trainer import TINY, Workspace

DEVICES = 8
PLACE = "zones: [us-central1-a], machine_type: a3-highgpu-8g"
SPOT = f"{{kind: spot, {PLACE}}}"
OLD_SPOT = f"{{kind: spot, notice_seconds: 0, dollars_per_hour: 24.0, {PLACE}}}"
STANDARD = f"{{kind: standard, {PLACE}}}"
SHORT = ("train.steps=1", "evaluation.every_steps=0", "telemetry.sample_tokens=0")


def vms(*options: str) -> str:
    return (
        "launch.gce={project: p, image: projects/p/global/images/i, "
        f"capacity_options: [{', '.join(options)}]}}"
    )


@dataclass(frozen=True)
class Case:
    """A config, and parts of what all three say of it."""

    overrides: tuple[str, ...]
    texts: tuple[str, ...]
    on_vm: tuple[str, ...] = ()
    """Overrides of the agent of the VM."""
    rate: bool = False
    """Whether the place was measured."""


CASES = {
    "steps": Case((), ("8 devices on 1 host, 6,335 h between failures", "saved every 8 steps;")),
    "seconds": Case(("checkpoint.when={kind: seconds, every_seconds: 600}",), ("every 0:10:00;",)),
    "auto": Case(("checkpoint.when={kind: auto}",), ("saved every 0:06:56 at first (auto);",)),
    "continuous": Case(("checkpoint.when={kind: continuous}",), ("saved every 1.0 s;",)),
    "state": Case(("optimizer.ema_decay=0.99",), ("state ", "1,000 MB/s a host assumed")),
    "notice": Case(
        ("preemption.notice_seconds=45", "preemption.margin_seconds=10"),
        ("a notice leaves 35 of 45 s: the state is saved in them",),
    ),
    "spot": Case(
        (vms(SPOT),),
        (
            "$25.00 an hour (spot, assumed)",
            "0.15 preemptions a VM and day (Compute Engine has observed 5 to 15 % a day)",
            "leaves 115 of 120 s",
        ),
        on_vm=("preemption.notice_seconds=120",),
    ),
    "short notice": Case((vms(OLD_SPOT),), ("$24.00 an hour (spot)", "leaves 25 of 30 s")),
    "on demand": Case(
        (vms(STANDARD, SPOT), "checkpoint.memory={}", "model.compute_dtype=float16"),
        ("$88.00 an hour (standard, assumed)", "loses the least"),
        on_vm=("preemption.notice_seconds=120",),
    ),
    "measured": Case((), ("a save takes 1.53 s, a restore 0.764 s (1 and 2 MB/s",), rate=True),
}


def by_doctor(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert doctor.main([*arguments, "--json"], env={}) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    return next(check["detail"] for check in checks if check["name"] == "estimate")


def by_plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    fleet = ["--gpus", str(DEVICES), "--gpus-per-host", str(DEVICES), "--replications", "2"]
    assert jaxres_command.main(["plan", *arguments, *fleet, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_start(workspace: Workspace, overrides: tuple[str, ...]) -> tuple[str, list[float]]:
    env = {"JAX_NUM_CPU_DEVICES": str(DEVICES)}
    trainer = workspace.finish("run", *overrides, env=env)
    notes = [event["message"] for event in trainer.events_of("note")]
    (found,) = (note for note in notes if note.startswith("estimate: "))
    assert found in trainer.printed()
    chosen = [event["seconds"] for event in trainer.events_of("save_interval_chosen")]
    return found.removeprefix("estimate: "), chosen


def measure(workspace: Workspace, overrides: tuple[str, ...]) -> None:
    rate = StorageRate(
        place=storage_rate.place_of(workspace.root),
        machine=socket.gethostname(),
        write_mb_per_second=1.0,
        read_mb_per_second=2.0,
        date="2026-11-26",
    )
    storage_rate.store(configs.load(TINY, list(overrides)).config, rate)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_doctor_plan_and_start_say_the_same_of_a_config(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    is_on_vms = any(override.startswith("launch.gce") for override in case.overrides)
    workspace: Workspace = request.getfixturevalue("bucket" if is_on_vms else "workspace")
    own = (f"data.cache_dir={tmp_path / 'cache'}",)  # Other tests measure places, too.
    overrides = (*SHORT, *case.overrides, *own)
    if case.rate:
        measure(workspace, own)
    arguments = workspace._arguments("run", *overrides, config=None)
    before = by_doctor(arguments, capsys)
    planned = by_plan(arguments, capsys)
    started, chosen = by_start(workspace, (*overrides, *case.on_vm))
    assert "; ".join(planned["estimate"]) == before
    assert started == before
    if is_on_vms:
        config, run = job_config.find_without_bucket(Path(arguments[0]), arguments[1:])
        by_up = preflight.estimate_lines(config, run)
        assert [line.removeprefix("estimate: ") for line in by_up] == planned["estimate"]
    for text in case.texts:
        assert text in before
    if chosen:
        assert chosen[0] == pytest.approx(416.03, abs=0.01), "the interval of `auto` is another"
