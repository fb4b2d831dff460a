"""Next action of a Slurm job of a run: train, be submitted again, or end. Pure.

The job's script runs one process, which starts the training on the nodes of the job (`srun`), and
decides what follows when it ends. It applies the restart policy of `launch local`, with the same
budgets, so that Slurm is never asked to repeat what can't succeed. What it must remember beyond one
job is in a journal in the shared folder of the run's jobs; how an attempt ended is in the run log.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxres.config import RunConfig
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.launch.here_document import here_document
from jaxres.runlog.attempt_result import AttemptOutcome, is_named_twice
from jaxres.runlog.run_log import AttemptEnded, Claim, Commit, Record, in_force
from jaxres.storage.codec import TaggedCodec
from jaxres.supervisor import restart_policy
from jaxres.supervisor.restart_policy import KILLED, NO_EXIT_RECORD, GiveUp

LEAST_SECONDS = 120.0
"""Less time than this before the job's limit is not worth another attempt in the same job."""
EARLY_SECONDS = 60.0
"""Slurm may send a job's signal so much earlier than asked."""
SHORT_FLAGS = {"-N": "nodes", "-x": "exclude", "-J": "job-name", "-o": "output", "-a": "array"}
SHORT_FLAGS |= {"-d": "dependency", "-n": "ntasks", "-k": "no-kill", "-W": "wait"}
SHORT_FLAGS |= {"-e": "error", "-M": "clusters"}
"""Short options of sbatch whose long ones are used here."""
REFUSED_FLAGS = frozenset(
    {
        *("array", "clusters", "dependency", "error", "job-name", "nodes", "no-kill"),
        *("no-requeue", "ntasks"),
        *("ntasks-per-node", "open-mode", "output", "signal", "test-only", "wait", "wrap"),
    }
)
"""Options of sbatch that would undo the script's, or start the run several times."""
JOB_VARIABLES = re.compile(
    "SLURM_(CPUS|CPUS_PER|GPUS|GPUS_PER|JOB|MEM_PER|NTASKS|NTASKS_PER|STEP|TASKS_PER|TRES_PER)_.+"
    "|SLURM_(JOBID|NTASKS|NPROCS|NNODES|NODELIST|PROCID|GPUS|STEPID|THREADS_PER_CORE)|SRUN_.+"
)
"""Variables of a job; sbatch passes those on for which the new job sets no value."""
FILTERS = re.compile(
    "(SQUEUE|SINFO|SCANCEL)_.+|SLURM_TIME_FORMAT|SBATCH_(ARRAY_INX|CLUSTERS|ERROR|JOB_NAME|"
    "NO_KILL|NO_REQUEUE|OPEN_MODE|OUTPUT|REQUEUE|SIGNAL|USE_MIN_NODES|WAIT)"
)
"""Variables that change the answers of Slurm's commands, or override the job's script."""


@dataclass(frozen=True)
class Begun:
    """Journal: training was started on nodes of a job."""

    attempt: int
    """Newest attempt of the run before."""
    step: int
    """Newest committed step before."""
    nodes: tuple[str, ...]
    """Names of the nodes, in the order of the hosts of the attempt."""


@dataclass(frozen=True)
class Ended:
    """Journal: srun has returned."""

    exit: int


@dataclass(frozen=True)
class Final:
    """Journal: no other attempt follows until the user submits a job again."""

    exit: int


@dataclass(frozen=True)
class Submitted:
    """Journal: a job was submitted."""

    job: str


Entry = Begun | Ended | Final | Submitted
ENTRIES: TaggedCodec[Entry] = TaggedCodec(
    "kind", {"begun": Begun, "ended": Ended, "final": Final, "submitted": Submitted}
)


def misleading_variables(names: Iterable[str], arguments: Sequence[str]) -> list[str]:
    """Returns the environment variables by which Slurm would do, or print, something else.

    Args:
      names: the variables of this process.
      arguments: those of `launch slurm`; an option that they have goes before its variable.

    >>> misleading_variables(["SQUEUE_STATES", "SLURM_CONF", "SBATCH_TIMELIMIT"], ["--time=9"])
    ['SBATCH_TIMELIMIT', 'SQUEUE_STATES']
    >>> misleading_variables(["SLURM_CPUS_PER_TASK"], ["job", "a.yaml"])
    []
    """
    given = {word.partition("=")[0] for word in arguments}
    asked = {"SBATCH_TIMELIMIT": "--time", "SBATCH_PARTITION": "--partition"}
    found = {name for name in names if FILTERS.fullmatch(name)}
    found |= {name for name in names if asked.get(name) in given}
    if arguments[:1] != ["job"]:
        found |= {name for name in names if JOB_VARIABLES.fullmatch(name)}
    return sorted(found)


