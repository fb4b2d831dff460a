"""`jaxres data`: builds, shows, counts and verifies a data set. Needs no jax."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxres import config as configs
from jaxres import data, faults
from jaxres.config import RunConfig
from jaxres.config.argparser import Parser, path_argument, require_writable
from jaxres.config.schema.data import (
    CustomSource,
    DataSection,
    DocumentSource,
    MixtureSource,
    TokensSource,
    kinds_of,
)
from jaxres.config.schema.model import embedding_rows
from jaxres.config.schema.training import BadRecordsSection
from jaxres.data import Rows
from jaxres.data.bucket import download_cache
from jaxres.data.corpus import describe, describe_corpus, open_corpus
from jaxres.data.dataset import PLAN_MARK, Dataset
from jaxres.data.inspect import image_statistics, show_rows, statistics
from jaxres.data.mixture import MixedRows, Mixture
from jaxres.data.sources.images import CLASSES, IMAGES, ImageRows
from jaxres.data.sources.source_files import read_below
from jaxres.data.tokens.token_folder import FILES, TokenFolder
from jaxres.data.verify import DataReport, verify_data
from jaxres.exit_codes import ExitCode
from jaxres.faults import RunError, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.run_log import RunHistory
from jaxres.storage import gcs_objects
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor import jax_settings
from jaxres.supervisor.run_config import parse_target, resolve_run

USAGE = """jaxres data COMMAND CONFIG.yaml|RUN_DIR [section.field=value ...]
  build    tokenises the corpus, or continues to, and prints its folder; [--out FOLDER|gs://...]
  show     prints rows as the model gets them; [--rows N] [--at POSITION]
  inspect  counts documents, tokens, lengths and duplicates; [--json]
  verify   reads every byte, and compares it with its digests
"""
DAMAGED = 1
"""Exit code of `data verify` if the data are damaged, absent, or another run's."""
MAX_POSITION = 10**15
UPLOADED_LAST = "meta.json"
BUILT_FILES = (*FILES, CLASSES, "tokenizer.json", "tokenizer_config.json")


def main(arguments: Sequence[str], *, env: Mapping[str, str]) -> int:
    """Runs one command; returns the exit code."""
    if list(arguments) in (["--help"], ["-h"]):
        sys.stdout.write(f"usage: {USAGE}")
        return ExitCode.DONE
    try:
        options, rest = _parser().parse_known_args(arguments)
        config, history = _load(rest)
        if options.command == "verify":
            return _verify(config, history)
        if options.command == "build":
            _build(config, options)
        else:
            shows = {"show": _show, "inspect": _inspect}[options.command]
            shows(config, _open(config, env=env), options)
    except RunError as raised:
        error = faults.by_phase(raised, at_start=True)
        sys.stderr.write(faults.format_exit_message(error.exit_code, str(error)))
        return error.exit_code
    return ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxres data", usage=USAGE)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="jaxres data"
    )
    commands.add_parser("build").add_argument("--out", type=path_argument)
    show = commands.add_parser("show")
    show.add_argument("--rows", type=_position, default=3)
    show.add_argument("--at", type=_position, default=0)
    commands.add_parser("inspect").add_argument("--json", action="store_true")
    commands.add_parser("verify")
    return parser


def _position(text: str) -> int:
    if not (text.isdecimal() and int(text) <= MAX_POSITION):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0 to {MAX_POSITION:,}")
    return int(text)


def _load(arguments: Sequence[str]) -> tuple[RunConfig, RunHistory]:
    """Returns the config, and the history of the run; an empty one if a config file is given."""
    target, overrides = parse_target(arguments, command="jaxres data")
    if is_remote(target) or target.is_dir():
        loaded, run_dir = resolve_run(target, overrides)
        config, history = loaded.config, run_log.fold(run_log.read_records(run_dir.log))
    else:
        config, history = configs.load(target, overrides).config, RunHistory()
    configs.require_trainer(config, "jaxres data")
    return config, history


def _progress(message: str) -> None:
    sys.stderr.write(f"{message}\n")


def _build(config: RunConfig, options: argparse.Namespace) -> None:
    if not isinstance(config.data.source, MixtureSource):
        _build_one(config.data, options.out, config.guards.bad_records)
        return
    if options.out is not None:
        raise UsageError("--out: takes one source; build each source of a mixture by itself")
    for part in config.data.source.sources:
        if not isinstance(part.source, CustomSource | TokensSource):
            _progress(f"source {part.name}:")
            one = config.data.model_copy(update={"source": part.source})
            _build_one(one, None, config.guards.bad_records)


