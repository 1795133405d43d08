"""EAGLE-3 drafts what the PyTorch references draft."""

import mlx_specdec  # noqa: F401  # isort: skip

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec.checkpoints.eagle3 import read
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.drafters.eagle3 import Eagle3Head, Eagle3Model
from mlx_specdec.drafters.heads import HeadDrafter
from mlx_specdec.features import Features
from mlx_specdec.networks.eagle3 import Eagle3
from mlx_specdec.sampling import Sampler, SamplingParams
from mlx_specdec.target.model import Target

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ("eagle3_safeailab_llama", "eagle3_speculators_variant")
TOLERANCE = 1e-3


@cache
def golden_target() -> Target:
    return Target(load_model(GOLDEN / "target_llama")[0])


@cache
def network(name: str) -> Eagle3:
    return read(Folder(GOLDEN / name))


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / name / "expected.npz"))


class Recording(Eagle3Head):
    """Keeps what passes through it."""

    def __init__(self, network: Eagle3, target: Target):
        super().__init__(network, target)
        self.seen_logits: list[mx.array] = []
        self.handed_on: list[mx.array] = []

    def rows(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        output, recurrent = super().rows(tokens, hidden, cache)
        self.handed_on.append(recurrent[-1])
        return output, recurrent

    def logits(self, output: mx.array) -> mx.array:
        self.seen_logits.append(super().logits(output)[0])
        return self.seen_logits[-1][None]


def replay(name: str, network: Eagle3, first_round: bool = False) -> tuple[int, float]:
    """Our drafter through the rounds of the reference: how many drafted ids differ, and by how much logits and
    recurrent hidden states do. `first_round`: it drafts after the prompt pass too, as our loop lets it."""
    numbers, head = expected(name), Recording(network, golden_target())
    drafter = HeadDrafter("eagle3", head, Eagle3Model(network).pair(golden_target())().wants, 4)
    sampler = Sampler(SamplingParams(), [1])
    wrong, apart = 0, 0.0
    for number in range(1, 5):
        ids = numbers[f"r{number}_ids"].tolist()
        rows = mx.array(numbers[f"r{number}_new_features"])
        features = Features(tuple(mx.split(rows, 3, axis=-1)), None)
        tokens = ids[:-1][-rows.shape[0] :]
        if number == 1:
            body = len(tokens) - 1
            drafter.start(tokens)
            drafter.observe(tokens[:body], features.head(body))
            if first_round:
                drafter.propose(tokens[body], 3, sampler)
            tokens, features = tokens[body:], Features(tuple(h[body:] for h in features.layers), None)
        drafter.observe(tokens, features)
        head.seen_logits.clear()
        head.handed_on.clear()
        draft = drafter.propose(ids[-1], 4, sampler).tokens.tolist()
        wrong += sum(a != b for a, b in zip(draft, numbers[f"r{number}_draft_ids"].tolist(), strict=True))
        logits = np.array(mx.stack(head.seen_logits))
        known = np.arange(logits.shape[1]) if network.ids is None else network.ids
        assert np.isneginf(np.delete(logits, known, axis=1)).all()
        apart = max(apart, np.abs(logits[:, known] - numbers[f"r{number}_draft_logits"]).max())
        apart = max(apart, np.abs(np.array(mx.stack(head.handed_on)) - numbers[f"r{number}_recurrent_hidden"]).max())
    return wrong, apart


@pytest.mark.parametrize("first_round", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_references(name: str, first_round: bool) -> None:
    wrong, apart = replay(name, network(name), first_round)
    assert wrong == 0
    assert apart < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_references(name: str) -> None:
    """Tapped off our target: the very layers, and their streams before any norm."""
    target, numbers = Target(golden_target().model), expected(name)
    target.watch(Eagle3Model(network(name)).pair(target)().wants)
    try:
        _, features = target.sequence().forward(mx.array(numbers["prompt_ids"]))
    finally:
        target.close()
    ours = np.array(mx.concatenate(features.layers, axis=-1))
    assert np.abs(ours - numbers["prompt_features"]).max() < TOLERANCE


def but(right: Eagle3, **fields: Any) -> Eagle3:
    """A network with the same weights, that takes its config to say something else."""
    layer = {k: fields.pop(k) for k in list(fields) if hasattr(right.config.layer, k)}
    config = dataclasses.replace(right.config, layer=dataclasses.replace(right.config.layer, **layer), **fields)
    wrong = Eagle3(config, right.ids)
    wrong.load_weights(tree_flatten(right.parameters()), strict=False)
    return wrong


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "the residual starts after the norm": (NAMES[0], {"norm_before_residual": True}),
    "normed output is handed on": (NAMES[0], {"norm_output": True}),
    "the target's rotation": (NAMES[0], {"rope_theta": 500_000.0}),
    "output is handed on before the norm": (NAMES[1], {"norm_output": False}),
    "hidden states are fused without their norms": (NAMES[1], {"fc_norm": False}),
    "the rotation is not scaled": (NAMES[1], {"rope_scaling": None}),
    "the target's embedding": (NAMES[1], {"own_embedding": False}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str) -> None:
    name, fields = MISTAKES[mistake]
    wrong, apart = replay(name, but(network(name), **fields))
    assert wrong >= 6
    assert apart > 1


VARIANTS = ("norm_before", "two_layers", "qwen3", "sliding")


def variant(name: str) -> tuple[Eagle3, dict[str, np.ndarray]]:
    folder = GOLDEN / "eagle3_variants" / name
    return read(Folder(folder)), dict(np.load(folder / "expected.npz"))


def furthest(network: Eagle3, numbers: dict[str, np.ndarray]) -> float:
    """How far our logits are at most from speculators', row by row in two parts and then along its chain."""
    config, cache = network.config, network.make_cache()
    hidden = network.fuse(mx.split(mx.array(numbers["features"]), config.taps, axis=-1))
    tokens = mx.array(numbers["tokens"])
    parts = [
        network(network.embed_tokens(tokens[part]), hidden[part], cache) for part in (slice(0, 15), slice(15, None))
    ]
    output = mx.concatenate(parts)
    ours, theirs = [network.lm_head(network.norm(output))], [numbers["logits"]]
    row = output[-1:]
    for number, token in enumerate(numbers.get("draft_ids", [])):
        normed = network.norm(row)
        ours.append(network.lm_head(normed))
        theirs.append(numbers["draft_logits"][number : number + 1])
        embedded = network.embed_tokens(mx.array([int(token)]))
        row = network(embedded, normed if config.norm_output else row, cache)
    return float(np.abs(np.array(mx.concatenate(ours)) - np.concatenate(theirs)).max())


@pytest.mark.parametrize("name", VARIANTS)
def test_what_else_speculators_publishes(name: str) -> None:
    assert furthest(*variant(name)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("norm_before", {"norm_before_residual": False}),
        ("norm_before", {"norm_before_fc": False}),
        ("norm_before", {"rope_scaling": None}),
        ("norm_before", {"qkv_bias": False}),
        ("two_layers", {"norm_output": False}),
        ("two_layers", {"rope_scaling": None}),
        ("qwen3", {"qk_norm": False}),
        ("qwen3", {"fc_norm": False}),
        ("qwen3", {"rope_scaling": None}),
        ("sliding", {"windows": (None, None, None)}),
        ("sliding", {"windows": (5, None, None)}),
        ("sliding", {"windows": (None, 6, None)}),
    ],
    ids=str,
)
def test_mistakes_show_there_too(name: str, fields: dict[str, Any]) -> None:
    network, numbers = variant(name)
    assert furthest(but(network, **fields), numbers) > 0.1
