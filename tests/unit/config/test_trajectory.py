import re
import textwrap
from pathlib import Path

import pytest

from jaxres.config import (
    RunConfig,
    check_same,
    diff,
    digest,
    dump_yaml,
    free_changes,
    load,
    load_recorded,
    loss_scale,
    moved_content,
    run_dirs,
    trajectory,
    with_absolute_paths,
)
from jaxres.config.schema.fields import is_free, iter_fields
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError

from .conftest import MINIMAL, Write


def config(write: Write, *overrides: str) -> RunConfig:
    return load(write(), overrides).config


def test_the_trajectory_has_the_keys_not_declared_free(write: Write):
    keys = trajectory(config(write, "model.kind=mlp", "optimizer.schedule.kind=linear"))
    assert keys == {
        "run": {"seed": 0},
        "data": {
            "source": {"kind": "text", "include": ["**/*"], "exclude": []},
            "tokenizer": {"kind": "bytes"},
            "seq_len": 256,
            "heldout_fraction": 0.02,
        },
        "model": {"kind": "mlp", "num_layers": 2, "d_model": 64, "vocab_size": None},
        "optimizer": {
            "kind": "adamw",
            "learning_rate": 0.0003,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "schedule": {
                "kind": "linear",
                "warmup_fraction": 0.05,
                "final_fraction": 0.0,
                "horizon_steps": 30,
            },
            "b1": 0.9,
            "b2": 0.95,
            "eps": 1e-8,
        },
        "train": {"global_batch_size": 24, "reduction": "fast"},
        "guards": {
            "spikes": {
                "clip_deviations": 4.0,
                "skip_deviations": 10.0,
                "window_steps": 100,
                "warmup_steps": 100,
            }
        },
    }


def test_the_digest_of_a_known_config_never_changes(write: Write):
    overrides = ["model.kind=mlp", "optimizer.schedule.kind=linear"]
    # A change here makes every existing run a new one: that is a breaking change.
    assert digest(config(write, *overrides)) == (
        "abf1b3e7d4acb078d2cbe121ce09776787626150be62fe9ebd3b3111834342fa"
    )
    # Runs of the first definition are found by this digest.
    assert digest(config(write, *overrides), with_paths=True) == (
        "f8eeee48a00c773b9bf24f5b91881c2ddd527a9426f99c3b3690bd1527c1fa85"
    )


def test_an_explicit_default_does_not_change_the_digest(write: Write):
    bare = config(write)
    full = load_recorded(write(dump_yaml(bare), "full.yaml")).config
    assert digest(full) == digest(bare)
    assert digest(config(write, "optimizer.clip_norm=1", "optimizer.kind=adamw")) == digest(bare)


@pytest.mark.parametrize(
    "override",
    [
        "run.dir=elsewhere",
        "mesh.fsdp=2",
        "train.microbatches=2",
        "checkpoint.when.every_steps=3",
        "checkpoint.keep.daily=3",
        "model.remat=block",
        "data.cache_dir=there",
        "telemetry.sample_tokens=3",
    ],
)
def test_a_free_key_changes_neither_digest_nor_run_directory_name(write: Write, override: str):
    bare, other = config(write), config(write, override)
    assert digest(other) == digest(bare)
    check_same(bare, other, "runs/x")
    changed = [key for key, _, _ in free_changes(bare, other)]
    assert changed == [key for key in [override.partition("=")[0]] if key != "run.dir"]


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "data.seq_len=128",
        "data.heldout_fraction=0.1",
        "data.packing=best_fit",
        "model.dropout=0.1",
        "optimizer.b1=0.5",
        "optimizer.schedule.warmup_fraction=0.1",
        "train.global_batch_size=48",
        "train.steps=31",
        "guards.spikes.skip_deviations=20",
        "guards.rollback.rate_factor=0.5",
        "guards.spikes.mode=warn",
    ],
)
def test_a_trajectory_key_changes_the_digest_and_is_the_only_difference(
    write: Write, override: str
):
    bare, other = config(write), config(write, override)
    assert digest(other) != digest(bare)
    assert [key for key, _, _ in diff(bare, other)] == [override.partition("=")[0]]
    assert free_changes(bare, other) == []


