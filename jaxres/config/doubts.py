"""Notes on settings that are possible, and hardly what is meant."""

from __future__ import annotations

from jaxres.config.schema.data import NanogptSource, single_sources
from jaxres.config.schema.run_config import EvaluationSection, RunConfig

GPT2_END, GPT2_SIZES = 50_256, (50_257, 50_304)
"""Token at which GPT-2's documents end; its number of tokens, and that of a padded embedding."""


def doubts(config: RunConfig) -> list[str]:
    """Returns notes on settings that a start reads and that do nothing, or not what they say."""
    sources = single_sources(config.data.source) | {
        f"data.validation[{part.name}].source": part.source for part in config.data.validation
    }
    found = [
        f"{key}.end_of_document is {GPT2_END:,}, which ends documents of GPT-2's tokenizer, and "
        f"{key}.vocab_size is {source.vocab_size:,}: give the id of its own tokenizer, or null"
        for key, source in sources.items()
        if isinstance(source, NanogptSource)
        if source.end_of_document == GPT2_END and source.vocab_size not in GPT2_SIZES
    ]
    if config.evaluation.every_steps:
        return found
    batches = config.evaluation.batches != EvaluationSection.model_fields["batches"].default
    unused = ["data.validation"] * bool(config.data.validation) + ["evaluation.batches"] * batches
    return found + [f"{key} is not used in training: evaluation.every_steps is 0" for key in unused]
