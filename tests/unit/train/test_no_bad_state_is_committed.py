"""The training loop over fake components: no committed state is bad, under any random faults.

A state is the set of rows that it was trained on. Faults are drawn at random: losses that stay
high, updates that spoil the state, gradients that are not finite, records that can't be read, bits
that flip in one device's copy, notices with and without time, saves that take a while.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import numpy as np
import pytest

from jaxres.config.schema.training import GuardsSection, RollbackSection
from jaxres.data import Batch, positions_at
from jaxres.engine.divergence import losses, skips
from jaxres.engine.replica_fingerprint import Copies
from jaxres.engine.state import TrainState
from jaxres.engine.step import MetricsLayout
from jaxres.exit_codes import ExitCode
from jaxres.faults import Continue
from jaxres.runlog import run_log
from jaxres.runlog.run_log import Commit, Record
from jaxres.train.checks.replica_check import ReplicaCheck
from jaxres.train.components import BadRows, DataLoader, StepSchedule
from jaxres.train.consensus import SingleHostConsensus
from jaxres.train.loop import train
from jaxres.train.stop_requests import StopRequests
from tests.tiers import slow_but
from tests.unit.train.test_loop import fake_run

STEPS, ROWS = 60, 4
SPOIL, HIGH, NAN, UNREADABLE, FLIP = "spoil", "high", "nan", "unreadable", "flip"
LIMITS = GuardsSection(
    rollback=RollbackSection(patience_steps=3, warmup_steps=5, max_rollbacks=2),
    max_skips_in_a_row=2,
)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of the mesh."""

    id: int
    process_index: int = 0
    device_kind: str = "chip"


def replica_check(*, every_steps=7, mode="act", emit=lambda event: None):
    """The comparison of three copies, of which that of device 1 has the flipped bits."""
    return ReplicaCheck(
        lambda state: np.asarray([[1], [1 + ("flipped" in state.params)], [1]], np.uint32),
        Copies(kinds=((),), groups=(((0, 1, 2),),), num_bytes={3: 1}),
        [Device(10), Device(11), Device(12)],
        0,
        every_steps=every_steps,
        mode=mode,
        emit=emit,
    )


class Log:
    """The run log, in memory."""

    attempt, folder = 1, "run/log"

    def __init__(self):
        self.kept = []

    def append(self, body):
        self.kept.append(Record(len(self.kept) + 1, 1, 0.0, body))
        return self.kept[-1]

    def records(self):
        return list(self.kept)

    def records_through(self, seq):
        return self.kept[:seq]

    def history(self):
        return run_log.fold(self.kept)


@dataclasses.dataclass
class FakeRestored:
    state: dict
    progress: object
    commit: Commit


class Checkpoints:
    """Commits each save after a random delay."""

    def __init__(self, log, chance):
        self.log, self.chance = log, chance
        self.states, self.pending, self.refused_from = {}, None, math.inf
        self.saved_step = 0
        self.last_error = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    @property
    def committed_step(self):
        return self.log.history().step

    def check(self):
        if self.pending and self.chance.random() < 0.4:
            self.wait()

    def wait(self):
        if self.pending:
            (state, progress), self.pending = self.pending, None
            if progress.step < self.refused_from:
                path = f"{len(self.states)}"
                self.states[path] = (state, progress)
                body = Commit(step=progress.step, path=path, manifest="", bytes=0)
                self.log.append(body)

    def save(self, state, progress, *, may_skip=False):
        if progress.step > self.saved_step:
            self.wait()
            self.pending = (dict(state), progress)
            self.saved_step = progress.step

    def discard_from(self, onset):
        self.refused_from = onset
        self.wait()

    def rewind(self, step):
        self.saved_step, self.refused_from = step, math.inf

    def restore(self, history, shapes, *, seconds, last_step):
        if history.newest is None:
            return None
        return FakeRestored(*self.states[history.newest.path], history.newest)

    def verdict(self):
        return Continue()


