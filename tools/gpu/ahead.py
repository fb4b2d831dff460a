"""Compiles a train step for several GPUs on a machine without one, and counts its collectives.

    python tools/gpu/ahead.py CONFIG [KEY=VALUE ...] --plugin FOLDER [--devices 8]

XLA compiles for the device that tools/gpu/h100.txt describes; nothing is executed. FOLDER holds
jax-cuda12-plugin, jax-cuda12-pjrt (of the installed jax) and nvidia-cuda-nvcc-cu12, as `pip install
--no-deps --target FOLDER` leaves them. There is no cuDNN (set model.attention=xla), and no kernel
is timed. The output is JSON: for each kind of collective their number, their MB, and how many MB
are hidden: a product of matrices is scheduled between start and end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge  # No public function registers a plugin without its device.
from jax.experimental import topologies
from jaxlib import xla_client

from jaxres import config as configs
from jaxres import data
from jaxres.engine import mesh as meshes
from jaxres.engine import mesh_plan
from jaxres.train.compiled import assemble, jitted_steps, xla_options

DEVICE = Path(__file__).with_name("h100.txt")
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
START = re.compile(rf"%(\S+) = (.*?) (?:{'|'.join(KINDS)})-start\(")
DONE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})-done\(%([\w.\-]+)\)")
LOOP = re.compile(r"body=%([\w.\-]+).*?known_trip_count\":\{\"n\":\"(\d+)\"")
COMPUTATION = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(")
PRODUCT = re.compile(r" = .*(?:fusion|custom-call)\(.*(?:gemm|cublas|dot_general)")
ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")


def main(arguments: list[str]) -> None:
    """Compiles the step and prints its collectives."""
    parser = argparse.ArgumentParser(prog="tools/gpu/ahead.py", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--plugin", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--text", type=Path, help="where the scheduled program is written")
    options = parser.parse_intermixed_args(arguments)
    step = compiled(options.config, options.overrides, devices(options.plugin, options.devices))
    if options.text is not None:
        options.text.write_text(step.as_text())
    memory = step.memory_analysis()
    found = collectives(step.as_text())
    print(json.dumps({**found, "temporary_MB": memory.temp_size_in_bytes / 1e6}, indent=1))


def devices(plugin: Path, number: int) -> list[Any]:
    """Returns absent GPUs of one host."""
    os.environ["PATH"] = f"{plugin / 'nvidia/cuda_nvcc/bin'}{os.pathsep}{os.environ['PATH']}"
    library = plugin / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    xla_bridge.register_plugin("cuda", library_path=str(library), priority=1)
    xla_client.initialize_pjrt_plugin("cuda")
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=DEVICE.read_text(),
        topology=f"1x1x{number}",
    )
    return list(topology.devices)


def compiled(path: Path, overrides: list[str], found: list[Any]) -> Any:
    """Returns the compiled train step of a config."""
    config = configs.load(path, overrides).config
    dataset = data.open_dataset(config.data)
    plan = mesh_plan.plan(config.mesh, config.train, config.model, num_devices=len(found))
    mesh = meshes.build(config.mesh, devices=found)
    parts = assemble.components(config, dataset, plan=plan, mesh=mesh, platform="gpu")
    options = xla_options.choose(config.compilation, xla_options.profile_of(parts), flags="")
    return xla_options.compile_with(jitted_steps.traced_step(parts).lower(), options)


def collectives(text: str) -> dict[str, dict[str, float]]:
    """Returns the collectives of a scheduled program by kind, those in a loop once for each pass.

    Their number and MB, and the MB that a product of matrices may hide: one is scheduled between
    start and end.
    """
    passes = {loop[1]: int(loop[2]) for loop in LOOP.finditer(text)}
    begun: dict[str, list[float]] = {}
    found: dict[str, dict[str, float]] = {}
    times = 1
    for line in text.splitlines():
        if computation := COMPUTATION.match(line):
            times = passes.get(computation[1], 1)
        if start := START.search(line):
            begun[start[1]] = [_megabytes(start[2]), 0]
        elif (done := DONE.search(line)) and done[3] in begun:
            (whole, products), results = begun.pop(done[3]), _megabytes(done[1])
            total = found.setdefault(done[2], {"number": 0, "MB": 0.0, "hidden_MB": 0.0})
            size = max(results, whole - results)  # A start has its operands too, but for one kind.
            total["number"] += times
            total["MB"] += times * size
            total["hidden_MB"] += times * size if products else 0
        elif PRODUCT.search(line):
            for each in begun.values():
                each[1] += 1
    return found


def _megabytes(shapes: str) -> float:
    """Returns the size of all arrays in a text.

    >>> _megabytes("(bf16[1000,500]{1,0}, pred[8]{0})")
    1.000008
    """
    return (
        sum(
            math.prod(int(size) for size in dims.split(",") if size)
            * max(1, int(re.sub(r"\D", "", kind.removeprefix("b")) or 8) // 8)
            for kind, dims in ARRAY.findall(shapes)
        )
        / 1e6
    )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
