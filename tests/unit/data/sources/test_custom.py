import re
import sys
import types

import numpy as np
import pytest

from jaxres.config.schema.data import CustomSource, DataSection
from jaxres.config.schema.model import CustomModel, GptModel, MlpModel, VitModel
from jaxres.data import TOKEN_ROW_KEYS, BadRecord, batch_at, find_bad_rows, first_row, open_dataset
from jaxres.engine import evaluate
from jaxres.engine.mesh import LocalRows
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from tests.unit.secret_examples import letters


class Images:
    order = "="

    def __init__(self, count=50, broken=None):
        self.count = count
        self.broken = broken or {}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = np.full((2, 3), index, f"{self.order}f4")
        row = {"image": image, "label": np.array(index % 7, f"{self.order}i8")}
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


def test_counts_of_an_object_may_be_of_numpy_and_are_never_ignored(source, monkeypatch):
    monkeypatch.setattr(Documents, "vocab_size", np.int64(60))
    monkeypatch.setattr(Documents, "tokens_per_row", np.uint8(5))
    dataset = open_dataset(source("user_rows:documents"))
    assert (dataset.vocab_size, dataset.tokens_per_row) == (60, 5)
    for name, value in (("vocab_size", 60.0), ("tokens_per_row", "5")):
        with monkeypatch.context() as changed:
            changed.setattr(Documents, name, value)
            with pytest.raises(ConfigError, match=f"{name} of the object is {value!r}"):
                open_dataset(source("user_rows:documents"))


def test_arrays_in_another_byte_order_are_the_same_numbers(source, monkeypatch):
    little = open_dataset(source("user_rows:images")).train
    monkeypatch.setattr(Images, "order", ">")
    big = open_dataset(source("user_rows:images")).train
    assert not Images()[0]["image"].dtype.isnative
    for name, array in big.rows(np.arange(45)).items():
        assert array.dtype.isnative
        assert np.array_equal(array, little.rows(np.arange(45))[name])


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


def token_row(**changed):
    numbers = np.arange(8, dtype=np.int32)
    row = dict.fromkeys(TOKEN_ROW_KEYS, numbers)
    return {**row, "weights_BT": np.ones(8, np.float32), **changed}


def filled(value, dtype=np.int32, shape=8):
    """Returns an array whose last value is this one."""
    return np.append(np.zeros(shape - 1, dtype), np.array([value], dtype))


DECODER = GptModel(vocab_size=257)
CUSTOM_MODEL = CustomModel(target="user:model")
WIDE = "which 32 bits can't hold"


@pytest.mark.parametrize(
    ("model", "item", "message"),
    [
        (CUSTOM_MODEL, {"x": filled(2**33, np.int64)}, rf"x\[7\] is 8589934592, {WIDE}"),
        (CUSTOM_MODEL, {"x": filled(-(2**31) - 1, np.int64)}, WIDE),
        (CUSTOM_MODEL, {"x": filled(2**32, np.uint64)}, WIDE),
        (CUSTOM_MODEL, {"x": filled(1e300, np.float64)}, WIDE),
        (CUSTOM_MODEL, {"x": filled(1e300j, np.complex128)}, WIDE),
        (CUSTOM_MODEL, {"x": 2**40}, f"x is 1099511627776, {WIDE}"),
        (DECODER, token_row(tokens_BT=filled(2**32 + 3, np.int64)), r"not in 0\.\.256"),
        (DECODER, token_row(tokens_BT=filled(257)), r"257, not in 0\.\.256 .model\.vocab_size"),
        (MlpModel(vocab_size=64), token_row(targets_BT=filled(-5)), r"targets_BT\[7\] is -5, not"),
        (DECODER, token_row(positions_BT=filled(8)), r"not in 0\.\.7 .data\.seq_len=8"),
        (DECODER, token_row(segment_ids_BT=filled(-1)), r"segment_ids_BT\[7\] is -1, not in"),
        (DECODER, token_row(weights_BT=filled(-1.0, np.float32)), r"is -1\.0, not 0 or 1"),
        (DECODER, token_row(weights_BT=filled(np.nan, np.float32)), "is nan, not 0 or 1"),
        (
            DECODER,
            [1, 2, 3, 4, 5000, 6, 7, 8, 9],
            r"is 5000, not in 0\.\.256",
        ),
        (
            VitModel(num_classes=3, image_size=32),
            {"image": np.zeros((32, 32, 3), np.uint8), "label": 3},
            r"label is 3, not in 0\.\.2 .model\.num_classes=3",
        ),
    ],
)
def test_values_that_the_model_can_not_compute_with_are_bad_records(
    source, monkeypatch, model, item, message
):
    opened = with_one_bad(source, monkeypatch, item, 13)
    rows = open_dataset(opened()).for_model(model, has_64_bits=False).train
    found = find_bad_rows(rows, np.arange(12, 15))
    assert list(found) == [1]
    assert re.search(message, found[1])
    assert "item 13: " in found[1]
    with pytest.raises(BadRecord, match=message):
        rows.rows(np.array([12, 13, 14]))


