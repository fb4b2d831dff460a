"""`launch k8s`: prints or submits the manifest of a run on Kubernetes; and the process of its pods.

The manifest (manifest.py) tells Kubernetes after which exit codes it starts the hosts again.
Before each restart the pods' process reads the run log and applies the budgets of `launch local`,
which depend on committed steps; then it becomes `python -m jaxres.train`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from yaml import YAMLError

from jaxres import config as configs
from jaxres import faults
from jaxres.clock import Clock, SystemClock
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser, local_path_argument
from jaxres.config.errors import raise_all
from jaxres.config.yaml import parse, plain
from jaxres.exit_codes import ExitCode, exit_name
from jaxres.faults import ConfigError, Fenced, RunError, StorageUnavailable, UsageError
from jaxres.host import signals
from jaxres.launch import argument_checks
from jaxres.launch.k8s import manifest as k8s_manifest
from jaxres.launch.k8s.manifest import ClusterOptions, Kind, Manifest
from jaxres.runlog import run_log
from jaxres.runlog.event_log import read_events
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor import restart_policy
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.attempt_runner import RESTART_VARIABLE
from jaxres.supervisor.restart_policy import GiveUp, Restart
from jaxres.supervisor.run_config import find_run_dir, parse_target, resolve_run
from jaxres.telemetry import stdio

COMMAND = "python -m jaxres.launch k8s"
USAGE = """\
usage: python -m jaxres.launch k8s CONFIG.yaml [section.field=value ...] --image IMAGE
           --print|--submit [--nodes N] [--gpus-per-node G] [--kind jobset|job]
           [--namespace NAME] [--name NAME]
           [--claim NAME:/path ...] [--service-account NAME] [--shm-size SIZE] [--queue NAME]
           [--topology LABEL] [--exclude-node NODE ...] [--grace-seconds S] [--max-restarts N]
           [--patch FILE.yaml]

Prints the manifest of a job that trains with one pod a node (kubectl apply -f -), or submits it.
Kubernetes starts the hosts again after a preemption or a failure, until the last step is committed
(0), or an attempt ends with what can't be retried (76, 78, 81, 85), or a budget of restarts without
a new commit is used up (84). The pods read the config from a ConfigMap; from a Secret if it has a
secret, or arguments of custom data.
--image: image with jaxres (Dockerfile); run.dir=...: in a bucket, or on a claim.
--kind: jobset (default; needs JobSet 0.10.1 or newer), or job: a plain indexed Job, in which lost
    pods are replaced one by one, and failures without a new commit are not counted.
--claim: PersistentVolumeClaim and where it is mounted; may be repeated.
--service-account: service account that may use the bucket.
--shm-size: size of /dev/shm, such as 64Gi (up to the memory of the pod).
--queue: local queue of Kueue. --topology: node label whose value all pods share, such as
    cloud.google.com/gke-nodepool. --exclude-node: node that gets no pod.
--grace-seconds: time from SIGTERM to SIGKILL (preemption.sigterm_seconds, else by measured saves).
--max-restarts: most restarts for failures (100).
--patch: file with `metadata` and `spec` that are added to the template of the pods: requests and
    limits, tolerations, nodeSelector, imagePullSecrets, variables of secrets (docs/schedulers.md).
"""
CALL_SECONDS = 60.0
JOBSETS = (k8s_manifest.JOBSET_GROUP, k8s_manifest.JOBSET_VERSION, k8s_manifest.JOBSET_PLURAL)
NO_KUBECONFIG = (OSError, ValueError, TypeError, KeyError, AttributeError, YAMLError)
"""Exceptions of the client for a file that is no kubeconfig."""


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs `launch k8s`; returns the exit code."""
    if arguments[:1] == ["pod"]:
        return _pod(arguments[1:], env=env, clock=SystemClock())
    target, overrides, given = _parse(arguments)
    objects, options = _render(target, overrides, given)
    if given.submit:
        return _submit(objects, options, env=env)
    stdio.write_result(k8s_manifest.to_yaml(objects))
    return ExitCode.DONE


