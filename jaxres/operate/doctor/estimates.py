"""Durations, save intervals and storage of a job, estimated before it runs. Pure.

The shortest duration of a step follows from its floating-point operations, so every estimate of
time is a lower bound until the run has measured steps.
"""

from __future__ import annotations

from jaxres.config import RunConfig
from jaxres.config.schema.checkpoint import StepsWhen
from jaxres.config.schema.model import VitModel
from jaxres.estimate.assumptions import DEFAULTS
from jaxres.operate.doctor.facts import Facts
from jaxres.operate.plan.retention_bill import storage_bill
from jaxres.storage.path import is_remote
from jaxres.telemetry.stdio import format_bytes

DEVICE_FLOPS = {"cpu": 1e11}
OTHER_DEVICE_FLOPS = 4e14
"""Assumed operations per second of a device: 40 % of the 989 TFLOP/s of an H100 in bfloat16."""
FLOPS_PER_PARAM_AND_TOKEN = 6
"""Forward and backward pass (Kaplan et al., arXiv 2001.08361)."""
HOUR_SECONDS = 3600.0
MAX_COUNTED_SAVES = 20_000
"""Most saves for which the retention is computed step by step."""
PRICE = DEFAULTS["--storage-price"]


def step_seconds(config: RunConfig, facts: Facts) -> float | None:
    """Returns the measured duration of a step, else the shortest possible; None: unknown."""
    if facts.estimate.step_seconds is not None:
        return facts.estimate.step_seconds
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


def hours(config: RunConfig, facts: Facts) -> float | None:
    """Returns the duration of the run, or a lower bound of it; None: unknown."""
    seconds = step_seconds(config, facts)
    return None if seconds is None else seconds * config.train.steps / HOUR_SECONDS


def is_small(config: RunConfig, facts: Facts) -> bool:
    """Returns whether a run is too small for the items about long or multi-machine jobs."""
    length = hours(config, facts)
    return config.launch.gce is None and facts.num_hosts == 1 and (length is None or length < 1)


def interval_seconds(config: RunConfig, facts: Facts) -> float | None:
    """Returns the time between two saves, or a lower bound of it; None: unknown."""
    known, when = facts.estimate.interval_seconds, config.checkpoint.when
    seconds = step_seconds(config, facts)
    if known is not None or not isinstance(when, StepsWhen) or seconds is None:
        return known
    return when.every_steps * seconds


def kept_text(config: RunConfig, facts: Facts) -> str | None:
    """Returns the size of all checkpoints that retention keeps and, in a bucket, their price."""
    if not facts.estimate.has_state:
        return None
    size = round(facts.estimate.job.state_bytes)
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
