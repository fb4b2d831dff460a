"""A step counts only once all of it is on the disk: when its record appears, it is whole."""

from __future__ import annotations

import signal

from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tests.promises.trainer import Place, assert_bit_exact, digest, line


def test_a_commit_record_means_a_whole_step(place: Place, tiny: RunDir) -> None:
    trainer = place.start("watched")
    whole: dict[int, str] = {}
    for _ in range(4):
        before = len(files.list_names(trainer.run_dir.log))
        trainer.wait(
            lambda before=before: len(files.list_names(trainer.run_dir.log)) > before,
            what="a record",
        )
        trainer.kill(signal.SIGSTOP)
        newest = line(trainer.run_dir).newest
        if newest is not None:
            whole[newest.step] = digest(trainer.run_dir, newest.step)
        trainer.kill(signal.SIGCONT)
    trainer.kill()
    assert trainer.ended() == -9
    assert len(whole) >= 2, "hardly any commit was looked at"

    place.finish("watched")
    assert_bit_exact(place.run_dir("watched"), tiny)


def test_a_kill_at_the_commit_record_loses_nothing(place: Place, tiny: RunDir) -> None:
    trainer = place.start("broken")
    trainer.wait(lambda: line(trainer.run_dir).newest is not None, what="a commit record")
    trainer.kill()
    assert trainer.ended() == -9
    committed = line(trainer.run_dir).step
    assert committed > 0

    again = place.finish("broken")
    assert f"going on from step {committed} " in again.said()
    assert_bit_exact(place.run_dir("broken"), tiny)
