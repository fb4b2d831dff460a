"""Counts the requests of a run to its bucket: per commit, attempt and hour; and their price.

    python tools/bench/bucket.py               counts; prices by --class-a, --class-b, for 10,000
    python tools/bench/bucket.py --late 0.05   how long saves delay training, compared with a disk
    python tools/bench/bucket.py --late 0.05 --bandwidth 25e6   saves and restores against a limit

Runs against the emulated service of the tests, so only counts are meaningful, and of the times only
those that do not depend on the service: the call of a save, and transfers that a limit of the
bandwidth (the same in both directions) slows down far below what this machine can do. The model is
the smallest one: a large one writes more files and reads them back in parts of 16 MiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from jaxres.runlog.event_log import read_events  # noqa: E402
from jaxres.runlog.paths import RunDir  # noqa: E402
from jaxres.storage.path import parse_path  # noqa: E402
from jaxres_emulators.gcs import GcsServer  # noqa: E402

CLASSES = {"A": 0.05, "B": 0.004}
"""Dollars for 10,000 requests, standard storage in us-east1, from Google's example:
https://cloud.google.com/storage/pricing-examples
"""
ROUNDS = 4
"""Rounds of a run on a disk and one in the bucket, in turns."""
AIM_MS = 50
SAVE_EVERY = 20
HEARTBEAT_SECONDS, POLL_SECONDS, FLUSH_SECONDS = 5.0, 2.5, 5.0
HOURS = 730
SETTINGS = (
    "model.kind=mlp",
    "optimizer.schedule.kind=constant",
    "evaluation.every_steps=0",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
)


def main(arguments: list[str]) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="bucket.py")
    parser.add_argument("--late", type=float, help="seconds that each answer takes")
    for name, dollars in CLASSES.items():
        flag = f"--class-{name.lower()}"
        parser.add_argument(flag, dest=name, type=float, default=dollars, help="dollars for 10,000")
    parser.add_argument("--bandwidth", type=float, help="bytes in a second, in each direction")
    parser.add_argument("--megabytes", type=float, default=256, help="of the state that is saved")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, GcsServer(late_seconds=given.late or 0) as server:
        os.environ.update(server.env)
        if given.bandwidth is not None:
            _against_a_limit(server, given.bandwidth, megabytes=given.megabytes)
        elif given.late is not None:
            _side_by_side(server, folder)
        else:
            _count(server, folder, {name: getattr(given, name) / 10_000 for name in CLASSES})
    return 0


def _count(server: GcsServer, folder: str, prices: Mapping[str, float]) -> None:
    _train(server, folder, "gs://bucket/warm", 5 * SAVE_EVERY)
    short = _train(server, folder, "gs://bucket/short", 5 * SAVE_EVERY)
    long = _train(server, folder, "gs://bucket/long", 15 * SAVE_EVERY)
    again = _train(server, folder, "gs://bucket/short", 6 * SAVE_EVERY)
    commit = {name: (long[name] - short[name]) / 10 for name in prices}
    fresh = {name: short[name] - 5 * commit[name] for name in prices}
    resumed = {name: again[name] - commit[name] for name in prices}
    hour = {
        "A": 3600 / HEARTBEAT_SECONDS + 2 * 3600 / FLUSH_SECONDS,
        "B": 3600 / HEARTBEAT_SECONDS + 2 * 3600 / POLL_SECONDS,
    }

    def price(found: Mapping[str, float]) -> float:
        return sum(found[name] * dollars for name, dollars in prices.items())

    print(f"{'':24}{'class A':>9}{'class B':>9}  dollars")
    for what, found in (("commit", commit), ("first attempt", fresh), ("resumed", resumed)):
        print(f"{what:24}{found['A']:9.0f}{found['B']:9.0f}  {price(found):.6f}")
    print(f"{'hour, one writer':24}{hour['A']:9.0f}{hour['B']:9.0f}  {price(hour):.6f}")
    month = HOURS * (price(hour) + 6 * price(commit))
    print(f"a month with a commit every 10 minutes: {month:.2f} dollars, without what is stored")


def _side_by_side(server: GcsServer, folder: str) -> None:
    """Runs on a disk and in the bucket in turns; prints the durations of the calls of saves."""
    roots = {"disk": f"{folder}/runs", "bucket": "gs://bucket/runs"}
    blocked: dict[str, list[float]] = {name: [] for name in roots}
    for number in range(ROUNDS):
        for name, root in roots.items():
            run_dir = RunDir(parse_path(f"{root}/{number}"))
            _train(server, folder, str(run_dir.root), 15 * SAVE_EVERY)
            events = read_events(run_dir.events(1, 0))
            found = [e["blocked_seconds"] for e in events if e["event"] == "save_started"]
            if number:  # The first pair only warms up.
                blocked[name] += found[1:]
    middle = {name: 1000 * statistics.median(found) for name, found in blocked.items()}
    for name, found in blocked.items():
        deciles = statistics.quantiles(found, n=10)
        print(
            f"{name:8} {len(found)} saves: training held up for {middle[name]:.1f} ms (median), "
            f"{1000 * deciles[8]:.1f} ms (one in ten is longer)"
        )
    more = middle["bucket"] - middle["disk"]
    says = "held" if more <= AIM_MS else "MISSED"
    ratio = middle["bucket"] / middle["disk"]
    late = 1000 * server.late_seconds
    print(
        f"at {late:.0f} ms latency: {more:+.1f} ms, {ratio:.2f} times; aim of +{AIM_MS} ms: {says}"
    )


def _against_a_limit(server: GcsServer, limit: float, *, megabytes: float) -> None:
    """Saves a state by both writers and restores it in turns; prints the rates and the limit."""
    import jax

    from jaxres.checkpoint.restore.restore import restore
    from tools.bench import checkpoint

    make = checkpoint.make_arrays(number=24, gigabytes=megabytes / 1000)
    size = sum(array.nbytes for array in jax.tree.leaves(make()))
    for bandwidth in (server.sent, server.received):
        bandwidth.bytes_per_second = limit
    seconds: dict[str, list[float]] = {"restore": []}
    for number in range(ROUNDS):
        for writer in ("orbax", "tensorstore"):
            found = seconds.setdefault(f"save, {writer}", [])
            root = parse_path(f"gs://bucket/{writer}/{number}")
            saved = checkpoint.commit_step(root, make(), writer=writer, note=found.append)
        step_dir, commit, like = saved
        begun = time.perf_counter()
        jax.block_until_ready(restore(step_dir, commit, like).state)
        seconds["restore"].append(time.perf_counter() - begun)
    rates = {name: [size / each for each in found] for name, found in seconds.items()}
    for name, found in rates.items():
        ratio = statistics.median(found) / limit
        print(f"{name:18} {size / 1e6:.0f} MB, {len(found)} times: {ratio:.2f} of {limit:.3g} B/s")


def _train(server: GcsServer, folder: str, run_dir: str, steps: int) -> Counter[str]:
    before = Counter(server.counts)
    overrides = [f"run.dir={run_dir}", f"train.steps={steps}", *SETTINGS]
    overrides += [f"data.cache_dir={folder}/data", f"compilation.cache_dir={folder}/xla"]
    command = [sys.executable, "-m", "jaxres.train", "tests/promises/tiny.yaml", *overrides]
    env = {**os.environ, **server.env, "HOME": folder}
    subprocess.run(command, env=env, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return Counter(server.counts) - before


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
