"""A drafter's files: found in every form, and refused with a sentence that says which tensor and what was expected."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.folder import Folder, fill
from mlx_specdec.errors import CheckpointError
from tests.checkpoints.torch_files import save


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 32, bias=False)
        self.norm = nn.RMSNorm(32)


def arrays() -> dict[str, np.ndarray]:
    return {
        "fc.weight": np.arange(2048, dtype=np.float32).reshape(32, 64) / 1000,
        "norm.weight": np.ones(32, dtype=np.float32),
    }


def tensors() -> dict[str, mx.array]:
    return {name: mx.array(x) for name, x in arrays().items()}


def folder(path: Path, config: dict[str, Any] | None = None) -> Folder:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    return Folder(path)


def filled(path: Path, given: dict[str, mx.array], config: dict[str, Any] | None = None) -> Network:
    network = Network()
    fill(network, given, folder(path, config))
    return network


# --- where tensors are


def holds(found: Folder) -> bool:
    read = found.tensors()
    return read.keys() == arrays().keys() and all(mx.array_equal(read[k], mx.array(v)) for k, v in arrays().items())


def index(path: Path, name: str, places: Any) -> None:
    (path / name).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_safetensors(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "anything.safetensors"), tensors())
    assert holds(folder(tmp_path))


def test_shards_of_safetensors(tmp_path: Path) -> None:
    for number, (name, x) in enumerate(tensors().items()):
        mx.save_safetensors(str(tmp_path / f"{number}.safetensors"), {name: x})
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"other": mx.ones(3)})
    index(tmp_path, "model.safetensors.index.json", {n: f"{i}.safetensors" for i, n in enumerate(arrays())})
    assert holds(folder(tmp_path)), "and not what the index leaves out"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickled(name: str, tmp_path: Path) -> None:
    save(tmp_path / name, arrays())
    save(tmp_path / "training_args.bin", {"other": np.ones(3, dtype=np.float32)})
    save(tmp_path / "optimizer.pt", {"other": np.ones(3, dtype=np.float32)})
    assert holds(folder(tmp_path))


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_of_pickled_files(with_index: bool, tmp_path: Path) -> None:
    places = {}
    for number, (name, x) in enumerate(arrays().items()):
        places[name] = f"pytorch_model-0000{number + 1}-of-00002.bin"
        save(tmp_path / places[name], {name: x})
    if with_index:
        index(tmp_path, "pytorch_model.bin.index.json", places)
    assert holds(folder(tmp_path))


def test_safetensors_come_before_pickled_files(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors())
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing that can be read")
    index(tmp_path, "pytorch_model.bin.index.json", {"fc.weight": "nowhere.bin"})
    assert holds(folder(tmp_path))


def test_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file and no pytorch_model.bin"):
        folder(tmp_path).tensors()


@pytest.mark.parametrize("length", [0, 5, 60, 500])
def test_a_truncated_file(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), tensors())
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read: .* fetch it again"):
        folder(tmp_path).tensors()


PLACES = ["../model.safetensors", "/etc/passwd", "..", ".", "", "sub/model.safetensors", "sub/../../x.safetensors"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_names_files_elsewhere(name: str, place: str, tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors())
    inner = folder(tmp_path / "inner")
    index(tmp_path / "inner", name, {"fc.weight": place})
    with pytest.raises(CheckpointError, match="which is not in its folder; do not use it"):
        inner.tensors()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_a_missing_shard(name: str, tmp_path: Path) -> None:
    index(tmp_path, name, {"fc.weight": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002.safetensors, which is missing; fetch"):
        folder(tmp_path).tensors()


@pytest.mark.parametrize("said", ["", "[", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_none(said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(said)
    with pytest.raises(CheckpointError, match="is not an index of shards"):
        folder(tmp_path).tensors()


@pytest.mark.parametrize(
    ("said", "why"), [("", "is not JSON"), ("[]", "is not a JSON object"), ("[" * 100_000, "JSON")]
)
def test_a_config_that_is_none(said: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(CheckpointError, match=why):
        Folder(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json that can be read; give the folder"):
        Folder(tmp_path)


# --- whether they fit


def test_a_network_is_filled(tmp_path: Path) -> None:
    network = filled(tmp_path, tensors())
    assert mx.array_equal(network.fc.weight, tensors()["fc.weight"])
    assert not network.training


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    given = {"norm.weight": tensors()["norm.weight"]}
    with pytest.raises(CheckpointError, match=r"lacks fc.weight; is it whole"):
        filled(tmp_path, given)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has the unknown tensor layers.0.extra; is it whole"):
        filled(tmp_path, tensors() | {"layers.0.extra": mx.ones(3)})


def test_many_are_counted(tmp_path: Path) -> None:
    extra = {f"extra.{i}": mx.ones(3) for i in range(100)}
    with pytest.raises(CheckpointError, match=r"extra.0, .* and 92 more; is it"):
        filled(tmp_path, tensors() | extra)


def test_a_wrong_shape_is_said_with_both(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fc.weight has the shape \[64, 32\] and its config asks for \[32, 64\]"):
        filled(tmp_path, tensors() | {"fc.weight": tensors()["fc.weight"].T})


@pytest.mark.parametrize("value", [mx.nan, mx.inf, -mx.inf])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_what_is_no_number_is_refused(value: float, dtype: mx.Dtype, tmp_path: Path) -> None:
    broken = tensors()
    broken["fc.weight"][3, 5] = value
    with pytest.raises(CheckpointError, match=r"fc.weight holds NaN or infinite values; fetch"):
        filled(tmp_path, {name: x.astype(dtype) for name, x in broken.items()})


def test_a_matrix_of_zeros_was_never_trained(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"fc.weight is all zero: the head was never trained; leave it out"):
        filled(tmp_path, tensors() | {"fc.weight": mx.zeros((32, 64))})


def test_a_vector_of_zeros_may_be_meant(tmp_path: Path) -> None:
    filled(tmp_path, tensors() | {"norm.weight": mx.zeros(32)})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("settings", ["quantization", "quantization_config"])
def test_quantised_modules(bits: int, settings: str, tmp_path: Path) -> None:
    dense = filled(tmp_path, tensors())
    expected = dense.fc(mx.ones((1, 64)))
    nn.quantize(dense, group_size=32, bits=bits)
    given = dict(tree_flatten(dense.parameters()))
    network = filled(tmp_path, given, {settings: {"group_size": 32, "bits": bits}})
    assert isinstance(network.fc, nn.QuantizedLinear)
    assert mx.array_equal(network.fc(mx.ones((1, 64))), dense.fc(mx.ones((1, 64))))
    assert mx.allclose(network.fc(mx.ones((1, 64))), expected, rtol=0.05)


def test_settings_of_one_module_come_first(tmp_path: Path) -> None:
    dense = filled(tmp_path, tensors())
    nn.quantize(dense, group_size=64, bits=8)
    config = {"quantization": {"group_size": 32, "bits": 4, "fc": {"group_size": 64, "bits": 8}}}
    assert filled(tmp_path, dict(tree_flatten(dense.parameters())), config).fc.bits == 8


def test_quantised_in_another_way_than_the_config_says(tmp_path: Path) -> None:
    dense = filled(tmp_path, tensors())
    nn.quantize(dense, group_size=32, bits=8)
    given = dict(tree_flatten(dense.parameters()))
    with pytest.raises(CheckpointError, match=r"fc.weight has the shape \[32, 16\] and its config asks for \[32, 8\]"):
        filled(tmp_path, given, {"quantization": {"group_size": 32, "bits": 4}})
    with pytest.raises(CheckpointError, match=r"has the unknown tensor fc.biases, fc.scales"):
        filled(tmp_path, given)
