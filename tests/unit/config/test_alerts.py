"""Alert targets: a list of sections by kind; no secret appears in a config or a message."""

from __future__ import annotations

import pytest

from jaxres.config import digest, dump_yaml, load, load_recorded
from jaxres.faults import ConfigError

from .conftest import Write

ALL = (
    "alerts.targets=[{kind: slack, url_env: A, kinds: [gave_up]}, {kind: pagerduty, key_env: B},"
    " {kind: generic, url_env: C}]"
)


def error_of(write: Write, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(), [override])
    return str(caught.value)


def test_targets_of_every_kind_survive_the_recorded_config_and_are_free(
    write: Write,
):
    config = load(write(), [ALL]).config
    assert [target.kind for target in config.alerts.targets] == ["slack", "pagerduty", "generic"]
    assert load_recorded(write(dump_yaml(config), "again.yaml")).config == config
    assert digest(config) == digest(load(write()).config)


@pytest.mark.parametrize(
    ("targets", "key", "message"),
    [
        ("[{kind: slack, url_env: A}, {kind: slack, url_env: A}]", "[1]", "appears twice"),
        ("[{kind: slak}]", "[0].kind", "did you mean 'slack'"),
        ("[{url_env: A}]", "[0].kind", "choose slack, pagerduty or generic"),
        ("[{kind: slack, key_env: A}]", "[0].key_env", "pagerduty has it"),
        ("[{kind: slack, url_env: A, kinds: [gaveup]}]", "[0].kinds", "did you mean 'gave_up'"),
        ("[{kind: pagerduty, key_env: A, url: 'http://a'}]", "[0].url", "https://"),
        ("[{kind: pagerduty, key_env: A, url: 'http://127.0.0.1.a'}]", "[0].url", "https://"),
        ("{kind: slack}", "", "must be a list"),
        ("[3]", "[0]", "must be a section"),
    ],
)
def test_an_invalid_target_is_reported_with_its_key(
    write: Write, targets: str, key: str, message: str
):
    error = error_of(write, f"alerts.targets={targets}")
    assert f"alerts.targets{key}: " in error
    assert message in error


@pytest.mark.parametrize("targets", ["[{kind: slack, url_env: '%s'}]", "'%s'", "['%s']"])
def test_a_secret_in_the_wrong_place_is_refused_and_not_shown(write: Write, targets: str):
    assert "hooks" not in error_of(write, f"alerts.targets={targets % 'https://hooks/s3cret'}")
