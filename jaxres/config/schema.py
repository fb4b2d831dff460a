"""The run's configuration: frozen sections, each field with its unit and, where one exists, source.

Every field is a *trajectory* key (it changes what is computed) unless it is declared with `free()`
(topology, intervals, retention, telemetry, limits). Defaults live here and nowhere else.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt

from jaxres.config.base import Folder, PositiveFloat, Section, free
from jaxres.config.schema_operations import (
    AlertsSection,
    KeepSection,
    LaunchSection,
    PreemptionSection,
    RestartSection,
    StepsWhen,
    When,
)
from jaxres.config.schema_training import (
    AdamwOptimizer,
    FromSeed,
    GuardsSection,
    InitFrom,
    LossScaleSection,
    Optimizer,
)

Target = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class RunSection(Section):
    dir: Folder | None = free(None)
    """Run directory; also gs://BUCKET/FOLDER.

    Default: runs/<config name>-<first 8 of the trajectory digest>.
    """
    seed: NonNegativeInt = 0
    """Seed of parameters, dropout and data order."""


class TextSource(Section):
    kind: Literal["text"] = "text"
    path: str
    """Folder, file or glob of text files; `{stdlib}` stands for Python's standard library. Also
    gs://BUCKET/FOLDER, or one object: copied to data.cache_dir first."""
    include: tuple[str, ...] = ("**/*",)
    """Patterns below a folder, as in pathlib's glob."""
    exclude: tuple[str, ...] = ()
    """Patterns of relative paths to leave out; `*` also matches `/`, as in fnmatch."""


class TokensSource(Section):
    kind: Literal["tokens"] = "tokens"
    path: Folder
    """Folder with tokens.bin, offsets.npy and meta.json (docs/data.md has the format). Also
    gs://BUCKET/FOLDER: copied to data.cache_dir first."""


class CustomSource(Section):
    kind: Literal["custom"] = "custom"
    target: Target
    """`package.module:build`; called with `args`; the result has __len__ and __getitem__."""
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it.
    """Keyword arguments of the target."""


Source = Annotated[TextSource | TokensSource | CustomSource, Field(discriminator="kind")]


class BytesTokenizer(Section):
    kind: Literal["bytes"] = "bytes"
    """One token a byte (0..255), and 256 at the end of every document."""


class DataSection(Section):
    source: Source
    """Where the training text or rows come from."""
    tokenizer: BytesTokenizer = BytesTokenizer()
    """How text becomes tokens. Only `bytes` so far."""
    seq_len: PositiveInt = 256
    """Tokens a row."""
    heldout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the corpus, at its end, that training never touches and evaluation reads."""
    cache_dir: Path = free(Path("~/.cache/jaxres"))
    """Folder of tokenised corpora, and of copies from a bucket; `~` is the home folder."""
    prefetch_batches: PositiveInt = free(8)
    """Batches read ahead in the background; refilled when half of them are used."""
    timeout_seconds: PositiveFloat = free(300.0)
    """Longest wait for one batch before the run ends with an error."""


class GptModel(Section):
    kind: Literal["gpt"] = "gpt"
    num_layers: PositiveInt = 12
    """Decoder blocks."""
    d_model: PositiveInt = 768
    """Width of the residual stream."""
    num_heads: PositiveInt = 12
    """Query heads; must divide d_model into even head widths (RoPE)."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads; must divide num_heads. Default: num_heads. (GQA, arXiv 2305.13245)"""
    d_ff: PositiveInt | None = None
    """Width of the SwiGLU layer. Default: 8/3 d_model up to a multiple of 64. (arXiv 2002.05202)"""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding. Default: the tokenizer's, up to a multiple of 64."""
    tie_embeddings: bool = True
    """Whether the output layer reuses the embedding."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate after attention and feed-forward."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary angles. (arXiv 2104.09864)"""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm. (arXiv 1910.07467)"""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of activations and matrix products; weights, softmax and logits are float32. float16 has
    a loss scale (train.loss_scale)."""
    attention: Literal["auto", "xla", "cudnn"] = free("auto")
    """Attention kernel; auto: cudnn on GPU with bfloat16, else xla."""
    remat: Literal["none", "block"] = free("none")
    """block: recompute each block in the backward pass; less memory, about a third more work."""

    def tensor_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of mesh.tensor that split the heads evenly."""
        both = math.gcd(self.num_heads, self.num_kv_heads or self.num_heads)
        return tuple(n for n in range(1, both + 1) if both % n == 0)


class MlpModel(Section):
    kind: Literal["mlp"] = "mlp"
    num_layers: PositiveInt = 2
    """Hidden layers."""
    d_model: PositiveInt = 64
    """Width of embedding and hidden layers."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding. Default: the tokenizer's, up to a multiple of 64."""


