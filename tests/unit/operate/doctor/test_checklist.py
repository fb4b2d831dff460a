"""The production checklist of `jaxres doctor`: each item has its statuses, and what to do."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.config.schema.alerts import AlertsSection
from jaxres.estimate import job_estimate
from jaxres.estimate.storage_rate import StorageRate
from jaxres.jax_cli import doctor
from jaxres.launch.gce.checks.bucket_setup import Location
from jaxres.operate.chaos import results as chaos_results
from jaxres.operate.chaos.results import ChaosFound, ChaosResult
from jaxres.operate.doctor import checklist, estimates
from jaxres.operate.doctor import facts as checklist_facts
from jaxres.operate.doctor.check import Check
from jaxres.operate.doctor.checklist import ITEMS
from jaxres.operate.doctor.facts import Facts, Gpus, Nccl
from jaxres.runlog.paths import RunDir
from jaxres.storage.path import parse_path
from jaxres.telemetry import alert_sender, routing_check
from jaxres.train import kept_results
from tests.unit.telemetry.webhook_server import served

ROOT = Path(__file__).parents[4]
TINY = ROOT / "tests" / "promises" / "tiny.yaml"
CONFIGS = sorted(ROOT.glob("configs/*.yaml"))
OPTION = "{kind: %s, zones: [%s], machine_type: a3-highgpu-8g}"
OLD_SPOT = "{kind: spot, notice_seconds: 0, zones: [us-central1-a], machine_type: a3-highgpu-8g}"
MANY = "launch.gce.num_hosts=32"
HOURLY = "checkpoint.when={kind: seconds, every_seconds: 4320}"
US, EU = Location("us-central1", "region"), Location("europe-west4", "region")
SPOT, ON_DEMAND = OPTION % ("spot", "us-central1-a"), OPTION % ("standard", "us-central1-a")
TARGET = "{kind: slack, url_env: SLACK_URL}"


def gce(*options: str) -> str:
    return (
        "launch.gce={project: p, image: projects/p/global/images/i, "
        f"capacity_options: [{', '.join(options)}]}}"
    )


def load(*overrides: str) -> RunConfig:
    return configs.load(TINY, list(overrides)).config


MEASURED = StorageRate(
    place="/",
    machine="node-7",
    write_mb_per_second=800.0,
    read_mb_per_second=1_000.0,
    date="2026-11-26",
)
OF_JOB = ("state_bytes", "step_seconds", "rate", "given")
"""Arguments of `facts` and `found` that are part of the estimate of the job."""


def facts(config: RunConfig, **changes: Any) -> Facts:
    """A job of 16 GPUs on two hosts, one of them this machine."""
    given: dict[str, Any] = {"state_bytes": 96_000_000_000, "rate": MEASURED}
    given |= {name: changes.pop(name) for name in OF_JOB if name in changes}
    devices, hosts = changes.get("num_devices", 16), changes.get("num_hosts", 2)
    vms = job_estimate.vms_of(config)
    known: dict[str, Any] = {
        "estimate": job_estimate.estimate(
            config, vms or job_estimate.fleet(devices, hosts), **given
        ),
        "platform": "gpu",
        "num_devices": 16,
        "num_hosts": 2,
        "num_params": 8_000_000_000,
        "run_root": Path("/disk/run"),
        "file_system": "ext4",
        "is_clock_synchronised": True,
        "open_files": 65_536,
        "gpus": Gpus(error=None),
        "driver": "580.65",
        "cuda": 13,
        "nccl": Nccl(name="nvidia-nccl-cu13", version="2.27.7", least="2.18.1"),
        "chaos": ChaosFound(dict.fromkeys(chaos_results.KINDS, "passed"), "all held"),
        "checks": {name: Check("pass", name, "good") for name in ("resume", "notices", "run.dir")},
    }
    return Facts(**(known | changes))


def found(name: str, *overrides: str, **changes: Any) -> Check:
    config = load(*overrides)
    checks = checklist.judge(config, facts(config, **changes))
    return next(check for check in checks if check.name == name)


BUCKET = {"run_root": parse_path("gs://one/run"), "file_system": None}
REPLICA = "checkpoint.replica.path="
SMALL = {"platform": "cpu", "num_devices": 1, "num_hosts": 1, "num_params": 1000}


@pytest.mark.parametrize(
    ("name", "status", "text", "overrides", "changes"),
    [
        ("sharded saves", "pass", "44.7 GiB", [], {}),
        ("save interval", "pass", "at first", ["checkpoint.when.kind=auto"], {}),
        (
            *("save interval", "warn", "Set checkpoint.when.mtbf_hours=0.024"),
            *(["checkpoint.when.kind=auto"], {"given": {"--spot-rate": 500.0}}),
        ),
        (
            "save interval",
            "pass",
            "optimum",
            ["checkpoint.when.kind=continuous"],
            {"state_bytes": 1e12},
        ),
        ("save interval", "pass", "optimum is about", [], {"step_seconds": 150.0}),
        ("save interval", "pass", "measured", [], {"step_seconds": 150.0}),
        ("save interval", "warn", "no step was measured", ["checkpoint.save_every_steps=8"], {}),
        ("save interval", "warn", "measured", [], {"step_seconds": 0.1}),
        (
            *("save interval", "warn", "no step was measured"),
            *([], {"num_params": 8_000_000_000_000_000}),
        ),
        ("save interval", "warn", "checkpoint.when.kind=auto", [], {"step_seconds": 40_000.0}),
        (
            *("save interval", "warn", "% of the time more is lost"),
            *(["checkpoint.when={kind: seconds, every_seconds: 1}"], {}),
        ),
        ("save interval", "warn", "only the last", ["checkpoint.save_every_steps=9999"], {}),
        ("save interval", "warn", "unknown", [], {"num_params": None}),
        (
            *("save interval", "pass", "1 h 12 min"),
            *(["run.dir=gs://one/run", gce(ON_DEMAND), HOURLY], {}),
        ),
        (
            *("save interval", "warn", "unsaved preemption"),
            *(["run.dir=gs://one/run", gce(OLD_SPOT), MANY, HOURLY], {"state_bytes": 1e12}),
        ),
        (
            *("save interval", "pass", "1 h 12 min"),
            *(["run.dir=gs://one/run", gce(SPOT), MANY, HOURLY], {"state_bytes": 1e12}),
        ),
        ("fast storage", "pass", "a restore 48 s (800 and 1,000 MB/s a host, measured", [], {}),
        ("fast storage", "warn", "doctor CONFIG --storage", [], {"rate": None}),
        ("fast storage", "warn", "assumed", ["checkpoint.memory={}"], {"rate": None}),
        (
            *("fast storage", "warn", "launch gce check"),
            *(["run.dir=gs://one/run", gce(ON_DEMAND)], {"rate": None}),
        ),
        ("fast storage", "warn", "in memory", [], {"file_system": "tmpfs"}),
        ("fast storage", "warn", "each restart reads", [], {"state_bytes": 2e12}),
        ("fast storage", "pass", "measured", ["checkpoint.memory={}"], {"state_bytes": 1.3e12}),
        (
            "fast storage",
            "warn",
            "limited by storage",
            ["checkpoint.memory={}"],
            {"state_bytes": 5e13},
        ),
        ("fast storage", "warn", "unknown", [], {"state_bytes": None}),
        ("digests", "pass", "every 24 h", [], {}),
        ("digests", "warn", "checkpoint.scrub", ["checkpoint.scrub=null"], {}),
        ("replica", "warn", "checkpoint.replica.path", [], {}),
        ("replica", "pass", "15 min", [f"{REPLICA}gs://two/run"], {}),
        (
            *("replica", "warn", "no alert"),
            *(["checkpoint.replica={path: gs://two/run, lag_minutes: null}"], {}),
        ),
        ("replica place", "n/a", "no replica", [], {}),
        ("replica place", "warn", "same bucket", [f"{REPLICA}gs://one/copy"], BUCKET),
        ("replica place", "warn", "one and two is not known", [f"{REPLICA}gs://two/run"], BUCKET),
        (
            *("replica place", "warn", "two is not known"),
            *([f"{REPLICA}gs://two/run"], BUCKET | {"bucket_places": {"one": US, "two": None}}),
        ),
        (
            *("replica place", "warn", "one region"),
            *([f"{REPLICA}gs://two/run"], BUCKET | {"bucket_places": {"one": US, "two": US}}),
        ),
        (
            *("replica place", "pass", "is in us-central1, two in europe-west4"),
            *([f"{REPLICA}gs://two/run"], BUCKET | {"bucket_places": {"one": US, "two": EU}}),
        ),
        ("replica place", "pass", "a bucket", [f"{REPLICA}gs://two/run"], {}),
        ("replica place", "pass", "another", [f"{REPLICA}/other/run"], {}),
        ("replica place", "warn", "on the", [f"{REPLICA}/other/run"], {"shares_disk": True}),
        ("replica place", "n/a", "other machines", [f"{REPLICA}/o/run"], {"is_here": False}),
        ("retention", "warn", "2 checkpoints of 89.4 GiB, 178.8 GiB at the end", [], {}),
        ("retention", "warn", "none from before damage", ["checkpoint.keep.best=2"], {}),
        ("retention", "pass", "daily=7", ["checkpoint.keep.daily=7"], {}),
        ("retention", "pass", "hours=6", ["checkpoint.keep.hours=6"], {}),
        ("retention", "pass", "every_steps=500", ["checkpoint.keep.every_steps=500"], {}),
        ("retention", "warn", "$3.84 a month at $0.02 a GB", [], BUCKET),
        ("retention", "n/a", "unknown", [], {"state_bytes": None}),
        ("health access", "pass", "every 10 s", [], {}),
        ("health access", "warn", "No driver", [], {"gpus": Gpus(error="No driver")}),
        (
            *("health access", "warn", "ecc, xid"),
            *([], {"gpus": Gpus(error=None, unreadable={"xid": "?", "ecc": "?"})}),
        ),
        ("health access", "warn", "null", ["hardware.health=null"], {}),
        ("health access", "n/a", "other machines", [], {"is_here": False}),
        ("health access", "n/a", "no GPUs", [], {"platform": "tpu"}),
        ("incidents", "n/a", "no target", [], {}),
        ("incidents", "pass", "120 min", [f"alerts.targets=[{TARGET}]"], {}),
        (
            *("incidents", "warn", "no target gets commits_stalled, hardware_fault"),
            *(["alerts.targets=[{kind: slack, url_env: S, kinds: [gave_up]}]"], {}),
        ),
        (
            *("incidents", "warn", "alerts.no_commit_minutes"),
            *([f"alerts.targets=[{TARGET}]", "alerts.no_commit_minutes=null"], {}),
        ),
        ("restarts", "warn", "`jaxres train` restarts nothing", [], {}),
        ("restarts", "pass", "attempt 2", [], {"restarted_by": "attempt 2 has a launcher"}),
        ("restarts", "warn", "first failure", ["restart.max_attempts_without_commit=1"], {}),
        ("restarts", "pass", "replaces VMs", ["run.dir=gs://one/run", gce(ON_DEMAND)], {}),
        ("resume check", "pass", "good", [], {}),
        ("resume check", "n/a", "other machines", [], {"checks": {}}),
        (
            *("resume check", "warn", "never"),
            *([], {"checks": {"resume": Check("warn", "resume", "never tested")}}),
        ),
        ("data position", "pass", "no row is repeated", [], {}),
        ("random state", "pass", "PRNG key", [], {}),
        ("notices", "pass", "good", [], {}),
        ("notices", "n/a", "other machines", [], {"is_here": False}),
        ("save at a notice", "pass", "SIGTERM", [], {}),
        ("save at a notice", "pass", "no option", ["run.dir=gs://one/run", gce(ON_DEMAND)], {}),
        (
            *("save at a notice", "pass", "a save takes 120 s"),
            *(["run.dir=gs://one/run", gce(SPOT), "preemption.notice_seconds=130"], {}),
        ),
        (
            *("save at a notice", "pass", "leaves 115 s"),
            *(["run.dir=gs://one/run", gce(SPOT)], {"state_bytes": 9e10}),
        ),
        (
            *("save at a notice", "warn", "leaves 25 s: it saves nothing"),
            *(["run.dir=gs://one/run", gce(OLD_SPOT)], {"state_bytes": 9e10}),
        ),
        (
            *("save at a notice", "warn", "leaves 115 s: it saves nothing"),
            *(["run.dir=gs://one/run", gce(SPOT)], {"state_bytes": 9.3e10}),
        ),
        (
            *("save at a notice", "warn", "leaves 55 s: it saves nothing"),
            *(["preemption.sigterm_seconds=60"], {}),
        ),
        ("save at a notice", "pass", "leaves 75 s", ["preemption.sigterm_seconds=80"], {}),
        (
            *("save at a notice", "warn", "preemption.metadata=auto"),
            *(["run.dir=gs://one/run", gce(SPOT), "preemption.metadata=off"], {}),
        ),
        ("capacity", "n/a", "no VMs", [], {}),
        ("capacity", "warn", "only spot", ["run.dir=gs://one/run", gce(SPOT)], {}),
        ("capacity", "warn", "one zone", ["run.dir=gs://one/run", gce(ON_DEMAND)], {}),
        (
            *("capacity", "pass", "spot, standard"),
            *(["run.dir=gs://one/run", gce(SPOT, ON_DEMAND)], {"state_bytes": 1e9}),
        ),
        (
            *("capacity", "warn", "no mixed fleet"),
            *(["run.dir=gs://one/run", gce(SPOT, ON_DEMAND)], {"state_bytes": 1e9, "rate": None}),
        ),
        (
            *("capacity", "warn", "all of it may be preempted at once"),
            *(["run.dir=gs://one/run", gce(SPOT, ON_DEMAND)], {"state_bytes": 1e12}),
        ),
        ("capacity", "pass", "standard, spot", ["run.dir=gs://one/run", gce(ON_DEMAND, SPOT)], {}),
        ("metrics", "warn", "dcgm-exporter", [], {}),
        ("metrics", "pass", "loss", [], {"platform": "cpu"}),
        ("metrics", "pass", "loss", ["telemetry.prometheus={}"], {}),
        ("dashboards", "warn", "tools/dashboards", [], {}),
        ("dashboards", "pass", "127.0.0.1:19400", ["telemetry.prometheus={}"], {}),
        (
            *("dashboards", "fail", "the start is refused"),
            *(["telemetry.prometheus={}"], {"has_exporter": False}),
        ),
        ("dashboards", "pass", "mlflow", ["telemetry.trackers=[{kind: mlflow}]"], {}),
        ("alerts", "warn", "alerts.targets", [], {}),
        ("alerts", "pass", "--send-test-alert", [f"alerts.targets=[{TARGET}]"], {}),
        (
            *("alerts", "fail", "SLACK_URL is not set"),
            *([f"alerts.targets=[{TARGET}]"], {"alert_error": "SLACK_URL is not set"}),
        ),
        (
            *("alerts", "warn", "SLACK_URL is not set"),
            [f"alerts.targets=[{TARGET}]"],
            {"alert_error": "SLACK_URL is not set", "starts_here": False},
        ),
        ("alerts", "fail", "no test message was sent", [], {"test_alerts": ()}),
        (
            *("alerts", "fail", "slack:A answered 404"),
            *(
                [f"alerts.targets=[{TARGET}]"],
                {"test_alerts": [("slack:A", False, "answered 404")]},
            ),
        ),
        (
            *("alerts", "pass", "slack:A answered 200"),
            *([f"alerts.targets=[{TARGET}]"], {"test_alerts": [("slack:A", True, "answered 200")]}),
        ),
        ("host kill", "pass", "all held", [], {}),
        (
            *("partition", "warn", "did not hold"),
            *([], {"chaos": ChaosFound({"partition": "failed"}, "1 of 3")}),
        ),
        ("damage", "warn", "not run: never", [], {"chaos": ChaosFound({}, "never")}),
        (
            *("partition", "warn", "chaos run --hosts 2"),
            *([], {"chaos": ChaosFound({}, "never"), "num_hosts": 2}),
        ),
        (
            *("partition", "n/a", "one host"),
            ["run.dir=gs://one/run", gce(SPOT)],
            {"chaos": ChaosFound({}, "never"), "num_hosts": 1},
        ),
        ("budgets", "pass", "5 failures", [], {}),
        ("budgets", "warn", "limits the cost", ["run.dir=gs://one/run", gce(SPOT)], {}),
        (
            *("budgets", "pass", "launch.max_hours=9"),
            *(["run.dir=gs://one/run", gce(SPOT), "launch.max_hours=9"], {}),
        ),
        ("guards", "pass", "skip", [], {}),
        ("guards", "warn", "guards.rollback=null", ["guards.rollback=null"], {}),
        ("guards", "warn", "guards.spikes.mode=warn", ["guards.spikes.mode=warn"], {}),
        ("guards", "warn", "on_nonfinite", ["guards.on_nonfinite=warn"], {}),
        ("hang limits", "pass", "30 s", ["deadlines.step_seconds=30"], {}),
        ("hang limits", "warn", "deadlines", ["deadlines.step_seconds=3601"], {}),
        ("clock", "pass", "synchronised", [], {}),
        ("clock", "warn", "chrony", [], {"is_clock_synchronised": False}),
        ("clock", "n/a", "timedatectl", [], {"is_clock_synchronised": None}),
        ("open files", "pass", "65,536", [], {}),
        ("open files", "pass", "any number", [], {"open_files": -1}),
        ("open files", "warn", "ulimit", [], {"open_files": 256}),
        ("open files", "n/a", "other machines", [], {"open_files": None}),
        (
            *("disk", "fail", "can't be written"),
            *([], {"checks": {"run.dir": Check("fail", "run.dir", "can't be written")}}),
        ),
        ("driver", "pass", "NCCL 2.27.7", [], {}),
        ("driver", "warn", "needs 580", [], {"driver": "570.12"}),
        ("driver", "pass", "570.12", [], {"driver": "570.12", "cuda": 12}),
        (
            *("driver", "warn", "pip install"),
            *([], {"nccl": Nccl(name="nvidia-nccl-cu13", version="2.9.9", least="2.18.1")}),
        ),
        (
            *("driver", "warn", "not installed"),
            *([], {"nccl": Nccl(name="nvidia-nccl-cu13", version=None, least="2.18.1")}),
        ),
        ("driver", "n/a", "no GPUs", [], {"platform": "cpu"}),
        ("driver", "n/a", "unknown", [], {"driver": None}),
        ("determinism", "pass", "run.determinism=fast", [], {}),
        ("determinism", "warn", "run.determinism=bitwise", ["run.guarantee=bitwise"], {}),
        ("determinism", "pass", "a CPU", ["run.guarantee=bitwise"], {"platform": "cpu"}),
    ],
)
def test_an_item_has_its_status_and_says_why(
    name: str, status: str, text: str, overrides: list[str], changes: dict[str, Any]
) -> None:
    check = found(name, *overrides, **changes)
    assert check.status == status, check
    assert text in f"{check.detail}. {check.remedy}", check
    if status in ("warn", "fail") and name not in checklist.COVERED:
        assert check.remedy, "a user must know what to do"


def test_every_item_is_in_the_table_of_the_docs_and_says_whether_it_is_for_all_runs() -> None:
    text = (ROOT / "docs/prove.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([a-z ]+?)( \*)? \|", text, re.MULTILINE)
    wanted = [(str(n), item.name, "" if item.for_all else " *") for n, item in enumerate(ITEMS, 1)]
    assert rows == [(n, name, star) for n, name, star in wanted]
    assert ITEMS[22 - 1].name == "damage"


@pytest.mark.parametrize("name", [item.name for item in ITEMS if not item.for_all])
def test_a_small_run_is_not_asked_for_what_only_a_long_one_needs(name: str) -> None:
    check = found(name, **SMALL)
    assert (check.status, check.detail) == ("n/a", checklist.SMALL)


@pytest.mark.parametrize(
    ("changes", "small"),
    [
        ({}, True),
        ({"step_seconds": 3600.0}, False),
        ({"num_params": 10_000_000_000}, False),
        ({"num_params": None}, True),
        ({"num_hosts": 2}, False),
    ],
)
def test_a_run_is_small_by_its_hours_and_hosts(changes: dict[str, Any], small: bool) -> None:
    assert estimates.is_small(load(), facts(load(), **SMALL | changes)) == small


def test_a_small_run_that_would_be_refused_fails() -> None:
    assert (
        found("dashboards", "telemetry.prometheus={}", has_exporter=False, **SMALL).status == "fail"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_every_config_of_ours_is_judged_without_a_failure(path: Path) -> None:
    config = configs.load(path).config
    checks = checklist.judge(config, facts(config))
    assert [check.name for check in checks] == [item.name for item in ITEMS]
    assert [check for check in checks if check.status == "fail"] == []


def test_what_is_good_is_listed_by_name_and_what_is_not_has_a_line() -> None:
    checks = [
        Check("pass", "digests", "a"),
        Check("warn", "replica", "b", "Do c"),
        Check("warn", "disk", "printed as run.dir already"),
        Check("n/a", "capacity", "d"),
    ]
    lines = checklist.text(checks, all_items=False).splitlines()
    assert lines[0] == "production checklist: 1 pass, 2 warn, 1 n/a (docs/prove.md)"
    assert [line.split() for line in lines[1:4]] == [
        ["warn", "replica", "b.", "Do", "c"],
        ["pass", "digests"],
        ["n/a", "capacity"],
    ]
    every = checklist.text(checks, all_items=True)
    assert [line.split()[1] for line in every.splitlines()[1:]] == [c.name for c in checks]


def chaos(**kinds: Any) -> ChaosResult:
    return ChaosResult(
        config="tiny",
        trajectory="x",
        kinds=kinds,
        summary="3 of 3 promises held",
        versions=kept_results.versions_here(),
        seed=0,
        hosts=1,
        steps=12,
        save_every_steps=3,
        seconds=1.0,
        held=True,
        runs=(),
    )


def test_a_campaign_counts_for_its_trajectory_and_versions_only(tmp_path: Path) -> None:
    config = load(f"data.cache_dir={tmp_path}")
    assert chaos_results.read(config).kinds["partition"] == "not run"
    path = chaos_results.store(config, chaos(node_kill="passed", partition="failed"))
    result = chaos_results.read(config)
    assert result.text == "3 of 3 promises held"
    assert list(result.kinds.values()) == ["passed", "failed", "not run"]
    other = load(f"data.cache_dir={tmp_path}", "run.seed=7")
    assert chaos_results.read(other).kinds["node_kill"] == "not run"
    fields = json.loads(path.read_bytes())
    path.write_text(json.dumps(fields | {"versions": fields["versions"] | {"jax": "0.1"}}))
    assert chaos_results.read(config).kinds["node_kill"] == "not run"
    assert "jax 0.1 -> " in chaos_results.read(config).text
    for broken in ("[]", "{", '{"kinds": 3}'):
        path.write_text(broken)
        assert "can't be read" in chaos_results.read(config).text


def test_a_kind_has_passed_if_all_promises_held_in_each_of_its_runs() -> None:
    before = chaos_results.kinds_of([], {"node_kill": "failed", "corruption": "passed"})
    assert list(before.values()) == ["failed", "not run", "passed"], "an earlier campaign is lost"
    runs = [
        (["node_kill", None], True),
        (["corruption", "node_kill"], False),
        (["corruption"], True),
    ]
    found = chaos_results.kinds_of(runs, before)
    assert list(found.values()) == ["failed", "not run", "failed"], "the last run of a kind decides"
    assert chaos_results.kinds_of(runs[:1], before)["node_kill"] == "passed"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"message": "watch_unavailable", "reason": "no driver"}', "no driver"),
        (b'{"message": "watch_started", "driver": "1", "gpus": ["a"], "unreadable": {}}', None),
        (b"", "no answer"),
        (b"{}", "no answer"),
    ],
)
def test_the_first_message_of_the_health_process_says_whether_gpus_are_read(
    line: bytes, error: str | None
) -> None:
    gpus = checklist_facts.gpus_of(line)
    assert gpus.error is None if error is None else error in str(gpus.error)


def test_facts_of_this_machine_are_read_and_those_of_other_machines_are_not(
    tmp_path: Path,
) -> None:
    config, run_dir = load(f"alerts.targets=[{TARGET}]"), RunDir(tmp_path / "run")
    common: dict[str, Any] = {
        "env": {},
        "checks": {},
        "estimate": facts(config).estimate,
        "num_params": 1,
    }
    own = checklist_facts.Devices(is_here=True, platform="cpu", number=1, num_hosts=1)
    here = checklist_facts.gather(config, run_dir, devices=own, **common)
    assert here.file_system
    assert here.open_files
    assert here.alert_error == ("alerts.targets[0]: the environment variable SLACK_URL is not set")
    assert here.restarted_by == ""
    there = checklist_facts.gather(
        config, run_dir, devices=dataclasses.replace(own, is_here=False), **common
    )
    assert (there.file_system, there.open_files, there.is_clock_synchronised) == (None, None, None)
    vms = load("run.dir=gs://one/run", gce(SPOT), "launch.gce.num_hosts=3")
    planned = checklist_facts.gather(vms, run_dir, devices=own, **common)
    assert (planned.num_devices, planned.num_hosts, planned.platform) == (24, 3, "gpu")
    assert (planned.is_here, planned.starts_here) == (False, True)


def resolved(text: str, **env: str) -> tuple[alert_sender.ResolvedTarget, ...]:
    section: AlertsSection = load(f"alerts.targets=[{text}]").alerts
    return alert_sender.resolve(section, env=env)


def test_a_test_message_reaches_each_target_once() -> None:
    with served() as hook, served(404) as other:
        targets = "{kind: slack, url_env: A}, {kind: generic, url_env: B}"
        sent = routing_check.send(
            resolved(targets, A=hook.url, B=other.url), run="mine", nonce="n", clock=SystemClock()
        )
        assert list(sent) == [
            ("slack:A", True, "answered 200"),
            ("generic:B", False, "answered 404"),
        ]
        assert hook.received == [
            {"text": "mine: a test message of jaxres doctor; nothing has happened"}
        ]
        assert (other.received[0]["kind"], other.received[0]["run"]) == ("test", "mine")


def test_a_test_alert_at_pagerduty_is_resolved_at_once() -> None:
    with served(path="/v2/enqueue") as hook:
        target = f"{{kind: pagerduty, key_env: KEY, url: '{hook.url}'}}"
        sent = routing_check.send(
            resolved(target, KEY="s3cret"), run="mine", nonce="n", clock=SystemClock()
        )
        assert [is_delivered for _, is_delivered, _ in sent] == [True]
        actions = [(body["event_action"], body["dedup_key"]) for body in hook.received]
        assert actions == [("trigger", "n-test-0"), ("resolve", "n-test-0")]
        assert {body["routing_key"] for body in hook.received} == {"s3cret"}


def test_of_several_checks_of_one_name_the_worst_counts() -> None:
    checks = [Check("pass", "mesh", "a"), Check("warn", "mesh", "b"), Check("pass", "mesh", "c")]
    assert doctor.worst(checks)["mesh"].detail == "b"
