"""A price that the config does not give is asked of the Billing Catalog API, kept, and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxres.config import RunConfig
from jaxres.config.schema_gce import GceSection
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError
from jaxres.launch.gce import command
from jaxres.launch.gce.api import billing_catalog
from jaxres.launch.gce.api.billing_catalog import CatalogUnavailable
from jaxres.launch.gce.api.compute import Compute
from jaxres.launch.gce.checks import option_prices
from jaxres.launch.gce.checks.option_prices import PriceLookup
from jaxres.launch.gce.decide import reconcile
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.catalog_prices import CatalogPrice, UnknownPrice
from jaxres.launch.gce.state.desired_state import DesiredState, Spending, decode_state, encode_state
from jaxres.storage.path import GcsPath
from jaxres_emulators.gce import GceEmulator
from jaxres_emulators.gce.billing_skus import NETHERLANDS, SKUS, sku
from jaxres_emulators.gce.calls.billing import CALL
from tests.manual_clock import ManualClock
from tests.promises.trainer import TINY
from tests.unit.launch.gce_config import OPTION, config

DAY = 86_400.0
UNPRICED = {name: value for name, value in OPTION.items() if name != "dollars_per_hour"}
SPOT_DOLLARS = 12 * 0.01659 + 85 * 0.00222 + 1.5399
ON_DEMAND_DOLLARS = 12 * 0.031611 + 85 * 0.004237 + 2.933908
EUROPE = {**UNPRICED, "zones": ["us-central1-a", "europe-west4-a"]}


def section(*options: dict[str, Any], **gce: Any) -> GceSection:
    found = job(*options, **gce).launch.gce
    assert found is not None
    return found


def job(*options: dict[str, Any], launch: dict[str, Any] | None = None, **gce: Any) -> RunConfig:
    return config(capacity_options=[*(options or (UNPRICED,))], launch=launch, **gce)


def compute(gce: GceEmulator) -> Compute:
    return Compute(section(project=gce.project), endpoint=gce.url)


def look_up(
    gce: GceEmulator,
    *options: dict[str, Any],
    clock: ManualClock | None = None,
    known: tuple[CatalogPrice, ...] = (),
) -> PriceLookup:
    wanted = section(*options)
    return option_prices.look_up(
        wanted, lambda: compute(gce), clock or ManualClock(1.7e9), known=known
    )


def reason(lookup: PriceLookup, *options: dict[str, Any]) -> str:
    found = option_prices.price_of(section(*options).capacity_options[0], lookup)
    assert isinstance(found, UnknownPrice), found
    return found.reason


def test_the_skus_of_all_pages_are_read(gce: GceEmulator) -> None:
    gce.sell(SKUS, page_size=4)
    found = look_up(gce)
    (price,) = found.prices
    assert price.dollars_per_hour == pytest.approx(SPOT_DOLLARS)
    assert (price.usage, price.region, price.effective) == ("spot", "us-central1", "2026-11-26")
    assert gce.calls().calls[CALL] == -(-len(SKUS) // 4), "a page was left out or read twice"


def test_one_reading_of_the_catalog_serves_all_options(gce: GceEmulator) -> None:
    gce.sell(SKUS)
    standard = {**UNPRICED, "kind": "standard"}
    reserved = {
        **UNPRICED,
        "kind": "reservation",
        "reservation": "r",
        "provisioning_model": "standard",
    }
    options = (UNPRICED, standard, reserved)
    found = look_up(gce, *options)
    assert gce.calls().calls[CALL] == 1
    filled = option_prices.fill(job(*options), found.prices).launch.gce
    assert filled is not None
    dollars = [option.dollars_per_hour for option in filled.capacity_options]
    expected = [SPOT_DOLLARS, ON_DEMAND_DOLLARS, ON_DEMAND_DOLLARS]
    assert dollars == pytest.approx(expected), "another price than that of its kind"


def test_the_price_of_the_config_counts_and_nothing_is_asked(gce: GceEmulator) -> None:
    gce.sell(SKUS)
    found = look_up(gce, OPTION)
    assert found == PriceLookup()
    assert gce.calls().calls[CALL] == 0
    by_catalog = look_up(gce).prices
    filled = option_prices.fill(job(OPTION), by_catalog).launch.gce
    assert filled is not None
    assert filled.capacity_options[0].dollars_per_hour == 1.5


REFUSED = "the Cloud Billing API refuses (403: Cloud Billing API has not been used in project"


def test_an_api_that_is_not_enabled_leaves_the_price_unknown_with_what_to_do(
    gce: GceEmulator,
) -> None:
    found = look_up(gce)
    assert gce.calls().calls[CALL] == 1, "a refusal is not asked for again"
    assert found.prices == ()
    assert reason(found).startswith(REFUSED)
    command = "`gcloud services enable cloudbilling.googleapis.com --project emulated` enables it"
    assert reason(found).endswith(command)
    (result,) = option_prices.results(job(), found)
    assert result.state == "warning"
    assert result.remedy == "Give dollars_per_hour"


def test_a_service_that_fails_is_asked_again_and_one_that_does_not_answer_is_left(
    gce: GceEmulator,
) -> None:
    gce.sell(SKUS)
    gce.fail("503", call=CALL, times=2)
    assert len(look_up(gce).prices) == 1
    assert gce.calls().calls[CALL] == 3
    gce.fail("stall", call=CALL, times=None, late_seconds=3600.0)
    with pytest.raises(CatalogUnavailable, match="has not sent all prices within 2 s"):
        billing_catalog.list_skus(compute(gce), regions={"us-central1"}, seconds=2.0)


@pytest.mark.parametrize("answer", ["no end", "no list"])
def test_an_answer_that_is_no_list_of_skus_leaves_the_price_unknown(
    gce: GceEmulator, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    if answer == "no end":
        monkeypatch.setattr(billing_catalog, "MAX_PAGES", 3)
        gce.sell(SKUS, page_size=1)
        text = "the Cloud Billing API has more than 3 pages of SKUs"
    else:
        gce.sell(["not a SKU"])  # type: ignore[list-item]
        text = "the Cloud Billing API has sent no list of SKUs (AttributeError"
    assert reason(look_up(gce)).startswith(text)


def test_a_price_is_asked_for_once_a_day_and_kept_while_the_service_does_not_answer(
    gce: GceEmulator,
) -> None:
    gce.sell(SKUS)
    clock = ManualClock(1.7e9)
    known = look_up(gce, clock=clock).prices
    clock.now += DAY - 1
    later = look_up(gce, clock=clock, known=known).prices
    assert gce.calls().calls[CALL] == 1, "it was asked twice in a day"
    assert later == known
    clock.now += 2
    again = look_up(gce, clock=clock, known=known).prices
    assert gce.calls().calls[CALL] == 2, "an old price was not asked for again"
    assert again[0].looked_up_at == pytest.approx(known[0].looked_up_at + DAY + 1)
    gce.sell([])
    clock.now += DAY + 1
    kept = look_up(gce, clock=clock, known=again).prices
    assert kept == again, "a known price was lost"


def test_an_option_whose_regions_have_different_prices_has_none(gce: GceEmulator) -> None:
    gce.sell(SKUS)
    same = look_up(gce, EUROPE)
    price = option_prices.price_of(section(EUROPE).capacity_options[0], same)
    assert isinstance(price, CatalogPrice), "both regions have the same price"
    others = [one for one in SKUS if one["skuId"] != "A2NL-04"]
    text = "Spot Preemptible A2 Instance Core running in Netherlands"
    gce.sell([*others, sku("A2NL-04", text, 0.5, usage="Preemptible", regions=NETHERLANDS)])
    found = reason(look_up(gce, EUROPE), EUROPE)
    assert found == (
        "it differs between its regions ($1.9277 in us-central1, $7.7286 in europe-west4): "
        "give each one an option of its own"
    )


def test_vms_of_blocks_that_are_reserved_for_a_time_have_no_price() -> None:
    option = {**UNPRICED, "kind": "reservation", "reservation": "r"}
    lookup = option_prices.look_up(section(option), _no_compute, ManualClock(1.7e9))
    text = "reservation_bound VMs are billed by the terms of their reservation"
    assert reason(lookup, option) == text


def _no_compute() -> Compute:
    raise AssertionError("nothing may be asked for")


def test_without_credentials_the_price_is_unknown_and_the_plan_is_shown() -> None:
    def no_credentials() -> Compute:
        raise ConfigError("launch.gce: no credentials for Google Cloud (none were found).")

    lookup = option_prices.look_up(section(), no_credentials, ManualClock(1.7e9))
    assert reason(lookup) == "launch.gce: no credentials for Google Cloud (none were found)"


@pytest.mark.parametrize("limit", ["launch.max_dollars", "alerts.spend_dollars"])
def test_a_limit_on_costs_needs_every_price(gce: GceEmulator, limit: str) -> None:
    has_limit = job()
    name, field = limit.split(".")
    changed = getattr(has_limit, name).model_copy(update={field: 10.0})
    has_limit = has_limit.model_copy(update={name: changed})
    lines: list[str] = []

    def prices(*, is_new: bool) -> tuple[CatalogPrice, ...]:
        return option_prices.for_job(
            has_limit, compute(gce), ManualClock(1.7e9), lines.append, known=(), is_new=is_new
        )

    with pytest.raises(ConfigError, match=f"{limit} can't be enforced without it") as error:
        prices(is_new=True)
    assert str(error.value).startswith(
        "launch.gce.capacity_options[0].dollars_per_hour: the price of spot a2-highgpu-1g is "
        "unknown: the Cloud Billing API refuses"
    )
    assert lines == []
    assert prices(is_new=False) == (), "a job that runs is led on"
    assert len(lines) == 1, "that the price is unknown is said once"
    gce.sell(SKUS)
    assert len(prices(is_new=True)) == 1
    assert len(lines) == 1


def test_the_prices_are_part_of_the_desired_state_and_charge_what_was_deleted_before() -> None:
    price = CatalogPrice("a2-highgpu-1g", "us-central1", "spot", 2.0, ("A",), "2026-11-26", 5.0)
    parts = (Spending(0, "boot", 1800.0), Spending(0, "training", 3600.0, 7.0))
    before = DesiredState("jx", "code", "config", spending=parts, spent_dollars=7.0)
    after = option_prices.adopt(before, job(), (price,))
    assert [part.dollars for part in after.spending] == [1.0, 7.0]
    assert after.spent_dollars == 8.0, "VMs of the time without a price are free of charge"
    assert option_prices.adopt(after, job(), (price,)) == after, "charged twice"
    path = GcsPath("bkt", "launch/desired_state.json")
    assert decode_state(encode_state(after), path) == after


def test_max_dollars_counts_the_price_of_the_catalog(gce: GceEmulator) -> None:
    from tests.unit.launch.gce.decide.test_reconcile import NOW, READY, observed

    gce.sell(SKUS)
    limited = job(launch={"max_dollars": 1.9})
    desired = replace(READY, prices=look_up(gce).prices)
    filled = option_prices.fill(limited, desired.prices)
    now = NOW - 100 + 1800  # Two VMs for half an hour: the price of one for an hour.
    found = reconcile.decide(desired, observed(now=now), filled).desired
    assert found.end is not None, "no VM has cost anything"
    assert found.end.reason == "launch.max_dollars=1.9 is reached ($1.93 spent)"
    assert filled.launch.gce is not None
    line = spending.describe(Spending(0, "boot", 3600.0, 1.93), filled.launch.gce)
    assert line == "    spot a2-highgpu-1g: boot: $1.93, 1.00 VM hours"


def test_the_plan_names_source_and_date_of_a_price(
    gce: GceEmulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    gce_fields = {
        "project": gce.project,
        "num_hosts": 2,
        "image": "projects/debian-cloud/global/images/family/debian-12",
        "capacity_options": [UNPRICED],
    }
    fields = {"base": str(TINY), "run": {"dir": "gs://bucket/run"}, "launch": {"gce": gce_fields}}
    path.write_text(json.dumps(fields))
    arguments = ["up", str(path), "--dry-run"]
    assert command.main(arguments, env=gce.env) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert "a2-highgpu-1g, 1 x A100 40 GB; price unknown: give dollars_per_hour\n" in printed
    assert f"the price of spot a2-highgpu-1g is unknown: {REFUSED}" in printed
    gce.sell(SKUS)
    assert command.main(arguments, env=gce.env) == ExitCode.DONE
    line = "; $3.86 an hour for all, by the Billing Catalog API, 2026-11-26\n"
    printed = capsys.readouterr().out
    assert line in printed, printed
    assert "unknown" not in printed
