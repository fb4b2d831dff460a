"""`jaxres evaluate`: validation losses of a run, and tasks from local files."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxres import data, inference
from jaxres.checkpoint.weights.source import parse_step
from jaxres.config.argparser import local_path_argument
from jaxres.data.text_bytes import bits_per_byte, bytes_per_target
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, UsageError
from jaxres.inference import LoadedModel
from jaxres.jax_cli.sample import model_parser
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir, root_of
from jaxres.storage import files, foreign_json
from jaxres.storage.files import refuse_lfs_pointer
from jaxres.supervisor import run_config
from jaxres.train.resume import check_cut

Scores = dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = model_parser("jaxres evaluate")
    parser.add_argument("--set", action="append", metavar="NAME", help="validation set; all")
    parser.add_argument(
        "--task", action="append", default=[], type=local_path_argument, metavar="FILE.jsonl"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N rows, or lines of a task")
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0) and ExitCode.USAGE
    if options.limit is not None and options.limit < 1:
        raise UsageError("--limit must be at least 1")
    loaded = inference.load(options.model, parse_step(options.step))
    scores: dict[str, Scores] = {}
    if options.set or not options.task:
        if inference.is_folder(options.model):
            raise UsageError(f"{options.model}: a folder has no validation sets; give --task")
        scores |= _sets(RunDir(root_of(options.model)), loaded, options)
    names = [*scores, *(path.stem for path in set(options.task))]
    for path in options.task:
        name = path.stem if names.count(path.stem) == 1 else str(path)
        scores[name] = _task(path, loaded, options.limit)
    if options.json:
        shown = {name: _finite(values) for name, values in scores.items()}
        sys.stdout.write(json.dumps({"model": loaded.name, "scores": shown}) + "\n")
    else:
        sys.stdout.write(_table(loaded.name, scores))
    return ExitCode.DONE


def _finite(values: Scores) -> dict[str, float | None]:
    """Returns scores for JSON, which has no NaN."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _sets(run_dir: RunDir, loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Scores]:
    import jax

    config = run_config.newest_config(run_dir)
    dataset = data.open_dataset(config.data, bad_records=config.guards.bad_records)
    dataset = dataset.for_model(config.model, has_64_bits=jax.config.read("jax_enable_x64"))
    check_cut(dataset.fingerprint, run_log.fold(run_log.read_records(run_dir.log)))
    names = options.set or list(dataset.validation)
    if not names:
        raise UsageError(f"{run_dir.root}: the run has no validation sets; give --task")
    for name in names:
        if name not in dataset.validation:
            known = ", ".join(dataset.validation) or "none"
            raise UsageError(f"--set {name}: no such validation set (here: {known})")
    found = {}
    for name in names:
        rows = dataset.validation[name]
        count = min(len(rows), options.limit or len(rows))
        size = min(config.train.max_rows_per_device or 8, count)
        found[name] = {"rows": count} | _means(loaded, rows, count, size)
        per_target = None
        if dataset.tokenizer is not None:
            per_target = bytes_per_target(rows, dataset.tokenizer, num_rows=count)
        if per_target is not None:
            found[name]["bits_per_byte"] = bits_per_byte(found[name]["loss"], per_target)
    return found


def _means(loaded: LoadedModel, rows: Any, count: int, size: int) -> Scores:
    """Returns the means of the loss and the metrics over the first rows."""
    import jax

    from jaxres.models.interface import compute_loss

    def sums(params: Any, model_state: Any, batch: Any, mask_B: Any) -> dict[str, Any]:
        outputs = compute_loss(loaded.model, params, model_state, batch, None)
        pairs = {"loss": (outputs.loss_sum_B, outputs.weight_B), **outputs.metrics}
        return {
            name: [jax.numpy.where(mask_B, part_B, 0).sum() for part_B in pair]
            for name, pair in pairs.items()
        }

    compiled = jax.jit(sums)
    totals: dict[str, np.ndarray] = {}
    for start in range(0, count, size):
        ids = start + np.arange(size)
        batch = rows.rows(np.where(ids < count, ids, 0))
        for name, pair in compiled(loaded.params, loaded.model_state, batch, ids < count).items():
            totals[name] = totals.get(name, 0) + np.asarray(pair, np.float64)
    return {
        name: float(total[0] / total[1]) if total[1] else math.nan for name, total in totals.items()
    }


def _task(path: Path, loaded: LoadedModel, limit: int | None) -> Scores:
    """Returns the scores of the lines of a task: questions, or texts."""
    from jaxres.engine import text_scores

    tokenizer = loaded.text_tokenizer()
    lines = list(_lines(path))[:limit]
    parsed = [text_scores.parse(row, f"{path}:{number}") for number, row in lines]
    measure = text_scores.Likelihood(loaded.model.logits, loaded.params, seq_len=loaded.seq_len)
    questions = [part for part in parsed if isinstance(part, text_scores.Question)]
    texts = [part for part in parsed if isinstance(part, str)]
    if questions and texts:
        raise ConfigError(f"{path}: has texts and questions; put them into two files.")
    if not parsed:
        raise ConfigError(f"{path}: is empty.")
    if questions:
        return text_scores.score_choices(questions, tokenizer, measure)
    if not any(texts):
        raise ConfigError(f"{path}: all of its texts are empty.")
    return text_scores.score_texts(texts, tokenizer, measure)


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        data = files.read_whole(path)
        refuse_lfs_pointer(data, path)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read ({error}).") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = foreign_json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # Raises for half a surrogate pair.
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON of Unicode text ({error}).") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: not an object of fields.")
        yield number, row


def _table(name: str, scores: Mapping[str, Scores]) -> str:
    lines = [name]
    for part, values in scores.items():
        shown = "  ".join(
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value:.4g}"
            for key, value in values.items()
        )
        lines.append(f"  {part:20} {shown}")
    return "".join(f"{line}\n" for line in lines)
