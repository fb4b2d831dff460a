"""Schema of alerts, preemption notices, the restart policy, and policies of saves and retention.

All keys are free: they may change at any restart. Secrets of alerts are in environment variables,
never in a config.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from jaxres.config.schema.base import (
    MOST_COUNT,
    Fraction,
    Hours,
    Minutes,
    NonNegativeHours,
    NonNegativeInt,
    NonNegativeSeconds,
    PositiveFloat,
    PositiveInt,
    RunRoot,
    Seconds,
    Section,
    form,
    free,
)
from jaxres.config.schema.gce import GceSection

KINDS = (
    *("restarted", "supervisor_restarted", "gave_up", "commits_stalled", "commits_resumed"),
    *("rollback", "saves_failing", "saves_recovered", "preempted", "finished"),
    *("replica_behind", "replica_caught_up", "hardware_fault"),
    "checkpoint_damaged",
    *("straggler", "straggler_recovered", "throughput_dropped", "throughput_recovered"),
    *("vm_lost", "no_capacity", "capacity_found", "spend_exceeded", "attempt_failed"),
    *("masked_steps", "masked_steps_recovered"),
)
"""Kinds of incidents."""
NOT_A_NAME = "not_a_variable"
"""Type of this validation error. Its input may be a secret, so no message includes it."""


def _variable(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        return text
    raise PydanticCustomError(
        NOT_A_NAME,
        "must be the name of an environment variable, such as SLACK_URL; do not put the "
        "secret itself into a config",
    )


Variable = Annotated[str, AfterValidator(_variable)]


class SlackTarget(Section):
    """Alert target: a Slack incoming webhook."""

    kind: Literal["slack"] = "slack"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the incoming webhook's URL."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent (docs/watch.md); null: all."""


class PagerdutyTarget(Section):
    """Alert target: a PagerDuty service, by Events API v2."""

    kind: Literal["pagerduty"] = "pagerduty"
    key_env: Variable = free(...)
    """Name of the environment variable that holds the integration (routing) key."""
    url: str = free("https://events.pagerduty.com/v2/enqueue")
    """Address of the Events API v2."""
    kinds: tuple[str, ...] | None = free(("gave_up", "attempt_failed", "commits_stalled"))
    """Kinds of incidents that page; null: all. `commits_resumed` and `finished` always resolve."""


class GenericTarget(Section):
    """Alert target: a webhook that receives JSON."""

    kind: Literal["generic"] = "generic"
    url_env: Variable = free(...)
    """Name of the environment variable that holds the URL, which may contain a secret."""
    kinds: tuple[str, ...] | None = free(None)
    """Kinds of incidents that are sent (docs/watch.md); null: all."""


AlertTarget = Annotated[SlackTarget | PagerdutyTarget | GenericTarget, Field(discriminator="kind")]


class AlertsSection(Section):
    """Alerts about incidents of a supervised run."""

    targets: tuple[AlertTarget, ...] = free(())
    """Webhooks, as in [{kind: slack, url_env: SLACK_URL}]."""
    no_commit_minutes: Minutes | None = free(120.0)
    """Minutes without a new committed step after which an alert is sent; null: never."""
    masked_steps: PositiveInt | None = free(10)
    """Masked steps within guards.skip_window_steps beyond which an alert is sent; null: never."""
    no_capacity_minutes: Minutes | None = free(60.0)
    """Minutes for which VMs of `launch gce` are lacking before an alert is sent; null: never."""
    spend_dollars: PositiveFloat | None = free(None)
    """Dollars spent by `launch gce` beyond which an alert is sent; null: never."""


def variable(target: SlackTarget | PagerdutyTarget | GenericTarget) -> str:
    """Returns the name of the environment variable that holds the target's secret."""
    return target.key_env if isinstance(target, PagerdutyTarget) else target.url_env


class WandbTracker(Section):
    """Experiment tracker: Weights & Biases; the key is in the environment or in ~/.netrc."""

    kind: Literal["wandb"] = "wandb"
    project: Annotated[str, Field(min_length=1)] = free(...)
    """Project of the run."""
    entity: str | None = free(None)
    """Team or user; null: the account's default."""
    mode: Literal["online", "offline"] = free("online")
    """offline: writes files in RUN_DIR/trackers/wandb for `wandb sync`."""
    every_seconds: Seconds = free(5.0)
    """Seconds between two looks at the run's files."""


TrackingUri = Annotated[
    str,
    form(
        r"databricks|(?!file:)[a-z][a-z0-9+.-]*://.+",
        "an address such as http://HOST:5000, or a database such as sqlite:////shared/mlflow.db "
        "(MLflow 3 writes into no folder)",
    ),
]


class MlflowTracker(Section):
    """Experiment tracker: an MLflow tracking server."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: TrackingUri | None = free(None)
    """Address, as in http://HOST:5000; null: the variable MLFLOW_TRACKING_URI."""
    experiment: Annotated[str, Field(min_length=1)] = free("jaxres")
    """Experiment of the run; it is made if it does not exist."""
    every_seconds: Seconds = free(5.0)
    """Seconds between two looks at the run's files."""


