"""The batches on their way: read and laid on the devices ahead of time, in the background."""

from __future__ import annotations

import contextlib
import functools

from jax.sharding import Mesh

from jaxres import data
from jaxres import mesh as meshes
from jaxres.config.schema import DataSection
from jaxres.data import Batch, Dataset
from jaxres.events import PhaseChanged
from jaxres.train.place import Place
from jaxres.train.run import At, Fed, Feed


def open_feed(
    dataset: Dataset,
    mesh: Mesh,
    place: Place,
    stack: contextlib.ExitStack,
    *,
    section: DataSection,
    seed: int,
    global_batch_size: int,
) -> Feed:
    """Returns the batches of a data set; `stack` ends what was opened last."""
    local = meshes.local_rows(mesh, global_batch_size)
    reading = stack.enter_context(contextlib.ExitStack())

    def laid(batch: Batch) -> Fed:
        return batch, meshes.place_batch(mesh, batch.arrays, local=local)

    def open_at(skips: data.Skips) -> At:
        reading.close()  # What was read ahead may have rows that are left out from now on.
        batch_at = data.batch_at(
            dataset.train,
            seed=seed,
            global_batch_size=global_batch_size,
            skips=skips,
            local=local.rows,
        )
        prefetch = data.Prefetch(
            batch_at,
            depth=section.prefetch_batches,
            timeout_seconds=section.timeout_seconds,
            place=laid,
        )
        return functools.partial(_fed, reading.enter_context(prefetch), place)

    return Feed(
        open=open_at,
        num_rows=len(dataset.train),
        tokens_per_step=global_batch_size * dataset.tokens_per_row,
    )


def _fed(prefetch: data.Prefetch[Fed], place: Place, cursor: int) -> Fed | None:
    waits = 0

    def give_up() -> bool:
        nonlocal waits
        waits += 1
        if waits == 1:
            place.emit(PhaseChanged("wait for data"))
        # The others are in the step already, and can't be called back.
        return place.peers.member.is_alone and place.requests.stop_asked() is not None

    fed = prefetch.get(cursor, give_up=give_up)
    if waits:
        place.emit(PhaseChanged("train"))
    return fed
