"""A run with steps of a small random decoder, and an independent Llama forward pass in NumPy.

The forward pass uses Hugging Face's names and conventions only, nothing of jaxres.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxres import config as configs
from jaxres import models
from jaxres.clock import SystemClock
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.run_config import RunConfig
from jaxres.config.schema.training import LoraSection
from jaxres.models import Params
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import RunLog, Start
from tests.unit.checkpoint.conftest import Attempt, progress, state
from tests.unit.runlog.example_records import CLAIM

ROWS, T = 320, 16
SIZES = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 48,
    "rope_theta": 500.0,
    "norm_eps": 1e-3,
    "compute_dtype": "float32",
}


def config(**model) -> RunConfig:
    data = {"source": {"kind": "text", "path": "{stdlib}"}, "seq_len": T}
    section = {"kind": "gpt", **SIZES, **model}
    return RunConfig.model_validate({"data": data, "model": section, "train": {"steps": 8}})


def random_params(model: GptModel, seed: int = 0, adapters: LoraSection | None = None) -> Params:
    built = models.build(model, vocab_size=257, seq_len=T, platform="cpu", adapters=adapters)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(built.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)


def logits(
    model: GptModel,
    params: Params,
    tokens_BT: np.ndarray,
    adapters: LoraSection | None = None,
) -> np.ndarray:
    built = models.build(model, vocab_size=257, seq_len=T, platform="cpu", adapters=adapters)
    assert built.logits is not None
    return np.asarray(jax.jit(built.logits)(params, jnp.asarray(tokens_BT)))


def run_of(root, run_config: RunConfig, params: Params, *, steps=(8,), **parts) -> RunDir:
    """Creates a run that has committed these parameters, scaled by step / 8, at each step.

    `parts` are further parts of the state.
    """
    run_dir = RunDir(root)
    log = RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    log.append(Start(step=0, path=None, dataset="d", computation={}))
    run_dir.attempt(1).mkdir(parents=True)
    for path in (run_dir.config, run_dir.attempt(1) / "config.yaml"):
        path.write_text(configs.dump_yaml(run_config))
    attempt = Attempt(run_dir, log)
    with attempt.checkpoints() as checkpoints:
        for step in steps:
            scaled = jax.tree.map(lambda x, by=step / 8: x * by, params)
            checkpoints.save(state(step) | {"params": scaled} | parts, progress(step))
            checkpoints.wait()
    return run_dir


def flat(params: Params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path({"params": params})[0]
    return {
        jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(leaf)
        for keys, leaf in leaves
    }


def llama_forward(tensors: dict[str, np.ndarray], config_json: str, tokens_BT: np.ndarray):
    """Computes the logits as transformers' modeling_llama.py does, in float64."""
    c = json.loads(config_json)
    heads, groups, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    steps = tokens_BT.shape[1]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def norm(x, name):
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
        return x / scale * w[f"{name}.weight"]

    inverse = 1.0 / c["rope_theta"] ** (np.arange(0, width, 2) / width)
    angles = np.outer(np.arange(steps), inverse)
    angles = np.concatenate([angles, angles], -1)

    def rotary(x):  # B heads T width
        half = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * np.cos(angles) + half * np.sin(angles)

    def split(x, count):
        return x.reshape(*x.shape[:2], count, width).transpose(0, 2, 1, 3)

    x = w["model.embed_tokens.weight"][tokens_BT]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm")
        q = rotary(split(linear(h, f"{at}.self_attn.q_proj"), heads))
        k = rotary(split(linear(h, f"{at}.self_attn.k_proj"), groups))
        v = split(linear(h, f"{at}.self_attn.v_proj"), groups)
        k, v = (np.repeat(each, heads // groups, axis=1) for each in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width)
        scores = np.where(np.tril(np.ones((steps, steps), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        x = x + linear(mixed, f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj"
        )
    x = norm(x, "model.norm")
    return linear(x, "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head")
