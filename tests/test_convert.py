"""`convert`: the same tensors as mlx-lm's own conversion, heads and drafters kept, little memory."""

import mlx_specdec  # noqa: F401  # isort: skip

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert as mlx_lm_convert

from mlx_specdec import CheckpointError
from mlx_specdec.checkpoints import load
from mlx_specdec.checkpoints.conversion import convert
from mlx_specdec.checkpoints.conversion_options import Numbers
from mlx_specdec.checkpoints.conversion_source import fetched
from mlx_specdec.checkpoints.drafter import read_network
from mlx_specdec.checkpoints.folder import Folder
from mlx_specdec.checkpoints.mtp import read_heads
from tests import zoo
from tests.checkpoints import torch_files
from tests.checkpoints.test_medusa import arrays as medusa_arrays
from tests.checkpoints.test_medusa import as_in_vllm
from tests.checkpoints.tiny_gguf import TinyGGUF, logits

GOLDEN = Path(__file__).parent / "golden"
Tensors = dict[str, mx.array]


def checkpoint(
    folder: Path, model: nn.Module, *, shards: int = 2, config: dict[str, Any] | None = None, dtype: Any = None
) -> Path:
    """A Hugging Face folder of `model` with a tokenizer, in so many shards with an index."""
    folder.mkdir()
    args: Any = model.args
    tensors: Tensors = {n: x.astype(dtype or x.dtype) for n, x in tree_flatten(model.parameters())}  # type: ignore[misc]
    names, places = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in part})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(args) | (config or {})))
    zoo.tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 298}')
    return folder


def tensors_of(folder: Path, pattern: str = "model*.safetensors") -> Tensors:
    tensors: Tensors = {}
    for file in folder.glob(pattern):
        tensors |= mx.load(str(file))  # type: ignore[arg-type]
    return tensors


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same(ours: Tensors, theirs: Tensors) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and mx.array_equal(ours[name], theirs[name]).item() for name in theirs
    )


def refusal(source: Path | str, result: Path, error: type[Exception] = CheckpointError, **numbers: Any) -> str:
    with pytest.raises(error) as raised:
        convert(str(source), result, Numbers(**numbers))
    assert "\n" not in str(raised.value)
    assert not result.exists()
    assert not list(result.parent.glob(f".{result.name}*"))
    return str(raised.value)


FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "bfloat16": {"dtype": "bfloat16"},
    "4 bits": {"quantize": True},
    "8 bits in groups of 32": {"quantize": True, "q_bits": 8, "q_group_size": 32},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "mixed bits": {"quantize": True, "quant_predicate": "mixed_3_6", "q_group_size": 32},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_very_tensors_and_config_of_mlx_lm(tmp_path: Path, form: str) -> None:
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300, hidden_size=64, num_hidden_layers=8))
    convert(str(source), tmp_path / "ours", Numbers(**FORMS[form]))
    mlx_lm_convert(str(source), str(tmp_path / "theirs"), **FORMS[form])
    assert same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    theirs = config_of(tmp_path / "theirs")
    assert theirs.pop("eos_token_id") == 298  # out of generation_config.json, which goes along as it is
    assert config_of(tmp_path / "ours") == theirs


@pytest.mark.parametrize("form", ["as it is", "4 bits"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "gemma3_text", "deepseek_v3", "falcon_h1", "phi3", "qwen3_5"])
def test_other_architectures(tmp_path: Path, name: str, form: str) -> None:
    """Tied heads, stacked experts, projections that are split, precision that is kept."""
    model = zoo.build(name, vocab=300, hidden_size=64, moe_intermediate_size=64)
    source = checkpoint(tmp_path / "source", model, config={"torch_dtype": "float16"})
    options = FORMS[form] | ({"q_group_size": 32} if FORMS[form] else {})
    convert(str(source), tmp_path / "ours", Numbers(**options))
    mlx_lm_convert(str(source), str(tmp_path / "theirs"), **options)
    assert same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    theirs = config_of(tmp_path / "theirs")
    assert config_of(tmp_path / "ours") | {"eos_token_id": 298} == theirs


