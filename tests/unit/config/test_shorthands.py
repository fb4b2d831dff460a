import pytest

from jaxres.config import dump_yaml, load, load_recorded
from jaxres.config.schema.checkpoint import AutoWhen, ContinuousWhen, StepsWhen
from jaxres.faults import ConfigError

from .conftest import MINIMAL, Write

SAVE = "checkpoint.save_every_steps"


def checkpoint(write: Write, given: str, *overrides: str):
    return load(write(MINIMAL + f"checkpoint: {given}"), overrides).config.checkpoint


def test_save_every_steps_selects_its_policy_over_that_of_an_earlier_layer(write: Write):
    assert checkpoint(write, "{}").when == StepsWhen(every_steps=1000)
    assert checkpoint(write, "{save_every_steps: 7}").when == StepsWhen(every_steps=7)
    auto = "{when: {kind: auto, max_overhead: 0.1}}"
    assert checkpoint(write, auto).when == AutoWhen(max_overhead=0.1)
    assert checkpoint(write, auto, f"{SAVE}=7").when == StepsWhen(every_steps=7)
    assert checkpoint(write, "{when: {every_steps: 9}}", f"{SAVE}=7").when.every_steps == 7
    assert checkpoint(write, auto, f"{SAVE}=null").when == AutoWhen(max_overhead=0.1)


def test_a_full_key_in_a_later_layer_overrides_the_shorthand(write: Write):
    section = checkpoint(write, "{save_every_steps: 7}", "checkpoint.when.kind=continuous")
    assert section.when == ContinuousWhen()
    section = checkpoint(
        write, "{keep_last: 7}", "checkpoint.keep.last=4", "checkpoint.keep.daily=2"
    )
    assert (section.keep.last, section.keep.daily) == (4, 2)


def test_a_shorthand_and_the_equal_full_key_agree(write: Write):
    given = "{save_every_steps: 7, when: {kind: steps, every_steps: 7}, keep_last: 4}"
    section = checkpoint(write, given)
    assert (section.when, section.keep.last) == (StepsWhen(every_steps=7), 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "{save_every_steps: 7, when: {kind: auto}}",
            "checkpoint.save_every_steps: is short for checkpoint.when.kind=steps, and "
            "checkpoint.when.kind=auto is given too; leave one of them out",
        ),
        (
            "{keep_last: 3, keep: {last: 4}}",
            "checkpoint.keep_last: is short for checkpoint.keep.last=3, and "
            "checkpoint.keep.last=4 is given too; leave one of them out",
        ),
        ("{keep_last: 1}", "checkpoint.keep.last: must be at least 2 (got 1)"),
        ("{save_every_steps: 0}", "checkpoint.when.every_steps: must be greater than 0 (got 0)"),
    ],
)
def test_a_layer_that_contradicts_itself_is_rejected_with_its_line(write: Write, given, message):
    with pytest.raises(ConfigError) as caught:
        checkpoint(write, given)
    assert str(caught.value) == f"x.yaml:5: {message}"


def test_a_recorded_config_has_full_keys_and_accepts_shorthands(write: Write):
    text = dump_yaml(load(write(), ["checkpoint.when.kind=auto"]).config)
    assert "save_every_steps" not in text
    recorded = write(text, "config.yaml")
    assert load_recorded(recorded).config.checkpoint.when == AutoWhen()
    again = load_recorded(recorded, [f"{SAVE}=5"]).config.checkpoint
    assert again.when == StepsWhen(every_steps=5)
