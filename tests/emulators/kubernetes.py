"""A stand-in for Kubernetes: an API that checks bodies, and the controllers of Jobs and JobSets.

    with ApiServer() as server: ...      # accepts objects that the types of Kubernetes describe
    cluster = Cluster(folder); cluster.apply(text); cluster.wait(...)    # runs them as processes

The types are those of the package kubeflow-trainer-api, which are generated from the definitions of
JobSet v1alpha2 and of Kubernetes: a field that they don't know is refused. What follows the exit of
a pod is written after pkg/controller/job (pod_failure_policy.go, job_controller.go) of Kubernetes
and pkg/controllers/failure_policy.go of JobSet, with the same messages.

A pod is a process of this machine. What it does not have: images, names of pods (every pod is on
loopback), limits, scheduling, Kueue, node failures. Time passes only in `wait`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxres_emulators.serving import Quiet, Serving
from tests.emulators import polling

ROOT = Path(__file__).parents[2]
CORE_FIELDS = {
    "ConfigMap": {"apiVersion", "kind", "metadata", "data"},
    "Secret": {"apiVersion", "kind", "metadata", "stringData"},
    "Service": {"apiVersion", "kind", "metadata", "spec"},
}
"""Objects that the package has no types of, and their fields that are accepted."""
SERVICE_FIELDS = {"clusterIP", "publishNotReadyAddresses", "selector"}
NAME = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
RESOURCES = {
    r"/apis/jobset\.x-k8s\.io/v1alpha2/namespaces/([^/]+)/jobsets": "JobSet",
    r"/apis/batch/v1/namespaces/([^/]+)/jobs": "Job",
    r"/api/v1/namespaces/([^/]+)/configmaps": "ConfigMap",
    r"/api/v1/namespaces/([^/]+)/secrets": "Secret",
    r"/api/v1/namespaces/([^/]+)/services": "Service",
}


class Refused(Exception):
    """A body that Kubernetes would refuse."""


def check(manifest: Mapping[str, Any]) -> None:
    """Refuses an object with fields, types or values that Kubernetes does not accept."""
    from kubeflow_trainer_api import models  # Takes seconds, which only these tests need.

    kind = manifest.get("kind")
    if kind == "JobSet":
        _check_strictly(models.JobsetV1alpha2JobSet, manifest)
        jobs = [job["template"] for job in manifest["spec"]["replicatedJobs"]]
    elif kind == "Job":
        _check_strictly(models.IoK8sApiBatchV1Job, manifest)
        jobs = [manifest]
    elif kind in CORE_FIELDS:
        unknown = set(manifest) - CORE_FIELDS[kind]
        unknown |= set(manifest.get("spec", {})) - SERVICE_FIELDS
        if unknown:
            raise Refused(f"unknown field {sorted(unknown)[0]}")
        jobs = []
    else:
        raise Refused(f"no kind {kind}")
    if NAME.fullmatch(manifest["metadata"]["name"]) is None:
        raise Refused(f"metadata.name: {manifest['metadata']['name']}")
    for job in jobs:
        _check_job(job["spec"])


def _check_strictly(model: Any, manifest: Mapping[str, Any]) -> None:
    """Refuses what the type does not keep: parsing drops unknown fields."""
    try:
        kept = model.from_dict(dict(manifest)).to_dict()
    except ValueError as error:
        raise Refused(str(error)) from error
    if kept != manifest:
        raise Refused(f"unknown field {_first_difference(manifest, kept)}")


def _first_difference(given: Any, kept: Any, path: str = "") -> str:
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for name in given:
            if given[name] != kept.get(name):
                return _first_difference(given[name], kept.get(name), f"{path}.{name}")
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            if one != other:
                return _first_difference(one, other, f"{path}[{index}]")
    return path


def _check_job(spec: Mapping[str, Any]) -> None:
    """Refuses what the validation of Kubernetes refuses beyond types (batch/validation)."""
    pod = spec["template"]["spec"]
    names = {container["name"] for container in pod["containers"]}
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    if rules and pod["restartPolicy"] != "Never":
        raise Refused("podFailurePolicy needs restartPolicy Never")
    for rule in rules:
        if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
            raise Refused(f"action {rule['action']}")
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            raise Refused("a rule has either exit codes or conditions")
        codes = rule.get("onExitCodes", {"values": [1], "containerName": min(names)})
        values = codes["values"]
        if not values or values != sorted(set(values)) or len(values) > 255 or 0 in values:
            raise Refused(f"values {values}: expected ascending codes but 0")
        if codes["containerName"] not in names:
            raise Refused(f"containerName {codes['containerName']}")
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        if not {mount["name"] for mount in container["volumeMounts"]} <= volumes:
            raise Refused("a mount of no volume")


# The API.


class _Requests(Quiet):
    """Requests for namespaced objects: create, read, replace, delete."""

    emulator: ApiServer

    def do_POST(self) -> None:
        body = self._body()
        key = self._key(body["metadata"]["name"])
        if key is not None and key[0] in self.emulator.answers:
            self._send_bytes(*self.emulator.answers[key[0]])
        elif key is None:
            self._answer(404, "the server could not find the requested resource")
        elif key[1] in self.emulator.absent_namespaces:
            self._answer(404, f'namespaces "{key[1]}" not found')
        elif key in self.emulator.objects:
            self._answer(409, f"{key[2]} already exists")
        else:
            self._store(key, body, created=201)

    def do_GET(self) -> None:
        path, _, name = self.path.partition("?")[0].rpartition("/")
        found = self.emulator.objects.get(self._key(name, path) or ("", "", ""))
        self._answer(404, "not found") if found is None else self._send(200, found)

    def do_PUT(self) -> None:
        path, _, name = self.path.partition("?")[0].rpartition("/")
        key = self._key(name, path)
        self._answer(404, "not found") if key is None else self._store(key, self._body(), 200)

    def _store(self, key: tuple[str, str, str], body: dict[str, Any], created: int) -> None:
        try:
            check(body)
        except Refused as refused:
            self._answer(400, f"strict decoding error: {refused}")
        else:
            self.emulator.objects[key] = self.emulator.webhook(body)
            self._send(created, self.emulator.objects[key])

    def do_DELETE(self) -> None:
        path, _, name = self.path.partition("?")[0].rpartition("/")
        key = self._key(name, path)
        if key is None or self.emulator.objects.pop(key, None) is None:
            self._answer(404, "not found")
        else:
            self._send(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _key(self, name: str, path: str = "") -> tuple[str, str, str] | None:
        for pattern, kind in RESOURCES.items():
            match = re.fullmatch(pattern, path or self.path.partition("?")[0])
            if match and kind not in self.emulator.absent:
                return kind, match[1], name
        return None

    def _body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, code: int, message: str) -> None:
        self._send(code, {"kind": "Status", "apiVersion": "v1", "code": code, "message": message})

    def _send(self, code: int, body: Mapping[str, Any]) -> None:
        self._send_bytes(code, json.dumps(body).encode())

    def _send_bytes(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()


class ApiServer:
    """The API of a cluster, on loopback."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        """(kind, namespace, name) -> object."""
        self.absent = set[str]()
        """Kinds that this cluster does not have."""
        self.absent_namespaces = set[str]()
        self.answers: dict[str, tuple[int, bytes]] = {}
        """Kind -> status and body that its creation gets, and nothing is created."""
        self.webhook: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: body
        """Changes an object that is created."""
        self._serving = Serving(self, _Requests, host="127.0.0.1", port=0)

    def __enter__(self) -> ApiServer:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._serving.stop()

    def write_kubeconfig(self, path: Path) -> None:
        """Writes a file that `KUBECONFIG` may name."""
        server = f"http://{self._serving.address}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
        }
        path.write_text(yaml.safe_dump(config))


# The controllers.


def pod_failure(
    rules: list[dict[str, Any]], code: int, *, is_disrupted: bool, pod: str
) -> tuple[str, str]:
    """Returns the action of the first rule that a failed pod matches, and the Job's message."""
    for index, rule in enumerate(rules):
        found, what = rule.get("onExitCodes"), ""
        if found is not None:
            is_in = code in found["values"]
            if code != 0 and is_in == (found["operator"] == "In"):
                what = f"Container {found['containerName']} for pod {pod} failed with exit code"
                what += f" {code}"
        elif is_disrupted:
            what = f"Pod {pod} has condition DisruptionTarget"
        if what:
            return rule["action"], f"{what} matching {rule['action']} rule at index {index}"
    return "Count", ""


