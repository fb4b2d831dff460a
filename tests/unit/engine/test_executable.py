"""Compiled programs come back bit for bit, or not at all; another program's key is another."""

import functools
import hashlib
import os
import pickle
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.experimental import serialize_executable

from jaxres.engine import executable
from jaxres.engine.executable import Signature, Unusable
from jaxres.faults import ConfigError
from jaxres.train.compiled import compile_cache
from jaxres.train.compiled.compile_cache import Program, StepToCompile
from tests.compiling import nothing_kept

X = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


@functools.cache
def here():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def shape():
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=here())


@functools.cache
def signature():
    return Signature(({"x": shape()}, None), results=({"x": here()}, here()))


FACTS = {"text": "1f", "compilation": "2e"}


@pytest.fixture(autouse=True)
def all_is_compiled():
    with nothing_kept():
        yield


def function(arrays, unused=None):
    return {"x": jnp.tanh(arrays["x"] @ arrays["x"].T) ** 2}, jnp.float32(3)


def compiled(function=function):
    jitted = jax.jit(function, donate_argnums=0, out_shardings=signature().results)
    return jitted.lower(*signature().arguments).compile()


def devices():
    return jax.devices()[:1]


def file_with(content):
    return executable.MAGIC + hashlib.sha256(content).digest() + content


def dumped():
    return executable.dump(compiled(), signature(), FACTS)


def test_a_loaded_program_computes_the_same_bits_and_is_like_the_compiled_one():
    fresh = compiled()
    loaded = executable.load(executable.dump(fresh, signature(), {}), signature(), devices())
    arguments = [{"x": jax.device_put(X, here())} for _ in range(2)]
    one, other = (
        program(argument, None)
        for program, argument in zip((fresh, loaded), arguments, strict=True)
    )
    assert all(argument["x"].is_deleted() for argument in arguments), "donated to both"
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(np.asarray(left).view(np.uint32), np.asarray(right).view(np.uint32))
        assert (left.aval, left.sharding) == (right.aval, right.sharding)
    assert loaded.in_tree == fresh.in_tree
    assert loaded.donate_argnums == fresh.donate_argnums
    assert loaded.in_avals == fresh.in_avals
    assert executable.facts_of(dumped()) == FACTS
    with pytest.raises(TypeError, match="float32"):
        loaded({"x": jax.device_put(X[:2], here())}, None)


@pytest.mark.parametrize("at", [0, 20, 60, -1])
def test_a_flipped_bit_is_refused_before_anything_is_read(at, monkeypatch):
    data = bytearray(dumped())
    data[at] ^= 1
    monkeypatch.setattr(executable, "_compiled", lambda *_: pytest.fail("was read"))
    with pytest.raises(Unusable, match="does not match its digest"):
        executable.load(bytes(data), signature(), devices())


def test_a_pickle_with_a_right_digest_is_refused_and_does_not_run(tmp_path):
    """As one who may write the file could plant it."""
    trace = tmp_path / "ran"

    class Planted:
        def __reduce__(self):
            return Path.touch, (trace,)

    with pytest.raises(Unusable):
        executable.load(file_with(pickle.dumps(Planted())), signature(), devices())
    assert not trace.exists()


def test_loading_unpickles_nothing(monkeypatch):
    """Not even through JAX: its own deserialize_and_load does."""
    data = dumped()

    def fails(*_, **__):
        pytest.fail("was unpickled")

    class Unpickler(pickle.Unpickler):
        __init__ = fails

    monkeypatch.setattr(pickle, "loads", fails)
    monkeypatch.setattr(pickle, "load", fails)
    monkeypatch.setattr(pickle, "Unpickler", Unpickler)
    monkeypatch.setattr(serialize_executable._JaxPjrtUnpickler, "__init__", fails)
    executable.load(data, signature(), devices())


