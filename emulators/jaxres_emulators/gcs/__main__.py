"""`python -m jaxres_emulators.gcs`: serves a bucket until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys

from jaxres_emulators.gcs.server import CONTROL, GcsServer


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m jaxres_emulators.gcs")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", default="bucket", help="made at the start; default: bucket")
    options = parser.parse_args()
    with GcsServer(port=options.port, buckets=(options.bucket,)) as server:
        for name, value in server.env.items():
            _say(f"export {name}={value}")
        _say(f"# then run.dir=gs://{options.bucket}/my-run; faults, and how often was asked:")
        storm = """-d '{"kind": "503", "probability": 0.2, "times": null, "seconds": 60}'"""
        _say(f"# curl {storm} {server.url}{CONTROL}faults; curl {server.url}{CONTROL}counts")
        limits = """-d '{"late_seconds": 0.05, "bytes_per_second": 1e8}'"""
        _say(f"# curl {limits} {server.url}{CONTROL}limits")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                signal.pause()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
