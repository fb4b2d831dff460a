"""A test of the hardware with a wrong answer names the host and the device; sound ones pass."""

import errno
import os

import jax
import numpy as np
import pytest

from jaxres.clock import SystemClock
from jaxres.exit_codes import ExitCode
from jaxres.faults import StorageRefused, UnhealthyHost
from jaxres.storage import files, probe
from jaxres.train.checks import preflight

SMALL = preflight.Extent(64, 1, 1.0, 2**16, 2**16, 2**16)


def run_tests(folder, dtypes=("float32", "bfloat16", "float16")):
    tests = preflight.run(SMALL, dtypes=dtypes, places=[folder], host="node-7", clock=SystemClock())
    return [measured.what for measured in tests]


def only_device(array, number):
    return {device.id for device in array.devices()} == {number}


def flipped(array):
    """An array in whose last item one bit is flipped, with the sharding of the given one."""
    data = np.array(array)
    data.reshape(-1).view(np.uint8)[-1] ^= 1
    return jax.device_put(data, array.sharding)


@pytest.mark.slow
def test_sound_hardware_passes_every_test_on_every_device(tmp_path):
    what = run_tests(tmp_path)
    for number in range(8):
        own = [text for text in what if text.startswith(f"device {number} ")]
        assert [text.partition(", ")[2].split(" of ")[-1] for text in own] == [
            *(f"{dtype} products" for dtype in ("bfloat16", "float16", "float32")),
            "memory",
            "host to device",
        ]
    assert what[-2:] == ["sum over 8 devices", f"disk of {tmp_path}, write, read"]
    assert list(tmp_path.iterdir()) == []


def corrupt(monkeypatch, name, number):
    """Makes one step of a test return an array with a flipped bit on one device."""
    real = getattr(preflight, name)

    def act(*arguments):
        array = real(*arguments)
        return flipped(array) if only_device(array, number) else array

    monkeypatch.setattr(preflight, name, act)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("product", "a product of bfloat16 matrices is wrong at 1 places, first at [63, 63]"),
        ("filled", "1 of 16384 words of memory have changed"),
        ("sent", "data sent to it and back has changed"),
    ],
)
def test_a_wrong_answer_of_one_device_names_host_and_device(monkeypatch, tmp_path, name, text):
    corrupt(monkeypatch, name, 5)
    with pytest.raises(UnhealthyHost) as raised:
        run_tests(tmp_path)
    assert str(raised.value).startswith(f"node-7: device 5 (cpu): {text}")
    assert raised.value.exit_code == ExitCode.UNHEALTHY


@pytest.mark.slow
def test_a_device_with_a_wrong_sum_is_named(monkeypatch, tmp_path):
    real = preflight.summed

    def summed(array):
        total = real(array)
        parts = [shard.data for shard in total.addressable_shards]
        parts[3] = flipped(parts[3])
        return jax.make_array_from_single_device_arrays(total.shape, total.sharding, parts)

    monkeypatch.setattr(preflight, "summed", summed)
    with pytest.raises(UnhealthyHost, match="node-7: device 3: a sum over all devices is wrong"):
        run_tests(tmp_path)


@pytest.mark.slow
def test_the_bandwidth_of_the_sum_is_measured_on_a_compiled_sum(monkeypatch, tmp_path):
    lowered = []
    real = preflight._add_rows

    def add_rows(everywhere):
        lowered.append(everywhere)
        return real(everywhere)

    monkeypatch.setattr(preflight, "_add_rows", add_rows)
    tests = preflight.run(SMALL, dtypes=(), places=[tmp_path], host="h", clock=SystemClock())
    (measured,) = (one for one in tests if one.bus_bytes_per_second is not None)
    assert (measured.what, measured.message_bytes) == ("sum over 8 devices", 2**16)
    assert measured.bus_bytes_per_second > 0
    assert "bus bandwidth, 0 MiB a device" in measured.result
    assert len(lowered) > preflight.SUM_ROUNDS
    functions = [real(one) for one in lowered]  # All at once: else they could share one id.
    assert len({id(each) for each in functions}) == 1, "each sum was compiled again"


@pytest.mark.slow
def test_a_file_that_reads_back_differently_is_a_fault_of_the_host(monkeypatch, tmp_path):
    real = os.fsync

    def damage(file):
        os.pwrite(file, bytes([os.pread(file, 1, 100)[0] ^ 1]), 100)
        real(file)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(UnhealthyHost, match=f"node-7: {tmp_path}: a file reads back differently"):
        run_tests(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_can_not_be_written_any_more_is_an_error_of_the_storage(monkeypatch, tmp_path):
    def refuse(dir):
        raise OSError(errno.EROFS, "Read-only file system", str(dir / "x"))

    monkeypatch.setattr(probe.tempfile, "TemporaryFile", refuse)
    with pytest.raises(StorageRefused, match=f"{tmp_path}: can't be used .Read-only file system"):
        run_tests(tmp_path)


@pytest.mark.slow
def test_a_full_disk_is_not_filled_further(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "free_bytes", lambda folder: 3 * SMALL.transfer_bytes)
    assert run_tests(tmp_path)[-1] == "sum over 8 devices"