def _build_one(
    section: DataSection, out: RunPath | None, bad_records: BadRecordsSection | None
) -> None:
    if out is not None and (read := read_below(section.source, out, BUILT_FILES)):
        raise UsageError(
            f"--out {out}: lies in the folder of data.source.path, and later starts would read "
            f"{', '.join(read)} there as documents. Give a folder outside, or leave it out with "
            "data.source.exclude."
        )
    source = download_cache.localize(section, progress=_progress)
    if isinstance(source, CustomSource | TokensSource):
        raise UsageError(
            f"data.source.kind={source.kind}: there is nothing to tokenise. `data build` takes "
            f"{', '.join(kinds_of(DocumentSource))}."
        )
    corpus = describe_corpus(
        source,
        section.tokenizer,
        cache_dir=section.cache_dir,
        bad_records=bad_records,
        progress=_progress,
    )
    if isinstance(out, Path):
        if out.exists():
            raise UsageError(f"--out {out}: exists already. Give a new folder, or remove it.")
        require_writable("--out", out)
        corpus = replace(corpus, entry=out.absolute(), named_by="--out")
    built = open_corpus(corpus, progress=_progress)
    if section.packing != "concat":  # The plan of the rows too.
        same = TokensSource(path=built.folder)
        data.open_dataset(section.model_copy(update={"source": same}), progress=_progress)
    if out is not None and is_remote(out):
        _upload(built, out)
    _print_built(built, out if out is not None else built.folder)


def _upload(built: TokenFolder, out: RunPath) -> None:
    """Uploads a token folder; meta.json last, so that an incomplete folder does not open."""
    assert is_remote(out), out
    paths = sorted(built.folder.iterdir(), key=lambda path: (path.name == UPLOADED_LAST, path.name))
    for path in paths:
        _progress(f"Uploading {path.name}, {path.stat().st_size / 1e6:,.1f} MB, to {out}")
        gcs_objects.upload(path, out / path.name)


def _print_built(built: TokenFolder, place: RunPath) -> None:
    kind = IMAGES if built.meta.tokenizer == IMAGES else "tokens"
    sys.stdout.write(
        f"{place}: {describe(built.meta)}, fingerprint {built.meta.fingerprint}\n"
        f"to train on it: data.source.kind={kind} data.source.path={place}\n"
    )


def _open(config: RunConfig, *, env: Mapping[str, str]) -> Dataset:
    """Returns the data set as a run opens it; raises ConfigError if it does not fit the model."""
    bad_records = config.guards.bad_records
    dataset = data.open_dataset(config.data, progress=_progress, bad_records=bad_records)
    has_64_bits = env.get("JAX_ENABLE_X64", "").lower() in jax_settings.ON
    dataset = dataset.for_model(config.model, has_64_bits=has_64_bits)
    rows = getattr(config.model, "vocab_size", None)
    if rows is not None and dataset.vocab_size is not None:
        embedding_rows(rows, vocab_size=dataset.vocab_size)
    return dataset


def _show(config: RunConfig, dataset: Dataset, options: argparse.Namespace) -> None:
    order = dataset.order(seed=config.run.seed, rows_per_step=config.train.global_batch_size)
    for text in show_rows(dataset, order, count=options.rows, position=options.at):
        sys.stdout.write(text)


def _inspect(config: RunConfig, dataset: Dataset, options: argparse.Namespace) -> None:
    if isinstance(dataset.train, MixedRows):
        _inspect_mixture(config, dataset, dataset.train, as_json=options.json)
        return
    heldout = len(dataset.heldout)
    fields = _count(dataset.train, heldout) | {"fingerprint": dataset.fingerprint}
    fields["padding"] = dataset.padding or 0.0
    if options.json:
        sys.stdout.write(f"{json.dumps(fields)}\n")
        return
    steps = len(dataset.train) / config.train.global_batch_size
    sys.stdout.write(
        f"{_counts_text(fields)}rows{_row_size(dataset)}: {len(dataset.train):,} to train on, "
        f"{heldout:,} held out{_padding(dataset)}; an epoch takes {steps:,.1f} steps, the run has "
        f"{config.train.steps:,}\nfingerprint: {dataset.fingerprint}\n"
    )


