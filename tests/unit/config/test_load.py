import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxres.config import dump_yaml, load, load_recorded, run_dirs
from jaxres.config.other_names import ADVICE, NOTES, OTHER_NAMES
from jaxres.config.schema.fields import iter_fields
from jaxres.config.schema.model import GptModel, MlpModel
from jaxres.config.schema.optimizer import AdamwOptimizer, LinearSchedule, SgdOptimizer
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, UsageError

from .conftest import MINIMAL, Write

ROOT = Path(__file__).parents[3]


def lines(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value).split("\n")


def test_the_package_imports_neither_jax_nor_numpy():
    code = "import sys, jaxres.config; print([m for m in ('jax', 'numpy') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_minimal_file_uses_the_defaults(write: Write):
    loaded = load(write())
    assert loaded.name == "x"
    assert loaded.config.model == GptModel()
    assert loaded.config.optimizer == AdamwOptimizer()
    assert loaded.origins["train.steps"] == "x.yaml:4"
    assert "run.seed" not in loaded.origins


def test_a_section_without_a_kind_has_the_default_kind(write: Write):
    path = write(MINIMAL + "optimizer: {learning_rate: 3e-4, schedule: {final_fraction: 0}}\n")
    assert load(path).config.optimizer.learning_rate == 3e-4
    assert load(path, ["optimizer.b1=0.5"]).config.optimizer.learning_rate == 3e-4


def test_overrides_take_precedence_over_the_file_and_the_last_one_wins(write: Write):
    overrides = ["train.steps=1", "--train.steps=2", "mesh={data: 2, fsdp: 4}", "mesh.data=3"]
    loaded = load(write(), overrides)
    assert loaded.config.train.steps == 2
    assert (loaded.config.mesh.data, loaded.config.mesh.fsdp) == (3, 4)
    assert loaded.origins["train.steps"] == "command line (train.steps=2)"


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.kind=sgd", "optimizer.momentum=0.5"],
        ["optimizer.momentum=0.5", "optimizer.kind=sgd"],
        ["optimizer={momentum: 0.5, kind: sgd}"],
        ["optimizer.kind=lion", "--optimizer.momentum=0.5", "optimizer.kind=sgd"],
    ],
)
def test_another_kind_on_the_command_line_replaces_the_section(write: Write, overrides: list[str]):
    path = write(MINIMAL + "optimizer: {kind: adamw, learning_rate: 3e-4, weight_decay: 0.3}\n")
    assert load(path, overrides).config.optimizer == SgdOptimizer(momentum=0.5)


def test_another_kind_replaces_a_section_of_the_default_kind(write: Write):
    path = write(MINIMAL + "optimizer: {learning_rate: 3e-4}\n")
    assert load(path, ["optimizer.kind=sgd"]).config.optimizer == SgdOptimizer()


def test_the_same_kind_keeps_the_values_of_lower_layers(write: Write):
    path = write(MINIMAL + "optimizer: {learning_rate: 3e-4}\n")
    optimizer = load(path, ["optimizer.kind=adamw"]).config.optimizer
    assert optimizer == AdamwOptimizer(learning_rate=3e-4)


def test_another_schedule_replaces_the_schedule_only(write: Write):
    path = write(MINIMAL + "optimizer: {b1: 0.5, schedule: {kind: cosine, final_fraction: 0.3}}\n")
    optimizer = load(path, ["optimizer.schedule.kind=linear"]).config.optimizer
    assert optimizer == AdamwOptimizer(b1=0.5, schedule=LinearSchedule())


def test_files_take_precedence_over_their_bases_in_order(write: Write):
    write("train: {steps: 1, global_batch_size: 48}\nmodel: {kind: gpt, num_layers: 3}\n", "a.yaml")
    write("train: {steps: 2}\nrun: {seed: 7}\n", "b.yaml")
    path = write(
        "base: [a.yaml, b.yaml]\ndata: {source: {kind: text, path: p}}\nmodel: {kind: mlp}"
    )
    loaded = load(path)
    train = loaded.config.train
    assert (train.steps, train.global_batch_size, loaded.config.run.seed) == (2, 48, 7)
    assert loaded.config.model == MlpModel()
    assert loaded.origins["train.steps"] == "b.yaml:1"
    assert not [place for place in loaded.origins.values() if place == "a.yaml:2"]


