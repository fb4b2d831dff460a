"""Models: pure functions over a plain nested dict of arrays, built once from the configuration."""

from jaxres.config.schema import CustomModel, GptModel, MlpModel
from jaxres.models import custom, gpt, mlp
from jaxres.models.interface import (
    Axes,
    Batch,
    KeepRows,
    LossSums,
    Model,
    Params,
    anywhere,
    num_params,
)

__all__ = ["Axes", "Batch", "LossSums", "Model", "Params", "build", "num_params"]


def build(
    config: GptModel | MlpModel | CustomModel,
    *,
    vocab_size: int | None,
    seq_len: int,
    platform: str,
    keep_rows: KeepRows = anywhere,
) -> Model:
    """Builds the configured model; touches no device.

    `vocab_size` is the tokenizer's (None: there is none), `platform` is where the steps will run,
    as jax.default_backend() names it; `keep_rows` is called on activations (a custom model has to
    do without). Raises ConfigError.
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