def _inspect_mixture(
    config: RunConfig, dataset: Dataset, rows: MixedRows, *, as_json: bool
) -> None:
    batch, steps = config.train.global_batch_size, config.train.steps
    order = dataset.order(seed=config.run.seed, rows_per_step=batch)
    assert isinstance(order, Mixture)
    served = dict(zip(rows.parts, order.rows_by_part(steps * batch), strict=True))
    found: dict[str, dict[str, Any]] = {
        name: _count(part, len(dataset.validation.get(name, ()))) | {"served": served[name]}
        for name, part in rows.parts.items()
    }
    if as_json:
        sys.stdout.write(f"{json.dumps({'sources': found, 'fingerprint': dataset.fingerprint})}\n")
        return
    for name, fields in found.items():
        own = fields["rows"]["train"]
        sys.stdout.write(
            f"source {name}\n{_counts_text(fields)}rows{_row_size(dataset)}: {own:,} "
            f"to train on, {fields['rows']['heldout']:,} held out; the run trains on "
            f"{served[name]:,}, {served[name] / own:,.2f} epochs, "
            f"{served[name] / (steps * batch):.2%} of its rows\n\n"
        )
    sys.stdout.write(f"fingerprint: {dataset.fingerprint}\n")


def _count(rows: Rows, heldout: int) -> dict[str, Any]:
    if isinstance(rows, ImageRows):
        found = asdict(image_statistics(rows, progress=_progress))
    else:
        found = asdict(statistics(rows, progress=_progress))
    return found | {"rows": {"train": len(rows), "heldout": heldout}}


def _counts_text(fields: Mapping[str, Any]) -> str:
    lengths = ", ".join(f"{name} {length:,}" for name, length in fields["lengths"].items())
    if "labels" in fields:
        labels = ", ".join(f"{label}: {count:,}" for label, count in fields["labels"].items())
        return (
            f"images: {fields['num_images']:,}, of which {fields['num_duplicates']:,} equal an "
            f"earlier one, {fields['num_contradictions']:,} of them with another label\n"
            f"images of each label: {labels}\nbytes an image: {lengths}\n"
            + "".join(f"left out in training: {text}\n" for text in fields["undecodable"])
            + _labels_beyond(fields["labels"], fields["num_classes"])
        )
    beyond = (
        f"WARNING: {fields['num_tokens_beyond']:,} tokens have an id of {fields['num_ids']:,} or "
        "more, beyond vocab_size or the model's embedding: training leaves out, or refuses, each "
        "row with one\n"
    )
    return (
        f"documents: {fields['num_documents']:,}, of which {fields['num_duplicates']:,} equal an "
        f"earlier one\ntokens: {fields['num_tokens']:,}; {fields['num_tokens_used']:,} of "
        f"{fields['vocab_size']:,} ids are used\ntokens a document: {lengths}\n"
        + (beyond if fields["num_tokens_beyond"] else "")
    )


def _labels_beyond(labels: Mapping[int, int], num_classes: int | None) -> str:
    """Returns a line about the images whose label is no class of the model, if there are some."""
    beyond = {} if num_classes is None else {k: n for k, n in labels.items() if k >= num_classes}
    if not beyond:
        return ""
    return (
        f"WARNING: left out in training: {sum(beyond.values()):,} images of the labels "
        f"{', '.join(map(str, beyond))}, not in 0..{(num_classes or 0) - 1} (model.num_classes)\n"
    )


def _row_size(dataset: Dataset) -> str:
    return "" if dataset.tokens_per_row == 1 else f" of {dataset.tokens_per_row} tokens"


def _padding(dataset: Dataset) -> str:
    return "" if dataset.padding is None else f", {dataset.padding:.1%} of the positions padding"


def _verify(config: RunConfig, history: RunHistory) -> int:
    problems, text = as_text(verify_data(config.data, config.guards.bad_records), history)
    sys.stdout.write(text)
    return DAMAGED if problems else ExitCode.DONE


def as_text(report: DataReport, history: RunHistory) -> tuple[int, str]:
    """Returns the number of problems, and the lines to print."""
    problems = list(report.problems)
    recorded = (history.dataset or "").partition(PLAN_MARK)[0]
    if history.newest is not None and report.fingerprint not in (None, recorded):
        problems.append(
            f"the run was started with the fingerprint {recorded}: these are other data"
        )
    if problems:
        return len(problems), "".join(f"not valid: {problem}\n" for problem in problems)
    return 0, f"valid: {report.verified}\n"
