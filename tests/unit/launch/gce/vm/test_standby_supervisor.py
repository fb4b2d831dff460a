"""A supervisor that waits is used once, with the code and config that it was started for, or ends.

Each test's agent is a process of its own: it starts the standby as on a VM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jaxres.exit_codes import ExitCode
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record, file_name
from tests.promises.trainer import ROOT, TINY
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS, wait_until

KEY = ("code", "config")


def agent(folder: Path, code: str) -> Any:
    """Runs code in a process that has started a standby; returns the JSON that the code prints."""
    given = f"""
        import json, os, time
        from pathlib import Path
        from jaxres import config as configs
        from jaxres.launch.gce.vm.standby_supervisor import StandbySupervisor
        from jaxres.runlog.paths import RunDir
        from tests.waiting import wait_until

        folder = Path({str(folder)!r})
        standby = StandbySupervisor(folder)
        config = configs.load(Path({str(TINY)!r})).config
        standby.start(RunDir(folder / "run"), config, env=os.environ, key={KEY!r})
        pid = standby._process.pid
        output = folder / "output-0001.txt"

        def wait_ready():
            wait_until(standby.poll, "standby")

        def take(key={KEY!r}, arguments=("--no-such-flag",)):
            return standby.take(arguments, env=dict(os.environ), key=key, output=output)

        def is_gone():
            return not Path(f"/proc/{{pid}}").exists()
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(given) + textwrap.dedent(code)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.slow
def test_the_standby_becomes_the_training_of_one_attempt(tmp_path: Path) -> None:
    code, second = agent(
        tmp_path,
        """
        wait_ready()
        process = take()
        print(json.dumps([process.wait(), take() is None]))
        """,
    )
    assert code == ExitCode.USAGE
    assert second, "one process for two attempts"
    assert "--no-such-flag: unknown flag" in (tmp_path / "output-0001.txt").read_text()


@pytest.mark.slow
def test_a_standby_for_other_code_or_another_config_is_killed(tmp_path: Path) -> None:
    for key in (("other", "config"), ("code", "other")):
        is_unused, gone = agent(
            tmp_path,
            f"""
            wait_ready()
            print(json.dumps([take(key={key!r}) is None, is_gone()]))
            """,
        )
        assert is_unused, f"{key}: the attempt would run with {KEY}"
        assert gone


@pytest.mark.slow
def test_a_standby_that_is_not_ready_goes_on_as_the_training(tmp_path: Path) -> None:
    is_ready, is_same, code = agent(
        tmp_path,
        """
        import signal
        os.kill(pid, signal.SIGSTOP)
        is_ready, process = standby.poll(), take()
        if process is None:
            print(json.dumps([is_ready, False, None]))
        else:
            os.kill(pid, signal.SIGCONT)
            print(json.dumps([is_ready, process.pid == pid, process.wait()]))
        """,
    )
    assert not is_ready, "it was ready before it could be stopped"
    assert is_same, "the attempt has imported everything again"
    assert code == ExitCode.USAGE
    assert "--no-such-flag: unknown flag" in (tmp_path / "output-0001.txt").read_text()


@pytest.mark.slow
def test_a_standby_that_is_not_ready_forks_its_worker_once_the_imports_are_done(
    tmp_path: Path,
) -> None:
    config = [
        str(TINY),
        f"run.dir={tmp_path}/run",
        "evaluation.every_steps=0",
        "optimizer.schedule={kind: constant}",
    ]
    command = [sys.executable, "-m", "jaxres.train", *config, "train.steps=2"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=SURE_SECONDS)
    is_ready, code = agent(
        tmp_path,
        f"""
        import signal
        os.kill(pid, signal.SIGSTOP)
        is_ready, process = standby.poll(), take(arguments={[*config, "train.steps=4"]!r})
        os.kill(pid, signal.SIGCONT)
        print(json.dumps([is_ready, process.wait()]))
        """,
    )
    assert not is_ready, "it was ready before it could be stopped"
    assert code == ExitCode.DONE
    run_dir = RunDir(tmp_path / "run")
    (opened,) = (e for e in read_events(run_dir.events(2, 0)) if e["event"] == "run_opened")
    assert opened["forked"], (tmp_path / "output-0001.txt").read_text()


@pytest.mark.slow
def test_the_fork_server_of_a_standby_imports_while_the_standby_does(tmp_path: Path) -> None:
    """Here each of the two notes that it imports, and then waits until its parent is gone."""
    log = tmp_path / "run" / RunDir(tmp_path / "run").log.name
    log.mkdir(parents=True)
    (log / file_name(1)).write_bytes(Record(1, 1, 0.0, CLAIM).encode())
    (modules := tmp_path / "modules").mkdir()
    note = f"open(f'{tmp_path}/imports-{{os.getpid()}}', 'w').close()"
    wait = "parent = os.getppid()\nwhile os.getppid() == parent: time.sleep(0.05)\nsys.exit()"
    (modules / "pydantic.py").write_text(f"import os, sys, time\n{note}\n{wait}")
    given = {"PYTHONPATH": f"{modules}:{ROOT}"}
    is_started = agent(
        tmp_path,
        f"""
        standby.stop()
        standby.start(RunDir(folder / "run"), config, env=os.environ | {given!r}, key={KEY!r})
        pid = standby._process.pid
        children = Path(f"/proc/{{pid}}/task/{{pid}}/children")

        wait_until((folder / f"imports-{{pid}}").exists, "import")
        commands = [Path(f"/proc/{{n}}/cmdline").read_text() for n in children.read_text().split()]
        print(json.dumps(any("prepared.forkserver" in command for command in commands)))
        """,
    )
    assert is_started, "the standby imports first"


@pytest.mark.slow
def test_a_standby_ends_with_its_agent(tmp_path: Path) -> None:
    pid = agent(tmp_path, "wait_ready(); print(pid, flush=True); os._exit(0)")
    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists(), "end of it with its agent")