class CustomModel(Section):
    kind: Literal["custom"] = "custom"
    target: Target
    """`package.module:build`; called with `args`, vocab_size and seq_len; returns models.Model."""
    args: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it.
    """Keyword arguments of the target."""


Model = Annotated[GptModel | MlpModel | CustomModel, Field(discriminator="kind")]


class TrainSection(Section):
    steps: PositiveInt
    """Steps (batches) of the whole run. May grow where the schedule has its own horizon."""
    global_batch_size: PositiveInt = 24
    """Rows a step, over all devices and hosts."""
    microbatches: PositiveInt = free(1)
    """Parts in which a step's batch is computed one after the other; more parts, less memory."""
    max_rows_per_device: PositiveInt | None = free(None)
    """Rows that a device computes at once at most: where fewer devices come back, the batch is cut
    into more parts than train.microbatches, and stays the same. null: no bound."""
    reduction: Literal["fast", "invariant"] = "fast"
    """invariant: gradients equal bit for bit on any device count (not built yet)."""
    loss_scale: LossScaleSection = LossScaleSection()
    """What keeps float16's gradients within its range."""


MeshAxis = Annotated[int, Field(ge=-1)]


class MeshSection(Section):
    data: MeshAxis | None = free(None)
    """Devices over which the batch is split; -1: all the rest, which is also the default unless
    another axis takes it."""
    fsdp: MeshAxis = free(1)
    """Devices over which batch and state are split; -1: all the rest."""
    tensor: MeshAxis = free(1)
    """Devices over which matrix products are split; -1: all the rest."""

    def sizes(self) -> dict[str, int]:
        """Returns the size asked for of every axis, at most one of them -1 in a checked config."""
        others = {"fsdp": self.fsdp, "tensor": self.tensor}
        default = 1 if -1 in others.values() else -1
        return {"data": default if self.data is None else self.data} | others


class CheckpointSection(Section):
    when: When = free(StepsWhen())
    """When to save; the last step is always saved."""
    save_every_steps: PositiveInt | None = free(None)
    """Short for when.kind=steps and when.every_steps: setting it selects that policy."""
    busy: Literal["wait", "skip"] = free("wait")
    """What becomes of a save by steps that is due while one is still being written: wait holds up
    training until that is over, but not for longer than twice what the longest save has taken (at
    least 5 s; 1 s after one that storage has refused): then, as with skip, it is left out. The
    other policies never let two meet."""
    keep: KeepSection = KeepSection()
    """What to keep: whatever any of these names, and what is pinned; the rest is pruned."""
    keep_last: PositiveInt | None = free(None)
    """Short for keep.last."""
    snapshot: Literal["auto", "copy", "device"] = free("auto")
    """What a save takes before training goes on. copy: the host's memory (on CPU the buffers
    themselves, which the next step then can't reuse); device: a copy on each device, brought to the
    host in the background; auto: device where there is room for it (on CPU always), else copy."""
    background_share: Annotated[float, Field(gt=0, le=1)] = free(1.0)
    """Share of its time for which a background thread digests a save and reads it back; less slows
    training less, and the save takes longer. The writing itself is Orbax's."""
    timeout_seconds: PositiveFloat = free(600.0)
    """Longest wait for one save to become durable."""
    max_failed_saves: PositiveInt = free(20)
    """Saves in a row that storage may refuse; with that many the run ends (74)."""


