"""A real HTTP server receives each incident of a run once; the secret is stored nowhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jaxres.exit_codes import ExitCode
from tests.promises.trainer import FAULTY, PACED, Workspace
from tests.unit.telemetry.webhook_server import served

TARGETS = "alerts.targets=[{kind: generic, url_env: HOOK}, {kind: slack, url_env: DEAD}]"
SECRET = "s3cret-token"


@pytest.mark.slow
def test_a_restart_and_the_end_are_each_delivered_once_although_the_server_fails(
    workspace: Workspace,
) -> None:
    with served(500, 500) as hook:
        secrets = {"HOOK": hook.url, "DEAD": f"http://127.0.0.1:9/{SECRET}"}
        env = {**PACED, **secrets}
        trainer = workspace.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True, env=env)
        trainer.wait_commit(10)
        worker = trainer.worker()
        assert worker is not None
        assert SECRET.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
        os.kill(worker, signal.SIGKILL)
        second = workspace.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True, env=env)
        assert second.wait_exit() == ExitCode.FENCED, "a rejected supervisor sends no incident"
        assert trainer.wait_exit() == 0, trainer.printed()
        reported = [(body["kind"], body["attempt"], body["code"]) for body in hook.accepted]
        assert reported == [("restarted", 1, 137), ("finished", 2, 0)]
        assert len(set(hook.keys)) == 2
    files = [path for path in trainer.run_dir.root.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in trainer.printed() + second.printed()
    assert "2 incidents were not delivered to slack:DEAD" in trainer.printed()


def test_a_missing_variable_is_a_config_error(workspace: Workspace) -> None:
    trainer = workspace.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True)
    trainer.assert_fails(ExitCode.CONFIG, "variable HOOK is not set", "variable DEAD is not set")
    assert not trainer.run_dir.log.exists()


@pytest.mark.slow
def test_plain_training_sends_its_own_alerts_over_a_killed_worker_and_a_killed_supervisor(
    workspace: Workspace,
) -> None:
    with served() as hook:
        arguments = ("alerts.targets=[{kind: generic, url_env: HOOK}]",)
        env = {**PACED, "HOOK": hook.url}
        first = workspace.start("run", *arguments, config=FAULTY, env=env)
        first.wait_commit(10)
        worker = first.worker()
        assert worker is not None
        assert SECRET.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
        os.kill(worker, signal.SIGKILL)
        assert first.wait_exit() == 137, first.printed()
        second = workspace.start("run", *arguments, config=FAULTY, env=env)
        second.wait_commit(30)
        second.process.kill()
        second.wait_exit()
        third = workspace.start("run", *arguments, config=FAULTY, env=env)
        assert third.wait_exit() == 0, third.printed()
        assert [(body["kind"], body["attempt"], body["code"]) for body in hook.accepted] == [
            ("attempt_failed", 1, 137),
            ("supervisor_restarted", 2, None),
            ("finished", 3, 0),
        ]
    files = [path for path in third.run_dir.root.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
