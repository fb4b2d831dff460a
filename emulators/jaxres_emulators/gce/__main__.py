"""`python -m jaxres_emulators.gce`: serves a project until it is interrupted, and a bucket.

VMs have the environment of the emulator. So that they reach the bucket, one command starts both.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from types import FrameType

from jaxres_emulators.gce.emulator import ACTIONS, GceEmulator
from jaxres_emulators.gce.server import API, CONTROL
from jaxres_emulators.gcs import GcsServer


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxres_emulators.gce")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--project", default="emulated")
    parser.add_argument("--speed", type=float, default=1.0, help="all delays are divided by it")
    parser.add_argument("--simulated", action="store_true", help="VMs without processes")
    parser.add_argument("--bucket", help="also serves this bucket, which VMs can reach")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    with contextlib.ExitStack() as stack:
        bucket: dict[str, str] = {}
        if options.bucket is not None:
            bucket = stack.enter_context(GcsServer(buckets=(options.bucket,))).env
        gce = stack.enter_context(
            GceEmulator(
                project=options.project,
                port=options.port,
                speed=options.speed,
                is_simulated=options.simulated,
                env=bucket,
            )
        )
        over = f"CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE={gce.url}{API}/"
        lines = [
            *(f"export {name}={value}" for name, value in {**gce.env, **bucket}.items()),
            f"# folders of VMs: {gce.root}",
            f"# gcloud: {over} CLOUDSDK_AUTH_DISABLE_CREDENTIALS=true gcloud compute ...",
            f"# what there is: curl {gce.url}{CONTROL}state",
            f"""# faults: curl -d '{{"name": "NAME"}}' {gce.url}{CONTROL}preempt""",
            f"# or one of: {', '.join(ACTIONS)}",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
