"""Commands `checkpoints export` and `checkpoints import`. They do not import jax."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights import hf_tensors
from jaxres.checkpoint.weights import origin as weights_origin
from jaxres.checkpoint.weights import source as weights_source
from jaxres.checkpoint.weights.export import ExportedParams
from jaxres.checkpoint.weights.source import Weights
from jaxres.config import RunConfig, huggingface, huggingface_export, require_trainer
from jaxres.config.argparser import require_writable
from jaxres.config.schema.data import TextSource
from jaxres.config.schema.model import GptModel
from jaxres.config.yaml import dump
from jaxres.data.tokens import hf_bytes_tokenizer, tokenizer
from jaxres.exit_codes import ExitCode
from jaxres.faults import ConfigError, Unrestorable, UsageError
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.storage import files as storage
from jaxres.supervisor.run_config import resolve_run

DIFFERENT = 1
"""Exit code of `checkpoints import` if an export differs from its step."""


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Exports or imports; returns the output (text or JSON) and the exit code."""
    if options.sub == "export":
        _refuse_own_folder(RunDir(options.run_dir), options.out)  # Before a folder is made there.
    require_writable("--out", options.out)
    return import_(options) if options.sub == "import" else (export(options), ExitCode.DONE)


def export(options: argparse.Namespace) -> str:
    """Exports the parameters of a committed step; returns the output (text or JSON)."""
    run_dir = RunDir(options.run_dir)
    commit = _committed(run_dir, weights_source.parse_step(options.step))
    config = resolve_run(run_dir.root, [])[0].config
    require_trainer(config, "jaxres checkpoints export")
    limit = options.max_shard_bytes
    if limit is None:
        limit = weights_export.MAX_SHARD_BYTES
    if limit < 1:
        raise UsageError("--max-shard-bytes must be at least 1")
    notes = list[str]()
    if options.names == "peft":
        source, named = _adapters(run_dir, config, commit)
    else:
        source = weights_source.from_run(run_dir, config, commit)
        named, notes = _named(options, run_dir, config, source)
    params = weights_export.of_run(source).cast(options.dtype)
    names = named["names"]
    out = options.out or run_dir.exports / f"{source.step:08d}-{names}-{options.dtype}"
    try:
        digest = weights_export.write(
            params,
            out,
            max_shard_bytes=limit,
            about={
                "facts": dict(weights_source.facts_of(config.model)),
                "step": source.step,
                "dtype": options.dtype,
            },
            **named,
        )
    except Unrestorable:
        _committed(run_dir, commit.step)  # A live run may have pruned it meanwhile.
        raise
    fields = _fields(out, params, digest) | {"step": source.step, "names": names}
    lines = [f"step {source.step}, read back and equal", *notes]
    return _text(fields | ({"notes": notes} if notes else {}), lines, as_json=options.json)


def _refuse_own_folder(run_dir: RunDir, out: Path | None) -> None:
    """Raises UsageError for a folder among the steps or the records of the run."""
    own = [at.resolve() for at in (run_dir.checkpoints, run_dir.log) if isinstance(at, Path)]
    if out is not None and any(out.resolve().is_relative_to(folder) for folder in own):
        raise UsageError(
            f"--out {out}: lies in a folder for the run's own files. Give another folder, or leave "
            f"--out out: exports are then written to {run_dir.exports}."
        )


def _named(
    options: argparse.Namespace, run_dir: RunDir, config: RunConfig, source: Weights
) -> tuple[dict[str, Any], list[str]]:
    """Returns the names of the tensors, and the files beside them, as arguments of `write`.

    With them: notes on what is taken over from the folder of the initial weights.
    """
    family = _family(options.names, config)
    if family is None:
        return {"names": "jaxres", "rules": None, "beside": {}}, []
    beside, note = _extra_files(run_dir, config, source, dtype=options.dtype)
    named = {"names": family, "rules": hf_tensors.rules_of(family), "beside": beside}
    return named, [note] if note else []


