"""Manifests of a run on Kubernetes: a JobSet, or a plain indexed Job. Pure.

Kubernetes places the pods and replaces those that it loses; whether another attempt makes sense
follows from the exit code by the table of exit codes, whose rows become rules of the manifest. In a
JobSet any failed pod ends its child Job, so that all hosts start again together; in a plain Job
each failed pod is replaced by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from textwrap import indent
from typing import Any, Literal

from jaxres.config import RunConfig, dump_yaml, file_mode, yaml
from jaxres.exit_codes import MAX_SIGNAL, ROWS, SIGNAL_BASE, ExitCode, RestartRule, exit_row
from jaxres.faults import ConfigError
from jaxres.secret_values import PRIVATE
from jaxres.storage.path import RunPath

Manifest = dict[str, Any]
"""A Kubernetes object, with the field names of its JSON."""
Kind = Literal["jobset", "job"]
JOBSET_GROUP, JOBSET_VERSION, JOBSET_PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
CONTAINER, HOSTS = "train", "hosts"
"""Name of the container, and of the replicated job of a JobSet."""
CONFIG_FOLDER, CONFIG_FILE = "/etc/jaxres", "config.yaml"
TEXTS = "stringData"
"""Key of a Secret with plain texts; the cluster answers with `data` in base64."""
SHARED_MEMORY = "/dev/shm"
PORT = 8470
"""Port of host 0 on which the supervisors meet; every pod has an address of its own."""
GROUP = 1000
"""Group of the user of the image (Dockerfile), to which the files of a claim belong."""
RESTARTS = "JAXRES_RESTARTS"
"""Environment variable of a pod: how often its JobSet was restarted before; empty: unknown."""
RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
TOPOLOGY_ANNOTATION = "alpha.jobset.sigs.k8s.io/exclusive-topology"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
GPU_RESOURCE = "nvidia.com/gpu"
GRACE_SECONDS = 180
"""Time from SIGTERM to SIGKILL, unless saves need more: a run with no more saves at once."""
GRACE_RESERVE_SECONDS = 30.0
"""Time for the steps in flight and the records of the end, on top of saves and margin."""
MAX_RESTARTS = 100
"""Restarts of a JobSet for failures. jaxres counts failures without a new commit by itself and ends
the run with 84; this limit ends what fails before the run log is reached."""
MAX_POD_NAME = 63
MAX_NAME = 30
"""Characters of the name of a run, so that the names of 10,000 pods have at most 63."""


class Consequence(StrEnum):
    """Consequence of the exit of a pod."""

    COMPLETE = "complete"
    END = "end"
    """The whole run ends: another attempt would exit the same way, or isn't wanted."""
    RESTART_UNCOUNTED = "restart, not counted"
    """A preemption: the run continues, however often."""
    RESTART = "restart"


def consequence(code: int) -> Consequence:
    """Returns the consequence of an exit code, by the table of exit codes.

    >>> consequence(81), consequence(143), consequence(137)
    (<Consequence.END: 'end'>, <Consequence.RESTART_UNCOUNTED: 'restart, not counted'>, \
<Consequence.RESTART: 'restart'>)
    """
    row = exit_row(code)
    if code == ExitCode.DONE:
        return Consequence.COMPLETE
    if row.restart is RestartRule.NEVER:
        return Consequence.END
    return Consequence.RESTART_UNCOUNTED if row.resumes_unattended else Consequence.RESTART


