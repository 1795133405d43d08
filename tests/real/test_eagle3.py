"""A trained EAGLE-3 head on the real model: ids, drafts and counts of a loop written apart from this package."""

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
from mlx_specdec.drafters.eagle3 import Eagle3Model
from mlx_specdec.networks.eagle3 import Eagle3
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests.scripted import drafted_rounds

pytestmark = pytest.mark.real

NAME, DRAFTS, WANTED, PROMPTS = "smollm2-eagle3", 4, 96, 8


@cache
def rounded() -> nn.Module:
    """The weights that the expected drafts come from: MLX made them dense in float16, which rounds them."""
    model = dequantize_model(mlx_specdec.load("smollm2-135m")[0])
    model.set_dtype(mx.float32)
    return model


@cache
def exact() -> nn.Module:
    return mlx_specdec.load("smollm2-135m", dtype="float32")[0]


def decode(model: nn.Module, folder: Path, expected: dict[str, Any]) -> tuple[list[int], list[list[int]], list[int]]:
    """Ids, drafts and how many of each stood. The first id came from the prompt pass, before anything was drafted."""
    network = to_dtype(read_network(Folder(folder), "eagle3"), "float32")
    assert isinstance(network, Eagle3)
    target = Target(model)
    drafter = Eagle3Model(network).pair(target)()
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
    assert kind_of(Folder(folder)) == "eagle3"
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(rounded(), folder, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert drafts == expected["drafted"]
    assert accepted == expected["accepted"]


@pytest.mark.parametrize("number", [3, 7])
def test_ids_and_counts_with_exact_weights(number: int, trained: Callable[[str], Path]) -> None:
    """A few drafts are other ones here: their logits were within 0.03 of each other."""
    folder = trained(NAME)
    expected = json.loads((folder / "expected.json").read_text())[number]
    ids, drafts, accepted = decode(exact(), folder, expected)
    assert ids[: len(expected["ids"])] == expected["ids"]
    assert accepted == expected["accepted"]
    others = [i for i, pair in enumerate(zip(drafts, expected["drafted"], strict=True)) if pair[0] != pair[1]]
    assert len(others) <= 3
