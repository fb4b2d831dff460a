"""`launch slurm`: submits a job to Slurm, and restarts the training inside it.

Slurm places the job; jaxres decides whether a restart makes sense, on which nodes, and whether the
job is submitted again (job.py). One process of the job's script starts `python -m
jaxres.train` on its nodes by srun, as one attempt, until the run ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from jaxres import config as configs
from jaxres import faults
from jaxres.cluster.detect import COORDINATOR, VARIABLES, Address, slurm_port
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser, path_argument
from jaxres.config.schema.supervision import RestartSection
from jaxres.exit_codes import ExitCode, RestartRule, exit_name, exit_row
from jaxres.faults import Fenced, RunError, UsageError, command_line
from jaxres.host import signals
from jaxres.launch import argument_checks, local
from jaxres.launch.slurm import client as slurm_commands
from jaxres.launch.slurm import job as slurm_job
from jaxres.launch.slurm.job import (
    Allocation,
    Begun,
    End,
    Ended,
    Final,
    JobOptions,
    Resubmit,
    Submitted,
    Train,
)
from jaxres.launch.slurm.journal import Journal
from jaxres.launch.storage_retry import with_retries
from jaxres.runlog import faulty_hosts, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Record
from jaxres.secret_values import PRIVATE
from jaxres.storage import files
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor.attempt import print_message
from jaxres.supervisor.preemption import time_limit
from jaxres.supervisor.run_config import parse_target, recorded_root, resolve_run
from jaxres.telemetry import stdio

T = TypeVar("T")
COMMAND = "python -m jaxres.launch slurm"
USAGE = """\
usage: python -m jaxres.launch slurm CONFIG.yaml|RUN_DIR [section.field=value ...] --nodes N|A..B
           [--partition NAME[,NAME...]] [--time LIMIT] [--signal-seconds S] [--setup LINE]
           [--sbatch=OPTION ...] [--folder FOLDER] [--dry-run]
       python -m jaxres.launch slurm status RUN_DIR
       python -m jaxres.launch slurm logs RUN_DIR
       python -m jaxres.launch slurm stop RUN_DIR     save, then end; a waiting job is cancelled

Submits a job that trains with one task a node, restarts the training by the same rules as `launch
local`, and submits itself again before its time limit or without a node that has failed. It ends by
itself: with 0 when the last step is committed, with the code of what can't be retried (76, 78, 81,
85), or with 84 when a budget of restarts is used up. `scancel` ends it too, after a save.
--nodes N|A..B: number of nodes; A..B: as many as there are, and with fewer if some fail.
--partition: of several, Slurm takes the one that starts first.
--time: time limit as sbatch takes it, such as 24:00:00.
--signal-seconds: how long before the limit the training saves and the job is submitted again (300).
--setup: line of the shell before Python starts, such as "source venv/bin/activate".
--sbatch: another option of sbatch, such as --sbatch=--gpus-per-node=8; may be repeated.
--folder: shared folder of the job's script, output and journal (RUN_DIR/slurm).
--dry-run: prints the script, submits nothing.
"""
VERBS = ("status", "logs", "stop", "job")
STEP_SECONDS = 300
"""Longest wait for the nodes of the job, on which the step before may still end."""
TAIL_LINES = 40
MAX_SIGNAL_SECONDS = 65535
"""Slurm's own limit."""


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs `launch slurm`; returns the exit code."""
    verb, rest = arguments[:1], arguments[1:]
    if verb == ["job"]:
        return _job(_parse(rest), env=env)
    if verb and verb[0] in VERBS:
        return {"status": _status, "logs": _logs, "stop": _stop}[verb[0]](rest)
    return _submit(_parse(arguments))


@dataclass(frozen=True)
class _Options:
    """Parsed command line of a submission, and of the job's own process."""

    arguments: tuple[str, ...]
    """Config file or run directory, absolute, and overrides."""
    flags: tuple[str, ...]
    """The other arguments, for the job's own process."""
    job: JobOptions
    folder: str | None
    is_dry_run: bool


