"""safetensors files of other writers are read; broken files are refused with the reason."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as package

from jaxres.checkpoint.read.manifest import ArrayInfo
from jaxres.checkpoint.weights import safetensors
from jaxres.faults import ConfigError
from jaxres.storage import files
from jaxres.storage.path import GcsPath

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.float64(1.5) * np.ones((1, 1, 2)),
    "empty": np.zeros((0, 3), np.float16),
    "scalar": np.asarray(7, np.int64),
    "bits": np.asarray([True, False]),
}


def test_files_of_the_reference_package_are_read(tmp_path):
    package.save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"who": "it"})
    found = safetensors.open_path(tmp_path)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        there = found[name].read()
        assert (there.dtype, there.shape) == (array.dtype, array.shape)
        assert there.tobytes() == array.tobytes()


def test_an_object_of_a_bucket_is_read_in_parts_and_only_as_it_was(
    tmp_path, gcs_bucket, monkeypatch
):
    monkeypatch.setattr(safetensors, "OBJECT_BYTES", 10)
    package.save_file(ARRAYS, tmp_path / "x.safetensors", metadata={"who": "it"})
    path = GcsPath(gcs_bucket, "weights/x.safetensors")
    files.replace(path, (tmp_path / "x.safetensors").read_bytes())
    for place in (path, path.parent):
        found = safetensors.open_path(place)
        assert found.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            there = found[name].read()
            assert (there.dtype, there.shape) == (array.dtype, array.shape)
            assert there.tobytes() == array.tobytes()
    files.replace(path, (tmp_path / "x.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="changed while it was read"):
        found["a"].read()
    with pytest.raises(ConfigError, match="there are none"):
        safetensors.open_path(path.parent / "y.safetensors")
    files.replace(path, b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ConfigError, match="pointer of Git LFS"):
        safetensors.open_path(path)
    for content in (b"", b"1234567", (200).to_bytes(8, "little") + b"{}"):
        files.replace(path, content)
        with pytest.raises(ConfigError, match=r"a header of \d+ bytes in a file of"):
            safetensors.open_path(path)


def test_a_file_whose_metadata_say_that_it_is_quantized_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    package.save_file(ARRAYS, path, metadata={"format": "pt", "quantization": "none"})
    assert safetensors.open_path(tmp_path).keys() == ARRAYS.keys()
    package.save_file(ARRAYS, path, metadata={"_quantization_metadata": '{"format": "fp8"}'})
    with pytest.raises(ConfigError, match=r"_quantization_metadata.*Convert the model to bfloat16"):
        safetensors.open_path(tmp_path)


def test_the_reference_package_reads_our_files(tmp_path):
    infos = {name: ArrayInfo(array.dtype.name, array.shape) for name, array in ARRAYS.items()}
    safetensors.write_file(tmp_path / "x.safetensors", infos, iter(ARRAYS.items()))
    found = package.load_file(tmp_path / "x.safetensors")
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].tobytes()) == (array.dtype, array.tobytes())


def header(text, body=b"\0" * 8):
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def of(**entries):
    return header(json.dumps(entries).encode())


BROKEN = {
    "empty file": (b"", "a header of 0 bytes in a file of 0"),
    "half a length": (b"\1\0\0", "a header of 1 bytes in a file of 3"),
    "a length beyond the file": ((10**9).to_bytes(8, "little") + b"{}", "a header of 1000000000"),
    "no json": (header(b"{nothing"), "can't be read"),
    "not text": (header(b"\xff\xfe{}"), "can't be read"),
    "a list": (header(b"[]"), "can't be read"),
    "a name twice": (header(b'{"a": {}, "a": {}}'), "the key 'a' occurs twice"),
    "no offsets": (of(a={"dtype": "F32", "shape": [2]}), "data_offsets"),
    "a negative size": (of(a=entry(shape=(-2,))), "shape (-2,)"),
    "another size": (of(a=entry(shape=(3,))), "F32[3] in 8 bytes"),
    "offsets in reverse": (of(a=entry(offsets=(8, 0))), "bytes 8 to 0"),
    "a gap": (of(a=entry(shape=(1,), offsets=(4, 8))), "begins at byte"),
    "an overlap": (of(a=entry(), b=entry(shape=(1,), offsets=(4, 8))), "begins at byte"),
    "cut off": (of(a=entry())[:-1], "its header describes"),
    "more than it describes": (of(a=entry()) + b"\0", "its header describes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(tmp_path, name):
    data, message = BROKEN[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        safetensors.open_file(path)
    assert f"{path}: not a valid safetensors file" in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_type_blocks_only_its_own_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    entries = {"a": entry(offsets=(0, 8)), "b": entry("F4", offsets=(8, 16))}
    path.write_bytes(header(json.dumps(entries).encode(), b"\0" * 16))
    found = safetensors.open_file(path)
    assert found["a"].read().tolist() == [0, 0]
    with pytest.raises(ConfigError, match="of an unknown type"):
        found["b"].read()


def test_a_file_truncated_after_opening_is_refused(tmp_path):
    package.save_file({"a": ARRAYS["a"]}, tmp_path / "x.safetensors")
    found = safetensors.open_path(tmp_path)
    os.truncate(tmp_path / "x.safetensors", 80)
    with pytest.raises(ConfigError, match="cut off"):
        found["a"].read()


def sharded(folder, places):
    package.save_file({"a": ARRAYS["a"]}, folder / "1.safetensors")
    package.save_file({"b": ARRAYS["b"]}, folder / "2.safetensors")
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("below", ["", "weights/", "weights/more/"])
def test_an_index_leads_to_all_files(tmp_path, below):
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    package.save_file({"a": ARRAYS["a"]}, tmp_path / f"{below}1.safetensors")
    package.save_file({"b": ARRAYS["b"]}, tmp_path / "2.safetensors")
    places = {"a": f"{below}1.safetensors", "b": "2.safetensors"}
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": places}))
    found = safetensors.open_path(tmp_path)
    assert {name: tensor.file for name, tensor in found.items()} == {
        name: tmp_path / place for name, place in places.items()
    }


@pytest.mark.parametrize("place", ["../1.safetensors", "/etc/1", "x/../../1", "", "a\0b"])
def test_an_index_reads_only_files_below_its_folder(tmp_path, place):
    folder = tmp_path / "weights"
    folder.mkdir()
    package.save_file({"a": ARRAYS["a"]}, tmp_path / "1.safetensors")
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(ConfigError, match=r"(?s)index\.json: .*relative to it") as caught:
        safetensors.open_path(folder)
    assert repr(place) in str(caught.value)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "2.safetensors", "b": "2.safetensors"}, r": a, .* assigns to it, is missing"),
        ({"a": "1.safetensors", "b": "1.safetensors"}, r": b, .* assigns to it, is missing"),
        ({"a": "1.safetensors"} | {"b": "3.safetensors"}, "no such file"),
        ({"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}, ": c, .* is missing"),
        ([], "can't be read"),
    ],
)
def test_an_index_that_contradicts_the_files_is_refused(tmp_path, places, message):
    sharded(tmp_path, places)
    with pytest.raises(ConfigError, match=message):
        safetensors.open_path(tmp_path)


def test_a_tensor_missing_in_the_index_is_refused(tmp_path):
    sharded(tmp_path, {"a": "1.safetensors"})
    package.save_file({"a": ARRAYS["a"], "x": ARRAYS["b"]}, tmp_path / "1.safetensors")
    with pytest.raises(ConfigError, match="assigns to no file"):
        safetensors.open_path(tmp_path)


def test_several_files_without_an_index_are_not_guessed_at(tmp_path):
    sharded(tmp_path, {})
    (tmp_path / safetensors.INDEX).unlink()
    with pytest.raises(ConfigError, match="there are several"):
        safetensors.open_path(tmp_path)


def test_numbered_files_that_the_index_does_not_name_are_of_another_save(tmp_path):
    sharded(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    package.save_file({"a": ARRAYS["a"]}, tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"does not name model-00001-of-00003.*two saves"):
        safetensors.open_path(tmp_path)


def two_saves(folder, **single):
    sharded(folder, {"a": "1.safetensors", "b": "2.safetensors"})
    package.save_file({"a": ARRAYS["a"], "b": ARRAYS["b"]} | single, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("single", "name"),
    [
        ({"a": ARRAYS["a"] + 1}, "a"),
        ({"a": ARRAYS["a"].T.copy()}, "a"),
        ({"a": ARRAYS["a"].view(np.int32)}, "a"),
        ({"lm_head": ARRAYS["a"]}, "lm_head"),
    ],
)
def test_a_single_file_beside_an_index_of_other_tensors_is_not_guessed_at(tmp_path, single, name):
    two_saves(tmp_path, **single)
    with pytest.raises(ConfigError, match=rf"differ \(in {name}\).*not meant to another folder"):
        safetensors.open_path(tmp_path)
    assert safetensors.open_path(tmp_path / "model.safetensors").keys() >= {"a", "b"}
    (tmp_path / "model.safetensors").unlink()
    assert safetensors.open_path(tmp_path).keys() == {"a", "b"}


def test_a_single_file_with_the_tensors_of_the_index_is_accepted(tmp_path):
    two_saves(tmp_path)
    assert safetensors.open_path(tmp_path)["a"].file == tmp_path / "1.safetensors"


def test_a_single_file_beside_numbered_files_without_an_index_is_not_guessed_at(tmp_path):
    for name in ("model", "model-00001-of-00002", "model-00002-of-00002"):
        package.save_file({"a": ARRAYS["a"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"two saves. Give the path of model\.safetensors"):
        safetensors.open_path(tmp_path)


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "adapter_model-00001-of-00001.safetensors",
        "adapter_model.safetensors.index.json",
        "adapter_model.bin",
        "adapter_config.json",
        "adapters.safetensors",
    ],
)
def test_adapters_beside_weights_are_not_dropped(tmp_path, name, has_index):
    two_saves(tmp_path)
    if not has_index:
        (tmp_path / safetensors.INDEX).unlink()
    package.save_file({"lora_A": ARRAYS["a"]}, tmp_path / name)
    with pytest.raises(ConfigError, match=f"has {name} beside the weights.*away if they do"):
        safetensors.open_path(tmp_path)


def test_adapters_alone_are_read(tmp_path):
    package.save_file({"lora_A": ARRAYS["a"]}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert set(safetensors.open_path(tmp_path)) == {"lora_A"}
