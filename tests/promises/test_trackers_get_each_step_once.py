"""An experiment tracker gets each step of the surviving history once, over all attempts.

The slow tests use Weights & Biases (offline files) and a real MLflow server; CI installs both
before them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

import pytest

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.config.schema.telemetry import WandbTracker
from jaxres.runlog import run_log
from jaxres.runlog.metrics import MetricsLine
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Rollback, RunLog, Start
from jaxres.supervisor.companions.tracker_copy import Copy, has_everything
from jaxres.telemetry.trackers import Identity, Row
from tests.promises import wandb_files
from tests.promises.trainer import (
    FAULTY,
    TrainingProcess,
    Workspace,
    assert_bit_exact,
    free_address,
    history,
)
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS

SLOW = {"PACE": "0.008"}
"""Environment of a run of 15 s: MLflow's client needs some to start."""
CONFIG = RunConfig.model_validate(
    {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
)


class Service:
    """A service that stores rows by the id of a run; it may be away."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.replaced: list[str] = []
        self.is_away = self.forgets = False
        self._id = ""

    def open(self, identity: Identity, *, sent_through: int) -> int:
        self._check()
        self._id = identity.id
        known = self.rows.setdefault(identity.id, [])
        return sent_through if self.forgets else max((step for step, _ in known), default=0)

    def log(self, rows: Sequence[Row]) -> None:
        self._check()
        self.rows[self._id] += rows

    def close(self, *, is_replaced: bool = False) -> None:
        if is_replaced:
            self.replaced.append(self._id)

    def _check(self) -> None:
        if self.is_away:
            raise ConnectionError("the service is away")

    def steps(self, number: int = 0) -> list[int]:
        return [step for step, _ in list(self.rows.values())[number]]


class Run:
    """A run whose log and metrics the test writes, as a worker does."""

    def __init__(self, root: Path) -> None:
        self.dir = RunDir(root)
        self.log: RunLog | None = None

    def start(self, attempt: int, step: int) -> None:
        after = [] if self.log is None else list(self.records())
        claim = dataclasses.replace(CLAIM, attempt=attempt, nonce=f"n{attempt}")
        self.log = RunLog.claim(self.dir.log, claim, after=after, clock=SystemClock())
        self.dir.attempt(attempt).mkdir(parents=True)
        self.segment(step)

    def records(self):
        return run_log.read_records(self.dir.log)

    def segment(self, step: int) -> None:
        self.log.append(Start(step=step, path=None, dataset="d", computation={}))

    def steps(self, *steps: int, loss: float = 1.0, partial: bool = False) -> None:
        attempt = self.log.attempt
        with self.dir.metrics(attempt).open("a") as file:
            for step in steps:
                line = MetricsLine(
                    seq=self.log.last_seq,
                    step=step,
                    attempt=attempt,
                    loss=loss,
                    grad_norm=0.5,
                    learning_rate=0.1,
                    tokens=10 * step,
                    step_seconds=0.2,
                    skipped=False,
                    samples="x",
                )
                text = json.dumps(line.fields())
                file.write(text[:9] if partial else text + "\n")

    def evaluated(self, step: int, loss: float) -> None:
        event = {"event": "evaluated", "time": 1.0, "step": step, "losses": {"heldout": loss}}
        with self.dir.events(self.log.attempt, 0).open("a") as file:
            file.write(json.dumps(event) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def copy_of(run: Run, service: Service) -> Copy:
    return Copy(run.dir, CONFIG, service, name="it")


def test_steps_that_are_trained_again_after_a_restart_are_sent_once(run):
    service = Service()
    copy = copy_of(run, service)
    copy.update()
    assert service.rows == {}, "nothing is sent before the first start record"
    run.start(1, 0)
    run.steps(1, 2, 3)
    copy.update()
    run.steps(4)
    run.steps(5, partial=True)
    copy.update()
    assert service.steps() == [1, 2, 3, 4]
    run.start(2, 2)
    run.steps(3, 4, 5, 6)
    copy.update()
    copy_of(run, service).update()
    run.steps(7)
    copy_of(run, service).update()
    assert service.steps() == [1, 2, 3, 4, 5, 6, 7]
    assert len(service.rows) == 1


@pytest.mark.parametrize("forgets", [False, True])
def test_a_killed_process_sends_no_step_twice(run, forgets):
    """The kill is between sending and recording that it was sent."""
    service = Service()
    service.forgets = forgets
    run.start(1, 0)
    run.steps(1, 2)
    copy_of(run, service).update()
    run.steps(3, 4)

    class Killed(BaseException):
        pass

    send = service.log

    def killed_after_it(rows):
        send(rows)
        raise Killed

    service.log = killed_after_it
    with pytest.raises(Killed):
        copy_of(run, service).update()
    service.log = send
    run.steps(5)
    copy_of(run, service).update()
    assert service.steps() == [1, 2, 3, 4, 5]


def test_what_a_service_missed_while_it_was_away_is_sent_later(run):
    service = Service()
    copy = copy_of(run, service)
    run.start(1, 0)
    run.steps(1, 2)
    copy.update()
    service.is_away = True
    run.steps(3)
    run.evaluated(3, 2.5)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            copy.update()
        copy.reset()
    run.steps(4)
    service.is_away = False
    copy.update()
    assert service.steps() == [1, 2, 3, 4]
    values: Mapping[str, float] = dict(service.rows.popitem()[1])[3]
    assert values["heldout/loss"] == 2.5


def test_after_a_rollback_a_new_run_of_the_tracker_has_the_surviving_history(run):
    service = Service()
    copy = copy_of(run, service)
    run.start(1, 0)
    run.steps(1, 2, 3, 4)
    run.evaluated(2, 2.0)
    run.evaluated(4, 4.0)
    copy.update()
    run.log.append(
        Rollback(onset=3, target=2, rows=((0, 9),), rate_factor=1.0, rate_steps=0, reason="r")
    )
    copy.update()
    run.segment(2)
    run.steps(3, 4, 5, loss=7.0)
    copy.update()
    first, second = service.rows
    assert second == f"{first}-1"
    assert service.replaced == [first]
    assert service.steps(1) == [1, 2, 3, 4, 5]
    rows = dict(service.rows[second])
    assert [rows[step]["train/loss"] for step in (2, 3, 5)] == [1.0, 7.0, 7.0]
    assert rows[2]["heldout/loss"] == 2.0


def test_a_tracker_has_everything_once_it_was_closed(run):
    """Until then the command of a complete run sends the rest."""
    section = WandbTracker(kind="wandb", project="p")
    copy = Copy(run.dir, CONFIG, Service(), name="wandb-0")
    run.start(1, 0)
    run.steps(1, 2)
    copy.update()
    assert not has_everything(run.dir, section, 0, step=2)
    copy.close()
    assert has_everything(run.dir, section, 0, step=2)
    assert not has_everything(run.dir, section, 0, step=3), "away in the whole next attempt"
    run.steps(3)
    again = Copy(run.dir, CONFIG, Service(), name="wandb-0")
    again.update()
    assert not has_everything(run.dir, section, 0, step=2)


def test_numbers_that_are_not_finite_are_left_out(run):
    service = Service()
    run.start(1, 0)
    run.steps(1, loss=float("nan"))
    copy_of(run, service).update()
    assert "train/loss" not in dict(service.rows.popitem()[1])[1]


class Server:
    """A real MLflow server on this machine, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, free_address()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        host, port = self.address.split(":")
        command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", port]
        command += ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--workers", "1"]
        with (self.folder / "mlflow.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, process_group=0, cwd=self.folder
            )
        until = time.monotonic() + SURE_SECONDS
        while time.monotonic() < until:
            try:
                with urlopen(f"http://{self.address}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError((self.folder / "mlflow.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def steps(self) -> list[list[int]]:
        """Returns the steps of each run, as the server has them."""
        from mlflow import MlflowClient

        client = MlflowClient(f"http://{self.address}")
        found = client.get_experiment_by_name("jaxres")
        runs = client.search_runs([found.experiment_id]) if found else []
        points = [client.get_metric_history(run.info.run_id, "train/loss") for run in runs]
        return [[point.step for point in each] for each in points]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def trackers(server: Server) -> str:
    mlflow = f"{{kind: mlflow, tracking_uri: 'http://{server.address}', every_seconds: 0.5}}"
    return (
        "telemetry.trackers=[{kind: wandb, project: p, mode: offline, every_seconds: 0.5}, "
        f"{mlflow}]"
    )


def wandb_steps(run_dir: RunDir, name: str) -> list[int]:
    paths = sorted(Path(run_dir.root).glob("trackers/wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in paths}) == 1, "one run over all attempts"
    rows = [row for path in paths for row in wandb_files.rows(path)]
    return [row["step"] for row in rows if name in row]


def wait_for(training: TrainingProcess, server: Server, step: int) -> None:
    training.wait(
        lambda: any(step in steps for steps in server.steps()), what=f"step {step} at the server"
    )


@pytest.mark.slow
def test_each_step_is_sent_once_over_restarts_by_hand_and_of_the_launcher(
    workspace: Workspace, fault_free: RunDir, server: Server
) -> None:
    training = workspace.start(
        "run", trackers(server), config=FAULTY, env=SLOW | {"FAULT": "row:700:sleep"}
    )
    training.wait_step(13)
    wait_for(training, server, 10)
    training.kill()
    assert training.wait_exit() != 0
    gate = workspace.root / "gate"
    env = SLOW | {"FAULT": "row:600:gate", "GATE": str(gate)}
    launched = workspace.launch(
        "run", trackers(server), hosts=1, config=FAULTY, env=env, restart=True
    )
    launched.wait_step(30)
    launched.kill(target="worker")
    gate.touch()
    assert launched.wait_exit() == 0, launched.printed()
    assert_bit_exact(launched.run_dir, fault_free)
    last = history(fault_free)[-1]["step"]
    assert [sorted(steps) for steps in server.steps()] == [list(range(1, last + 1))]
    assert wandb_steps(launched.run_dir, "train/loss") == list(range(1, last + 1))
    assert wandb_steps(launched.run_dir, "heldout/loss") == [20, 40, 60]


@pytest.mark.campaign
def test_a_dead_service_stops_nothing_and_gets_the_rest_later(
    workspace: Workspace, fault_free: RunDir, server: Server
) -> None:
    workspace.finish("run", "train.steps=4", config=FAULTY)  # Trackers may be added later.
    held = SLOW | {"HELD": "40"}
    training = workspace.start("run", trackers(server), config=FAULTY, env=held)
    wait_for(training, server, 10)
    server.kill()
    training.wait_printed("tracker mlflow: ")
    assert training.wait_exit() == 0, training.printed()
    training.wait_printed("tracker mlflow: has not received the last steps")
    assert_bit_exact(training.run_dir, fault_free)
    server.start()
    (steps,) = server.steps()
    assert 10 <= len(steps) == max(steps) < 60, "the service was away"
    again = workspace.start("run", trackers(server), config=FAULTY)
    assert again.wait_exit() == 0, again.printed()
    again.wait_printed("nothing to do")
    assert [sorted(steps) for steps in server.steps()] == [list(range(1, 61))]
    assert wandb_steps(training.run_dir, "train/loss") == list(range(1, 61))
