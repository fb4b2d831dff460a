"""The storage of the run directory changes no bit: a disk, a mount without locks, a bucket."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from tests.promises.preloaded import Lockless
from tests.promises.trainer import (
    FAULTY,
    MLP,
    ROOT,
    TINY,
    Workspace,
    assert_bit_exact,
    digest,
    run_history,
    starts,
)

PACED = {"PACE": "0.004", "HELD": "40"}


def killed_once(
    where: Workspace, fault_free: RunDir, name: str, env: Mapping[str, str] | None = None
) -> RunDir:
    """Kills and resumes a run, compares it with a run on a disk, and returns it."""
    first = where.start(name, config=FAULTY, env={**(env or {}), **PACED})
    first.wait_commit(20)
    first.kill()
    assert first.wait_exit() == -9, first.printed()
    where.finish(name, config=FAULTY, env=env)
    assert starts(first.run_dir)[-1] >= 20, "it did not come back"
    assert_bit_exact(first.run_dir, fault_free)
    for commit in run_history(first.run_dir).committed:
        if commit.step in {one.step for one in run_history(fault_free).committed}:
            assert digest(first.run_dir, commit.step) == digest(fault_free, commit.step)
    return first.run_dir


@pytest.mark.slow
def test_a_bucket_gives_the_digests_of_a_disk(bucket: Workspace, fault_free: RunDir) -> None:
    assert isinstance(killed_once(bucket, fault_free, "run").root, GcsPath)


@pytest.mark.slow
def test_a_mount_without_locks_gives_the_digests_of_a_disk(
    workspace: Workspace, fault_free: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "mount").mkdir()
    mount = Lockless.under(tmp_path / "mount", built_in=tmp_path)
    killed_once(workspace, fault_free, "mount", mount.env)
    refused, lost = mount.refusals()
    assert refused >= 2, "no lock was asked for"
    assert lost >= 2, "no answer was lost"


@pytest.mark.slow
def test_a_run_directory_of_any_path_gives_the_same_bits(
    workspace: Workspace, unbroken: RunDir
) -> None:
    """Relative, with `..` through a link, a leading dash, spaces and other characters."""
    (workspace.root / "disk" / "far").mkdir(parents=True)
    (workspace.root / "link").symlink_to("disk/far")
    name = "-a b='ünï~'"
    run_dir = RunDir(workspace.root / "disk" / name)
    near = os.path.relpath(workspace.root, ROOT)
    arguments = [str(TINY), *MLP, f"run.dir={near}/link/..//{name}"]
    arguments += [f"data.cache_dir={workspace.caches}"]
    trainer = workspace.command(run_dir, arguments, held_after=70)
    trainer.wait_commit(60)
    trainer.kill()
    assert trainer.wait_exit() == -9, trainer.printed()
    again = workspace.command(run_dir, [f"{near}/link/../{name}"])
    assert again.wait_exit() == 0, again.printed()
    assert starts(run_dir)[-1] >= 60
    assert_bit_exact(run_dir, unbroken)
    assert digest(RunDir(workspace.root / "link" / ".." / name)) == digest(unbroken)
