"""Parts about faults: kills, restarts, a full device, a stuck step."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxres.jax_cli import replay
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.storage import files
from tools.bench import restart as restart_bench
from tools.gpu import machine
from tools.gpu.runs import (
    NO_GPU,
    REHEARSED,
    ROOT,
    Figures,
    command,
    digest,
    event,
    quickstart,
    sized,
    train,
)

LARGE = (
    *("model.num_layers=21", "model.d_model=2048", "model.num_heads=16", "data.seq_len=512"),
    *("model.compute_dtype=bfloat16", "train.global_batch_size=4", "train.steps=100000"),
    *("checkpoint.save_every_steps=200", "evaluation.every_steps=0", "telemetry.sample_tokens=0"),
)
"""A billion parameters and their moments in float32, and steps of about 0.1 s."""
KILLED_SECONDS = 10.0
RELEASE_SECONDS = 20.0
NOISE_MIB = 64
TOO_LARGE = (
    *("data.seq_len=1024", "train.global_batch_size=256", "model.num_layers=48"),
    *("model.d_model=1024", "model.compute_dtype=bfloat16"),
    *("evaluation.every_steps=0", "telemetry.sample_tokens=0"),
)
"""A layer's arrays have less than 2**31 items, which kernels may refuse; all take 400 GB."""
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


FLIPPED = """
import os

import jax
import jax.numpy as jnp
import numpy as np

AT = int(os.environ.get("FLIP_AT", "0"))
steps = 0

def mask(weights):
    global steps
    steps += 1
    return np.uint32(1 << 22 if steps == AT else 0)

class Bigrams:
    def init(self, key):
        return {"logits_VV": 0.02 * jax.random.normal(key, (256, 256))}

    def loss(self, params, batch, key):
        logits_VV, weights_BT = params["logits_VV"], batch["weights_BT"]
        flip = jax.pure_callback(mask, jax.ShapeDtypeStruct((), jnp.uint32), weights_BT)
        bits_VV = jax.lax.bitcast_convert_type(logits_VV, jnp.uint32) ^ flip
        other_VV = jax.lax.stop_gradient(jax.lax.bitcast_convert_type(bits_VV, jnp.float32))
        here_VV = jnp.zeros((256, 256), bool).at[ord("e"), ord(" ")].set(flip != 0)
        log_probs_VV = jax.nn.log_softmax(jnp.where(here_VV, other_VV, logits_VV))
        nats_BT = -log_probs_VV[batch["tokens_BT"], batch["targets_BT"]] * weights_BT
        return nats_BT.sum(1), weights_BT.sum(1)

def build(vocab_size, seq_len):
    return Bigrams()
"""
"""A custom model for which one bit of a weight is flipped in one step, which has the program of all
others."""


def resume_bitwise(folder: Path) -> Figures:
    """Fails unless a killed run ends bit for bit as an unbroken one, and says so."""
    figures = _resume(folder, "bitwise")
    assert figures["equal_digest"], "the killed run has another digest"
    assert figures["different_losses"] == 0
    assert str(figures["guarantee"]).startswith("bitwise"), figures["guarantee"]
    return figures


def resume_fast(folder: Path) -> Figures:
    """Compares runs without deterministic kernels; fails if a guarantee is bitwise and wrong."""
    figures = _resume(folder, "fast")
    if not figures["equal_digest"]:
        assert not str(figures["guarantee"]).startswith("bitwise"), figures["guarantee"]
    return figures


