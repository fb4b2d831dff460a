"""A user's own loop around `jaxres.attempt` keeps the promises: killed, preempted, damaged."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxres
from jaxres.exit_codes import ExitCode
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_json_lines
from jaxres.runlog.paths import RunDir
from tests import damage
from tests.promises.trainer import ROOT
from tests.waiting import SURE_SECONDS, wait_until

LOOP = ROOT / "tests/promises/own_loop.py"
EXAMPLES = {name: ROOT / f"examples/{name}/train.py" for name in ("nnx_mnist", "decoder")}
ENDLESS = 10**6


class Program:
    """A process of a user's program, and the folder of its run."""

    def __init__(self, script: Path, folder: Path, last: int, hold_at: int = 0) -> None:
        self.folder, self.log = folder, folder.with_suffix(".txt")
        for suffix in (".held", ".go"):
            folder.with_suffix(suffix).unlink(missing_ok=True)
        words = [sys.executable, str(script), str(folder), str(last)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        env["HOLD"] = f"{hold_at}:{folder}"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, env=env, stdout=log, stderr=log)

    def wait(self) -> int:
        return self.process.wait(SURE_SECONDS)

    def held(self) -> Program:
        """Waits until the program holds."""
        wait_until(lambda: self.folder.with_suffix(".held").exists() or self.process.poll())
        assert self.process.poll() is None, self.log.read_text()
        return self

    def send(self, number: int) -> Program:
        self.process.send_signal(number)
        self.folder.with_suffix(".go").touch()
        return self


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.process.kill()
        program.process.wait()


def digest(folder: Path) -> tuple[int, str | None]:
    """Returns the newest committed step, and the digest of all of it."""
    report = jaxres.checkpoints(folder).verify()[-1]
    return report.step, report.digest


def _has_run(program: Program, step: int, run_dir: RunDir) -> bool:
    """Returns whether a step is committed; fails if the program has ended before."""
    assert program.process.poll() is None, program.log.read_text()
    return run_log.fold(run_log.read_records(run_dir.log)).step >= step


def unbroken(script: Path, folder: Path, last: int) -> tuple[int, str | None]:
    program = Program(script, folder, last)
    assert program.wait() == ExitCode.DONE, program.log.read_text()
    return digest(folder)


@pytest.mark.slow
def test_killed_at_any_step_it_ends_as_an_unbroken_run(
    tmp_path: Path, programs: list[Program]
) -> None:
    chance, folder, step = random.Random(tmp_path.name), tmp_path / "a", 0
    for _ in range(3):
        step += chance.randrange(3, 12)
        programs.append(Program(LOOP, folder, ENDLESS, hold_at=step))
        assert programs[-1].held().send(signal.SIGKILL).wait() == -signal.SIGKILL
    last = step + 4
    programs.append(Program(LOOP, folder, last))
    assert programs[-1].wait() == ExitCode.DONE, programs[-1].log.read_text()
    starts = run_log.fold(run_log.read_records(RunDir(folder).log)).starts
    assert len(starts) == 4
    assert max(run_log.start_of(start).step for start in starts) > 0, "a step was restored"
    assert digest(folder) == unbroken(LOOP, tmp_path / "b", last)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_as_an_unbroken_run(
    tmp_path: Path, programs: list[Program], name: str
) -> None:
    example, chance, folder = EXAMPLES[name], random.Random(tmp_path.name), tmp_path / "a"
    for attempt in (1, 2):
        programs.append(Program(example, folder, ENDLESS))
        wait_until(lambda number=attempt: _has_run(programs[-1], 100 * number, RunDir(folder)))
        more, metrics = chance.randrange(1, 60), RunDir(folder).metrics(attempt)
        lines = len(read_json_lines(metrics)) + more
        wait_until(lambda path=metrics, n=lines: len(read_json_lines(path)) >= n)
        assert programs[-1].send(signal.SIGKILL).wait() == -signal.SIGKILL
    (newest, _) = digest(folder)
    assert newest > 0
    last = newest + 50
    programs.append(Program(example, folder, last))
    assert programs[-1].wait() == ExitCode.DONE, programs[-1].log.read_text()
    assert digest(folder) == unbroken(example, tmp_path / "b", last)


@pytest.mark.slow
def test_a_notice_saves_the_step_and_exits_75_and_the_next_start_goes_on(
    tmp_path: Path, programs: list[Program]
) -> None:
    folder = tmp_path / "a"
    programs.append(Program(LOOP, folder, ENDLESS, hold_at=7))
    assert programs[-1].held().send(signal.SIGTERM).wait() == ExitCode.PREEMPTED
    assert digest(folder)[0] == 8, "the step after the notice"
    printed = programs[-1].log.read_text()
    assert "(exit 75 PREEMPTED)" in printed
    assert "the program goes on" not in printed
    programs.append(Program(LOOP, folder, 11))
    assert programs[-1].wait() == ExitCode.DONE
    assert "the program goes on" in programs[-1].log.read_text()
    assert digest(folder) == unbroken(LOOP, tmp_path / "b", 11)


@pytest.mark.slow
def test_a_damaged_newest_step_is_named_and_computed_again(
    tmp_path: Path, programs: list[Program]
) -> None:
    folder = tmp_path / "a"
    wanted = unbroken(LOOP, folder, 12)
    (step_dir,) = (folder / "checkpoints").glob("00000012-*")
    data = max(step_dir.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    damage.flip_bit_at(data, data.stat().st_size // 2)
    programs.append(Program(LOOP, folder, 12))
    assert programs[-1].wait() == ExitCode.DONE, programs[-1].log.read_text()
    assert "step 12 is damaged and is excluded" in programs[-1].log.read_text()
    assert digest(folder) == wanted


@pytest.mark.slow
def test_a_second_process_is_refused_and_the_first_goes_on(
    tmp_path: Path, programs: list[Program]
) -> None:
    folder = tmp_path / "a"
    programs.append(Program(LOOP, folder, 9, hold_at=4))
    first = programs[-1].held()
    words = [sys.executable, str(LOOP), str(folder), "9"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    second = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert second.returncode == ExitCode.FENCED, second.stderr
    assert "owned by host" in second.stderr
    first.send(signal.SIGCONT)
    assert first.wait() == ExitCode.DONE
    assert digest(folder) == unbroken(LOOP, tmp_path / "b", 9)
