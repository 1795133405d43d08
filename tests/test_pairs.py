"""A drafter that is named: found, told from its files, compared with its target before its weights are read, and
never replaced by another."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from mlx_specdec import CheckpointError, PairingError, SpecDecError, SpecDecoder, checkpoints, load
from mlx_specdec.checkpoints import hub
from mlx_specdec.checkpoints.gguf import load_gguf
from mlx_specdec.checkpoints.gguf_file import GGUFFile
from mlx_specdec.pairs import load_drafter
from tests import hub_cache, zoo
from tests.checkpoints.gguf_drafters import assistant, eagle, flash
from tests.checkpoints.test_gguf_mtp import with_heads as gguf_with_heads
from tests.checkpoints.tiny_gguf import TinyGGUF
from tests.hub_cache import LETTERS, LLAMA, PAIRS, copied, llama, medusa_heads, qwen3, repository, toml, with_heads
from tests.scripted import plain

PROMPT, TOKENS = [5, 9, 14, 7, 22, 9, 14, 7], 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no catalogue of the user's."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "hub"


def pair(target: Path, drafter: str, **options: Any) -> tuple[nn.Module, Any, Any]:
    model, tokenizer = load(str(target))
    brought = load_drafter(drafter, target=str(target), model=model, tokenizer=tokenizer, **options)
    return model, tokenizer, brought


def refusal(target: Path, drafter: str, **options: Any) -> str:
    """The sentence for a pair that is none, if loading says it or the decoder."""
    model, tokenizer = load(str(target))
    with pytest.raises(SpecDecError) as caught:
        SpecDecoder(model, tokenizer, load_drafter(
            drafter, target=str(target), model=model, tokenizer=tokenizer, **options
        ))  # fmt: skip
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder: Path, **values: Any) -> Path:
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | values))
    return folder


# Every kind


@pytest.mark.parametrize("place", ["folder", "hub"])
@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "eagle3 by its authors"])
def test_every_kind_is_told_from_its_files(kind: str, place: str, cache: Path, tmp_path: Path) -> None:
    make, make_drafter, method, _ = PAIRS[kind]
    made = make_drafter(tmp_path / "drafter" if place == "folder" else repository(cache, "owner/name"))
    model, tokenizer, brought = pair(make(tmp_path / "target"), str(made) if place == "folder" else "owner/name")
    assert isinstance(brought, nn.Module) if kind == "draft_model" else brought.name == method
    with SpecDecoder(model, tokenizer, brought) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=2))
    assert [r.token for r in responses] == plain(model, PROMPT, TOKENS)[: len(responses)]
    assert responses[-1].stats.drafted > 0


def test_one_that_only_the_catalogue_knows(cache: Path, tmp_path: Path) -> None:
    """The authors' own EAGLE-3 files look like those of a small Llama."""
    copied("eagle3_safeailab_llama", repository(cache, "a/eagle"))
    (tmp_path / "mine.toml").write_text(toml({"tiny": LLAMA}, {"a/eagle": ("eagle3", "tiny")}))
    assert pair(llama(tmp_path / "target"), "a/eagle", models=tmp_path / "mine.toml")[2].name == "eagle3"


GGUF = {
    "eagle3": (llama, eagle),
    "dflash": (qwen3, flash),
    "gemma4_assistant": (PAIRS["gemma4_assistant"].target, assistant),
}


@pytest.mark.parametrize("kind", GGUF)
def test_a_drafter_in_a_gguf_file(kind: str, tmp_path: Path) -> None:
    make, write = GGUF[kind]
    path = write(tmp_path / "drafter.gguf")
    model, _, brought = pair(make(tmp_path / "target"), str(path))
    assert brought.name == kind
    with SpecDecoder(model, hub_cache.tokenizer(), brought) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=2))
    assert [r.token for r in responses] == plain(model, PROMPT, TOKENS)[: len(responses)]
    assert "hidden size is 64 and this target's is 32" in refusal(narrow(tmp_path / "narrow"), str(path))


