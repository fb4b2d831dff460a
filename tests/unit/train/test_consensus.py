"""Consensus of the hosts: every host reads the same flags out of the step."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxres.cluster.host_group import HostRank
from jaxres.config.schema.run_config import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.exit_codes import STOP_REQUESTS, ExitCode
from jaxres.faults import Continue, StopRun, fault
from jaxres.train import build
from jaxres.train.checks.host_times import TIMED_STEPS, LocalTimes
from jaxres.train.consensus import HostFlags, SingleHostConsensus, StepConsensus

FULL = StopRun(fault("storage_unavailable"), "20 saves in a row have failed")


@dataclasses.dataclass
class FakeRequests:
    stop: ExitCode | None = None
    save: bool = False
    time: bool = True

    def requested_stop(self):
        return self.stop

    def may_save(self):
        return self.time

    def save_requested(self):
        return self.save

    def clear_save_request(self):
        self.save = False


def consensus_of(requests=None, *, storage=Continue, hosts=1):
    """A consensus over 8 devices; with several hosts each has an equal share of them, in order."""
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    consensus = StepConsensus(requests or FakeRequests(), storage, mesh=mesh)
    consensus._rows = range(0, 8, 8 // hosts)
    return consensus


def step_output(*hosts):
    """What a step returns for the flags of each host."""
    return np.concatenate([np.tile(flags.encode(), 8 // len(hosts)) for flags in hosts])


@pytest.mark.parametrize("stop", STOP_REQUESTS)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("storage", [False, True])
def test_decoded_flags_equal_the_encoded_ones(stop, save, storage):
    for has_time in (True, False):
        flags = HostFlags(stop, has_time, save, storage, busy_seconds=0.25, is_keeping=not save)
        assert HostFlags.decode(flags.encode()) == flags


def test_flags_on_the_devices_are_read_back_from_each_device():
    requests = FakeRequests(stop=ExitCode.PREEMPTED, save=True)
    facts = np.asarray(consensus_of(requests).local_flags(times=None))
    assert [HostFlags.decode(row) for row in facts] == [
        HostFlags(ExitCode.PREEMPTED, save=True)
    ] * 8


@pytest.mark.parametrize("host", range(4))
def test_a_stop_of_any_one_host_stops_all_hosts(host):
    flags = [HostFlags() for _ in range(4)]
    flags[host] = HostFlags(stop=ExitCode.PREEMPTED)
    hosts = [consensus_of(hosts=4) for _ in range(4)]
    for each in hosts:
        assert each.verdict() == Continue()
        each.on_flags(step_output(*flags))
    (verdict,) = {str(each.verdict()) for each in hosts}
    assert "preemption" in verdict


def test_an_operators_stop_outranks_a_preemption_and_both_are_remembered():
    consensus = consensus_of(hosts=2)
    consensus.on_flags(step_output(HostFlags(stop=ExitCode.PREEMPTED), HostFlags()))
    consensus.on_flags(step_output(HostFlags(), HostFlags(stop=ExitCode.STOPPED)))
    consensus.on_flags(step_output(HostFlags(), HostFlags()))
    verdict = consensus.verdict()
    assert isinstance(verdict, StopRun)
    assert verdict.fault.name == "operators_stop"


def test_one_host_without_time_to_save_decides_for_all():
    hosts = [consensus_of(hosts=2) for _ in range(2)]
    for each in hosts:
        each.on_flags(step_output(HostFlags(stop=ExitCode.PREEMPTED), HostFlags()))
        assert each.verdict().saves
        each.on_flags(step_output(HostFlags(), HostFlags(stop=ExitCode.PREEMPTED, has_time=False)))
        assert not each.verdict().saves
    alone = SingleHostConsensus(FakeRequests(stop=ExitCode.PREEMPTED, time=False), lambda: FULL)
    assert (alone.verdict().fault.name, alone.verdict().saves) == ("preemption", False)


def test_a_local_request_has_no_effect_before_a_step_returns_it():
    requests = FakeRequests(stop=ExitCode.STOPPED, save=True)
    consensus = consensus_of(requests, storage=lambda: FULL)
    consensus.local_flags(times=LocalTimes(0.0))
    assert consensus.verdict() == Continue()
    assert not consensus.save_requested()


def test_a_save_is_requested_until_it_is_cleared():
    requests = FakeRequests(save=True)
    consensus = consensus_of(requests, hosts=2)
    consensus.on_flags(step_output(HostFlags(), HostFlags(save=True)))
    consensus.on_flags(step_output(HostFlags(), HostFlags()))
    assert consensus.save_requested()
    consensus.clear_save_request()
    assert not consensus.save_requested()
    assert not requests.save


def test_a_follower_receives_that_saves_fail_on_host_0():
    consensus = consensus_of(hosts=2)
    consensus.on_flags(step_output(HostFlags(storage=True), HostFlags()))
    verdict = consensus.verdict()
    assert isinstance(verdict, StopRun)
    assert verdict.fault.name == "storage_unavailable"


def test_every_host_receives_the_busy_seconds_of_each():
    consensus = consensus_of(hosts=4)
    flags = [HostFlags(busy_seconds=seconds) for seconds in (0.5, 0.25, 2.0, 0.125)]
    assert consensus.on_flags(step_output(*flags)).busy_seconds == (0.5, 0.25, 2.0, 0.125)


def test_unchanged_flags_are_placed_on_the_devices_once_per_timed_steps():
    requests = FakeRequests()
    consensus = consensus_of(requests)
    given = [consensus.local_flags(times=LocalTimes(step / 8)) for step in range(3 * TIMED_STEPS)]
    assert len({id(facts) for facts in given}) == 4
    means = {HostFlags.decode(np.asarray(facts)[0]).busy_seconds for facts in given}
    assert means == {0.0, 2 / 8, 7 / 8, 12 / 8}
    requests.stop = ExitCode.PREEMPTED
    assert (
        HostFlags.decode(np.asarray(consensus.local_flags(times=LocalTimes(0.0)))[0]).stop
        == ExitCode.PREEMPTED
    )


def test_all_hosts_read_that_one_is_still_writing_a_state_to_host_memory():
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    writing = StepConsensus(FakeRequests(), Continue, mesh=mesh, is_keeping=lambda: True)
    (flags,) = {tuple(row) for row in np.asarray(writing.local_flags(times=None))}
    for hosts in ([HostFlags(), HostFlags.decode(np.asarray(flags))], [HostFlags()] * 2):
        consensus = consensus_of(hosts=2)
        consensus.on_flags(step_output(*hosts))
        assert consensus.any_host_keeping() == any(host.is_keeping for host in hosts)


@pytest.mark.parametrize("is_writing", [False, True])
def test_the_flags_of_a_run_have_whether_its_memory_tier_is_writing(is_writing):
    peers = SimpleNamespace(member=HostRank(0, 2, "127.0.0.1:1"))
    context = SimpleNamespace(peers=peers, requests=FakeRequests())
    checkpoints = SimpleNamespace(in_flight=False, verdict=Continue)
    memory = SimpleNamespace(is_writing=lambda: is_writing)
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    consensus = build._consensus(context, checkpoints, memory, mesh, lambda: False)
    flags = HostFlags.decode(np.asarray(consensus.local_flags(times=None))[0])
    assert flags.is_keeping == is_writing, "the others don't see that this host is writing"


def test_a_time_based_save_is_requested_through_the_step():
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    due = [True]
    lead = StepConsensus(FakeRequests(), Continue, mesh=mesh, is_due=lambda: due[0])
    assert HostFlags.decode(np.asarray(lead.local_flags(times=None))[0]) == HostFlags(save=True)
    assert not lead.save_requested(), "before a step has returned it"
    alone = SingleHostConsensus(FakeRequests(), Continue, is_due=lambda: due[0])
    assert alone.save_requested()
    due[0] = False
    assert HostFlags.decode(np.asarray(lead.local_flags(times=None))[0]) == HostFlags()
    assert not alone.save_requested()


def test_a_single_host_acts_at_once():
    requests = FakeRequests()
    consensus = SingleHostConsensus(requests, Continue)
    assert consensus.local_flags(times=LocalTimes(0.0)) is None
    assert consensus.verdict() == Continue()
    requests.stop = ExitCode.STOPPED
    assert isinstance(consensus.verdict(), StopRun)
