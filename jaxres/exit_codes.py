"""The table of exit codes: the meaning of each code, and every rule that depends on a code.

`docs/exit-codes.md` is printed from this module (`python -m jaxres.exit_codes`). Exit codes are
part of the outside contract: schedulers and scripts rely on them. No other module groups codes; it
reads a column of this table, so that a new code is one new row.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

SIGNAL_BASE = 128
"""A process that a signal killed is reported as this number plus the signal's, as shells do."""
MAX_SIGNAL = 64


class ExitCode(IntEnum):
    """How a command that trains exits."""

    DONE = 0
    USAGE = 64
    BUG = 70
    STORAGE = 74
    PREEMPTED = 75
    STOPPED = 76
    CONFIG = 78
    PEER_LOST = 79
    HUNG = 80
    DIVERGED = 81
    UNHEALTHY = 82
    FENCED = 83
    NO_PROGRESS = 84
    UNRESTORABLE = 85
    OUT_OF_MEMORY = 86


class Severity(IntEnum):
    """Order in which the exits of a job's hosts are taken for the root cause; the highest wins.

    Root-cause attribution uses this order within a job, where the time of each exit is known.
    FENCED is above all others because a job that another attempt owns must not act on what it has
    observed. STORAGE is as severe as a crash because unavailable storage often makes the other
    hosts crash.
    """

    CONSEQUENCE = 0
    """Follows from another host's exit."""
    GRACEFUL = 1
    FAILURE = 2
    """A crash, a bug, storage: the earliest one is the cause."""
    HUNG = 3
    OUT_OF_MEMORY = 4
    COMMITTED = 5
    """A graceful exit of host 0 that has committed: later failures of other hosts don't matter."""
    CONFIG = 6
    """Input that another attempt would find just as bad; a worker never exits with USAGE."""
    UNRESTORABLE = 7
    DIVERGED = 8
    UNHEALTHY = 9
    FENCED = 10


class RestartRule(StrEnum):
    """Whether another attempt follows, and which budget it uses."""

    NEVER = "never"
    """Another attempt would exit the same way, or isn't wanted."""
    PREEMPTION_BUDGET = "at once; restart.max_preemptions_without_commit"
    WITHOUT_HOST = "at once, without the host; restart.max_attempts_without_commit"
    STORAGE_BUDGET = "with backoff; restart.max_storage_attempts"
    FAILURE_BUDGET = "with backoff; restart.max_attempts_without_commit"
    FAILURE_BUDGET_ONCE = "with backoff, once per new commit"

    @property
    def uses_failure_budget(self) -> bool:
        """Whether an exit with this rule counts as a failed attempt."""
        return self in _FAILURE_RULES


_FAILURE_RULES = frozenset(
    {RestartRule.NEVER, RestartRule.FAILURE_BUDGET, RestartRule.FAILURE_BUDGET_ONCE}
)


@dataclass(frozen=True, kw_only=True)
class ExitRow:
    """One row of the table."""

    code: int
    name: str
    meaning: str
    severity: Severity
    tie_break: int = 2
    """Order among codes of the same severity at the same instant; the lowest is the cause."""
    restart: RestartRule
    remedy: str
    """The operator's next action; see `remedy` for the fields."""
    message_has_remedy: bool = False
    """Whether the error message of this exit states the remedy, so that a report adds none."""
    needs_operator: bool = False
    """Whether the same command would exit the same way until an operator has acted."""
    is_graceful: bool = False
    """Whether the run ended as requested or is complete; each host takes its own time for it."""
    is_agreed: bool = False
    """Whether all hosts decide on this exit together, so that each exits by itself."""
    is_shared: bool = False
    """Whether the other hosts exit with this code too when host 0's supervisor does; else 79."""
    is_failure: bool = True
    """Whether an attempt with this exit and without a commit counts as a failure for the MTBF."""
    blames_host: bool = False
    """Whether a host that is the cause twice in a row is excluded."""
    outranks_lost_host: bool = False
    """Whether this exit, rather than the loss of another host's machine, is the cause."""
    resumes_unattended: bool = False
    """Whether a scheduler restarts a supervisor with this exit: the restart history continues."""
    stop_signals: tuple[signal.Signals, ...] = ()
    """Signals that request this exit; the first is the one that is forwarded to workers."""
    stop_rank: int = 0
    """Precedence among requested stops of several hosts, the highest wins; 0: not a request."""
    of_program: bool = False
    """Whether an exit of a program (`program`) with this code means the same, without a message."""


