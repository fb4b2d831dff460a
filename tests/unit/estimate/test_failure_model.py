"""Failures of a fleet: the numbers that the field quotes."""

from __future__ import annotations

import pytest

from jaxres.estimate import failure_model
from jaxres.estimate.failure_model import Component, FleetModel


def fleet(num_gpus: int, *components: Component, gpus_per_host: int = 8) -> FleetModel:
    return FleetModel(num_gpus, gpus_per_host, components)


def test_a_thousand_gpus_of_which_each_survives_a_day_by_999_in_1000_all_survive_by_37_percent():
    gpu = Component("gpu", "gpu", failure_model.mtbf_of_daily_survival(0.999))
    rate = fleet(1000, gpu).failures_per_hour()
    assert failure_model.survival(rate, hours=24) == pytest.approx(0.999**1000)
    assert round(0.999**1000, 3) == 0.368


def test_419_failures_in_54_days_give_a_gpu_an_mtbf_that_gives_them_back():
    gpu_mtbf = 16_384 * 54 * 24 / 419
    whole = fleet(16_384, Component("gpu", "gpu", gpu_mtbf))
    assert whole.failures_per_hour() * 54 * 24 == pytest.approx(419)


@pytest.mark.parametrize(
    ("num_gpus", "mtbf", "hours"), [(512, 100_000, 195.3), (1000, 50_000, 50.0)]
)
def test_the_fleet_fails_as_often_as_all_of_its_gpus_together(num_gpus, mtbf, hours):
    assert fleet(num_gpus, Component("gpu", "gpu", mtbf)).mtbf_hours() == pytest.approx(
        hours, abs=0.05
    )


def test_rates_of_components_of_gpus_hosts_and_the_job_add_up():
    parts = (
        Component("gpu", "gpu", 1000.0),
        Component("nic", "host", 100.0),
        Component("switch", "job", 10.0),
    )
    assert fleet(20, *parts).num_hosts == 3
    assert fleet(20, *parts).failures_per_hour() == pytest.approx(20 / 1000 + 3 / 100 + 1 / 10)


def test_a_fleet_without_components_never_fails():
    assert fleet(8).failures_per_hour() == 0
    assert fleet(8).mtbf_hours() == float("inf")


@pytest.mark.parametrize("mean", [0.01, 3.7, 419.0, 5000.0])
def test_poisson_quantiles_enclose_their_share(mean):
    for share in (0.05, 0.5, 0.95):
        quantile = failure_model.poisson_quantile(mean, share)
        below = failure_model.poisson_share(mean, below=quantile)
        assert below <= share + 1e-9
        assert failure_model.poisson_share(mean, below=quantile + 1) >= share - 1e-9
