"""Tiny GGUF files with random weights, and the mlx-lm models that they must equal.

Files are written by the `gguf` package, in the way that llama.cpp's converters do it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type
from mlx_lm.models import llama, qwen2, qwen3
from tokenizers import pre_tokenizers

import mlx_specdec  # noqa: F401  (before mlx.core, for the BLAS)

MODULES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TYPES = [3, 3, 3, 4]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ċ Ċ", "1 2"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
]


def head_dim(arch: str) -> int:
    return 32 if arch == "qwen3" else HIDDEN // HEADS


def shapes(arch: str, *, tied: bool = True, biases: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """GGUF tensor name -> shape."""
    q, kv = HEADS * head_dim(arch), KV_HEADS * head_dim(arch)
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not tied:
        found["output.weight"] = (len(TOKENS), HIDDEN)
    layer = {
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "attn_q": (q, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, q),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    if arch == "qwen3":
        layer |= {"attn_q_norm": (head_dim(arch),), "attn_k_norm": (head_dim(arch),)}
    if arch == "qwen2":
        biases = (*biases, "attn_q", "attn_k", "attn_v")
    for i in range(LAYERS):
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        found |= {f"blk.{i}.{name}.bias": layer[name][:1] for name in biases}
    return found


def metadata(arch: str) -> dict[str, Any]:
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": head_dim(arch),
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES + [1] * (len(TOKENS) - len(TYPES)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


@dataclass
class TinyGGUF:
    """What to write.

    `types` maps a part of a tensor name to its type, the rest is F32; a value of None in `extra` drops that key.
    """

    arch: str = "llama"
    tied: bool = True
    types: dict[str, Type] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def write(self, path: Path) -> dict[str, np.ndarray]:
        """Write the file; returns GGUF tensor name -> its values, float32, in Hugging Face's row order."""
        rng = np.random.default_rng(7)
        writer = gguf.GGUFWriter(path, self.arch)
        add_metadata(writer, metadata(self.arch) | self.extra)
        held = {}
        for name, shape in shapes(self.arch, tied=self.tied, biases=self.biases).items():
            values = rng.normal(0, 0.3, shape).astype(np.float32)
            if "norm" in name:
                values = (1 + values).astype(np.float16).astype(np.float32)  # exact in a quantised file too
            kind = next((kind for part, kind in self.types.items() if part in name), Type.F32)
            kind = kind if len(shape) == 2 else Type.F32
            held[name] = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
            if name in self.without:
                continue
            count = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
            permuted = permute(values, count) if self.arch == "llama" and count else values
            writer.add_tensor(name, gguf.quants.quantize(permuted, kind), raw_dtype=kind)
        for name, values in self.tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return held


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, Type]], arch: str = "llama") -> None:
    """A file of nothing but tensors, each packed as its type says."""
    writer = gguf.GGUFWriter(path, arch)
    for name, (packed, kind) in tensors.items():
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """uint8 [rows, bytes]: any bytes that stand for numbers of ordinary size."""
    rng = np.random.default_rng(seed)
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // values, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        while (odd := ~(np.abs(gguf.quants.dequantize(blocks, kind)).max(axis=-1) < 1000)).any():
            blocks[odd] = rng.integers(0, 256, (odd.sum(), nbytes), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of Llama files, as llama.cpp's converter makes it."""
    grouped = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(grouped.swapaxes(1, 2).reshape(values.shape))


def add_metadata(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    """Write keys, each by the type of its value; None is left out."""
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in values.items():
        if value is not None:
            adders.get(type(value), writer.add_array)(key, value)


def dense_model(spec: TinyGGUF, held: dict[str, np.ndarray], **config: Any) -> Any:
    """The mlx-lm model with these very float32 weights, built without this package."""
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_output": "self_attn.o_proj",
    }
    weights = {}
    for name, values in held.items():
        *where, part, kind = name.split(".")
        room = "self_attn" if part.startswith("attn") else "mlp"
        tail = names.get(part) or f"{room}.{part.partition('_')[2]}" + ("" if part.endswith("norm") else "_proj")
        prefix = f"model.layers.{where[1]}." if where else ""
        weights[f"{prefix}{tail}.{kind}"] = mx.array(values)
    module = MODULES[spec.arch]
    fields = {
        "model_type": spec.arch,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim(spec.arch),
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": spec.tied,
        "attention_bias": "attn_q" in spec.biases,
        "mlp_bias": "ffn_gate" in spec.biases,
    }
    model = module.Model(module.ModelArgs.from_dict(fields | config))
    model.load_weights(list(weights.items()))
    return model


def logits(model: Any) -> np.ndarray:
    """float32 [24, vocabulary]: the logits of a fixed sequence of 24 tokens."""
    ids = mx.array([[(7 * i + 3) % len(TOKENS) for i in range(24)]])
    return np.array(model(ids)[0].astype(mx.float32))
