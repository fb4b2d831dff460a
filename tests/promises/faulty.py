"""User code that fails on request: rows and a model, imported by the training process only.

The environment selects the fault instead of the config, so that the same command without it is the
same run. FAULT="WHERE:COUNT:WHAT", as "row:300:spin", applies to every host; "row:300:spin:2" only
to host 2. PACE is the seconds per row, HELDOUT_PACE those of a held-out row, JITTER the mean of
random delays, which differ in every process. SLOW="HOST:COUNT:FACTOR": from its COUNT-th row on
each row of that host takes so many times as long as a row has taken, with all of the step's work,
on this machine. POISON="INDEX:WHAT,..." lists unreadable items: raise,
range or hang. WHAT "gate" waits until the file GATE exists. HELD="COUNT:FILE" holds a process in
the rows of its COUNT-th own step until the file exists: of all steps but the one before, the
metrics and commits are there. FLIP="STEP:HOST:DEVICE" flips a bit of
one device's copy of a parameter after that step, once in a run, with the hook `flip_bit`.
WRONG_PRODUCT is the id of a device whose product in the tests of the hardware is wrong.
WRONG_STEP="STEP:DEVICE:N" makes a device compute a wrong number in the N-th computation of a step;
N = 0: in each computation from that step on.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError
from jaxres.train.checks import preflight
from jaxres.train.compiled import compile_cache

VOCAB = 64
NUM_ROWS = 2000
BATCH_ROWS = 24
"""train.global_batch_size of the config."""
HELDOUT_FROM = 1800
MANY_SECONDS = 3600
POISON = {
    int(index): what
    for index, _, what in (word.partition(":") for word in os.environ.get("POISON", "").split(","))
    if what
}
CHANCE = random.Random(os.getpid())


class OnPurpose(Exception):
    """Failure requested by a test."""


def spin() -> NoReturn:
    while True:
        pass


def hold() -> NoReturn:
    """Holds the GIL forever, as a stuck extension does."""
    keeping = ctypes.PyDLL(None)
    while True:
        keeping.sleep(MANY_SECONDS)


def fail() -> NoReturn:
    raise OnPurpose("requested by the test")


def exhaust_device() -> None:
    jnp.zeros((1 << 46,), jnp.float32).block_until_ready()


def exhaust_host() -> None:
    bytearray(1 << 62)


def eat() -> None:
    """Allocates half a gigabyte in small blocks."""
    eaten = [b"x" * (1 << 20) for _ in range(512)]
    del eaten


class Unhealthy(RunError):
    """Failure that a hardware check would raise."""

    exit_code = ExitCode.UNHEALTHY


def unhealthy() -> None:
    if jax.process_index() == 1:
        raise Unhealthy("a device has failed, requested by the test")


def unhealthy_place() -> None:
    """Fails on the physical host BAD_HOST, whatever VM is there, once the gate is open."""
    wait_at_gate()
    if os.environ["JAXRES_PHYSICAL_HOST"] == os.environ["BAD_HOST"]:
        raise Unhealthy("a device has failed, requested by the test")


def unhealthy_node() -> None:
    """Fails on the Slurm node BAD_NODE."""
    if os.environ["SLURMD_NODENAME"] == os.environ["BAD_NODE"]:
        raise Unhealthy("a device has failed, requested by the test")


def fewer_at_place() -> None:
    """JAX finds one device on the physical host BAD_HOST, whatever VM is there."""
    if os.environ["JAXRES_PHYSICAL_HOST"] == os.environ["BAD_HOST"]:
        jax.local_device_count = lambda: 1


def spawn() -> None:
    """Starts processes that outlive the process group, with and without the environment."""
    command = [sys.executable, "-c", f"import time; time.sleep({MANY_SECONDS})", os.environ["TAG"]]
    for environment in (None, {}):
        subprocess.Popen(command, start_new_session=True, env=environment)


def wait_at_gate() -> None:
    """Waits until a test opens the gate, however slow the test is."""
    wait_for_file(os.environ["GATE"])


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


WHATS = {
    "unhealthy": unhealthy,
    "unhealthy_place": unhealthy_place,
    "unhealthy_node": unhealthy_node,
    "fewer_at_place": fewer_at_place,
    "spawn": spawn,
    "eat": eat,
    "sleep": lambda: time.sleep(MANY_SECONDS),
    "nap": lambda: time.sleep(12),
    "gate": wait_at_gate,
    "spin": spin,
    "hold": hold,
    "fail": fail,
    "sys_exit": lambda: sys.exit(0),
    "os_exit": lambda: os._exit(0),
    "exhaust_device": exhaust_device,
    "exhaust_host": exhaust_host,
}
ROWS_READ = itertools.count(1)
ROW_TIMES = list[float]()
"""When the rows of a host with SLOW were read."""
COUNTS = {where: itertools.count(1) for where in ("build", "trace", "row", "heldout")}


def reach(where: str) -> None:
    """Fails if this is the requested place and count."""
    count = next(COUNTS[where])
    if where == "row" and "HELD" in os.environ:
        step, _, gate = os.environ["HELD"].partition(":")
        of_step = BATCH_ROWS // jax.process_count()
        if count == int(step) * of_step - of_step // 2:  # Other threads are a few rows off.
            wait_for_file(gate)
    asked_where, asked_count, what, *host = os.environ.get("FAULT", "::").split(":")
    is_time = where == asked_where and count == int(asked_count)
    if is_time and host in ([], [str(jax.process_index())]):
        WHATS[what]()


def row_seconds(pace: float) -> float:
    """Returns the seconds that the row takes that this host reads now."""
    host, count, factor = os.environ.get("SLOW", "::").split(":")
    if host != str(jax.process_index()):
        return pace
    number, now = next(ROWS_READ), time.monotonic()
    ROW_TIMES.append(now)
    if number < int(count):
        return pace
    before = ROW_TIMES[int(count) // 2 : int(count)]  # The first ones wait for compilation.
    return float(factor) * (before[-1] - before[0]) / (len(before) - 1)


def flip_bit(context: Any) -> None:
    """Flips one bit in the memory of one device's copy of the parameter; a hook."""
    step, host, device = os.environ["FLIP"].split(":")
    flipped = context.run_dir / f"flipped-{step}"
    if (str(context.step), str(context.host)) == (step, host) and not flipped.exists():
        flipped.touch()
        data = context.params["bias_V"].addressable_shards[int(device)].data
        octet = ctypes.c_uint8.from_address(data.unsafe_buffer_pointer())
        octet.value ^= 1 << 4


