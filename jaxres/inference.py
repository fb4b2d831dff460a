"""Models of runs and of folders in Hugging Face's format, with their numbers, for inference."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxres.checkpoint.read import manifest
from jaxres.checkpoint.read.verify import verify_step
from jaxres.checkpoint.weights import export as weights_export
from jaxres.checkpoint.weights.source import Step, commit_of, from_run
from jaxres.config import require_trainer
from jaxres.config.schema.data import HuggingfaceTokenizer
from jaxres.data.tokens import tokenizer as tokenizers
from jaxres.data.tokens.tokenizer import FILE_NAME, LibraryTokenizer, Tokenizer, limited
from jaxres.faults import ConfigError, Unrestorable
from jaxres.runlog import run_log
from jaxres.runlog.paths import RunDir, root_of
from jaxres.runlog.run_log import Commit, RunHistory
from jaxres.storage import foreign_json
from jaxres.storage.files import read_whole
from jaxres.storage.path import RunPath, is_remote
from jaxres.supervisor import run_config


@dataclass(frozen=True)
class LoadedModel:
    """A model and its parameters."""

    model: Any
    """A jaxres.models.Model."""
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    seq_len: int
    """Tokens of a row in training; of a folder, the most positions of the model."""
    name: str
    """The run and step, or the folder, that it is from."""
    model_state: dict[str, Any] | None = None
    """Arrays that are no parameters, such as batch statistics; None: there are none."""

    def logits(self, tokens_BT: Any) -> np.ndarray:
        """Returns float32 logits_BTV of token ids, one document a row.

        Raises:
          ConfigError: the model has no logits, such as one of images; or no such token.
        """
        ids = np.asarray(tokens_BT)
        logits_BTV = np.asarray(self._compiled(self.params, ids.astype(np.int32)))
        size = logits_BTV.shape[-1]
        if not ((ids >= 0) & (ids < size)).all():
            raise ConfigError(f"{self.name}: token ids must be from 0 to {size - 1}.")
        return logits_BTV

    def sample(
        self, prompt: str = "", *, tokens: int = 100, rows: int = 1, **sampling: Any
    ) -> list[str]:
        """Returns texts with which the model continues a prompt, one a row.

        `sampling` are the fields of `jaxres.models.generate.Sampling`: seed, temperature, top_k,
        top_p. Raises ConfigError if one is out of range, or the model has no logits, or logits that
        are NaN, or no tokenizer.
        """
        drawn = np.array(list(self.stream(prompt, tokens=tokens, rows=rows, **sampling)))
        assert self.tokenizer is not None
        return [self.tokenizer.decode(row) for row in drawn.reshape(tokens, rows).T.tolist()]

    def stream(
        self, prompt: str = "", *, tokens: int = 100, rows: int = 1, **sampling: Any
    ) -> Iterator[np.ndarray]:
        """Yields the tokens of `sample` as they are drawn, an array of one for each row."""
        from jaxres.models.generate import Sampling, generate

        if problems := sampling_problems(prompt=prompt, tokens=tokens, rows=rows, **sampling):
            raise ConfigError("\n".join(f"{name} {says}" for name, says in problems.items()))
        tokenizer = self.text_tokenizer()
        prompt_ids = list(tokenizer.encode(prompt)) or [tokenizer.end_of_document]
        return generate(
            self.model,
            self.params,
            prompt_ids,
            count=tokens,
            seq_len=self.seq_len,
            sampling=Sampling(**sampling),
            num_rows=rows,
        )

    def text_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer. Raises ConfigError if the model is none of text."""
        if self.model.logits is None:
            raise ConfigError(f"{self.name}: this model has no logits, so it is none of text.")
        if self.tokenizer is None:
            raise ConfigError(f"{self.name}: the tokenizer of this model is not known.")
        return self.tokenizer

    @functools.cached_property
    def _compiled(self) -> Any:
        import jax

        if self.model.logits is None:
            raise ConfigError("this model has no logits; call model.loss or your own module.")
        return jax.jit(self.model.logits)


