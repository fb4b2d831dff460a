"""Saves compiled programs in files and loads them, each under a key made of its inputs.

The key is a digest of all inputs of the compilation: programs with different inputs have different
keys. A file holds a digest of its content, one line of JSON, and the executable as serialised by
XLA. Nothing is pickled: the caller provides the trees and shardings of arguments and results, which
are known without tracing. The digest detects damage, not an attack. An executable is machine code,
so files are read and written only in a folder that no other account can use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib
import numpy as np
import optax
from jax._src import core, stages  # jax.stages.Compiled has no public constructor.
from jax._src.interpreters import pxla
from jaxlib import xla_client

from jaxres.faults import RunError
from jaxres.storage import files

MAGIC = b"jaxres compiled 3\n"
SUFFIX = ".compiled"
LIBRARIES = (
    *("LIBTPU_INIT_ARGS", "TF_XLA_", "TF_CUDNN_", "NVIDIA_TF32_", "CUBLAS_", "CUBLASLT_"),
    *("CUDNN_", "ONEDNN_", "DNNL_"),
)
"""Prefixes of environment variables by which libraries below JAX choose kernels or precision."""
DECIDING = ("XLA_", "JAX_", "NPROC", *LIBRARIES)
"""Prefixes of environment variables that XLA and its libraries read; equal on every host."""
ELSEWHERE = ("jax_compilation_cache_dir",)
"""JAX settings that do not affect the program: paths."""


FIELDS = frozenset(
    (
        *("all_args_info", "backend", "committed", "device_list", "dispatch_in_layouts"),
        *("host_callbacks", "input_avals", "input_shardings", "keepalive", "kept_var_idx", "mut"),
        *("name", "ordered_effects", "output_avals", "output_shardings", "pgle_profiler"),
        *("unordered_effects", "xla_executable", "xla_in_layouts", "xla_out_layouts"),
    )
)
"""Fields of UnloadedMeshExecutable in jax 0.10.2. With other fields, no program is stored."""


class Unusable(Exception):
    """A program can't be stored, or a stored file can't be loaded as a program."""


@dataclass(frozen=True)
class Signature:
    """Arguments and results of a program; known before it is traced."""

    arguments: tuple[Any, ...]
    """Trees of jax.ShapeDtypeStruct with shardings."""
    results: Any
    """Tree of shardings, one for each array."""

    def in_tree(self) -> Any:
        """Returns the tree of positional and keyword arguments."""
        return jax.tree.structure((self.arguments, {}))


def key(inputs: Mapping[str, Any]) -> str:
    """Returns the digest of the inputs of a compilation.

    >>> key({"a": 1, "b": 2}) == key({"b": 2, "a": 1}), key({"a": 1}) == key({"a": 2})
    (True, False)
    """
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def here(devices: Sequence[Any], *, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the inputs of a compilation besides the program: libraries, machine, settings.

    Args:
      devices: the mesh's devices, in its order.
      environment: the environment variables of this process.
    """
    modules = {"jax": jax, "jaxlib": jaxlib, "flax": flax, "optax": optax, "numpy": np}
    settings = jax.config.values.items()
    return {
        "versions": {name: module.__version__ for name, module in modules.items()},
        "python": sys.version,
        "processor": _processor(),
        "platform": [devices[0].platform, devices[0].client.platform_version],
        "devices": [[d.id, d.process_index, d.device_kind] for d in devices],
        "processes": jax.process_count(),
        "environment": {n: v for n, v in environment.items() if n.startswith(DECIDING)},
        "settings": {name: repr(value) for name, value in settings if name not in ELSEWHERE},
    }


def _processor() -> str:
    """Returns a digest of the model and features of the first core, on which programs depend."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    relevant = ("model", "flags", "Features", "CPU ", "vendor", "cpu family", "stepping")
    return hashlib.sha256(
        "\n".join(line for line in text.splitlines() if line.startswith(relevant)).encode()
    ).hexdigest()


AHEAD_SECONDS = 60.0
"""How much the clock of a file server may be ahead of this machine's."""