@pytest.mark.parametrize("kind", ["seconds", "continuous", "auto"])
def test_when_to_save_is_free_as_a_whole(write: Write, kind: str):
    bare, other = config(write), config(write, f"checkpoint.when.kind={kind}")
    assert digest(other) == digest(bare)
    assert [key for key, _, _ in free_changes(bare, other)] == ["checkpoint.when.kind"]


def test_every_key_is_free_or_in_the_trajectory(write: Write):
    dumped = dump_yaml(config(write))
    free = {leaf.key for leaf in iter_fields() if is_free(leaf.info)}
    assert {"run.dir", "mesh.data", "checkpoint.keep_last", "model.attention"} <= free
    assert {"data.source.path", "init_from.path"} <= free
    assert not {"run.seed", "model.d_model", "train.steps", "optimizer.b1"} & free
    assert "d_model" in dumped


@pytest.mark.parametrize(
    ("schedule", "is_bound"),
    [
        ("{kind: cosine}", True),
        ("{kind: constant, warmup_fraction: 0.1}", True),
        ("{kind: constant}", False),
        ("{kind: cosine, horizon_steps: 30}", False),
        ("{kind: constant, warmup_fraction: 0.1, horizon_steps: 9}", False),
    ],
)
def test_steps_belong_to_the_trajectory_if_the_learning_rate_depends_on_them(
    write: Write, schedule: str, is_bound: bool
):
    overrides = [f"optimizer.schedule={schedule}"]
    short, long = config(write, *overrides), config(write, *overrides, "train.steps=60")
    assert (digest(short) != digest(long)) == is_bound
    if is_bound:
        assert diff(short, long) == [("train.steps", 30, 60)]
    else:
        assert free_changes(short, long) == [("train.steps", 30, 60)]


def test_a_run_can_grow_if_its_schedule_keeps_its_horizon(write: Write):
    short = config(write)
    long = config(write, "train.steps=60", "optimizer.schedule.horizon_steps=30")
    check_same(short, long, "runs/x")
    check_same(long, short, "runs/x")


def test_the_default_run_directory_is_named_by_config_and_digest(write: Write):
    bare = config(write)
    *earlier, current = run_dirs(bare, "x")
    assert current == Path.cwd() / "runs" / f"x-{digest(bare)[:8]}"
    assert earlier == [Path.cwd() / "runs" / f"x-{digest(bare, with_paths=True)[:8]}"]
    assert run_dirs(config(write, "run.dir=a/b"), "x") == (Path.cwd() / "a/b",)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("data.source={kind: text, path: %s}", "data.source.path"),
        ("data.source={kind: tokens, path: %s}", "data.source.path"),
        ("init_from={kind: run, path: %s}", "init_from.path"),
        ("init_from={kind: safetensors, path: %s}", "init_from.path"),
    ],
)
def test_a_path_whose_content_has_a_fingerprint_is_free_and_reported_as_moved(
    write: Write, section: str, path: str
):
    one, other = (config(write, section % place) for place in ("here", "there"))
    assert digest(one) == digest(other)
    assert run_dirs(one, "x")[-1] == run_dirs(other, "x")[-1]
    check_same(one, other, "runs/x")
    places = [str(Path.cwd() / place) for place in ("here", "there")]
    assert moved_content(one, other) == [(path, *places)]
    assert moved_content(one, one) == []
    assert moved_content(one, config(write, section % places[0])) == []
    assert digest(one, with_paths=True) != digest(other, with_paths=True)


MIXTURE = """data.source={kind: mixture, sources: [
  {name: web, weight: %s, source: {kind: text, path: %s}},
  {name: own, weight: 1, source: {kind: custom, target: 'a.b:c', args: {at: %s, n: %s},
                                  path_args: [at]}}]}"""


