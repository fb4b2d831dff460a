"""A read that fails once at a restart: exit 74 or a retry, and the same bits; no verdict on it."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import AttemptEnded
from tests import bpe
from tests.promises.preloaded import FailingReads, built
from tests.promises.trainer import MLP, Workspace, assert_bit_exact, run_history, starts
from tests.sharing import made_once
from tests.tiers import campaign, slow_but

QUICK = ("restart.storage_backoff_seconds=0.05", "restart.backoff_seconds=0.05")
PARTS = range(8)
VARIABLE = re.compile(r"[0-9a-f]{12,}|[0-9]+|(?<=/d/)[^/]+")
"""Parts of a path that are others in each run: digests, numbers, names of TensorStore's files."""
RUN, CACHES, INPUTS = "RUN", "CACHES", "INPUTS"


@dataclass(frozen=True)
class Interrupted:
    """A killed run, a copy of which is continued.

    Attributes:
      killed: the run.
      unbroken: the same run from start to end.
      caches: its caches.
      has_own_caches: no other run uses them; each copy has a copy of them, too.
      library: `failing.c`, built.
      data: overrides of its data.
      inputs: folder with its data.
    """

    killed: RunDir
    unbroken: RunDir
    caches: Path
    has_own_caches: bool
    library: str
    data: tuple[str, ...] = ()
    inputs: Path = Path("/nonexistent")

    def copy(self, to: Path) -> Workspace:
        """Returns a workspace with a copy of the run, named "run"."""
        caches = self.caches
        if self.has_own_caches:
            caches = to / "caches"
            shutil.copytree(self.caches, caches, copy_function=shutil.copy2)
        workspace = Workspace(to, caches, preload=self.library, more_spares=3)
        workspace.copy(self.killed, "run")
        return workspace


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = made_once(tmp_path_factory, "failing", lambda root: built("failing", root))
    return str(root / "failing.so")


@pytest.fixture(scope="session")
def short(killed: RunDir, unbroken: RunDir, caches: Path, library: str) -> Interrupted:
    """The runs and caches of other tests."""
    return Interrupted(killed, unbroken, caches, False, library)


def data(inputs: Path) -> tuple[str, ...]:
    """Returns the overrides of a run that reads a tokenizer and a folder of texts."""
    return (
        f"data.source={{kind: text, path: {inputs / 'texts'}, include: ['a*.py', 'sub/*.py']}}",
        f"data.tokenizer={{kind: huggingface, path: {inputs / 'tokenizer'}}}",
    )


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory, library: str) -> Interrupted:
    """A run with all that a run can read."""

    def make(root: Path) -> None:
        inputs = root / "inputs"
        bpe.train(inputs / "tokenizer")
        for number, path in enumerate(bpe.SOURCES[:12]):
            to = inputs / "texts" / ("sub" if number % 2 else ".") / f"a{path.name}"
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
        workspace = Workspace(root, root / "caches")
        workspace.finish("unbroken", *MLP, *QUICK, *data(inputs))
        trainer = workspace.start("killed", *MLP, *QUICK, *data(inputs))
        trainer.wait_commit(60)
        trainer.wait_compiled_steps_stored()
        trainer.kill()
        assert trainer.wait_exit() == -9, trainer.printed()
        workspace.end_all()

    root = made_once(tmp_path_factory, "interrupted-reads", make)
    inputs, caches = root / "inputs", root / "caches"
    killed, unbroken = RunDir(root / "killed"), RunDir(root / "unbroken")
    return Interrupted(killed, unbroken, caches, True, library, data(inputs), inputs)


