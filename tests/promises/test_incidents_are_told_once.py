"""A real HTTP server is told of a run's incidents, exactly once each, and the secret is nowhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from jaxres.faults import Exit
from tests.promises.trainer import FAULTY, PACED, Place
from tests.unit.alerts.hooks import served

TARGETS = "alerts.targets=[{kind: generic, url_env: HOOK}, {kind: slack, url_env: DEAD}]"
SECRET = "s3cret-token"


def test_a_fall_and_the_end_are_told_once_though_the_server_fails_for_a_while(place: Place) -> None:
    with served(500, 500) as hook:
        secrets = {"HOOK": hook.url, "DEAD": f"http://127.0.0.1:9/{SECRET}"}
        env = {**PACED, **secrets}
        trainer = place.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True, env=env)
        trainer.wait_commit(10)
        worker = trainer.worker()
        assert worker is not None
        assert SECRET.encode() not in Path(f"/proc/{worker}/environ").read_bytes()
        os.kill(worker, signal.SIGKILL)
        second = place.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True, env=env)
        assert second.ended() == Exit.FENCED, "who is refused tells nobody"
        assert trainer.ended() == 0, trainer.said()
        told = [(body["kind"], body["attempt"], body["code"]) for body in hook.taken]
        assert told == [("restarted", 1, 137), ("finished", 2, 0)]
        assert len(set(hook.keys)) == 2
    files = [path for path in trainer.run_dir.root.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in trainer.said() + second.said()
    assert "slack:DEAD has not been told of 2 incidents" in trainer.said()


def test_a_missing_variable_ends_the_start(place: Place) -> None:
    trainer = place.launch("run", TARGETS, hosts=1, config=FAULTY, restart=True)
    trainer.refused(Exit.CONFIG, "variable HOOK is not set", "variable DEAD is not set")
    assert not trainer.run_dir.log.exists()