def test_bases_are_relative_to_the_file_and_one_level_deep(write: Write):
    Path("sub").mkdir()
    write("train: {steps: 5}\n", "sub/a.yaml")
    top = "base: a.yaml\ndata: {source: {kind: text, path: p}}\n"
    assert load(write(top, "sub/x.yaml")).config.train.steps == 5
    write("base: b.yaml\ntrain: {steps: 5}\n", "sub/a.yaml")
    assert lines(Path("sub/x.yaml")) == [
        "sub/a.yaml:1: base: a base can't have a base itself; name both files in sub/x.yaml"
    ]


def test_a_pipe_is_no_base_and_a_config_on_the_command_line_may_be_one(
    write: Write, tmp_path: Path
):
    """A shell's `<(COMMAND)` is a pipe; a base that is one would never be read."""
    os.mkfifo(tmp_path / "pipe")
    assert lines(write(MINIMAL + "base: pipe")) == [
        "x.yaml:5: can't be read: [Errno 29] a pipe, a socket or a device, expected a file: 'pipe'"
    ]
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(MINIMAL,))
    writer.start()
    assert load(tmp_path / "pipe").config.train.steps == 30
    writer.join()


def test_an_invalid_base_is_reported_with_its_line(write: Write):
    assert lines(write(MINIMAL + "base: no.yaml")) == ["x.yaml:5: base: no.yaml: no such file"]
    assert lines(write(MINIMAL + "base: [quickstrat, gce/a4-highgp]")) == [
        "x.yaml:5: base: quickstrat: no such file; did you mean 'quickstart'?",
        "x.yaml:5: base: gce/a4-highgp: no such file; did you mean 'gce/a4-highgpu'?",
    ]
    assert lines(write(MINIMAL + "base: 3")) == [
        "x.yaml:5: base: must be a path relative to this file, a built-in config, or a list of "
        "these (got 3)"
    ]


def test_all_problems_are_reported_at_once_with_their_locations(write: Write):
    path = write(
        """
        data:
          source: {kind: text, path: "{stdlib}"}
          seq_lne: 3
        train:
          steps: many
          steps: 3
          global_batch_size: true
        optimizer:
          kind: adamw
          momentum: 3
          b1: 2
        model:
        steps: 4
        """
    )
    problems = lines(path, "telemetry.sample_tokns=3", "run=3", "train.microbatches=1.0")
    assert problems == [
        "x.yaml:6: train.steps: given twice (first at x.yaml:5)",
        "command line (run=3): run: is a section (got 3); set its fields, as in run.dir=...",
        "x.yaml:12: model: is a section (got null); set its fields, as in model.kind=...",
        "x.yaml:3: data.seq_lne: unknown key; did you mean 'seq_len'? (keys here: source, "
        "tokenizer, seq_len, packing, heldout_fraction, validation, cache_dir, bucket_cache_gb, "
        "prefetch_batches, timeout_seconds)",
        "x.yaml:11: optimizer.b1: must be at most 1 (got 2)",
        "x.yaml:10: optimizer.momentum: unknown key for kind adamw; sgd, adafactor or muon "
        "has it (keys here: learning_rate, weight_decay, clip_norm, schedule, groups, freeze, "
        "ema_decay, kind, b1, b2, eps)",
        "x.yaml:7: train.global_batch_size: must be a whole number (got true)",
        "command line (train.microbatches=1.0): train.microbatches: must be a whole number "
        "(got 1.0)",
        "command line (telemetry.sample_tokns=3): telemetry.sample_tokns: unknown key; did you "
        "mean 'sample_tokens'? (keys here: log_every_seconds, tensorboard, trackers, prometheus, "
        "sample_prompt, sample_tokens)",
        "x.yaml:13: steps: unknown key; did you mean train.steps? (keys here: run, program, data, "
        "model, init_from, lora, optimizer, train, mesh, checkpoint, guards, evaluation, hooks, "
        "telemetry, deadlines, hosts, preemption, hardware, restart, launch, compilation, "
        "alerts)",
    ]