def plant_wrong_product(device: int) -> None:
    """From now on products on a device, as the tests of the hardware compute them, are wrong."""
    real = preflight.product

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        is_planted = a.devices() == {jax.devices()[device]}
        return real(a, b).at[7, 9].add(1) if is_planted else real(a, b)

    preflight.product = product


if "WRONG_PRODUCT" in os.environ:
    plant_wrong_product(int(os.environ["WRONG_PRODUCT"]))


class FaultyStep:
    """A compiled step on devices of which one computes a wrong number when it is asked to."""

    computed: ClassVar[Counter[int]] = Counter()
    """Step -> how often it was computed."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __call__(self, state: Any, *inputs: Any) -> Any:
        number = int(state.step) + 1
        self.computed[number] += 1
        step, device, turn = map(int, os.environ["WRONG_STEP"].split(":"))
        is_wrong = number == step and self.computed[number] == turn
        state, metrics = self._call(state, *inputs)
        if is_wrong or (turn == 0 and number >= step):
            jax.block_until_ready(state)
            shards = state.params["bias_V"].addressable_shards
            for shard in [one for one in shards if one.device.id == device]:
                octet = ctypes.c_uint8.from_address(shard.data.unsafe_buffer_pointer())
                octet.value ^= 1 << 4
        return state, metrics


def plant_faulty_step() -> None:
    """From now on the train step, also that on rotated devices, is a FaultyStep."""
    real = compile_cache.get

    def get(*arguments: Any, **others: Any) -> Any:
        compiled = real(*arguments, **others)
        steps = {name: one for name, one in compiled.items() if "training" in name}
        wrong = {
            name: dataclasses.replace(one, call=FaultyStep(one.call)) for name, one in steps.items()
        }
        return compiled | wrong

    compile_cache.get = get


if "WRONG_STEP" in os.environ:
    plant_faulty_step()


class TokenRows:
    """Rows of tokens; the last tenth is held out and read by the main thread, the rest is not."""

    vocab_size = VOCAB
    fingerprint = "faulty"

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        where, pace = ("heldout", "HELDOUT_PACE") if index >= HELDOUT_FROM else ("row", "PACE")
        reach(where)
        time.sleep(row_seconds(float(os.environ.get(pace, os.environ.get("PACE", "0")))))
        what = POISON.get(index)
        if what == "raise":
            raise ValueError("a broken record")
        if what == "range":
            return np.full(17, VOCAB)
        if what == "hang":
            time.sleep(MANY_SECONDS)
        if jitter := float(os.environ.get("JITTER", "0")):
            time.sleep(CHANCE.expovariate(1 / jitter))
        return np.random.default_rng(index).integers(0, VOCAB, 17)


def other_names() -> list[dict[str, Any]]:
    """Rows with the names of another library."""
    return [{"input_ids": np.arange(4), "labels": np.arange(4)}] * 20


def rows() -> TokenRows:
    reach("build")
    return TokenRows()


def model(*, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """A bias a token."""

    def init(key: jax.Array) -> dict[str, Any]:
        return {"bias_V": 0.01 * jax.random.normal(key, (vocab_size,))}

    def loss(params: dict[str, Any], batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        reach("trace")
        log_probs_V = jax.nn.log_softmax(params["bias_V"])
        weights_BT = batch["weights_BT"]
        nats_B = -jnp.sum(log_probs_V[batch["targets_BT"]] * weights_BT, axis=1)
        return nats_B, jnp.sum(weights_BT, axis=1)

    return SimpleNamespace(init=init, loss=loss)


def sharded_model(*, vocab_size: int, seq_len: int) -> SimpleNamespace:
    """The same, with parameters that mesh.fsdp splits: no device holds a copy of another one's."""
    return SimpleNamespace(
        **vars(model(vocab_size=vocab_size, seq_len=seq_len)), axes={"bias_V": ("embed",)}
    )
