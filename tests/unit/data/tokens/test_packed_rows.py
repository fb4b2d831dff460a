import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.config.schema.data import DataSection, TokensSource
from jaxres.config.schema.model import GptModel
from jaxres.data import BadRecord, TokensDamaged, open_dataset, write_tokens
from jaxres.data.dataset import PLAN_MARK
from jaxres.data.inspect import show_rows
from jaxres.data.tokens import packed_rows, packing
from jaxres.data.tokens.packed_rows import open_packed_rows
from jaxres.data.tokens.token_folder import open_tokens
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.models import gpt
from jaxres.train.resume import check_dataset
from tests.damage import flip_bit_at, remove_digests

T = 16
KINDS = ("concat", "best_fit", "pad")


@pytest.fixture
def corpus(tmp_path):
    """A folder whose tokens are their own indices, so that a row shows which ones it has."""
    lengths = np.random.default_rng(0).integers(0, 50, size=80)
    bounds = np.cumsum([0, *lengths])
    docs = [np.arange(a, b) for a, b in pairwise(bounds)]
    write_tokens(tmp_path / "set", docs, vocab_size=int(bounds[-1]), tokenizer="mine")
    return tmp_path / "set"


def packed(corpus, *, kind="best_fit", progress=lambda what: None, **part):
    opened = open_tokens(corpus)
    part = {"start": 0, "stop": opened.meta.num_tokens, "seq_len": T} | part
    folder = corpus.parent / "plans"
    return open_packed_rows(opened, packing=kind, folder=folder, progress=progress, **part)


def naive_row(bounds, pieces):
    """Returns the arrays of a row, built token by token."""
    tokens, segments, positions, starts = [], [], [], set()
    for segment, (first, length) in enumerate(pieces, 1):
        starts.add(len(tokens))
        tokens += range(first, first + length)
        segments += [segment] * length
        positions += range(length)
    used = len(tokens)
    for values in (tokens, segments, positions):
        values += [0] * (T + 1 - used)
    weights = [float(t + 1 < used and t + 1 not in starts) for t in range(T)]
    return {
        "tokens_BT": tokens[:T],
        "targets_BT": tokens[1:],
        "segment_ids_BT": segments[:T],
        "positions_BT": positions[:T],
        "weights_BT": weights,
    }


@pytest.mark.parametrize("kind", ["best_fit", "pad"])
def test_rows_equal_those_of_a_naive_loop(corpus, kind):
    rows = packed(corpus, kind=kind)
    arrays = rows.rows(np.arange(len(rows)))
    plan, bounds = rows.plan, rows.corpus.offsets
    for i in range(len(rows)):
        own = slice(plan.begins_R[i], plan.begins_R[i + 1])
        pieces = list(zip(plan.starts_P[own].tolist(), plan.lengths_P[own].tolist(), strict=True))
        expected = naive_row(bounds, pieces)
        assert {key: values[i].tolist() for key, values in arrays.items()} == expected
    dtypes = {key: str(values.dtype) for key, values in arrays.items()}
    ints = ("tokens_BT", "targets_BT", "segment_ids_BT", "positions_BT")
    assert dtypes == {**dict.fromkeys(ints, "int32"), "weights_BT": "float32"}
    assert all(v.shape == (len(rows), T) and v.flags.c_contiguous for v in arrays.values())


@pytest.mark.parametrize("kind", ["best_fit", "pad"])
def test_every_target_is_trained_on_once_an_epoch_after_the_token_before_it(corpus, kind):
    rows = packed(corpus, kind=kind)
    arrays = rows.rows(np.arange(len(rows)))
    used = arrays["weights_BT"] > 0
    targets = np.sort(arrays["targets_BT"][used])
    begins = rows.corpus.offsets
    expected = np.setdiff1d(np.arange(rows.stop), begins)
    assert targets.tolist() == expected.tolist()
    assert (arrays["tokens_BT"][used] + 1 == arrays["targets_BT"][used]).all()
    assert (arrays["segment_ids_BT"][used] > 0).all()
    padding = (arrays["segment_ids_BT"] == 0).mean()
    assert padding == pytest.approx(rows.plan.padding)


def test_a_plan_is_read_again_and_not_made_again(corpus, monkeypatch):
    first, messages = packed(corpus), []
    monkeypatch.delattr(packed_rows, "plan_rows")
    again = packed(corpus, progress=messages.append)
    assert (again.digest, messages) == (first.digest, [])
    ids = np.arange(len(first))
    a, b = first.rows(ids), again.rows(ids)
    assert all(np.array_equal(a[key], b[key]) for key in a)


