"""Out-of-memory errors: recognises them, and suggests settings to change.

Home of: out_of_memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from jaxres.config import RunConfig
from jaxres.faults import ConfigError
from jaxres.telemetry.stdio import format_bytes


def is_oom(error: Exception) -> bool:
    """Returns whether an error means that a device or the host ran out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def check_state_fits(state_bytes: int, limit_bytes: int | None) -> None:
    """Raises if the state alone exceeds a device's memory, which is known before the run.

    Raises:
      ConfigError: the state exceeds the limit.
    """
    if limit_bytes is None or state_bytes <= limit_bytes:
        return
    raise ConfigError(
        f"parameters and optimizer state take {format_bytes(state_bytes)} of each device, "
        f"which has {format_bytes(limit_bytes)}. Split them over "
        f"{state_bytes / limit_bytes:.1f} times as many devices or more (mesh.fsdp, then "
        "mesh.tensor), or choose a smaller model (`jaxres doctor CONFIG --devices N` shows "
        "the memory use of N devices)"
    )


def warn_host_memory(
    snapshot: int, held_bytes: int, *, meminfo: Path = Path("/proc/meminfo")
) -> str | None:
    """Returns a warning if a save needs more than this host's free memory; None if it does not.

    One save is in flight at a time, so a save takes one copy of what this host's devices hold: on
    CPU the old buffers, which the next step then can't reuse, elsewhere a copy in host memory.
    An array that several devices hold may be stored once, so it may take less.

    Args:
      snapshot: the most bytes that a save takes.
      held_bytes: bytes of the state in the same memory, on CPU.
      meminfo: file of the kernel with the available memory.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if available is None or int(available[1]) * 1024 >= snapshot + held_bytes:
        return None
    return (
        f"a save takes up to {format_bytes(snapshot)} of this host's memory until it is committed"
        f"{f', besides {format_bytes(held_bytes)} of state' if held_bytes else ''}; "
        f"{format_bytes(int(available[1]) * 1024)} are available. Free some, or split the state "
        "over more hosts (mesh.fsdp)"
    )


def warn_device_memory(
    config: RunConfig, step_bytes: int | None, limit_bytes: int | None
) -> str | None:
    """Returns a warning if XLA's estimate of a step exceeds a device's memory; None if not."""
    if step_bytes is None or limit_bytes is None or step_bytes <= limit_bytes:
        return None
    return (
        f"a step needs about {format_bytes(step_bytes)} of each device (XLA's estimate), which has "
        f"{format_bytes(limit_bytes)}. If it runs out of memory change one of these: "
        + "; ".join(_device_settings(config))
    )


def oom_message(config: RunConfig, error: Exception) -> str:
    """Returns the error message: the exhausted memory, and settings to change, with numbers.

    >>> from jaxres.config.schema.run_config import RunConfig, TrainSection
    >>> from jaxres.config.schema.data import DataSection, TextSource
    >>> data = DataSection(source=TextSource(path="x"))
    >>> small = RunConfig(data=data, train=TrainSection(steps=1, global_batch_size=24))
    >>> error = MemoryError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes")
    >>> print(oom_message(small, error))
    out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes
    Committed steps are kept. Change one of these and run the same command again:
      train.microbatches=2 (1 now: 24 rows of 256 tokens at a time)
      model.remat=block (none now: every activation is kept)
      mesh.fsdp=N with more devices (parameters and optimizer state are split over them)
    """
    first_line = re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__
    return (
        f"out of memory: {first_line}\n"
        "Committed steps are kept. Change one of these and run the same command again:\n"
        + "\n".join(f"  {setting}" for setting in _device_settings(config))
    )


def _device_settings(config: RunConfig) -> list[str]:
    """Returns the settings that make a step take less of a device, with numbers."""
    settings = []
    rows = config.train.global_batch_size // config.train.microbatches
    more = next((n for n in range(2, rows + 1) if rows % n == 0 and rows > 1), None)
    bound = config.train.max_rows_per_device
    if bound is not None and bound > 1:
        settings.append(f"train.max_rows_per_device={bound // 2} ({bound} now)")
    elif bound is None and more is not None:
        settings.append(
            f"train.microbatches={config.train.microbatches * more} "
            f"({config.train.microbatches} now: {rows} rows of {config.data.seq_len} tokens at a "
            "time)"
        )
    if config.model.kind == "gpt" and config.model.remat != "block":
        kept = {"none": "every activation is", "selective": "results of products are"}
        now = config.model.remat
        settings.append(f"model.remat=block ({now} now: {kept[now]} kept)")
    settings.append(
        "mesh.fsdp=N with more devices (parameters and optimizer state are split over them)"
    )
    return settings


def host_advice(config: RunConfig, reason: str) -> str:
    """Returns the error message after the kernel's OOM killer has killed the worker.

    >>> from jaxres.config.schema.run_config import RunConfig, TrainSection
    >>> from jaxres.config.schema.data import DataSection, TextSource
    >>> data = DataSection(source=TextSource(path="x"))
    >>> small = RunConfig(data=data, train=TrainSection(steps=1, global_batch_size=24))
    >>> print(host_advice(small, "killed"))
    killed
    Committed steps are kept. Change one of these and run the same command again:
      data.prefetch_batches=4 (8 now: batches of 24 rows in memory)
      a host with more memory (a save takes a second copy of the state)
    """
    now = config.data.prefetch_batches
    settings = []
    if now > 1:
        rows = config.train.global_batch_size
        settings.append(
            f"data.prefetch_batches={now // 2} ({now} now: batches of {rows} rows in memory)"
        )
    settings.append("a host with more memory (a save takes a second copy of the state)")
    return (
        f"{reason}\nCommitted steps are kept. Change one of these and run the same command again:"
        + "".join(f"\n  {setting}" for setting in settings)
    )
