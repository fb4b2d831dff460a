"""Parts about speed: whole runs, the loop, saves, deterministic kernels."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxres import config as configs
from jaxres.data.tokens.token_writer import write_tokens
from jaxres.runlog.paths import RunDir
from jaxres.telemetry.throughput import peak_flops
from tools.bench import step
from tools.gpu import runs, trace
from tools.gpu.runs import (
    NO_GPU,
    REHEARSED,
    ROOT,
    WARM_STEPS,
    Figures,
    event,
    every,
    sized,
    step_seconds,
    train,
)

VOCAB = 50304
OUT_OF_MEMORY = "exit 86"
LENGTHS = {"gpt2-124m": 1024, "llama-1b": 2048}
TRIES = {
    "gpt2-124m": ((64, "none"), (32, "none"), (32, "block")),
    "llama-1b": ((16, "selective"), (8, "none"), (16, "block"), (4, "block")),
}
"""Rows and rematerialization, in the order in which they are tried."""
LOOPS = {
    "small": (),
    "medium": ("model.num_layers=12", "model.d_model=768", "model.num_heads=12"),
    "large": (
        *("model.num_layers=12", "model.d_model=1536", "model.num_heads=12", "data.seq_len=1024"),
        *("model.compute_dtype=bfloat16", "train.global_batch_size=8"),
    ),
}
"""Models whose step takes about 5, 20 and 100 ms on a GPU of 2023."""


def quickstart(folder: Path) -> Figures:
    """Trains the quickstart to its end."""
    run_dir = RunDir(folder / "run")
    steps = sized(280, 8)
    train(runs.quickstart(folder, f"run.dir={run_dir.root}", f"train.steps={steps}"))
    return {"steps": steps, "step_ms": 1e3 * step_seconds(run_dir)} | _utilization(run_dir)


def _utilization(run_dir: RunDir) -> Figures:
    built, seconds = event(run_dir, 1, "run_built"), step_seconds(run_dir)
    tokens_per_step, flops = built["tokens_per_step"], built["flops_per_token"]
    assert isinstance(tokens_per_step, int)
    assert isinstance(flops, float | int)
    rate = tokens_per_step / seconds
    peak = peak_flops(str(built["devices"]).partition(" x ")[2])
    return {"tokens_per_s": rate, "MFU": NO_GPU if peak is None else rate * flops / peak}


def speed_124m(folder: Path) -> Iterator[Figures]:
    """Trains GPT-2's size on random tokens, with the largest batch that fits."""
    found, arguments = _speed(folder, "gpt2-124m")
    yield found
    yield _profile(folder, arguments)


def speed_1b(folder: Path) -> Iterator[Figures]:
    """Trains the 1B model on random tokens at sequence 2048, with the largest batch that fits."""
    found, arguments = _speed(folder, "llama-1b")
    mfu = found["MFU"]
    yield found | {"reaches_50_percent": mfu >= 0.5 if isinstance(mfu, float) else NO_GPU}
    yield _profile(folder, arguments)


def allocator(folder: Path) -> Iterator[Figures]:
    """Yields the speed of the 1B model with JAX's allocator of device memory, and with CUDA's.

    JAX's needs a step's temporary memory in one piece; CUDA's joins pieces.
    """
    for name in ("default", "cuda_malloc_async"):
        if name != "default":
            os.environ["TF_GPU_ALLOCATOR"] = name
        (folder / name).mkdir()
        found, _ = _speed(folder / name, "llama-1b")
        yield {f"{name} {key}": found[key] for key in ("rows", "remat", "step_ms")}


def _profile(folder: Path, arguments: list[str]) -> Figures:
    """Returns the summary of a profile of some steps of jaxres's loop, in this process."""
    config = configs.load(Path(arguments[0]), arguments[1:]).config
    warm, steps = WARM_STEPS, sized(10, 3)
    with step.built(config, live=False) as parts:
        watched = _Watched(parts.run.step, folder / "profile", first=warm, last=warm + steps)
        with contextlib.suppress(_ProfileEnded):
            step.train(step.short(parts.run, steps=warm + steps + 1, step=watched))
    assert watched.profiler is not None
    return watched.profiler.summary(steps=steps)


class _ProfileEnded(Exception):
    """Ends the loop before its last step, which would save gigabytes."""


