"""Mismatches between weights and a model are listed, and are errors unless they are allowed."""

import json

import numpy as np
import pytest

from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import hf_tensors
from jaxres.checkpoint.weights import mapping as weights_mapping
from jaxres.checkpoint.weights import source as weights_source
from jaxres.checkpoint.weights.source import Weights
from jaxres.config import huggingface
from jaxres.config.schema.model import CustomModel, GptModel, MlpModel
from jaxres.config.schema.training import FromSafetensors
from jaxres.faults import ConfigError
from tests.unit.checkpoint.llama_run import ROWS, SIZES

MODEL = GptModel(**SIZES)
SHAPES = hf_tensors.shapes(MODEL, rows=ROWS)
WANTED = {path: ArrayInfo("float32", shape) for path, shape in SHAPES.items()}
FACTS = weights_source.facts_of(MODEL)


def source(tensors=None, *, facts=FACTS, **changed):
    """Weights under jaxres's names; None in `changed`: absent in the source."""
    infos = {**(WANTED if tensors is None else tensors), **changed}
    infos = {name: info for name, info in infos.items() if info is not None}
    arrays = {name: np.full(info.shape, 1, info.dtype) for name, info in infos.items()}
    return Weights("there", infos, arrays.__getitem__, facts)


def bind(found, **settings):
    section = FromSafetensors.model_validate_json(json.dumps({"path": "x", **settings}))
    return weights_mapping.map_weights(found, WANTED, facts=FACTS, section=section)


def refused(found, **settings):
    with pytest.raises(ConfigError) as caught:
        bind(found, **settings)
    rows = str(caught.value).splitlines()
    assert rows[0] == "there: these weights do not match the model:"
    return [row.strip() for row in rows[1:-1]]


def test_matching_weights_are_loaded_completely():
    bound = bind(source())
    assert (bound.taken.keys(), bound.fresh, bound.left_out) == (WANTED.keys(), (), ())


def test_every_difference_is_listed():
    found = source(
        **{
            "params/norm/scale": None,
            "params/blocks/attention/key": ArrayInfo("float32", (2, 32, 4, 8)),
            "params/old": ArrayInfo("float32", (3,)),
        }
    )
    assert refused(found) == [
        "params/blocks/attention/key (model.layers.N.self_attn.k_proj.weight): "
        "params/blocks/attention/key is float32[2,32,4,8], not of shape [2,32,2,8], "
        "expected float32[2,32,2,8]",
        "params/norm/scale (model.norm.weight): absent, expected float32[32]",
        "params/old: float32[3], expected absent",
    ]


def test_allowed_arrays_may_be_missing_and_allowed_tensors_unused():
    found = source(**{"params/norm/scale": None, "params/old": ArrayInfo("float32", (3,))})
    bound = bind(found, allow_missing=["params/norm/*"], allow_extra=["params/old"])
    assert (bound.fresh, bound.left_out) == (("params/norm/scale",), ("params/old",))
    assert refused(found, allow_missing=["params/norm"], allow_extra=["old"])


def test_an_array_of_another_shape_stays_fresh_if_both_its_names_are_allowed():
    name = "params/embedding"
    found = source(**{name: ArrayInfo("float32", (9, 32))})
    assert len(refused(found)) == 1
    bound = bind(found, allow_missing=[name], allow_extra=[name])
    assert (bound.fresh, bound.left_out) == ((name,), (name,))


def test_a_missing_layer_makes_the_whole_array_missing():
    rows = refused(source(llama_tensors(layers=1)))
    assert len(rows) == 9
    for row in rows:
        assert row.startswith("params/blocks/")
        assert ": 1 of 2 layers, expected float32[2," in row


def llama_tensors(*, layers=2, dtype="float32"):
    shapes = hf_tensors.shapes(MODEL.model_copy(update={"num_layers": layers}), rows=ROWS)
    found = {}
    for path, shape in shapes.items():
        rule = hf_tensors.LLAMA[path]
        there = rule.hf_shape(shape[1:] if "{}" in rule.name else shape)
        found |= {name: ArrayInfo(dtype, there) for name in rule.names(shape)}
    return found


def test_rename_rules_apply_before_the_lookup():
    tensors = {f"lm.{name}": info for name, info in llama_tensors().items()}
    assert len(refused(source(tensors))) == len(SHAPES) + len(tensors)
    bound = bind(source(tensors), rename={"lm": "x", "lm.model": "model"})
    assert bound.taken.keys() == WANTED.keys()
    assert bound.taken["params/norm/scale"].names == ("lm.model.norm.weight",)
    assert bind(source(), rename={"param": "x"}).taken.keys() == WANTED.keys(), (
        "complete parts only"
    )


