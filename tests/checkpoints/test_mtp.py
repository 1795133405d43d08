"""MTP heads in all the places and forms that checkpoints have them in, and what is said of those that cannot be used.

That the numbers are right is tested with the drafter; here every form must give the very network that the published one
gives.
"""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints.drafter import kind_of, read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.mtp import read_heads
from mlx_specdec.checkpoints.mtp_layout import trunk_classes
from mlx_specdec.features import FeatureRequest
from mlx_specdec.networks.mtp import MtpConfig, MtpNetwork
from mlx_specdec.target.model import Target
from tests import zoo

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = (
    "mtp_qwen3_5",
    "mtp_qwen3_5_moe",
    "mtp_qwen3_next",
    "mtp_glm4_moe",
    "mtp_glm4_moe_three",
    "mtp_glm4_moe_lite",
    "mtp_deepseek_v3",
    "mtp_mimo",
)
Tensors = dict[str, mx.array]


@cache
def model_of(name: str) -> nn.Module:
    return load_model(GOLDEN / name, get_model_classes=trunk_classes)[0]


def config_of(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def tensors_of(name: str) -> Tensors:
    return mx.load(str(GOLDEN / name / "model.safetensors"))  # type: ignore[return-value]


def parted(name: str) -> tuple[Tensors, Tensors]:
    """A published file's trunk and heads."""
    layers = len(model_of(name).layers)
    mark = re.compile(rf"mtp|layers\.({'|'.join(str(layers + j) for j in range(3))})\.")
    tensors = tensors_of(name)
    heads = {key: value for key, value in tensors.items() if mark.search(key)}
    return {key: value for key, value in tensors.items() if key not in heads}, heads


def written(path: Path, config: dict[str, Any], **files: Tensors) -> Folder:
    """A folder of these files, `__` in a name standing for a slash."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        file = path / f"{name.replace('__', '/')}.safetensors"
        file.parent.mkdir(exist_ok=True)
        mx.save_safetensors(str(file), tensors)
    return Folder(path)


def weights(network: nn.Module | None) -> Tensors:
    assert network is not None
    return dict(tree_flatten(network.parameters()))


@cache
def published(name: str) -> Tensors:
    return weights(read_heads(Folder(GOLDEN / name), model_of(name)))


def same(network: nn.Module | None, name: str) -> bool:
    ours, theirs = weights(network), published(name)
    return ours.keys() == theirs.keys() and all(mx.allclose(ours[k], theirs[k], atol=1e-6).item() for k in theirs)


def converted(name: str) -> Tensors:
    """The trunk as mlx-lm writes it."""
    return dict(tree_flatten(model_of(name).parameters()))


def qwen_names(name: str, shifted: bool = True) -> Tensors:
    """Qwen's head under mlx's names, experts stacked, with norms as mlx has them or as they were published."""
    outer = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
    head = {}
    for key, value in published(name).items():
        rest = key.removeprefix("heads.0.")
        module, _, kind = rest.rpartition(".")
        renamed = f"{outer[module]}.{kind}" if module in outer else rest.replace("block.", "layers.0.")
        head[f"mtp.{renamed}"] = value - (0 if shifted or not key.endswith("norm.weight") else 1)
    return head


@pytest.mark.parametrize("name", PUBLISHED)
def test_trunk_and_heads_part(name: str) -> None:
    """mlx-lm loads the trunk alone, strictly; the heads have all that the file holds beside it."""
    parameters = published(name)
    heads = len({key.split(".")[1] for key in parameters})
    assert heads == (3 if name.endswith("three") else 1)
    assert not any("mtp" in key or "eh_proj" in key for key in converted(name))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_a_prefix_from_a_conversion(tmp_path: Path, name: str, prefix: str) -> None:
    trunk, heads = parted(name)
    heads = {prefix + key.removeprefix("model."): value for key, value in heads.items()}
    assert same(read_heads(written(tmp_path, config_of(name), model=trunk | heads), model_of(name)), name)


SIDECARS: dict[str, tuple[str, dict[str, Any]]] = {
    "mtp.safetensors": ("mtp", {}),
    "mtp/weights.safetensors": ("mtp__weights", {}),
    "model-mtp.safetensors": ("model-mtp", {}),
    "named in the config": ("extra__heads", {"mlx_lm_extra_tensors": {"mtp_file": "extra/heads.safetensors"}}),
}


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("sidecar", SIDECARS)
def test_a_file_beside_the_shards(tmp_path: Path, sidecar: str, bare: bool) -> None:
    name, (file, more) = "mtp_qwen3_5", SIDECARS[sidecar]
    head = {key.removeprefix("mtp.") if bare else key: value for key, value in qwen_names(name).items()}
    folder = written(tmp_path, config_of(name) | more, **{"model": converted(name), file: head})
    assert same(read_heads(folder, model_of(name)), name)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("sidecar", SIDECARS)
def test_a_target_with_a_file_beside_the_shards_loads_and_drafts(tmp_path: Path, sidecar: str, bare: bool) -> None:
    """Also where every file is a link to another folder, as in the hub's cache."""
    name, (file, more) = "mtp_qwen3_5", SIDECARS[sidecar]
    head = {key.removeprefix("mtp.") if bare else key: value for key, value in qwen_names(name).items()}
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    written(blobs, config_of(name) | more, **{"model": converted(name), file: head})
    folder = tmp_path / "snapshot"
    for blob in (blob for blob in blobs.rglob("*") if blob.is_file()):
        link = folder / blob.relative_to(blobs)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    model, _ = load_model(folder, get_model_classes=trunk_classes)
    assert kind_of(Folder(folder)) is None
    assert same(read_heads(Folder(folder), model), name)


def test_a_file_beside_the_shards_comes_before_them(tmp_path: Path) -> None:
    """It was made for this checkpoint; one of each would mix two forms of norms."""
    name = "mtp_qwen3_5"
    stale = {key: mx.zeros_like(value) for key, value in parted(name)[1].items()}
    folder = written(tmp_path, config_of(name), model=parted(name)[0] | stale, mtp=qwen_names(name))
    assert same(read_heads(folder, model_of(name)), name)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("name", ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_qwen3_next"])
def test_norms_of_a_converted_checkpoint(tmp_path: Path, name: str, shifted: bool) -> None:
    """The trunk is in mlx's form; its head may have been left as it was published."""
    folder = written(tmp_path, config_of(name), model=converted(name) | qwen_names(name, shifted))
    assert same(read_heads(folder, model_of(name)), name)


@pytest.mark.parametrize("shifted", [True, False])
def test_norms_are_decided_together(tmp_path: Path, shifted: bool) -> None:
    """Two of the seven look like the other form, as trained ones may."""
    name = "mtp_qwen3_5"
    head = qwen_names(name, shifted)
    odd = ("mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight")
    head |= {key: head[key] + (-0.9 if shifted else 0.9) for key in odd}
    folder = written(tmp_path, config_of(name), model=converted(name) | head)
    ours, theirs = weights(read_heads(folder, model_of(name))), published(name)
    for key in theirs:
        moved = key in ("heads.0.norm.weight", "heads.0.hnorm.weight")
        by = (-0.9 if shifted else 0.9) if moved else 0
        assert mx.allclose(ours[key], theirs[key] + by, atol=1e-5)


def as_fused(head: Tensors) -> Tensors:
    """Experts as Qwen3.5 publishes them, whatever they were."""
    path = next(key for key in head if ".switch_mlp." in key).partition(".switch_mlp.")[0]
    gate, up, down = (head[f"{path}.switch_mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    others = {key: value for key, value in head.items() if ".switch_mlp." not in key}
    fused = {"gate_up_proj": mx.concatenate([gate, up], axis=1), "down_proj": down}
    return others | {f"{path}.experts.{kind}": value for kind, value in fused.items()}


def as_numbered(head: Tensors) -> Tensors:
    """Experts as Qwen3-Next publishes them."""
    numbered = {}
    for key, value in head.items():
        for number, one in enumerate(value) if ".switch_mlp." in key else [(None, value)]:
            numbered[key.replace(".switch_mlp.", f".experts.{number}.")] = one
    return numbered


@pytest.mark.parametrize("form", [as_fused, as_numbered, dict])
@pytest.mark.parametrize("name", ["mtp_qwen3_5_moe", "mtp_qwen3_next"])
def test_experts_fused_numbered_or_stacked(tmp_path: Path, name: str, form: Callable[[Tensors], Tensors]) -> None:
    folder = written(tmp_path, config_of(name), model=converted(name) | form(qwen_names(name)))
    assert same(read_heads(folder, model_of(name)), name)


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    name = "mtp_qwen3_5"
    head = {key.removeprefix("mtp."): value for key, value in qwen_names(name).items()}
    config = {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": config_of(name)["text_config"]}
    folder = written(tmp_path, config, model=head)
    assert kind_of(folder) == "mtp"
    network = read_network(folder, "mtp")
    assert same(network, name)
    assert network.config == MtpConfig(64, 1e-6, 4, 97)


def test_experts_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Which is not that of their names when there are more than ten."""
    model = zoo.build("qwen3_5_moe", num_experts=12)
    args = model.language_model.args
    network = MtpNetwork(MtpConfig(32, 1e-5), [type(model.layers[3])(args, 3)])
    stacked = "heads.0.block.mlp.switch_mlp.up_proj.weight"
    outer = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    head = {}
    for key, value in weights(network).items():
        module, _, kind = key.removeprefix("heads.0.").rpartition(".")
        head[f"mtp.{outer.get(module, module).replace('block.', 'layers.0.')}.{kind}"] = value
    found = weights(read_heads(written(tmp_path, {}, model=as_numbered(head)), model))
    assert mx.array_equal(found[stacked], weights(network)[stacked])


def test_a_target_that_is_listened_to(tmp_path: Path) -> None:
    name = "mtp_glm4_moe"
    target = Target(model_of(name))
    target.watch(FeatureRequest(tuple(range(4)), final=True))
    network = read_heads(Folder(GOLDEN / name), target.model)
    target.close()
    assert network is not None
    assert type(network.heads[0].block) is type(target.model.layers[0])
    assert same(network, name)


def nextn_names(name: str) -> Tensors:
    """A head of DeepSeek's or GLM's under mlx's names."""
    layers = len(model_of(name).layers)
    outer = {"norm": "shared_head.norm"}
    head = {}
    for key, value in published(name).items():
        module, _, kind = key.removeprefix("heads.0.").rpartition(".")
        head[f"model.layers.{layers}.{outer.get(module, module).removeprefix('block.')}.{kind}"] = value
    return head


@pytest.mark.parametrize("name", ["mtp_deepseek_v3", "mtp_glm4_moe_lite", "mtp_glm4_moe"])
def test_a_converted_head_without_copies_of_the_ends(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path, config_of(name), model=converted(name) | nextn_names(name))
    assert same(read_heads(folder, model_of(name)), name)


def test_a_head_among_the_numbers_of_the_trunk(tmp_path: Path) -> None:
    """Under a prefix of its own, numbered from 0."""
    name = "mtp_glm4_moe"
    head = {key.replace("model.layers.4.", "mtp.layers.0."): value for key, value in nextn_names(name).items()}
    folder = written(tmp_path, config_of(name), model=converted(name) | head)
    assert same(read_heads(folder, model_of(name)), name)
    load_model(tmp_path, get_model_classes=trunk_classes)


def test_fp8_is_made_dense_as_the_trunk_is(tmp_path: Path) -> None:
    name = "mtp_deepseek_v3"
    tensors = tensors_of(name)
    for kind in ("self_attn.kv_b_proj", "self_attn.o_proj", "mlp.experts.3.up_proj"):
        key = f"model.layers.2.{kind}.weight"
        tensors |= {key: mx.to_fp8(tensors[key] * 64), f"{key}_scale_inv": mx.array([[1 / 64]])}
    ours = weights(read_heads(written(tmp_path, config_of(name), model=tensors), model_of(name)))
    for key, value in published(name).items():
        assert mx.allclose(ours[key].astype(mx.float32), value, rtol=0.07, atol=1e-3), key


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["mtp_qwen3_5", "mtp_qwen3_5_moe", "mtp_glm4_moe"])
def test_quantised_heads(tmp_path: Path, name: str, bits: int) -> None:
    """The shapes say how; a config may speak of the trunk only, or name the head's modules."""
    names = qwen_names if "qwen" in name else nextn_names
    head: Tensors = {}
    for key, value in names(name).items():
        if value.ndim > 1 and value.shape[-1] % 32 == 0 and ".gate." not in key:
            module = key.removesuffix("weight")
            packed = mx.quantize(value, 32, bits)
            head |= dict(zip((f"{module}{kind}" for kind in ("weight", "scales", "biases")), packed, strict=True))
        else:
            head[key] = value
    quantization = {"group_size": 64, "bits": 6, "mtp.fc": {"group_size": 32, "bits": bits}}
    folder = written(tmp_path, config_of(name) | {"quantization": quantization}, model=converted(name), mtp=head)
    network = read_heads(folder, model_of(name))
    assert network is not None
    layer = network.heads[0]
    assert (layer.eh_proj.bits, layer.eh_proj.group_size) == (bits, 32)
    dense = mx.dequantize(layer.eh_proj.weight, layer.eh_proj.scales, layer.eh_proj.biases, 32, bits)
    assert mx.allclose(dense, published(name)["heads.0.eh_proj.weight"], atol=0.3 if bits == 4 else 0.02)
    rows = mx.random.normal((3, layer.norm.weight.shape[0]), key=mx.random.key(0))
    post, _ = network(rows, rows, network.make_cache()[0], 0)
    assert mx.isfinite(post).all()


def test_a_quantised_latent_projection_is_split(tmp_path: Path) -> None:
    """DeepSeek's kv_b_proj in 8 bits, as conversions before mlx-lm split it have it."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    model = zoo.build("deepseek_v3", **sizes)
    last = len(model.layers) - 1
    network = MtpNetwork(MtpConfig(32, 1e-5, 3, 64), [type(model.layers[last])(model.args, last)])
    tensors = weights(network)
    tensors["heads.0.block.mlp.gate.weight"] = mx.ones((4, 32))
    wk, wv = (tensors.pop(f"heads.0.block.self_attn.{kind}.weight") for kind in ("embed_q", "unembed_out"))
    joined = mx.concatenate([wk.swapaxes(-1, -2), wv], axis=1).reshape(-1, 32)
    names = {"block.": "", "norm.weight": "shared_head.norm.weight"}
    head = {}
    for key, value in tensors.items():
        rest = key.removeprefix("heads.0.")
        head[f"model.layers.3.{names.get(rest, rest.replace('block.', ''))}"] = value
    packed = zip(("weight", "scales", "biases"), mx.quantize(joined, 32, 8), strict=True)
    head |= {f"model.layers.3.self_attn.kv_b_proj.{kind}": value for kind, value in packed}
    found = read_heads(written(tmp_path, {"num_nextn_predict_layers": 1}, model=head), model)
    assert found is not None
    split = found.heads[0].block.self_attn.embed_q
    assert mx.allclose(mx.dequantize(split.weight, split.scales, split.biases, 32, 8), wk, atol=0.01)


def test_the_heads_keep_their_dtype(tmp_path: Path) -> None:
    name = "mtp_mimo"
    tensors = {key: value.astype(mx.bfloat16) for key, value in tensors_of(name).items()}
    network = read_heads(written(tmp_path, config_of(name), model=tensors), model_of(name))
    assert {value.dtype for value in weights(network).values()} == {mx.bfloat16}
    post, _ = network(mx.ones((2, 32)), mx.ones((2, 32)), network.make_cache()[0], 0)  # type: ignore[misc]
    assert post.dtype == mx.bfloat16


def test_a_target_without_heads(tmp_path: Path) -> None:
    name = "mtp_glm4_moe"
    config = config_of(name) | {"num_nextn_predict_layers": 0}
    assert read_heads(written(tmp_path / "glm", config, model=parted(name)[0]), model_of(name)) is None
    llama = zoo.build("llama")
    assert read_heads(written(tmp_path / "llama", {}, model=dict(tree_flatten(llama.parameters()))), llama) is None


def refusal(folder: Folder, name: str = "mtp_qwen3_5", model: nn.Module | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        read_heads(folder, model or model_of(name))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_declared_heads_that_a_conversion_dropped(tmp_path: Path) -> None:
    said = refusal(written(tmp_path, config_of("mtp_qwen3_5"), model=converted("mtp_qwen3_5")))
    assert "declares 1 MTP head(s) and its files hold none" in said
    assert "mtp.safetensors" in said


SPOILT: dict[str, tuple[Callable[[mx.array], mx.array | None], str]] = {
    "nan": (lambda x: x * mx.nan, r"eh_proj\.weight holds NaN"),
    "zero": (mx.zeros_like, r"eh_proj\.weight is all zero"),
    "wrong shape": (lambda x: x[:, :64], r"eh_proj\.weight has the shape \[64, 64\].*asks for \[64, 128\]"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_tensor_is_named(tmp_path: Path, how: str) -> None:
    spoil, sentence = SPOILT[how]
    tensors = tensors_of("mtp_qwen3_5")
    tensors["mtp.fc.weight"] = spoil(tensors["mtp.fc.weight"])  # type: ignore[assignment]
    assert re.search(sentence, refusal(written(tmp_path, config_of("mtp_qwen3_5"), model=tensors)))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tensors_of("mtp_qwen3_5")
    del tensors["mtp.layers.0.self_attn.k_norm.weight"]
    assert "lacks heads.0.block.self_attn.k_norm.weight" in refusal(
        written(tmp_path, config_of("mtp_qwen3_5"), model=tensors)
    )


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    name = "mtp_deepseek_v3"
    tensors = tensors_of(name)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    assert "experts.7.up_proj.weight" in refusal(written(tmp_path, config_of(name), model=tensors), name)


def test_other_families_and_embeddings(tmp_path: Path) -> None:
    llama = zoo.build("llama")
    config = {"num_nextn_predict_layers": 1}
    said = refusal(written(tmp_path / "llama", config, model={"x": mx.zeros(1)}), model=llama)
    assert "those of llama are not supported" in said
    config = config_of("mtp_qwen3_5")
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    said = refusal(written(tmp_path / "qwen", config, model=tensors_of("mtp_qwen3_5")))
    assert "an embedding of their own" in said
    dense = zoo.build("qwen3_5")
    said = refusal(written(tmp_path / "moe", {}, model=tensors_of("mtp_qwen3_5_moe")), model=dense)
    assert "with experts and its target has no layer of that kind" in said


def test_files_that_a_config_names_wrongly(tmp_path: Path) -> None:
    config, trunk = config_of("mtp_qwen3_5"), {"model": converted("mtp_qwen3_5")}
    for number, (file, sentence) in enumerate(
        {"heads.safetensors": "which is missing", "../heads.safetensors": "not in its folder"}.items()
    ):
        named = config | {"mlx_lm_extra_tensors": {"mtp_file": file}}
        assert sentence in refusal(written(tmp_path / str(number), named, **trunk))
    folder = written(tmp_path / "damaged", config, **trunk)
    (folder.path / "mtp.safetensors").write_bytes(b"no tensors here")
    assert "mtp.safetensors cannot be read" in refusal(folder)


def test_a_folder_of_its_own_that_describes_no_target(tmp_path: Path) -> None:
    for number, config in enumerate(({"model_type": "unheard_of_mtp"}, {"model_type": "glm4_moe_mtp"})):
        with pytest.raises(CheckpointError, match="does not describe the target"):
            read_network(written(tmp_path / str(number), config, model={"fc.weight": mx.ones((2, 2))}), "mtp")
    config = {"model_type": "qwen3_5_mtp", "text_config": config_of("mtp_qwen3_5")["text_config"]}
    config["text_config"]["mtp_num_hidden_layers"] = 0
    with pytest.raises(CheckpointError, match="holds no tensor of an MTP head"):
        read_network(written(tmp_path / "empty", config, model={"other": mx.ones((2, 2))}), "mtp")


def test_heads_quantised_in_another_way(tmp_path: Path) -> None:
    head = qwen_names("mtp_qwen3_5")
    head |= {"mtp.fc.weight": mx.zeros((64, 5), dtype=mx.uint32), "mtp.fc.scales": mx.ones((64, 4), dtype=mx.uint8)}
    said = refusal(written(tmp_path, config_of("mtp_qwen3_5"), model=converted("mtp_qwen3_5"), mtp=head))
    assert "quantised in another way than mlx-lm's" in said
