"""A supervisor serves its metrics while workers stall, die and start again; rules act on them.

The slow tests use the real Prometheus (`apt-get install --no-install-recommends prometheus`), which
has promtool too; CI installs it before them. Without it they are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxres.supervisor.run_metrics import LABELS, METRICS
from tests.promises.trainer import FAULTY, ROOT, TrainingProcess, Workspace, free_address
from tests.waiting import SURE_SECONDS

DASHBOARDS = ROOT / "tools" / "dashboards"
RULES = DASHBOARDS / "alerts.yaml"
NAME = re.compile(r"\bjaxres_\w+")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (apt-get install --no-install-recommends prometheus)",
)
GATE_ROW = 12 * 24
"""A row of about step 12."""
STALLED = "JaxresTrainingStalled"
STALL_SECONDS = 5
"""In place of the 900 s of the rule."""


def dashboard() -> dict[str, Any]:
    return json.loads((DASHBOARDS / "grafana.json").read_text())


def dashboard_expressions() -> list[str]:
    """Returns all PromQL of the dashboard, with the variables that Grafana replaces."""
    targets = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = {"$__rate_interval": "5m", "$run": ".*", "$host": ".*"}
    for name, value in variables.items():
        targets = [expression.replace(name, value) for expression in targets]
    assert not [expression for expression in targets if "$" in expression]
    return targets


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def assert_known(expression: str) -> None:
    """Asserts that each metric, and each label it is selected or grouped by, is exported."""
    names = NAME.findall(expression)
    assert names or expression.startswith("up{"), expression
    assert {*names} <= {*METRICS}, expression
    known = {"job", *LABELS, *(label for name in names for label in METRICS[name].labels)}
    grouped = re.findall(r"\bby \(([\w, ]+)\)", expression)
    used = {label for labels in grouped for label in labels.split(", ")}
    used |= {*re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression)}
    assert used <= known, expression


def test_every_expression_of_the_dashboard_uses_exported_metrics_and_labels() -> None:
    for expression in dashboard_expressions():
        assert_known(expression)


def test_the_dashboard_has_the_form_that_grafana_imports() -> None:
    found = dashboard()
    assert {"uid", "title", "schemaVersion", "templating", "time", "panels"} <= found.keys()
    assert "id" not in found, "Grafana gives the id"
    ids = [panel["id"] for panel in found["panels"]]
    assert len({*ids}) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    variables = {variable["name"] for variable in found["templating"]["list"]}
    assert variables == {"datasource", "run", "host"}


def test_every_alert_uses_exported_metrics_is_tested_and_explained() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len({*names}) == len(names) == 15
    for rule in rules():
        assert_known(rule["expr"])
        assert rule["labels"]["severity"] in ("warning", "critical")
    tests = yaml.safe_load((DASHBOARDS / "alerts_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for name in names:
        own = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name]
        assert {*own} == {True, False}, f"{name}: one case where it fires, one where it does not"
    page = (ROOT / "docs" / "watch.md").read_text()
    assert re.findall(r"^\| `(Jaxres\w+)` \|", page, re.M) == names


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=SURE_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@needs_prometheus
def test_the_alert_rules_fire_when_they_should() -> None:
    assert "15 rules found" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(DASHBOARDS / "alerts_test.yaml"))


@pytest.mark.slow
@needs_prometheus
def test_prometheus_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    recorded = [
        {"record": f"panel:{number}", "expr": expression}
        for number, expression in enumerate(dashboard_expressions())
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(path))


class Prometheus:
    """A real Prometheus that scrapes one address every second."""

    def __init__(self, address: str, output: Path) -> None:
        self.address, self._output = address, output

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=SURE_SECONDS) as answer:
                return json.loads(answer.read())["data"]
        except OSError as error:  # It starts, or is not ready.
            assert "level=error" not in (printed := self._output.read_text()), printed
            return {"error": str(error)}

    def firing(self) -> list[dict[str, Any]]:
        alerts = self.get("alerts").get("alerts", [])
        return [alert for alert in alerts if alert["state"] == "firing"]

    def value(self, expression: str) -> float | None:
        """Returns the value of an expression with one series, or None."""
        found = self.get("query", query=expression).get("result", [])
        return float(found[0]["value"][1]) if len(found) == 1 else None


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Runs it with the rule of stalled training, with a shorter limit."""
    (rule,) = [rule for rule in rules() if rule["alert"] == STALLED]
    assert rule["expr"].endswith("> 900")
    shorter = {"expr": rule["expr"].replace("900", str(STALL_SECONDS)), "for": "0s"}
    group = {"name": "jaxres", "rules": [rule | shorter]}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "jaxres", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", str(folder / "prometheus.yml"))
    address, output = free_address(), folder / "prometheus.log"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield Prometheus(address, output)
    finally:
        process.kill()
        process.wait()


def is_at(trainer: TrainingProcess, phase: str) -> bool:
    phases = [event["phase"] for event in trainer.events() if event["event"] == "phase_changed"]
    return phases[-1:] == [phase]