def test_the_paths_of_a_mixture_are_free_and_its_weights_are_not(write: Write):
    bare = ("telemetry.sample_tokens=0",)
    one = config(write, MIXTURE % (1, "here", "x", 5), *bare)
    moved = config(write, MIXTURE % (1, "there", "y", 5), *bare)
    assert digest(one) == digest(moved)
    part = "data.source.sources[%d].source."
    path = (part % 0 + "path", str(Path.cwd() / "here"), str(Path.cwd() / "there"))
    assert moved_content(one, moved) == [path, (part % 1 + "args.at", "x", "y")]
    check_same(one, moved, "runs/x")
    for other, key in (
        ((2, "here", "x", 5), "sources[0].weight: recorded 1.0, given 2.0"),
        ((1, "here", "x", 6), "sources[1].source.args.n: recorded 5, given 6"),
    ):
        given = config(write, MIXTURE % other, *bare)
        assert digest(given) != digest(one)
        with pytest.raises(ConfigError, match=re.escape(key)):
            check_same(one, given, "runs/x")


def test_recorded_paths_of_content_do_not_depend_on_the_working_directory(write: Write):
    given = config(
        write,
        "data.source={kind: jsonl, path: here/*.jsonl}",
        "data.tokenizer={kind: huggingface, path: there}",
        "data.validation=[{name: one, source: {kind: tokens, path: there}}]",
        "init_from={kind: run, path: ~/run}",
    )
    recorded = with_absolute_paths(given)
    assert recorded.data.source.path == str(Path.cwd() / "here/*.jsonl")
    assert recorded.data.tokenizer.path == Path.cwd() / "there"
    assert recorded.data.validation[0].source.path == Path.cwd() / "there"
    for same in ("{stdlib}/json", "~/text", "gs://bucket/text", "/text"):
        source = f"data.source={{kind: text, path: '{same}'}}"
        assert with_absolute_paths(config(write, source)).data.source.path == same
    assert free_changes(recorded, given) == []
    assert digest(recorded) == digest(given)


@pytest.mark.parametrize(
    "override",
    [
        "data.source.include=[a]",
        "data.source.exclude=[a]",
        "data.source={kind: tokens, path: '{stdlib}'}",
        "data.source={kind: custom, target: 'a:b', args: {path: x}}",
        "init_from={kind: run, path: a, at_step: 3}",
    ],
)
def test_what_is_read_of_a_path_and_how_stays_in_the_trajectory(write: Write, override: str):
    assert digest(config(write, override)) != digest(config(write))


def test_arguments_of_a_custom_source_have_no_fingerprint_of_ours_and_stay(write: Write):
    one, other = (
        config(write, f"data.source={{kind: custom, target: 'a:b', args: {{path: {place}}}}}")
        for place in ("here", "there")
    )
    assert [key for key, _, _ in diff(one, other)] == ["data.source.args.path"]
    assert moved_content(one, other) == []


def refusal(write: Write, *overrides: str) -> str:
    recorded, loaded = config(write), load(write(), overrides)
    with pytest.raises(ConfigError) as caught:
        check_same(recorded, loaded.config, Path("runs/x-3f9c"), origins=loaded.origins)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


def test_another_trajectory_is_rejected_with_a_diff_and_the_remedy(write: Write):
    assert refusal(write, "data.seq_len=128") == textwrap.dedent(
        """\
        runs/x-3f9c: this run was started with another trajectory (exit 78)
          data.seq_len: recorded 256, given 128 (command line)
        To resume that run, drop the override; to start a new run, change run.dir or leave it out."""  # noqa: E501
    )


def test_other_steps_are_rejected_with_the_horizon_as_remedy(write: Write):
    assert refusal(write, "train.steps=60") == textwrap.dedent(
        """\
        runs/x-3f9c: this run was started with another trajectory (exit 78)
          train.steps: recorded 30, given 60 (command line)
        To resume that run, drop the override; to start a new run, change run.dir or leave it out.
        The learning rate depends on train.steps. To train longer in that run, add optimizer.schedule.horizon_steps=30: after that step the rate stays at its final value."""  # noqa: E501
    )


