"""Bytes of text that a token stands for, by which losses of different tokenizers are compared."""

from __future__ import annotations

import math

import numpy as np

from jaxres.data.bad_records import rows_to_evaluate
from jaxres.data.batching import Rows
from jaxres.data.tokens.tokenizer import Tokenizer

MAX_ROWS = 2048


def bytes_per_target(rows: Rows, tokenizer: Tokenizer, *, num_rows: int) -> float | None:
    """Returns the mean number of text bytes of a weighted target in the first rows.

    At most MAX_ROWS rows are read. The end of a document counts as a target of no bytes.
    None: the rows are not of tokens, or have no target.
    """
    num_bytes = num_targets = 0
    for row in range(min(num_rows, len(rows), MAX_ROWS)):
        arrays = rows_to_evaluate(rows, np.array([row]))
        if "targets_BT" not in arrays:
            return None
        targets = arrays["targets_BT"][0][arrays["weights_BT"][0] > 0]
        text = tokenizer.decode(targets[targets != tokenizer.end_of_document].tolist())
        # A character that is cut at a row's end is U+FFFD, which stands for one or more bytes.
        num_bytes += len(text.encode()) - text.count("\ufffd") * (len("\ufffd".encode()) - 1)
        num_targets += len(targets)
    return num_bytes / num_targets if num_bytes else None


def bits_per_byte(loss: float, bytes_a_target: float) -> float:
    """Returns a loss in nats a target as bits a byte of text.

    >>> round(bits_per_byte(math.log(2), 4.0), 3)
    0.25
    """
    return loss / math.log(2) / bytes_a_target