def ids(folder: Path) -> list[int]:
    model, tokenizer = mlx_lm.load(str(folder))
    return [r.token for r in mlx_lm.stream_generate(model, tokenizer, [5, 7, 9, 11], max_tokens=20)]


@pytest.mark.parametrize("tied", [True, False])
def test_mlx_lm_loads_it_and_generates_the_same(tmp_path: Path, tied: bool) -> None:
    model = zoo.build("llama", vocab=300, tie_word_embeddings=tied)
    source = checkpoint(tmp_path / "source", model)
    if tied:  # some checkpoints hold the head all the same
        extra = {"lm_head.weight": model.model.embed_tokens.weight}
        mx.save_safetensors(str(source / "model-head.safetensors"), extra)
        index = json.loads((source / "model.safetensors.index.json").read_text())
        index["weight_map"]["lm_head.weight"] = "model-head.safetensors"
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(str(source), tmp_path / "result")
    assert ids(tmp_path / "result") == ids(source)
    assert len(set(ids(source))) > 4
    assert ("lm_head.weight" in tensors_of(tmp_path / "result")) is not tied


def test_pytorch_files(tmp_path: Path) -> None:
    """The same folder, with .bin shards and without .safetensors."""
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300))
    pickled = shutil.copytree(source, tmp_path / "pickled", ignore=shutil.ignore_patterns("model*"))
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in source.glob("model*.safetensors"):
        arrays = {name: np.array(x) for name, x in mx.load(str(file)).items()}  # type: ignore[union-attr]
        torch_files.save(pickled / file.name.replace("model-", "pytorch_model-").replace("safetensors", "bin"), arrays)
    for name, file in index["weight_map"].items():
        index["weight_map"][name] = file.replace("model-", "pytorch_model-").replace("safetensors", "bin")
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    convert(str(source), tmp_path / "one")
    convert(str(pickled), tmp_path / "other")
    assert same(tensors_of(tmp_path / "one"), tensors_of(tmp_path / "other"))
    assert same(tensors_of(tmp_path / "one"), tensors_of(source))


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300))
    mx.save_safetensors(str(source / "model-old.safetensors"), {"model.norm.weight": mx.zeros(32)})
    mx.save_safetensors(str(source / "consolidated.safetensors"), {"norm.weight": mx.zeros(32)})
    convert(str(source), tmp_path / "result")
    assert tensors_of(tmp_path / "result")["model.norm.weight"].sum().item() != 0
    (source / "model.safetensors.index.json").unlink()
    (source / "model-old.safetensors").unlink()
    convert(str(source), tmp_path / "without_index")
    assert same(tensors_of(tmp_path / "result"), tensors_of(tmp_path / "without_index"))


def test_the_files_beside_the_weights(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300))
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "README.md").write_text("a card")
    (source / "LICENSE").write_text("a licence")
    (source / "tiktoken.model").write_text("a vocabulary")
    (source / "own.tiktoken").write_text("another one")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "optimizer.pt").write_bytes(b"a training state")
    convert(str(source), tmp_path / "result")
    assert {file.name for file in (tmp_path / "result").iterdir()} == {
        *("config.json", "model.safetensors.index.json", "generation_config.json", "LICENSE", "chat_template.jinja"),
        *("tiktoken.model", "own.tiktoken"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *(file.name for file in source.glob("*token*")),
    }
    assert load(tmp_path / "result")[1].encode("hello") == load(source)[1].encode("hello")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}')
    (source / "tokenization_own.py").write_text("raise SystemExit")
    convert(str(source), tmp_path / "with_tokenizer_code")
    assert (tmp_path / "with_tokenizer_code" / "tokenization_own.py").exists()


