"""Checks the variables that JAX and XLA read, before an attempt is claimed. No jax.

JAX reads its settings when it is imported, and XLA its flags when it is used first. A value that
they can't read ends the worker, by an exception or an abort, and would count as a bug. Which values
they can read is their business: a process of its own reads unusual ones first. Settings under which
no run trains, or under which guards of jaxres can't work, are refused by their names. All other
settings that may change bits are in the start record (`train/compiled/numerics_fingerprint.py`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxres.faults import ConfigError, RunError, UnhealthyHost
from jaxres.host.limits import error_of_limit
from jaxres.runlog import run_log
from jaxres.runlog.records import Record
from jaxres.storage import files, local_store
from jaxres.storage.path import is_address
from jaxres.supervisor.process.worker_group import versions

FLAGS = "XLA_FLAGS"
PLATFORM_VARIABLES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")
"""Platforms of JAX itself; a plugin may have another one."""
OWN_PLUGINS = ("xla_cuda", "xla_rocm")
"""How the names of the plugins of these platforms begin."""
NUM_DEVICES = "JAX_NUM_CPU_DEVICES"
MOST_DEVICES = 10_000
DUMPS = "JAX_DUMP_IR_TO"
"""Folder that JAX creates, and to which it writes each function that it compiles."""
SOURCE_PATTERN = "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX"
"""Regular expression that JAX applies to the paths of source files."""
READABLE = (
    *(*PLATFORM_VARIABLES, NUM_DEVICES, DUMPS, SOURCE_PATTERN),
    "JAX_COMPILATION_CACHE_DIR",
)
"""Variables that are judged here, or have any text as value."""
ON = ("1", "true", "t", "yes", "y", "on")
"""Values that JAX reads as true, in any case."""
GUARDED = (
    "a step that is not finite would end the run instead of being masked. `jaxres replay "
    "--explain` finds the operation"
)
CHECKED = (
    "the steps are compiled without the error state that these checks need. `jaxres replay "
    "--explain` finds the operation"
)
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "JAX_DISABLE_JIT": (ON, "the steps are compiled ahead of time. For a debugger use --inline"),
    "JAX_NO_TRACING": (ON, "the steps have to be traced"),
    "JAX_NO_EXECUTION": (ON, "nothing would be computed"),
    "JAX_DEBUG_NANS": (ON, GUARDED),
    "JAX_DEBUG_INFS": (ON, GUARDED),
    "JAX_ERROR_CHECKING_BEHAVIOR_NAN": (("raise",), CHECKED),
    "JAX_ERROR_CHECKING_BEHAVIOR_DIVIDE": (("raise",), CHECKED),
    "JAX_NUMPY_DTYPE_PROMOTION": (
        ("strict",),
        "the steps, and optax and Flax, rely on the promotion of dtypes",
    ),
    "JAX_NUMPY_RANK_PROMOTION": (
        ("raise",),
        "the steps, and optax and Flax, rely on broadcasting",
    ),
    "JAX_TRANSFER_GUARD": (
        ("disallow", "disallow_explicit"),
        "batches and saves are copied between host and devices",
    ),
}
"""Name of each setting that is refused -> the refused values, in small letters, and why."""
PROBE_SECONDS = 60.0
"""Longest wait for the process that reads the variables; after it nothing is refused."""
READ_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"
READ_SETTINGS = "import jax"
UNKNOWN_BACKEND = "is not in the list of known backends"
NO_BACKEND = "Unable to initialize backend"


def refuse_unusable(records: Sequence[Record], *, env: Mapping[str, str]) -> None:
    """Raises as `check`; a run has tried the flags with which it has trained before.

    Raises:
      ConfigError: a variable can't be read, or no run can have its value.
    """
    history = run_log.fold(records)
    trained, here = {record.attempt for record in history.starts}, versions()
    claims = [claim for claim in history.claims if claim.attempt in trained]
    same = [claim for claim in claims if dict(claim.versions) == here]
    check(env, tried_flags=[claim.fingerprint.get("xla_flags", "") for claim in same])


def check(env: Mapping[str, str], *, tried_flags: Sequence[str] = ()) -> None:
    """Raises if a variable has a value that JAX or XLA can't read, or that no run can have.

    Args:
      tried_flags: values of XLA_FLAGS with which these versions have trained before.

    Raises:
      ConfigError: one has; the message names all that are found.
    """
    problems = [text for name in sorted(env) if (text := _problem(name, env[name])) is not None]
    if not problems and env.get(FLAGS, "") not in ("", *tried_flags):
        problems = _flags_problem(env)
    if not problems and any(_is_unusual(name) for name in env):
        problems = _settings_problem(env)
    if problems:
        raise ConfigError("the environment can't be used:\n" + "\n".join(problems))


def _is_unusual(name: str) -> bool:
    return name.startswith("JAX_") and name not in READABLE


def _problem(name: str, value: str) -> str | None:
    """Returns the error in a variable's value, checked without JAX; None: no error found.

    >>> _problem("JAX_PLATFORMS", "cpu"), _problem("JAX_DISABLE_JIT", "0")
    (None, None)
    """
    if name in PLATFORM_VARIABLES:
        return _platforms_problem(name, value)
    if name == NUM_DEVICES:
        is_count = re.fullmatch("[0-9]{1,9}", value) and 1 <= int(value) <= MOST_DEVICES
        expected = f"expected a number from 1 to {MOST_DEVICES:,}, or no such variable"
        return None if is_count else f"{name}={value}: {expected}"
    if name == FLAGS and value.strip() and not value.lstrip().startswith("-"):
        return (
            f"{name}={value}: XLA takes this for the name of a file with flags, which no record of "
            f"the run would have. Give the flags themselves, such as {name}=--xla_dump_to=/tmp/x"
        )
    if name == DUMPS and value:
        return _dumps_problem(value)
    if name == SOURCE_PATTERN:
        return _pattern_problem(value)
    values, why = REFUSED.get(name, ((), ""))
    return f"{name}={value}: {why}. Unset it." if value.lower() in values else None


def _dumps_problem(value: str) -> str | None:
    """Returns why JAX can't write to its folder of dumps, which this creates; None: it can."""
    try:
        if value == "sponge":  # JAX reads it as a variable of Google's test runner.
            raise NotADirectoryError(errno.ENOTDIR, "the name has another meaning for JAX")
        if not is_address(value):
            files.try_to_create_in(Path(value))
    except OSError as error:
        if error.errno in local_store.FULL:
            return None  # No error of the setting: the run's own checks report a full disk.
        return (
            f"{DUMPS}={value}: JAX can't write its dumps there ({error.strerror}). Give a folder "
            "that can be written, or unset it."
        )
    return None