def sources(
    folder: Path, paths: Iterable[Path] | None = None, *, since: float, now: float
) -> str | None:
    """Returns the digest of a package's Python files; None if one changed since its import.

    A file whose time is in the future was written before this machine's clock was set back, or on
    a machine whose clock is ahead: a change since then would have a time before now.

    Args:
      paths: the files in it; None: all.
      since: wall-clock time before the import; imported files are older.
      now: wall-clock time.
    """
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py") if paths is None else paths):
        if not files.is_file(path):  # A folder, a pipe or an editor's link to nothing: no code.
            continue
        if since <= path.stat().st_ctime <= now + AHEAD_SECONDS:
            return None
        data = files.read_whole(path)
        total.update(b"\0".join([str(path.relative_to(folder)).encode(), data, b""]))
    return total.hexdigest()


def file_of(folder: Path, key: str) -> Path:
    """Returns the file of a key's program."""
    return folder / f"{key}{SUFFIX}"


def can_be_kept() -> bool:
    """Returns whether this version of JAX has the internals that `dump` and `load` rely on."""
    return {field.name for field in fields(pxla.UnloadedMeshExecutable)} == FIELDS


def dump(program: Any, signature: Signature, facts: Mapping[str, str]) -> bytes:
    """Returns the content of a program's file.

    Args:
      signature: arguments and results that it was traced with.
      facts: what `facts_of` returns.

    Raises:
      Unusable: XLA can't turn the program into bytes, or `load` could not call it.
    """
    if not can_be_kept():
        raise Unusable(
            f"jax {jax.__version__} has other fields of compiled programs than jaxres supports"
        )
    try:
        description = _description(program, signature)
        executable = program.runtime_executable().serialize()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise Unusable(f"XLA can't serialise it: {error}") from error
    line = json.dumps({**description, "facts": dict(facts)}).encode()
    content = line + b"\n" + executable
    return MAGIC + hashlib.sha256(content).digest() + content


def _description(program: Any, signature: Signature) -> dict[str, Any]:
    """Returns the facts about a program that neither the executable nor the signature has.

    Raises:
      Unusable: the program differs from its signature, or is of a kind that `load` can't call.
    """
    unloaded = program._executable._unloaded_executable
    named = ("unordered_effects", "ordered_effects", "host_callbacks", "keepalive", "mut")
    has = [name for name in named if getattr(unloaded, name)]
    has += ["const_args"] * bool(program._params.const_args)
    has += ["layouts"] * any(layout is not None for layout in unloaded.dispatch_in_layouts)
    if has or not unloaded.committed:
        raise Unusable(f"it has {', '.join(has) or 'no fixed devices'}")
    arguments = jax.tree.leaves(signature.arguments)
    results, out_tree = jax.tree.flatten(signature.results)
    kept = sorted(unloaded.kept_var_idx)
    placed = [
        *zip(unloaded.input_avals, unloaded.input_shardings, strict=True),
        *zip(unloaded.output_avals, unloaded.output_shardings, strict=True),
    ]
    asked = [*(arguments[index].sharding for index in kept), *results]
    if (program.in_tree, program.out_tree) != (signature.in_tree(), out_tree) or not all(
        found.is_equivalent_to(sharding, aval.ndim)
        for (aval, found), sharding in zip(placed, asked, strict=True)
    ):
        raise Unusable("its arguments or results differ from its signature")
    donated = [info.donated for info in jax.tree.leaves(program.args_info)]
    return {
        "name": unloaded.name,
        "arguments": [[list(leaf.shape), str(leaf.dtype)] for leaf in arguments],
        "donated": [index for index, is_donated in enumerate(donated) if is_donated],
        "used": kept,
        "results": [[list(a.shape), str(a.dtype), a.weak_type] for a in unloaded.output_avals],
    }