def test_a_missing_key_is_reported_with_the_way_to_set_it(write: Write):
    assert lines(write("")) == [
        "x.yaml: data.source.kind: missing; choose text, jsonl, parquet, huggingface, "
        "nanogpt, images, tokens, custom or mixture in the file or as data.source.kind=...",
        "x.yaml: train.steps: missing; give it in the file or as train.steps=...",
    ]
    assert lines(write("train: 3"), "data.source.kind=tokens") == [
        "x.yaml:1: train: is a section (got 3); set its fields, as in train.steps=...",
        "command line (data.source.kind=tokens): data.source.path: missing; give it in the file "
        "or as data.source.path=...",
    ]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps=true", "must be a whole number (got true)"),
        ("train.steps=1e3", "must be a whole number (got 1000.0)"),
        ("train.steps=010", 'must be a whole number (got "010")'),
        ("train.steps='3'", 'must be a whole number (got "3")'),
        ("train.steps=null", "must be a whole number (got null)"),
        ("train.steps=[3]", "must be a whole number (got [3])"),
        ("train.steps=0", "must be greater than 0 (got 0)"),
        ("train.steps=", "is empty; give a value, or leave it out"),
        ("train.steps=[", "not valid YAML: "),
        ("train.steps=" + "9" * 300, "must be at most 2,147,483,647"),
        ("run.seed=-1", "must be at least 0 (got -1)"),
        ("run.seed=4294967296", "must be at most 4,294,967,295"),
        ("run.dir=", "is empty; give a value, or leave it out"),
        ("optimizer.learning_rate=.nan", "must be a finite number (got NaN)"),
        ("optimizer.learning_rate=nan", 'must be a number (got "nan")'),
        ("optimizer.learning_rate=1e999", "must be a finite number (got Infinity)"),
        ("optimizer.learning_rate=" + "9" * 400, "must be a finite number (got a number of"),
        ("optimizer.learning_rate=true", "must be a number (got true)"),
        ("optimizer.learning_rate=0", "must be greater than 0 (got 0)"),
        ("model.dropout=1", "must be less than 1 (got 1)"),
        ("model.tie_embeddings=1", "must be true or false (got 1)"),
        ("model.tie_embeddings=yes", 'must be true or false (got "yes")'),
        ("model.scan_layers=maybe", 'must be auto, true or false (got "maybe")'),
        (
            "model.attention=cudn",
            "must be auto, xla or cudnn (got \"cudn\"); did you mean 'cudnn'?",
        ),
        (
            "optimizer.kind=adam",
            'must be adamw, lion, sgd, adafactor, muon or custom (got "adam"); did you mean '
            "'adamw'?",
        ),
        ("optimizer.kind=3", "must be adamw, lion, sgd, adafactor, muon or custom (got 3)"),
        (
            "optimizer.schedule.kind=cos",
            'must be cosine, linear, constant, wsd, inverse_sqrt or piecewise (got "cos")',
        ),
        ("data.tokenizer.kind=bpe", 'must be bytes or huggingface (got "bpe")'),
        ("data.source.include=x", 'must be a list (got "x")'),
        ("hooks=[{target: a}]", 'must be package.module:function (got "a")'),
        ("run.tags=['']", 'must be one line of 1 to 200 characters (got "")'),
        ("data.source.include=[3]", "must be text (in quotes, where it looks like something else)"),
    ],
)
def test_an_invalid_value_is_rejected_with_the_allowed_values(
    write: Write, override: str, line: str
):
    problems = lines(write(), override)
    assert len(problems) == 1
    key = override.partition("=")[0]
    assert problems[0].startswith("command line (")
    assert f": {key}" in problems[0]
    assert line in problems[0]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "launch.gce.capacity_options=[{kind: spot, zones: [us-central1]}]",
            'must be a zone such as us-central1-a (got "us-',
        ),
        ("launch.gce.labels={a: B}", 'must be at most 63 small letters, digits, - and _ (got "B")'),
        ("launch.gce.labels={A: b}", 'small letters, digits, - and _, the first a letter (got "A'),
        ("launch.gce.tags=[a-]", 'and the last no - (got "a-")'),
    ],
)
def test_text_of_another_form_is_rejected_with_its_own_form(write: Write, override: str, line: str):
    problems = lines(write(), override)
    assert any(line in problem for problem in problems), problems
    assert not any("package.module:function" in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps.x=3", "train.steps: is a single value, not a section (got keys below"),
        (
            "optimizer=sgd",
            'optimizer: is a section (got "sgd"); set its fields, as in optimizer.',
        ),
        ("mesh=null", "mesh: is a section (got null); set its fields, as in mesh.data=..."),
        ("foo.bar=3", "foo: unknown key ("),
        ("trian.steps=3", "trian: unknown key; did you mean 'train'?"),
        ("seed=3", "seed: unknown key; did you mean run.seed?"),
        (
            "lr=3",
            "lr: unknown key; here it is optimizer.learning_rate (keys here: run, program, data,",
        ),
        (
            "train.batch_size=8",
            "train.batch_size: unknown key; here it is train.global_batch_size (the rows of a step "
            "over all devices) (keys here:",
        ),
        (
            "train.epochs=3",
            "train.epochs: unknown key; a run is train.steps long; `jaxres data inspect "
            "CONFIG.yaml` says how many an epoch takes (keys here:",
        ),
        (
            "optimizer.warmup_steps=3",
            "optimizer.warmup_steps: unknown key; here it is optimizer.schedule.warmup_steps (",
        ),
        (
            "model.moe=true",
            "model.moe: unknown key; a mixture of experts needs a model of your own (",
        ),
        ("mesh.expert=2", "mesh.expert: unknown key; a mixture of experts needs a model of your"),
        ("mesh.pipeline=2", "mesh.pipeline: unknown key; a mesh has the axes data, fsdp and tens"),
        ("base=x.yaml", "base: unknown key"),
    ],
)
def test_an_override_of_an_unknown_key_is_rejected(write: Write, override: str, line: str):
    problems = lines(write(), override)
    assert len(problems) == 1
    assert problems[0].startswith(f"command line ({override}): {line}")


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("runs/a[b]", "'a[b]' has one of"),
        ("a\nb", "'a\\nb' has one of"),
        ("/gs/a", "takes /gs for a bucket"),
        ("s3://b/a", "must be a local path or gs://"),
        ("gs://bkt/a/../b", "must be gs://BUCKET/FOLDER"),
        ("gs://bkt//a", "must be gs://BUCKET/FOLDER"),
    ],
)
def test_a_run_directory_where_nothing_can_be_saved_is_one_line(
    write: Write, folder: str, text: str
):
    with pytest.raises(ConfigError) as refused:
        load(write(), [f"run.dir={folder}"])
    (line,) = str(refused.value).splitlines()
    assert line.startswith("command line (run.dir=")
    assert text in line


