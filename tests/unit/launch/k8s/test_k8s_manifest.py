"""Manifests for Kubernetes: what follows each exit code, and that the real types accept them."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path, PurePosixPath

import pytest
import yaml

from jaxres import config as configs
from jaxres.clock import SystemClock
from jaxres.config import RunConfig
from jaxres.exit_codes import ROWS, ExitCode, RestartRule
from jaxres.faults import ConfigError, UsageError
from jaxres.launch import argument_checks
from jaxres.launch.k8s import command as k8s
from jaxres.launch.k8s import manifest as k8s_manifest
from jaxres.launch.k8s.manifest import ClusterOptions, Consequence, consequence
from jaxres.runlog.event_log import EventLog
from jaxres.runlog.events import SaveCommitted
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog
from jaxres.storage.path import GcsPath
from tests.emulators import kubernetes as emulator
from tests.unit.runlog.example_records import CLAIM

CONFIG = RunConfig.model_validate(
    {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
)
ROOT = GcsPath("bucket", "runs/first")
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
END, FREE, AGAIN = "FailJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJobSet"
AFTER = {
    ExitCode.USAGE: END,
    ExitCode.BUG: AGAIN,
    ExitCode.STORAGE: AGAIN,
    ExitCode.PREEMPTED: FREE,
    ExitCode.STOPPED: END,
    ExitCode.CONFIG: END,
    ExitCode.PEER_LOST: AGAIN,
    ExitCode.HUNG: AGAIN,
    ExitCode.DIVERGED: END,
    ExitCode.UNHEALTHY: AGAIN,
    ExitCode.FENCED: END,
    ExitCode.NO_PROGRESS: END,
    ExitCode.UNRESTORABLE: END,
    ExitCode.OUT_OF_MEMORY: AGAIN,
}
OTHERS = {
    1: AGAIN,
    127: AGAIN,
    129: FREE,
    134: AGAIN,
    137: AGAIN,
    139: AGAIN,
    143: FREE,
    255: AGAIN,
}


def options(**given) -> ClusterOptions:
    defaults = {"image": "me/jaxres:1", "name": "jaxres-first", "grace_seconds": 180, "nodes": 2}
    return ClusterOptions(**{**defaults, **given})


def owner(**given):
    return k8s_manifest.manifests(CONFIG, ROOT, options(**given))[-1]


def pod_spec(**given):
    return emulator.job_spec(owner(**given))["template"]["spec"]


def environment(**given):
    return {entry["name"]: entry for entry in pod_spec(**given)["containers"][0]["env"]}


@pytest.mark.parametrize("row", [row for row in ROWS if row.code != 0], ids=lambda row: row.name)
def test_each_row_of_the_exit_code_table_has_its_consequence(row):
    assert emulator.after_exit(owner(), row.code) == AFTER[ExitCode(row.code)]


@pytest.mark.parametrize("code", OTHERS)
def test_signals_and_unknown_codes_have_their_consequence(code):
    assert emulator.after_exit(owner(), code) == OTHERS[code]


def test_the_rules_contain_what_the_table_of_exit_codes_says_and_no_list_of_their_own():
    never = {int(row.code) for row in ROWS if row.restart is RestartRule.NEVER} - {0}
    assert set(k8s_manifest.codes_with(Consequence.END)) == never
    assert consequence(0) is Consequence.COMPLETE


@pytest.mark.parametrize("code", [75, 79, 137])
def test_a_disruption_uses_no_restart_whatever_the_code(code):
    assert emulator.after_exit(owner(), code, is_disrupted=True) == FREE
    assert emulator.after_exit(owner(kind="job"), code, is_disrupted=True) == "Ignore"


def test_a_disrupted_pod_whose_run_has_diverged_is_not_started_again():
    assert emulator.after_exit(owner(), ExitCode.DIVERGED, is_disrupted=True) == END
    assert emulator.after_exit(owner(kind="job"), ExitCode.DIVERGED, is_disrupted=True) == "FailJob"


@pytest.mark.parametrize("code", [*AFTER, *OTHERS])
def test_a_plain_job_ends_ignores_or_counts_as_the_jobset_does(code):
    jobset = {**AFTER, **OTHERS}[code]
    expected = {END: "FailJob", FREE: "Ignore", AGAIN: "Count"}[jobset]
    assert emulator.after_exit(owner(kind="job"), code) == expected


@pytest.mark.parametrize("kind", ["jobset", "job"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nodes": 1},
        {"gpus_per_node": 8, "queue": "research", "service_account": "trainer"},
        {"claims": (("data", "/data"), ("runs", "/runs")), "shared_memory": "64Gi"},
        {"excluded_nodes": ("n1", "n2"), "max_restarts": 3},
    ],
)
def test_the_real_types_accept_every_field(kind, given):
    for manifest in k8s_manifest.manifests(CONFIG, ROOT, options(kind=kind, **given)):
        emulator.check(manifest)


def test_the_check_of_the_types_refuses_an_unknown_field():
    wrong = copy.deepcopy(owner())
    emulator.job_spec(wrong)["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(emulator.Refused, match="terminationGracePeriod"):
        emulator.check(wrong)
    wrong = copy.deepcopy(owner(kind="job"))
    wrong["spec"]["backoffLimit"] = "6"
    with pytest.raises(emulator.Refused, match="backoffLimit"):
        emulator.check(wrong)


def test_the_printed_text_reads_back_as_the_same_objects():
    objects = k8s_manifest.manifests(CONFIG, ROOT, options(kind="job", claims=(("c", "/c"),)))
    assert list(yaml.safe_load_all(k8s_manifest.to_yaml(objects))) == objects


def test_the_pods_read_the_same_config(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(k8s_manifest.manifests(CONFIG, ROOT, options())[0]["data"]["config.yaml"])
    command = k8s_manifest.pod_command(ROOT, 180)
    assert command[:5] == ["python", "-m", "jaxres.launch", "k8s", "pod"]
    assert command[5] == "/etc/jaxres/config.yaml"
    loaded = configs.load(path, command[6:]).config
    assert configs.digest(loaded) == configs.digest(CONFIG)
    assert loaded.run.dir == ROOT


def test_the_hosts_find_each_other_by_the_names_that_kubernetes_gives():
    env = environment()
    pod = (
        "jaxres-first-hosts-0-0"  # <jobset>-<replicated job>-<index of the job>-<index of the pod>
    )
    assert env["JAXRES_COORDINATOR"]["value"] == f"{pod}.jaxres-first:8470"
    assert env["JAXRES_NUM_HOSTS"]["value"] == "2"
    field = env["JAXRES_HOST_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    plain = environment(kind="job")
    assert plain["JAXRES_COORDINATOR"]["value"] == "jaxres-first-0.jaxres-first:8470"
    assert pod_spec(kind="job")["subdomain"] == "jaxres-first"
    assert "JAXRES_COORDINATOR" not in environment(nodes=1)


def test_a_host_is_known_by_its_node_and_must_have_its_gpus():
    env = environment(gpus_per_node=4)
    assert env["JAXRES_HOST_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert env["JAXRES_MIN_DEVICES"]["value"] == "4"
    assert pod_spec(gpus_per_node=4)["containers"][0]["resources"]["limits"] == {
        "nvidia.com/gpu": "4"
    }


def test_queue_and_topology_are_labelled():
    metadata = owner(queue="research", topology="cloud.google.com/gke-nodepool")["metadata"]
    assert metadata["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    (label,) = metadata["annotations"]
    assert label == "alpha.jobset.sigs.k8s.io/exclusive-topology"


def test_shared_memory_is_not_docker_s_64_megabytes():
    spec = pod_spec(shared_memory="64Gi")
    (volume,) = [v for v in spec["volumes"] if v["name"] == "shared-memory"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm"


@pytest.mark.parametrize("seconds", [1.0, 80.0, 200.0, 1000.0])
def test_the_grace_period_covers_the_save_in_flight_and_one_more(seconds):
    needed = k8s.grace_seconds(CONFIG, seconds, asked=None)
    assert needed >= 2 * seconds + CONFIG.preemption.margin_seconds


def test_a_grace_period_shorter_than_the_measured_saves_is_refused():
    with pytest.raises(ConfigError, match=r"a save took 200 s.*--grace-seconds 435"):
        k8s.grace_seconds(CONFIG, 200.0, asked=60)
    configured = CONFIG.model_copy(
        update={"preemption": CONFIG.preemption.model_copy(update={"sigterm_seconds": 40.0})}
    )
    assert k8s.grace_seconds(configured, None, asked=None) == 40
    with pytest.raises(ConfigError, match="40 s from SIGTERM"):
        k8s.grace_seconds(configured, 200.0, asked=None)


def test_the_longest_save_of_the_newest_attempt_is_the_measure(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    assert k8s.longest_save_seconds(run_dir) is None
    RunLog.claim(run_dir.log, dataclasses.replace(CLAIM, attempt=1), after=(), clock=SystemClock())
    run_dir.events(1, 0).parent.mkdir(parents=True)
    with EventLog(run_dir.events(1, 0), clock=SystemClock()) as events:
        for seconds in (3.0, 250.0, 4.0):
            events.emit(SaveCommitted(step=1, path="p", bytes=1, seconds=seconds))
    assert k8s.longest_save_seconds(run_dir) == 250.0


@pytest.mark.parametrize("grace", [40, 435])
def test_the_run_is_told_the_grace_period_that_kubernetes_gives(grace):
    spec = pod_spec(grace_seconds=grace)
    assert spec["terminationGracePeriodSeconds"] == grace
    assert f"preemption.sigterm_seconds={grace}" in spec["containers"][0]["command"]


def test_two_runs_have_two_names_and_one_run_has_one():
    first = k8s_manifest.object_name(PurePosixPath("/data/runs/A_b"))  # type: ignore[arg-type]
    assert first == k8s_manifest.object_name(PurePosixPath("/data/runs/A_b"))  # type: ignore[arg-type]
    assert first != k8s_manifest.object_name(PurePosixPath("/other/A_b"))  # type: ignore[arg-type]
    longest = k8s_manifest.object_name(GcsPath("bucket", "x" * 200))
    assert len(f"{longest}-hosts-0-99999") <= 63


TWO_CLAIMS = ["--claim", "a:/x", "--claim", "b:/x"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["--image", "i"], UsageError, "--print or --submit"),
        (["--print"], UsageError, "--image"),
        (["--image", "a b", "--print"], UsageError, "--image 'a b'"),
        (["--image", "ü/i", "--print"], UsageError, "--image 'ü/i'"),
        (["--image", "me/Jaxres:1", "--print"], UsageError, "--image 'me/Jaxres:1'"),
        (["--image", "me//i", "--print"], UsageError, "--image 'me//i'"),
        (["--image", "i:1:2", "--print"], UsageError, "--image 'i:1:2'"),
        (["--image", "i", "--print", "--nodes", "0"], UsageError, "--nodes 0"),
        (["--image", "i", "--print", "--nodes", "9999999"], UsageError, "to 100000"),
        (["--image", "i", "--print", "--gpus-per-node", "-1"], UsageError, "--gpus-per-node -1"),
        (["--image", "i", "--print", "--gpus-per-node", "9" * 30], UsageError, "999[.]{3}: exp"),
        (["--image", "i", "--print", "--max-restarts", "9" * 11], UsageError, "--max-restarts"),
        (["--image", "i", "--print", "--grace-seconds", "-1"], UsageError, "--grace-seconds -1"),
        (["--image", "i", "--print", "--namespace", "Ü"], UsageError, "--namespace 'Ü'"),
        (["--image", "i", "--print", "--queue", "a b"], UsageError, "--queue 'a b'"),
        (["--image", "i", "--print", "--queue", "q" * 64], UsageError, "up to 63"),
        (["--image", "i", "--print", "--exclude-node", "a..b"], UsageError, "--exclude-node"),
        (["--image", "i", "--print", "--topology", "a/b/c"], UsageError, "--topology 'a/b/c'"),
        (["--image", "i", "--print", "--shm-size", "lots"], UsageError, "--shm-size 'lots'"),
        (["--image", "i", "--print", "--shm-size", "64"], UsageError, "--shm-size '64'"),
        (["--image", "i", "--print", "--shm-size", "64K"], UsageError, "--shm-size '64K'"),
        (["--image", "i", "--print", "--exclude-node", ""], UsageError, "--exclude-node ''"),
        (["--image", "i", "--print", "--service-account", "A"], UsageError, "--service-account"),
        (["--image", "i", "--print", *TWO_CLAIMS], UsageError, "something else is at /x"),
        (["--image", "i", "--print", "--claim", "a:/dev/shm"], UsageError, "is at /dev/shm"),
        (["--image", "i", "--print", "--claim", "a:/etc/jaxres/x"], UsageError, "something else"),
        (["--image", "i", "--print", "--claim", "a:/etc"], UsageError, "something else"),
        (["--image", "i", "--print", "--claim", "a:/"], UsageError, "something else"),
        (
            [
                "--image",
                "i",
                "--print",
                "run.dir=gs://bucket/run",
                "preemption.sigterm_seconds=1e9",
            ],
            ConfigError,
            "at most 604800",
        ),
        (["--image", "i", "--print", "--claim", "a:/x/.."], UsageError, "without .."),
        (["--image", "i", "--print", "--kind", "job", "--topology", "x"], UsageError, "--topology"),
        (["--image", "i", "--print", "run.dir=/here"], ConfigError, "lost with its pod"),
        (["--image", "i", "--print"], ConfigError, "lost with its pod"),
        (["--image", "i", "--print", "--claim", "x"], UsageError, "--claim 'x'"),
        (
            ["--image", "i", "--print", "run.dir=gs://bucket/run", "--name", "A"],
            UsageError,
            "--name 'A'",
        ),
    ],
)
def test_bad_arguments_are_one_clear_error(arguments, error, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        k8s.main(["quickstart", *arguments], env={})


DIGEST = "sha256:" + 64 * "a"


@pytest.mark.parametrize(
    "image",
    ["i", "me/jaxres:1", "REGISTRY/jaxres:1", "localhost:5000/a/b_c/d-e:V.1", f"r.io/j@{DIGEST}"],
)
def test_names_of_images_are_accepted(image):
    assert argument_checks.image(image) == image


def test_gpus_that_the_mesh_can_not_use_are_refused_before_the_cluster_is_asked():
    arguments = ["quickstart", "run.dir=gs://bucket/run", "--image", "i", "--print", "mesh.data=3"]
    with pytest.raises(ConfigError, match="does not make 2 device"):
        k8s.main([*arguments, "--nodes", "2", "--gpus-per-node", "1"], env={})


def test_a_run_directory_that_kubernetes_would_expand_is_escaped():
    command = k8s_manifest.pod_command(PurePosixPath("/data/$(HOSTNAME)/a$$b"), 180)
    assert "run.dir=/data/$$(HOSTNAME)/a$$$$b" in command


PATCH = """
spec:
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  containers:
  - name: train
    resources: {requests: {memory: 8Gi}, limits: {memory: 9Gi}}
    env: [{name: A, valueFrom: {secretKeyRef: {name: b, key: c}}}]