def test_another_part_length_or_packing_has_another_plan(corpus):
    others = ({}, {"stop": 500}, {"start": 7}, {"seq_len": 8}, {"kind": "pad"})
    digests = [packed(corpus, **other).digest for other in others]
    assert len(set(digests)) == len(others)
    assert [packed(corpus, **other).digest for other in others] == digests


def only(corpus, suffix):
    (path,) = (corpus.parent / "plans").glob(f"*.{suffix}")
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "bit of the array": lambda c: flip_bit_at(only(c, "npy"), 128 + 8 * 20),
    "header of the array": lambda c: flip_bit_at(only(c, "npy"), 12),
    "array cut": lambda c: truncate(only(c, "npy")),
    "array empty": lambda c: only(c, "npy").write_bytes(b""),
    "array removed": lambda c: only(c, "npy").unlink(),
    "array of another type": lambda c: np.save(only(c, "npy"), np.zeros(3)),
    "record removed": lambda c: only(c, "json").unlink(),
    "record cut": lambda c: truncate(only(c, "json")),
    "bit of the record": lambda c: flip_bit_at(only(c, "json"), 60),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_found_and_made_again_as_it_was(corpus, damage):
    first = packed(corpus)
    before = only(corpus, "npy").read_bytes()
    DAMAGES[damage](corpus)
    again = packed(corpus)
    assert again.digest == first.digest
    assert only(corpus, "npy").read_bytes() == before
    assert packed(corpus, progress=pytest.fail).digest == first.digest


def test_the_plan_of_a_known_corpus_never_changes(tmp_path):
    docs = [np.arange(7 * i * i % 53) for i in range(60)]
    write_tokens(tmp_path / "set", docs, vocab_size=53, tokenizer="mine")
    # A change here refuses the restart of every run that packs: that is a breaking change.
    expected = {
        "best_fit": "30a0f25ac97d1c7bf403831b339bf9cf",
        "pad": "f09d2f37d575960f1206f509b5b7ef2d",
    }
    found = {kind: packed(tmp_path / "set", kind=kind).digest for kind in expected}
    assert found == expected, "the rule changed"


def other_rule(*args, packing, **options):
    del packing
    return packing_plan(*args, packing="pad", **options)


packing_plan = packing.plan_rows


def test_a_plan_made_again_by_another_rule_is_refused(corpus, monkeypatch):
    first = packed(corpus)
    DAMAGES["bit of the array"](corpus)
    monkeypatch.setattr(packed_rows, "plan_rows", other_rule)
    with pytest.raises(ConfigError, match=f"records {first.digest}") as caught:
        packed(corpus)
    assert caught.value.exit_code == ExitCode.CONFIG
    only(corpus, "json").unlink()
    assert packed(corpus).digest != first.digest, "without the record the digest still shows it"


def test_the_record_says_what_the_plan_was_made_from(corpus):
    rows = packed(corpus)
    record = json.loads(only(corpus, "json").read_bytes())
    assert (record["packing"], record["seq_len"], record["plan"]) == ("best_fit", T, rows.digest)
    assert (record["corpus"], record["stop"]) == (rows.corpus.meta.fingerprint, rows.stop)
    assert set(record["versions"]) == {"jaxres", "numpy", "python"}


def test_a_flipped_bit_of_a_token_is_found_when_its_row_is_read(corpus):
    rows = packed(corpus)
    flip_bit_at(corpus / "tokens.bin", 20)
    with pytest.raises(TokensDamaged, match=r"tokens\.bin: block 0"):
        rows.rows(np.array([0]))


def test_a_flipped_bit_of_an_offset_is_found_before_a_plan_is_made(corpus, monkeypatch):
    flip_bit_at(corpus / "offsets.npy", 128 + 8 * 30)
    with pytest.raises(TokensDamaged, match=r"offsets\.npy: block 0"):
        packed(corpus)
    remove_digests(corpus)
    offsets = np.load(corpus / "offsets.npy")
    offsets[30] = 10**6
    np.save(corpus / "offsets.npy", offsets)
    monkeypatch.setattr("jaxres.data.tokens.token_folder.NUM_OFFSETS_CHECKED", 2)
    with pytest.raises(TokensDamaged, match="ascending order"):
        packed(corpus)


def test_a_token_beyond_the_vocabulary_is_reported_with_its_row(corpus):
    remove_digests(corpus)
    rows = packed(corpus)
    path = corpus / "tokens.bin"
    tokens = np.memmap(path, "<u2", mode="r+")
    first = int(rows.plan.starts_P[rows.plan.begins_R[3]])
    tokens[first + 1] = 60_000
    tokens.flush()
    rows.rows(np.array([0, 1]))
    with pytest.raises(BadRecord, match=rf"row 3, token {first + 1} of the file is 60000"):
        rows.rows(np.array([2, 3]))


