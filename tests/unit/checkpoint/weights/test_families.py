"""Decoders of Hugging Face's families compute what transformers computes, and go both ways.

golden/family_logits.npz is what transformers 5.23 (torch 2.15, float32) computed;
`families_by_transformers.py` makes it again.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres import config as configs
from jaxres import models
from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights import hf_tensors, safetensors
from jaxres.config import huggingface, huggingface_export
from jaxres.config.schema.model import GptModel
from jaxres.faults import ConfigError
from jaxres.models.param_paths import nested
from tests.tiers import campaign, slow_but
from tests.unit.checkpoint import families
from tests.waiting import SURE_SECONDS

GOLDEN = Path(__file__).parents[3] / "golden" / "family_logits.npz"
BOUND = 2e-5
"""Two implementations in float32; measured: at most 4e-6."""


def params_of(folder: Path) -> models.Params:
    stored, _ = weights_export.of_folder(folder)
    return nested({path.removeprefix("params/"): stored.read(path) for path in stored.infos})


def build(model) -> models.Model:
    model = model.model_copy(update={"compute_dtype": "float32"})
    return models.build(model, vocab_size=None, seq_len=families.T, platform="cpu")


@pytest.mark.parametrize("case", slow_but(families.CONFIGS, "llama"))
def test_logits_equal_those_of_transformers(tmp_path, case):
    folder = families.write_folder(tmp_path, families.CONFIGS[case])
    built = build(huggingface.model_of(families.CONFIGS[case])[0])
    params = params_of(folder)
    found = jax.jit(built.logits)(params, jnp.asarray(families.TOKENS))
    expected = np.load(GOLDEN)[case]
    assert np.abs(found[:, -families.COMPARED :] - expected).max() < BOUND
    shapes = jax.tree.map(lambda x: x.shape, jax.eval_shape(built.init, jax.random.key(0)))
    assert shapes == jax.tree.map(lambda x: x.shape, params), "init makes the same arrays"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["gemma3", "llama", "gpt2", *campaign(["mistral"])],
)
def test_tokens_one_by_one_with_a_cache_have_the_same_logits(tmp_path, case):
    built = build(huggingface.model_of(families.CONFIGS[case])[0])
    params, tokens = (
        params_of(families.write_folder(tmp_path, families.CONFIGS[case])),
        jnp.asarray(families.TOKENS),
    )
    whole = jax.jit(built.logits)(params, tokens)
    decode = jax.jit(built.decoder.decode)
    first, cache = decode(params, tokens[:, :5], built.decoder.cache(2, families.T + 3), 0)
    rows = [first]
    for position in range(5, families.T):
        one, cache = decode(params, tokens[:, position : position + 1], cache, position)
        rows.append(one)
    assert np.abs(jnp.concatenate(rows, axis=1) - whole).max() < BOUND


@pytest.mark.parametrize("case", families.CONFIGS)
def test_a_family_is_exported_as_it_was_imported(tmp_path, case):
    folder = families.write_folder(tmp_path / "in", families.CONFIGS[case])
    params, model = weights_export.of_folder(folder)
    out = tmp_path / "out"
    digest = weights_export.write(
        params,
        out,
        names="hf",
        rules=hf_tensors.rules_of(huggingface_export.family_of(model)),
        max_shard_bytes=10**9,
        about={},
        beside={},
    )
    fields = huggingface_export.fields_of(
        model, rows=families.ROWS, dtype="float32", seq_len=families.T, eos=None
    )
    assert huggingface.model_of(json.loads(json.dumps(fields))) == (model, {})
    names = safetensors.open_path(folder).keys()
    written = safetensors.open_path(out)
    assert written.keys() == names
    for name in names:
        assert np.array_equal(
            written[name].read(), families.numbers(name, written[name].info.shape)
        )
    assert weights_export.digest_of(params) == digest


def test_a_gpt2_without_prefix_and_with_its_masks_is_read(tmp_path):
    folder = families.write_folder(tmp_path, families.CONFIGS["gpt2"])
    prefixed = safetensors.open_path(folder)
    bare = {name.removeprefix("transformer."): t.read() for name, t in prefixed.items()}
    bare |= {f"h.{n}.attn.bias": np.zeros((1, 1, 16, 16), np.float32) for n in range(3)}
    expected = params_of(folder)
    (folder / safetensors.SINGLE_FILE).unlink()
    infos = {name: ArrayInfo("float32", array.shape) for name, array in bare.items()}
    safetensors.write_file(folder / safetensors.SINGLE_FILE, infos, iter(bare.items()))
    assert jax.tree.all(jax.tree.map(np.array_equal, params_of(folder), expected))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "falcon"}, "falcon"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"num_hidden_layers": None}, "num_layers"),
        ({"num_attention_heads": 0}, "not a complete config"),
        ({"intermediate_size": -1}, "d_ff: Input should be greater than 0"),
        ({"rope_scaling": "linear"}, "not a complete config"),
    ],
)
def test_what_the_decoder_cannot_compute_is_named(tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps(families.CONFIGS["llama"] | change))
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {{kind: huggingface, path: {tmp_path}}}\ntrain: {{steps: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        configs.load(config)
    assert named in str(caught.value)
    assert "c.yaml:1" in str(caught.value)


def test_a_folder_without_safetensors_trains_only_if_the_config_names_the_seed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(families.CONFIGS["llama"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{kind: huggingface, path: {tmp_path}}}\n"
        "data: {source: {kind: jsonl, path: x}}\ntrain: {steps: 1}\n"
    )
    with pytest.raises(ConfigError, match=r"no model.safetensors .*init_from=\{kind: seed\}"):
        configs.load(config)
    words = ["init_from.kind=seed", "model.vocab_size=300"]
    assert configs.load(config, words).config.init_from.kind == "seed"
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="it is no JSON object"):
        configs.load(config)


def test_a_folder_sets_model_weights_and_tokenizer_unless_they_are_given(tmp_path):
    folder = families.write_folder(tmp_path / "model", families.CONFIGS["qwen3"])
    (folder / "tokenizer.json").write_text("{}")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{kind: huggingface, path: {folder}, remat: block}}\n"
        "data: {source: {kind: jsonl, path: x}}\ntrain: {steps: 1}\n"
    )
    loaded = configs.load(config, ["model.compute_dtype=float32"]).config
    expected = huggingface.model_of(families.CONFIGS["qwen3"])[0]
    assert loaded.model == expected.model_copy(
        update={"remat": "block", "compute_dtype": "float32"}
    )
    assert str(loaded.init_from.path) == str(loaded.data.tokenizer.path) == str(folder)
    overrides = ["init_from.kind=seed", "data.tokenizer={kind: huggingface, path: other}"]
    own = configs.load(config, overrides).config
    assert (own.init_from.kind, str(own.data.tokenizer.path)) == ("seed", "other")


OTHER_TOKENIZERS = {
    "sentencepiece": ("tokenizer.model", "tokenizer_config.json"),
    "byte pairs": ("vocab.json", "merges.txt"),
    "tiktoken": ("qwen.tiktoken",),
    "tekken": ("tekken.json",),
    "none": (),
}


def test_parts_of_a_mixture_and_paths_below_home_are_no_way_around_the_tokenizer(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    fields = families.CONFIGS["llama"] | {"vocab_size": 300}
    families.write_folder(tmp_path / "model", fields)
    text, ids = (f"{{kind: {kind}, path: x}}" for kind in ("text", "tokens"))
    config = tmp_path / "c.yaml"
    refused = list[tuple[str, str]]()
    for model in ("{kind: huggingface, path: ~/model}", "{kind: mlp}"):
        for parts in ((text,), (ids, text), (ids, ids)):
            named = [f"{{name: n{n}, weight: 1, source: {x}}}" for n, x in enumerate(parts)]
            config.write_text(
                f"model: {model}\ninit_from: {{kind: safetensors, path: ~/model}}\n"
                f"data: {{source: {{kind: mixture, sources: [{', '.join(named)}]}}}}\n"
                "train: {steps: 1}\n"
            )
            try:
                loaded = configs.load(config).config
            except ConfigError as error:
                refused.append((str(error), parts))
            else:
                assert str(loaded.init_from.path) == "~/model", "recorded as it is given"
    assert [parts for _, parts in refused] == [(text,), (ids, text)] * 2
    assert all("of a tokenizer there is: nothing" in error for error, _ in refused)


@pytest.mark.parametrize("names", OTHER_TOKENIZERS.values(), ids=OTHER_TOKENIZERS)
def test_weights_without_tokenizer_json_are_not_trained_on_unchosen_bytes(tmp_path, names):
    fields = families.CONFIGS["llama"] | {"vocab_size": 300}
    folder = families.write_folder(tmp_path / "model", fields)
    for name in names:
        (folder / name).write_text("{}")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{kind: huggingface, path: {folder}}}\n"
        "data: {source: {kind: text, path: x}}\ntrain: {steps: 1}\n"
    )
    found = ", ".join(sorted(names)) or "nothing"
    with pytest.raises(
        ConfigError, match=rf"data.tokenizer.* there is: {found}\).*save_pretrained"
    ):
        configs.load(config)
    other = "data.tokenizer={kind: huggingface, path: other}"
    assert str(configs.load(config, [other]).config.data.tokenizer.path) == "other"
    loaded = configs.load(config, ["init_from.allow_changed=[tokenizer]"]).config
    assert (str(loaded.init_from.path), loaded.data.tokenizer.kind) == (str(folder), "bytes")
    assert configs.load(config, ["data.tokenizer={kind: bytes}"]).config.data.tokenizer.kind
    assert configs.load(config, ["init_from.kind=seed"]).config.data.tokenizer.kind == "bytes"
    own = "{kind: gpt, num_layers: 1, d_model: 8, num_heads: 1}"
    given = [f"model={own}", f"init_from={{kind: safetensors, path: {folder}}}"]
    with pytest.raises(
        ConfigError, match=rf"data.tokenizer.* there is: {found}\).*save_pretrained"
    ):
        configs.load(config, given)
    assert configs.load(config, [*given, "data.tokenizer={kind: bytes}"])
    (folder / "tokenizer.json").write_text("{}")
    assert configs.load(config, given).config.data.tokenizer.kind == "bytes", (
        "compared at the start"
    )


def test_sizes_of_a_mixed_model_have_no_family():
    model = huggingface.model_of(families.CONFIGS["gemma"])[0]
    with pytest.raises(ConfigError, match="--names jaxres"):
        huggingface_export.family_of(model.model_copy(update={"bias": "qkv"}))


def test_a_decoder_that_config_json_can_not_say_is_not_exported_as_another():
    sizes = {"num_layers": 4, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 128}
    llama3 = {"kind": "llama3", "factor": 8.0}
    for family, keys, lost in (
        ("gpt2", {"sliding_window": 4}, "model.sliding_window=4"),
        ("gpt2", {"head_dim": 16}, "model.head_dim=16"),
        ("llama", {"sliding_window": 4, "sliding_rope_theta": 500.0}, "model.sliding_rope_theta"),
        ("gemma3_text", {"sliding_window": 4, "rope_scaling": llama3}, "model.sliding_rope_theta"),
        ("gemma3_text", {"sliding_window": 4, "full_attention_every": 2}, ""),
        ("qwen3", {"sliding_window": 4, "full_attention_every": 9}, ""),
        ("qwen3", {"sliding_window": 4, "full_attention_every": 1}, ""),
        ("llama", {"rope_scaling": llama3, "head_dim": 16, "num_kv_heads": 2}, ""),
        ("gpt2", {"rope_theta": 500.0, "rope_scaling": llama3}, ""),
    ):
        model = GptModel.model_validate({**sizes, **huggingface.STYLES[family], **keys})
        given = {"rows": 128, "dtype": "float32", "seq_len": 32, "eos": None}
        if lost:
            with pytest.raises(ConfigError, match=f"can't say {lost}.*--names jaxres"):
                huggingface_export.fields_of(model, **given)
        else:
            assert huggingface_export.fields_of(model, **given)["vocab_size"] == 128, family


@pytest.mark.campaign
def test_transformers_still_computes_the_recorded_logits(tmp_path):
    script = Path(families.__file__).with_name("families_by_transformers.py")
    python = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
    subprocess.run([python, script, tmp_path / "out.npz"], check=True, timeout=SURE_SECONDS)
    found, recorded = np.load(tmp_path / "out.npz"), np.load(GOLDEN)
    for case in families.CONFIGS:
        assert math.isclose(np.abs(found[case] - recorded[case]).max(), 0, abs_tol=1e-5)
