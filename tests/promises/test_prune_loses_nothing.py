"""A run killed as it prunes loses nothing that it keeps, and keeps nothing that it prunes."""

from __future__ import annotations

from pathlib import Path

from jaxres import runlog, storage, verbs
from jaxres.faults import Exit
from jaxres.rundir import RunDir
from jaxres.runlog import Prune
from tests.promises.trainer import FAULTY, PACED, Place, assert_bit_exact, digest, line, starts


def test_a_kill_at_the_prune_record_loses_nothing_and_leaves_nothing(
    place: Place, calm: RunDir
) -> None:
    trainer = place.start("run", config=FAULTY, env=PACED)
    run_dir = trainer.run_dir
    trainer.wait_commit(10)
    words = ["checkpoints", "pin", str(run_dir.root), "--step", "10"]
    assert verbs.main(words, usage="") == 0
    assert verbs.main(["checkpoints", "prune", str(run_dir.root)], usage="") == Exit.FENCED

    def pruned() -> list[int]:
        bodies = [record.body for record in runlog.read_records(run_dir.log)]
        return [step for body in bodies if isinstance(body, Prune) for step in body.steps]

    trainer.wait(lambda: bool(pruned()), what="a prune record")
    trainer.kill()
    assert trainer.ended() == -9
    assert pruned() == [20], "10 is pinned, and a live run heeds it"
    kept = [commit.step for commit in line(run_dir).committed]
    assert kept == [10, 30, 40]
    for step in kept:
        digest(run_dir, step)

    place.finish("run", config=FAULTY)
    assert starts(run_dir) == [0, 40]
    names = [Path(commit.path).name for commit in line(run_dir).committed]
    assert [name.partition("-")[0] for name in names] == ["00000010", "00000050", "00000060"]
    assert storage.list_names(run_dir.checkpoints) == names
    assert not storage.trash(run_dir.checkpoints)
    assert_bit_exact(run_dir, calm)