ROWS: tuple[ExitRow, ...] = (
    ExitRow(
        code=ExitCode.DONE,
        name="DONE",
        meaning="The last step is committed.",
        severity=Severity.GRACEFUL,
        restart=RestartRule.NEVER,
        remedy="nothing; for a new run change run.seed, run.dir or the config",
        is_graceful=True,
        is_agreed=True,
        is_shared=True,
        is_failure=False,
    ),
    ExitRow(
        code=ExitCode.USAGE,
        name="USAGE",
        meaning="A flag or command is unknown, or the config file doesn't exist.",
        severity=Severity.CONFIG,
        tie_break=3,
        restart=RestartRule.NEVER,
        remedy="fix the command line as the message states",
        message_has_remedy=True,
        needs_operator=True,
        is_failure=False,
        outranks_lost_host=True,
    ),
    ExitRow(
        code=ExitCode.BUG,
        name="BUG",
        meaning="An unexpected exception, in jaxres or in custom code.",
        severity=Severity.FAILURE,
        tie_break=0,
        restart=RestartRule.FAILURE_BUDGET,
        remedy="fix what the traceback shows, then run {command}",
        blames_host=True,
        outranks_lost_host=True,
    ),
    ExitRow(
        code=ExitCode.STORAGE,
        name="STORAGE",
        meaning="Storage doesn't answer, is full, denies access while something runs, or has "
        "damaged a cached copy of the data.",
        severity=Severity.FAILURE,
        tie_break=1,
        restart=RestartRule.STORAGE_BUDGET,
        remedy="free some space or repair the storage, then run {command}",
        is_agreed=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.PREEMPTED,
        name="PREEMPTED",
        meaning="SIGTERM or a preemption notice; what could be saved in time is saved.",
        severity=Severity.GRACEFUL,
        tie_break=1,
        restart=RestartRule.PREEMPTION_BUDGET,
        remedy=(
            "run {command}, here or on another machine; if no step is committed between "
            "preemptions, find out why the machine is preempted so often"
        ),
        is_graceful=True,
        is_agreed=True,
        is_shared=True,
        resumes_unattended=True,
        stop_signals=(signal.SIGTERM, signal.SIGHUP),
        stop_rank=1,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.STOPPED,
        name="STOPPED",
        meaning="The operator's stop: Ctrl-C or RUN_DIR/stop; the newest step is saved.",
        severity=Severity.GRACEFUL,
        tie_break=0,
        restart=RestartRule.NEVER,
        remedy="run {command} to resume",
        is_graceful=True,
        is_agreed=True,
        is_shared=True,
        is_failure=False,
        stop_signals=(signal.SIGINT,),
        stop_rank=2,
    ),
    ExitRow(
        code=ExitCode.CONFIG,
        name="CONFIG",
        meaning="A bad key, value or data set, or a path that can't be used at a start.",
        severity=Severity.CONFIG,
        restart=RestartRule.NEVER,
        remedy="fix what the message names, then run {command}",
        message_has_remedy=True,
        needs_operator=True,
        is_failure=False,
        outranks_lost_host=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.PEER_LOST,
        name="PEER_LOST",
        meaning="Another host of the run is gone or doesn't connect.",
        severity=Severity.CONSEQUENCE,
        restart=RestartRule.FAILURE_BUDGET,
        remedy=(
            "check the host that the message names and the network between the hosts, then run "
            "{command} on all hosts or on the remaining ones"
        ),
        blames_host=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.HUNG,
        name="HUNG",
        meaning="No progress within the limit of a phase.",
        severity=Severity.HUNG,
        restart=RestartRule.FAILURE_BUDGET,
        remedy=(
            "read {stacks}; if this is not a hang, raise the phase's limit (deadlines.*); then run "
            "{command}"
        ),
        blames_host=True,
        outranks_lost_host=True,
    ),
    ExitRow(
        code=ExitCode.DIVERGED,
        name="DIVERGED",
        meaning="The loss diverged, or too many steps or rows had to be left out.",
        severity=Severity.DIVERGED,
        restart=RestartRule.NEVER,
        remedy="lower the learning rate or inspect the rows, then start a new run",
        message_has_remedy=True,
        needs_operator=True,
        is_agreed=True,
        outranks_lost_host=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.UNHEALTHY,
        name="UNHEALTHY",
        meaning="A host or device is unhealthy, or too few hosts are left.",
        severity=Severity.UNHEALTHY,
        restart=RestartRule.WITHOUT_HOST,
        remedy=(
            "replace the host that the message names, or repair it and run `jaxres hosts RUN_DIR "
            "--forget HOST`; then run {command}"
        ),
        needs_operator=True,
        is_agreed=True,
        outranks_lost_host=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.FENCED,
        name="FENCED",
        meaning="Another attempt owns the run; this one wrote nothing.",
        severity=Severity.FENCED,
        restart=RestartRule.NEVER,
        remedy="nothing: another attempt owns the run",
        message_has_remedy=True,
        is_shared=True,
        outranks_lost_host=True,
    ),
    ExitRow(
        code=ExitCode.NO_PROGRESS,
        name="NO_PROGRESS",
        meaning="A restart or cost budget is used up without a new committed step.",
        severity=Severity.FAILURE,
        restart=RestartRule.NEVER,
        remedy="fix what keeps the run from its next commit, then run {command}",
        needs_operator=True,
    ),
    ExitRow(
        code=ExitCode.UNRESTORABLE,
        name="UNRESTORABLE",
        meaning="Checkpoints exist and none is valid, or the run log is lost, damaged or older "
        "than they are.",
        severity=Severity.UNRESTORABLE,
        restart=RestartRule.NEVER,
        remedy="restore the checkpoint from a copy, or start a new run",
        message_has_remedy=True,
        needs_operator=True,
        outranks_lost_host=True,
        of_program=True,
    ),
    ExitRow(
        code=ExitCode.OUT_OF_MEMORY,
        name="OUT_OF_MEMORY",
        meaning="A device or the host ran out of memory.",
        severity=Severity.OUT_OF_MEMORY,
        restart=RestartRule.FAILURE_BUDGET_ONCE,
        remedy="change one of the settings that the message names, then run {command}",
        needs_operator=True,
        outranks_lost_host=True,
        of_program=True,
    ),
)
_BY_CODE: Mapping[int, ExitRow] = {row.code: row for row in ROWS}
STOP_SIGNALS: Mapping[signal.Signals, ExitCode] = {
    number: ExitCode(row.code) for row in ROWS for number in row.stop_signals
}
"""The exit that each stop signal requests."""
STOP_REQUESTS: tuple[ExitCode | None, ...] = (
    None,
    *(
        ExitCode(row.code)
        for row in sorted(ROWS, key=lambda row: row.stop_rank)
        if row.stop_rank > 0
    ),
)
"""Stop requests of a host, none first; of the requests of several hosts the last one wins."""


