"""How many bytes each host writes of a checkpoint, with a sharded and with a replicated state.

    python -m tools.experiments.sharded_or_full

Exits 1 if four hosts with a sharded state do not write a quarter each, to 10 %, or if a checkpoint
of several hosts is more than 10 % larger than that of one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tools.experiments import plans
from tools.experiments.training_process import ROOT, TIMEOUT_SECONDS

CONFIG = ROOT / "experiments" / "sharded_or_full" / "run.yaml"
MESHES = {"sharded (fsdp)": "mesh.fsdp=-1", "replicated (data)": "mesh.data=-1"}
HOSTS = (1, 2, 4)
TOLERANCE = 0.1


def written(folder: Path, *, mesh: str, hosts: int) -> dict[str, Any]:
    """Trains 4 steps and returns the bytes of array data by host, and of all other files."""
    run_dir = folder / f"{hosts}-{mesh.partition('=')[0]}"
    command = [sys.executable, "-m", "jaxres.launch", "local", str(CONFIG), f"run.dir={run_dir}"]
    command += [mesh, "--hosts", str(hosts), "--devices-per-host", "1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=4 * TIMEOUT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}:\n{done.stdout}{done.stderr}")
    (step_dir,) = (run_dir / "checkpoints").iterdir()
    by_host: Counter[str] = Counter()
    others = 0
    for path in step_dir.rglob("*"):
        if not path.is_file():
            continue
        folder_name = path.relative_to(step_dir).parts[1:2]
        size = path.stat().st_size
        if folder_name and folder_name[0].startswith("ocdbt.process_"):
            host = folder_name[0].removeprefix("ocdbt.process_").partition(".")[0]
            by_host[host] += size
        else:
            others += size
    sizes = [by_host[str(host)] for host in range(hosts)]
    return {"bytes_by_host": sizes, "bytes_of_arrays": sum(sizes), "bytes_of_the_rest": others}


def result() -> dict[str, Any]:
    """Returns the bytes that each host writes, by mesh and number of hosts."""
    with tempfile.TemporaryDirectory(prefix="jaxres-experiment-") as name:
        found = {
            mesh: {str(n): written(Path(name), mesh=flag, hosts=n) for n in HOSTS}
            for mesh, flag in MESHES.items()
        }
    sharded = found["sharded (fsdp)"]
    one = sharded["1"]["bytes_of_arrays"]
    quarters = [size / one for size in sharded["4"]["bytes_by_host"]]
    most = max(own["bytes_of_arrays"] for by_hosts in found.values() for own in by_hosts.values())
    holds = max(quarters) <= (1 + TOLERANCE) / 4 and most <= (1 + TOLERANCE) * one
    return {
        "claim": "of a sharded state each of 4 hosts writes a quarter; a checkpoint has each byte "
        "once",
        "holds": holds,
        "written": found,
    }


if __name__ == "__main__":
    sys.exit(plans.write("sharded_or_full", result()))