def test_quantised_anew_and_made_dense(tmp_path: Path) -> None:
    """8 bits to 4; what has the bits already is kept to the bit; -d leaves nothing packed."""
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300, hidden_size=64))
    eight, four = (Numbers(quantize=True, q_bits=bits) for bits in (8, 4))
    convert(str(source), tmp_path / "eight", eight)
    convert(str(tmp_path / "eight"), tmp_path / "eight_again", eight)
    assert same(tensors_of(tmp_path / "eight"), tensors_of(tmp_path / "eight_again"))
    assert config_of(tmp_path / "eight") == config_of(tmp_path / "eight_again")
    convert(str(tmp_path / "eight"), tmp_path / "four", four)
    assert config_of(tmp_path / "four")["quantization"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    model, _ = mlx_lm.load(str(tmp_path / "four"))
    assert model.layers[0].mlp.up_proj.bits == 4
    convert(str(tmp_path / "eight"), tmp_path / "dense", Numbers(dequantize=True))
    dense = tensors_of(tmp_path / "dense")
    assert dense.keys() == tensors_of(source).keys()
    assert {x.dtype for x in dense.values()} == {mx.float32}
    assert "quantization" not in config_of(tmp_path / "dense")
    assert all(mx.allclose(dense[n], x, atol=0.02) for n, x in tensors_of(source).items())


def test_another_mode_of_as_many_bits_is_kept(tmp_path: Path) -> None:
    """Experts published in mxfp4 lose nothing by -q, unless a mode is asked for."""
    source = checkpoint(tmp_path / "source", zoo.build("llama", vocab=300, hidden_size=64))
    convert(str(source), tmp_path / "mxfp4", Numbers(quantize=True, q_mode="mxfp4"))
    convert(str(tmp_path / "mxfp4"), tmp_path / "again", Numbers(quantize=True))
    assert same(tensors_of(tmp_path / "mxfp4"), tensors_of(tmp_path / "again"))
    convert(str(tmp_path / "mxfp4"), tmp_path / "mxfp8", Numbers(quantize=True, q_mode="mxfp8"))
    assert config_of(tmp_path / "mxfp8")["quantization"] == {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert mlx_lm.load(str(tmp_path / "mxfp8"))[0].layers[0].mlp.up_proj.mode == "mxfp8"


def test_a_gguf_file(tmp_path: Path) -> None:
    TinyGGUF().write(tmp_path / "tiny.gguf")
    convert(str(tmp_path / "tiny.gguf"), tmp_path / "result", Numbers(dtype="float32"))
    original, tokenizer = load(tmp_path / "tiny.gguf", dtype="float32")
    result, same_tokenizer = mlx_lm.load(str(tmp_path / "result"))
    np.testing.assert_allclose(logits(result), logits(original), atol=1e-6)
    assert same_tokenizer.encode("hello <|im_end|> 42") == tokenizer.encode("hello <|im_end|> 42")
    assert set(tokenizer.eos_token_ids) <= set(load(tmp_path / "result")[1].eos_token_ids)


# heads


def drafted(network: Any, hidden: int) -> mx.array:
    rows = mx.random.normal((3, hidden), key=mx.random.key(0))
    return network(rows, rows, network.make_cache()[0], 0)[0]


@pytest.mark.parametrize("name", sorted(p.name for p in GOLDEN.glob("mtp_*")))
def test_heads_go_along(tmp_path: Path, name: str) -> None:
    """The trunk loads strictly in mlx-lm, and the heads are those of the source."""
    source = GOLDEN / name
    convert(str(source), tmp_path / "dense")
    model, _ = mlx_lm.utils.load_model(tmp_path / "dense")
    heads, known = (read_heads(Folder(folder), model) for folder in (tmp_path / "dense", source))
    ours, theirs = (dict(tree_flatten(x.parameters())) for x in (heads, known))  # type: ignore[union-attr]
    assert same(ours, theirs)
    size = heads.config.hidden  # type: ignore[union-attr]

    convert(str(source), tmp_path / "packed", Numbers(quantize=True, q_bits=8, q_group_size=32))
    packed_model, _ = mlx_lm.utils.load_model(tmp_path / "packed")
    packed: Any = read_heads(Folder(tmp_path / "packed"), packed_model)
    assert len(packed.heads) == len(heads.heads)  # type: ignore[union-attr]
    assert not hasattr(packed.heads[0].eh_proj, "bits")
    settings = config_of(tmp_path / "packed")["quantization"]
    of_heads = {path: form for path, form in settings.items() if isinstance(form, dict)}
    stored = tensors_of(tmp_path / "packed", "mtp.safetensors")
    scaled = {key.removesuffix(".scales") for key in stored if key.endswith(".scales")}
    assert scaled
    assert scaled <= of_heads.keys()
    assert not any("norm" in path for path in scaled)
    assert mx.allclose(drafted(packed, size), drafted(heads, size), atol=0.15)


def test_heads_in_a_file_that_the_config_names(tmp_path: Path) -> None:
    """They are written to another one, so that the name must not go along."""
    source = shutil.copytree(GOLDEN / "mtp_qwen3_5", tmp_path / "source")
    tensors = tensors_of(source)
    mx.save_safetensors(str(source / "heads.safetensors"), {n: x for n, x in tensors.items() if "mtp." in n})
    mx.save_safetensors(str(source / "model.safetensors"), {n: x for n, x in tensors.items() if "mtp." not in n})
    edit(source / "config.json", lambda config: config | {"mlx_lm_extra_tensors": {"mtp_file": "heads.safetensors"}})
    convert(str(source), tmp_path / "result")
    model, _ = mlx_lm.utils.load_model(tmp_path / "result")
    heads, known = (read_heads(Folder(folder), model) for folder in (tmp_path / "result", source))
    assert same(*(dict(tree_flatten(x.parameters())) for x in (heads, known)))  # type: ignore[union-attr]
    assert "mlx_lm_extra_tensors" not in config_of(tmp_path / "result")


def test_a_file_of_heads_does_not_say_what_format_the_model_has(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN / "mtp_qwen3_5", tmp_path / "source")
    convert(str(source), tmp_path / "known")
    tensors = tensors_of(source)
    (source / "model.safetensors").unlink()
    mx.save_safetensors(str(source / "mtp.safetensors"), {n: x for n, x in tensors.items() if "mtp." in n})
    trunk = {n: np.array(x.astype(mx.float32)) for n, x in tensors.items() if "mtp." not in n}
    torch_files.save(source / "pytorch_model.bin", trunk)
    convert(str(source), tmp_path / "result")
    for pattern in ("model*.safetensors", "mtp.safetensors"):
        assert same(tensors_of(tmp_path / "result", pattern), tensors_of(tmp_path / "known", pattern))


def test_a_second_conversion_keeps_the_heads_as_they_are(tmp_path: Path) -> None:
    """Norms are not shifted twice, and packed heads stay packed."""
    numbers = Numbers(quantize=True, q_bits=8, q_group_size=32)
    convert(str(GOLDEN / "mtp_qwen3_5"), tmp_path / "once", numbers)
    convert(str(tmp_path / "once"), tmp_path / "twice", numbers)
    convert(str(tmp_path / "once"), tmp_path / "dense", Numbers(dequantize=True))
    assert same(tensors_of(tmp_path / "once", "mtp.safetensors"), tensors_of(tmp_path / "twice", "mtp.safetensors"))
    assert config_of(tmp_path / "once")["quantization"] == config_of(tmp_path / "twice")["quantization"]
    assert not any(name.endswith("scales") for name in tensors_of(tmp_path / "dense", "*.safetensors"))


def test_heads_that_a_config_declares_and_the_files_have_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "mtp_glm4_moe", source)
    tensors = tensors_of(source)
    mx.save_safetensors(str(source / "model.safetensors"), {n: x for n, x in tensors.items() if ".layers.4." not in n})
    with caplog.at_level("WARNING", logger="mlx_specdec"):
        convert(str(source), tmp_path / "result")
    assert "declares 1 MTP head(s) and holds none that can be used; converted without" in caplog.text
    assert not (tmp_path / "result" / "mtp.safetensors").exists()


def test_damaged_heads_are_not_converted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "mtp_qwen3_5", source)
    tensors = tensors_of(source)
    tensors["mtp.fc.weight"] *= mx.nan
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    assert "eh_proj.weight holds NaN" in refusal(source, tmp_path / "result")


