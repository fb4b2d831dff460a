import pytest

from jaxres.config import check, load
from jaxres.config.doubts import doubts
from jaxres.faults import ConfigError

from .conftest import MINIMAL, Write

TEXT = "source: {kind: text, path: x}"
ONE = f"{{name: a, weight: 1, {TEXT}}}"
MIXTURES = (
    (
        "",
        "",
        "data.source.sources: is empty; give at least one source, with its name, weight and "
        "source (docs/data.md)",
    ),
    (
        f"{ONE}, {ONE}",
        "",
        "data.source.sources[1].name: a is taken; give each source its own name",
    ),
    (
        f"{{name: heldout, weight: 1, {TEXT}}}",
        "",
        "data.source.sources[0].name: heldout is taken; give each source its own name",
    ),
    (
        f"{ONE}, {{name: b, weight: 0, {TEXT}}}",
        "",
        "data.source.sources[1].weight: b never has a weight above 0; give it one, or leave the "
        "source out",
    ),
    (
        f"{{name: a, weight: 0, {TEXT}}}",
        ", schedule: [{after_step: 5, weights: {a: 1}}]",
        "data.source.sources: the weights must have a sum above 0; give one source a weight",
    ),
    (
        f"{ONE}, {{name: b, weight: 1.0e-6, {TEXT}}}",
        "",
        "data.source.sources: b: 1e-06 is less than 1/65536 of the sum; raise it or leave the "
        "source out",
    ),
    (
        f"{{name: a, weight: 1, epochs: 2, {TEXT}}}",
        "",
        "data.source.sources: every source has `epochs`, so the rows end; leave it out for one "
        "source",
    ),
    (
        ONE,
        ", schedule: [{after_step: 5, weights: {b: 1}}]",
        "data.source.schedule[0].weights: must have exactly the names of the sources: a (0: no "
        "rows)",
    ),
    (
        ONE,
        ", schedule: [{after_step: 5, weights: {a: 1}}, {after_step: 5, weights: {a: 2}}]",
        "data.source.schedule[1].after_step: must be more than 5, that of the change before",
    ),
    (
        "{name: a, weight: 1, source: {kind: nanogpt, path: x, vocab_size: 9}}",
        "",
        "data.source.sources[0].source.end_of_document: 50256 is not below "
        "data.source.sources[0].source.vocab_size=9; give the tokenizer's, or null",
    ),
)
CUSTOM = "data.source={kind: custom, target: 'a.b:c'}"
IMAGES = "data.source={kind: images, path: x}"
LATER = "{after_step: 5, factor: 0.1}, {after_step: 5, factor: 0.2}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["train.global_batch_size=256", "train.microbatches=3"],
            "train.global_batch_size: 256 is not divisible by train.microbatches=3; try 255 or 258",
        ),
        (
            ["train.microbatches=25"],
            "train.global_batch_size: 24 is not divisible by train.microbatches=25; try 25",
        ),
        (
            ["mesh.data=4", "mesh.fsdp=4"],
            "train.global_batch_size: 24 is not divisible by mesh.data * mesh.fsdp = 4 * 4; "
            "try 16 or 32",
        ),
        (
            ["mesh.tensor=0"],
            "mesh.tensor: must be at least 1, or -1 for all remaining devices (got 0)",
        ),
        (
            ["mesh.data=-1", "mesh.fsdp=-1"],
            "mesh.fsdp: only one axis can be -1 (got mesh.data and mesh.fsdp); "
            "give the others a number",
        ),
        (
            ["model.num_heads=7"],
            "model.d_model: 768 is not divisible by model.num_heads=7; try 756 or 770",
        ),
        (
            ["model.d_model=12"],
            "model.d_model: 12 is divided by model.num_heads=12 into an odd head width (1), RoPE "
            "needs an even one; try 24",
        ),
        (
            ["model.num_kv_heads=4", "mesh.tensor=3"],
            "mesh.tensor: 3 does not divide model.num_heads=12 and model.num_kv_heads=4; "
            "try one of 1, 2, 4",
        ),
        (
            ["model.num_kv_heads=5"],
            "model.num_kv_heads: 5 does not divide model.num_heads=12; "
            "try one of 1, 2, 3, 4, 6, 12",
        ),
        (
            ["model.vocab_size=256"],
            "model.vocab_size: 256 is smaller than the bytes tokenizer's 257; leave it out, or "
            "give at least that",
        ),
        (
            ["model.kind=mlp", "model.vocab_size=2"],
            "model.vocab_size: 2 is smaller than the bytes tokenizer's 257; leave it out, or "
            "give at least that",
        ),
        (
            ["model.attention=cudnn", "model.compute_dtype=float32"],
            "model.attention: cudnn needs model.compute_dtype=bfloat16 (it is float32); "
            "use auto or xla",
        ),
        *(
            ([f"data.source={{kind: mixture, sources: [{sources}]{more}}}"], line)
            for sources, more, line in MIXTURES
        ),
        (
            ["data.source={kind: images, path: x}"],
            "model.kind: gpt reads tokens; images need vit or custom (docs/models.md)",
        ),
        (
            ["train.reduction=invariant", "train.virtual_shards=6"],
            "train.virtual_shards: must be a power of two, such as 8 (got 6)",
        ),
        (
            ["train.reduction=invariant", "train.global_batch_size=20"],
            "train.global_batch_size: 20 is not divisible by train.virtual_shards * "
            "train.microbatches = 8 * 1; try 16 or 24",
        ),
        (
            ["train.reduction=invariant", "mesh.tensor=2"],
            "mesh.tensor: must be 1 with train.reduction=invariant: a split matrix product adds in "
            "another order. Use mesh.fsdp and mesh.data",
        ),
        (
            ["train.reduction=invariant", "optimizer.kind=muon"],
            "optimizer.kind: muon adds over whole arrays, in an order that depends on the devices; "
            "with train.reduction=invariant use adamw, lion or sgd",
        ),
        (
            ["train.virtual_shards=16"],
            "train.virtual_shards: has no effect with train.reduction=fast; set invariant, or "
            "leave it out",
        ),
        (
            ["evaluation.every_steps=5", "data.heldout_fraction=0"],
            "evaluation.every_steps: there is nothing to evaluate on: data.heldout_fraction is 0; "
            "give a share such as 0.02, or data.validation, or set evaluation.every_steps to 0",
        ),
        (
            ["telemetry.sample_tokens=5", CUSTOM],
            "telemetry.sample_tokens: a text sample needs data with a tokenizer and a model "
            "with logits (here custom and gpt); set it to 0",
        ),
        (
            ["model={kind: custom, target: 'a.b:c', args: {seq_len: 3}}"],
            "model.args.seq_len: is passed by jaxres itself; remove it",
        ),
        (
            ["model={kind: vit, num_classes: 2, patch_size: 15}", IMAGES],
            "model.patch_size: must divide model.image_size=224 (got 15)",
        ),
        (
            ["model={kind: vit, num_classes: 2, num_heads: 5}", IMAGES],
            "model.num_heads: must divide model.d_model=768 (got 5)",
        ),
        (
            ["model={kind: vit, num_classes: 2, image_size: 32}", IMAGES],
            "model.image_size: must be data.source.size=224 (got 32)",
        ),
        (
            ["model={kind: vit, num_classes: 2}", IMAGES, "mesh.tensor=5"],
            "mesh.tensor: 5 does not divide model.num_heads=12",
        ),
        (
            ["model={kind: vit, num_classes: 2}"],
            "model.kind: vit reads images, and text has tokens; use gpt or mlp",
        ),
        (
            ["optimizer.schedule={kind: piecewise, changes: [" + LATER + "]}"],
            "optimizer.schedule.changes: after_step must ascend (got 5, 5)",
        ),
        (
            ["optimizer={kind: custom, target: 'optax:sgd', args: {learning_rate: 1}}"],
            "optimizer.args.learning_rate: is optimizer.learning_rate; set that instead",
        ),
        (
            ["lora.targets=[]"],
            "lora.targets: is empty, so no parameter is trained; give patterns of matrices, or "
            "leave lora out",
        ),
        (
            ["lora.rank=4", "optimizer.freeze=['*']"],
            "optimizer.freeze: with lora only the adapters are trained; leave optimizer.freeze out",
        ),
        (
            ["data.packing=pad", CUSTOM],
            "data.packing: pad packs documents, not custom rows; leave it out",
        ),
        (
            ["compilation.xla_options.xla_gpu_deterministic_ops=false"],
            "compilation.xla_options.xla_gpu_deterministic_ops: is set by run.determinism, on "
            "which the guarantee depends; remove it here",
        ),
        (["data.source.path="], "data.source.path: is empty; name a folder, file or glob"),
        (
            ["data.source.include=[]"],
            "data.source.include: is empty, so no file is taken; leave it out for all",
        ),
    ],
)
def test_an_impossible_combination_is_rejected(write: Write, overrides: list[str], line: str):
    with pytest.raises(ConfigError) as caught:
        load(write(), overrides)
    text = str(caught.value)
    assert text.startswith("command line (")
    assert text.endswith(f"): {line}")