def test_a_config_file_whose_name_can_be_no_run_directory_is_refused(write: Write):
    loaded = load(write(name="a[1].yaml"))
    with pytest.raises(ConfigError, match=r"run.dir: 'a\[1\]-.*has one of .* or set run.dir="):
        run_dirs(loaded.config, loaded.name)
    assert load(Path("a[1].yaml"), ["run.dir=b"]).config.run.dir == Path.cwd() / "b"


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("telemetry.sample_prompt", "3", "3"),
        ("telemetry.sample_prompt", "true", "true"),
        ("telemetry.sample_prompt", "null", "null"),
        ("telemetry.sample_prompt", ".nan", ".nan"),
        ("telemetry.sample_prompt", "def ", "def "),
        ("telemetry.sample_prompt", "a # b: [", "a # b: ["),
        ("telemetry.sample_prompt", "", ""),
        ("telemetry.sample_prompt", '"a\\tb"', "a\tb"),
        ("telemetry.sample_prompt", "a=b", "a=b"),
        ("data.source.path", "{stdlib}", "{stdlib}"),
        ("data.source.path", "010", "010"),
        ("run.dir", "/3", Path("/3")),
        ("run.dir", "null", None),
        ("compilation.cache_dir", "null", None),
        ("optimizer.learning_rate", "3", 3.0),
        ("optimizer.clip_norm", "null", None),
        ("data.source.include", "[a, b]", ("a", "b")),
    ],
)
def test_override_values_are_yaml_and_text_is_taken_literally(
    write: Write, key: str, raw: str, value: object
):
    result: object = load(write(), [f"{key}={raw}"]).config
    for part in key.split("."):
        result = getattr(result, part)
    assert (result, type(result)) == (value, type(value))


def test_arguments_of_a_target_accept_any_key_but_no_infinity(write: Write):
    path = write(MINIMAL + "model: {kind: custom, target: 'a.b:c', args: {x: 1, kind: q}}\n")
    overrides = ["model.args.y=[1, no]", "model.args.kind=r", "model.args.deep.er=2"]
    model = load(path, overrides).config.model
    assert model.model_dump()["args"] == {"x": 1, "kind": "r", "y": [1, "no"], "deep": {"er": 2}}
    assert load(path, ["model.args={}"]).config.model.args == {}, "cleared, not merged"
    assert lines(path, "model.args.y=[1, .inf]") == [
        "command line (model.args.y=[1, .inf]): model.args.y[1]: must be a finite number (got inf)"
    ]


@pytest.mark.parametrize(
    "override", ["foo", "--resume", "-train.steps=3", "=3", "train..steps=3", ""]
)
def test_an_argument_that_is_no_override_is_a_usage_error(write: Write, override: str):
    with pytest.raises(UsageError, match="no such flag; settings are given as") as caught:
        load(write(), [override])
    assert caught.value.exit_code == ExitCode.USAGE


