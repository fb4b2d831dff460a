"""The verbs that only look at a run directory: status, history, checkpoints. They need no jax."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxres.cli import status
from jaxres.clock import SystemClock
from jaxres.config.argparser import Parser
from jaxres.faults import Exit, TypedEnd, UsageError
from jaxres.runlog import attempt_history, metrics, run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit, Line, Quarantine, Record
from jaxres.storage import files
from jaxres.storage.path import place
from jaxres.supervisor import run_lock


def _local(text: str) -> Path:
    if not isinstance(found := place(text), Path):
        raise argparse.ArgumentTypeError(f"{text}: must be on this machine; copy it from there")
    return found


def _parser(usage: str) -> argparse.ArgumentParser:
    parser = Parser(prog="jaxres", usage=usage.removeprefix("usage: "))
    verbs = parser.add_subparsers(dest="verb", required=True, prog="jaxres")

    def verb(parent: argparse._SubParsersAction[Parser], name: str) -> argparse.ArgumentParser:
        found = parent.add_parser(name)
        found.add_argument("run_dir", type=place, metavar="RUN_DIR")
        return found

    look = verb(verbs, "status")
    look.add_argument("--json", action="store_true")
    look.add_argument("--watch", action="store_true")
    history = verb(verbs, "history")
    history.add_argument("--attempts", action="store_true")
    history.add_argument("--json", action="store_true")
    checkpoints = verbs.add_parser("checkpoints").add_subparsers(dest="sub", required=True)
    verb(checkpoints, "list").add_argument("--json", action="store_true")
    verb(checkpoints, "digest").add_argument("--step", type=int)
    verb(checkpoints, "verify").add_argument("--step", type=int)
    diff = verb(checkpoints, "diff")
    diff.add_argument("other_run_dir", type=place, nargs="?", metavar="OTHER_RUN_DIR")
    diff.add_argument("--step", type=int)
    diff.add_argument("--other-step", type=int)
    diff.add_argument("--json", action="store_true")
    prune = verb(checkpoints, "prune")
    prune.add_argument("--dry-run", action="store_true")
    prune.add_argument("--json", action="store_true")
    verb(checkpoints, "pin").add_argument("--step", type=int, required=True)
    verb(checkpoints, "unpin").add_argument("--step", type=int, required=True)
    export = verb(checkpoints, "export")
    export.add_argument("--names", choices=("llama", "jaxres", "gpt2"))
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument("--max-shard-bytes", type=int)
    for either in (export, verb(checkpoints, "import")):
        either.add_argument("--step", type=int)
        either.add_argument("--out", type=_local)
        either.add_argument("--json", action="store_true")
    return parser


def _parse(words: Sequence[str], *, usage: str) -> argparse.Namespace:
    """Returns the options; those of `checkpoints prune` have `overrides`, wherever they stood."""
    parser = _parser(usage)
    options, rest = parser.parse_known_args(words)
    takes = getattr(options, "sub", None) == "prune"
    unknown = [word for word in rest if not takes or word.startswith("-") or "=" not in word]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides = rest
    return options


def main(words: Sequence[str], *, usage: str, env: Mapping[str, str] | None = None) -> int:
    """Runs one of the verbs and returns its exit code."""
    try:
        options = _parse(words, usage=usage)
        code = Exit.DONE
        if getattr(options, "sub", None) in ("export", "import"):
            from jaxres.cli import weights

            text, code = weights.act(options)
            sys.stdout.write(text)
            return code
        run_dir = RunDir(options.run_dir)
        line = _line(run_dir)
        match options.verb, getattr(options, "sub", None):
            case "status", _:
                seen = status.look(run_dir, line, clock=SystemClock(), watch=options.watch)
                text = status.as_json(seen) if options.json else status.as_text(seen)
                code = seen.outlook.code
            case "history", _ if options.attempts:
                is_alive = run_lock.is_alive(run_dir, clock=SystemClock())
                found = attempt_history.read(run_dir, is_alive=is_alive)
                text = (
                    attempt_history.as_json(found)
                    if options.json
                    else attempt_history.as_text(found)
                )
            case "history", _:
                text = _history(run_dir, line, as_json=options.json)
            case _, "list":
                text = _list(run_dir, line, as_json=options.json)
            case _, "prune":
                text = _prune(run_dir, line, options, env=env or {})
            case _, "pin" | "unpin":
                text = _pin(run_dir, options)
            case _, "verify":
                text, code = _verify(run_dir, line, step=options.step)
            case _, "diff":
                text, code = _diff(run_dir, line, options)
            case _:
                text = _digest(run_dir, line, step=options.step)
    except TypedEnd as end:
        sys.stderr.write(f"{end}\n")
        return end.exit
    sys.stdout.write(text)
    return code


def _line(run_dir: RunDir) -> Line:
    records = run_log.read_records(run_dir.log)
    if not records:
        raise UsageError(f"{run_dir.root}: no run here (no log/). Give the directory of a run.")
    return run_log.fold(records)


def _history(run_dir: RunDir, line: Line, *, as_json: bool) -> str:
    history = metrics.read_history(run_dir, line)
    if as_json:
        rows = [{k: v for k, v in m.fields().items() if k != "seq"} for m in history]
        return "".join(json.dumps(row) + "\n" for row in rows)
    head = (
        f"{'step':>8} {'attempt':>7} {'loss':>10} {'grad norm':>10} {'rate':>10} {'tokens':>14}\n"
    )
    return head + "".join(
        f"{m.step:>8} {m.attempt:>7} {_cell(m.loss)} {_cell(m.grad_norm)} "
        f"{_cell(m.learning_rate)} {m.tokens:>14,}\n"
        for m in history
    )


def _cell(value: float | None) -> str:
    return f"{'null' if value is None else f'{value:.4g}':>10}"


def _prune(
    run_dir: RunDir, line: Line, options: argparse.Namespace, *, env: Mapping[str, str]
) -> str:
    from jaxres.cli import prune as prune_cli

    clock = SystemClock()
    keep = prune_cli.keep_of(run_dir, options.overrides)
    if options.dry_run:
        is_alive = run_lock.is_alive(run_dir, clock=clock)
        found = prune_cli.outline(run_dir, line, keep, is_alive=is_alive)
    else:
        found = prune_cli.prune(run_dir, keep, clock=clock, env=env)
    if options.json:
        return prune_cli.as_json(found)
    return prune_cli.as_text(found, is_done=not options.dry_run)


def _pin(run_dir: RunDir, options: argparse.Namespace) -> str:
    from jaxres.cli import prune as prune_cli

    act = prune_cli.pin if options.sub == "pin" else prune_cli.unpin
    return act(run_dir, options.step)


def _list(run_dir: RunDir, line: Line, *, as_json: bool) -> str:
    pins = files.list_names(run_dir.pins)
    rows = [
        _row(record, commit, "committed") | {"pinned": str(commit.step) in pins}
        for record, commit in zip(line.commits, line.committed, strict=True)
    ]
    rows += [
        _row(record, decided, "quarantined") | {"evidence": decided.evidence}
        for record, decided in line.quarantined
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


def _row(record: Record, of: Commit | Quarantine, status: str) -> dict[str, Any]:
    assert isinstance(record.body, Commit), record
    return {
        "step": of.step,
        "attempt": record.attempt,
        "status": status,
        "path": of.path,
        "bytes": record.body.bytes,
    }


def _digest(run_dir: RunDir, line: Line, *, step: int | None) -> str:
    from jaxres.checkpoint import manifest
    from jaxres.checkpoint.content_digest import content_digest

    commit = _commit(run_dir, line, step=step)
    step_dir = (run_dir.root / commit.path).absolute()
    arrays = manifest.read_arrays(step_dir, commit)
    return content_digest(arrays, progress=manifest.read_progress(step_dir, commit)) + "\n"


DAMAGED = 1
"""How `checkpoints verify` ends where a step is damaged, absent or not committed."""


def _verify(run_dir: RunDir, line: Line, *, step: int | None) -> tuple[str, int]:
    from jaxres.checkpoint import verify

    wanted = [commit for commit in line.committed if step in (None, commit.step)]
    if not wanted:
        what = "no step" if step is None else f"step {step} is not"
        told = [
            f" ({d.path} is quarantined: {d.evidence})"
            for _, d in line.quarantined
            if d.step == step
        ]
        return f"{run_dir.root}: {what} committed{''.join(told)}\n", DAMAGED
    found = [verify.examine(run_dir.root.absolute() / commit.path, commit) for commit in wanted]
    is_whole = not any(findings.problems for findings in found)
    return "".join(map(verify.as_text, found)), Exit.DONE if is_whole else DAMAGED


DIFFERENT = 1
"""How `checkpoints diff` ends where the states differ."""


def _diff(run_dir: RunDir, line: Line, options: argparse.Namespace) -> tuple[str, int]:
    from jaxres.checkpoint import diff

    a = _commit(run_dir, line, step=options.step)
    if options.other_run_dir is not None:
        other_dir = RunDir(options.other_run_dir)
        b = _commit(other_dir, _line(other_dir), step=options.other_step)
    else:
        other_dir, b = run_dir, _commit(run_dir, line, step=options.other_step)
        if a.step == b.step:
            raise UsageError(
                f"{run_dir.root}: step {a.step} is to be compared with itself. Give another run "
                "directory, or --step N --other-step M of this one."
            )
    found = diff.diff(*((d.root.absolute() / c.path, c) for d, c in ((run_dir, a), (other_dir, b))))
    text = diff.as_json(found) if options.json else diff.as_text(found)
    return text, Exit.DONE if found.is_equal else DIFFERENT


def _commit(run_dir: RunDir, line: Line, *, step: int | None) -> Commit:
    for commit in reversed(line.committed):
        if step in (None, commit.step):
            return commit
    steps = ", ".join(str(commit.step) for commit in line.committed) or "none"
    what = "no step" if step is None else f"step {step} is not"
    raise UsageError(f"{run_dir.root}: {what} committed (committed: {steps})")
