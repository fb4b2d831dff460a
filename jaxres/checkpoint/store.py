"""Saves in the background, commits through the run log, restores the newest step on the line.

Order of a commit: arrays by Orbax (asynchronously, into a directory of this attempt) -> its
result -> progress.json and MANIFEST.json -> everything fsynced, the metrics lines too -> the commit
record. Only the record makes the step count: a kill before it leaves the older step in force.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, NoReturn

import jax
from orbax.checkpoint import v1 as ocp

from jaxres import storage
from jaxres.checkpoint import manifest as manifests
from jaxres.checkpoint import retention
from jaxres.checkpoint.manifest import ArrayInfo, Manifest
from jaxres.clock import Clock
from jaxres.config.schema import CheckpointSection
from jaxres.events import Emit, SaveCommitted, SaveStarted, SaveWaited, StepsPruned
from jaxres.faults import ConfigError, StorageUnavailable
from jaxres.rundir import RunDir
from jaxres.runlog import Claim, Commit, Line, Prune, RunLog, canonical_json
from jaxres.state import Progress

Tree = dict[str, Any]


class Checkpoints:
    """Owns the step directories of one attempt and the save in flight; a context manager.

    On an exception the save in flight is not committed; without one its failure is raised.
    """

    def __init__(
        self,
        section: CheckpointSection,
        *,
        run_dir: RunDir,
        log: RunLog,
        claim: Claim,
        emit: Emit,
        clock: Clock,
        before_commit: Callable[[], None],
    ) -> None:
        """Prepares; touches nothing before `__enter__`.

        Args:
          section: intervals, retention, limits.
          run_dir: where the steps go.
          log: where commits and prunes go.
          claim: this attempt's; its versions and fingerprint go into every manifest.
          emit: told of every save.
          clock: times the saves.
          before_commit: makes durable what must be so before a step counts (the metrics lines).
        """
        self._section = section
        self._run_dir = run_dir
        self._log = log
        self._claim = claim
        self._emit = emit
        self._clock = clock
        self._before_commit = before_commit
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="jaxres-saver")
        self._flight: Future[None] | None = None
        self._abandoned = False
        self._saved_step = log.line().step
        self._context = ocp.Context()
        self._context.array.saving.use_compression = False
        self._context.array.saving.use_replica_parallel = False
        self._context.async_options.timeout_secs = math.ceil(section.timeout_seconds)

    def __enter__(self) -> Checkpoints:
        line = self._log.line()
        storage.make_dir(self._run_dir.checkpoints)
        keep = {Path(commit.path).name for commit in line.committed}
        retention.sweep(self._run_dir.checkpoints, keep=keep, attempt=self._log.attempt)
        logging.getLogger("absl").addFilter(_tells_more_than_orbax)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._abandoned = kind is not None
        self._saver.shutdown(wait=True)
        if kind is None:
            self.poll()

    @property
    def saved_step(self) -> int:
        """The newest step that is saved or being saved."""
        return self._saved_step

    def save(self, state: Tree, progress: Progress) -> None:
        """Snapshots a state and writes it in the background; nothing to do if the line has it.

        One save is in flight at a time: a save due earlier waits for the one before.

        Args:
          state: the plain nested dict of arrays; may be donated as soon as this returns.
          progress: the host's facts at the same step.
        """
        if progress.step <= self._saved_step:
            return
        started = self._clock.monotonic()
        if self._flight is not None and not self._flight.done():
            self.wait()
            self._emit(SaveWaited(progress.step, self._clock.monotonic() - started))
        self.poll()
        started = self._clock.monotonic()
        name = retention.step_name(progress.step, attempt=self._log.attempt)
        step_dir = (self._run_dir.checkpoints / name).absolute()
        with self._context, storage.typed_errors(step_dir):
            response = ocp.save_async(str(step_dir), state, checkpointable_name=manifests.ARRAYS)
        self._saved_step = progress.step
        self._emit(SaveStarted(progress.step, self._clock.monotonic() - started))
        arrays = array_infos(state)
        self._flight = self._saver.submit(
            self._finish, response, step_dir, progress, arrays, started
        )

    def _finish(
        self,
        response: Any,
        step_dir: Path,
        progress: Progress,
        arrays: Mapping[str, ArrayInfo],
        started: float,
    ) -> None:
        """Makes one step durable, then makes it count. Runs in the saver's thread."""
        _settled(response, step_dir, timeout=self._section.timeout_seconds)
        facts = canonical_json(dataclasses.asdict(progress))
        storage.replace(step_dir / manifests.PROGRESS, facts)
        files = manifests.inventory(step_dir)
        manifest = Manifest(
            step=progress.step,
            attempt=self._log.attempt,
            files=files,
            arrays=arrays,
            versions=self._claim.versions,
            fingerprint=self._claim.fingerprint,
            trajectory=self._claim.trajectory,
        ).encode()
        storage.replace(step_dir / manifests.MANIFEST, manifest)
        storage.sync_tree(step_dir)
        self._before_commit()
        if self._abandoned:
            return
        size = sum(files.values()) + len(manifest)
        path = step_dir.relative_to(self._run_dir.root.absolute()).as_posix()
        self._log.append(
            Commit(
                step=progress.step,
                path=path,
                manifest=manifests.digest_of(manifest),
                bytes=size,
                known_good=False,
            )
        )
        seconds = self._clock.monotonic() - started
        self._emit(SaveCommitted(progress.step, path, size, seconds))
        self._prune(self._log.line())

    def _prune(self, line: Line) -> None:
        paths = {commit.step: commit.path for commit in line.committed}
        steps = retention.to_prune(list(paths), keep_last=self._section.keep_last)
        if not steps:
            return
        self._log.append(Prune(steps=steps))
        for step in steps:
            storage.delete_tree(self._run_dir.root / paths[step])
        self._emit(StepsPruned(steps))

    def poll(self) -> None:
        """Raises what the newest background save has failed with, if it has."""
        if self._flight is not None and self._flight.done():
            self._flight.result()

    def wait(self) -> None:
        """Waits until the save in flight is committed; raises if it failed or takes too long."""
        if self._flight is None:
            return
        try:
            self._flight.result(timeout=2 * self._section.timeout_seconds)
        except FutureTimeout:
            if self._flight.done():
                raise
            raise StorageUnavailable(
                f"{self._run_dir.checkpoints}: a save was not durable within "
                f"{2 * self._section.timeout_seconds:.0f} s. Nothing committed is lost. Is the "
                "disk slow? checkpoint.timeout_seconds sets the limit."
            ) from None

    def restore(self, commit: Commit, like: Tree) -> tuple[Tree, Progress]:
        """Reads a committed step into arrays sharded as asked for.

        Args:
          commit: the step's record.
          like: nested dict of jax.ShapeDtypeStruct with shardings.

        Raises:
          Unrestorable: the step is damaged.
          StorageUnavailable: storage did not let it be read; nothing is judged.
          ConfigError: it was read, but holds other arrays than the model wants.
        """
        step_dir = (self._run_dir.root / commit.path).absolute()
        manifest = manifests.read(step_dir, commit)
        _refuse_differences(step_dir, manifest.arrays, array_infos(like))
        try:
            with self._context:
                state = ocp.load(str(step_dir), like, checkpointable_name=manifests.ARRAYS)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            # Orbax checks none of its JSON files: a flipped letter shows as any of these.
            raise manifests.unreadable(step_dir, commit.step, error) from error
        assert isinstance(state, dict), type(state)
        facts = manifests.read_progress(step_dir, commit)
        try:
            return state, Progress(**facts)
        except TypeError as error:
            what = f"{manifests.PROGRESS} is not this version's ({error})"
            raise manifests.damaged(step_dir, commit.step, what) from error