def _adapters(run_dir: RunDir, config: RunConfig, commit: Commit) -> tuple[Weights, dict[str, Any]]:
    """Returns the adapters of a run, and how the package peft stores them.

    Raises:
      UsageError: the run has none, or its model is none of Hugging Face's.
    """
    family = _family(None, config)
    if config.lora is None or family is None:
        what = "has no adapters" if config.lora is None else f"is of kind {config.model.kind}"
        raise UsageError(f"--names peft: the run {what}. Leave it out to export the model.")
    source = weights_source.from_run(run_dir, config, commit, only_adapters=True)
    rules = hf_tensors.adapter_rules(family)
    if others := sorted(set(source.tensors) - set(rules)):
        raise UsageError(
            f"--names peft: {others[0]}: {family} has no linear layer of its own for it. Leave "
            "--names out to export the model with its adapters merged."
        )
    modules = {rules[path].name.split(".lora_")[0].rpartition(".")[2] for path in source.tensors}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": sorted(modules),
        "base_model_name_or_path": str(getattr(config.init_from, "path", "")),
        "bias": "none",
        "lora_dropout": 0.0,
    }
    beside = {"adapter_config.json": json.dumps(fields, indent=1).encode()}
    named = {"names": "peft", "rules": rules, "beside": beside, "stem": weights_export.ADAPTER}
    return source, named


def _committed(run_dir: RunDir, step: weights_source.Step) -> Commit:
    try:
        return weights_source.commit_of(run_dir, step)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _family(names: str | None, config: RunConfig) -> str | None:
    """Returns the model_type whose names the tensors get; None: jaxres's own names."""
    is_gpt = isinstance(config.model, GptModel)
    if names == "jaxres" or (names is None and not is_gpt):
        return None
    if not isinstance(config.model, GptModel):
        raise UsageError(
            f"--names {names}: the model is of kind {config.model.kind}, not a decoder of this "
            "family. Use --names jaxres."
        )
    family = huggingface_export.family_of(config.model)
    if names not in (None, "huggingface", family):
        raise UsageError(f"--names {names}: the model is a {family}. Use --names {family}.")
    return family


def _extra_files(
    run_dir: RunDir, config: RunConfig, source: Weights, *, dtype: str
) -> tuple[dict[str, bytes], str]:
    """Returns config.json, the tokenizer files if the run has a tokenizer, and a note."""
    assert isinstance(config.model, GptModel)
    seq_len = config.data.seq_len
    eos, files = _tokenizer_files(run_dir, config, seq_len=seq_len)
    rows = source.tensors["params/embedding"].shape[0]
    fields = huggingface_export.fields_of(
        config.model, rows=rows, dtype=dtype, seq_len=seq_len, eos=eos
    )
    origin = weights_origin.find(config, fields)
    text = json.dumps(fields | origin.fields, indent=1)
    return {"config.json": text.encode(), **origin.beside, **files}, origin.note