def test_a_class_of_images_that_is_named_twice_is_refused_in_every_source(write: Write):
    images = "{kind: images, path: x, classes: [dog, cat, cat, Cat]}"
    part = f"{{name: a, weight: 1, source: {images}}}"
    for key, override in (
        ("data.source", f"data.source={images}"),
        ("data.source.sources[0].source", f"data.source={{kind: mixture, sources: [{part}]}}"),
        ("data.validation[0].source", f"data.validation=[{{name: a, source: {images}}}]"),
    ):
        text = f"{key}.classes: 'cat' is there twice, so it would have two labels"
        with pytest.raises(ConfigError) as caught:
            load(write(), [override])
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.global_batch_size=48", "train.microbatches=3"],
        ["mesh.data=-1", "mesh.fsdp=5", "mesh.tensor=6"],
        ["mesh.data=1", "mesh.fsdp=-1"],
        ["mesh.data=4", "mesh.fsdp=6", "mesh.tensor=4"],
        ["model.num_kv_heads=4", "model.vocab_size=257"],
        ["model.vocab_size=2", CUSTOM],
        ["model.attention=cudnn"],
        ["compilation.xla_options={xla_gpu_autotune_level: 2, xla_a: true, xla_b: x}"],
        ["evaluation.every_steps=5"],
        ["telemetry.sample_tokens=5", "model.kind=mlp"],
        ["telemetry.sample_tokens=5", "model={kind: custom, target: 'a.b:c'}"],
        ["optimizer.schedule.horizon_steps=3"],
        ["model={kind: vit, num_classes: 2}", IMAGES],
        ["model={kind: vit, num_classes: 2}", CUSTOM],
        ["train.steps=1", "checkpoint.save_every_steps=1000"],
    ],
)
def test_a_possible_combination_is_accepted(write: Write, overrides: list[str]):
    assert check(load(write(), overrides).config) == []


