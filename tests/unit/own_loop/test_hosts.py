"""What a loop does on several hosts, by a group of hosts of which the other one is made up."""

import json
import sys
import threading

import jax.numpy as jnp
import pytest

import jaxres
from jaxres.cluster.host_group import HostRank, SingleHost
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Continue, StopRun, StorageUnavailable, UsageError
from jaxres.own_loop import hosts
from jaxres.train import jax_coordination
from jaxres.train.stop_requests import StopRequests
from tests.waiting import SURE_SECONDS

WAIT_SECONDS = 3.0


class Pair(SingleHost):
    """The group of host 0 of two; the other host sends the messages that it is given."""

    member = HostRank(0, 2, "here:1")

    def __init__(self, *others):
        self.others = others

    def gather(self, topic, message, *, seconds):
        return (message, *self.others)


def test_each_host_gets_its_own_position_back():
    same, other = {"row": 3}, {"row": 8}
    saved = hosts.position_of_all(same, Pair(json.dumps(other)), step=1)
    assert [hosts.own_position(saved, HostRank(n, 2)) for n in (0, 1)] == [same, other]
    with pytest.raises(ConfigError, match="2 hosts have saved one each, and these are 3"):
        hosts.own_position(saved, HostRank(0, 3))
    assert hosts.position_of_all(same, Pair(json.dumps(same)), step=1) == same
    assert hosts.own_position(same, HostRank(1, 2)) == same


def test_a_leaf_of_one_process_is_named_before_anything_is_written():
    with pytest.raises(
        ConfigError, match=r"^2 leaves of the state are of this process alone, such as a/b:"
    ):
        hosts.require_global({"a": {"b": jnp.ones(2)}, "n": 3})


def agreement_of(requests):
    return hosts.Agreement(Pair(), requests, Continue, is_due=lambda: False)


def test_a_stop_has_an_effect_when_the_flags_of_its_step_are_read():
    requests = StopRequests()
    agreement = agreement_of(requests)
    before = agreement.send()
    requests.request_stop(ExitCode.PREEMPTED)
    after = agreement.send()
    agreement.receive(before, is_saved=False)
    assert agreement.consensus.verdict() == Continue(), "the other host has not been told"
    agreement.receive(after, is_saved=False)
    assert isinstance(agreement.consensus.verdict(), StopRun)


def test_flags_of_steps_before_a_save_ask_for_no_second_one():
    requests = StopRequests()
    requests.request_save()
    agreement = agreement_of(requests)
    facts = [agreement.send() for _ in range(2)]
    agreement.receive(facts[0], is_saved=False)
    assert agreement.consensus.save_requested()
    agreement.consensus.clear_save_request()
    agreement.receive(facts[1], is_saved=True)
    assert not agreement.consensus.save_requested()


def test_jax_that_is_used_before_the_hosts_meet_is_a_clear_error(monkeypatch):
    def join(*_, **__):
        raise RuntimeError("jax.distributed.initialize() must be called before any JAX calls")

    monkeypatch.setattr(jax_coordination, "join", join)
    env = {"JAXRES_HOST": "0", "JAXRES_NUM_HOSTS": "2", "JAX_COORDINATOR_ADDRESS": "here:1"}
    with pytest.raises(UsageError, match="Enter the attempt before the first array is made"):
        hosts.join(env, heartbeat_seconds=10.0, clock=None)


def test_after_an_error_nothing_waits_for_a_host_that_is_gone(tmp_path, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    class Lost(Pair):
        def gather(self, topic, message, *, seconds):
            if not topic.startswith("saved/"):
                return (message, message)
            begun.set()
            ended.wait(WAIT_SECONDS)
            ended.set()
            raise StorageUnavailable("the other host is gone")

    monkeypatch.setattr(hosts, "join", lambda env, **_: Lost())
    monkeypatch.setattr(hosts, "require_global", lambda state: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def fail_while_a_save_is_in_flight():
        with jaxres.attempt(tmp_path, save_every_steps=1) as attempt:
            state, _, start = attempt.restore_or(lambda: {"w": jnp.zeros(4)})
            for step in attempt.steps(start, 9):
                attempt.finished(step, state)
                attempt._judge_through(step)
                assert begun.wait(SURE_SECONDS)
                raise ValueError("the program fails")

    with pytest.raises(ValueError, match="the program fails"):
        fail_while_a_save_is_in_flight()
    assert not ended.is_set(), "it has waited for the save in flight"
    assert sys.excepthook.__name__ == "_exit_by_error"
    ended.set()
