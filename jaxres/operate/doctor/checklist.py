"""The production checklist of `jaxres doctor`: needs of a long run beyond a valid config. Pure.

Each item is a function of the config and of what is known about the job and this machine
(`facts.py`). docs/prove.md has the table of all items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxres.config import RunConfig
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.base import Section
from jaxres.config.schema.training import GuardsSection
from jaxres.operate.chaos.results import FAILED, PASSED
from jaxres.operate.chaos.scenarios import ChecklistKind
from jaxres.operate.doctor import estimates, saved_state
from jaxres.operate.doctor.check import Check, ItemResult, Status, fail, not_applicable, ok, warn
from jaxres.operate.doctor.facts import Facts
from jaxres.operate.doctor.saved_state import listed
from jaxres.telemetry import incidents

SMALL = "a run of less than an hour on one machine"
MANY_FILES = 1024
"""Open files that a worker may have: TensorStore's, data files, connections."""
LONGEST_HANG_SECONDS = 3600.0
"""Limit of a step from which on a hang costs more than a failure should."""
LEAST_DRIVER = {12: 525, 13: 580}
"""CUDA version -> oldest driver of JAX's packages (docs.jax.dev, Installation)."""
MUST_REACH = (Kind.GAVE_UP, Kind.COMMITS_STALLED, Kind.HARDWARE_FAULT)
"""Incidents that an operator has to get: the run has ended, does not advance, or a host is sick."""

Judge = Callable[[RunConfig, Facts], ItemResult]


@dataclass(frozen=True)
class Item:
    """An item of the checklist."""

    name: str
    judge: Judge
    for_all: bool = False
    """Whether it applies to a small run too."""
    covered_by: str | None = None
    """Name of the check before the checklist that prints it already."""


def judge(config: RunConfig, facts: Facts) -> list[Check]:
    """Returns the results of all items, in their order."""
    small, found = estimates.is_small(config, facts), list[Check]()
    for item in ITEMS:
        result = item.judge(config, facts)
        if small and not item.for_all and result.status != "fail":
            result = not_applicable(SMALL)
        found.append(Check(result.status, item.name, result.detail, result.remedy))
    return found


def text(checks: Sequence[Check], *, all_items: bool) -> str:
    """Returns the printed text of the checklist.

    Items that warn or fail have a line each, unless an earlier check has printed them; the others
    are listed by name.
    """
    width = max(len(item.name) for item in ITEMS)
    by_status: dict[Status, list[str]] = {"pass": [], "warn": [], "fail": [], "n/a": []}
    for check in checks:
        by_status[check.status].append(check.name)
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items() if names)
    lines = [f"production checklist: {counts} (docs/prove.md)"]
    if all_items:
        return "\n".join([*lines, *(check.line(width=width) for check in checks)]) + "\n"
    lines += [
        check.line(width=width)
        for check in checks
        if check.status in ("warn", "fail") and check.name not in COVERED
    ]
    listed: Mapping[Status, str] = {"pass": "pass", "n/a": "n/a "}
    lines += [
        f"{word}  {', '.join(by_status[status])}"
        for status, word in listed.items()
        if by_status[status]
    ]
    return "\n".join([*lines, "--all prints each with its reason"]) + "\n"


# Detection.


def _health(config: RunConfig, facts: Facts) -> ItemResult:
    section = config.hardware.health
    if facts.platform != "gpu":
        return not_applicable("there are no GPUs")
    if section is None:
        return warn("hardware.health is null: no GPU is watched", "Remove it")
    if not facts.is_here:
        return not_applicable(saved_state.ELSEWHERE)
    if facts.gpus is None or facts.gpus.error is not None:
        why = "it was not asked" if facts.gpus is None else facts.gpus.error
        return warn(
            f"NVIDIA's library can't read the GPUs ({why}), so no fault of them is seen",
            "Install `.[hardware]`, and let containers see libnvidia-ml.so.1",
        )
    if facts.gpus.unreadable:
        return warn(
            f"some readings are missing: {', '.join(sorted(facts.gpus.unreadable))}",
            "Faults of these kinds are not seen; a newer driver, or a machine that is not virtual, "
            "has them",
        )
    return ok(f"NVIDIA's library reads all GPUs every {section.poll_seconds:g} s")


