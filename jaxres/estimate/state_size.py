"""Size of the training state from the config alone, without jax. Pure.

`tests/unit/estimate/test_state_size.py` compares it with the arrays that training makes.
"""

from __future__ import annotations

from jaxres.config import RunConfig, loss_scale
from jaxres.config.schema.data import BytesTokenizer
from jaxres.config.schema.model import AnyModel, GptModel, MlpModel, VitModel
from jaxres.faults import ConfigError

FLOAT_BYTES = 4
"""Parameters and moments are float32."""
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Arrays of a parameter's size that an optimizer keeps for it."""
OTHER_BYTES = 24
"""PRNG key, step, and statistics of the gradient norm."""
LOSS_SCALE_BYTES = 8
"""Factor and count of a loss scale."""
COUNT_BYTES = {"adamw": 4, "lion": 4, "sgd": 0}
"""The optimizer's count of steps."""
BYTES_VOCABULARY = 257
"""Tokens of the tokenizer of bytes."""


def state_bytes(config: RunConfig) -> int:
    """Returns the bytes of a state, all arrays included.

    Raises:
      ConfigError: the config alone does not say it.
    """
    kind = config.optimizer.kind
    if kind not in MOMENTS:
        raise _unknown(f"optimizer.kind {kind}")
    if config.lora is not None or config.optimizer.freeze:
        raise _unknown("parameters that are not trained")
    copies = 1 + MOMENTS[kind] + (config.optimizer.ema_decay is not None)
    arrays = FLOAT_BYTES * copies * num_params(config.model, config=config)
    scale = 0 if loss_scale(config) is None else LOSS_SCALE_BYTES
    return arrays + OTHER_BYTES + COUNT_BYTES[kind] + scale


def num_params(model: AnyModel, *, config: RunConfig) -> int:
    """Returns the number of parameters.

    Raises:
      ConfigError: it depends on files or on the user's code.
    """
    if isinstance(model, VitModel):
        return _vit(model)
    if isinstance(model, MlpModel):
        width = model.d_model
        per_layer = width * width + width
        return 2 * _rows(model, config) * width + model.num_layers * per_layer
    if isinstance(model, GptModel):
        return _gpt(model, rows=_rows(model, config), seq_len=config.data.seq_len)
    raise _unknown(f"model.kind {model.kind}")


def _rows(model: GptModel | MlpModel, config: RunConfig) -> int:
    """Returns the rows of the embedding."""
    if model.vocab_size is not None:
        return model.vocab_size
    if not isinstance(config.data.tokenizer, BytesTokenizer):
        raise _unknown("a vocabulary that is the tokenizer's")
    return -(-BYTES_VOCABULARY // 64) * 64


def _gpt(model: GptModel, *, rows: int, seq_len: int) -> int:
    D, F, C = model.d_model, model.ff_width, model.head_width
    H, K = model.num_heads, model.num_kv_heads or model.num_heads
    norm = 2 if model.norm == "layer" else 1
    attention = 2 * D * C * (H + K)
    if model.bias != "none":
        attention += C * (H + 2 * K)
    if model.bias == "all":
        attention += D
    if model.qk_norm:
        attention += 2 * norm * C
    feed_forward = (3 if model.gated else 2) * D * F
    if model.bias == "all":
        feed_forward += F + D + (F if model.gated else 0)
    norms = (4 if model.post_norms else 2) * norm * D
    whole = model.num_layers * (attention + feed_forward + norms)
    whole += rows * D * (1 if model.tie_embeddings else 2) + norm * D
    if model.positions == "learned":
        whole += (model.max_positions or seq_len) * D
    return whole


def _vit(model: VitModel) -> int:
    D, F = model.d_model, model.d_ff or 4 * model.d_model
    patches, pixels = (model.image_size // model.patch_size) ** 2, 3 * model.patch_size**2
    block = 4 * D * D + 2 * D * F + F + D + 2 * 2 * D
    head = D * model.num_classes + model.num_classes
    return pixels * D + patches * D + model.num_layers * block + 2 * D + head


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"the size of the state with {what} is not known: give --state-gib")
