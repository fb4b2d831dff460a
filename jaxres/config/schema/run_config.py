"""The schema of a run's configuration; each field's docstring has its unit and source.

Every field is a *trajectory* key (it changes what is computed) unless `free()` declares it
(topology, intervals, retention, telemetry, limits). Defaults live in this folder and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jaxres.config.schema.alerts import AlertsSection
from jaxres.config.schema.base import (
    MOST_FLOAT,
    Dimension,
    LocalPath,
    NonNegativeInt,
    RunRoot,
    Section,
    Seed,
    form,
    free,
    later,
)
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.config.schema.data import DataSection
from jaxres.config.schema.hardware import HardwareSection
from jaxres.config.schema.model import GptModel, ModelSection
from jaxres.config.schema.optimizer import AdamwOptimizer, Optimizer
from jaxres.config.schema.program import ProgramSection
from jaxres.config.schema.supervision import (
    DeadlinesSection,
    HostsSection,
    LaunchSection,
    PreemptionSection,
    RestartSection,
)
from jaxres.config.schema.telemetry import TelemetrySection
from jaxres.config.schema.training import (
    FromSeed,
    GuardsSection,
    HookSection,
    InitFrom,
    LoraSection,
    LossScaleSection,
)

Line = Annotated[str, form(r"[^\x00-\x1f]{1,200}", "one line of 1 to 200 characters")]
"""Text on one line."""


class RunSection(Section):
    """Run directory and seed."""

    dir: RunRoot | None = free(None)
    """Run directory, or gs://BUCKET/FOLDER; `~` is the home folder.

    Default: runs/<config name>-<first 8 of the trajectory digest>.
    """
    name: Line | None = free(None)
    """Name of the run for people, on one line."""
    tags: tuple[Line, ...] = free(())
    """Short texts by which `jaxres runs --tag` finds the run."""
    must_exist: bool = free(False)
    """Whether a start is refused (78) if the run directory holds no run.

    Set it after the first start: a disk that is not mounted then starts no second run at step 0."""
    seed: Seed = 0
    """Seed of parameters, dropout and data order."""
    guarantee: Literal["any", "statistical", "bitwise"] = free("any")
    """Least guarantee level of a start; one with a lower level is refused (78).

    bitwise: code and all that decides rounding are those of the attempts before."""
    determinism: Literal["fast", "bitwise"] = free("fast")
    """`bitwise`: on a GPU only kernels whose results are equal bit for bit in every execution.

    Adds `--xla_gpu_deterministic_ops=true` to XLA_FLAGS, which also picks kernels without timing
    them, so that a replaced machine of the same kind picks the same ones. Slower;
    docs/benchmarks.md has the cost. Without effect on a CPU."""


class TrainSection(Section):
    """Length of the run and size of its batches."""

    steps: Annotated[int, Field(gt=0, le=2**31 - 1)]  # Counted in 32 bits.
    """Steps (batches) of the whole run. May grow if the schedule has its own horizon."""
    global_batch_size: Dimension = 24
    """Rows per step, over all devices and hosts."""
    microbatches: Dimension = free(1)
    """Parts into which a step's batch is split (gradient accumulation); more parts, less memory."""
    max_rows_per_device: Dimension | None = free(None)
    """Most rows that a device computes at once; null: no limit.

    On fewer devices the batch is split into more parts than train.microbatches, and the global
    batch stays the same."""
    reduction: Literal["fast", "invariant"] = "fast"
    """invariant: the same bits on any number of devices and hosts.

    Each device then holds all parameters and gradients during a step (docs/many-hosts.md)."""
    virtual_shards: Dimension = later(8)
    """Parts of a step's batch that reduction=invariant computes and adds in a fixed order.

    A power of two; mesh.data x mesh.fsdp divides it."""
    loss_scale: LossScaleSection = LossScaleSection()
    """Scale of the loss, which keeps gradients within float16's range."""


MeshAxis = Annotated[int, Field(ge=-1, le=2**24)]


class MeshSection(Section):
    """Sizes of the axes of the device mesh."""

    data: MeshAxis | None = free(None)
    """Devices over which the batch is split; -1: all remaining devices.

    Default: -1 unless another axis is -1, else 1."""
    fsdp: MeshAxis = free(1)
    """Devices over which batch and state are split; -1: all remaining devices."""
    tensor: MeshAxis = free(1)
    """Devices over which matrix products are split; -1: all remaining devices."""

    def sizes(self) -> dict[str, int]:
        """Returns the configured size of every axis; in a checked config at most one is -1."""
        others = {"fsdp": self.fsdp, "tensor": self.tensor}
        default = 1 if -1 in others.values() else -1
        return {"data": default if self.data is None else self.data} | others