def test_another_kind_is_listed_once_with_the_differing_common_keys(write: Write):
    keys = [key for key, _, _ in diff(config(write), config(write, "optimizer.kind=sgd"))]
    assert keys == ["optimizer.learning_rate", "optimizer.weight_decay", "optimizer.kind"]


def test_values_from_a_file_are_reported_with_their_line(write: Write):
    recorded = config(write)
    loaded = load(write(MINIMAL + "run: {seed: 3}\n", "y.yaml"))
    with pytest.raises(ConfigError) as caught:
        check_same(recorded, loaded.config, "runs/x", origins=loaded.origins)
    assert "  run.seed: recorded 0, given 3 (y.yaml:5)\nTo resume that run, give the values" in str(
        caught.value
    )


def test_initial_weights_belong_to_the_trajectory_and_the_default_keeps_old_digests(write: Write):
    plain = config(write)
    assert digest(config(write, "init_from.kind=seed")) == digest(plain)
    assert "init_from" not in trajectory(plain)
    one, other = (config(write, f"init_from={{kind: run, path: x, at_step: {n}}}") for n in (1, 2))
    assert len({digest(plain), digest(one), digest(other)}) == 3, "each has its own run directory"
    assert [key for key, _, _ in diff(one, other)] == ["init_from.at_step"]
    assert [key for key, _, _ in diff(plain, one)] == ["init_from"]


def test_the_rate_after_rollbacks_is_in_the_trajectory_and_the_default_keeps_old_digests(
    write: Write,
):
    plain = config(write)
    for override in ("rate_factor=1", "rate_steps=9", "max_rollbacks=9"):
        assert digest(config(write, f"guards.rollback.{override}")) == digest(plain)
    assert digest(config(write, "guards.rollback=null")) == digest(plain)
    overrides = ["guards.rollback.rate_factor=0.5"]
    half, longer = (
        config(write, *overrides),
        config(write, *overrides, "guards.rollback.rate_steps=9"),
    )
    assert [key for key, _, _ in diff(half, longer)] == ["guards.rollback.rate_steps"]
    assert len({digest(plain), digest(half), digest(longer)}) == 3


def test_a_loss_scale_belongs_to_the_trajectory_if_the_loss_is_scaled(write: Write):
    plain, half = config(write), config(write, "model.compute_dtype=float16")
    scale = half.train.loss_scale
    assert (loss_scale(plain), loss_scale(half)) == (None, scale)
    for override in ("first=4096", "grow_every_steps=9", "when=never"):
        assert digest(config(write, f"train.loss_scale.{override}")) == digest(plain)
    other = config(write, "model.compute_dtype=float16", "train.loss_scale.first=4096")
    assert [key for key, _, _ in diff(half, other)] == ["train.loss_scale.first"]
    always = config(write, "model.compute_dtype=float16", "train.loss_scale.when=always")
    assert digest(always) == digest(half) != digest(other)
    never = config(write, "model.compute_dtype=float16", "train.loss_scale.when=never")
    assert loss_scale(never) is None
    assert digest(never) != digest(half)


def test_arguments_that_the_sources_own_fingerprint_covers_are_free_and_reported_as_moved(
    write: Write,
):
    one, other, many = (
        config(
            write,
            f"data.source={{kind: custom, target: 'a:b', args: {{path: {place}, n: {n}}}, "
            "path_args: [path]}",
        )
        for place, n in (("here", 1), ("there", 1), ("here", 2))
    )
    assert digest(one) == digest(other) != digest(many)
    assert moved_content(one, other) == [("data.source.args.path", "here", "there")]
    assert [key for key, _, _ in diff(one, many)] == ["data.source.args.n"]
    before = config(write, "data.source={kind: custom, target: 'a:b', args: {path: here, n: 1}}")
    check_same(before, other, "runs/x")  # The list may be added to a run that has started.
    assert digest(before, with_paths=True) == digest(one, with_paths=True)
