"""Benchmark of checkpoints against stock Orbax and the machine's limits, in turns, in one run.

    python tools/bench/checkpoint.py [--layers 12] [--width 768] [--rounds 5] [--devices 8]
    python tools/bench/checkpoint.py --arrays 74 [--gigabytes 0.75] [--rounds 5] [--devices 8]

The state is that of the built-in decoder (float32 weights and two moments; 1.2 GB by default), or
so many float32 arrays of equal size. The process has the environment of a worker.
Prints how long a save delays training (the call and the step after it, which donates the state),
the whole save with and without digests, a restore with and without verification, and `verify`
without jax, each as a ratio to stock Orbax and to a plain copy, write or read of as many bytes; a
verified restore and the first step after it, with the file cache warm and cold; and how much a save
slows steps that compute, for some shares of `checkpoint.background_share`. Where nothing else is
said, the file cache is warm for reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxres import models
from jaxres.checkpoint.checkpointer import Checkpointer
from jaxres.checkpoint.read import verify
from jaxres.checkpoint.read.tensorstore_reader import ARRAYS
from jaxres.checkpoint.restore.load_arrays import load
from jaxres.checkpoint.restore.restore import restore
from jaxres.checkpoint.write import array_writer
from jaxres.checkpoint.write.orbax_writer import save_context
from jaxres.clock import SystemClock
from jaxres.cluster.host_group import SingleHost
from jaxres.config.schema.checkpoint import CheckpointSection
from jaxres.config.schema.model import GptModel
from jaxres.config.schema.optimizer import AdamwOptimizer
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.engine import optimizer
from jaxres.engine import state as states
from jaxres.engine.state import Progress
from jaxres.runlog.events import Event, SaveCommitted, SaveFailed
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Claim, Commit, RunLog
from jaxres.storage import files
from jaxres.storage.direct_file import BUFFER_BYTES, DirectReader, DirectWriter
from jaxres.storage.path import RunPath
from jaxres.supervisor.process.worker_env import WORKER_VARIABLES
from jaxres.train.worker import SWITCH_SECONDS

TIMEOUT_SECONDS = 600.0
VOCAB = 32_000
CHUNK = 2**24
SHARES = (1.0, 0.5, 0.25, 0.1)
SIDE = 512
CLAIM = Claim(
    attempt=1,
    host="bench",
    pid=1,
    boot_id="",
    nonce="0",
    coordinator=None,
    num_hosts=1,
    threads=1,
    versions={},
    fingerprint={},
    trajectory="bench",
)


def make_state(*, layers: int, width: int) -> Any:
    """Returns a function that creates the state on the devices."""
    config = GptModel(num_layers=layers, d_model=width, num_heads=12)
    model = models.build(config, vocab_size=VOCAB, seq_len=256, platform="cpu")
    tx = optimizer.build(AdamwOptimizer(), axes=model.axes)
    mesh = meshes.build(MeshSection(fsdp=-1), devices=jax.devices())
    shapes = jax.eval_shape(lambda: states.init(model, tx, seed=0))
    out = states.shardings(shapes, model, mesh)
    made = jax.jit(lambda: states.init(model, tx, seed=0), out_shardings=out)
    return lambda: states.to_plain(made())


def make_arrays(*, number: int, gigabytes: float) -> Callable[[], Any]:
    """Returns a function that creates so many arrays, each split over all devices."""
    mesh = meshes.build(MeshSection(fsdp=-1), devices=jax.devices())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    rows = 64 * max(1, round(gigabytes * 1e9 / number / 4 / 1024 / 64 / len(jax.devices())))
    shape = (rows * len(jax.devices()), 1024)
    noise = np.random.default_rng(0).random(shape, np.float32)  # Stock Orbax compresses the rest.
    scaled = jax.jit(
        lambda x: {f"a{n}": x * np.float32(n + 1) for n in range(number)}, out_shardings=split
    )
    return lambda: scaled(noise)  # Not a constant of the program, which XLA would fold.


step = jax.jit(lambda state: jax.tree.map(lambda x: x + x.dtype.type(1), state), donate_argnums=0)
"""Stand-in for a training step: reads and writes all of the state, which it donates."""


changed = jax.jit(
    lambda state, number: jax.tree.map(lambda x: x + number.astype(x.dtype), state),
    donate_argnums=0,
)
"""Makes another state for each save: jaxres links arrays equal to those two saves before."""


compute = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, y: (y @ y) / len(x), x))
"""Stand-in for a training step that computes: a few milliseconds on two cores."""


def seconds(act: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


class Saving:
    """One way to save, into its own folders, one after the other."""

    def __init__(
        self,
        folder: Path,
        begin: Callable[[Any, Path], Callable[[], None]],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves nothing yet.

        Args:
          folder: where the saves are.
          begin: begins a save; returns what waits until it is durable.
          settle: waits for what follows a save and is not part of it: old steps are deleted.
        """
        self._folder = folder
        self._begin = begin
        self._settle = settle
        self._count = 0

    def times(self, make: Callable[[], Any]) -> tuple[float, float, float]:
        """Returns seconds of the call, of the step right after it, and of the whole save."""
        self._count += 1
        state = jax.block_until_ready(changed(make(), np.int32(self._count)))
        target = self._folder / f"{self._count}"
        begun = time.perf_counter()
        wait = self._begin(state, target)
        called = time.perf_counter()
        state = jax.block_until_ready(step(state))
        stepped = time.perf_counter()
        wait()
        ended = time.perf_counter()
        self._settle()
        shutil.rmtree(target, ignore_errors=True)
        return called - begun, stepped - called, ended - begun

    def beside_steps(self, make: Callable[[], Any], side: int = SIDE) -> tuple[float, float]:
        """Returns seconds of a save, and how much slower the concurrent steps are.

        Args:
          make: creates the state.
          side: rows of the matrix that a step multiplies.
        """
        self._count += 1
        state = jax.block_until_ready(changed(make(), np.int32(self._count)))
        small = jax.block_until_ready(compute(jax.numpy.ones((side, side))))
        alone = statistics.mean(
            seconds(lambda: jax.block_until_ready(compute(small))) for _ in range(100)
        )
        target = self._folder / f"{self._count}"
        begun = time.perf_counter()
        wait = self._begin(state, target)
        saver = threading.Thread(target=wait)
        saver.start()
        beside = []
        while saver.is_alive():
            beside.append(seconds(lambda: jax.block_until_ready(compute(small))))
        ended = time.perf_counter()
        self._settle()
        shutil.rmtree(target, ignore_errors=True)
        return ended - begun, statistics.mean(beside) / alone


