"""Items of the production checklist on saved states: how often, where, at a notice. Pure.

Each passes only on evidence; without it, it warns with what would be evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxres.config import RunConfig
from jaxres.config.schema.checkpoint import AutoWhen, EpochsWhen, StepsWhen, When
from jaxres.estimate.job_estimate import PREEMPTIBLE, JobEstimate
from jaxres.operate.doctor import estimates
from jaxres.operate.doctor.check import ItemResult, not_applicable, ok, warn
from jaxres.operate.doctor.facts import Facts
from jaxres.operate.report import number_text
from jaxres.storage.path import is_remote
from jaxres.telemetry.stdio import format_bytes

ELSEWHERE = "the job runs on other machines: run `jaxres doctor` on one of them"
MAX_LOST_SHARE = 0.01
"""Share of the time that an interval may lose beyond the best one."""
LONGEST_RESTORE_SECONDS = 600.0
"""Restore from which on storage is slow: the field asks for 5 to 10 minutes."""
LATER = "Set checkpoint.when.kind=auto, or run `jaxres doctor` again once the run has steps"
MEASURE = "Run `jaxres doctor CONFIG --storage` on a machine of the job"
MEASURE_VM = "Run `launch gce check CONFIG`, which measures it on a VM"
IN_MEMORY = ("tmpfs", "ramfs")


def sharded(_: RunConfig, facts: Facts) -> ItemResult:
    """Judges whether each host writes its own part."""
    if not facts.estimate.has_state:
        return ok("each host writes its own shards of the state")
    share = format_bytes(round(facts.estimate.job.state_bytes / facts.num_hosts))
    return ok(f"each host writes its own shards: {share}, if they are equal")


def interval(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges the time between two saves."""
    when, known = config.checkpoint.when, facts.estimate
    is_steps = isinstance(when, StepsWhen)
    if estimates.is_small(config, facts):
        return ok("a run that is quickly repeated")
    if is_steps and when.every_steps >= config.train.steps:
        return warn(
            f"a save every {when.every_steps} steps, of {config.train.steps}: only the last step "
            "is saved",
            "Set checkpoint.when.kind=auto",
        )
    if isinstance(when, EpochsWhen):
        return warn(
            f"a save every {when.every_epochs} epochs, of unknown duration; the optimum is about "
            f"{number_text.duration(known.best_interval_seconds)}",
            "Set checkpoint.when.kind=auto, unless a save has to be of whole epochs",
        )
    seconds = estimates.interval_seconds(config, facts)
    is_measured = not is_steps or known.step_seconds is not None
    if seconds is None:
        return warn("the duration of a step is unknown", LATER)
    lost, per_hour = known.lost_share(seconds), known.losses_per_hour
    source = " or more" if not is_measured else ", measured" if is_steps else ""
    failures = f"a failure or unsaved preemption every {1 / per_hour:.3g} h" if per_hour else ""
    found = (
        f"{_when_text(when)}{number_text.duration(seconds)}{source}, the optimum is "
        f"about {number_text.duration(known.best_interval_seconds)} ({failures or 'no failures'})"
    )
    if lost > MAX_LOST_SHARE and (is_measured or seconds > known.best_interval_seconds):
        return warn(f"{found}: {100 * lost:.0f} % of the time more is lost", _better(when, known))
    if not is_measured:
        return warn(f"{found}: no step was measured", LATER)
    return ok(found)


def _when_text(when: When) -> str:
    """Returns the begin of the text of an interval."""
    if isinstance(when, StepsWhen):
        return f"a save every {when.every_steps} steps, "
    return "at first a save every " if isinstance(when, AutoWhen) else "a save every "


def _better(when: When, known: JobEstimate) -> str:
    if isinstance(when, AutoWhen):
        hours = 1 / known.losses_per_hour
        return f"Set checkpoint.when.mtbf_hours={hours:.3g}"
    return "Set checkpoint.when.kind=auto, which measures it"