def _pattern_problem(value: str) -> str | None:
    try:
        re.compile(value)
    except re.error as error:
        return f"{SOURCE_PATTERN}={value}: is no regular expression ({error}). Unset it."
    return None


def _platforms_problem(name: str, value: str) -> str | None:
    if not value or _has_other_plugins():
        return None
    unknown = [each for each in value.split(",") if each not in PLATFORMS]
    if not unknown:
        return None
    return f"{name}={value}: {unknown[0]!r} is no platform of JAX ({', '.join(PLATFORMS)})"


def _has_other_plugins() -> bool:
    """Returns whether a plugin of JAX is installed that may have a platform of any name."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return any(not plugin.name.startswith(OWN_PLUGINS) for plugin in plugins)


def _flags_problem(env: Mapping[str, str]) -> list[str]:
    """Returns XLA's message about invalid flags in the environment; []: XLA accepts them."""
    lines = _errors(READ_FLAGS, env).splitlines()
    if not any("parse_flags_from_env" in line for line in lines):
        return []
    own = [line for line in lines if ".cc:" in line]  # It prints all flags that there are, too.
    return [f"{FLAGS}={env[FLAGS]}: {own[0].partition('] ')[2]}"]


def _settings_problem(env: Mapping[str, str]) -> list[str]:
    """Returns the error that JAX raises when it reads its settings; []: it reads them."""
    error = _errors(READ_SETTINGS, env).rstrip().rpartition("\n")[2]
    if not error.startswith("ValueError: "):
        return []
    unusual = {name: env[name] for name in sorted(env) if _is_unusual(name)}
    named = [name for name in unusual if re.search(rf"\b{name}\b", error, re.IGNORECASE)]
    named = named or [name for name, value in unusual.items() if repr(value) in error]
    if not named:
        return []
    return [f"{name}={env[name]}: {error.removeprefix('ValueError: ')}" for name in named]


def _errors(code: str, env: Mapping[str, str]) -> str:
    """Runs code in a child process; returns its stderr if it fails, "" if it succeeds or hangs."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        command = [sys.executable, "-c", code]
        ended = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS
        )
        return ended.stderr.decode(errors="replace") if ended.returncode else ""
    return ""


@contextlib.contextmanager
def typed_errors(env: Mapping[str, str]) -> Iterator[None]:
    """Converts JAX's exceptions about missing devices into typed errors.

    Raises:
      UnhealthyHost: this host has no device that can be used, of a platform that is asked for.
      ConfigError: JAX does not know the platform.
    """
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        end = backend_error(error, env)
        if end is None:
            raise
        raise end from error


def _has_no_devices() -> bool:
    """Returns whether JAX, if it is imported, has no devices: without a GPU it only asserts one."""
    try:
        return "jax" in sys.modules and not sys.modules["jax"].devices()
    except AssertionError:
        return True


def backend_error(error: BaseException, env: Mapping[str, str]) -> RunError | None:
    """Returns the fault of an exception that this host causes; None: it is another one.

    JAX finds no devices, or a limit of the machine is reached (`error_of_limit`).
    """
    if (end := error_of_limit(error)) is not None:
        return end
    if isinstance(error, AssertionError) and _has_no_devices():
        text = "there is no device of this platform"
    elif isinstance(error, RuntimeError) and str(error).startswith((NO_BACKEND, "Unknown backend")):
        text = str(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    else:
        return None
    given = next((f"{name}={env[name]}" for name in PLATFORM_VARIABLES if env.get(name)), "")
    names = [] if not given else given.partition("=")[2].split(",")
    if UNKNOWN_BACKEND in text and any(name not in PLATFORMS for name in names):
        return ConfigError(f"{given}: JAX has no such platform: {text}")
    return UnhealthyHost(
        f"{given or 'JAX_PLATFORMS is not set'}: JAX can use no device: {text}. Check driver and "
        "devices of this host (nvidia-smi, dmesg) and its installation of jax. To train on "
        "CPUs on purpose set JAX_PLATFORMS=cpu"
    )