def exit_row(code: int) -> ExitRow:
    """Returns the row of a code; also for 128 + a signal's number and for unknown codes.

    >>> exit_row(80).name, exit_row(137).name, exit_row(3).name
    ('HUNG', 'signal 9 (SIGKILL)', 'unknown')
    """
    row = _BY_CODE.get(code)
    if row is not None:
        return row
    if SIGNAL_BASE < code <= SIGNAL_BASE + MAX_SIGNAL:
        return _signal_row(code)
    return ExitRow(
        code=code,
        name="unknown",
        meaning="Not an exit code of jaxres.",
        severity=Severity.FAILURE,
        restart=RestartRule.FAILURE_BUDGET,
        remedy="read the output, then run {command}",
        blames_host=True,
    )


@functools.cache
def _signal_row(code: int) -> ExitRow:
    number = code - SIGNAL_BASE
    known = {known.value: known.name for known in signal.Signals}
    return ExitRow(
        code=code,
        name=f"signal {number}" + (f" ({known[number]})" if number in known else ""),
        meaning="A signal killed the process.",
        severity=Severity.FAILURE,
        restart=RestartRule.FAILURE_BUDGET,
        remedy=(
            "find out what killed the worker (its output, the kernel's log: dmesg), then run "
            "{command}"
        ),
        blames_host=True,
        resumes_unattended=number in (signal.SIGTERM, signal.SIGHUP),
    )


