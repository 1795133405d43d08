"""Write tests/golden/dflash_variants: tiny DFlash drafters, and what the reference implementations draft with them.

    python -m venv venv && venv/bin/pip install torch==2.14.1 transformers==5.19.0 speculators==0.9.0 safetensors numpy
    venv/bin/pip install --no-deps dflash==0.1.0
    venv/bin/python scripts/golden/dflash_variants.py tests/golden/dflash_variants

z-lab's model draws a block in its generation loop, speculators' in its training pass, with one anchor here. Weights and
features are random, so there is no target but its two ends.

expected.npz: `features` [37, taps * hidden] of the certain tokens, of which a round knows the first `known`[round];
`anchors`[round] is the token after them; `logits_N` [drafts, draft vocabulary] of round N, the largest of which are
`ids_N` [drafts] in the target's vocabulary. `embed` and `head` [vocabulary, hidden] are the target's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash.model import DFlashDraftModel as ZLab
from dflash.model import _draft_value
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel as Speculators
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VOCAB, HIDDEN, MASK = 64, 32, 61
KNOWN = (24, 28, 29, 37)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}

ZLAB: dict[str, dict[str, Any]] = {
    "sliding": {
        "block_size": 16,
        "dflash_config": {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": [1, 4]},
        "layer_types": [SLIDING, FULL],
        "sliding_window": 6,
        "use_sliding_window": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "sliding_noncausal": {
        "dflash_config": {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": [1, 4]},
        "layer_types": [SLIDING, SLIDING],
        "sliding_window": 10,
        "use_sliding_window": True,
        "is_causal": False,
        "rope_theta": 1000000.0,
    },
    "causal": {
        "block_size": 6,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [0, 3],
            "input_embedding_scale": 2.5,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 4.0,
        },
        "is_causal": True,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
}
SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speculators": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 6, "use_sliding_window": True},
        {"block_size": 6, "draft_vocab_size": 40},
    ),
    "speculators_anchor": (
        {
            "layer_types": [FULL, SLIDING],
            "sliding_window": 9,
            "use_sliding_window": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
                FULL: {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
        {"block_size": 5, "sliding_window_non_causal": True, "sample_from_anchor": True, "draft_vocab_size": VOCAB},
    ),
}


def draw(model: torch.nn.Module) -> None:
    """Weights that make attention choose and residuals count."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                centre = 2.0 if "q_norm" in name else 1.0 if "norm" in name else 0.0
                weight.copy_(centre + 0.3 * torch.randn_like(weight))
            else:
                weight.copy_(2 / weight.shape[-1] ** 0.5 * torch.randn_like(weight))


def zlab(folder: Path, fields: dict[str, Any], numbers: dict[str, Any]) -> list[torch.Tensor]:
    """Write the checkpoint; the draft logits of every round."""
    written = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_target_layers": 6, **SIZES, **fields}
    config = Qwen3Config(**written)
    model = ZLab(config).eval()
    draw(model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=1) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data = numbers["head"]
    scale = float(_draft_value(config, "input_embedding_scale", 1.0))
    rounds = []
    for known, anchor in zip(KNOWN, numbers["anchors"], strict=True):
        block = torch.tensor([int(anchor)] + [MASK] * (model.block_size - 1))
        output = model(
            position_ids=torch.arange(known + model.block_size)[None],
            noise_embedding=scale * numbers["embed"][block][None],
            target_hidden=numbers["features"][None, :known],
        )
        rounds.append(model.compute_logits(output[0, 1:], head))
    return rounds


def speculators(
    folder: Path, layer: dict[str, Any], fields: dict[str, Any], numbers: dict[str, Any]
) -> list[torch.Tensor]:
    inner = Qwen3Config(**SIZES, **layer)
    inner._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=inner,
        aux_hidden_state_layer_ids=[2, 5],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=fields["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
        **fields,
    )
    model = Speculators(config).eval()
    draw(model)
    reduced = fields["draft_vocab_size"] < VOCAB
    if reduced:
        ids = torch.randperm(VOCAB)[: fields["draft_vocab_size"]].sort().values
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[ids] = True
        model.load_vocab_mappings(marks, ids - torch.arange(len(ids)))
    model.embed_tokens.weight.data = numbers["embed"]
    if not reduced:
        model.lm_head.weight.data = numbers["head"]
    model.save_pretrained(str(folder))
    for extra in folder.glob("*.py"):
        extra.unlink()
    assert not {"embed_tokens.weight", "verifier_norm.weight"} & set(load_file(folder / "model.safetensors"))
    rounds = []
    for known, anchor in zip(KNOWN, numbers["anchors"], strict=True):
        total = known + model.block_size + 1  # rows from the anchor on are seen by nothing
        tokens, mask = torch.zeros(1, total, dtype=torch.long), torch.zeros(1, total, dtype=torch.long)
        tokens[0, known], mask[0, known] = anchor, 1
        features = torch.zeros(1, total, numbers["features"].shape[1])
        features[0, :known] = numbers["features"][:known]
        _, logits, _, _, places = model._backbone_forward(
            features, tokens, mask, torch.zeros(1, total, HIDDEN), torch.zeros_like(tokens), max_anchors=1
        )
        assert places.tolist() == list(range(known, known + model.block_size))
        rounds.append(logits[0, 0 if config.sample_from_anchor else 1 :])
    numbers["d2t"] = model.d2t if reduced else torch.zeros(VOCAB, dtype=torch.long)
    return rounds


@torch.no_grad()
def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for seed, name in enumerate([*ZLAB, *SPECULATORS]):
        torch.manual_seed(seed)
        numbers: dict[str, Any] = {
            "features": 3 * torch.randn(KNOWN[-1], 2 * HIDDEN),
            "anchors": torch.randint(0, VOCAB, (len(KNOWN),)),
            "embed": torch.randn(VOCAB, HIDDEN),
            "head": 2 / HIDDEN**0.5 * torch.randn(VOCAB, HIDDEN),
            "known": torch.tensor(KNOWN),
        }
        folder = Path(sys.argv[1]) / name
        rounds = zlab(folder, ZLAB[name], numbers) if name in ZLAB else speculators(folder, *SPECULATORS[name], numbers)
        offsets = numbers.pop("d2t", torch.zeros(VOCAB, dtype=torch.long))
        for number, logits in enumerate(rounds):
            best = logits.argmax(-1)
            numbers |= {f"logits_{number}": logits, f"ids_{number}": best + offsets[best]}
        gaps = torch.cat([logits.topk(2).values.diff().abs().flatten() for logits in rounds])
        print(name, "smallest gap between the two largest logits", float(gaps.min()))
        np.savez(folder / "expected.npz", **{key: value.numpy() for key, value in numbers.items()})


main()
