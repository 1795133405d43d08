"""ONNX exports: every exporter's names give the source's logits, blocks keep their codes, and what is wrong is said."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints.conversion import convert
from mlx_specdec.checkpoints.conversion_options import Numbers
from mlx_specdec.checkpoints.onnx_blocks import unpacked
from mlx_specdec.checkpoints.onnx_file import OnnxFile
from mlx_specdec.checkpoints.onnx_parts import Packed

onnx: Any = pytest.importorskip("onnx", reason="needs the package onnx (mlx-specdec[onnx])")

GOLDEN = Path(__file__).parents[1] / "golden"
EXPORTS = sorted(path.name for path in GOLDEN.glob("onnx_*"))
FLOAT, FLOAT16, UINT8 = 1, 10, 2


def logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    model, _ = load_model(folder)
    return np.array(model(mx.array(ids)).astype(mx.float32))


def same_logits(source: Path, result: Path, tolerance: float = 1e-4) -> bool:
    expected = np.load(source / "expected.npz")
    return bool(np.abs(logits(result, expected["ids"]) - expected["logits"]).max() < tolerance)


def tensors_of(folder: Path) -> dict[str, mx.array]:
    return {n: x for file in folder.glob("model*.safetensors") for n, x in mx.load(str(file)).items()}  # type: ignore[union-attr]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", EXPORTS)
def test_the_logits_of_the_source(tmp_path: Path, name: str) -> None:
    convert(str(GOLDEN / name), tmp_path / "result")
    assert same_logits(GOLDEN / name, tmp_path / "result")
    assert ("quantization" in config_of(tmp_path / "result")) is name.endswith("int4")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "result" / file).read_bytes() == (GOLDEN / name / file).read_bytes()
    model, tokenizer = mlx_lm.load(str(tmp_path / "result"))
    assert list(mlx_lm.stream_generate(model, tokenizer, [3, 4, 5], max_tokens=3))


def test_exports_of_every_family_are_there() -> None:
    """Fused and parted projections, biases, tied heads, norms that 1 was added to, windows, soft caps, blocks."""
    assert {name.removeprefix("onnx_") for name in EXPORTS} == {
        *(f"optimum_{family}" for family in ("llama", "qwen2", "gemma3", "phi3")),
        *(f"genai_{family}" for family in ("llama", "phi3", "gemma2", "gemma3", "qwen2_int4", "qwen3_int4")),
    }


@pytest.mark.parametrize("name", ["onnx_genai_qwen3_int4", "onnx_genai_qwen2_int4"])
def test_blocks_made_dense_and_blocks_asked_for(tmp_path: Path, name: str) -> None:
    """-d and the packed form are the same numbers; -q in the same form keeps the codes, in another it does not."""
    source = GOLDEN / name
    convert(str(source), tmp_path / "kept")
    convert(str(source), tmp_path / "dense", Numbers(dequantize=True))
    assert same_logits(source, tmp_path / "dense")
    assert not any(n.endswith("scales") for n in tensors_of(tmp_path / "dense"))
    convert(str(source), tmp_path / "asked", Numbers(quantize=True, q_bits=4, q_group_size=32))
    kept, asked = tensors_of(tmp_path / "kept"), tensors_of(tmp_path / "asked")
    packed = [n for n in kept if n.removesuffix("weight") + "scales" in kept]
    assert packed
    assert all(mx.array_equal(kept[n], asked[n]) for n in packed)
    expected = np.load(source / "expected.npz")
    np.testing.assert_allclose(
        logits(tmp_path / "asked", expected["ids"]), rounded(tmp_path, expected["ids"]), atol=1e-3
    )
    convert(str(source), tmp_path / "eight", Numbers(quantize=True, q_bits=8, q_group_size=64))
    assert load_model(tmp_path / "eight")[0].layers[0].mlp.up_proj.bits == 8
    assert same_logits(source, tmp_path / "eight", 1.0)


def rounded(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of the dense model with what only `asked` has packed (qwen3's embedding) through 4 bits and back."""
    kept, asked = tensors_of(folder / "kept"), tensors_of(folder / "asked")
    model, _ = load_model(folder / "dense")
    for scales in asked.keys() - kept.keys():
        if scales.endswith(".scales"):
            name = scales.removesuffix("scales") + "weight"
            packed = mx.quantize(kept[name], 32, 4)
            model.load_weights([(name, mx.dequantize(*packed, 32, 4))], strict=False)
    return np.array(model(mx.array(ids)).astype(mx.float32))


# other shapes of the same graphs


def edited(tmp_path: Path, name: str, change: Callable[[Any], Any] | None = None) -> Path:
    """A copy of a golden export with a changed model."""
    folder = shutil.copytree(GOLDEN / name, tmp_path / "source")
    if change is not None:
        model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
        change(model)
        onnx.save(model, str(folder / "model.onnx"))
    return folder


