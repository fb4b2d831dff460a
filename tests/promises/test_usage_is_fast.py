"""The help of each command lists all settings and imports no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxres.config.schema.fields import iter_fields
from tests.promises.trainer import ROOT
from tests.tiers import slow_but
from tests.waiting import SURE_SECONDS

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore")
COMMANDS = {
    "train": ["jaxres.train", "--help"],
    "train -h": ["jaxres.train", "-h"],
    "jaxres": ["jaxres", "--help"],
    "jaxres train": ["jaxres", "train", "--help"],
    "launch, with every key of train": ["jaxres.launch", "--help"],
    "launch local, with every key of train": ["jaxres", "launch", "local", "--help"],
}
VERBS = (
    *("train", "launch local", "status", "history", "checkpoints list", "checkpoints digest"),
    "doctor",
)


@pytest.mark.parametrize("name", slow_but(COMMANDS, "train", "jaxres"))
def test_help_is_complete_and_imports_no_jax(name: str) -> None:
    wait_exit = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *COMMANDS[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert wait_exit.returncode == 0, wait_exit.stderr
    if "train" in name:
        wanted = [leaf.key for leaf in iter_fields()]
        assert "checkpoint.save_every_steps" in wanted
    else:
        wanted = [f"  {verb} " for verb in VERBS]
    assert [text for text in wanted if text not in wait_exit.stdout] == []
    modules = {row.rpartition("|")[2].strip() for row in wait_exit.stderr.splitlines()}
    assert "jaxres.exit_codes" in modules, "importtime was not read as meant"
    loaded = {module.partition(".")[0] for module in modules}
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))
