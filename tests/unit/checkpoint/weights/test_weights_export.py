"""Exports compute the same in any Llama implementation and are imported again bit for bit."""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights import hf_tensors, origin, safetensors
from jaxres.checkpoint.weights import source as weights_source
from jaxres.cli.checkpoints import command as checkpoints_cli
from jaxres.clock import SystemClock
from jaxres.config.huggingface_export import fields_of
from jaxres.config.schema.training import FromSafetensors, LoraSection
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.runlog.run_log import Prune, RunLog
from tests import damage as damages
from tests.tiers import slow_but
from tests.unit.checkpoint.llama_run import (
    ROWS,
    T,
    config,
    flat,
    llama_forward,
    logits,
    random_params,
    run_of,
)

TOKENS = np.random.default_rng(1).integers(0, ROWS, (2, T))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A run of a decoder with an untied output layer, and its parameters."""
    cfg = config(tie_embeddings=False)
    params = random_params(cfg.model)
    return run_of(tmp_path_factory.mktemp("untied") / "run", cfg, params), cfg, params


def run_command(capsys, *arguments, code=0):
    assert checkpoints_cli.main(["checkpoints", *map(str, arguments)], usage="") == code
    return capsys.readouterr()


def json_rows(capsys, *arguments, code=0):
    return [
        json.loads(row)
        for row in run_command(capsys, *arguments, "--json", code=code).out.splitlines()
    ]


def read_by_package(folder):
    """Returns the tensors that the reference package reads from a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            assert file.metadata()["format"] == "pt"
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tie_embeddings", slow_but([False, True], True))
def test_an_independent_llama_computes_the_same_logits_from_an_export(
    tmp_path, capsys, tie_embeddings
):
    cfg = config(tie_embeddings=tie_embeddings)
    params = random_params(cfg.model)
    run_dir = run_of(tmp_path / "run", cfg, params)
    run_command(capsys, "export", run_dir.root, "--out", tmp_path / "out")
    found = read_by_package(tmp_path / "out")
    assert len(found) == 2 * 9 + (2 if tie_embeddings else 3)
    there = llama_forward(found, (tmp_path / "out" / "config.json").read_text(), TOKENS)
    here = logits(cfg.model, params, TOKENS)
    assert np.abs(here).max() > 2
    # float32 against float64: measured 8e-7; a misplaced tensor gives more than 0.1.
    assert np.abs(here - there).max() < 2e-5


@pytest.mark.slow
def test_an_export_of_adapters_is_one_llama_that_computes_the_same(tmp_path, capsys):
    adapters = LoraSection(rank=2, alpha=3.0, targets=("*attention/*", "*feed_forward/*"))
    cfg = config().model_copy(update={"lora": adapters})
    params = random_params(cfg.model, adapters=adapters)
    run_dir = run_of(tmp_path / "run", cfg, params)
    run_command(capsys, "export", run_dir.root, "--out", tmp_path / "out")
    found = read_by_package(tmp_path / "out")
    there = llama_forward(found, (tmp_path / "out" / "config.json").read_text(), TOKENS)
    here = logits(cfg.model, params, TOKENS, adapters)
    assert np.abs(here - there).max() < 1e-4
    without = {name: part for name, part in params.items() if name != "lora"}
    assert np.abs(here - logits(cfg.model, without, TOKENS)).max() > 0.1


