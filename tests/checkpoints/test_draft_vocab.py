"""Which tokens the rows of a reduced head stand for."""

import mlx_specdec  # noqa: F401  # isort: skip

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints.draft_vocab import draft_ids


def ids(d2t: list[int] | None, t2d: list[int] | None = None, rows: int = 3) -> list[int] | None:
    marks = None if t2d is None else mx.array([i in t2d for i in range(10)])
    given = draft_ids(Path("drafter"), rows, 10, None if d2t is None else mx.array(d2t), marks)
    return None if given is None else given.tolist()


def test_offsets_are_the_first_reading() -> None:
    assert ids([0, 0, 5]) == [0, 1, 7]
    assert ids([0, 2, 5]) == [0, 3, 7]
    assert ids([0, 0, 0]) == [0, 1, 2]


def test_marks_decide() -> None:
    assert ids([0, 2, 5], [0, 2, 5]) == [0, 2, 5]
    assert ids([0, 2, 5], [0, 3, 7]) == [0, 3, 7]
    assert ids([5, 0, 2], [0, 2, 5]) == [5, 0, 2]


def test_ids_that_cannot_be_offsets() -> None:
    assert ids([0, 2, 9]) == [0, 2, 9]
    assert ids([4, 3, 9]) == [4, 3, 9]


def test_a_whole_vocabulary_needs_no_map() -> None:
    assert ids(None, rows=10) is None
    assert ids([0] * 10, list(range(10)), rows=10) is None
    assert ids(list(range(10)), rows=10) is None


@pytest.mark.parametrize(("d2t", "t2d"), [([9, 9, 9], None), ([-1, 0, 0], None), ([1, 0, 0], [5, 6, 7])])
def test_what_is_no_map(d2t: list[int], t2d: list[int] | None) -> None:
    with pytest.raises(CheckpointError, match="d2t"):
        ids(d2t, t2d)
