"""Models as pure functions over a plain nested dict of arrays, built from the configuration."""

from jaxres.config.schema.model import AnyModel, CustomModel, GptModel, MlpModel, VitModel
from jaxres.config.schema.training import LoraSection
from jaxres.models import custom, gpt, lora, mlp, vit
from jaxres.models.interface import (
    Axes,
    BatchArrays,
    KeepRows,
    LossSums,
    Model,
    Params,
    anywhere,
    num_params,
)
from jaxres.models.modules import from_linen, from_nnx

__all__ = [
    "Axes",
    "BatchArrays",
    "LossSums",
    "Model",
    "Params",
    "build",
    "from_linen",
    "from_nnx",
    "num_params",
]


def build(
    config: AnyModel,
    *,
    vocab_size: int | None,
    seq_len: int,
    platform: str,
    keep_rows: KeepRows = anywhere,
    adapters: LoraSection | None = None,
    deterministic: bool = False,
) -> Model:
    """Builds the configured model, with adapters if there are some, without touching a device.

    `vocab_size` is the tokenizer's (None: no tokenizer). `platform` is where the steps will run, as
    named by jax.default_backend(). `keep_rows` is applied to activations, except in a custom model.
    `deterministic` is whether XLA takes only deterministic kernels. Raises ConfigError.
    """
    match config:
        case GptModel():
            model = gpt.build(
                config,
                vocab_size=vocab_size,
                seq_len=seq_len,
                platform=platform,
                keep_rows=keep_rows,
                deterministic=deterministic,
            )
        case MlpModel():
            model = mlp.build(config, vocab_size=vocab_size, keep_rows=keep_rows)
        case VitModel():
            model = vit.build(config, platform=platform, keep_rows=keep_rows)
        case CustomModel():
            model = custom.build(config, vocab_size=vocab_size, seq_len=seq_len)
    return model if adapters is None else lora.with_adapters(model, adapters)