def with_one_bad(source, monkeypatch, item, number):
    """Returns a function that returns a config whose item `number` is this one."""
    usable = [1] * 9 if isinstance(item, list) else {k: np.zeros_like(v) for k, v in item.items()}

    class Mine(Images):
        def __getitem__(self, index):
            return item if index == number else usable

    monkeypatch.setattr(sys.modules["user_rows"], "images", Mine)
    config = source("user_rows:images").model_dump()
    return lambda **changed: DataSection.model_validate(config | changed)


def test_values_are_checked_in_held_out_rows_validation_sets_and_mixtures(source, monkeypatch):
    custom = {"name": "own", "source": {"kind": "custom", "target": "user_rows:images"}}
    mixture = {"kind": "mixture", "sources": ({**custom, "weight": 1.0},)}
    for number, changed, place in (
        (47, {}, lambda opened: opened.heldout),
        (47, {}, lambda opened: opened.validation["heldout"]),
        (2, {"validation": (custom,)}, lambda opened: opened.validation["own"]),
        (2, {"source": mixture}, lambda opened: opened.train),
        (47, {"source": mixture}, lambda opened: opened.validation["own"]),
    ):
        opened = with_one_bad(source, monkeypatch, [5000] * 9, number)
        rows = place(open_dataset(opened(**changed)).for_model(DECODER, has_64_bits=False))
        with pytest.raises(BadRecord, match=f"item {number}: .* is 5000, not in 0"):
            rows.rows(np.arange(5))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            token_row(tokens_BT=np.zeros(8, np.float32)),
            r"tokens_BT is float32\[8\], and must be int",
        ),
        ({name: np.zeros(9, np.int32) for name in TOKEN_ROW_KEYS}, r"must have the shape \[8\]"),
        ({"x": np.zeros(3, np.longdouble)}, r"\['x'\]: values must be numbers of at most 64 bits"),
    ],
)
def test_items_whose_types_the_model_can_not_compute_with_do_not_start(
    source, monkeypatch, item, message
):
    class Mine(Images):
        fingerprint = "x"

        def __getitem__(self, index):
            return item

    monkeypatch.setattr(sys.modules["user_rows"], "images", Mine)
    with pytest.raises(BadRecord, match=message) as caught:
        first_row(
            open_dataset(source("user_rows:images")).for_model(DECODER, has_64_bits=False).train
        )
    assert caught.value.exit_code == ExitCode.CONFIG


def test_values_of_64_bits_are_read_where_jax_keeps_them_or_32_bits_hold_them(source, monkeypatch):
    class Mine(Images):
        value = 1

        def __getitem__(self, index):
            return {"x": np.array([self.value]), "y": np.array([np.inf, 1.5])}

    monkeypatch.setattr(sys.modules["user_rows"], "images", Mine)
    dataset = open_dataset(source("user_rows:images"))
    for value, wide in ((2**33, True), (2**31 - 1, False), (-(2**31), False)):
        Mine.value = value
        rows = dataset.for_model(CUSTOM_MODEL, has_64_bits=wide).train
        assert rows.rows(np.array([1]))["x"].tolist() == [[value]]