def _resume(folder: Path, determinism: str) -> Figures:
    """Compares an unbroken run with a killed one, whose steps are compiled again each time."""
    shared = (f"train.steps={sized(1500, 20)}", f"checkpoint.save_every_steps={sized(100, 4)}")
    shared += ("evaluation.every_steps=0", "telemetry.sample_tokens=0")
    shared += (f"run.determinism={determinism}", "compilation.keep_programs=0")
    shared += () if REHEARSED else ("model.compute_dtype=bfloat16",)  # As runs on GPUs have it.
    unbroken, killed = RunDir(folder / "unbroken"), RunDir(folder / "killed")
    train(quickstart(folder, f"run.dir={unbroken.root}", *shared))
    chance, committed = random.Random(0), list[int]()
    for attempt in range(1, sized(4, 2)):
        own = [*quickstart(folder, f"run.dir={killed.root}", *shared)]
        own += [f"compilation.cache_dir={folder / f'xla{attempt}'}"]
        process = subprocess.Popen(command(own), cwd=ROOT)
        if not _wait_for_commit(killed, process, after=max(committed, default=0)):
            break
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        if process.wait(KILLED_SECONDS) != -signal.SIGKILL:
            break  # It has ended before.
        committed.append(_committed(killed))
    assert committed, "the run has ended before it could be killed: give it more steps"
    train(quickstart(folder, f"run.dir={killed.root}", *shared))
    losses = [_losses(run_dir) for run_dir in (unbroken, killed)]
    different = sum(a != b for a, b in zip(*losses, strict=True))
    return {
        "kills": len(committed),
        "killed_after_commits_of": " ".join(map(str, committed)),
        "steps": len(losses[0]),
        "equal_digest": digest(unbroken) == digest(killed),
        "different_losses": different,
        "guarantee": event(killed, len(committed) + 1, "training_started")["guarantee"],
    }


def _committed(run_dir: RunDir) -> int:
    return run_log.fold(run_log.read_records(run_dir.log)).step


def _wait_for_commit(run_dir: RunDir, process: subprocess.Popen[bytes], *, after: int) -> bool:
    """Waits for a commit after a step; returns False if the run has ended before.

    A run that commits nothing is ended by the limit of its part.

    Raises:
      AssertionError: the run has failed.
    """
    while not files.exists(run_dir.root) or _committed(run_dir) <= after:
        if (code := process.poll()) is not None:
            assert code == 0, f"the run has ended with exit {code} before it could be killed"
            return False
        time.sleep(0.005)
    return True


def _losses(run_dir: RunDir) -> list[float]:
    arguments = command(["history", str(run_dir.root), "--json"], module="jaxres")
    text = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line)["loss"] for line in text.splitlines()]


def restart(folder: Path) -> Iterator[Figures]:
    """Yields seconds from SIGKILL of a worker to its next step, fresh and forked."""
    kinds = {name: restart_bench.KINDS[name] for name in ("kept", "forked")}
    shared = quickstart(folder, "restart.backoff_seconds=0", "checkpoint.save_every_steps=2")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for number in range(sized(4, 1)):
        for name, own in kinds.items():
            run_dir = RunDir(folder / f"{name}{number}")
            arguments = ["local", *shared, *own, f"run.dir={run_dir.root}", "--hosts", "1"]
            supervised = command(arguments, module="jaxres.launch")
            found[name].append(restart_bench.measure(supervised, run_dir, forked=name == "forked"))
        yield _medians(found)


def restart_large(folder: Path) -> Iterator[Figures]:
    """Yields seconds from SIGKILL of a forked worker to its next step, with a state of 12 GiB."""
    shared = quickstart(folder, "restart.backoff_seconds=0", "checkpoint.keep_last=2")
    shared += ["checkpoint.save_every_steps=2"] if REHEARSED else [*LARGE]
    found: dict[str, list[dict[str, float]]] = {"forked": []}
    for number in range(sized(2, 1)):
        root = folder / f"run{number}"
        arguments = ["local", *shared, f"run.dir={root}", "--hosts", "1"]
        supervised = command(arguments, module="jaxres.launch")
        found["forked"].append(restart_bench.measure(supervised, RunDir(root), forked=True))
        shutil.rmtree(root)  # A disk has room for one.
        yield _medians(found)


def _medians(found: dict[str, list[dict[str, float]]]) -> Figures:
    """Returns the medians of the rounds without the first, which fills the caches."""
    return {
        f"{name} {part}": statistics.median(one[part] for one in rounds[1:] or rounds)
        for name, rounds in found.items()
        for part in restart_bench.PARTS
    }


