"""Scenarios after which a run leaves rows out: a bad record, and a loss that stays high.

Each function is called while every worker holds after the planned step, and returns what it did.
The steps from there on must have exactly the rows that are left, in their order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash

from jaxres import config as configs
from jaxres import data
from jaxres.config import RunConfig
from jaxres.data.tokens.token_digests import BLOCK_BYTES
from jaxres.data.tokens.token_folder import DTYPES, TokenRows
from jaxres.operate.chaos.held_run import AGAIN, HeldRun
from jaxres.operate.chaos.scenarios import SPIKE_STEPS
from jaxres.operate.chaos.schedule import STEPS, ScheduledFault
from jaxres.operate.chaos.verdict import Injection
from jaxres.runlog.event_log import read_events


def bad_record(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Stops the run, makes a token out of range that it reads two steps later, and starts it."""
    if problem := run.stop(number):
        return Injection(fault, problem=problem)
    attempt, config, step = run.history().attempt, _config(run), fault.step + 2
    batch = config.train.global_batch_size
    position = random.Random(f"{fault}").randrange((step - 1) * batch, step * batch)
    problem = _plant(config, position)
    run.mark_fault()
    if problem:
        run.resume(number)
        return Injection(fault, problem=problem)
    again = AGAIN + number
    run.plan_hold(again, step=step)
    run.start()
    is_held = run.wait_held(again)
    seconds, rows = run.seconds(), ((position, position + 1),)
    unkept = "" if is_held else f"the run ended before step {step}"
    if is_held and run.history().skips != rows:
        unkept = f"the run log has the skips {run.history().skips}, not {rows}"
    if is_held and not _has_event(run, attempt + 1, "bad_records_skipped"):
        unkept = unkept or "no event names the bad record"
    run.other_samples |= samples_without(config, rows, first=step)
    run.release(again)
    did = f"the row at position {position} of the stream has a token out of range"
    return Injection(fault, did, recovery_seconds=seconds, unkept=unkept)


def spike(run: HeldRun, number: int, fault: ScheduledFault) -> Injection:
    """Multiplies the parameters, and waits until the run has rolled back."""
    if problem := run.wait_commit(fault.step):
        return Injection(fault, problem=problem)
    attempt, config = run.history().attempt, _config(run)
    again, found_at = AGAIN + number, fault.step + SPIKE_STEPS
    run.request(number, step=fault.step, kind="scale")
    run.mark_altered(fault.step)
    run.mark_fault()
    run.plan_hold(again, step=found_at)  # Before it is a rollback.
    run.release(number)
    is_held = run.wait_held(again)
    seconds = run.seconds()
    if not (did := run.done(number)):
        return Injection(fault, problem="the parameters were not edited")
    batch = config.train.global_batch_size
    rows = ((fault.step * batch, found_at * batch),)
    unkept = "" if is_held else f"the run ended before step {found_at}"
    if is_held and run.history().skips != rows:
        unkept = f"the run log has the skips {run.history().skips}, not {rows}"
    if is_held and not _has_event(run, attempt, "rolled_back"):
        unkept = unkept or "no event says that the run has rolled back"
    run.other_samples |= samples_without(config, rows, first=fault.step + 1)
    run.release(again)
    return Injection(fault, did, recovery_seconds=seconds, unkept=unkept)


def _config(run: HeldRun) -> RunConfig:
    """Returns the config of a run, with its own data folder if it has one."""
    folder = run.folder("data")
    own = [f"data.cache_dir={folder}"] if folder.exists() else []
    return configs.load(run.runner.config, [*run.runner.overrides, *own]).config


def _has_event(run: HeldRun, attempt: int, name: str) -> bool:
    return any(one["event"] == name for one in read_events(run.run_dir.events(attempt, 0)))


def samples_without(
    config: RunConfig, skips: Sequence[tuple[int, int]], *, first: int
) -> dict[int, str]:
    """Returns step -> digest of the samples of each step from one on, if rows are left out.

    Args:
      config: of the run; its data are opened.
      skips: half-open ranges of positions of the stream that are left out.
      first: the first of the steps; no row before it is left out.
    """
    batch, (start, stop) = config.train.global_batch_size, ((first - 1), STEPS)
    left_out = {position for begin, end in skips for position in range(begin, end)}
    positions = [p for p in range(start * batch, stop * batch + len(left_out)) if p not in left_out]
    dataset = data.open_dataset(config.data, bad_records=config.guards.bad_records)
    order = dataset.order(seed=config.run.seed, rows_per_step=batch)
    ids = order.ids(np.array(positions[: (stop - start) * batch], np.int64))
    return {
        first + index: data.sample_digest(ids[index * batch : (index + 1) * batch])
        for index in range(stop - start)
    }


def _plant(config: RunConfig, position: int) -> str:
    """Makes a token of the row at a position out of range, with a digest that fits.

    Returns:
      Why that is impossible; empty: it is done.
    """
    dataset = data.open_dataset(config.data, bad_records=config.guards.bad_records)
    rows = dataset.train
    if not isinstance(rows, TokenRows) or rows.corpus.meta.block_bytes != BLOCK_BYTES:
        return "the rows are no windows of a token folder with digests"
    meta, folder = rows.corpus.meta, rows.corpus.folder
    dtype = DTYPES[meta.dtype]
    if meta.vocab_size > np.iinfo(dtype).max:
        return f"every {meta.dtype} is a token"
    if not folder.is_relative_to(Path(config.data.cache_dir)):
        return "the run has cached no corpus"
    order = dataset.order(seed=config.run.seed, rows_per_step=config.train.global_batch_size)
    (row,) = order.ids(np.array([position], np.int64)).tolist()
    # The first and the last token of a window are in the windows beside it too.
    token = rows.start + row * rows.seq_len + rows.seq_len // 2
    tokens = np.memmap(folder / "tokens.bin", dtype, mode="r+")
    tokens[token] = meta.vocab_size
    tokens.flush()
    block = token * dtype.itemsize // BLOCK_BYTES
    digests = np.load(folder / "digests.npy", mmap_mode="r+")
    content = tokens.view(np.uint8)[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
    digests[block] = xxhash.xxh3_64_intdigest(content.tobytes())
    digests.flush()
    return ""
