"""Compiled steps by way of the bucket, so that a VM that is new loads what another has compiled."""

from __future__ import annotations

import contextlib

from jaxres import bucket, storage
from jaxres.faults import TypedEnd
from jaxres.launch.places import Places
from jaxres.place import BucketPath
from jaxres.rundir import RunDir

MAX_BYTES = 2**30


class Sharing:
    """Brings and gives files whose names are digests of all that decides what is in them."""

    def __init__(self, places: Places) -> None:
        """Asks for nothing yet."""
        self._folder = places.compiled
        self._there: set[str] = set()

    def bring(self, run: BucketPath) -> None:
        """Fetches what is not here; without the bucket's answer steps are compiled anew."""
        local = RunDir(run).compiled
        with contextlib.suppress(TypedEnd, OSError):
            local.mkdir(parents=True, exist_ok=True)
            for name in bucket.names(self._folder):
                self._there.add(name)
                if not (local / name).exists() and (data := bucket.read(self._folder / name)):
                    storage.replace(local / name, data)

    def give(self, run: BucketPath) -> None:
        """Puts there what is new here."""
        local = RunDir(run).compiled
        with contextlib.suppress(TypedEnd, OSError):
            for name in storage.list_names(local):
                if name not in self._there and (local / name).stat().st_size <= MAX_BYTES:
                    bucket.write(self._folder / name, (local / name).read_bytes(), over=0)
                    self._there.add(name)
