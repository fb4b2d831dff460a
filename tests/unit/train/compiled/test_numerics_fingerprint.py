"""The source of custom code is in the fingerprint of a start."""

import importlib
import os
import subprocess
import sys
import time

import jax
import pytest

from jaxres.config.schema.data import CustomSource, TextSource
from jaxres.runlog.guarantee import UNKNOWN
from jaxres.train.compiled import compile_cache
from jaxres.train.compiled.numerics_fingerprint import (
    _code_digest,
    jax_settings_here,
    library_settings_here,
)


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """Returns a function that digests the code of data from a target, imported after a time."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(target, *, imported_after=10.0):
        importlib.import_module(target.partition(":")[0])
        after = time.time() + imported_after
        monkeypatch.setattr(compile_cache, "process_start", lambda clock: after)
        return _code_digest(("data",), [CustomSource(target=target)])

    return digest


def test_a_change_of_a_custom_module_changes_the_digest(tmp_path, digest):
    module = tmp_path / "rows_of_mine.py"
    module.write_text("ROWS = 1\n")
    first = digest("rows_of_mine:build")
    assert first == digest("rows_of_mine:build")
    (tmp_path / "another.py").write_text("")
    assert first == digest("rows_of_mine:build"), "another module of the folder is no part of it"
    module.write_text("ROWS = 2\n")
    assert first != digest("rows_of_mine:build"), "changed data code is not in the record"
    assert first != _code_digest(("data",), [TextSource(path="x")])


def test_a_change_beside_a_module_in_a_package_changes_the_digest(tmp_path, digest):
    package = tmp_path / "data_of_mine"
    package.mkdir()
    for name in ("__init__", "rows", "reader"):
        (package / f"{name}.py").write_text("A = 1\n")
    first = digest("data_of_mine.rows:build")
    (package / "reader.py").write_text("A = 2\n")
    assert first != digest("data_of_mine.rows:build")


def test_a_module_that_is_younger_than_the_process_has_no_digest(tmp_path, digest):
    (tmp_path / "new_rows.py").write_text("")
    assert digest("new_rows:build", imported_after=-10.0) == UNKNOWN
    assert digest("math:floor") == UNKNOWN, "a module without source"


@pytest.mark.slow
def test_the_defaults_of_settings_are_those_of_jax():
    code = "import jax; from jaxres.train.compiled import numerics_fingerprint as n; import sys; "
    code += "sys.exit(str({k: jax.config.values[k] for k in n.DEFAULTS} == dict(n.DEFAULTS)))"
    kept = {name: v for name, v in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert ended.stderr.endswith("True\n"), "JAX has another default"


def test_settings_of_jax_that_may_change_bits_are_in_the_fingerprint(monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    assert jax_settings_here() == {}
    with jax.numpy_dtype_promotion("standard"), jax.default_matmul_precision("bfloat16"):
        assert jax_settings_here() == {"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"}
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    assert jax_settings_here() == {}, "a default, or no bit depends on it"
    monkeypatch.setenv("JAX_SOFTMAX_CUSTOM_JVP", "1")
    assert list(jax_settings_here()) == ["JAX_SOFTMAX_CUSTOM_JVP"]


def determinism(code, **env):
    """Runs code in a process that has imported all that a worker needs, and used no device."""
    head = "import jax, os; from jaxres.train import session; "
    head += "from jaxres.train.compiled import compile_cache; "
    return subprocess.run(
        [sys.executable, "-c", head + code],
        env={**os.environ, "XLA_FLAGS": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_xla_reads_its_flags_after_the_imports_so_that_determinism_takes_effect():
    unknown = "os.environ['XLA_FLAGS'] = '--xla_no_such_flag=1'; jax.devices()"
    ended = determinism(unknown)
    assert ended.returncode != 0
    assert "Unknown flag in XLA_FLAGS" in ended.stderr
    known = "compile_cache.set_determinism('bitwise'); jax.devices(); "
    ended = determinism(known + "print(compile_cache.xla_flags_here())")
    assert ended.stdout == "--xla_gpu_deterministic_ops=true\n", ended.stderr


@pytest.mark.slow
def test_determinism_that_comes_too_late_is_a_config_error():
    ended = determinism(
        "jax.devices(); set_determinism = compile_cache.set_determinism; set_determinism('fast'); "
        "os.environ['XLA_FLAGS'] = '--xla_gpu_deterministic_ops=true'; set_determinism('bitwise'); "
        "os.environ['XLA_FLAGS'] = ''; print('late'); set_determinism('bitwise')"
    )
    assert ended.stdout == "late\n", ended.stderr
    assert "ConfigError: run.determinism is bitwise, and this process has used JAX" in ended.stderr


def test_variables_of_libraries_that_may_change_bits_are_in_the_fingerprint(monkeypatch):
    before = library_settings_here()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    changed = {"NVIDIA_TF32_OVERRIDE": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert library_settings_here() == before | changed