def outcomes(
    journal: Sequence[Entry], records: Sequence[Record]
) -> tuple[AttemptOutcome[str], ...]:
    """Returns the outcome of each attempt since the last final end, oldest first.

    Args:
      journal: all entries; no training runs now.
    """
    found: list[AttemptOutcome[str]] = []
    begun: Begun | None = None
    for entry in journal:
        match entry:
            case Begun():
                found += [] if begun is None else [_outcome(begun, None, records)]
                begun = entry
            case Ended() if begun is not None:
                found.append(_outcome(begun, entry, records))
                begun = None
            case Final():
                found.clear()
                begun = None
            case _:
                pass
    found += [] if begun is None else [_outcome(begun, None, records)]
    return tuple(found)


def idle_jobs(journal: Sequence[Entry], records: Sequence[Record]) -> int:
    """Returns in how many of the newest jobs no attempt of the run has begun.

    Such a job has had too few usable nodes, or srun has failed before the first process started.
    """
    attempts = {r.attempt for r in in_force(records) if isinstance(r.body, Claim)}
    count = 0
    for entry in journal:
        match entry:
            case Submitted():
                count += 1
            case Begun() if entry.attempt + 1 in attempts:
                count = 0
            case Final():
                count = 0
            case _:
                pass
    return count


def final_since(journal: Sequence[Entry], job: str) -> int | None:
    """Returns the exit code of the run's final end since a job was submitted; None: no such end.

    If there is one, the job has waited beside the job that ended the run: for example, Slurm had
    put that job back in the queue after the run was submitted again.

    >>> journal = [Submitted("1"), Submitted("2"), Final(81), Submitted("3")]
    >>> final_since(journal, "2"), final_since(journal, "3")
    (81, None)
    """
    found = None
    for entry in journal:
        if isinstance(entry, Submitted) and entry.job == job:
            found = None
        elif isinstance(entry, Final):
            found = entry.exit
    return found


def has_failed_to_begin(history: Sequence[AttemptOutcome[str]]) -> bool:
    """Returns whether srun has failed last, before an attempt of the run began."""
    return bool(history) and not history[-1].attempt and history[-1].code != ExitCode.DONE


def _outcome(begun: Begun, ended: Ended | None, records: Sequence[Record]) -> AttemptOutcome[str]:
    """Returns the outcome of one start, by the run log if it has an attempt of it."""
    own = [r for r in in_force(records) if r.attempt == begun.attempt + 1]
    before, commits = begun.step, [r.body.step for r in own if isinstance(r.body, Commit)]
    after = max([before, *commits])
    if not any(isinstance(record.body, Claim) for record in own):
        code = KILLED if ended is None else ended.exit
        reason = "srun ended before an attempt began; the output of the job says why"
        return AttemptOutcome(code, reason, before, after)
    end = next((r.body for r in reversed(own) if isinstance(r.body, AttemptEnded)), None)
    if end is None:
        return AttemptOutcome(KILLED, NO_EXIT_RECORD, before, after, attempt=begun.attempt + 1)
    named = end.culprit is not None and end.culprit < len(begun.nodes)
    culprit = begun.nodes[end.culprit] if named and end.culprit is not None else None
    return AttemptOutcome(end.exit, end.reason, before, after, culprit, begun.attempt + 1)


@dataclass(frozen=True)
class Train:
    """Decision: start training on nodes of this job."""

    nodes: tuple[str, ...]
    after_seconds: float
    reason: str


@dataclass(frozen=True)
class Resubmit:
    """Decision: submit the job again, and end this one."""

    exclude: tuple[str, ...]
    """Names of the nodes that the next job must not have."""
    after_seconds: float
    reason: str


@dataclass(frozen=True)
class End:
    """Decision: end, and submit nothing."""

    exit: int
    reason: str


@dataclass(frozen=True)
class Allocation:
    """Nodes and time of the job."""

    nodes: tuple[str, ...]
    """Names of all its nodes."""
    counts: tuple[int, ...]
    """Numbers of nodes that the training can run with, ascending."""
    seconds_left: float | None = None
    """Time until the job's limit; None: it has none."""
    left_out: frozenset[str] = frozenset()
    """Nodes whose hardware has failed, which are excluded by hand, or which are down."""
    signal_seconds: float = 0.0
    """How long before the limit Slurm sends the signal, which it sends only once."""
    is_preempted: bool = False
    """Whether Slurm ends this job for another one: its signal to save has been sent."""

    @property
    def least_seconds(self) -> float:
        """Time until the limit that another attempt needs; the signal has still to come."""
        return max(LEAST_SECONDS, self.signal_seconds + EARLY_SECONDS)


