"""The HTTP server of the metrics: it answers, ends no run, and drops clients that are silent."""

import contextlib
import json
import os
import socket
import urllib.request

import pytest

from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.faults import ConfigError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Record
from jaxres.supervisor.companions import prometheus_exporter
from jaxres.supervisor.companions.prometheus_exporter import PrometheusExporter
from jaxres.telemetry.heartbeat import StepFinished
from tests.unit.runlog.example_records import CLAIM
from tests.waiting import SURE_SECONDS, is_cut

SOURCE = {"kind": "text", "path": "x"}


def config(address):
    telemetry = {} if address is None else {"prometheus": {"address": address}}
    sections = {"data": {"source": SOURCE}, "train": {"steps": 9}, "telemetry": telemetry}
    return RunConfig.model_validate(sections)


def exporter(tmp_path, address, *, name="my-run"):
    return PrometheusExporter(config(address), RunDir(tmp_path / name), clock=SystemClock())


@pytest.fixture
def address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def scraped(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SURE_SECONDS) as response:
        return response.read().decode()


def test_the_metrics_are_served_with_the_names_of_run_and_host(tmp_path, address):
    with exporter(tmp_path, address) as served:
        served.metrics.on_status(StepFinished(7, 0.5, 2.0, 100))
        served.ensure_started(host=3, health=None)
        served.ensure_started(host=3, health=None)
        text = scraped(address)
        assert 'jaxres_step{host="3",run="my-run"} 7.0' in text
        assert "# TYPE jaxres_steps_total counter" in text
    with pytest.raises(OSError):
        scraped(address)


def test_a_taken_address_is_a_warning_and_the_next_attempt_tries_again(tmp_path, address, capsys):
    host, _, port = address.partition(":")
    with socket.socket() as taken, exporter(tmp_path, address) as served:
        taken.bind((host, int(port)))
        taken.listen()
        served.ensure_started(host=0, health=None)
        served.ensure_started(host=0, health=None)
        printed = capsys.readouterr().err
        assert printed.count("no metrics are served at") == 1
        assert address in printed
        assert "training continues" in printed
        taken.close()
        served.ensure_started(host=0, health=None)
        assert "jaxres_run_info" in scraped(address)


def test_an_address_that_is_no_name_of_a_host_is_a_warning(tmp_path, capsys):
    with exporter(tmp_path, "no..host:19400") as served:
        served.ensure_started(host=0, health=None)
    assert "no metrics are served at no..host:19400" in capsys.readouterr().err


def test_a_run_directory_with_any_name_is_a_label(tmp_path, address):
    name = os.fsdecode(b'a"b\nc\xff')
    with exporter(tmp_path, address, name=name) as served:
        served.ensure_started(host=0, health=None)
        assert 'run="a\\"b\\nc?"' in scraped(address)


REQUESTS = (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: ")


def clients(stack, address, number):
    """Returns clients that send no whole request."""
    host, _, port = address.partition(":")
    found = []
    for index in range(number):
        client = stack.enter_context(socket.create_connection((host, int(port))))
        client.settimeout(SURE_SECONDS)
        client.sendall(REQUESTS[index % len(REQUESTS)])
        found.append(client)
    return found


@pytest.mark.parametrize("number", [1, 2 * prometheus_exporter.MAX_CLIENTS])
def test_clients_that_send_no_whole_request_keep_nobody_away(
    tmp_path, address, monkeypatch, number
):
    monkeypatch.setattr(prometheus_exporter, "CLIENT_SECONDS", 100 * SURE_SECONDS)
    with exporter(tmp_path, address) as served, contextlib.ExitStack() as stack:
        served.ensure_started(host=0, health=None)
        slow = clients(stack, address, number)
        assert "jaxres_run_info" in scraped(address)
        assert all(map(is_cut, slow[: -prometheus_exporter.MAX_CLIENTS]))
        assert len(served._server.http._limited) <= prometheus_exporter.MAX_CLIENTS


@pytest.mark.parametrize("request_sent", REQUESTS)
def test_a_client_that_takes_too_long_is_dropped(tmp_path, address, monkeypatch, request_sent):
    monkeypatch.setattr(prometheus_exporter, "CLIENT_SECONDS", 0.05)
    with exporter(tmp_path, address) as served, contextlib.ExitStack() as stack:
        served.ensure_started(host=0, health=None)
        (client,) = clients(stack, address, 1)
        with contextlib.suppress(OSError):
            client.sendall(request_sent)
        assert is_cut(client)


def test_the_end_waits_for_no_client_and_drops_it(tmp_path, address, monkeypatch):
    monkeypatch.setattr(prometheus_exporter, "CLIENT_SECONDS", 100 * SURE_SECONDS)
    monkeypatch.setattr(prometheus_exporter, "CLOSE_SECONDS", 100 * SURE_SECONDS)
    with contextlib.ExitStack() as stack:
        with exporter(tmp_path, address) as served:
            served.ensure_started(host=0, health=None)
            (slow,) = clients(stack, address, 1)
            assert "jaxres_run_info" in scraped(address)  # The server has accepted both.
        assert is_cut(slow)


def test_without_the_section_there_are_no_metrics_and_no_server(tmp_path):
    with exporter(tmp_path, None) as off:
        off.on_history([])
        off.ensure_started(host=0, health=None)
        assert off.metrics is None


def test_a_missing_package_is_a_config_error_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus_exporter, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[prometheus\]'"):
        exporter(tmp_path, "127.0.0.1:1")
    assert exporter(tmp_path, None).metrics is None


def test_steps_before_a_kill_of_the_supervisor_are_known_from_the_end_of_the_metrics(tmp_path):
    with exporter(tmp_path, "127.0.0.1:1") as served:
        run_dir = RunDir(tmp_path / "my-run")
        run_dir.attempt(1).mkdir(parents=True)
        lines = [json.dumps({"step": step, "filler": "x" * 90}) for step in range(1, 2000)]
        run_dir.metrics(1).write_text("\n".join(lines) + '\n{"step": 99999')
        assert run_dir.metrics(1).stat().st_size > prometheus_exporter.TAIL_BYTES
        served.on_history([Record(1, 1, 0.0, CLAIM)])
        assert served.metrics._timeline.reached == 1999


@pytest.mark.parametrize("text", ["9400", ":9400", "localhost", "localhost:0", "h:65536", "h:x"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        config(text)