def continue_with_a_failed_read(
    interrupted: Interrupted, root: Path, call: str = "*", number: int = 0
) -> list[str]:
    """Continues the run, of which one read fails; asserts that it ends as an unbroken one.

    Args:
      interrupted: the run.
      root: folder of the copy.
      call: pattern of the call that fails, with RUN, CACHES and INPUTS for the folders.
      number: which of these; 0: none fails.

    Returns:
      The calls of the copy's processes that match, with the same names; "!" is before a failed one.
    """
    workspace = interrupted.copy(root)
    run_dir = workspace.run_dir("run")
    assert isinstance(run_dir.root, Path)
    folders = {RUN: run_dir.root, CACHES: workspace.caches, INPUTS: interrupted.inputs}
    pattern = re.sub("|".join(folders), lambda match: str(folders[match[0]]), call)
    library = interrupted.library
    reads = FailingReads.of(
        *folders.values(), library=library, root=root, call=pattern, number=number
    )
    newest, corpora = run_history(run_dir).step, corpora_of(workspace.caches)
    own = (*MLP, *QUICK, *interrupted.data)
    trainer = workspace.launch("run", *own, hosts=1, restart=True, env=reads.env)
    code, printed = trainer.wait_exit(), trainer.printed()
    where = f"{reads.failed()}\n{printed}"
    assert code in (ExitCode.DONE, ExitCode.STORAGE), f"exit {code} after {where}"
    assert "Traceback" not in printed, where
    assert "damaged" not in printed.replace("Nothing was judged damaged", ""), where
    if code == ExitCode.STORAGE:  # Before the loop, or too late for it: the same command again.
        none = {**reads.env, "JAXRES_TEST_FAIL_NUMBER": "0"}
        trainer = workspace.launch("run", *own, hosts=1, restart=True, env=none)
        assert trainer.wait_exit() == 0, f"{trainer.printed()} after {where}"
    ends = [record.body for record in run_log.read_records(run_dir.log)]
    codes = [int(end.exit) for end in ends if isinstance(end, AttemptEnded)]
    assert set(codes) <= {ExitCode.DONE, ExitCode.STORAGE}, f"{codes} after {where}"
    assert run_history(run_dir).quarantined == (), where
    assert starts(run_dir)[:2] == [0, newest], f"it resumed from another step after {where}"
    now = corpora_of(workspace.caches)
    assert corpora.items() <= now.items(), f"a cached corpus was given up after {where}"
    assert_bit_exact(run_dir, interrupted.unbroken)
    workspace.end_all()
    names = {str(path): name for name, path in folders.items()}
    paths = "|".join(map(re.escape, names))
    return [re.sub(paths, lambda match: names[match[0]], line) for line in reads.seen()]


def corpora_of(caches: Path) -> dict[str, int]:
    """Returns the cached corpora and the inodes of their tokens."""
    return {str(path): path.stat().st_ino for path in (caches / "corpora").glob("*/tokens.bin")}


def places_of(calls: Sequence[str]) -> Counter[str]:
    """Returns the number of reads of each place; a place is a pattern for `continue_with_...`."""
    return Counter(VARIABLE.sub("*", call.replace("[", "?")) for call in calls)


KNOWN = (
    ("open RUN/attempts/0001/config.yaml", 2),
    ("read RUN/attempts/0002/config.yaml", 1),
)
"""Reads after which a run ended with 78, by a supervisor and by a worker."""


@pytest.mark.parametrize(("call", "number"), slow_but(KNOWN, KNOWN[0]))
def test_a_read_that_once_ended_a_run_ends_none(
    short: Interrupted, tmp_path: Path, call: str, number: int
) -> None:
    calls = continue_with_a_failed_read(short, tmp_path, call, number)
    assert has_failed(calls), calls


@pytest.fixture(scope="session")
def reads(tmp_path_factory: pytest.TempPathFactory, interrupted: Interrupted) -> Counter[str]:
    """How often each place is read by the run that is continued, to its end."""

    def make(root: Path) -> None:
        calls = continue_with_a_failed_read(interrupted, root)
        (root / "places.json").write_text(json.dumps(places_of(calls)))

    root = made_once(tmp_path_factory, "places-of-reads", make)
    return Counter(json.loads((root / "places.json").read_text()))


@pytest.mark.parametrize("part", [pytest.param("few", marks=pytest.mark.slow), *campaign(PARTS)])
def test_no_read_that_fails_once_changes_a_bit_or_the_verdict_on_a_run(
    interrupted: Interrupted, reads: Counter[str], tmp_path: Path, part: str | int
) -> None:
    """Each place fails when it is read first, and once later; the few are of all folders."""
    cases = [(call, n) for call, count in sorted(reads.items()) for n in (1, 2, 3) if n <= count]
    start, every = (0, 60) if isinstance(part, str) else (part, len(PARTS))
    failed = []
    for index, (call, number) in enumerate(cases[start::every]):
        folder = tmp_path / str(index)
        folder.mkdir()
        failed.append(has_failed(continue_with_a_failed_read(interrupted, folder, call, number)))
        shutil.rmtree(folder)
    assert sum(failed) >= 0.8 * len(failed), "some places are not read in each run, most are"


def has_failed(calls: Sequence[str]) -> bool:
    """Returns whether one of these calls has failed."""
    return any(call.startswith("!") for call in calls)
