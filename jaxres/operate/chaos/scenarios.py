"""The scenarios of `jaxres chaos`: the fault of each, and the run's promise then. Pure.

A scenario acts from outside: by signals, on the files of a run that has stopped, or by a hook of
its run. Production code does not know of it. `runs.py` has the function that injects each.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from jaxres.exit_codes import SIGNAL_BASE, ExitCode
from jaxres.train.chaos_hooks import array_edit_hook, break_hook
from jaxres.train.chaos_hooks.fault_request import WORKER_HOOK

KILLED = SIGNAL_BASE + signal.SIGKILL
ChecklistKind = Literal["node_kill", "partition", "corruption"]
"""Faults of the production checklist: a killed host, a cut network, a damaged checkpoint."""
Place = Literal["disk", "bucket", "hosts", "vms"]
"""Where a run is: under one supervisor on a disk or in an emulated bucket; `hosts`: on a disk, with
a supervisor for each host, which needs two workers or more; `vms`: `launch gce` on emulated VMs."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One kind of fault, and the limits of its recovery."""

    name: str
    injects: str
    promise: str
    """The scenario's own promise, besides the promises of every run (verdict.py)."""
    ends: frozenset[int | None] = frozenset()
    """Exits of the attempt that the fault may end; None: it leaves no stop record. Empty: the fault
    ends no attempt."""
    lost_intervals: int = 0
    """Most steps that are computed again, in save intervals; 0: no step is lost."""
    at_save: bool = False
    """Whether it is injected after a step that is saved."""
    damages: bool = False
    """Whether the newest step must be found damaged, and an older one restored."""
    is_alone: bool = False
    """Whether a run has no second fault: it needs settings of its own, or another directory."""
    place: Place = "disk"
    """Where its run is."""
    after_save: bool = False
    """Whether it is injected after the step that follows a saved one: two steps are left until the
    next save."""
    cpu_only: bool = False
    """Whether it needs devices that are CPUs."""
    min_devices: int = 1
    """Fewest devices of all workers."""
    min_devices_per_host: int = 1
    """Fewest devices of each worker."""
    min_hosts: int = 1
    """Fewest workers."""
    at_step: int | None = None
    """The step after which it is injected; None: the schedule decides."""
    has_own_oracle: bool = False
    """Whether its run has another length, so that it is compared with one without faults alone."""
    has_fake_gpus: bool = False
    """Whether a fake of NVIDIA's library is in its run, for the health guard."""
    settings: tuple[str, ...] = ()
    """Overrides of its run, which is alone then."""
    is_default: bool = True
    """Whether it is in the default schedule; else by its name or `--all`."""
    rows: tuple[str, ...] = ()
    """Rows of the table of faults (faults.py) whose response it needs."""
    checklist_kind: ChecklistKind | None = None
    """Which item of `jaxres doctor`'s checklist it is a test of."""

    @property
    def is_emulated(self) -> bool:
        """Whether an emulated service is in its run: a bucket, VMs, a proxy or a fake library."""
        return self.has_fake_gpus or self.place != "disk"


NOTICE_ENDS: frozenset[int | None] = frozenset({ExitCode.PREEMPTED})
NO_RECORD: frozenset[int | None] = frozenset({None})


def _hooks(target: str, *, every_steps: int = 1) -> str:
    """Returns the setting of a run with another hook behind the one that holds it."""
    fields = f"every_steps: {every_steps}, timeout_seconds: 86400"
    hooks = (f"{{target: '{each}', {fields}}}" for each in (break_hook.TARGET, target))
    return f"hooks=[{', '.join(hooks)}]"


