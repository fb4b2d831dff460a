"""Tasks for SkyPilot: what follows each exit code, and that its schema has every field."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from jaxres import config as configs
from jaxres.config import RunConfig
from jaxres.exit_codes import ROWS, ExitCode
from jaxres.faults import ConfigError, UsageError
from jaxres.launch.sky import command as sky
from jaxres.launch.sky import task as sky_task
from jaxres.launch.sky.task import TaskOptions
from jaxres.storage.path import GcsPath
from tests.emulators import skypilot
from tests.emulators.skypilot import AGAIN, DONE, FAILED
from tests.waiting import SURE_SECONDS

CONFIG = RunConfig.model_validate(
    {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
)
ROOT = GcsPath("bucket", "runs/first")
NODE = "the node's own process trains again"
"""SkyPilot does not see such an exit of the training."""
AFTER = {
    ExitCode.DONE: DONE,
    ExitCode.USAGE: FAILED,
    ExitCode.BUG: NODE,
    ExitCode.STORAGE: NODE,
    ExitCode.PREEMPTED: AGAIN,
    ExitCode.STOPPED: FAILED,
    ExitCode.CONFIG: FAILED,
    ExitCode.PEER_LOST: NODE,
    ExitCode.HUNG: NODE,
    ExitCode.DIVERGED: FAILED,
    ExitCode.UNHEALTHY: AGAIN,
    ExitCode.FENCED: FAILED,
    ExitCode.NO_PROGRESS: FAILED,
    ExitCode.UNRESTORABLE: FAILED,
    ExitCode.OUT_OF_MEMORY: NODE,
}
OTHERS = {1: NODE, 127: NODE, 129: AGAIN, 134: NODE, 137: NODE, 139: NODE, 143: AGAIN, 255: NODE}


def options(**given) -> TaskOptions:
    defaults = {"name": "jaxres-first", "image": "me/jaxres:1", "python": "python", "nodes": 2}
    return TaskOptions(**{**defaults, **given})


def task(**given):
    return sky_task.task(CONFIG, ROOT, options(**given))


def after(code: int) -> str:
    """Returns the consequence of a training's exit on one node of two."""
    if not sky_task.ends_node(code):
        return NODE
    other = skypilot.after_exits(task(), [137, code]) if code else DONE
    assert skypilot.after_exits(task(nodes=1), [code]) == other, "one node ends otherwise than two"
    return other


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_of_the_exit_code_table_has_its_consequence(row):
    assert after(row.code) == AFTER[ExitCode(row.code)]


@pytest.mark.parametrize("code", OTHERS)
def test_signals_and_unknown_codes_have_their_consequence(code):
    assert after(code) == OTHERS[code]


def test_an_exit_has_at_most_one_layer_that_starts_the_run_again():
    codes = sky_task.recover_on_exit_codes()
    assert codes == [75, 82, 129, 143]
    assert task()["resources"]["job_recovery"]["max_restarts_on_errors"] == 0
    assert all(sky_task.ends_node(code) for code in codes)


def test_nodes_that_skypilot_kills_start_nothing_again():
    """Their code is 137, whatever has ended the job."""
    assert sky_task.CANCELLED not in sky_task.recover_on_exit_codes()
    for code in (ExitCode.DIVERGED, ExitCode.CONFIG, ExitCode.NO_PROGRESS):
        assert skypilot.after_exits(task(nodes=3), [137, code, 137]) == FAILED


def test_a_node_that_has_failed_is_left():
    """FAILOVER would start the job again on the nodes that are still there."""
    assert task()["resources"]["job_recovery"]["strategy"] == "EAGER_NEXT_REGION"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nodes": 1, "image": "", "setup": ("pip install .", "echo 'ü: #'"), "workdir": "."},
        {"accelerators": ("H100", 8), "use_spot": True, "disk_gb": 256, "infra": "gcp/us-central1"},
    ],
)
def test_the_printed_task_is_accepted_and_reads_back_the_same(given):
    text = sky_task.to_yaml(task(**given))
    skypilot.check(yaml.safe_load(text))
    assert yaml.safe_load(text) == task(**given)


