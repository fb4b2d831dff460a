"""Any program is started, watched, stopped and restarted as the trainer is, without a change."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxres.exit_codes import ExitCode
from jaxres.program.output import MOST_FILE_BYTES
from jaxres.runlog.run_log import AttemptEnded, read_records
from tests.promises.leftovers import assert_nothing_left
from tests.promises.trainer import TrainingProcess, Workspace, free_address, run_history
from tests.tiers import slow_but
from tests.waiting import has_ended, wait_until

SOURCE = Path(__file__).with_name("any_program.py")
LAST = 10
CAN_NOT_START: list[tuple[dict[str, Any], str]] = [
    ({"command": ["no-such-program"]}, "no-such-program: no such program on PATH"),
    ({"command": ["./main.py"]}, "can't be executed"),
    ({"cwd": "/no/such/folder", "files": []}, "program.cwd: /no/such/folder: no such folder"),
    ({"files": ["other.py"]}, "other.py: no such file"),
]


@dataclass
class ProgramRun:
    """A run of the program, in a folder of its own."""

    workspace: Workspace
    folder: Path
    config: Path
    name: str = "run"
    section: dict[str, Any] = field(default_factory=dict)

    def start(
        self, *overrides: str, hosts: int = 0, flags: tuple[str, ...] = (), **env: str
    ) -> Any:
        """Starts it under `jaxres.train`, or with a number of hosts under `launch local`."""
        given = self.section.get("env", {}) | env
        section = {"program": self.section | {"env": given}}
        self.config.write_text(yaml.safe_dump(section))
        run_dir = self.workspace.run_dir(self.name)
        arguments = [str(self.config), f"run.dir={run_dir.root}", *overrides, *flags]
        verb = ("jaxres.train",)
        if hosts:
            verb = ("jaxres.launch", "local")
            arguments += ["--hosts", str(hosts), "restart.backoff_seconds=0.1"]
        return self.workspace.command(run_dir, arguments, verb=verb)

    def command(self, *words: str) -> str:
        """Returns the output of a `jaxres` command about the run."""
        run_dir = self.workspace.run_dir(self.name)
        found = self.workspace.command(run_dir, list(words), verb=("jaxres",))
        found.wait_exit()
        return found.printed()

    def pid(self, trainer: TrainingProcess, attempt: int, host: int = 0) -> int:
        """Waits until an attempt has started the program; returns its pid there."""
        path = self.folder / f"pid-{host}-{attempt}"
        trainer.wait(lambda: path.exists() and path.read_text() != "", what=f"program {attempt}")
        return int(path.read_text())

    def count(self, host: int = 0) -> int:
        path = self.folder / f"count-{host}"
        return int(path.read_text()) if path.exists() else 0

    def ends(self) -> list[AttemptEnded]:
        """Returns the recorded ends of the attempts."""
        records = read_records(self.workspace.run_dir(self.name).log)
        return [record.body for record in records if isinstance(record.body, AttemptEnded)]

    def output(self, attempt: int = 1, host: int = 0) -> str:
        return self.workspace.run_dir(self.name).output(attempt, host).read_text()


@pytest.fixture
def program(workspace: Workspace) -> ProgramRun:
    folder = workspace.root / "own"
    folder.mkdir()
    shutil.copy(SOURCE, folder / "main.py")
    section = {
        "command": ["python", "main.py", str(folder)],
        "files": ["main.py"],
        "cwd": str(folder),
    }
    return ProgramRun(workspace, folder, workspace.root / "program.yaml", section=section)


def test_a_program_that_exits_with_0_is_done_and_never_run_again(program: ProgramRun) -> None:
    first = program.start()
    assert first.wait_exit() == ExitCode.DONE, first.printed()
    assert "begins\n" in first.printed()
    assert f"count {LAST}\n" in first.printed()
    assert sorted(program.output().splitlines()) == sorted(first.printed().splitlines())
    state = json.loads(program.command("status", str(first.run_dir.root), "--json"))
    assert state["state"] == "done", state
    assert "DONE (exit 0)" in program.command("history", str(first.run_dir.root), "--attempts")
    assert "1 attempt, 0 incidents" in program.command("report", str(first.run_dir.root))
    assert "done" in program.command("runs", str(program.workspace.root))
    (program.folder / "count-0").unlink()
    again = program.start()
    assert again.wait_exit() == ExitCode.DONE
    assert "nothing to do" in again.printed()
    assert program.count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_killed_program_is_restarted_until_it_is_done(program: ProgramRun, hosts: int) -> None:
    chance = random.Random(hosts)
    trainer = program.start(hosts=hosts, PACE="0.2")
    for attempt in (1, 2):
        victims = [program.pid(trainer, attempt, host) for host in range(hosts)]
        time.sleep(chance.uniform(0, 0.6))
        os.kill(chance.choice(victims), signal.SIGKILL)
        trainer.wait(lambda n=attempt: len(program.ends()) >= n, what=f"end {attempt}")
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert [end.exit for end in program.ends()] == [137, 137, ExitCode.DONE]
    assert [program.count(host) for host in range(hosts)] == [LAST] * hosts
    assert_nothing_left(trainer.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("request_by", ["SIGTERM", "SIGINT", "stop file"])
def test_a_stop_is_a_sigterm_to_the_program_and_the_run_goes_on(
    program: ProgramRun, request_by: str
) -> None:
    trainer = program.start("deadlines.silence_seconds=60", PACE="3600")
    program.pid(trainer, 1)
    trainer.wait_printed("begins")
    if request_by == "stop file":
        (trainer.run_dir.root / "stop").touch()
    else:
        trainer.process.send_signal(signal.Signals[request_by])
    expected = ExitCode.PREEMPTED if request_by == "SIGTERM" else ExitCode.STOPPED
    assert trainer.wait_exit() == expected, trainer.printed()
    assert "saved\n" in trainer.printed()
    again = program.start()
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert [end.exit for end in program.ends()] == [expected, ExitCode.DONE]


@pytest.mark.slow
def test_a_program_that_ignores_sigterm_is_killed_in_time(program: ProgramRun) -> None:
    trainer = program.start("deadlines.stop_seconds=1", DO="deaf")
    trainer.wait_printed("deaf")
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
    assert "deadlines.stop_seconds" in program.ends()[0].reason
    assert has_ended(program.pid(trainer, 1))


@pytest.mark.slow
def test_silence_is_a_hang_and_output_is_none(program: ProgramRun) -> None:
    limit = "deadlines.silence_seconds=6"
    one = "restart.max_attempts_without_commit=1"
    trainer = program.start(limit, one, hosts=1, DO="silent", CHATTY_SECONDS="9")
    assert trainer.wait_exit() == ExitCode.NO_PROGRESS, trainer.printed()
    assert [end.exit for end in program.ends()] == [ExitCode.HUNG]
    output = program.output()
    assert output.count("chatty") > 1
    assert "silent" in output.splitlines()
    assert "Fatal Python error: Aborted" in output
    assert "in be_silent" in output
    assert has_ended(program.pid(trainer, 1))


@pytest.mark.slow
def test_no_process_of_a_program_is_left(program: ProgramRun) -> None:
    budget = "restart.max_attempts_without_commit=2"
    trainer = program.start(budget, hosts=1, DO="children", STAYS="0")
    assert trainer.wait_exit() == ExitCode.NO_PROGRESS, trainer.printed()
    assert [end.exit for end in program.ends()] == [ExitCode.BUG] * 2
    wait_until(lambda: not _with_argument(str(program.folder)), "end of the children")


@pytest.mark.slow
def test_no_process_of_a_program_outlives_the_next_attempt(program: ProgramRun) -> None:
    trainer = program.start(hosts=1, DO="children", STAYS="3600")
    trainer.wait_printed("has children")
    trainer.process.send_signal(signal.SIGKILL)
    trainer.process.wait()
    assert _with_argument(str(program.folder)), "left behind"
    again = program.start(hosts=1)
    assert again.wait_exit() == ExitCode.DONE, again.printed()
    assert not _with_argument(str(program.folder))


def _with_argument(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        found += [str(path)] if text.encode() in words else []
    return found


@pytest.mark.slow
def test_no_process_of_a_program_outlives_a_killed_supervisor(program: ProgramRun) -> None:
    trainer = program.start(PACE="3600")
    pid = program.pid(trainer, 1)
    trainer.process.send_signal(signal.SIGKILL)
    trainer.process.wait()
    wait_until(lambda: has_ended(pid), "end of the program")


@pytest.mark.parametrize(
    ("change", "says"),
    slow_but(CAN_NOT_START, CAN_NOT_START[0]),
)
def test_a_program_that_can_not_start_is_one_clear_error(
    program: ProgramRun, change: dict[str, Any], says: str
) -> None:
    program.section |= change
    trainer = program.start()
    trainer.assert_fails(ExitCode.CONFIG, says)
    assert not trainer.run_dir.root.exists()


@pytest.mark.slow
def test_a_program_that_prints_much_fills_no_disk(program: ProgramRun) -> None:
    trainer = program.start(DO="much")
    assert trainer.wait_exit() == ExitCode.DONE
    path, older = (getattr(trainer.run_dir, name)(1, 0) for name in ("output", "older_output"))
    assert path.stat().st_size <= MOST_FILE_BYTES
    assert older.stat().st_size <= MOST_FILE_BYTES
    lines = path.read_text().splitlines()
    assert "MiB before this are in output-host000-older.txt" in lines[0]
    assert lines[-1] == "the end"
    assert trainer.output.stat().st_size > 100 * 2**20


@pytest.mark.slow
def test_the_processes_of_a_program_meet_by_jax_distributed(program: ProgramRun) -> None:
    once = ("--no-restart",)
    trainer = program.start(hosts=2, flags=once, DO="meet", JAX_PLATFORMS="cpu")
    assert trainer.wait_exit() == ExitCode.DONE, trainer.printed()
    assert all("met [0, 1]" in program.output(1, host) for host in (0, 1))
    assert trainer.printed().count("met [0, 1]") == 1


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_a_notice_on_one_host_reaches_the_program_on_all(program: ProgramRun, host: int) -> None:
    at = free_address()
    trainers = [
        program.start(
            flags=("--coordinator", at, "--num-hosts=2", f"--host-id={number}"), PACE="3600"
        )
        for number in (0, 1)
    ]
    for number, trainer in enumerate(trainers):
        program.pid(trainer, 1, number)
    for number in (0, 1):
        wait_until(lambda n=number: "begins" in program.output(1, n), "a begun program")
    trainers[host].process.send_signal(signal.SIGTERM)
    codes = [trainer.wait_exit() for trainer in trainers]
    printed = "\n".join(trainer.printed() for trainer in trainers)
    assert codes == [ExitCode.PREEMPTED] * 2, printed
    assert all("saved" in program.output(1, number) for number in (0, 1)), printed


@pytest.mark.slow
def test_other_files_are_refused_and_another_environment_is_not(program: ProgramRun) -> None:
    first = program.start(DO="fail", CODE="3")
    assert first.wait_exit() == ExitCode.BUG, first.printed()
    run_dir, main = first.run_dir, program.folder / "main.py"
    with main.open("a") as file:
        file.write("# changed\n")
    program.start().assert_fails(ExitCode.CONFIG, "program.files.main.py: recorded")
    by_run = program.workspace.command(run_dir, [str(run_dir.root)])
    by_run.assert_fails(ExitCode.CONFIG, "main.py has changed: recorded sha256")
    assert len(run_history(run_dir).claims) == 1
    shutil.copy(SOURCE, main)
    last = program.start(DO="count")
    assert last.wait_exit() == ExitCode.DONE, last.printed()
    assert len(run_history(run_dir).claims) == 2


@pytest.mark.slow
def test_messages_of_a_program_reach_the_supervisor_and_bad_lines_do_no_harm(
    program: ProgramRun,
) -> None:
    trainer = program.start(DO="messages")
    assert trainer.wait_exit() == ExitCode.DIVERGED, trainer.printed()
    assert program.ends()[0].reason == "the loss is nan"
    assert trainer.printed().count("that is no message") == 1
    (ended,) = (event for event in trainer.events() if event["event"] == "run_ended")
    assert ended["step"] == 7


def test_a_secret_of_a_program_is_not_shown(program: ProgramRun) -> None:
    secret = "hf_" + "a" * 30
    trainer = program.start(HF_TOKEN=secret, DO="fail", CODE="75")
    assert trainer.wait_exit() == ExitCode.PREEMPTED, trainer.printed()
    recorded = trainer.run_dir.attempt(1) / "config.yaml"
    assert recorded.stat().st_mode & 0o077 == 0
    assert secret not in trainer.printed()


@pytest.mark.parametrize(
    "verb", slow_but(["doctor", "plan", "resume-check", "data show"], "doctor")
)
def test_commands_of_the_trainer_refuse_a_program(program: ProgramRun, verb: str) -> None:
    program.config.write_text(yaml.safe_dump({"program": program.section}))
    assert "runs a program" in program.command(*verb.split(), str(program.config))
