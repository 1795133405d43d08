"""What `load` takes for what, and what it says when it cannot."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config

import mlx_specdec  # noqa: F401  (before mlx.core, for the BLAS)
from mlx_specdec import checkpoints
from mlx_specdec.checkpoints.gguf_config import model_config
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.errors import CheckpointError, OptionError

from .tiny_gguf import TinyGGUF, dense_model, logits


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def gguf(tmp_path) -> Path:
    TinyGGUF(types={"attn": Type.Q4_1, "token_embd": Type.Q8_0}).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def write_folder(folder: Path, *, bits: int | None = None) -> nn.Module:
    """A folder in mlx-lm's format, made from a tiny model and the tokenizer of a GGUF file."""
    folder.mkdir()
    spec = TinyGGUF()
    held = spec.write(folder / "source.gguf")
    file = GGUFFile(folder / "source.gguf")
    config, model = model_config(file), dense_model(spec, held)
    if bits:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    save_config(config, folder / "config.json")
    _, tokenizer = checkpoints.load(folder / "source.gguf")
    tokenizer.save_pretrained(folder)
    (folder / "source.gguf").unlink()
    return model


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file_and_a_folder_need_no_network(tmp_path, gguf):
    checkpoints.load(str(gguf))
    write_folder(tmp_path / "folder")
    model, tokenizer = checkpoints.load(tmp_path / "folder")
    assert tokenizer.decode(tokenizer.encode("hello <|im_end|>")) == "hello <|im_end|>"
    assert not model.training
    for tokenizer_file in (tmp_path / "folder").glob("*token*"):
        tokenizer_file.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        checkpoints.load(tmp_path / "folder")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_makes_a_model_dense_and_casts_it(tmp_path, gguf, dtype):
    write_folder(tmp_path / "folder", bits=4)
    for source in (gguf, tmp_path / "folder"):
        model, _ = checkpoints.load(source, dtype=dtype)
        assert {value.dtype for _, value in tree_flatten(model.parameters())} == {getattr(mx, dtype)}
        assert not any(isinstance(module, nn.QuantizedLinear) for module in model.modules())


def test_a_quantised_folder_made_dense_computes_the_same(tmp_path):
    quantised = write_folder(tmp_path / "folder", bits=4)
    dense, _ = checkpoints.load(tmp_path / "folder", dtype="float32")
    np.testing.assert_allclose(logits(dense), logits(quantised), atol=1e-4, rtol=1e-4)
    kept, _ = checkpoints.load(tmp_path / "folder")
    assert isinstance(kept.layers[0].self_attn.q_proj, nn.QuantizedLinear)


def test_weights_are_rounded_once(gguf):
    """float16 scales times float16 codes would round twice; the dense weight is the nearest to the exact one."""
    exact = checkpoints.load(gguf, dtype="float32")[0].model.embed_tokens.weight
    half = checkpoints.load(gguf, dtype="float16")[0].model.embed_tokens.weight
    assert mx.array_equal(half, exact.astype(mx.float16))


def test_options_reach_the_model_and_the_tokenizer(gguf):
    model, tokenizer = checkpoints.load(
        gguf, model_config={"rope_theta": 500.0}, tokenizer_config={"chat_template": "other"}, lazy=True
    )
    assert model.args.rope_theta == 500.0
    assert tokenizer.chat_template == "other"


def test_a_name_of_the_catalogue_is_fetched_but_a_file_of_that_name_comes_first(tmp_path, gguf, monkeypatch):
    monkeypatch.setattr(checkpoints, "fetch", lambda entry, progress: gguf)
    monkeypatch.chdir(tmp_path)
    assert checkpoints.load("smollm2-135m")[0].args.hidden_size == 64
    write_folder(tmp_path / "smollm2-135m")
    monkeypatch.setattr(checkpoints, "fetch", None)
    assert checkpoints.load("smollm2-135m")[0].args.hidden_size == 64


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "source", ["missing.gguf", "./missing", "../missing", "/missing", "~/missing", "", Path("missing")]
)
def test_a_path_that_does_not_exist_is_not_looked_up(source):
    with pytest.raises(CheckpointError, match=r"does not exist; give a \.gguf file.*smollm2-135m"):
        checkpoints.load(source)


def test_a_hub_id_that_cannot_be_had_is_one_sentence(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"^owner/name cannot be fetched \(no route to host\); check the name"):
        checkpoints.load("owner/name")


def break_folder(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    match how:
        case "empty":
            for file in folder.iterdir():
                file.unlink()
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "config is not JSON":
            (folder / "config.json").write_text("{")
        case "unknown model":
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "klingon"}))
        case "no model type":
            del config["model_type"]
            (folder / "config.json").write_text(json.dumps(config))
        case "a layer too many":
            (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
        case "weights cut":
            whole = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        case "a shard is missing" | "a shard elsewhere":
            name = "../model.safetensors" if how == "a shard elsewhere" else "model-2.safetensors"
            index = {"weight_map": {"a": "model.safetensors", "b": name}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        case "a drafter":
            (folder / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
        case "code of its own":
            (folder / "config.json").write_text(json.dumps(config | {"model_file": "evil.py"}))
            (folder / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")


BROKEN = {
    "empty": "has no config.json",
    "no weights": "holds no .safetensors file",
    "config is not JSON": "is not JSON",
    "unknown model": "klingon not supported",
    "no model type": "cannot be loaded",
    "a layer too many": "Missing",
    "weights cut": "cannot be loaded",
    "a shard is missing": "names model-2.safetensors, which is missing",
    "a shard elsewhere": "names the file '../model.safetensors', which is not in its folder",
    "code of its own": "evil.py",
    "a drafter": r"is a drafter \(eagle3\) and not a model; give it with --drafter",
}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_one_sentence(tmp_path, how):
    write_folder(tmp_path / "folder")
    break_folder(tmp_path / "folder", how)
    with pytest.raises(CheckpointError, match=BROKEN[how]) as caught:
        checkpoints.load(tmp_path / "folder")
    assert "\n" not in str(caught.value)


def test_other_refusals(tmp_path, gguf):
    with pytest.raises(OptionError, match="dtype is 'float8'; choose one of float32, float16, bfloat16"):
        checkpoints.load(gguf, dtype="float8")
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"is a file but not a \.gguf one"):
        checkpoints.load(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        checkpoints.load(gguf, adapter_path=tmp_path / "nowhere")


def test_importing_the_room_imports_neither_mlx_lm_nor_mlx():
    code = (
        "import sys, mlx_specdec.checkpoints; print(sorted({'mlx_lm', 'mlx.core', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
