"""Prices of the capacity options, all from the config: a limit on costs needs each one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxres.config import RunConfig
from jaxres.config.errors import raise_all
from jaxres.config.schema.gce import CapacityOption, GceSection, ReservationOption
from jaxres.launch.gce.checks.check_result import CheckResult
from jaxres.launch.gce.decide import cheaper_option
from jaxres.launch.gce.state import spending
from jaxres.launch.gce.state.desired_state import DesiredState

PAGES = {
    "spot": 'Google\'s page "Spot VMs pricing"',
    "standard": 'Google\'s page "VM instance pricing"',
    "flex_start": 'Google\'s page "Dynamic Workload Scheduler pricing"',
}
"""Where the price of a VM is published, by the kind of the option."""


def published(option: CapacityOption) -> str:
    """Returns where Google publishes the price of an option's VMs."""
    if not isinstance(option, ReservationOption):
        return PAGES[option.kind]
    if option.provisioning_model == "standard":
        return PAGES["standard"]
    return "the terms of the reservation"


def results(config: RunConfig, *, earlier: DesiredState | None = None) -> Iterator[CheckResult]:
    """Yields which prices are missing: failed if a limit on costs needs them.

    Args:
      earlier: its desired state, if it has one. An earlier version of jaxres may have written
        prices into it that it had asked Google for; they are refused rather than ignored.
    """
    gce = config.launch.gce
    assert gce is not None, config
    limits = {
        "launch.max_dollars": config.launch.max_dollars,
        "alerts.spend_dollars": config.alerts.spend_dollars,
    }
    needed_by = [name for name, value in limits.items() if value is not None]
    had_prices = earlier is not None and bool(earlier.costs.prices)
    for number, option in enumerate(gce.capacity_options):
        if option.dollars_per_hour is not None:
            continue
        text = f"the price of {option.kind} {option.machine_type} is unknown: the config has none"
        if needed_by:
            text += f"; {' and '.join(needed_by)} can't be enforced without it"
        if had_prices:
            text += "; `prices` of the saved state of the launch, by the Billing Catalog API, are "
            text += "no longer used"
        state = "failed" if needed_by or had_prices else "warning"
        key = f"launch.gce.capacity_options[{number}].dollars_per_hour"
        remedy = f"Set {key} to the dollars of one VM and hour: {published(option)} has them"
        yield CheckResult("prices", state, text, remedy, key)


def check(
    config: RunConfig, console: Callable[[str], None], *, earlier: DesiredState | None
) -> None:
    """Prints which prices are missing.

    Args:
      console: prints a line.
      earlier: its desired state; None: it has none.

    Raises:
      ConfigError: a limit on costs, or the saved state, needs a price that is missing.
    """
    found = [*results(config, earlier=earlier)]
    raise_all(result.problem() for result in found if result.state == "failed")
    for result in found:
        console(result.text())


def adopt(desired: DesiredState, config: RunConfig) -> DesiredState:
    """Returns the desired state with VMs charged that were deleted before there was a price."""
    gce = config.launch.gce
    assert gce is not None, config
    charged = tuple(
        replace(part, dollars=spending.charge(part.option, part.vm_seconds, gce))
        if not part.dollars
        else part
        for part in desired.costs.spending
    )
    costs = desired.costs
    before, after = (sum(p.dollars for p in parts) for parts in (costs.spending, charged))
    spent = costs.spent_dollars + after - before
    costs = replace(costs, prices=(), spending=charged, spent_dollars=spent)
    return replace(desired, costs=costs)


def cost_lines(desired: DesiredState, gce: GceSection, *, now: float) -> list[str]:
    """Returns the costs by capacity option and cause as lines."""
    parts = spending.so_far(desired, gce, now=now)
    saved = cheaper_option.saved_dollars(desired, gce, now=now)
    moves = [f"    saved by moves to a cheaper option: ${saved:.2f}"] if saved else []
    return [*(spending.describe(part, gce) for part in parts), *moves]