def test_external_data_and_a_folder_above(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN / "onnx_optimum_llama", tmp_path / "source")
    model = onnx.load(str(source / "model.onnx"))
    (source / "model.onnx").unlink()
    (source / "onnx").mkdir()
    onnx.save(model, str(source / "onnx" / "model.onnx"), save_as_external_data=True, location="model.onnx_data",
              size_threshold=0)  # fmt: skip
    assert (source / "onnx" / "model.onnx").stat().st_size < (source / "onnx" / "model.onnx_data").stat().st_size * 2
    convert(str(source), tmp_path / "result")
    assert same_logits(source, tmp_path / "result")
    convert(str(source / "onnx" / "model.onnx"), tmp_path / "by_file")
    assert same_logits(source, tmp_path / "by_file")


def test_a_merged_decoder(tmp_path: Path) -> None:
    """Both branches of an `If` use the initialisers outside; other files beside it are not taken."""

    def merge(model: Any) -> None:
        helper, graph = onnx.helper, model.graph
        branches = [helper.make_graph(graph.node, name, [], graph.output) for name in ("then", "else")]
        choice = helper.make_node("If", ["use_cache_branch"], [o.name for o in graph.output],
                                  then_branch=branches[0], else_branch=branches[1])  # fmt: skip
        del graph.node[:]
        graph.node.append(choice)

    source = edited(tmp_path, "onnx_optimum_qwen2", merge)
    (source / "model.onnx").rename(source / "decoder_model_merged.onnx")
    (source / "decoder_model.onnx").write_bytes(b"")
    convert(str(source), tmp_path / "result")
    assert same_logits(source, tmp_path / "result")


def test_names_of_the_newer_exporter_of_torch(tmp_path: Path) -> None:
    """Initialisers keep their names and are transposed in the graph; nodes are numbered."""

    def rename(model: Any) -> None:
        helper, graph = onnx.helper, model.graph
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        nodes = []
        for number, node in enumerate(graph.node):
            if node.op_type == "MatMul" and node.input[1] in tensors:
                values = onnx.numpy_helper.to_array(tensors[node.input[1]])
                name = node.name.removesuffix("/MatMul").strip("/").replace("/", ".") + ".weight"
                graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(values.T), name))
                nodes.append(helper.make_node("Transpose", [name], [f"val_{number}"], f"node_Transpose_{number}",
                                              perm=[1, 0]))  # fmt: skip
                node.input[1] = f"val_{number}"
            node.name = f"node_{node.op_type}_{number}"
            nodes.append(node)
        kept = [t for t in graph.initializer if not t.name.startswith("onnx::")]
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend(kept)

    source = edited(tmp_path, "onnx_optimum_llama", rename)
    convert(str(source), tmp_path / "result")
    assert same_logits(source, tmp_path / "result")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    def halve(model: Any) -> None:
        kind = onnx.TensorProto.FLOAT16 if dtype == "float16" else onnx.TensorProto.BFLOAT16
        for tensor in model.graph.initializer:
            if tensor.data_type == FLOAT:
                values = mx.array(onnx.numpy_helper.to_array(tensor)).astype(getattr(mx, dtype))
                raw = bytes(memoryview(np.array(values.view(mx.uint16))))
                tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, kind, tensor.dims, raw, raw=True))

    source = edited(tmp_path, "onnx_optimum_llama", halve)
    config = config_of(source)
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    convert(str(source), tmp_path / "result")
    convert(str(GOLDEN / "onnx_optimum_llama"), tmp_path / "exact")
    ours, exact = tensors_of(tmp_path / "result"), tensors_of(tmp_path / "exact")
    assert all(mx.array_equal(ours[n], x.astype(getattr(mx, dtype))) for n, x in exact.items())


# blocks

Blocks = tuple[OnnxFile, Packed, np.ndarray]