"""


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_patch_is_added_to_the_pods_and_the_real_types_accept_it(kind):
    patch = yaml.safe_load(PATCH)
    made = pod_spec(kind=kind, gpus_per_node=8)
    found = pod_spec(kind=kind, gpus_per_node=8, patch=patch)
    assert k8s_manifest.changed_fields(made, found) == []
    assert found["tolerations"] == patch["spec"]["tolerations"]
    container = found["containers"][0]
    assert container["resources"]["limits"] == {"memory": "9Gi", "nvidia.com/gpu": "8"}
    assert container["resources"]["requests"] == {"memory": "8Gi"}
    assert container["env"][-1]["name"] == "A"
    emulator.check(owner(kind=kind, gpus_per_node=8, patch=patch))


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"spec": {"restartPolicy": "Always"}}, 'spec.restartPolicy is "Never" by jaxres'),
        ({"spec": {"containers": [{"name": "train", "command": ["sh"]}]}}, "[train].command is"),
        (
            {"spec": {"containers": [{"name": "train", "env": [{"name": "JAXRES_HOST_ID"}]}]}},
            None,
        ),
        (
            {"spec": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}}}},
            "nodeSelectorTerms is",
        ),
    ],
)
def test_a_patch_replaces_nothing(patch, says):
    made = pod_spec(excluded_nodes=("bad",))
    if says is None:
        assert pod_spec(excluded_nodes=("bad",), patch=patch) == made
        return
    with pytest.raises(ConfigError) as refused:
        pod_spec(excluded_nodes=("bad",), patch=patch)
    assert says in str(refused.value)


def test_the_names_of_pods_are_no_longer_than_jobset_accepts():
    for nodes in (1, 10, 11, 10_000):
        longest = k8s_manifest.longest_name(nodes)
        assert len(k8s_manifest.pod_name("a" * longest, nodes - 1)) == 63
        assert len(k8s_manifest.object_name(PurePosixPath("/" + 99 * "a"))) <= longest
