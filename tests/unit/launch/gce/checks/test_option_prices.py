"""Prices come from the config: a limit on costs needs each one, and an old state's are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce import command
from jaxres.launch.gce.checks import option_prices
from jaxres.launch.gce.state.desired_state import DesiredState, Spending
from jaxres.launch.gce.state.state_object import decode_state, encode_state
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from tests.promises.trainer import TINY
from tests.unit.launch.changed_state import changed
from tests.unit.launch.gce_config import OPTION, config

UNPRICED = {name: value for name, value in OPTION.items() if name != "dollars_per_hour"}
STATE = DesiredState("jx", "code", "config")
OLD_PRICE = {"machine_type": "a2-highgpu-1g", "region": "us-central1", "dollars_per_hour": 2.0}
PATH = GcsPath("bkt", "launch/desired_state.json")


def job(*options: dict[str, Any]) -> RunConfig:
    return config(capacity_options=[*(options or (UNPRICED,))])


def limited(limit: str, *options: dict[str, Any]) -> RunConfig:
    """Returns a job with a limit on its costs."""
    name, field = limit.split(".")
    unlimited = job(*options)
    section = getattr(unlimited, name).model_copy(update={field: 10.0})
    return unlimited.model_copy(update={name: section})


def check(wanted: RunConfig, *, earlier: DesiredState | None = None) -> list[str]:
    """Returns the lines that the check prints."""
    lines: list[str] = []
    option_prices.check(wanted, lines.append, earlier=earlier)
    return lines


@pytest.mark.parametrize("earlier", [None, STATE], ids=["a new job", "a job that runs"])
@pytest.mark.parametrize("limit", ["launch.max_dollars", "alerts.spend_dollars"])
def test_a_limit_on_costs_needs_every_price(limit: str, earlier: DesiredState | None) -> None:
    with pytest.raises(ConfigError, match=f"{limit} can't be enforced without it") as error:
        check(limited(limit, OPTION, UNPRICED), earlier=earlier)
    assert error.value.exit_code == ExitCode.CONFIG
    key = "launch.gce.capacity_options[1].dollars_per_hour"
    assert str(error.value).startswith(f"{key}: the price of spot a2-highgpu-1g is unknown")
    remedy = f'Set {key} to the dollars of one VM and hour: Google\'s page "Spot VMs pricing"'
    assert remedy in str(error.value)
    assert check(limited(limit, OPTION), earlier=earlier) == []


def test_without_a_limit_a_missing_price_is_said_and_the_job_begins() -> None:
    assert check(job(OPTION)) == []
    (line,) = check(job())
    assert line.startswith(
        "the price of spot a2-highgpu-1g is unknown: the config has none. Set launch.gce."
    )


@pytest.mark.parametrize(
    ("fields", "page"),
    [
        ({"kind": "spot"}, "Spot VMs pricing"),
        ({"kind": "standard"}, "VM instance pricing"),
        ({"kind": "flex_start"}, "Dynamic Workload Scheduler pricing"),
        (
            {"kind": "reservation", "reservation": "r", "provisioning_model": "standard"},
            "VM instance pricing",
        ),
        ({"kind": "reservation", "reservation": "r"}, "the terms of the reservation"),
    ],
)
def test_a_missing_price_is_named_with_where_it_is_published(
    fields: dict[str, Any], page: str
) -> None:
    (line,) = check(job(UNPRICED | fields))
    assert page in line


def test_a_saved_state_with_prices_of_the_catalog_is_refused_unless_the_config_has_them() -> None:
    old = json.loads(encode_state(STATE)) | {"prices": [OLD_PRICE]}
    read = decode_state(json.dumps(old).encode(), PATH)  # `status` and `down` need it.
    with pytest.raises(ConfigError, match="`prices` of the saved state of the launch"):
        check(job(), earlier=read)
    assert check(job(OPTION), earlier=read) == []
    assert option_prices.adopt(read, job(OPTION)).costs.prices == ()
    del old["prices"]
    assert decode_state(json.dumps(old).encode(), PATH) == STATE
    assert len(check(job(), earlier=STATE)) == 1


def test_vms_that_were_deleted_before_there_was_a_price_are_charged_once() -> None:
    parts = (Spending(0, "boot", 1800.0), Spending(0, "training", 3600.0, 7.0))
    before = changed(STATE, spending=parts, spent_dollars=7.0)
    after = option_prices.adopt(before, job(OPTION | {"dollars_per_hour": 2.0}))
    assert [part.dollars for part in after.costs.spending] == [1.0, 7.0]
    assert after.costs.spent_dollars == 8.0, "VMs of the time without a price are free of charge"
    assert option_prices.adopt(after, job(OPTION)) == after, "charged twice"


def test_the_plan_says_where_a_missing_price_is_published_and_sends_no_request(
    gce: GceEmulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    gce_fields = {
        "project": gce.project,
        "num_hosts": 2,
        "image": "projects/debian-cloud/global/images/family/debian-12",
        "capacity_options": [UNPRICED, OPTION],
    }
    fields = {"base": str(TINY), "run": {"dir": "gs://bucket/run"}, "launch": {"gce": gce_fields}}
    path.write_text(json.dumps(fields))
    assert command.main(["up", str(path), "--dry-run"], env=gce.env) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "a2-highgpu-1g, 1 x A100 40 GB; price unknown: give dollars_per_hour\n" in printed
    assert 'Google\'s page "Spot VMs pricing" has them\n' in printed
    assert "; $3.00 an hour for all\n" in printed
    assert gce.calls().calls.total() == 0
