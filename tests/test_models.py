"""The catalogue, and the command that lists it and says which drafters fit a target."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Type
from huggingface_hub import constants

from mlx_specdec import CheckpointError
from mlx_specdec.__main__ import main
from mlx_specdec.checkpoints import catalogue as room
from mlx_specdec.checkpoints.catalogue import METHODS, plain_name, read_catalogue
from tests import hub_cache
from tests.checkpoints.tiny_gguf import TinyGGUF
from tests.hub_cache import LLAMA, QWEN3, copied, heads_alone, llama, qwen3, repository, toml, with_heads, without_heads


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache and no catalogue of the user's; the network must not be asked."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path / "wheels"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["models", *arguments])


# Names


@pytest.mark.parametrize(("name", "plain"), [
    ("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", "llama-3.1-8b"),
    ("Llama-3.1-8B-Instruct-Q4_K_M.gguf", "llama-3.1-8b"),
    ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m"),
    ("Qwen3.5-35B-A3B-UD-Q4_K_XL-00001-of-00003.gguf", "qwen3.5-35b-a3b"),
    ("Qwen3-30B-A3B-Instruct-2507-4bit-DWQ-053125", "qwen3-30b-a3b-2507"),
    ("Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b-thinking-2507"),
    ("QWEN/QWEN3-8B", "qwen3-8b"),
    ("qwen3-8b-mlx-8bit", "qwen3-8b"),
    ("Qwen3_8B_4bit/", "qwen3-8b"),
    ("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen3-8b"),
    ("RedHatAI/Qwen3-8B-quantized.w4a16", "qwen3-8b"),
    ("nvidia/Qwen3-8B-NVFP4", "qwen3-8b"),
    ("Qwen3-8B-AWQ", "qwen3-8b"),
    ("Qwen3-8B-GPTQ-Int4", "qwen3-8b"),
    ("Qwen3-4B-128K-GGUF", "qwen3-4b"),
    ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "qwen3-14b"),
    ("gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b"),
    ("google/gemma-4-E4B-it", "gemma-4-e4b"),
    ("gemma-4-31B-it-qat-4bit", "gemma-4-31b"),
    ("vicuna-7b-v1.3", "vicuna-7b-v1.3"),
    ("Llama-2-7b-chat-hf", "llama-2-7b"),
    ("Qwen3-8B-bf16", "qwen3-8b"),
    ("Qwen3-8B-IQ4_NL.gguf", "qwen3-8b"),
    ("4bit", ""),
    ("", ""),
])  # fmt: skip
def test_names_without_owner_quantisation_and_packaging(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(("name", "families"), [
    ("mlx-community/Qwen3-8B-4bit", ["qwen3-8b"]),
    ("meta-llama/Llama-3.1-8B-Instruct", ["llama-3.1-8b"]),
    ("lmstudio-community/gemma-3-text-27b-it-4bit", ["gemma-3-27b"]),
    ("Llama-4-Scout-17B-16E-Instruct", ["llama-4-scout"]),
    ("Qwen3-30B-A3B-Instruct-2507", ["qwen3-30b-a3b-instruct-2507"]),
    ("Qwen3-30B-A3B-Thinking-2507", []),
    ("Qwen3-80B", []),
])  # fmt: skip
def test_families_by_name(name: str, families: list[str]) -> None:
    assert read_catalogue().families([name], {})[0] == families


def test_families_by_the_config_of_a_folder_that_is_called_otherwise() -> None:
    known = read_catalogue()
    sizes = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36}
    assert known.families(["mlx_model"], sizes) == (["qwen3-8b"], "its sizes")
    assert known.families(["mlx_model"], sizes | {"hidden_size": 4095}) == ([], "its sizes")
    assert known.families(["x"], {"_name_or_path": "/ckpt/Llama-3.3-70B-Instruct"}) == (
        ["llama-3.3-70b"], "the name in its config",
    )  # fmt: skip
    assert known.families(["Qwen3-14B"], sizes | {"_name_or_path": "Qwen3-4B"}) == (["qwen3-14b"], "its name")
    nested = {"model_type": "qwen3_5", "text_config": {"hidden_size": 5120, "num_hidden_layers": 64}}
    assert known.families(["mlx_model"], nested)[0] == ["qwen3.5-27b", "qwen3.6-27b"]
    assert known.families(["mlx_model"], {})[0] == []


@pytest.mark.parametrize(("name", "like"), [
    ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"), ("Qwen3-8B-Base", "qwen3-8b"),
    ("mlx-community/Meta-Llama-3-8B-Instruct", "llama-3.1-8b"), ("/models/my-deepseek-7b-4bit/", "llama-3.1-8b"),
])  # fmt: skip
def test_sizes_do_not_overrule_a_name_that_says_another_model(name: str, like: str) -> None:
    known = read_catalogue()
    sizes = known.targets[like].config or {}
    assert known.families([name], sizes) == ([], "its name")
    assert known.families(["mlx_model"], sizes | {"_name_or_path": name}) == ([], "its name")
    for other in ("mlx_model", "llama", "my-model-7", "0123456789abcdef0123"):
        assert like in known.families([other], sizes)[0]


# What we ship


def test_the_catalogue_is_whole() -> None:
    known = read_catalogue()
    assert {drafter.method for drafter in known.drafters.values()} == set(METHODS)
    for drafter in known.drafters.values():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", drafter.name)
        assert drafter.seen.startswith("https://")
        assert not drafter.name.endswith("-GGUF")
    for family in known.targets.values():
        assert known.drafters_for([family.name])
        assert all(name == plain_name(name) for name in family.names if "*" not in name)
    own = {plain_name(name) for name, drafter in known.drafters.items() if drafter.method == "draft_model"}
    assert all(known.families([name], {})[0] == [] for name in own), "a draft model drafts for larger ones"


def test_reading_the_catalogue_imports_little() -> None:
    code = (
        "import sys; from mlx_specdec.checkpoints.catalogue import read_catalogue; read_catalogue()\n"
        "print(sorted(sys.modules.keys() & {'mlx.core', 'mlx_lm', 'transformers', 'huggingface_hub'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# A file of the user's own


def test_a_users_file_adds_to_ours_and_comes_first(home: Path) -> None:
    mine = home / "mine.toml"
    mine.write_text(toml({"tiny": LLAMA}, {"a/b": ("eagle3", "tiny"), "z-lab/Qwen3-8B-DFlash-b16": ("mtp", "qwen3-8b"),
                                           "~/heads/q": ("mtp", "qwen3-8b")}))  # fmt: skip
    known = read_catalogue(mine)
    assert list(known.drafters)[:3] == ["a/b", "z-lab/Qwen3-8B-DFlash-b16", "~/heads/q"]
    assert known.drafters["z-lab/Qwen3-8B-DFlash-b16"].method == "mtp"
    names = [drafter.name for drafter in known.drafters_for(["qwen3-8b"])]
    assert names[:3] == ["z-lab/Qwen3-8B-DFlash-b16", "~/heads/q", "RedHatAI/Qwen3-8B-speculator.dflash"]
    assert "smollm2-135m" in known.models


def test_the_place_of_a_users_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.user_file() == home / "config" / "mlx-specdec" / "models.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(room.sys, "platform", "linux")
    assert room.user_file() == Path.home() / ".config" / "mlx-specdec" / "models.toml"
    monkeypatch.setattr(room.sys, "platform", "darwin")
    assert room.user_file() == Path.home() / "Library" / "Application Support" / "mlx-specdec" / "models.toml"


ENTRY = '[drafters."a/b"]\nmethod = "dflash"\ntargets = ["qwen3-8b"]\nseen = "x"\n'
BAD = {
    "not TOML": ("[targets", "is not TOML"),
    "not UTF-8": (b'a = "\xff"', "is not TOML"),
    "another table": ("[drafter.x]\n", "has 'drafter' at its top; its tables are models, targets, drafters"),
    "no table": ("drafters = 3\n", "has 'drafters' at its top"),
    "an entry that is none": ('[drafters]\n"a/b" = 3\n', "entry 'a/b' that is 3"),
    "an unknown field": (ENTRY + "blocks = 3\n", "with the field 'blocks'; it may have method, targets, seen"),
    "a field too few": (ENTRY.replace('seen = "x"\n', ""), "entry 'a/b' without seen"),
    "another type": (ENTRY + 'block = "16"\n', "whose block is '16'; its type is a whole number"),
    "a truth for a number": (ENTRY + "block = true\n", "whose block is True; its type is a whole number"),
    "a text for a list": (ENTRY.replace('["qwen3-8b"]', '"qwen3-8b"'), "its type is a list of texts"),
    "an empty list": (ENTRY.replace('["qwen3-8b"]', "[]"), "whose targets is []"),
    "an unknown method": (ENTRY.replace("dflash", "magic"), "whose method is 'magic'; choose among dflash, eagle3"),
    "an unknown target": (ENTRY.replace("qwen3-8b", "qwen3-9b"), "for the target 'qwen3-9b', which is not a [targets]"),
    "no place": (ENTRY.replace("a/b", "ab"), "entry 'ab' that is neither a Hub id nor a folder's path"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_a_bad_file_is_refused_in_one_sentence(how: str, home: Path) -> None:
    content, reason = BAD[how]
    mine = home / "mine.toml"
    mine.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as caught:
        read_catalogue(mine)
    assert reason in str(caught.value)
    assert "mine.toml" in str(caught.value)
    done = run("--models", str(mine))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_not_there(home: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.toml cannot be read \(No such file or directory\)"):
        read_catalogue(home / "no.toml")


# The command without a target


def test_everything_is_listed(home: Path) -> None:
    done = run()
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "    smollm2-135m: SmolLM2 135M Instruct, Q4_1, Apache-2.0" in lines
    place = lines.index("  qwen3-8b")
    assert lines[place + 1] == "      z-lab/Qwen3-8B-DFlash-b16: dflash, block 16, MIT, trained without thinking"
    assert lines[place + 2] == "      RedHatAI/Qwen3-8B-speculator.dflash: dflash, license on its page"
    assert lines[-2:] == ["in the Hub's cache on this machine", "  nothing"]
    assert not any(line.lstrip().startswith("+") for line in lines)


def test_what_is_on_this_machine_is_marked(home: Path) -> None:
    copied("dflash_zlab_qwen3", repository(home / "hub", "z-lab/Qwen3-8B-DFlash-b16"))
    copied("eagle3_safeailab_llama", repository(home / "hub", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"))
    (repository(home / "hub", "z-lab/Qwen3-4B-DFlash-b16") / "config.json").write_text('{"dflash_config": {}}')
    qwen3(repository(home / "hub", "mlx-community/Qwen3-8B-4bit"))
    llama(repository(home / "hub", "someone/else"))
    heads_alone(repository(home / "hub", "someone/heads"))
    (repository(home / "hub", "someone/torn") / "config.json").write_text("{")
    refused = repository(home / "hub", "z-lab/Qwen3.8-27B-DFlash2")
    (refused / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    (repository(home / "hub", "someone/without-config") / "README.md").write_text("")
    lines = run().stdout.splitlines()
    assert [line for line in lines if line.startswith("    + ")] == [
        "    + z-lab/Qwen3-8B-DFlash-b16: dflash, block 16, MIT, trained without thinking",
        "    + yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: eagle3, license on its page",
    ]
    here = dict(line.strip().split(": ", 1) for line in lines[lines.index("in the Hub's cache on this machine") + 1 :])
    what = {name: re.sub(r"^[\d.]+ GB, ", "", said) for name, said in here.items()}
    torn, refused_kind = what.pop("someone/torn"), what.pop("z-lab/Qwen3.8-27B-DFlash2")
    assert what == {
        "mlx-community/Qwen3-8B-4bit": "a target: qwen3-8b",
        "someone/else": "a model that no drafter is known for",
        "someone/heads": "a drafter (mtp)",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "a drafter (eagle3) for llama-3.1-8b",
        "z-lab/Qwen3-4B-DFlash-b16": "a drafter (dflash) for qwen3-4b",
        "z-lab/Qwen3-8B-DFlash-b16": "a drafter (dflash) for qwen3-8b",
    }
    assert "is not JSON" in torn
    assert "is a DFlash 2 drafter, which is not supported" in refused_kind
    found = json.loads(run("--json").stdout)
    assert found.keys() == {"models", "targets", "drafters", "cached"}
    assert [d["name"] for d in found["drafters"] if d["here"]] == [
        "z-lab/Qwen3-8B-DFlash-b16", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ]  # fmt: skip
    assert found["models"][0]["here"] is False
    assert {c["name"]: c["kind"] for c in found["cached"]}["someone/heads"] == "mtp"


# The command for a target


def sentences(*arguments: str) -> tuple[str, list[str], list[str]]:
    """The head line, what fits, and what does not."""
    done = run(*arguments)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    lines = done.stdout.splitlines()
    cut = lines.index("do not fit:") if "do not fit:" in lines else len(lines)
    return lines[0], lines[2:cut], lines[cut + 1 :]


def test_which_drafters_fit_and_why_others_do_not(home: Path) -> None:
    hub, mine, target = home / "hub", home / "mine.toml", llama(home / "any")
    entries: dict[str, tuple[str, str]] = {}

    def add(name: str, golden: str, letters: str | None = None, method: str = "eagle3", **config: Any) -> None:
        copied(golden, repository(hub, name), letters, **config)
        entries[name] = (method, "tiny")

    add("a/fits", "eagle3_speculators_variant", hub_cache.LETTERS)
    add("a/wide", "eagle3_safeailab_llama", hidden_size=4096)
    add("a/vocab", "eagle3_safeailab_llama", vocab_size=151936)
    add("a/stranger", "eagle3_safeailab_llama", hub_cache.LETTERS[::-1])
    add("a/deep", "dflash_zlab_qwen3", method="dflash", num_target_layers=36)
    add("a/padded", "dflash_zlab_qwen3", method="dflash", vocab_size=1152)
    add("a/model", "target_llama", hub_cache.LETTERS, method="draft_model")
    add("a/foreign", "target_llama", hub_cache.LETTERS[1:] + "a", method="draft_model")
    entries["a/away"] = ("dflash", "tiny")
    mine.write_text(toml({"tiny": LLAMA}, entries))
    heads_alone(repository(hub, "b/heads"))  # in the catalogue for nothing
    head, fit, others = sentences(str(target), "--models", str(mine))
    assert head == f"{target}: tiny, known by its sizes; hidden size 64; 8 layers; 128 tokens"
    assert fit == [
        "  + a/fits: eagle3, license on its page",
        "  + a/padded: dflash, license on its page",
        "  + a/model: draft_model, license on its page",
        "    a/away: dflash, license on its page",
    ]
    other = "was made for a target whose"
    assert others == [
        f"    a/wide: the drafter eagle3 {other} hidden size is 4096 and this target's is 64",
        f"    a/vocab: the drafter eagle3 {other} vocabulary is 151936 and this target's is 128",
        "    a/stranger: the drafter has another tokenizer: token 3 is 'a' in the target and ',' in the drafter",
        f"    a/deep: the drafter dflash {other} number of layers is 36 and this target's is 8",
        "    a/foreign: the draft model has another tokenizer: token 3 is 'a' in the target and 'b' in the draft model",
        f"    b/heads: the drafter mtp {other} number of layers is 4 and this target's is 8",
    ]
    found = json.loads(run(str(target), "--models", str(mine), "--json").stdout)
    assert found["sizes"] == {"hidden": 64, "layers": 8, "vocab": 128}
    assert (found["families"], found["known_by"], found["path"]) == (["tiny"], "its sizes", str(target))
    assert {d["name"]: (d["here"], d["fits"]) for d in found["drafters"]}["a/away"] == (False, True)
    assert [d["wrong"] for d in found["drafters"] if d["name"] == "a/fits"] == [None]


def test_only_configs_are_read(home: Path) -> None:
    target = qwen3(repository(home / "hub", "owner/Qwen3-8B-4bit"))
    copied("dflash_zlab_qwen3", repository(home / "hub", "z-lab/Qwen3-8B-DFlash-b16"))
    for file in home.rglob("*.safetensors"):
        length = int.from_bytes(file.read_bytes()[:8], "little")
        file.write_bytes(file.read_bytes()[: 8 + length])  # names and shapes, and not one weight
    for name in ("owner/Qwen3-8B-4bit", str(target)):
        head, fit, _ = sentences(name)
        assert head == f"{name}: qwen3-8b, known by its name; hidden size 64; 8 layers; 160 tokens"
        assert fit[0] == "  + z-lab/Qwen3-8B-DFlash-b16: dflash, block 16, MIT, trained without thinking"


def test_a_target_that_is_not_on_this_machine(home: Path) -> None:
    head, fit, others = sentences("mlx-community/Qwen3-8B-4bit")
    assert head == "mlx-community/Qwen3-8B-4bit: qwen3-8b, known by its name; not on this machine"
    assert len(fit) == len(read_catalogue().drafters_for(["qwen3-8b"]))
    assert others == []
    done = run("owner/unheard-of")
    assert done.stdout.splitlines() == [
        "owner/unheard-of: not in the catalogue; not on this machine", "no drafter with weights is known to fit",
    ]  # fmt: skip


def test_heads_inside_the_checkpoint(home: Path) -> None:
    _, fit, others = sentences(str(with_heads(home / "with")))
    assert (fit, others) == (["  + mtp: the heads inside the checkpoint"], [])
    assert run(str(without_heads(home / "without"))).stdout.splitlines()[1:] == [
        "no drafter with weights is known to fit"
    ]
    dropped = without_heads(home / "dropped")
    (dropped / "config.json").write_text((home / "with" / "config.json").read_text())
    declared = ["    mtp: its config declares 1 MTP head(s), and its files hold none, as when a conversion drops them"]
    assert sentences(str(dropped))[2] == declared
    tensors = dict(mx.load(str(home / "with" / "model.safetensors")))
    mx.save_safetensors(str(dropped / "mtp.safetensors"), {n: x for n, x in tensors.items() if n.startswith("mtp.")})
    assert sentences(str(dropped))[1] == ["  + mtp: the heads inside the checkpoint"]
    other = copied("target_llama", home / "other", num_nextn_predict_layers=2)
    assert sentences(str(other))[2] == [
        "    mtp: its config declares 2 MTP head(s), and those of its family are not supported"
    ]
    odd = copied("target_llama", home / "odd", model_type="no-such-model", num_nextn_predict_layers=2)
    assert "no-such-model" in sentences(str(odd))[2][0]


def test_heads_in_a_file_that_the_config_names(home: Path) -> None:
    whole = dict(mx.load(str(with_heads(home / "with") / "model.safetensors")))
    target = without_heads(home / "without")
    mx.save_safetensors(str(target / "extra.safetensors"), {n: x for n, x in whole.items() if n.startswith("mtp.")})
    said = json.loads((target / "config.json").read_text())
    for name, wrong in (
        ("extra.safetensors", None),
        ("other.safetensors", "its config names the file 'other.safetensors' for its MTP heads, which is missing"),
        (
            "../with/model.safetensors",
            "its config names the file '../with/model.safetensors', which is not in its folder",
        ),
    ):
        (target / "config.json").write_text(json.dumps(said | {"mlx_lm_extra_tensors": {"mtp_file": name}}))
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
        lines = run(str(target)).stdout.splitlines()
        assert ("  + mtp: the heads inside the checkpoint" if wrong is None else f"    mtp: {wrong}") in lines


def test_a_gguf_file(home: Path) -> None:
    TinyGGUF(types={"attn": Type.Q4_1, "token_embd": Type.Q8_0}).write(home / "Qwen3-8B-Q4_K_M.gguf")
    llama(repository(home / "hub", "mlx-community/Qwen3-0.6B-4bit"))
    head, fit, others = sentences(str(home / "Qwen3-8B-Q4_K_M.gguf"))
    assert re.fullmatch(r".*\.gguf: qwen3-8b, known by its name; hidden size 64; \d layers; \d+ tokens", head)
    assert "    z-lab/Qwen3-8B-DFlash-b16: dflash, block 16, MIT, trained without thinking" in fit
    assert others[0].startswith("    mlx-community/Qwen3-0.6B-4bit: the draft model has another tokenizer: token ")


@pytest.mark.parametrize(("target", "says"), [
    ("./nowhere", "does not exist"),
    ("smollm2-135m", "smollm2-135m is not on this machine"),
    ("z-lab/Qwen3-8B-DFlash-b16", "is a drafter (dflash) and not a model; give it with --drafter, and as the model the "
                                  "one it was made for, qwen3-8b"),
    ("{dflash}", "is a drafter (dflash) and not a model"),
    ("{empty}", "has no config.json that can be read"),
])  # fmt: skip
def test_what_is_no_target(target: str, says: str, home: Path) -> None:
    (home / "empty").mkdir()
    folders = {"dflash": copied("dflash_zlab_qwen3", home / "dflash"), "empty": home / "empty"}
    done = run(target.format_map(folders))
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_sizes_of_a_catalogue_that_a_user_wrote(home: Path) -> None:
    mine = home / "mine.toml"
    mine.write_text(toml({"tiny": QWEN3}, {"a/b": ("dflash", "tiny")}))
    assert sentences(str(qwen3(home / "any")), "--models", str(mine))[0].startswith(f"{home / 'any'}: tiny, known by")


# What is odd


@pytest.mark.parametrize("config", [
    {"text_config": "x"}, {"text_config": ["x"]}, {"model_type": ["llama"], "architectures": 1}, {"model_type": "?"},
    {"speculators_config": [1], "draft_vocab_size": {}}, {"_name_or_path": [1]}, [], None,
], ids=str)  # fmt: skip
def test_one_odd_repository_does_not_hide_the_others(config: Any, home: Path) -> None:
    (repository(home / "hub", "a/odd") / "config.json").write_text(json.dumps(config))
    heads_alone(repository(home / "hub", "b/heads"))
    done = run()
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-2].startswith("  a/odd: ")
    assert lines[-1].endswith("a drafter (mtp)")
    assert "a/odd" in {each["name"] for each in json.loads(run("--json").stdout)["cached"]}
    assert "  + b/heads: mtp" in sentences(str(without_heads(home / "any")))[1]


def test_whatever_is_wrong_with_a_repository_is_in_its_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind_of(folder: Any) -> str:
        raise TypeError("no such thing")

    llama(repository(home / "hub", "a/odd"))
    monkeypatch.setattr("mlx_specdec.fits.kind_of", kind_of)
    assert run().stdout.splitlines()[-1].endswith(" GB, a/odd cannot be read (TypeError: no such thing)")


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.exception
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_cache_that_is_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "file"))
    assert f"the Hub's cache {home / 'file'} is not a folder that can be read; set HF_HUB_CACHE to one" in refused()


@pytest.mark.parametrize(("golden", "changes"), [
    ("target_llama", {"model_type": None}), ("target_llama", {"model_type": "cache"}),
    ("target_llama", {"model_type": ["llama"]}), ("target_llama", {"text_config": "x"}),
    ("mtp_qwen3_5", {"architectures": 1, "text_config": {"num_hidden_layers": "x"}}),
    ("eagle3_speculators_variant", {"speculators_config": [1]}),
], ids=str)  # fmt: skip
def test_a_config_that_cannot_be_is_one_sentence(golden: str, changes: dict[str, Any], home: Path) -> None:
    folder = copied(golden, home / "odd", **changes)
    if changes == {"model_type": None}:
        said = json.loads((folder / "config.json").read_text())
        del said["model_type"]
        (folder / "config.json").write_text(json.dumps(said))
    assert f"{folder} cannot be read (" in refused(str(folder))
