"""Commands on a run directory: status, history, checkpoints. They do not import jax."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres import faults
from jaxres.cli import status
from jaxres.cli.checkpoints import history as history_cli
from jaxres.cli.checkpoints import hosts as hosts_cli
from jaxres.clock import SystemClock
from jaxres.config.argparser import Parser, path_argument
from jaxres.config.huggingface import STYLES
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, UsageError
from jaxres.runlog import run_log, step_dirs
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Quarantine, Record, RunHistory
from jaxres.storage import files
from jaxres.storage.path import is_remote
from jaxres.supervisor import run_lock


def _local(text: str) -> Path:
    if is_remote(path := path_argument(text)):
        raise argparse.ArgumentTypeError(f"{text}: must be a local path")
    return path


def _verb(commands: argparse._SubParsersAction[Parser], name: str) -> argparse.ArgumentParser:
    """Adds a command whose first argument is a run directory."""
    subparser = commands.add_parser(name)
    subparser.add_argument("run_dir", type=path_argument, metavar="RUN_DIR")
    return subparser


def _parser(usage: str) -> argparse.ArgumentParser:
    parser = Parser(prog="jaxres", usage=usage.removeprefix("usage: "))
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", prog="jaxres")
    status_parser = verbs.add_parser("status")
    status_parser.add_argument("run_dir", type=path_argument, nargs="+", metavar="RUN_DIR")
    status_parser.add_argument("--json", action="store_true")
    status_parser.add_argument("--watch", action="store_true")
    history = _verb(verbs, "history")
    history.add_argument("--attempts", action="store_true")
    history.add_argument("--json", action="store_true")
    report = _verb(verbs, "report")
    report.add_argument("--out", type=path_argument, metavar="FILE.html")
    report.add_argument("--compare", type=path_argument, metavar="RUN_DIR")
    report.add_argument("--json", action="store_true")
    hosts = _verb(verbs, "hosts")
    change = hosts.add_mutually_exclusive_group()
    change.add_argument("--forget", metavar="HOST")
    change.add_argument("--exclude", metavar="HOST")
    hosts.add_argument("--reason", metavar="TEXT")
    hosts.add_argument("--json", action="store_true")
    _add_checkpoints(
        verbs.add_parser("checkpoints").add_subparsers(dest="sub", required=True, metavar="COMMAND")
    )
    return parser


def _add_checkpoints(checkpoints: argparse._SubParsersAction[Parser]) -> None:
    """Adds the commands of `jaxres checkpoints`."""
    _verb(checkpoints, "list").add_argument("--json", action="store_true")
    _verb(checkpoints, "digest").add_argument("--step", type=int)
    _verb(checkpoints, "verify").add_argument("--step", type=int)
    diff = _verb(checkpoints, "diff")
    diff.add_argument("other_run_dir", type=path_argument, nargs="?", metavar="OTHER_RUN_DIR")
    diff.add_argument("--step", type=int)
    diff.add_argument("--other-step", type=int)
    diff.add_argument("--json", action="store_true")
    prune = _verb(checkpoints, "prune")
    prune.add_argument("--dry-run", action="store_true")
    prune.add_argument("--json", action="store_true")
    replicate = _verb(checkpoints, "replicate")
    replicate.add_argument("to", type=path_argument, metavar="TO")
    replicate.add_argument("--follow", action="store_true")
    replicate.add_argument("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)
    replicate.add_argument("--max-mb-per-second", type=float)
    replicate.add_argument("--json", action="store_true")
    _verb(checkpoints, "adopt").add_argument("--yes", action="store_true")
    pin = _verb(checkpoints, "pin")
    pin.add_argument("--step", type=int, required=True)
    pin.add_argument("--hold", action="store_true")
    _verb(checkpoints, "unpin").add_argument("--step", type=int, required=True)
    export = _verb(checkpoints, "export")
    export.add_argument("--names", choices=("huggingface", "jaxres", "peft", *STYLES))
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument("--max-shard-bytes", type=int)
    export.add_argument("--step")
    imports = _verb(checkpoints, "import")
    imports.add_argument("--step", type=int)
    for subparser in (export, imports):
        subparser.add_argument("--out", type=_local)
        subparser.add_argument("--json", action="store_true")


def _parse(arguments: Sequence[str], *, usage: str) -> argparse.Namespace:
    """Returns the options; `overrides` holds the config overrides of `checkpoints prune`."""
    parser = _parser(usage)
    options, rest = parser.parse_known_args(arguments)
    has_overrides = getattr(options, "sub", None) == "prune"
    unknown = [arg for arg in rest if not has_overrides or arg.startswith("-") or "=" not in arg]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = rest
    return options


def main(arguments: Sequence[str], *, usage: str, env: Mapping[str, str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        options = _parse(arguments, usage=usage)
        code = ExitCode.DONE
        if getattr(options, "sub", None) in ("export", "import"):
            from jaxres.cli.checkpoints import weights

            text, code = weights.run(options)
            sys.stdout.write(text)
            return code
        if options.verb == "status":
            return _status(options)
        run_dir = RunDir(options.run_dir)
        if getattr(options, "sub", None) == "replicate":
            from jaxres.cli.checkpoints import replicate

            return replicate.run(options, clock=SystemClock())
        if getattr(options, "sub", None) == "adopt":
            from jaxres.cli.checkpoints import adopt

            sys.stdout.write(
                adopt.adopt(run_dir, yes=options.yes, clock=SystemClock(), env=env or {})
            )
            return code
        text, code = _answer(run_dir, _read_history(run_dir), options, env=env or {})
    except RunError as end:
        error = faults.by_phase(end, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    sys.stdout.write(text)
    return code


def _answer(
    run_dir: RunDir, history: RunHistory, options: argparse.Namespace, *, env: Mapping[str, str]
) -> tuple[str, int]:
    """Returns the output and the exit code of a command on a run with a readable log."""
    code = ExitCode.DONE
    match options.verb, getattr(options, "sub", None):
        case "history", _:
            show = history_cli.attempts_text if options.attempts else history_cli.steps_text
            text = show(run_dir, history, as_json=options.json)
        case "report", _:
            text = _report(run_dir, options)
        case "hosts", _:
            text = _hosts(run_dir, history, options)
        case _, "list":
            text = _list(run_dir, history, as_json=options.json)
        case _, "prune":
            text = _prune(run_dir, history, options, env=env)
        case _, "pin" | "unpin":
            text = _pin(run_dir, options)
        case _, "verify":
            text, code = _verify(run_dir, history, step=options.step)
        case _, "diff":
            text, code = _diff(run_dir, history, options)
        case _:
            text = _digest(run_dir, history, step=options.step)
    return text, code


def _status(options: argparse.Namespace) -> int:
    """Prints the status of each run; returns the highest of their codes, errors included."""
    codes = list[int]()
    for number, path in enumerate(options.run_dir):
        run_dir = RunDir(path)
        try:
            history = _read_history(run_dir)
            found = status.read_status(run_dir, history, clock=SystemClock(), watch=options.watch)
        except RunError as end:
            error = faults.by_phase(end, at_start=True)
            sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
            codes.append(error.exit_code)
            continue
        between = "\n" if number and not options.json else ""
        text = status.as_json(found) if options.json else status.as_text(found)
        sys.stdout.write(between + text)
        codes.append(found.outlook.code)
    return max(codes)


def _read_history(run_dir: RunDir) -> RunHistory:
    records = []
    if is_remote(run_dir.root) or run_dir.root.is_dir():
        records = run_log.read_records(run_dir.log)
        if not records:
            step_dirs.require_complete_log(run_dir, run_log.fold(records))
    if not records:
        raise UsageError(f"{run_dir.root}: no run here (no log/). Give a run directory.")
    return run_log.fold(records)


def _prune(
    run_dir: RunDir, history: RunHistory, options: argparse.Namespace, *, env: Mapping[str, str]
) -> str:
    from jaxres.cli.checkpoints import prune as prune_cli

    clock = SystemClock()
    keep = prune_cli.keep_policy(run_dir, options.overrides)
    if options.dry_run:
        is_alive = run_lock.liveness(run_dir, clock=clock) != "gone"
        preview = prune_cli.preview(run_dir, history, keep, is_alive=is_alive)
    else:
        preview = prune_cli.prune(run_dir, keep, clock=clock, env=env)
    if options.json:
        return prune_cli.as_json(preview)
    return prune_cli.as_text(preview, is_done=not options.dry_run)


def _pin(run_dir: RunDir, options: argparse.Namespace) -> str:
    from jaxres.cli.checkpoints import prune as prune_cli

    if options.sub == "pin":
        return prune_cli.pin(run_dir, options.step, holds=options.hold)
    return prune_cli.unpin(run_dir, options.step)


def _hosts(run_dir: RunDir, history: RunHistory, options: Any) -> str:
    if options.forget is not None:
        return hosts_cli.forget(run_dir, options.forget)
    if options.exclude is not None:
        reason, clock = options.reason or "no reason given", SystemClock()
        return hosts_cli.exclude(run_dir, options.exclude, reason=reason, clock=clock)
    if options.reason is not None:
        raise UsageError("--reason is that of --exclude HOST, which is missing")
    return hosts_cli.listed(run_dir, history, as_json=options.json)


def _report(run_dir: RunDir, options: Any) -> str:
    from jaxres.cli import report

    compare = None if options.compare is None else RunDir(options.compare)
    if compare is not None:
        _read_history(compare)
    return report.text(run_dir, as_json=options.json, out=options.out, compare=compare)


def _list(run_dir: RunDir, history: RunHistory, *, as_json: bool) -> str:
    pins = files.list_names(run_dir.pins)
    rows = [
        _row(record, commit, "committed") | {"pinned": str(commit.step) in pins}
        for record, commit in zip(history.commits, history.committed, strict=True)
    ]
    rows += [
        _row(record, quarantine, "quarantined") | {"evidence": quarantine.evidence}
        for record, quarantine in history.quarantined
    ]
    rows.sort(key=lambda row: (row["step"], row["attempt"]))
    if as_json:
        return "".join(json.dumps(row) + "\n" for row in rows)
    head = f"{'step':>8} {'attempt':>7} {'status':>11} {'bytes':>14}  path\n"
    return head + "".join(
        f"{r['step']:>8} {r['attempt']:>7} {r['status']:>11} {r['bytes']:>14,}  {r['path']}"
        f"{'  pinned' * r.get('pinned', False)}\n"
        for r in rows
    )


def _row(record: Record, body: Commit | Quarantine, status: str) -> dict[str, Any]:
    assert isinstance(record.body, Commit), record
    return {
        "step": body.step,
        "attempt": record.attempt,
        "status": status,
        "path": body.path,
        "bytes": record.body.bytes,
    }


def _digest(run_dir: RunDir, history: RunHistory, *, step: int | None) -> str:
    from jaxres.checkpoint.digests.content_digest import content_digest
    from jaxres.checkpoint.read import manifest

    commit = _commit(run_dir, history, step=step)
    step_dir = run_dir.root / commit.path
    arrays = manifest.read_arrays(step_dir, commit)
    return content_digest(arrays, progress=manifest.read_progress(step_dir, commit)) + "\n"


DAMAGED = 1
"""Exit code of `checkpoints verify` if a step is damaged, absent or not committed."""


def _verify(run_dir: RunDir, history: RunHistory, *, step: int | None) -> tuple[str, int]:
    from jaxres.checkpoint.read import verify

    wanted = [commit for commit in history.committed if step in (None, commit.step)]
    if not wanted:
        what = "no step" if step is None else f"step {step} is not"
        evidence = [
            f" ({d.path} is quarantined: {d.evidence})"
            for _, d in history.quarantined
            if d.step == step
        ]
        return f"{run_dir.root}: {what} committed{''.join(evidence)}\n", DAMAGED
    results = [verify.verify_step(run_dir.root / commit.path, commit) for commit in wanted]
    is_valid = not any(findings.problems for findings in results)
    return "".join(map(verify.as_text, results)), ExitCode.DONE if is_valid else DAMAGED


DIFFERENT = 1
"""Exit code of `checkpoints diff` if the states differ."""


def _diff(run_dir: RunDir, history: RunHistory, options: argparse.Namespace) -> tuple[str, int]:
    from jaxres.checkpoint import diff

    a = _commit(run_dir, history, step=options.step)
    if options.other_run_dir is not None:
        other_dir = RunDir(options.other_run_dir)
        b = _commit(other_dir, _read_history(other_dir), step=options.other_step)
    else:
        other_dir, b = run_dir, _commit(run_dir, history, step=options.other_step)
        if a.step == b.step:
            raise UsageError(
                f"{run_dir.root}: step {a.step} would be compared with itself. Give another run "
                "directory, or --step N --other-step M of this one."
            )
    differences = diff.diff(*((d.root / c.path, c) for d, c in ((run_dir, a), (other_dir, b))))
    text = diff.as_json(differences) if options.json else diff.as_text(differences)
    return text, ExitCode.DONE if differences.is_equal else DIFFERENT


def _commit(run_dir: RunDir, history: RunHistory, *, step: int | None) -> Commit:
    for commit in reversed(history.committed):
        if step in (None, commit.step):
            return commit
    steps = ", ".join(str(commit.step) for commit in history.committed) or "none"
    what = "no step" if step is None else f"step {step} is not"
    raise UsageError(f"{run_dir.root}: {what} committed (committed: {steps})")