def array_infos(tree: Tree) -> dict[str, ArrayInfo]:
    """Returns path (`params/blocks/...`) -> dtype and global shape of every array in a tree.

    Raises:
      ConfigError: two arrays have the same path, or would have in the files, where `.` stands for
        `/`; one of them would be lost.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    infos: dict[str, ArrayInfo] = {}
    names: dict[str, str] = {}
    for keys, leaf in flat:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        other = names.setdefault(path.replace("/", "."), path)
        if path in infos or other != path:
            raise ConfigError(
                f"model: two arrays of the state would be stored as one: {other} and {path}. "
                "Rename one of them, without a dot or slash in its name."
            )
        infos[path] = ArrayInfo(str(leaf.dtype), tuple(leaf.shape))
    return infos


def _tells_more_than_orbax(record: logging.LogRecord) -> bool:
    """Drops what Orbax logs: of every failed save several tracebacks, beside the error it raises.

    For the rest of the process, because its threads may log after the save has failed.
    """
    return "orbax" not in record.pathname


def _settled(response: Any, step_dir: Path, *, timeout: float) -> None:
    try:
        response.result(timeout=timeout)
    except (OSError, ValueError, RuntimeError, TimeoutError) as error:
        _raise_typed(error, step_dir)


def _raise_typed(error: Exception, step_dir: Path) -> NoReturn:
    if not (isinstance(error, OSError) or manifests.is_storage_fault(error)):
        raise error
    raise StorageUnavailable(
        f"{step_dir}: could not be saved ({error}). Nothing committed is lost. Free some space or "
        "mend the storage, then start the same command again."
    ) from error


def _refuse_differences(
    step_dir: Path, there: Mapping[str, ArrayInfo], here: Mapping[str, ArrayInfo]
) -> None:
    rows = [
        f"  {path}: {there.get(path, 'absent')} there, {here.get(path, 'absent')} here"
        for path in sorted({*there, *here})
        if there.get(path) != here.get(path)
    ]
    if rows:
        raise ConfigError(
            f"{step_dir}: the checkpoint holds other arrays than this model and optimizer\n"
            + "\n".join(rows)
            + "\nThe config is the same, so the code has changed: go back to the code that started "
            "the run, or start a new run in another run.dir."
        )
