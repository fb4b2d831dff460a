"""The storage of the run directory changes no bit: a disk, a mount without locks, a bucket."""

from __future__ import annotations

from pathlib import Path

from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.promises.preloaded import Lockless
from tests.promises.trainer import FAULTY, Workspace, assert_bit_exact, digest, run_history, starts

PACED = {"PACE": "0.004"}


def test_a_disk_a_mount_without_locks_and_a_bucket_give_the_same_digests(
    workspace: Workspace, bucket: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    """The same run, killed once and resumed."""
    (tmp_path / "mount").mkdir()
    mount = Lockless.under(tmp_path / "mount", built_in=tmp_path)
    cases = {"disk": (workspace, {}), "mount": (workspace, mount.env), "bucket": (bucket, {})}
    runs = []
    for name, (where, env) in cases.items():
        first = where.start(name, config=FAULTY, env=env | PACED)
        first.wait_commit(20)
        first.kill()
        assert first.wait_exit() == -9, first.printed()
        where.finish(name, config=FAULTY, env=env)
        assert starts(first.run_dir)[-1] >= 20, "it did not come back"
        runs.append(first.run_dir)
    assert_fails, lost = mount.refusals()
    assert assert_fails >= 2, "no lock was asked for"
    assert lost >= 2, "no answer was lost"
    assert isinstance(runs[-1].root, GcsPath)
    for run_dir in runs:
        assert_bit_exact(run_dir, fault_free)
        for commit in run_history(run_dir).committed:
            if commit.step in {one.step for one in run_history(fault_free).committed}:
                assert digest(run_dir, commit.step) == digest(fault_free, commit.step)