def sampling_problems(
    *,
    prompt: str,
    tokens: int,
    rows: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> dict[str, str]:
    """Returns the errors in arguments of `LoadedModel.sample`, by argument name."""
    is_text = prompt.encode(errors="ignore").decode() == prompt
    checks = {
        "prompt": (is_text, "must be Unicode text (bytes must be UTF-8)"),
        "tokens": (1 <= tokens < 2**63, "must be from 1 to 2^63 - 1"),
        "rows": (rows >= 1, "must be at least 1"),
        "seed": (0 <= seed < 2**32, "must be from 0 to 2^32 - 1"),
        "temperature": (0 <= temperature < math.inf, "must be at least 0"),
        "top_k": (top_k is None or top_k >= 1, "must be at least 1"),
        "top_p": (top_p is None or 0 < top_p <= 1, "must be above 0, and at most 1"),
    }
    return {name: says for name, (is_right, says) in checks.items() if not is_right}


def load(source: str | RunPath, step: Step = "newest") -> LoadedModel:
    """Returns the model of a run, or of a folder in Hugging Face's format.

    A run's computes in its model.compute_dtype, a folder's in float32.

    Raises:
      ConfigError: the step is not committed, or the folder's model can't be computed.
      Unrestorable: the step is damaged.
    """
    if is_folder(source):
        return _load_folder(Path(str(source)))
    if _has(source, "adapter_config.json"):
        raise ConfigError(
            f"{source}: holds adapters only (--names peft); give the run, or another export."
        )
    return _load_run(RunDir(root_of(source)), step)


def is_folder(source: str | RunPath) -> bool:
    """Returns whether a path is a folder in Hugging Face's format."""
    return _has(source, "config.json")


def _has(source: str | RunPath, name: str) -> bool:
    text = str(source)
    return "://" not in text and (Path(os.path.expanduser(text)) / name).is_file()


def _load_run(run_dir: RunDir, step: Step) -> LoadedModel:
    from jaxres import models

    commit = commit_of(run_dir, step)
    config = run_config.newest_config(run_dir)
    require_trainer(config, str(run_dir.root))
    tokenizer = tokenizer_of(run_dir)
    tokenizer = limited(tokenizer, getattr(config.model, "vocab_size", None))
    model = models.build(
        config.model,
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        seq_len=config.data.seq_len,
        platform="cpu",
    )
    return LoadedModel(
        model,
        params_of(run_dir, commit),
        tokenizer,
        config.data.seq_len,
        f"{run_dir.root} step {commit.step}",
        None if model.init_state is None else state_of(run_dir, commit)["model_state"],
    )


def _load_folder(folder: Path) -> LoadedModel:
    from jaxres import models

    folder = folder.expanduser()
    stored, section = weights_export.of_folder(folder)
    if section is None:
        raise ConfigError(f"{folder}: tensors under jaxres's own names; load the run instead.")
    fields = foreign_json.loads(read_whole(folder / "config.json"))
    tokenizer = None
    if (folder / FILE_NAME).is_file():
        tokenizer = tokenizers.open_tokenizer(HuggingfaceTokenizer(path=folder))
        if isinstance(tokenizer, LibraryTokenizer):
            tokenizer.require_unambiguous()
        tokenizer = limited(tokenizer, section.vocab_size)
    seq_len = fields.get("max_position_embeddings", fields.get("n_positions", 1024))
    section = section.model_copy(update={"compute_dtype": "float32"})
    model = models.build(section, vocab_size=None, seq_len=seq_len, platform="cpu")
    arrays = {path: stored.read(path) for path in stored.infos}
    _refuse_nonfinite(arrays, folder)
    return LoadedModel(model, nested(arrays)["params"], tokenizer, seq_len, str(folder))


def _refuse_nonfinite(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Raises ConfigError for weights of a folder that are NaN or infinite; a run commits none."""
    bad = [path for path, array in arrays.items() if not np.isfinite(array).all()]
    if bad:
        others = f" and {len(bad) - 1} other arrays" if bad[1:] else ""
        raise ConfigError(
            f"{folder}: {bad[0]}{others} have values that are not finite (NaN or infinite): no "
            "text can be continued or scored. Copy the folder again, or take another one."
        )


def history_of(run_dir: RunDir) -> RunHistory:
    """Returns the history of a run."""
    return run_log.fold(run_log.read_records(run_dir.log))


def params_of(run_dir: RunDir, commit: Commit) -> dict[str, Any]:
    """Returns the parameters of a step as it evaluates them: averaged, with adapters added."""
    weights = from_run(run_dir, run_config.newest_config(run_dir), commit)
    return nested({path: weights.read(path) for path in weights.tensors})["params"]


def state_of(run_dir: RunDir, commit: Commit) -> dict[str, Any]:
    """Returns the whole training state of a step. Raises Unrestorable if it is damaged."""
    step_dir = run_dir.root / commit.path
    findings = verify_step(step_dir.absolute(), commit)
    if findings.problems:
        raise Unrestorable(f"{step_dir}: step {commit.step} is damaged: {findings.evidence}")
    return nested(manifest.read_arrays(step_dir.absolute(), commit))


def tokenizer_of(run_dir: RunDir) -> Tokenizer | None:
    """Returns the tokenizer that a run trains with; None: it is not known."""
    name = history_of(run_dir).tokenizer
    if name is None:
        return None
    folder = run_dir.tokenizer(name)
    if is_remote(folder):
        raise ConfigError(f"{run_dir.root}: its tokenizer is read from disks only; copy the run.")
    section = run_config.newest_config(run_dir).data.tokenizer
    special = section.special_tokens if isinstance(section, HuggingfaceTokenizer) else "text"
    return tokenizers.of_folder(folder, name, special_tokens=special)


def nested(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns arrays by path as nested dicts, without jax."""
    root: dict[str, Any] = {}
    for path, array in flat.items():
        *above, last = path.split("/")
        node = root
        for key in above:
            node = node.setdefault(key, {})
        node[last] = array
    return root