def _tokenizer_files(
    run_dir: RunDir, config: RunConfig, *, seq_len: int
) -> tuple[int | None, dict[str, bytes]]:
    """Returns the token that ends a document, and the tokenizer's files; None: unknown."""
    name = run_log.recorded_tokenizer(run_log.read_records(run_dir.log))
    if name is None and isinstance(config.data.source, TextSource):
        name = tokenizer.BYTES  # A run from before the field.
    if name == tokenizer.BYTES:
        return tokenizer.END_OF_DOCUMENT, hf_bytes_tokenizer.bytes_tokenizer(seq_len=seq_len)
    if name is None or not name.startswith(tokenizer.LIBRARY):
        return None, {}
    folder = run_dir.tokenizer(name)
    names = (tokenizer.FILE_NAME, tokenizer.SETTINGS)
    files = {name: storage.read_whole(folder / name) for name in names}
    settings = json.loads(files[tokenizer.SETTINGS])
    added = json.loads(files[tokenizer.FILE_NAME])["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    settings.setdefault("model_max_length", seq_len)
    files[tokenizer.SETTINGS] = json.dumps(settings, indent=1).encode()
    return ids.get(settings["eos_token"]), files


def import_(options: argparse.Namespace) -> tuple[str, int]:
    """Reads safetensors folders; returns the output (text or JSON) and the exit code.

    For a run directory it reads the run's exports of one step and compares them with that step.
    """
    path, run_dir = options.run_dir, None
    folders = [path]
    if (path / "log").is_dir():
        run_dir = RunDir(path)
        folders = _exports(run_dir, step=options.step)
    elif options.step is not None:
        raise UsageError(f"--step needs a run directory; {path} is not one.")
    if options.out is not None and len(folders) > 1:
        found = ", ".join(str(folder) for folder in folders)
        raise UsageError(
            f"--out takes one export, but there are several: {found}. Choose one of them."
        )
    texts, codes = [], []
    for folder in folders:
        text, code = _import_one(folder, run_dir, options)
        texts.append(text)
        codes.append(code)
    return "".join(texts), max(codes)


def _exports(run_dir: RunDir, *, step: int | None) -> list[Path]:
    """Returns the exports of a step, by default of the newest exported step."""
    found: dict[int, list[Path]] = {}
    for name in storage.list_names(run_dir.exports):
        about = weights_source.read_about(run_dir.exports / name)
        if about is not None and isinstance(about.get("step"), int):
            found.setdefault(about["step"], []).append(run_dir.exports / name)
    if not found or step not in (None, *found):
        steps = ", ".join(str(n) for n in sorted(found)) or "none"
        raise UsageError(
            f"{run_dir.exports}: no export{'' if step is None else f' of step {step}'} here "
            f"(exported: {steps}). Make one with `jaxres checkpoints export`."
        )
    return found[max(found) if step is None else step]


def _import_one(
    folder: Path, run_dir: RunDir | None, options: argparse.Namespace
) -> tuple[str, int]:
    params, model = weights_export.of_folder(folder)
    params = weights_export.check_finite(params, where=folder)
    digest = weights_export.digest_of(params)
    fields: dict[str, Any] = _fields(folder, params, digest)
    rows, code = [], int(ExitCode.DONE)
    if run_dir is not None:
        about = weights_source.read_about(folder)
        assert about is not None
        fields["step"] = about["step"]
        is_equal = _digest_of_step(run_dir, about["step"], dtype=about["dtype"]) == digest
        fields["equal"] = is_equal
        rows.append(f"{'equal' if is_equal else 'NOT EQUAL'} to step {about['step']}, bit for bit")
        code = int(ExitCode.DONE) if is_equal else DIFFERENT
    if options.out is not None and code == ExitCode.DONE:
        facts = weights_source.from_safetensors(folder).facts or {}
        weights_export.write(
            params.cast("float32"),
            options.out,
            names="jaxres",
            rules=None,
            max_shard_bytes=weights_export.MAX_SHARD_BYTES,
            about={"facts": dict(facts), "dtype": "float32"},
            beside={},
        )
        rows.append(f"written to {options.out}, under jaxres names, as float32")
    sections: dict[str, Any] = {
        "init_from": {"kind": "safetensors", "path": str((options.out or folder).absolute())}
    }
    if model is not None:
        sections = {"model": huggingface.shown(model)} | sections
    fields["config"] = sections
    rows += ["to start a run from it:", *(f"  {row}" for row in dump(sections).splitlines())]
    return _text(fields, rows, as_json=options.json), code


def _digest_of_step(run_dir: RunDir, step: int, *, dtype: str) -> str:
    commit = _committed(run_dir, step)
    config = resolve_run(run_dir.root, [])[0].config
    return weights_export.digest_of(
        weights_export.of_run(weights_source.from_run(run_dir, config, commit)).cast(dtype)
    )


def _fields(folder: Path, params: ExportedParams, digest: str) -> dict[str, Any]:
    dtypes = sorted({info.dtype for info in params.infos.values()})
    return {
        "path": str(folder),
        "params": digest,
        "arrays": len(params.infos),
        "numbers": params.numbers,
        "dtypes": dtypes,
    }


def _text(fields: dict[str, Any], rows: list[str], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(fields) + "\n"
    first = (
        f"{fields['arrays']} arrays, {fields['numbers']:,} numbers, {', '.join(fields['dtypes'])}"
    )
    lines = [fields["path"], *(f"  {row}" for row in (fields["params"], first, *rows))]
    return "".join(f"{line}\n" for line in lines)
