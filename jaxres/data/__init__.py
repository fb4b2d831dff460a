"""Data as a pure function of the data set's fingerprint, seed, cursor and skips; no jax in here.

Nouns: a *source* (text files, a token folder, a user's object) opens as a `Dataset` of *rows*,
equally shaped examples with ids 0..n-1, in two parts: `train`, and `heldout`, which training never
touches. The *stream* is the endless concatenation of epochs, each a permutation of the train rows;
a *position* is an index into it, and the *cursor* is the position of the next row. *Skips* are
ranges of positions that are not served. A `Batch` is a step's rows; `batch_at` computes it from the
cursor, `Prefetch` does so ahead of time. Cursors and skips count rows, so they mean the same when
the batch size or the number of hosts changes.
"""

from jaxres.data.bad_records import bad_rows, hung_row, is_its_own, why
from jaxres.data.batching import Arrays, BadRecord, Batch, Rows, batch_at
from jaxres.data.dataset import Dataset, open_dataset
from jaxres.data.prefetch import DataThreadDied, DataTimeout, Prefetch
from jaxres.data.shuffle import Skips, left_out, positions_at, rows_at, sample_digest
from jaxres.data.token_folder import TokensDamaged, TokenWriter, write_tokens

__all__ = [
    "Arrays",
    "BadRecord",
    "Batch",
    "DataThreadDied",
    "DataTimeout",
    "Dataset",
    "Prefetch",
    "Rows",
    "Skips",
    "TokenWriter",
    "TokensDamaged",
    "bad_rows",
    "batch_at",
    "hung_row",
    "is_its_own",
    "left_out",
    "open_dataset",
    "positions_at",
    "rows_at",
    "sample_digest",
    "why",
    "write_tokens",
]
