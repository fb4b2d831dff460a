"""Compiled programs come back bit for bit, or not at all; another program's key is another."""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxres.engine import executable
from jaxres.engine.executable import Unusable
from jaxres.train.compile_cache import Program

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def compiled(power: float = 2.0):
    jitted = jax.jit(lambda x: jnp.tanh(x @ x.T) ** power, donate_argnums=0)
    return jitted.lower(jax.ShapeDtypeStruct(X.shape, X.dtype)).compile()


def devices():
    return jax.devices()[:1]


def test_a_loaded_program_computes_the_same_bits():
    fresh = compiled()
    loaded = executable.load(executable.dump(fresh), devices())
    one, other = (np.asarray(program(jnp.asarray(X))) for program in (fresh, loaded))
    assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("at", [0, 20, 60, -1])
def test_a_flipped_bit_is_refused_before_anything_is_unpickled(at, monkeypatch):
    data = bytearray(executable.dump(compiled()))
    data[at] ^= 1
    monkeypatch.setattr(executable.pickle, "loads", lambda _: pytest.fail("was unpickled"))
    with pytest.raises(Unusable, match="not what was written"):
        executable.load(bytes(data), devices())


@pytest.mark.parametrize("length", [0, 10, 50, 1000])
def test_a_file_that_was_cut_short_is_refused(length):
    with pytest.raises(Unusable):
        executable.load(executable.dump(compiled())[:length], devices())


def test_libraries_devices_threads_and_settings_are_in_the_key():
    def key(number_of_devices=1, **environment):
        chosen = jax.devices()[:number_of_devices]
        return executable.key(executable.here(chosen, environment=environment))

    assert key() == key(HOME="/root", JAXRES_ATTEMPT="3", CUDA_VISIBLE_DEVICES="1")
    others = [key(NPROC="2"), key(NPROC="3"), key(XLA_FLAGS="--x"), key(number_of_devices=2)]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        others.append(key())
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert len({key(), *others}) == 1 + len(others)


def test_code_that_changed_after_its_import_has_no_digest(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    later = time.time() + 10
    first = executable.sources(folder, since=later)
    assert first == executable.sources(folder, since=later)
    (folder / "a.py").write_text("a = 2\n")
    second = executable.sources(folder, since=later)
    (folder / "a.py").rename(folder / "b.py")
    assert len({first, second, executable.sources(folder, since=later)}) == 3
    os.utime(folder / "b.py", (0, 0))  # As a copy that keeps times.
    assert executable.sources(folder, since=time.time() - 10) is None


def test_the_newest_files_are_kept(tmp_path):
    for number in range(4):
        executable.keep(tmp_path / "kept", f"{number}", b"content", most=2)
        os.utime(executable.file_of(tmp_path / "kept", f"{number}"), (number, number))
    assert [path.name for path in sorted(Path(tmp_path, "kept").iterdir())] == [
        "2.compiled",
        "3.compiled",
    ]


def test_programs_of_one_text_that_are_called_differently_have_different_keys():
    """As when a new version of this package has one more argument, which is None."""
    step = jax.jit(lambda x, more=None: x + 1)
    old = Program("step", lambda: step.trace(jnp.ones(3)), {}, None)
    new = Program("step", lambda: step.trace(jnp.ones(3), None), {}, None)
    assert old.lowered.as_text() == new.lowered.as_text()
    assert old.text_key != new.text_key