def bit_flip(folder: Path) -> Figures:
    """Fails unless `jaxres replay` finds the step in which one bit of one weight was flipped."""
    (folder / "flipped.py").write_text(FLIPPED)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    run_dir = RunDir(folder / "run")
    steps, flipped_at = 8, 6
    os.environ["FLIP_AT"] = str(flipped_at)
    train(
        [
            *(str(ROOT / "configs/quickstart.yaml"), f"data.cache_dir={folder / 'data'}"),
            *("model={kind: custom, target: 'flipped:build'}", f"run.dir={run_dir.root}"),
            *(f"train.steps={steps}", "checkpoint.save_every_steps=2", "checkpoint.keep_last=9"),
            *("evaluation.every_steps=0", "telemetry.sample_tokens=0"),
            *("run.determinism=bitwise", f"compilation.cache_dir={folder / 'xla'}"),
        ]
    )
    del os.environ["FLIP_AT"]
    differ = [
        step for step in (flipped_at - 1, flipped_at, steps) if _replay_differs(run_dir, step)
    ]
    assert differ == [flipped_at], f"step {flipped_at} was flipped; replay differs at {differ}"
    return {
        "flipped_step": flipped_at,
        "found_by_replay": True,
        "other_steps_as_recorded": 2,
        "found_by_the_run": "not measured: no such check yet",
    }


def _replay_differs(run_dir: RunDir, step: int) -> bool:
    """Replays a step; returns whether its loss differs from the recorded one."""
    text = "\n".join(replay.StepReplay(run_dir, step=step).lines(explain=False))
    print(text)
    assert ("as recorded" in text) != ("recorded: " in text), text
    return "as recorded" not in text


def out_of_memory(folder: Path) -> Figures:
    """Fails unless a device without room ends the run as 86 with advice."""
    if REHEARSED:
        os.environ |= {"FAULT": "row:30:exhaust_device"}
        arguments = [str(ROOT / "tests/promises/faulty.yaml"), f"run.dir={folder / 'run'}"]
        arguments += [f"compilation.cache_dir={folder / 'xla'}"]
    else:
        arguments = quickstart(folder, f"run.dir={folder / 'run'}", *TOO_LARGE)
    text = train(arguments, exit=86)
    advice = [name for name in ("microbatches", "remat", "fsdp") if name in text]
    assert advice, "no advice in the message"
    return {"exit": 86, "advice": ", ".join(advice)}


def hang(folder: Path) -> Figures:
    """Fails unless a step that never ends is ended as 80 in time and leaves no process."""
    (folder / "stuck.py").write_text(STUCK)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    before, deadline = _used_mib(), sized(40, 10)  # A GPU's first step takes some seconds.
    begun = time.monotonic()
    text = train(
        [
            *(str(ROOT / "configs/quickstart.yaml"), f"data.cache_dir={folder / 'data'}"),
            *("model={kind: custom, target: 'stuck:build'}", f"run.dir={folder / 'run'}"),
            *("deadlines.step_seconds=5", f"deadlines.compile_seconds={deadline}"),
            "telemetry.sample_tokens=0",
            f"compilation.cache_dir={folder / 'xla'}",
        ],
        exit=80,
    )
    assert f"no progress for {deadline}" in text, "it was not ended at its deadline"
    ended = time.monotonic() - begun
    if before is None:
        return {"seconds": ended, "gpu_MiB_left": NO_GPU, "gpu_processes": NO_GPU}
    until = time.monotonic() + RELEASE_SECONDS  # The driver cleans up after a killed process.
    while ((left := (_used_mib() or 0) - before) > NOISE_MIB) and time.monotonic() < until:
        time.sleep(0.5)
    assert left <= NOISE_MIB, f"{left} MiB of the GPU are still in use"
    return {"seconds": ended, "gpu_MiB_left": left, "gpu_processes": _gpu_processes()}


def _used_mib() -> int | None:
    """Returns the used memory of the first GPU; None if there is no GPU."""
    answer = str(machine.query(["memory.used"])["memory.used"])  # As "512 MiB".
    return int(answer.split()[0]) if answer.endswith("MiB") else None


def _gpu_processes() -> object:
    """Fails if the driver lists a GPU process other than this one; returns 0 if it lists none.

    A container or a virtual machine may list none at all, so the used memory is compared too.
    """
    ended = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        return f"not measured: nvidia-smi has ended with {ended.returncode}"
    others = [line for line in ended.stdout.split() if line.isdigit() and int(line) != os.getpid()]
    assert not others, f"processes {others} still hold the GPU"
    return 0
