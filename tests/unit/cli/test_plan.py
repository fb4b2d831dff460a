"""`jaxres plan`: text, JSON, sources of values, refusals."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxres import __main__ as jaxres_command
from jaxres import config as configs
from jaxres.cli import plan
from jaxres.estimate import storage_rate
from jaxres.estimate.assumptions import ASSUMPTIONS
from jaxres.estimate.storage_rate import StorageRate
from jaxres.faults import UsageError
from tests.unit.operate.plan.test_measured import crashed_run
from tests.unit.operate.report.parsed_page import parse

ROOT = Path(__file__).parents[3]
SMALL = ("--gpus", "64", "--state-gib", "100", "--replications", "50")


def planned(capsys, *words: str):
    assert jaxres_command.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_text_is_one_screen_and_has_what_was_asked_for(capsys):
    words = ("--spot-rate", "0.5", "--notice-seconds", "120", "--memory", "neighbor")
    assert jaxres_command.main(["plan", *SMALL, *words, "--spares", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 35
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    for part in (
        *("64 GPUs on 8 hosts for 30 days", "Young", "Daly", "goodput", "p5", "p95"),
        *("without async saves", "without spares", "storage:", "by hand", "total", "notice"),
    ):
        assert part in text


def test_flags_are_used_as_given_and_only_the_rest_is_assumed(capsys):
    found = planned(
        capsys,
        *SMALL,
        *("--hours", "100", "--mtbf-hours", "640", "--write-mb-per-s", "100"),
        *("--stall-seconds", "3", "--gpu-hour-price", "4", "--storage-price", "1"),
    )
    assert found["failures"]["mtbf_hours"] == pytest.approx(10.0)
    assert found["failures"]["expected"] == pytest.approx(10.0)
    assert found["saves"]["write_seconds"] == pytest.approx(100 * 2**30 / 8 / 1e8)
    assert found["saves"]["stall_seconds"] == 3.0
    assert found["measures"][0]["dollars"] == pytest.approx(64 * 100 * 4)
    assumed = {one["flag"] for one in found["assumed"]}
    assert assumed.isdisjoint({"--stall-seconds", "--gpu-hour-price", "--write-mb-per-s"})
    assert {"--boot-seconds", "--host-share"} <= assumed


@pytest.mark.slow
def test_waits_outages_racks_and_mixed_fleets_are_part_of_the_plan(capsys):
    base = planned(capsys, *SMALL)["goodput"]
    spot = ("--spot-rate", "1", "--stockout-share", "0.3")
    waits = planned(capsys, *SMALL, *spot)
    mixed = planned(capsys, *SMALL, *spot, "--on-demand-fallback")
    assert waits["goodput"]["mean"] < mixed["goodput"]["mean"] < base["mean"]
    assert waits["goodput"]["on_demand_share"] == 0 < mixed["goodput"]["on_demand_share"] < 1
    prices = mixed["prices"]
    assert prices["spot"] < prices["gpu_hour"] < prices["on_demand"]
    assert {"with on-demand fallback"} <= {one["name"] for one in waits["measures"]}
    away = planned(capsys, *SMALL, "--outages-per-day", "4", "--outage-seconds", "3600")
    assert away["goodput"]["long_run"] is None
    racks = ("--component", "switch=100/rack", "--hosts-per-rack", "4")
    found = planned(capsys, *SMALL, *racks)
    assert found["failures"]["mtbf_hours"] == pytest.approx(50)
    assert {kind["name"] for kind in found["interruptions"]} == {"rack"}
    assert jaxres_command.main(["plan", *SMALL, *racks[:2]]) == 64
    assert "--hosts-per-rack" in capsys.readouterr().err


def test_the_bill_of_the_text_and_the_json_is_the_sum_of_its_lines(capsys):
    for bill in planned(capsys, *SMALL)["insurance"].values():
        assert bill["total"] == pytest.approx(sum(line["dollars"] for line in bill["lines"]))


def test_components_and_survival_of_a_day_are_other_ways_to_say_how_often_it_fails(capsys):
    found = planned(capsys, *SMALL, "--component", "gpu=64000/gpu", "--component", "nic=8000/host")
    assert found["failures"]["mtbf_hours"] == pytest.approx(1 / (64 / 64000 + 8 / 8000))
    found = planned(capsys, "--gpus", "1000", "--state-gib", "1", "--daily-survival", "0.999")
    assert round(found["failures"]["survival_day"], 3) == 0.368


def test_a_config_gives_the_state_the_hosts_the_prices_and_the_notice(tmp_path, capsys):
    config = tmp_path / "job.yaml"
    option = "zones: [us-central1-a], machine_type: a3-highgpu-8g"
    config.write_text(
        f"""\