def _incidents(config: RunConfig, _: Facts) -> ItemResult:
    if not config.alerts.targets:
        return not_applicable("there is no target (item alerts)")
    missing = [
        kind
        for kind in MUST_REACH
        if not any(incidents.is_wanted(target, kind) for target in config.alerts.targets)
    ]
    if missing:
        return warn(f"no target gets {', '.join(missing)}", "Add them to alerts.targets[].kinds")
    if config.alerts.no_commit_minutes is None:
        return warn(
            "no alert is sent if commits stop", "Set alerts.no_commit_minutes to some minutes"
        )
    return ok(f"ends, sick hosts, {config.alerts.no_commit_minutes:g} min without a commit")


def _restarts(config: RunConfig, facts: Facts) -> ItemResult:
    attempts = config.restart.max_attempts_without_commit
    if attempts == 1:
        return warn(
            "the first failure ends the run", "Raise restart.max_attempts_without_commit, say to 5"
        )
    if config.launch.gce is not None:
        return ok(f"`launch gce` restarts the job and replaces VMs; {attempts} failures end it")
    if facts.restarted_by:
        return ok(f"{facts.restarted_by}; {attempts} failures without a commit end the run")
    return warn(
        "no attempt of this run was restarted so far, and `jaxres train` restarts nothing",
        "Start it by `jaxres launch local`, `slurm`, `k8s` or `sky`; once a run has such an "
        "attempt, this passes",
    )


# Resumption.


def _covered(name: str) -> Judge:
    """Returns an item that a check before the checklist has decided."""

    def covered(_: RunConfig, facts: Facts) -> ItemResult:
        check = facts.checks.get(name)
        if check is None:
            return not_applicable(saved_state.ELSEWHERE)
        return ItemResult(check.status, check.detail, check.remedy)

    return covered


def _data_position(config: RunConfig, _: Facts) -> ItemResult:
    if config.run.must_exist:
        return ok("a number in each state, and run.must_exist bars a second start at step 0")
    return ok("a number in each state: no row is repeated or left out")


def _random_state(_: RunConfig, __: Facts) -> ItemResult:
    return ok("the PRNG key is an array of each state")


# Preemption.


def _notices(config: RunConfig, facts: Facts) -> ItemResult:
    if not facts.is_here:
        return not_applicable(saved_state.ELSEWHERE)
    return _covered("notices")(config, facts)


# Monitoring.


def _metrics(config: RunConfig, facts: Facts) -> ItemResult:
    found = "loss, gradient norm, duration and tokens of each step; MFU on the console"
    if facts.platform == "gpu" and config.telemetry.prometheus is None:
        return warn(
            f"{found}; utilization and memory of the GPUs are not exported",
            "Set telemetry.prometheus, or run NVIDIA's dcgm-exporter on each host",
        )
    return ok(found)


def _dashboards(config: RunConfig, facts: Facts) -> ItemResult:
    telemetry = config.telemetry
    if telemetry.prometheus is not None:
        if facts.is_here and not facts.has_exporter:
            return fail(
                "telemetry.prometheus is set and prometheus-client is not installed, so the start "
                "is refused",
                "Install `.[prometheus]`",
            )
        return ok(f"metrics on {telemetry.prometheus.address}, dashboard in tools/dashboards")
    if telemetry.trackers:
        return ok(f"metrics in {listed([tracker.kind for tracker in telemetry.trackers])}")
    return warn(
        "no metrics are exported",
        "Set telemetry.prometheus={} and import tools/dashboards, or add telemetry.trackers",
    )


