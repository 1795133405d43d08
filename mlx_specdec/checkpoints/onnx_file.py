"""An ONNX file: its nodes, and its initialisers by name, read when they are used."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .folder import is_within

# onnx.TensorProto.DataType: how numpy reads it from a file of external data.
DTYPES = {1: "<f4", 2: "u1", 3: "i1", 6: "<i4", 7: "<i8", 10: "<f2", 11: "<f8", 16: "<u2"}
BFLOAT16 = 16


class OnnxFile:
    """The graph of an ONNX file and of all graphs within it (both branches of a merged decoder), as one."""

    def __init__(self, path: Path):
        """Raises CheckpointError for what is no ONNX model, and where the package `onnx` is missing."""
        try:
            import onnx
        except ImportError as error:
            raise CheckpointError(
                f"{path} is read with the package onnx, which is not installed; install mlx-specdec[onnx]"
            ) from error
        self.path = path
        try:
            model = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # whatever protobuf raises
            raise CheckpointError(f"{path} is not an ONNX model ({_line(error)}); fetch it again") from error
        self.nodes: list[Any] = []
        self.initialisers: dict[str, Any] = {}
        for graph in _graphs(model.graph):
            self.nodes += graph.node
            self.initialisers |= {tensor.name: tensor for tensor in graph.initializer}
        for node in self.nodes:
            if node.op_type == "Constant" and (value := attributes(node).get("value")) is not None:
                self.initialisers[node.output[0]] = value
        if not self.nodes:
            raise CheckpointError(f"{path} holds no nodes; fetch it again")
        self.producers = {name: node for node in self.nodes for name in node.output}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.initialisers[name].dims)

    def array(self, name: str) -> mx.array:
        """The values of an initialiser, float64 as float32. Raises CheckpointError."""
        tensor = self.initialisers[name]
        values = self._external(tensor) if tensor.data_location == 1 else self._inline(tensor)
        if values.dtype == np.float64:
            values = values.astype(np.float32)
        array = mx.array(values)
        return array.view(mx.bfloat16) if tensor.data_type == BFLOAT16 else array

    def _inline(self, tensor: Any) -> np.ndarray:
        from onnx.numpy_helper import to_array

        self._dtype(tensor)
        try:
            values = to_array(tensor)
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: {tensor.name} cannot be read ({_line(error)}); fetch it again"
            ) from error
        return values.view(np.uint16) if tensor.data_type == BFLOAT16 else values

    def _external(self, tensor: Any) -> np.ndarray:
        """A view of a file beside this one: never of another folder's, never beyond its end."""
        said = {entry.key: entry.value for entry in tensor.external_data}
        place = Path(said.get("location", ""))
        if place.is_absolute() or ".." in place.parts or not place.parts:
            raise CheckpointError(
                f"{self.path} keeps {tensor.name} in the file {str(place)!r}, which is not in its folder; do not use it"
            )
        file, dtype, shape = self.path.parent / place, self._dtype(tensor), tuple(tensor.dims)
        if not is_within(file, self.path.parent):
            raise CheckpointError(f"{self.path} keeps {tensor.name} in {place}, a link to a file which is not in its "
                                  "folder; put the file itself there")  # fmt: skip
        if not file.is_file():
            raise CheckpointError(f"{self.path} keeps weights in {place}, which is missing; fetch it as well")
        size = math.prod(shape) * dtype.itemsize
        try:
            offset, length = int(said.get("offset", 0)), int(said.get("length", size))
        except ValueError:
            offset = length = -1
        if min((offset, *shape, 0)) < 0 or length != size or offset + size > file.stat().st_size:
            raise CheckpointError(
                f"{self.path}: {tensor.name} of the shape {list(shape)} is to lie at {said.get('offset', 0)} of "
                f"{place}, in {said.get('length', size)} bytes, which is not so; fetch both files again"
            )
        if size == 0:
            return np.zeros(shape, dtype)
        return np.memmap(file, dtype, "r", offset, shape)

    def _dtype(self, tensor: Any) -> "np.dtype[Any]":
        if tensor.data_type not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {tensor.name} has ONNX's data type {tensor.data_type}, which is not supported; use an "
                "export in float32, float16, bfloat16 or 4 bits (MatMulNBits)"
            )
        return np.dtype(DTYPES[tensor.data_type])


def attributes(node: Any) -> dict[str, Any]:
    """A node's attributes by name, in Python's types."""
    from onnx.helper import get_attribute_value

    return {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
