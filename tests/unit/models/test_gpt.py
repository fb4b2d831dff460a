"""The decoder: attention mask, computation, parameters and kernels."""

import functools
import operator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxres import models
from jaxres.config.schema.model import GptModel
from jaxres.faults import ConfigError
from jaxres.models import attention, gpt, interface
from jaxres.models.interface import split
from tests.compiling import quickly_compiled

B, T, V = 2, 16, 64
SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64, "compute_dtype": "float32"}


@functools.cache
def build(*, platform="cpu", deterministic=False, **overrides):
    config = GptModel(**(SMALL | overrides))
    return models.build(
        config, vocab_size=V, seq_len=T, platform=platform, deterministic=deterministic
    )


def params_of(model):
    """Returns random parameters, larger than the initial ones (init compiles slowly)."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes
    )


@functools.cache
@quickly_compiled()
def initial(model):
    return jax.jit(model.init)(jax.random.key(0))


def batch_of(*, documents=((0, T),), seed=0):
    """Returns random tokens; every row has documents at these (start, end)."""
    rng = np.random.default_rng(seed)
    segments, positions = np.zeros((2, B, T), np.int32)
    for number, (start, end) in enumerate(documents):
        segments[:, start:end] = number
        positions[:, start:end] = np.arange(end - start)
    return {
        "tokens_BT": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "targets_BT": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "segment_ids_BT": jnp.asarray(segments),
        "positions_BT": jnp.asarray(positions),
        "weights_BT": jnp.ones((B, T), jnp.float32),
    }


@functools.cache
def compiled_nats(model):
    def at(params, batch, position):
        weights = jnp.broadcast_to(jnp.arange(T) == position, (B, T)).astype(jnp.float32)
        return model.loss(params, {**batch, "weights_BT": weights}, None)[0]

    return jax.jit(jax.vmap(at, in_axes=(None, None, 0), out_axes=1))


def nats_BT(model, params, batch):
    """Returns the loss of every position from the public function, through one-hot weights."""
    return np.asarray(compiled_nats(model)(params, batch, jnp.arange(T)))


def logits_of(model, params, tokens):
    return jax.jit(model.logits)(params, tokens)


def mean_loss(model, key=None):
    def mean(params, batch):
        sums, weights = model.loss(params, batch, key)
        return jnp.sum(sums) / jnp.sum(weights)

    return mean


def equal(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), left, right))


def change(batch, start, end):
    tokens = batch["tokens_BT"]
    return {**batch, "tokens_BT": tokens.at[:, start:end].set((tokens[:, start:end] + 1) % V)}


@pytest.mark.slow
def test_a_document_does_not_attend_to_its_neighbours():
    model, batch = build(), batch_of(documents=((0, 5), (5, 12), (12, T)))
    before = nats_BT(model, params_of(model), batch)
    after = nats_BT(model, params_of(model), change(batch, 5, 12))
    assert np.array_equal(before[:, :5], after[:, :5])
    assert np.array_equal(before[:, 12:], after[:, 12:])
    assert not np.any(before[:, 5:12] == after[:, 5:12])


def test_a_position_does_not_attend_to_later_ones():
    model, batch = build(), batch_of()
    before = nats_BT(model, params_of(model), batch)
    after = nats_BT(model, params_of(model), change(batch, 9, 10))
    assert np.array_equal(before[:, :9], after[:, :9])
    assert not np.any(before[:, 9:] == after[:, 9:])


def test_the_loss_of_a_document_does_not_depend_on_its_offset_in_the_row():
    model, batch = build(), batch_of(documents=((0, 8), (8, T)))
    tokens = batch["tokens_BT"]
    twice = {**batch, "tokens_BT": tokens.at[:, 8:].set(tokens[:, :8])}
    targets = batch["targets_BT"]
    twice["targets_BT"] = targets.at[:, 8:].set(targets[:, :8])
    nats = nats_BT(model, params_of(model), twice)
    # Products over masked positions add zeros at other places of the sum: no bit-equality.
    np.testing.assert_allclose(nats[:, :8], nats[:, 8:], rtol=1e-5)


def test_positions_of_weight_zero_do_not_affect_the_loss():
    model, batch = build(), batch_of()
    params = params_of(model)
    batch["weights_BT"] = jnp.asarray(np.random.default_rng(1).random((B, T)), jnp.float32)
    loss_B, weight_B = jax.jit(model.loss)(params, batch, None)
    assert loss_B.dtype == weight_B.dtype == jnp.float32
    expected = nats_BT(model, params, batch) * np.asarray(batch["weights_BT"])
    np.testing.assert_allclose(loss_B, expected.sum(1), rtol=1e-5)  # another order of summation
    np.testing.assert_allclose(weight_B, np.asarray(batch["weights_BT"]).sum(1), rtol=1e-6)


@pytest.mark.slow
def test_logits_of_a_plain_row_equal_those_of_one_document():
    model, batch = build(), batch_of()
    params = params_of(model)
    logits = logits_of(model, params, batch["tokens_BT"])
    assert logits.shape == (B, T, V)
    assert logits.dtype == jnp.float32
    nats = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["targets_BT"][..., None], axis=-1
    )[..., 0]
    # logsumexp(x) - x[i] against log_softmax: the same number, rounded elsewhere.
    np.testing.assert_allclose(nats_BT(model, params, batch), nats, rtol=1e-5)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_grouped_queries_equal_full_attention_with_repeated_heads():
    grouped, full = build(num_kv_heads=2), build(num_kv_heads=4)
    params = params_of(grouped)
    repeated = jax.tree.map(lambda leaf: leaf, params)
    for name in ("key", "value"):
        leaf = params["blocks"]["attention"][name]
        repeated["blocks"]["attention"][name] = jnp.repeat(leaf, 2, axis=2)
    tokens = batch_of()["tokens_BT"]
    # The products are batched differently, so that sums may be ordered differently.
    np.testing.assert_allclose(
        logits_of(grouped, params, tokens), logits_of(full, repeated, tokens), atol=1e-5
    )


@pytest.mark.slow
def test_rotary_scores_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(i, j):
        angles = [attention.rope_angles(jnp.full((1, 1), p), width=8, theta=1e4) for p in (i, j)]
        return jnp.sum(attention.rotate(q, angles[0]) * attention.rotate(k, angles[1]))

    # Sines of different angles: equal in exact arithmetic only.
    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    assert jnp.array_equal(attention.rotate(q, jnp.zeros((1, 1, 4))), q)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_a_tied_model_equals_an_untied_one_whose_head_is_the_embedding():
    tied, untied = build(tie_embeddings=True), build(tie_embeddings=False)
    params = params_of(tied)
    assert "head" not in params
    assert untied.axes["head"] == ("embed", "vocab")
    with_head = {**params, "head": params["embedding"].T}
    tokens = batch_of()["tokens_BT"]
    # The transposed product may add up in another order.
    np.testing.assert_allclose(
        logits_of(tied, params, tokens), logits_of(untied, with_head, tokens), atol=1e-5
    )


def test_the_scan_equals_a_loop_over_the_layers():
    config = GptModel(**SMALL)
    model = build()
    _, _, block = split(lambda rngs: gpt.Block(config, kernel="xla", rngs=rngs))

    def loop(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        angles = attention.rope_angles(positions, width=8, theta=config.rope_theta)
        mask = attention.attention_mask(jnp.zeros((B, T), jnp.int32))
        x = params["embedding"][tokens]
        for index in range(config.num_layers):
            layer = jax.tree.map(operator.itemgetter(index), params["blocks"])
            x = nnx.merge(block, layer)(x, None, angles, mask)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps)
        return (x * params["norm"]["scale"]) @ params["embedding"].T

    params, tokens = params_of(model), batch_of()["tokens_BT"]
    # XLA fuses a loop's body by itself, unrolled layers with each other.
    np.testing.assert_allclose(
        jax.jit(loop)(params, tokens), logits_of(model, params, tokens), atol=1e-5
    )


@pytest.mark.slow
@quickly_compiled()
@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("setting", ["none", "selective", "block"])
def test_remat_and_scan_change_neither_loss_nor_gradients(setting, scan_layers):
    batch, key = batch_of(), jax.random.key(3)
    plain, remat = (
        build(dropout=0.3, **overrides)
        for overrides in ({}, {"remat": setting, "scan_layers": scan_layers})
    )
    params = params_of(plain)
    loss, grads = jax.jit(jax.value_and_grad(mean_loss(plain, key)))(params, batch)
    again, regrads = jax.jit(jax.value_and_grad(mean_loss(remat, key)))(params, batch)
    np.testing.assert_allclose(loss, again, rtol=1e-6)  # fused differently
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, regrads)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_dropout_depends_on_the_key_only():
    model, batch = build(dropout=0.5), batch_of()
    params = params_of(model)
    loss = jax.jit(model.loss)
    first, same = loss(params, batch, jax.random.key(1)), loss(params, batch, jax.random.key(1))
    assert equal(first, same)
    assert not jnp.array_equal(first[0], loss(params, batch, jax.random.key(2))[0])
    # Another function than build().loss, which another test may have compiled with other settings.
    without = jax.jit(lambda *arguments: build().loss(*arguments))
    assert equal(loss(params, batch, None), without(params, batch, None))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_without_dropout_the_key_has_no_effect():
    model, batch = build(dropout=0.0), batch_of()
    loss, params = jax.jit(model.loss), params_of(model)
    assert equal(loss(params, batch, jax.random.key(1)), loss(params, batch, None))


def test_dropout_keeps_the_mean_and_drops_its_share():
    dropped = gpt.dropout(jnp.ones(100_000), jax.random.key(0), rate=0.25)
    assert float(jnp.mean(dropped == 0)) == pytest.approx(0.25, abs=0.01)  # 7 standard deviations
    assert float(jnp.mean(dropped)) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@quickly_compiled()  # test_mlp.py makes the same promise of optimised code
def test_initial_parameters_have_the_same_bits_on_one_device_and_on_eight():
    model = build()
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = {"embed": "fsdp", "mlp": "tensor", "heads": "tensor", "vocab": "tensor"}
    shardings = jax.tree.map(
        lambda names: NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names))),
        model.axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    divided = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
    assert len(divided["blocks"]["feed_forward"]["up"].sharding.device_set) == 8
    assert equal(jax.device_get(divided), jax.device_get(initial(model)))


@pytest.mark.slow
@quickly_compiled()
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_compute_keeps_float32_weights_and_gradients(dtype):
    model, batch = build(compute_dtype=dtype), batch_of()
    params = params_of(model)
    loss = jax.jit(mean_loss(model))(params, batch)
    grads = jax.eval_shape(jax.grad(mean_loss(model)), params, batch)
    for tree in (jax.eval_shape(model.init, jax.random.key(0)), grads):
        assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {jnp.dtype("float32")}
    exact = jax.jit(mean_loss(build()))(params, batch)
    assert loss.dtype == jnp.float32
    assert loss != exact
    assert float(loss) == pytest.approx(float(exact), rel=0.02)  # bfloat16 has 8 bits
    assert logits_of(model, params, batch["tokens_BT"]).dtype == jnp.float32


def test_num_params_is_the_sum_over_matrices_and_norms():
    D, F, L = 32, 64, 2
    attention = 2 * D * 32 + 2 * D * 16  # 4 query heads and 2 key and value heads of width 8
    count = V * D + L * (attention + 3 * D * F + 2 * D) + D
    shapes = jax.eval_shape(build(num_kv_heads=2).init, jax.random.key(0))
    assert models.num_params(shapes) == count


def test_flops_are_those_of_the_matrix_products():
    D, F, L = 32, 64, 2
    weights = L * (4 * D * D + 3 * D * F) + D * V
    assert build().flops_per_token == 6 * weights + 12 * L * D * T
    assert build(tie_embeddings=False).flops_per_token == build().flops_per_token


def test_axes_name_every_dim_of_every_parameter():
    for model in (build(), build(tie_embeddings=False)):
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        ranks = jax.tree.map(lambda leaf: leaf.ndim, shapes)
        assert ranks == jax.tree.map(len, model.axes, is_leaf=lambda n: isinstance(n, tuple))
        stacked = jax.tree.leaves(model.axes["blocks"], is_leaf=lambda n: isinstance(n, tuple))
        assert {names[0] for names in stacked} == {"layers"}
        assert type(shapes["blocks"]) is dict


@pytest.mark.slow
def test_initial_weights_are_small_and_smaller_at_outputs_and_differ_by_layer():
    params = initial(build())
    attention = params["blocks"]["attention"]
    assert float(jnp.std(attention["query"])) == pytest.approx(0.02, rel=0.1)  # 2,048 draws
    assert float(jnp.std(attention["output"])) == pytest.approx(0.02 / np.sqrt(2 * 2), rel=0.1)
    assert not jnp.array_equal(attention["query"][0], attention["query"][1])
    assert jnp.all(params["norm"]["scale"] == 1)


@pytest.mark.slow
def test_an_untrained_model_has_the_loss_of_a_uniform_guess():
    model = build()
    loss = jax.jit(mean_loss(model))(initial(model), batch_of())
    assert float(loss) == pytest.approx(np.log(V), abs=0.1)  # logits spread by about 0.02 sqrt(D)


def test_the_embedding_has_the_tokenizers_rows_up_to_a_multiple_of_64():
    model = models.build(GptModel(**SMALL), vocab_size=257, seq_len=T, platform="cpu")
    assert jax.eval_shape(model.init, jax.random.key(0))["embedding"].shape == (320, 32)
    exact = GptModel(**SMALL, vocab_size=300)
    model = models.build(exact, vocab_size=257, seq_len=T, platform="cpu")
    assert jax.eval_shape(model.init, jax.random.key(0))["embedding"].shape == (300, 32)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"vocab_size": V - 1}, "model.vocab_size"),
        ({"attention": "cudnn", "compute_dtype": "bfloat16"}, "model.attention"),
    ],
)
def test_unsupported_sizes_are_rejected_by_name(overrides, field):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        build(**overrides)


def test_an_unknown_vocabulary_size_is_rejected():
    with pytest.raises(ConfigError, match=r"Set model\.vocab_size"):
        models.build(GptModel(**SMALL), vocab_size=None, seq_len=T, platform="cpu")


def lowered_for_cuda(model):
    """Lowers the gradient of the training step for CUDA, without a CUDA device."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    grad = jax.jit(jax.grad(mean_loss(model, jax.random.key(0))))
    return grad.trace(shapes, batch_of()).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def cudnn(monkeypatch):
    """Gives jax the version of cuDNN, for which it asks the CUDA plugin; here there is none."""
    versions = SimpleNamespace(cudnn_get_version=lambda: 91000)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", versions)


