"""In a real run the first execution of each program is alone on the devices (engine/device_use.py).

The run is one of its own process, in which the lock and the placing of batches tell who uses them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.promises.trainer import ROOT, TINY
from tests.waiting import SURE_SECONDS

RUN = """
import json, sys, threading

import jaxres
from jaxres.engine import device_use, mesh


class Recorded:
    def __init__(self):
        self.lock, self.holders = threading.Lock(), []

    def __enter__(self):
        self.lock.acquire()
        self.holders.append(threading.current_thread().name)

    def __exit__(self, *_):
        self.lock.release()


lock, placed, place = Recorded(), [], mesh.place_batch


def place_batch(*arguments, **settings):
    is_prefetch = threading.current_thread().name == "jaxres-prefetch"
    placed.append((is_prefetch, is_prefetch and lock.lock.locked() and lock.holders[-1]))
    return place(*arguments, **settings)


device_use._in_use, mesh.place_batch = lock, place_batch
run = jaxres.train(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps({"steps": run.steps, "holders": lock.holders, "placed": placed}))
"""


@pytest.mark.slow
def test_programs_and_batches_take_turns_in_a_run(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path}/run", "train.steps=8", "evaluation.every_steps=4"]
    overrides += ["compilation.keep_programs=0", "telemetry.sample_tokens=0"]
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(TINY), json.dumps(overrides)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SURE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["steps"] == [8]
    ahead = [holder for is_prefetch, holder in found["placed"] if is_prefetch]
    assert len(ahead) >= 8
    assert set(ahead) == {"jaxres-prefetch"}, "a batch was placed beside a first execution"
    others = [name for name in found["holders"] if name != "jaxres-prefetch"]
    assert others == ["MainThread"] * 2, "the train step and the evaluation, each once"