def test_rename_rules_that_map_two_names_to_one_are_refused():
    with pytest.raises(ConfigError, match=r"init_from\.rename"):
        bind(source(), rename={"params/norm": "params/blocks/attention_norm"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_float_types_are_loaded_exactly(dtype):
    found = source(llama_tensors(dtype=dtype))
    taken = bind(found).taken["params/blocks/feed_forward/up"]
    assert weights_mapping.assemble(found, taken, dtype="float32").dtype == np.float32
    assert weights_mapping.assemble(found, taken).dtype.name == dtype


def test_rounding_must_be_allowed_and_integers_are_never_loaded():
    found = source(llama_tensors(dtype="float64"))
    assert all("init_from.cast=rounding" in row for row in refused(found))
    assert bind(found, cast="rounding").taken.keys() == WANTED.keys()
    found = source(llama_tensors(dtype="int32"))
    assert all("of an unsupported type" in row for row in refused(found, cast="rounding"))


def test_settings_that_do_not_affect_shapes_are_compared():
    found = source(facts={**FACTS, "rope_theta": 9.0, "rope_scaling": {"factor": 8}})
    assert refused(found) == [
        "rope_theta: 9.0, expected 500.0",
        "rope_scaling: {'factor': 8}, expected None",
    ]
    assert bind(found, allow_changed=["rope_*"]).fresh == ()
    (row,) = refused(source(facts=None))
    assert row.startswith("config.json: absent")
    assert bind(source(facts=None), allow_changed=["config.json"]).fresh == ()
    assert weights_source.facts_of(MlpModel()) == {"kind": "mlp"}


def test_arguments_of_a_custom_model_are_compared_without_its_secrets():
    def facts(**args):
        return weights_source.facts_of(CustomModel(target="my:build", args=args))

    def bind_custom(there, **settings):
        section = FromSafetensors.model_validate_json(json.dumps({"path": "x", **settings}))
        here = facts(heads=4, password="new")
        return weights_mapping.map_weights(source(facts=there), WANTED, facts=here, section=section)

    assert bind_custom(facts(heads=4, password="old")).fresh == ()
    with pytest.raises(ConfigError, match=r"args: {'heads': 9}, expected {'heads': 4}"):
        bind_custom(facts(heads=9))
    assert bind_custom(facts(heads=9), allow_changed=["args"]).fresh == ()
    earlier = {"kind": "custom", "target": "my:build"}
    assert bind_custom(earlier).fresh == (), "an export that does not have them"


HF = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": ROWS,
}


@pytest.mark.parametrize(
    ("fields", "differing"),
    [
        ({}, {}),
        ({"rope_scaling": None, "hidden_act": "silu", "head_dim": 8}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {}),
        ({"rope_scaling": {"type": "yarn"}}, {"rope_scaling": {"type": "yarn"}}),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5.0}},
            {"rope_scaling": {"rope_type": "dynamic", "rope_theta": 5.0}},
        ),
        ({"attention_bias": True}, {"attention_bias": True}),
        ({"hidden_act": "relu"}, {"hidden_act": "relu"}),
        ({"model_type": "qwen3", "attn_logit_softcapping": 5.0}, {"attn_logit_softcapping": 5.0}),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            {"max_window_layers": 1},
        ),
    ],
)
def test_unsupported_settings_of_a_decoder_are_listed(fields, differing):
    model, found = huggingface.model_of(HF | fields)
    assert (model.vocab_size, found) == (ROWS, differing)
    assert model.rope_theta == fields.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    assert (model.tie_embeddings, model.norm_eps) == (False, 1e-6), "defaults of transformers"


def test_a_config_of_another_model_type_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="gpt2"):
        huggingface.model_of({"model_type": "gpt2", "n_embd": 3})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon"}))
    facts = weights_source._facts_there(tmp_path, None)
    assert refused(source(facts=facts))[0].startswith("config.json: model_type 'falcon' is not one")


def scaled(scale, dtype="float8_e4m3fn"):
    tensors = llama_tensors(dtype="bfloat16")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = ArrayInfo(dtype, tensors[name].shape)
    return source({**tensors, scale: ArrayInfo("float32", (1,))})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize(
    "scale",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.layers.0.mlp.up_proj.scale_weight",
        "model.layers.0.mlp.up_proj.weight.absmax",
        "model.layers.0.mlp.up_proj.weight_zero_point",
    ],
)
def test_weights_with_scales_are_refused_whatever_is_allowed(scale, dtype):
    with pytest.raises(ConfigError) as caught:
        bind(scaled(scale, dtype), allow_extra=["*"], allow_changed=["*"])
    assert f"{scale}: float32[1] is a scale of model.layers.0.mlp.up_proj.weight" in str(
        caught.value
    )
    assert "Convert the model to bfloat16" in str(caught.value)
    assert (
        len(refused(source({**llama_tensors(), "rotary.scale": ArrayInfo("float32", (1,))}))) == 1
    )


def test_weights_whose_config_says_that_they_are_quantized_are_refused_whatever_is_allowed(
    tmp_path,
):
    for family in ("llama", "falcon"):
        fields = HF | {"model_type": family, "quantization_config": {"quant_method": "fp8"}}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        facts = weights_source._facts_there(tmp_path, None)
        with pytest.raises(ConfigError, match=r"quantization_config.*are quantized") as caught:
            bind(source(facts=facts), allow_changed=["*", "config.json", "quantization_config"])
        assert "allow_changed" not in str(caught.value)


def test_plain_float8_numbers_without_scales_are_loaded():
    found = source(llama_tensors(dtype="float8_e4m3fn"))
    assert bind(found).taken.keys() == WANTED.keys()


def test_a_tied_model_takes_a_head_only_if_it_equals_the_embedding():
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    found = source(tensors)
    assert "params/head" not in bind(found).taken
    arrays = {name: found.read(name) for name in tensors}
    arrays["lm_head.weight"] = arrays["lm_head.weight"].copy()
    arrays["lm_head.weight"][-1, -1] += 1
    other = Weights("there", found.tensors, arrays.__getitem__, FACTS)
    with pytest.raises(ConfigError, match=r"lm_head.weight: .*model.tie_embeddings=false"):
        bind(other)


def test_an_untied_model_without_a_head_is_refused():
    head = ArrayInfo("float32", WANTED["params/embedding"].shape[::-1])
    section = FromSafetensors.model_validate_json('{"path": "x"}')
    with pytest.raises(ConfigError) as caught:
        weights_mapping.map_weights(
            source(llama_tensors()), WANTED | {"params/head": head}, facts=FACTS, section=section
        )
    assert "params/head (lm_head.weight): absent" in str(caught.value)
    assert "Of a tied model: model.tie_embeddings=true" in str(caught.value)