def jobset_action(policy: Mapping[str, Any], reason: str, message: str) -> str:
    """Returns the action of the first rule of a JobSet that its failed Job matches."""
    for rule in policy.get("rules", []):
        reasons = rule.get("onJobFailureReasons", [])
        patterns = rule.get("onJobFailureMessagePatterns", [])
        is_reason = not reasons or reason in reasons
        if is_reason and (not patterns or any(re.search(text, message) for text in patterns)):
            return rule["action"]
    return "RestartJobSet"


def after_exit(owner: Mapping[str, Any], code: int, *, is_disrupted: bool = False) -> str:
    """Returns the action of the Job, or of its JobSet, after a pod's failure."""
    spec = job_spec(owner)
    rules = spec["podFailurePolicy"]["rules"]
    action, message = pod_failure(rules, code, is_disrupted=is_disrupted, pod="default/pod")
    if owner["kind"] == "Job":
        return action
    if action == "FailJob":
        return jobset_action(owner["spec"]["failurePolicy"], "PodFailurePolicy", message)
    assert (action, spec["backoffLimit"]) == ("Count", 0), "the pod alone would be replaced"
    message = "Job has reached the specified backoff limit"
    return jobset_action(owner["spec"]["failurePolicy"], "BackoffLimitExceeded", message)


