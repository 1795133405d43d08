"""Where no drafter is named: what is chosen, what is said of it, and that the text is plain decoding's all the same."""

import mlx_specdec  # noqa: F401  # isort: skip

import json
import logging
import os
import random
import shutil
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from mlx_specdec import CheckpointError, OptionError, PairingError, SpecDecoder, load
from mlx_specdec.__main__ import main
from mlx_specdec.choice import choose
from mlx_specdec.target.model import CacheOptions
from tests import hub_cache, zoo
from tests.hub_cache import GOLDEN, LLAMA, PAIRS, QWEN3_5, copied, heads_alone, llama, repository, toml, with_heads
from tests.scripted import plain

PROMPT, TOKENS = [5, 9, 14, 7, 22, 9, 14, 7], 24
NOTHING = "drafter suffix: no drafter with weights is known for this model"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, a home without a catalogue, and a network that is not to be asked."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return root


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged of choices since it was last asked."""
    caplog.set_level(logging.INFO, logger="mlx_specdec")

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "mlx_specdec.choice"]
        caplog.clear()
        return found

    return messages


def catalogue(folder: Path, targets: dict[str, dict[str, Any]], drafters: dict[str, tuple[str, str]]) -> str:
    (folder / "mine.toml").write_text(toml(targets, drafters))
    return str(folder / "mine.toml")


def any_name(seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_letters + string.digits, k=12))


def drafts(model: nn.Module, tokenizer: Any, drafter: Any) -> tuple[list[int], Any]:
    """The ids with a drafter, and what was counted."""
    with SpecDecoder(model, tokenizer, drafter) as decoder:
        responses = list(decoder.stream(PROMPT, max_tokens=TOKENS, num_draft_tokens=3))
    return [r.token for r in responses], responses[-1].stats


def text_of_plain_decoding(model: nn.Module, tokenizer: Any) -> list[int]:
    ids = plain(model, PROMPT, TOKENS)
    ends = [place for place, token in enumerate(ids) if token in tokenizer.eos_token_ids]
    return ids[: ends[0] + 1] if ends else ids


def same_text(model: nn.Module, tokenizer: Any, drafter: Any) -> None:
    assert drafts(model, tokenizer, drafter)[0] == text_of_plain_decoding(model, tokenizer)


# What is chosen


@pytest.mark.parametrize("kind", PAIRS)
def test_a_published_drafter_on_this_machine(
    kind: str, cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    """Whatever the target's folder is called."""
    make, make_drafter, method, config = PAIRS[kind]
    make_drafter(repository(cache, "someone/a-drafter"))
    models = catalogue(tmp_path, {"tiny": config}, {"someone/a-drafter": (method, "tiny")})
    target = make(tmp_path / any_name(len(kind)))
    model, tokenizer, drafter = load(str(target), drafter="auto", models=models)
    assert said() == [f"drafter someone/a-drafter: the {method} drafter for tiny (known by its sizes), on this machine"]
    ids, stats = drafts(model, tokenizer, drafter)
    assert ids == text_of_plain_decoding(model, tokenizer)
    assert stats.drafter == method
    assert stats.drafted > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "draft_model"])
