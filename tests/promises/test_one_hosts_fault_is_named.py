"""What goes wrong on one host ends all with its code and its words; nobody else is blamed."""

from __future__ import annotations

from jaxres.faults import Exit
from tests.promises.trainer import FAULTY, Place

ENDLESS = ("train.steps=1000000", "checkpoint.save_every_steps=1000000")


def test_an_error_on_one_host_is_one_traceback_with_its_name(place: Place) -> None:
    trainer = place.launch("run", *ENDLESS, hosts=2, config=FAULTY, env={"FAULT": "row:300:fail:1"})
    assert trainer.ended() == Exit.BUG, trainer.said()
    said = trainer.said()
    assert said.count("Traceback") == 1, said
    assert "host 1 (" in said, said
    assert "): tests.promises.faulty.OnPurpose: as the test has asked" in said, said


def test_memory_that_one_host_lacks_is_typed_with_its_name(place: Place) -> None:
    env = {"FAULT": "row:300:exhaust_host:1"}
    trainer = place.launch("run", *ENDLESS, hosts=2, config=FAULTY, env=env)
    trainer.refused(Exit.OUT_OF_MEMORY, "host 1 (", "train.microbatches=")


def test_data_that_one_host_waits_for_are_not_the_others_hang(place: Place) -> None:
    limits = ("deadlines.step_seconds=1", "data.timeout_seconds=4")
    env = {"FAULT": "row:300:sleep:1"}
    trainer = place.launch("run", *ENDLESS, *limits, hosts=2, config=FAULTY, env=env)
    trainer.refused(Exit.HUNG, "host 1 (", "did not come within 4 s (data.timeout_seconds)")
