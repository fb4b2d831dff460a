import sys
import types

import numpy as np
import pytest

from jaxres.config.schema_data import CustomSource, DataSection
from jaxres.data import BadRecord, batch_at, find_bad_rows, first_row, open_dataset
from jaxres.engine import evaluate
from jaxres.engine.mesh import LocalRows
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from tests.unit.secret_examples import letters


class Images:
    def __init__(self, count=50, broken=None):
        self.count = count
        self.broken = broken or {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = {"image": np.full((2, 3), index, np.float32), "label": index % 7}
        return self.broken.get(index, row)


class Documents(Images):
    vocab_size = 60
    fingerprint = "mine-1"
    tokens_per_row = 5

    def __getitem__(self, index):
        return self.broken.get(index, [index, 1, 2, 3, 4, 5, 6, 7, 8])


class Augmented(Images):
    def item_at(self, index, epoch):
        return {"image": np.full((2, 3), 1000 * (epoch + 1) + index, np.float32), "label": 0}


def broken_inside():
    raise KeyError("in the user's code")


def remote_images(token=None, count=50, url=""):
    return Images(count)


@pytest.fixture
def source(monkeypatch):
    module = types.ModuleType("user_rows")
    module.images = Images
    module.remote_images = remote_images
    module.documents = Documents
    module.augmented = Augmented
    module.number = lambda: 7
    module.constant = 3
    module.broken = broken_inside
    monkeypatch.setitem(sys.modules, "user_rows", module)

    def make(target, *, heldout_fraction=0.1, **args):
        return DataSection(
            source=CustomSource(target=target, args=args),
            seq_len=8,
            heldout_fraction=heldout_fraction,
        )

    return make


def test_dicts_are_stacked_and_the_last_items_are_held_out(source):
    dataset = open_dataset(source("user_rows:images"))
    assert (len(dataset.train), len(dataset.heldout)) == (45, 5)
    batch = batch_at(dataset.train, dataset.order(seed=0, rows_per_step=4), global_batch_size=4)(43)
    assert batch.arrays["image"].shape == (4, 2, 3)
    assert batch.arrays["image"][:, 0, 0].tolist() == batch.ids.tolist()
    assert batch.arrays["label"].tolist() == [i % 7 for i in batch.ids]
    heldout = dataset.heldout.rows(np.arange(5))
    assert heldout["image"][:, 0, 0].tolist() == [45, 46, 47, 48, 49]
    with pytest.raises(IndexError, match="45 rows"):
        dataset.train.rows(np.array([45]))
    assert (dataset.vocab_size, dataset.tokens_per_row, dataset.tokenizer) == (None, 8, None)


def test_rows_may_differ_from_epoch_to_epoch(source):
    dataset = open_dataset(source("user_rows:augmented"))
    order = dataset.order(seed=0, rows_per_step=9)
    at = batch_at(dataset.train, order, global_batch_size=9)
    values = [at(cursor).arrays["image"][:, 0, 0].tolist() for cursor in range(0, 135, 9)]
    for epoch in range(3):
        served = np.concatenate(values[5 * epoch : 5 * epoch + 5])
        assert sorted(served.tolist()) == [1000 * (epoch + 1) + index for index in range(45)]
    heldout = dataset.heldout.rows(np.arange(5))
    assert heldout["image"][:, 0, 0].tolist() == [45, 46, 47, 48, 49]
    validation = {"name": "own", "source": {"kind": "custom", "target": "user_rows:augmented"}}
    config = source("user_rows:augmented").model_dump() | {"validation": (validation,)}
    rows = open_dataset(DataSection.model_validate(config)).validation["own"]
    assert rows.rows(np.array([7]))["image"][0, 0, 0] == 7


def test_token_ids_become_the_arrays_of_a_token_row(source):
    dataset = open_dataset(source("user_rows:documents"))
    arrays = dataset.train.rows(np.array([9, 2]))
    assert arrays["tokens_BT"].tolist() == [[9, 1, 2, 3, 4, 5, 6, 7], [2, 1, 2, 3, 4, 5, 6, 7]]
    assert arrays["targets_BT"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2
    assert arrays["positions_BT"].tolist() == [list(range(8))] * 2
    assert (arrays["segment_ids_BT"] == 1).all()
    assert arrays["weights_BT"].dtype == np.float32
    assert {str(v.dtype) for v in arrays.values()} == {"int32", "float32"}
    assert (dataset.fingerprint, dataset.vocab_size, dataset.tokens_per_row) == ("mine-1", 60, 5)


def test_arguments_are_free_only_with_a_fingerprint_of_the_objects_own(source):
    for target, is_free in (("user_rows:documents", True), ("user_rows:images", False)):
        made = source(target)
        free = made.source.model_copy(update={"path_args": ("count",)})
        config = made.model_copy(update={"source": free})
        if is_free:
            assert open_dataset(config).fingerprint == "mine-1"
            continue
        with pytest.raises(ConfigError, match=r"data\.source\.path_args: .*without `fingerprint`"):
            open_dataset(config)


def test_the_fingerprint_does_not_depend_on_secrets_and_has_its_earlier_definition(source):
    token, other = "hf_" + letters(34), "hf_" + letters(34, 3)
    open_with = [{"token": token}, {"token": other}, {"token": other, "count": 40}]
    one, two, fewer = (open_dataset(source("user_rows:remote_images", **a)) for a in open_with)
    assert one.fingerprint == two.fingerprint != fewer.fingerprint
    assert len({one.earlier_fingerprint, two.earlier_fingerprint, one.fingerprint}) == 3
    for same in ({}, {"token": "<eos>"}, {"count": 40}):
        plain = open_dataset(source("user_rows:remote_images", **same))
        assert plain.fingerprint == plain.earlier_fingerprint


def test_the_fingerprint_depends_on_arguments_length_and_content(source):
    prints = [
        open_dataset(source("user_rows:images", **args)).fingerprint
        for args in ({}, {}, {"count": 51}, {"count": 50})
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("user_gone.rows:build", {}, r"can't be imported.* PYTHONPATH"),
        ("user_rows:absent", {}, "has no function absent"),
        ("user_rows:constant", {}, "has no function constant"),
        ("user_rows:number", {}, "returned a int; it must have __len__"),
        ("user_rows:images", {"size": 3}, r"does not take data\.source\.args.*'size'"),
        ("user_rows:images", {"count": 0}, "returned no items"),
        ("user_rows:images", {"count": 1}, "leaves none to train on"),
    ],
)
def test_an_invalid_target_is_rejected_with_its_name(source, target, args, message):
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(source(target, **args))
    assert target in str(caught.value)


def test_an_error_of_the_users_code_keeps_its_class(source):
    with pytest.raises(KeyError, match="user's code"):
        open_dataset(source("user_rows:broken"))


IMAGE = {"image": np.zeros((2, 3), np.float32), "label": 1}


@pytest.mark.parametrize(
    ("target", "item", "message"),
    [
        ("images", {**IMAGE, "image": np.zeros((2, 4), np.float32)}, r"float32\[2, 4\]"),
        ("images", {**IMAGE, "label": 0.5}, r"label float64\[\]"),
        ("images", {"image": IMAGE["image"]}, "must have the same shapes"),
        ("images", {**IMAGE, "name": "x"}, "values must be numbers"),
        ("images", None, "must be a dict of arrays"),
        ("documents", [1, 2, 3], r"int64\[3\]; it must be .* \+ 1 = 9 token ids"),
        ("documents", [1, 2, 3, 4, 60, 6, 7, 8, 9], r"token 4 is 60, not in 0\.\.59"),
        ("documents", [1, 2, 3, 4, -1, 6, 7, 8, 9], "token 4 is -1"),
    ],
)
def test_an_invalid_item_is_reported_with_its_index(source, monkeypatch, target, item, message):
    class Missing(dict):
        def get(self, key, default=None):
            return item if key == 13 else default

    made = (Images if target == "images" else Documents)()
    made.broken = Missing()
    made.fingerprint = "x"
    monkeypatch.setattr(sys.modules["user_rows"], target, lambda: made)
    dataset = open_dataset(source(f"user_rows:{target}"))
    dataset.train.rows(np.array([12]))
    with pytest.raises(BadRecord, match=message) as caught:
        dataset.train.rows(np.array([12, 13]))
    assert "item 13" in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG


def test_an_error_while_reading_an_item_names_the_item(source, monkeypatch):
    class Torn(Images):
        def __getitem__(self, index):
            return super().__getitem__(index) if index != 3 else 1 / 0

    made = Torn()
    made.fingerprint = "x"
    monkeypatch.setattr(sys.modules["user_rows"], "images", lambda: made)
    dataset = open_dataset(source("user_rows:images"))
    with pytest.raises(ZeroDivisionError) as caught:
        dataset.train.rows(np.array([3]))
    assert "item 3 of data.source.target user_rows:images" in caught.value.__notes__[0]


def test_bad_items_at_the_beginning_do_not_stop_the_start(source, monkeypatch):
    class Torn(Images):
        bad = (0, 1)

        def __getitem__(self, index):
            if index in self.bad:
                raise KeyError(index)
            return super().__getitem__(index) if index != 2 else {"name": "no number"}

    monkeypatch.setattr(sys.modules["user_rows"], "images", Torn)
    dataset = open_dataset(source("user_rows:images"))
    assert first_row(dataset.train)["image"].tolist() == np.full((1, 2, 3), 3).tolist()
    assert find_bad_rows(dataset.train, np.arange(5)).keys() == {0, 1, 2}
    assert dataset.fingerprint == open_dataset(source("user_rows:images")).fingerprint
    Torn.bad = range(50)
    with pytest.raises(KeyError) as caught:
        open_dataset(source("user_rows:images"))
    assert "item 0 of data.source.target" in caught.value.__notes__[0], "all of the first are bad"
    Torn.bad = (47,)
    dataset = open_dataset(source("user_rows:images"))
    local = LocalRows(np.arange(4), 4)
    read = evaluate.batches(dataset.heldout, rows_per_batch=4, limit=2, local=local)
    with pytest.raises(BadRecord, match=r"to evaluate on can't be used: .*item 47 of data\.source"):
        list(read)