def ours(folder: Path, snapshot: str, share: float = 1.0) -> Saving:
    """Returns saves of one run by jaxres, digests, read-back and commit included."""
    run_dir = RunDir(folder / "run")
    section = CheckpointSection(
        timeout_seconds=TIMEOUT_SECONDS,
        snapshot=snapshot,  # type: ignore[arg-type]
        background_share=share,
    )
    outcomes = queue.SimpleQueue[SaveCommitted | SaveFailed]()

    def emit(event: Event) -> None:
        if isinstance(event, SaveCommitted | SaveFailed):
            outcomes.put(event)

    store = Checkpointer(
        section,
        run_dir=run_dir,
        log=RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock()),
        claim=CLAIM,
        peers=SingleHost(),
        emit=emit,
        before_commit=lambda: None,
    )
    store.__enter__()
    count = 0

    def begin(state: Any, target: Path) -> Callable[[], None]:
        nonlocal count
        count += 1
        store.save(state, Progress(step=count))

        def wait() -> None:
            outcome = outcomes.get(timeout=TIMEOUT_SECONDS)
            assert isinstance(outcome, SaveCommitted), outcome

        return wait

    return Saving(folder, begin, store.wait)


def orbax(folder: Path, context: ocp.Context) -> Saving:
    """Returns saves by Orbax alone."""

    def begin(state: Any, target: Path) -> Callable[[], None]:
        with context:
            response = ocp.save_async(str(target.absolute()), state, checkpointable_name=ARRAYS)
        return lambda: response.result() and None

    return Saving(folder, begin)


def plain_write(data: list[np.ndarray], target: Path) -> None:
    """Writes as many bytes to one file, and syncs it."""
    with target.open("wb", buffering=0) as file:
        for array in data:
            view = array.reshape(-1).view(np.uint8).data
            for start in range(0, len(view), CHUNK):
                file.write(view[start : start + CHUNK])
        os.fsync(file.fileno())


def plain_read_back(target: Path) -> None:
    """Reads a durable file from the disk, with the page cache dropped before."""
    buffer = memoryview(bytearray(CHUNK))
    with target.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.readinto(buffer):
            pass


def write_and_read_back(data: list[np.ndarray], target: Path) -> tuple[float, float]:
    """Returns the seconds of a plain write, and of reading it back from the disk."""
    written = seconds(lambda: plain_write(data, target))
    return written, seconds(lambda: plain_read_back(target))


