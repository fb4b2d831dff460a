"""Measures and checks jaxres on this machine's GPU: one command, one process for each part.

    python tools/gpu/check.py [--minutes 25] [--out build/gpu] [--only PART ...] [--again]
                              [--wheels FOLDER] [--rehearse]

Needs a checkout and an installed jax, flax, optax, orbax-checkpoint and tensorstore. Packages that
are missing are named; pure-Python ones are taken from wheels in a folder (--wheels). The parts run
in order of worth, each with a time limit. One that fails or hangs stops no other. After each part
OUT/results.jsonl gets a line, OUT/results.md the table, OUT/PART.txt has its output. Started again,
the command goes on with the parts that have not passed, those that have never run first (--again:
with all). `--rehearse` runs every part at a tiny size on the CPU. Exits with 1 if a part has not
passed. See docs/benchmarks.md.
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
PASSED, FAILED, TIMED_OUT, NO_TIME = "passed", "failed", "timed out", "no time left"
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
class Part:
    """One part of the check: the function of its name in a module."""

    name: str
    module: str
    minutes: float
    """Longest time on a GPU."""
    question: str


PARTS = (
    Part("environment", "tools.gpu.machine", 2, "what the machine is, and how fast it copies"),
    Part("quickstart", "tools.gpu.training", 3, "the quickstart trains"),
    Part("resume_bitwise", "tools.gpu.recovery", 4, "with bitwise kernels killed equals unbroken"),
    Part("resume_fast", "tools.gpu.recovery", 4, "without them: how often bits differ"),
    Part("speed_124m", "tools.gpu.training", 3, "tokens/s and MFU of a 124M model"),
    Part("speed_1b", "tools.gpu.training", 6, "tokens/s and MFU of a 1B model, sequence 2048"),
    Part("step_path", "tools.gpu.training", 4, "jaxres's loop against a bare one"),
    Part("restart", "tools.gpu.recovery", 4, "seconds from SIGKILL to the next step"),
    Part("saves", "tools.gpu.saves", 4, "what a save costs"),
    Part("attention", "tools.gpu.kernels", 2, "cuDNN's attention against XLA's"),
    Part("determinism_cost", "tools.gpu.training", 3, "step time with bitwise kernels"),
    Part("out_of_memory", "tools.gpu.recovery", 3, "too large a batch ends as 86 with advice"),
    Part("hang", "tools.gpu.recovery", 3, "a stuck step ends as 80 and leaves no process"),
    Part("memory", "tools.gpu.steps", 2, "the estimate of memory against what is used"),
    Part("variants", "tools.gpu.steps", 4, "float16, remat, microbatches, donation"),
    Part("bit_flip", "tools.gpu.recovery", 2, "replay finds a step with a flipped bit"),
    Part("health", "tools.gpu.machine", 1, "temperature, ECC, throttling"),
)


@dataclass(frozen=True)
class Result:
    """How a part ended."""

    name: str
    status: str
    seconds: float
    figures: dict[str, object]
    error: str = ""


def main(arguments: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Runs the parts; returns the exit code."""
    options = _parse(arguments)
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
    unknown = set(options.only) - {part.name for part in parts}
    if unknown:
        names = ", ".join(part.name for part in parts)
        print(
            f"--only {', '.join(sorted(unknown))}: no such part (parts: {names})", file=sys.stderr
        )
        return 64
    if not (options.rehearse or parts is not PARTS) and (why := _no_backend(path)):
        print(f"JAX does not use this machine's GPU: {why}", file=sys.stderr)
        return 64
    ends_at = time.monotonic() + 60 * options.minutes
    results = {} if options.again else _read(out)
    asked = [part for part in parts if not options.only or part.name in options.only]
    due = _due(asked, results)

    def run(part: Part) -> Result:
        longest = REHEARSE_SECONDS if options.rehearse else 60 * part.minutes
        limit = min(ends_at - time.monotonic(), longest)
        if limit <= 0:
            return Result(part.name, NO_TIME, 0.0, {})
        return _run(part, out, path, limit=limit, rehearse=options.rehearse)

    for part in asked:
        if part not in due:
            print(f"{part.name}: passed before", flush=True)
    with ThreadPoolExecutor(2 if options.rehearse else 1) as pool:
        for result in pool.map(run, due):
            results[result.name] = result
            with (out / "results.jsonl").open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
            (out / "results.md").write_text(table(parts, results))
            print(
                f"{result.name}: {result.status} ({result.seconds:.0f} s) {result.error}",
                flush=True,
            )
    return int(not all(_has_passed(results[part.name]) for part in asked))


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()


def _no_backend(path: Sequence[str]) -> str:
    """Returns why JAX has no GPU in a new process; empty if it has one.

    It skips a platform of JAX_PLATFORMS whose devices it does not see, and computes on the CPU.
    """
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
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
        return f"importing it has taken more than {BACKEND_SECONDS:.0f} s"
    platform = (ended.stdout.split() or [""])[-1]
    said = ended.stderr.strip()[-TAIL_CHARACTERS:]
    return "" if platform == "gpu" else f"its platform is {platform or 'unknown'}. {said}"


def _environment(path: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a part on a GPU; an error of CUDA is then one of JAX."""
    return {"JAX_PLATFORMS": "cuda,cpu", **os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _due(asked: Sequence[Part], results: Mapping[str, Result]) -> list[Part]:
    """Returns the parts that have not passed; parts that have never run come first."""
    due = [part for part in asked if not _has_passed(results.get(part.name))]
    ran = {name for name, result in results.items() if result.status != NO_TIME}
    return sorted(due, key=lambda part: part.name in ran)


def _has_passed(result: Result | None) -> bool:
    return result is not None and result.status == PASSED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/gpu/check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--rehearse", action="store_true")
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


def _read(out: Path) -> dict[str, Result]:
    """Returns the last result of each part of an earlier start."""
    lines = (out / "results.jsonl").read_text().splitlines() if _has_results(out) else []
    found: dict[str, Result] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # A line may be cut off.
            result = Result(**json.loads(line))
            found[result.name] = result
    return found


def _has_results(out: Path) -> bool:
    return (out / "results.jsonl").exists()


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


def table(parts: Sequence[Part], results: dict[str, Result]) -> str:
    """Returns the results as a Markdown table."""
    rows = ["| part | question | result | figures |", "|---|---|---|---|"]
    for part in parts:
        result = results.get(part.name)
        status = (
            "not measured yet" if result is None else f"{result.status}, {result.seconds:.0f} s"
        )
        figures = {} if result is None else result.figures
        cell = "; ".join(f"{name} {_text(value)}" for name, value in figures.items())
        rows.append(f"| {part.name} | {part.question} | {status} | {cell} |")
    return "\n".join(rows) + "\n"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