@pytest.mark.slow
def test_adapters_alone_added_as_peft_does_give_the_merged_export(tmp_path, capsys):
    adapters = LoraSection(rank=2, alpha=3.0, targets=("*attention/*", "*feed_forward/up"))
    cfg = config().model_copy(update={"lora": adapters})
    params = random_params(cfg.model, adapters=adapters)
    run_dir = run_of(tmp_path / "run", cfg, params)
    run_command(capsys, "export", run_dir.root, "--out", tmp_path / "merged")
    merged = read_by_package(tmp_path / "merged")
    run_command(capsys, "export", run_dir.root, "--names", "peft", "--out", tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    expected = ["k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (fields["r"], fields["lora_alpha"], fields["target_modules"]) == (2, 3.0, expected)
    pairs = safetensors.open_path(tmp_path / "adapter/adapter_model.safetensors")
    base = {name: part for name, part in params.items() if name != "lora"}
    plain = run_of(tmp_path / "plain", config(), base)
    run_command(capsys, "export", plain.root, "--out", tmp_path / "base")
    found = read_by_package(tmp_path / "base")
    for name, tensor in found.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in pairs:
            a, b = (pairs.pop(f"{module}.lora_{x}.weight").read() for x in "AB")
            tensor = tensor + 3.0 / 2 * b @ a
        assert np.abs(tensor - merged[name]).max() < 1e-5, name
    assert pairs == {}, "no tensor without a module"
    err = run_command(capsys, "export", plain.root, "--names", "peft", code=64).err
    assert "the run has no adapters" in err


@pytest.mark.slow
def test_an_export_has_the_averaged_parameters_where_there_are_some(tmp_path, capsys):
    cfg = config(tie_embeddings=False)
    params, average = random_params(cfg.model), random_params(cfg.model, seed=1)
    frozen = average.pop("head")
    run_dir = run_of(tmp_path / "run", cfg, params, ema=average)
    run_command(capsys, "export", run_dir.root, "--names", "jaxres", "--out", tmp_path / "out")
    found = read_by_package(tmp_path / "out")
    expected = flat({**average, "head": params["head"]})
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], expected[path]) for path in expected)
    assert not np.array_equal(frozen, params["head"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", ["llama", "jaxres"])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_an_export_is_imported_bit_for_bit(tmp_path, capsys, untied, dtype, names, shard_bytes):
    run_dir, _, params = untied
    out = tmp_path / "out"
    options = ("--names", names, "--dtype", dtype, "--max-shard-bytes", shard_bytes, "--out", out)
    (exported,) = json_rows(capsys, "export", run_dir.root, *options)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes == 10**9)
    found, _ = weights_export.of_folder(out)
    for path, array in flat(params).items():
        there = found.read(path)
        wanted = array.astype(there.dtype)
        assert there.dtype.name == dtype
        assert (there.shape, there.tobytes()) == (wanted.shape, wanted.tobytes()), path
    (imported,) = json_rows(capsys, "import", out)
    assert imported["params"] == exported["params"]
    assert read_by_package(out).keys() == weights_source.from_safetensors(out).tensors.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "no temporary folder is left"


def test_a_config_that_contradicts_the_export_beside_it_is_refused(tmp_path, capsys, untied):
    """The number of heads changes no shape."""
    out = tmp_path / "out"
    run_command(capsys, "export", untied[0].root, "--names", "llama", "--out", out)
    fields = json.loads((out / "config.json").read_text())
    heads = fields["num_attention_heads"]
    changed = {"num_attention_heads": 2 * heads, "num_key_value_heads": 2 * heads}
    head_dim = fields["hidden_size"] // (2 * heads)
    (out / "config.json").write_text(json.dumps(fields | changed | {"head_dim": head_dim}))
    with pytest.raises(ConfigError, match=r"config\.json: gives .*, and jaxres\.json beside it"):
        weights_source.from_safetensors(out)
    (out / "jaxres.json").unlink()
    assert weights_source.from_safetensors(out).facts["num_heads"] == 2 * heads


def test_an_export_takes_over_what_serving_needs_from_the_folder_of_the_initial_weights(
    tmp_path, capsys, untied
):
    run_dir, cfg, params = untied
    given, out = tmp_path / "given", tmp_path / "out"
    run_command(capsys, "export", run_dir.root, "--out", given)
    own = json.loads((given / "config.json").read_text())
    served = {"max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": [256, 3]}
    beside = {"generation_config.json": "{}", "chat_template.jinja": "{{ messages }}"}
    for name, text in beside.items():
        (given / name).write_text(text)
    tuned = cfg.model_copy(update={"init_from": FromSafetensors(path=given)})
    tuned_run = run_of(tmp_path / "tuned", tuned, params)
    for change, taken in (
        ({}, served),
        ({"rope_theta": 5.0}, {}),
        ({"model_type": "t5"}, {}),
        (None, {}),
    ):
        (given / "config.json").unlink(missing_ok=True)
        if change is not None:
            (given / "config.json").write_text(json.dumps(own | served | change))
        printed = run_command(capsys, "export", tuned_run.root, "--out", out).out
        assert json.loads((out / "config.json").read_text()) == own | taken
        found = {path.name: path.read_text() for path in out.iterdir() if path.name in beside}
        assert found == (beside if taken else {})
        assert str(given) in printed.splitlines()[-1], "what is taken over, or why nothing is"
        shutil.rmtree(out)


@pytest.mark.parametrize(("own", "taken"), [(3, [2, 3]), (None, [2, 3]), (4, 4)])
def test_the_ends_of_the_initial_weights_are_taken_over_if_the_run_has_one_of_them(
    tmp_path, own, taken
):
    cfg = config().model_copy(update={"init_from": FromSafetensors(path=tmp_path)})
    fields = fields_of(cfg.model, rows=64, dtype="float32", seq_len=8, eos=own)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eos_token_id": [2, 3]}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    found = origin.find(cfg, fields)
    assert (fields | found.fields)["eos_token_id"] == taken
    assert bool(found.beside) == (taken != own)


def test_shards_are_small_and_the_index_names_every_tensor(tmp_path, capsys, untied):
    out = tmp_path / "out"
    run_command(capsys, "export", untied[0].root, "--out", out, "--max-shard-bytes", 20_000)
    index = json.loads((out / safetensors.INDEX).read_text())
    assert set(index["weight_map"].values()) == {p.name for p in out.glob("model-*.safetensors")}
    total = 0
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "numpy") as opened:
            total += opened.get_tensor(name).nbytes
    assert index["metadata"]["total_size"] == total
    large = [p for p in out.glob("model-*.safetensors") if p.stat().st_size > 20_000 + 2000]
    for path in large:  # One tensor alone is larger than the limit.
        assert len(safetensors.open_file(path)) == 1