@pytest.mark.slow
@needs_prometheus
def test_a_stalled_run_is_an_alert_that_ends_with_the_next_step_and_a_dead_worker_a_restart(
    workspace: Workspace, tmp_path: Path
) -> None:
    gate, address = tmp_path / "gate", free_address()
    env = {"FAULT": f"row:{GATE_ROW}:gate", "GATE": str(gate), "PACE": "0.01"}
    own = (f"telemetry.prometheus.address={address}", "checkpoint.save_every_steps=4")
    own += ("train.steps=100000", "evaluation.every_steps=0")
    trainer = workspace.launch("held-run", *own, hosts=1, config=FAULTY, restart=True, env=env)
    held_at = GATE_ROW // 24 - 2  # The last step whose metrics are written before the held one.
    with prometheus(tmp_path, address) as server:
        trainer.wait(  # A short wait for data may come earlier.
            lambda: (
                trainer.steps()[-1:] == [held_at]
                and is_at(trainer, "wait for data")
                and bool(server.firing())
            ),
            what="an alert at the gate",
        )
        trainer.wait(lambda: server.value("jaxres_step") == held_at, what="a scrape of the step")
        (alert,) = server.firing()
        assert alert["labels"]["alertname"] == STALLED
        assert (alert["labels"]["run"], alert["labels"]["host"]) == ("held-run", "0")
        assert trainer.steps()[-1] == held_at, "nothing was trained when the alert came"
        assert server.value('jaxres_phase{phase="wait for data"}') == 1
        committed = held_at // 4 * 4
        trainer.wait(
            lambda: server.value("jaxres_last_commit_step") == committed, what="the commit"
        )

        gate.touch()
        trainer.wait(lambda: not server.firing(), what="the end of the alert")
        assert trainer.steps()[-1] > held_at

        supervisor_began = server.value("jaxres_supervisor_start_time_seconds")
        worker = trainer.worker()
        assert worker is not None
        killed_at = time.time()
        os.kill(worker, signal.SIGKILL)
        signals = 'jaxres_restarts_total{cause="signal"}'
        trainer.wait(lambda: server.value(signals) == 1, what="the restart in the metrics")
        newest_step = "jaxres_last_step_timestamp_seconds"
        trainer.wait(
            lambda: (
                server.value("jaxres_attempt") == 2
                and (server.value(newest_step) or 0.0) > killed_at
            ),
            what="a step of the second attempt in the metrics",
        )
        assert server.value("jaxres_supervisor_start_time_seconds") == supervisor_began
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.wait_exit() == 76, trainer.printed()


def scraped(address: str) -> dict[str, float]:
    """Returns each series that an exporter serves, or nothing if none answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=SURE_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in series}


@pytest.mark.campaign
def test_each_supervisor_of_a_job_serves_its_own_host_and_a_new_one_knows_the_kill_before(
    workspace: Workspace, tmp_path: Path
) -> None:
    addresses = [free_address(), free_address()]
    gate = tmp_path / "gate"
    env = {"FAULT": f"row:{GATE_ROW}:gate", "GATE": str(gate)}

    def start() -> list[TrainingProcess]:
        at = free_address()
        return [
            workspace.start_host(
                "job",
                f"telemetry.prometheus.address={address}",
                host=host,
                hosts=2,
                at=at,
                config=FAULTY,
                env=env,
            )
            for host, address in enumerate(addresses)
        ]

    def step_of(host: int) -> float:
        return scraped(addresses[host]).get(f'jaxres_step{{host="{host}",run="job"}}', 0.0)

    trainers = start()
    for host, trainer in enumerate(trainers):
        trainer.wait(lambda host=host: step_of(host) >= 5, what=f"steps in the metrics of {host}")
    for trainer in trainers:
        trainer.kill()
    for trainer in trainers:
        trainer.wait_exit()

    again = start()  # It is held at the gate too, so that it can't end before it is scraped.
    for host, trainer in enumerate(again):
        labels = f'host="{host}",run="job"'
        replayed = f'jaxres_goodput_seconds_total{{class="replayed",{labels}}}'
        trainer.wait(
            lambda host=host, name=replayed: scraped(addresses[host]).get(name, 0.0) > 0,
            what="a replay",
        )
        found = scraped(addresses[host])
        assert found[f'jaxres_restarts_total{{cause="killed",{labels}}}'] == 1
        assert found[f"jaxres_attempt{{{labels}}}"] == 2
    gate.touch()
    for trainer in again:
        assert trainer.wait_exit() == 0, trainer.printed()


@pytest.mark.slow
def test_a_run_whose_address_is_taken_trains_to_its_end(workspace: Workspace) -> None:
    address = free_address()
    host, _, port = address.partition(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        trainer = workspace.launch(
            "run", f"telemetry.prometheus.address={address}", hosts=1, config=FAULTY, restart=True
        )
        assert trainer.wait_exit() == 0, trainer.printed()
    assert trainer.printed().count(f"no metrics are served at {address}") == 1
