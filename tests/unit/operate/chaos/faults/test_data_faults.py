"""The samples that are left without some rows are computed apart from the run; a planted token is
one bad record and no damage.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxres import config as configs
from jaxres import data
from jaxres.config import RunConfig
from jaxres.data.tokens.token_writer import write_tokens
from jaxres.operate.chaos.faults import data as data_faults
from jaxres.operate.chaos.schedule import STEPS

TINY = Path(__file__).parents[4] / "promises" / "tiny.yaml"
BATCH = 4


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folder = tmp_path / "tokens"
    documents = [np.arange(400) % 50 for _ in range(8)]
    write_tokens(folder, documents, vocab_size=50, tokenizer="other")
    overrides = [f"data.source={{kind: tokens, path: {folder}}}", f"data.cache_dir={tmp_path}"]
    overrides += [f"train.global_batch_size={BATCH}", "data.seq_len=16", "evaluation.every_steps=0"]
    return configs.load(TINY, [*overrides, "data.heldout_fraction=0"]).config


def trained(config: RunConfig, skips: tuple[tuple[int, int], ...]) -> dict[int, str]:
    """Returns the samples of each step as the data loader has them."""
    dataset, cursor = data.open_dataset(config.data), 0
    order = dataset.order(seed=config.run.seed, rows_per_step=BATCH)
    at = data.batch_at(dataset.train, order, global_batch_size=BATCH, skips=skips)
    found: dict[int, str] = {}
    for step in range(1, STEPS + 1):
        batch = at(cursor)
        found[step], cursor = data.sample_digest(batch.ids), batch.next_cursor
    return found


@pytest.mark.parametrize("skips", [((21, 22),), ((20, 28),), ((22, 23), (30, 33))])
def test_the_samples_that_are_left_are_those_of_the_data_loader(
    config: RunConfig, skips: tuple[tuple[int, int], ...]
) -> None:
    found = data_faults.samples_without(config, skips, first=6)
    expected = trained(config, skips)
    assert found == {step: expected[step] for step in range(6, STEPS + 1)}
    assert found != {step: trained(config, ())[step] for step in range(6, STEPS + 1)}


def test_a_planted_token_is_one_bad_record_with_digests_that_fit(config: RunConfig) -> None:
    assert data_faults._plant(config, 21) == ""
    dataset = data.open_dataset(config.data)
    order = dataset.order(seed=config.run.seed, rows_per_step=BATCH)
    ids, _ = data.sample_ids_at(order, 0, len(dataset.train))
    reasons = data.find_bad_rows(dataset.train, ids)
    assert list(reasons) == [21]
    assert "is 50, but vocab_size is 50" in reasons[21]


def test_a_corpus_that_is_not_of_the_run_is_left_alone(config: RunConfig, tmp_path: Path) -> None:
    before = (tmp_path / "tokens" / "tokens.bin").read_bytes()
    cache = tmp_path / "cache"
    other = config.model_copy(
        update={"data": config.data.model_copy(update={"cache_dir": str(cache)})}
    )
    assert data_faults._plant(other, 21) == "the run has cached no corpus"
    assert (tmp_path / "tokens" / "tokens.bin").read_bytes() == before
    shutil.rmtree(cache, ignore_errors=True)