@pytest.mark.slow
def test_exports_of_a_run_are_compared_with_their_steps(tmp_path, capsys):
    cfg = config()
    run_dir = run_of(tmp_path / "run", cfg, random_params(cfg.model), steps=(4, 8))
    run_command(capsys, "export", run_dir.root, "--step", 4)
    run_command(capsys, "export", run_dir.root)
    run_command(capsys, "export", run_dir.root, "--dtype", "bfloat16")
    found = json_rows(capsys, "import", run_dir.root)
    assert [(row["step"], row["equal"]) for row in found] == [(8, True), (8, True)]
    (four,) = json_rows(capsys, "import", run_dir.root, "--step", 4)
    assert Path(four["path"]).name == "00000004-llama-float32"
    assert four["params"] not in [row["params"] for row in found]

    other = run_dir.exports / "00000008-llama-float32"
    about = json.loads((other / "jaxres.json").read_text())
    (run_dir.exports / "00000004-llama-float32" / "jaxres.json").rename(other / "x")
    (other / "x").rename(other / "jaxres.json")  # Its step is 4, and so are its checksums.
    assert about["step"] == 8
    assert "other numbers" in run_command(capsys, "import", other, code=78).err


@pytest.mark.slow
def test_a_folder_of_the_same_step_with_other_numbers_is_not_equal(tmp_path, capsys):
    cfg = config()
    run_dir = run_of(tmp_path / "run", cfg, random_params(cfg.model))
    twin = run_of(tmp_path / "twin", cfg, random_params(cfg.model, seed=1))
    run_command(capsys, "export", twin.root, "--out", run_dir.exports / "twin")
    (row,) = json_rows(capsys, "import", run_dir.root, code=1)
    assert row["equal"] is False


