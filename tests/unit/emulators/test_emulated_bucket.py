"""What `jaxres chaos` needs of the emulated bucket: its environment, and silent damage."""

from __future__ import annotations

import os
import random

import pytest

from jaxres.runlog.paths import RunDir
from jaxres.storage.path import GcsPath
from jaxres.train.chaos_hooks import break_hook
from jaxres_emulators.environment import environment
from jaxres_emulators.gcs import GcsServer


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXRES_TEST_A", "before")
    monkeypatch.delenv("JAXRES_TEST_B", raising=False)
    with environment({"JAXRES_TEST_A": "1", "JAXRES_TEST_B": "2"}):
        assert (os.environ["JAXRES_TEST_A"], os.environ["JAXRES_TEST_B"]) == ("1", "2")
    assert os.environ["JAXRES_TEST_A"] == "before"
    assert "JAXRES_TEST_B" not in os.environ


def test_a_flipped_bit_of_an_object_has_no_other_trace() -> None:
    with GcsServer(buckets=("bucket",)) as server:
        stored = server.objects.put("bucket", "name", bytes(8), {}, {})
        where = server.flip_bit("name", random.Random(0))
        found = server.objects.now["bucket", "name"]
    changed = [at for at, byte in enumerate(found.data) if byte]
    assert (changed, found.data[where].bit_count()) == ([where], 1)
    assert found.generation == stored.generation
    assert found.crc32c != stored.crc32c, "a reader's checksum is that of the damaged bytes"


def test_no_two_runs_in_buckets_share_their_local_files() -> None:
    names = ("a/b", "a+b", "a%2Bb", "a%b", "a++b", "a/+b")
    folders = {RunDir(GcsPath("bucket", name)).local for name in names}
    assert len(folders) == len(names)


def test_a_run_in_a_bucket_is_held_by_local_files() -> None:
    run = GcsPath("bucket", "run-1")
    folder = break_hook.folder_of(run)
    assert folder == RunDir(run).local.with_name("bucket+run-1.breaks")
