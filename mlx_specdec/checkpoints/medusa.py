"""Medusa heads: the authors' layout (`{head}.{block}.linear.weight`, `{head}.{blocks}.weight`, usually in
medusa_lm_head.pt), and vLLM's (`blocks.{head}.layers.{layer}.weight`, `lm_heads.{head}.weight`)."""

import re

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..networks.medusa import Medusa, MedusaConfig
from .folder import Folder, fill

Tensors = dict[str, mx.array]

PREFIX = re.compile(r"^(model\.)?(medusa_heads?\.)?")
OURS = (
    (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"blocks.\1.layers.\2."),
    (re.compile(r"^(\d+)\.\d+\.(?=weight$|scales$|biases$)"), r"lm_heads.\1."),
    (re.compile(r"^lm_head\."), "lm_heads.0."),
)


def read(folder: Folder) -> Medusa:
    """All heads that the files hold. Raises CheckpointError."""
    tensors = {_ours(name): tensor for name, tensor in folder.tensors().items()}
    token_map = tensors.pop("token_map", None)
    config = _config(folder, tensors, token_map)
    ids = _ids(folder, config, token_map)
    if config.shared_head:  # of copies only the first is read
        tensors = {name: x for name, x in tensors.items() if not re.match(r"lm_heads\.[1-9]", name)}
    if ids is not None:
        rows = mx.array(ids)
        for name, x in tensors.items():
            if name.startswith("lm_heads.") and x.shape[0] == config.vocab:  # whole heads, with a map of what to keep
                tensors[name] = x[rows]
    network = Medusa(config, ids)
    fill(network, tensors, folder)
    return network


def _ours(name: str) -> str:
    name = PREFIX.sub("", name)
    for theirs, ours in OURS:
        name = theirs.sub(ours, name)
    return name


def _config(folder: Folder, tensors: Tensors, token_map: mx.array | None) -> MedusaConfig:
    """From the config, and from the tensors what it leaves out. The number of heads is the files': published configs
    speak of fewer than there are."""
    said = folder.config
    heads, layers = _count(tensors, r"blocks\.(\d+)\."), _count(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
    declared = said.get("medusa_num_heads", said.get("num_heads"))
    if heads == 0 or (isinstance(declared, int) and heads < declared):
        raise CheckpointError(f"{folder.path} holds {heads} Medusa heads and its config names {declared or 'some'}; "
                              "fetch the checkpoint again")  # fmt: skip
    shared = bool(said.get("original_lm_head"))
    if not shared and _count(tensors, r"lm_heads\.(\d+)\.") < heads:
        raise CheckpointError(f"{folder.path} holds the blocks of {heads} Medusa heads and not as many projections "
                              "onto the vocabulary; fetch the checkpoint again")  # fmt: skip
    rows = tensors["lm_heads.0.weight"].shape[0] if "lm_heads.0.weight" in tensors else 0
    vocab = said.get("vocab_size") or rows
    return MedusaConfig(
        hidden=said.get("hidden_size") or tensors["blocks.0.layers.0.weight"].shape[0],
        vocab=vocab,
        draft_vocab=vocab if token_map is None else token_map.size,
        heads=heads,
        layers=layers,
        bias=any(re.match(r"blocks\..*\.bias$", name) for name in tensors),
        shared_head=shared,
        logit_scale=float(said.get("logit_scale", 1.0)),
        target_name=said.get("base_model_name_or_path"),
    )


def _count(tensors: Tensors, pattern: str) -> int:
    """One more than the highest number that stands in a tensor's name where `pattern` has it."""
    return max((int(found[1]) + 1 for name in tensors if (found := re.match(pattern, name))), default=0)


def _ids(folder: Folder, config: MedusaConfig, token_map: mx.array | None) -> np.ndarray | None:
    truncated = folder.config.get("truncated_vocab_size") or config.vocab
    if token_map is None:
        if truncated < config.vocab:
            raise CheckpointError(f"{folder.path} drafts {truncated} of {config.vocab} tokens and has no token_map to "
                                  "say which; fetch it again")  # fmt: skip
        return None
    ids = np.array(token_map.astype(mx.int64)).reshape(-1)
    if len(np.unique(ids)) < len(ids) or ids.min(initial=0) < 0 or ids.max(initial=0) >= config.vocab:
        raise CheckpointError(f"{folder.path}: token_map names tokens twice or beyond the vocabulary of "
                              f"{config.vocab}; fetch the checkpoint again")  # fmt: skip
    return ids
