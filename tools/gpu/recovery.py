"""Parts about faults: kills, restarts, a full device, a stuck step."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path

from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tools.bench import restart as restart_bench
from tools.gpu.runs import NO_GPU, REHEARSED, ROOT, command, digest, event, quickstart, sized, train

Figures = dict[str, object]
STUCK = """
import time
import jax

class Stuck:
    def init(self, key):
        return {"weight": jax.numpy.ones(())}

    def loss(self, params, batch, key):
        def callback(rows):
            time.sleep(3600)
            return rows

        rows = batch["weights_BT"].sum(1)
        rows = jax.pure_callback(callback, jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows)
        return rows * params["weight"], rows

def build(vocab_size, seq_len):
    return Stuck()
"""
"""A custom model whose step never ends."""


def resume_bitwise(folder: Path) -> Figures:
    """Fails unless a killed run ends bit for bit as an unbroken one, and says so."""
    figures = _resume(folder, "bitwise")
    assert figures["equal_digest"], "the killed run has another digest"
    assert figures["different_losses"] == 0
    assert str(figures["guarantee"]).startswith("bitwise"), figures["guarantee"]
    return figures


def resume_fast(folder: Path) -> Figures:
    """Returns how much differs without deterministic kernels; the guarantee must not say less."""
    figures = _resume(folder, "fast")
    if not figures["equal_digest"]:
        assert not str(figures["guarantee"]).startswith("bitwise"), figures["guarantee"]
    return figures


def _resume(folder: Path, determinism: str) -> Figures:
    """Compares an unbroken run with a killed one, whose steps are compiled again each time."""
    shared = (f"train.steps={sized(300, 20)}", f"checkpoint.save_every_steps={sized(20, 4)}")
    shared += ("evaluation.every_steps=0", "telemetry.sample_tokens=0")
    shared += (f"run.determinism={determinism}", "compilation.keep_programs=0")
    unbroken, killed = RunDir(folder / "unbroken"), RunDir(folder / "killed")
    train(quickstart(folder, f"run.dir={unbroken.root}", *shared))
    chance, committed = random.Random(0), list[int]()
    for attempt in range(1, sized(4, 2)):
        own = [*quickstart(folder, f"run.dir={killed.root}", *shared)]
        own += [f"compilation.cache_dir={folder / f'xla{attempt}'}"]
        process = subprocess.Popen(command(own), cwd=ROOT)
        _wait_for_commit(killed, after=max(committed, default=0))
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        committed.append(_committed(killed))
    train(quickstart(folder, f"run.dir={killed.root}", *shared))
    losses = [_losses(run_dir) for run_dir in (unbroken, killed)]
    different = sum(a != b for a, b in zip(*losses, strict=True))
    return {
        "killed_after_commits_of": " ".join(map(str, committed)),
        "steps": len(losses[0]),
        "equal_digest": digest(unbroken) == digest(killed),
        "different_losses": different,
        "guarantee": event(killed, len(committed) + 1, "training_started")["guarantee"],
    }


def _committed(run_dir: RunDir) -> int:
    return run_log.fold(run_log.read_records(run_dir.log)).step


def _wait_for_commit(run_dir: RunDir, *, after: int) -> None:
    until = time.monotonic() + 120
    while not files.exists(run_dir.root) or _committed(run_dir) <= after:
        assert time.monotonic() < until, f"no commit after step {after}"
        time.sleep(0.005)


def _losses(run_dir: RunDir) -> list[float]:
    arguments = command(["history", str(run_dir.root), "--json"], module="jaxres")
    text = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line)["loss"] for line in text.splitlines()]


def restart(folder: Path) -> Figures:
    """Returns seconds from SIGKILL of a worker to its next step, fresh and forked."""
    kinds = {name: restart_bench.KINDS[name] for name in ("kept", "forked")}
    shared = quickstart(folder, "restart.backoff_seconds=0", "checkpoint.save_every_steps=2")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(sized(4, 1)):
        for name, own in kinds.items():
            run_dir = RunDir(folder / f"{name}{number}")
            arguments = ["local", *shared, *own, f"run.dir={run_dir.root}", "--hosts", "1"]
            supervised = command(arguments, module="jaxres.launch")
            found[name].append(restart_bench.measure(supervised, run_dir, forked=name == "forked"))
    figures: Figures = {}
    for name, rounds in found.items():
        later = rounds[1:] or rounds  # The first fills the caches.
        for part in restart_bench.PARTS:
            figures[f"{name} {part}"] = statistics.median(one[part] for one in later)
    return figures


def out_of_memory(folder: Path) -> Figures:
    """Fails unless a device without room ends the run as 86 with advice."""
    if REHEARSED:
        os.environ |= {"FAULT": "row:30:exhaust_device"}
        arguments = [str(ROOT / "tests/promises/faulty.yaml"), f"run.dir={folder / 'run'}"]
        arguments += [f"compilation.cache_dir={folder / 'xla'}"]
    else:
        arguments = quickstart(folder, f"run.dir={folder / 'run'}", "data.seq_len=8192")
        arguments += ["train.global_batch_size=4096", "model.d_model=4096", "model.num_heads=32"]
    text = train(arguments, exit=86)
    advice = [name for name in ("microbatches", "remat", "fsdp") if name in text]
    assert advice, "no advice in the message"
    return {"exit": 86, "advice": ", ".join(advice)}


def hang(folder: Path) -> Figures:
    """Fails unless a step that never ends is ended as 80 in time and leaves no process."""
    (folder / "stuck.py").write_text(STUCK)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    begun = time.monotonic()
    text = train(
        [
            *(str(ROOT / "configs/quickstart.yaml"), f"data.cache_dir={folder / 'data'}"),
            *("model={kind: custom, target: 'stuck:build'}", f"run.dir={folder / 'run'}"),
            *("deadlines.step_seconds=5", "deadlines.compile_seconds=10"),
            "telemetry.sample_tokens=0",
            f"compilation.cache_dir={folder / 'xla'}",
        ],
        exit=80,
    )
    assert "no progress for 10" in text, "it was not ended at its deadline"
    return {"seconds": time.monotonic() - begun, "gpu_processes": _gpu_processes()}


def _gpu_processes() -> object:
    """Returns how many processes the driver still lists; raises if there are any but this one."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    except FileNotFoundError:
        return NO_GPU
    others = [line for line in text.split() if line.strip() != str(os.getpid())]
    assert not others, f"processes {others} still hold the GPU"
    return 0