def exit_name(code: int) -> str:
    """Returns an exit code and its name, as all output prints it.

    >>> exit_name(80), exit_name(137)
    ('80 HUNG', '137 signal 9 (SIGKILL)')
    """
    return f"{code} {exit_row(code).name}"


def remedy(code: int, *, command: str = "the same command", stacks: str = "the stacks") -> str:
    """Returns the operator's next action after an exit, as one sentence without a period.

    Args:
      code: the exit code.
      command: the command that resumes the run.
      stacks: where the stacks of a hung worker are.

    >>> remedy(76, command="python -m jaxres.train runs/a")
    'run python -m jaxres.train runs/a to resume'
    """
    return exit_row(code).remedy.format(command=command, stacks=stacks)


@dataclass(frozen=True)
class ProgramEnd:
    """How the process of a program has ended, and what an exit code depends on besides."""

    status: int
    """Its exit code, or minus the number of the signal that ended it."""
    requested: ExitCode | None = None
    """The stop for which it was sent SIGTERM before; None: it was sent none."""
    announced: int | None = None
    """Exit code of the exit message that it has sent; None: it has sent none."""
    was_killed: bool = False
    """Whether it was killed because it had not ended in time after SIGTERM."""
    was_out_of_memory: bool = False
    """Whether the kernel has killed a process for lack of memory while the program ran."""


@dataclass(frozen=True)
class ProgramRow:
    """One row of the table of a program's ends; the first one that matches counts."""

    end: str
    """The end, as text of the table."""
    matches: Callable[[ProgramEnd], bool]
    code: Callable[[ProgramEnd], int]
    """The exit code of the attempt."""
    meaning: str
    """The exit code, as text of the table."""
    reason: str
    """The reason that is recorded; `{status}` is the exit code or signal of the program."""


def _shell_status(end: ProgramEnd) -> int:
    """Returns the exit code as a shell has it: 128 + the number of a signal."""
    return SIGNAL_BASE - end.status if end.status < 0 else end.status


def _is_stop(end: ProgramEnd) -> bool:
    """Whether a program that was asked to stop has ended as it was asked to."""
    ends = (0, ExitCode.PREEMPTED, ExitCode.STOPPED, SIGNAL_BASE + signal.SIGTERM)
    return end.requested is not None and (end.was_killed or _shell_status(end) in ends)