def _parse(arguments: Sequence[str]) -> _Options:
    parser = Parser(prog=COMMAND, usage=USAGE, add_help=False)
    parser.add_argument("--nodes", default="")
    parser.add_argument("--partition", default="")
    parser.add_argument("--time", default="")
    parser.add_argument("--signal-seconds", type=int, default=300)
    parser.add_argument("--setup", default="")
    parser.add_argument("--sbatch", action="append", default=[])
    parser.add_argument("--folder")
    parser.add_argument("--dry-run", action="store_true")
    given, others = parser.parse_known_args(list(arguments))
    target, overrides = parse_target(others, command=COMMAND)
    if not given.nodes:
        raise UsageError(f"--nodes: on how many nodes? (usage: `{COMMAND} --help`)")
    least, most = local.parse_range("--nodes", given.nodes)
    argument_checks.number("--nodes", most, 1, argument_checks.MAX_NODES)
    argument_checks.number("--signal-seconds", given.signal_seconds, 1, MAX_SIGNAL_SECONDS)
    lines = [("--setup", given.setup), ("--partition", given.partition), ("--time", given.time)]
    for flag, text in [*lines, *(("--sbatch", option) for option in given.sbatch)]:
        if not text.isprintable():
            raise UsageError(f"{flag} {text[:60]!r}: expected one line without control characters")
    for flag, text in lines[1:]:
        if re.search(r"[\s#'\"\\]", text):
            raise UsageError(f"{flag} {text[:60]!r}: expected no blanks, quotes and #")
    slurm_job.check_sbatch(given.sbatch)
    slurm_job.check_time(given.time, given.signal_seconds)
    where = str(
        target if is_remote(target) or not os.path.exists(target) else Path(target).resolve()
    )
    partitions = tuple(name for name in given.partition.split(",") if name)
    options = JobOptions(
        name="",
        least=least,
        most=most,
        partitions=partitions,
        time=given.time,
        signal_seconds=given.signal_seconds,
        sbatch=tuple(given.sbatch),
        setup=given.setup,
    )
    folder = None if given.folder is None else os.path.abspath(given.folder)
    flags = [f"--nodes={given.nodes}", f"--signal-seconds={given.signal_seconds}"]
    flags += [f"{flag}={text}" for flag, text in [*lines, ("--folder", folder)] if text]
    flags += [f"--sbatch={option}" for option in given.sbatch]
    return _Options((where, *overrides), tuple(flags), options, folder, given.dry_run)


def _journal(run_dir: RunDir, folder: str | None) -> Journal:
    if folder is None and run_dir.is_remote:
        raise UsageError(
            f"{run_dir.root}: the output of a Slurm job is in a file. Give a folder that all nodes "
            "share: --folder /shared/jobs/first"
        )
    found = Path(str(run_dir.root)) / "slurm" if folder is None else Path(folder)
    if re.search(r"[\s%#'\"\\]", str(found)):
        raise UsageError(
            f"{str(found)!r}: Slurm does not take this name for the output of a job. Give a folder "
            "without blanks, quotes, backslashes, # and %: --folder /shared/jobs/first"
        )
    return Journal(found)


