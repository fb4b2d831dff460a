"""Probabilities of texts under a model: perplexity and multiple choice, as in lm-eval.

Shape suffixes: B rows, T position, V vocabulary. (EleutherAI's lm-evaluation-harness, 0.4)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxres.data.tokens.tokenizer import Tokenizer
from jaxres.faults import ConfigError

LENGTH_STEP = 64
"""Rows are padded to a multiple of so many positions, so that few programs are compiled."""
ROWS_PER_BATCH = 8
TEXTS = ("text", "page")
QUESTIONS = ("query", "question", "ctx")
CHOICES = ("choices", "endings")
ANSWERS = ("gold", "answer", "label", "answerKey")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A question with its possible answers."""

    text: str
    choices: tuple[str, ...]
    right: int
    """Number of the right one."""


def parse(row: Mapping[str, Any], where: str) -> Question | str:
    """Returns the question of a line of a task, or the text whose perplexity is measured.

    A question has `query` (or `question`, `ctx`), `choices` (or `endings`) and `gold` (or `answer`,
    `label`, `answerKey`): the number of the right choice from 0, its letter, or its text.

    Raises ConfigError for a line that is neither, or has two of these that differ.
    """
    if {QUESTIONS[0], CHOICES[0], ANSWERS[0]} <= row.keys():  # As lm-eval adds them to a row.
        row = {name: row[name] for name in (QUESTIONS[0], CHOICES[0], ANSWERS[0])}
    text, question = (_only(row, names, str, where) for names in (TEXTS, QUESTIONS))
    choices, given = _only(row, CHOICES, list, where), _only(row, ANSWERS, object, where)
    if text is not None and question is None and choices is None:
        return text
    if text is not None:
        raise ConfigError(f"{where}: both a text ({' or '.join(TEXTS)}) and a part of a question.")
    if question is None or choices is None or given is None or len(choices) < 2:
        raise ConfigError(
            f"{where}: neither a text ({' or '.join(TEXTS)}) nor a question with "
            f"{' or '.join(QUESTIONS)}, {' or '.join(CHOICES)} (a list) and {' or '.join(ANSWERS)}."
        )
    texts = tuple(str(choice) for choice in choices)
    return Question(question, texts, _number(given, choices, where))


def _only(row: Mapping[str, Any], names: Sequence[str], kind: type, where: str) -> Any:
    """Returns the field of a row that has one of some names, or None.

    Raises ConfigError if several have it and differ.
    """
    given = {name: row[name] for name in names if row.get(name) is not None}
    found = {name: value for name, value in given.items() if isinstance(value, kind)}
    for (first, value), (other, another) in itertools.pairwise(found.items()):
        if value != another:
            raise ConfigError(
                f"{where}: {first} and {other} differ, and either may be meant. Leave one out."
            )
    return next(iter(found.values()), None)


def _number(given: Any, choices: Sequence[Any], where: str) -> int:
    """Returns the number of the right choice; raises ConfigError unless one reading names one."""
    found = {number for number, choice in enumerate(choices) if choice == given}
    if isinstance(given, str):
        found |= {number for number, choice in enumerate(choices) if str(choice) == given}
        found |= {LETTERS.find(given)} if len(given) == 1 else set()
        found |= {int(given)} if given.isdecimal() and len(given) < 10 else set()
    elif isinstance(given, int):
        found |= {given}
    found &= set(range(len(choices)))
    if isinstance(given, bool | float) or not found:
        raise ConfigError(f"{where}: {given!r} is none of the {len(choices)} choices.")
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"{where}: {given!r} may mean each of the choices {numbers} (counted from 0), by its "
            "number, letter or text. Give its number, as a number, and choices that differ."
        )
    return found.pop()


Row = tuple[list[int], int]
"""Token ids, and how many of the last ones are measured."""