def codes_with(wanted: Consequence) -> list[int]:
    """Returns the exit codes of the table, and of signals, that have a consequence; ascending."""
    signals = range(SIGNAL_BASE + 1, SIGNAL_BASE + MAX_SIGNAL + 1)
    codes = {*(int(row.code) for row in ROWS), *signals}
    return sorted(code for code in codes if consequence(code) is wanted)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Options on the place of a run, which its config does not have."""

    image: str
    nodes: int = 1
    gpus_per_node: int = 0
    kind: Kind = "jobset"
    namespace: str = "default"
    name: str
    """Name of the JobSet or Job."""
    queue: str = ""
    """Local queue of Kueue; empty: none."""
    topology: str = ""
    """Node label; all pods get nodes with the same value, which no other JobSet uses; empty: no."""
    service_account: str = ""
    """Kubernetes service account, which gives access to a bucket; empty: the default one."""
    claims: tuple[tuple[str, str], ...] = ()
    """PersistentVolumeClaims and the paths where they are mounted."""
    shared_memory: str = ""
    """Size of /dev/shm, such as 64Gi; empty: up to the memory of the pod."""
    excluded_nodes: tuple[str, ...] = ()
    """Nodes that get no pod."""
    grace_seconds: int
    """Time from SIGTERM to SIGKILL."""
    max_restarts: int = MAX_RESTARTS
    """Restarts for failures: of the whole JobSet, or of each host of a Job."""
    patch: Manifest = field(default_factory=dict)
    """Merged into the template of the pods, see `merged`."""
    has_secret: bool = False
    """Whether the config is in a Secret; set by `manifests`."""


def object_name(root: RunPath) -> str:
    """Returns the name of a run's objects; of one run only one can exist at a time.

    >>> from pathlib import PurePosixPath
    >>> object_name(PurePosixPath("/runs/First_try"))
    'jaxres-first-try-2a7aed'
    """
    base = re.sub("[^a-z0-9]+", "-", root.name.lower()).strip("-")[:MAX_NAME].rstrip("-")
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:6]
    return f"jaxres-{base}-{digest}" if base else f"jaxres-{digest}"


def needed_grace_seconds(config: RunConfig, save_seconds: float | None) -> int:
    """Returns the seconds that a pod may need after SIGTERM: the save in flight, and one more.

    Args:
      config: its margin is added.
      save_seconds: the longest measured save of the run; None: none was measured.
    """
    if save_seconds is None:
        return GRACE_SECONDS
    margin = config.preemption.margin_seconds
    return max(GRACE_SECONDS, math.ceil(2 * save_seconds + margin + GRACE_RESERVE_SECONDS))


def manifests(config: RunConfig, root: RunPath, options: ClusterOptions) -> list[Manifest]:
    """Returns the objects of a run, in the order in which `kubectl apply` may create them.

    Args:
      config: the resolved config, which the pods read from a ConfigMap, or from a Secret.
      root: the run directory, as the pods see it.
    """
    text = dump_yaml(config)
    is_secret = file_mode(text) == PRIVATE
    options = replace(options, has_secret=is_secret)
    config_map = {
        "apiVersion": "v1",
        "kind": "Secret" if is_secret else "ConfigMap",
        "metadata": _metadata(options),
        TEXTS if is_secret else "data": {CONFIG_FILE: text},
    }
    if options.kind == "jobset":
        return [config_map, _jobset(root, options)]
    service = [_service(options)] if options.nodes > 1 else []
    return [config_map, *service, _plain_job(root, options)]


def to_yaml(objects: list[Manifest]) -> str:
    """Returns the objects as one YAML stream, which `kubectl apply -f -` reads."""
    return "---\n".join(
        _config_map_yaml(o) if {"data", TEXTS} & o.keys() else yaml.dump(o) for o in objects
    )


def changed_fields(sent: Any, created: Any, path: str = "") -> list[str]:
    """Returns the paths of fields that a cluster has changed or dropped; it may add fields.

    >>> changed_fields({"a": [{"b": 1}], "c": 2}, {"a": [{"b": 3, "d": 4}]})
    ['a[0].b', 'c']
    """
    if isinstance(sent, dict) and isinstance(created, dict):
        found = [
            (f"{path}.{name}".lstrip("."), value, created.get(name)) for name, value in sent.items()
        ]
    elif isinstance(sent, list) and isinstance(created, list) and len(sent) <= len(created):
        found = [(f"{path}[{n}]", *pair) for n, pair in enumerate(zip(sent, created, strict=False))]
    else:
        return [] if sent == created else [path]
    return [text for where, old, new in found for text in changed_fields(old, new, where)]


def _config_map_yaml(config_map: Manifest) -> str:
    """Writes the config as a block of lines, so that it can be read and edited."""
    data = TEXTS if TEXTS in config_map else "data"
    text = config_map[data][CONFIG_FILE]
    head = yaml.dump({name: value for name, value in config_map.items() if name != data})
    return f"{head}{data}:\n  {CONFIG_FILE}: |\n{indent(text, ' ' * 4)}"


def _metadata(options: ClusterOptions, **others: Any) -> Manifest:
    return {"name": options.name, "namespace": options.namespace, **others}


def _owner_metadata(options: ClusterOptions) -> Manifest:
    labels = {QUEUE_LABEL: options.queue} if options.queue else {}
    annotations = {TOPOLOGY_ANNOTATION: options.topology} if options.topology else {}
    others = {"labels": labels, "annotations": annotations}
    return _metadata(options, **{name: values for name, values in others.items() if values})


def _jobset(root: RunPath, options: ClusterOptions) -> Manifest:
    """A JobSet of one Job; a failed pod fails the Job, and the JobSet's rules decide.

    An end and a preemption fail the Job with the same reason, PodFailurePolicy; its message has the
    index of the pod's rule, by which they differ. Other failures exceed the Job's backoff limit, 0.
    """
    rules = [
        {
            "name": "anotherAttemptWouldEndTheSame",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [".*rule at index 0$"],
        },
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        },
        {"name": "failed", "action": "RestartJobSet"},
    ]
    job = _job_spec(root, options, backoff_limit=0, preempted="FailJob")
    return {
        "apiVersion": f"{JOBSET_GROUP}/{JOBSET_VERSION}",
        "kind": "JobSet",
        "metadata": _owner_metadata(options),
        "spec": {
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": options.max_restarts, "rules": rules},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": HOSTS, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _plain_job(root: RunPath, options: ClusterOptions) -> Manifest:
    limit = options.max_restarts * options.nodes  # A fault of one host ends the others with 79.
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _owner_metadata(options),
        "spec": _job_spec(root, options, backoff_limit=limit, preempted="Ignore"),
    }


def _service(options: ClusterOptions) -> Manifest:
    """Gives the pods of a plain Job names; a JobSet has one of its own."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": options.name},
        },
    }