def load(data: bytes, signature: Signature, devices: Sequence[Any]) -> Any:
    """Returns the compiled program in a file's content.

    Raises:
      Unusable: the content is damaged, has other arguments, or can't be loaded on this machine.
    """
    head, content = data[: len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if head != MAGIC + hashlib.sha256(content).digest():
        raise Unusable("its content does not match its digest")
    try:
        line, _, executable = content.partition(b"\n")
        return _compiled(json.loads(line), executable, signature, devices)
    except (
        jax.errors.JaxRuntimeError,
        *(ValueError, TypeError, KeyError, IndexError, AttributeError),
    ) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unusable(f"it can't be loaded here: {first[:200]}") from error


def facts_of(data: bytes) -> dict[str, str]:
    """Returns the facts that `dump` has stored in the content of a file; `load` has checked it."""
    return json.loads(data[len(MAGIC) + 32 :].partition(b"\n")[0])["facts"]


def _compiled(
    description: Mapping[str, Any], executable: bytes, signature: Signature, devices: Sequence[Any]
) -> Any:
    """Returns the jax.stages.Compiled that a compilation by JAX would return."""
    arguments = jax.tree.leaves(signature.arguments)
    if [[list(leaf.shape), str(leaf.dtype)] for leaf in arguments] != description["arguments"]:
        raise ValueError("its arguments have other shapes")
    shardings, out_tree = jax.tree.flatten(signature.results)
    results = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak)
        for (shape, dtype, weak), sharding in zip(description["results"], shardings, strict=True)
    ]
    in_avals: list[Any] = [core.shaped_abstractify(leaf) for leaf in arguments]
    out_avals: list[Any] = [core.shaped_abstractify(result) for result in results]
    used = description["used"]
    device_list = xla_client.DeviceList(tuple(devices))
    backend = devices[0].client
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=backend.deserialize_executable(executable, executable_devices=device_list),
        device_list=device_list,
        backend=backend,
        input_avals=[in_avals[index] for index in used],
        input_shardings=[arguments[index].sharding for index in used],
        output_avals=out_avals,
        output_shardings=shardings,
        committed=True,
        name=description["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(used),
        mut=None,
        xla_in_layouts=[None] * len(used),  # Default layouts: _description allows no others.
        dispatch_in_layouts=[None] * len(used),
        xla_out_layouts=[None] * len(results),
        all_args_info=pxla.AllArgsInfo(
            in_avals, core.DebugInfo("jit", description["name"], None, None)
        ),
        pgle_profiler=None,
    )
    infos = [
        stages.ArgInfo(aval, index in description["donated"]) for index, aval in enumerate(in_avals)
    ]
    args_info = jax.tree.unflatten(signature.in_tree(), infos)
    return jax.stages.Compiled(unloaded.load(), [], args_info, out_tree, no_kwargs=False)


def keep(folder: Path, key: str, data: bytes, *, most: int) -> None:
    """Writes the file of a key, then removes the oldest files if there are more than `most`.

    Raises:
      RunError: storage refuses the write, or other accounts can use the folder.
    """
    files.make_private_dir(folder)
    files.replace(file_of(folder, key), data)
    with files.typed_errors(folder):
        names = [name for name in files.list_names(folder) if name.endswith(SUFFIX)]
        times: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # Another process has removed it.
                times[name] = (folder / name).stat().st_mtime_ns
        own = file_of(folder, key).name  # Its time is the oldest if the clock was set back.
        for name in sorted(times, key=lambda name: (name == own, times[name]))[:-most]:
            (folder / name).unlink(missing_ok=True)


def read(folder: Path, key: str) -> bytes | None:
    """Returns the content of a key's file, or None if there is no file.

    Raises:
      Unusable: storage refuses the read, or other accounts can use the folder.
    """
    try:
        files.make_private_dir(folder)
        return files.read(file_of(folder, key))
    except (RunError, OSError) as error:
        raise Unusable(str(error)) from error
