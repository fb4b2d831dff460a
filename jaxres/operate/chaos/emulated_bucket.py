"""A bucket on loopback for one run with faults, by the Cloud Storage of `jaxres_emulators`."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxres.config import RunConfig
from jaxres.operate.chaos import emulators
from jaxres.operate.chaos.short_runs import Runner
from jaxres.runlog.paths import RunDir
from jaxres.storage import gcs_client
from jaxres.storage.path import GcsPath
from jaxres.train.chaos_hooks import break_hook

if TYPE_CHECKING:
    from jaxres_emulators.gcs import GcsServer

PACKAGES = ("google.cloud.storage", "gcsfs", "google_crc32c")


@contextlib.contextmanager
def emulated_bucket(runner: Runner, name: str) -> Iterator[tuple[Runner, GcsServer]]:
    """Yields a runner whose runs are in an empty bucket, and the service.

    Args:
      name: of the run; its files outside the bucket are deleted at the end.
    """
    from jaxres_emulators.environment import environment
    from jaxres_emulators.gcs import GcsServer

    bucket = GcsPath(f"jaxres-chaos-{secrets.token_hex(4)}", "")
    with GcsServer(buckets=(bucket.bucket,)) as server, environment(server.env):
        there = dataclasses.replace(runner, env={**runner.env, **server.env}, bucket=bucket)
        root = there.run_dir(name).root
        try:
            yield there, server
        finally:
            there.stop()
            gcs_client.close()
            for folder in (RunDir(root).local, break_hook.folder_of(root)):
                shutil.rmtree(folder, ignore_errors=True)


def why_not(config: RunConfig) -> str:
    """Returns why a config has no run in an emulated bucket; empty: it can have one."""
    missing = [name for name in PACKAGES if not emulators.is_there(name)]
    if missing:
        return f"{missing[0]} is not installed: the extra `gcs`"
    if "gs://" in config.data.model_dump_json():
        return "the data are in a bucket, and the emulator takes its place"
    return ""
