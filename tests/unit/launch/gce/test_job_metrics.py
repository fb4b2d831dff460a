"""What a launcher exports: that VMs or a spare are lacking, also while no supervisor runs."""

from __future__ import annotations

import json
import socket
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.faults import ConfigError
from jaxres.launch.gce.job_metrics import JobMetrics, samples
from jaxres.storage.path import GcsPath
from jaxres.supervisor.companions import prometheus_exporter
from tests.unit.launch.gce.decide.test_reconcile import RUNNING, START, observed, vm
from tests.unit.launch.gce.decide.test_spares import SPARE, training
from tests.unit.launch.gce_config import config
from tests.waiting import SURE_SECONDS

RUN = GcsPath("bkt", "runs/a")


def values(*of: Any) -> dict[str, float]:
    return {sample.metric: sample.value for sample in samples(*of)}


def test_a_launcher_exports_lacking_vms_and_lost_spares() -> None:
    spared = replace(RUNNING, spares=(vm(SPARE),))
    whole = values(spared, training(SPARE), config(spares=1))
    assert whole == {
        "jaxres_job_vms": 2,
        "jaxres_job_spares": 1,
        "jaxres_job_target_spares": 1,
        "jaxres_job_capacity_wait_seconds": 0,
    }
    lost = values(RUNNING, training(), config(spares=1))
    assert (lost["jaxres_job_spares"], lost["jaxres_job_target_spares"]) == (0, 1)
    waiting = values(START, observed(lacking_seconds=90.0), config())
    assert (waiting["jaxres_job_vms"], waiting["jaxres_job_capacity_wait_seconds"]) == (0, 90.0)


def with_address(address: str) -> RunConfig:
    fields = json.loads(config().model_dump_json())
    fields["telemetry"]["prometheus"] = {"launcher_address": address}
    return RunConfig.model_validate_json(json.dumps(fields))


def test_they_are_served_before_the_first_vm_until_the_launcher_ends() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    metrics = JobMetrics(with_address(address), RUN)
    url = f"http://{address}/metrics"
    try:
        metrics.update(START, observed(lacking_seconds=90.0))
        with urllib.request.urlopen(url, timeout=SURE_SECONDS) as response:
            text = response.read().decode()
        assert 'jaxres_job_capacity_wait_seconds{host="launcher",run="a"} 90.0' in text
    finally:
        metrics.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=SURE_SECONDS)


def test_a_missing_package_is_told_before_a_vm_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus_exporter, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="prometheus-client is not installed"):
        JobMetrics(with_address("127.0.0.1:1"), RUN)
    JobMetrics(config(), RUN).update(replace(START), observed())