def _parse(arguments: Sequence[str]) -> tuple[RunPath, list[str], argparse.Namespace]:
    parser = Parser(prog=COMMAND, usage=USAGE, add_help=False)
    parser.add_argument("--image", default="")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--kind", choices=get_args(Kind), default="jobset")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--name", default="")
    parser.add_argument("--claim", action="append", default=[])
    parser.add_argument("--service-account", default="")
    parser.add_argument("--shm-size", default="")
    parser.add_argument("--queue", default="")
    parser.add_argument("--topology", default="")
    parser.add_argument("--exclude-node", action="append", default=[])
    parser.add_argument("--grace-seconds", type=int)
    parser.add_argument("--max-restarts", type=int, default=k8s_manifest.MAX_RESTARTS)
    parser.add_argument("--patch", type=local_path_argument)
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--submit", action="store_true")
    given, others = parser.parse_known_args(list(arguments))
    target, overrides = parse_target(others, command=COMMAND)
    if given.print == given.submit:
        raise UsageError(f"give --print or --submit (usage: `{COMMAND} --help`)")
    if not given.image:
        raise UsageError(f"--image: which image has jaxres? (usage: `{COMMAND} --help`)")
    _check(given)
    if given.kind == "job" and given.topology:
        raise UsageError("--topology: a plain Job has no such rule; use --kind jobset")
    return target, overrides, given


def _check(given: argparse.Namespace) -> None:
    """Raises UsageError for a flag that Kubernetes would refuse, or read as something else."""
    argument_checks.image(given.image)
    argument_checks.number("--nodes", given.nodes, 1, argument_checks.MAX_NODES)
    argument_checks.number("--gpus-per-node", given.gpus_per_node, 0, argument_checks.MAX_GPUS)
    most = argument_checks.MAX_RESTARTS // given.nodes  # A plain Job counts all nodes' restarts.
    argument_checks.number("--max-restarts", given.max_restarts, 0, most)
    if given.grace_seconds is not None:
        longest = argument_checks.MAX_SECONDS
        argument_checks.number("--grace-seconds", given.grace_seconds, 1, longest)
    names = "lower-case letters, digits and hyphens"
    argument_checks.text("--namespace", given.namespace, argument_checks.NAME, names)
    dotted = [("--exclude-node", node) for node in given.exclude_node]
    dotted += [("--service-account", given.service_account)] if given.service_account else []
    for flag, value in dotted:
        argument_checks.text(flag, value, argument_checks.LONG_NAME, f"{names}, or dots")
    if given.queue:
        short = f"up to 63 {names}, or dots"
        argument_checks.text("--queue", given.queue, argument_checks.LABEL_NAME, short)
    if given.topology:
        label = "a label of nodes, such as cloud.google.com/gke-nodepool"
        argument_checks.text("--topology", given.topology, argument_checks.NODE_LABEL, label)
    if given.shm_size:
        size = "a size, such as 64Gi"
        argument_checks.text("--shm-size", given.shm_size, argument_checks.SIZE, size)


def _render(
    target: RunPath, overrides: Sequence[str], given: argparse.Namespace
) -> tuple[list[Manifest], ClusterOptions]:
    """Returns the objects of the run, and the options that they were made with."""
    loaded = configs.load(argument_checks.config_file(target), overrides)
    run_dir = find_run_dir(loaded)
    claims = _claims(given.claim)
    _require_shared(loaded.config, run_dir.root, claims)
    argument_checks.require_feasible(
        loaded.config, nodes=given.nodes, gpus_per_node=given.gpus_per_node
    )
    options = ClusterOptions(
        image=given.image,
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        kind=given.kind,
        namespace=given.namespace,
        name=_name(given, run_dir.root),
        queue=given.queue,
        topology=given.topology,
        service_account=given.service_account,
        claims=claims,
        shared_memory=given.shm_size,
        excluded_nodes=tuple(given.exclude_node),
        grace_seconds=grace_seconds(
            loaded.config, longest_save_seconds(run_dir), asked=given.grace_seconds
        ),
        max_restarts=given.max_restarts,
        patch={} if given.patch is None else _patch(given.patch),
    )
    return k8s_manifest.manifests(loaded.config, run_dir.root, options), options


