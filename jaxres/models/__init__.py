"""Models as pure functions over a plain nested dict of arrays, built from the configuration."""

from jaxres.config.schema import CustomModel, GptModel, MlpModel
from jaxres.models import custom, gpt, mlp
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

__all__ = ["Axes", "BatchArrays", "LossSums", "Model", "Params", "build", "num_params"]


def build(
    config: GptModel | MlpModel | CustomModel,
    *,
    vocab_size: int | None,
    seq_len: int,
    platform: str,
    keep_rows: KeepRows = anywhere,
) -> Model:
    """Builds the configured model without touching a device.

    `vocab_size` is the tokenizer's (None: no tokenizer). `platform` is where the steps will run, as
    named by jax.default_backend(). `keep_rows` is applied to activations, except in a custom model.
    Raises ConfigError.
    """
    match config:
        case GptModel():
            return gpt.build(
                config,
                vocab_size=vocab_size,
                seq_len=seq_len,
                platform=platform,
                keep_rows=keep_rows,
            )
        case MlpModel():
            return mlp.build(config, vocab_size=vocab_size, keep_rows=keep_rows)
        case CustomModel():
            return custom.build(config, vocab_size=vocab_size, seq_len=seq_len)
