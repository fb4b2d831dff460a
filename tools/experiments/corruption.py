"""Flips single bits in committed checkpoints of jaxres and in stock Orbax checkpoints.

    python -m tools.experiments.corruption

Exits 1 if jaxres misses a flip or a restore ends with another state.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tools.experiments.training_process import (
    ROOT,
    TrainingProcess,
    committed_steps,
    jaxres,
    write_result,
)

FOLDER = ROOT / "experiments" / "corruption"
COPIES, STEPS = 5, 201
"""In each copy of the run every step but the first gets one flip: 1,000 in all."""
MORE_STEPS = 220
TIMEOUT_SECONDS = 60
MIXED_COPIES = 3
"""In the others all flips are in array data: a restore has to read past all of them."""
DATA, DATA_SHARE = "array data", 0.05
"""A file with more than this share of the bytes is array data, the others are metadata."""


def main() -> int:
    """Flips bits of both and writes results/results.json."""
    with tempfile.TemporaryDirectory(prefix="corruption-") as name:
        folder = Path(name)
        run_dir, unbroken = folder / "run", folder / "unbroken"
        train(run_dir, steps=STEPS)
        train(unbroken, steps=MORE_STEPS, save_every=MORE_STEPS)
        wanted = digest(unbroken)
        copies = [hit_copy(run_dir, number=n, wanted=wanted) for n in range(COPIES)]
        stock = hit_stock(run_dir, num_hits=COPIES * (STEPS - 1))
    found = sum((Counter(copy["found"]) for copy in copies), Counter())
    missed = sum((Counter(copy["missed"]) for copy in copies), Counter())
    result = {
        "claim": "jaxres finds every flip, and a restore ends with the state of the unbroken run",
        "holds": not missed and all(copy["digest_equal"] for copy in copies),
        "jaxres": {"hits": (found + missed).total(), "found": found, "missed": missed},
        "jaxres_restores": [
            {key: copy[key] for key in ("restored_step", "flips_passed", "digest_equal")}
            for copy in copies
        ],
        "orbax": stock,
    }
    write_result(FOLDER / "results" / "results.json", result)
    print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


def train(run_dir: Path, *, steps: int, save_every: int = 1) -> TrainingProcess:
    """Trains up to a step."""
    cache = run_dir.parent / "cache"
    overrides = (
        f"train.steps={steps}",
        f"checkpoint.save_every_steps={save_every}",
        f"data.cache_dir={cache}",
        f"compilation.cache_dir={cache}/xla",
    )
    process = TrainingProcess(FOLDER / "run.yaml", run_dir=run_dir, overrides=overrides)
    process.finish()
    return process


def digest(run_dir: Path) -> str:
    """Returns the digest of the newest state."""
    return jaxres("checkpoints", "digest", str(run_dir)).strip()


def flip(folder: Path, *, number: int) -> str:
    """Flips the random bit `number` of a folder's files; returns the kind of the file."""
    chance = random.Random(number)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    sizes = {path: path.stat().st_size for path in paths}
    data = {path for path in paths if sizes[path] > DATA_SHARE * sum(sizes.values())}
    match where(number):
        case "any byte":
            (path,) = chance.choices(paths, list(sizes.values()))
        case "any file":
            path = chance.choice(paths)
        case _:
            path = max(data, key=lambda path: sizes[path])
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return DATA if path in data else "metadata"


def where(number: int) -> str:
    """Returns where a bit is flipped: anywhere, in a file of any size, or in the array data."""
    if number >= MIXED_COPIES * (STEPS - 1):
        return DATA
    return "any file" if number % 2 else "any byte"


def hit_copy(run_dir: Path, *, number: int, wanted: str) -> dict[str, Any]:
    """Flips a bit of every step but the first of a copy, verifies it, and resumes it."""
    copy = run_dir.with_name(f"copy-{number}")
    shutil.copytree(run_dir, copy)
    steps = committed_steps(copy)
    assert steps == list(range(1, STEPS + 1)), steps
    first = number * (STEPS - 1) - 2
    kinds = {step: flip(step_dir(copy, step), number=first + step) for step in steps[1:]}
    command = [sys.executable, "-m", "jaxres", "checkpoints", "verify", str(copy)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    damaged = {int(step) for step in re.findall(r"^step (\d+): damaged", printed, re.MULTILINE)}
    intact = {int(step) for step in re.findall(r"^step (\d+): valid", printed, re.MULTILINE)}
    assert 1 in intact, printed
    second = train(copy, steps=MORE_STEPS, save_every=MORE_STEPS)
    restored = second.steps()[0] - 1
    equal = digest(copy) == wanted
    shutil.rmtree(copy)
    return {
        "found": Counter(kinds[step] for step in damaged),
        "missed": Counter(kinds[step] for step in intact - {1}),
        "restored_step": restored,
        "flips_passed": STEPS - restored,
        "digest_equal": equal,
    }


def step_dir(run_dir: Path, step: int) -> Path:
    """Returns the directory of a step."""
    (path,) = (run_dir / "checkpoints").glob(f"{step:08d}-*")
    return path


def hit_stock(run_dir: Path, *, num_hits: int) -> dict[str, Any]:
    """Flips bits of a stock checkpoint of the same state, in processes that may die."""
    outcomes: dict[str, Counter[str]] = {DATA: Counter(), "metadata": Counter()}
    done, kind = 0, ""
    source = step_dir(run_dir, STEPS)
    while done < num_hits:
        words = [str(source), str(run_dir.parent / f"stock-{done}"), str(done), str(num_hits)]
        command = [sys.executable, "-m", "tools.experiments.stock_orbax", *words]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # A traceback for each error.
        )
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            kind = row["kind"]
            if outcome := row.get("outcome"):
                outcomes[kind][outcome] += 1
                done += 1
        if child.wait() and done < num_hits:
            outcomes[kind]["process died"] += 1
            done += 1
    return {"hits": num_hits, **outcomes}


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