EDIT_SETTING = _hooks(array_edit_hook.TARGET)
"""Setting of a run whose parameters are edited while it is held."""
WORKER_SETTING = _hooks(WORKER_HOOK)
"""Setting of a run in whose workers a fault is planted."""
SPIKE_STEPS = 2
SPIKE_SETTING = (
    "guards.rollback={loss_factor: 1.05, loss_deviations: 3, warmup_steps: 3, max_rollbacks: 3, "
    f"patience_steps: {SPIKE_STEPS}}}"
)
"""Setting of a run that is to find a high loss after SPIKE_STEPS steps, within its few steps."""
SLOW_FROM, SLOW_STEPS = 32, 100
"""The step after which a host is slow, and the steps of its run: the usual time is known from 20
measured steps, and a host is named after 8 records of 5 steps or more. No step is measured beside a
hook or a save, nor are the first ten."""
SLOW_SETTINGS = (
    f"train.steps={SLOW_STEPS}",
    "checkpoint.when={kind: steps, every_steps: 1000}",
    "evaluation.every_steps=0",
    "guards.throughput={min_seconds: 0, window_steps: 5, drop: 0.3}",
    _hooks(WORKER_HOOK, every_steps=SLOW_FROM),
)
"""Settings of a run that is to name a slow host within its steps."""
LOOP_ATTEMPTS = 2
"""restart.max_attempts_without_commit of a run in a crash loop."""
VM_LOST: frozenset[int | None] = NO_RECORD | NOTICE_ENDS | {ExitCode.PEER_LOST}
"""Ends of an attempt that loses a VM: its supervisor records none, the launcher PREEMPTED, other
hosts' supervisors PEER_LOST."""
STATE_LOST: frozenset[int | None] = VM_LOST | {SIGNAL_BASE + signal.SIGTERM}
"""As VM_LOST; or the agent of the VM ends it, once it reads a state that does not have the VM."""
ALL = (
    Scenario(
        name="worker-kill",
        injects="SIGKILL to a worker between two steps",
        promise="the supervisor restarts it; at most a save interval is lost",
        ends=frozenset({KILLED}),
        lost_intervals=1,
        checklist_kind="node_kill",
        rows=("crash",),
    ),
    Scenario(
        name="notice",
        injects="SIGTERM to the supervisor, as before a preemption; then the same command",
        promise="the run saves and exits with PREEMPTED; no step is lost",
        ends=NOTICE_ENDS,
        rows=("preemption",),
    ),
    Scenario(
        name="hang",
        injects="SIGSTOP to a worker",
        promise="the watchdog kills it within deadlines.hook_seconds (set to 5)",
        ends=frozenset({ExitCode.HUNG}),
        lost_intervals=2,  # It does not wait for the commit of the save in flight.
        is_alone=True,
        rows=("hang",),
    ),
    Scenario(
        name="supervisor-kill",
        injects="SIGKILL to the supervisor; then the same command",
        promise="no worker outlives it; the command resumes; at most a save interval is lost",
        ends=frozenset({None}),
        lost_intervals=1,
        checklist_kind="node_kill",
        rows=("crash",),
    ),
    Scenario(
        name="kill-in-save",
        injects="SIGKILL to the worker of host 0 while a save is written",
        promise="the unfinished save is never restored, and deleted",
        ends=frozenset({KILLED}),
        lost_intervals=2,
        at_save=True,
        rows=("crash",),
    ),
    Scenario(
        name="bit-flip",
        injects="flips a bit of an array in the newest checkpoint, while the run is stopped",
        promise="the damage is found and recorded; the newest whole step is restored",
        ends=NOTICE_ENDS,
        lost_intervals=1,
        damages=True,
        checklist_kind="corruption",
        rows=("damaged_checkpoint",),
    ),
    Scenario(
        name="lost-file",
        injects="deletes a data file of the newest checkpoint, while the run is stopped",
        promise="the damage is found and recorded; the newest whole step is restored",
        ends=NOTICE_ENDS,
        lost_intervals=1,
        damages=True,
        checklist_kind="corruption",
        rows=("damaged_checkpoint",),
    ),
    Scenario(
        name="torn-line",
        injects="half a line at the end of metrics and events, while the run is stopped",
        promise="no other line is lost or damaged; the run resumes",
        ends=NOTICE_ENDS,
    ),
    Scenario(
        name="region-loss",
        injects="deletes the run directory of a killed run that has a replica",
        promise="the same command resumes in the replica; prints RPO (steps) and RTO (seconds)",
        ends=frozenset({None}),
        lost_intervals=1,  # It waits until the replica has the newest commit.
        is_alone=True,
    ),
    Scenario(
        name="stop",
        injects="Ctrl-C, or a file `stop` in the run directory; then the same command",
        promise="the run saves and exits with STOPPED; the command resumes; no step is lost",
        ends=frozenset({ExitCode.STOPPED}),
        rows=("operators_stop",),
    ),
    Scenario(
        name="zombie",
        injects="SIGSTOP to the supervisor, the same command, SIGCONT once that one trains",
        promise="the old supervisor exits with FENCED and changes nothing",
        ends=NO_RECORD,
        lost_intervals=1,
        rows=("zombie",),
    ),
    Scenario(
        name="lost-log",
        injects="deletes the run log, while the run is stopped",
        promise="a start is refused (85); `checkpoints adopt` rebuilds the log; no step is lost",
        ends=NO_RECORD,  # The copy in the newest checkpoint is older than the stop record.
        rows=("lost_log",),
    ),
    Scenario(
        name="full-disk",
        injects="no file as large as those of a save can be written, until a save has failed",
        promise="the failed save is reported; training continues; the next save is committed",
        at_save=True,
        is_alone=True,  # A step of the oracle is not committed.
        rows=("storage_unavailable",),
    ),
    Scenario(
        name="storage-outage",
        injects="the run is in a bucket, which refuses every request while a save is written",
        promise="training continues; the save is tried again and committed",
        at_save=True,
        place="bucket",
        rows=("storage_unavailable",),
    ),
    Scenario(
        name="bucket-flip",
        injects="flips a bit of the newest checkpoint in a bucket, while the run is stopped",
        promise="the damage is found and recorded; the newest whole step is restored",
        ends=NOTICE_ENDS,
        lost_intervals=1,
        damages=True,
        place="bucket",
        rows=("damaged_checkpoint",),
        checklist_kind="corruption",
    ),
    Scenario(
        name="slow-storage",
        injects="the run is in a bucket whose answers come late while a save is written",
        promise="training continues; the save is committed",
        at_save=True,
        place="bucket",
        is_default=False,
    ),
    Scenario(
        name="damaged-cache",
        injects="cuts every cached compiled program in half, while the run is stopped",
        promise="the run compiles again and resumes; no step is lost",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,  # It compiles twice.
    ),
    Scenario(
        name="damaged-data",
        injects="flips a bit in each block of the cached corpus, while the run is stopped",
        promise="the damage is found at the first read; the corpus is built again; no step is lost",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,  # It builds the corpus twice.
        rows=("damaged_data",),
    ),
    Scenario(
        name="partition",
        injects="cuts the connection between the supervisors of two hosts; then the same commands",
        promise="every supervisor exits with PEER_LOST; at most a save interval is lost",
        ends=frozenset({ExitCode.PEER_LOST}),
        lost_intervals=1,
        place="hosts",
        rows=("peer_lost",),
        checklist_kind="partition",
    ),
    Scenario(
        name="peer-lost",
        injects="SIGKILL to the supervisor of one host; then the same commands",
        promise="the other supervisors exit with PEER_LOST; at most a save interval is lost",
        ends=frozenset({ExitCode.PEER_LOST, None}),  # Without host 0 there is no record.
        lost_intervals=1,
        place="hosts",
        rows=("peer_lost",),
        checklist_kind="node_kill",
    ),
    Scenario(
        name="slow-network",
        injects="what the supervisors send comes late while a save is written",
        promise="no host is taken for lost; the save is committed",
        at_save=True,
        place="hosts",
    ),
    Scenario(
        name="bad-config",
        injects="the command with an unknown key, and with another seed, while the run is stopped",
        promise="each exits with CONFIG and changes no byte of the run directory; then it resumes",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,
        rows=("bad_config",),
    ),
    Scenario(
        name="nan-step",
        injects="the parameters overflow for one step; SIGKILL to a worker two steps later",
        promise="the step is masked and logged, and the next loss is finite; nothing of it is kept",
        ends=frozenset({KILLED}),
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        after_save=True,
        cpu_only=True,
        settings=(EDIT_SETTING,),
        rows=("nonfinite_update",),
    ),
    Scenario(
        name="nan-state",
        injects="a number of each parameter becomes NaN; the same command once the run has ended",
        promise="the run exits with DIVERGED and saves nothing of it; the command resumes",
        ends=frozenset({ExitCode.DIVERGED}),
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        after_save=True,
        cpu_only=True,
        settings=(EDIT_SETTING,),
        rows=("diverged",),
    ),
    Scenario(
        name="crash-loop",
        injects="SIGKILL to a worker after the same step in each attempt; then the same command",
        promise="the supervisor gives up with NO_PROGRESS; the command resumes",
        ends=frozenset({KILLED}),
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        settings=(f"restart.max_attempts_without_commit={LOOP_ATTEMPTS}",),
        rows=("crash_loop",),
    ),
    Scenario(
        name="flipped-copy",
        injects="flips a bit of one device's copy of a parameter; then `hosts --forget`",
        promise="the run exits with UNHEALTHY and saves nothing of it; the command resumes",
        ends=frozenset({ExitCode.UNHEALTHY}),
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        cpu_only=True,
        min_devices=2,
        settings=(EDIT_SETTING, "guards.corruption={every_steps: 1000}"),  # Before each save.
        rows=("silent_corruption",),
    ),
    Scenario(
        name="missing-device",
        injects="the command on one device less of each worker, while the run is stopped",
        promise="it exits with UNHEALTHY and does not train; with all devices it resumes",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,
        cpu_only=True,
        min_devices_per_host=2,
        rows=("missing_device",),
    ),
    Scenario(
        name="bad-record",
        injects="a token of the cached corpus is out of range, with digests that fit",
        promise="its row is recorded as a skip and left out; every other sample is trained on once",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,  # It builds the corpus once more.
        after_save=True,
        settings=("guards.bad_records={max: 10}",),
        rows=("bad_record",),
    ),
    Scenario(
        name="spike",
        injects="every parameter is multiplied by 100",
        promise="the run rolls back to before it, and leaves out the rows of the high losses",
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        after_save=True,
        cpu_only=True,
        settings=(EDIT_SETTING, SPIKE_SETTING),
        rows=("loss_spike",),
    ),
    Scenario(
        name="out-of-memory",
        injects="a worker allocates more than there is after the same step in each attempt; then "
        "the same command",
        promise="the command exits with OUT_OF_MEMORY and names settings; the command resumes",
        ends=frozenset({ExitCode.OUT_OF_MEMORY}),
        lost_intervals=1,
        is_alone=True,
        is_default=False,
        after_save=True,
        settings=(WORKER_SETTING,),
        rows=("out_of_memory",),
    ),
    Scenario(
        name="unhealthy-device",
        injects="a GPU of a fake library has a row of memory to remap; then `hosts --forget`",
        promise="the run saves and exits with UNHEALTHY; on a healthy GPU the command resumes",
        ends=frozenset({ExitCode.UNHEALTHY}),
        is_alone=True,
        is_default=False,
        after_save=True,
        cpu_only=True,  # XLA and NCCL would load the fake as well.
        has_fake_gpus=True,
        settings=("hardware.health={poll_seconds: 0.2}",),
        rows=("unhealthy_device",),
    ),
    Scenario(
        name="failed-preflight",
        injects="the command on a device whose products are wrong, while the run is stopped",
        promise="it exits with UNHEALTHY and does not train; on a sound device it resumes",
        ends=NOTICE_ENDS,
        is_alone=True,
        is_default=False,
        settings=("hardware.preflight=quick",),
        rows=("failed_preflight",),
    ),
    Scenario(
        name="straggler",
        injects="a host sleeps in each step, in a longer run of several hosts",
        promise="that host, and no other, is named; training continues",
        is_alone=True,
        is_default=False,
        min_hosts=2,
        at_step=SLOW_FROM,
        has_own_oracle=True,
        settings=SLOW_SETTINGS,
        rows=("straggler",),
    ),
    Scenario(
        name="vm-lost",
        injects="every process of a VM ends, and the Compute API goes on to list it as running",
        promise="`launch gce` replaces the VM; at most a save interval is lost",
        ends=VM_LOST,
        lost_intervals=1,
        place="vms",
        is_default=False,
        rows=("host_lost",),
        checklist_kind="node_kill",
    ),
    Scenario(
        name="stockout",
        injects="a VM is preempted without a notice, and its capacity option has no other one",
        promise="`launch gce` takes the next option; at most a save interval is lost",
        ends=VM_LOST,
        lost_intervals=1,
        place="vms",
        is_default=False,
        rows=("no_capacity",),
    ),
    Scenario(
        name="launcher-kill",
        injects="SIGKILL to `launch gce up`; then the same command",
        promise="it adopts the attempt, which goes on; no step is lost, no VM is created",
        place="vms",
        is_default=False,
        rows=("launcher_lost",),
    ),
    Scenario(
        name="launch-state-lost",
        injects="SIGKILL to `launch gce up`, the desired state is deleted; then the same command",
        promise="it deletes the VMs, then creates others; at most a save interval is lost",
        ends=STATE_LOST,
        lost_intervals=1,
        place="vms",
        is_default=False,
        rows=("launch_state_lost",),
    ),
)
BY_NAME = {scenario.name: scenario for scenario in ALL}
DEFAULT = tuple(scenario.name for scenario in ALL if scenario.is_default)
"""The scenarios of a schedule without names."""
