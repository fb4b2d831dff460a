"""Measures and checks jaxres on this machine's GPU: one command, one process for each part.

    python tools/gpu/check.py [--minutes 8] [--out build/gpu] [--only PART ...] [--again]
                              [--wheels FOLDER] [--rehearse] [--record RESULTS]

Needs a checkout and an installed jax, flax, optax, orbax-checkpoint and tensorstore. Packages that
are missing are named; pure-Python ones are taken from wheels in a folder (--wheels). The parts run
in the order of tools/gpu/parts.py, what is unknown first, each in a process with a time limit; one
that would not fit into the minutes that are left waits for the next call. One that fails or hangs
stops no other. After each part OUT/results.jsonl gets a line, OUT/results.md the table, and
OUT/PART.txt has its output. Left out is what has passed in OUT, or for this code and kind of GPU in
the committed results (--again: nothing). `--record OUT/results.jsonl` adds results to those: commit
them, and the page that tools/golden.py then writes. `--rehearse` runs every part at a tiny size on
the CPU. Exits with 1 if a part has not passed. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.gpu import results  # noqa: E402
from tools.gpu.parts import PARTS, Part, code_digest, unknown_names  # noqa: E402
from tools.gpu.results import FAILED, NO_TIME, PASSED, TIMED_OUT, UNKNOWN, Result  # noqa: E402

MINUTES, REHEARSE_MINUTES = 8.0, 60.0
ASK = (
    "import jax, platform; d = jax.devices()[0]; print(d.platform, d.device_kind, "
    "f'Python {platform.python_version()}, jax {jax.__version__}, ' "
    "+ d.client.platform_version.split()[-1], sep='|')"
)
"""Code that prints the platform, the kind of the device, and versions."""
NEEDED = {
    **{name: name for name in ("jax", "flax", "optax", "tensorstore", "numpy", "ml_dtypes")},
    **{name: name for name in ("jaxtyping", "pydantic", "rich", "plotext", "xxhash")},
    "annotated_types": "annotated-types",
    "markdown_it": "markdown-it-py",
    "orbax.checkpoint": "orbax-checkpoint",
    "pydantic_core": "pydantic-core",
    "pygments": "Pygments",
    "typing_extensions": "typing-extensions",
    "typing_inspection": "typing-inspection",
    "yaml": "PyYAML",
}
"""Module -> package; what pydantic and rich import too, since only the files are looked for."""
TAG = "JAXRES_GPU_CHECK"
"""Environment variable of all processes of a part, by which what it leaves is found."""
REHEARSE_SECONDS = 1800.0
QUICK_COMPILATION = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA_FLAGS of a rehearsal."""
BACKEND_SECONDS = 120.0
KILL_ROUNDS = 100
"""Searches for processes to kill, 0.05 s apart."""
KILLED_SECONDS = 10.0
"""Longest wait for a killed process: one that is stuck in the driver never ends."""
TAIL_CHARACTERS = 2000


@dataclass(frozen=True)
class Machine:
    """The GPU that JAX uses, in words."""

    device: str = ""
    versions: str = ""


