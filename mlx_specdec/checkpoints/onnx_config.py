"""The config of a decoder exported for onnxruntime-genai, from genai_config.json and from the graph itself.

genai_config.json has the sizes; what the graph alone knows is the width of the layers, the rotation (a table of
cosines), the soft caps and the windows.
"""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .onnx_file import OnnxFile, attributes
from .onnx_parts import NORMS, Dense, Packed, used

Config = dict[str, Any]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text")
GEMMAS = ("gemma", "gemma2", "gemma3_text")


def genai_config(folder: Path, file: OnnxFile) -> Config:
    """The config.json that the model was exported from, as far as mlx-lm needs it. Raises CheckpointError."""
    path = folder / "genai_config.json"
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        decoder, kind = model["decoder"], model["type"]
        config = {
            "model_type": kind,
            "hidden_size": decoder["hidden_size"],
            "num_hidden_layers": decoder["num_hidden_layers"],
            "num_attention_heads": decoder["num_attention_heads"],
            "num_key_value_heads": decoder["num_key_value_heads"],
            "head_dim": decoder["head_size"],
            "vocab_size": model["vocab_size"],
            "max_position_embeddings": model["context_length"],
        }
    except OSError as error:
        raise CheckpointError(
            f"{folder} has neither a config.json nor a genai_config.json; fetch one of them"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a decoder's ({error!r}); fetch it again") from error
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{path} names the type {kind!r}, whose config cannot be told from it ({', '.join(FAMILIES)} can); put the "
            "model's own config.json beside it"
        )
    config |= {key: model[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in model}
    config["intermediate_size"] = _intermediate_size(file)
    config["rms_norm_eps"] = _epsilon(file)
    config["tie_word_embeddings"] = kind in GEMMAS or _tied(file)
    if kind == "llama":
        config["attention_bias"] = any("/attn/o_proj/Add" in node.name for node in file.nodes)
    return config | _attention(path, file, config)


def _intermediate_size(file: OnnxFile) -> int:
    for node in file.nodes:
        if "down_proj" in node.name and (weight := used(file, node)[0]):
            return _columns(file, weight)
    raise CheckpointError(
        f"{file.path} has no down_proj to tell the width of its layers from; put its config.json there"
    )


def _columns(file: OnnxFile, weight: Dense | Packed) -> int:
    if isinstance(weight, Packed):
        return weight.columns or 0
    return file.shape(weight.name)[0 if weight.transposed else 1]


def _epsilon(file: OnnxFile) -> float:
    """Written as float32, so rounded to what it was."""
    given = (attributes(node).get("epsilon") for node in file.nodes if node.op_type in NORMS)
    return float(f"{next((e for e in given if e is not None), 1e-5):.6g}")


def _tied(file: OnnxFile) -> bool:
    """Whether the vocabulary's head is made of the very matrix that the embedding is."""
    names: dict[str, str] = {}
    for node in file.nodes:
        for place in ("embed_tokens", "lm_head"):
            if place in node.name and (weight := used(file, node)[0]):
                names.setdefault(place, weight.name if isinstance(weight, Dense) else weight.codes)
    return "lm_head" not in names or names.get("embed_tokens") == names["lm_head"]


def _attention(path: Path, file: OnnxFile, config: Config) -> Config:
    """What the attention of the layers says: rotation, windows, soft caps."""
    nodes = [node for node in file.nodes if node.op_type == "GroupQueryAttention"]
    said = [attributes(node) for node in nodes]
    windows = [attribute.get("local_window_size", -1) for attribute in said]
    full = next((i for i, window in enumerate(windows) if window < 0), len(windows) - 1)
    found = _rotation(path, file, config, nodes[full] if nodes else None)
    if config["model_type"] not in GEMMAS:
        return found
    if config["model_type"] != "gemma" and said:
        found["query_pre_attn_scalar"] = round(said[0].get("scale", 0.0625) ** -2)
    if config["model_type"] == "gemma2" and said:
        found["attn_logit_softcapping"] = said[0].get("softcap", 50.0)
        found["final_logit_softcapping"] = _final_cap(file)
    if max(windows, default=-1) > 0:
        found["sliding_window"] = max(windows)
        if config["model_type"] == "gemma3_text":
            local = _rotation(path, file, config, nodes[windows.index(max(windows))])
            found |= {"rope_local_base_freq": local["rope_theta"], "sliding_window_pattern": full + 1}
    return found


def _final_cap(file: OnnxFile) -> float:
    for node in file.nodes:
        if node.op_type == "Div" and "softcap" in node.name and node.input[1] in file.initialisers:
            return float(np.array(file.array(node.input[1])))
    return 30.0


def _rotation(path: Path, file: OnnxFile, config: Config, attention: Any) -> Config:
    """rope_theta, and what else there is to the rotation, from the table of cosines and sines by position.

    Raises CheckpointError for one that is more than a power law and factors.
    """
    places = (7, 8)
    if attention is None or len(attention.input) < 9 or not attention.input[7]:
        attention = next((node for node in file.nodes if node.op_type == "RotaryEmbedding"), None)
        places = (2, 3)
    names = [attention.input[place] for place in places] if attention is not None else []
    if not names or any(name not in file.initialisers for name in names):
        raise _undetermined(path)
    cosines, sines = (np.array(file.array(name).astype(mx.float32)).astype(np.float64) for name in names)
    if cosines.ndim != 2 or cosines.shape != sines.shape or len(cosines) < 2:
        raise _undetermined(path)
    frequencies = np.arctan2(sines[1], cosines[1])  # of position 1, all between 0 and 1
    size = 2 * len(frequencies)
    found: Config = {} if size == config["head_dim"] else {"partial_rotary_factor": size / config["head_dim"]}
    exponents = np.arange(0, size, 2) / size
    middle = len(frequencies) // 2
    theta = float(f"{frequencies[middle] ** (-1 / exponents[middle]):.4g}") if frequencies[middle] > 0 else math.nan
    if _same(cosines, sines, theta**-exponents):
        return found | {"rope_theta": theta}
    if np.abs(np.hypot(cosines[1], sines[1]) - 1).max() > 1e-3 or not _same(cosines, sines, frequencies):
        raise _undetermined(path)  # cosines that are scaled, or too coarse to tell the frequencies from
    factors = (10000.0**-exponents / frequencies).tolist()
    # A divisor for each frequency is mlx-lm's longrope; the original context keeps its scaling of the values out.
    scaling = {"type": "longrope", "original_max_position_embeddings": 1 << 40}
    return found | {
        "rope_theta": 10000.0,
        "rope_scaling": {**scaling, "short_factor": factors, "long_factor": factors},
    }


def _same(cosines: np.ndarray, sines: np.ndarray, frequencies: np.ndarray) -> bool:
    """Whether a table is that of the frequencies, as exactly as float16 and far positions have it."""
    positions = np.unique(np.linspace(0, min(len(cosines), 4096) - 1, 64).astype(int))
    angles = positions[:, None] * frequencies
    tolerance = 2e-3 + 1e-6 * positions[:, None]
    return bool(
        (np.abs(np.cos(angles) - cosines[positions]) < tolerance).all()
        and (np.abs(np.sin(angles) - sines[positions]) < tolerance).all()
    )


def _undetermined(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} does not say how positions are rotated and the graph has no plain table of it; put the model's own "
        "config.json beside it"
    )
