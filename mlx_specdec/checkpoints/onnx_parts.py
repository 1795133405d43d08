"""Which initialisers of an ONNX graph are the weights of which modules.

Exporters keep a module's name in the name of an initialiser (`model.layers.0.attn.q_proj.MatMul.weight`), or only in
that of the node which uses it (`/model/layers.0/self_attn/q_proj/MatMul` of `onnx::MatMul_733`). What counts is how a
node uses it: a matrix may be transposed or packed, a norm's weight may have had 1 added.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .onnx_file import OnnxFile, attributes

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
NORMS = {  # the input that is the weight
    "SimplifiedLayerNormalization": 1,
    "RMSNormalization": 1,
    "SkipSimplifiedLayerNormalization": 2,
}
THROUGH = ("Transpose", "Cast", "Identity", "Reshape")
MOVES = 8  # at most so many of them, one after another
# Weights in forms that are not read, which would otherwise be said to be missing.
REFUSED = ("MatMulInteger", "DequantizeLinear", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QMoE", "MatMulBnb4")


@dataclass(frozen=True)
class Dense:
    """A matrix or vector as it is used: an initialiser, or its transpose."""

    name: str
    transposed: bool = False


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] in blocks of `block` columns of few bits (MatMulNBits, GatherBlockQuantized)."""

    codes: str
    scales: str
    zero_points: str | None
    bits: int
    block: int
    columns: int | None


@dataclass
class Module:
    """Where the weights of a module are."""

    weight: Dense | Packed | None = None
    bias: Dense | None = None
    used_by: str = ""  # the kind of node
    epsilon: float | None = None  # of a norm


@dataclass
class Names:
    """The modules that are looked for, by their names in mlx-lm, and their places."""

    wanted: Iterable[str]
    places: dict[tuple[int | None, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.wanted:
            *_, last = path.split(".")
            found = re.search(r"\.layers\.(\d+)\.", path)
            number = int(found[1]) if found else None
            self.places[number, last] = path
            for fused, parts in FUSED.items():
                if last == fused:
                    self.places |= {(number, part): path.removesuffix(fused) + part for part in parts}
                elif last in parts:
                    self.places[number, fused] = path.removesuffix(last) + fused

    def find(self, text: str) -> str | None:
        """The module that a name of a node or initialiser speaks of."""
        parts = [part for part in re.split(r"[/.]", text) if part]
        if "final_norm_layernorm" in parts:
            return self.places.get((None, "norm"))
        number = next((int(b) for a, b in pairwise(parts) if a == "layers" and b.isdigit()), None)
        return next((self.places[number, part] for part in parts if (number, part) in self.places), None)


def find_modules(file: OnnxFile, names: Names) -> dict[str, Module]:
    """The modules with weights in a graph, fused ones under their fused name."""
    found: dict[str, Module] = {}
    for node in file.nodes:
        weight, bias = used(file, node)
        for part, source in (("weight", weight), ("bias", bias)):
            if source is None:
                continue
            if node.op_type.startswith("Gather"):
                path = names.places.get((None, "embed_tokens"))
            else:
                name = source.name if isinstance(source, Dense) else source.codes
                path = names.find(name) or names.find(node.name)
            if path is None:
                continue
            module = found.setdefault(path, Module())
            if getattr(module, part) is None:
                setattr(module, part, source)
                if part == "weight":
                    module.used_by, module.epsilon = node.op_type, attributes(node).get("epsilon")
    return found


def used(file: OnnxFile, node: Any) -> tuple[Dense | Packed | None, Dense | None]:
    """The weight and the bias that a node applies, in the orientation of torch's layers."""
    kind, inputs = node.op_type, [*node.input, *[""] * 6]
    weight: Dense | Packed | None = None
    bias: Dense | None = None
    if kind in ("MatMul", "Gemm"):
        flip = kind == "MatMul" or not attributes(node).get("transB", 0)
        weight = _matrix(_behind(file, inputs[1]), file, flip=flip)
        bias = _vector(file, inputs[2])
    elif kind == "MatMulNBits":
        weight, bias = _packed(file, inputs[1:4], attributes(node)), _vector(file, inputs[5])
    elif kind == "GatherBlockQuantized" and "input_ids" in inputs[1]:
        weight = _packed(file, [inputs[0], *inputs[2:4]], attributes(node))
    elif kind == "Gather" and "input_ids" in inputs[1]:
        weight = _matrix(_behind(file, inputs[0]), file, flip=False)
    elif kind in NORMS:
        weight = _vector(file, inputs[NORMS[kind]])
    elif kind == "Mul":
        weight = _vector(file, inputs[0]) or _vector(file, inputs[1])
    elif kind == "Add":
        bias = _vector(file, inputs[0]) or _vector(file, inputs[1])
    return weight, bias


def _behind(file: OnnxFile, name: str) -> Dense | None:
    """The initialiser that an input is made of by moving it alone."""
    turned = False
    for _ in range(MOVES):
        if name in file.initialisers:
            return Dense(name, turned)
        node = file.producers.get(name)
        if node is None or node.op_type not in THROUGH:
            return None
        turned ^= node.op_type == "Transpose" and list(attributes(node).get("perm", (1, 0))) == [1, 0]
        name = node.input[0]
    return None


def _matrix(found: Dense | None, file: OnnxFile, flip: bool) -> Dense | None:
    if found is None or len(file.shape(found.name)) != 2:
        return None
    return Dense(found.name, found.transposed != flip)


def _vector(file: OnnxFile, name: str) -> Dense | None:
    found = _behind(file, name)
    return found if found and len(file.shape(found.name)) == 1 and file.shape(found.name)[0] > 1 else None


def _packed(file: OnnxFile, inputs: list[str], said: dict[str, Any]) -> Packed | None:
    """`inputs` are codes, scales and perhaps zero points."""
    behind = [_behind(file, name) for name in inputs if name]
    if len(behind) < 2 or None in behind:
        return None
    codes, scales, *zeros = (found.name for found in behind if found)
    return Packed(
        codes, scales, zeros[0] if zeros else None, said.get("bits", 4), said.get("block_size", 128), said.get("K")
    )