def main(arguments: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Runs the parts; returns the exit code."""
    options = _parse(arguments)
    if options.record is not None:
        names = results.record(options.record)
        print(f"recorded: {', '.join(names) or 'none'}. Now: python tools/golden.py")
        return 0
    ends_at = time.monotonic() + 60 * _minutes(options)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if not (options.rehearse or parts is not PARTS or _has_gpu()):
        print(
            "no GPU here (no nvidia-smi, no /dev/nvidia0): give --rehearse for a run on the CPU",
            file=sys.stderr,
        )
        return 64
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = [str(ROOT), *_unpacked(options.wheels, out), *_own_metadata(out), *given]
    if missing := _missing(path):
        print(
            f"missing packages: {', '.join(missing)}. Install them, or put their wheels into a "
            "folder and give it by --wheels.",
            file=sys.stderr,
        )
        return 64
    if unknown := unknown_names(options.only, parts):
        names = ", ".join(part.name for part in parts)
        print(f"--only {', '.join(unknown)}: no such part (parts: {names})", file=sys.stderr)
        return 64
    machine = Machine()
    if not (options.rehearse or parts is not PARTS):
        machine, why = _machine(path)
        if why:
            print(f"JAX does not use this machine's GPU: {why}", file=sys.stderr)
            return 64
    asked = [part for part in parts if not options.only or part.name in options.only]
    found = {} if options.again else _earlier(out, machine)
    due = _due(asked, found)

    def run(part: Part) -> Result:
        left = ends_at - time.monotonic()
        longest = REHEARSE_SECONDS if options.rehearse else 60 * part.minutes
        if left <= 0 or (left < longest and not options.rehearse):
            return Result(part.name, NO_TIME, 0.0, {})
        ended = _run(part, out, path, limit=min(left, longest), rehearse=options.rehearse)
        code = code_digest(part) if machine.device else UNKNOWN
        today = time.strftime("%Y-%m-%d", time.gmtime())
        return dataclasses.replace(ended, **dataclasses.asdict(machine), date=today, code=code)

    for part in asked:
        if part not in due:
            print(f"{part.name}: passed before", flush=True)
    with ThreadPoolExecutor(2 if options.rehearse else 1) as pool:
        for result in pool.map(run, due):
            found[result.name] = result
            with (out / "results.jsonl").open("a") as file:
                file.write(results.line(result))
            (out / "results.md").write_text(results.table(parts, found))
            print(
                f"{result.name}: {result.status} ({result.seconds:.0f} s) {result.error}",
                flush=True,
            )
    return int(not all(found[part.name].has_passed for part in asked))


def _minutes(options: argparse.Namespace) -> float:
    default = REHEARSE_MINUTES if options.rehearse else MINUTES
    return default if options.minutes is None else options.minutes


def _earlier(out: Path, machine: Machine) -> dict[str, Result]:
    """Returns the last result of each part: committed ones of this code, and those in a folder."""
    committed = results.known(machine.device) if machine.device else {}
    return committed | {result.name: result for result in results.read(out / "results.jsonl")}


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def _machine(path: Sequence[str]) -> tuple[Machine, str]:
    """Returns the GPU of JAX in a new process, and why it has none; empty if it has one.

    It skips a platform of JAX_PLATFORMS whose devices it does not see, and computes on the CPU.
    """
    command = [sys.executable, "-c", ASK]
    try:
        ended = subprocess.run(
            command,
            env=_environment(path),
            capture_output=True,
            text=True,
            timeout=BACKEND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Machine(), f"importing it has taken more than {BACKEND_SECONDS:.0f} s"
    platform, _, rest = (ended.stdout.splitlines() or [""])[-1].partition("|")
    device, _, versions = rest.partition("|")
    said = ended.stderr.strip()[-TAIL_CHARACTERS:]
    why = "" if platform == "gpu" else f"its platform is {platform or 'unknown'}. {said}"
    return Machine(device, versions), why


def _environment(path: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a part on a GPU; an error of CUDA is then one of JAX."""
    return {"JAX_PLATFORMS": "cuda,cpu", **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _due(asked: Sequence[Part], found: Mapping[str, Result]) -> list[Part]:
    """Returns the parts that have not passed; parts that have never run come first."""
    due = [part for part in asked if part.name not in found or not found[part.name].has_passed]
    ran = {name for name, result in found.items() if result.status != NO_TIME}
    return sorted(due, key=lambda part: part.name in ran)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu/check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--record", type=Path, metavar="RESULTS")
    return parser.parse_args(arguments)


def _unpacked(wheels: Path | None, out: Path) -> list[str]:
    """Returns the folders of unpacked wheels."""
    found = []
    for wheel in sorted(wheels.glob("*.whl")) if wheels is not None else []:
        folder = out / "wheels" / wheel.stem
        if not folder.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        found.append(str(folder))
    return found


def _own_metadata(out: Path) -> list[str]:
    """Returns a folder with the version of jaxres, which a checkout that is not installed lacks."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("jaxres")
        return []
    folder = out / "metadata"
    about = folder / "jaxres-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxres\nVersion: 0\n")
    return [str(folder)]


def _missing(path: Sequence[str]) -> list[str]:
    """Returns the packages that can't be found."""
    sys.path[:0] = [folder for folder in path if folder not in sys.path]
    return [package for module, package in NEEDED.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _run(part: Part, out: Path, path: Sequence[str], *, limit: float, rehearse: bool) -> Result:
    """Runs a part in a process of its own, and kills its leftover processes."""
    folder = out / part.name
    figures, output = out / f"{part.name}.json", out / f"{part.name}.txt"
    figures.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("run_part.py"))]
    command += [part.module, part.name, str(folder), str(figures)]
    mark = f"{part.name}-{os.getpid()}-{time.monotonic_ns()}"
    env = _environment(path) | {TAG: mark}
    if rehearse:
        env |= {"JAX_PLATFORMS": "cpu", "REHEARSE": "1", "XLA_FLAGS": QUICK_COMPILATION}
    started = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            left = _kill_marked(mark)
            stuck = _stuck(process)
    seconds = time.monotonic() - started
    tail = output.read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    found = json.loads(figures.read_text()) if figures.exists() else {}
    if code is None:
        return Result(part.name, TIMED_OUT, seconds, found, f"after {limit:.0f} s{stuck}: {tail}")
    if code != 0 or not figures.exists():
        return Result(part.name, FAILED, seconds, found, f"exit {code}: {tail}")
    if left:
        return Result(part.name, FAILED, seconds, found, f"left {left} process(es) behind")
    return Result(part.name, PASSED, seconds, found)


def _stuck(process: subprocess.Popen[bytes]) -> str:
    """Waits for a process that has ended or was killed; returns a text if it does not end."""
    try:
        process.wait(KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        return f", process {process.pid} has not ended {KILLED_SECONDS:.0f} s after SIGKILL"
    return ""


def _kill_marked(mark: str) -> int:
    """Kills all processes with this mark in their environment; returns how many there were."""
    wanted, killed = f"{TAG}={mark}".encode(), set[int]()
    for _ in range(KILL_ROUNDS):
        found = set[int]()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                is_marked = wanted in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_marked:
                found.add(int(entry.name))
        if not found:
            break
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed |= found
        time.sleep(0.05)
    return len(killed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