def section(corpus, kind, **fields):
    fields = {"seq_len": T, "heldout_fraction": 0.2, "cache_dir": corpus.parent / "cache"} | fields
    return DataSection(source=TokensSource(path=corpus), packing=kind, **fields)


def test_the_fingerprint_has_the_plan_and_that_of_concat_is_the_tokens_alone(corpus):
    tokens = open_tokens(corpus).meta.fingerprint
    prints = {kind: open_dataset(section(corpus, kind)).fingerprint for kind in KINDS}
    assert prints["concat"] == tokens
    assert len(set(prints.values())) == 3
    assert all(prints[kind].startswith(f"{tokens}{PLAN_MARK}") for kind in ("best_fit", "pad"))
    for fields in ({"seq_len": 8}, {"heldout_fraction": 0.5}):
        other = open_dataset(section(corpus, "best_fit", **fields)).fingerprint
        assert other not in prints.values()
    again = section(corpus, "best_fit", cache_dir=corpus.parent / "elsewhere")
    assert open_dataset(again).fingerprint == prints["best_fit"], "the place does not matter"


def test_a_plan_of_another_rule_is_other_data(corpus, monkeypatch):
    before = open_dataset(section(corpus, "best_fit")).fingerprint
    shutil.rmtree(corpus.parent / "cache")
    monkeypatch.setattr(packed_rows, "plan_rows", other_rule)
    after = open_dataset(section(corpus, "best_fit")).fingerprint
    history = SimpleNamespace(newest=10, dataset=before)
    check_dataset(before, history)
    with pytest.raises(ConfigError, match=r"data\.packing: .* other rows") as caught:
        check_dataset(after, history)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_the_parts_share_no_token_and_padding_is_not_counted_as_tokens(corpus):
    full = open_dataset(section(corpus, "concat"))
    assert (full.padding, full.tokens_of(10)) == (None, 10 * T)
    for kind in ("best_fit", "pad"):
        dataset = open_dataset(section(corpus, kind))
        train, heldout = (
            rows.rows(np.arange(len(rows))) for rows in (dataset.train, dataset.heldout)
        )
        assert train["targets_BT"].max() < full.heldout.start
        assert heldout["tokens_BT"][heldout["segment_ids_BT"] > 0].min() >= full.heldout.start
        num_tokens = int((train["segment_ids_BT"] > 0).sum())
        assert dataset.tokens_of(len(dataset.train)) == num_tokens
        shown = "".join(
            show_rows(
                dataset,
                dataset.order(seed=0, rows_per_step=1),
                count=len(dataset.train),
                position=0,
            )
        )
        assert "segment 0" not in shown
        assert shown.count("padding: ") == int((train["segment_ids_BT"] == 0).any(axis=1).sum())


def test_a_part_without_targets_is_refused(tmp_path):
    write_tokens(tmp_path / "set", [[1, 2, 3]] * 4 + [[1]], vocab_size=9, tokenizer="mine")
    with pytest.raises(ConfigError, match=r"the held-out part has .* no document of two tokens"):
        open_dataset(section(tmp_path / "set", "pad", heldout_fraction=0.05))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
def test_padding_changes_no_bit_of_the_loss_and_its_gradient_is_finite(corpus):
    rows = packed(corpus, kind="pad")
    arrays = {key: jnp.asarray(v) for key, v in rows.rows(np.arange(8)).items()}
    config = GptModel(num_layers=1, d_model=8, num_heads=2, compute_dtype="float32")
    size = rows.corpus.meta.vocab_size
    model = gpt.build(config, vocab_size=size, seq_len=T, platform="cpu")
    params = model.init(jax.random.key(0))

    def total(params, arrays):
        nats_B, weights_B = model.loss(params, arrays, None)
        return nats_B.sum(), weights_B.sum()

    loss = jax.jit(jax.value_and_grad(total, has_aux=True))
    padding_BT = arrays["segment_ids_BT"] == 0
    assert padding_BT.any()
    other = {key: jnp.where(padding_BT, 5, arrays[key]) for key in ("tokens_BT", "targets_BT")}
    (one, one_grads), (two, two_grads) = loss(params, arrays), loss(params, arrays | other)
    assert one == two
    assert one[1] == (rows.rows(np.arange(8))["weights_BT"]).sum()
    for a, b in zip(jax.tree.leaves(one_grads), jax.tree.leaves(two_grads), strict=True):
        assert np.isfinite(a).all()
        assert np.array_equal(a, b)
