"""Every name on disk, on the wire and in JSON output stays as `golden/format_names.json` has it.

The names are read from what the real encoders write for an example of every class. After a change
of a format: `python -m tests.unit.test_format_names` writes the file again.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxres.checkpoint import diff, finalize, save_messages
from jaxres.checkpoint.digests import block_digests
from jaxres.checkpoint.memory import tier
from jaxres.checkpoint.read import manifest, readback, tensorstore_reader
from jaxres.checkpoint.restore import restore
from jaxres.checkpoint.retention import retention
from jaxres.cli import chaos, plan, report, run_state, status
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.cli.checkpoints import prune as prune_cli
from jaxres.clock import SystemClock
from jaxres.cluster import messages
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import GenericTarget
from jaxres.data.tokens import token_folder
from jaxres.engine.state import Progress
from jaxres.goodput import summary
from jaxres.goodput.intervals import ActivityInterval
from jaxres.goodput.run_timeline import RunTimeline
from jaxres.jax_cli import doctor
from jaxres.launch.gce.state import (
    desired_state,
    lease,
    observed_state,
    spending,
    state_object,
)
from jaxres.launch.gce.state.paths import LaunchPaths
from jaxres.operate.chaos import results as chaos_results
from jaxres.operate.chaos.schedule import PlannedRun
from jaxres.operate.chaos.verdict import Broken, ChaosFacts, Injection
from jaxres.operate.doctor.check import Check
from jaxres.operate.plan.measured import Measured
from jaxres.operate.resume_verdict import RunFacts
from jaxres.runlog import (
    attempt_history,
    launch_events,
    metrics,
    paths,
    records,
    replica_files,
    run_log,
    scrub_progress,
)
from jaxres.runlog.evaluations import EVALUATED
from jaxres.runlog.event_log import EventLog, read_events
from jaxres.runlog.events import EVENTS, BadRecordsSkipped, Event
from jaxres.runlog.run_log import RunHistory
from jaxres.storage import codec
from jaxres.storage.path import GcsPath
from jaxres.supervisor import run_lock
from jaxres.telemetry import alert_delivery_log, heartbeat, incidents
from jaxres.train import consensus, resume_results
from tests.unit.launch import gce_config

GOLDEN = Path(__file__).parents[1] / "golden" / "format_names.json"
ADVICE = (
    "this is a format change: list the names in CHANGELOG, then write the file again: python -m "
    "tests.unit.test_format_names. If readers of the old format would misread it "
    "(docs/formats.md, Compatibility), bump its number (runlog/records.py, "
    "checkpoint/read/manifest.py, cluster/messages.py, launch/gce/state/state_object.py, "
    "launch/gce/state/lease.py)"
)
SCALARS: Mapping[Any, Any] = {bool: True, int: 7, float: 1.5, str: "x", bytes: b"x", Any: "x"}
CLOCK = SystemClock()


def example(hint: Any) -> Any:
    """Returns a value of a type, every optional part of it present."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return example(next(one for one in args if one is not type(None)))
    if origin is Literal:
        return args[0]
    if origin is tuple:
        return tuple(example(one) for one in args if one is not Ellipsis)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return {example(args[0]): example(args[1])}
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return (example(args[0]),)
    if dataclasses.is_dataclass(origin):  # A generic class: its parameter names a host, as text.
        return example(origin)
    if isinstance(hint, TypeVar):
        return SCALARS[str]
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        fields = [field.name for field in dataclasses.fields(hint) if field.init]
        return hint(**{name: example(hints[name]) for name in fields})
    return next(iter(hint)) if issubclass(hint, StrEnum) else SCALARS[hint]


def bound(hint: Any, parameters: Mapping[Any, Any]) -> Any:
    """Returns a type with its type variables replaced."""
    if hint in parameters:
        return parameters[hint]
    variables = getattr(hint, "__parameters__", ())
    return hint[tuple(parameters[variable] for variable in variables)] if variables else hint