def _alerts(config: RunConfig, facts: Facts) -> ItemResult:
    if not config.alerts.targets:
        if facts.test_alerts is not None:
            return fail("alerts.targets is empty: no test message was sent", "Set alerts.targets")
        if estimates.is_small(config, facts):
            return not_applicable(SMALL)
        return warn(
            "no alert is sent if the run ends or stops", "Set alerts.targets (docs/watch.md)"
        )
    if facts.alert_error is not None:
        remedy = "Set it where the supervisor starts, or remove the target"
        return (fail if facts.starts_here else warn)(facts.alert_error, remedy)
    sent = facts.test_alerts or ()
    refused = [f"{name} {answer}" for name, is_delivered, answer in sent if not is_delivered]
    if refused:
        return fail(
            f"a test message was not delivered: {'; '.join(refused)}",
            "Compare the variable with the address that the service shows",
        )
    if sent:
        answers = "; ".join(f"{name} {answer}" for name, _, answer in sent)
        return ok(f"a test message was delivered: {answers}")
    return ok(f"{len(config.alerts.targets)} targets; --send-test-alert sends a message to each")


# Chaos.


def _chaos(kind: ChecklistKind) -> Judge:
    def chaos(_: RunConfig, facts: Facts) -> ItemResult:
        if facts.chaos is None:
            return not_applicable("no result was looked for")
        verdict = facts.chaos.kinds.get(kind)
        if verdict == PASSED:
            return ok(facts.chaos.text)
        if verdict == FAILED:
            return warn(f"a promise did not hold: {facts.chaos.text}", "See the campaign's table")
        if kind != "partition":
            return warn(f"not run: {facts.chaos.text}", "Run `jaxres chaos run` with this config")
        if facts.num_hosts == 1:
            return not_applicable("the job has one host")
        advice = "Run `jaxres chaos run --hosts 2` with this config"
        return warn(f"not run: {facts.chaos.text}", advice)

    return chaos


# The run and its machine.


def _budgets(config: RunConfig, _: Facts) -> ItemResult:
    launch, restart = config.launch, config.restart
    limits = {"launch.max_dollars": launch.max_dollars, "launch.max_hours": launch.max_hours}
    given = [f"{key}={value:g}" for key, value in limits.items() if value is not None]
    bound = (
        f"{restart.max_attempts_without_commit} failures, {restart.max_storage_attempts} of storage"
    )
    if launch.gce is not None and not given:
        return warn(
            f"nothing limits the cost of the VMs (restarts: {bound})",
            "Set launch.max_dollars, with prices of the capacity options (docs/gce-reference.md), "
            "or launch.max_hours",
        )
    return ok(", ".join([f"{bound} without a commit", *given]))


def _guards(config: RunConfig, _: Facts) -> ItemResult:
    guards = config.guards
    defaults = {name: info.default for name, info in GuardsSection.model_fields.items()}
    sections = [name for name, default in defaults.items() if isinstance(default, Section)]
    off = [f"guards.{name}=null" for name in sections if getattr(guards, name) is None]
    off += [
        f"guards.{name}.mode=warn"
        for name in sections
        if getattr(getattr(guards, name), "mode", "act") == "warn"
    ]
    off += ["guards.on_nonfinite=warn"] if guards.on_nonfinite == "warn" else []
    if off:
        return warn(f"off: {', '.join(off)}", "Remove these keys")
    return ok(f"all; a step that is not finite: {guards.on_nonfinite}")


def _hang_limits(config: RunConfig, _: Facts) -> ItemResult:
    limit = config.deadlines.step_seconds
    if limit > LONGEST_HANG_SECONDS:
        return warn(
            f"a hang is found after {limit:g} s", "Lower deadlines.step_seconds to the longest step"
        )
    return ok(f"a step that takes {limit:g} s, or 10 times the slowest of the last 50, is a hang")


def _clock(config: RunConfig, facts: Facts) -> ItemResult:
    if not facts.is_here:
        return not_applicable(saved_state.ELSEWHERE)
    if facts.is_clock_synchronised is None:
        return not_applicable("neither the kernel nor timedatectl says whether it is synchronised")
    if facts.is_clock_synchronised:
        return ok("synchronised; clocks of other hosts are not compared")
    return warn(
        "the clock of this machine is not synchronised: times in the logs of hosts don't agree",
        "Start chrony or systemd-timesyncd",
    )


