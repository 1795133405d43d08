"""A trained DFlash drafter on the real model: ids, drafts and counts of a loop written apart from this package."""

import mlx_specdec  # isort: skip

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.utils import dequantize_model

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.precision import to_dtype
from mlx_specdec.drafters.base import Draft
from mlx_specdec.drafters.dflash import DFlashModel
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests.scripted import drafted_rounds

pytestmark = pytest.mark.real

NAME, DRAFTS, WANTED, PROMPTS = "smollm2-dflash", 7, 96, 8


@cache
def rounded() -> nn.Module:
    """The weights that the expected drafts come from: MLX made them dense in float16, which rounds them."""
    model, _ = mlx_specdec.load("smollm2-135m")
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    return model


@cache
def exact() -> nn.Module:
    return mlx_specdec.load("smollm2-135m", dtype="float32")[0]


def decode(model: nn.Module, folder: Path, expected: dict[str, Any]) -> tuple[list[int], list[list[int]], list[int]]:
    """Ids, drafts and how many of each stood. The first id came from the prompt pass, before anything was drafted."""
    network = read_network(Folder(folder), "dflash")
    assert isinstance(to_dtype(network, "float32"), type(network))
    target = Target(model)
    drafter = DFlashModel(network).pair(target)()  # type: ignore[arg-type]
    target.watch(drafter.wants)
    drafts: list[list[int]] = []
    propose = drafter.propose

    def record(last: int, limit: int, sampler: Sampler) -> Draft:
        draft = propose(last, limit, sampler)
        drafts.append(draft.tokens.tolist())
        return draft

    drafter.propose = record  # type: ignore[method-assign]
    first = expected["ids"][:1]
    prompt, ids, accepted = expected["prompt"] + first, [*first], []
    sampler = Sampler(SamplingParams(), prompt)
    for emitted in drafted_rounds(target.sequence(), prompt, sampler, WANTED, drafter, DRAFTS):
        ids += emitted.tokens
        accepted.append(emitted.accepted)
        if len(accepted) == len(expected["accepted"]):
            break
    target.close()
    return ids, drafts, accepted


@pytest.mark.parametrize("number", range(PROMPTS))
def test_ids_drafts_and_counts(number: int, trained: Callable[[str], Path]) -> None:
    folder = trained(NAME)
    assert kind_of(Folder(folder)) == "dflash"
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(rounded(), folder, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    assert drafts == expected["drafted"]


@pytest.mark.parametrize("number", [4, 5])
def test_ids_and_counts_with_exact_weights(number: int, trained: Callable[[str], Path]) -> None:
    """A weak drafter's logits lie close together, so one draft in two hundred changes with the weights' last bits."""
    folder = trained(NAME)
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(exact(), folder, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    pairs = [
        pair
        for ours, theirs in zip(drafts, expected["drafted"], strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    assert sum(a == b for a, b in pairs) > 0.98 * len(pairs)