def narrow(folder: Path) -> Path:
    """A target of another width."""
    folder.mkdir()
    model = zoo.build("llama", vocab=64, hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
    model.save_weights(str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(asdict(model.args)))
    hub_cache.tokenizer().save_pretrained(folder)
    return folder


def test_heads_in_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_with_heads(tmp_path / "target.gguf", "mtp_qwen3_5", "qwen35")
    model = load_gguf(GGUFFile(path))
    brought = load_drafter("mtp", target=str(path), model=model, tokenizer=hub_cache.tokenizer())
    assert brought.name == "mtp"
    with SpecDecoder(model, hub_cache.tokenizer(), brought) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=2))
    assert [r.token for r in responses] == plain(model, PROMPT, TOKENS)[: len(responses)]
    TinyGGUF().write(tmp_path / "without.gguf")
    with pytest.raises(PairingError, match="has no MTP heads in its checkpoint"):
        pair(tmp_path / "without.gguf", "mtp")


def without_weights(folder: Path) -> Path:
    """So that whatever is said is said before they are read."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


OTHER = {
    "eagle3": ("eagle3_speculators_variant", {"target_hidden_size": 96}, r"\(target_llama\) whose hidden size is 96"),
    "dflash, width": ("dflash_zlab_qwen3", {"hidden_size": 2560}, "hidden size is 2560 and this target's is 64"),
    "dflash, depth": ("dflash_zlab_qwen3", {"num_target_layers": 36}, "layers is 36 and this target's is 8"),
    "gemma4_assistant": ("gemma4_assistant_plain/assistant", {"backbone_hidden_size": 5376}, "hidden size is 5376 and"),
    "mtp, width": ("mtp_qwen3_5", {"model_type": "qwen3_5_mtp", "text_config": {"hidden_size": 96}}, "size is 96 and"),
    "mtp, depth": (
        "mtp_qwen3_5", {"model_type": "qwen3_5_mtp", "text_config": {"num_hidden_layers": 7}}, "layers is 7 and"
    ),
    "medusa": ("medusa", {"hidden_size": 5120}, r"\(target_llama\) whose hidden size is 5120 and this target's is 64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER)
def test_another_size_is_refused_with_both_values_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    golden, changes, said = OTHER[kind]
    folder = medusa_heads(tmp_path / "d") if golden == "medusa" else copied(golden, tmp_path / "d")
    edit(without_weights(folder), **changes)
    target = {"dflash": qwen3, "mtp, width": hub_cache.without_heads, "mtp, depth": hub_cache.without_heads}.get(
        kind, llama
    )
    with pytest.raises(PairingError, match=said):
        pair(target(tmp_path / "target"), str(folder))


@pytest.mark.parametrize(("kind", "vocab", "fits"), [
    ("dflash", 1184, True), ("dflash", 1185, False), ("dflash", 158, True), ("medusa", 129, True),
    ("medusa", 9000, False),
])  # fmt: skip
def test_padded_vocabularies_are_one(kind: str, vocab: int, fits: bool, tmp_path: Path) -> None:
    """Up to 1024 rows more or less, and no draft beyond what the target knows."""
    if kind == "dflash":
        target, folder = qwen3(tmp_path / "target"), copied("dflash_zlab_qwen3", tmp_path / "d", vocab_size=vocab)
    else:
        target, folder = llama(tmp_path / "target"), medusa_heads(tmp_path / "d", vocab=vocab)
    if not fits:
        have = 160 if kind == "dflash" else 128
        assert f"vocabulary is {vocab} and this target's is {have}" in refusal(target, str(folder))
        return
    model, tokenizer, brought = pair(target, str(folder))
    with SpecDecoder(model, tokenizer, brought) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=2))
    assert [r.token for r in responses] == plain(model, PROMPT, TOKENS)[: len(responses)]


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind not in ("draft_model", "eagle3 by its authors")])
def test_a_tokenizer_that_a_drafter_carries_is_compared_by_content(kind: str, tmp_path: Path) -> None:
    make, make_drafter, _, _ = PAIRS[kind]
    target, folder = make(tmp_path / "target"), make_drafter(tmp_path / "drafter")
    hub_cache.tokenizer(LETTERS).save_pretrained(folder)
    pair(target, str(folder))
    hub_cache.tokenizer(LETTERS + "äöü").save_pretrained(folder)  # which goes on further
    pair(target, str(folder))
    hub_cache.tokenizer(LETTERS[1:] + LETTERS[0]).save_pretrained(folder)
    said = refusal(target, str(without_weights(folder)))
    assert said.startswith("the drafter has another tokenizer: token 3 is 'a' in the target and 'b' in the drafter; ")
    (folder / "tokenizer.json").write_text("no tokenizer")
    assert "tokenizer.json cannot be read" in refusal(target, str(folder))


def test_a_broken_config_is_one_sentence_and_no_traceback(tmp_path: Path) -> None:
    target = llama(tmp_path / "target")
    no_sizes = {"transformer_layer_config": {"hidden_size": 64}}
    broken = ({"draft_vocab_size": "many"}, {"speculators_config": 3}, no_sizes, {"norm_before_fc": True})
    for number, changes in enumerate(broken):
        folder = copied("eagle3_speculators_variant", tmp_path / f"d{number}")
        assert str(folder) in refusal(target, str(edit(folder, **changes)))


@pytest.mark.parametrize(("target", "wanted", "warns"), [
    ("Qwen3-8B-Base-4bit", "Qwen/Qwen3-8B", True), ("Qwen3-8B-4bit", "Qwen/Qwen3-8B", False),
    ("Qwen3-8B-4bit", "/ckpt/final-3", False), ("mlx_model", "Qwen/Qwen3-8B", False),
    ("gemma-3-27b-it", "google/gemma-3-text-27b-it", False), ("Llama-3.1-8B", "meta-llama/Llama-3.3-70B", True),
])  # fmt: skip
def test_another_name_is_said_and_never_refused(
    target: str, wanted: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("eagle3_speculators_variant", tmp_path / "d")
    speculators = json.loads((folder / "config.json").read_text())["speculators_config"]
    speculators["verifier"]["name_or_path"] = wanted
    edit(folder, speculators_config=speculators)
    assert pair(llama(tmp_path / target), str(folder))[2].name == "eagle3"
    said = [record.getMessage() for record in caplog.records if record.name == "mlx_specdec.pairs"]
    sentence = f"the drafter {folder} says that it was made for {wanted}, and this is {tmp_path / target}"
    assert said == ([sentence] if warns else [])


# Names that are no drafter's


def test_what_cannot_be_found(cache: Path, tmp_path: Path) -> None:
    target = llama(tmp_path / "target")
    assert "'./nowhere' does not exist" in refusal(target, "./nowhere")
    assert refusal(target, "owner/nothing").startswith(
        "owner/nothing is not on this machine as a whole, and HF_HUB_OFFLINE"
    )
    assert refusal(target, "owner/nothing", offline=True).startswith(
        "owner/nothing is not on this machine as a whole, and --off"
    )
    assert "has no MTP heads in its checkpoint" in refusal(target, "mtp")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(target, str(tmp_path / "empty"))


def test_heads_inside_the_checkpoint(tmp_path: Path) -> None:
    assert pair(with_heads(tmp_path / "target"), "mtp", dtype="float32")[2].name == "mtp"
    assert load(str(tmp_path / "target"), drafter="mtp")[2].name == "mtp"


# Hub manners


class Hub:
    """Counts what it is asked for, and gives it from folders."""

    def __init__(self, cache: Path, **remote: Path):
        self.cache, self.remote = cache, {f"owner/{name}": folder for name, folder in remote.items()}
        self.asked: list[tuple[str, str | None, tuple[str, ...]]] = []

    def __call__(
        self, name: str, *, revision: str | None, allow_patterns: Sequence[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        self.asked.append((name, revision, tuple(allow_patterns)))
        folder = self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / hub_cache.REVISION
        if not folder.exists():
            repository(self.cache, name)
        for pattern in allow_patterns:
            for file in self.remote[name].glob(pattern):
                shutil.copy(file, folder)
        return str(folder)

    def files(self, name: str) -> set[str]:
        return {file.name for file in self.cache.glob(f"models--owner--{name}/snapshots/*/*")}


def online(monkeypatch: pytest.MonkeyPatch, cache: Path, **remote: Path) -> Hub:
    served = Hub(cache, **remote)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", served)
    return served


def test_only_what_is_needed_is_fetched(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = copied("eagle3_speculators_variant", tmp_path / "whole")
    pickled = copied("eagle3_speculators_variant", tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    for folder in (whole, pickled):
        for name in ("pytorch_model.bin", "optimizer.bin", "training.pt", "README.md", "modelling.py", "model.gguf"):
            (folder / name).write_bytes(b"no tensors")
    served = online(monkeypatch, cache, whole=whole, pickled=pickled)
    target = llama(tmp_path / "target")
    pair(target, "owner/whole", revision="v1")
    assert served.files("whole") == {"config.json", "model.safetensors"}
    assert {revision for _, revision, _ in served.asked} == {"v1"}
    assert "pytorch_model.bin" in refusal(target, "owner/pickled")  # it is read, and is no checkpoint
    assert served.files("pickled") == {"config.json", "pytorch_model.bin"}


def test_a_drafter_of_another_target_is_not_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copied("eagle3_speculators_variant", tmp_path / "other", target_hidden_size=96)
    served = online(monkeypatch, cache, other=other)
    assert "hidden size is 96 and this target's is 64" in refusal(llama(tmp_path / "target"), "owner/other")
    assert served.files("other") == {"config.json"}


def test_a_folder_that_exists_is_never_looked_up(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = online(monkeypatch, cache)
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "owner" / "target")
    copied("eagle3_speculators_variant", tmp_path / "owner" / "drafter")
    assert load("owner/target", drafter="owner/drafter")[2].name == "eagle3"
    assert served.asked == []


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind not in ("draft_model", "eagle3 by its authors")])
def test_a_drafter_given_as_the_model_is_answered_before_its_weights_are_fetched(
    kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PAIRS[kind].drafter(tmp_path / "drafter")
    served = online(monkeypatch, cache, drafter=folder)
    for name in ("owner/drafter", str(folder)):
        with pytest.raises(
            CheckpointError, match=rf"is a drafter \({PAIRS[kind].method}\) and not a model; give it with"
        ):
            load(name)
    assert served.files("drafter") == {"config.json"}


def test_a_catalogued_drafter_given_as_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = online(monkeypatch, cache)
    with pytest.raises(CheckpointError) as caught:
        load("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
    assert str(caught.value) == ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B is a drafter (eagle3) and not a model; give it "
                                 "with --drafter, and as the model the one it was made for, llama-3.1-8b")  # fmt: skip
    assert served.asked == []


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_fetched_for_those_who_trust_it(
    trusted: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama(tmp_path / "target")
    for name in ("modelling.py", "pytorch_model.bin", "README.md"):
        (folder / name).write_text("raise SystemExit")
    served = online(monkeypatch, cache, target=folder)
    checkpoints.load("owner/target", trust_remote_code=trusted)
    assert ("modelling.py" in served.files("target")) is trusted
    assert not served.files("target") & {"pytorch_model.bin", "README.md"}


@pytest.mark.parametrize(("named", "fetched"), [("heads/extra.safetensors", True), ("*", False), ("../x", False)])
def test_a_file_that_the_config_names_for_its_heads_is_fetched(
    named: str, fetched: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edit(llama(tmp_path / "target"), mlx_lm_extra_tensors={"mtp_file": named})
    served = online(monkeypatch, cache, target=folder)
    checkpoints.load("owner/target")
    wanted = {pattern for _, _, patterns in served.asked for pattern in patterns}
    assert (named in wanted) is fetched
    assert wanted - {named} == {"config.json", *checkpoints.MODEL_FILES}


class Answer:
    headers: dict[str, str] = {}  # noqa: RUF012
    request = None
    status_code = 404


@pytest.mark.parametrize(("error", "kind"), [
    (LocalEntryNotFoundError("no connection"), hub.Unreachable),
    (ConnectionError("no route\nto host"), hub.Unreachable),
    (TimeoutError("too slow"), hub.Unreachable),
    (HfHubHTTPError("no such repository", response=Answer()), CheckpointError),  # type: ignore[arg-type]
], ids=lambda value: getattr(value, "__name__", type(value).__name__))  # fmt: skip
def test_a_network_that_fails_is_told_from_a_repository_that_is_not_there(
    error: Exception, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(CheckpointError, match=r"^owner/name cannot be fetched \(.*\); check the name") as caught:
        hub.snapshot("owner/name", None, ("config.json",))
    assert caught.type is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["--offline", "HF_HUB_OFFLINE"])
def test_offline_and_a_name_of_the_catalogue(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "fetch", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    with pytest.raises(hub.Unreachable, match=f"smollm2-135m is not on this machine, and {how} is set"):
        load("smollm2-135m", offline=how == "--offline")


def test_unread_weights_stay_unread(tmp_path: Path) -> None:
    """A pair that fits is only refused by what its weights are."""
    folder = copied("eagle3_speculators_variant", tmp_path / "d")
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.save_safetensors(str(folder / "model.safetensors"), {n: x for n, x in tensors.items() if n != "fc.weight"})
    assert "lacks fc.weight" in refusal(llama(tmp_path / "target"), str(folder))