def direct_write_and_read_back(data: list[np.ndarray], folder: Path) -> float:
    """Returns the seconds that a save's parts take if nothing is digested: the disk's limit.

    As in a save they are written past the page cache by some threads, and read back by as many
    others meanwhile.
    """
    flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in data])
    starts = range(0, len(flat), array_writer.PART_BYTES)
    folder.mkdir()

    def write(start: int) -> Future[None]:
        with DirectWriter(folder / f"{start}") as file:
            file.append(flat[start : start + array_writer.PART_BYTES])
        return readers.submit(read, start)

    def read(start: int) -> None:
        with DirectReader(folder / f"{start}", longest=BUFFER_BYTES) as file:
            while left := file.size_bytes - file.position:
                file.take(min(left, BUFFER_BYTES))

    begun = time.perf_counter()
    readers = ThreadPoolExecutor(array_writer.THREADS)
    with readers, ThreadPoolExecutor(array_writer.THREADS) as writers:
        for reading in list(writers.map(write, starts)):
            reading.result()
    taken = time.perf_counter() - begun
    shutil.rmtree(folder)
    return taken


def main() -> int:
    """Measures, and prints medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--arrays", type=int, help="this many arrays instead of a decoder's state")
    parser.add_argument("--gigabytes", type=float, default=0.75, help="of the arrays together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves-only", action="store_true", help="without restores and shares")
    parser.add_argument(
        "--devices", type=int, default=0, help="virtual CPU devices; 0: this machine's"
    )
    options = parser.parse_args()
    if not os.environ.keys() >= WORKER_VARIABLES.keys():  # The C library reads them at a start.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**WORKER_VARIABLES, **os.environ})
    sys.setswitchinterval(SWITCH_SECONDS)
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.arrays:
        make = make_arrays(number=options.arrays, gigabytes=options.gigabytes)
    else:
        make = make_state(layers=options.layers, width=options.width)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        size = _saves(Path(name), make, rounds=options.rounds)
        if options.saves_only:
            return 0
        _print_restores(restores(Path(name), make, rounds=options.rounds), size=size)
        _print_first_steps(Path(name), make, rounds=options.rounds)
        _print_curve(Path(name), make, rounds=options.rounds)
    return 0


def _saves(folder: Path, make: Callable[[], Any], *, rounds: int) -> int:
    """Times saves and the machine's limits in turns, prints them; returns the state's bytes."""
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(make())]
    size = sum(array.nbytes for array in host)
    warm = [np.empty_like(array) for array in host]
    print(f"state: {size / 1e9:.2f} GB in {len(host)} arrays on {jax.device_count()} device(s)")
    own = save_context(timeout_seconds=TIMEOUT_SECONDS)
    for part in ("copy", "device", "bare", "stock"):
        (folder / part).mkdir()
    ways = {
        "jaxres, snapshot=copy": ours(folder / "copy", "copy"),
        "jaxres, snapshot=device": ours(folder / "device", "device"),
        "Orbax, the same settings": orbax(folder / "bare", own),
        "Orbax, its defaults": orbax(folder / "stock", ocp.Context()),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    copies, writes, read_backs, limits, idle = [], [], [], [], []
    for round_number in range(rounds + 1):
        times = {name: way.times(make) for name, way in ways.items()}
        copied = seconds(lambda: [np.copyto(w, h) for w, h in zip(warm, host, strict=True)])
        written, read = write_and_read_back(host, folder / "plain")
        limit = direct_write_and_read_back(host, folder / "direct")
        state = jax.block_until_ready(step(make()))
        stepped = seconds(lambda s=state: jax.block_until_ready(step(s)))
        if round_number:  # The first one warms up.
            for name, value in times.items():
                found[name].append(value)
            copies.append(copied)
            writes.append(written)
            read_backs.append(written + read)
            limits.append(limit)
            idle.append(stepped)
    _print_saves(
        found, copies=copies, writes=writes, read_backs=read_backs, limits=limits, idle=idle
    )
    return size


def _print_saves(
    found: dict[str, list[tuple[float, float, float]]],
    *,
    copies: list[float],
    writes: list[float],
    read_backs: list[float],
    limits: list[float],
    idle: list[float],
) -> None:
    copy, write, read_back, limit, step_seconds = (
        statistics.median(x) for x in (copies, writes, read_backs, limits, idle)
    )
    print(
        f"plain copy {copy:.3f} s, plain write with fsync {write:.3f} s, the same and read back "
        f"from the disk {read_back:.3f} s, in a save's parts past the page cache {limit:.3f} s "
        f"({limit / write:.2f} x plain write), step {step_seconds:.3f} s"
    )
    stock = found["Orbax, its defaults"]
    bare = found["Orbax, the same settings"]
    for name, rows in found.items():
        call, after, whole = (statistics.median(row[i] for row in rows) for i in range(3))
        held = statistics.median(row[0] + row[1] for row in rows) - step_seconds
        others = statistics.median(row[0] + row[1] for row in stock) - step_seconds
        by_bare = statistics.median(a[2] / b[2] for a, b in zip(rows, bare, strict=True))
        by_stock = statistics.median(a[2] / b[2] for a, b in zip(rows, stock, strict=True))
        print(
            f"  {name:<26} call {call:.3f} s, step after it {after:.3f} s: held up {held:.3f} s "
            f"({held / copy:.2f} x plain copy, {held / others:.2f} x stock); whole {whole:.2f} s "
            f"({by_bare:.2f} x same settings, {by_stock:.2f} x stock, {whole / write:.2f} x plain "
            f"write, {whole / read_back:.2f} x write and read back, {whole / limit:.2f} x parts)"
        )


def _print_curve(folder: Path, make: Callable[[], Any], *, rounds: int) -> None:
    """Prints how much slower steps are during a save, for some shares."""
    print("checkpoint.background_share: seconds of a save, and its steps against those without one")
    for share in SHARES:
        (folder / f"share-{share}").mkdir()
        saving = ours(folder / f"share-{share}", "copy", share)
        rows = [saving.beside_steps(make) for _ in range(rounds + 1)][1:]
        seconds, slower = (statistics.median(row[i] for row in rows) for i in range(2))
        print(f"  {share:<4} {seconds:.2f} s, {slower:.3f} x")


def commit_step(
    root: RunPath,
    state: Any,
    *,
    writer: str = "tensorstore",
    note: Callable[[float], object] = lambda _: None,
) -> tuple[RunPath, Commit, Any]:
    """Commits a step of a new run; returns its directory, record, and the shapes to restore it.

    Args:
      root: run directory.
      state: nested dict of arrays.
      writer: `checkpoint.writer`.
      note: is called with the seconds of the save.
    """
    run_dir = RunDir(root)
    log = RunLog.claim(run_dir.log, CLAIM, after=[], clock=SystemClock())
    store = Checkpointer(
        CheckpointSection(timeout_seconds=TIMEOUT_SECONDS, writer=writer),  # type: ignore[arg-type]
        run_dir=run_dir,
        log=log,
        claim=dataclasses.replace(CLAIM),
        peers=SingleHost(),
        emit=lambda event: None,
        before_commit=lambda: None,
    )
    with store:
        begun = time.perf_counter()
        store.save(state, Progress(step=1))
        store.wait()
        note(time.perf_counter() - begun)
    commit = log.history().newest
    assert commit is not None
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    return (run_dir.root / commit.path).absolute(), commit, like


def restores(
    folder: Path, make: Callable[[], Any], *, rounds: int
) -> list[tuple[float, float, float]]:
    """Restores one committed step in turns: unverified, verified; and verifies it without jax.

    Returns:
      The seconds of the three, for every round.
    """
    step_dir, commit, like = commit_step(folder / "restore", make())
    rows = []
    for round_number in range(rounds + 1):
        bare = seconds(lambda: jax.block_until_ready(load(step_dir, like)))
        verified = seconds(lambda: jax.block_until_ready(restore(step_dir, commit, like).state))
        checked = seconds(lambda: verify.verify_step(step_dir, commit))
        if round_number:
            rows.append((bare, verified, checked))
    return rows


def _plain_read(path: Path) -> None:
    """Reads a file into fresh memory."""
    data = np.empty(path.stat().st_size, np.uint8)
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(data), CHUNK):
            file.readinto(data[start : start + CHUNK].data)


def _print_first_steps(folder: Path, make: Callable[[], Any], *, rounds: int) -> None:
    """Prints the time of a verified restore and the first step, against a plain read."""
    step_dir, commit, like = commit_step(folder / "first-steps", make())
    stored = [path for path in Path(str(step_dir)).rglob("*") if path.is_file()]

    def restored() -> None:
        state = restore(step_dir, commit, like).state
        jax.block_until_ready(step(state))

    print("a verified restore and the first step, against a plain read of as many bytes")
    for name in ("warm", "cold"):
        rows = []
        for _ in range(rounds + 1):
            if name == "cold":
                for path in [folder / "plain", *stored]:
                    files.drop_page_cache(path)
            rows.append((seconds(lambda: _plain_read(folder / "plain")), seconds(restored)))
        read, whole = (statistics.median(row[i] for row in rows[1:]) for i in range(2))
        ratio = statistics.median(row[1] / row[0] for row in rows[1:])
        print(f"  {name}: {whole:.2f} s, plain read {read:.2f} s, {ratio:.2f} x")


def _print_restores(rows: list[tuple[float, float, float]], *, size: int) -> None:
    ratio = statistics.median(row[1] / row[0] for row in rows)
    bare, verified, checked = (statistics.median(row[i] for row in rows) for i in range(3))
    print(
        f"restore: unverified {bare:.2f} s, verified {verified:.2f} s, ratio {ratio:.3f}; verify "
        f"without jax {checked:.2f} s, {size / checked / 1e9:.2f} GB/s on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    sys.exit(main())
