"""Keys that became constants: a config that has one is read as before, or refused by name."""

import pytest
import yaml

from jaxres.config import dump_yaml, load, load_recorded
from jaxres.config.removed_keys import REMOVED
from jaxres.config.schema.fields import iter_fields
from jaxres.engine import divergence
from jaxres.faults import ConfigError
from jaxres.supervisor import restart_policy, slow_hosts
from jaxres.supervisor.health import gpu_health, host_health
from jaxres.telemetry import alert_sender
from jaxres.train.checks import device_probe, stragglers

from .conftest import MINIMAL, Write

CONSTANTS = {
    "alerts.max_per_hour": alert_sender.MAX_PER_HOUR,
    "guards.rollback.window_steps": divergence.USUAL_STEPS,
    "guards.throughput.max_lost_minutes": slow_hosts.MAX_LOST_MINUTES,
    "guards.throughput.probe_every_steps": device_probe.EVERY_STEPS,
    "guards.throughput.probe_share": device_probe.MAX_SHARE,
    "guards.throughput.slow_factor": stragglers.SLOW_FACTOR,
    "hardware.health.clock_step_seconds": host_health.CLOCK_STEP_SECONDS,
    "hardware.health.leak_minutes": host_health.LEAK_MINUTES,
    "hardware.health.link_errors_per_minute": gpu_health.LINK_ERRORS_PER_MINUTE,
    "hardware.health.slow_minutes": gpu_health.SLOW_MINUTES,
    "restart.max_backoff_seconds": restart_policy.MAX_BACKOFF_SECONDS,
    "restart.max_storage_backoff_seconds": restart_policy.MAX_STORAGE_BACKOFF_SECONDS,
}


def recorded(write: Write, key: str, value: object):
    """Writes the config.yaml of a run of an earlier version, which has a removed key."""
    data = yaml.safe_load(dump_yaml(load(write()).config))
    *sections, name = key.split(".")
    inner = data
    for section in sections:
        inner = inner[section]
    inner[name] = value
    return write(yaml.safe_dump(data), "recorded.yaml")


def test_each_removed_key_names_the_constant_that_the_code_uses_and_is_no_key():
    assert REMOVED == CONSTANTS
    assert not set(REMOVED) & {leaf.key for leaf in iter_fields()}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_at_its_constant_is_read_and_another_value_is_refused_by_name(
    write: Write, key: str
):
    config = load(write()).config
    assert load_recorded(recorded(write, key, REMOVED[key])).config == config
    assert load(write(), [f"{key}={REMOVED[key]:g}"]).config == config
    remedy = rf"{key}: is no key any more: its value is always .* \(got 7\); remove the line"
    with pytest.raises(ConfigError, match=rf"recorded\.yaml:\d+: {remedy}"):
        load_recorded(recorded(write, key, 7))
    with pytest.raises(ConfigError, match=rf"command line \(.*\): {remedy}"):
        load(write(), [f"{key}=7"])


@pytest.mark.parametrize("value", ["null", "true", "'60'", "[60]"])
def test_a_removed_key_whose_value_is_no_number_is_refused(write: Write, value: str):
    path = write(MINIMAL + f"hardware: {{health: {{leak_minutes: {value}}}}}\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:\d+: hardware\.health\.leak_minutes: is no"):
        load(path)
