"""Benchmark of the consensus on a stop: flags inside the step, or a gate over the key-value store.

    python tools/bench/consensus.py --hosts 4 --rounds 20

Starts real processes that talk over loopback. Prints, from one run: what the flags cost the host
per step (the framework's share), what they add to a step of the devices (ratio), and for both
protocols how many of the rounds ended at the same step on all hosts, and how long a request took,
while every host was slowed at random. docs/adr/0007 has the decision and the reasons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxres.clock import SystemClock
from jaxres.cluster.host_group import HostRank
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.exit_codes import ExitCode
from jaxres.faults import Continue, StopRun
from jaxres.train.checks.host_times import LocalTimes
from jaxres.train.consensus import FACTS, StepConsensus, facts_shape
from jaxres.train.jax_coordination import JaxCoordination, join
from jaxres.train.loop import LAG

BLOCKS, STEPS_A_BLOCK = 12, 100
WIDTH = 256
MEAN_DELAY_SECONDS = 0.005
MAX_STEPS = 2000


@dataclass
class FakeRequests:
    """Stand-in for the requests of a worker."""

    stop: ExitCode | None = None

    def requested_stop(self) -> ExitCode | None:
        """Returns the requested exit."""
        return self.stop

    def save_requested(self) -> bool:
        """Returns False."""
        return False

    def clear_save_request(self) -> None:
        """No-op."""


def make_step(mesh: jax.sharding.Mesh, *, with_facts: bool) -> Callable[..., Any]:
    """Returns a small data-parallel step, compiled: (weights, batch, facts) -> weights, vector."""

    def step(weights: Any, batch: Any, facts: Any) -> tuple[Any, Any]:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.tanh(batch @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        numbers = jnp.stack([value])
        if facts is not None:
            numbers = jnp.concatenate([numbers, facts.reshape(-1)])
        return weights - 0.1 * gradient, numbers

    whole = meshes.replicated(mesh)
    shapes = (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=whole),
        jax.ShapeDtypeStruct(
            (8 * mesh.size, WIDTH), np.float32, sharding=meshes.batch_sharding(mesh)
        ),
        facts_shape(mesh) if with_facts else None,
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(whole, whole))
    return jitted.lower(*shapes).compile()


@dataclass
class Bench:
    """One host's side of the measurements."""

    job: JaxCoordination
    mesh: jax.sharding.Mesh
    requests: FakeRequests = field(default_factory=FakeRequests)

    def __post_init__(self) -> None:
        """Places weights and batch, and compiles both steps."""
        shape = (8 * self.mesh.size, WIDTH)
        rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        self.batch = meshes.place_batch(self.mesh, {"rows": rows})["rows"]
        self.weights = jax.jit(
            lambda: jnp.eye(WIDTH) / 2, out_shardings=meshes.replicated(self.mesh)
        )()
        self.with_flags = make_step(self.mesh, with_facts=True)
        self.without = make_step(self.mesh, with_facts=False)
        self.job.barrier("compiled", seconds=60)

    def consensus(self) -> StepConsensus:
        """Returns a new consensus."""
        self.requests.stop = None
        return StepConsensus(self.requests, Continue, mesh=self.mesh)  # type: ignore[arg-type]

    def block(self, *, flags: bool) -> tuple[float, float]:
        """Returns seconds per step, and the host's share for the flags."""
        consensus, flight, host = self.consensus(), deque[Any](), 0.0
        begun = time.perf_counter()
        for _ in range(STEPS_A_BLOCK):
            if len(flight) == LAG:
                values = np.asarray(flight.popleft())
                if flags:
                    at = time.perf_counter()
                    consensus.on_flags(values[1:])
                    host += time.perf_counter() - at
            at = time.perf_counter()
            facts = consensus.local_flags(times=LocalTimes(1e-4)) if flags else None
            host += time.perf_counter() - at
            step = self.with_flags if flags else self.without
            self.weights, metrics = step(self.weights, self.batch, facts)
            flight.append(metrics)
        jax.block_until_ready(self.weights)
        return (time.perf_counter() - begun) / STEPS_A_BLOCK, host / STEPS_A_BLOCK

    def stop_by_flags(self, request_at: float | None, chance: random.Random) -> tuple[int, float]:
        """Runs steps until all hosts have received the stop: (the step, when)."""
        consensus, flight, begun = self.consensus(), deque[Any](), time.time()
        for step in range(MAX_STEPS):
            if request_at is not None and time.time() - begun >= request_at:
                self.requests.stop = ExitCode.PREEMPTED
            if len(flight) == LAG:
                consensus.on_flags(np.asarray(flight.popleft())[1:])
            if isinstance(consensus.verdict(), StopRun):
                return step, time.time()
            time.sleep(chance.expovariate(1 / MEAN_DELAY_SECONDS))
            facts = consensus.local_flags(times=LocalTimes(0.0))
            self.weights, metrics = self.with_flags(self.weights, self.batch, facts)
            flight.append(metrics)
        raise AssertionError("no stop was requested")

    def stop_by_gate(
        self, request_at: float | None, chance: random.Random, name: str
    ) -> tuple[int, float]:
        """The same with a gate: freeze, publish, barrier, the newest step of all and one more."""
        gate = LockProtocol(self.job, name)
        begun = time.time()
        for step in range(MAX_STEPS):
            if request_at is not None and time.time() - begun >= request_at:
                gate.request()
            if gate.enter(step):
                jax.block_until_ready(self.weights)
                return step, time.time()
            time.sleep(chance.expovariate(1 / MEAN_DELAY_SECONDS))
            self.weights, _ = self.without(self.weights, self.batch, None)
        raise AssertionError("no stop was requested")