TrackerSection = Annotated[WandbTracker | MlflowTracker, Field(discriminator="kind")]


def _listening(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("must be HOST:PORT, as 127.0.0.1:19400, 0.0.0.0:19400 or [::1]:19400")
    return text


class PrometheusSection(Section):
    """Exporter of metrics for Prometheus in each supervisor (docs/watch.md)."""

    address: Annotated[str, AfterValidator(_listening)] = free("127.0.0.1:19400")
    """Address HOST:PORT on which /metrics is served to everyone who can connect."""


class PreemptionSection(Section):
    """Sources of preemption notices, and the time that each leaves."""

    metadata: Literal["auto", "off"] = free("auto")
    """Whether to read preemption notices from GCE's metadata server; off: only signals.

    auto: on a GCE VM, or if GCE_METADATA_HOST is set."""
    notice_seconds: Seconds = free(30.0)
    """Seconds that a Spot VM keeps running after the metadata value `preempted`.

    120 if the VM was created with a preemptionNoticeDuration of 120 s."""
    maintenance_seconds: Seconds | None = free(None)
    """Seconds that a VM keeps running after a maintenance event; null: unknown, save at once.

    Used if the metadata key upcoming-maintenance has no time (GPU VMs: 3600, others: 60)."""
    sigterm_seconds: Seconds | None = free(None)
    """Seconds between SIGTERM and SIGKILL; null: unknown, save at once.

    Kubernetes: terminationGracePeriodSeconds; Slurm: KillWait."""
    margin_seconds: NonNegativeSeconds = free(5.0)
    """Safety margin, subtracted from the seconds of every notice."""


HealthAction = Literal["warn", "save", "leave"]
"""What follows a fault: nothing; a save and exit 82; exit 82 at once, without a save."""


class HealthSection(Section):
    """Health guard of each host (docs/hardware.md), and what follows each class of faults.

    warn: training continues; save: saves the last finished step and exits with 82; leave: exits
    with 82 at once, and saves nothing.
    """

    poll_seconds: Seconds = free(10.0)
    """Seconds between two readings of all GPUs; Xid errors are received at once."""
    answer_seconds: Seconds = free(60.0)
    """Longest time that NVIDIA's library may take to answer."""
    lost: HealthAction = free("leave")
    """The driver has lost a GPU, or asks for its reset."""
    xid: HealthAction = free("leave")
    """Xid errors after which a GPU has to be reset; those of a program are warnings only."""
    ecc: HealthAction = free("leave")
    """Uncorrectable memory errors: the state may be wrong, so it is not saved."""
    row_remap: HealthAction = free("save")
    """The remapping of a row of memory is pending (until a reset of the GPU) or has failed."""
    thermal: HealthAction = free("warn")
    """Heat, the power supply or a fault slows the clocks for 5 minutes."""
    link: HealthAction = free("warn")
    """More than 100 errors of PCIe or NVLink in a minute, which the link repeats."""
    silent: HealthAction = free("warn")
    """NVIDIA's library has not answered for answer_seconds."""
    disk_free_gb: PositiveFloat | None = free(5.0)
    """Warns if the disk of the run's local files has fewer GB (1e9 bytes) left; null: never."""


class HardwareSection(Section):
    """Watch over the machines of a run, and tests of them."""

    preflight: Literal["auto", "off", "quick", "full"] = free("auto")
    """Tests of devices, links and disk before an attempt trains; a wrong answer ends it with 82.

    quick takes seconds, full minutes (most of each device's memory); auto: quick on accelerators,
    off on CPUs."""
    allow_fewer: bool = free(False)
    """Whether a host may train with fewer devices than are known to belong to it.

    false: it exits with 82, and is replaced or left out (docs/many-hosts.md)."""
    health: HealthSection | None = free(HealthSection())
    """Health guard of each host: GPUs of NVIDIA, memory, disk, clock, network; null: none."""


class RestartSection(Section):
    """Restart policy of a supervisor: budgets and backoff."""

    max_attempts_without_commit: PositiveInt = free(5)
    """Failures in a row without a new committed step, after which the supervisor gives up (84).

    Failures are crashes, exceptions, hangs and lost hosts. A new commit resets all budgets."""
    backoff_seconds: NonNegativeSeconds = free(1.0)
    """Wait after the first failure; doubled after each further one, up to 60 s.

    A new commit ends the doubling."""
    jitter: Fraction = free(0.25)
    """Largest random part of a wait, as a share of it, so that jobs restart at different times."""
    max_preemptions_without_commit: PositiveInt = free(100)
    """Most preemptions (75) in a row without a new committed step; restarts are immediate."""
    max_storage_attempts: PositiveInt = free(20)
    """Most storage failures (74) in a row without a new committed step."""
    storage_backoff_seconds: NonNegativeSeconds = free(30.0)
    """Wait after a storage failure; doubled after each further one, up to 600 s."""
    fork: bool = free(True)
    """Whether restarted workers are forked from the fork server, which takes some 100 MB.

    On VMs of `launch gce` their supervisor is started before, too. false: each is a new process."""


class LaunchSection(Section):
    """Limits on time and cost of `launch`, and the VMs of `launch gce`."""

    max_hours: Hours | None = free(None)
    """Hours after which the supervisor saves and exits (84); null: no limit.

    The time while the machine is suspended is included. A new supervisor starts from zero."""
    max_restarts_per_1000_steps: PositiveInt | None = free(None)
    """Most restarts, for any cause, per 1000 committed steps; one more ends the run (84)."""
    max_dollars: PositiveFloat | None = free(None)
    """Most dollars that the VMs may cost (84), by the prices of launch.gce.capacity_options."""
    gce: GceSection | None = free(None)
    """Section of `launch gce`; null: the run uses no VMs."""

    @property
    def dollars_per_host_hour(self) -> float | None:
        """The price of a VM in dollars per hour; None: none is given, or there are several."""
        options = () if self.gce is None else self.gce.capacity_options
        prices = {option.dollars_per_hour for option in options}
        return prices.pop() if len(prices) == 1 else None


class StepsWhen(Section):
    """Save policy: every so many steps."""

    kind: Literal["steps"] = "steps"
    every_steps: PositiveInt = free(1000)
    """Steps between saves."""


class SecondsWhen(Section):
    """Save policy: every so many seconds of training."""

    kind: Literal["seconds"] = "seconds"
    every_seconds: Seconds = free(600.0)
    """Seconds of training between saves.

    If a save is due while another is in flight, it starts when that one is committed."""


class ContinuousWhen(Section):
    """Save policy: one save after another."""

    kind: Literal["continuous"] = "continuous"
    """Starts a save as soon as the previous one is committed."""


class AutoWhen(Section):
    """Save policy: an interval computed from the costs of saves and failures."""

    kind: Literal["auto"] = "auto"
    """Computes the interval from measurements: it loses the least time to saves and failures."""
    mtbf_hours: PositiveFloat = free(24.0)
    """Expected hours of training between failures, before any are measured.

    It counts as one observed failure in that time; the measured failures of the run are added."""
    max_overhead: Annotated[float, Field(gt=0, le=1)] = free(0.05)
    """Largest share of the training time for which saves may block training."""


When = Annotated[
    StepsWhen | SecondsWhen | ContinuousWhen | AutoWhen,
    Field(discriminator="kind"),
]


def _absolute(path: Path) -> Path:
    if not path.expanduser().is_absolute():
        raise ValueError("must be an absolute path of a local folder")
    return path


class MemorySection(Section):
    """Tier of checkpoints in host memory: the newest two states, beside the committed steps."""

    every_steps: PositiveInt = free(10)
    """Steps between two states that are kept in host memory."""
    neighbor_copies: bool = free(False)
    """Whether the next host keeps a copy of each state, for a host that is lost with its memory.

    It takes as much memory again and the network between the hosts; no effect with one host."""
    folder: Annotated[Path, AfterValidator(_absolute)] = free(Path("/dev/shm"))
    """Existing folder for them on each host: shared memory, or a local SSD if they don't fit."""


class KeepSection(Section):
    """Retention policies; a step is kept if any of them names it."""

    last: Annotated[int, Field(ge=2, le=MOST_COUNT)] = free(3)
    """Number of newest steps that are kept; at least 2, because the newest one may be damaged."""
    hours: NonNegativeHours = free(0.0)
    """Keeps all steps committed within this many hours before the newest commit."""
    daily: NonNegativeInt = free(0)
    """Keeps the newest step of each day (UTC), for this many of the newest days with a step."""
    weekly: NonNegativeInt = free(0)
    """Keeps the newest step of each week, for this many of the newest weeks with a step."""
    every_steps: PositiveInt | None = free(None)
    """Keeps all steps that are a multiple of this, permanently; null: none."""
    best: NonNegativeInt = free(0)
    """Number of steps with the lowest held-out loss that are kept; needs evaluations."""


class ReplicaSection(Section):
    """A second place that gets a verified copy of each committed step and of the run log."""

    path: RunRoot = free(...)
    """Folder or gs://BUCKET/FOLDER of the replica; nothing else is in it."""
    max_mb_per_second: PositiveFloat | None = free(None)
    """Most MB (1e6 bytes) a second, those of the read-back included; null: no limit."""
    lag_minutes: Minutes | None = free(15.0)
    """Minutes that a committed step may be missing in the replica until it is an incident.

    null: never."""


class ScrubSection(Section):
    """Verification of committed steps in the background, while the run trains."""

    every_hours: Hours = free(24.0)
    """Hours after which a committed step is read again and compared with its manifest."""
    max_mb_per_second: PositiveFloat = free(20.0)
    """Most MB (1e6 bytes) that are read in a second."""
