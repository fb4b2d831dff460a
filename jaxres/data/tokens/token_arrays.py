"""The arrays of a row of tokens: inputs, targets, segments, positions and weights in the loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxres.data.batching import Arrays

TOKEN_ROW_KEYS = ("tokens_BT", "targets_BT", "segment_ids_BT", "positions_BT", "weights_BT")


def token_arrays(
    tokens_BW: NDArray[np.int32], segment_ids_BW: NDArray[np.int32], positions_BW: NDArray[np.int32]
) -> Arrays:
    """Returns the arrays of rows of W = T + 1 tokens: T inputs, and the T targets after them.

    Segment ids number the documents of a row from 1; 0 is padding. A target has weight 1 in the
    loss if its input is in the same document, else 0: no document predicts the next one. B may be
    absent.
    """
    inputs, targets = segment_ids_BW[..., :-1], segment_ids_BW[..., 1:]
    arrays = (
        tokens_BW[..., :-1].copy(),
        tokens_BW[..., 1:].copy(),
        inputs.copy(),
        positions_BW[..., :-1].copy(),
        ((inputs == targets) & (targets != 0)).astype(np.float32),
    )
    return dict(zip(TOKEN_ROW_KEYS, arrays, strict=True))