@pytest.mark.parametrize(
    "other",
    [
        lambda: Signature(
            ({"x": jax.ShapeDtypeStruct((2, 2), X.dtype, sharding=here())}, None),
            ({"x": here()}, here()),
        ),
        lambda: Signature(
            ({"x": jax.ShapeDtypeStruct(X.shape, "int32", sharding=here())}, None),
            ({"x": here()}, here()),
        ),
        lambda: Signature(({"x": shape()}, shape()), ({"x": here()}, here())),
        lambda: Signature(({"x": shape()}, None), ({"x": here()}, here(), here())),
    ],
    ids=["shape", "dtype", "one more argument", "one more result"],
)
def test_a_program_of_another_signature_is_refused(other):
    with pytest.raises(Unusable, match="can't be loaded here"):
        executable.load(dumped(), other(), devices())


def test_a_program_that_does_not_match_its_signature_is_not_cached():
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    called = Signature(({"y": shape()}, None), signature().results)
    placed = Signature(signature().arguments, ({"x": here()}, second))
    for other in (called, placed):
        with pytest.raises(Unusable, match="signature"):
            executable.dump(compiled(), other, FACTS)

    def with_callback(arrays, unused):
        jax.debug.callback(lambda: None)
        return function(arrays)

    with pytest.raises(Unusable, match=r"it has .*host_callbacks"):
        executable.dump(compiled(with_callback), signature(), FACTS)


def test_a_jax_with_other_internals_caches_no_program_and_uses_its_own_cache(monkeypatch):
    assert executable.can_be_kept(), "this version of JAX needs other FIELDS"
    monkeypatch.setattr(executable, "FIELDS", executable.FIELDS | {"another"})
    with pytest.raises(Unusable, match="has other fields of compiled programs"):
        dumped()
    with compile_cache._without_jax_cache():
        assert jax.config.values["jax_enable_compilation_cache"]


@pytest.mark.parametrize("length", [0, 10, 50, 1000])
def test_a_file_that_was_cut_short_is_refused(length):
    with pytest.raises(Unusable):
        executable.load(dumped()[:length], signature(), devices())


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


def test_a_program_for_another_topology_or_machine_has_another_key(monkeypatch):
    """So a host neither loads nor takes one: it asks for its own key."""

    def key(*processes, kind="H100", platform="gpu", version="CUDA 12.9", **environment):
        client = SimpleNamespace(platform_version=version)
        chosen = [
            SimpleNamespace(
                id=number, process_index=process, device_kind=kind, platform=platform, client=client
            )
            for number, process in enumerate(processes)
        ]
        return executable.key(executable.here(chosen, environment=environment))

    keys = [
        key(0, 0, 1, 1),
        key(0, 1, 2, 3),
        key(0, 1, 0, 1),
        key(1, 1, 0, 0),
        key(0, 0, 1),
        key(0, 0, 1, 1, kind="H200"),
        key(0, 0, 1, 1, platform="tpu"),
        key(0, 0, 1, 1, version="CUDA 13.0"),
        key(0, 0, 1, 1, XLA_FLAGS="--xla_gpu_autotune_level=0"),
        key(0, 0, 1, 1, LIBTPU_INIT_ARGS="--x"),
    ]
    for module in (jax, jaxlib, np):
        monkeypatch.setattr(module, "__version__", "0")
        keys.append(key(0, 0, 1, 1))
        monkeypatch.undo()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    keys.append(key(0, 0, 1, 1))
    assert len(set(keys)) == len(keys)


def test_code_that_changed_after_its_import_has_no_digest(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "a.py").write_text("a = 1\n")
    now = time.time()
    later = {"since": now + 10, "now": now}
    first = executable.sources(folder, **later)
    assert first == executable.sources(folder, **later)
    (folder / "a.py").write_text("a = 2\n")
    second = executable.sources(folder, **later)
    (folder / "a.py").rename(folder / "b.py")
    assert len({first, second, executable.sources(folder, **later)}) == 3
    os.utime(folder / "b.py", (0, 0))  # As a copy that keeps times.
    assert executable.sources(folder, since=now - 10, now=now) is None


