"""Cost of asynchronous and synchronous saves with a slow store, in one run.

    python -m tools.experiments.checkpoint_overhead

A step sleeps for 0.1 s and the store, an emulated bucket, moves 2 MB/s, so that the speed of this
machine decides little. Training waits for the commit of every second save. Exits 1 if the others
hold it up for more than a tenth of the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.experiments import plans
from tools.experiments.training_process import ROOT, TIMEOUT_SECONDS, jaxres

CONFIG = ROOT / "experiments" / "checkpoint_overhead" / "run.yaml"
BUCKET = "overhead"
STEP_SECONDS, STEPS, EVERY_STEPS = 0.1, 240, 60
BYTES_PER_SECOND = 2e6
BOUND = 0.1
SCRATCH = Path("~/.cache/jaxres/runs")
"""Where a run in a bucket has its local files."""
HOOK = "tools.experiments.checkpoint_overhead:wait_for_commit"
POLL_SECONDS = 0.2
RUN_SECONDS = 6 * TIMEOUT_SECONDS


def wait_for_commit(run: Any) -> None:
    """Hook after each step: waits for a commit after every second save, and before the next one."""
    last = run.step // EVERY_STEPS * EVERY_STEPS
    after = 1 if last % (2 * EVERY_STEPS) == 0 else EVERY_STEPS - 1
    # A hook is called before the save of its step.
    while last and run.step == last + after and not is_committed(str(run.run_dir), last):
        time.sleep(POLL_SECONDS)


def is_committed(run_dir: str, step: int) -> bool:
    """Returns whether the log of a run in the bucket has the commit of a step."""
    prefix = run_dir.removeprefix(f"gs://{BUCKET}/") + "/log/"
    names = [item["name"] for item in json.loads(requested(f"?prefix={prefix}")).get("items", [])]
    records = (requested(f"/{name.replace('/', '%2F')}?alt=media") for name in sorted(names)[-2:])
    return any(
        record["kind"] == "commit" and record["step"] == step for record in map(json.loads, records)
    )


def requested(words: str) -> bytes:
    """Returns the emulated bucket's response to a GET request."""
    url = f"{os.environ['STORAGE_EMULATOR_HOST']}/storage/v1/b/{BUCKET}/o{words}"
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
        return answer.read()


@contextlib.contextmanager
def slow_bucket() -> Iterator[dict[str, str]]:
    """Serves the emulated bucket; yields the environment variables of its clients."""
    command = [sys.executable, "-m", "jaxres_emulators.gcs", "--bucket", BUCKET]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            found: dict[str, str] = {}
            while match := re.fullmatch(r"export (\w+)=(.*)\n", server.stdout.readline()):
                found[match[1]] = match[2]
            limits = json.dumps({"bytes_per_second": BYTES_PER_SECOND}).encode()
            url = f"{found['STORAGE_EMULATOR_HOST']}/emulator/limits"
            urllib.request.urlopen(url, data=limits, timeout=TIMEOUT_SECONDS).close()
            yield found
        finally:
            server.terminate()


def trained(cache: Path) -> dict[str, Any]:
    """Trains a run to its end; returns its ledger."""
    run_dir = f"gs://{BUCKET}/{cache.name}"
    hook = {"target": HOOK, "every_steps": 1, "timeout_seconds": RUN_SECONDS}
    words = [str(CONFIG), f"run.dir={run_dir}", f"checkpoint.save_every_steps={EVERY_STEPS}"]
    words += [f"data.cache_dir={cache}", f"compilation.cache_dir={cache / 'xla'}"]
    words += [f"hooks={json.dumps([hook])}"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxres.train", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}:\n{done.stdout}{done.stderr}")
    ledger = json.loads(jaxres("report", run_dir, "--json"))
    shutil.rmtree(SCRATCH.expanduser() / f"{BUCKET}+{cache.name}", ignore_errors=True)
    return ledger


def windows(ledger: dict[str, Any]) -> list[dict[str, float]]:
    """Returns the seconds of the training before the first save, and after each of them.

    `wait` is the first call of the hook, in which a synchronous save is waited for.
    """
    found, trains = [empty()], False
    for own in ledger["intervals"]:
        name, seconds = own["activity"], own["end"] - own["start"]
        if name == "save_stall" and trains:
            found.append(empty())
        trains = name != "save_stall" and (trains or name == "productive")
        if name in found[-1]:
            found[-1][name] += seconds
        if name == "hook" and not found[-1]["wait"]:
            found[-1]["wait"] = seconds
    return found


def empty() -> dict[str, float]:
    """Returns the classes of a window, without any time."""
    return {"productive": 0.0, "save_stall": 0.0, "wait": 0.0}


def result() -> dict[str, Any]:
    """Trains and compares the saves."""
    with tempfile.TemporaryDirectory(prefix="jaxres-experiment-") as name, slow_bucket() as found:
        os.environ |= {**found, "STEP_SECONDS": str(STEP_SECONDS)}
        ledger = trained(Path(name))
    before, *rows = windows(ledger)[: STEPS // EVERY_STEPS]
    modes = {"asynchronous": rows[0::2], "synchronous": rows[1::2]}
    stalls = {
        mode: statistics.mean(own["save_stall"] + own["wait"] for own in found)
        for mode, found in modes.items()
    }
    return {
        "claim": "asynchronous saves hold up training for at most a tenth of synchronous ones",
        "holds": stalls["asynchronous"] <= BOUND * stalls["synchronous"],
        "stall_seconds_of_a_save": plans.rounded(stalls),
        "step_seconds": STEP_SECONDS,
        "every_steps": EVERY_STEPS,
        "bytes_per_second": BYTES_PER_SECOND,
        "before_the_first_save": plans.rounded(before),
        "after_each_save": plans.rounded(modes),
    }


if __name__ == "__main__":
    sys.exit(plans.write("checkpoint_overhead", result()))