def _job_spec(
    root: RunPath, options: ClusterOptions, *, backoff_limit: int, preempted: str
) -> Manifest:
    """Returns the spec of a Job; `preempted` is the action for uncounted restarts."""
    rules: list[Manifest] = [
        {"action": "FailJob", "onExitCodes": _exit_codes(Consequence.END)},
        {"action": preempted, "onExitCodes": _exit_codes(Consequence.RESTART_UNCOUNTED)},
        {
            "action": preempted,
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": rules},
        "template": merged({"spec": _pod_spec(root, options)}, options.patch),
    }


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(o, dict) and "name" in o for o in value)


def longest_name(nodes: int) -> int:
    """Returns the longest length of a JobSet's name, which its pods' names contain."""
    return MAX_POD_NAME - len(pod_name("", nodes - 1))


def pod_name(name: str, index: int) -> str:
    """Returns the name of a pod of a JobSet; the cluster draws the last five characters."""
    return f"{name}-{HOSTS}-0-{index}-abcde"


def merged(made: Any, patch: Any, path: str = "") -> Any:
    """Returns a part of a manifest with a patch: it adds, and replaces nothing.

    Sections are merged, and items of lists by their `name`. A list whose items have none is added
    only where there is no list: terms of an affinity, for example, are alternatives.

    Raises:
      ConfigError: the patch has another value where there is one.

    >>> merged({"a": [{"name": "x", "b": 1}]}, {"a": [{"name": "x", "c": 2}], "d": 3})
    {'a': [{'name': 'x', 'b': 1, 'c': 2}], 'd': 3}
    """
    if isinstance(made, dict) and isinstance(patch, dict):
        both = {key: merged(made[key], patch[key], f"{path}.{key}") for key in made & patch.keys()}
        return {**made, **patch, **both}
    if _has_names(made) and _has_names(patch):
        added = {each["name"]: each for each in patch}
        items = [
            merged(each, added.pop(name, each), f"{path}[{name}]")
            for each in made
            for name in [each["name"]]
        ]
        return [*items, *added.values()]
    if made != patch:
        raise ConfigError(
            f"--patch: {path.lstrip('.')} is {json.dumps(made)} by jaxres, and can't be "
            f"{json.dumps(patch)}: the patch adds to the manifest and replaces nothing of it"
        )
    return made


