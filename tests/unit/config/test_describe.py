import pytest
from pydantic import TypeAdapter, ValidationError

from jaxres.config import describe, dump_yaml, load, load_recorded
from jaxres.config.schema.fields import iter_fields

from .conftest import Write


@pytest.mark.slow
def test_every_setting_of_every_kind_is_listed_with_its_meaning():
    text = describe()
    for leaf in iter_fields():
        assert f"    {leaf.key}: " in text
        meaning = leaf.docstring
        assert meaning, f"{leaf.key} has no docstring"
        first = meaning.splitlines()[0]
        assert first.endswith((".", ")")), f"the first line of {leaf.key} is no sentence"
        for line in meaning.splitlines():
            assert line.strip() in text, f"--help cuts off the description of {leaf.key}"
    for line in text.splitlines():
        assert len(line) <= 120


def test_help_lists_type_default_and_whether_a_key_is_free():
    text = describe()
    for line in (
        "    run.dir: path or gs:// path or null; default null (free)\n",
        "    train.steps: whole number > 0 and <= 2,147,483,647; required\n",
        "    optimizer.clip_norm: number > 0 and <= 1e+30 or null; default 1.0\n",
        "    data.heldout_fraction: number >= 0 and < 1; default 0.02\n",
        '    data.source.include: list of text; default ["**/*"]\n',
        '    data.cache_dir: path; default "~/.cache/jaxres" (free)\n',
        '    model.attention: auto | xla | cudnn; default "auto" (free)\n',
        "  with optimizer.kind=adamw (default); or lion, sgd, adafactor, muon, custom:\n",
        "  with data.source.kind=custom; or text, jsonl, parquet, huggingface, nanogpt, "
        "images, tokens, mixture:\n",
    ):
        assert line in text


def test_no_setting_of_one_kind_is_listed_twice():
    blocks = describe().split("  with ")
    for block in blocks:
        lines = [line for line in block.splitlines() if line.startswith("    ") and ";" in line]
        assert len(lines) == len(set(lines))


def test_every_default_is_valid():
    # pydantic's own check of defaults can't be on: read as JSON, it refuses a Path as default.
    for leaf in iter_fields():
        if leaf.info.is_required():
            continue
        adapter = TypeAdapter(leaf.info.rebuild_annotation())
        try:
            adapter.validate_python(leaf.info.default, strict=True)
        except ValidationError as error:
            pytest.fail(f"{leaf.section.__name__}.{leaf.key}: {error}")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.kind=mlp", "optimizer.kind=lion", "optimizer.schedule.kind=constant"],
        ["data.source={kind: custom, target: 'a.b:c', args: {a: 1.0, b: [], c: {d: null}}}"],
        ["data.source={kind: tokens, path: '3'}", "compilation.cache_dir=null"],
        ["telemetry.sample_prompt='yes\\n'", "optimizer.learning_rate=1e-7", "mesh.data=1"],
    ],
)
def test_a_dumped_config_reloads_equal(write: Write, overrides: list[str]):
    config = load(write(), overrides).config
    assert load_recorded(write(dump_yaml(config), "again.yaml")).config == config


def test_the_run_directory_is_not_recorded(write: Write):
    assert "dir:" not in dump_yaml(load(write(), ["run.dir=a"]).config).split("data:")[0]
