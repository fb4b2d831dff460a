"""Commands `checkpoints export` and `checkpoints import`. They do not import jax."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxres.checkpoint import hf_llama, weights_export, weights_source
from jaxres.checkpoint.weights_export import ExportedParams
from jaxres.config import RunConfig
from jaxres.config.schema import GptModel
from jaxres.config.schema_data import TextSource
from jaxres.config.yaml import dump
from jaxres.data import tokenizer
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
    return import_(options) if options.sub == "import" else (export(options), ExitCode.DONE)


def export(options: argparse.Namespace) -> str:
    """Exports the parameters of a committed step; returns the output (text or JSON)."""
    run_dir = RunDir(options.run_dir)
    commit = _committed(run_dir, step=options.step)
    config = resolve_run(run_dir.root, [])[0].config
    limit = options.max_shard_bytes
    if limit is None:
        limit = weights_export.MAX_SHARD_BYTES
    if limit < 1:
        raise UsageError("--max-shard-bytes must be at least 1")
    names = _names(options.names, config)
    source = weights_source.from_run(run_dir, config.model, commit)
    params = weights_export.of_run(source).cast(options.dtype)
    beside = {}
    if names == "llama":
        beside = _extra_files(run_dir, config, params, dtype=options.dtype)
    out = options.out or run_dir.exports / f"{source.step:08d}-{names}-{options.dtype}"
    try:
        digest = weights_export.write(
            params,
            out,
            names=names,
            max_shard_bytes=limit,
            facts=weights_source.facts_of(config.model),
            about={"step": source.step, "dtype": options.dtype},
            beside=beside,
        )
    except Unrestorable:
        _committed(run_dir, step=commit.step)  # A live run may have pruned it meanwhile.
        raise
    fields = _fields(out, params, digest) | {"step": source.step, "names": names}
    return _text(fields, [f"step {source.step}, read back and equal"], as_json=options.json)


def _committed(run_dir: RunDir, *, step: int | None) -> Commit:
    try:
        return weights_source.committed(run_dir, step=step)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _names(names: str | None, config: RunConfig) -> str:
    is_gpt = isinstance(config.model, GptModel)
    if names == "gpt2":
        raise UsageError(
            "--names gpt2: a GPT-2 has LayerNorm with bias, learned positions and GELU, which "
            "no model of jaxres has. Use --names llama."
        )
    if names == "llama" and not is_gpt:
        raise UsageError(
            f"--names llama: the model is of kind {config.model.kind}, not a Llama. Use "
            "--names jaxres."
        )
    return names or ("llama" if is_gpt else "jaxres")


def _extra_files(
    run_dir: RunDir, config: RunConfig, params: ExportedParams, *, dtype: str
) -> dict[str, bytes]:
    """Returns config.json, and the tokenizer files if the run has a tokenizer."""
    assert isinstance(config.model, GptModel)
    seq_len = config.data.seq_len
    eos, files = _tokenizer_files(run_dir, config, seq_len=seq_len)
    fields = hf_llama.write_config(
        config.model,
        {path: info.shape for path, info in params.infos.items()},
        dtype=dtype,
        seq_len=seq_len,
        eos=eos,
    )
    return {"config.json": json.dumps(fields, indent=1).encode(), **files}


def _tokenizer_files(
    run_dir: RunDir, config: RunConfig, *, seq_len: int
) -> tuple[int | None, dict[str, bytes]]:
    """Returns the token that ends a document, and the tokenizer's files; None: unknown."""
    name = run_log.recorded_tokenizer(run_log.read_records(run_dir.log))
    if name is None and isinstance(config.data.source, TextSource):
        name = tokenizer.BYTES  # A run from before the field.
    if name == tokenizer.BYTES:
        return tokenizer.END_OF_DOCUMENT, hf_llama.bytes_tokenizer(seq_len=seq_len)
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
            max_shard_bytes=weights_export.MAX_SHARD_BYTES,
            facts=facts,
            about={"dtype": "float32"},
            beside={},
        )
        rows.append(f"written to {options.out}, under jaxres names, as float32")
    sections: dict[str, Any] = {
        "init_from": {"kind": "safetensors", "path": str((options.out or folder).absolute())}
    }
    if model is not None:
        sections = {"model": _model_section(model)} | sections
    fields["config"] = sections
    rows += ["to start a run from it:", *(f"  {row}" for row in dump(sections).splitlines())]
    return _text(fields, rows, as_json=options.json), code


def _model_section(model: GptModel) -> dict[str, Any]:
    """Returns the `model` config section of a model."""
    names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")
    others = ("tie_embeddings", "rope_theta", "norm_eps")
    return {"kind": "gpt"} | {name: getattr(model, name) for name in (*names, *others)}


def _digest_of_step(run_dir: RunDir, step: int, *, dtype: str) -> str:
    commit = _committed(run_dir, step=step)
    config = resolve_run(run_dir.root, [])[0].config
    return weights_export.digest_of(
        weights_export.of_run(weights_source.from_run(run_dir, config.model, commit)).cast(dtype)
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
