"""Counts what a run in a bucket asks of it: per commit, per attempt, per hour; and its price.

    python tools/bench/bucket.py [LATENCY_SECONDS]

Against the emulated service of the tests, on which only the counts mean anything; with a latency it
tells, too, for how long saves hold training up. The model is the smallest there is: a large one
writes more files, of up to 2 GB each, and reads them back by 16 MiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.emulators.gcs import GcsServer  # noqa: E402

PRICES = {"A": 0.05 / 10_000, "B": 0.004 / 10_000}
"""Dollars a request, standard storage in one region."""
SAVE_EVERY = 20
BEAT_SECONDS, LOOK_SECONDS, FLUSH_SECONDS = 5.0, 2.5, 5.0
HOURS = 730
SETTINGS = (
    "model.kind=mlp",
    "optimizer.schedule.kind=constant",
    "evaluation.every_steps=0",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
)


def main(words: list[str]) -> int:
    """Measures and prints."""
    late = float(words[0]) if words else 0.0
    with tempfile.TemporaryDirectory() as folder, GcsServer(late_seconds=late) as server:
        _train(server, folder, "warm", 5 * SAVE_EVERY)
        short = _train(server, folder, "short", 5 * SAVE_EVERY)
        long = _train(server, folder, "long", 15 * SAVE_EVERY)
        again = _train(server, folder, "short", 6 * SAVE_EVERY)
        blocked = _blocked_seconds(server, folder)
    commit = {name: (long[name] - short[name]) / 10 for name in PRICES}
    fresh = {name: short[name] - 5 * commit[name] for name in PRICES}
    resumed = {name: again[name] - commit[name] for name in PRICES}
    hour = {
        "A": 3600 / BEAT_SECONDS + 2 * 3600 / FLUSH_SECONDS,
        "B": 3600 / BEAT_SECONDS + 2 * 3600 / LOOK_SECONDS,
    }
    print(f"{'':24}{'class A':>9}{'class B':>9}  dollars")
    for what, found in (("commit", commit), ("first attempt", fresh), ("resumed", resumed)):
        print(f"{what:24}{found['A']:9.0f}{found['B']:9.0f}  {_price(found):.6f}")
    print(f"{'hour, one writer':24}{hour['A']:9.0f}{hour['B']:9.0f}  {_price(hour):.6f}")
    month = HOURS * (_price(hour) + 6 * _price(commit))
    print(f"a month with a commit every 10 minutes: {month:.2f} dollars, without what is stored")
    print(f"a save has held training up for {1000 * blocked:.0f} ms (median) at {late} s latency")
    return 0


def _train(server: GcsServer, folder: str, name: str, steps: int) -> Counter[str]:
    before = Counter(server.counts)
    words = [f"run.dir=gs://bucket/{name}", f"train.steps={steps}", *SETTINGS]
    words += [f"data.cache_dir={folder}/data", f"compilation.cache_dir={folder}/xla"]
    command = [sys.executable, "-m", "jaxres.train", "tests/promises/tiny.yaml", *words]
    env = {**os.environ, **server.env, "HOME": folder}
    subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Counter(server.counts) - before


def _blocked_seconds(server: GcsServer, folder: str) -> float:
    """Returns for how long the call of a save has held the loop, the median of the long run."""
    rows = b"".join(server.body(name) for name in server.names("long/attempts/0001/events-host000"))
    events = [json.loads(row) for row in rows.splitlines()]
    found = sorted(e["blocked_seconds"] for e in events if e["event"] == "SaveStarted")
    return found[len(found) // 2]


def _price(found: Mapping[str, float]) -> float:
    return sum(found[name] * price for name, price in PRICES.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
