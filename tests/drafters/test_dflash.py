"""DFlash against numbers of the reference implementations."""

import mlx_specdec  # noqa: F401  # isort: skip

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.drafters.dflash import DFlashDrafter, DFlashModel
from mlx_specdec.features import Features
from mlx_specdec.networks.dflash import DFlash, Sight
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target
from tests.scripted import drafted

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


VARIANTS = ("sliding", "sliding_noncausal", "causal", "speculators", "speculators_anchor")


def two_ends(embed: np.ndarray, head: np.ndarray) -> Any:
    """As much of a target as a drafter needs: an embedding that it scales by 7, as some do, and a head."""

    def embedded(tokens: mx.array, scaled: bool = True) -> mx.array:
        return mx.array(embed)[tokens] * (7 if scaled else 1)

    ends = SimpleNamespace(embed=embedded, head=lambda hidden: hidden @ mx.array(head).T, caps=False)
    return SimpleNamespace(model=SimpleNamespace(layers=[None] * 6), hidden=embed.shape[1], vocab=len(embed), ends=ends)


def variant_rounds(network: DFlash, name: str, chunk: int) -> Iterator[tuple[float, bool]]:
    """How far the draft logits of each round are from the reference's, and whether the ids are the same.

    Features come in chunks, as those of a prompt, up to what is known in the round.
    """
    known, ids = np.load(GOLDEN / "dflash_variants" / name / "expected.npz"), network._draft_ids
    # z-lab's reference embeds as its target does, speculators' takes the rows as they are
    embed = known["embed"] if name.startswith("speculators") else known["embed"] / 7
    drafter = DFlashModel(network).pair(two_ends(embed, known["head"]))()
    head, seen = Listening(drafter), 0
    for number, until in enumerate(known["known"].tolist()):
        for start in range(seen, until, chunk):
            rows = mx.array(known["features"][start : min(start + chunk, until)])
            drafter.observe([0] * len(rows), Features(tuple(mx.split(rows, 2, axis=-1)), None))
        seen = until
        draft = drafter.propose(int(known["anchors"][number]), 16, Sampler(SamplingParams(), [0]))
        logits, drafted = head.logits, np.arange(head.logits.shape[1]) if ids is None else np.array(ids)
        assert int((~mx.isinf(logits)).sum()) == len(logits) * len(drafted)
        same = draft.tokens.tolist() == known[f"ids_{number}"].tolist()
        yield far(logits[:, mx.array(drafted)], known[f"logits_{number}"]), same


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("name", VARIANTS)
def test_golden_variants(name: str, chunk: int) -> None:
    for away, same_ids in variant_rounds(network_of(f"dflash_variants/{name}"), name, chunk):
        assert away < TOLERANCE
        assert same_ids


# Configs that are nearly right.
NEARLY: dict[str, tuple[str, dict[str, Any]]] = {
    "window from the anchor": ("sliding", {"sights": (Sight(6, None, True), Sight())}),
    "window from each row": ("speculators", {"sights": (Sight(5, 6, True), Sight())}),
    "not causal": ("sliding", {"sights": (Sight(5, 6, False), Sight())}),
    "causal": ("sliding_noncausal", {"sights": (Sight(9, 10, True),) * 2}),
    "a window of one less": ("sliding_noncausal", {"sights": (Sight(8, 9, False),) * 2}),
    "uncapped": ("causal", {"final_logit_softcapping": None}),
    "no YaRN factor": ("causal", {"ropes": ((1e4, {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0,
                                                   "mscale_all_dim": 1.0,
                                                   "original_max_position_embeddings": 16}),) * 2}),
    "the target's scale": ("speculators_anchor", {"scaled_embedding": True}),
}  # fmt: skip


@pytest.mark.parametrize("nearly", NEARLY)
def test_the_variants_notice_a_mistake(nearly: str) -> None:
    name, fields = NEARLY[nearly]
    network = changed(network_of(f"dflash_variants/{name}"), **fields)
    assert max(away for away, _ in variant_rounds(network, name, 64)) > 0.1


def test_greedy_ids_of_the_golden_target() -> None:
    model, _ = load_model(GOLDEN / "target_qwen3")
    known, target = np.load(GOLDEN / "target_qwen3" / "expected.npz"), Target(model)
    make = DFlashModel(network_of("dflash_zlab_qwen3")).pair(target)
    target.watch(make().wants)
    prompt, answer = (known[f"dflash_zlab_qwen3_{what}_ids"].tolist() for what in ("prompt", "greedy"))
    for k in (1, 2, 4, 8):
        assert drafted(target, make(), prompt, len(answer), k) == answer