@dataclass
class _Watched:
    """Replaces a run's step: profiles the calls from `first` to before `last`."""

    step: Callable[..., Any]
    folder: Path
    first: int
    last: int
    calls: int = 0
    profiler: trace.Profiler | None = None

    def __call__(self, state: Any, *arguments: Any) -> Any:
        if self.calls == self.first:
            jax.block_until_ready(state)
            self.profiler = trace.Profiler(self.folder)
        if self.calls == self.last and self.profiler is not None:
            jax.block_until_ready(state)
            self.profiler.stop()
            raise _ProfileEnded
        self.calls += 1
        return self.step(state, *arguments)


def _speed(folder: Path, name: str) -> tuple[Figures, list[str]]:
    """Returns the figures of the first try (rows, remat) that fits, and its arguments."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    length = LENGTHS[name]
    chance = np.random.default_rng(0)
    documents = [chance.integers(0, VOCAB, length * sized(256, 8)) for _ in range(8)]
    write_tokens(folder / "tokens", documents, vocab_size=VOCAB, tokenizer="random")
    for rows, remat in [(2, "block")] if REHEARSED else TRIES[name]:
        run_dir = RunDir(folder / f"run-{rows}-{remat}")
        arguments = speed_arguments(folder, name, rows=rows, remat=remat)
        arguments.append(f"run.dir={run_dir.root}")
        try:
            train(arguments)
        except AssertionError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            continue
        figures = {"rows": rows, "remat": remat, "step_ms": 1e3 * step_seconds(run_dir)}
        return figures | _utilization(run_dir), arguments
    raise AssertionError(f"none of these fits into memory: {TRIES[name]}")


def speed_arguments(folder: Path, name: str, *, rows: int, remat: str) -> list[str]:
    """Returns a config and its overrides: `rows` rows at once, on one device, without saves."""
    small = ("model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.d_ff=64")
    small += ("model.num_kv_heads=2",) if name.startswith("llama") else ()
    return [
        str(ROOT / "configs" / f"{name}.yaml"),
        *(f"data.source.path={folder / 'tokens'}", f"data.seq_len={sized(LENGTHS[name], 32)}"),
        f"compilation.cache_dir={folder / 'xla'}",
        *(f"train.global_batch_size={rows}", "train.microbatches=1", f"model.remat={remat}"),
        *(f"train.steps={sized(40, 8)}", f"model.vocab_size={VOCAB}", "mesh.fsdp=1"),
        "train.max_rows_per_device=null",  # It would make microbatches of the rows.
        *("evaluation.every_steps=0", "checkpoint.save_every_steps=1000000"),
        "telemetry.sample_tokens=0",
        *(small if REHEARSED else ()),
    ]


def host_time(folder: Path) -> Figures:
    """Returns the ratio of jaxres's loop to a bare one for a model whose steps are short."""
    del folder
    return _step_path("small")


def step_path(folder: Path) -> Iterator[Figures]:
    """Yields the ratio of jaxres's loop to a bare one, for longer steps."""
    del folder
    names = list(LOOPS)[1:] if not REHEARSED else ["small"]
    yield from every(**{name: lambda name=name: _step_path(name) for name in names})


def _step_path(name: str) -> Figures:
    config = configs.load(step.CONFIG, [*step.SMALL, "run.dir=bench", *LOOPS[name]]).config
    with step.built(config, live=False) as parts:
        pairs = step.take_turns(
            parts.run, blocks=sized(8, 3), steps=sized(20, 4), save_every=step.NEVER
        )
    ratios = [ours.wall / bare.wall for ours, bare in pairs]
    return {
        f"{name} loop ms": 1e3 * statistics.median(ours.wall for ours, _ in pairs),
        f"{name} bare ms": 1e3 * statistics.median(bare.wall for _, bare in pairs),
        f"{name} ratio": statistics.median(ratios),
    }


def determinism_cost(folder: Path) -> Figures:
    """Returns the step time with bitwise kernels, divided by the one without."""
    seconds = {}
    for how in ("fast", "bitwise"):
        run_dir = RunDir(folder / how)
        arguments = [f"run.dir={run_dir.root}", f"run.determinism={how}"]
        arguments += ["evaluation.every_steps=0", "telemetry.sample_tokens=0"]
        arguments += [f"train.steps={sized(60, 8)}", *(() if REHEARSED else LOOPS["medium"])]
        train(runs.quickstart(folder, *arguments))
        seconds[how] = step_seconds(run_dir)
    fast, bitwise = seconds["fast"], seconds["bitwise"]
    ratio: object = NO_GPU if REHEARSED else bitwise / fast
    return {"fast ms": 1e3 * fast, "bitwise ms": 1e3 * bitwise, "ratio": ratio}
