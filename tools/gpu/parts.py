"""The parts of tools/gpu/check.py in their order, and digests of the code they depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEP = ("models", "engine", "train/compiled")
LOOP = (*STEP, "train", "data")
RUN = (*LOOP, "checkpoint", "runlog")
ENDS = ("train", "supervisor", "host")


@dataclass(frozen=True)
class Part:
    """One part of the check: the function of its name in a module."""

    name: str
    module: str
    minutes: float
    """Longest time on a GPU."""
    question: str
    code: tuple[str, ...] = ()
    """Folders of jaxres/ that decide its figures, besides its own module."""


PARTS = (
    Part(
        *("resume_bitwise", "tools.gpu.recovery", 4),
        "with `run.determinism=bitwise`: fails unless all bits are equal after kills",
        RUN,
    ),
    Part(
        *("saves", "tools.gpu.saves", 4),
        "`held_up_ms`: a save and the step after it, less that step; `copy_..._ms`: a plain copy "
        "to the host's memory; `save_s`: until the commit; steps beside a save; restores, digests",
        ("checkpoint", "storage"),
    ),
    Part(
        *("health", "tools.gpu.machine", 1),
        "by NVML and `nvidia-smi`: fails on uncorrected errors, rows to remap, slowed clocks",
    ),
    Part(
        *("variants", "tools.gpu.steps", 4),
        "a 124M model with other settings, divided by plain bfloat16",
        STEP,
    ),
    Part(
        *("host_time", "tools.gpu.training", 3),
        "jaxres's loop of a small model's steps, divided by a bare jitted loop",
        LOOP,
    ),
    Part(
        *("restart_large", "tools.gpu.recovery", 6),
        "from SIGKILL of a worker to the next step, with a state of 12 GiB, in a forked worker",
        (*RUN, "supervisor"),
    ),
    Part(
        *("allocator", "tools.gpu.training", 6),
        "the 1B model with JAX's allocator, and with `TF_GPU_ALLOCATOR=cuda_malloc_async`",
        LOOP,
    ),
    Part(
        *("environment", "tools.gpu.machine", 2),
        "versions, memory, links; copies, local disk",
    ),
    Part(*("quickstart", "tools.gpu.training", 3), "duration of a step", LOOP),
    Part(
        *("resume_fast", "tools.gpu.recovery", 4),
        "as `resume_bitwise`, without it; fails if bits differ and the guarantee is `bitwise`",
        RUN,
    ),
    Part(
        *("speed_124m", "tools.gpu.training", 3),
        "the largest batch of a list that fits, tokens per second, MFU; of a profile of 10 steps "
        "the slowest kernels, and `gap_share`, the time in which no kernel runs",
        LOOP,
    ),
    Part(*("speed_1b", "tools.gpu.training", 6), "the same for 1B parameters, rows of 2,048", LOOP),
    Part(
        *("step_path", "tools.gpu.training", 4),
        "jaxres's loop of larger models' steps, divided by a bare jitted loop",
        LOOP,
    ),
    Part(
        *("restart", "tools.gpu.recovery", 4),
        "from SIGKILL of a worker to the next step, in a fresh and in a forked worker",
        (*RUN, "supervisor"),
    ),
    Part(
        *("attention", "tools.gpu.kernels", 2),
        "cuDNN's attention, with a mask and with `is_causal`, against XLA's",
        ("models",),
    ),
    Part(
        *("determinism_cost", "tools.gpu.training", 3),
        "a step with `run.determinism=bitwise`, divided by one with `fast`",
        LOOP,
    ),
    Part(
        *("out_of_memory", "tools.gpu.recovery", 3),
        "fails unless a batch that does not fit ends with 86 and advice",
        ENDS,
    ),
    Part(
        *("hang", "tools.gpu.recovery", 3),
        "fails unless a host callback that never returns ends with 80 at its deadline",
        ENDS,
    ),
    Part(
        *("memory", "tools.gpu.steps", 2),
        "doctor's estimate, XLA's analysis, the device's peak",
        STEP,
    ),
    Part(
        *("bit_flip", "tools.gpu.recovery", 2),
        "fails unless `jaxres replay` computes another loss for the step with a flipped bit alone",
        (*LOOP, "jax_cli"),
    ),
)
"""What is still unknown comes first."""


def code_digest(part: Part, *, root: Path = ROOT) -> str:
    """Returns the digest of the source on which a part's figures depend."""
    paths = [root / f"{part.module.replace('.', '/')}.py", root / "tools/gpu/runs.py"]
    for folder in part.code:
        paths += (root / "jaxres" / folder).rglob("*.py")
    total = hashlib.sha256()
    for path in sorted(set(paths)):
        total.update(b"\0".join([str(path.relative_to(root)).encode(), path.read_bytes(), b""]))
    return total.hexdigest()[:12]


def unknown_names(names: Sequence[str], parts: Sequence[Part]) -> list[str]:
    """Returns the names that no part has."""
    return sorted(set(names) - {part.name for part in parts})
