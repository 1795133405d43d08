"""Write tests/golden/mtp_*: tiny targets with MTP heads as published, and what transformers makes of them.

    python -m venv venv && venv/bin/pip install torch==2.13.0+cpu transformers==5.24.0 safetensors numpy
    venv/bin/python scripts/golden/mtp.py tests/golden [mtp_mimo ...]

The weights are random. Target and heads are loaded from the folder that is written, so that names and shapes are what
transformers takes for published ones. MiMo-7B, which it does not have, is its Qwen2 (the same layers) with
`mtp_hidden_states_first`.

expected.npz: `ids`, of which the first `prompt` are random and the others the target's greedy answer; `hidden` [n, H]
after the target's last norm and `logits` [n, V] of them; and for every ids[: p + 1], p from `prompt` on, what the heads
draft after it, computed from nothing but hidden[:p]: `draft_ids` [., k] and the `draft_logits` [., k, V] that they are
the largest of. One head drafts three tokens, with its own output after the first; of three, each drafts one.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

PROMPT, ANSWER, DRAFTS = 12, 20, 3

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "float32",
}
QWEN: dict[str, Any] = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
}
MLA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp_qwen3_next": QWEN | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
    "mtp_qwen3_5_moe": QWEN | {
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                            "mrope_section": [1, 1, 0], "mrope_interleaved": True},
    },
    "mtp_deepseek_v3": MLA | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
                              "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_scaling": YARN},
    "mtp_glm4_moe_three": MLA | {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "head_dim": 8,
                                 "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True,
                                 "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 3},
    "mtp_glm4_moe_lite": MLA | {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
                                "rope_theta": 1e6},
    "mtp_mimo": {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_hidden_layers": 2,
                 "num_nextn_predict_layers": 1, "attention_bias": True},
}  # fmt: skip


def draw(name: str, shape: torch.Size, random: torch.Generator, zero_centred: bool) -> torch.Tensor:
    """Loud enough for the next token to depend on all before it; norms near 1, or near 0 if they are so published."""
    normal = torch.randn(shape, generator=random)
    if "A_log" in name or "dt_bias" in name:
        return 0.5 * normal
    if name.endswith("norm.weight"):
        return 0.2 * normal + (0 if zero_centred and "linear_attn.norm" not in name else 1)
    if len(shape) == 1:
        return 0.1 * normal
    return normal * (0.5 if "embed_tokens" in name else 1.5 / shape[-1] ** 0.5)


def configure(folder: Path) -> Any:
    """The config as transformers should have it; what it lacks for MTP is set on the object, not in the file."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "mimo":
        config = AutoConfig.for_model("qwen2", **{k: v for k, v in config.items() if k != "model_type"})
        config.mtp_hidden_states_first = True
    else:
        config = AutoConfig.from_pretrained(folder)
    heads = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "mtp_num_hidden_layers", None) or 1
    config.num_mtp_layers = heads
    config.mtp_layer_types = ["full_attention"] * heads
    config.mtp_mlp_layer_types = ["sparse"] * heads
    config._attn_implementation = "eager"
    return config


def head_names(model_type: str, layers: int, heads: int) -> dict[str, str]:
    """The trunk's tensor for every tensor of the heads, in their published names, that has its shape."""
    last, names = f"model.layers.{layers - 1}.", {}
    for j in range(heads):
        if model_type.startswith("qwen3"):
            inside, outside, tops = "mtp.layers.0.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        elif model_type == "mimo":
            inside = outside = f"model.mtp_layers.{j}."
            tops = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        else:
            inside = outside = f"model.layers.{layers + j}."
            tops = ("enorm", "hnorm", "shared_head.norm")
            names |= {f"{inside}embed_tokens.weight": "model.embed_tokens.weight"}
            names |= {f"{inside}shared_head.head.weight": "lm_head.weight"}
        names |= {f"{outside}{top}.weight": "model.norm.weight" for top in tops}
        names[inside] = last
    return names


PROJECTIONS = {"qwen3": "mtp.fc", "mimo": "model.mtp_layers.{j}.input_proj", "": "model.layers.{n}.eh_proj"}


def write_weights(folder: Path, config: Any, model_type: str, seed: int) -> None:
    """Draw target and heads, in the names that transformers publishes a target of this kind under."""
    random = torch.Generator().manual_seed(seed)
    zero_centred = model_type.startswith("qwen3")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    for file in (folder / "plain").iterdir():
        file.unlink()
    (folder / "plain").rmdir()
    trunk = {name: draw(name, value.shape, random, zero_centred) for name, value in sorted(tensors.items())}
    layers, heads = config.num_hidden_layers, config.num_mtp_layers
    head: dict[str, torch.Tensor] = {}
    for name, source in head_names(model_type, layers, heads).items():
        if source in trunk:
            copied = "embed_tokens" in name or "shared_head.head" in name
            head[name] = trunk[source].clone() if copied else draw(name, trunk[source].shape, random, zero_centred)
        else:
            for key in sorted(k for k in trunk if k.startswith(source)):
                head[name + key.removeprefix(source)] = draw(key, trunk[key].shape, random, zero_centred)
    pattern = next(p for start, p in PROJECTIONS.items() if model_type.startswith(start))
    for j in range(heads):
        name = pattern.format(j=j, n=layers + j) + ".weight"
        head[name] = draw(name, torch.Size((config.hidden_size, 2 * config.hidden_size)), random, zero_centred)
    tensors = trunk | head
    save_file(fuse(tensors) if model_type.startswith("qwen3_5") else tensors, folder / "model.safetensors")


