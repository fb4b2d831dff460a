"""Checks that involve several configuration keys.

Only combinations that are impossible on every machine are refused here. What depends on the
devices, the data or the free disk space is checked once those are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from jaxres.config.errors import Problem, did_you_mean, show
from jaxres.config.gce_machine_types import region_of, shape_of
from jaxres.config.schema.alert_kinds import Kind
from jaxres.config.schema.alerts import PagerdutyTarget, variable
from jaxres.config.schema.checkpoint import EpochsWhen
from jaxres.config.schema.data import (
    HELDOUT,
    BytesTokenizer,
    CustomSource,
    FilesSource,
    ImagesSource,
    MixtureSource,
    NanogptSource,
    SingleSource,
    Source,
    TextSource,
    Tokenizer,
    TokensSource,
    single_sources,
)
from jaxres.config.schema.gce import CapacityOption, FlexStartOption, GceSection, PythonRuntime
from jaxres.config.schema.model import CustomModel, GptModel, MlpModel, VitModel
from jaxres.config.schema.optimizer import (
    AdamwOptimizer,
    CustomOptimizer,
    LionOptimizer,
    PiecewiseSchedule,
    SgdOptimizer,
)
from jaxres.config.schema.program import OWN_VARIABLES
from jaxres.config.schema.run_config import RunConfig, TrainSection
from jaxres.storage.path import SCHEME, is_remote, parse_path

SMALLEST_SHARE = 1 / 65_536
"""Smallest share of a source in a mixture: one row of a block (jaxres/data/mixture.py)."""
BYTES_VOCAB = 257
"""256 byte values and the end of a document."""


def check(config: RunConfig) -> list[Problem]:
    """Returns every problem of this combination of values."""
    if config.program is not None:
        return [*_program(config), *_alerts(config), *_gce(config)]
    return [
        *_numbers(config),
        *_batch(config),
        *_reduction(config),
        *_model(config),
        *_optimizer(config),
        *_mesh(config),
        *_time_limits(config),
        *_features(config),
        *_data(config),
        *_alerts(config),
        *_gce(config),
        *_compilation(config),
    ]


def _program(config: RunConfig) -> Iterator[Problem]:
    section = config.program
    assert section is not None
    if isinstance(config.checkpoint.when, EpochsWhen):
        text = "kind epochs: jaxres does not know the epochs of a program; give another kind"
        yield Problem("checkpoint.when", text, others=("program",))
    if not section.command:
        yield Problem("program.command", "is empty; give the program and its arguments")
    for name in sorted(set(OWN_VARIABLES) & set(section.env)):
        yield Problem(f"program.env.{name}", "is set by jaxres itself; remove it")
    names = {str(path) for path in section.files}
    if section.files_sha256 and set(section.files_sha256) != names:
        text = "has not the names of program.files; leave it out, jaxres computes it"
        yield Problem("program.files_sha256", text, others=("program.files",))


def _numbers(config: RunConfig) -> Iterator[Problem]:
    if config.lora is not None and not config.lora.targets:
        text = "is empty, so no parameter is trained; give patterns of matrices, or leave lora out"
        yield Problem("lora.targets", text)
    if math.frexp(config.train.loss_scale.first)[0] != 0.5:
        yield Problem("train.loss_scale.first", "must be a power of two, such as 65536")


def _compilation(config: RunConfig) -> Iterator[Problem]:
    for name in ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"):
        if name in config.compilation.xla_options:
            yield Problem(
                f"compilation.xla_options.{name}",
                "is set by run.determinism, on which the guarantee depends; remove it here",
                others=("run.determinism",),
            )


def _nearest(value: int, divisor: int) -> str:
    """Returns the multiples of a divisor around a value, as text."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def _batch(config: RunConfig) -> Iterator[Problem]:
    rows, parts = config.train.global_batch_size, config.train.microbatches
    if rows % parts:
        yield Problem(
            "train.global_batch_size",
            f"{rows} is not divisible by train.microbatches={parts}; try {_nearest(rows, parts)}",
            others=("train.microbatches",),
        )
    sizes = config.mesh.sizes()
    data, fsdp = sizes["data"], sizes["fsdp"]
    if data > 0 and fsdp > 0 and rows % (data * fsdp):
        yield Problem(
            "train.global_batch_size",
            f"{rows} is not divisible by mesh.data * mesh.fsdp = {data} * {fsdp}; "
            f"try {_nearest(rows, data * fsdp)}",
            others=("mesh.data", "mesh.fsdp"),
        )


