"""A trained EAGLE-3 head on the real model: ids, drafts and counts of a loop written apart from this package."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.precision import to_dtype
from mlx_specdec.drafters.eagle3 import Eagle3Model
from tests.real.trained import decode, exact, rounded

pytestmark = pytest.mark.real

NAME, DRAFTS, PROMPTS = "smollm2-eagle3", 4, 8


def drafter(folder: Path) -> Eagle3Model:
    return Eagle3Model(to_dtype(read_network(Folder(folder), "eagle3"), "float32"))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(PROMPTS))
def test_ids_drafts_and_counts(number: int, trained: Callable[[str], Path]) -> None:
    folder = trained(NAME)
    assert kind_of(Folder(folder)) == "eagle3"
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(rounded(), drafter(folder), DRAFTS, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert drafts == expected["drafted"]
    assert accepted == expected["accepted"]


@pytest.mark.parametrize("number", [3, 7])
def test_ids_and_counts_with_exact_weights(number: int, trained: Callable[[str], Path]) -> None:
    """A few drafts are other ones here: their logits were within 0.03 of each other."""
    folder = trained(NAME)
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(exact(), drafter(folder), DRAFTS, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    others = [i for i, pair in enumerate(zip(drafts, expected["drafted"], strict=True)) if pair[0] != pair[1]]
    assert len(others) <= 3
