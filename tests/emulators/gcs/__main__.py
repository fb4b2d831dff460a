"""`python -m tests.emulators.gcs`: serves a bucket until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import time

from tests.emulators.gcs.server import CONTROL, GcsServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.gcs")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", default="bucket", help="made at the start; default: bucket")
    options = parser.parse_args()
    with GcsServer(port=options.port, buckets=(options.bucket,)) as server:
        for name, value in server.env.items():
            print(f"export {name}={value}")
        print(f"# then run.dir=gs://{options.bucket}/my-run; faults, and how often was asked:")
        storm = """-d '{"kind": "503", "probability": 0.2, "times": null, "seconds": 60}'"""
        print(f"# curl {storm} {server.url}{CONTROL}faults; curl {server.url}{CONTROL}counts")
        limits = """-d '{"late_seconds": 0.05, "bytes_per_second": 1e8}'"""
        print(f"# curl {limits} {server.url}{CONTROL}limits")
        print("", end="", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