def test_what_is_no_file_is_no_code_of_a_package(tmp_path):
    """A link to nothing is what an editor leaves beside a file with unsaved changes."""
    (tmp_path / "a.py").write_text("a = 1\n")
    now = time.time()
    known = executable.sources(tmp_path, since=now + 10, now=now)
    (tmp_path / "b.py").mkdir()
    (tmp_path / ".#a.py").symlink_to("user@host.4711:1")
    (tmp_path / "c.py").symlink_to("/dev/null")
    assert executable.sources(tmp_path, since=now + 10, now=now) == known


def test_code_of_the_future_is_as_it_was_imported(tmp_path):
    """The clock was set back, or is behind that of the machine on which the files were written."""
    (tmp_path / "a.py").write_text("a = 1\n")
    now = time.time()
    known = executable.sources(tmp_path, since=now + 10, now=now)
    assert executable.sources(tmp_path, since=now - 9000, now=now - 8000) == known


def test_the_newest_files_are_kept(tmp_path):
    for number in range(4):
        executable.keep(tmp_path / "kept", f"{number}", b"content", most=2)
        os.utime(executable.file_of(tmp_path / "kept", f"{number}"), (number, number))
    assert [path.name for path in sorted(Path(tmp_path, "kept").iterdir())] == [
        "2.compiled",
        "3.compiled",
    ]


def test_a_program_that_is_stored_after_the_clock_was_set_back_is_kept(tmp_path):
    later = time.time() + 10_000
    for name in "ab":
        executable.keep(tmp_path / "kept", name, b"content", most=2)
        os.utime(executable.file_of(tmp_path / "kept", name), (later, later))
    executable.keep(tmp_path / "kept", "new", b"content", most=2)
    assert executable.read(tmp_path / "kept", "new") == b"content"


def set_mode(folder):
    folder.chmod(0o750)


def replace_by_link(folder):
    folder.rename(folder.with_name("moved"))
    folder.symlink_to(folder.with_name("moved"))


def replace_by_file(folder):
    (folder / "1.compiled").unlink()
    folder.rmdir()
    folder.write_text("")


@pytest.mark.parametrize("change", [set_mode, replace_by_link, replace_by_file])
def test_a_folder_that_others_can_use_is_neither_read_nor_written(tmp_path, change):
    folder = tmp_path / "programs"
    executable.keep(folder, "1", b"content", most=2)
    assert (executable.read(folder, "1"), folder.stat().st_mode & 0o777) == (b"content", 0o700)
    change(folder)
    with pytest.raises(Unusable, match="expected a folder of this account"):
        executable.read(folder, "1")
    with pytest.raises(ConfigError, match="machine code"):
        executable.keep(folder, "2", b"content", most=2)
    with pytest.raises(ConfigError, match="machine code"):
        compile_cache.use_compilation_cache(folder)
    assert jax.config.values["jax_compilation_cache_dir"] != str(folder)


def test_a_folder_of_another_account_is_not_used(tmp_path, monkeypatch):
    executable.keep(tmp_path / "programs", "1", b"content", most=2)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(Unusable, match="expected a folder of this account"):
        executable.read(tmp_path / "programs", "1")


def test_programs_of_one_text_that_are_called_differently_have_different_keys():
    """As when a new version of this package has one more argument, which is None."""
    step = jax.jit(lambda x, more=None: x + 1)
    old, new = (
        Program(
            "step",
            StepToCompile(partial(step.trace, *arguments), Signature(arguments, here())),
            {},
            None,
        )
        for arguments in ((jnp.ones(3),), (jnp.ones(3), None))
    )
    assert old.lowered.as_text() == new.lowered.as_text()
    assert old.text_key != new.text_key


def test_steps_of_one_text_have_keys_of_their_own():
    """As fingerprints with and without arrays that have no copy, where all have one."""
    arguments = (jnp.ones(3),)
    trace = partial(jax.jit(lambda x: x + 1).trace, *arguments)
    step = StepToCompile(trace, Signature(arguments, here()))
    assert len({Program(name, step, {}, None).text_key for name in ("one", "two")}) == 2
