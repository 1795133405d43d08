"""A Hub cache on disk, made of tiny checkpoints: targets, and drafters of every kind for them."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden"
REVISION = "0123456789abcdef0123456789abcdef01234567"
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


def tokenizer(letters: str = LETTERS) -> PreTrainedTokenizerFast:
    """A token for each letter, and three others before them."""
    ids = {token: place for place, token in enumerate(["<s>", "<|endoftext|>", "</s>", *letters])}
    core = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<s>", "<|endoftext|>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def repository(root: Path, name: str, revision: str = REVISION) -> Path:
    """The folder of a new repository's only snapshot, as the hub lays out its cache."""
    top = root / f"models--{name.replace('/', '--')}"
    (top / "refs").mkdir(parents=True)
    (top / "refs" / "main").write_text(revision)
    (top / "snapshots" / revision).mkdir(parents=True)
    return top / "snapshots" / revision


def copied(golden: str, folder: Path, letters: str | None = None, **config: Any) -> Path:
    """A golden checkpoint in a folder, with other values in its config, and with a tokenizer of `letters`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (GOLDEN / golden).glob("*.safetensors"):
        shutil.copy(file, folder)
    said = json.loads((GOLDEN / golden / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    if letters is not None:
        tokenizer(letters).save_pretrained(folder)
    return folder


def with_heads(folder: Path) -> Path:
    """A target that holds its MTP heads."""
    return copied("mtp_qwen3_5", folder, LETTERS)


def without_heads(folder: Path) -> Path:
    """The same target as a conversion leaves it that drops them and says nothing of them."""
    copied("mtp_qwen3_5", folder, LETTERS)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.save_safetensors(str(folder / "model.safetensors"), {n: x for n, x in tensors.items() if "mtp" not in n})
    return folder


def heads_alone(folder: Path) -> Path:
    """Its heads in a repository of their own, as mlx-vlm splits them off."""
    copied("mtp_qwen3_5", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": config["text_config"]})
    )
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    heads = {name.removeprefix("mtp."): x for name, x in tensors.items() if name.startswith("mtp.")}
    for name, x in heads.items():  # as mlx has them
        if name.endswith("norm.weight"):
            heads[name] = x + 1
    mx.save_safetensors(str(folder / "model.safetensors"), heads)
    return folder


def medusa_heads(folder: Path, hidden: int = 64, vocab: int = 128) -> Path:
    """Two heads in the authors' layout, for target_llama."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = mx.random.split(mx.random.key(7), 4)
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = mx.random.normal((hidden, hidden), key=keys[2 * head]) * 0.1
        tensors[f"{head}.0.linear.bias"] = mx.zeros((hidden,))
        tensors[f"{head}.1.weight"] = mx.random.normal((vocab, hidden), key=keys[2 * head + 1]) * 0.1
    mx.save_safetensors(str(folder / "medusa_lm_head.safetensors"), tensors)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target_llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Pair(NamedTuple):
    """How a target and its drafter are made, what the catalogue calls the method, and the target's sizes there."""

    target: Callable[[Path], Path]
    drafter: Callable[[Path], Path]
    method: str
    config: dict[str, Any]


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8}
QWEN3 = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 8}
QWEN3_5 = {"model_type": ["qwen3_5", "qwen3_5_text"], "hidden_size": 64, "num_hidden_layers": 4}
GEMMA4 = {"model_type": ["gemma4", "gemma4_text"], "hidden_size": 64, "num_hidden_layers": 6}


def llama(folder: Path) -> Path:
    return copied("target_llama", folder, LETTERS)


def qwen3(folder: Path) -> Path:
    return copied("target_qwen3", folder, LETTERS)


PAIRS = {
    "eagle3": Pair(llama, lambda folder: copied("eagle3_speculators_variant", folder), "eagle3", LLAMA),
    # the authors' own files have nothing of EAGLE-3 in their config but a draft vocabulary
    "eagle3 by its authors": Pair(llama, lambda folder: copied("eagle3_safeailab_llama", folder), "eagle3", LLAMA),
    "dflash": Pair(qwen3, lambda folder: copied("dflash_zlab_qwen3", folder), "dflash", QWEN3),
    "mtp": Pair(without_heads, heads_alone, "mtp", QWEN3_5),
    "gemma4_assistant": Pair(
        lambda folder: copied("gemma4_assistant_plain/target", folder, LETTERS),
        lambda folder: copied("gemma4_assistant_plain/assistant", folder),
        "gemma4_assistant",
        GEMMA4,
    ),
    "medusa": Pair(llama, medusa_heads, "medusa", LLAMA),
    "draft_model": Pair(llama, llama, "draft_model", LLAMA),
}


def toml(targets: dict[str, dict[str, Any]], drafters: dict[str, tuple[str, str]]) -> str:
    """A catalogue: targets with their config, drafters with their method and target."""
    lines = []
    for name, config in targets.items():
        sizes = ", ".join(f"{field} = {json.dumps(value)}" for field, value in config.items())
        lines += [f"[targets.{json.dumps(name)}]", f"names = [{json.dumps(name)}]", f"config = {{ {sizes} }}"]
    for name, (method, target) in drafters.items():
        lines += [f"[drafters.{json.dumps(name)}]", f"method = {json.dumps(method)}",
                  f"targets = [{json.dumps(target)}]", 'seen = "here"']  # fmt: skip
    return "\n".join(lines) + "\n"