FORWARD, BACKWARD = "__cudnn$fmhaScaleBiasSoftmax(", "__cudnn$fmhaScaleBiasSoftmaxBackward("


def on_gpu(**overrides):
    return build(platform="gpu", compute_dtype="bfloat16", num_kv_heads=2, **overrides)


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(("remat", "forward"), [("none", 1), ("selective", 1), ("block", 2)])
def test_auto_attention_on_cuda_uses_cudnn_and_selective_remat_keeps_its_result(remat, forward):
    text = lowered_for_cuda(on_gpu(remat=remat, scan_layers=True))
    assert text.count(FORWARD) == forward  # once in the loop over the layers; again if recomputed
    assert text.count(BACKWARD) == 1
    assert text.count("CAUSAL") == forward + 1, "cuDNN computes what the mask leaves out"


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
def test_layers_are_unrolled_on_an_accelerator_up_to_a_number_of_them():
    few = lowered_for_cuda(on_gpu(num_layers=3))
    assert "stablehlo.while" not in few
    many = lowered_for_cuda(on_gpu(num_layers=interface.MOST_UNROLLED + 1))
    assert "stablehlo.while" in many
    assert "stablehlo.while" in lowered_for_cuda(on_gpu(num_layers=3, scan_layers=True))


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn")
def test_with_deterministic_kernels_cudnn_s_backward_pass_is_called_in_one_place():
    # XLA fails to execute a program with two of them.
    assert "stablehlo.while" in lowered_for_cuda(on_gpu(deterministic=True))
    with pytest.raises(ConfigError, match=r"^model\.scan_layers: false .* Use auto"):
        on_gpu(deterministic=True, scan_layers=False)
    text = lowered_for_cuda(on_gpu(deterministic=True, scan_layers=False, attention="xla"))
    assert "stablehlo.while" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_output_layer_s_gradients_are_products_in_the_type_of_activations(name):
    dtype = jnp.dtype(name)
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (2, 8, 16), dtype), jax.random.normal(keys[1], (16, 32))
    g = jax.random.normal(keys[2], (2, 8, 32)) * 1e-6
    logits, gradients = jax.vjp(gpt.logits_product, x, head)
    assert logits.dtype == jnp.float32
    products = [
        {str(operand.aval.dtype) for operand in equation.invars}
        for equation in jax.make_jaxpr(gradients)(g).eqns
        if equation.primitive.name == "dot_general"
    ]
    # In float16 small gradients would lose bits, or be 0.
    assert products == [{"float32" if name == "float16" else name}] * 2
    x32, head32 = x.astype(jnp.float32), head.astype(dtype).astype(jnp.float32)
    exact = jax.vjp(jnp.matmul, x32, head32)[1](g)
    for found, expected, like in zip(gradients(g), exact, (x, head), strict=True):
        assert found.dtype == like.dtype
        largest = float(jnp.max(jnp.abs(expected)))
        error = jnp.max(jnp.abs(found.astype(jnp.float32) - expected))
        # float32: some processors add the products of the two forms in another order.
        assert float(error) <= largest * (1e-5 if name == "float32" else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"compute_dtype": "float32"},
        {"compute_dtype": "float16"},
        {"attention": "xla"},
        {"d_model": 16},
    ],
    ids=["float32", "float16", "xla", "head width 4"],
)
def test_auto_attention_on_cuda_uses_xla_if_cudnn_is_unsupported(overrides):
    model = build(platform="gpu", **({"compute_dtype": "bfloat16"} | overrides))
    assert "cudnn" not in lowered_for_cuda(model)
