"""A Gemma 4 assistant from its folder, as Google publishes it and as mlx-vlm's conversions hold it."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.gemma4_text import ModelArgs

from ..errors import CheckpointError
from ..networks.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from .folder import Folder, fill

# What its layers never have; Hugging Face's configuration refuses other values too.
ABSENT: dict[str, Any] = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}


def read(folder: Folder) -> Gemma4Assistant:
    """Raises CheckpointError for sizes that do not fit one another and for tensors that are not those of the config."""
    network = Gemma4Assistant(_config(folder))
    tensors = {name.removeprefix("model."): value for name, value in folder.tensors().items()}
    tensors.pop("lm_head.weight", None)  # a copy of the embedding in some files: the head is always tied to it
    if not folder.config.get("use_ordered_embeddings"):
        tensors = {name: value for name, value in tensors.items() if not name.startswith("masked_embedding.")}
    elif (order := tensors.get("masked_embedding.token_ordering")) is not None:
        tensors["masked_embedding.token_ordering"] = _checked(order, network.config, folder)
    fill(network, tensors, folder)
    return network


def _config(folder: Folder) -> Gemma4AssistantConfig:
    config = folder.config
    given = config.get("text_config")
    if not isinstance(given, dict) or not isinstance(config.get("backbone_hidden_size"), int):
        raise CheckpointError(
            f"{folder.path / 'config.json'} has no text_config or no backbone_hidden_size, which a Gemma 4 assistant "
            "has; fetch it again"
        )
    for name, value in ABSENT.items():
        if given.get(name, value) != value:
            raise CheckpointError(
                f"{folder.path / 'config.json'} says {name} {given[name]}, and an assistant has {value}; is it a model "
                "to generate with, and not a drafter?"
            )
    text = ModelArgs.from_dict({**given, **ABSENT, "num_kv_shared_layers": given.get("num_hidden_layers", 4)})
    if len(text.layer_types) != text.num_hidden_layers:
        raise CheckpointError(
            f"{folder.path / 'config.json'} names {len(text.layer_types)} layer_types for {text.num_hidden_layers} "
            "layers; fetch it again"
        )
    if not config.get("use_ordered_embeddings"):
        return Gemma4AssistantConfig(text, config["backbone_hidden_size"])
    centroids, clusters = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    if text.vocab_size % centroids or not 0 < clusters <= centroids:
        raise CheckpointError(
            f"{folder.path / 'config.json'} shares {text.vocab_size} tokens among {centroids} clusters and looks at "
            f"{clusters} of these, which cannot be; fetch it again"
        )
    return Gemma4AssistantConfig(text, config["backbone_hidden_size"], centroids, clusters)


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