class LockProtocol:
    """The alternative protocol: no host can enter a step while its thread holds the lock."""

    def __init__(self, job: JaxCoordination, name: str) -> None:
        self.client, self.host, self.name = job._client, job.member.host, name
        self.lock, self.current, self.stop_at = threading.Lock(), -1, MAX_STEPS
        self.seconds: list[float] = []
        threading.Thread(target=self._agree, daemon=True).start()

    def request(self) -> None:
        """Requests a stop of all hosts; any host may, any number of times."""
        with contextlib.suppress(
            jax.errors.JaxRuntimeError
        ):  # Another host has requested it already.
            self.client.key_value_set(f"{self.name}/request", "1")

    def enter(self, step: int) -> bool:
        """Returns whether the loop stops before this step."""
        with self.lock:
            if step >= self.stop_at:
                return True
            self.current = step
            return False

    def _agree(self) -> None:
        self.client.blocking_key_value_get(f"{self.name}/request", 600_000)
        with self.lock:
            self.client.key_value_set(f"{self.name}/now/{self.host}", str(self.current))
            self.client.wait_at_barrier(f"{self.name}/frozen", 10_000)
            found = self.client.key_value_dir_get(f"{self.name}/now/")
            self.stop_at = max(int(value) for _, value in found) + 1


def child(host: int, num_hosts: int, coordinator: str, rounds: int) -> None:
    """Runs one host; host 0 prints the measurements as JSON."""
    member = HostRank(host, num_hosts, coordinator)
    job = join(member, heartbeat_seconds=30, clock=SystemClock())
    bench = Bench(job, meshes.build(MeshSection(), devices=jax.devices()))
    costs: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for index in range(BLOCKS):
        for flags in (True, False) if index % 2 else (False, True):
            costs[flags].append(bench.block(flags=flags))
    found: dict[str, list[tuple[int, float]]] = {"flags": [], "gate": []}
    for index in range(rounds):
        chance = random.Random(1000 * index + host)
        shared = random.Random(index)
        requester, request_at = shared.randrange(num_hosts), shared.uniform(0.02, 0.3)
        mine = request_at if requester == host else None
        for protocol in found:
            job.barrier(f"{protocol}/{index}", seconds=60)
            begun = time.time() + (request_at if requester == host else 0)
            if protocol == "flags":
                step, at = bench.stop_by_flags(mine, chance)
            else:
                step, at = bench.stop_by_gate(mine, chance, f"gate{index}")
            found[protocol].append((step, at))
            job.kv_set(f"{protocol}/{index}/{host}", json.dumps([step, at, begun, requester]))
    if host == 0:
        sys.stdout.write(
            json.dumps({"costs": [costs[False], costs[True]], "ends": ends(job, rounds)})
        )
        sys.stdout.flush()
    job.barrier("measured", seconds=60)
    job.shutdown()


def ends(job: JaxCoordination, rounds: int) -> dict[str, list[list[Any]]]:
    """Returns protocol -> rounds -> the result of every host."""
    return {
        protocol: [
            [
                json.loads(job.kv_get(f"{protocol}/{index}/{host}", host=host, seconds=60))
                for host in range(job.member.num_hosts)
            ]
            for index in range(rounds)
        ]
        for protocol in ("flags", "gate")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the hosts and prints their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", nargs=2, metavar=("HOST", "COORDINATOR"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        child(int(options.child[0]), options.hosts, options.child[1], options.rounds)
        return 0
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = [
            sys.executable,
            __file__,
            "--hosts",
            str(options.hosts),
            "--rounds",
            str(options.rounds),
        ]
        hosts = [
            subprocess.Popen([*command, "--child", str(h), address], stdout=subprocess.PIPE)
            for h in range(options.hosts)
        ]
        outputs = [host.communicate(timeout=500)[0] for host in hosts]
    print_results(json.loads(outputs[0].splitlines()[-1]), num_hosts=options.hosts)
    return 0


def print_results(found: dict[str, Any], *, num_hosts: int) -> None:
    """Prints the results."""
    without, with_flags = found["costs"]
    plain = statistics.median(seconds for seconds, _ in without)
    ratios = [w[0] / o[0] for w, o in zip(with_flags, without, strict=True)]
    host = statistics.median(seconds for _, seconds in with_flags)
    print(f"{num_hosts} hosts, the flags of a host are {len(FACTS)} numbers")
    print(f"the flags cost the host   {host * 1e3:.3f} ms per step")
    print(
        f"a step with the flags     {statistics.median(ratios):.3f} x of one without "
        f"({plain * 1e3:.2f} ms; blocks {min(ratios):.3f} to {max(ratios):.3f})"
    )
    for protocol, rounds in found["ends"].items():
        same = sum(len({end[0] for end in hosts}) == 1 for hosts in rounds)
        lags = [max(e[1] for e in hosts) - hosts[hosts[0][3]][2] for hosts in rounds]
        print(
            f"{protocol}: {same} of {len(rounds)} rounds at the same step on all hosts; request to "
            f"the last host's stop {statistics.median(lags) * 1e3:.0f} ms (worst "
            f"{max(lags) * 1e3:.0f})"
        )


if __name__ == "__main__":
    sys.exit(main())
