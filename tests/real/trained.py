"""What the tests of trained heads share: the two forms of the real target, and a decoding that is written down."""

import mlx_specdec  # isort: skip

from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import dequantize_model

from mlx_specdec.drafters.base import Draft, DrafterModel
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests.scripted import drafted_rounds

WANTED = 96  # tokens


@cache
def rounded() -> nn.Module:
    """The weights that the expected drafts come from: MLX made them dense in float16, which rounds them."""
    model = dequantize_model(mlx_specdec.load("smollm2-135m")[0])
    model.set_dtype(mx.float32)
    return model


@cache
def exact() -> nn.Module:
    return mlx_specdec.load("smollm2-135m", dtype="float32")[0]


def decode(
    model: nn.Module, drafting: DrafterModel, most: int, expected: dict[str, Any]
) -> tuple[list[int], list[list[int]], list[int]]:
    """Ids, drafts and how many of each stood. The first id came from the prompt pass, before anything was drafted."""
    target = Target(model)
    drafter = drafting.pair(target)()
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
    for emitted in drafted_rounds(target.sequence(), prompt, sampler, WANTED, drafter, most):
        ids += emitted.tokens
        accepted.append(emitted.accepted)
        if len(accepted) == len(expected["accepted"]):
            break
    target.close()
    return ids, drafts, accepted