# drafters

DRAFTERS = {
    "eagle3": "eagle3_safeailab_llama",
    "eagle3 of speculators": "eagle3_speculators_variant",
    "dflash": "dflash_zlab_qwen3",
    "gemma4_assistant": "gemma4_assistant_plain/assistant",
}


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    """A drafter whose config says what it is."""
    folder = shutil.copytree(GOLDEN / DRAFTERS["eagle3"], tmp_path / "eagle3")
    edit(folder / "config.json", lambda config: config | {"architectures": ["LlamaForCausalLMEagle3"]})
    return folder


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def parameters(folder: Path, kind: str) -> Tensors:
    network = read_network(Folder(folder), kind)
    for module in network.modules():
        if "scales" in module:
            module.weight = mx.dequantize(
                module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode
            )
    return {n: x for n, x in tree_flatten(network.parameters()) if not n.endswith((".scales", ".biases"))}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters_keep_their_layout(eagle3: Path, tmp_path: Path, drafter: str) -> None:
    kind = drafter.partition(" ")[0]
    source = eagle3 if drafter == "eagle3" else GOLDEN / DRAFTERS[drafter]
    convert(str(source), tmp_path / "dense")
    assert same(tensors_of(tmp_path / "dense"), tensors_of(source))
    assert config_of(tmp_path / "dense") == config_of(source)

    convert(str(source), tmp_path / "packed", Numbers(quantize=True, q_bits=8, q_group_size=32))
    packed = tensors_of(tmp_path / "packed")
    scaled = {name.removesuffix(".scales") for name in packed if name.endswith(".scales")}
    assert any("mlp" in name for name in scaled)
    assert any("self_attn" in name for name in scaled)
    assert not any("fc" in name or "norm" in name or "projection" in name for name in scaled)
    ours, theirs = parameters(tmp_path / "packed", kind), parameters(source, kind)
    assert ours.keys() == theirs.keys()
    assert all(mx.allclose(ours[name], x, atol=0.02 * mx.abs(x).max().item()) for name, x in theirs.items())

    convert(str(tmp_path / "packed"), tmp_path / "again", Numbers(dequantize=True))
    assert tensors_of(tmp_path / "again").keys() == tensors_of(source).keys()