def test_import_names_the_config_that_the_weights_need(tmp_path, capsys, untied):
    run_dir, cfg, params = untied
    (exported,) = json_rows(capsys, "export", run_dir.root, "--out", tmp_path / "a")
    (row,) = json_rows(capsys, "import", tmp_path / "a", "--out", tmp_path / "b")
    section = cfg.model.model_dump() | {"vocab_size": ROWS}
    assert {**section, **row["config"]["model"]} == section
    assert row["config"]["init_from"] == {"kind": "safetensors", "path": str(tmp_path / "b")}
    found, model = weights_export.of_folder(tmp_path / "b")
    assert model is None
    assert weights_export.digest_of(found) == exported["params"]
    assert read_by_package(tmp_path / "b").keys() == flat(params).keys()


def test_the_tokenizer_of_an_export_is_the_bytes_tokenizer(tmp_path, capsys, untied):
    run_command(capsys, "export", untied[0].root, "--out", tmp_path / "out")
    made = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert sorted(made["model"]["vocab"].values()) == list(range(256))
    assert made["model"]["vocab"]["A"] == ord("A")
    assert made["model"]["vocab"]["Ġ"] == ord(" ")  # The byte-level alphabet of GPT-2.
    assert [token["id"] for token in made["added_tokens"]] == [256]


