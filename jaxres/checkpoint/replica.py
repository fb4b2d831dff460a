"""Copies the committed steps of a run, and its log, to a second place. No jax.

Order of an update: the files of the steps in force, newest first, each read back and compared with
the manifest; the files of the attempts; then manifests and records at once
(runlog/replica_files.py); then steps that the log of the replica has pruned are deleted there. Only
the replica's own log decides what is deleted: a source that is lost deletes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from jaxres.checkpoint.read import manifest as manifests
from jaxres.checkpoint.read.manifest import MANIFEST, CheckpointDamaged, FileInfo
from jaxres.checkpoint.read.readback import READ_BYTES
from jaxres.checkpoint.retention import pruning
from jaxres.checkpoint.throttle import BandwidthLimit
from jaxres.clock import Clock
from jaxres.config import file_mode
from jaxres.faults import ConfigError, StorageUnavailable, UsageError
from jaxres.runlog import replica_files, run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.records import Claim, Commit, Record, file_name
from jaxres.runlog.replica_files import Marker
from jaxres.runlog.run_log import RunHistory, fold
from jaxres.secret_values import PRIVATE
from jaxres.storage import files, line_writer
from jaxres.storage.path import RunPath, is_remote

TRIES = 3
"""How often a file is copied until it reads back as it should, and read until it is damaged; and
how often the steps in force are looked up until none was pruned while it was copied."""
MAX_WAITING_LINES = 1_000_000
CONFIG = "config.yaml"
OWN_FILES = (replica_files.MARKER, replica_files.UPDATE, CONFIG, "events-supervisor.jsonl")
"""Files in the root of a replica that its updates write."""


@dataclass
class ReplicaUpdate:
    """Result of one update of a replica."""

    step: int = 0
    """Newest committed step in the replica; 0: none."""
    seq: int = 0
    """Number of records in the replica."""
    copied: list[int] = field(default_factory=list)
    """Steps that were copied, in the order of their copies."""
    pruned: list[str] = field(default_factory=list)
    """Step directories that were deleted in the replica."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Steps that are damaged in the source, which are not copied -> evidence."""
    num_bytes: int = 0
    """Bytes of the files that were written."""


def publishable(records: Sequence[Record], *, whole: Collection[str], after: int) -> int:
    """Returns the number of records for the replica: their newest step must be whole there. Pure.

    Args:
      records: the records of the source.
      whole: paths of the step directories that are whole in the replica.
      after: number of records that the replica has.
    """
    end = len(records)
    while end > after:
        newest = fold(records[:end]).commits[-1:]
        if not newest:
            # Without a step the replica would begin at step 0, which is wrong if one was damaged.
            return end if end == len(records) else after
        body = newest[0].body
        assert isinstance(body, Commit), body
        if body.path in whole:
            return end
        end = newest[0].seq - 1
    return after


