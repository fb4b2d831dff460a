"""A host whose GPU reports a fault exits with 82, names the GPU, and saves only a good state.

NVIDIA's library is a compiled fake; `tests/unit/supervisor/health/test_health_watcher.py` has all
faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres_emulators.nvml import FakeNvml
from tests.promises.trainer import (
    FAULTY,
    PACED,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    free_address,
    run_history,
)
from tests.tiers import campaign_but

pytestmark = pytest.mark.slow
OFTEN = "hardware.health.poll_seconds=0.05"
GPU = "GPU 0 (Fake H100, GPU-0)"
GATE_ROW, COMMITTED, HELD_AFTER = 600, 20, 21
"""A gate holds the run at this row, of batches of 24: after step HELD_AFTER at least, and before
the save after COMMITTED."""


@pytest.fixture
def gpus(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path / "nvml")


def faults(trainer: TrainingProcess, host: int = 0) -> list[tuple[str, str, str]]:
    """Returns kind, action and device of each fault that a supervisor has found."""
    events: list[dict[str, Any]] = read_events(
        trainer.run_dir.host_supervisor_events(trainer.attempt, host)
    )
    found = [event for event in events if event["event"] == "hardware_fault_found"]
    return [(event["kind"], event["action"], event["device"]) for event in found]


def gated(tmp_path: Path, gpus: FakeNvml) -> dict[str, str]:
    return PACED | gpus.env | {"FAULT": f"row:{GATE_ROW}:gate", "GATE": str(tmp_path / "gate")}


def test_a_fatal_xid_ends_the_run_at_once_and_nothing_is_saved_after_it(
    workspace: Workspace, gpus: FakeNvml, tmp_path: Path, fault_free: RunDir
) -> None:
    env = gated(tmp_path, gpus)
    trainer = workspace.launch("run", OFTEN, hosts=1, config=FAULTY, env=env, restart=True)
    trainer.wait_commit(COMMITTED)
    trainer.wait_step(HELD_AFTER)
    assert faults(trainer) == [], "the health process has ended"
    gpus.set("xid 79 a 0")
    printed = trainer.assert_gave_up(ExitCode.UNHEALTHY)
    assert f"{GPU}: Xid 79: the GPU has fallen off" in printed
    assert faults(trainer) == [("xid", "leave", GPU)], printed
    kinds = [event["event"] for event in read_events(trainer.run_dir.supervisor_events)]
    assert kinds[-1] == "gave_up", "it has started again on a sick machine, or sends no alert"
    assert run_history(trainer.run_dir).attempt == 1
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed, record.culprit) == (ExitCode.UNHEALTHY, False, 0)
    assert run_history(trainer.run_dir).step == COMMITTED, "a state was saved after the fault"
    gpus.set()
    workspace.repaired("run")
    again = workspace.finish("run", OFTEN, config=FAULTY, env=gpus.env)
    assert_bit_exact(again.run_dir, fault_free)


REMAP = ("remap_pending 1", "row_remap", "save")


@pytest.mark.parametrize(
    ("line", "kind", "action"),
    campaign_but([REMAP, ("lost 15", "lost", "leave")], REMAP),
)
def test_a_fault_of_one_host_is_named_by_it_and_the_run_goes_on_exactly(
    workspace: Workspace,
    gpus: FakeNvml,
    fault_free_pair: RunDir,
    line: str,
    kind: str,
    action: str,
) -> None:
    at, held = free_address(), PACED | {"HELD": "16"}
    lead, sick = (
        workspace.start_host("run", OFTEN, host=host, hosts=2, at=at, config=FAULTY, env=held | env)
        for host, env in enumerate([{}, gpus.env])
    )
    sick.attempt = lead.attempt
    lead.wait_step(13)
    gpus.set(line)
    saves = action == "save"
    if saves:
        sick.wait_printed("saving after the current step")
        lead.go_on()
    assert sick.wait_stopped() == ExitCode.UNHEALTHY, sick.printed()
    code = lead.wait_exit()
    assert code == (ExitCode.PREEMPTED if saves else ExitCode.PEER_LOST), lead.printed()
    assert faults(sick, host=1) == [(kind, action, GPU)]
    record = lead.end_record()
    assert record is not None
    assert (record.culprit, record.committed) == (1, saves), lead.printed()
    if saves:
        assert run_history(lead.run_dir).step == lead.steps()[-1]
    else:
        assert f"{GPU}: the driver has lost it" in record.reason
    gpus.set()
    workspace.repaired("run")
    again = workspace.launched("run", OFTEN, hosts=2, config=FAULTY, env=gpus.env)
    assert_bit_exact(again.run_dir, fault_free_pair)


def test_a_hung_library_is_a_warning_and_training_goes_on(
    workspace: Workspace, gpus: FakeNvml, tmp_path: Path, fault_free: RunDir
) -> None:
    quick = (OFTEN, "hardware.health.answer_seconds=0.3")
    env = gated(tmp_path, gpus)
    trainer = workspace.start("run", *quick, config=FAULTY, env=env)
    trainer.wait_step(HELD_AFTER)
    gpus.set("hang nvmlDeviceGetTotalEccErrors")
    trainer.wait(lambda: bool(faults(trainer)), what="a warning")
    assert faults(trainer) == [("silent", "warn", "GPUs of this host")]
    Path(env["GATE"]).touch()
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert_bit_exact(trainer.run_dir, fault_free)
