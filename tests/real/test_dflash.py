"""A trained DFlash drafter on the real model: ids, drafts and counts of a loop written apart from this package."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.precision import to_dtype
from mlx_specdec.drafters.dflash import DFlashModel
from tests.real.trained import decode, exact, rounded

pytestmark = pytest.mark.real

NAME, DRAFTS, PROMPTS = "smollm2-dflash", 7, 8


def drafter(folder: Path) -> DFlashModel:
    return DFlashModel(to_dtype(read_network(Folder(folder), "dflash"), "float32"))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(PROMPTS))
def test_ids_drafts_and_counts(number: int, trained: Callable[[str], Path]) -> None:
    folder = trained(NAME)
    assert kind_of(Folder(folder)) == "dflash"
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(rounded(), drafter(folder), DRAFTS, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    assert drafts == expected["drafted"]


@pytest.mark.parametrize("number", [4, 5])
def test_ids_and_counts_with_exact_weights(number: int, trained: Callable[[str], Path]) -> None:
    """A weak drafter's logits lie close together, so one draft in two hundred changes with the weights' last bits."""
    folder = trained(NAME)
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(exact(), drafter(folder), DRAFTS, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    pairs = [
        pair
        for ours, theirs in zip(drafts, expected["drafted"], strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    assert sum(a == b for a, b in pairs) > 0.98 * len(pairs)
