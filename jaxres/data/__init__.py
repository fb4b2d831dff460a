"""Training data: a pure function of the data set's fingerprint, seed, cursor and skips; no jax.

Terms: a *source* (text files, a token folder, a user's object) opens as a `Dataset` of *rows*,
equally shaped examples with ids 0..n-1, in two parts: `train`, and `heldout`, which is never
trained on. The *stream* is the endless concatenation of epochs, each a permutation of the train
rows. A *position* is an index into the stream, and the *cursor* is the position of the next row.
*Skips* are ranges of positions that are not served. A `Batch` has the rows of a step: `batch_at`
computes it from the cursor, `Prefetch` computes it ahead of time. Cursors and skips count rows, so
they remain valid when the batch size or the number of hosts changes.
"""

from jaxres.data.bad_records import describe, find_bad_rows, find_hung_row, rows_to_evaluate
from jaxres.data.batching import (
    Arrays,
    BadRecord,
    Batch,
    Rows,
    batch_at,
    first_row,
    is_record_fault,
)
from jaxres.data.dataset import Dataset, open_dataset
from jaxres.data.mixture import Mixture, describe_row
from jaxres.data.order import Order, Skips, positions_at, sample_digest, sample_ids_at, skip_ranges
from jaxres.data.prefetch import DataThreadDied, DataTimeout, Prefetch
from jaxres.data.shuffle import Permutation
from jaxres.data.tokens.token_arrays import TOKEN_ROW_KEYS
from jaxres.data.tokens.token_folder import CacheDamaged, TokensDamaged
from jaxres.data.tokens.token_writer import TokenWriter, write_tokens

__all__ = [
    "TOKEN_ROW_KEYS",
    "Arrays",
    "BadRecord",
    "Batch",
    "CacheDamaged",
    "DataThreadDied",
    "DataTimeout",
    "Dataset",
    "Mixture",
    "Order",
    "Permutation",
    "Prefetch",
    "Rows",
    "Skips",
    "TokenWriter",
    "TokensDamaged",
    "batch_at",
    "describe",
    "describe_row",
    "find_bad_rows",
    "find_hung_row",
    "first_row",
    "is_record_fault",
    "open_dataset",
    "positions_at",
    "rows_to_evaluate",
    "sample_digest",
    "sample_ids_at",
    "skip_ranges",
    "write_tokens",
]