def test_all_impossible_combinations_are_reported_at_once_with_their_lines(write: Write):
    path = write(
        MINIMAL + "  microbatches: 5\n  virtual_shards: 16\nmodel: {kind: gpt, d_model: 9}"
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    places = [line.partition(": ")[0] for line in str(caught.value).split("\n")]
    assert places == ["x.yaml:5", "x.yaml:6", "x.yaml:7"]


def test_settings_that_are_hardly_meant_are_told(write: Write):
    wiki = "data.validation=[{name: wiki, source: {kind: text, path: x}}]"
    llama, gpt2 = (
        f"data.source={{kind: nanogpt, path: x, dtype: uint32, vocab_size: {size}}}"
        for size in (128_256, 50_304)
    )
    end = "data.source.end_of_document"
    cases = {
        (): [],
        (wiki,): ["data.validation"],
        ("evaluation.batches=3",): ["evaluation.batches"],
        (wiki, "evaluation.batches=3", "evaluation.every_steps=2"): [],
        (llama,): [end],
        (llama, "evaluation.every_steps=2"): [end],
        (llama, f"{end}=128001"): [],
        (llama, f"{end}=null"): [],
        (gpt2,): [],
    }
    path = write()
    keys = {
        given: [note.split()[0] for note in doubts(load(path, given).config)] for given in cases
    }
    assert keys == cases