class Likelihood:
    """Computes the log probability of tokens, given the tokens before them."""

    def __init__(self, logits: Callable[[Any, Array], Array], params: Any, *, seq_len: int):
        def measure(
            params: Any,
            tokens_BT: Int[Array, "B T"],
            targets_BT: Int[Array, "B T"],
            counts_BT: Bool[Array, "B T"],
        ) -> Float[Array, " B"]:
            logits_BTV = logits(params, tokens_BT).astype(jnp.float32)
            nats_BTV = jax.nn.log_softmax(logits_BTV)
            nats_BT = jnp.take_along_axis(nats_BTV, targets_BT[..., None], axis=-1)[..., 0]
            return jnp.sum(nats_BT, axis=1, where=counts_BT)

        self._measure = jax.jit(measure)
        self._params, self.seq_len = params, seq_len

    def of_rows(self, rows: Iterable[Row]) -> Iterator[float]:
        """Yields the log probability, in nats, of the measured tokens of each row.

        Of a row that is longer than seq_len + 1 tokens only the last ones are computed with.
        Raises ConfigError for one that is NaN.
        """
        remaining = iter(rows)
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            cut = [(tokens[-self.seq_len - 1 :], measured) for tokens, measured in batch]
            longest = max(len(tokens) for tokens, _ in cut) - 1
            length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.seq_len)
            arrays = [np.zeros((ROWS_PER_BATCH, length), t) for t in (np.int32, np.int32, bool)]
            for row, (tokens, measured) in enumerate(cut):
                num = len(tokens) - 1
                arrays[0][row, :num], arrays[1][row, :num] = tokens[:-1], tokens[1:]
                arrays[2][row, num - min(measured, num) : num] = True
            nats_B = np.asarray(self._measure(self._params, *arrays), np.float64)[: len(batch)]
            if np.isnan(nats_B).any():
                raise ConfigError(
                    "the model's logits are NaN or infinite, so texts have no probability. Take "
                    "another step (--step N)."
                )
            yield from nats_B.tolist()


def choice_rows(question: Question, tokenizer: Tokenizer) -> list[Row]:
    """Returns a row for each choice: the question, a space and the choice, which is measured."""
    start = len(tokenizer.encode(question.text))
    rows = []
    for choice in question.choices:
        tokens = tokenizer.encode(f"{question.text} {choice}")
        rows.append(([tokenizer.end_of_document, *tokens], max(len(tokens) - start, 1)))
    return rows


def text_rows(text: str, tokenizer: Tokenizer, *, seq_len: int) -> list[Row]:
    """Returns rows that measure each token of a text once, given the tokens before it in its row.

    The last row is as long as the others if the text is. (lm-eval's rolling windows)
    """
    tokens = [tokenizer.end_of_document, *tokenizer.encode(text)]
    rows = []
    for start in range(0, len(tokens) - 1, seq_len):
        end = min(start + seq_len + 1, len(tokens))
        rows.append((tokens[max(end - seq_len - 1, 0) : end], end - 1 - start))
    return rows


def score_choices(
    questions: Sequence[Question], tokenizer: Tokenizer, likelihood: Likelihood
) -> dict[str, float]:
    """Returns accuracies: by log probability (acc), and by it per byte of a choice (acc_norm).

    With the standard error of each, and how many choices are longer than a row (cut_choices), so
    that only their ends are measured.
    """
    rows = [row for question in questions for row in choice_rows(question, tokenizer)]
    nats = likelihood.of_rows(rows)
    right: list[tuple[float, float]] = []
    for question in questions:
        found = np.array(list(islice(nats, len(question.choices))))
        sizes = np.array([max(len(choice.encode()), 1) for choice in question.choices])
        best = np.argmax(found), np.argmax(found / sizes)
        right.append((float(best[0] == question.right), float(best[1] == question.right)))
    hits = np.array(right)
    scores: dict[str, float] = {"questions": len(questions)}
    if cut := sum(measured > likelihood.seq_len for _, measured in rows):
        scores["cut_choices"] = cut
    for column, name in enumerate(("acc", "acc_norm")):
        scores[name] = float(hits[:, column].mean())
        deviation = hits[:, column].std(ddof=1) if len(hits) > 1 else math.nan
        scores[f"{name}_stderr"] = float(deviation / math.sqrt(len(hits)))
    return scores


def score_texts(
    texts: Sequence[str], tokenizer: Tokenizer, likelihood: Likelihood
) -> dict[str, float]:
    """Returns perplexities by word and byte, and bits a byte, over all texts."""
    rows = (row for text in texts for row in text_rows(text, tokenizer, seq_len=likelihood.seq_len))
    nats = -sum(likelihood.of_rows(rows))
    num_bytes = sum(len(text.encode()) for text in texts)
    num_words = sum(len(text.split()) for text in texts)
    return {
        "texts": len(texts),
        "word_perplexity": math.exp(min(nats / max(num_words, 1), 700.0)),
        "byte_perplexity": math.exp(nats / max(num_bytes, 1)),
        "bits_per_byte": nats / max(num_bytes, 1) / math.log(2),
    }
