"""If supervisor or worker dies, no process remains, and the same command resumes the run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.paths import RunDir
from tests.promises.leftovers import members, wait_until_gone
from tests.promises.trainer import ENDLESS, FAULTY, PACED, Workspace, assert_bit_exact
from tests.tiers import campaign


@pytest.mark.slow
@pytest.mark.parametrize("when", ["training", "first instants"])
def test_worker_is_killed_with_its_supervisor(
    workspace: Workspace, fault_free: RunDir, when: str
) -> None:
    workspace.fresh = when == "first instants"
    trainer = workspace.start("run", ENDLESS, config=FAULTY, env=PACED)
    if when == "training":
        trainer.wait_step(13)
    else:
        trainer.wait(lambda: trainer.worker() is not None, what="a worker")
    assert len(members(trainer.run_dir)) == 2
    trainer.kill(target="supervisor")
    assert trainer.wait_exit() == -9
    wait_until_gone(trainer.run_dir)
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_supervisor_reports_a_killed_worker(workspace: Workspace, fault_free: RunDir) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED | {"HELD": "16"})
    trainer.wait_step(13)
    trainer.kill(target="worker")
    printed = trainer.assert_fails(128 + signal.SIGKILL, "killed by SIGKILL")
    assert re.search("phase '(train|wait for data)'", printed), "it was held before a save"
    record = trainer.end_record()
    assert record is not None
    assert (record.exit, record.committed) == (137, False)
    wait_until_gone(trainer.run_dir)
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_a_run_whose_processes_were_all_killed_can_resume(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = workspace.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    trainer.kill()
    assert trainer.wait_exit() == -9
    wait_until_gone(trainer.run_dir)
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["row:400:fail", *campaign(["trace:1:fail", "row:400:sys_exit"])])
def test_error_in_custom_code_is_reported_once_as_a_bug(
    workspace: Workspace, fault_free: RunDir, fault: str
) -> None:
    trainer = workspace.start("run", config=FAULTY, env={"FAULT": fault})
    assert trainer.wait_exit() == ExitCode.BUG, trainer.printed()
    printed = trainer.printed()
    name = "sys.exit" if "sys_exit" in fault else "OnPurpose"
    assert printed.count("(exit 70 BUG)") == 1, printed
    assert f"{name}" in printed
    written = trainer.run_dir.traceback(1, 0).read_text()
    assert "faulty.py" in written
    assert printed.count("most recent call last") == written.count("most recent call last")
    record = trainer.end_record()
    assert record is not None
    assert record.exit == ExitCode.BUG
    assert "traceback-host000.txt" in record.reason
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
def test_worker_that_exits_without_an_exit_message_has_not_finished(
    workspace: Workspace, fault_free: RunDir
) -> None:
    trainer = workspace.start("run", config=FAULTY, env={"FAULT": "row:400:os_exit"})
    trainer.assert_fails(ExitCode.BUG, "exited with 0 without an exit message")
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["row:400:exhaust_host", "heldout:3:exhaust_device", *campaign(["heldout:3:exhaust_host"])],
)
def test_out_of_memory_names_settings_to_change(
    workspace: Workspace, fault_free: RunDir, fault: str
) -> None:
    trainer = workspace.start("run", config=FAULTY, env={"FAULT": fault})
    printed = trainer.assert_fails(ExitCode.OUT_OF_MEMORY, "train.microbatches=2 (1 now: 24 rows")
    assert ("RESOURCE_EXHAUSTED" in printed) == ("device" in fault), printed
    record = trainer.end_record()
    assert record is not None
    assert record.exit == ExitCode.OUT_OF_MEMORY
    workspace.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, fault_free)


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.mark.slow
def test_kill_by_the_oom_killer_is_distinguished_from_other_kills(
    workspace: Workspace, fault_free: RunDir
) -> None:
    """A real OOM kill: the run's memory cgroup allows hardly more than its present use."""
    mine = next(
        row.split(":", 2)[2]
        for row in Path("/proc/self/cgroup").read_text().splitlines()
        if ":memory:" in row or row.startswith("0::")
    )
    is_old = (GROUPS / "memory.limit_in_bytes").exists()
    parent = GROUPS / mine.lstrip("/") if is_old else Path("/sys/fs/cgroup") / mine.lstrip("/")
    limit = "memory.limit_in_bytes" if is_old else "memory.max"
    group = parent / f"jaxres-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made here ({error}); the counter has unit tests")
    try:
        if not (group / limit).exists():
            pytest.skip("memory groups are not delegated here; the counter has unit tests")
        workspace.through = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        trainer = workspace.start("run", config=FAULTY, env=PACED | {"FAULT": "row:900:eat"})
        trainer.wait_step(13)
        in_use = "memory.usage_in_bytes" if is_old else "memory.current"
        (group / limit).write_text(str(int((group / in_use).read_text()) + (64 << 20)))
        printed = trainer.assert_fails(ExitCode.OUT_OF_MEMORY, "the kernel killed the worker")
        assert "data.prefetch_batches=4 (8 now: batches of 24 rows" in printed
        workspace.through = ()
        workspace.finish("run", config=FAULTY)
        assert_bit_exact(trainer.run_dir, fault_free)
    finally:
        workspace.end_all()
        group.rmdir()
