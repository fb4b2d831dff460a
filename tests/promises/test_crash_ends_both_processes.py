"""Whoever of door and worker dies, nobody is left behind, and the same command goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxres.faults import Exit
from jaxres.runlog.paths import RunDir
from tests.promises.leftovers import members, wait_for_nobody
from tests.promises.trainer import FAULTY, PACED, Place, assert_bit_exact


@pytest.mark.parametrize("when", ["training", "first instants"])
def test_worker_dies_with_its_door(place: Place, calm: RunDir, when: str) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    if when == "training":
        trainer.wait_step(13)
    else:
        trainer.wait(lambda: trainer.worker() is not None, what="a worker")
    assert len(members(trainer.run_dir)) == 2
    trainer.kill(who="door")
    assert trainer.ended() == -9
    wait_for_nobody(trainer.run_dir, seconds=1 if when == "training" else 3)
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_door_tells_of_a_worker_that_was_killed(place: Place, calm: RunDir) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    trainer.kill(who="worker")
    trainer.refused(128 + signal.SIGKILL, "ended by SIGKILL", "phase 'train'")
    words = trainer.last_words()
    assert words is not None
    assert (words.exit, words.committed) == (137, False)
    wait_for_nobody(trainer.run_dir, seconds=1)
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_both_killed_leave_a_run_that_goes_on(place: Place, calm: RunDir) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    trainer.wait_step(13)
    trainer.kill()
    assert trainer.ended() == -9
    wait_for_nobody(trainer.run_dir, seconds=1)
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


@pytest.mark.parametrize("fault", ["row:400:fail", "trace:1:fail", "row:400:sys_exit"])
def test_error_in_custom_code_is_a_bug_told_once(place: Place, calm: RunDir, fault: str) -> None:
    trainer = place.start("run", config=FAULTY, env={"FAULT": fault})
    assert trainer.ended() == Exit.BUG, trainer.said()
    said = trainer.said()
    name = "sys.exit" if "sys_exit" in fault else "OnPurpose"
    assert said.count("(exit 70 BUG)") == 1, said
    assert f"{name}" in said
    written = trainer.run_dir.traceback(1, 0).read_text()
    assert "faulty.py" in written
    assert said.count("most recent call last") == written.count("most recent call last")
    words = trainer.last_words()
    assert words is not None
    assert words.exit == Exit.BUG
    assert "traceback-host000.txt" in words.reason
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


def test_worker_that_leaves_without_a_word_has_not_finished(place: Place, calm: RunDir) -> None:
    trainer = place.start("run", config=FAULTY, env={"FAULT": "row:400:os_exit"})
    trainer.refused(Exit.BUG, "left with 0 and did not say why")
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


@pytest.mark.parametrize(
    "fault", ["row:400:exhaust_host", "heldout:3:exhaust_device", "heldout:3:exhaust_host"]
)
def test_memory_that_ran_out_names_settings(place: Place, calm: RunDir, fault: str) -> None:
    trainer = place.start("run", config=FAULTY, env={"FAULT": fault})
    said = trainer.refused(Exit.OUT_OF_MEMORY, "train.microbatches=2 (1 now: 24 rows")
    assert ("RESOURCE_EXHAUSTED" in said) == ("device" in fault), said
    words = trainer.last_words()
    assert words is not None
    assert words.exit == Exit.OUT_OF_MEMORY
    place.finish("run", config=FAULTY)
    assert_bit_exact(trainer.run_dir, calm)


GROUPS = Path("/sys/fs/cgroup/memory")


def test_kernels_memory_kill_is_told_from_other_kills(place: Place, calm: RunDir) -> None:
    """A real kill: the run's own memory group may hold hardly more than it holds already."""
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
        place.through = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        trainer = place.start("run", config=FAULTY, env=PACED | {"FAULT": "row:900:eat"})
        trainer.wait_step(13)
        in_use = "memory.usage_in_bytes" if is_old else "memory.current"
        (group / limit).write_text(str(int((group / in_use).read_text()) + (64 << 20)))
        said = trainer.refused(Exit.OUT_OF_MEMORY, "the kernel killed the worker")
        assert "data.prefetch_batches=4 (8 now: batches of 24 rows" in said
        place.through = ()
        place.finish("run", config=FAULTY)
        assert_bit_exact(trainer.run_dir, calm)
    finally:
        place.end_all()
        group.rmdir()