base: {ROOT / "configs/llama-8b.yaml"}
run: {{dir: gs://bucket/runs/first}}
launch:
  gce:
    project: project
    num_hosts: 4
    spares: 1
    image: projects/p/global/images/family/f
    runtime: {{kind: container, image: i}}
    capacity_options:
      - {{kind: spot, {option}, dollars_per_hour: 24.0}}
      - {{kind: standard, {option}, dollars_per_hour: 80.0}}
"""
    )
    found = planned(capsys, str(config), "--spot-rate", "0.1", "checkpoint.keep.daily=3")
    assert (found["fleet"]["num_gpus"], found["fleet"]["num_hosts"]) == (32, 4)
    assert found["fleet"]["state_bytes"] == pytest.approx(8.03e9 * 12, rel=0.01)
    assert found["prices"]["spot"] == 3.0
    assert found["prices"]["on_demand"] == 10.0
    assert found["saves"]["largest_state_at_notice_bytes"] == pytest.approx(115 * 4e9)
    (spares,) = (one for one in found["insurance"]["with"]["lines"] if one["name"] == "spare hosts")
    assert spares["dollars"] > 0.0, "the spares of launch.gce are not in the costs"
    none = planned(capsys, str(config), "--spares", "0")
    (spares,) = (one for one in none["insurance"]["with"]["lines"] if one["name"] == "spare hosts")
    assert spares["dollars"] == 0.0


def job(folder: Path, *options: str) -> str:
    """Writes a config of a job on VMs, and returns its path."""
    config = folder / "job.yaml"
    rows = "".join(f"      - {option}\n" for option in options)
    config.write_text(
        f"""\
base: {ROOT / "configs/llama-8b.yaml"}
run: {{dir: gs://bucket/runs/first}}
launch:
  gce:
    project: project
    num_hosts: 4
    image: projects/p/global/images/family/f
    capacity_options:
{rows}"""
    )
    return str(config)


PLACE = "zones: [us-central1-a], machine_type: a3-highgpu-8g"


def test_spot_vms_without_a_rate_are_priced_as_such_and_the_rate_is_said(tmp_path, capsys):
    config = job(tmp_path, f"{{kind: spot, {PLACE}, dollars_per_hour: 24.0}}")
    found = planned(capsys, config, "--replications", "20")
    assert found["prices"]["gpu_hour"] == 3.0
    assert found["failures"]["preemptions_expected"] == pytest.approx(4 * 0.15 * 30)
    assert {one["flag"]: one["value"] for one in found["assumed"]}["--spot-rate"] == 0.15
    assert found["spot"]["spot_dollars_per_useful_hour"] is not None
    assert plan.main([config, "--replications", "20"]) == 0
    text = capsys.readouterr().out
    assert "0.15 preemptions a VM and day (Compute Engine has observed 5 to 15 % a day)" in text
    assert "$96.00 an hour (spot)" in text


def test_goodput_is_that_of_the_interval_of_the_config(tmp_path, capsys):
    config = job(tmp_path, f"{{kind: standard, {PLACE}}}")
    when = "checkpoint.when={kind: seconds, every_seconds: 14400}"
    own = planned(capsys, config, when, "--replications", "50")
    best = planned(capsys, config, "checkpoint.when={kind: auto}", "--replications", "50")
    assert own["saves"]["interval_seconds"] == 14400
    assert best["saves"]["interval_seconds"] == pytest.approx(best["saves"]["daly_seconds"])
    assert own["goodput"]["mean"] < best["goodput"]["mean"]
    assert "saved every 4:00:00; " in "\n".join(own["estimate"])


def test_the_rate_that_a_check_has_measured_on_a_vm_is_used(tmp_path, capsys):
    words = [job(tmp_path, f"{{kind: standard, {PLACE}}}"), f"data.cache_dir={tmp_path}"]
    config = configs.load(Path(words[0]), words[1:]).config
    rate = StorageRate(
        place="gs://bucket",
        machine="a3-highgpu-8g",
        write_mb_per_second=100.0,
        read_mb_per_second=200.0,
        date="2026-11-26",
    )
    storage_rate.store(config, rate)
    found = planned(capsys, *words, "--replications", "5")
    size = found["fleet"]["state_bytes"]
    assert found["saves"]["write_seconds"] == pytest.approx(size / 4 / 1e8)
    assert "100 and 200 MB/s a host, measured on a3-highgpu-8g, 2026-11-26" in found["estimate"][1]
    assert "--write-mb-per-s" not in {one["flag"] for one in found["assumed"]}
    given = planned(capsys, *words, "--replications", "5", "--write-mb-per-s", "400")
    assert given["saves"]["write_seconds"] == pytest.approx(size / 4 / 4e8)


def test_a_run_gives_what_it_has_measured(tmp_path, capsys, monkeypatch):
    run = crashed_run()
    from jaxres.goodput import summary
    from jaxres.operate.plan import measured
    from tests.unit.goodput.test_run_timeline import fold

    timeline = fold(run)
    events = [event for own in run.events.values() for event in own]
    own = measured.of_run(timeline, summary.summarize(timeline), events)
    monkeypatch.setattr(plan, "_measured", lambda run_dir: own)
    found = planned(capsys, "--from", str(tmp_path), "--gpus-per-host", "4")
    assert found["fleet"]["num_gpus"] == 4
    assert found["saves"]["write_seconds"] == 30.0
    assert found["saves"]["stall_seconds"] == 2.0
    assert own.start_seconds is not None
    kinds = {kind["name"]: kind["restart_seconds"] for kind in found["interruptions"]}
    assert kinds["process"] == pytest.approx(10 + own.start_seconds + 20)
    assert found["measured"]["failures"] == 2
    mtbf = own.mtbf_hours(expected=50_677 / 4)
    assert found["failures"]["mtbf_hours"] == pytest.approx(mtbf, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--gpus"),
        (["--gpus", "8"], "--state-gib"),
        (["--gpus", "0", "--state-gib", "1"], "--gpus 0"),
        ([*SMALL, "--component", "gpu=soon/gpu"], "NAME=HOURS"),
        ([*SMALL, "--host-share", "1.5"], "from 0 to 1"),
        ([*SMALL, "train.steps=3"], "checkpoint.keep"),
        ([*SMALL, "--days", "nan"], "--days"),
        ([*SMALL, "--spares", "-1"], "--spares"),
        ([*SMALL, "a.yaml", "b.yaml"], "more than one config"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy(words, message, capsys):
    assert plan.main(words) == 64
    assert message in capsys.readouterr().err


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert plan.main(["--from", str(tmp_path)]) == 64
    assert "no run here" in capsys.readouterr().err


@pytest.mark.slow
def test_extreme_jobs_have_a_plan(capsys):
    for words in (
        ["--gpus", "1", "--state-gib", "0.001", "--mtbf-hours", "1e12"],
        ["--gpus", "1000000", "--state-gib", "1e6", "--mtbf-hours", "1000", "--hours", "1"],
        [*SMALL, "--spot-rate", "1000", "--hours", "2"],
        [*SMALL, "--stall-seconds=0", "--detect-seconds=0", "--boot-seconds=0", "--hours", "24"],
    ):
        assert 0 <= planned(capsys, *words, "--replications", "5")["goodput"]["mean"] <= 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--state-gib", "1e12"], id="a save takes ages of the MTBF"),
        pytest.param(["--component", "x=1e225/gpu"], id="no failure in the age of the universe"),
    ],
)
def test_numbers_without_measure_have_a_plan_in_text_and_json(words, capsys):
    words = ["--gpus", "64", "--state-gib", "10", "--replications", "5", *words]
    assert planned(capsys, *words)["goodput"]["mean"] <= 1
    assert plan.main(words) == 0
    assert not {"nan", "inf"} & set(capsys.readouterr().out.split())


def test_the_page_has_the_plan_and_loads_nothing(capsys, tmp_path):
    file = tmp_path / "plan.html"
    found = planned(capsys, *SMALL, "--plot", str(file))
    text = file.read_text()
    page = parse(text)
    assert len(page.of_class("path", "line")) == 2 * 3, "mean, p5, p95 in both charts"
    assert f"{100 * found['goodput']['mean']:.2f} %" in text
    for one in found["measures"]:
        assert html.escape(one["name"]) in text
    assert "<script" not in text
    assert "http:" not in text
    assert jaxres_command.main(["plan", *SMALL, "--plot", str(tmp_path / "no" / "x")]) == 64
    assert "No such file" in capsys.readouterr().err


def test_the_page_shows_that_the_planned_interval_is_the_best():
    words = ["--gpus", "1024", "--state-gib", "500", "--mtbf-hours", "5000", "--stall-seconds", "5"]
    inputs = plan.read_inputs(plan._parse([*words, "--days", "30"]))
    points = {round(p["seconds"]): p["mean"] for p in plan._by_interval(inputs)}
    planned_seconds = round(plan.plan_of(inputs.job).storage.interval_seconds)
    assert max(points.values()) - points[planned_seconds] < 0.002
    assert points[planned_seconds] - points[max(points)] > 0.01


def test_each_assumption_has_its_source_in_the_docs():
    text = (ROOT / "docs/planning.md").read_text()
    for one in ASSUMPTIONS:
        assert f"| `{one.flag}` | {one.value:,.10g} {one.unit} | {one.source} |" in text


@pytest.mark.slow
def test_the_command_imports_no_jax():
    code = (
        "import sys; from jaxres.__main__ import main; "
        f"code = main({['plan', *SMALL]!r}); "
        "sys.exit(code or ('jax' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_unknown_flag_is_refused():
    with pytest.raises(UsageError):
        plan._parse(["--gpu", "8"])
