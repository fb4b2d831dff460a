"""Summary of a profile by jax.profiler: the kernels that take most time, and idle time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tools.gpu.runs import Figures

TOP = 6
NAME_CHARACTERS = 48
NOT_READABLE = "not measured: "


@dataclass(frozen=True)
class Span:
    """One kernel in the profile; times in nanoseconds."""

    name: str
    start: float
    end: float


class Profiler:
    """A profile of this process, from its creation to `stop`."""

    def __init__(self, folder: Path) -> None:
        """Starts the profile, whose files are written to a folder."""
        self._folder = folder
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1 if jax.default_backend() == "gpu" else 2
        jax.profiler.start_trace(str(folder), profiler_options=options)

    def stop(self) -> None:
        """Ends the profile and writes the files."""
        jax.profiler.stop_trace()

    def summary(self, *, steps: int) -> Figures:
        """Returns the summary of `steps` steps, or why there is none."""
        files = sorted(self._folder.rglob("*.xplane.pb"))
        if not files:
            return {"profile": f"{NOT_READABLE}the profiler has written no xplane.pb"}
        planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
        found = kernels(planes, platform=jax.default_backend())
        if not found:
            names = ", ".join(plane.name for plane in planes)
            return {"profile": f"{NOT_READABLE}no kernels in the planes {names}"}
        return summary(found, steps=steps)


def kernels(planes: Iterable[Any], *, platform: str) -> list[Span]:
    """Returns the kernels of the first GPU without copies, or of XLA's threads on a CPU."""
    own, prefix = ("/device:GPU:0", "Stream") if platform == "gpu" else ("/host:CPU", "tf_XLA")
    events = [
        event
        for plane in planes
        if plane.name.startswith(own)
        for line in plane.lines
        if line.name.startswith(prefix)
        for event in line.events
        if event.duration_ns > 0
    ]
    is_kernel = _is_gpu_kernel if platform == "gpu" else _is_cpu_kernel
    return [
        Span(event.name, event.start_ns, event.start_ns + event.duration_ns)
        for event in events
        if is_kernel(event.name)
    ]


def _is_gpu_kernel(name: str) -> bool:
    return not name.lower().startswith(("memcpy", "memset"))


def _is_cpu_kernel(name: str) -> bool:
    return "::" not in name  # The others are functions of the runtime.


def summary(found: list[Span], *, steps: int) -> Figures:
    """Returns shares of the time, and gaps: times when no stream computes.

    >>> found = [Span("gemm.1", 0, 60e3), Span("gemm.2", 50e3, 80e3), Span("add", 90e3, 100e3)]
    >>> summary(found, steps=2)["top_kernels"]
    'gemm 90 %, add 10 %'
    >>> summary(found, steps=2)["gap_share"], summary(found, steps=2)["gap_us_per_step"]
    (0.1, 5.0)
    """
    by_name: dict[str, float] = {}
    for span in found:
        name = re.sub(r"([._]\d+)+$", "", span.name.removeprefix("void "))[:NAME_CHARACTERS]
        by_name[name] = by_name.get(name, 0.0) + span.end - span.start
    total = sum(by_name.values())
    top = sorted(by_name.items(), key=lambda item: -item[1])[:TOP]
    gaps, until = 0.0, min(span.start for span in found)
    begun = until
    for span in sorted(found, key=lambda span: span.start):
        gaps += max(0.0, span.start - until)
        until = max(until, span.end)
    return {
        "top_kernels": ", ".join(f"{name} {100 * taken / total:.0f} %" for name, taken in top),
        "kernels_per_step": len(found) / steps,
        "gap_share": gaps / (until - begun),
        "gap_us_per_step": gaps / 1e3 / steps,
    }
