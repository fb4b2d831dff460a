"""Promises of the word that goes through the step: every host reads the same out of it."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxres.config.schema import MeshSection
from jaxres.engine import mesh as meshes
from jaxres.faults import Continue, Exit, Stop, fault
from jaxres.train.consensus import STOPS, TIMED_STEPS, AllWords, OwnWord, Word

FULL = Stop(fault("storage_unavailable"), "20 saves in a row have failed")


@dataclasses.dataclass
class FakeRequests:
    stop: Exit | None = None
    save: bool = False
    time: bool = True

    def stop_asked(self):
        return self.stop

    def has_time(self):
        return self.time

    def save_asked(self):
        return self.save

    def save_taken(self):
        self.save = False


def agreement(requests=None, *, storage=Continue, hosts=1):
    """An agreement over 8 devices; with several hosts each has as many of them, in order."""
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    found = AllWords(requests or FakeRequests(), storage, mesh=mesh)
    found._rows = range(0, 8, 8 // hosts)
    return found


def through_the_step(*words):
    """What a step returns where each host has given its word."""
    return np.concatenate([np.tile(word.encode(), 8 // len(words)) for word in words])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("storage", [False, True])
def test_a_word_reads_back_as_it_was_given(stop, save, storage):
    for has_time in (True, False):
        word = Word(stop, has_time, save, storage, busy_seconds=0.25)
        assert Word.decode(word.encode()) == word


def test_a_word_laid_on_the_devices_comes_back_from_each():
    requests = FakeRequests(stop=Exit.PREEMPTED, save=True)
    facts = np.asarray(agreement(requests).facts(busy_seconds=None))
    assert [Word.decode(row) for row in facts] == [Word(Exit.PREEMPTED, save=True)] * 8


@pytest.mark.parametrize("host", range(4))
def test_one_hosts_stop_is_everybodys_whoever_has_it(host):
    words = [Word() for _ in range(4)]
    words[host] = Word(stop=Exit.PREEMPTED)
    everyone = [agreement(hosts=4) for _ in range(4)]
    for one in everyone:
        assert one.verdict() == Continue()
        one.heard(through_the_step(*words))
    (verdict,) = {str(one.verdict()) for one in everyone}
    assert "preemption" in verdict


def test_an_operators_stop_stands_before_a_preemption_and_neither_is_forgotten():
    one = agreement(hosts=2)
    one.heard(through_the_step(Word(stop=Exit.PREEMPTED), Word()))
    one.heard(through_the_step(Word(), Word(stop=Exit.STOPPED)))
    one.heard(through_the_step(Word(), Word()))
    verdict = one.verdict()
    assert isinstance(verdict, Stop)
    assert verdict.fault.name == "operators_stop"


def test_one_host_without_time_saves_for_nobody():
    everyone = [agreement(hosts=2) for _ in range(2)]
    for one in everyone:
        one.heard(through_the_step(Word(stop=Exit.PREEMPTED), Word()))
        assert one.verdict().saves
        one.heard(through_the_step(Word(), Word(stop=Exit.PREEMPTED, has_time=False)))
        assert not one.verdict().saves
    alone = OwnWord(FakeRequests(stop=Exit.PREEMPTED, time=False), lambda: FULL)
    assert (alone.verdict().fault.name, alone.verdict().saves) == ("preemption", False)


def test_a_stop_that_only_this_host_knows_of_changes_nothing_yet():
    requests = FakeRequests(stop=Exit.STOPPED, save=True)
    one = agreement(requests, storage=lambda: FULL)
    one.facts(busy_seconds=0.0)
    assert one.verdict() == Continue()
    assert not one.save_asked()


def test_a_save_is_asked_for_until_it_is_taken():
    requests = FakeRequests(save=True)
    one = agreement(requests, hosts=2)
    one.heard(through_the_step(Word(), Word(save=True)))
    one.heard(through_the_step(Word(), Word()))
    assert one.save_asked()
    one.save_taken()
    assert not one.save_asked()
    assert not requests.save


def test_a_host_that_does_not_save_itself_learns_that_storage_refuses():
    one = agreement(hosts=2)
    one.heard(through_the_step(Word(storage=True), Word()))
    verdict = one.verdict()
    assert isinstance(verdict, Stop)
    assert verdict.fault.name == "storage_unavailable"


def test_every_host_learns_how_long_each_has_worked():
    one = agreement(hosts=4)
    words = [Word(busy_seconds=seconds) for seconds in (0.5, 0.25, 2.0, 0.125)]
    assert one.heard(through_the_step(*words)) == (0.5, 0.25, 2.0, 0.125)


def test_a_word_that_stays_is_laid_on_the_devices_once_in_so_many_steps():
    requests = FakeRequests()
    one = agreement(requests)
    given = [one.facts(busy_seconds=step / 8) for step in range(3 * TIMED_STEPS)]
    assert len({id(facts) for facts in given}) == 4
    means = {Word.decode(np.asarray(facts)[0]).busy_seconds for facts in given}
    assert means == {0.0, 3.5 / 8, 11.5 / 8, 19.5 / 8}
    requests.stop = Exit.PREEMPTED
    assert Word.decode(np.asarray(one.facts(busy_seconds=0.0))[0]).stop == Exit.PREEMPTED


def test_a_save_that_is_due_by_the_leads_clock_is_asked_for_as_a_person_does():
    mesh = meshes.build(MeshSection(), devices=jax.devices())
    due = [True]
    lead = AllWords(FakeRequests(), Continue, mesh=mesh, is_due=lambda: due[0])
    assert Word.decode(np.asarray(lead.facts(busy_seconds=None))[0]) == Word(save=True)
    assert not lead.save_asked(), "before a step has brought it to all"
    alone = OwnWord(FakeRequests(), Continue, is_due=lambda: due[0])
    assert alone.save_asked()
    due[0] = False
    assert Word.decode(np.asarray(lead.facts(busy_seconds=None))[0]) == Word()
    assert not alone.save_asked()


def test_a_host_that_is_alone_acts_at_once():
    requests = FakeRequests()
    one = OwnWord(requests, Continue)
    assert one.facts(busy_seconds=0.0) is None
    assert one.verdict() == Continue()
    requests.stop = Exit.STOPPED
    assert isinstance(one.verdict(), Stop)