def job_spec(owner: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the spec of a Job, or of the only Job of a JobSet."""
    if owner["kind"] == "Job":
        return owner["spec"]
    (replicated,) = owner["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


@dataclass
class Pod:
    """A process."""

    index: int
    process: subprocess.Popen[bytes]
    output: Path
    is_disrupted: bool = False
    kill_at: float | None = None
    """When it is killed, on the monotonic clock; None: it was not asked to end."""

    def terminate(self, grace_seconds: float) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + grace_seconds
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()


@dataclass
class Cluster:
    """Runs the pods of one JobSet or Job as processes, and restarts them as its policies say.

    A JobSet starts all pods again; a Job replaces each by itself, at the same address.
    """

    folder: Path
    env: Mapping[str, str]
    owner: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    pods: dict[int, Pod] = field(default_factory=dict)
    exits: list[tuple[int, int]] = field(default_factory=list)
    """Host and exit code of each pod that has ended by itself, in order."""
    actions: list[str] = field(default_factory=list)
    """What followed each failed pod."""
    restarts: int = 0
    counted: int = 0
    state: str = "Running"
    """Running, Complete or Failed."""
    address: str = ""
    """Where the pods meet: the name of pod 0."""

    def apply(self, text: str) -> None:
        """Checks the objects of a YAML stream, and starts their pods."""
        for manifest in yaml.safe_load_all(text):
            check(manifest)
            if manifest["kind"] == "ConfigMap":
                self.config = manifest["data"]["config.yaml"]
            elif manifest["kind"] in ("JobSet", "Job"):
                self.owner = manifest
        self._start_all()

    def wait(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Runs the controllers until a condition holds."""
        polling.wait(condition, self._reconcile, seconds=seconds, what=what, printed=self.printed)

    def settle(self, seconds: float) -> None:
        """Runs the controllers for a while."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > until, seconds=2 * seconds, what="end of a wait")

    def evict(self, index: int) -> None:
        """Asks a pod to end because its node is needed, as an eviction does."""
        self.pods[index].is_disrupted = True
        self.pods[index].terminate(self._grace_seconds)

    def printed(self) -> str:
        """Returns the output of all pods."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("pod-*.txt")))

    def end(self) -> None:
        """Kills what still runs."""
        for pod in self.pods.values():
            if pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()

    @property
    def _spec(self) -> dict[str, Any]:
        return job_spec(self.owner)

    @property
    def _grace_seconds(self) -> float:
        return self._spec["template"]["spec"]["terminationGracePeriodSeconds"]

    def _start_all(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        for index in range(self._spec["completions"]):
            self.pods[index] = self._start(index)

    def _start(self, index: int) -> Pod:
        (container,) = self._spec["template"]["spec"]["containers"]
        folder = self.folder / "config"
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(self.config)
        (mount,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config"]
        python, *rest = (word.replace(mount, str(folder)) for word in container["command"])
        assert python == "python"
        output = self.folder / f"pod-{self.restarts:03d}-{index}.txt"
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *rest],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **self.env, **self._pod_env(container, index)},
                process_group=0,
            )
        return Pod(index, process, output)

    def _pod_env(self, container: Mapping[str, Any], index: int) -> dict[str, str]:
        fields = {
            "spec.nodeName": f"node-{index}",
            "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": str(self.restarts),
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        }
        env = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
        for variable in container["env"]:
            found = variable.get("value")
            if found is None:
                found = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            is_address = variable["name"] == "JAXRES_COORDINATOR"
            env[variable["name"]] = self.address if is_address else found
        return env

    def _reconcile(self) -> None:
        for pod in self.pods.values():
            if pod.kill_at is not None and time.monotonic() >= pod.kill_at:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pod.process.pid, signal.SIGKILL)
        ended = [pod for pod in self.pods.values() if pod.process.poll() is not None]
        failed = [pod for pod in ended if pod.process.returncode != 0]
        if self.state != "Running":
            return
        if failed and self.owner["kind"] == "Job":
            self._replace(failed[0])
        elif failed:
            self._on_failure(failed[0])
        elif len(ended) == len(self.pods):
            self.state = "Complete"

    def _act(self, pod: Pod) -> str:
        """Records the failure of a pod; returns the action that follows."""
        code = pod.process.returncode
        code = 128 - code if code < 0 else code
        self.exits.append((pod.index, code))
        self.actions.append(after_exit(self.owner, code, is_disrupted=pod.is_disrupted))
        return self.actions[-1]

    def _replace(self, pod: Pod) -> None:
        action = self._act(pod)
        self.counted += action == "Count"
        if action == "FailJob" or self.counted > self._spec["backoffLimit"]:
            self._end_others()
            self.state = "Failed"
        else:
            self.pods[pod.index] = self._start(pod.index)

    def _on_failure(self, pod: Pod) -> None:
        action = self._act(pod)
        self._end_others()
        if action == "RestartJobSet":
            if self.counted >= self.owner["spec"]["failurePolicy"]["maxRestarts"]:
                action = "FailJobSet"
            self.counted += 1
        if action == "FailJobSet":
            self.state = "Failed"
            return
        self.restarts += 1
        self._start_all()

    def _end_others(self) -> None:
        """Ends the pods that still run, as a failed Job does; waits for them."""
        for pod in self.pods.values():
            if pod.process.poll() is None:
                pod.terminate(self._grace_seconds)
        for pod in self.pods.values():
            if pod.process.poll() is None:
                assert pod.kill_at is not None
                try:
                    pod.process.wait(timeout=max(0.0, pod.kill_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(pod.process.pid, signal.SIGKILL)
                    pod.process.wait()
