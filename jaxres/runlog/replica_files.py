"""The files by which a folder is the replica of a run, and the atomic update of its run log.

`REPLICA.json` names the run. An update of the log is one object, `replica-update.json`: the
manifests of the steps that are new, and the records. Once it exists the update is decided, and the
next process that starts there finishes it: the manifests first, then the records in order, then the
object is deleted. So a kill at any instant leaves the state before or after the update.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxres.faults import Fenced, RunError, StorageUnavailable, Unrestorable, command_line
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record, file_name, fold, last_seq, read_records
from jaxres.runlog.step_dirs import MANIFEST
from jaxres.storage import files
from jaxres.storage.checksummed_json import decode_checksummed, encode_checksummed
from jaxres.storage.path import RunPath, require_inside

FORMAT = 1
MARKER = "REPLICA.json"
UPDATE = "replica-update.json"
PROGRESS = "replica.json"
"""File in the run directory itself: the progress of its replica."""
TRIES = 3
"""How often a manifest is written until it reads back as it should."""


class Diverged(Fenced):
    """A run continues in the replica: its log has records that the source does not have."""


@dataclass(frozen=True)
class Marker:
    """Content of `REPLICA.json`."""

    run: str
    """Nonce of the run's first claim."""
    source: str
    """Run directory that the folder is a replica of."""
    seq: int = 0
    """Number of records in the replica; if its log has more, a run continues there."""
    step: int = 0
    """Newest committed step in the replica; 0: none."""
    time: float = 0.0
    """Wall-clock time of the newest update, in seconds since the epoch; for display."""


def read_marker(run_dir: RunDir) -> Marker | None:
    """Returns the marker of a replica; None: the folder is none.

    Raises:
      Unrestorable: the file is damaged.
    """
    path = run_dir.root / MARKER
    if (data := files.read(path)) is None:
        return None
    try:
        fields = decode_checksummed(data, number=FORMAT)
        del fields["format"]
        return Marker(**fields)
    except (ValueError, TypeError) as error:
        raise Unrestorable(
            f"{path}: can't be read ({error}). It names the run that this folder is a replica of. "
            "Delete the file to use the folder as a run directory; nothing was changed."
        ) from error


def write_marker(run_dir: RunDir, marker: Marker) -> None:
    """Writes the marker."""
    fields = {"format": FORMAT, **dataclasses.asdict(marker)}
    files.replace(run_dir.root / MARKER, encode_checksummed(fields))


@dataclass(frozen=True)
class ReplicaProgress:
    """Content of `replica.json`, for display and for the lag; no decision on data uses it."""

    path: str
    """Folder of the replica."""
    seq: int = 0
    """Number of records in the replica."""
    step: int = 0
    """Newest committed step in the replica; 0: none."""
    error: str = ""
    """Why the newest copy has failed; empty: it has not."""


def read_progress(run_dir: RunDir) -> ReplicaProgress | None:
    """Returns the replica's progress; None: there is no replica, or the file can't be decoded."""
    try:
        fields = decode_checksummed(files.read(run_dir.root / PROGRESS) or b"", number=FORMAT)
        return ReplicaProgress(fields["path"], fields["seq"], fields["step"], fields["error"])
    except (ValueError, KeyError):
        return None


def write_progress(run_dir: RunDir, progress: ReplicaProgress) -> None:
    """Writes the progress of a run's replica."""
    fields = {"format": FORMAT, **dataclasses.asdict(progress)}
    files.replace(run_dir.root / PROGRESS, encode_checksummed(fields))


def update(
    run_dir: RunDir, *, manifests: Mapping[str, bytes], records: Mapping[int, bytes]
) -> None:
    """Adds steps and records to a replica, all of them or none.

    Args:
      run_dir: the replica.
      manifests: path of a step directory, whose files are complete but for this -> its manifest.
      records: number -> bytes of the records that follow the newest one there.

    Raises:
      Diverged: the folder has another record in one of these places.
    """
    fields = {
        "format": FORMAT,
        "manifests": {path: data.decode() for path, data in manifests.items()},
        "records": {str(seq): data.decode() for seq, data in records.items()},
    }
    files.replace(run_dir.root / UPDATE, encode_checksummed(fields))
    if not finish_update(run_dir):
        raise diverged(run_dir)