PROGRAM_ROWS: tuple[ProgramRow, ...] = (
    ProgramRow(
        "after SIGTERM: 0, 75, 76, death by SIGTERM, or still running after "
        "deadlines.stop_seconds, and killed",
        matches=_is_stop,
        code=lambda end: end.requested or ExitCode.PREEMPTED,
        meaning="75 after a notice, 76 after an operator's stop",
        reason="the program was asked to stop, and ended with {status}",
    ),
    ProgramRow(
        "the exit code that its exit message names, or 0",
        matches=lambda end: end.announced is not None and end.status in (0, end.announced),
        code=lambda end: end.announced or 0,
        meaning="the same, with the reason of the message",
        reason="",
    ),
    ProgramRow(
        "0",
        matches=lambda end: end.status == 0,
        code=lambda end: ExitCode.DONE,
        meaning="0 DONE: the run is complete",
        reason="the program exited with 0",
    ),
    ProgramRow(
        "death by SIGKILL while the kernel killed for lack of memory",
        matches=lambda end: (
            end.was_out_of_memory and _shell_status(end) == SIGNAL_BASE + signal.SIGKILL
        ),
        code=lambda end: ExitCode.OUT_OF_MEMORY,
        meaning="86 OUT_OF_MEMORY",
        reason="the kernel killed the program because memory ran out",
    ),
    ProgramRow(
        "death by another signal N, or 128 + N, as of a shell",
        matches=lambda end: SIGNAL_BASE < _shell_status(end) <= SIGNAL_BASE + MAX_SIGNAL,
        code=_shell_status,
        meaning="128 + N",
        reason="the program was ended by {status}",
    ),
    ProgramRow(
        ", ".join(str(int(row.code)) for row in ROWS if row.of_program),
        matches=lambda end: exit_row(end.status).of_program,
        code=lambda end: end.status,
        meaning="the same code, with its meaning in the table above",
        reason="the program exited with {status}",
    ),
    ProgramRow(
        "64 (EX_USAGE)",
        matches=lambda end: end.status == ExitCode.USAGE,
        code=lambda end: ExitCode.CONFIG,
        meaning="78 CONFIG: program.command is wrong",
        reason="the program exited with {status}: it does not accept the arguments of "
        "program.command",
    ),
    ProgramRow(
        "any other exit code",
        matches=lambda end: True,
        code=lambda end: ExitCode.BUG,
        meaning="70 BUG",
        reason="the program exited with {status}",
    ),
)
"""How the end of a program becomes the exit code of an attempt."""


def of_program(end: ProgramEnd) -> tuple[int, str]:
    """Returns the exit code of an attempt whose program has ended, and the reason.

    The reason is empty where that of the program's own message counts.

    >>> of_program(ProgramEnd(3)), of_program(ProgramEnd(0, requested=ExitCode.STOPPED))[0].name
    ((<ExitCode.BUG: 70>, 'the program exited with 3'), 'STOPPED')
    """
    row = next(row for row in PROGRAM_ROWS if row.matches(end))
    status = f"exit code {end.status}" if end.status >= 0 else exit_row(_shell_status(end)).name
    if end.was_killed:
        status = "SIGKILL, since it still ran when deadlines.stop_seconds was over"
    return row.code(end), row.reason.format(status=end.status if end.status > 0 else status)


def table() -> str:
    """Returns docs/exit-codes.md."""
    lines = [
        "# Exit codes",
        "",
        "Printed by `python -m jaxres.exit_codes`; a test compares them. A process that a signal",
        "killed is reported as 128 + the signal's number. *operator*: the same command would exit",
        "the same way until an operator has acted (`jaxres status` exits 3).",
        "",
        "| code | name | meaning | another attempt | operator | what to do |",
        "|---|---|---|---|---|---|",
    ]
    for row in (*ROWS, exit_row(SIGNAL_BASE + signal.SIGKILL)):
        is_signal = row.code > SIGNAL_BASE
        code, name = ("128 + N", "signal N") if is_signal else (str(row.code), row.name)
        operator = "yes" if row.needs_operator else ""
        what = remedy(row.code)
        lines.append(f"| {code} | {name} | {row.meaning} | {row.restart} | {operator} | {what} |")
    lines += [
        "",
        "## Programs",
        "",
        "With `program` in its config, an attempt ends as the program does, by the first row that",
        "matches ([own-loop.md](own-loop.md)).",
        "",
        "| end of the program | exit code of the attempt |",
        "|---|---|",
        *(f"| {row.end} | {row.meaning} |" for row in PROGRAM_ROWS),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201
