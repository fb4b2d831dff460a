"""`launch k8s --submit` over HTTP, and what the process of a pod decides before it trains."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import yaml

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Fenced, StorageRefused, StorageUnavailable, UsageError
from jaxres.launch.k8s import command as k8s
from jaxres.launch.k8s import manifest as k8s_manifest
from jaxres.runlog.run_log import AttemptEnded, Commit, Record
from jaxres.supervisor.restart_policy import GiveUp, Restart
from tests.emulators.kubernetes import ApiServer
from tests.unit.runlog.example_records import CLAIM

CONFIG = RunConfig.model_validate(
    {"data": {"source": {"kind": "text", "path": "x"}}, "train": {"steps": 9}}
)
ARGUMENTS = ["quickstart", "run.dir=gs://bucket/run", "--image", "me/jaxres:1", "--nodes", "2"]


@pytest.fixture
def server():
    with ApiServer() as server:
        yield server


@pytest.fixture
def submit(server, tmp_path: Path):
    server.write_kubeconfig(tmp_path / "kubeconfig")

    def call(*arguments: str) -> int:
        env = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
        return k8s.main([*ARGUMENTS, *arguments, "--submit"], env=env)

    return call


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--nodes", "10", "--name", "a" * 48], UsageError, "at most 47 with 10 nodes"),
        (["--patch", "nowhere.yaml"], UsageError, "--patch nowhere.yaml: no such file"),
        (["--patch", "list.yaml"], ConfigError, "expected `metadata` and `spec`"),
        (["--patch", "half.yaml"], ConfigError, "half.yaml:2: not valid YAML"),
    ],
)
def test_what_a_cluster_would_refuse_of_names_and_patches_is_refused(
    tmp_path, monkeypatch, words, kind, says
):
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("containers: []")
    Path("half.yaml").write_text("{")
    with pytest.raises(kind, match=says):
        k8s.main([*ARGUMENTS, *words, "--print"], env={})


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_what_is_submitted_is_what_is_printed(server, submit, capsys, kind):
    assert k8s.main([*ARGUMENTS, "--kind", kind, "--print"], env={}) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert submit("--kind", kind) == 0
    assert {found["kind"]: found for found in server.objects.values()} == {
        found["kind"]: found for found in printed
    }
    assert f"kubectl get {kind} " in capsys.readouterr().out


def test_a_run_has_one_job_and_a_second_one_changes_nothing(server, submit):
    submit()
    before = dict(server.objects)
    with pytest.raises(Fenced, match="kubectl delete jobset jaxres-run-"):
        submit("restart.backoff_seconds=3")
    assert server.objects == before


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_job_that_was_deleted_is_submitted_again_with_its_new_config(server, submit, kind):
    submit("--kind", kind)
    (key,) = [key for key in server.objects if key[0].lower() == kind]
    del server.objects[key]
    submit("--kind", kind, "restart.backoff_seconds=7")
    (config,) = [found for (kind, *_), found in server.objects.items() if kind == "ConfigMap"]
    assert "backoff_seconds: 7.0" in config["data"]["config.yaml"]


def test_a_cluster_without_jobset_is_named(server, submit):
    server.absent.add("JobSet")
    with pytest.raises(ConfigError, match=r"install JobSet 0\.10\.1.*--kind job"):
        submit()


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_a_namespace_that_does_not_exist_is_named(server, submit, kind):
    server.absent_namespaces.add("team")
    with pytest.raises(ConfigError, match=r'namespaces "team" not found.*create namespace team'):
        submit("--kind", kind, "--namespace", "team")
    assert server.objects == {}


def test_credentials_that_have_expired_are_named(server, submit):
    server.answers["JobSet"] = 401, b'{"message": "Unauthorized"}'
    with pytest.raises(ConfigError, match=r"401 Unauthorized\. The credentials of the kubeconfig"):
        submit()


def test_a_job_that_is_still_being_deleted_is_named(server, submit):
    server.answers["JobSet"] = 409, b'{"message": "object is being deleted: jobsets already exist"}'
    with pytest.raises(Fenced, match="object is being deleted"):
        submit()


def test_a_config_map_of_something_else_is_not_overwritten(server, submit):
    foreign = {"kind": "ConfigMap", "apiVersion": "v1", "data": {"nginx.conf": "x"}}
    server.objects["ConfigMap", "default", "web"] = foreign
    with pytest.raises(ConfigError, match=r"ConfigMap of this name that is not of a run.*--name"):
        submit("--name", "web")
    assert server.objects == {("ConfigMap", "default", "web"): foreign}


def test_an_interrupted_submission_leaves_no_job_without_its_config(server, submit, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(k8s._Api, "create_or_replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submit()
    assert server.objects == {}


def test_what_the_api_refuses_is_one_message(submit, monkeypatch):
    wrong = {"containerName": "train", "operator": "In", "values": [0]}
    monkeypatch.setattr(k8s_manifest, "_exit_codes", lambda wanted: wrong)
    with pytest.raises(ConfigError, match="refuses it: 400 strict decoding error: values"):
        submit()


def test_an_api_that_does_not_answer_is_an_outage(server, submit):
    server.__exit__()
    try:
        with pytest.raises(StorageUnavailable, match="does not answer"):
            submit()
    finally:
        server.__init__()
        server.__enter__()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"<html>", b"\xff", b'{"message": null}'])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, StorageUnavailable), (500, StorageUnavailable), (409, Fenced), (422, ConfigError)],
)
def test_an_answer_of_any_form_is_a_typed_error(server, submit, status, kind, body):
    server.answers["JobSet"] = status, body
    with pytest.raises(kind):
        submit()


@pytest.mark.parametrize("body", [b"<html>", b"\xff", b'{"kind": "Jo'])
@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_an_answer_that_is_no_json_is_an_outage_and_says_what_may_exist(server, submit, kind, body):
    server.answers[kind] = 201, body
    with pytest.raises(StorageUnavailable, match=r"no JSON.*may have created.*kubectl delete"):
        submit("--kind", kind.lower())


@pytest.mark.parametrize(("status", "error"), [(500, StorageUnavailable), (403, ConfigError)])
@pytest.mark.parametrize("kind", ["JobSet", "Job"])
def test_a_job_whose_config_is_refused_does_not_stay(server, submit, kind, status, error):
    """Its pods would wait for the config forever, and the next submission would be refused."""
    server.answers["ConfigMap"] = status, b"{}"
    with pytest.raises(error):
        submit("--kind", kind.lower())
    assert server.objects == {}
    server.answers.clear()
    assert submit("--kind", kind.lower()) == 0


def test_a_jobset_of_an_older_version_is_named(server, submit):
    old = b'{"message": "strict decoding error: unknown field \\"spec.failurePolicy.rules\\""}'
    server.answers["JobSet"] = 400, old
    with pytest.raises(ConfigError, match=r"unknown field.*JobSet 0\.10\.1 or newer"):
        submit()


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_what_a_webhook_changes_is_printed(server, submit, capsys, kind):
    def shorten(found):
        text = json.dumps(found).replace("PodFailurePolicy", "podFailurePolicy")
        changed = json.loads(text.replace('GracePeriodSeconds": 180', 'GracePeriodSeconds": 30'))
        changed["metadata"]["uid"] = "1"
        return changed

    server.webhook = shorten
    assert submit("--kind", kind) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "has changed" in line]
    assert any("terminationGracePeriodSeconds:" in line for line in lines)
    assert not any("metadata" in line for line in lines)


@pytest.mark.parametrize("text", ["::: {", "[1]", "contexts: 3", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_one_message(tmp_path, text):
    (tmp_path / "config").write_text(text)
    for path in (tmp_path / "config", tmp_path):
        with pytest.raises(ConfigError, match="no cluster is configured"):
            k8s.main([*ARGUMENTS, "--submit"], env={"KUBECONFIG": str(path)})


def test_no_cluster_is_one_message(tmp_path):
    env = {"KUBECONFIG": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match="absent: no cluster is configured"):
        k8s.main([*ARGUMENTS, "--submit"], env=env)


def test_without_the_client_the_extra_and_the_other_way_are_named(submit, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"\.\[k8s\].*kubectl apply"):
        submit()


# The process of a pod.


def records(*attempts):
    """The log of attempts: each its exit code, and the step that it has committed; None: none."""
    bodies = []
    for number, (code, step) in enumerate(attempts, 1):
        bodies.append((number, dataclasses.replace(CLAIM, attempt=number, nonce=str(number))))
        if step is not None:
            bodies.append((number, Commit(step=step, path="p", manifest="m", bytes=1)))
        if code is not None:
            bodies.append((number, AttemptEnded(exit=code, reason="why", committed=False)))
    return [
        Record(seq=seq, attempt=attempt, time=float(seq), body=body)
        for seq, (attempt, body) in enumerate(bodies, 1)
    ]


def after(*attempts, restarts=None):
    restarts = len(attempts) if restarts is None else restarts
    return k8s.after_restart(records(*attempts), CONFIG, restarts=restarts)


@pytest.mark.parametrize("code", [ExitCode.BUG, ExitCode.HUNG, ExitCode.PEER_LOST, 137, None])
def test_failures_without_a_new_commit_use_up_the_budget(code):
    assert isinstance(after(*4 * [(code, None)]), Restart)
    ended = after(*5 * [(code, None)])
    assert isinstance(ended, GiveUp)
    assert ended.exit == ExitCode.NO_PROGRESS


def test_a_commit_gives_the_full_budget_again():
    assert isinstance(after(*4 * [(70, None)], (70, 10), *4 * [(70, None)]), Restart)


def test_a_preemption_restarts_at_once_and_a_failure_after_a_wait():
    preempted, failed = after((75, 10)), after((70, None))
    assert isinstance(preempted, Restart)
    assert preempted.after_seconds == 0
    assert isinstance(failed, Restart)
    assert failed.after_seconds >= 1


def test_all_hosts_decide_alike():
    assert after((70, None), (70, None)) == after((70, None), (70, None))


def test_a_job_that_is_submitted_again_begins_with_the_full_budget():
    exhausted = 5 * [(70, None)]
    assert isinstance(after(*exhausted, (70, None), restarts=1), Restart)


def test_a_restart_before_any_attempt_has_begun_trains():
    assert after(restarts=3) is None


def test_storage_that_refuses_a_restarted_pod_is_an_outage_and_no_bad_config(monkeypatch):
    def refuse(*_):
        raise StorageRefused("the bucket refuses access")

    monkeypatch.setattr(k8s, "resolve_run", refuse)
    with pytest.raises(StorageUnavailable) as caught:
        k8s.main(["pod", "gs://bucket/run"], env={k8s_manifest.RESTARTS: "1"})
    assert caught.value.exit_code == ExitCode.STORAGE


def test_out_of_memory_is_retried_once():
    assert isinstance(after((86, None)), Restart)
    assert after((86, None), (86, None)) == GiveUp(
        86, "a second such failure without a new commit: why"
    )
