"""Variables that JAX or XLA can't read, or that no run can have, are refused by their names."""

import os
import subprocess
import sys

import jax
import pytest

from jaxres.faults import ConfigError, UnhealthyHost
from jaxres.supervisor import jax_settings
from jaxres.supervisor.jax_settings import check, typed_errors

REFUSED = {
    "JAX_DISABLE_JIT=True": "compiled ahead of time",
    "JAX_NO_TRACING=1": "have to be traced",
    "JAX_NO_EXECUTION=on": "nothing would be computed",
    "JAX_DEBUG_NANS=1": "instead of being masked",
    "JAX_DEBUG_INFS=true": "instead of being masked",
    "JAX_ERROR_CHECKING_BEHAVIOR_NAN=raise": "without the error state",
    "JAX_ERROR_CHECKING_BEHAVIOR_DIVIDE=Raise": "without the error state",
    "JAX_DUMP_IR_TO=/proc/x": "can't write its dumps there",
    "JAX_DUMP_IR_TO=/etc/hosts/x": "Not a directory",
    "JAX_DUMP_IR_TO=sponge": "another meaning",
    "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX=(": "no regular expression",
    "JAX_NUMPY_DTYPE_PROMOTION=strict": "promotion of dtypes",
    "JAX_NUMPY_RANK_PROMOTION=raise": "broadcasting",
    "JAX_TRANSFER_GUARD=disallow_explicit": "are copied",
    "JAX_PLATFORMS=cdua": "'cdua' is no platform of JAX (cpu, gpu, cuda, rocm, tpu)",
    "JAX_PLATFORMS=CPU": "'CPU' is no platform",
    "JAX_PLATFORMS=cpu,": "'' is no platform",
    "JAX_PLATFORM_NAME=foo": "'foo' is no platform",
    "XLA_FLAGS=xla_dump_to": "the name of a file with flags",
    "XLA_FLAGS= /etc/flags --xla_dump_to=x": "the name of a file with flags",
    "JAX_NUM_CPU_DEVICES=0": "a number from 1 to 10,000",
    "JAX_NUM_CPU_DEVICES=": "a number from 1 to 10,000",
    "JAX_NUM_CPU_DEVICES=1e3": "a number from 1 to 10,000",
    "JAX_NUM_CPU_DEVICES=1000000000": "a number from 1 to 10,000",
}
UNREADABLE = {
    "JAX_ENABLE_X64=maybe": "invalid truth value 'maybe'",
    "JAX_DEFAULT_PRNG_IMPL=mersenne": 'Invalid value "mersenne"',
    "JAX_TRACER_ERROR_NUM_TRACEBACK_FRAMES=many": "invalid literal for int()",
    "XLA_FLAGS=--xla_no_such_flag=1": "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1",
    "XLA_FLAGS=--xla_cpu_use_thunk_runtime=perhaps": "Couldn't interpret value perhaps",
}
"""What only JAX and XLA themselves can judge."""


def environment(*given):
    """Returns an environment with variables, and without those of the tests that JAX reads."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return kept | dict(one.split("=", 1) for one in given)


def failing(rows):
    """Returns the rows that are not refused with the variable's name and a text, as messages."""
    failed = []
    for given, text in rows.items():
        try:
            check(environment(given))
            failed.append(f"{given}: is not refused")
        except ConfigError as error:
            if f"\n{given}: " not in str(error) or text not in str(error):
                failed.append(f"{given}: {error}")
    return failed


def test_a_setting_that_no_run_can_have_is_refused_by_its_name():
    assert failing(REFUSED) == []
    known = {name.upper() for name in jax.config.values}
    assert set(jax_settings.REFUSED) <= known, "JAX has no such setting"


@pytest.mark.slow  # Each starts a process.
def test_a_setting_that_jax_or_xla_cannot_read_is_refused_by_its_name():
    assert failing(UNREADABLE) == []


def test_a_flag_that_xla_does_not_know_is_refused_by_its_name():
    given = "XLA_FLAGS=--xla_no_such_flag=1"
    assert failing({given: UNREADABLE[given]}) == []
    check(environment(given), tried_flags=["--xla_no_such_flag=1"])


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)JAX_DISABLE_JIT=1: .*JAX_PLATFORMS=x: "):
        check(environment("JAX_PLATFORMS=x", "JAX_DISABLE_JIT=1"))


def test_settings_that_a_run_can_have_are_let_through(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(jax_settings, "_errors", lambda code, env: started.append(code) or "")
    check(environment("JAX_PLATFORMS=cuda,cpu", "JAX_NUM_CPU_DEVICES=8", "XLA_FLAGS="))
    check(environment("JAX_PLATFORMS=", "JAX_COMPILATION_CACHE_DIR=maybe", "JAX_DUMP_IR_TO="))
    check(environment(f"JAX_DUMP_IR_TO={tmp_path / 'a'}"))
    check(environment("JAX_DUMP_IR_TO=gs://bucket/a", f"{jax_settings.SOURCE_PATTERN}=/home/.*?/"))
    assert started == [], "each start would wait for a process that imports jax"
    check(environment("JAX_DISABLE_JIT=0", "JAX_DEBUG_NANS=False", "JAX_TRANSFER_GUARD=log"))
    assert started == [jax_settings.READ_SETTINGS]


def test_a_process_that_fails_for_another_reason_refuses_nothing(monkeypatch):
    for errors in ("", "Killed", "ImportError: libtpu", "ValueError: a package is broken"):
        monkeypatch.setattr(jax_settings, "_errors", lambda code, env, errors=errors: errors)
        check(environment("JAX_ENABLE_X64=1", "XLA_FLAGS=--xla_dump_to=x"))


def ended(platforms):
    """Returns the typed error of a process in which JAX has no device of the platforms."""
    code = (
        "import os, jax; from jaxres.supervisor.jax_settings import typed_errors\n"
        "try:\n  with typed_errors(os.environ): jax.devices()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    env = environment(f"JAX_PLATFORMS={platforms}", "CUDA_VISIBLE_DEVICES=")
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow  # Each imports jax.
def test_a_platform_without_a_usable_device_is_the_hosts_fault():
    for platform in ("cuda", "tpu", "cuda,rocm"):
        text = ended(platform)
        assert text.startswith(f"UnhealthyHost JAX_PLATFORMS={platform}: JAX can use no"), text
    assert ended("foo").startswith("ConfigError JAX_PLATFORMS=foo: JAX has no such platform")


def test_an_error_that_is_not_about_devices_stays_as_it_is():
    for error in (RuntimeError("Unable to do it"), AssertionError("of a model")):
        with pytest.raises(type(error), match=str(error)), typed_errors({}):
            raise error
    text = "Unable to initialize backend 'cuda': FAILED_PRECONDITION: No visible GPU devices."
    env = {"JAX_PLATFORMS": "cuda"}
    with pytest.raises(UnhealthyHost, match=r"JAX_PLATFORMS=cuda: .*No visible"), typed_errors(env):
        raise RuntimeError(text)


def test_a_host_that_starts_no_more_threads_is_no_bug():
    end = jax_settings.backend_error(RuntimeError("can't start new thread"), {})
    assert isinstance(end, UnhealthyHost)
    assert "ulimit -u" in str(end)
