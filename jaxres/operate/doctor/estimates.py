"""Durations, save intervals and storage of a job, estimated before it runs. Pure.

The shortest duration of a step follows from its floating-point operations, so every estimate of
time is a lower bound until the run has measured steps.
"""

from __future__ import annotations

from jaxres.checkpoint.retention import save_interval
from jaxres.checkpoint.retention.save_interval import Costs
from jaxres.config import RunConfig
from jaxres.config.schema.checkpoint import AutoWhen, SecondsWhen, StepsWhen
from jaxres.config.schema.model import VitModel
from jaxres.operate.doctor.facts import Facts
from jaxres.operate.plan.assumptions import DEFAULTS
from jaxres.operate.plan.goodput_model import transfer_seconds
from jaxres.operate.plan.retention_bill import storage_bill
from jaxres.storage.path import is_remote
from jaxres.telemetry.stdio import format_bytes

DEVICE_FLOPS = {"cpu": 1e11}
OTHER_DEVICE_FLOPS = 4e14
"""Assumed operations per second of a device: 40 % of the 989 TFLOP/s of an H100 in bfloat16."""
FLOPS_PER_PARAM_AND_TOKEN = 6
"""Forward and backward pass (Kaplan et al., arXiv 2001.08361)."""
HOUR_SECONDS = 3600.0
MAX_LOST_SHARE = 0.01
"""Share of the time that an interval may lose beyond the best one."""
MAX_COUNTED_SAVES = 20_000
"""Most saves for which the retention is computed step by step."""
WRITE_MB_PER_SECOND = DEFAULTS["--write-mb-per-s"]
WRITE_TEXT = f"at {WRITE_MB_PER_SECOND:g} MB/s a host, assumed"
PRICE = DEFAULTS["--storage-price"]


def step_seconds(config: RunConfig, facts: Facts) -> float | None:
    """Returns the measured duration of a step, else the shortest possible; None: unknown."""
    if facts.step_seconds is not None:
        return facts.step_seconds
    if facts.num_params is None:
        return None
    tokens = config.train.global_batch_size * _tokens_per_row(config)
    flops = FLOPS_PER_PARAM_AND_TOKEN * facts.num_params * tokens
    rate = DEVICE_FLOPS.get(facts.platform, OTHER_DEVICE_FLOPS)
    return flops / (rate * max(1, facts.num_devices))


def _tokens_per_row(config: RunConfig) -> int:
    model = config.model
    if isinstance(model, VitModel):
        return (model.image_size // model.patch_size) ** 2
    return config.data.seq_len


def is_lower_bound(config: RunConfig, facts: Facts) -> bool:
    """Returns whether `interval_seconds` may be longer in fact."""
    return isinstance(config.checkpoint.when, StepsWhen) and facts.step_seconds is None


def step_source(config: RunConfig, facts: Facts) -> str:
    """Returns where the duration of a step in `interval_seconds` comes from."""
    if is_lower_bound(config, facts):
        return " or more"
    return ", measured" if isinstance(config.checkpoint.when, StepsWhen) else ""


def hours(config: RunConfig, facts: Facts) -> float | None:
    """Returns the duration of the run, or a lower bound of it; None: unknown."""
    seconds = step_seconds(config, facts)
    return None if seconds is None else seconds * config.train.steps / HOUR_SECONDS


def interval_seconds(config: RunConfig, facts: Facts) -> float | None:
    """Returns the time between two saves; None: unknown, or not decided before the run."""
    when = config.checkpoint.when
    if isinstance(when, SecondsWhen):
        return when.every_seconds
    seconds = step_seconds(config, facts)
    if not isinstance(when, StepsWhen) or seconds is None:
        return None
    return when.every_steps * seconds


def mtbf_hours(facts: Facts) -> float:
    """Returns the expected hours between failures of the job's devices."""
    if facts.platform == "cpu":
        return AutoWhen().mtbf_hours
    return DEFAULTS["--mtbf-hours"] / max(1, facts.num_devices)


def best_interval(seconds: float, facts: Facts) -> tuple[float, float]:
    """Returns the best interval, and the share of the time that another one loses beyond it."""
    mtbf, stall = HOUR_SECONDS * mtbf_hours(facts), DEFAULTS["--stall-seconds"]
    costs = Costs(stall_seconds=stall, write_seconds=write_seconds(facts) or 0.0)
    best = max(save_interval.optimum(stall, mtbf_seconds=mtbf), costs.write_seconds)
    useful = [
        save_interval.useful_share(each, costs, mtbf_seconds=mtbf) for each in (best, seconds)
    ]
    return best, max(0.0, useful[0] - useful[1])


def write_seconds(facts: Facts) -> float | None:
    """Returns the assumed time from a snapshot to its commit; None: the size is unknown."""
    if facts.state_bytes is None:
        return None
    return transfer_seconds(
        facts.state_bytes, num_hosts=facts.num_hosts, mb_per_second=WRITE_MB_PER_SECOND
    )


def kept_text(config: RunConfig, facts: Facts) -> str | None:
    """Returns the size of all checkpoints that retention keeps and, in a bucket, their price."""
    size = facts.state_bytes
    if size is None:
        return None
    count = _num_kept(config, facts, size)
    text = f"{count} checkpoints of {format_bytes(size)}, {format_bytes(count * size)} at the end"
    if not is_remote(facts.run_root):
        return text
    return f"{text}; ${count * size / 1e9 * PRICE:,.2f} a month at ${PRICE:g} a GB (assumed)"


def _num_kept(config: RunConfig, facts: Facts, size: int) -> int:
    keep, when = config.checkpoint.keep, config.checkpoint.when
    seconds, length = interval_seconds(config, facts), hours(config, facts)
    most = keep.last + keep.daily + keep.weekly + keep.best
    most += 0 if keep.every_steps is None else config.train.steps // keep.every_steps
    if not seconds or not length or length * HOUR_SECONDS / seconds > MAX_COUNTED_SAVES:
        return most
    bill = storage_bill(
        keep,
        state_bytes=size,
        interval_seconds=seconds,
        hours=length,
        dollars_per_gb_month=PRICE,
        steps_per_save=when.every_steps if isinstance(when, StepsWhen) else 1,
    )
    return bill.kept