def blocks(path: Path, bits: int, block: int, columns: int, zeros: str | None, half: bool = False) -> Blocks:
    """A file with one MatMulNBits of random codes, and the matrix that they stand for by its definition."""
    random, rows = np.random.default_rng(bits * block), 6
    count, kind = -(-columns // block), np.float16 if half else np.float32
    codes = random.integers(0, 1 << bits, (rows, count, block), np.uint8)
    scales = random.uniform(0.01, 0.1, (rows, count)).astype(kind)
    points = np.full((rows, count), 1 << (bits - 1), np.float32)
    tensors = {"w_Q4": pack(codes, bits), "w_scales": scales.reshape(-1)}
    if zeros == "codes":
        given = random.integers(0, 1 << bits, (rows, count), np.uint8)
        points, tensors["w_zp"] = given.astype(np.float32), pack(given, bits).reshape(-1)
    elif zeros == "numbers":
        points = random.uniform(0, 1 << bits, (rows, count)).astype(kind)
        tensors["w_zp"] = points
    matrix = (codes - points[..., None].astype(np.float32)) * scales[..., None].astype(np.float32)
    node = onnx.helper.make_node("MatMulNBits", ["x", *tensors], ["y"], "/lm_head/MatMul", domain="com.microsoft",
                                 K=columns, N=rows, bits=bits, block_size=block)  # fmt: skip
    inits = [onnx.numpy_helper.from_array(np.ascontiguousarray(x), n) for n, x in tensors.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [], inits)), str(path))
    packed = Packed("w_Q4", "w_scales", "w_zp" if zeros else None, bits, block, columns)
    return OnnxFile(path), packed, matrix.reshape(rows, -1)[:, :columns]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """The first code in the lowest bits of a byte, rows padded to whole bytes."""
    each = 8 // bits
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    parts = padded.reshape(*padded.shape[:-1], -1, each).astype(np.uint8)
    return np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)