def decide(
    history: Sequence[AttemptOutcome[str]],
    allocation: Allocation,
    config: RunConfig,
    *,
    is_first: bool,
    seed: int,
    idle_jobs: int = 0,
) -> Train | Resubmit | End:
    """Decides the next action of the job.

    Args:
      history: outcomes since the last final end (`outcomes`), also of earlier jobs.
      allocation: what the job has.
      is_first: whether this job has not trained yet.
      idle_jobs: number of the newest jobs in which no attempt has begun (`idle_jobs`).
    """
    decision = _by_restart_policy(history, allocation, config, is_first=is_first, seed=seed)
    limit = config.restart.max_attempts_without_commit
    if isinstance(decision, Resubmit) and idle_jobs >= limit:
        many = f"no attempt has begun in {idle_jobs} jobs in a row"
        return End(ExitCode.NO_PROGRESS, f"{many}; {decision.reason}")
    return decision


def _by_restart_policy(
    history: Sequence[AttemptOutcome[str]],
    allocation: Allocation,
    config: RunConfig,
    *,
    is_first: bool,
    seed: int,
) -> Train | Resubmit | End:
    seconds, reason = 0.0, "the first attempt"
    if history:
        unnamed = [replace(outcome, culprit=None) for outcome in history]
        decision = restart_policy.decide_next(unnamed, config, seed=seed)  # type: ignore[arg-type]
        if isinstance(decision, GiveUp):
            return End(decision.exit, decision.reason)
        seconds, reason = decision.after_seconds, decision.reason
    without = allocation.left_out | _named_twice(history)
    usable = tuple(node for node in allocation.nodes if node not in without)
    exclude = tuple(sorted(without))
    if allocation.is_preempted:
        return Resubmit(exclude, seconds, f"Slurm gives the nodes to another job; {reason}")
    left = allocation.seconds_left
    if not is_first and left is not None and left < allocation.least_seconds + seconds:
        return Resubmit(exclude, seconds, f"the job's time limit is {left:.0f} s away; {reason}")
    fitting = [count for count in allocation.counts if count <= len(usable)]
    if not fitting:
        few = f"{len(usable)} of the job's nodes are usable, {allocation.counts[0]} are needed"
        return Resubmit(exclude, seconds, f"{few}; {reason}")
    return Train(usable[: fitting[-1]], seconds, reason)


def _named_twice(history: Sequence[AttemptOutcome[str]]) -> frozenset[str]:
    """Returns the nodes that two consecutive failures have named, with no commit between them."""
    found, since = set[str](), 0
    for number in range(1, len(history) + 1):
        culprit = history[number - 1].culprit
        if culprit is not None and is_named_twice(history[since:number]):
            found.add(culprit)
            since = number
    return frozenset(found)


@dataclass(frozen=True)
class JobOptions:
    """Options of the job, as `launch slurm` got them."""

    name: str
    least: int
    most: int
    partitions: tuple[str, ...] = ()
    time: str = ""
    """Time limit as Slurm takes it; empty: the partition's."""
    signal_seconds: int = 300
    """How long before the limit the training is asked to save."""
    sbatch: tuple[str, ...] = ()
    """Other options of sbatch, such as `--gpus-per-node=8`."""
    setup: str = ""
    """Line of the shell before Python starts, such as `source venv/bin/activate`."""


def check_sbatch(options: Sequence[str]) -> None:
    """Raises UsageError for an option of `--sbatch` that would break the job's script."""
    for option in options:
        # A line of a script may have several options, and sbatch takes the start of a name for it.
        flags = [_sbatch_flag(word) for word in option.split() if word.startswith("-")]
        if not option.startswith("-"):
            raise UsageError(
                f"--sbatch={option}: expected an option, as --sbatch=--gpus-per-node=8"
            )
        if any(name.startswith(flag) for flag in flags if flag for name in REFUSED_FLAGS):
            raise UsageError(
                f"--sbatch={option}: the script of `launch slurm` decides this by itself, and by "
                "--nodes, --time, --partition and --signal-seconds"
            )


