"""`jaxres report`: the text and the JSON of a hand-written run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxres import config as configs
from jaxres.__main__ import main
from jaxres.cli import report
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.goodput import summary
from jaxres.launch.gce.state.desired_state import DesiredState, JobCosts, Spending
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.launch.gce.state.state_object import encode_state
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_objects
from jaxres.storage.path import GcsPath
from tests.unit.goodput.simulated_run import SimulatedRun
from tests.unit.goodput.test_run_timeline import fold
from tests.unit.launch.gce_config import OPTION, config
from tests.unit.operate.report.parsed_page import parse


@pytest.fixture
def crashed() -> SimulatedRun:
    run = SimulatedRun()
    seq = run.begin(("import", 1.0), ("compile", 2.0))
    for _ in range(4):
        run.train(seq, 1.0)
        if run.step == 2:
            run.save(0.0)
    run.now += 3.0
    run.record_crash(80)
    run.now += 3600.0
    seq = run.begin(("restore", 1.0))
    run.train(seq, 1.0)
    run.train(seq, 1.0)
    run.save(0.0)
    run.end(0, detection_seconds=0.0)
    return run


def test_the_text_has_each_class_and_what_each_incident_has_cost(crashed: SimulatedRun):
    found = summary.summarize(fold(crashed), dollars_per_host_hour=3600.0)
    text = report.as_text(RunDir(Path("runs/x")), found, report.VmSpending())
    assert text.startswith("runs/x: 2 attempts, 1 incident; 1 h 00 min since ")
    assert "  productive              4.0 s    0.1 %       $4.00\n" in text
    assert "  replayed                2.0 s    0.1 %       $2.00\n" in text
    assert "  down                3,600.0 s   99.6 %\n" in text
    assert (
        "not recorded, so in other classes: capacity wait and vm boot (only `launch gce` " in text
    )
    assert "money: $4.00 useful, $11.00 not, while attempts ran\n" in text
    assert text.endswith(
        "after 11 s: attempt 1 HUNG: 1 h 00 min, 0.008 device hours, $7.00\n"
        "    2 steps lost 2.0 s, detection 3.0 s, down 3600.0 s, start up 1.0 s, compile 0.0 s, "
        "restore 1.0 s\n    why\n"
    )


def write(crashed: SimulatedRun, folder: Path) -> None:
    run_dir = RunDir(folder)
    run_dir.log.mkdir(parents=True)
    for record in crashed.records:
        (run_dir.log / f"{record.seq:08d}.json").write_bytes(record.encode())
    for attempt, events in crashed.events.items():
        run_dir.attempt(attempt).mkdir(parents=True)
        files = {
            run_dir.events(attempt, 0): events,
            run_dir.host_supervisor_events(attempt, 0): crashed.supervisor_events[attempt],
            run_dir.metrics(attempt): [line.fields() for line in crashed.lines[attempt]],
        }
        for path, rows in files.items():
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_command_reads_a_run_directory(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path)
    assert checkpoints_cli.main(["report", str(tmp_path), "--json"], usage="usage: x") == 0
    found = json.loads(capsys.readouterr().out)
    wanted = summary.summarize(fold(crashed))
    assert found["by_activity"] == pytest.approx(dict(wanted.by_activity))
    assert found["dollars"] is None, "no config, so no price"
    assert sum(i["end"] - i["start"] for i in found["intervals"]) == pytest.approx(wanted.seconds)


@pytest.mark.parametrize("command", ["report", "history --attempts", "status"])
def test_events_of_the_launcher_that_cannot_be_read_are_named_and_the_rest_is_shown(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    write(crashed, tmp_path)
    verb, *options = command.split()
    words = [verb, str(tmp_path), *options]
    code, shown = main(words), capsys.readouterr()
    events = RunDir(tmp_path).launch_events
    assert str(events) not in shown.err
    events.parent.mkdir()
    events.write_text("no folder")
    assert main(words) == code
    without = capsys.readouterr()
    assert without.out == shown.out
    assert f"WARNING: {events}: can't be used (Not a directory)" in without.err
    assert without.err.count(str(events)) == 1, without.err


def test_the_report_has_the_costs_of_vms_by_option_and_cause(
    crashed: SimulatedRun, tmp_path: Path, gcs_bucket: str, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path)
    run = GcsPath(gcs_bucket, "run")
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        name = file.relative_to(tmp_path).as_posix()
        gcs_objects.write(GcsPath(gcs_bucket, f"run/{name}"), file.read_bytes(), over=None)
    option = OPTION | {"dollars_per_hour": 2.0}
    text = configs.dump_yaml(config(capacity_options=[option]))
    gcs_objects.write(RunDir(run).config, text.encode(), over=None)
    parts = (Spending(0, "training", 7200.0, 4.0), Spending(0, "spare", 1800.0, 1.0))
    state = DesiredState("jx", "code", "config", phase="ended", costs=JobCosts(spending=parts))
    path = LaunchPaths(run).desired_state
    gcs_objects.write(path, encode_state(state), over=None)
    assert checkpoints_cli.main(["report", str(run), "--json"], usage="usage: x") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["cause"], row["dollars"]) for row in found["spending"]] == [
        ("spot", "training", 4.0),
        ("spot", "spare", 1.0),
    ]
    assert sum(found["dollars_by_activity"].values()) == pytest.approx(found["dollars"])
    assert found["dollars"] > 0, "the price of the config was not used"
    assert checkpoints_cli.main(["report", str(run)], usage="usage: x") == 0
    printed = capsys.readouterr().out
    assert (
        "VMs: $5.00, 2.50 VM hours\n"
        "    spot a2-highgpu-1g: training: $4.00, 2.00 VM hours\n"
        "    spot a2-highgpu-1g: spare: $1.00, 0.50 VM hours\n"
    ) in printed, printed
    gcs_objects.write(path, b"damaged", over=None)
    assert checkpoints_cli.main(["report", str(run), "--json"], usage="usage: x") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["spending"] == []
    assert f"WARNING: {path}: is not readable as a desired state" in shown.err
    assert shown.err.count(str(path)) == 2, "once for the costs, once for the events"


def test_the_page_is_written_beside_the_text_and_two_runs_are_compared(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path / "a")
    crashed.lines[2][0] = dataclasses.replace(crashed.lines[2][0], loss=2.0)
    write(crashed, tmp_path / "b")
    file = tmp_path / "report.html"
    arguments = ["report", str(tmp_path / "a"), "--out", str(file)]
    assert checkpoints_cli.main(arguments, usage="usage: x") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{tmp_path / 'a'}: 2 attempts, 1 incident; ")
    assert printed.endswith(f"{file}: {file.stat().st_size:,} bytes, open it in a browser\n")
    parse(file.read_text())
    arguments += ["--compare", str(tmp_path / "b")]
    assert checkpoints_cli.main(arguments, usage="usage: x") == 0
    assert "The losses differ first at step 3.\n" in capsys.readouterr().out
    assert "Two runs" in file.read_text()
    parse(file.read_text())


def test_a_page_in_a_folder_that_does_not_exist_is_a_wrong_argument(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path / "a")
    out = tmp_path / "absent" / "x.html"
    arguments = ["report", str(tmp_path / "a"), "--out", str(out)]
    assert checkpoints_cli.main(arguments, usage="usage: x") == 64
    assert f"--out {out}: its folder does not exist" in capsys.readouterr().err


def test_a_run_to_compare_with_that_is_none_is_a_wrong_argument(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path / "a")
    arguments = ["report", str(tmp_path / "a"), "--compare", str(tmp_path / "b")]
    assert checkpoints_cli.main(arguments, usage="usage: x") == 64
    assert "no run here" in capsys.readouterr().err


def test_a_file_that_is_no_page_is_not_overwritten(
    crashed: SimulatedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(crashed, tmp_path / "run")
    out, text = tmp_path / "out", b"something else"
    out.write_bytes(text)
    command = ["report", str(tmp_path / "run"), "--out", str(out)]
    assert main(command) == 64
    assert "exists, and is no page of this command" in capsys.readouterr().err
    assert out.read_bytes() == text
    out.unlink()
    for _ in range(2):
        assert main(command) == 0
    assert b"<html" in out.read_bytes()