@pytest.mark.parametrize("zeros", [None, "codes", "numbers"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_blocks_stand_for_the_same_numbers(tmp_path: Path, bits: int, block: int, zeros: str | None) -> None:
    columns = 3 * block
    file, packed, matrix = blocks(tmp_path / "one.onnx", bits, block, columns, zeros)
    found = unpacked(file, packed)
    assert ("scales" in found) is (block in (32, 64, 128))
    if "scales" in found:
        found["weight"] = mx.dequantize(found["weight"], found["scales"], found["biases"], block, bits)
        np.testing.assert_allclose(found["weight"], matrix, atol=2e-6 * (1 << bits) * 0.1)
    else:
        assert np.array_equal(found["weight"], matrix)


def test_blocks_that_do_not_fill_a_row(tmp_path: Path) -> None:
    file, packed, matrix = blocks(tmp_path / "one.onnx", 4, 32, 80, "codes")
    found = unpacked(file, packed)
    assert found.keys() == {"weight"}
    assert np.array_equal(found["weight"], matrix)


@pytest.mark.parametrize(("zeros", "kept"), [(None, True), ("numbers", False)])
def test_half_precision_scales_are_kept_where_nothing_is_rounded(tmp_path: Path, zeros: str | None, kept: bool) -> None:
    """A zero point of 8 times a scale is exact; another number mostly is not, and the block becomes dense."""
    file, packed, matrix = blocks(tmp_path / "one.onnx", 4, 32, 96, zeros, half=True)
    found = unpacked(file, packed)
    assert ("scales" in found) is kept
    if kept:
        exact = (x.astype(mx.float32) for x in (found["scales"], found["biases"]))
        found["weight"] = mx.dequantize(found["weight"], *exact, 32, 4)
    np.testing.assert_allclose(found["weight"].astype(mx.float32), matrix, atol=1e-6 if kept else 1e-3)


@pytest.mark.parametrize(
    "wrong", [{"bits": 3}, {"block": 8}, {"columns": 97}, {"scales": "w_Q4"}, {"codes": "w_scales"}]
)
def test_blocks_of_other_sizes(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file, packed, _ = blocks(tmp_path / "one.onnx", 4, 32, 96, "codes")
    with pytest.raises(CheckpointError, match=r"not supported|do not make a matrix"):
        unpacked(file, Packed(**{**packed.__dict__, **wrong}))


# what goes wrong


def refusal(source: Path, tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        convert(str(source), tmp_path / "result")
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "elsewhere"}
    return str(raised.value)


def external(entries: dict[str, str]) -> Callable[[Any], None]:
    """The place of one initialiser in the file of weights, changed."""

    def change(model: Any) -> None:
        tensor = next(t for t in model.graph.initializer if "gate_proj" in t.name)
        said = {entry.key: entry.value for entry in tensor.external_data} | entries
        del tensor.external_data[:]
        for key, value in said.items():
            tensor.external_data.add(key=key, value=value)

    return change


@pytest.mark.parametrize("place", ["../elsewhere", "/etc/passwd", "a/../../elsewhere", "..", ""])
def test_weights_outside_the_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(1 << 20))
    assert "is not in its folder" in refusal(
        edited(tmp_path, "onnx_genai_llama", external({"location": place})), tmp_path
    )


def test_weights_that_are_a_link_to_another_folder(tmp_path: Path) -> None:
    source = edited(tmp_path, "onnx_genai_llama")
    (source / "model.onnx.data").rename(tmp_path / "elsewhere")
    (source / "model.onnx.data").symlink_to(tmp_path / "elsewhere")
    assert "a link to a file which is not in its folder" in refusal(source, tmp_path)


@pytest.mark.parametrize(
    "entries", [{"offset": "99999999"}, {"offset": "-4"}, {"length": "4"}, {"offset": "x"}, {"length": "1e3"}]
)
def test_weights_that_are_not_where_they_should_be(tmp_path: Path, entries: dict[str, str]) -> None:
    said = refusal(edited(tmp_path, "onnx_genai_llama", external(entries)), tmp_path)
    assert "which is not so; fetch both files again" in said


def test_a_missing_and_a_truncated_file_of_weights(tmp_path: Path) -> None:
    source = edited(tmp_path, "onnx_genai_llama")
    data = (source / "model.onnx.data").read_bytes()
    (source / "model.onnx.data").write_bytes(data[:-1])
    assert "which is not so" in refusal(source, tmp_path)
    (source / "model.onnx.data").unlink()
    assert "model.onnx.data, which is missing" in refusal(source, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes | None) -> None:
    source = edited(tmp_path, "onnx_optimum_llama")
    file = source / "model.onnx"
    file.write_bytes(file.read_bytes()[:-5000] if content is None else content)
    said = refusal(source, tmp_path)
    assert "is not an ONNX model" in said or "holds no nodes" in said


def test_a_missing_weight(tmp_path: Path) -> None:
    def drop(model: Any) -> None:
        node = next(n for n in model.graph.node if n.name == "/model/layers.1/mlp/up_proj/MatMul")
        model.graph.node.remove(node)

    assert "lacks model.layers.1.mlp.up_proj.weight" in refusal(edited(tmp_path, "onnx_genai_llama", drop), tmp_path)


def test_weights_in_a_form_that_is_not_read(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        for node in model.graph.node:
            if "proj" in node.name and node.op_type == "MatMul":
                node.op_type = "MatMulInteger"

    said = refusal(edited(tmp_path, "onnx_optimum_llama", change), tmp_path)
    assert "holds weights as MatMulInteger, which is not supported" in said


def test_a_config_of_another_model(tmp_path: Path) -> None:
    source = edited(tmp_path, "onnx_optimum_llama")
    config = config_of(source)
    for changes, sentence in (
        ({"intermediate_size": 128}, "mlp.gate_proj.weight has the shape [64, 32] and its config asks for [128, 32]"),
        ({"model_type": "unheard_of"}, "is of the model_type 'unheard_of', of which mlx-lm makes no model"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2."),
    ):
        (source / "config.json").write_text(json.dumps(config | changes))
        assert sentence in refusal(source, tmp_path)


def test_configs_that_cannot_be_told(tmp_path: Path) -> None:
    source = edited(tmp_path, "onnx_genai_llama")
    file = source / "genai_config.json"
    genai = json.loads(file.read_text())
    file.write_text(json.dumps(genai | {"model": genai["model"] | {"type": "whisper"}}))
    assert "names the type 'whisper', whose config cannot be told from it" in refusal(source, tmp_path)
    file.write_text('{"model": {}}')
    assert "genai_config.json is not a decoder's" in refusal(source, tmp_path)
    file.unlink()
    assert "has neither a config.json nor a genai_config.json" in refusal(source, tmp_path)


def test_a_rotation_that_is_more_than_frequencies(tmp_path: Path) -> None:
    """As of models with a long context, whose cosines are scaled."""
    source = edited(tmp_path, "onnx_genai_llama")
    model = onnx.load(str(source / "model.onnx"))
    for tensor in model.graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            values = 1.2 * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    onnx.save(model, str(source / "model.onnx"))
    assert "does not say how positions are rotated" in refusal(source, tmp_path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = edited(tmp_path, "onnx_optimum_llama")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "is not installed; install mlx-specdec[onnx]" in refusal(source, tmp_path)


def test_other_weights_come_first(tmp_path: Path) -> None:
    """A repository with ONNX beside its safetensors is read from these."""
    source = edited(tmp_path, "onnx_optimum_llama")
    convert(str(source), tmp_path / "whole")
    (tmp_path / "whole" / "model.onnx").write_bytes(b"not read")
    convert(str(tmp_path / "whole"), tmp_path / "result")
    assert same_logits(source, tmp_path / "result")


def test_unused_outputs_stay_out(tmp_path: Path) -> None:
    """A tied head that an exporter wrote a second time is not kept."""
    convert(str(GOLDEN / "onnx_optimum_qwen2"), tmp_path / "result")
    model: nn.Module = load_model(tmp_path / "result")[0]
    assert "lm_head" not in model
    assert "lm_head.weight" not in tensors_of(tmp_path / "result")
