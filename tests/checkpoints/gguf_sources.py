"""Tiny checkpoints in Hugging Face's layout, and the GGUF files that llama.cpp's converter makes of them.

Tensor names come from the gguf package's own map; what else the converter does to a tensor is repeated here. What
mlx-lm makes of the same checkpoint is what the GGUF file must give.
"""

import importlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from mlx.utils import tree_flatten

import mlx_specdec  # noqa: F401  (before mlx.core, for the BLAS)

from .tiny_gguf import add_metadata, permute, random_blocks

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 32, 96, 160
BASE = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
KEYS = {
    "block_count": 4,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FFN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}


@dataclass
class Source:
    """A checkpoint of mlx-lm's `model_type` and the file of architecture `arch` made of it."""

    arch: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # tensors that the converter adds

    def with_(self, config: dict[str, Any], keys: dict[str, Any]) -> "Source":
        return replace(self, config=self.config | config, keys=self.keys | keys)

    def full_config(self) -> dict[str, Any]:
        return BASE | self.config | {"model_type": self.model_type}

    def model(self) -> Any:
        module = importlib.import_module(f"mlx_lm.models.{self.model_type}")
        return module.Model(module.ModelArgs.from_dict(self.full_config()))

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint: random tensors by Hugging Face's names."""
        rng = np.random.default_rng(11)
        model = self.model()
        empty = dict(tree_flatten(model.parameters()))
        if self.full_config()["tie_word_embeddings"]:
            empty.pop("lm_head.weight", None)
        found: dict[str, np.ndarray] = {}
        for name, value in empty.items():
            scale = 0.1 if value.ndim == 1 else 0.3
            values = rng.normal(0, scale, value.shape).astype(np.float32)
            centred = self.model_type.startswith(("gemma", "qwen3_5")) and self.model_type != "gemma4_text"
            if value.ndim == 1 and not (centred and "linear_attn" not in name):
                values = 1 + values
            found |= self._original(name, values)
        return _fused(found)

    def _original(self, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm")
        if "conv1d" in name:
            return {name: values.swapaxes(1, 2)}
        if ".switch_mlp." not in name and ".switch_glu." not in name:
            return {name: values}
        room, _, kind = name.removesuffix(".weight").rpartition(".")
        if self.model_type == "qwen3_moe":
            room = room.replace("switch_mlp", "experts")
            return {f"{room}.{e}.{kind}.weight": expert for e, expert in enumerate(values)}
        return {f"{room.replace('switch_mlp', 'experts').replace('.switch_glu', '')}.{kind}": values}

    def reference(self, tensors: dict[str, np.ndarray]) -> Any:
        """What mlx-lm makes of the checkpoint."""
        model = self.model()
        arrays = {name: mx.array(values) for name, values in tensors.items()}
        model.load_weights(list((model.sanitize(arrays) if hasattr(model, "sanitize") else arrays).items()))
        return model

    def write(
        self,
        path: Path,
        tensors: dict[str, np.ndarray],
        types: dict[str, Type] | None = None,
        *,
        random: bool = False,
        **keys: Any,
    ) -> None:
        """The GGUF file; `types` maps a part of a tensor's name to its type, the rest is F32. `random` blocks stand for
        what gguf cannot quantise."""
        writer = gguf.GGUFWriter(path, self.arch)
        add_metadata(writer, {f"{self.arch}.{key}": value for key, value in (KEYS | self.keys).items()} | keys)
        for name, values in _stacked(tensors, self.arch == "qwen35moe").items():
            tensor = self.tensor(name)
            kind = _kind(tensor, values, types or {})
            held = np.ascontiguousarray(self._converted(name, values))
            packed = random_blocks(kind, *held.shape) if random and kind != Type.F32 else quantize(held, kind)
            writer.add_tensor(tensor, packed, raw_dtype=kind)
        for tensor, values in self.extra.items():
            writer.add_tensor(tensor, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def tensor(self, name: str) -> str:
        """A tensor's name in GGUF, by the gguf package's map and, where that has none, by the converter's code."""
        arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        names = gguf.get_tensor_name_map(arch, 8)
        theirs = name.replace("language_model.", "").replace(".dt_bias", ".dt_proj.bias")
        found = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if found is None:
            own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
            found = f"blk.{theirs.split('.')[2]}.{own['.'.join(theirs.split('.')[-2:])]}"
        return found + (".weight" if found.endswith("layer_output_scale") else "")

    def rounded(self, tensors: dict[str, np.ndarray], types: dict[str, Type]) -> dict[str, np.ndarray]:
        """The checkpoint with its matrices as these types round them."""
        stacked = _stacked(tensors, self.arch == "qwen35moe")
        kinds = {name: _kind(self.tensor(name), values, types) for name, values in stacked.items()}

        def kind_of(name: str) -> Type:
            name = re.sub(r"(\.experts)\.\d+", r"\1", name)
            names = (name, f"{name}.weight", name.replace("gate_up", "gate") + ".weight")
            return next(kinds[each] for each in names if each in kinds)

        return {
            name: gguf.quants.dequantize(quantize(values, kind_of(name)), kind_of(name))
            if kind_of(name) != Type.F32 and values.ndim > 1
            else values
            for name, values in tensors.items()
        }

    def _converted(self, name: str, values: np.ndarray) -> np.ndarray:
        """What the converter does to a tensor."""
        name = name.replace("language_model.", "")
        if self.arch in ("llama", "smollm3"):
            for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
                if f".{part}." in name:
                    return permute(values, heads)
        zero_centred = self.arch in ("gemma", "gemma2", "gemma3") or self.arch.startswith("qwen35")
        if zero_centred and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            return values + 1
        if ".linear_attn." in name:
            return self._linear(name.split(".linear_attn.")[1], values)
        return values

    def _linear(self, name: str, values: np.ndarray) -> np.ndarray:
        keys, heads, size = (
            self.config[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "value_head_dim")
        )
        first = 2 * keys * self.config["linear_key_head_dim"]

        def tiled(x: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
            shape = (*x.shape[:axis], keys, heads // keys, size, *x.shape[axis + 1 :])
            return x.reshape(shape).swapaxes(axis, axis + 1).reshape(x.shape)

        if name == "conv1d.weight":
            values = values[:, 0]
        if name in ("conv1d.weight", "in_proj_qkv.weight"):
            return np.concatenate([values[:first], tiled(values[first:], size)])
        if name == "out_proj.weight":
            return tiled(values, size, axis=1)
        if name == "in_proj_z.weight":
            return tiled(values, size)
        if name == "norm.weight":
            return values
        values = tiled(values, 1)
        return -np.exp(values) if name == "A_log" else values


def _kind(tensor: str, values: np.ndarray, types: dict[str, Type]) -> Type:
    matrix = values.ndim > 1 and "conv1d" not in tensor
    return next((kind for part, kind in types.items() if part in tensor), Type.F32) if matrix else Type.F32


def _fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts of one layer as newer checkpoints have them: gate and up in one tensor."""
    fused = dict(tensors)
    for name in tensors:
        if name.endswith(".experts.gate_proj"):
            room = name.removesuffix(".gate_proj")
            fused[f"{room}.gate_up_proj"] = np.concatenate([fused.pop(name), fused.pop(f"{room}.up_proj")], axis=1)
    return fused


def _stacked(tensors: dict[str, np.ndarray], apart: bool) -> dict[str, np.ndarray]:
    """Experts of one layer in one tensor for each projection; `apart`: gate and up in two."""
    stacked: dict[str, Any] = {}
    for name, values in tensors.items():
        if name.endswith(".gate_up_proj") and ".experts." in name:
            room, (gate, up) = name.removesuffix(".gate_up_proj"), np.split(values, 2, axis=1)
            stacked |= {f"{room}.gate_proj.weight": gate, f"{room}.up_proj.weight": up} if apart else {
                f"{name}.weight": values}  # fmt: skip
            continue
        if found := re.fullmatch(r"(.*\.experts)\.\d+(\..*)", name):
            stacked.setdefault(found[1] + found[2], []).append(values)
        else:
            stacked[name + (".weight" if name.endswith(".experts.down_proj") else "")] = values
    return {name: np.stack(values) if isinstance(values, list) else values for name, values in stacked.items()}
