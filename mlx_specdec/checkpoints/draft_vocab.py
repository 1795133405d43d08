"""The reduced vocabulary of a drafter's head: which tokens of the target its rows stand for."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError


def draft_ids(path: Path, rows: int, vocab: int, d2t: mx.array | None, t2d: mx.array | None) -> np.ndarray | None:
    """The target's ids int64 [rows] of a head's rows; None where row i is token i of all `vocab`.

    `d2t` int [rows] holds what is to be added to a row's number (EAGLE's own meaning) or else the ids themselves;
    `t2d` bool [vocab] marks the tokens that have a row. The marks decide which it is; without them d2t is read as
    offsets if that gives distinct tokens. Raises CheckpointError when neither reading does.
    """
    if d2t is None:
        if rows < vocab:
            raise CheckpointError(f"{path} drafts {rows} of {vocab} tokens and has no d2t to say which; fetch it again")
        return None
    if d2t.shape != (rows,):
        raise CheckpointError(f"{path}: d2t has the shape {list(d2t.shape)} and the head {rows} rows; fetch it again")
    given = np.array(d2t.astype(mx.int64))
    marked = None if t2d is None else np.flatnonzero(np.array(t2d))
    for ids in (given + np.arange(rows), given):
        if _distinct(ids, vocab) and (marked is None or np.array_equal(np.sort(ids), marked)):
            return None if rows == vocab and np.array_equal(ids, np.arange(vocab)) else ids
    fault = "names tokens twice or beyond the vocabulary" if marked is None else "and t2d do not name the same tokens"
    raise CheckpointError(f"{path}: d2t {fault}, read as offsets or as ids; fetch the checkpoint again")


def _distinct(ids: np.ndarray, vocab: int) -> bool:
    return ids.min() >= 0 and ids.max() < vocab and len(np.unique(ids)) == len(ids)
