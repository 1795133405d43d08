"""Write tests/golden/gemma4_assistant_ordered: a tiny Gemma 4 like E2B, and its assistant with an ordered embedding.

    python -m venv venv && venv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    venv/bin/python scripts/golden/gemma4_assistant.py tests/golden/gemma4_assistant_ordered

The target's last two layers share keys, its layers are given inputs of their own, and its window is 8. The assistant
is fitted a little to the target's text, or no draft would ever stand. A step is Hugging Face's forward, on keys and
values of certain tokens alone.

expected.npz: `prompt_ids` [24], `greedy_ids` [40]; `all_hidden` [64, hidden] after the final norm; `key_KIND` and
`value_KIND` [heads, 64, dim] of the last layer of a kind that shares none. `rN_draft_ids` [3], `rN_draft_logits`
[3, vocab], `rN_h_next` [3, hidden] of a first round after the prompt and `greedy_ids[0]`, and a second one two tokens
later. `trace_drafts` [rounds, 3], `trace_accepted`, `trace_start` [rounds]: a whole run; draft j guesses position
start + j. Tokens outside the chosen clusters have the smallest logit of the step less 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

VOCAB, PROMPT, TOKENS, DRAFTS = 96, 24, 40, 3
CLUSTERS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "attn_implementation": "eager",
}
TARGET = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
ASSISTANT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
Shared = dict[str, tuple[torch.Tensor, torch.Tensor]]


def draw(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for the next token to depend on what came before."""
    random = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=random)
        with torch.no_grad():
            if value.ndim == 1:
                value.copy_((8.0 if name == "model.norm.weight" else 1.0) + 0.1 * noise)
            else:
                value.copy_(noise * (0.04 if "embed" in name else 2.0 / value.shape[-1] ** 0.5))


def make() -> tuple[Gemma4ForCausalLM, Gemma4AssistantForCausalLM]:
    target = Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **TARGET)).eval()
    draw(target, 1)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**SIZES, **ASSISTANT),
        backbone_hidden_size=TARGET["hidden_size"],
        use_ordered_embeddings=True,
        num_centroids=CLUSTERS,
        centroid_intermediate_top_k=3,
        attn_implementation="eager",
    )
    assistant = Gemma4AssistantForCausalLM(config).eval()
    draw(assistant, 2)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    assistant.masked_embedding.token_ordering.copy_(order)
    return target, assistant


def run(target: Gemma4ForCausalLM, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, Shared]:
    """Logits and last hidden states of all tokens, and the keys and values that an assistant reads."""
    output = target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
    return output.logits[0], output.hidden_states[-1][0], dict(output.shared_kv_states)


def step(
    target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM, token: int, hidden: torch.Tensor, held: Shared
) -> Any:
    """One draft after `token`, which stands where the keys end."""
    embedding = target.get_input_embeddings()(torch.tensor([[token]]))
    position = torch.tensor([[held["full_attention"][0].shape[2]]])
    return assistant(
        inputs_embeds=torch.cat([embedding, hidden[None, None]], dim=-1), position_ids=position, shared_kv_states=held
    )


def cut(held: Shared, rows: int) -> Shared:
    return {kind: (keys[:, :, :rows], values[:, :, :rows]) for kind, (keys, values) in held.items()}


def fit(target: Any, assistant: Any, text: list[int], hidden: torch.Tensor, held: Shared) -> None:
    """Move matrices and centroids towards the first two drafts of every place, so that some stand."""
    head = assistant.masked_embedding
    cluster = torch.empty(VOCAB, dtype=torch.long)
    cluster[head.token_ordering] = torch.arange(VOCAB) // (VOCAB // CLUSTERS)
    moved = [x for name, x in assistant.named_parameters() if x.ndim > 1 and "embed_tokens" not in name]
    optimiser = torch.optim.Adam(moved, lr=0.01)
    for _ in range(30):
        loss = torch.zeros(())
        for place in range(PROMPT, len(text) - 3, 2):
            carried, rows = hidden[place - 1], cut(held, place)
            for ahead in range(2):
                seen: list[torch.Tensor] = []
                release = head.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0][0, 0]))
                output = step(target, assistant, text[place + ahead], carried, rows)
                release.remove()
                carried, wanted = output.last_hidden_state[0, 0], text[place + ahead + 1]
                for scores, right in (
                    (assistant.lm_head.weight @ seen[0], wanted),
                    (head.centroids(seen[0]), cluster[wanted]),
                ):
                    loss = loss + torch.nn.functional.cross_entropy(scores[None], torch.as_tensor(right)[None])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def drafted(target: Any, assistant: Any, token: int, hidden: torch.Tensor, held: Shared) -> dict[str, np.ndarray]:
    ids, logits, carried = [], [], []
    for _ in range(DRAFTS):
        output = step(target, assistant, token, hidden, held)
        hidden, token = output.last_hidden_state[0, 0], int(output.logits[0, 0].argmax())
        ids.append(token)
        logits.append(output.logits[0, 0].numpy())
        carried.append(hidden.numpy())
    return {"draft_ids": np.array(ids), "draft_logits": np.stack(logits), "h_next": np.stack(carried)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    target, assistant = make()
    text = torch.randint(3, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        for _ in range(TOKENS):
            text.append(int(run(target, text)[0][-1].argmax()))
        _, hidden, held = run(target, text)
    fit(target, assistant, text, hidden, held)
    arrays = {
        "prompt_ids": np.array(text[:PROMPT]),
        "greedy_ids": np.array(text[PROMPT:]),
        "all_hidden": hidden.numpy(),
    }
    for kind, pair in held.items():
        arrays |= {f"{what}_{kind}": x[0].numpy() for what, x in zip(("key", "value"), pair, strict=True)}
    with torch.no_grad():
        for name, place in (("r1", PROMPT), ("r2", PROMPT + 2)):
            found = drafted(target, assistant, text[place], hidden[place - 1], cut(held, place))
            arrays |= {f"{name}_{what}": x for what, x in found.items()}
        drafts, accepted, starts = [], [], []
        place = PROMPT
        while place < len(text) - 1:
            ids = drafted(target, assistant, text[place], hidden[place - 1], cut(held, place))["draft_ids"].tolist()
            right = text[place + 1 : place + 1 + DRAFTS]
            stand = next((i for i, pair in enumerate(zip(ids, right, strict=False)) if pair[0] != pair[1]), len(right))
            drafts.append(ids)
            accepted.append(stand)
            starts.append(place + 1)
            place += stand + 1
    arrays |= {"trace_drafts": np.array(drafts), "trace_accepted": np.array(accepted), "trace_start": np.array(starts)}
    for model, name in ((target, "target"), (assistant, "assistant")):
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "target" / "config.json").read_text())
    del config["per_layer_config"]  # new in 5.24: published files, and mlx-lm, have the older key
    config["global_head_dim"] = SIZES["global_head_dim"]
    (folder / "target" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.savez_compressed(folder / "expected.npz", **arrays)
    gaps = [np.sort(arrays[f"{name}_draft_logits"])[:, -2:] for name in ("r1", "r2")]
    print(text, accepted, np.diff(np.concatenate(gaps))[:, 0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