def test_a_drafter_that_has_the_bits_asked_for_is_kept(eagle3: Path, tmp_path: Path) -> None:
    """Groups of another size are no reason to round again, unless they are asked for."""
    convert(str(eagle3), tmp_path / "once", Numbers(quantize=True, q_group_size=32))
    convert(str(tmp_path / "once"), tmp_path / "again", Numbers(quantize=True))
    assert any(name.endswith("scales") for name in tensors_of(tmp_path / "once"))
    assert same(tensors_of(tmp_path / "once"), tensors_of(tmp_path / "again"))
    assert config_of(tmp_path / "once") == config_of(tmp_path / "again")
    convert(str(tmp_path / "once"), tmp_path / "eight", Numbers(quantize=True, q_bits=8, q_group_size=32))
    assert config_of(tmp_path / "eight")["quantization"]["bits"] == 8
    assert not same(tensors_of(tmp_path / "once"), tensors_of(tmp_path / "eight"))
    read_network(Folder(tmp_path / "eight"), "eagle3")


def test_a_drafter_in_another_precision(eagle3: Path, tmp_path: Path) -> None:
    convert(str(eagle3), tmp_path / "half", Numbers(dtype="float16"))
    half, own = tensors_of(tmp_path / "half"), tensors_of(eagle3)
    assert all(
        half[n].dtype == (mx.float16 if mx.issubdtype(x.dtype, mx.floating) else x.dtype) for n, x in own.items()
    )


