"""A Gemma 4 assistant from its folder, as Google publishes it and as mlx-vlm's conversions hold it."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.gemma4_text import ModelArgs

from ..errors import CheckpointError
from ..networks.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from .folder import Folder, fill

# What its layers never have; Hugging Face's configuration refuses other values too.
ABSENT: dict[str, Any] = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}


FULL, SLIDING = "full_attention", "sliding_attention"


def read(folder: Folder) -> Gemma4Assistant:
    """Raises CheckpointError for sizes that do not fit one another and for tensors that are not those of the config."""
    config = _config(folder)
    tensors = {name.removeprefix("model."): value for name, value in folder.tensors().items()}
    if folder.config.get("tie_word_embeddings", True):
        tensors.pop("lm_head.weight", None)  # a copy of the embedding in some files
    if config.centroids is None:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("masked_embedding.")}
    elif (order := tensors.get("masked_embedding.token_ordering")) is not None:
        tensors["masked_embedding.token_ordering"] = _checked(order, config, folder)
    network = Gemma4Assistant(config)
    fill(network, tensors, folder)
    return network


def _config(folder: Folder) -> Gemma4AssistantConfig:
    config = folder.config
    given, backbone = config.get("text_config"), config.get("backbone_hidden_size")
    if not isinstance(given, dict) or not isinstance(backbone, int):
        raise _wrong(
            folder, "has no text_config or no backbone_hidden_size, as a Gemma 4 assistant has; fetch it again"
        )
    for name, value in ABSENT.items():
        if given.get(name, value) != value:
            raise _wrong(folder, f"says {name} {given[name]}, and an assistant has {value}; is it a model to generate "
                                 "with, and no drafter?")  # fmt: skip
    text = _text(folder, given)
    if not config.get("use_ordered_embeddings"):
        return Gemma4AssistantConfig(text, backbone)
    centroids, clusters = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    if text.vocab_size % centroids or not 0 < clusters <= centroids:
        raise _wrong(folder, f"shares {text.vocab_size} tokens among {centroids} clusters and looks at {clusters} of "
                             "these, which cannot be; fetch it again")  # fmt: skip
    return Gemma4AssistantConfig(text, backbone, centroids, clusters)


def _text(folder: Folder, given: dict[str, Any]) -> ModelArgs:
    """The sizes of its layers, with Hugging Face's meaning of what is left out."""
    layers = given.get("num_hidden_layers", 4)
    kinds = list(given.get("layer_types") or (SLIDING if (i + 1) % 6 else FULL for i in range(layers)))
    if len(kinds) != layers:
        raise _wrong(folder, f"names {len(kinds)} layer_types for {layers} layers; fetch it again")
    kinds[-1] = FULL
    widths = {}
    if "global_head_dim" not in given and "per_layer_config" in given:  # as transformers writes it from 5.24 on
        own = [given["per_layer_config"].get(str(i), {}) for i, kind in enumerate(kinds) if kind == FULL]
        widths["global_head_dim"] = own[-1].get("head_dim", given.get("head_dim", 256))
    return ModelArgs.from_dict({**given, **ABSENT, **widths, "layer_types": kinds, "num_kv_shared_layers": layers})


def _wrong(folder: Folder, said: str) -> CheckpointError:
    return CheckpointError(f"{folder.path / 'config.json'} {said}")


def _checked(order: mx.array, config: Gemma4AssistantConfig, folder: Folder) -> mx.array:
    """The token ordering as int32: every token once, or the head would miss some or read beyond its embedding."""
    vocab = config.text.vocab_size
    order = order.astype(mx.int32)
    if order.shape != (vocab,) or not mx.array_equal(mx.sort(order), mx.arange(vocab)):
        raise CheckpointError(
            f"{folder.path}: masked_embedding.token_ordering is not an ordering of the {vocab} tokens; fetch the "
            "checkpoint again"
        )
    return order