def load(folder: Path, config: Any, model_type: str) -> tuple[Any, MtpModel]:
    if model_type == "mimo":
        return load_mimo(folder, config)
    main = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    # transformers knows heads by the number of layers of the model that was published.
    numbers = "|".join(str(config.num_hidden_layers + j) for j in range(config.num_mtp_layers))
    pattern = r"^mtp.*" if model_type.startswith("qwen3") else rf"model\.layers\.({numbers})\..*"
    main._keys_to_ignore_on_load_unexpected = [pattern]
    return main.eval(), MtpModel.from_pretrained(main).eval()


def load_mimo(folder: Path, config: Any) -> tuple[Any, MtpModel]:
    tensors = load_file(folder / "model.safetensors")
    main = AutoModelForCausalLM.from_config(config)
    main.load_state_dict({k: v for k, v in tensors.items() if "mtp_layers" not in k})
    heads = MtpModel(main, config.num_mtp_layers)
    renamed = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
               "final_layernorm": "post_norm"}  # fmt: skip
    for name, value in tensors.items():
        if match := re.fullmatch(r"model\.mtp_layers\.(\d+)\.(\w+)\.(.*)", name):
            j, module, rest = match.groups()
            path = f"layers.{j}.{renamed[module] if module in renamed else 'mtp_block.' + module}.{rest}"
            heads.get_parameter(path).data.copy_(value)
    return main.eval(), heads.eval()


def publish(folder: Path) -> None:
    """Qwen3.5 with experts in its outer form: experts in one tensor, the language model inside a larger one."""
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": config}, indent=1) + "\n")
    tensors = load_file(folder / "model.safetensors")
    tensors = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Numbered experts as two tensors for all, gate before up."""
    fused, experts = {}, {}
    for name, value in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = value
        else:
            fused[name] = value
    for path, numbered in experts.items():
        each = [numbered[number] for number in sorted(numbered)]
        fused[f"{path}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        fused[f"{path}.down_proj"] = torch.stack([e["down"] for e in each])
    return fused


def draft(heads: MtpModel, hidden: torch.Tensor, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """What follows ids [n + 1], by hidden [n, H] of all but the last, computed from nothing.

    Several heads draft in turn, as transformers has them do. One drafts again with its own output.
    """
    cache = MtpCache(config=heads.config)
    positions = torch.arange(1, len(ids))[None]
    fed, ids = hidden[None], ids[None, 1:]
    if heads.num_mtp_layers > 1:
        drafts, logits, _ = heads(ids, fed, None, positions, cache)
        return drafts[0].tolist(), logits[0]
    drafts, rows = [], []
    for _ in range(DRAFTS):
        fed = heads.forward_layer(0, fed, positions, cache, input_ids=ids)[:, -1:]
        rows.append(heads._project_to_logits(fed)[0, -1])
        drafts.append(rows[-1].argmax().item())
        ids, positions = torch.tensor([[drafts[-1]]]), positions[:, -1:] + 1
    return drafts, torch.stack(rows)


@torch.no_grad()
def make(folder: Path, settings: dict[str, Any], seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | settings, indent=1) + "\n")
    config = configure(folder)
    write_weights(folder, config, settings["model_type"], seed)
    main, heads = load(folder, config, settings["model_type"])
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
    ids = prompt
    for _ in range(ANSWER):
        ids = torch.cat([ids, main(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=-1)
    made = main(ids, use_cache=False, output_hidden_states=True)
    hidden = made.hidden_states[-1][0]
    starts = range(PROMPT, PROMPT + ANSWER)
    drafts = [draft(heads, hidden[:n], ids[0, : n + 1]) for n in starts]
    np.savez_compressed(
        folder / "expected.npz",
        ids=ids[0].int().numpy(),
        prompt=np.int32(PROMPT),
        hidden=hidden.numpy(),
        logits=made.logits[0].numpy(),
        draft_ids=np.array([d for d, _ in drafts], dtype=np.int32),
        draft_logits=np.stack([rows.numpy() for _, rows in drafts]),
    )
    if settings["model_type"].startswith("qwen3_5"):
        publish(folder)
    tops = torch.stack([rows for _, rows in drafts]).topk(2).values
    print(folder.name, "smallest gap", (tops[..., 0] - tops[..., 1]).min().item(),
          "kinds of ids", len(set(ids[0, PROMPT:].tolist())), len({t for d, _ in drafts for t in d}))  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, (title, changes) in enumerate(CONFIGS.items()):
        if len(sys.argv) < 3 or title in sys.argv[2:]:
            make(Path(sys.argv[1]) / title, changes, seed=number)