def test_a_flipped_bit_in_an_export_is_reported_on_import(tmp_path, capsys, untied):
    run_command(capsys, "export", untied[0].root, "--out", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    err = run_command(capsys, "import", tmp_path / "out", code=78).err
    assert str(path) in err
    assert "other numbers than jaxres.json records" in err


@pytest.mark.slow
def test_a_flipped_bit_in_a_step_is_never_exported(tmp_path, capsys, untied):
    root, original = tmp_path / "run", tmp_path / "honest"
    shutil.copytree(untied[0].root, root)
    (exported,) = json_rows(capsys, "export", root, "--out", original)
    data = max((root / "checkpoints").rglob("*"), key=lambda path: path.stat().st_size)
    before, chance, refused = data.read_bytes(), random.Random(0), 0
    for number in range(20):
        damages.flip_bit(data, chance)
        out = tmp_path / str(number)
        code = checkpoints_cli.main(
            ["checkpoints", "export", str(root), "--out", str(out)], usage=""
        )
        errors = capsys.readouterr().err
        assert code in (0, 85), errors
        assert (code == 85) == ("has another digest than was committed" in errors), errors
        assert out.exists() == (code == 0)
        refused += code == 85
        if code == 0:  # The bit does not belong to a parameter.
            assert read_by_package(out).keys() == read_by_package(original).keys()
            for name, array in read_by_package(out).items():
                assert array.tobytes() == read_by_package(original)[name].tobytes()
        data.write_bytes(before)
    assert refused >= 5, f"{exported}: too few flips hit a parameter"


def test_an_export_that_reads_back_differently_is_deleted(tmp_path, untied, monkeypatch):
    run_dir, cfg, _ = untied
    commit = weights_source.committed(run_dir, step=None)
    params = weights_export.of_run(weights_source.from_run(run_dir, cfg, commit))
    original = safetensors.write_file

    def write_with_a_bit_flipped(path, infos, contents):
        original(path, infos, contents)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(safetensors, "write_file", write_with_a_bit_flipped)
    with pytest.raises((ConfigError, StorageUnavailable), match="other numbers"):
        weights_export.write(
            params,
            tmp_path / "out",
            names="llama",
            rules=hf_tensors.LLAMA,
            max_shard_bytes=10**9,
            about={},
            beside={},
        )
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_are_not_contiguous_are_written_correctly(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T[::-1]
    info = weights_source.ArrayInfo("float32", array.shape)
    safetensors.write_file(tmp_path / "x.safetensors", {"a": info}, iter([("a", array)]))
    assert read_by_package(tmp_path)["a"].tolist() == array.tolist()


def test_no_export_is_written_among_the_steps_or_the_records_of_a_run(tmp_path, capsys, untied):
    root = untied[0].root
    (tmp_path / "link").symlink_to(root)
    for out in (root / "checkpoints" / "x", root / "log", tmp_path / "link" / "checkpoints" / "x"):
        before = sorted(root.rglob("*"))
        err = run_command(capsys, "export", root, "--out", out, code=64).err
        assert "lies in a folder for the run's own files" in err
        assert sorted(root.rglob("*")) == before


def test_a_refused_export_or_import_reports_the_reason(tmp_path, capsys, untied):
    root = untied[0].root
    err = run_command(capsys, "export", root, "--names", "gpt2", code=64).err
    assert "the model is a llama. Use --names llama" in err
    run_command(capsys, "export", root, "--out", tmp_path / "out")
    err = run_command(capsys, "export", root, "--out", tmp_path / "out", code=64).err
    assert "exists already" in err
    assert (
        "step 3 is not committed" in run_command(capsys, "export", root, "--step", 3, code=64).err
    )
    assert "no run here" in run_command(capsys, "export", tmp_path, code=64).err
    assert "no export of step 3" in run_command(capsys, "import", root, "--step", 3, code=64).err
    assert "no such file" in run_command(capsys, "import", tmp_path / "absent", code=78).err


def test_bfloat16_is_rounded_to_the_nearest(tmp_path, capsys, untied):
    run_dir, _, params = untied
    run_command(capsys, "export", run_dir.root, "--out", tmp_path / "out", "--dtype", "bfloat16")
    there = read_by_package(tmp_path / "out")["model.embed_tokens.weight"]
    assert there.dtype == ml_dtypes.bfloat16
    here = np.asarray(params["embedding"])
    assert np.array_equal(there, here.astype(ml_dtypes.bfloat16))
    assert np.abs(there.astype(np.float32) - here).max() <= np.abs(here).max() * 2**-8


def test_a_step_that_is_pruned_while_it_is_exported_is_not_reported_as_damaged(
    tmp_path, monkeypatch
):
    cfg = config()
    run_dir = run_of(tmp_path / "run", cfg, random_params(cfg.model), steps=(4, 8))
    log = RunLog(run_dir.log, attempt=1, last_seq=4, clock=SystemClock())
    original = weights_export.write

    def write_late(params, out, **kwargs):
        log.append(Prune(steps=(4,)))
        (path,) = run_dir.checkpoints.glob("*04-*")
        shutil.rmtree(path)
        return original(params, out, **kwargs)

    monkeypatch.setattr(weights_export, "write", write_late)
    command = ["checkpoints", "export", str(run_dir.root), "--step", "4"]
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert checkpoints_cli.main(command, usage="") == 64
    assert "step 4 is not committed (committed: 8)" in err.getvalue()
    assert list(run_dir.exports.iterdir()) == []


def test_weights_from_which_no_run_can_start_are_not_imported_as_valid(untied, tmp_path, capsys):
    run_dir, _, _ = untied
    folder = tmp_path / "foreign"
    run_command(capsys, "export", run_dir.root, "--out", folder)
    (folder / weights_source.ABOUT).unlink()
    (place,) = folder.glob("*.safetensors")
    tensors = {name: np.array(value) for name, value in load_file(place).items()}
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, place, metadata={"format": "pt"})
    shown = run_command(capsys, "import", folder, code=78)
    assert f"{folder}: 1 of " in shown.err
    assert "are not finite" in shown.err
    assert "to start a run" not in shown.out
    tensors["model.norm.weight"][0] = 1
    save_file(tensors, place, metadata={"format": "pt"})
    assert "to start a run" in run_command(capsys, "import", folder).out