def _exit_codes(wanted: Consequence) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": codes_with(wanted)}


def _pod_spec(root: RunPath, options: ClusterOptions) -> Manifest:
    size = {"sizeLimit": options.shared_memory} if options.shared_memory else {}
    source: Manifest = {"configMap": {"name": options.name}}
    if options.has_secret:
        source = {"secret": {"secretName": options.name}}
    volumes: list[Manifest] = [
        {"name": "config", **source},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", **size}},
    ]
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": SHARED_MEMORY},
    ]
    for number, (claim, path) in enumerate(options.claims):
        name = f"claim-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": path})
    container: Manifest = {
        "name": CONTAINER,
        "image": options.image,
        "command": pod_command(root, options.grace_seconds),
        "env": _env(options),
        "volumeMounts": mounts,
    }
    if options.gpus_per_node:
        container["resources"] = {"limits": {GPU_RESOURCE: str(options.gpus_per_node)}}
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    if options.claims:
        spec["securityContext"] = {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.kind == "job" and options.nodes > 1:
        spec["subdomain"] = options.name
    if options.excluded_nodes:
        spec["affinity"] = _away_from(options.excluded_nodes)
    return spec


def _away_from(nodes: tuple[str, ...]) -> Manifest:
    field = {"key": "metadata.name", "operator": "NotIn"}
    terms = [{"matchFields": [{**field, "values": [node]} for node in nodes]}]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def pod_command(root: RunPath, grace_seconds: int) -> list[str]:
    """Returns the command of a pod; the run is told the time that Kubernetes gives it to save."""
    command = ["python", "-m", "jaxres.launch", "k8s", "pod", f"{CONFIG_FOLDER}/{CONFIG_FILE}"]
    shown = str(root).replace("$", "$$")  # Kubernetes puts a variable for $(NAME), and $ for $$.
    return [*command, f"run.dir={shown}", f"preemption.sigterm_seconds={grace_seconds}"]


def _env(options: ClusterOptions) -> list[Manifest]:
    """Returns the variables by which jaxres finds its place (cluster/detect.py)."""
    env = [_from_field("JAXRES_HOST_NAME", "spec.nodeName")]
    if options.kind == "jobset":
        env.append(_from_field(RESTARTS, f"metadata.labels['{RESTART_LABEL}']"))
    if options.nodes > 1:
        pod = f"{options.name}-{HOSTS}-0-0" if options.kind == "jobset" else f"{options.name}-0"
        values = {
            "JAXRES_COORDINATOR": f"{pod}.{options.name}:{PORT}",
            "JAXRES_NUM_HOSTS": str(options.nodes),
        }
        env += _values(values)
        env.append(_from_field("JAXRES_HOST_ID", f"metadata.annotations['{INDEX_ANNOTATION}']"))
    if options.gpus_per_node:
        env += _values({"JAXRES_MIN_DEVICES": str(options.gpus_per_node), "JAXRES_PLATFORM": "gpu"})
    return env


def _values(values: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _from_field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
