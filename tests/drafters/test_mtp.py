"""MTP heads against transformers' own numbers, and that whatever they draft the text stays the target's."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.drafters.base import NOTHING, Draft, Drafter
from mlx_specdec.drafters.mtp import MtpModel
from mlx_specdec.features import Features
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests.scripted import drafted_rounds

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = ("mtp_qwen3_5", "mtp_glm4_moe")


class Listening(Sampler):
    """Greedy, and keeps the logits that drafts were taken from."""

    def __init__(self, prompt: Sequence[int]):
        super().__init__(SamplingParams(), prompt)
        self.heard: list[mx.array] = []

    def draft(self, logits: mx.array, fed: mx.array) -> tuple[mx.array, mx.array | None]:
        self.heard.append(logits)
        return super().draft(logits, fed)


@cache
def golden(name: str) -> tuple[Target, Callable[[], Drafter], dict[str, np.ndarray]]:
    """A golden target, what makes drafters of its heads, and what the reference made of both."""
    path = GOLDEN / name
    model, _ = load_model(path)
    heads = read_heads(Folder(path), model)
    assert heads is not None
    target = Target(model)
    make = MtpModel(heads).pair(target)
    target.watch(make().wants)
    return target, make, dict(np.load(path / "expected.npz"))


def propose(drafter: Drafter, last: int, limit: int, prompt: Sequence[int]) -> tuple[list[int], np.ndarray]:
    sampler = Listening(prompt)
    draft = drafter.propose(last, limit, sampler)
    assert draft.probs is None
    return draft.tokens.tolist(), np.array(mx.concatenate(sampler.heard))


@pytest.mark.parametrize("name", PUBLISHED)
def test_rounds_equal_the_reference(name: str) -> None:
    """Two rounds, fed with the reference's own hidden states."""
    _, make, want = golden(name)
    drafter, prompt = make(), want["prompt_ids"].tolist()
    hidden = mx.array(want["all_hidden"])

    def observe(tokens: list[int], start: int) -> None:
        drafter.observe(tokens, Features((), hidden[start : start + len(tokens)]))

    drafter.start(prompt)
    observe(prompt[:9], 0)
    observe(prompt[9:], 9)
    first = want["first_token_id"].item()
    ids, logits = propose(drafter, first, 3, prompt)
    assert ids == want["r1_draft_ids"].tolist()
    np.testing.assert_allclose(logits, want["r1_draft_logits"], atol=1e-4)
    accepted = want["r1_accepted"].item()
    observe([first, *ids[:accepted]], len(prompt))
    ids, logits = propose(drafter, want["r1_bonus_id"].item(), 3, prompt)
    assert ids == want["r2_draft_ids"].tolist()
    np.testing.assert_allclose(logits, want["r2_draft_logits"], atol=1e-4)


class Kept:
    """A drafter that is silent once, as the reference is on the prompt, and then has its drafts written down."""

    def __init__(self, drafter: Drafter):
        self._drafter, self._silent = drafter, True
        self.drafts: list[list[int]] = []

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._drafter, attribute)

    def propose(self, last: int, limit: int, sampler: Sampler) -> Draft:
        if self._silent:
            self._silent = False
            return NOTHING
        draft = self._drafter.propose(last, limit, sampler)
        self.drafts.append(draft.tokens.tolist())
        return draft


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", PUBLISHED)
def test_whole_runs_equal_the_reference(name: str, k: int) -> None:
    """Every draft and every count of a decode, up to the last round, which the reference drafts for in full."""
    target, make, want = golden(name)
    prompt, answer = want["prompt_ids"].tolist(), want["greedy_ids"].tolist()
    drafter = Kept(make())
    ids, starts, accepted = [], [], []
    for emitted in drafted_rounds(target.sequence(), prompt, Sampler(SamplingParams(), prompt), 40, drafter, k):
        starts.append(len(prompt) + len(ids))
        ids += emitted.tokens
        accepted.append(emitted.accepted)
    assert ids == answer
    trace = {key: want[f"trace_k{k}_{key}"].tolist() for key in ("drafts", "accepted", "start")}
    assert starts[1:] == trace["start"][: len(starts) - 1]
    for ours, theirs in zip(drafter.drafts, trace["drafts"], strict=False):
        assert ours == theirs[: len(ours)]
    assert accepted[1:] == trace["accepted"][: len(accepted) - 1]
    assert sum(accepted) > 8