def test_an_absent_file_is_a_usage_error_and_an_unreadable_one_is_not(write: Write):
    with pytest.raises(UsageError, match=r"^no\.yaml: no such file$"):
        load(write().with_name("no.yaml"))
    with pytest.raises(UsageError, match="is a folder, not a file"):
        load(Path("."))
    Path("latin.yaml").write_bytes(b"a: \xff")
    assert lines(Path("latin.yaml"))[0].startswith("latin.yaml: can't be read: ")
    assert lines(write("- a"))[0] == (
        "x.yaml:1: contains a list; sections such as `train:` are expected"
    )


def test_a_built_in_config_is_found_by_name_from_any_folder(write: Write):
    write()
    loaded = load(Path("quickstart"), ["train.steps=7"])
    assert (loaded.name, loaded.config.train.steps) == ("quickstart", 7)
    same = load(ROOT / "configs" / "quickstart.yaml", ["train.steps=7"])
    assert (loaded.config, loaded.name) == (same.config, same.name), "another run"


def test_a_file_of_the_working_directory_comes_before_a_built_in_config(write: Write):
    write(MINIMAL + "run: {seed: 5}\n").rename("quickstart")
    assert load(Path("quickstart")).config.run.seed == 5
    Path("quickstart").unlink()
    Path("quickstart").mkdir()
    with pytest.raises(UsageError, match=r"^quickstart: is a folder, not a file"):
        load(Path("quickstart"))


def test_an_unknown_name_lists_the_built_in_configs_and_the_nearest(write: Write):
    write()
    listed = "gpt2-124m, llama-1b, llama-70b, llama-8b, quickstart"
    with pytest.raises(ConfigError, match="did you mean 'quickstart'") as caught:
        load(Path("quikstart"))
    assert f"(built-in configs: {listed})" in str(caught.value)
    with pytest.raises(UsageError, match="the built-in config is named 'llama-1b'"):
        load(Path("configs/llama-1b.yaml"))


def test_a_dotted_key_in_a_file_is_rejected_with_the_way_to_write_it(write: Write):
    path = write("train.steps: 3\ndata: {source: {kind: text, path: p}}\n")
    assert lines(path) == [
        "x.yaml:1: train.steps: dotted keys are for the command line; in a file, put the field "
        "into its section"
    ]


def test_an_unreadable_file_is_the_only_problem_reported(write: Write):
    problems = lines(write("train:\n\tsteps: 3"))
    assert len(problems) == 1
    assert problems[0].startswith("x.yaml:2: not valid YAML: ")


def test_an_argument_that_is_not_utf_8_is_rejected(write: Write):
    override = "telemetry.sample_prompt=\udcff"
    assert lines(write(), override)[0].endswith(": telemetry.sample_prompt: is not UTF-8 text")


def test_messages_contain_no_control_characters(write: Write):
    problems = lines(write(), "train.steps=\x1b[31m\n3")
    assert all(line.isprintable() for line in problems)


def test_a_recorded_config_reloads_equal_and_accepts_overrides(write: Write):
    overrides = ["optimizer.kind=lion", "telemetry.sample_prompt=010", "model.norm_eps=1e-7"]
    config = load(write(), overrides).config
    Path("run-1").mkdir()
    recorded = write(dump_yaml(config), "run-1/config.yaml")
    loaded = load_recorded(recorded)
    assert (loaded.config, loaded.name) == (config, "run-1")
    assert load_recorded(recorded, ["run.dir=/here"]).config.run.dir == Path("/here")
    write("base: a.yaml\n" + dump_yaml(config), "run-1/config.yaml")
    with pytest.raises(ConfigError, match="base: unknown key"):
        load_recorded(recorded)


@pytest.mark.parametrize("key", ["spikes", "rollback"])
def test_null_turns_a_guard_off_and_a_later_override_turns_it_on(write: Write, key: str):
    path = write(MINIMAL + f"guards: {{{key}: null}}\n", "off.yaml")
    for off in (load(path).config, load(write(), [f"guards.{key}=null"]).config):
        assert getattr(off.guards, key) is None
        assert load_recorded(write(dump_yaml(off), "recorded.yaml")).config == off
    on = load(path, [f"guards.{key}.warmup_steps=50"]).config
    assert getattr(on.guards, key).warmup_steps == 50


def test_names_of_other_trainers_lead_to_keys_that_exist():
    keys = {leaf.key for leaf in iter_fields()}
    assert set(OTHER_NAMES.values()) | set(NOTES) <= keys
    assert not set(ADVICE) & set(OTHER_NAMES)
    # A name that is a key of ours in the same section never gets there; in others it is a hint.
    assert OTHER_NAMES["learning_rate"] == "optimizer.learning_rate"