def diverged(run_dir: RunDir) -> Diverged:
    """Returns the error that a replica has become a run of its own."""
    return Diverged(
        f"{run_dir.root}: a run goes on here: its log has records that the source does not have. "
        "Nothing more is copied, and nothing here was overwritten. Give another folder for the "
        "replica; if this one isn't needed, delete it first."
    )


def finish_update(run_dir: RunDir) -> bool:
    """Finishes an update that a killed process has left; False: the log has other records.

    Raises:
      Unrestorable: the update is damaged.
      StorageUnavailable: storage failed; the next call goes on.
    """
    path = run_dir.root / UPDATE
    if (data := files.read(path)) is None:
        return True
    try:
        fields = decode_checksummed(data, number=FORMAT)
        records = {int(seq): text.encode() for seq, text in fields["records"].items()}
        texts = fields["manifests"].items()
        manifests = {require_inside(name): text.encode() for name, text in texts}
    except (ValueError, KeyError, AttributeError) as error:
        raise Unrestorable(
            f"{path}: can't be read ({error}). It is the newest update of a replica. Delete it, "
            "then run `jaxres checkpoints replicate` again or, if the source is lost, "
            f"`{command_line('jaxres checkpoints adopt', run_dir.root)}`. Nothing was changed."
        ) from error
    is_own = _write_update(run_dir, manifests, records)
    files.delete(path)
    return is_own


def _write_update(
    run_dir: RunDir, manifests: Mapping[str, bytes], records: Mapping[int, bytes]
) -> bool:
    """Writes the manifests, then the records; False: the log has other records."""
    places = [run_dir.log / file_name(seq) for seq in records]
    present = files.read_all(places)
    if any(there not in (None, own) for there, own in zip(present, records.values(), strict=True)):
        return False
    for name, manifest in manifests.items():
        _replace_verified(run_dir.root / name / MANIFEST, manifest)
    files.make_dir(run_dir.log)
    for seq in sorted(records):
        place = run_dir.log / file_name(seq)
        if not files.create(place, records[seq]) and files.read(place) != records[seq]:
            return False
    return True


def _replace_verified(path: RunPath, data: bytes) -> None:
    """Writes a file and reads it back: a record must not name a step with a wrong manifest."""
    for _ in range(TRIES):
        files.replace(path, data)
        with files.typed_errors(path):
            files.drop_page_cache(path)
        if files.read(path) == data:
            return
    raise StorageUnavailable(
        f"{path}: reads back differently from what was written. The step does not count as copied. "
        "Is the disk, the network or this machine's memory faulty?"
    )


def refuse_older_run(run_dir: RunDir, replica: RunPath, records: Sequence[Record]) -> None:
    """Refuses to train a run whose replica has more of it, as after a restore from a backup.

    A replica that can't be read, or is of another run, is the replicator's to report.

    Args:
      records: log of the run; empty: it has none, or has lost it.

    Raises:
      Unrestorable: the replica has records that the run does not have.
    """
    marker = None
    with contextlib.suppress(RunError):
        marker = read_marker(RunDir(replica))
    if marker is None or marker.seq <= last_seq(records):
        return
    claims = fold(records).claims
    is_own = marker.run == claims[0].nonce if claims else marker.source == str(run_dir.root)
    if is_own:
        raise Unrestorable(
            f"{run_dir.root}: its replica {replica} is newer: it has step {marker.step} and "
            f"{marker.seq} records of the log, of which this run directory has "
            f"{last_seq(records)}. Was it restored from a backup, or emptied? Nothing was changed. "
            f"Go on in the replica, with another place for its own replica: run.dir={replica} "
            "checkpoint.replica.path=OTHER. To train from here nevertheless, give another "
            "checkpoint.replica.path."
        )


def prepare_start(run_dir: RunDir) -> None:
    """Makes a replica ready for a run that continues there; does nothing in other folders.

    Raises:
      Unrestorable: no committed step was copied yet, so a run would begin at step 0.
    """
    if (marker := read_marker(run_dir)) is None:
        return
    finish_update(run_dir)
    records = read_records(run_dir.log)
    if not fold(records).commits and last_seq(records) <= marker.seq:
        copy = command_line("jaxres checkpoints replicate", marker.source, run_dir.root)
        raise Unrestorable(
            f"{run_dir.root}: is a replica of {marker.source} without a committed step yet, so a "
            f"run here would begin at step 0. Finish the copy: {copy}. If the source is lost, give "
            "another run.dir for a new run."
        )