def _open_files(_: RunConfig, facts: Facts) -> ItemResult:
    if facts.open_files is None:
        return not_applicable(saved_state.ELSEWHERE)
    if 0 <= facts.open_files < MANY_FILES:
        return warn(
            f"a process may have {facts.open_files} open files",
            f"Run `ulimit -n {64 * MANY_FILES}`",
        )
    number = "any number of" if facts.open_files < 0 else f"{facts.open_files:,}"
    return ok(f"a process may have {number} open files")


def _driver(_: RunConfig, facts: Facts) -> ItemResult:
    if facts.platform != "gpu":
        return not_applicable("there are no GPUs")
    if not facts.is_here:
        return not_applicable(saved_state.ELSEWHERE)
    least = LEAST_DRIVER.get(facts.cuda or 0)
    if facts.driver is None or least is None:
        return not_applicable("the version of NVIDIA's driver or of JAX's plugin is unknown")
    if int(facts.driver.split(".")[0]) < least:
        return warn(
            f"driver {facts.driver}, and JAX with CUDA {facts.cuda} needs {least}",
            f"Install driver {least} or later",
        )
    nccl = facts.nccl
    if nccl is None:
        return ok(f"driver {facts.driver}, CUDA {facts.cuda}; JAX's plugin names no NCCL")
    if nccl.version is None:
        return warn(
            f"driver {facts.driver}; {nccl.name} is not installed", f"Install `.[cuda{facts.cuda}]`"
        )
    if _numbers(nccl.version) < _numbers(nccl.least):
        return warn(
            f"NCCL {nccl.version}, and JAX's plugin needs {nccl.least}",
            f"Run `pip install '{nccl.name}>={nccl.least}'`",
        )
    return ok(f"driver {facts.driver}, CUDA {facts.cuda}, NCCL {nccl.version}")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version.

    >>> _numbers("2.18.1") < _numbers("2.27.3.post1")
    True
    """
    parts = version.split(".")
    return tuple(int(part) for part in parts if part.isdecimal())


def _determinism(config: RunConfig, facts: Facts) -> ItemResult:
    run = config.run
    if facts.platform == "gpu" and run.determinism == "fast" and run.guarantee == "bitwise":
        return warn(
            f"run.seed={run.seed}, run.guarantee=bitwise, and kernels that may differ in bits",
            "Set run.determinism=bitwise (docs/benchmarks.md)",
        )
    what = f"run.seed={run.seed}, train.reduction={config.train.reduction}"
    if facts.platform == "cpu":
        return ok(f"{what}; run.determinism has no effect on a CPU")
    return ok(f"{what}, run.determinism={run.determinism}")


ITEMS = (
    Item("sharded saves", saved_state.sharded, for_all=True),
    Item("save interval", saved_state.interval, for_all=True),
    Item("fast storage", saved_state.fast_storage),
    Item("digests", saved_state.digests, for_all=True),
    Item("replica", saved_state.replica),
    Item("replica place", saved_state.replica_place),
    Item("retention", saved_state.retention, for_all=True),
    Item("health access", _health),
    Item("incidents", _incidents),
    Item("restarts", _restarts),
    Item("resume check", _covered("resume"), for_all=True, covered_by="resume"),
    Item("data position", _data_position, for_all=True),
    Item("random state", _random_state, for_all=True),
    Item("notices", _notices, for_all=True, covered_by="notices"),
    Item("save at a notice", saved_state.save_at_notice),
    Item("capacity", saved_state.capacity),
    Item("metrics", _metrics, for_all=True),
    Item("dashboards", _dashboards),
    Item("alerts", _alerts, for_all=True),
    Item("host kill", _chaos("node_kill")),
    Item("partition", _chaos("partition")),
    Item("damage", _chaos("corruption")),
    Item("budgets", _budgets),
    Item("guards", _guards, for_all=True),
    Item("hang limits", _hang_limits, for_all=True),
    Item("clock", _clock),
    Item("open files", _open_files, for_all=True),
    Item("disk", _covered("run.dir"), for_all=True, covered_by="run.dir"),
    Item("driver", _driver, for_all=True),
    Item("determinism", _determinism, for_all=True),
)
"""The 22 items of the production checklist in its order, then items of run and machine."""
COVERED = frozenset(item.name for item in ITEMS if item.covered_by is not None)
"""Items that a check before the checklist prints."""
