"""The verbs `checkpoints export` and `checkpoints import`. They need no jax."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jaxres.checkpoint import hf_llama, weights_export, weights_source
from jaxres.checkpoint.weights_export import Params
from jaxres.config import RunConfig
from jaxres.config.schema import GptModel, TextSource
from jaxres.config.yaml import dump
from jaxres.data import text as text_data
from jaxres.faults import ConfigError, Exit, Unrestorable, UsageError
from jaxres.runlog.paths import RunDir
from jaxres.runlog.run_log import Commit
from jaxres.storage import files as storage
from jaxres.supervisor.run_config import resolve

DIFFERENT = 1
"""How `checkpoints import` ends where an export is not what the step holds."""


def act(options: argparse.Namespace) -> tuple[str, int]:
    """Exports or imports; returns what a person or a script reads, and the exit code."""
    return bring(options) if options.sub == "import" else (give(options), Exit.DONE)


def give(options: argparse.Namespace) -> str:
    """Exports the parameters of a committed step; returns what a person or a script reads."""
    run_dir = RunDir(options.run_dir)
    commit = _committed(run_dir, step=options.step)
    config = resolve(run_dir.root, [])[0].config
    asked = options.max_shard_bytes
    limit = weights_export.MAX_SHARD_BYTES if asked is None else asked
    if limit < 1:
        raise UsageError("--max-shard-bytes must be at least 1")
    names = _names(options.names, config)
    source = weights_source.from_run(run_dir, config.model, commit)
    params = weights_export.of_run(source).cast(options.dtype)
    out = options.out or run_dir.exports / f"{source.step:08d}-{names}-{options.dtype}"
    try:
        digest = weights_export.write(
            params,
            out,
            names=names,
            max_shard_bytes=limit,
            facts=weights_source.facts_of(config.model),
            about={"step": source.step, "dtype": options.dtype},
            beside=_beside(config, params, dtype=options.dtype) if names == "llama" else {},
        )
    except Unrestorable:
        _committed(run_dir, step=commit.step)  # A run that trains may have pruned it meanwhile.
        raise
    told = _told(out, params, digest) | {"step": source.step, "names": names}
    return _text(told, [f"step {source.step}, read back and equal"], as_json=options.json)


def _committed(run_dir: RunDir, *, step: int | None) -> Commit:
    try:
        return weights_source.committed(run_dir, step=step)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _names(asked: str | None, config: RunConfig) -> str:
    is_gpt = isinstance(config.model, GptModel)
    if asked == "gpt2":
        raise UsageError(
            "--names gpt2: a GPT-2 has LayerNorm with bias, learned positions and GELU. No model "
            "here has; under its names the numbers would mean something else. Use --names llama."
        )
    if asked == "llama" and not is_gpt:
        raise UsageError(
            f"--names llama: the model is of kind {config.model.kind}, which is no Llama. Use "
            "--names jaxres."
        )
    return asked or ("llama" if is_gpt else "jaxres")


def _beside(config: RunConfig, params: Params, *, dtype: str) -> dict[str, bytes]:
    """Returns config.json, and the tokenizer where the run has one."""
    assert isinstance(config.model, GptModel)
    seq_len, has_tokenizer = config.data.seq_len, isinstance(config.data.source, TextSource)
    fields = hf_llama.write_config(
        config.model,
        {path: info.shape for path, info in params.infos.items()},
        dtype=dtype,
        seq_len=seq_len,
        eos=text_data.END_OF_DOCUMENT if has_tokenizer else None,
    )
    files = hf_llama.bytes_tokenizer(seq_len=seq_len) if has_tokenizer else {}
    return {"config.json": json.dumps(fields, indent=1).encode(), **files}


def bring(options: argparse.Namespace) -> tuple[str, int]:
    """Reads safetensors folders back; returns what a person or a script reads, and the exit code.

    A run directory stands for the exports in it, of one step, and they are held against that step.
    """
    place, run_dir = options.run_dir, None
    places = [place]
    if (place / "log").is_dir():
        run_dir = RunDir(place)
        places = _exports(run_dir, step=options.step)
    elif options.step is not None:
        raise UsageError(f"--step goes with a run directory; {place} is none.")
    if options.out is not None and len(places) > 1:
        found = ", ".join(str(path) for path in places)
        raise UsageError(f"--out takes one export, here are several: {found}. Name one of them.")
    texts, codes = [], []
    for path in places:
        text, code = _bring_one(path, run_dir, options)
        texts.append(text)
        codes.append(code)
    return "".join(texts), max(codes)


def _exports(run_dir: RunDir, *, step: int | None) -> list[Path]:
    """Returns the exports of a step, by default of the newest that has one."""
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


def _bring_one(place: Path, run_dir: RunDir | None, options: argparse.Namespace) -> tuple[str, int]:
    params, model = weights_export.of_folder(place)
    digest = weights_export.digest_of(params)
    told: dict[str, Any] = _told(place, params, digest)
    rows, code = [], int(Exit.DONE)
    if run_dir is not None:
        about = weights_source.read_about(place)
        assert about is not None
        told["step"] = about["step"]
        is_equal = _digest_of_step(run_dir, about["step"], dtype=about["dtype"]) == digest
        told["equal"] = is_equal
        rows.append(f"{'equal' if is_equal else 'NOT EQUAL'} to step {about['step']}, bit for bit")
        code = int(Exit.DONE) if is_equal else DIFFERENT
    if options.out is not None and code == Exit.DONE:
        facts = weights_source.from_safetensors(place).facts or {}
        weights_export.write(
            params.cast("float32"),
            options.out,
            names="jaxres",
            max_shard_bytes=weights_export.MAX_SHARD_BYTES,
            facts=facts,
            about={"dtype": "float32"},
            beside={},
        )
        rows.append(f"written to {options.out}, under jaxres's own names, as float32")
    sections: dict[str, Any] = {
        "init_from": {"kind": "safetensors", "path": str((options.out or place).absolute())}
    }
    if model is not None:
        sections = {"model": _model_section(model)} | sections
    told["config"] = sections
    rows += ["to start a run from it:", *(f"  {row}" for row in dump(sections).splitlines())]
    return _text(told, rows, as_json=options.json), code


def _model_section(model: GptModel) -> dict[str, Any]:
    """Returns the settings that such a model needs."""
    names = ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size")
    others = ("tie_embeddings", "rope_theta", "norm_eps")
    return {"kind": "gpt"} | {name: getattr(model, name) for name in (*names, *others)}


def _digest_of_step(run_dir: RunDir, step: int, *, dtype: str) -> str:
    commit = _committed(run_dir, step=step)
    config = resolve(run_dir.root, [])[0].config
    return weights_export.digest_of(
        weights_export.of_run(weights_source.from_run(run_dir, config.model, commit)).cast(dtype)
    )


def _told(place: Path, params: Params, digest: str) -> dict[str, Any]:
    dtypes = sorted({info.dtype for info in params.infos.values()})
    return {
        "path": str(place),
        "params": digest,
        "arrays": len(params.infos),
        "numbers": params.numbers,
        "dtypes": dtypes,
    }


def _text(told: dict[str, Any], rows: list[str], *, as_json: bool) -> str:
    if as_json:
        return json.dumps(told) + "\n"
    first = f"{told['arrays']} arrays, {told['numbers']:,} numbers, {', '.join(told['dtypes'])}"
    lines = [told["path"], *(f"  {row}" for row in (told["params"], first, *rows))]
    return "".join(f"{line}\n" for line in lines)