def _submit(options: _Options) -> int:
    loaded, run_dir = resolve_run(*parse_target(options.arguments, command=COMMAND))
    gpus = slurm_job.gpus_per_node(options.job.sbatch)
    if options.job.least == options.job.most:
        nodes = options.job.most
        argument_checks.require_feasible(loaded.config, nodes=nodes, gpus_per_node=gpus or 0)
    counts = _counts(options, loaded.config, gpus)
    journal = _journal(run_dir, options.folder)
    text = _script(options, loaded.config, run_dir, journal)
    if options.is_dry_run:
        stdio.write_result(text)
        return ExitCode.DONE
    folder = ("--folder", options.folder) if options.folder else ()
    for job, state in _unfinished(run_dir, journal).items():
        raise Fenced(
            f"job {job} of this run is {state}. Wait for it, or end it: "
            f"`{command_line(f'{COMMAND} stop', run_dir.root, *folder)}`, or `scancel {job}`"
        )
    faulty = faulty_hosts.read(run_dir, warn=stdio.warn)
    files.make_dir(journal.folder)
    # Its config may have a token; only its owner's `sbatch` reads it.
    files.replace(journal.folder / "job.sh", text.encode(), mode=PRIVATE)
    job = journal.submit(_exclude(options, {host.identity.name for host in faulty}))
    found = filter(str.isdecimal, _unfinished(run_dir, journal))
    others = [other for other in found if int(other) < int(job)]
    if others:  # Another command has submitted the run at the same time.
        slurm_commands.call("scancel", job)
        journal.append(Submitted(others[0]))
        raise Fenced(f"job {others[0]} of this run was submitted at the same time; {job} is not")
    shown = str(counts[-1]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    _say(f"job {job} is submitted ({shown} nodes); its output: {_output(journal, job)}")
    with suppress(RunError):
        there = slurm_commands.nodes_of(options.job.partitions)
        if 0 < there < options.job.least:
            _say(f"the job waits until there are so many: {there} nodes are in the partition now")
    status = command_line(f"{COMMAND} status", run_dir.root, *folder)
    _say(f"`{status}` shows where it is; `stop` instead of it ends it")
    return ExitCode.DONE


def _unfinished(run_dir: RunDir, journal: Journal) -> dict[str, str]:
    """Returns the jobs of a run that Slurm has, with their states.

    By their name too: a job whose submission was not answered is not in the journal.
    """
    rows = slurm_commands.call(
        "squeue", "--noheader", "--all", f"--name={_job_name(run_dir)}", "--format=%i|%T"
    )
    found = dict(row.split("|", 1) for row in rows.splitlines() if "|" in row)
    if (job := journal.newest_job()) and (state := slurm_commands.state(job)) is not None:
        found[job] = state
    return found


def _exclude(options: _Options, nodes: Collection[str]) -> list[str]:
    """Returns the option of sbatch by which a job does not get these nodes.

    Without those that Slurm does not know: an excluded host of a run that began elsewhere.
    """
    known = slurm_commands.known_nodes() if nodes else set[str]()
    exclude = slurm_job.excluded(options.job.sbatch, sorted(known.intersection(nodes)))
    return [f"--exclude={exclude}"] if exclude else []


def _job_name(run_dir: RunDir) -> str:
    digest = hashlib.sha256(str(run_dir.root).encode()).hexdigest()[:6]
    return f"jaxres-{re.sub('[^A-Za-z0-9_.-]', '-', run_dir.root.name)}-{digest}"


def _script(options: _Options, config: RunConfig, run_dir: RunDir, journal: Journal) -> str:
    """Returns the job's script; later changes of the config file do not change the job."""
    named = dataclasses.replace(options.job, name=_job_name(run_dir))
    file = str(journal.folder / "config.yaml")
    command = [sys.executable, "-m", "jaxres.launch", "slurm", "job"]
    command += [file, f"run.dir={run_dir.root}", *options.flags]
    return slurm_job.script(
        named,
        output=str(journal.folder / "job-%j.txt"),
        file=file,
        config=configs.dump_yaml(configs.with_absolute_paths(config)),
        command=shlex.join(command),
    )


def _training_arguments(options: _Options, run_dir: RunDir) -> list[str]:
    """Returns the arguments of `jaxres.train`, with the run directory as it was found."""
    root, others = str(run_dir.root), options.arguments
    if others[0] == root:
        return list(others)
    return [*(text for text in others if not text.startswith("run.dir=")), f"run.dir={root}"]


def _output(journal: Journal, job: str) -> Path:
    return journal.folder / f"job-{job}.txt"


def _counts(options: _Options, config: RunConfig, devices_per_node: int | None) -> tuple[int, ...]:
    """Returns the numbers of nodes that the training can run with, ascending; None: not known."""
    least, most = options.job.least, options.job.most
    if devices_per_node is None:
        return tuple(range(least, most + 1))
    return local.feasible_hosts(least, most, config, per_host=devices_per_node)


def _job(options: _Options, *, env: Mapping[str, str]) -> int:
    """The process of the job's script: trains until something else has to follow."""
    number, names = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not (number and names):
        raise UsageError("`launch slurm job` runs in the script of a Slurm job; submit it instead")
    nodes = slurm_commands.node_names(names)
    target, overrides = parse_target(options.arguments, command=COMMAND)
    with signals.wakeup_fd() as wakeup:
        found = with_retries(
            lambda: resolve_run(target, overrides),
            _restart_limits(target, overrides),
            wait=partial(signals.wait_for_stop, wakeup),
            what="the run can't be read",
        )
        if found is None:
            return _ended_between_attempts()
        loaded, run_dir = found
        journal, config = _journal(run_dir, options.folder), loaded.config
        gpus = local.devices_per_host(env, "SLURM_GPUS_ON_NODE", "JAX_NUM_CPU_DEVICES")
        counts = _counts(options, config, gpus)
        job = _Job(options, config, run_dir, journal, number, nodes, counts, wakeup, env)
        try:
            return job.run()
        except RunError as error:
            if exit_row(error.exit_code).restart is RestartRule.NEVER:
                journal.append(Final(error.exit_code))  # An operator has to act, then submits it.
            raise


def _restart_limits(target: RunPath, overrides: Sequence[str]) -> RestartSection:
    """Returns the limits of the config file; the defaults if the run directory has the config."""
    with suppress(RunError, OSError):
        if not is_remote(target):
            return configs.load(target, overrides).config.restart
    return RestartSection()


@dataclass(frozen=True)
class _Job:
    """A running job: its attempts, and the decisions after them."""

    options: _Options
    config: RunConfig
    run_dir: RunDir
    journal: Journal
    number: str
    nodes: tuple[str, ...]
    counts: tuple[int, ...]
    wakeup: int
    """File descriptor that gets a byte for each signal."""
    env: Mapping[str, str]

    def run(self) -> int:
        """Returns the exit code of the job."""
        node = self.env.get("SLURMD_NODENAME", self.nodes[0])
        output = _output(self.journal, self.number)
        with slurm_commands.ScriptWatch(job=self.number, node=node, output=output) as watch:
            return self._run(watch)

    def _run(self, watch: slurm_commands.ScriptWatch) -> int:
        is_first = True
        while True:
            decide = partial(self._decide, is_first=is_first)
            found = self._retry(decide, "can't go on yet")
            if found is None:
                return self._told_to_end()
            decision, records, has_lost_node = found
            if isinstance(decision, End):
                self._record(Final(decision.exit))
                print_message(f"{decision.reason} ({exit_name(decision.exit)})")
                return decision.exit
            if isinstance(decision, Resubmit):
                return self._resubmit(decision)
            if self.options.job.least < self.options.job.most:  # With --no-kill.
                watch.ensure_started(decision.nodes)
            if self._wait(decision.after_seconds):
                return self._told_to_end()
            code, is_stopped = self._train(decision, records, has_lost_node)
            if is_stopped:  # Submitted again, unless Slurm ends it: scancel, or a preemption.
                print_message(f"the job was told to end; srun exited with {exit_name(code)}")
                return code
            is_first = False

    def _told_to_end(self) -> int:
        """Returns the exit code of a job that was told to end between two attempts."""
        self._continue_unless_cancelled()
        return _ended_between_attempts()

    def _continue_unless_cancelled(self) -> None:
        """Submits the job again if its time limit or its node ends it, and not scancel or Slurm.

        At the limit the training that was asked to save before it has hung, or takes too long.
        """
        if reason := self._reason_to_continue():
            self._resubmit(Resubmit((), 0.0, reason))

    def _reason_to_continue(self) -> str | None:
        """Returns why the run continues in another job although this one was told to end.

        Slurm marks a job before it tells its processes to end, so one that is RUNNING was told by
        something else: its node that shuts down, in most cases.
        """
        with suppress(RunError):
            state, _, reason = (slurm_commands.state(self.number, "%T|%r") or "").partition("|")
            if reason == slurm_commands.TIME_LIMIT:
                return "the job's time limit is reached"
            if state == "RUNNING":
                return "SIGTERM did not come from Slurm, so the node of the job's script shuts down"
        return None

    def _decide(
        self, *, is_first: bool
    ) -> tuple[Train | Resubmit | End, list[Record], bool] | None:
        """Decides by the run log, the journal and Slurm's answers.

        Returns:
          The decision, the run log, and whether the job has lost a node; None: Slurm has put the
          job back in the queue, as the node of this process is lost to it.
        """
        entries = self.journal.read()
        has_begun = any(isinstance(entry, Begun) for entry in entries)
        if is_first and (code := slurm_job.final_since(entries, self.number)) is not None:
            reason = f"the run has ended since job {self.number} was submitted; submit it again"
            return End(code, reason), [], False
        with faults.refusals(at_start=not has_begun):
            records = run_log.read_records(self.run_dir.log)
            faulty = faulty_hosts.read(self.run_dir, records, warn=stdio.warn)
            left_out = {host.identity.name for host in faulty}
        left, bar, names = (slurm_commands.state(self.number, "%L|%N") or "").partition("|")
        if bar and not names:
            return None
        nodes = slurm_commands.node_names(names) if names else self.nodes
        history = slurm_job.outcomes(entries, records)
        down = slurm_commands.nodes_down(nodes)
        if not is_first and slurm_job.has_failed_to_begin(history):
            down |= slurm_commands.nodes_without_daemon(
                [node for node in nodes if node not in down]
            )
        allocation = Allocation(
            nodes,
            self.counts,
            # Below zero squeue prints INVALID: a cluster with OverTimeLimit.
            0.0 if left == "INVALID" else time_limit.parse_time_left(left),
            frozenset(left_out | down),
            self.options.job.signal_seconds,
            slurm_commands.is_preempted(self.number),
        )
        decision = slurm_job.decide(
            history,
            allocation,
            self.config,
            is_first=is_first,
            seed=secrets.randbits(32),
            idle_jobs=slurm_job.idle_jobs(entries, records),
        )
        if isinstance(decision, Resubmit):
            decision = self._stopped(records) or decision
        return decision, records, len(nodes) < len(self.nodes)

    def _stopped(self, records: list[Record]) -> End | None:
        """Returns the end of a job by a request to stop, which is moved; None: there is none."""
        # An attempt of the next job would take the request, but that job may wait for days.
        stop = self.run_dir.request("stop")
        if not files.exists(stop):
            return None
        folder = self.run_dir.attempt(run_log.fold(records).attempt)
        files.make_dir(folder)
        files.move(stop, folder / "stop")
        return End(ExitCode.STOPPED, f"{stop}: the job is not submitted again")

    def _resubmit(self, decision: Resubmit) -> int:
        """Submits the job again; returns the exit code of this one."""
        begin = f"--begin=now+{decision.after_seconds:.0f}"

        def submit() -> str | None:
            waiting = _unfinished(self.run_dir, self.journal)
            waiting.pop(self.number, None)
            for job in waiting:  # An earlier call has submitted it, and was not answered.
                self.journal.append(Submitted(job))
                return job
            options = [begin, *_exclude(self.options, decision.exclude)]
            if self._wait(0.0) and not self._reason_to_continue():  # scancel, since the attempt.
                return None
            return self.journal.submit(options)

        new = self._retry(submit, "can't submit the job again")
        if new is None:
            return _ended_between_attempts()
        print_message(f"job {new} continues after this one: {decision.reason}")
        return ExitCode.DONE

    def _train(
        self, decision: Train, records: Sequence[Record], has_lost_node: bool
    ) -> tuple[int, bool]:
        """Trains one attempt; returns srun's exit code, and whether the job was told to end."""
        print_message(f"training on {','.join(decision.nodes)}: {decision.reason}")
        history = run_log.fold(records)
        is_restart = bool(slurm_job.outcomes(self.journal.read(), records))
        if self._record(Begun(history.attempt, history.step, decision.nodes)) is None:
            return ExitCode.PREEMPTED, True
        flags = _step_flags(decision.nodes, has_lost_node=has_lost_node)
        training = ["jaxres.train", *_training_arguments(self.options, self.run_dir)]
        command = ["srun", *flags, sys.executable, "-m", *training]
        told = self._continue_unless_cancelled
        env = {**self.env, **self._coordinator(decision.nodes)}
        code, is_stopped = slurm_commands.run_step(
            command, is_restart, self.wakeup, env, on_stop=told
        )
        self._record(Ended(code))
        return code, is_stopped

    def _coordinator(self, nodes: Sequence[str]) -> dict[str, str]:
        """Returns the variable for hosts that can't resolve the name of the first node.

        Slurm itself reaches nodes by the addresses of its configuration.
        """
        if len(nodes) == 1 or VARIABLES[COORDINATOR] in self.env:
            return {}
        with suppress(RunError):  # Then by its name, as without jaxres's launcher.
            if address := slurm_commands.node_address(nodes[0]):
                begun = sum(isinstance(entry, Begun) for entry in self.journal.read())
                port = slurm_port(int(self.number), begun)
                return {VARIABLES[COORDINATOR]: str(Address(address, port))}
        return {}

    def _record(self, entry: slurm_job.Entry) -> bool | None:
        """Appends to the journal; None: it could not, and the job was told to end."""

        def append() -> bool:
            self.journal.append(entry)
            return True

        return self._retry(append, "the journal can't be written")

    def _retry(self, call: Callable[[], T], what: str) -> T | None:
        return with_retries(call, self.config.restart, wait=self._wait, what=what)

    def _wait(self, seconds: float) -> bool:
        return signals.wait_for_stop(self.wakeup, seconds)


def _ended_between_attempts() -> int:
    print_message("the job was told to end, or put back in the queue, between two attempts")
    return ExitCode.PREEMPTED


def _step_flags(nodes: Sequence[str], *, has_lost_node: bool) -> list[str]:
    """Returns the flags of srun for an attempt on nodes of this job."""
    # The step before has to end first, but Slurm never takes one on a lost node for ended.
    wait = "--overlap" if has_lost_node else f"--immediate={STEP_SECONDS}"
    return [*slurm_commands.step_flags(nodes), wait]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _run_of(arguments: Sequence[str], verb: str) -> tuple[RunDir, Journal]:
    parser = Parser(prog=f"{COMMAND} {verb}", usage=USAGE, add_help=False)
    parser.add_argument("run")
    parser.add_argument("--folder")
    given = parser.parse_args(list(arguments))
    run_dir = RunDir(recorded_root(path_argument(given.run)))
    journal = _journal(run_dir, given.folder)
    if journal.newest_job() is None and files.exists(journal.folder):
        for job in _unfinished(run_dir, journal):  # Its submission was not answered.
            journal.append(Submitted(job))
    if journal.newest_job() is None:
        raise UsageError(f"{journal.folder}: no job of `launch slurm` was submitted for this run")
    return run_dir, journal


def _status(arguments: Sequence[str]) -> int:
    run_dir, journal = _run_of(arguments, "status")
    job, history = journal.newest_job(), run_log.fold(run_log.read_records(run_dir.log))
    assert job is not None
    found = slurm_commands.state(job, "%T|%r|%N|%L|%P")
    if found is None:
        finals = [entry for entry in journal.read() if isinstance(entry, Final | Submitted)]
        end = f"ended ({exit_name(finals[-1].exit)})" if isinstance(finals[-1], Final) else ""
        _say(f"job {job}: {end or f'not in the queue; `sacct --jobs={job}` may say why'}")
        if not end:  # The process of the job's script can't have decided: it was killed.
            again = command_line(COMMAND, run_dir.root, "--nodes", "N", "...")
            _say(f"nothing submits it again; `{again}` goes on")
    else:
        state, reason, nodes, left, partition = found.split("|")
        detail = f"on {nodes}, {left} left" if nodes else f"waits ({reason})"
        _say(f"job {job}: {state}, partition {partition}, {detail}")
    _say(f"attempt {history.attempt}, committed step {history.step}")
    more = command_line("python -m jaxres status", run_dir.root)
    _say(f"output: {_output(journal, job)}; more: `{more}`")
    return ExitCode.DONE


def _logs(arguments: Sequence[str]) -> int:
    _, journal = _run_of(arguments, "logs")
    newest, *others = [_output(journal, job) for job in reversed(journal.jobs())]
    path = next(filter(files.exists, (newest, *others)), None)
    if path is None:
        raise UsageError(f"{newest}: not there yet; the job has not started")
    if path != newest:
        _say(f"{newest}: not there yet; the end of the job before it, {path}:")
    data = files.read(path) or b""
    _say("\n".join(data.decode(errors="replace").splitlines()[-TAIL_LINES:]))
    return ExitCode.DONE


def _stop(arguments: Sequence[str]) -> int:
    run_dir, journal = _run_of(arguments, "stop")
    jobs = _unfinished(run_dir, journal)
    if not jobs:
        _say(f"job {journal.newest_job()} has ended already")
    for job, state in jobs.items():
        if state == "PENDING":
            slurm_commands.call("scancel", job)
            _say(f"job {job} waited; it is cancelled. The run can be continued.")
            continue
        files.replace(run_dir.request("stop"), b"")
        _say(f"job {job}: asked to save and to end ({run_dir.request('stop')})")
    return ExitCode.DONE