class EvaluationSection(Section):
    """Evaluation on held-out data during training."""

    every_steps: NonNegativeInt = free(0)
    """Steps between evaluations on held-out data; 0: no evaluation."""
    batches: Dimension = free(8)
    """Held-out batches (of train.global_batch_size rows) per evaluation, always the first ones."""


XlaOption = Annotated[
    str,
    form(r"xla_[a-z0-9_]{1,120}", "an option of XLA such as xla_gpu_autotune_level, without --"),
]

XlaInteger = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""XLA has no longer ones."""
XlaFloat = Annotated[float, Field(ge=-MOST_FLOAT, le=MOST_FLOAT)]


class CompileSection(Section):
    """How the steps are compiled, and the caches of compiled programs."""

    profile: Literal["auto", "none"] = free("auto")
    """auto: on several CUDA GPUs, options of XLA by which collectives overlap with computations.

    The list is in docs/benchmarks.md. Without effect on one GPU and on CPUs."""
    xla_options: dict[XlaOption, bool | XlaInteger | XlaFloat | str] = free({})
    """Further options of XLA for the compiled steps, as {xla_gpu_autotune_level: 2}.

    They replace options of the profile. Options in XLA_FLAGS win over both."""

    cache_dir: LocalPath | None = free(Path("~/.cache/jaxres/xla"))
    """Folder of compiled programs on each host, shared by the runs of one account; null: none.

    Its subfolders must be usable by this account only, as compiled programs are machine code."""
    keep_programs: NonNegativeInt = free(128)
    """Compiled steps kept in the folder for restarts, of all runs; 0: neither kept nor loaded.

    Each number of hosts or devices takes up to four."""


class RunConfig(Section):
    """The whole configuration of a run: one field for each section."""

    run: RunSection = RunSection()
    """Run directory and seed."""
    program: ProgramSection | None = later(None)
    """A command in place of the trainer, with which data, model, optimizer and train are left out.
    """
    data: DataSection
    """Source, tokenizer, row length and held-out split."""
    model: ModelSection = GptModel()
    """Architecture of the model."""
    init_from: InitFrom = FromSeed()
    """Initial parameters of a new run; optimizer state and step start from zero."""
    lora: LoraSection | None = later(None)
    """Adapters of low rank; the other parameters are frozen. null: all are trained."""
    optimizer: Optimizer = AdamwOptimizer()
    """Optimizer and learning rate."""
    train: TrainSection
    """Length of the run and size of its batches."""
    mesh: MeshSection = MeshSection()
    """Devices along each mesh axis; the product must be the number of devices."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saves and retention of checkpoints."""
    guards: GuardsSection = GuardsSection()
    """Guards against non-finite steps, gradient spikes, high losses and bad records."""
    evaluation: EvaluationSection = EvaluationSection()
    """Evaluation on held-out data."""
    hooks: tuple[HookSection, ...] = free(())
    """Functions of yours that look at the run, as in [{target: my:look, every_steps: 100}]."""
    telemetry: TelemetrySection = TelemetrySection()
    """Console output, TensorBoard, trackers, metrics for Prometheus and the text sample."""
    deadlines: DeadlinesSection = DeadlinesSection()
    """Longest time without progress in each phase, after which the attempt ends as hung (80)."""
    hosts: HostsSection = HostsSection()
    """Rendezvous of the hosts of a job, and detection of a lost host."""
    preemption: PreemptionSection = PreemptionSection()
    """Sources of preemption notices, and the time that each leaves."""
    hardware: HardwareSection = HardwareSection()
    """Watch over the machines: faults of their GPUs."""
    restart: RestartSection = RestartSection()
    """Restart policy of `launch`: budgets and backoff."""
    launch: LaunchSection = LaunchSection()
    """Limits on time and cost, and the VMs of `launch gce`."""
    compilation: CompileSection = CompileSection()
    """Options of the compiler, and caches of compiled programs."""
    alerts: AlertsSection = AlertsSection()
    """Webhooks that report incidents of a supervised run: restarts, give-ups, its end."""

    @property
    def last_step(self) -> int | None:
        """The last step of the run; None: a program decides when it is done."""
        return None if self.program is not None else self.train.steps