class Replica:
    """Copies one run to one place; `update` is called under the run lock of that place."""

    def __init__(
        self, source: RunDir, target: RunDir, *, limit: BandwidthLimit, clock: Clock
    ) -> None:
        self._source, self._target = source, target
        self._limit, self._clock = limit, clock
        self._raw: list[bytes] = []
        """The records of the source."""
        self._records: list[Record] = []
        self._seen = -1
        """Number of records of the source at the last complete update."""
        self._num_there = 0
        """Number of records of the replica."""
        self._whole: set[str] = set()
        """Paths of steps that are whole in the replica."""
        self._is_open = False

    def has_news(self) -> bool:
        """Reads new records of the source; returns whether there are any since the last update.

        Raises:
          UsageError: no run is in the source.
        """
        if not self._raw:
            names = files.list_names(self._source.log)
            self._add_records(files.read_all([self._source.log / name for name in names]))
            if not self._raw:
                raise UsageError(f"{self._source.root}: no run here (no log/). Nothing was copied.")
        while (data := files.read(self._source.log / file_name(len(self._raw) + 1))) is not None:
            self._add_records([data])
        return self._seen != len(self._raw)

    def check(self) -> None:
        """Raises if the target is not a place for this replica; writes nothing.

        Raises:
          ConfigError: the target is the source, is inside it, is another run, or is a replica of
            another run.
        """
        if self._target.root == self._source.root:
            raise ConfigError(f"{self._target.root}: is the run directory itself. Give another.")
        if _is_inside(self._target.root, self._source.root):
            raise ConfigError(
                f"{self._target.root}: is inside the run directory, so it would be lost with it. "
                "Give a folder in another place. Nothing was copied."
            )
        marker = replica_files.read_marker(self._target)
        if marker is None:
            there = files.list_names(self._target.log) or step_dirs.listed(self._target.checkpoints)
            if there or files.read(self._target.config) is not None:
                raise ConfigError(
                    f"{self._target.root}: has a run already, and is no replica "
                    f"({replica_files.MARKER} is missing). Give another folder."
                )
        elif marker.run != self._run():
            raise ConfigError(
                f"{self._target.root}: is a replica of another run, {marker.source}. Give another "
                "folder. Nothing was changed."
            )

    def update(self) -> ReplicaUpdate:
        """Brings the replica up to date.

        Raises:
          ConfigError: as `check`.
          Diverged: a run goes on there.
          StorageUnavailable: one of the places failed; the next call goes on where this one ended.
        """
        self.has_news()
        self._open()
        done = ReplicaUpdate()
        records, staged = self._copy_steps(done)
        whole = self._whole | set(staged)
        end = publishable(records, whole=whole, after=self._num_there)
        in_force = {commit.path: commit for commit in fold(records[:end]).committed}
        staged = {path: data for path, data in staged.items() if path in in_force}
        self._copy_attempts(records[:end])
        if end > self._num_there or staged:
            self._publish(end, staged, in_force)
        there = fold(records[:end])
        done.step, done.seq = there.step, end
        replica_files.write_marker(self._target, self._marker(done))
        done.pruned = self._sweep(there)
        self._copy_pins(there)
        self._copy_hosts_left_out()
        self._seen = len(records)
        return done

    def _add_records(self, contents: Sequence[bytes | None]) -> None:
        for data in contents:
            path = self._source.log / file_name(len(self._raw) + 1)
            if data is None:
                raise StorageUnavailable(f"{path}: existed a moment ago. Is the run being moved?")
            self._records.append(Record.decode(data, path=path))
            self._raw.append(data)

    def _run(self) -> str:
        first = self._records[0].body
        assert isinstance(first, Claim), first
        return first.nonce

    def _marker(self, done: ReplicaUpdate) -> Marker:
        return Marker(self._run(), str(self._source.root), done.seq, done.step, self._clock.wall())

    def _open(self) -> None:
        """Reads the state of the replica; writes the marker of a new one."""
        if self._is_open and files.read(self._target.log / file_name(self._num_there + 1)) is None:
            return
        self._is_open = False  # Another replicator of the same run may have added records.
        self._whole.clear()
        self.check()
        if replica_files.read_marker(self._target) is None:
            replica_files.write_marker(self._target, self._marker(ReplicaUpdate()))
        if not replica_files.finish_update(self._target):
            raise replica_files.diverged(self._target)
        names = files.list_names(self._target.log)
        there = files.read_all([self._target.log / name for name in names])
        if there != self._raw[: len(there)]:
            raise replica_files.diverged(self._target)
        self._num_there = len(there)
        for commit in fold(self._records[: self._num_there]).committed:
            try:
                manifests.read((self._target.root / commit.path).absolute(), commit)
                self._whole.add(commit.path)
            except CheckpointDamaged:
                continue  # It is copied again.
        self._is_open = True

    def _refuse_diverged(self) -> None:
        if files.read(self._target.log / file_name(self._num_there + 1)) is not None:
            raise replica_files.diverged(self._target)

    def _copy_steps(self, done: ReplicaUpdate) -> tuple[list[Record], dict[str, bytes]]:
        """Copies the steps in force; returns the records they follow from, and their manifests.

        The source may prune one meanwhile: then its new records say what is in force.
        """
        records, staged = list[Record](), dict[str, bytes]()
        for _ in range(TRIES):
            records, is_complete = list(self._records), True
            for commit in reversed(fold(records).committed):
                if commit.path in self._whole | set(staged) or commit.step in done.damaged:
                    continue
                manifest = self._copy_unless_gone(commit, done)
                if manifest is not None:
                    staged[commit.path] = manifest
                    done.copied.append(commit.step)
                elif commit.step not in done.damaged:
                    is_complete = False
            if is_complete:
                break
        return records, staged

    def _copy_unless_gone(self, commit: Commit, done: ReplicaUpdate) -> bytes | None:
        """Copies a step and returns its manifest; None: it is pruned meanwhile, or damaged."""
        try:
            return self._copy_step(commit, done)
        except CheckpointDamaged as damage:
            newest = self._source.log / file_name(len(self._raw))
            if files.read(newest) is None:
                raise StorageUnavailable(
                    f"{newest}: existed a moment ago, so the source is lost or unmounted. Nothing "
                    "in the replica was changed."
                ) from damage
            self.has_news()
            if commit in fold(self._records).committed:
                done.damaged[commit.step] = damage.what
            return None

    def _copy_step(self, commit: Commit, done: ReplicaUpdate) -> bytes:
        """Copies the files of a step but the manifest, and returns that."""
        source = (self._source.root / commit.path).absolute()
        target = (self._target.root / commit.path).absolute()
        manifest = manifests.load(source, commit)
        with manifests.reading(source, commit.step):
            data = files.read_whole(source / MANIFEST)
        if manifests.digest_of(data) != commit.manifest:
            raise manifests.damaged(source, commit.step, f"{MANIFEST} is not the committed one")
        with files.typed_errors(target):
            present = files.sizes_of(target, manifest.files.keys())
        for name, info in manifest.files.items():
            self._refuse_diverged()
            if present.get(name) == info.size and self._checksum(target / name) == info:
                continue  # Copied by an update that was interrupted.
            content = self._read_verified(source, commit, name, info)
            self._write_verified(target / name, content, info)
            done.num_bytes += info.size
        return data

    def _read_verified(self, source: RunPath, commit: Commit, name: str, info: FileInfo) -> bytes:
        """Returns the bytes of a file of the source; raises CheckpointDamaged on proof."""
        for _ in range(TRIES):
            with manifests.reading(source, commit.step):
                try:
                    files.drop_page_cache(source / name)
                    content = self._read(source / name)
                except files.TransferCorrupted:
                    continue
                except FileNotFoundError:
                    manifests.refuse_if_unavailable(source, commit.step, name=name)
                    raise
            if manifests.info_of(content) == info:
                return content
        raise manifests.damaged(source, commit.step, f"{name} differs from the committed file")

    def _write_verified(self, path: RunPath, content: bytes, info: FileInfo) -> None:
        """Writes a file and reads it back."""
        with files.typed_errors(path):
            files.make_dir(path.parent)
            for _ in range(TRIES):
                files.replace(path, content)
                if self._checksum(path) == info:
                    return
        raise StorageUnavailable(
            f"{path}: reads back differently from what was written. The step does not count as "
            "copied. Is the disk, the network or this machine's memory faulty?"
        )

    def _checksum(self, path: RunPath) -> FileInfo | None:
        """Returns size and checksum as storage has them; None: damaged in transfer."""
        size, checksum = 0, xxhash.xxh3_128()
        with files.typed_errors(path):
            files.drop_page_cache(path)
            try:
                for part in files.iter_chunks(path, size_bytes=READ_BYTES):
                    self._limit.spend(len(part))
                    size += len(part)
                    checksum.update(part)
            except files.TransferCorrupted:
                return None
        return FileInfo(size, checksum.hexdigest())

    def _read(self, path: RunPath) -> bytes:
        content = bytearray()
        for part in files.iter_chunks(path, size_bytes=READ_BYTES):
            self._limit.spend(len(part))
            content += part
        return bytes(content)

    def _publish(
        self, end: int, staged: Mapping[str, bytes], in_force: Mapping[str, Commit]
    ) -> None:
        """Makes the copied steps and the records part of the replica, and reads them back."""
        self._refuse_diverged()
        self._is_open = False  # After an error the next update looks at what is there.
        new = {seq: self._raw[seq - 1] for seq in range(self._num_there + 1, end + 1)}
        replica_files.update(self._target, manifests=staged, records=new)
        self._num_there = end
        there = files.read_all([self._target.log / file_name(seq) for seq in new])
        if there != list(new.values()):
            raise StorageUnavailable(f"{self._target.log}: reads back differently. Is it faulty?")
        for path in staged:
            manifests.read((self._target.root / path).absolute(), in_force[path])
            self._whole.add(path)
        self._is_open = True

    def _sweep(self, there: RunHistory) -> list[str]:
        """Deletes the steps that the replica's log does not have in force any more.

        Of a step that was judged damaged while it was being copied, the half that is there.
        """
        recorded = {path.rpartition("/")[2] for path in there.paths}
        committed = {commit.path.rpartition("/")[2] for commit in there.committed}
        kept = committed | {
            name
            for name in there.protected_dirs - committed
            if files.exists(self._target.checkpoints / name / MANIFEST)
        }
        dead = [
            found.name
            for found in step_dirs.listed(self._target.checkpoints)
            if found.name in recorded - kept
        ]
        for name in dead:
            self._refuse_diverged()
            files.delete_tree(self._target.checkpoints / name)
            self._whole.discard(f"checkpoints/{name}")
        self._delete_leftovers()
        return dead

    def _delete_leftovers(self) -> None:
        """Deletes temporary files of killed updates.

        In the root the heartbeat of the run lock is written meanwhile: there only the update's own.
        """
        root = self._target.root
        for folder in (self._target.checkpoints, self._target.log, self._target.attempts):
            files.delete_leftovers(folder)
        files.delete_leftovers(root / "tokenizers")
        files.delete_leftovers(root, of=OWN_FILES)

    def _copy_pins(self, there: RunHistory) -> None:
        """Adds the pins of the source; removes pins of steps that the replica does not have."""
        pins, own = pruning.pinned(self._source), pruning.pinned(self._target)
        steps = {commit.step for commit in there.committed}
        for step in pins & steps - own:
            pruning.pin(self._target, step)
        for step in own - steps:
            pruning.unpin(self._target, step)

    def _copy_hosts_left_out(self) -> None:
        """Adds the hosts that are excluded, and the faults reported or forgotten, in the source."""
        for folder, to in (
            (self._source.excluded_hosts, self._target.excluded_hosts),
            (self._source.reported_faults, self._target.reported_faults),
            (self._source.forgotten_faults, self._target.forgotten_faults),
        ):
            for name in sorted(set(files.list_names(folder)) - set(files.list_names(to))):
                self._refuse_link_outside(folder / name)
                files.make_dir(to)
                files.create(to / name, files.read(folder / name) or b"")

    def _copy_attempts(self, records: Sequence[Record]) -> None:
        """Copies configs, tokenizers, metrics and events of the recorded attempts."""
        self._copy_small(self._source.config, self._target.config)
        if (tokenizer := run_log.recorded_tokenizer(records)) is not None:
            folder, to = self._source.tokenizer(tokenizer), self._target.tokenizer(tokenizer)
            for name in files.sizes(folder):
                self._copy_small(folder / name, to / name)
        self._copy_lines(self._source.supervisor_events, self._target.supervisor_events)
        for attempt in sorted({record.attempt for record in records}):
            folder, to = self._source.attempt(attempt), self._target.attempt(attempt)
            for name in files.list_names(folder):
                if name.endswith(".jsonl"):
                    self._copy_lines(folder / name, to / name)
                elif name in (CONFIG, self._source.sharding(attempt).name):
                    self._copy_small(folder / name, to / name)

    def _copy_small(self, path: RunPath, to: RunPath) -> None:
        """Copies a file that does not change, unless it is there."""
        self._refuse_link_outside(path)
        if (content := files.read(path)) is None:
            return
        mode = file_mode(content.decode(errors="replace")) if path.name == CONFIG else 0o666
        is_open = (
            mode == PRIVATE and isinstance(to, Path) and to.exists() and to.stat().st_mode & 0o77
        )
        if is_open or files.read(to) != content:
            files.make_dir(to.parent)
            self._limit.spend(len(content))
            files.replace(to, content, mode=mode)

    def _refuse_link_outside(self, path: RunPath) -> None:
        """Raises ConfigError for a file of the source that is elsewhere; steps have digests.

        The run may be of another user: a link could lead to any file that this account can read.
        """
        if not _is_inside(path, self._source.root):
            raise ConfigError(
                f"{path}: is, through a link, outside of the run directory. Put the file itself "
                "there, or remove the link. It was not copied."
            )

    def _copy_lines(self, path: RunPath, to: RunPath) -> None:
        """Appends the whole lines that the copy lacks; a killed update has left a part of one."""
        self._refuse_link_outside(path)
        with files.typed_errors(to):
            start = line_writer.cut_partial_line(to)
        rest, writer = b"", None
        try:
            for part in line_writer.iter_parts(path, start=start):
                whole, newline, rest = (rest + part).rpartition(b"\n")
                if not newline:
                    continue
                self._limit.spend(len(whole) + 1)
                writer = writer or line_writer.open_line_writer(
                    to, max_waiting=MAX_WAITING_LINES, on_overflow="refuse"
                )
                writer.append(whole)
            if writer is not None:
                writer.sync()
        finally:
            if writer is not None:
                writer.close()


def _is_inside(path: RunPath, folder: RunPath) -> bool:
    if is_remote(path) and is_remote(folder):
        return path.bucket == folder.bucket and path.key.startswith(f"{folder.key}/")
    if is_remote(path) or is_remote(folder):
        return False
    return path.resolve().is_relative_to(folder.resolve())