def shape(value: Any) -> Any:
    """Returns the keys of parsed JSON, and in place of every other value the name of its type."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def written(data: bytes | str) -> Any:
    return shape(json.loads(data))


def record_names() -> dict[str, Any]:
    found = {}
    for kind in get_args(records.Body):
        data = records.Record(1, 7, 1.5, example(kind)).encode()
        found[json.loads(data)["kind"]] = written(data)
    return found


def event_names() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "events.jsonl")
        with EventLog(path, clock=CLOCK) as log:
            for kind in get_args(Event):
                log.emit(example(kind))
        return {event["event"]: shape(event) for event in read_events(path)}


def worker_message_names() -> dict[str, Any]:
    found = {}
    for kind in get_args(heartbeat.StatusMessage):
        line = json.loads(heartbeat.encode(example(kind)))
        found[line["message"]] = shape(line)
    return found


def host_message_names() -> list[Any]:
    return [written(messages.encode(example(kind))) for kind in messages.MESSAGES.kinds.values()]


def run_lock_names() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = paths.RunDir(Path(folder))
        with run_lock.RunLock(run_dir, clock=CLOCK) as lock:
            lock.heartbeat(example(run_lock.TrainingProgress))
            return shape(run_lock.read(run_dir))


def manifest_names() -> dict[str, Any]:
    arrays = {"x": block_digests.ArrayInfo("float32", (2,))}
    found = dataclasses.replace(example(manifest.Manifest), arrays=arrays, digests={"x": "x"})
    return written(found.encode())


def run_history() -> RunHistory:
    """Returns the history of a run with a commit and a quarantined one."""
    commit, quarantine = example(records.Commit), example(records.Quarantine)
    bodies = [
        example(records.Claim),
        dataclasses.replace(commit, step=1, path="y"),
        dataclasses.replace(quarantine, step=1, path="y"),
        commit,
    ]
    return run_log.fold([records.Record(n, 7, 1.5, body) for n, body in enumerate(bodies, 1)])


def status_names() -> dict[str, Any]:
    run_dir = paths.RunDir(Path("runs/x"))
    fields = {"step": 7, "losses": {}, "bits_per_byte": {}, "loss": 1.5}
    evaluated = {"event": EVALUATED, **fields}
    found = status.Status(
        run_dir=run_dir,
        history=run_history(),
        is_alive=True,
        watched=False,
        heartbeat={"host": "x", "pid": 7, "time": 1.5},
        now=2.5,
        newest=example(metrics.MetricsLine),
        steps=7,
        evaluation=status._newest_evaluation([evaluated]),
        hosts=[example(status.HostSnapshot)],
        recent=[example(attempt_history.AttemptSummary)],
        supervision=example(run_state.LastSupervisorEvent),
        outlook=run_state.RunOutlook("running", "x", "x"),
        replica=example(replica_files.ReplicaProgress),
        damaged=(example(scrub_progress.StepCheck),),
    )
    return written(status.as_json(found))


def history_names() -> dict[str, Any]:
    return {k: v for k, v in shape(example(metrics.MetricsLine).fields()).items() if k != "seq"}


def list_names() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        text = checkpoints_cli._list(paths.RunDir(Path(folder)), run_history(), as_json=True)
        return [written(line) for line in text.splitlines()]


def diff_names() -> list[Any]:
    array = diff.ArrayDiff(
        "x", *(block_digests.ArrayInfo("x", (1,)),) * 2, example(diff.Difference)
    )
    side = diff.Side(Path("x"), 7, "x")
    found = diff.StateDiff(side, side, 1, (array,), (example(diff.FactDiff),))
    return [written(line) for line in diff.as_json(found).splitlines()]


def prune_names() -> list[Any]:
    step = example(retention.CommittedStep)
    found = prune_cli.PrunePreview(
        retention.PrunePlan((step,), {step.step: ("x",)}), {"x": 7}, 7, True
    )
    return [written(line) for line in prune_cli.as_json(found).splitlines()]


def incident_names() -> dict[str, Any]:
    (message,) = incidents.messages(
        GenericTarget(url_env="X"),
        example(incidents.Incident),
        key="x",
        time=1.5,
        secret="",
        left_out={"x": 1},
        is_open={},
    )
    return shape(message.body)


def paths_of(folder: Any) -> list[str]:
    """Returns the path of every property and method of a class of paths."""
    found: set[str] = set()
    for name, member in inspect.getmembers(type(folder)):
        if name.startswith("_") or name in (
            "is_remote",
            "is_remote",
            "local",
            "label",
            "local_attempt",
            "is_remote",
        ):
            continue
        if isinstance(member, property):
            found.add(str(getattr(folder, name)))
        elif inspect.isfunction(member):
            wanted = [one for one in get_type_hints(member) if one != "return"]
            given = {"attempt": 1, "host": 2, "name": "NAME", "digest": "DIGEST"}
            found.add(str(getattr(folder, name)(*(given[one] for one in wanted))))
    return sorted(found)


def save_message_names() -> dict[str, Any]:
    kinds = save_messages.MESSAGES.kinds
    return {tag: written(save_messages.encode(example(kind))) for tag, kind in kinds.items()}


def memory_message_names() -> dict[str, Any]:
    kinds = {"report": tier.HeldStates, "decision": tier.AgreedState, "read": tier.ReadFailures}
    return {name: written(codec.to_text(example(kind))) for name, kind in kinds.items()}


def bad_record_names() -> dict[str, Any]:
    kinds = {"rows": run_log.Skip, "decision": BadRecordsSkipped}
    return {name: written(codec.to_text(example(kind))) for name, kind in kinds.items()}


def desired_state_names() -> Any:
    return written(state_object.encode_state(example(desired_state.DesiredState)))


def resume_check_names() -> dict[str, Any]:
    return written(json.dumps(example(resume_results.ResumeCheckResult).fields()))


def doctor_names() -> Any:
    return written(doctor.as_json(Path("CONFIG"), [example(Check)], [example(Check)]))


def chaos_names() -> dict[str, Any]:
    facts = ChaosFacts(example(PlannedRun), example(RunFacts), (example(Injection),))
    run = chaos.run_fields(facts, [example(Broken)])
    result = dataclasses.replace(example(chaos_results.ChaosResult), runs=(run,))
    return written(json.dumps(result.fields()))


def launch_event_names() -> list[str]:
    return list(get_args(launch_events.LaunchEventKind))


def plan_names() -> Any:
    words = ["--gpus=8", "--state-gib=1", "--spot-rate=1", "--replications=2"]
    inputs = plan.read_inputs(plan._parse(words))
    found = plan.compute(dataclasses.replace(inputs, measured=example(Measured)))
    return shape(json.loads(json.dumps(found)))


def report_names() -> Any:
    timeline, gce = RunTimeline((example(ActivityInterval),)), gce_config.config().launch.gce
    assert gce is not None
    vms = report.VmSpending(spending.rows([example(desired_state.Spending)], gce))
    return written(report.as_json_text(timeline, example(summary.Summary), vms))


RESTORE_RESULTS = (
    *(restore.VALID, restore.DAMAGED, restore.STORAGE),
    *(restore.TIMEOUT, restore.CONFIG, restore.RETRY),
)


def names() -> dict[str, Any]:
    """Returns all names, by the file or message that has them."""
    producers: Mapping[str, Callable[[], Any]] = {
        "run log: records": record_names,
        "event files: events": event_names,
        "pipe of the worker: messages": worker_message_names,
        "connection of two hosts: messages": host_message_names,
        "step: columns of a host's flags": lambda: list(consensus.FACTS),
        "restore: result of one host": lambda: written(example(restore.ReadResult).encode()),
        "restore: kinds of results": lambda: list(RESTORE_RESULTS),
        "save: messages of host 0": save_message_names,
        "memory: messages of the hosts": memory_message_names,
        "bad records: messages of the hosts": bad_record_names,
        "save: report of one host": lambda: written(example(readback.HostReport).encode()),
        "launch/events: kinds": launch_event_names,
        "metrics.jsonl": lambda: shape(example(metrics.MetricsLine).fields()),
        "MANIFEST.json": manifest_names,
        "progress.json": lambda: shape(
            json.loads(json.dumps(dataclasses.asdict(example(Progress))))
        ),
        "owner.json": run_lock_names,
        "REPLICA.json": lambda: shape(dataclasses.asdict(example(replica_files.Marker))),
        "scrub.json": lambda: shape(dataclasses.asdict(example(scrub_progress.StepCheck))),
        "replica.json": lambda: shape(dataclasses.asdict(example(replica_files.ReplicaProgress))),
        "alerts.jsonl": lambda: shape(alert_delivery_log.line("x", "x", "queued", time=1.5)),
        "alerts.jsonl: states": lambda: list(get_args(alert_delivery_log.DeliveryState)),
        "alerts: body of a generic webhook": incident_names,
        "alerts: kinds of incidents": lambda: list(Kind),
        "launch/lease.json": lambda: written(lease._encode(example(lease.LeaseRecord))),
        "launch/desired_state.json": desired_state_names,
        "launch/reports: metadata": lambda: shape(example(observed_state.AgentReport).metadata()),
        "data folder: meta.json": lambda: shape(dataclasses.asdict(example(token_folder.Meta))),
        "status --json": status_names,
        "history --json": history_names,
        "history --attempts --json": lambda: written(
            attempt_history.as_json([example(attempt_history.AttemptSummary)])
        ),
        "report --json": report_names,
        "plan --json": plan_names,
        "checkpoints list --json": list_names,
        "checkpoints diff --json": diff_names,
        "checkpoints prune --json": prune_names,
        "resume-check --json": resume_check_names,
        "doctor --json": doctor_names,
        "chaos run --json": chaos_names,
        "run directory: paths": lambda: paths_of(paths.RunDir(Path("RUN"))),
        "launch: paths": lambda: paths_of(LaunchPaths(GcsPath("BUCKET", "RUN"))),
        "step directory: paths": lambda: [
            *(manifest.MANIFEST, manifest.PROGRESS, manifest.HELDOUT_DATA, manifest.DIGESTS),
            f"{manifest.DIGESTS}/{finalize.CUT_BLOCKS}",
            *(manifest.FROZEN_DIGESTS, tensorstore_reader.FROZEN),
        ],
        "formats": lambda: {
            "run log": records.FORMAT,
            "manifest": [manifest.FORMAT, manifest.FROZEN_FORMAT],
            "messages between hosts": messages.VERSION,
            "lease": lease.FORMAT,
            "desired state": state_object.FORMAT,
        },
    }
    return {name: make() for name, make in producers.items()}


def as_text(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def test_names_on_disk_and_wire_do_not_change():
    there, now = GOLDEN.read_text(), as_text(names())
    changes = difflib.unified_diff(
        there.splitlines(), now.splitlines(), GOLDEN.name, "written now", n=3, lineterm=""
    )
    assert now == there, "\n".join([ADVICE, *changes])


def test_every_class_of_a_union_has_a_tag():
    assert set(records.RECORDS.kinds.values()) == set(get_args(records.Body))
    assert set(EVENTS.kinds.values()) == set(get_args(Event))
    assert set(heartbeat.MESSAGES.kinds.values()) == set(get_args(heartbeat.StatusMessage))
    assert set(messages.MESSAGES.kinds.values()) == set(get_args(messages.Message)) - {
        messages.Disconnected
    }


if __name__ == "__main__":
    sys.stdout.write(f"writes {GOLDEN}\n")
    GOLDEN.write_text(as_text(names()))