def _name(given: argparse.Namespace, root: RunPath) -> str:
    """Returns the name of the job, which is in the names of its pods."""
    name = argument_checks.job_name(given.name or k8s_manifest.object_name(root))
    longest = k8s_manifest.longest_name(given.nodes)
    if given.kind == "jobset" and len(name) > longest:
        raise UsageError(
            f"--name {name}: has {len(name)} characters, at most {longest} with {given.nodes} "
            f"nodes: JobSet refuses names of pods, such as {k8s_manifest.pod_name(name, 0)}, of "
            "more than 63"
        )
    return name


def _patch(path: Path) -> Manifest:
    """Reads the fields to add to the template of the pods.

    Raises:
      UsageError: there is no such file.
      ConfigError: it is no YAML, or none of a template.
    """
    if (text := files.read(path)) is None:
        raise UsageError(f"--patch {path}: no such file")
    node, problems = parse(text.decode(errors="replace"), lambda line: f"{path}:{line + 1}")
    raise_all(problems)
    found = {} if node is None else plain(node)
    if not isinstance(found, dict) or not found.keys() <= {"metadata", "spec"}:
        raise ConfigError(f"--patch {path}: expected `metadata` and `spec`, as of a pod's template")
    return found


def _claims(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    found = list[tuple[str, str]]()
    for text in texts:
        found.append(argument_checks.claim(text, [path for _, path in found]))
    return tuple(found)


def _require_shared(config: RunConfig, root: RunPath, claims: Sequence[tuple[str, str]]) -> None:
    """Refuses a run directory that would be lost with its pod.

    Raises:
      ConfigError: it is neither in a bucket nor on a claim.
    """
    if is_remote(root):
        return
    folders = [Path(path) for _, path in claims]
    if config.run.dir is None or not any(Path(root).is_relative_to(path) for path in folders):
        raise ConfigError(
            f"run.dir={config.run.dir}: it would be lost with its pod. Give a bucket "
            "(run.dir=gs://BUCKET/run), or a folder of a claim (--claim data:/data "
            "run.dir=/data/run)"
        )


def longest_save_seconds(run_dir: RunDir) -> float | None:
    """Returns the longest save of the run's newest attempt; None: none is known here.

    A bucket is not asked: the manifest is printed without a network.
    """
    if run_dir.is_remote:
        return None
    attempt = run_log.fold(run_log.read_records(run_dir.log)).attempt
    events = read_events(run_dir.events(attempt, 0)) if attempt else []
    seconds = [row.get("seconds") for row in events if row["event"] == "save_committed"]
    return max((float(text) for text in seconds if text is not None), default=None)


def grace_seconds(config: RunConfig, save_seconds: float | None, *, asked: int | None) -> int:
    """Returns the time from SIGTERM to SIGKILL: never less than a measured save needs.

    Args:
      config: preemption.sigterm_seconds is used if nothing is asked for.
      save_seconds: the longest measured save; None: unknown.

    Raises:
      ConfigError: what was asked for is too short for the save, or longer than a week.
    """
    needed = k8s_manifest.needed_grace_seconds(config, save_seconds)
    configured = config.preemption.sigterm_seconds
    if asked is None and configured is not None:
        asked = round(configured)
    if asked is None:
        return needed
    if asked < 1 or (save_seconds is not None and asked < needed):
        measured = "" if save_seconds is None else f" (a save took {save_seconds:.0f} s)"
        raise ConfigError(
            f"{asked} s from SIGTERM to SIGKILL are too few to save{measured}: give at least "
            f"--grace-seconds {needed}"
        )
    if asked > argument_checks.MAX_SECONDS:
        raise ConfigError(
            f"{asked} s from SIGTERM to SIGKILL: a node waits that long for a pod to end; give at "
            f"most {argument_checks.MAX_SECONDS}"
        )
    return asked


# The process of a pod.


def _pod(arguments: Sequence[str], *, env: Mapping[str, str], clock: Clock) -> int:
    """Waits or ends as the restart policy decides; else becomes `python -m jaxres.train`."""
    restarts = _num_restarts(env)
    if restarts:
        with faults.refusals(at_start=False):  # The pods before this one have had access.
            loaded, run_dir = resolve_run(*parse_target(arguments, command=f"{COMMAND} pod"))
            records = run_log.read_records(run_dir.log)
        decision = after_restart(records, loaded.config, restarts=restarts)
        if isinstance(decision, GiveUp):
            print_message(f"{decision.reason} ({exit_name(decision.exit)})")
            return decision.exit
        if decision is not None:
            print_message(f"restart {restarts}: {decision.reason}")
            clock.sleep(decision.after_seconds)
    return _become_supervisor(arguments, {**env, RESTART_VARIABLE: "1" if restarts else "0"})


def _become_supervisor(arguments: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Becomes `python -m jaxres.train` in this process: a signal from now on waits for it."""
    signals.block()
    os.execve(sys.executable, [sys.executable, "-m", "jaxres.train", *arguments], env)


def _num_restarts(env: Mapping[str, str]) -> int:
    text = env.get(k8s_manifest.RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def after_restart(
    records: Sequence[Record], config: RunConfig, *, restarts: int
) -> Restart | GiveUp | None:
    """Decides the action of a restarted pod; None: no attempt has ended yet. Pure.

    All pods of the job decide alike, so that none waits for another that has ended.

    Args:
      records: the run log; no attempt runs.
      restarts: how often Kubernetes has restarted the JobSet; what ended before it began does not
        count, because an operator has submitted it since.
    """
    history = restart_policy.load_history(records, supervised_only=False).outcomes[-restarts:]
    return restart_policy.decide_next(history, config, seed=restarts) if history else None


# Submission.


def _submit(objects: Sequence[Manifest], options: ClusterOptions, *, env: Mapping[str, str]) -> int:
    """Creates the objects: the job first, which refuses a second job of the run."""
    try:
        import kubernetes
    except ImportError as error:
        raise ConfigError(
            "the Kubernetes client is not installed. Run `pip install -e '.[k8s]'` in the "
            "checkout of jaxres, or print the manifest: --print | kubectl apply -f -"
        ) from error
    where = env.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    try:
        if env.get("KUBECONFIG") or Path(where).exists():
            kubernetes.config.load_kube_config(config_file=where)
        else:
            kubernetes.config.load_incluster_config()
    except (kubernetes.config.ConfigException, *NO_KUBECONFIG) as error:
        raise ConfigError(f"{where}: no cluster is configured: {error}") from error
    *others, job = objects
    with kubernetes.client.ApiClient() as client:
        api = _Api(kubernetes, client, options)
        created = api.create_job(job)
        try:
            for manifest in others:
                api.create_or_replace(manifest)
        except (RunError, KeyboardInterrupt):
            api.delete_job(job)  # Its pods would wait for the others forever.
            raise
    for path in k8s_manifest.changed_fields(job, created):
        sys.stdout.write(f"the cluster has changed {path}: a webhook, or a version without it\n")
    kind = job["kind"].lower()
    space = f"-n {options.namespace}"
    sys.stdout.write(
        f"{kind} {options.name} is submitted\n"
        f"its state: kubectl get {kind} {options.name} {space}\n"
        f"its output: kubectl logs -f {space} -l {_selector(options)}\n"
        f"save and end: kubectl delete {kind} {options.name} {space}\n"
    )
    return ExitCode.DONE


def _selector(options: ClusterOptions) -> str:
    jobset = f"jobset.sigs.k8s.io/jobset-name={options.name}"
    return jobset if options.kind == "jobset" else f"batch.kubernetes.io/job-name={options.name}"


@dataclass(frozen=True)
class _Api:
    """Calls of the Kubernetes API, with typed errors."""

    library: Any
    """The module `kubernetes`."""
    client: Any
    options: ClusterOptions

    def create_job(self, job: Manifest) -> Any:
        """Creates the JobSet or Job; returns it as the cluster has it."""
        space = self.options.namespace
        limits = {"field_validation": "Strict", "_request_timeout": CALL_SECONDS}
        if job["kind"] == "JobSet":
            custom = self.library.client.CustomObjectsApi(self.client)
            create = partial(custom.create_namespaced_custom_object, *JOBSETS[:2], space)
            request = partial(create, JOBSETS[2], job, **limits)
        else:
            batch = self.library.client.BatchV1Api(self.client)
            request = partial(batch.create_namespaced_job, space, job, **limits)
        try:
            return self.client.sanitize_for_serialization(self._call(request))
        except StorageUnavailable as error:
            kind, name = self.options.kind, self.options.name
            raise StorageUnavailable(
                f"{error}. It may have created the job: if `kubectl get {kind} {name} -n {space}` "
                f"shows it, `kubectl delete {kind} {name} -n {space}` before you submit again"
            ) from error

    def delete_job(self, job: Manifest) -> None:
        """Deletes a job that was just created; prints the manual remedy if that fails."""
        space, name = self.options.namespace, self.options.name
        limit = {"propagation_policy": "Background", "_request_timeout": CALL_SECONDS}
        if job["kind"] == "JobSet":
            custom = self.library.client.CustomObjectsApi(self.client)
            delete = partial(custom.delete_namespaced_custom_object, *JOBSETS[:2], space)
            request = partial(delete, JOBSETS[2], name, **limit)
        else:
            batch = self.library.client.BatchV1Api(self.client)
            request = partial(batch.delete_namespaced_job, name, space, **limit)
        try:
            self._call(request)
        except RunError as error:
            kind = self.options.kind
            print_message(
                f"the job was created without its config ({error}): `kubectl delete {kind} {name} "
                f"-n {space}` before you submit again"
            )

    def create_or_replace(self, manifest: Manifest) -> None:
        """Creates a ConfigMap, a Secret or a Service, or replaces an earlier job's of the run."""
        core = self.library.client.CoreV1Api(self.client)
        kind = manifest["kind"].lower().replace("configmap", "config_map")
        space, name = self.options.namespace, self.options.name
        limit = {"_request_timeout": CALL_SECONDS}
        try:
            create = getattr(core, f"create_namespaced_{kind}")
            self._call(lambda: create(space, manifest, **limit))
        except Fenced:
            if kind == "service":
                return
            read = getattr(core, f"read_namespaced_{kind}")
            found = self._call(lambda: read(name, space, **limit))
            if set(found.data or {}) - {k8s_manifest.CONFIG_FILE}:
                raise ConfigError(
                    f"{name}: namespace {space} has a {manifest['kind']} of this name that is not "
                    "of a run. Give another --name"
                ) from None
            put = getattr(core, f"replace_namespaced_{kind}")
            self._call(lambda: put(name, space, manifest, **limit))

    def _call(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except self.library.client.ApiException as error:
            raise self._typed(error) from error
        except OSError as error:
            raise StorageUnavailable(f"the Kubernetes API does not answer: {error}") from error
        except self._unanswered() as error:
            raise StorageUnavailable(f"the Kubernetes API does not answer: {error}") from error
        except ValueError as error:  # A proxy answers, or half an answer has come.
            raise StorageUnavailable(f"the Kubernetes API answers no JSON: {error}") from error

    def _unanswered(self) -> type[Exception]:
        from urllib3.exceptions import HTTPError

        return HTTPError

    def _typed(self, error: Any) -> Exception:
        name, space = self.options.name, self.options.namespace
        message = _message(error.body)
        said = message or error.reason
        if error.status == 409:
            return Fenced(
                f"{name}: there is a job of this run already ({said}). If it has ended: kubectl "
                f"delete {self.options.kind} {name} -n {space}; then submit again"
            )
        missing = re.search('(namespaces|configmaps) "', message)
        if error.status == 404 and self.options.kind == "jobset" and not missing:
            return ConfigError(
                f"the cluster has no JobSet {k8s_manifest.JOBSET_VERSION}: install JobSet 0.10.1 "
                "or newer (jobset.sigs.k8s.io), or give --kind job"
            )
        if error.status >= 500 or error.status == 429:
            return StorageUnavailable(f"the Kubernetes API: {error.status} {said}")
        refused = f"{name}: the Kubernetes API refuses it: {error.status} {said}"
        if missing and error.status == 404:
            create = f"`kubectl create namespace {space}`, then " if "namesp" in missing[1] else ""
            refused += f". To go on: {create}submit again"
        if error.status == 401:
            refused += ". The credentials of the kubeconfig are not valid, or have expired"
        if self.options.kind == "jobset" and re.search("unknown field|nsupported value", str(said)):
            refused += ". JobSet 0.10.1 or newer has these fields (jobset.sigs.k8s.io)"
        return ConfigError(refused)


def _message(body: Any) -> str:
    """Returns the message of an answer that refuses a request; empty: it has none.

    The API of Kubernetes answers a path that it does not have with a line that is no JSON.
    """
    with suppress(ValueError, AttributeError, TypeError, KeyError):
        return str(json.loads(body)["message"] or "")
    return ""