def test_mtp_heads_in_a_folder_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = config_of(GOLDEN / "mtp_qwen3_5")
    (source / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_5_mtp"}))
    heads = {n: x for n, x in tensors_of(GOLDEN / "mtp_qwen3_5").items() if "mtp." in n}
    mx.save_safetensors(str(source / "model.safetensors"), heads)
    convert(str(source), tmp_path / "dense")
    ours, theirs = (
        dict(tree_flatten(read_network(Folder(f), "mtp").parameters())) for f in (tmp_path / "dense", source)
    )
    assert same(ours, theirs)
    convert(str(source), tmp_path / "packed", Numbers(quantize=True, q_bits=8, q_group_size=32))
    network: Any = read_network(Folder(tmp_path / "packed"), "mtp")
    assert network.heads[0].block.self_attn.q_proj.bits == 8


@pytest.mark.parametrize("layout", ["authors", "vllm"])
def test_medusa_heads(tmp_path: Path, layout: str) -> None:
    """Out of a .pt file, which becomes a .safetensors with the same names."""
    made = medusa_arrays() if layout == "authors" else as_in_vllm(medusa_arrays())
    source = tmp_path / "source"
    source.mkdir()
    said = {"medusa_num_heads": 3, "hidden_size": 32, "vocab_size": 20}
    (source / "config.json").write_text(json.dumps(said))
    torch_files.save(source / ("medusa_lm_head.pt" if layout == "authors" else "pytorch_model.bin"), made)
    convert(str(source), tmp_path / "dense")
    assert same(tensors_of(tmp_path / "dense"), {name: mx.array(x) for name, x in made.items()})
    convert(str(source), tmp_path / "packed", Numbers(quantize=True, q_bits=8, q_group_size=32))
    ours, theirs = parameters(tmp_path / "packed", "medusa"), parameters(source, "medusa")
    assert all(mx.allclose(ours[name], x, atol=0.02) for name, x in theirs.items())
    assert any(name.endswith("scales") for name in tensors_of(tmp_path / "packed"))


# the Hub

REPOSITORIES = {
    "safetensors": ({"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "mtp.safetensors"}, ()),
    "pytorch": ({"pytorch_model.bin"}, ("*.safetensors",)),
    "pytorch with heads": ({"pytorch_model.bin", "mtp.safetensors"}, ("model*.safetensors", "consolidated*")),
    "onnx": ({"model.onnx"}, ("*.safetensors", "*.bin")),
}


@pytest.mark.parametrize("form", REPOSITORIES)
def test_of_a_repository_only_what_is_needed_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    weights, without = REPOSITORIES[form]
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    (remote / "onnx").mkdir(parents=True)
    small = {"config.json", "tokenizer.json", "tiktoken.model", "own.tiktoken", "LICENSE", "chat_template.jinja"}
    every = {
        *("model.onnx", "onnx/model.onnx", "onnx/model_fp16.onnx", "pytorch_model.bin", "consolidated.safetensors"),
        *("README.md", "modeling_own.py", "picture.png", "mtp.safetensors"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    }
    for name in small | every:
        (remote / name).write_text("")
    for pattern in without:
        for file in remote.glob(pattern):
            file.unlink()

    def download(name: str, *, revision: str, allow_patterns: list[str], **_: Any) -> str:
        assert (name, revision) == ("owner/model", "v1")
        for pattern in allow_patterns:
            for file in remote.glob(pattern):
                (cache / file.relative_to(remote)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, cache / file.relative_to(remote))
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetched("owner/model", "v1") == cache
    assert {str(file.relative_to(cache)) for file in cache.rglob("*") if file.is_file()} == small | weights


# memory

LARGEST = 1.5  # shards' worth


def mass(folder: Path) -> Path:
    """Some 40 MB of float32 in four shards."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 64}
    return checkpoint(folder, zoo.build("llama", vocab=2000, num_hidden_layers=10, **sizes), shards=4)


@pytest.mark.parametrize("form", ["as it is", "bfloat16", "4 bits"])
def test_memory_is_that_of_a_shard(tmp_path: Path, form: str) -> None:
    source = mass(tmp_path / "source")
    largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
    assert largest > 8e6
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(str(source), tmp_path / "result", Numbers(**FORMS[form]))
    assert mx.get_peak_memory() - before < LARGEST * largest
    assert mx.get_active_memory() - before < 1e5
