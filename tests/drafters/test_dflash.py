"""DFlash against numbers of the reference implementation, and that it never changes the text."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.drafters.dflash import DFlashDrafter, DFlashModel
from mlx_specdec.networks.dflash import DFlash, DFlashConfig, Sight
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import CacheOptions, Target
from tests import zoo
from tests.scripted import drafted, plain

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 1e-3


def network_of(name: str) -> DFlash:
    folder = Folder(GOLDEN / name)
    assert kind_of(folder) == "dflash"
    network = read_network(folder, "dflash")
    assert isinstance(network, DFlash)
    return network


def changed(network: DFlash, **fields: Any) -> DFlash:
    """The same weights under another config."""
    other = DFlash(replace(network.config, **fields), network._draft_ids)
    other.load_weights(tree_flatten(network.parameters()))
    return other


class Listening:
    """A head that keeps what it said."""

    def __init__(self, drafter: DFlashDrafter):
        self._head, drafter._head = drafter._head, self

    def __call__(self, output: mx.array) -> mx.array:
        self.logits = self._head(output)
        return self.logits


class Replayed(NamedTuple):
    """One round: how far features, draft logits and verify logits are from the reference's, and the ids."""

    features: float
    logits: float
    verified: float
    same_ids: bool


def replay(network: DFlash, name: str, move: int = 0) -> Iterator[Replayed]:
    """The rounds of a golden folder, on our own target with our own features, with the reference's acceptances.

    `move` counts the drafter's positions from another one than 0.
    """
    model, _ = load_model(GOLDEN / "target_qwen3")
    target = Target(model)
    drafter = DFlashModel(network).pair(target)()
    target.watch(drafter.wants)
    head, sequence, known = Listening(drafter), target.sequence(), np.load(GOLDEN / name / "expected.npz")
    ids = known["r1_ids"].tolist()
    drafter.start(ids)
    for chunk, features in sequence.prefill(ids):
        assert features is not None
        drafter.observe(chunk, features)
    for number in range(1, 5):
        ids, wanted = known[f"r{number}_ids"].tolist(), known[f"r{number}_draft_ids"].tolist()
        away = far(mx.concatenate(features.layers, axis=-1), known[f"r{number}_new_features"])  # type: ignore[union-attr]
        drafter._observed += move
        draft = drafter.propose(ids[-1], len(wanted), Sampler(SamplingParams(), ids))
        drafter._observed -= move
        logits, features = sequence.forward(mx.array([ids[-1], *wanted]))
        same = draft.tokens.tolist() == wanted
        yield Replayed(
            away,
            far(head.logits, known[f"r{number}_draft_logits"]),
            far(logits, known[f"r{number}_verify_target_logits"]),
            same,
        )
        if number < 4:
            accepted = int(known[f"r{number}_accepted"])
            sequence.settle(accepted + 1)
            features = features.head(accepted + 1)  # type: ignore[union-attr]
            drafter.observe([ids[-1], *wanted[:accepted]], features)
    target.close()


def far(ours: mx.array, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(np.array(ours) - theirs).max())


GOLDENS = ("dflash_zlab_qwen3",)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_rounds(name: str) -> None:
    rounds = list(replay(network_of(name), name))
    assert len(rounds) == 4
    for replayed in rounds:
        assert replayed.same_ids
        assert max(replayed[:3]) < TOLERANCE


MISTAKES: dict[str, Callable[[DFlash], DFlash]] = {
    "causal": lambda n: changed(n, sights=(Sight(causal=True),) * 2),
    "mask 0": lambda n: changed(n, mask_token_id=0),
    "taps - 1": lambda n: changed(n, target_layer_ids=(0, 2, 4)),
    "theta of the target": lambda n: changed(n, ropes=((1e6, None),) * 2),
    "anchor drafts": lambda n: changed(n, sample_from_anchor=True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_golden_rounds_notice_a_mistake(mistake: str) -> None:
    network = MISTAKES[mistake](network_of("dflash_zlab_qwen3"))
    assert max(replayed.logits for replayed in replay(network, "dflash_zlab_qwen3")) > 1


def test_the_golden_rounds_notice_block_positions_off_by_one() -> None:
    assert next(replay(network_of("dflash_zlab_qwen3"), "dflash_zlab_qwen3", move=1)).logits > 1


VOCAB, TOKENS = 64, 40
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(21)]
FULL = Sight()
SIGHTS = {
    "full": (FULL, FULL),
    "sliding": (Sight(5, 6, True), FULL),
    "all sliding": (Sight(5, 6, True), Sight(5, 6, False)),
    "from the anchor": (Sight(6, None, True), Sight(6, None, False)),
}


def random_network(
    target: Target, sights: tuple[Sight, ...] = SIGHTS["sliding"], seed: int = 0, **fields: Any
) -> DFlash:
    assert target.hidden is not None
    config = DFlashConfig(
        hidden_size=target.hidden,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
        block_size=9,
        mask_token_id=3,
        target_layer_ids=(0, len(target.model.layers) - 1),
        target_hidden_size=target.hidden,
        vocab_size=target.vocab,
        sights=sights,
        ropes=((10000.0, None),) * len(sights),
    )
    reduced = fields.get("draft_vocab_size")
    mx.random.seed(seed)
    return DFlash(replace(config, **fields), None if reduced is None else mx.arange(0, 3 * reduced, 3))


@cache
def target_of(name: str) -> Target:
    return Target(zoo.build(name, **({"hidden_size_per_layer_input": 0} if name == "gemma4_text" else {})), STEP)


STEP = CacheOptions(prefill_step_size=8)
FAMILIES = (
    "qwen3", "llama", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5", "qwen3_5_moe", "deepseek_v3",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_equal_plain_decoding(name: str) -> None:
    target = target_of(name)
    make = DFlashModel(random_network(target)).pair(target)
    target.watch(make().wants)
    for sampling in ({}, {"temperature": 1.0, "seed": 7}):
        answer = plain(target.model, PROMPT, TOKENS, STEP, **sampling)
        for k in (1, 2, 4, 8):
            assert drafted(target, make(), PROMPT, TOKENS, k, **sampling) == answer, k
