"""Write tests/golden/eagle3_variants: tiny EAGLE-3 drafters in speculators' layout, and what speculators makes of them.

    python -m venv venv && venv/bin/pip install torch==2.14.1 speculators==0.9.0 transformers==5.19.0 safetensors numpy
    venv/bin/python scripts/golden/eagle3_variants.py tests/golden/eagle3_variants

Weights and features are random, so there is no target. Each drafter is written by the library and loaded from there.

expected.npz: row i of `features` [n, taps * hidden] goes with `tokens`[i], already shifted: the token after the one
that the features are of. `logits` [n, draft_vocab] of every row; and a chain after the last one: `draft_logits`
[k, draft_vocab], the largest of which are `draft_rows` [k], the target's `draft_ids` [k]. The library's forward is one
for training, with a step for every token of a chain, but it drafts from given tokens: rows without features follow
the last, with the ids drafted so far. Past a sliding window its steps see what no decoder lets them see: no chain then.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

ROWS, CHAIN, VOCAB = 24, 4, 64
LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "norm_before": (
        LlamaConfig(**LAYER, rope_parameters=YARN, attention_bias=True),
        {"norm_before_residual": True, "norm_before_fc": True, "draft_vocab_size": VOCAB},
    ),
    "two_layers": (
        LlamaConfig(**{**LAYER, "num_hidden_layers": 2}, rope_parameters=LLAMA3, mlp_bias=True),
        {"norm_before_residual": True, "norm_output": True, "draft_vocab_size": 40},
    ),
    "qwen3": (
        Qwen3Config(**LAYER, rope_parameters=LINEAR),
        {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6], "draft_vocab_size": 40},
    ),
    "sliding": (
        Qwen3Config(
            **{**LAYER, "num_hidden_layers": 3},
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        {"norm_before_fc": True, "draft_vocab_size": 40},
    ),
}


def write(folder: Path, layer: Any, fields: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposals = SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=CHAIN)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    config = Eagle3SpeculatorConfig(transformer_layer_config=layer, speculators_config=proposals, **fields)
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = weight.ndim == 1 and name.endswith("weight")
            spread = 0.3 if weight.ndim == 1 else 2 / weight.shape[-1] ** 0.5
            weight.copy_(norm + spread * torch.randn_like(weight))
    if fields["draft_vocab_size"] < VOCAB:
        ids = torch.randperm(VOCAB)[: fields["draft_vocab_size"]].sort().values
        marks = torch.zeros(VOCAB, dtype=torch.bool)
        marks[ids] = True
        model.load_vocab_mappings(marks, ids - torch.arange(len(ids)))
    model.save_pretrained(str(folder))
    for extra in folder.glob("*.py"):
        extra.unlink()


def numbers(folder: Path, chain: bool, seed: int) -> dict[str, np.ndarray]:
    config = Eagle3SpeculatorConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).eval()  # its own from_pretrained wants the target too
    missing, unknown = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not unknown
    assert all(name.startswith("verifier_") for name in missing)
    taps = model.fc.in_features
    generator = torch.Generator().manual_seed(seed)
    features = 3 * torch.randn(ROWS, taps, generator=generator)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    first = steps(model, features, tokens, [])
    out = {"features": features, "tokens": tokens, "logits": first[0]}
    if chain:
        rows, ids, logits = [], [], []
        for _ in range(CHAIN):
            logits.append(steps(model, features, tokens, ids)[len(ids)][ROWS - 1])
            rows.append(int(logits[-1].argmax()))
            ids.append(rows[-1] + (0 if model.d2t is None else int(model.d2t[rows[-1]])))
        out |= {"draft_logits": torch.stack(logits), "draft_rows": torch.tensor(rows), "draft_ids": torch.tensor(ids)}
    return {name: value.numpy() for name, value in out.items()}


@torch.no_grad()
def steps(model: Any, features: Any, tokens: Any, ids: list[int]) -> list[Any]:
    """The logits [rows, draft_vocab] of each of len(ids) + 1 steps, the rows being followed by `ids`."""
    logits: list[Any] = []
    listening = model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    padded = torch.cat([features, torch.zeros(len(ids), features.shape[1])])
    followed = torch.cat([tokens, torch.tensor(ids, dtype=tokens.dtype)])
    model(
        hidden_states=padded[None],
        input_ids=followed[None],
        document_ids=torch.zeros(1, len(followed), dtype=torch.long),
        ttt_steps=len(ids) + 1,
    )
    listening.remove()
    return logits


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    for seed, (name, (layer, fields)) in enumerate(VARIANTS.items()):
        folder = Path(sys.argv[1]) / name
        write(folder, layer, fields, seed)
        np.savez(folder / "expected.npz", **numbers(folder, name != "sliding", seed))


main()