def test_the_check_refuses_an_unknown_field():
    with pytest.raises(skypilot.Refused, match="num_node"):
        skypilot.check({**task(), "num_node": 2})


def node_env(tmp_path: Path, **given: object) -> dict[str, str]:
    """Runs the script of the second of two nodes up to the training; returns its environment."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nenv; echo "ARGUMENTS=$*"\n')
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "SKYPILOT_NODE_RANK": "1"}
    env |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}
    script = task(python=str(python), **given)["run"]
    done = subprocess.run(
        ["bash", "-euc", script], env=env, capture_output=True, text=True, timeout=SURE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def test_the_nodes_find_each_other_by_the_variables_of_skypilot(tmp_path: Path):
    env = node_env(tmp_path, accelerators=("H100", 8))
    assert env["JAXRES_COORDINATOR"] == "10.0.0.7:8470"
    assert (env["JAXRES_NUM_HOSTS"], env["JAXRES_HOST_ID"]) == ("2", "1")
    assert (env["JAXRES_PLATFORM"], env["JAXRES_MIN_DEVICES"]) == ("gpu", "8")
    assert len(env["JAXRES_INSTANCE"]) == 36


def test_the_nodes_read_the_same_config(tmp_path: Path):
    words = node_env(tmp_path)["ARGUMENTS"].split()
    assert words[:4] == ["-m", "jaxres.launch", "sky", "node"]
    assert words[5] == f"run.dir={ROOT}"
    loaded = configs.load(Path(words[4]), words[5:]).config
    assert configs.digest(loaded) == configs.digest(CONFIG)
    assert loaded.run.dir == ROOT


def test_the_script_is_clean_shell(tmp_path: Path):
    path = tmp_path / "run.sh"
    path.write_text("#!/bin/bash\n" + task(accelerators=("H100", 8))["run"])
    command = [Path(sysconfig.get_path("scripts")) / "shellcheck", "--severity=warning", path]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SURE_SECONDS)
    assert found.returncode == 0, found.stdout + found.stderr


BUCKET = ["run.dir=gs://bucket/run", "--print"]
IMAGE = [*BUCKET, "--image", "i"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (BUCKET, UsageError, "how do the nodes get jaxres"),
        (IMAGE[:1] + IMAGE[2:], UsageError, "give --print"),
        (["--print", "--image", "i"], ConfigError, "lost with its nodes"),
        (["--print", "--image", "i", "run.dir=/data/run"], ConfigError, "lost with its nodes"),
        ([*BUCKET, "--image", "a b"], UsageError, "--image 'a b'"),
        ([*IMAGE, "--nodes", "0"], UsageError, "--nodes 0"),
        ([*IMAGE, "--nodes", "9999999"], UsageError, "--nodes 9999999"),
        ([*IMAGE, "--gpus", "H100"], UsageError, "such as H100:8"),
        ([*IMAGE, "--gpus", "H100:0"], UsageError, "from 1 to 1024 GPUs"),
        ([*IMAGE, "--gpus", "H100:99999"], UsageError, "from 1 to 1024 GPUs"),
        ([*IMAGE, "--gpus", "H100:²"], UsageError, "such as H100:8"),
        ([*IMAGE, "--gpus", "H100:3", "mesh.data=2"], ConfigError, "does not make 3 device"),
        ([*IMAGE, "--name", "ü"], UsageError, "--name 'ü'"),
        ([*IMAGE, "--name", "a---b"], UsageError, "two hyphens"),
        ([*IMAGE, "--infra", "a b"], UsageError, "--infra 'a b'"),
        ([*IMAGE, "--disk-gb", "0"], UsageError, "--disk-gb 0"),
        ([*IMAGE, "--setup", "a\nb"], UsageError, "without control characters"),
        ([*IMAGE, "--python", "a\x00"], UsageError, "without control characters"),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments, error, text):
    with pytest.raises(error, match=text):
        sky.main(["quickstart", *arguments], env={})