def _reduction(config: RunConfig) -> Iterator[Problem]:
    train, mesh = config.train, config.mesh
    shards, rows, parts = train.virtual_shards, train.global_batch_size, train.microbatches
    if train.reduction == "fast":
        if shards != TrainSection.model_fields["virtual_shards"].default:
            yield Problem(
                "train.virtual_shards",
                "has no effect with train.reduction=fast; set invariant, or leave it out",
                others=("train.reduction",),
            )
        return
    if shards & (shards - 1):
        yield Problem("train.virtual_shards", f"must be a power of two, such as 8 (got {shards})")
    elif rows % shards or rows // shards % parts:
        yield Problem(
            "train.global_batch_size",
            f"{rows} is not divisible by train.virtual_shards * train.microbatches = {shards} * "
            f"{parts}; try {_nearest(rows, shards * parts)}",
            others=("train.virtual_shards", "train.microbatches"),
        )
    if mesh.tensor not in (1, -1):
        yield Problem(
            "mesh.tensor",
            "must be 1 with train.reduction=invariant: a split matrix product adds in another "
            "order. Use mesh.fsdp and mesh.data",
            others=("train.reduction",),
        )
    elementwise = AdamwOptimizer | LionOptimizer | SgdOptimizer
    if not isinstance(config.optimizer, elementwise):
        yield Problem(
            "optimizer.kind",
            f"{config.optimizer.kind} adds over whole arrays, in an order that depends on the "
            "devices; with train.reduction=invariant use adamw, lion or sgd",
            others=("train.reduction",),
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    model, sources = config.model, single_sources(config.data.source).values()
    if isinstance(model, GptModel):
        yield from _heads(model)
        yield from _positions(model, seq_len=config.data.seq_len)
        if model.attention == "cudnn" and model.compute_dtype != "bfloat16":
            yield Problem(
                "model.attention",
                f"cudnn needs model.compute_dtype=bfloat16 (it is {model.compute_dtype}); "
                "use auto or xla",
                others=("model.compute_dtype",),
            )
    if isinstance(model, VitModel):
        yield from _vit(model, sources)
    if isinstance(model, CustomModel | VitModel):
        return
    has_ids = CustomSource | TokensSource | NanogptSource | ImagesSource
    is_text = any(not isinstance(part, has_ids) for part in sources)
    is_bytes = is_text and isinstance(config.data.tokenizer, BytesTokenizer)
    if is_bytes and model.vocab_size is not None and model.vocab_size < BYTES_VOCAB:
        yield Problem(
            "model.vocab_size",
            f"{model.vocab_size} is smaller than the bytes tokenizer's {BYTES_VOCAB}; "
            "leave it out, or give at least that",
        )


def _heads(model: GptModel) -> Iterator[Problem]:
    width, heads, groups = model.d_model, model.num_heads, model.num_kv_heads
    if model.head_dim is not None and model.head_dim % 2 and model.positions == "rotary":
        yield Problem("model.head_dim", f"{model.head_dim} is odd, RoPE needs an even width")
    if model.head_dim is None and width % (heads if model.positions == "learned" else 2 * heads):
        is_odd = width % heads == 0
        reason = f"into an odd head width ({width // heads}), RoPE needs an even one"
        yield Problem(
            "model.d_model",
            f"{width} is {'divided' if is_odd else 'not divisible'} by model.num_heads={heads}"
            f"{' ' + reason if is_odd else ''}; try {_nearest(width, 2 * heads)}",
            others=("model.num_heads",),
        )
    if groups is not None and heads % groups:
        fitting = [str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
        yield Problem(
            "model.num_kv_heads",
            f"{groups} does not divide model.num_heads={heads}; try one of {', '.join(fitting)}",
            others=("model.num_heads",),
        )


def _positions(model: GptModel, *, seq_len: int) -> Iterator[Problem]:
    if model.positions == "learned":
        if model.rope_scaling is not None:
            yield Problem("model.rope_scaling", "is for model.positions=rotary; leave it out")
        if model.max_positions is not None and model.max_positions < seq_len:
            text = f"{model.max_positions} is less than data.seq_len={seq_len}; lower data.seq_len"
            yield Problem("model.max_positions", text, others=("data.seq_len",))
    elif model.max_positions is not None:
        yield Problem("model.max_positions", "is for model.positions=learned; leave it out")
    if model.sliding_window is None:
        for key in ("full_attention_every", "sliding_rope_theta"):
            if getattr(model, key) is not None:
                yield Problem(f"model.{key}", "needs model.sliding_window")


def _mesh(config: RunConfig) -> Iterator[Problem]:
    axes = {f"mesh.{name}": size for name, size in config.mesh.sizes().items()}
    for key, size in axes.items():
        if size == 0:
            yield Problem(key, "must be at least 1, or -1 for all remaining devices (got 0)")
    rest = [key for key, size in axes.items() if size == -1]
    if len(rest) > 1:
        names = " and ".join(rest)
        text = f"only one axis can be -1 (got {names}); give the others a number"
        yield Problem(rest[-1], text, others=tuple(rest))
    model, tensor = config.model, config.mesh.tensor
    if isinstance(model, VitModel) and tensor > 0 and tensor not in model.tensor_sizes():
        text = f"{tensor} does not divide model.num_heads={model.num_heads}"
        yield Problem("mesh.tensor", text, others=("model.num_heads",))
    if isinstance(model, GptModel) and tensor > 0 and tensor not in model.tensor_sizes():
        heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
        fitting = ", ".join(map(str, model.tensor_sizes()))
        yield Problem(
            "mesh.tensor",
            f"{tensor} does not divide model.num_heads={heads} and model.num_kv_heads={groups}; "
            f"try one of {fitting}",
            others=("model.num_heads", "model.num_kv_heads"),
        )


def _vit(model: VitModel, sources: Iterable[Source]) -> Iterator[Problem]:
    if model.image_size % model.patch_size:
        yield Problem(
            "model.patch_size",
            f"must divide model.image_size={model.image_size} (got {model.patch_size})",
            others=("model.image_size",),
        )
    if model.d_model % model.num_heads:
        yield Problem(
            "model.num_heads",
            f"must divide model.d_model={model.d_model} (got {model.num_heads})",
            others=("model.d_model",),
        )
    for source in sources:
        if isinstance(source, ImagesSource) and source.size != model.image_size:
            yield Problem(
                "model.image_size",
                f"must be data.source.size={source.size} (got {model.image_size})",
                others=("data.source.size",),
            )
        elif not isinstance(source, ImagesSource | CustomSource):
            text = f"vit reads images, and {source.kind} has tokens; use gpt or mlp"
            yield Problem("model.kind", text, others=("data.source.kind",))


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    section = config.optimizer
    if isinstance(section, CustomOptimizer) and "learning_rate" in section.args:
        text = "is optimizer.learning_rate; set that instead"
        yield Problem("optimizer.args.learning_rate", text)
    if isinstance(section.schedule, PiecewiseSchedule):
        steps = [change.after_step for change in section.schedule.changes]
        if sorted(set(steps)) != steps:
            text = f"after_step must ascend (got {', '.join(map(str, steps))})"
            yield Problem("optimizer.schedule.changes", text)
    if config.lora is not None and section.freeze:
        text = "with lora only the adapters are trained; leave optimizer.freeze out"
        yield Problem("optimizer.freeze", text, others=("lora",))


def _time_limits(config: RunConfig) -> Iterator[Problem]:
    """Yields the time limits that would expire before a more specific limit inside them."""
    limits, save = config.deadlines, config.checkpoint.timeout_seconds
    if limits.data_seconds <= config.data.timeout_seconds:
        yield Problem(
            "deadlines.data_seconds",
            f"must be more than data.timeout_seconds={config.data.timeout_seconds:g}, which ends "
            f"the wait with a better message (got {limits.data_seconds:g})",
            others=("data.timeout_seconds",),
        )
    if limits.save_seconds <= 2 * save:
        yield Problem(
            "deadlines.save_seconds",
            f"must be more than twice checkpoint.timeout_seconds={save:g}, which ends the save "
            f"with a better message (got {limits.save_seconds:g})",
            others=("checkpoint.timeout_seconds",),
        )


def _features(config: RunConfig) -> Iterator[Problem]:
    source, model = config.data.source, config.model
    has_rows = config.data.heldout_fraction or config.data.validation
    if config.evaluation.every_steps and not has_rows:
        yield Problem(
            "evaluation.every_steps",
            "there is nothing to evaluate on: data.heldout_fraction is 0; give a share such as "
            "0.02, or data.validation, or set evaluation.every_steps to 0",
            others=("data.heldout_fraction",),
        )
    if config.checkpoint.keep.best and not config.evaluation.every_steps:
        yield Problem(
            "checkpoint.keep.best",
            "the best steps are those of the lowest held-out loss, and nothing is evaluated; "
            "set evaluation.every_steps, or checkpoint.keep.best to 0",
            others=("evaluation.every_steps",),
        )
    corruption = config.guards.corruption
    if corruption and corruption.replay_on == "rotated" and corruption.replay_every_steps is None:
        yield Problem(
            "guards.corruption.replay_on",
            "no step is replayed; set guards.corruption.replay_every_steps, or leave it out",
            others=("guards.corruption.replay_every_steps",),
        )
    sources = single_sources(source)
    has_no_text = isinstance(model, VitModel) or any(
        isinstance(part, CustomSource | ImagesSource) for part in sources.values()
    )
    if config.telemetry.sample_tokens and has_no_text:
        yield Problem(
            "telemetry.sample_tokens",
            "a text sample needs data with a tokenizer and a model with logits "
            f"(here {source.kind} and {model.kind}); set it to 0",
            others=("data.source.kind", "model.kind"),
        )
    for key, part in (*sources.items(), ("model", model)):
        if isinstance(part, CustomModel | CustomSource):
            taken = {"vocab_size", "seq_len"} if isinstance(part, CustomModel) else set()
            for name in sorted(taken & set(part.args)):
                yield Problem(f"{key}.args.{name}", "is passed by jaxres itself; remove it")


def _data(config: RunConfig) -> Iterator[Problem]:
    for key, source in single_sources(config.data.source).items():
        yield from _source(key, source, config.data.tokenizer)
        has_rows = isinstance(source, CustomSource | ImagesSource)
        if has_rows and config.data.packing != "concat":
            text = f"{config.data.packing} packs documents, not {source.kind} rows; leave it out"
            yield Problem("data.packing", text, others=(f"{key}.kind",))
        if isinstance(source, ImagesSource) and isinstance(config.model, GptModel | MlpModel):
            text = f"{config.model.kind} reads tokens; images need vit or custom (docs/models.md)"
            yield Problem("model.kind", text, others=(f"{key}.kind",))
    seen = {HELDOUT}
    if isinstance(config.data.source, MixtureSource):
        yield from _mixture(config.data.source)
        seen |= {part.name for part in config.data.source.sources}
    for number, part in enumerate(config.data.validation):
        key = f"data.validation[{number}]"
        if part.name in seen:
            yield Problem(f"{key}.name", f"{part.name} is taken; give each set its own name")
        seen.add(part.name)
        yield from _source(f"{key}.source", part.source, config.data.tokenizer)


def _mixture(mixture: MixtureSource) -> Iterator[Problem]:
    names = [part.name for part in mixture.sources]
    if not names:
        text = "is empty; give at least one source, with its name, weight and source (docs/data.md)"
        yield Problem("data.source.sources", text)
        return
    for number, name in enumerate(names):
        if name in (*names[:number], HELDOUT):
            key = f"data.source.sources[{number}].name"
            yield Problem(key, f"{name} is taken; give each source its own name")
    shares = {"data.source.sources": {part.name: part.weight for part in mixture.sources}}
    last = 0
    for number, change in enumerate(mixture.schedule):
        key = f"data.source.schedule[{number}]"
        if change.after_step <= last:
            yield Problem(
                f"{key}.after_step", f"must be more than {last}, that of the change before"
            )
        last = change.after_step
        if set(change.weights) != set(names):
            text = f"must have exactly the names of the sources: {', '.join(names)} (0: no rows)"
            yield Problem(f"{key}.weights", text)
        shares[f"{key}.weights"] = change.weights
    for key, weights in shares.items():
        total = sum(weights.values())
        if not 0 < total < math.inf:
            yield Problem(key, "the weights must have a sum above 0; give one source a weight")
            continue
        for name, weight in weights.items():
            if 0 < weight / total < SMALLEST_SHARE:
                least = f"1/{1 / SMALLEST_SHARE:.0f} of the sum"
                text = f"{name}: {weight:g} is less than {least}; raise it or leave the source out"
                yield Problem(key, text)
    for number, name in enumerate(names):
        if not any(weights.get(name, 0.0) for weights in shares.values()):
            text = f"{name} never has a weight above 0; give it one, or leave the source out"
            yield Problem(f"data.source.sources[{number}].weight", text)
    if all(part.epochs is not None for part in mixture.sources):
        text = "every source has `epochs`, so the rows end; leave it out for one source"
        yield Problem("data.source.sources", text)


def _source(key: str, source: SingleSource, tokenizer: Tokenizer) -> Iterator[Problem]:
    is_library = not isinstance(tokenizer, BytesTokenizer)
    if isinstance(source, CustomSource):
        if is_library:
            text = "a custom source has its own tokens; leave data.tokenizer out"
            yield Problem("data.tokenizer.kind", text, others=(f"{key}.kind",))
        return
    path = str(source.path)
    if not path:
        yield Problem(f"{key}.path", "is empty; name a folder, file or glob")
    if path.startswith(SCHEME):
        try:
            parse_path(path)
        except ValueError as error:
            yield Problem(f"{key}.path", f"{error}; {key}.include takes patterns")
    if isinstance(source, FilesSource) and not source.include:
        yield Problem(f"{key}.include", "is empty, so no file is taken; leave it out for all")
    if isinstance(source, ImagesSource):
        classes = source.classes
        for name in sorted({name for name in classes if classes.count(name) > 1}):
            text = f"{name!r} is there twice, so it would have two labels; give each class once"
            yield Problem(f"{key}.classes", text)
    if isinstance(source, TextSource) and source.encoding == "binary" and is_library:
        text = f"binary files need the bytes tokenizer, not {tokenizer.kind}; use utf-8"
        yield Problem(f"{key}.encoding", text, others=("data.tokenizer.kind",))
    if isinstance(source, NanogptSource):
        end, size = source.end_of_document, source.vocab_size
        if end is not None and end >= size:
            yield Problem(
                f"{key}.end_of_document",
                f"{end} is not below {key}.vocab_size={size}; give the tokenizer's, or null",
                others=(f"{key}.vocab_size",),
            )
        if source.dtype == "uint16" and size > 2**16:
            text = f"{size} tokens do not fit uint16 (65536); use uint32"
            yield Problem(f"{key}.dtype", text, others=(f"{key}.vocab_size",))


def _alerts(config: RunConfig) -> Iterator[Problem]:
    seen: set[tuple[str, str]] = set()
    for number, target in enumerate(config.alerts.targets):
        key, name = f"alerts.targets[{number}]", (target.kind, variable(target))
        if name in seen:
            yield Problem(key, f"appears twice: {target.kind} with {name[1]}; leave one out")
        seen.add(name)
        for kind in target.kinds or ():
            if kind not in list(Kind):
                text = f"there is no {show(kind)}{did_you_mean(kind, Kind)} ({', '.join(Kind)})"
                yield Problem(f"{key}.kinds", text)
        safe = ("https://", "http://127.0.0.1:", "http://127.0.0.1/")
        if isinstance(target, PagerdutyTarget) and not target.url.startswith(safe):
            yield Problem(f"{key}.url", "must begin with https:// (the key is sent to it)")
    if config.alerts.spend_dollars is not None and config.launch.gce is None:
        yield Problem("alerts.spend_dollars", "needs launch.gce.capacity_options with prices")


def _gce(config: RunConfig) -> Iterator[Problem]:
    gce = config.launch.gce
    if gce is None:
        if config.launch.max_dollars is not None:
            yield Problem("launch.max_dollars", "needs launch.gce.capacity_options with prices")
        return
    if config.run.dir is not None and not is_remote(config.run.dir):
        yield Problem(
            "run.dir",
            f"{config.run.dir}: a local disk is deleted with its VM; "
            "give a bucket, gs://BUCKET/FOLDER",
            others=("launch.gce",),
        )
    if not gce.capacity_options:
        yield Problem("launch.gce.capacity_options", "is empty; give at least one capacity option")
    if gce.image is None and gce.template is None:
        yield Problem("launch.gce.image", "give a boot image, or launch.gce.template")
    for number, option in enumerate(gce.capacity_options):
        yield from _option(gce, option, f"launch.gce.capacity_options[{number}]")
    if gce.external_ip and gce.template is not None and not gce.subnetworks:
        yield Problem(
            "launch.gce.external_ip",
            "the network interfaces are the template's; name launch.gce.subnetworks, or give the "
            "template an external address",
            others=("launch.gce.template",),
        )
    yield from _nic_types(gce)
    runtime = gce.runtime
    if isinstance(runtime, PythonRuntime) and runtime.python_version and not runtime.packages:
        yield Problem(
            "launch.gce.runtime.packages", "is empty; a new Python needs jaxres' packages"
        )
    for key, names in (("labels", gce.labels), ("metadata", gce.metadata)):
        for name in names:
            if name.startswith("jaxres-") or (key, name) == ("metadata", "startup-script"):
                yield Problem(f"launch.gce.{key}", f"{name} is set by jaxres itself; rename it")
    regions = {region_of(zone) for option in gce.capacity_options for zone in option.zones}
    named = [subnet for subnet in gce.subnetworks if "regions/" in subnet]
    fixed = [subnet for subnet in named if "{region}" not in subnet]
    if len(regions) > 1 and fixed:
        yield Problem(
            "launch.gce.subnetworks",
            f"{fixed[0]} is in one region, the capacity options in {', '.join(sorted(regions))}; "
            "write {region} for it",
        )


def _nic_types(gce: GceSection) -> Iterator[Problem]:
    key, given = "launch.gce.nic_types", gce.nic_types
    num_interfaces = max(1, len(gce.subnetworks))
    if given and gce.template is not None and not gce.subnetworks:
        text = "the network interfaces are the template's; name launch.gce.subnetworks too"
        yield Problem(key, text, others=("launch.gce.template",))
        return
    if given and len(given) != num_interfaces:
        yield Problem(
            key,
            f"has {len(given)} types, the VMs have {num_interfaces} interfaces; give one for each "
            "of launch.gce.subnetworks",
            others=("launch.gce.subnetworks",),
        )
        return
    for option in gce.capacity_options:
        shape = shape_of(option.machine_type)
        has_rdma = shape is not None and shape.has_rdma
        if "MRDMA" in given and shape is not None and not has_rdma:
            text = f"{option.machine_type} has no MRDMA interfaces; use GVNIC"
            yield Problem(key, text, others=("launch.gce.capacity_options",))
        if has_rdma and num_interfaces > 2 and "MRDMA" not in given:
            rest = num_interfaces - 2
            yield Problem(
                key,
                f"{option.machine_type} takes interfaces of an RDMA network as MRDMA only; give "
                f"the type of each of launch.gce.subnetworks: GVNIC twice, MRDMA {rest} times",
                others=("launch.gce.subnetworks",),
            )


def _option(gce: GceSection, option: CapacityOption, key: str) -> Iterator[Problem]:
    if not option.zones:
        yield Problem(f"{key}.zones", "is empty; give at least one zone")
    shape = shape_of(option.machine_type)
    if shape is not None and option.kind not in shape.kinds:
        fitting = ", ".join(shape.kinds)
        yield Problem(
            f"{key}.kind",
            f"{option.machine_type} ({shape.gpu}) is not available as {option.kind}; "
            f"use one of: {fitting}",
        )
    needs_hyperdisk = shape is not None and shape.needs_hyperdisk and gce.template is None
    if needs_hyperdisk and "hyperdisk" not in (gce.disk_type or ""):
        yield Problem(
            "launch.gce.disk_type",
            f"{option.machine_type} boots from Hyperdisk only; use hyperdisk-balanced",
        )
    if isinstance(option, FlexStartOption) and option.wait_minutes > 120:
        yield Problem(f"{key}.wait_minutes", f"must be at most 120 (got {option.wait_minutes})")
    if isinstance(option, FlexStartOption) and gce.max_run_hours > 168:
        yield Problem(
            "launch.gce.max_run_hours",
            f"flex_start VMs run for at most seven days (168; got {gce.max_run_hours:g})",
        )
    if isinstance(option, FlexStartOption) and gce.most_hosts > 1 and gce.max_run_hours * 6 < 1:
        yield Problem(
            "launch.gce.max_run_hours",
            f"several flex_start VMs run for at least ten minutes (got {gce.max_run_hours:g})",
        )
