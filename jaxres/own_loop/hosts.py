"""The processes of a loop on several hosts: they meet, and agree on stops and saves."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxres.clock import Clock
from jaxres.cluster.host_group import MESSAGE_SECONDS, HostGroup, HostRank, SingleHost
from jaxres.engine import mesh as meshes
from jaxres.engine.mesh_plan import AXES
from jaxres.faults import ConfigError, UsageError, Verdict
from jaxres.train import jax_coordination
from jaxres.train.consensus import Consensus, SingleHostConsensus, StepConsensus
from jaxres.train.stop_requests import StopRequests

HOST, NUM_HOSTS, COORDINATOR = "JAXRES_HOST", "JAXRES_NUM_HOSTS", "JAX_COORDINATOR_ADDRESS"
"""Variables by which the supervisor of a program gives each process its rank."""
BY_HOST = "jaxres.hosts"
"""Key of a saved position that differs between hosts: the list of theirs."""


def join(env: Mapping[str, str], *, heartbeat_seconds: float, clock: Clock) -> HostGroup:
    """Joins the processes of the other hosts, unless the program has done it; returns the group.

    Raises:
      UsageError: JAX has a backend already, or other processes than the supervisor has started.
    """
    member = HostRank(int(env.get(HOST, "0")), int(env.get(NUM_HOSTS, "1")), env.get(COORDINATOR))
    if member.is_alone:
        require_one_process()
        return SingleHost()
    if jax.distributed.is_initialized():
        peers = jax_coordination.joined(member, clock=clock)
    else:
        try:
            peers = jax_coordination.join(member, heartbeat_seconds=heartbeat_seconds, clock=clock)
        except RuntimeError as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise UsageError(
                f"jaxres.attempt: {member.num_hosts} hosts, and JAX was used before they could "
                "meet. Enter the attempt before the first array is made, or call "
                "jax.distributed.initialize at the beginning (docs/own-loop.md)."
            ) from error
    if (jax.process_count(), jax.process_index()) != (member.num_hosts, member.host):
        raise UsageError(
            f"jaxres.attempt: the supervisor has started {member.num_hosts} processes, of which "
            f"this is number {member.host}; jax.distributed has {jax.process_count()}, and this is "
            f"number {jax.process_index()}. Give it {NUM_HOSTS} and {HOST} (docs/own-loop.md)."
        )
    atexit.register(peers.shutdown)
    return peers


def require_one_process() -> None:
    """Raises UsageError if jax.distributed has several processes."""
    if jax.process_count() > 1:
        raise UsageError(
            f"jax.distributed has {jax.process_count()} processes: on several hosts a loop of "
            "one's own needs the supervisor that has started it: give the command as `program` "
            "in a config (docs/own-loop.md)."
        )


def require_global(state: Any) -> None:
    """Raises ConfigError if a leaf of a state on several hosts is known to this process only."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    local = [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for keys, leaf in flat
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    ]
    if local:
        raise ConfigError(
            f"{len(local)} leaves of the state are of this process alone, such as {local[0]}: on "
            "several hosts a step stores arrays on the devices of all hosts. Make the state in "
            "jax.jit with out_shardings, such as NamedSharding(mesh, PartitionSpec())."
        )


def position_of_all(position: Any, peers: HostGroup, *, step: int) -> Any:
    """Returns the position to save: that of all hosts, or a list where they differ."""
    texts = peers.gather(f"position/{step}", json.dumps(position), seconds=MESSAGE_SECONDS)
    if len(set(texts)) <= 1:
        return position
    return {BY_HOST: [json.loads(text) for text in texts]}


def own_position(saved: Any, member: HostRank) -> Any:
    """Returns the position of this host of a saved one.

    Raises:
      ConfigError: it was saved by another number of hosts, of which each had its own.
    """
    if not (isinstance(saved, dict) and saved.keys() == {BY_HOST}):
        return saved
    if len(saved[BY_HOST]) != member.num_hosts:
        raise ConfigError(
            f"position: {len(saved[BY_HOST])} hosts have saved one each, and these are "
            f"{member.num_hosts}. Go on with as many hosts, or give all the same position."
        )
    return saved[BY_HOST][member.host]


class Agreement:
    """The consensus of the trainer, for steps that are compiled without the flags of the hosts.

    The flags of the hosts pass through a program of their own, which is dispatched after the step.
    Every host reads those of a step at the same later step, so all act at the same one.
    """

    def __init__(
        self,
        peers: HostGroup,
        requests: StopRequests,
        storage: Callable[[], Verdict],
        *,
        is_due: Callable[[], bool],
    ) -> None:
        """Sends nothing yet.

        Args:
          peers: the hosts.
          requests: requests that this host has received.
          storage: the verdict on failed saves.
          is_due: whether a save is due by the clock.
        """
        self.consensus: Consensus
        if peers.member.is_alone:
            self.consensus = SingleHostConsensus(requests, storage, is_due=is_due)
            return
        sizes = (jax.device_count(), *[1] * (len(AXES) - 1))
        mesh = Mesh(meshes.device_array(jax.devices(), sizes), AXES, axis_types=meshes.AUTO)
        self.consensus = StepConsensus(requests, storage, mesh=mesh, is_due=is_due)
        self._everywhere = jax.jit(lambda facts: facts, out_shardings=meshes.replicated(mesh))

    def send(self) -> Any:
        """Sends this host's flags after a step; returns those of all hosts, which may come later.

        None: there is one host.
        """
        flags = self.consensus.local_flags(times=None)
        return None if flags is None else self._everywhere(flags)

    def receive(self, facts: Any, *, is_saved: bool) -> None:
        """Reads the flags of a step; `is_saved`: a save since has done what they ask for."""
        if facts is not None:
            self.consensus.on_flags(np.asarray(facts))
            if is_saved:
                self.consensus.clear_save_request()
