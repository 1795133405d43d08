"""Which tensors of a checkpoint belong to MTP heads, and how each family names them."""

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Tensors = dict[str, mx.array]

DECLARED = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
SHARED = re.compile(r"(^|\.)(embed_tokens|shared_head\.head|rotary_emb)\.")  # copies of the target's, or computed


@dataclass(frozen=True)
class Layout:
    """How a family names the tensors of its heads."""

    place: str  # a pattern for what stands before a head's own names, the head's number in its group
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False
    zero_centred: bool = False  # norms are published as what they differ from 1

    def split(self, name: str, bare: bool) -> tuple[str, int | None, str] | None:
        """The place of a tensor, its head's number (None where heads share it) and the rest of its name; None if it
        belongs to no head.

        `bare` names are those of a file that holds nothing else, where a prefix may have been taken off.
        """
        found = re.search(self.place, name)
        if found is None and bare:
            found = re.match(r"(?:layers\.(\d+)\.)?", name)
        if found is None or SHARED.search(name):
            return None
        return name[: found.end()], int(found[1]) if found[1] else None, name[found.end() :]

    def heads(self, tensors: Tensors, bare: bool) -> list[Tensors]:
        """The tensors of each head, in order, those that all share in every one."""
        shared: Tensors = {}
        placed: dict[tuple[int, str], Tensors] = {}
        for name, value in tensors.items():
            match self.split(name, bare):
                case (_, None, rest):
                    shared[rest] = value
                case (place, number, rest):
                    placed.setdefault((number, place), {})[rest] = value
        heads = [shared | placed[key] for key in sorted(placed)]
        return [head for head in heads if f"{self.projection}.weight" in head]

    def of_a_head(self, name: str, layers: int) -> bool:
        """Whether a target's tensor belongs to a head, if only as a copy of its embedding; `layers` are the trunk's."""
        found = re.search(self.place, name)
        beside = found is not None and (self is not NEXTN or int(found[1]) >= layers)
        # Without a prefix are those of a file that holds nothing else; a trunk's names have one.
        bare = name.partition(".")[0] in ("layers", self.projection, self.embedding_norm, self.hidden_norm, self.norm)
        return beside or bare or re.search(r"(^|\.)mtp\.", name) is not None


QWEN = Layout(
    r"(?:^|\.)mtp\.(?:layers\.(\d+)\.)?", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", zero_centred=True
)
NEXTN = Layout(r"(?:^|\.)layers\.(\d+)\.", "eh_proj", "enorm", "hnorm", "shared_head.norm")
MIMO = Layout(
    r"(?:^|\.)mtp_layers\.(\d+)\.",
    "input_proj",
    "token_layernorm",
    "hidden_layernorm",
    "final_layernorm",
    hidden_first=True,
)
LAYOUTS = {  # by mlx-lm's module
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "deepseek_v3": NEXTN,
    "glm4_moe": NEXTN,
    "glm4_moe_lite": NEXTN,
    "mimo": MIMO,
}


def module_of(kind: type) -> str:
    """The name of the mlx-lm module that a class, or what it was derived from, comes from; empty if none."""
    modules = (base.__module__ for base in kind.__mro__)
    return next((m.rpartition(".")[2] for m in modules if m.startswith("mlx_lm.models.")), "")


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says, its language model's own section included."""
    return config | (config.get("text_config") or {})


def declared(config: dict[str, Any]) -> int:
    """How many heads a target's config says it has."""
    known = settings(config)
    return max((known[key] for key in DECLARED if isinstance(known.get(key), int)), default=0)


def trunk_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The classes of a target, for mlx-lm's `load_model(get_model_classes=...)`, that leave every head out.

    By itself mlx-lm leaves out layer 61 of DeepSeek-V3, the first head of GLM-4.5, and Qwen3-Next's where experts are
    numbered; any other head makes its strict loading fail.
    """
    from mlx_lm.utils import _get_classes

    original, args = _get_classes(config)
    layout, layers = LAYOUTS.get(module_of(original)), settings(config).get("num_hidden_layers")
    if layout is None or layers is None:
        return original, args
    return _trunk(original, layout, layers), args


def _trunk(original: Any, layout: Layout, layers: int) -> type[nn.Module]:
    class Trunk(original):
        def sanitize(self, weights: Tensors) -> Tensors:
            return super().sanitize({n: value for n, value in weights.items() if not layout.of_a_head(n, layers)})

    return Trunk