@dataclasses.dataclass
class SimulatedRun:
    """The faults of a run, by row, and the time of a preemption notice."""

    seed: int
    log: Log = dataclasses.field(default_factory=Log)
    met: Counter = dataclasses.field(default_factory=Counter)

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.faults = {}
        for what in (SPOIL, NAN, UNREADABLE):
            if self.chance.random() < 0.4:
                self.faults[self.chance.randrange(STEPS * ROWS)] = what
        if self.chance.random() < 0.3:
            self.faults[self.chance.randrange(STEPS) * ROWS] = FLIP
        for _ in range(self.chance.choice([0, 1, 2])):
            first = self.chance.randrange(7, STEPS) * ROWS
            self.faults |= {first + ROWS * n: HIGH for n in range(self.chance.choice([1, 3, 4]))}
        self.checkpoints = Checkpoints(self.log, self.chance)

    def kinds_of(self, positions):
        return [self.faults[p] for p in positions if p in self.faults]

    def open(self, history):
        skips = history.skips

        def at(cursor):
            positions = positions_at(cursor, ROWS, skips=skips)
            bad = [p for p in positions.tolist() if self.faults.get(p) == UNREADABLE]
            if bad:
                self.met[UNREADABLE] += 1
                return BadRows(tuple((p, p + 1) for p in bad), "unreadable", None)
            batch = Batch({}, ids=positions, cursor=cursor, next_cursor=int(positions[-1]) + 1)
            return batch, {"positions": positions}

        return at

    def step(self, state, arrays, flags, factor):
        kinds = self.kinds_of(arrays["positions"].tolist())
        loss = math.nan if NAN in kinds else 9.0 if HIGH in kinds else 3.0
        applied, is_good = NAN not in kinds, "spoilt" not in state.params
        params = state.params
        if applied:
            params = {**params, **{str(p): True for p in arrays["positions"].tolist()}}
        if applied and SPOIL in kinds:
            params, is_good = {**params, "spoilt": True}, False
        if FLIP in kinds:
            params = {**params, "flipped": True}
            self.faults = {p: what for p, what in self.faults.items() if what != FLIP}
        self.met.update(kinds)
        numbers = [loss, 1.0, 0.1, 0.0, float(applied), float(is_good), 1.0]
        return dataclasses.replace(state, params=params), np.asarray(
            [*numbers, *[0.0] * ROWS], np.float32
        )

    def attempt(self, **parts):
        requests = StopRequests()

        def on_step(line):
            if self.chance.random() < 0.02:
                requests._stop = ExitCode.PREEMPTED
                requests._has_time = self.chance.random() < 0.7

        run, _ = fake_run(
            steps=STEPS,
            schedule=StepSchedule(steps=STEPS, save_every_steps=4, evaluate_every_steps=0),
            log=self.log,
            checkpoints=self.checkpoints,
            guards=(skips(LIMITS), losses(LIMITS.rollback)),
            limits=LIMITS,
            data_loader=DataLoader(open=self.open, num_rows=10**6, tokens_per_step=1),
            init=lambda history: (TrainState(params={}, opt={}, key=0, step=0, norms={}), None),
            shapes=TrainState(params={}, opt={}, key=0, step=0, norms={}),
            step=self.step,
            peak_rate=lambda factor: None,
            metrics_layout=MetricsLayout(("w",), num_rows=ROWS),
            row_origins=[(0, 0)] * ROWS,
            on_step=on_step,
            consensus=SingleHostConsensus(requests, self.checkpoints.verdict),
            **{"emit": self.emit, "replica_check": replica_check(emit=self.emit), **parts},
        )
        self.checkpoints.saved_step = self.log.history().step
        return train(run)

    def emit(self, event):
        self.met.update([type(event).__name__])

    def check_commits(self):
        """No committed state is spoilt, or was trained on rows that the log leaves out."""
        history = self.log.history()
        left_out = {p for start, stop in history.skips for p in range(start, stop)}
        for commit in history.committed:
            trained = self.checkpoints.states[commit.path][0]["params"]
            assert not {"spoilt", "flipped"} & trained.keys(), f"step {commit.step} is poisoned"
            rows = {int(p) for p in trained}
            assert not rows & left_out, f"step {commit.step} is of rows that were left out"
        return history


@pytest.mark.parametrize("block", slow_but(range(6), 0))
def test_no_committed_state_is_bad_under_random_faults(block):
    met, ends = Counter(), Counter()
    for seed in range(50 * block, 50 * block + 50):
        simulated = SimulatedRun(seed)
        for _ in range(20):
            ended = simulated.attempt()
            simulated.check_commits()
            ends[ended.result.code] += 1
            if ended.result.code not in (ExitCode.PREEMPTED, ExitCode.UNHEALTHY):
                break
        met += simulated.met
        if ended.result.code == ExitCode.DONE:
            trained = simulated.checkpoints.states[simulated.log.history().newest.path][0]["params"]
            masked = {p for p, what in simulated.faults.items() if what == NAN}
            assert not {int(p) for p in trained} & masked
    expected = {ExitCode.DONE, ExitCode.DIVERGED, ExitCode.PREEMPTED, ExitCode.UNHEALTHY}
    assert set(ends) == expected
    assert ends[ExitCode.UNHEALTHY] == met["CorruptionDetected"]
    found = ("RolledBack", "BadRecordsSkipped", "UpdateSkipped", "CorruptionDetected")
    for what in (SPOIL, HIGH, NAN, UNREADABLE, FLIP, *found):
        assert met[what] > 3, what
