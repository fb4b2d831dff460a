"""Home of: out_of_memory. What a runtime's error says, and which settings to change."""

from __future__ import annotations

import re
from pathlib import Path

from jaxres.config import RunConfig
from jaxres.faults import ConfigError
from jaxres.telemetry.stdio import size


def is_exhausted(error: Exception) -> bool:
    """Says whether an error means that memory ran out, on a device or on the host."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def refuse_large_state(state_bytes: int, limit_bytes: int | None) -> None:
    """Refuses a state that alone exceeds a device, which is known before the run.

    Raises:
      ConfigError: it does.
    """
    if limit_bytes is None or state_bytes <= limit_bytes:
        return
    raise ConfigError(
        f"parameters and optimizer state take {size(state_bytes)} of each device, which has "
        f"{size(limit_bytes)}. Split them over {state_bytes / limit_bytes:.1f} times as many "
        "devices or more (mesh.fsdp, then mesh.tensor), or choose a smaller model "
        "(`jaxres doctor CONFIG --devices N` tells what N devices would hold)"
    )


def small_host(
    snapshot: int, held_bytes: int, *, meminfo: Path = Path("/proc/meminfo")
) -> str | None:
    """Returns a warning where this host's free memory can't take a save; None where it can.

    One save is in flight at a time, so it takes one more copy of what this host's devices hold: on
    CPU the old buffers, which the next step then can't reuse, elsewhere what is copied to the host.
    Arrays that several devices hold may be there once, so it may take less.

    Args:
      snapshot: what a save takes at most.
      held_bytes: what the state takes of the same memory, on CPU.
      meminfo: the kernel's word on it.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if found is None or int(found[1]) * 1024 >= snapshot + held_bytes:
        return None
    return (
        f"a save takes up to {size(snapshot)} of this host's memory until it is committed"
        f"{f', beside {size(held_bytes)} of state' if held_bytes else ''}; "
        f"{size(int(found[1]) * 1024)} are available. Free some, or split the state over more "
        "hosts (mesh.fsdp)"
    )


def large_step(config: RunConfig, step_bytes: int | None, limit_bytes: int | None) -> str | None:
    """Returns a warning where XLA's estimate of a step exceeds a device; None where it does not."""
    if step_bytes is None or limit_bytes is None or step_bytes <= limit_bytes:
        return None
    return (
        f"a step needs about {size(step_bytes)} of each device (XLA's estimate), which has "
        f"{size(limit_bytes)}. If it runs out of memory change one of these: "
        + "; ".join(_device_settings(config))
    )


def advice(config: RunConfig, error: Exception) -> str:
    """Returns the end's message: what ran out, and the settings to change, with numbers.

    >>> from jaxres.config.schema import RunConfig, DataSection, TextSource, TrainSection
    >>> data = DataSection(source=TextSource(path="x"))
    >>> small = RunConfig(data=data, train=TrainSection(steps=1, global_batch_size=24))
    >>> print(advice(small, MemoryError("RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes")))
    out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 64 bytes
    What is committed stays. Change one of these and start the same command again:
      train.microbatches=2 (1 now: 24 rows of 256 tokens at a time)
      model.remat=block (none now: every activation is kept)
      mesh.fsdp=N with more devices (parameters and optimizer state are split over them)
    """
    first_line = re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__
    return (
        f"out of memory: {first_line}\n"
        "What is committed stays. Change one of these and start the same command again:\n"
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
    if config.model.kind == "gpt" and config.model.remat == "none":
        settings.append("model.remat=block (none now: every activation is kept)")
    settings.append(
        "mesh.fsdp=N with more devices (parameters and optimizer state are split over them)"
    )
    return settings


def host_advice(config: RunConfig, reason: str) -> str:
    """Returns the end's message after the kernel has killed the worker for want of host memory.

    >>> from jaxres.config.schema import RunConfig, DataSection, TextSource, TrainSection
    >>> data = DataSection(source=TextSource(path="x"))
    >>> small = RunConfig(data=data, train=TrainSection(steps=1, global_batch_size=24))
    >>> print(host_advice(small, "killed"))
    killed
    What is committed stays. Change one of these and start the same command again:
      data.prefetch_batches=4 (8 now: batches of 24 rows that wait in memory)
      a host with more memory (while a checkpoint is written the state is there twice)
    """
    now = config.data.prefetch_batches
    settings = []
    if now > 1:
        rows = config.train.global_batch_size
        settings.append(
            f"data.prefetch_batches={now // 2} ({now} now: batches of {rows} rows that wait in "
            "memory)"
        )
    settings.append(
        "a host with more memory (while a checkpoint is written the state is there twice)"
    )
    return (
        f"{reason}\nWhat is committed stays. Change one of these and start the same command again:"
        + "".join(f"\n  {setting}" for setting in settings)
    )