class EvaluationSection(Section):
    every_steps: NonNegativeInt = free(0)
    """Steps between evaluations on held-out data; 0: never."""
    batches: PositiveInt = free(8)
    """Held-out batches of train.global_batch_size rows an evaluation, the first ones always."""


class TelemetrySection(Section):
    log_every_seconds: PositiveFloat = free(10.0)
    """Seconds between plain progress lines where there is no terminal."""
    tensorboard: bool = free(False)
    """Whether RUN_DIR/tensorboard gets event files; needs `pip install 'jaxres[tensorboard]'`."""
    sample_prompt: str = free("def ")
    """Text that the sample at the end of the run continues."""
    sample_tokens: NonNegativeInt = free(0)
    """Length of the text sample at the end of the run; 0: none."""


class DeadlinesSection(Section):
    start_seconds: PositiveFloat = free(300.0)
    """Longest start-up step without progress: imports, devices, a part of the corpus."""
    restore_seconds: PositiveFloat = free(1800.0)
    """Longest restore of a checkpoint."""
    compile_seconds: PositiveFloat = free(1800.0)
    """Longest compilation, and longest of the first three steps of an attempt."""
    data_seconds: PositiveFloat = free(330.0)
    """Longest wait for a batch; more than data.timeout_seconds, which names the batch."""
    step_seconds: PositiveFloat = free(30.0)
    """Longest step, or 10 times the slowest of the last 50 steps where that is more."""
    evaluate_seconds: PositiveFloat = free(1800.0)
    """Longest evaluation, and longest text sample."""
    save_seconds: PositiveFloat = free(1800.0)
    """Longest blocking part of a save; more than twice checkpoint.timeout_seconds."""


class HostsSection(Section):
    join_seconds: PositiveFloat = free(300.0)
    """Longest wait, at the start of an attempt, until every host has come."""
    heartbeat_seconds: PositiveFloat = free(10.0)
    """A host that has not been heard of for so long is gone. Below 5, a busy machine looks dead."""


class CompileSection(Section):
    cache_dir: Path | None = free(Path("~/.cache/jaxres/xla"))
    """Folder of compiled programs that runs share (JAX's persistent cache); null: none."""
    keep_programs: NonNegativeInt = free(8)
    """Compiled steps that RUN_DIR/compiled keeps, so that a restart only loads them; two for each
    number of hosts or devices. 0: none is kept, none is loaded."""


class RunConfig(Section):
    run: RunSection = RunSection()
    """Where the run lives, and its seed."""
    data: DataSection
    """Rows, their order, and the held-out split."""
    model: Model = GptModel()
    """What is trained."""
    init_from: InitFrom = FromSeed()
    """Where the parameters of a new run come from; the optimizer and the step begin anew."""
    optimizer: Optimizer = AdamwOptimizer()
    """How it is trained."""
    train: TrainSection
    """How long, and in which batches."""
    mesh: MeshSection = MeshSection()
    """Devices by axis; the product must be their number."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When to save, and what to keep."""
    guards: GuardsSection = GuardsSection()
    """What is done about steps that are not as they should be."""
    evaluation: EvaluationSection = EvaluationSection()
    """Loss on held-out data."""
    telemetry: TelemetrySection = TelemetrySection()
    """What a person sees."""
    deadlines: DeadlinesSection = DeadlinesSection()
    """How long each phase may go on without progress before the run ends as hung (80)."""
    hosts: HostsSection = HostsSection()
    """How the hosts of a job find each other, and when one counts as gone."""
    preemption: PreemptionSection = PreemptionSection()
    """What the run is told of its machine's end, and how much time that leaves."""
    restart: RestartSection = RestartSection()
    """When `launch` tries again, and when it gives up."""
    launch: LaunchSection = LaunchSection()
    """Limits that protect a wallet."""
    compilation: CompileSection = CompileSection()
    """How steps are compiled."""
    alerts: AlertsSection = AlertsSection()
    """Who is told when a supervised run falls, comes back, gives up or ends."""