def fast_storage(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges the measured rates of the place of the run."""
    known = facts.estimate
    if facts.file_system in IN_MEMORY:
        return warn(
            f"{facts.run_root} is in memory ({facts.file_system}): a restarted machine has lost it",
            "Choose a disk or a bucket with run.dir=...",
        )
    if not known.has_state:
        return warn("the size of the state is unknown", "See the checks above")
    job = known.job
    found = (
        f"a save takes {number_text.duration(job.write_seconds)}, a restore "
        f"{number_text.duration(job.read_seconds)} ({known.rates})"
    )
    if not known.is_measured:
        return warn(
            f"{found}; {facts.run_root} was not measured",
            MEASURE_VM if known.kind else MEASURE,
        )
    if job.read_seconds > LONGEST_RESTORE_SECONDS and config.checkpoint.memory is None:
        return warn(
            f"{found}: each restart reads the state from there",
            "Set checkpoint.memory={} for restarts from host memory, or choose faster storage",
        )
    if job.write_seconds > known.best_interval_seconds / 2:
        return warn(
            f"{found}: saves are limited by storage, not by what failures cost",
            "Choose faster storage, or more hosts",
        )
    return ok(found)


def digests(config: RunConfig, _: Facts) -> ItemResult:
    """Judges whether committed steps are verified again."""
    saved = "every byte of a save is read back and compared before its commit"
    if config.checkpoint.scrub is None:
        return warn(
            f"{saved}, but committed steps are not verified again", "Remove checkpoint.scrub=null"
        )
    return ok(f"{saved}, and again every {config.checkpoint.scrub.every_hours:g} h")


def replica(config: RunConfig, _: Facts) -> ItemResult:
    """Judges whether there is a second place."""
    replica = config.checkpoint.replica
    if replica is None:
        return warn(
            "committed steps are in one place only",
            "Set checkpoint.replica.path=gs://OTHER-BUCKET/RUN or a folder of another disk",
        )
    if replica.lag_minutes is None:
        return warn(
            f"a copy in {replica.path}, and no alert if it falls behind",
            "Set checkpoint.replica.lag_minutes",
        )
    return ok(f"a verified copy in {replica.path}, an alert after {replica.lag_minutes:g} min")


def replica_place(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges whether that place survives the loss of the first."""
    replica, root = config.checkpoint.replica, facts.run_root
    if replica is None:
        return not_applicable("there is no replica")
    other = "Choose another bucket, in another region, or another disk"
    if is_remote(replica.path) and is_remote(root):
        if replica.path.bucket == root.bucket:
            return warn(f"the replica is in the same bucket, {root.bucket}", other)
        return _regions(root.bucket, replica.path.bucket, facts)
    if is_remote(replica.path) or is_remote(root):
        return ok("one of the two places is a bucket, the other a disk")
    if facts.shares_disk:
        return warn("the replica is on the file system of the run directory", other)
    if not facts.is_here:
        return not_applicable(ELSEWHERE)
    return ok("the replica is on another file system")


def _regions(own: str, other: str, facts: Facts) -> ItemResult:
    places = [facts.bucket_places.get(bucket) for bucket in (own, other)]
    names = [None if place is None else place.name for place in places]
    if None in names:
        unknown = " and ".join(b for b, n in zip((own, other), names, strict=True) if n is None)
        return warn(
            f"buckets {own} and {other}; the region of {unknown} is not known",
            "Give this account storage.buckets.get, and run `jaxres doctor` where the job starts",
        )
    found = f"bucket {own} is in {names[0]}, {other} in {names[1]}"
    if names[0] == names[1] and all(place and place.kind == "region" for place in places):
        return warn(f"{found}: one region", "Choose a bucket in another region")
    return ok(found)


def retention(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges whether steps are kept from before damage that is noticed late."""
    kept, keep = estimates.kept_text(config, facts), config.checkpoint.keep
    if kept is None:
        return not_applicable("the size of the state is unknown")
    far = {"hours": keep.hours, "daily": keep.daily, "weekly": keep.weekly}
    tiers = [f"{name}={value:g}" for name, value in far.items() if value]
    tiers += [f"every_steps={keep.every_steps}"] if keep.every_steps else []
    if estimates.is_small(config, facts):
        return ok(kept)
    if not tiers:
        return warn(
            f"{kept}: only the newest steps, none from before damage that is noticed later",
            "Set checkpoint.keep.hours, daily, weekly or every_steps",
        )
    return ok(f"{kept} ({', '.join(tiers)})")


def save_at_notice(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges whether a notice leaves the time to save the state."""
    gce, known, own = config.launch.gce, facts.estimate, config.preemption
    seconds, room = known.job.write_seconds, known.room_seconds
    if gce is None and own.sigterm_seconds is None:
        return ok("SIGTERM and notices save the last finished step, if there is time")
    if gce is None:
        assert own.sigterm_seconds is not None
        room = own.sigterm_seconds - own.margin_seconds
    elif not any(option.kind in PREEMPTIBLE for option in gce.capacity_options):
        return ok("no option is preemptible; SIGTERM saves the last finished step")
    elif own.metadata == "off":
        return warn(
            "VMs may be preempted, and preemption.metadata is off", "Set preemption.metadata=auto"
        )
    if not known.has_state:
        return warn(f"a notice leaves {room:g} s; the size of the state is unknown", "See above")
    found = f"a save takes {seconds:.3g} s ({known.rates}), a notice leaves {room:g} s"
    if seconds + known.job.stall_seconds <= room:
        return ok(found)
    return warn(
        f"{found}: it saves nothing",
        "Save more often (checkpoint.when.kind=auto), set checkpoint.memory.neighbor_copies, or "
        "ask for longer notices (docs/many-hosts.md)",
    )


def capacity(config: RunConfig, facts: Facts) -> ItemResult:
    """Judges whether the job gets machines, and what a preemption of all of them costs."""
    gce = config.launch.gce
    if gce is None:
        return not_applicable("the job uses no VMs of `launch gce`")
    kinds = [option.kind for option in gce.capacity_options]
    if all(kind in PREEMPTIBLE for kind in kinds):
        return warn(
            f"only {listed(kinds)} VMs: without such capacity the job waits",
            "Add an option of kind standard or reservation to launch.gce.capacity_options",
        )
    places = {zone for option in gce.capacity_options for zone in option.zones}
    if len(kinds) == 1 and len(places) == 1:
        return warn(
            f"one option in one zone ({kinds[0]}, {places.pop()})",
            "Add zones or options to launch.gce.capacity_options",
        )
    found = f"{listed(kinds)}, in {len(places)} zones; all VMs of a job are of one option"
    known = facts.estimate
    if kinds[0] not in PREEMPTIBLE or (known.is_measured and known.job.is_saved_at_notice):
        return ok(found)
    return warn(
        f"{found}: no mixed fleet, so all of it may be preempted at once; that a notice then saves "
        "the state is not shown",
        f"{MEASURE_VM}, or name a standard option first",
    )


def listed(kinds: Sequence[str]) -> str:
    """Returns kinds without repetitions, as text."""
    return ", ".join(dict.fromkeys(kinds))