def check_time(limit: str, signal_seconds: int) -> None:
    """Raises UsageError for a time limit before which no step would be trained."""
    seconds = _limit_seconds(limit)
    if seconds is not None and seconds <= signal_seconds + EARLY_SECONDS:
        raise UsageError(
            f"--time {limit}: the run saves and ends {signal_seconds} s before the limit, at times "
            f"{EARLY_SECONDS:.0f} s earlier, so it would not train. Give a longer limit, or a "
            "smaller --signal-seconds"
        )


def _limit_seconds(limit: str) -> float | None:
    """Returns the seconds of a time limit as sbatch takes it; None: unlimited, or no such limit.

    >>> [_limit_seconds(limit) for limit in ("5", "5:30", "1:00:00", "1-1", "0", "UNLIMITED")]
    [300.0, 330.0, 3600.0, 90000.0, None, None]
    """
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,2}))?(?::(\d{1,2}))?", limit, re.ASCII)
    if match is None:
        return None
    days, *parts = match.groups()
    first, second, third = (int(part or 0) for part in parts)
    is_minutes = days is None and parts[2] is None  # "minutes" and "minutes:seconds".
    seconds = 60 * first + second if is_minutes else 3600 * first + 60 * second + third
    return float(86400 * int(days or 0) + seconds) or None


def _sbatch_flag(option: str) -> str:
    """Returns the long name of an option of sbatch.

    >>> _sbatch_flag("--array=0-3"), _sbatch_flag("-a0-3"), _sbatch_flag("--mem 0")
    ('array', 'array', 'mem')
    """
    if option.startswith("--"):
        return re.split("[= ]", option[2:], maxsplit=1)[0]
    return SHORT_FLAGS.get(option[:2], "")


def excluded(sbatch: Sequence[str], nodes: Sequence[str]) -> str:
    """Returns the next job's --exclude: `nodes`, and the script's nodes, which it overrides.

    Args:
      sbatch: options of sbatch, which may exclude nodes too.
      nodes: names of nodes that the next job must not have.

    >>> excluded(["--exclude=n[7-9]", "--mem=0"], ["n1"]), excluded([], [])
    ('n1,n[7-9]', '')
    """
    own = [
        re.split("[= ]|^-x", option, maxsplit=1)[1].strip("= ")
        for option in sbatch
        if _sbatch_flag(option) == "exclude"
    ]
    return ",".join([*nodes, *own])


def gpus_per_node(sbatch: Sequence[str]) -> int | None:
    """Returns the GPUs per node that sbatch's options request; None: not known.

    >>> gpus_per_node(["--gpus-per-node=h100:8"]), gpus_per_node(["--mem=0", "--gres=gpu:4"])
    (8, 4)
    >>> gpus_per_node(["--gpus=16"]), gpus_per_node([])
    (None, None)
    """
    pattern = r"--(?:gpus-per-node=|gres=gpu:)(?:[A-Za-z][\w.-]*:)?([1-9]\d{0,4})"
    found = [match[1] for option in sbatch if (match := re.fullmatch(pattern, option))]
    return int(found[-1]) if found else None


def script(options: JobOptions, *, output: str, file: str, config: str, command: str) -> str:
    """Returns the job's script.

    Args:
      output: path of the output, with Slurm's `%j` for the number of the job.
      file: path at which the script writes the config, for all attempts.
      command: command of the process that starts the training, quoted for the shell.
    """
    is_fixed = options.least == options.most
    nodes = str(options.most) if is_fixed else f"{options.least}-{options.most}"
    lines = [
        f"--job-name={options.name}",
        f"--nodes={nodes}",
        f"--output={output}",
        "--open-mode=append",
        "--requeue",  # After the failure of a node, or a preemption by another job.
        "--dependency=singleton",  # A job that was submitted again begins when this one has ended.
        f"--signal=TERM@{options.signal_seconds}",  # To the tasks, not to this script.
    ]
    lines += [f"--partition={','.join(options.partitions)}"] if options.partitions else []
    lines += [f"--time={options.time}"] if options.time else []
    # With a number of tasks Slurm gives the least number of nodes of a range, even if it has more.
    lines += ["--ntasks-per-node=1"] if is_fixed else ["--no-kill"]
    lines += options.sbatch
    head = "".join(f"#SBATCH {line}\n" for line in lines)
    setup = f"{options.setup}\n" if options.setup else ""
    write = here_document(f"(umask 077; cat > {shlex.quote(file)})", config)
    return f"#!/bin/bash\n{head}set -e\n{setup}{write}\nexec {command}\n"