def test_a_drafter_in_a_folder_of_the_users_own(
    kind: str, cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    make, make_drafter, method, config = PAIRS[kind]
    folder = str(make_drafter(tmp_path / any_name(1)))
    models = catalogue(tmp_path, {"tiny": config}, {folder: (method, "tiny")})
    model, tokenizer, drafter = load(str(make(tmp_path / "tiny-4bit")), drafter="auto", models=models)
    assert said() == [f"drafter {folder}: the {method} drafter for tiny (known by its name), on this machine"]
    same_text(model, tokenizer, drafter)


def test_heads_inside_the_checkpoint_come_first(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    heads_alone(repository(cache, "someone/heads"))
    models = catalogue(tmp_path, {"tiny": QWEN3_5}, {"someone/heads": ("mtp", "tiny")})
    model, tokenizer, drafter = load(str(with_heads(tmp_path / "any")), drafter="auto", models=models)
    assert said() == ["drafter mtp: the heads inside the checkpoint"]
    ids, stats = drafts(model, tokenizer, drafter)
    assert (ids, stats.drafter) == (text_of_plain_decoding(model, tokenizer), "mtp")


def test_heads_that_a_conversion_dropped(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    target = hub_cache.without_heads(tmp_path / "any")
    shutil.copy(GOLDEN / "mtp_qwen3_5" / "config.json", target)  # which declares them
    heads_alone(repository(cache, "someone/heads"))
    models = catalogue(tmp_path, {"tiny": QWEN3_5}, {"someone/heads": ("mtp", "tiny")})
    model, tokenizer, drafter = load(str(target), drafter="auto", models=models)
    (sentence,) = said()
    assert sentence.startswith(
        "drafter someone/heads: the mtp drafter for tiny (known by its sizes), on this machine; mtp: "
    )
    assert "declares 1 MTP head(s) and its files hold none" in sentence
    same_text(model, tokenizer, drafter)


def test_the_first_in_the_catalogue_comes_first(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    copied("eagle3_speculators_variant", repository(cache, "a/eagle"))
    llama(repository(cache, "a/model"))
    entries = {"a/model": ("draft_model", "tiny"), "a/eagle": ("eagle3", "tiny")}
    for order in (list(entries), list(reversed(entries))):
        models = catalogue(tmp_path, {"tiny": LLAMA}, {name: entries[name] for name in order})
        load(str(llama(tmp_path / "any")), drafter="auto", models=models)
        assert said()[0].startswith(f"drafter {order[0]}: ")


def test_a_target_in_the_hubs_cache(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    llama(repository(cache, "mlx-community/Tiny-Instruct-4bit"))
    copied("eagle3_speculators_variant", repository(cache, "a/eagle"))
    models = catalogue(tmp_path, {"tiny": {"model_type": "other"}}, {"a/eagle": ("eagle3", "tiny")})
    model, tokenizer, drafter = load("mlx-community/Tiny-Instruct-4bit", drafter="auto", models=models)
    assert said() == ["drafter a/eagle: the eagle3 drafter for tiny (known by its name), on this machine"]
    same_text(model, tokenizer, drafter)
    snapshot = next(cache.glob("models--mlx-community*/snapshots/*"))  # given by its path
    load(str(snapshot), drafter="auto", models=models)
    assert "(known by its name)" in said()[0]


def test_nothing_is_known(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    model, tokenizer, drafter = load(str(llama(tmp_path / "any")), drafter="auto")
    assert (said(), drafter) == ([NOTHING], "suffix")
    same_text(model, tokenizer, drafter)


def test_a_model_that_cannot_be_rewound_decodes_plainly(cache: Path, said: Callable[[], list[str]]) -> None:
    model = zoo.build("baichuan_m1")
    choice = choose("baichuan", model, zoo.tokenizer())
    assert (choice.name, choice.drafter) == ("none", None)
    assert "cannot be rewound" in choice.why
    assert said() == [choice.why]


def test_without_drafter_nothing_is_chosen(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    assert len(load(str(with_heads(tmp_path / "any")))) == 2
    assert said() == []


# What goes wrong with a candidate


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def poisoned(folder: Path) -> None:
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors["fc.weight"] = mx.full(tensors["fc.weight"].shape, mx.nan)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            place = said["transformer_layer_config"] if name in said["transformer_layer_config"] else said
            place[name] = value
        (folder / "config.json").write_text(json.dumps(said))

    return change


def text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(content) and None


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard is missing": (no_weights, "names model-00002-of-00002.safetensors, which is missing"),
    "weights cut": (cut, "cannot be read"),
    "NaN": (poisoned, "fc.weight holds NaN"),
    "no JSON": (text("{"), "is not JSON"),
    "no object": (text("[1]"), "is not a JSON object"),
    "another hidden size": (config(hidden_size=32), "hidden size is 32 and this target's is 64"),
    "another size than its weights'": (config(vocab_size=9000), "its config asks for [9000, 64]"),
    "layers that are not there": (config(eagle_aux_hidden_state_layer_ids=[1, 3, 60]), "59"),
    "a number that is none": (config(num_attention_heads="four"), "num_attention_heads is 'four'"),
    "a table that is none": (config(speculators_config=[1]), "(AttributeError("),
    "a kind that is refused": (config(architectures=["DFlash2DraftModel"]), "DFlash 2 drafter, which is not supported"),
    "another tokenizer": (
        lambda folder: hub_cache.tokenizer(hub_cache.LETTERS[::-1]).save_pretrained(folder) and None,
        "the drafter has another tokenizer: token 3 is 'a' in the target and ',' in the drafter",
    ),
    "a tokenizer that is none": (
        lambda folder: (folder / "tokenizer.json").write_text("{}") and None, "tokenizer.json cannot be read"
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_candidate_is_passed_over_with_the_reason(
    how: str, cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    breaking, reason = BROKEN[how]
    breaking(copied("eagle3_speculators_variant", repository(cache, "a/broken")))
    llama(repository(cache, "a/whole"))
    target = str(llama(tmp_path / "any"))
    both = {"a/broken": ("eagle3", "tiny"), "a/whole": ("draft_model", "tiny")}
    for entries, first in ((both, "drafter a/whole: the draft_model drafter"), ({"a/broken": both["a/broken"]},
                           "drafter suffix: nothing else can be used")):  # fmt: skip
        models = catalogue(tmp_path, {"tiny": LLAMA}, entries)
        model, tokenizer, drafter = load(target, drafter="auto", models=models)
        (sentence,) = said()
        assert sentence.startswith(first)
        assert "; a/broken: " in sentence
        assert reason in sentence
        assert "\n" not in sentence
        same_text(model, tokenizer, drafter)


def test_a_broken_draft_model_and_one_with_another_tokenizer(
    cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    cut(llama(repository(cache, "a/cut")))
    copied("target_llama", repository(cache, "a/stranger"), hub_cache.LETTERS[::-1])
    models = catalogue(
        tmp_path, {"tiny": LLAMA}, {"a/cut": ("draft_model", "tiny"), "a/stranger": ("draft_model", "tiny")}
    )
    model, tokenizer, drafter = load(str(llama(tmp_path / "any")), drafter="auto", models=models)
    (sentence,) = said()
    assert drafter == "suffix"
    assert "a/cut cannot be loaded" in sentence
    assert "a/stranger: the draft model has another tokenizer: token 3 is 'a' in the target and ','" in sentence
    same_text(model, tokenizer, drafter)


def test_what_the_user_chose_is_never_passed_over(cache: Path, tmp_path: Path) -> None:
    other = copied("eagle3_speculators_variant", tmp_path / "other", target_hidden_size=32)
    target = str(llama(tmp_path / "any"))
    with pytest.raises(PairingError, match=r"\(target_llama\) whose hidden size is 32 and this target's is 64"):
        load(target, drafter=str(other))
    with pytest.raises(PairingError, match="has no MTP heads in its checkpoint"):
        load(target, drafter="mtp")
    (tmp_path / "mine.toml").write_text("[targets\n")
    with pytest.raises(CheckpointError, match=r"mine\.toml is not TOML"):
        load(target, drafter="auto", models=tmp_path / "mine.toml")
    model, tokenizer = load(target)
    with pytest.raises(OptionError, match="kv_bits is 4"):
        choose(target, model, tokenizer, cache=CacheOptions(kv_bits=4))


# The network


class Hub:
    """A Hub of folders, that counts what it is asked for."""

    def __init__(self, cache: Path, remote: dict[str, Path], error: Exception | None = None):
        self.cache, self.remote, self.error = cache, remote, error
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def __call__(self, name: str, *, allow_patterns: Sequence[str], local_files_only: bool, **_: Any) -> str:
        folder = self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / hub_cache.REVISION
        if not local_files_only:
            self.asked.append((name, tuple(allow_patterns)))
            if self.error is not None and not folder.exists():
                raise self.error
            if not folder.exists():
                repository(self.cache, name)
            for pattern in allow_patterns:
                for file in self.remote[name].glob(pattern):
                    shutil.copy(file, folder)
        if not folder.exists():
            raise LocalEntryNotFoundError("there is no such snapshot")
        return str(folder)


@pytest.fixture
def online(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub with an EAGLE-3 drafter, one beside it that is pickled as well, and a draft model."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    remote = {
        "a/eagle": copied("eagle3_speculators_variant", tmp_path / "remote" / "eagle"),
        "a/model": llama(tmp_path / "remote" / "model"),
    }
    (remote["a/eagle"] / "pytorch_model.bin").write_bytes(b"pickled")
    (remote["a/eagle"] / "modelling.py").write_text("raise SystemExit")
    hub = Hub(cache, remote)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    return hub


ENTRIES = {"a/eagle": ("eagle3", "tiny"), "a/model": ("draft_model", "tiny")}


def test_one_is_fetched_and_then_is_here(
    online: Hub, cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    target, models = str(llama(tmp_path / "tiny-4bit")), catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES)
    model, tokenizer, drafter = load(target, drafter="auto", models=models)
    assert said() == ["drafter a/eagle: the eagle3 drafter for tiny (known by its name), from the Hub"]
    same_text(model, tokenizer, drafter)
    assert {name for name, _ in online.asked} == {"a/eagle"}
    names = sorted(file.name for file in next(cache.glob("models--a--eagle/snapshots/*")).iterdir())
    assert names == ["config.json", "model.safetensors"]  # neither code nor the pickled copy
    online.asked.clear()
    load(target, drafter="auto", models=models)
    assert said() == ["drafter a/eagle: the eagle3 drafter for tiny (known by its name), on this machine"]
    assert online.asked == []


def test_what_is_here_comes_before_what_is_better_and_is_not(
    online: Hub, cache: Path, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    llama(repository(cache, "a/model"))
    load(str(llama(tmp_path / "tiny-4bit")), drafter="auto", models=catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES))
    assert said()[0].startswith("drafter a/model: ")
    assert online.asked == []


@pytest.mark.parametrize("how", ["offline", "HF_HUB_OFFLINE"])
def test_offline_never_asks(
    how: str, online: Hub, tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    models = catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES)
    model, tokenizer, drafter = load(
        str(llama(tmp_path / "tiny-4bit")), drafter="auto", models=models, offline=how == "offline"
    )
    assert said() == ["drafter suffix: nothing else can be used; a/eagle: is not on this machine; a/model: is not on "
                      "this machine"]  # fmt: skip
    assert online.asked == []
    same_text(model, tokenizer, drafter)
    with pytest.raises(CheckpointError, match=r"^a/eagle is not on this machine as a whole, and"):
        load(str(llama(tmp_path / "tiny-4bit")), drafter="a/eagle", models=models, offline=how == "offline")
    assert online.asked == []


@pytest.mark.parametrize("error", [
    LocalEntryNotFoundError("no connection"), TimeoutError("too slow"), ConnectionError("no route\nto host"),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_a_network_that_fails_is_asked_once_and_passed_over(
    error: Exception, online: Hub, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    online.error = error
    models = catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES)
    model, tokenizer, drafter = load(str(llama(tmp_path / "tiny-4bit")), drafter="auto", models=models)
    assert said()[0].startswith("drafter suffix: nothing else can be used; a/eagle: is not on this machine")
    assert [name for name, _ in online.asked] == ["a/eagle"]
    same_text(model, tokenizer, drafter)


def test_a_repository_that_is_gone_is_said_and_the_next_fetched(
    online: Hub, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    entries = {"a/gone?": ("eagle3", "tiny"), **ENTRIES}  # which is no name that the hub takes
    gone = LocalEntryNotFoundError("404")
    online.remote["a/gone?"] = tmp_path
    del online.remote["a/eagle"], entries["a/eagle"]
    from huggingface_hub.errors import HFValidationError

    def hub(name: str, **options: Any) -> str:
        if name == "a/gone?":
            raise HFValidationError("no such name") from gone
        return online(name, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", hub)
        load(str(llama(tmp_path / "tiny-4bit")), drafter="auto", models=catalogue(tmp_path, {"tiny": LLAMA}, entries))
    assert said()[0].startswith("drafter a/model: the draft_model drafter for tiny (known by its name), from the Hub; "
                                "a/gone?: a/gone? cannot be fetched (no such name)")  # fmt: skip


def test_sizes_alone_fetch_nothing(
    online: Hub, cache: Path, tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, models = str(llama(tmp_path / "any")), catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES)
    load(target, drafter="auto", models=models)
    here = "is not on this machine, and sizes alone fetch nothing"
    assert said() == [f"drafter suffix: nothing else can be used; a/eagle: {here}; a/model: {here}"]
    assert online.asked == []
    llama(repository(cache, "a/model"))
    load(target, drafter="auto", models=models)
    assert said()[0].startswith("drafter a/model: the draft_model drafter for tiny (known by its sizes), on this")


def test_sizes_of_several_families_choose_nothing(cache: Path, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    llama(repository(cache, "a/model"))
    models = catalogue(tmp_path, {"tiny": LLAMA, "small": LLAMA}, {"a/model": ("draft_model", "tiny")})
    load(str(llama(tmp_path / "any")), drafter="auto", models=models)
    assert said() == ["drafter suffix: its sizes are those of tiny and small, and no name tells which it is"]
    load(str(llama(tmp_path / "tiny-4bit")), drafter="auto", models=models)
    assert said()[0].startswith("drafter a/model: ")


# The commands


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


GENERATE = ("generate", "-p", "a b c", "-m", "6", "--json", "--num-draft-tokens", "3", "--model")


def test_the_commands_choose_and_say_so_once(cache: Path, tmp_path: Path) -> None:
    copied("eagle3_speculators_variant", repository(cache, "a/eagle"))
    target, models = str(llama(tmp_path / "any")), catalogue(tmp_path, {"tiny": LLAMA}, ENTRIES)
    line = "drafter a/eagle: the eagle3 drafter for tiny (known by its sizes), on this machine\n"
    plainly = run(*GENERATE, target, "--drafter", "none")
    assert (plainly.exit_code, plainly.stderr) == (0, "")
    for how in ((), ("--drafter", "auto"), ("--offline",)):
        done = run(*GENERATE, target, "--models", models, *how)
        assert (done.exit_code, done.stderr) == (0, line)
        found = json.loads(done.stdout)
        assert found["tokens"] == json.loads(plainly.stdout)["tokens"]
        assert found["stats"]["drafter"] == "eagle3"
    proved = run("prove", "--model", target, "--models", models, "-p", "a b c", "-m", "12", "--json")
    assert (proved.exit_code, proved.stderr.count(line)) == (0, 1)
    assert json.loads(proved.stdout)["holds"] is True
    question = {"question_id": 1, "category": "mine", "turns": ["a b c a b c"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    measured = run("bench", "--model", target, "--models", models, "--questions", str(tmp_path / "questions.jsonl"),
                   "-m", "4", "--repeats", "1", "--drafters", "auto;suffix", "--json")  # fmt: skip
    assert (measured.exit_code, measured.stderr) == (0, line)
    assert list(json.loads(measured.stdout)["ways"]) == ["plain", "mlx-lm", "a/eagle", "suffix"]


def test_the_users_own_catalogue_has_a_place(cache: Path, tmp_path: Path) -> None:
    copied("eagle3_speculators_variant", repository(cache, "a/eagle"))
    (tmp_path / "config" / "mlx-specdec").mkdir(parents=True)
    catalogue(tmp_path / "config" / "mlx-specdec", {"tiny": LLAMA}, ENTRIES)
    (tmp_path / "config" / "mlx-specdec" / "mine.toml").rename(tmp_path / "config" / "mlx-specdec" / "models.toml")
    done = run(*GENERATE, str(llama(tmp_path / "any")))
    assert (done.exit_code, done.stderr.partition(":")[0]) == (0, "drafter a/eagle")


def test_a_file_for_a_drafter_that_auto_does_not_take(cache: Path, tmp_path: Path) -> None:
    heads, memory = str(with_heads(tmp_path / "heads")), str(tmp_path / "memory")
    done = run(*GENERATE, heads, "--suffix-cache", memory)
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [
        "drafter mtp: the heads inside the checkpoint",
        f"--suffix-cache is {memory} and auto took mtp, which does not use it; for that, name suffix",
    ]
    assert not Path(memory).exists()
    plainly = str(llama(tmp_path / "any"))
    assert run(*GENERATE, plainly, "--suffix-cache", memory).stderr == f"{NOTHING}\n"
    assert Path(memory).exists()
    for how, given in (
        ((), "the drafter is left to auto"),
        (("--draft-model", plainly), f"--draft-model is {plainly}"),
        (("--drafter", "ngram_mod"), "the drafters are ngram_mod"),
    ):
        done = run(*GENERATE, plainly, "--lookup-cache-static", "F", *how)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: --lookup-cache-static is F and {given}; only ngram_cache uses that")


def test_a_draft_model_that_is_given_is_the_choice(cache: Path, tmp_path: Path) -> None:
    target, draft = str(with_heads(tmp_path / "any")), str(with_heads(tmp_path / "draft"))
    for how in ((), ("--drafter", "auto")):
        done = run(*GENERATE, target, "--draft-model", draft, *how)
        assert (done.exit_code, done.stderr) == (0, "")
        assert json.loads(done.stdout)["stats"]["drafter"] == "draft_model"
    done = run(*GENERATE, target, "--drafter", "suffix,auto")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: the drafters are suffix,auto; give auto alone, or a list without it\n"


def test_an_explicit_drafter_that_does_not_fit_is_an_error(cache: Path, tmp_path: Path) -> None:
    other = copied("dflash_zlab_qwen3", tmp_path / "other", num_target_layers=36)
    done = run(*GENERATE, str(hub_cache.qwen3(tmp_path / "any")), "--drafter", str(other))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == ("error: the drafter dflash was made for a target whose number of layers is 36 and this "
                           "target's is 8; use a drafter made for this target\n")  # fmt: skip


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_process_with_a_hub_cache_and_no_network(variable: str, tmp_path: Path) -> None:
    """As a user has it: by variables, and a target by its id."""
    root = tmp_path / "hub"
    root.mkdir()
    hub_cache.qwen3(repository(root, "owner/Tiny-8bit"))
    copied("dflash_zlab_qwen3", repository(root, "a/dflash"))
    models = catalogue(tmp_path, {"tiny": {"model_type": "?"}}, {"a/dflash": ("dflash", "tiny")})
    home = {variable: str(root if variable == "HF_HUB_CACHE" else tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_specdec", *GENERATE, "owner/Tiny-8bit", "--models", models],
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path), **home}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line = "drafter a/dflash: the dflash drafter for tiny (known by its name), on this machine\n"
    assert (done.returncode, done.stderr) == (0, line)
    assert json.loads(done.stdout)["stats"]["drafter"] == "dflash"
